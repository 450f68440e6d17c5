"""The looks of pages: colours of what takes time, and the style sheet."""

from __future__ import annotations

from typing import Final, NamedTuple


class Kind(NamedTuple):
    """Something that takes time: its colour, and what it is."""

    colour: str
    words: str


# phases of an update, which are waits of a trainer's thread, in their order
PHASES: Final = {
    "quantise": Kind("#b8925a", "codes and scales are made"),
    "pause": Kind("#8c98a4", "engines stop"),
    "open": Kind("#7d93ab", "workers join; before the first update: they learn, ranks plan"),
    "staging": Kind("#cbb02f", "other ranks have read what was sent before"),
    "engine": Kind("#a184cc", "workers have taken rounds"),
    "gather": Kind("#e08b2c", "what other ranks send has come"),
    "copy": Kind("#4a77c4", "this rank's own copies have run"),
    "prepare": Kind("#5f9ea0", "all workers hold every byte"),
    "commit": Kind("#75808c", "engines take the version and continue"),
    "begin": Kind("#8c98a4", "a folder has files of full size"),
    "write": Kind("#4a8ae0", "files are written"),
    "sync": Kind("#cbb02f", "the disk has them"),
    "publish": Kind("#5f9ea0", "the folder gets its name"),
    "engines": Kind("#a184cc", "engines load the files and continue"),
}
# what else is seen of a process: copies, and waits of an engine's worker
COPIES: Final = {
    "pack": Kind("#4a8ae0", "shards to staging"),
    "local": Kind("#5cb6e6", "shards to ring"),
    "unpack": Kind("#2fa676", "staging to ring"),
    "load": Kind("#d4644c", "ring to parameters"),
}
WORKER: Final = {
    "join": Kind("#7d93ab", "join the update"),
    "take": Kind("#a89a55", "wait for a round"),
    "finish": Kind("#ac5f39", "last copies"),
    "verdict": Kind("#75808c", "wait for the commit"),
}
POST: Final = Kind("#7f7f7f", "here a round is handed over")
OTHER: Final = Kind("#a0a8b0", "ranks agree to begin, and what lies between the phases")
KINDS: Final = {**PHASES, **COPIES, **WORKER, "post": POST, "other": OTHER}

# a notebook has rules for tables, which names given twice outrank
STYLE: Final = """
.wsync{color-scheme:light dark;color:CanvasText;background:Canvas;font:14px/1.45 system-ui,
sans-serif;max-width:1100px;margin:0 auto;padding:12px 16px;overflow-wrap:anywhere}
.wsync p{margin:4px 0}
.wsync .dim{color:GrayText;fill:GrayText}
.wsync table{border-collapse:collapse;margin:8px 0;font-variant-numeric:tabular-nums}
.wsync.wsync tr:nth-child(n){background:transparent}
.wsync.wsync th,.wsync.wsync td{padding:3px 14px 3px 0;text-align:left;vertical-align:top;
border:0;border-bottom:1px solid GrayText}
.wsync .legend{margin:6px 0;font-size:12px}
.wsync .legend span{margin-right:14px}
.wsync svg{max-width:100%;vertical-align:-1px}
.wsync text{fill:CanvasText}
.wsync .grid{stroke:GrayText;opacity:.4}
"""
