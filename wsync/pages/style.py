"""The looks of pages: colours of what takes time, and the style sheet."""

from __future__ import annotations

from typing import Final, NamedTuple


class Kind(NamedTuple):
    """Something that takes time: its colour on light and on dark ground, and what it is."""

    light: str
    dark: str
    words: str


# phases of an update, which are waits of a trainer's thread, in their order
PHASES: Final = {
    "quantise": Kind("#8d6e3f", "#b8925a", "codes and scales are made"),
    "pause": Kind("#aeb8c2", "#66717c", "engines stop"),
    "open": Kind(
        "#7d93ab", "#7f9ab8", "workers join; before the first update: they learn, ranks plan"
    ),
    "staging": Kind("#dcc04a", "#c2a52f", "other ranks have read what was sent before"),
    "engine": Kind("#a184cc", "#9a7fd0", "workers have taken rounds"),
    "gather": Kind("#e08b2c", "#d98a35", "what other ranks send has come"),
    "copy": Kind("#2f5fa8", "#5486d6", "this rank's own copies have run"),
    "prepare": Kind("#5f9ea0", "#4d9496", "all workers hold every byte"),
    "commit": Kind("#68727d", "#98a3af", "engines take the version and continue"),
    "begin": Kind("#aeb8c2", "#66717c", "a folder has files of full size"),
    "write": Kind("#3b7dd8", "#5a98ec", "files are written"),
    "sync": Kind("#dcc04a", "#c2a52f", "the disk has them"),
    "publish": Kind("#5f9ea0", "#4d9496", "the folder gets its name"),
    "engines": Kind("#a184cc", "#9a7fd0", "engines load the files and continue"),
}
# what else is seen of a process: copies, and waits of an engine's worker
COPIES: Final = {
    "pack": Kind("#3b7dd8", "#5a98ec", "shards to staging"),
    "local": Kind("#56b4e0", "#6cc4ee", "shards to ring"),
    "unpack": Kind("#2a9d6f", "#3fb986", "staging to ring"),
    "load": Kind("#c8553d", "#e0745c", "ring to parameters"),
}
WORKER: Final = {
    "join": Kind("#7d93ab", "#7f9ab8", "join the update"),
    "take": Kind("#eadb9c", "#6f6533", "wait for a round"),
    "finish": Kind("#a0522d", "#b8694a", "last copies"),
    "verdict": Kind("#68727d", "#98a3af", "wait for the commit"),
}
POST: Final = Kind("#1c2024", "#e8ebee", "here a round is handed over")
OTHER: Final = Kind("#d3d8dd", "#474e55", "ranks agree to begin, and what lies between the phases")
KINDS: Final = {**PHASES, **COPIES, **WORKER, "post": POST, "other": OTHER}


def kind_class(kind: str) -> str:
    return f"k-{kind if kind in KINDS else 'other'}"


def _fills(dark: bool) -> str:
    return "".join(
        f".wsync .k-{name}{{fill:{kind.dark if dark else kind.light}}}"
        for name, kind in KINDS.items()
    )


_LIGHT: Final = (
    "--ink:#1c2024;--dim:#57606a;--paper:#fff;--line:#d5dbe1;--shade:#f3f5f7;"
    "--good:#1a7f4b;--bad:#c0271c;--bar:#3b7dd8"
)
_DARK: Final = (
    "--ink:#e8ebee;--dim:#a3adb7;--paper:#16191d;--line:#3a424a;--shade:#262c33;"
    "--good:#4cc38a;--bad:#ff7b6b;--bar:#5a98ec"
)
# a notebook has rules for tables, which names given twice outrank
STYLE: Final = f"""
.wsync{{{_LIGHT};color:var(--ink);background:var(--paper);
font:14px/1.45 system-ui,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}}
div.wsync{{padding:12px 16px;border:1px solid var(--line);border-radius:6px;max-width:1100px}}
body.wsync{{margin:0}}
.wsync main{{max-width:1140px;margin:0 auto;padding:16px 24px 48px}}
.wsync h1{{font-size:22px;margin:8px 0 4px;overflow-wrap:anywhere}}
.wsync h2{{font-size:16px;font-weight:600;margin:28px 0 6px;color:var(--ink)}}
div.wsync h2{{font-size:14px;margin:16px 0 4px}}
.wsync p{{margin:4px 0;overflow-wrap:anywhere}}
.wsync .dim{{color:var(--dim)}}
.wsync .good{{color:var(--good);font-weight:600}}
.wsync .bad{{color:var(--bad);font-weight:600}}
.wsync .scroll{{overflow-x:auto}}
.wsync table{{border-collapse:collapse;margin:6px 0;color:var(--ink);font-size:13px}}
.wsync.wsync tr:nth-child(n){{background:transparent}}
.wsync.wsync th,.wsync.wsync td{{padding:3px 14px 3px 0;text-align:left;vertical-align:top;
border:0;border-bottom:1px solid var(--line);overflow-wrap:anywhere}}
.wsync.wsync th{{color:var(--dim);font-weight:600;vertical-align:bottom;overflow-wrap:normal}}
.wsync.wsync th.number,.wsync.wsync td.number{{text-align:right;white-space:nowrap;
font-variant-numeric:tabular-nums;overflow-wrap:normal}}
.wsync.wsync td:last-child,.wsync.wsync th:last-child{{padding-right:0}}
.wsync td:not(.number){{min-width:4.5em}}
.wsync.wsync td.group{{padding-top:10px}}
.wsync code,.wsync .mono{{font-family:ui-monospace,"DejaVu Sans Mono",monospace;font-size:12px;
background:transparent;color:var(--ink);overflow-wrap:anywhere;white-space:pre-wrap}}
.wsync summary{{cursor:pointer;margin-top:12px;color:var(--dim)}}
.wsync details details{{margin-left:16px}}
.wsync .figures{{display:flex;flex-wrap:wrap;gap:8px;margin:10px 0}}
.wsync .figures div{{background:var(--shade);border-radius:6px;padding:6px 12px;min-width:72px}}
.wsync .figures b{{display:block;font-size:17px;font-weight:600;font-variant-numeric:tabular-nums}}
.wsync .figures span{{color:var(--dim);font-size:12px}}
.wsync .legend{{display:flex;flex-wrap:wrap;gap:3px 18px;margin:6px 0;font-size:12px;
color:var(--ink)}}
.wsync .legend span{{white-space:normal}}
.wsync svg{{display:block;max-width:100%}}
.wsync .drawing{{margin:6px 0 14px}}
.wsync .swatch{{display:inline-block;vertical-align:-1px;margin-right:5px}}
.wsync text{{fill:var(--ink);font-family:system-ui,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}}
.wsync text.dim{{fill:var(--dim)}}
.wsync text.inside{{fill:#fff}}
.wsync .grid{{stroke:var(--line)}}
.wsync .paper{{fill:var(--paper)}}
.wsync .shade{{fill:var(--shade)}}
.wsync .plain{{fill:var(--bar)}}
{_fills(False)}
@media (max-width:600px){{.wsync main{{padding:12px 14px 32px}}
.wsync .scroll table{{width:100%}}
.wsync.wsync th,.wsync.wsync td{{padding-right:8px}}
.wsync td:not(.number){{min-width:2em}}
.wsync .wide thead{{display:none}}
.wsync .wide tr{{display:block;padding:6px 0;border-bottom:1px solid var(--line)}}
.wsync.wsync .wide td{{display:block;padding:0;border:0;text-align:left;white-space:normal}}
.wsync .wide td::before{{content:attr(data-head) " ";color:var(--dim)}}}}
@media (prefers-color-scheme:dark){{.wsync{{{_DARK}}}
.wsync text.inside{{fill:#000}}
{_fills(True)}}}
"""
