"""The transformers engine as a process: its command line, and a helper that starts one."""

import argparse
import contextlib
import json
import os
import select
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
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
    """A running command with a readable log; `url` is the address of the engine that it is.  Close
    it, or use `with`.

    Its standard input and output are pipes (the child takes the end of its input for the end of its
    parent), its standard error is a file that is read for messages.
    """

    url: str = ""

    def __init__(
        self,
        command: Sequence[str],
        name: str,
        *,
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        self.process = Popen(
            command,
            stdin=PIPE,
            stdout=PIPE,
            stderr=self._log,
            env={**os.environ, **(environment or {})},
            pass_fds=tuple(pass_fds),
            bufsize=0,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    def log(self) -> str:
        """The end of what the process wrote to its standard error."""
        if self._log.closed:
            return ""
        descriptor = self._log.fileno()
        start = max(0, os.fstat(descriptor).st_size - _TAIL_NBYTES)
        return os.pread(descriptor, _TAIL_NBYTES, start).decode("utf-8", "replace").strip()

    def close(self) -> None:
        """Ends the process; more than once does no harm."""
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
        """Waits until the engine says its port, where it listens from then on."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], timeout)[0]:
            raise DeadlineError(
                f"engine {self.name}: no port after {seconds(timeout)}: {self.log()}"
            )
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait(_STOP_SECONDS)
            raise PeerClosedError(f"engine {self.name}: ended with {status}: {self.log()}")
        self.url = f"http://127.0.0.1:{json.loads(line)['port']}"


def serve_in_process(
    model: "str | os.PathLike[str] | Any",
    *,
    dtype: str | None = None,
    seed: int = 0,
    timeout: float = 120.0,
) -> ServerProcess:
    """Starts an engine in a child process on a free port and waits until it listens.

    model: a checkpoint folder; or a transformers config object, of which the weights are drawn with
    `seed`.  dtype: torch's name, by default the checkpoint's or config's.  The child ends with this
    process.  Raises DeadlineError, or PeerClosedError with the end of the child's log.
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
    """The model of a checkpoint folder, or with a seed one of its config and random weights."""
    import torch
    import transformers

    from wsync.module_tensors import dtype_of
    from wsync.module_tensors.names import listed

    options = {"dtype": dtype_of(dtype)} if dtype else {}
    if not Path(path, "config.json").is_file():
        raise InvalidArgumentError(f"{path}: no config.json there")
    auto: Any = transformers.AutoModelForCausalLM
    if seed is not None:
        torch.manual_seed(seed)
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        return auto.from_config(config, **options)
    model, found = auto.from_pretrained(
        path, local_files_only=True, output_loading_info=True, **options
    )
    if names := sorted(found["missing_keys"]):
        # transformers warns, and draws them
        raise LayoutError(f"{path}: the checkpoint lacks {listed(names)}")
    return model


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of `python -m wsync.demo.engines.transformers`.

    What it asks for that cannot be had ends the process with status 2 and a line that says so."""
    from wsync.demo.engines.server import EngineServer
    from wsync.demo.engines.transformers import Engine

    parser = command_line()
    options = parser.parse_args(arguments)
    path = os.path.realpath(options.model)  # once: a trainer's `latest` may move between two files
    try:
        engine = Engine(load(path, dtype=options.dtype, seed=options.seed), model_path=path)
        if options.seed is None and Path(path, INDEX).exists():  # perhaps a trainer has written it
            stored = Checkpoint(path).weight_version
            engine.updates.weight_version = stored or engine.weight_version
        server = EngineServer(engine, options.port)
    except (OSError, ValueError, WsyncError) as error:  # transformers' are among them
        parser.exit(_EXIT_USAGE, f"{parser.prog}: {' '.join(str(error).split())}\n")
    print(json.dumps({"port": server.port}), flush=True)
    if options.child:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    with server, contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()


def _end_with_parent() -> None:
    """The parent holds the other end of standard input: its end of file is the parent's end."""
    while os.read(0, 4096):  # not sys.stdin, whose lock would be held at exit
        pass
    os._exit(0)  # whatever waits


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}",
        description="A small inference engine with SGLang's weight-update endpoints, on 127.0.0.1.",
    )
    parser.add_argument("--model", metavar="DIR", required=True, help="checkpoint folder")
    parser.add_argument("--port", type=int, default=30000, help="0 takes a free one")
    parser.add_argument("--dtype", help="torch's name of a dtype")
    parser.add_argument("--seed", type=int, help="of random weights, in place of the folder's")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser
