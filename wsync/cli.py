"""The `wsync` command.  It imports only the modules that the chosen subcommand needs."""

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
    "inspect": (
        "wsync.inspection",
        "show versions of engines, lost engines, and what workers keep",
    ),
    "copy": ("wsync.copying", "fill an engine from a running one, without a trainer"),
    "families": ("wsync.families.registry", "list the model families of Megatron trainers"),
    "doctor": ("wsync.doctor", "list what wsync finds on this machine, and what is missing"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line, by default that of the process; returns the exit status."""
    parser = argparse.ArgumentParser(
        "wsync",
        description="\n".join(f"{name:<9} {text}" for name, (_, text) in _COMMANDS.items()),
        epilog="`wsync COMMAND --help` explains a command.",
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
            f"wsync {chosen.command}: the Python package {error.name!r} is not installed; "
            "to install it, run pip install '.[demo]' in a clone of wsync",
            file=sys.stderr,
        )
        return 1
    try:
        return command(chosen.arguments)
    except KeyboardInterrupt:
        print(f"\nwsync {chosen.command}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
