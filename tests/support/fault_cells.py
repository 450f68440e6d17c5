"""The cells of the fault matrix: (phase, who, how); see fault_lab.py."""

from __future__ import annotations

Cell = tuple[str, str, str]

RANKS = 3  # of a trainer; the third has no worker
PHASES = ("open", "attach", "round", "done", "prepared", "commit", "close")
TARGETS = ("rank0", "rank1", "worker0", "worker1")
TRAINERS, WORKERS = TARGETS[:2], TARGETS[2:]


def _cross(phases: tuple[str, ...], who: tuple[str, ...], hows: tuple[str, ...]) -> list[Cell]:
    return [(phase, one, how) for phase in phases for one in who for how in hows]


def cells() -> list[Cell]:
    """The whole table, in the order of the report."""
    return [
        *_cross(PHASES, TARGETS, ("kill", "stop", "raise")),
        *_cross(PHASES[1:], TARGETS, ("cut",)),  # before, no socket is connected
        *_cross(PHASES[1:], TRAINERS, ("interrupt",)),
        *_cross(("open", "round", "prepared", "close"), TARGETS, ("exit",)),
        *_cross(("open", "round", "commit"), TRAINERS, ("fork",)),
        *_cross(("listen",), TRAINERS, ("descriptors", "directory")),
        *_cross(("attach",), TRAINERS, ("address-space", "room", "descriptors")),
        *_cross(("open",), WORKERS, ("address-space", "descriptors")),
    ]
