"""What an update or a verification has found, and how long it took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from wsync.machine.trace import Stretch, Trace
from wsync.module_tensors.names import listed


@dataclass
class Report:
    """One update as one trainer rank saw it.  Sizes are bytes, times are seconds.

    `ring_nbytes` and `staging_nbytes` are this rank's buffers, kept between updates unless
    Options.park gives them back.  `round_nbytes` is the most bytes that a round moves to one
    worker; a larger tensor that cannot be split exceeds it.
    `phases` are disjoint parts of this rank's wall time.  They say what the rank waited for while
    its copies ran.  An update of a `Sync` has these phases, in this order:

        quantise this rank makes codes and scales (with Options.quantise)
        pause    engines stop, and all ranks hear that they have stopped
        open     rank 0 sends the opening requests; ranks tell where weights are to be read in
                 place; in a first update workers also connect and say what they keep, and ranks
                 plan and make rings
        staging  other ranks read what this rank sent two rounds before
        engine   workers give ring slots back, and in the end have taken every round
        gather   the other ranks' messages of a round arrive
        copy     this rank's copies run: before a round that is sent as a bucket, and at the end
        prepare  workers hold every byte: first this rank's workers, then all ranks'
        commit   workers commit; engines take the version and continue
        verify   workers compare their weights with the trainer's (with Options.verify); before
                 engines continue

    An update of a `DiskSync` has quantise, begin (make files of full size), write, sync (to the
    disk), publish, engines (stop, load the files, take the version and continue).  With `delta` it
    has keep (copy a whole version) or, instead of write and sync, compare and save; and pull, in
    which engines fetch the version while they generate.

    `paused` is, for each engine, the seconds from the request to pause until it generates again, on
    rank 0.  `staged` says whether the rounds came before the pause (see `Sync.stage`): then the
    phases staging, engine, gather and copy are not a part of the pause.  The time between `stage`
    and `commit` is in none of these numbers.
    `engine_pause_seconds` and `engine_flush_seconds` are the times that the slowest engine took to
    stop and to empty its cache, as rank 0 saw it.  Engines stop and empty their caches together,
    during other phases.

    `delivered_nbytes` is the sum over all workers, or of the files that a `DiskSync` has written.
    `redundancy` is delivered bytes divided by the bytes that the workers need, in the trainer's
    dtype.  `changed_nbytes` counts the bytes that differ from the version before, if that was
    compared (`delta` of a `DiskSync`); None if it was not.
    `image_nbytes` is this rank's memory for codes and scales, with Options.quantise.
    `quantised_nbytes` counts the weights that all ranks quantise, in the trainer's dtype;
    `repeated_nbytes` is the part that several ranks quantise, because they hold the same elements.
    `unused` names the trainer's tensors that no engine uses; they are not delivered.
    `ways` lists the engines' names under each way of delivery, in words; a `DiskSync` lists them
    only on rank 0.  `paths` says for each engine what carried the bytes: "ring" (memory that it
    shares with a trainer rank), "nccl" (a communicator of its workers and the trainer ranks),
    "gloo" (one of torch's groups), "direct" (the trainer's own memory), "direct and ring" (both),
    "stock buckets", "stock broadcast" or "disk".  `exchange` says what carried the bytes between
    trainer ranks: "none", "shared", "nccl", "gloo" or "disk".
    `verification` is the wsync.Verification that Options.verify has asked for, or None.
    `lost` says for each engine that the update went without, why (see Options.lost).
    `own_loading` says for each engine with wsync's receiver which tensors its workers load by the
    engine's own load_weights, and why.  `learning_seconds` is the time that workers took to learn
    what they keep; it is a part of `open` in a connection's first update.  `audit_seconds` is the
    time that this rank's slowest worker took, before its first round, to check that the engine's
    load_weights still does what the worker has learnt.
    """

    version: str = ""
    tensors: int = 0
    model_nbytes: int = 0
    delivered_nbytes: int = 0
    needed_nbytes: int = 0
    sent_nbytes: int = 0
    changed_nbytes: int | None = None
    image_nbytes: int = 0
    quantised_nbytes: int = 0
    repeated_nbytes: int = 0
    rounds: int = 0
    workers: int = 0
    round_nbytes: int = 0
    ring_nbytes: int = 0
    staging_nbytes: int = 0
    exchange: str = "none"
    unused: tuple[str, ...] = ()
    ways: dict[str, list[str]] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    own_loading: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    learning_seconds: float = 0.0
    audit_seconds: float = 0.0
    staged: bool = False
    paused: dict[str, float] = field(default_factory=dict)
    engine_pause_seconds: float = 0.0
    engine_flush_seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    verification: Verification | None = None

    def __post_init__(self) -> None:
        self.trace: Trace = Trace()  # not a field: `facts` leaves it out

    @property
    def redundancy(self) -> float:
        return self.delivered_nbytes / self.needed_nbytes if self.needed_nbytes else 1.0

    def __str__(self) -> str:
        rate = self.delivered_nbytes / self.seconds / 1e9 if self.seconds else 0.0
        speed = f"{rate:.2f} GB/s" if rate >= 0.1 else f"{1e3 * rate:.1f} MB/s"
        return (
            f"version {self.version}: {counted(self.tensors, 'tensor')}, "
            f"{self.delivered_nbytes:,} bytes to {counted(self.workers, 'worker')} in "
            f"{self.seconds:.3f} s ({self._learning()}{self._paused()}{speed}, "
            f"{counted(self.rounds, 'round')}, redundancy {self.redundancy:.2f})"
        ) + "".join(
            (
                self._in_place(),
                self._changed(),
                self._quantised(),
                self._own_loading(),
                self._verified(),
                self._lost(),
            )
        )

    def _paused(self) -> str:
        staged = "staged, " if self.staged else ""
        return f"{staged}paused {max(self.paused.values()):.3f} s, " if self.paused else staged

    def _learning(self) -> str:
        notable = self.learning_seconds >= max(0.05, 0.1 * self.seconds)
        text = f"{self.learning_seconds:.1f} s of it to learn where weights go, once a connection; "
        return text * notable

    def _in_place(self) -> str:
        return ", read in place" * any(path.startswith("direct") for path in self.paths.values())

    def _changed(self) -> str:
        if self.changed_nbytes is None:
            return ""
        return f", {self.changed_nbytes:,} of {self.needed_nbytes:,} bytes changed"

    def _own_loading(self) -> str:
        if not self.own_loading:
            return ""
        return f", own load_weights in {', '.join(sorted(self.own_loading))} (see own_loading)"

    def _verified(self) -> str:
        if self.verification is None or not any(f["tensors"] for f in self.verification.workers):
            return ""
        whole = self.verification.unread.keys() <= self.lost.keys()
        return ", verified" if whole else ", verified in part (see verification)"

    def _lost(self) -> str:
        return f", without {', '.join(sorted(self.lost))} (see lost)" if self.lost else ""

    def _repr_html_(self) -> str:
        """The HTML that a notebook shows."""
        from wsync import pages

        rank, spans = self.trace.rank, self.trace.spans
        record = {"role": "trainer", "name": f"trainer rank {rank}", "spans": spans}
        return pages.fragment(*pages.update(self.facts(), [record]))

    def _quantised(self) -> str:
        if not self.quantised_nbytes:
            return ""
        return (
            f", {self.quantised_nbytes:,} bytes of weights quantised ({self.repeated_nbytes:,} "
            f"of them again on another rank), {self.image_nbytes:,} bytes of codes and scales here"
        )

    def phase(self, name: str) -> Stretch:
        """Adds the time spent in a block to phase `name`."""

        def add(begin: int, end: int) -> None:
            self.trace.spans.append(("thread", name, -1, begin, end))
            self.phases[name] = self.phases.get(name, 0.0) + 1e-9 * (end - begin)

        return Stretch(add)

    def metrics(self, *, whole: bool = True) -> dict[str, float]:
        """Flat numbers for a training log, under wsync's own names.  Seconds and bytes also appear
        under slime's names, or under similar ones.  Engines are counted by path.  whole: whether to
        add `perf/update_weights_time`, which slime's actor measures itself for its whole update."""
        flat = {"wsync/update_seconds": self.seconds}
        if whole:
            flat["perf/update_weights_time"] = self.seconds
        for name, seconds in self.phases.items():
            flat[f"wsync/{name}_seconds"] = flat[f"perf/update_weights_{name}_time"] = seconds
        if self.paused:
            longest = max(self.paused.values())
            flat["wsync/paused_seconds"] = flat["perf/update_weights_paused"] = longest
        flat["perf/update_weights_wire_bytes"] = float(self.delivered_nbytes)
        names = ["engine_pause_seconds", "engine_flush_seconds"]
        names += ["learning_seconds", "audit_seconds"]
        names += ["model_nbytes", "delivered_nbytes", "sent_nbytes", "rounds", "redundancy"]
        if self.quantised_nbytes:
            names += ["image_nbytes", "quantised_nbytes", "repeated_nbytes"]
        for name in names:
            flat[f"wsync/{name}"] = float(getattr(self, name))
        if self.changed_nbytes is not None:
            flat["wsync/changed_nbytes"] = float(self.changed_nbytes)
            flat["perf/update_weights_density"] = self.changed_nbytes / self.needed_nbytes
        flat["wsync/engines_lost"] = float(len(self.lost))
        for path in self.paths.values():
            name = f"wsync/engines_by_{path.replace(' ', '_')}"
            flat[name] = flat.get(name, 0.0) + 1.0
        return flat

    def facts(self) -> dict[str, Any]:
        """All fields and the redundancy, for JSON."""
        return {**asdict(self), "redundancy": self.redundancy}


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def other_values(different: Mapping[str, Sequence[int]]) -> str:
    """Names the tensors that differ, each with the indices of an element."""
    return f"other values in {listed(f'{name}{at}' for name, at in different.items())}"


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
            f"engine {each['engine']}: worker {each['worker']}: {other_values(each['different'])}"
            for each in self.workers
            if each["different"]
        )

    def __repr__(self) -> str:
        tensors, nbytes = (sum(found[n] for found in self.workers) for n in ("tensors", "nbytes"))
        compared = f"{counted(tensors, 'tensor')} of {counted(len(self.workers), 'worker')}"
        text = f"compared {compared}, {nbytes:,} bytes in {self.seconds:.3f} s"
        parts = [text, self.differences or "no differences"] if tensors else ["nothing compared"]
        left = {f["engine"]: f["uncompared"] for f in self.workers if f["uncompared"]}
        left |= self.unread
        parts += [f"engine {name}: not compared: {why}" for name, why in left.items()]
        return f"<Verification: {'; '.join(parts)}>"
