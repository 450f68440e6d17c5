"""The transformers engine as a process: its command line, and a helper that starts one."""

import argparse
import contextlib
import json
import os
import select
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wsync._core import (
    DeadlineError,
    InvalidArgumentError,
    LayoutError,
    WsyncError,
)
from wsync.checkpoints.safetensors_layout import INDEX, SINGLE, Checkpoint
from wsync.demo.engines.logged_process import Child
from wsync.machine.deadline import POLL_SECONDS, Deadline, seconds

_EXIT_USAGE = 2
_STOP_SECONDS = 10.0


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
        deadline = Deadline(timeout)
        while deadline.left:
            if select.select([self.process.stdout], [], [], POLL_SECONDS)[0]:
                if line := self.process.stdout.readline():
                    self.url = f"http://127.0.0.1:{json.loads(line)['port']}"
                    return
                self.process.wait(_STOP_SECONDS)
            self.check_alive()
        raise DeadlineError(f"engine {self.name}: no port after {seconds(timeout)}: {self.log()}")


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
    from wsync.module_tensors.names_in_messages import listed

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
        if names := sorted(set(found["missing_keys"]) - set(arguments.ignore)):
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
    import uvicorn

    from wsync.demo.engines.transformers import create_app

    parser = command_line()
    options = parser.parse_args(arguments)
    with contextlib.ExitStack() as stack:
        try:
            listener = stack.enter_context(_bind(options.host, options.port))
            if options.model:  # once: a trainer's `latest` may move between two files
                options.model = os.path.realpath(options.model)
            model, tokenizer = load(options)
            version = options.weight_version or _stored_version(options.model) or "default"
            app = create_app(
                model,
                tokenizer=tokenizer,
                api_key=options.api_key or os.environ.get("WSYNC_API_KEY") or None,
                model_path=options.model or options.config,
                weight_version=version,
                ignore=options.ignore,
                threads=options.threads,
                broadcast_seconds=options.broadcast_seconds,
            )
        except (OSError, ValueError, WsyncError) as error:  # transformers' are among them
            text = " ".join(str(error).split())
            parser.exit(_EXIT_USAGE, f"{parser.prog}: {text}\n")
        listener.listen()  # requests are answered as soon as the server runs
        print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
        level = "warning" if options.child else "info"
        server = uvicorn.Server(uvicorn.Config(app, log_level=level, access_log=False))
        if options.child:
            threading.Thread(target=_end_with_parent, args=(server,), daemon=True).start()
        server.run(sockets=[listener])


def _bind(host: str, port: int) -> socket.socket:
    """A socket that has a port before a model is loaded, and does not listen yet."""
    listener = socket.socket(proto=socket.IPPROTO_TCP)  # or asyncio sets no TCP_NODELAY
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise InvalidArgumentError(f"{host}:{port}: {error}") from error
    return listener


def _stored_version(folder: str | None) -> str | None:
    """The weight version of a checkpoint that a trainer has written, or None.  Where there is one
    file for all weights, transformers reads that, and an index is of others."""
    if folder is None or not Path(folder, INDEX).exists() or Path(folder, SINGLE).exists():
        return None
    return Checkpoint(folder).weight_version


def _end_with_parent(server: Any) -> None:
    """The parent holds the other end of standard input: its end of file is the parent's end."""
    while os.read(0, 4096):  # not sys.stdin, whose lock would be held at exit
        pass
    server.should_exit = True
    time.sleep(_STOP_SECONDS / 2)
    os._exit(1)  # requests that wait would keep the server up


def command_line() -> argparse.ArgumentParser:
    from wsync.engine.update_groups import BROADCAST_SECONDS

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
    parser.add_argument(
        "--broadcast-seconds",
        type=float,
        default=BROADCAST_SECONDS,
        help=f"the most that one broadcast of a trainer may take, by default {BROADCAST_SECONDS:g}",
    )
    parser.add_argument("--weight-version", help="by default the checkpoint's, if it has one")
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="NAME",
        help="a tensor that the checkpoint or an update may lack, or bring without use",
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser
