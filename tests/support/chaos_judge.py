"""What a watcher's looks say about engines: plain counting, of what is known from outside."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from support.chaos_watch import Look


class Update(NamedTuple):
    """One call of update on all ranks; times of time.monotonic()."""

    version: int
    began: float
    ended: float
    succeeded: bool


class Kill(NamedTuple):
    """engine: its number, -1 for a trainer rank."""

    when: float
    engine: int


def count(looks: Sequence[Look], updates: Sequence[Update], kills: Sequence[Kill]) -> Counter[str]:
    """How many looks had each verdict, and of those that were wrong or stale how many `lasting`.

    "stale": an older version than that of an update which had succeeded before the question was
    asked, by an engine that was not killed since that update began.
    "lasting": wrong or stale, and the engine had already been so before an update began that has
    succeeded, and was not killed in between.
    """
    found: Counter[str] = Counter()
    good = [update for update in updates if update.succeeded]
    first: dict[int, float] = {}  # when an engine was first seen wrong, and is not right since
    for look in sorted(looks):
        bad = look.wrong
        found[look.verdict] += 1
        if look.label >= 0 and _is_stale(look, good, kills):
            found["stale"] += 1
            bad = True
        if bad:
            begin = first.setdefault(look.engine, look.answered)
            if any(
                begin < update.began
                and update.ended < look.sent
                and not _killed(kills, look.engine, begin, look.answered)
                for update in good
            ):
                found["lasting"] += 1
        elif look.verdict == "right":
            first.pop(look.engine, None)
    return found


def _is_stale(look: Look, good: Sequence[Update], kills: Sequence[Kill]) -> bool:
    return any(
        look.label < update.version
        and update.ended < look.sent
        and not _killed(kills, look.engine, update.began, look.answered)
        for update in good[-1:0:-1] + list(good[:1])
    )


def _killed(kills: Sequence[Kill], engine: int, begin: float, end: float) -> bool:
    return any(kill.engine == engine and begin <= kill.when <= end for kill in kills)


def recoveries(updates: Sequence[Update], kills: Sequence[Kill]) -> list[float]:
    """Seconds from each kill to the end of the next update that began later and succeeded."""
    found = []
    for kill in kills:
        ends = [u.ended for u in updates if u.succeeded and u.began >= kill.when]
        if ends:
            found.append(min(ends) - kill.when)
    return found


def spread(seconds: Sequence[float]) -> str:
    if not seconds:
        return "none"
    return f"{len(seconds)}, median {statistics.median(seconds):.1f} s, max {max(seconds):.1f} s"
