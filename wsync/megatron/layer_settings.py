"""What layers are configured to be, where their weights have the same shapes whatever that is."""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from wsync import _core
from wsync.families.registry import FIELDS, Model
from wsync.layout import global_name
from wsync.megatron.global_names import LAYER

if TYPE_CHECKING:
    from torch.nn import Module

_Needed = dict[str, tuple[object, str]]  # values of fields, and why they have to be these
# sizes that shapes show only the product of, and Megatron's names of them
_SAME_SHAPE = {"g": "num_query_groups", "d": "kv_channels"}
# the same of delta nets, of which a configuration has some where a model has none, and of the
# layers of a vision tower
_NET_SIZES = {"gk": "num_key_heads", "gdk": "key_head_dim"}
_TOWER_SIZES = {"vision_heads": "num_attention_heads"}
_TOWER_LAYER = re.compile(r"vision_model\.decoder\.layers\.\d+")


class LayerSettings:
    """The settings and numbers of a model's layers, which another part of a program may change in
    place."""

    def __init__(self, spec: Model) -> None:
        self._spec = spec
        self._found: list[tuple[str, weakref.ref[Module]]] = []
        self._beside: list[tuple[str, weakref.ref[Module], _Needed]] = []
        self._needed: _Needed = {}
        if spec.family.rules:
            family = f"the family {spec.family.name!r} needs"
            for field, value in spec.family.settings.items():
                self._needed[field] = value, f"{family} {value}"
        self._needed |= self._sizes(_SAME_SHAPE)
        self._net, self._tower = self._sizes(_NET_SIZES), self._sizes(_TOWER_SIZES)

    def _sizes(self, names: Mapping[str, str]) -> _Needed:
        """What fields have to be by the configuration, but for sizes that a family reads from
        others of its fields than are usual."""
        family, sizes, needed = self._spec.family, self._spec.sizes, _Needed()
        for size, field in names.items():
            usual = FIELDS.get(size) or family.fields.get(size, ())
            if size in family.sizes and size in sizes and family.fields.get(size, usual) == usual:
                text = f"the configuration says {sizes[size]} ({' or '.join(usual)})"
                needed[field] = sizes[size], text
        return needed

    def find(self, chunks: Sequence[Module]) -> None:
        """Finds the layers there are now, and checks them."""
        modules = [each for chunk in chunks for each in chunk.named_modules()]
        self._found = [
            (path, weakref.ref(module))
            for path, module in modules
            if LAYER.fullmatch(global_name(path)) is not None
        ]
        self._beside = [
            (path, weakref.ref(module), needed)
            for path, module in modules
            if (needed := self._needed_beside(path, module))
        ]
        self.check()

    def _needed_beside(self, path: str, module: Module) -> _Needed:
        """What is needed of a delta net, or of a layer of a vision tower."""
        if _TOWER_LAYER.fullmatch(global_name(path)) is not None:
            return self._tower
        return self._net if all(hasattr(module, field) for field in self._net) else {}

    def numbers(self) -> list[object]:
        """The numbers that the layers have now."""
        return [getattr(layer(), "layer_number", None) for _, layer in self._found]

    def check(self) -> None:
        """Raises LayoutError where a layer's configuration says that the same bytes mean others
        than the family's rules take them for."""
        family = self._spec.family
        for path, layer in self._found if self._needed else ():
            config = getattr(layer(), "config", None)
            if config is None:
                continue
            for field, (value, text) in self._needed.items():
                # Fields of wsync's own families are of several versions of Megatron.
                if family.added and field in family.settings:
                    _check_field(config, path, field, family.name)
                _check_size(config, path, field, value, text)
        for path, part, needed in self._beside:
            holder = getattr(part(), "config", None) if needed is self._tower else part()
            for field, (value, text) in needed.items():
                _check_size(holder, path, field, value, text)


def _check_size(holder: object, path: str, field: str, value: object, text: str) -> None:
    """Raises LayoutError where a trainer's field has another value."""
    found = getattr(holder, field, value)
    if found != value:
        raise _core.LayoutError(f"{path}: the trainer's {field} is {found}, but {text}")


def _check_field(config: object, path: str, field: str, family: str) -> None:
    """Raises LayoutError for a setting of a user's family that no configuration has."""
    if not hasattr(config, field):
        raise _core.LayoutError(
            f"{path}: {type(config).__name__} has no field {field!r}, which the settings of the "
            f"family {family!r} name"
        )
