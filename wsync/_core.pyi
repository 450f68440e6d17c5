"""The C core.  Offsets and sizes are bytes, times are seconds; `check` is called about every
50 ms during a wait and may raise to end it."""

from collections.abc import Callable, Sequence
from typing import Any, Final, Self, final

from _typeshed import structseq

__version__: Final[str]

Check = Callable[[], object] | None

class WsyncError(Exception):
    status: int
    native: int
    origin: str

class NoMemoryError(WsyncError, MemoryError): ...
class InvalidArgumentError(WsyncError, ValueError): ...
class LayoutError(WsyncError, ValueError): ...
class UnsupportedError(WsyncError, NotImplementedError): ...
class StateError(WsyncError, RuntimeError): ...
class DeadlineError(WsyncError, TimeoutError): ...
class PeerClosedError(WsyncError, ConnectionError): ...
class ProtocolError(WsyncError, ValueError): ...
class PeerRefusedError(WsyncError, PermissionError): ...
class RemoteError(WsyncError, RuntimeError): ...
class SystemCallError(WsyncError, OSError): ...
class DeviceError(WsyncError, RuntimeError): ...

# --- layouts and plans (csrc/python/layout.c, plan.c) ---------------------------------------

# (target name, target dtype, target shape, target start, source start (one per source axis),
#  extent (one per target axis), axes (source axis of each target axis, or -1), group)
_Map = tuple[str, str, Sequence[int], Sequence[int], Sequence[int], Sequence[int], Sequence[int], int]
# or with scale and offset: the target's elements are x * scale + offset, or as they are where both are 0; and then
# with steps, one for each target axis: the box takes every step-th index
Map = _Map | tuple[*_Map, float, float] | tuple[*_Map, float, float, Sequence[int]]
# (start in the full parameter, extent, start in the local tensor)
Region = tuple[Sequence[int], Sequence[int], Sequence[int]]

@final
class Shard(structseq[Any], tuple[int, int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...], str]):
    """A box of a tensor and where it lies."""
    __match_args__: Final = ("rank", "buffer", "offset", "start", "extent", "strides", "origin")
    rank: Final[int]
    buffer: Final[int]
    offset: Final[int]
    start: Final[tuple[int, ...]]
    extent: Final[tuple[int, ...]]
    strides: Final[tuple[int, ...]]
    """Bytes."""
    origin: Final[str]
    affine: Final[tuple[float, float]]
    """(scale, offset) that the box's elements are computed with; (0.0, 0.0): as they are."""
    steps: Final[tuple[int, ...]]
    """The box takes every step-th index of the tensor: start, start + step, ..."""

@final
class TensorInfo(structseq[Any], tuple[str, str, tuple[int, ...], int]):
    """A tensor of a layout."""
    __match_args__: Final = ("name", "dtype", "shape", "group")
    name: Final[str]
    dtype: Final[str]
    shape: Final[tuple[int, ...]]
    group: Final[int]

@final
class LayoutBuilder:
    def __new__(cls, rank: int = 0) -> Self: ...
    def add_tensors(self, names: Sequence[str], tensors: TensorTable, groups: Sequence[int] | None = None) -> None:
        """Buffer i holds the whole tensor names[i], as tensors[i] describes it."""
    def add_tensor(self, name: str, dtype: str, shape: Sequence[int], group: int = 0) -> None:
        """Makes a tensor known without adding a shard."""
    def add_shard(self, name: str, dtype: str, shape: Sequence[int], start: Sequence[int], extent: Sequence[int],
                  buffer: int, offset: int, strides: Sequence[int], origin: str = "", group: int = 0,
                  steps: Sequence[int] | None = None) -> None:
        """One box; offset and strides in bytes.  steps: it takes every step-th index of the tensor."""
    def add_parameter(self, origin: str, buffer: int, dtype: str, strides: Sequence[int],
                      regions: Sequence[Region], maps: Sequence[Map]) -> int:
        """Composes the regions of a local parameter (element strides) with the maps from the full parameter to
        target tensors.  The source dtype is `dtype`, which is also the layout's dtype of the tensor (a map's own dtype
        is used only where `dtype` is empty).  Returns the number of local elements that were mapped."""
    def build(self) -> Layout:
        """The layout; the builder is empty afterwards."""

@final
class Layout:
    @staticmethod
    def from_bytes(data: bytes, /) -> Layout:
        """Parses what to_bytes() made.  ProtocolError names the byte that is wrong."""
    @staticmethod
    def merge(layouts: Sequence[Layout], /) -> Layout:
        """The union of layouts.  LayoutError names the tensor and the two ranks that disagree."""
    def to_bytes(self) -> bytes: ...
    def names(self) -> list[str]: ...
    def tensor(self, index: int, /) -> TensorInfo: ...
    def shards(self, index: int, /) -> list[Shard]: ...
    tensor_count: Final[int]
    shard_count: Final[int]
    rank_count: Final[int]
    nbytes: Final[int]
    """Bytes of all tensors, each counted once and whole."""
    shard_nbytes: Final[int]
    """Bytes of all shards, replicas counted each time."""
    def buffer_count(self, rank: int = 0) -> int: ...
    def join(self, wanted: Layout | None = None, lent: bytes = ...) -> Layout:
        """What a process that reads the memory of all ranks sees of the tensors and boxes that `wanted` has (None:
        all): their shards on one rank, buffer b of rank r as number b + the buffers of the ranks before r.  Of equal
        boxes one is left, so that the ranks share the work.  lent: a byte for each number, 0 where that cannot be read;
        tensors that are wanted from such a buffer alone are left out."""
    def without(self, other: Layout, /) -> Layout:
        """The tensors that `other` lacks."""
    def beside(self, other: Layout, first: int) -> Layout:
        """Both layouts in one, where buffer b of `other` has become first + b."""
    def check_apart(self, buffers: BufferTable, /) -> None:
        """LayoutError, by name, where a byte belongs to shards of two buffers when buffer i lies at buffers[i]."""

PACK: Final[int]
LOCAL: Final[int]
UNPACK: Final[int]
ALL_BUFFERS: Final[int]  # of a route that there are sources of, in place of one
MAX_THREADS: Final[int]  # of a stream

# (source_buffer, destination_buffer, source_offset, destination_offset, row_count, transform,
#  extent, source_stride, destination_stride)
CopyTuple = tuple[int, int, int, int, int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]

@final
class Slot(structseq[int], tuple[int, int, int]):
    """Where a round lies in a worker's ring."""
    __match_args__: Final = ("offset", "nbytes", "wait_round")
    offset: Final[int]
    nbytes: Final[int]
    wait_round: Final[int]
    """The slot may be written once the worker has finished this round; -1: at once."""

@final
class Message(structseq[Any], tuple[int, tuple[int, ...], int, int, int]):
    """Equal bytes from one rank to one or more others in one round."""
    __match_args__: Final = ("source", "peers", "send_offset", "recv_offset", "nbytes")
    source: Final[int]
    peers: Final[tuple[int, ...]]
    send_offset: Final[int]
    recv_offset: Final[int]
    nbytes: Final[int]

@final
class Plan:
    def __new__(cls, source: Layout, destinations: Sequence[tuple[Layout, bool]],
                 workers: Sequence[tuple[int, int]], hosts: Sequence[int], rank: int, *,
                 round_nbytes: int = 0, ring_nbytes: int = 0, send_nbytes: int = 0, recv_nbytes: int = 0,
                 rounds_grow: bool = False) -> Self:
        """destinations: (layout, whole); workers: (destination, home rank); hosts: one per rank.  A whole destination
        takes each box of its layout in one piece.  rounds_grow: what cannot be cut may exceed round_nbytes."""
    round_count: Final[int]
    round_nbytes: Final[int]
    """Most bytes of a round for one worker, but for a larger tensor that stays whole."""
    send_nbytes: Final[int]
    recv_nbytes: Final[int]
    fingerprint: Final[int]
    stats: Final[dict[str, int]]
    unused: Final[list[int]]
    """Indices of the source's tensors that no worker reads, without empty ones."""
    def ring_nbytes(self, worker: int, /) -> int: ...
    def slot(self, worker: int, round: int, /) -> Slot: ...
    def messages(self, round: int, /) -> list[Message]: ...
    def copies(self, round: int, phase: int, /) -> list[CopyTuple]: ...
    def manifest(self, worker: int, /) -> Layout:
        """The layout of the worker's ring: rank 0, buffer = round, offsets from the ring's start, boxes contiguous."""

@final
class Route:
    """Copies that fill `destination` from `source` in one process, grouped by source buffer (round)."""
    def __new__(cls, source: Layout, destination: Layout) -> Self: ...
    buffer_count: Final[int]
    def copies(self, buffer: int, /) -> list[CopyTuple]: ...
    def nbytes(self, buffer: int, /) -> int:
        """Bytes that the copies of a source buffer write."""

# tensor, kind, reciprocal, rows and columns of a block (0: all of the tensor's), names of the codes,
# the scales, the second scale (NVFP4) and the shape (INT4), number of those that share a second
# scale (0: none), group
QuantiseRule = tuple[str, str, bool, int, int, str, str, str | None, str | None, int, int]

@final
class Quantiser:
    """What of the merged layout of all ranks one rank, which has so many buffers, quantises.  InvalidArgumentError or
    UnsupportedError, which name the tensor: see csrc/core/quantise/quantiser.h."""
    def __new__(cls, layout: Layout, rank: int, buffers: int, rules: Sequence[QuantiseRule]) -> Self: ...
    layout: Final[Layout]
    """The rank's shards: codes and scales, in the buffers after its own, and what is not quantised."""
    ends: Final[list[int]]
    """Where the image's buffers end; each begins where the one before ends."""
    constants: Final[bytes]
    """The bytes that the image begins with, and which never change."""
    image_nbytes: Final[int]
    """Bytes of the memory for codes and scales."""
    amax_count: Final[int]
    """Entries of the table of amaxes, a float32 each; the same on all ranks."""
    stats: Final[dict[str, int]]
    """Of all ranks, in bytes of weights: quantised_nbytes, and of those repeated_nbytes, which another rank that
    holds the same elements quantises, too."""

# --- torch exchange (csrc/python/tensor_table.c) ---------------------------

@final
class TensorTable:
    """Where tensors lie; keeps them and their storages alive.  Made by describe()."""
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> tuple[int, str, tuple[int, ...], tuple[int, ...], int]:
        """(address, dtype, shape, element strides, bytes spanned from the address)"""
    nbytes: Final[int]
    """Bytes of all elements."""
    gpu: Final[int | None]
    """The CUDA device that some of them lie on, or None."""
    known: Final[bool]
    """Whether everything is as the form says that describe() was given."""
    def form(self) -> TensorTable:
        """The same facts, to compare with later ones: keeps no tensor alive, and cannot be read from."""
    def differs(self, other: TensorTable, /) -> int | None:
        """The first tensor whose dtype, shape or strides are not those of the other table's, or None."""
    def joined(self, other: TensorTable, /) -> TensorTable:
        """A table of this one's tensors and the other's behind them; keeps all of them alive."""
    def moved(self, tensors: Sequence[Any], /) -> int | None:
        """The first of these tensors whose address, dtype, shape or strides are not what the table says, or None.
        There are as many as the table has."""
    def offsets(self, alignment: int, begin: int = 0, /) -> tuple[list[int], int]:
        """(starts, nbytes): the tensors one after another at multiples of `alignment`, a power of two up to 4096."""

def describe(tensors: Sequence[Any], names: Sequence[str] | None = None, gpu: bool = False,
             former: TensorTable | None = None) -> TensorTable:
    """Describes torch tensors without copying; names are for error messages.  With gpu they may lie on a GPU, all of
    those on the same one.  former: a table of them, or its form(), which says the same in less time where it holds."""

@final
class BufferTable:
    """Spans that buffer indices stand for while copies run.  `owner` is kept alive with it."""
    def __new__(cls, spans: Sequence[tuple[int, int]], owner: object = None) -> Self: ...
    @staticmethod
    def of(tensors: TensorTable, owner: object = None) -> BufferTable:
        """Span i covers what tensors[i] describes, and is kept alive with the table.  StateError names
        a tensor whose memory on a GPU is not there now."""
    def allocations(self) -> list[tuple[int, int, int, bool]]:
        """What the driver has allocated around the buffers on a GPU now, by address: (address, nbytes, identity, piece).
        identity: 0 where no other process can map it; else no other memory there has it while this is lent.  piece:
        can be lent beside its neighbours.  Addresses of the host are left out."""
    def spans(self) -> bytes:
        """All addresses and lengths, to compare with another table's."""
    def lend(self, allocations: Sequence[tuple[int, int, int, bool]], /) -> Memory:
        """Memory of a GPU to be lent to another process: pieces side by side, or one allocation that is none.  It keeps
        pieces from being given back.  StateError if one has been replaced since `allocations`."""
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> tuple[int, int]: ...

def pack(tensors: TensorTable, address: int, nbytes: int, offsets: Sequence[int], stream: Stream = ...) -> None:
    """Copies tensor i, contiguous, to address + offsets[i]: in this thread, without the GIL, or on a stream.
    What lies at address must stay until that has passed."""

def reserve_file(name: str, descriptor: int, nbytes: int, /) -> None:
    """Makes a new file nbytes long and takes the space on its device, where the file system can."""

def write_files(route: Route, first: int, last: int, sources: BufferTable, files: Sequence[tuple[str, int, int]]) -> int:
    """Runs the copies of source buffers [first, last) of a route, destination buffer i being the file files[i]:
    (name, descriptor, nbytes); in this thread, without the GIL.  Returns the bytes written."""

# --- memory and streams (csrc/python/memory.c, event.c, stream.c, buffer_table.c) -----------

@final
class Device:
    """Where memory and streams are made: the host or a GPU."""
    name: Final[str]
    """"host" or "cuda"."""
    uuid: Final[str]
    """"GPU-..."; "" for the host."""
    ordinal: Final[int]
    """Of the GPU in this process; -1: the host."""
    def memory_available(self) -> int:
        """Bytes that may still be allocated there now."""
    def settle(self) -> None:
        """Waits until a GPU has done everything that this process has given it, without an end."""
    mps: Final[bool]
    """Whether this process uses the GPU as a client of MPS, where the driver says so."""
    peers: Final[list[str]]
    """UUIDs of the other GPUs of this process whose memory it can map."""

def host() -> Device: ...

def gpu(uuid: str, libraries: Sequence[str] = (), cache: str | None = None) -> Device:
    """A GPU of this process, with its kernels compiled and loaded.  libraries: paths at which NVRTC may lie; cache:
    folder for compiled kernels.  UnsupportedError says why it cannot be used."""

@final
class Memory:
    """Memory that another process can map: of a GPU, or of the host (a sealed memfd), mapped and faulted in.
    control: it holds events and nothing else."""
    def __new__(cls, nbytes: int, device: Device | None = None, control: bool = False) -> Self: ...
    @staticmethod
    def from_fd(fd: int, nbytes: int, device: Device | None = None) -> Memory: ...
    @staticmethod
    def borrow(fd: int, device: Device | None = None) -> Memory:
        """Maps shared memory for reading alone, all that a descriptor holds now.  PeerRefusedError: it is none."""
    def fileno(self) -> int: ...
    def retire(self) -> bool:
        """Whether what BufferTable.lend has lent may be given back: no process has it open whom that would hurt, and
        from now on none opens it."""
    address: Final[int]
    nbytes: Final[int]
    def __buffer__(self, flags: int, /) -> memoryview: ...  # writable bytes; of the host only

@final
class Event:
    def __new__(cls, memory: Memory, offset: int) -> Self: ...
    def wait(self, value: int, timeout: float, check: Check = None) -> None:
        """Waits until the event is at least `value`; DeadlineError after `timeout` seconds."""
    @property
    def value(self) -> int: ...

@final
class Stream:
    def __new__(cls, threads: int = 1, device: Device | None = None) -> Self: ...
    device: Final[Device]
    def copy(self, copies: Plan | Route, index: int, phase: int, sources: BufferTable, destinations: BufferTable) -> int:
        """Enqueues the copies of a plan's round and phase, or of a route's buffer (phase ignored).  Returns the bytes
        written.  Everything is kept alive until the stream has passed."""
    def quantise(self, quantiser: Quantiser, sources: BufferTable, results: BufferTable, codes: bool) -> None:
        """Enqueues one pass of a quantiser over its rank's parameters.  results: the spans of the image and of the
        table of amaxes; codes: codes and scales are written into the image, else the amaxes of pieces are merged
        into the table, which begins with 0.  Everything is kept alive until the stream has passed."""
    def record(self, event: Event, value: int) -> None:
        """Enqueues: the event becomes `value` once everything enqueued before has happened."""
    def wait(self, event: Event, value: int) -> None:
        """What follows starts once the event is at least `value`."""
    def lead(self, other: int, /) -> None:
        """What another stream of the GPU (torch's cuda_stream) is given from now on starts after what is enqueued here
        by now.  Nothing on the host."""
    def abandon(self, timeout: float = 60.0) -> bool:
        """Drops what has not begun, gives up waits, and returns when nothing that was enqueued runs any more; False if
        a GPU has not come to that within `timeout` seconds (at most 60): what was enqueued keeps all that it uses."""
    def look(self) -> None:
        """Raises what has ended its GPU's work for good; waits for nothing."""
    def synchronize(self, timeout: float, check: Check = None) -> None:
        """Waits for what is enqueued; DeadlineError after `timeout` seconds."""
    def trace(self, capacity: int, /) -> list[tuple[int, int, int, int]]:
        """(index, phase, begin, end) of the copies that ran since the last call, in ns of CLOCK_MONOTONIC; those of the
        next calls of copy that write anything are noted, up to `capacity` of them (0: none).  For an idle stream."""
    def close(self) -> None:
        """Waits for what is enqueued, up to the first wait whose event has not come, and ends the threads."""

# --- sessions (csrc/python/exporter.c, importer.c) -------------------------------------------

@final
class Exporter:
    def __new__(cls, directory: str | None = None) -> Self: ...
    address: Final[str]
    """What a worker needs to connect: "<token in hex>@<socket path>"."""
    @property
    def loaded(self) -> int:
        """Rounds of this update that the worker has finished, as far as is known without waiting."""
    @property
    def worker_uuid(self) -> str:
        """The GPU that the worker is on, once it has been accepted; "" for the host."""
    def accept(self, timeout: float, check: Check = None) -> bytes:
        """Waits for the worker; returns what it says of itself."""
    def attach(self, ring: Memory, manifest: bytes, timeout: float, check: Check = None) -> None:
        """Gives the worker a ring and the manifest of what will lie in it."""
    def lend(self, memory: Memory, timeout: float, check: Check = None) -> int:
        """Lends a segment of memory to the worker until a bind that does not name it; returns its number."""
    def bind(self, bindings: bytes, timeout: float, check: Check = None) -> None:
        """Says where the manifest's buffers lie: of each the segment (2**64 - 1: none), offset and size, three
        uint64."""
    def begin(self, update: int, rounds: int, timeout: float, check: Check = None) -> None:
        """Starts an update."""
    def acquire(self, wait_round: int, stream: Stream | None, timeout: float, check: Check = None) -> None:
        """Has the stream wait until the worker has finished a round (None: waits here); -1: nothing to wait for."""
    def look(self) -> None:
        """Raises what the worker has said, or that it is gone; waits for nothing, and does nothing
        while another call is under way."""
    def post(self, round: int, stream: Stream, timeout: float, check: Check = None) -> None:
        """Announces a round, ready when the stream gets here."""
    def prepared(self, timeout: float, check: Check = None) -> tuple[int, int, int]:
        """(tensors, bytes, nanoseconds of the audit)"""
    def commit(self, timeout: float, check: Check = None, park: bool = False) -> None:
        """Ends the update; with park, park() has to follow."""
    def park(self, timeout: float, check: Check = None) -> None:
        """Gives the ring's memory back on both sides until the next begin.  PeerRefusedError: it
        stays where it is, because somebody looks at it; the session goes on."""
    def abort(self, text: str) -> None:
        """Ends the update badly and the session with it."""
    def close(self) -> None: ...

@final
class Importer:
    def __new__(cls, address: str, blob: bytes, timeout: float, device: Device | None = None) -> Self: ...
    def begin(self, timeout: float, check: Check = None) -> tuple[int, int]:
        """(update, rounds)"""
    @property
    def generation(self) -> int:
        """Counts attaches: a change means that ring and manifest are new ones."""
    @property
    def ring(self) -> Memory: ...
    @property
    def manifest(self) -> bytes: ...
    @property
    def bound(self) -> BufferTable | None:
        """Where the manifest's buffers lie in what is lent, kept mapped; None: in the ring."""
    @property
    def segments(self) -> tuple[Memory, ...]:
        """What is lent, in the order lent."""
    def take(self, round: int, stream: Stream | None, timeout: float, check: Check = None) -> None:
        """Has the stream wait until a round lies in the ring (None: waits here)."""
    def wait(self, round: int, timeout: float, check: Check = None) -> None:
        """Waits here until a round that was taken lies in the ring."""
    @property
    def arrived(self) -> int:
        """Rounds of this update that were taken and lie in the ring, as far as is known."""
    def done(self, round: int, stream: Stream | None, timeout: float, check: Check = None) -> None:
        """Gives the slot back when the stream gets here (None: now)."""
    def prepared(self, tensors: int, nbytes: int, audit_ns: int, timeout: float, check: Check = None) -> None:
        """Says that everything is loaded."""
    def verdict(self, timeout: float, check: Check = None) -> None:
        """Waits for the commit; where that asks for it the ring is parked: no view of it, and
        no buffer, can be had before the next begin."""
    def fail(self, text: str) -> None:
        """Tells the trainer that the update failed here; ends the session."""
    def close(self) -> None: ...

# --- exchange between ranks (csrc/python/exchange.c) ----------------------------------------

@final
class Exchange:
    """Messages between the ranks of a plan, a step for each round."""
    @staticmethod
    def shared(rank: int, ranks: int, staging_nbytes: int, directory: str | None = None,
               device: Device | None = None) -> Exchange:
        """Ranks of one host, which read each other's send staging."""
    @staticmethod
    def nccl(rank: int, ranks: int, send_nbytes: int, recv_nbytes: int, timeout: float,
             device: Device | None) -> Exchange:
        """Ranks with a GPU each; streams wait for what NCCL moves, not the host.  A round may take
        timeout seconds.  UnsupportedError: there is no NCCL; DeviceError: it fails."""
    @staticmethod
    def nccl_address(device: Device | None) -> str:
        """The address that nccl() will have on a rank other than 0.  UnsupportedError: there is no NCCL."""
    name: Final[str]
    """Either "shared" or "nccl"."""
    address: Final[str]
    """Text to hand to all ranks."""
    @property
    def nbytes(self) -> int:
        """Bytes of this rank's own staging: both halves."""
    def connect(self, addresses: Sequence[str], timeout: float, check: Check = None) -> None:
        """Meets the other ranks; addresses[i] is rank i's address."""
    def begin(self, plan: Plan) -> None:
        """Starts an update."""
    def acquire(self, round: int, timeout: float, check: Check = None) -> None:
        """Waits until the send staging of a round may be written."""
    def spans(self, round: int) -> BufferTable:
        """Where the messages of a round are packed to and unpacked from."""
    def post(self, round: int, stream: Stream) -> None:
        """What was packed is on its way when the stream gets here."""
    def wait(self, round: int, stream: Stream, timeout: float, check: Check = None) -> None:
        """Waits until what the others sent can be read by what the stream is given next."""
    def release(self, round: int, stream: Stream) -> None:
        """What the others sent has been read when the stream gets here."""
    def check(self) -> None:
        """Raises what has gone wrong by itself, but while a wait is under way, which raises it.  Once
        a stream has passed all rounds, only this, on all ranks, says that their bytes are right."""
    def park(self) -> None:
        """Gives staging that is this rank's alone back until the next update."""
    def close(self) -> None:
        """Leaves; the others see an end in the middle of an update as PeerClosedError."""

# --- the GPU's memory for torch (csrc/python/exportable.c) -------------------------------------
#
# The module's file also exports two functions of C, of the form that torch.cuda.memory.CUDAPluggableAllocator calls:
# void *wsync_exportable_alloc(ssize_t nbytes, int ordinal, cudaStream_t stream), NULL where there is none, and
# void wsync_exportable_free(void *at, ssize_t nbytes, int ordinal, cudaStream_t stream), which waits for the stream.

def exportable_check(ordinal: int, /) -> None:
    """Raises UnsupportedError unless wsync_exportable_alloc can be had from a GPU (its place in cuda_devices)."""

def exportable_refusal() -> str:
    """Why wsync_exportable_alloc has last given this thread none; "" if it has since."""

# --- the GPU (csrc/python/device.c) -----------------------------------------------------------

def cuda_devices() -> tuple[int, list[tuple[str, str, int, tuple[int, int]]]]:
    """The CUDA version that the driver speaks (12080 is 12.8), and (uuid, name, bytes of memory,
    compute capability) of each GPU that this process sees.  Loads and initialises the driver.
    UnsupportedError says why there is no GPU to use."""

def nccl_library(libraries: Sequence[str] = ()) -> tuple[int, str]:
    """(version, path) of NCCL, which the first call loads: 22809 is 2.28.9.  libraries: paths at which it may lie,
    tried after WSYNC_NCCL_LIB and what the process has loaded and before the system's.  UnsupportedError says why there
    is none to use."""

def host_register(address: int, nbytes: int, device: Device, owner: object) -> object:
    """Has a GPU reach memory of the host for as long as the result lives, which keeps owner.  Nothing to do for the
    host as the device.  DeviceError if the driver refuses it."""

@final
class IpcMemory:
    """Memory of GPU `ordinal` (its place in cuda_devices) that processes without wsync open by its handle: an
    allocation of its own, of at least nbytes.  Not cleared."""
    def __new__(cls, ordinal: int, nbytes: int) -> Self: ...
    address: Final[int]
    nbytes: Final[int]
    handle: Final[bytes]
    def close(self) -> None:
        """Frees it.  No work on it may be under way, and nobody may have it open."""

def checksum(data: Any, /) -> int:
    """64-bit checksum (FNV-style over 8-byte words) of a contiguous buffer, or of the one contiguous tensor of a
    TensorTable, which lies in host memory; 0 is never returned."""

def count_down(counter: Any, least: int, /) -> bool:
    """Takes 1 from an integer of 4 or 8 bytes that other processes change too, unless it is `least` or less; whether
    it did."""
