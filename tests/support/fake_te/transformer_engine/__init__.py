"""A stand-in for TransformerEngine: parameters under its names, nothing that computes.

Megatron-Core's own wrappers run on top of it, so a model built from their layer specs has the
parameter names, shapes and attributes of a TransformerEngine model.  Attributes follow
TransformerEngine's modules, including what is wrong there: every weight calls itself parallel,
and a weight that is not row-parallel calls dimension 0 cut.

Whatever else Megatron-Core imports from the package is there as an empty class.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "2.9.0"
__path__: list[str] = []


class _Anything(type):
    """Classes that have every attribute."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _Open(types.ModuleType):
    """A module in which every name can be found."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Anything(name, (), {"__module__": self.__name__})
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path, target=None):
        if not fullname.startswith(__name__ + "."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        return _Open(spec.name)

    def exec_module(self, module):
        from support import te_modules

        place = module.__name__.removeprefix(__name__ + ".")
        for value in te_modules.HOMES.get(place, ()):
            setattr(module, value.__name__, value)
        if place == "pytorch":
            for name in ("distributed", "fp8", "ops"):
                importlib.import_module(f"{module.__name__}.{name}")


sys.meta_path.append(_Finder())

from transformer_engine import common, pytorch  # noqa: E402, F401

importlib.import_module("transformer_engine.common.recipe")
