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
from typing import Any

from wsync._core import (
    DeadlineError,
    InvalidArgumentError,
    LayoutError,
    PeerClosedError,
    WsyncError,
)
from wsync.checkpoints.safetensors_layout import INDEX, Checkpoint
from wsync.machine.deadline import seconds
from wsync.machine.fork_guard import Owner

_EXIT_USAGE = 2
_STOP_SECONDS = 10.0
_TAIL_NBYTES = 2000


class Child:
    """A running command with a readable log.  Its standard input and output are pipes (the child
    takes the end of its input for the end of its parent), its standard error is a file that is read
    for messages.
    """

    def __init__(
        self,
        command: Sequence[str],
        name: str,
        *,
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.name = name
        self._owner = Owner()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        try:
            self.process = Popen(
                command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=self._log,
                env={**os.environ, **(environment or {})},
                pass_fds=tuple(pass_fds),
                bufsize=0,
            )
        except BaseException:
            self._log.close()
            raise

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
        """Ends the process; more than once does no harm, nor does it in a process that was forked
        from the one that started it."""
        if not self._owner:
            return
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self.process.terminate()
        try:
            self.process.wait(_STOP_SECONDS)
        except TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()


class ServerProcess(Child):
    """A running engine in a child process; `url` is its address.  Close it, or use `with`."""

    url: str = ""

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
    random_weights: bool = False,
    api_key: str | None = None,
    dtype: str | None = None,
    seed: int = 0,
    timeout: float = 120.0,
) -> ServerProcess:
    """Starts an engine in a child process on a free port and waits until it listens.

    model: a checkpoint folder; or a config (a folder that holds one with random_weights=True,
    or a transformers config object), of which the weights are drawn with `seed`.  dtype: torch's
    name, by default the checkpoint's or config's.  The child ends with this process.  Raises
    DeadlineError, or PeerClosedError with the end of the child's log.
    """
    folder: tempfile.TemporaryDirectory[str] | None = None
    if hasattr(model, "save_pretrained"):
        folder = tempfile.TemporaryDirectory(prefix="wsync-engine-")
        model.save_pretrained(folder.name)
        model, random_weights = folder.name, True
    command = [sys.executable, "-P", "-m", "wsync.demo.engines.transformers"]
    command += ["--config" if random_weights else "--model", os.fspath(model)]
    command += ["--port", "0", "--child", "--seed", str(seed)]
    command += ["--dtype", dtype] if dtype else []
    # the key does not go on the command line, which everybody can read
    server = ServerProcess(command, str(model), environment={"WSYNC_API_KEY": api_key or ""})
    try:
        server.await_port(timeout)
    except BaseException:
        server.close()
        raise
    finally:
        if folder is not None:
            folder.cleanup()
    return server


def load(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """(model, tokenizer or None) as the command line says."""
    import torch
    import transformers

    from wsync.module_tensors import dtype_of
    from wsync.module_tensors.names import listed

    torch.set_num_threads(arguments.threads)
    options: dict[str, Any] = {}
    if arguments.dtype:
        options["dtype"] = dtype_of(arguments.dtype)
    path = arguments.model or arguments.config
    if not Path(path, "config.json").is_file():
        raise InvalidArgumentError(
            f"{path}: {'no config.json in it' if Path(path).is_dir() else 'no such folder'}"
        )
    auto: Any = transformers.AutoModelForCausalLM
    tokenizers: Any = transformers.AutoTokenizer
    if arguments.model:
        model, found = auto.from_pretrained(
            path, local_files_only=True, output_loading_info=True, **options
        )
        if names := sorted(found["missing_keys"]):
            # transformers warns, and draws them
            raise LayoutError(f"{path}: the checkpoint lacks {listed(names)}")
    else:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        torch.manual_seed(arguments.seed)
        model = auto.from_config(config, **options)
    tokenizer = None
    if any((Path(path) / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
        tokenizer = tokenizers.from_pretrained(path, local_files_only=True)
    return model, tokenizer


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of `python -m wsync.demo.engines.transformers`.

    What it asks for that cannot be had ends the process with status 2 and a line that says so."""
    from wsync.demo.engines.server import EngineServer
    from wsync.demo.engines.transformers import Engine

    parser = command_line()
    options = parser.parse_args(arguments)
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(EngineServer(options.host, options.port))  # before a model
            if options.model:  # once: a trainer's `latest` may move between two files
                options.model = os.path.realpath(options.model)
            model, tokenizer = load(options)
            engine = Engine(
                model,
                tokenizer=tokenizer,
                model_path=options.model or options.config,
                weight_version=_stored_version(options.model),
                threads=options.threads,
            )
        except (OSError, ValueError, WsyncError) as error:  # transformers' are among them
            text = " ".join(str(error).split())
            parser.exit(_EXIT_USAGE, f"{parser.prog}: {text}\n")
        server.open(engine, api_key=options.api_key or os.environ.get("WSYNC_API_KEY"))
        print(json.dumps({"port": server.port}), flush=True)
        if options.child:
            threading.Thread(target=_end_with_parent, daemon=True).start()
        stack.enter_context(contextlib.suppress(KeyboardInterrupt))
        server.serve_forever()


def _stored_version(folder: str | None) -> str:
    """The weight version of a checkpoint that a trainer has written."""
    stored = folder and Path(folder, INDEX).exists() and Checkpoint(folder).weight_version
    return stored or "default"


def _end_with_parent() -> None:
    """The parent holds the other end of standard input: its end of file is the parent's end."""
    while os.read(0, 4096):  # not sys.stdin, whose lock would be held at exit
        pass
    os._exit(0)  # whatever waits


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m wsync.demo.engines.transformers",
        description="A small inference engine with SGLang's weight-update endpoints.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", metavar="DIR", help="checkpoint folder")
    source.add_argument("--config", metavar="DIR", help="config folder; weights are random")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000, help="0 takes a free one")
    parser.add_argument("--api-key", help="bearer key; also read from WSYNC_API_KEY")
    parser.add_argument("--dtype", help="torch's name of a dtype")
    parser.add_argument("--seed", type=int, default=0, help="of random weights")
    parser.add_argument("--threads", type=int, default=1, help="of torch and of copies")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser
