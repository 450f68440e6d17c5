"""Runs the transformers engine as a process: its command line, and a helper that starts it."""

import argparse
import contextlib
import json
import os
import select
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from typing import Any, Self

from wsync._core import (
    DeadlineError,
    InvalidArgumentError,
    LayoutError,
    PeerClosedError,
    WsyncError,
)
from wsync.checkpoints.safetensors_layout import INDEX, Checkpoint
from wsync.machine.deadline import seconds

MODULE = "wsync.demo.engines.transformers"
_EXIT_USAGE = 2
_STOP_SECONDS = 10.0
_TAIL_NBYTES = 2000


class ServerProcess:
    """An engine's process, with a readable log.  `url` is the engine's address.  Call `close`, or
    use `with`.

    The standard input and output are pipes.  When the child's input ends, the child concludes that
    its parent has ended.  The standard error is a file; `log` reads it for messages.  `options` are
    Popen's.
    """

    url: str = ""

    def __init__(self, command: Sequence[str], name: str, **options: Any) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        self.process: Popen[bytes] = Popen(
            command, bufsize=0, stdin=PIPE, stdout=PIPE, stderr=self._log, **options
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    def log(self) -> str:
        """The last lines that the process wrote to its standard error."""
        if self._log.closed:
            return ""
        descriptor = self._log.fileno()
        start = max(0, os.fstat(descriptor).st_size - _TAIL_NBYTES)
        return os.pread(descriptor, _TAIL_NBYTES, start).decode("utf-8", "replace").strip()

    def close(self) -> None:
        """Ends the process.  Further calls have no effect."""
        for stream in filter(None, (self.process.stdin, self.process.stdout)):
            stream.close()
        self.process.terminate()
        try:
            self.process.wait(_STOP_SECONDS)
        except TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()

    def await_port(self, timeout: float) -> None:
        """Waits until the engine listens and prints its port; then sets `url`."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], timeout)[0]:
            raise DeadlineError(
                f"engine {self.name}: it did not listen within {seconds(timeout)}; its log: "
                f"{self.log()}"
            )
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait(_STOP_SECONDS)
            raise PeerClosedError(
                f"engine {self.name}: it ended with exit status {status}; its log: {self.log()}"
            )
        self.url = f"http://127.0.0.1:{json.loads(line)['port']}"


def serve_in_process(
    model: "str | os.PathLike[str] | Any",
    *,
    dtype: str | None = None,
    seed: int = 0,
    timeout: float = 120.0,
) -> ServerProcess:
    """Starts an engine in a child process on a free port and waits until it listens.

    The child ends with this process.

    Args:
        model: a checkpoint folder, or a transformers config object.
        dtype: torch's name of a dtype.  None stands for the dtype of the checkpoint or config.
        seed: if `model` is a config object, draws its random weights.
        timeout: seconds to wait.

    Raises:
        DeadlineError: the engine does not listen in time.
        PeerClosedError: the process has ended; the text has the end of its log.
    """
    with contextlib.ExitStack() as stack:
        words = ["--port", "0", "--child", *(["--dtype", dtype] if dtype else [])]
        if hasattr(model, "save_pretrained"):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="wsync-engine-"))
            model.save_pretrained(folder)
            model, words = folder, [*words, "--seed", str(seed)]
        program = [sys.executable, "-P", "-m", MODULE]
        server = ServerProcess([*program, "--model", os.fspath(model), *words], str(model))
        try:
            server.await_port(timeout)
        except BaseException:
            server.close()
            raise
        return server


def load(path: str, *, dtype: str | None, seed: int | None) -> Any:
    """The model of a checkpoint folder.  With a seed, its weights are random instead."""
    import torch
    import transformers

    from wsync.module_tensors import dtype_of
    from wsync.module_tensors.names import listed

    options = {"dtype": dtype_of(dtype)} if dtype else {}
    if not Path(path, "config.json").is_file():
        raise InvalidArgumentError(f"{path}: there is no config.json in this folder")
    auto: Any = transformers.AutoModelForCausalLM
    if seed is not None:
        torch.manual_seed(seed)
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        return auto.from_config(config, **options)
    model, found = auto.from_pretrained(
        path, local_files_only=True, output_loading_info=True, **options
    )
    if names := sorted(found["missing_keys"]):
        # transformers only warns, and makes random weights for them
        raise LayoutError(f"{path}: the checkpoint lacks {listed(names)}")
    return model


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of `python -m wsync.demo.engines.transformers`.

    If the model or the port cannot be had, prints one line and ends with status 2."""
    from wsync.demo.engines.server import EngineServer
    from wsync.demo.engines.transformers import Engine

    parser = command_line()
    options = parser.parse_args(arguments)
    # resolved once: a trainer's link `latest` may change between two files
    path = os.path.realpath(options.model)
    try:
        engine = Engine(load(path, dtype=options.dtype, seed=options.seed), model_path=path)
        if options.seed is None and Path(path, INDEX).exists():  # it may name a version
            stored = Checkpoint(path).weight_version
            engine.updates.weight_version = stored or engine.weight_version
        server = EngineServer(engine, options.port)
    except (OSError, ValueError, WsyncError) as error:  # these include transformers' errors
        parser.exit(_EXIT_USAGE, f"{parser.prog}: {' '.join(str(error).split())}\n")
    print(json.dumps({"port": server.port}), flush=True)
    if options.child:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    with server, contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()


def _end_with_parent() -> None:
    """Ends this process when standard input ends, because the parent holds its other end."""
    while os.read(0, 4096):  # sys.stdin would hold a lock at exit
        pass
    os._exit(0)  # other threads may still wait


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}",
        description="A small inference engine with SGLang's weight-update endpoints, on 127.0.0.1.",
    )
    parser.add_argument("--model", metavar="DIR", required=True, help="checkpoint folder")
    parser.add_argument("--port", type=int, default=30000, help="0 takes a free port")
    parser.add_argument("--dtype", help="torch's name of a dtype (default: the checkpoint's)")
    parser.add_argument("--seed", type=int, help="draw random weights with this seed")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser
