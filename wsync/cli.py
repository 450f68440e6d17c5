"""The `wsync` command: picks a subcommand and imports only what that one needs."""

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from wsync import __version__

_COMMANDS = {
    "demo": ("wsync.demo.cli", "train, update two engines, verify every byte"),
    "serve": (
        "wsync.demo.cpu_server",
        "start SGLang's or vLLM's server on the CPU, with a small model",
    ),
    "inspect": ("wsync.inspection", "show what an engine's workers keep of a model"),
    "families": ("wsync.families.registry", "list the model families of Megatron trainers"),
    "doctor": ("wsync.doctor", "say what this machine offers, and what is missing and why"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line (default: the process's own); returns the exit status."""
    parser = argparse.ArgumentParser(
        "wsync",
        description="\n".join(f"{name:<9} {text}" for name, (_, text) in _COMMANDS.items()),
        epilog="`wsync COMMAND --help` explains one of them.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-V", "--version", action="version", version=f"wsync {__version__}")
    parser.add_argument("command", choices=_COMMANDS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    chosen = parser.parse_args(argv)
    try:
        command: Callable[[Sequence[str]], int]
        command = import_module(_COMMANDS[chosen.command][0]).main
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "wsync":
            raise
        print(
            f"wsync {chosen.command}: needs the Python package {error.name!r}, which is not "
            "installed: in a clone of wsync, pip install '.[demo]' brings it",
            file=sys.stderr,
        )
        return 1
    try:
        return command(chosen.arguments)
    except KeyboardInterrupt:
        print(f"\nwsync {chosen.command}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
