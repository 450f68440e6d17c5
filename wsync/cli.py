"""The `wsync` command: picks a subcommand and imports only what that one needs."""

import difflib
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

_COMMANDS = {
    "demo": ("wsync.demo.cli", "train, update two engines, verify every byte"),
    "serve": (
        "wsync.demo.cpu_server",
        "start SGLang's or vLLM's server on the CPU, with a small model",
    ),
    "inspect": ("wsync.inspection", "show what an engine's workers keep of a model"),
    "families": ("wsync.families.user_families", "list the model families of Megatron trainers"),
    "doctor": ("wsync.doctor", "say what this machine offers, and what is missing and why"),
}
_EXIT_USAGE = 2


def _usage() -> str:
    lines = ["usage: wsync [--version] [--help] COMMAND ...", "", "commands:"]
    lines += [f"  {name:<9} {text}" for name, (_, text) in _COMMANDS.items()]
    lines += ["", "`wsync COMMAND --help` explains one of them."]
    return "\n".join(lines)


def _complain(word: str) -> int:
    kind = "option" if word.startswith("-") else "command"
    known = [*_COMMANDS, "--version", "--help"]
    close = difflib.get_close_matches(word, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    print(f"wsync: unknown {kind} {word!r}{hint}\n\n{_usage()}", file=sys.stderr)
    return _EXIT_USAGE


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line (default: the process's own); returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if words else _EXIT_USAGE
    if words[0] in ("-V", "--version"):
        from wsync import __version__

        print(f"wsync {__version__}")
        return 0
    if words[0] not in _COMMANDS:
        return _complain(words[0])
    try:
        command: Callable[[Sequence[str]], int] = import_module(_COMMANDS[words[0]][0]).main
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "wsync":
            raise
        print(
            f"wsync {words[0]}: needs the Python package {error.name!r}, which is not installed: "
            "in a clone of wsync, pip install '.[demo]' brings it",
            file=sys.stderr,
        )
        return 1
    try:
        return command(words[1:])
    except KeyboardInterrupt:
        print(f"\nwsync {words[0]}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
