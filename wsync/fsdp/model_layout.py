"""The layout of an FSDP model, or of a sharded state dict."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from wsync import _core
from wsync.families.runtime_names import RuntimeNames
from wsync.fsdp.parts import Form, Part
from wsync.fsdp.reader import of_mapping, of_module
from wsync.layout import TrainerLayout, position

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.nn import Module


def layout(
    model: Module | Mapping[str, Tensor],
    config: Any = None,
    *,
    group: ProcessGroup | None = None,
) -> TrainerLayout:
    """The layout of this rank of a model under FSDP2, FSDP1 or tensor-parallel DTensors.

    `model`: the module, or a sharded state dict (`StateDictType.SHARDED_STATE_DICT`).  A state dict
    does not follow training, so give `Sync.update` a new one each time.  `config`: the Hugging Face
    configuration (default: the model's own).  It tells whether embeddings are tied and how experts
    are fused.  A tensor with several names is delivered under all of them, except a tied head.
    `group`: the ranks that take part in updates (default: all).  Not collective.  FSDP2 modules are
    resharded now and at each update, as `state_dict()` does it.

    Raises UnsupportedError for a `Partial` placement and for fused experts without rules.  Raises
    LayoutError for a tensor that does not fit its placement, or that is flattened into a unit
    around `model`.  Raises InvalidArgumentError for a value that is not a tensor.
    """
    config = getattr(model, "config", None) if config is None else config
    tied = _says_tied(config)
    read: Callable[[], list[Part]]
    if isinstance(model, Mapping):
        read = functools.partial(of_mapping, model, tied)
    else:
        read = of_module(model, tied)
    parts = read()
    places: dict[object, int] = {}  # a flat parameter is one buffer, named after its first part
    keys = [
        (place,) if part.strides is None else id(part.tensor) for place, part in enumerate(parts)
    ]
    numbers = [places.setdefault(key, len(places)) for key in keys]
    firsts = [numbers.index(number) for number in range(len(places))]
    names = tuple(parts[first].name for first in firsts)
    table = _core.describe([parts[first].tensor for first in firsts], names, gpu=True)
    rank, count = position(group)
    builder = _core.LayoutBuilder(rank)
    names_of = RuntimeNames.of_config(config, (part.name for part in parts))
    for part, number in zip(parts, numbers, strict=True):
        _, dtype, _, strides, _ = table[number]
        maps = names_of.maps(part.name, dtype, part.shape, part.regions)
        if math.prod(part.shape) == 0:
            for each in maps:
                builder.add_tensor(each[0], dtype, each[2], each[7])
        elif part.regions:
            strides = strides if part.strides is None else part.strides
            builder.add_parameter(part.name, number, dtype, strides, part.regions, maps)
    forms = [part.form for part in parts]

    def current(weights: Mapping[str, Tensor] | None = None) -> Sequence[Tensor]:
        found = read() if weights is None else of_mapping(weights, tied, forms)
        _check_same(forms, found)
        for part, number in zip(found, numbers, strict=True):
            if part.tensor is not found[firsts[number]].tensor:
                raise _core.LayoutError(
                    f"{part.name}: it is no longer in one tensor with {names[number]}"
                )
        return [found[first].tensor for first in firsts]

    return TrainerLayout(builder.build(), names, current, table, rank, count, group, current)


def _says_tied(config: Any) -> bool:
    """Whether a configuration says that embeddings are tied and its text configuration, if there is
    one, agrees or says nothing.

    transformers before 5 reads the text configuration, and later versions read the outer one.  The
    configuration that is not read holds its class's default.  If only one of them says tied, a head
    that is the embedding's tensor is also delivered under its own name, which engines may know.
    """
    find = getattr(config, "get_text_config", None)
    text = getattr(config, "text_config", None) if find is None else find(decoder=True)
    own = bool(getattr(config, "tie_word_embeddings", False))
    return own and bool(getattr(text, "tie_word_embeddings", True))


def _check_same(forms: Sequence[Form], found: Sequence[Part]) -> None:
    """Raises LayoutError if the forms of parts have changed; their tensors may be others."""
    for old, new in zip(forms, found, strict=False):
        if old != new.form:
            raise _core.LayoutError(
                f"{old[0]}: its sharding has changed since the layout was made; make the layout "
                "again"
            )
    if len(forms) != len(found):
        raise _core.LayoutError(
            f"this rank holds {len(found)} tensors now, but {len(forms)} when the layout was made"
        )
