"""Verifies a recording: a replay must leave the bytes that load_weights leaves.

Both load made-up tensors.  This finds what raw kernels, pointers and numpy write, which torch's
dispatch modes do not see.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Final

import torch

from wsync._core import LOCAL, BufferTable, Layout, LayoutBuilder, Route, Stream
from wsync.engine.learn.bounded_call import NotEndedError, bounded
from wsync.engine.learn.dummy_weights import MadeUpModel
from wsync.engine.learn.module_memory import ModuleMemory, region, wrapped_tensors
from wsync.engine.learn.module_state import ModuleState
from wsync.engine.learn.recording import Recording, RecordingError
from wsync.engine.learn.regions import Box, Move
from wsync.engine.learn.time_limit import check
from wsync.engine.learn.watched_pools import watched_pools
from wsync.engine.learn.watched_writes import WatchedWrites
from wsync.engine.ring_loaders import LoadWeights
from wsync.machine.device import follow
from wsync.machine.error_text import error_text
from wsync.module_tensors import checksum_of, flat_bytes

# held bytes that are kept aside at a time
_BATCH: Final = 256 << 20
_TIMEOUT: Final = 600.0
# bytes of parameters that a load has to replace: no element of MadeUpModel's seed 1 consists of one
_POISONS: Final = (0x42, 0x41, 0x42)


def verify(
    module: torch.nn.Module,
    load: LoadWeights,
    model: MadeUpModel,
    recording: Recording,
    stream: Stream,
    held: ModuleMemory,
) -> None:
    """Loads made-up tensors twice, by the loader and by a replay over poisoned memory.

    The module's weights are lost.  Bytes that neither writes stay.  held: what it holds, but for
    caches that the loader drops.

    Raises:
        RecordingError: the results differ; the text names a tensor and a byte.
    """
    unwritten = sums_of_gaps(held, recording)
    load_made_up(load, model)
    if recording.fallback and not held.current():
        raise RecordingError("it gives tensors other memory")
    held = ModuleMemory(module)
    difference = held.difference(recording.facts)
    if difference:
        raise RecordingError(f"while loading, {difference}")
    check_gaps(held, recording, unwritten)
    pieces = recording.by_area()

    def replay(areas: Set[int]) -> None:
        shapes = {name: shape for name, _, shape, _, _ in model.tensors}
        builder = LayoutBuilder()
        for area in sorted(areas):
            add_boxes(builder, area, pieces.get(area, ()), recording, shapes)
        route = Route(model.layout, builder.build())
        if route.buffer_count:
            follow(stream, _TIMEOUT, check)
            sources = BufferTable([(model.address, model.nbytes)], model)
            stream.copy(route, 0, LOCAL, sources, held.table())
        stream.synchronize(_TIMEOUT)
        if recording.fallback:
            with WatchedWrites(held) as watched:
                load_made_up(load, model, frozenset(recording.fallback))
            recording.aside |= watched.parts
        for transfer in (*recording.fills, *recording.copies):
            if transfer.area in areas:
                transfer.run(held.areas)

    for areas in _batches(held, recording):
        _compare(held, areas, recording, replay)
    if recording.fallback:
        check_gaps(held, recording, unwritten)


def sums_of_gaps(held: ModuleMemory, recording: Recording) -> dict[int, list[int]]:
    """Checksums of what a recording does not write, by area."""
    return held.sums_of(recording.gaps)


def check_gaps(held: ModuleMemory, recording: Recording, before: dict[int, list[int]]) -> None:
    """RecordingError where these checksums have changed."""
    for area, sums in sums_of_gaps(held, recording).items():
        if sums != before.get(area, sums):
            path = held.areas[area].path
            raise RecordingError(f"{path}: written by means that cannot be seen")


def first_that_makes_same(
    module: torch.nn.Module,
    load: LoadWeights,
    ways: Sequence[tuple[LoadWeights, bool]],
    layout: Layout,
) -> tuple[LoadWeights, bool] | None:
    """Which of several other ways to call load_weights makes of a model's tensors what that makes
    of them in one call; with True: however many a call brings.

    The module's weights are put back: a loader that is not replaced may go by them.

    Raises:
        RecordingError: the loader has failed.
    """
    model = MadeUpModel(layout, seed=1)  # with values that weights have: it may go by them
    state = ModuleState(module, values=True)

    def made(by: LoadWeights, calls: Sequence[Sequence[int]] | None = None) -> object:
        with state.put_back():
            # what is not loaded after this must not look right
            load_made_up(by, MadeUpModel(layout))
            load_made_up(by, model, calls=calls)
            held = ModuleMemory(module)
            return [fact[:3] for fact in held.facts], _sums(module, held, state)

    wanted = made(load)
    for how, split in ways:
        # rounds may bring any tensor first
        orders = (model.together, model.together[::-1]) if split else (None,)
        if all(made(how, calls) == wanted for calls in orders):
            return how, split
    return None


def _sums(module: torch.nn.Module, held: ModuleMemory, state: ModuleState) -> dict[str, int]:
    """Checksums of a module's tensors, but for those that `state.unwritten` has, and of what
    wrappers are around."""
    inside = {path: checksum_of(part) for path, _, part in wrapped_tensors(module)}
    unwritten = state.unwritten
    paths = {fact[0] for fact in held.facts if held.areas[fact[4]].start not in unwritten}
    return held.sums(paths) | inside


def unloaded(module: torch.nn.Module, load: LoadWeights, layout: Layout) -> dict[str, torch.Tensor]:
    """Elements of parameters that load_weights does not load from a model's tensors when it is
    called again: by path, what selects them, on the host.

    The module's weights are put back.

    Raises:
        RecordingError: the loader has failed.
    """
    model = MadeUpModel(layout, seed=1)
    found: dict[str, torch.Tensor] = {}
    with ModuleState(module, values=True).put_back():
        for turn, poison in enumerate(_POISONS):
            for parameter in parameters(module).values():
                size = parameter.element_size()
                value = torch.full((size,), poison, dtype=torch.uint8, device="cpu")
                _once(parameter.detach()).copy_(value.view(parameter.dtype)[0])
            load_made_up(load, model)
            left = {
                path: (elements(parameter) == poison).all(-1).cpu()
                for path, parameter in parameters(module).items()
            }
            if turn > 0:  # a loader may skip what it has loaded before
                found = {path: mask & found.get(path, mask) for path, mask in left.items()}
    return {path: mask for path, mask in found.items() if mask.any()}


def elements(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements as rows of bytes."""
    return flat_bytes(tensor).view(-1, tensor.element_size())


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """Without the repetitions of a tensor that is expanded."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def parameters(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A module's parameters that have memory, and the parts of those that are wrappers."""
    held = ModuleMemory(module)
    named = zip(held.facts, held.tensors, strict=True)
    plain = {fact[0]: tensor for fact, tensor in named if fact[0] in held.parameters}
    wrapped = wrapped_tensors(module)
    return plain | {path: part for path, t, part in wrapped if isinstance(t, torch.nn.Parameter)}


def load_made_up(
    load: LoadWeights,
    model: MadeUpModel,
    names: frozenset[str] | None = None,
    *,
    calls: Sequence[Sequence[int]] | None = None,
) -> None:
    """Loads made-up tensors, all or these, in one call; calls: the numbers of those that each of
    several brings.

    Raises:
        RecordingError: the loader has failed.
    """
    try:
        with torch.no_grad(), watched_pools():
            pairs = model.pairs(names)
            for call in [None] if calls is None else calls:
                given = pairs if call is None else [pairs[index] for index in call]
                bounded(functools.partial(load, given))
                check()
    except NotEndedError:
        raise
    except Exception as error:
        raise RecordingError(f"it raised {error_text(error)}") from error
    finally:
        model.restore()
    check()


def add_boxes(
    builder: LayoutBuilder,
    area: int,
    pieces: Sequence[tuple[str, Box]],
    recording: Recording,
    shapes: dict[str, tuple[int, ...]],
) -> None:
    """Adds an area's boxes to a layout, as the buffer of its number."""
    for name, box in pieces:
        builder.add_shard(
            *(name, recording.kept[name], shapes[name], box.start, box.extent),
            *(area, box.address, box.strides),
        )


def _compare(
    held: ModuleMemory, areas: Set[int], recording: Recording, replay: Callable[[Set[int]], None]
) -> None:
    """Poisons the module's tensors in areas, replays, and compares them with what they held; puts
    that back on errors.  What else lies in their storages may be another model's."""
    kept = {
        area: [(move, region(data, move).clone()) for move in held.own_bytes[area]]
        for area, data in ((area, held.areas[area].bytes()) for area in sorted(areas))
    }
    try:
        for area, wanted in kept.items():
            data = held.areas[area].bytes()
            gaps = recording.gaps.get(area, ())
            same = [region(data, gap).clone() for gap in gaps]
            for move, values in wanted:
                # a byte that the replay leaves out differs for certain
                torch.bitwise_not(values, out=region(data, move))
            for gap, values in zip(gaps, same, strict=True):
                region(data, gap).copy_(values)
        replay(areas)
        for area, wanted in kept.items():
            _check_same(held, area, wanted)
    except BaseException:
        for area, wanted in kept.items():
            data = held.areas[area].bytes()
            for move, values in wanted:
                region(data, move).copy_(values)
        raise


def _check_same(held: ModuleMemory, area: int, kept: list[tuple[Move, torch.Tensor]]) -> None:
    """Raises RecordingError for the first byte of regions of an area that is another by now."""
    data = held.areas[area].bytes()
    for move, wanted in kept:
        found = region(data, move)
        if torch.equal(found, wanted):
            continue
        first = (found != wanted).flatten().view(torch.uint8).argmax()
        place = tuple(int(index) for index in torch.unravel_index(first, found.shape))
        start = move.destination + sum(i * s for i, s in zip(place, found.stride(), strict=True))
        raise RecordingError(
            f"{held.name(area, start)}: byte {start} of its storage is {int(found[place])} "
            f"after a replay, load_weights makes it {int(wanted[place])}"
        )


def _batches(held: ModuleMemory, recording: Recording) -> Iterator[set[int]]:
    """Areas that are verified at a time.  Areas that copies connect are in one batch: otherwise a
    copy would find its source filled even where the replay fills it too late."""
    groups = {area: {area} for area in (*recording.areas, *recording.computed)}
    for copy in recording.copies:
        joined = groups[copy.area] | groups.get(copy.source_area, set())
        groups |= dict.fromkeys(joined, joined)
    batch: set[int] = set()
    nbytes = 0
    for area, group in groups.items():
        if area != min(group):
            continue
        batch |= group
        nbytes += sum(move.nbytes for each in group for move in held.own_bytes[each])
        if nbytes >= _BATCH:
            yield batch
            batch, nbytes = set(), 0
    if batch:
        yield batch
