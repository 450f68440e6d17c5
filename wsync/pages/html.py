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


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Html:
    def row(kind: str, cells: Sequence[str]) -> Html:
        return tag("tr", *(tag(kind, cell) for cell in cells))

    return tag("table", row("th", heads), *(row("td", cells) for cells in rows))


def fragment(*content: str) -> Html:
    """A part of somebody else's page, with the style that it needs."""
    return tag("div", tag("style", Html(STYLE)), *content, class_="wsync")


def page(title: str, *content: str) -> str:
    """A whole file."""
    head = tag("head", Html(_HEAD), tag("title", title))
    body = tag("body", fragment(tag("h1", title), *content))
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def seconds_text(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    return f"{1e3 * seconds:.{1 if seconds >= 0.01 else 2}f} ms"
