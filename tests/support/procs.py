"""Real processes for tests: n ranks of a gloo group that run functions until they are closed."""

import contextlib
import datetime
import functools
import gc
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path

from support import nursery

PRELOADED = ["support.preloaded"]
_ENVIRONMENT = dict(os.environ)
GRACE = 30.0  # seconds that the other ranks have once one has failed


class RankError(AssertionError):
    """One or more ranks raised, died or did not answer in time; `results`: of the others."""

    def __init__(self, text, results):
        super().__init__(text)
        self.results = results


def runs(pid, *, patience=5.0):
    """Whether a process goes on running; one that has ended may stay as a zombie, for whoever is
    to be its parent need not be quick to reap it."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                state = file.read().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return False
        if state in "ZX":
            return False
        time.sleep(0.02)
    return True


def stopped(pid):
    """Whether a process is stopped by a signal; one that is gone is not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"
    except (FileNotFoundError, ProcessLookupError):
        return False


def spawned(target, *arguments, **options):
    """A process in an interpreter of its own that is to call `target`, and has not started."""
    return unnamed(multiprocessing.get_context("spawn"), target, *arguments, **options)


def started(target, *arguments):
    """A process that calls `target`, with what most ranks need imported; it is this process's to
    end, and has the environment of the first one that was asked for."""
    process = unnamed(forked(), target, *arguments)
    process.start()
    return process


def unnamed(context, target, *arguments, **options):
    """A process of a context whose own locks (tqdm's) have no files in /dev/shm: those would stay
    when it is killed, to the end of this process, or for good if that is killed with its group."""
    return context.Process(target=_unnamed, args=(target, *arguments), **options)


def _unnamed(target, *arguments):
    multiprocessing.set_start_method("fork", force=True)  # else they are for other interpreters
    target(*arguments)


def _serve(rank, count, store, setup, pipe):
    import torch
    import torch.distributed as dist

    nursery.install()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=count,
        timeout=datetime.timedelta(seconds=60),
    )
    if setup is not None:
        setup()
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send((True, function(*arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


@functools.cache
def forked():
    """A context whose processes have what most ranks need: it is imported once a session.  They
    have the variables that there were when tests began, whichever test is the first one here."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    _start_forking()
    return context


@functools.cache
def _start_forking():
    now = dict(os.environ)
    os.environ.clear()
    os.environ.update(_ENVIRONMENT)
    # the process that others are forked from goes by nothing else to find support.preloaded
    path = [str(Path(__file__).parents[1]), *filter(None, [_ENVIRONMENT.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(now)


def _nursery(count, store, path, environment, modules, setup, pipes):
    """Imports once what all ranks need, then forks them; stays until they have ended."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = path
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # see preloaded
    for pipe in pipes:  # what a rank starts (torch_shm_manager) may outlive it
        os.set_inheritable(pipe.fileno(), False)
    children = []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                for other, pipe in enumerate(pipes):
                    if other != rank:
                        pipe.close()
                _serve(rank, count, store, setup, pipes[rank])
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
    for pipe in pipes:
        pipe.close()
    for child in children:
        os.waitpid(child, 0)
    os._exit(0)


class Ranks:
    """`count` processes in one default process group; use as a context manager.

    `run` calls an importable function on every rank and returns the results in rank order.  Where
    a rank gave no answer, the others may sit in a collective: all are killed, and the next call
    starts new processes.
    `path` goes in front of sys.path; `modules` are imported once for all ranks; `setup` is called
    on each rank before anything else.  A `fresh` one has nothing imported before `path` is there.
    `grace`: seconds that the other ranks have once one has failed.
    """

    def __init__(self, count, *, path=(), modules=(), setup=None, fresh=False, grace=GRACE):
        self._count = count
        self._grace = grace
        self._context = multiprocessing.get_context("spawn") if fresh else forked()
        self._path = list(path)
        self._modules = list(modules)
        self._setup = setup
        self._pipes: list[Connection] = []
        self._nursery = None
        self._folder = None

    def __enter__(self):
        return self

    def __exit__(self, *args):
        self.close()

    def _start(self):
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self._folder = tempfile.TemporaryDirectory(prefix="wsync-ranks-")
        store = os.path.join(self._folder.name, "store")
        pairs = [self._context.Pipe() for _ in range(self._count)]
        theirs = [pair[1] for pair in pairs]
        place = (self._path, dict(os.environ))
        arguments = (self._count, store, *place, self._modules, self._setup, theirs)
        self._nursery = unnamed(self._context, _nursery, *arguments)
        self._nursery.start()
        for pipe in theirs:
            pipe.close()
        self._pipes = [pair[0] for pair in pairs]

    def run(self, function, *arguments, timeout=120.0):
        if not self._pipes:
            self._start()
        end = time.monotonic() + timeout
        for pipe in self._pipes:
            with contextlib.suppress(ConnectionError):  # its end is seen below
                pipe.send((function, arguments))
        results = {}
        failures = []
        unanswered = []
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while waiting:
            ready = wait(list(waiting), max(0.0, end - time.monotonic()))
            if not ready:
                unanswered += [f"rank {rank}: no answer in time" for rank in waiting.values()]
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    good, value = pipe.recv()
                except (EOFError, ConnectionError):
                    unanswered.append(f"rank {rank}: the process ended")
                    end = min(end, time.monotonic() + self._grace)
                    continue
                if good:
                    results[rank] = value
                else:
                    failures.append(f"rank {rank}: {value}")
                    end = min(end, time.monotonic() + self._grace)
        if unanswered:
            self.close(force=True)
        if failures or unanswered:
            text = f"{function.__name__} failed\n" + "\n".join(failures + unanswered)
            raise RankError(text, results)
        return [results[rank] for rank in range(len(results))]

    def close(self, *, force=False):
        """Ends the processes, by force where they do not go within a moment."""
        for pipe in self._pipes:
            pipe.close()
        self._pipes = []
        if self._nursery is None:
            return
        if not force:
            self._nursery.join(3.0)
        if self._nursery.is_alive():
            # The nursery leads a session of its own: its group is its ranks and itself.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._nursery.pid, signal.SIGKILL)
        self._nursery.join(5.0)
        self._nursery = None
        self._folder.cleanup()
