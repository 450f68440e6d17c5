"""What `Sync.verify` has found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from wsync.module_tensors.names import listed
from wsync.report import counted


@dataclass(frozen=True, repr=False)
class Verification:
    """How the weights of engines compare with the trainer's.  True if no tensor differs and every
    engine was compared, perhaps in part.

    workers: for each worker, a mapping with "engine", "worker", "tensors" and "nbytes" (compared,
    wholly or in part), "different" (by name of each tensor that differs, the indices of an element)
    and "uncompared" (tensors that were not compared, and why; "" if there are none).
    unread: for each engine of which nothing was compared, the reason.
    seconds: duration.  paused: by engine, the seconds without generation, on rank 0; empty if an
    update was verified while its engines were paused.
    """

    workers: Sequence[Mapping[str, Any]]
    unread: Mapping[str, str]
    seconds: float = 0.0
    paused: Mapping[str, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return not (self.unread or self.differences)

    @property
    def differences(self) -> str:
        """Names the tensors that differ, by worker; "" if there are none."""
        return "; ".join(
            f"engine {found['engine']}: worker {found['worker']}: other values in "
            + listed(f"{name}{at}" for name, at in found["different"].items())
            for found in self.workers
            if found["different"]
        )

    def __repr__(self) -> str:
        tensors, nbytes = (sum(found[n] for found in self.workers) for n in ("tensors", "nbytes"))
        compared = f"{counted(tensors, 'tensor')} of {counted(len(self.workers), 'worker')}"
        text = f"compared {compared}, {nbytes:,} bytes in {self.seconds:.3f} s"
        parts = [text, self.differences or "no differences"]
        left = {f["engine"]: f["uncompared"] for f in self.workers if f["uncompared"]}
        left |= self.unread
        parts += [f"engine {name}: not compared: {why}" for name, why in left.items()]
        return f"<Verification: {'; '.join(parts)}>"
