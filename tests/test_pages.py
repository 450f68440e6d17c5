"""What people are shown: pages are whole, say what the data say, and let no name become markup."""

from __future__ import annotations

import itertools
import re
from typing import Any
from xml.etree import ElementTree

import pytest

import wsync
from wsync.demo import page as demo_page
from wsync.pages import bars, html, style
from wsync.pages.timeline import file, rounds_of, timeline
from wsync.pages.update import bytes_table, update

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


def test_numbers_stand_at_the_right_of_a_table() -> None:
    made = html.table(
        ["name", "kind", "bytes"], [["a", "b", "1"], ["heading"], ["c", "d", "22"]], left=2
    )
    rows = [list(row) for row in parsed(made).iter("tr")]
    assert [[cell.get("class") for cell in row] for row in rows] == [
        [None, None, "number"],
        [None, None, "number"],
        ["group"],
        [None, None, "number"],
    ]
    assert rows[2][0].get("colspan") == "3"
    assert re.search(r"td\.number{text-align:right", style.STYLE)


def test_on_a_phone_a_wide_table_names_each_cell() -> None:
    heads = [f"head {place}" for place in range(6)]
    for count in (5, 6):
        root = parsed(html.table(heads[:count], [["cell"] * count]))
        assert (root.find("table[@class='wide']") is not None) == (count == 6)
        assert [cell.get("data-head") for cell in root.iter("td")] == heads[:count]
    assert "td::before{content:attr(data-head)" in style.STYLE


@pytest.mark.parametrize(
    "text",
    [
        html.page("a title", html.fragment("inside")),
        report()._repr_html_(),
        file([record("r", "trainer"), record("e")], "a title"),
    ],
    ids=["page", "report", "svg"],
)
def test_a_page_needs_nothing_but_itself(text: str) -> None:
    root = parsed(text)
    tags = {element.tag.split("}")[-1] for element in root.iter()}
    assert tags.isdisjoint({"script", "link", "img", "iframe", "object", "image", "use"})
    for element in root.iter():
        assert element.attrib.keys().isdisjoint({"src", "href"})
        assert not any(name.startswith("on") for name in element.attrib)
    assert "@import" not in text and "url(" not in text
    # a browser has pages light or dark; what else draws a file knows one way, and no variables
    alone = root.tag.endswith("svg")
    assert ("@media (prefers-color-scheme:dark)" in text) == (not alone)
    assert ("var(--" in text) == (not alone)


def test_every_kind_has_a_colour_on_light_and_on_dark_ground() -> None:
    light, dark = style.STYLE.split("@media (prefers-color-scheme:dark)")
    for name, kind in style.KINDS.items():
        assert f".k-{name}{{fill:{kind.light}}}" in light
        assert f".k-{name}{{fill:{kind.dark}}}" in dark
    assert style.kind_class("of tomorrow") == "k-other"


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


def test_a_bar_compares_what_was_moved_and_no_limit() -> None:
    facts = {**report().facts(), "round_nbytes": 1_000, "ring_nbytes": 2_000}
    rows = list(parsed(bytes_table(facts)).iter("tr"))
    barred = [row[0].text for row in rows if row.find(".//svg") is not None]
    assert [name.split()[0] for name in barred if name] == ["the", "needed", "delivered", "sent"]
    assert {"a round of one worker, at most", "rings of this rank"} <= {row[0].text for row in rows}


def test_an_update_that_moved_nothing_can_be_shown() -> None:
    assert "redundancy" in words(wsync.Report()._repr_html_())
    assert "redundancy" in words(update(wsync.Report().facts(), [], 0))


def test_the_longest_update_fills_the_chart() -> None:
    chart = html.tag("div", bars.phases_chart([("a", 1.0, {"pause": 1.0}), ("b", 0.25, {})]))
    widths = [
        element.attrib["width"]
        for element in parsed(chart).iter("rect")
        if element.find("title") is not None
    ]
    assert widths == ["100.000%", "25.000%"]


@pytest.mark.parametrize(("first", "last"), [(0.0, 1.0), (0.3, 147.0), (15.0, 16.0), (1e-6, 3e-6)])
def test_ticks_are_round_numbers_within(first: float, last: float) -> None:
    found = bars.ticks(first, last)
    assert 2 <= len(found) <= 6
    assert all(first - 1e-9 <= tick <= last + 1e-9 for tick in found)
    step = found[1] - found[0]
    assert f"{step:.0e}"[0] in "125"


def test_the_rounds_are_drawn_without_the_wait_for_the_commit() -> None:
    records = [record("r", "trainer"), record("e")]
    window = rounds_of(records)
    assert window is not None
    assert 40 * MS < window[0] < 41 * MS
    assert 43 * MS <= window[1] < 44 * MS
    short = [record("r", "trainer", rounds=300, commit=1), record("e", rounds=300)]
    assert rounds_of(short) is None  # they are most of it
    assert rounds_of([record("r", "trainer", rounds=0)]) is None


def test_a_lane_without_anything_takes_no_room() -> None:
    def height(spans: list[list[Any]]) -> float:
        made = timeline([{**record("e"), "spans": spans}])
        return float(next(parsed(html.tag("div", made)).iter("svg")).attrib["height"])

    spans = record("e")["spans"]
    copies = [span for span in spans if span[0] == "stream"]
    assert height(copies) < height(spans)


def test_very_many_spans_make_no_very_large_drawing() -> None:
    spans = [["stream", "load", n, n * MS, n * MS + 1] for n in range(50_000)]
    many = {**record("e"), "spans": [*spans, ["stream", "load", 50_000, 60_000 * MS, 70_000 * MS]]}
    text = file([many], "many")
    titles = [
        element.text or "" for element in parsed(text).iter() if element.tag.endswith("title")
    ]
    assert 1_400 < len(titles) < 4_000
    assert "load of round 50000: 10000.000 ms" in titles


def test_no_two_names_share_a_line_however_many_engines() -> None:
    names = [f"engine {number} {'n' * 49}" for number in range(20)]
    records = [record("trainer rank 0", "trainer"), *map(record, names)]
    root = parsed(html.tag("div", timeline(records)))
    drawing = list(root.iter("svg"))[1]  # of the rounds
    lines = {
        element.text: float(element.attrib["y"])
        for element in drawing.iter("text")
        if element.get("x") == "0"
    }
    assert list(lines) == ["trainer rank 0", *names]
    places = list(lines.values())
    assert all(b - a >= 24 for a, b in itertools.pairwise(places))
    assert places[-1] < float(drawing.attrib["height"])
    # bars and texts share no line either
    for rect in drawing.iter("rect"):
        if rect.find("title") is not None:
            top, bottom = (float(rect.attrib["y"]) + n for n in (0, float(rect.attrib["height"])))
            assert all(place <= top - 2 or place - 10 >= bottom for place in places)


def demo_facts(**more: Any) -> dict[str, Any]:
    updates = [{**report().facts(), "version": str(n), "verified": n != 2} for n in (1, 2)]
    worker = {"engine": NASTY, "way": "buckets", "rank": 0, "tensors": 12, "nbytes": 3_000_000}
    return {
        "model": "qwen3",
        "mode": "colocated",
        "parallel": {"tp": 2, "pp": 1, "ep": 1},
        "ranks": 2,
        "tensors": 1_234,
        "bytes": 4_000_000,
        "updates": updates,
        "deliveries": [{**worker, "worker": n} for n in (0, 1, None)],
        "engines": [{"name": NASTY, "checked": "all compared", "before": "?<", "after": "words"}],
        "versions": {"wsync": "0"},
        "verified": True,
        "problems": [],
        "learnt": False,
        **more,
    }


def test_the_demo_s_page_says_what_the_demo_found() -> None:
    records = [record("trainer rank 0", "trainer"), record(NASTY)]
    text = demo_page.report(demo_facts(), records)
    seen = words(text)
    assert "Verified: 1234 tensors, 4,000,000 bytes" in seen
    assert seen.count("3,000,000") == 3 and "9,000,000" in seen and "225.0%" in seen
    assert "load of round 2: 0.500 ms" in seen
    assert "all compared" in seen and "words" in seen
    assert "the model has not learnt its text" in seen
    assert [cell.text for cell in parsed(text).iter("span") if cell.get("class") == "bad"] == ["NO"]
    wrong = words(demo_page.report(demo_facts(verified=False, problems=["<a> differs"]), []))
    assert "NOT VERIFIED" in wrong and "<a> differs" in wrong and "Timeline" not in wrong
