"""What people are shown: pages are whole, say what the data say, and let no name become markup."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import pytest

import wsync
from wsync.pages import bars, html
from wsync.pages.timeline import rounds_of, timeline
from wsync.pages.update import update

MS = 1_000_000
NASTY = 'x</title><script>alert("1")</script> & \x00\x1b\ud800' + "n" * 30


def parsed(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)


def words(text: str) -> str:
    """What a reader sees, tooltips included."""
    return " ".join(" ".join(parsed(text).itertext()).split())


def record(name: str, role: str = "engine", rounds: int = 3, commit: int = 500) -> dict[str, Any]:
    """Rounds from 40 ms on, one a millisecond, after which a commit takes long."""
    spans: list[list[Any]] = []
    what, waits = ("load", "take") if role == "engine" else ("local", "engine")
    for number in range(rounds):
        begin = (40 + number) * MS
        spans.append(["thread", waits, number, begin, begin + MS // 2])
        spans.append(["stream", what, number, begin + MS // 2, begin + MS])
        if role == "trainer":
            spans.append(["thread", "post", number, begin + MS // 2, begin + MS // 2])
    if role == "trainer":
        spans.append(["thread", "pause", -1, 0, 40 * MS])
        spans.append(["thread", "commit", -1, (40 + rounds) * MS, (40 + rounds + commit) * MS])
    return {"role": role, "name": name, "rank": 0, "spans": spans}


def report() -> wsync.Report:
    return wsync.Report(
        version=NASTY,
        tensors=1_234,
        model_nbytes=4_000_000,
        delivered_nbytes=9_000_000,
        needed_nbytes=6_000_000,
        sent_nbytes=5_000_001,
        rounds=17,
        workers=3,
        unused=("lm_head.<weight>",),
        ways={"flattened buckets": ["http://a", "http://b"]},
        paths={"http://b": "ring"},
        own_loading={"http://a": "norm: computed"},
        seconds=0.25,
        phases={"commit": 0.1, "pause": 0.05, "of tomorrow": 0.025},
    )


def test_whatever_is_no_markup_is_escaped() -> None:
    made = html.tag("p", NASTY, html.tag("b", "bold"), title=NASTY, data_x=1)
    root = parsed(made)
    assert [child.tag for child in root] == ["b"]
    assert root.attrib["data-x"] == "1"
    seen = NASTY.replace("\x00", "\ufffd").replace("\x1b", "\ufffd").replace("\ud800", "\ufffd")
    assert (root.text, root.attrib["title"]) == (seen, seen)
    made.encode("utf-8")


@pytest.mark.parametrize(
    "text",
    [
        html.page("a title", html.fragment("inside")),
        report()._repr_html_(),
        html.page("a title", timeline([record("r", "trainer"), record("e")])),
    ],
    ids=["page", "report", "timeline"],
)
def test_a_page_needs_nothing_but_itself(text: str) -> None:
    root = parsed(text)
    tags = {element.tag.split("}")[-1] for element in root.iter()}
    assert tags.isdisjoint({"script", "link", "img", "iframe", "object", "image", "use"})
    for element in root.iter():
        assert element.attrib.keys().isdisjoint({"src", "href"})
        assert not any(name.startswith("on") for name in element.attrib)
    assert "@import" not in text and "url(" not in text
    assert "@media (prefers-color-scheme:dark)" in text


def test_a_notebook_shows_the_report_s_own_numbers() -> None:
    made = report()
    text = words(made._repr_html_())
    for number in ("1,234", "4,000,000", "6,000,000", "9,000,000", "5,000,001", "1.500", "17"):
        assert re.search(rf"(?<![\d,.]){re.escape(number)}(?![\d,])", text), number
    assert "250.0 ms" in text and "36.00 MB/s" in text
    assert "lm_head.<weight>" in text
    assert "by flattened buckets: http://a, http://b (ring)" in text
    assert "by its own load_weights, http://a: norm: computed" in text
    assert str(made).startswith("version x</title>")  # a terminal has what it had


def test_phases_add_up_to_the_update() -> None:
    made = report()
    assert list(bars.spent(made.seconds, made.phases)) == [
        "pause",
        "commit",
        "of tomorrow",
        "other",
    ]
    bar = parsed(html.tag("div", bars.phases_bar(made.seconds, made.phases)))
    widths = {
        element.findtext("title"): float(element.attrib["width"].rstrip("%"))
        for element in bar.iter("rect")
        if element.find("title") is not None
    }
    assert widths == {
        "pause: 50.0 ms": 20.0,
        "commit: 100.0 ms": 40.0,
        "other: 75.0 ms": 30.0,
        "of tomorrow: 25.0 ms": 10.0,
    }


def test_an_update_that_moved_nothing_can_be_shown() -> None:
    assert "redundancy" in words(wsync.Report()._repr_html_())
    assert "redundancy" in words(update(wsync.Report().facts(), [], 0))


def test_the_rounds_are_drawn_without_the_wait_for_the_commit() -> None:
    records = [record("r", "trainer"), record("e")]
    window = rounds_of(records)
    assert window is not None
    assert 40 * MS < window[0] < 41 * MS
    assert 43 * MS <= window[1] < 44 * MS
    short = [record("r", "trainer", rounds=300, commit=1), record("e", rounds=300)]
    assert rounds_of(short) is None  # they are most of it
    assert rounds_of([record("r", "trainer", rounds=0)]) is None
