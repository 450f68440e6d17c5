"""What people are shown: pages are whole, say what the data say, and let no name become markup."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import wsync
from wsync import pages
from wsync.pages import spent

NASTY = 'x</title><script>alert("1")</script> & \x00\x1b\ud800' + "n" * 30


def parsed(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)


def words(text: str) -> str:
    """What a reader sees, tooltips included."""
    return " ".join(" ".join(parsed(text).itertext()).split())


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
    made = pages.fragment(pages.tag("p", NASTY, pages.tag("b", "bold"), title=NASTY))
    root = parsed(made)[1]
    assert [child.tag for child in root] == ["b"]
    seen = NASTY.replace("\x00", "\ufffd").replace("\x1b", "\ufffd").replace("\ud800", "\ufffd")
    assert (root.text, root.attrib["title"]) == (seen, seen)
    made.encode("utf-8")


def test_a_notebook_shows_the_report_s_own_numbers() -> None:
    made = report()
    text = words(made._repr_html_())
    for number in ("1,234", "4,000,000", "6,000,000", "9,000,000", "5,000,001", "1.5", "17"):
        assert re.search(rf"(?<![\d,.]){re.escape(number)}(?![\d,])", text), number
    assert "commit engines take the version and continue 100.00 ms 40.0%" in text
    assert "lm_head.<weight>" in text
    assert "by flattened buckets: http://a, http://b (ring)" in text
    assert "by its own load_weights, http://a: norm: computed" in text
    assert str(made).startswith("version x</title>")  # a terminal has what it had


def test_phases_add_up_to_the_update() -> None:
    made = report()
    found = spent(made.seconds, made.phases)
    assert list(found) == ["pause", "commit", "of tomorrow", "other"]
    assert sum(found.values()) == made.seconds
