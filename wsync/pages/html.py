"""Elements, tables and whole pages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final
from xml.sax.saxutils import escape

from wsync.pages.style import STYLE

# what XML has no way to write
_UNWRITABLE: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_HEAD: Final = (
    '<meta charset="utf-8"/><meta name="viewport" content="width=device-width, initial-scale=1"/>'
    '<meta name="color-scheme" content="light dark"/>'
)


class Html(str):
    """Text that is markup; any other text is escaped where it becomes part of some."""

    __slots__ = ()


def _written(text: str) -> str:
    if isinstance(text, Html):
        return text
    return escape(_UNWRITABLE.sub("\ufffd", text), {'"': "&quot;"})


def joined(parts: Iterable[str]) -> Html:
    return Html("".join(map(_written, parts)))


def tag(name: str, *content: str, **attributes: object) -> Html:
    """An element.  Attributes: `class_` is class, `text_anchor` is text-anchor."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_written(str(value))}"'
        for key, value in attributes.items()
    )
    return Html(f"<{name}{given}>{joined(content)}</{name}>")


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> Html:
    """A table whose first columns, `left` of them, are words; the others are numbers, which stand
    at the right.  A row of one cell is a heading of those that follow.  On a phone each row of a
    table of many columns becomes a paragraph, with its heads."""
    wide = {"class_": "wide"} if len(heads) > 5 else {}

    def row(kind: str, cells: Sequence[str]) -> Html:
        if len(cells) == 1:
            return tag("tr", tag("td", cells[0], colspan=len(heads), class_="group"))
        made = (
            tag(kind, cell, data_head=head, **({"class_": "number"} if place >= left else {}))
            for place, (head, cell) in enumerate(zip(heads, cells, strict=True))
        )
        return tag("tr", *made)

    body = tag("tbody", *(row("td", cells) for cells in rows))
    whole = tag("table", tag("thead", row("th", heads)), body, **wide)
    return tag("div", whole, class_="scroll")


def section(title: str, *content: str) -> Html:
    return tag("section", tag("h2", title), *content)


def folded(title: str, *content: str, shown: bool = False) -> Html:
    """What a click on its title shows or hides."""
    state = {"open": "open"} if shown else {}
    return tag("details", tag("summary", title), *content, **state)


def fragment(*content: str) -> Html:
    """A part of somebody else's page, with the style that it needs."""
    return tag("div", tag("style", Html(STYLE)), *content, class_="wsync")


def page(title: str, *content: str) -> str:
    """A whole file."""
    head = tag("head", Html(_HEAD), tag("title", title), tag("style", Html(STYLE)))
    body = tag("body", tag("main", tag("h1", title), *content), class_="wsync")
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


# --- numbers ---------------------------------------------------------------------------------


def bytes_text(nbytes: float) -> str:
    """In decimal units: "8.41 MB"."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} B"


def seconds_text(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    return f"{1e3 * seconds:.{1 if seconds >= 0.01 else 2}f} ms"


def share_text(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"
