"""A model and the models that draft tokens with layers of its checkpoint, as one module.

Speculative decoding runs layers of multi-token prediction (MTP) as models of their own.  Trainers
deliver these layers with the model's, and a draft shares its embedding and its head with the model.
So a worker loads all of them in one update, as one module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class _WithDrafts(torch.nn.Module):
    """The model's tensors keep their paths.  The paths of a draft's own tensors begin with the
    draft's name."""

    def __init__(self, model: torch.nn.Module, drafts: Mapping[str, torch.nn.Module]) -> None:
        super().__init__()
        # the model's own dictionaries: an engine may bind other tensors in them
        vars(self).update(_parameters=model._parameters, _buffers=model._buffers)
        vars(self).update(_modules={**model._modules, **drafts}, _parts=[model, *drafts.values()])

    def load_weights(self, weights: Any) -> None:
        """Each model passes over the names of layers that it does not have."""
        for part in vars(self)["_parts"]:
            part.load_weights(weights)


def with_drafts(model: torch.nn.Module, drafts: Mapping[str, torch.nn.Module]) -> torch.nn.Module:
    """A module whose load_weights loads a model and its drafts, by name.  Its class has the name of
    the model's."""
    kind = type(type(model).__name__, (_WithDrafts,), {})
    made: torch.nn.Module = kind(model, drafts)
    return made
