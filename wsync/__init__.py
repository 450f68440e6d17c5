"""Moves freshly trained weights from sharded trainers into running inference engines.

Names are imported when they are first used, so that `import wsync` needs neither torch nor numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wsync import disk as disk
    from wsync import engine as engine
    from wsync import fsdp as fsdp
    from wsync import layout as layout
    from wsync import megatron as megatron
    from wsync._core import DeadlineError as DeadlineError
    from wsync._core import DeviceError as DeviceError
    from wsync._core import InvalidArgumentError as InvalidArgumentError
    from wsync._core import Layout as Layout
    from wsync._core import LayoutError as LayoutError
    from wsync._core import NoMemoryError as NoMemoryError
    from wsync._core import PeerClosedError as PeerClosedError
    from wsync._core import PeerRefusedError as PeerRefusedError
    from wsync._core import Plan as Plan
    from wsync._core import ProtocolError as ProtocolError
    from wsync._core import RemoteError as RemoteError
    from wsync._core import StateError as StateError
    from wsync._core import SystemCallError as SystemCallError
    from wsync._core import UnsupportedError as UnsupportedError
    from wsync._core import WsyncError as WsyncError
    from wsync._core import __version__ as __version__
    from wsync.bucket import FlattenedTensorBucket as FlattenedTensorBucket
    from wsync.bucket import FlattenedTensorMetadata as FlattenedTensorMetadata
    from wsync.disk import DiskSync as DiskSync
    from wsync.handles.base import EngineHandle as EngineHandle
    from wsync.handles.base import handle as handle
    from wsync.options import Options as Options
    from wsync.report import Report as Report
    from wsync.sync import Sync as Sync
    from wsync.sync import connect as connect
    from wsync.updater import UpdateWeightFromDisk as UpdateWeightFromDisk
    from wsync.updater import UpdateWeightFromDistributed as UpdateWeightFromDistributed
    from wsync.updater import UpdateWeightFromTensor as UpdateWeightFromTensor

_HOMES = {
    "wsync._core": (
        "DeadlineError",
        "DeviceError",
        "InvalidArgumentError",
        "Layout",
        "LayoutError",
        "NoMemoryError",
        "PeerClosedError",
        "PeerRefusedError",
        "Plan",
        "ProtocolError",
        "RemoteError",
        "StateError",
        "SystemCallError",
        "UnsupportedError",
        "WsyncError",
        "__version__",
    ),
    "wsync.disk": ("DiskSync",),
    "wsync.handles.base": ("EngineHandle", "handle"),
    "wsync.bucket": ("FlattenedTensorBucket", "FlattenedTensorMetadata"),
    "wsync.options": ("Options",),
    "wsync.report": ("Report",),
    "wsync.sync": ("Sync", "connect"),
    "wsync.updater": (
        "UpdateWeightFromDisk",
        "UpdateWeightFromDistributed",
        "UpdateWeightFromTensor",
    ),
}
_SUBMODULES = ("disk", "engine", "fsdp", "layout", "megatron")
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [*_HOME_OF, *_SUBMODULES]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"wsync.{name}")
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'wsync' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
