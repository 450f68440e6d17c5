"""The C core.  Offsets and sizes are bytes, and times are seconds.  `check` is called about every 50 ms during a wait;
it may raise to end the wait."""

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
# or with scale and offset: the target's elements are x * scale + offset, or unchanged if both are 0; and then with
# steps, one for each target axis: the box takes every step-th index
Map = _Map | tuple[*_Map, float, float] | tuple[*_Map, float, float, Sequence[int]]
# (start in the full parameter, extent, start in the local tensor)
Region = tuple[Sequence[int], Sequence[int], Sequence[int]]

@final
class Shard(structseq[Any], tuple[int, int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...], str]):
    """A box of a tensor, and its place in a buffer."""
    __match_args__: Final = ("rank", "buffer", "offset", "start", "extent", "strides", "origin")
    rank: Final[int]
    buffer: Final[int]
    offset: Final[int]
    start: Final[tuple[int, ...]]
    extent: Final[tuple[int, ...]]
    strides: Final[tuple[int, ...]]
    """In bytes."""
    origin: Final[str]
    affine: Final[tuple[float, float]]
    """(scale, offset): an element arrives as x * scale + offset.  (0.0, 0.0): elements are copied."""
    steps: Final[tuple[int, ...]]
    """The box takes every step-th index of the tensor from `start` on."""

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
        """Adds a tensor without a shard."""
    def add_shard(self, name: str, dtype: str, shape: Sequence[int], start: Sequence[int], extent: Sequence[int],
                  buffer: int, offset: int, strides: Sequence[int], origin: str = "", group: int = 0,
                  steps: Sequence[int] | None = None) -> None:
        """Adds one box; offset and strides are bytes.  steps: the box takes every step-th index of the tensor."""
    def add_parameter(self, origin: str, buffer: int, dtype: str, strides: Sequence[int],
                      regions: Sequence[Region], maps: Sequence[Map]) -> int:
        """Composes the regions of a local parameter (element strides) with the maps from the full parameter to target
        tensors.  `dtype` is the source dtype and also the layout's dtype of the tensor; if it is empty, the map's own
        dtype is used.  Returns the number of local elements that were mapped."""
    def build(self) -> Layout:
        """Returns the layout; the builder is empty afterwards."""

@final
class Layout:
    @staticmethod
    def from_bytes(data: bytes, /) -> Layout:
        """Parses the bytes of to_bytes().  ProtocolError names the first wrong byte."""
    @staticmethod
    def merge(layouts: Sequence[Layout], /) -> Layout:
        """Returns the union of layouts.  LayoutError names the tensor and the two ranks that disagree."""
    def to_bytes(self) -> bytes: ...
    def names(self) -> list[str]: ...
    def tensor(self, index: int, /) -> TensorInfo: ...
    def shards(self, index: int, /) -> list[Shard]: ...
    tensor_count: Final[int]
    shard_count: Final[int]
    rank_count: Final[int]
    nbytes: Final[int]
    """Bytes of all tensors; each counts once and whole."""
    shard_nbytes: Final[int]
    """Bytes of all shards; replicas count each time."""
    def buffer_count(self, rank: int = 0) -> int: ...
    def join(self, wanted: Layout | None = None, lent: bytes = ...) -> Layout:
        """Returns the tensors and boxes of `wanted` (None: all) as seen by a process that reads the memory of all
        ranks.  All shards are on one rank; buffer b of rank r becomes b + the number of buffers of the ranks before r.
        Of equal boxes only one stays, so that the ranks share the work.  lent: a byte for each buffer, 0 if the buffer
        cannot be read.  A tensor is left out if it is wanted only from such buffers."""
    def without(self, other: Layout, /) -> Layout:
        """Returns the tensors that `other` lacks."""
    def beside(self, other: Layout, first: int) -> Layout:
        """Joins both layouts; buffer b of `other` becomes first + b."""
    def check_apart(self, buffers: BufferTable, /) -> None:
        """Raises LayoutError, which names the tensors, if shards of two buffers share a byte when buffer i is at
        buffers[i]."""

PACK: Final[int]
LOCAL: Final[int]
UNPACK: Final[int]
ALL_BUFFERS: Final[int]  # index for Stream.copy: all buffers of a route that have sources
MAX_THREADS: Final[int]  # most threads of a stream

# (source_buffer, destination_buffer, source_offset, destination_offset, row_count, transform,
#  extent, source_stride, destination_stride)
CopyTuple = tuple[int, int, int, int, int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]

@final
class Slot(structseq[int], tuple[int, int, int]):
    """The place of a round in a worker's ring."""
    __match_args__: Final = ("offset", "nbytes", "wait_round")
    offset: Final[int]
    nbytes: Final[int]
    wait_round: Final[int]
    """The slot may be written once the worker has finished the round of this number.  If the number is -1, the slot
    may be written at once."""

@final
class Message(structseq[Any], tuple[int, tuple[int, ...], int, int, int]):
    """The same bytes from one rank to one or more others in one round."""
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
        takes each box of its layout in one piece.  rounds_grow: a piece that cannot be cut may exceed round_nbytes."""
    round_count: Final[int]
    round_nbytes: Final[int]
    """Most bytes of a round for one worker, except if a larger tensor stays whole."""
    send_nbytes: Final[int]
    recv_nbytes: Final[int]
    fingerprint: Final[int]
    stats: Final[dict[str, int]]
    unused: Final[list[int]]
    """Indices of the source's non-empty tensors that no worker reads."""
    def ring_nbytes(self, worker: int, /) -> int: ...
    def slot(self, worker: int, round: int, /) -> Slot: ...
    def messages(self, round: int, /) -> list[Message]: ...
    def copies(self, round: int, phase: int, /) -> list[CopyTuple]: ...
    def manifest(self, worker: int, /) -> Layout:
        """Returns the layout of the worker's ring: rank 0, buffer = round, offsets from the ring's start, and
        contiguous boxes."""

@final
class Route:
    """Copies that fill `destination` from `source` in one process, grouped by source buffer (round)."""
    def __new__(cls, source: Layout, destination: Layout) -> Self: ...
    buffer_count: Final[int]
    def copies(self, buffer: int, /) -> list[CopyTuple]: ...
    def nbytes(self, buffer: int, /) -> int:
        """Returns the bytes that the copies of a source buffer write."""

# tensor; kind; reciprocal; rows and columns of a block (0: all of the tensor's); names of the codes, of the scales, of
# the second scale (NVFP4) and of the shape (INT4); number of tensors that share a second scale (0: none); group
QuantiseRule = tuple[str, str, bool, int, int, str, str, str | None, str | None, int, int]

@final
class Quantiser:
    """The part of all ranks' merged layout that one rank quantises; the rank has `buffers` buffers.
    InvalidArgumentError and UnsupportedError name the tensor; see csrc/core/quantise/quantiser.h."""
    def __new__(cls, layout: Layout, rank: int, buffers: int, rules: Sequence[QuantiseRule]) -> Self: ...
    layout: Final[Layout]
    """The rank's shards: codes and scales, in the buffers after its own, and all shards that are not quantised."""
    ends: Final[list[int]]
    """The ends of the image's buffers; each buffer begins where the one before it ends."""
    constants: Final[bytes]
    """The image's first bytes, which never change."""
    image_nbytes: Final[int]
    """Bytes of the memory for codes and scales."""
    amax_count: Final[int]
    """Entries of the table of amaxes, one float32 each; the same on all ranks."""
    stats: Final[dict[str, int]]
    """quantised_nbytes: bytes of the weights that all ranks quantise.  repeated_nbytes: the part of these bytes that
    several ranks quantise, because they hold the same elements."""

# --- torch exchange (csrc/python/tensor_table.c) ---------------------------

@final
class TensorTable:
    """The memory of tensors; keeps the tensors and their storages alive.  Made by describe()."""
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> tuple[int, str, tuple[int, ...], tuple[int, ...], int]:
        """(address, dtype, shape, element strides, bytes spanned from the address)"""
    nbytes: Final[int]
    """Bytes of all elements."""
    gpu: Final[int | None]
    """The CUDA device of the tensors.  None: all are on the host."""
    known: Final[bool]
    """Whether all facts match the `former` that describe() was given."""
    def form(self) -> TensorTable:
        """Returns a table of the same facts, only to compare later tables with.  It keeps no tensor alive."""
    def differs(self, other: TensorTable, /) -> int | None:
        """Returns the index of the first tensor whose dtype, shape or strides differ from those in `other`; None if all
        agree."""
    def joined(self, other: TensorTable, /) -> TensorTable:
        """Returns a table of this table's tensors and then the other's; keeps all of them alive."""
    def moved(self, tensors: Sequence[Any], /) -> int | None:
        """Returns the index of the first tensor whose address, dtype, shape or strides differ from the table's; None if
        all agree.  There must be as many tensors as in the table."""
    def offsets(self, alignment: int, /) -> tuple[list[int], int]:
        """(starts, nbytes): places the tensors one after another at multiples of `alignment`, a power of two up to
        4096."""

def describe(tensors: Sequence[Any], names: Sequence[str] | None = None, gpu: bool = False,
             former: TensorTable | None = None) -> TensorTable:
    """Describes torch tensors without copying; `names` are for error messages.  gpu: tensors may be on a GPU, all of
    them on the same one.  former: a table of the same tensors, or its form(), which saves time if it still holds.  If a
    table's own tensors are given, and are where they were, it is returned itself."""

@final
class BufferTable:
    """The memory that buffer indices refer to while copies run.  Keeps `owner` alive."""
    def __new__(cls, spans: Sequence[tuple[int, int]], owner: object = None) -> Self: ...
    @staticmethod
    def of(tensors: TensorTable, owner: object = None, ask: bool = True) -> BufferTable:
        """Span i covers tensors[i].  Keeps the tensors alive.  StateError names a tensor whose GPU memory is
        not there now.  ask: False if the caller knows that all is there."""
    def allocations(self) -> list[tuple[int, int, int, bool]]:
        """Returns the allocations that `of` found around the buffers on a GPU, by address: (address, nbytes, identity,
        piece).  identity: unique among other memory there while this is lent; 0 if no other process can map it.  piece:
        whether it can be lent together with its neighbours.  Addresses of the host are left out."""
    malloced: Final[bool]
    """Whether all GPU memory that `of` found was made by cudaMalloc.  Other memory may be unmapped under its tensors."""
    def spans(self) -> bytes:
        """Returns all addresses and lengths, to compare with another table's."""
    def lend(self, allocations: Sequence[tuple[int, int, int, bool]], /) -> Memory:
        """Makes memory of a GPU that can be lent to another process: adjacent pieces, or one allocation that is not a
        piece.  While it lives, pieces are not given back.  StateError: an allocation was replaced since
        `allocations`."""
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> tuple[int, int]: ...

def pack(tensors: TensorTable, address: int, nbytes: int, offsets: Sequence[int]) -> None:
    """Copies tensor i, contiguous, to address + offsets[i], in this thread, without the GIL."""

def reserve_file(name: str, descriptor: int, nbytes: int, /) -> None:
    """Makes a new file of nbytes and reserves the space on its device, if the file system can."""

def write_files(route: Route, first: int, last: int, sources: BufferTable, files: Sequence[tuple[str, int, int]]) -> int:
    """Runs the copies of source buffers [first, last) of a route in this thread, without the GIL.  Destination buffer i
    is the file files[i]: (name, descriptor, nbytes).  Returns the bytes written."""

# --- memory and streams (csrc/python/memory.c, event.c, stream.c, buffer_table.c) -----------

@final
class Device:
    """A place for memory and streams: the host or a GPU."""
    name: Final[str]
    """"host" or "cuda"."""
    uuid: Final[str]
    """"GPU-...".  The host has ""."""
    ordinal: Final[int]
    """The GPU's number in this process.  The host has -1."""
    def memory_available(self) -> int:
        """Returns the bytes that may still be allocated there now."""
    def settle(self) -> None:
        """Waits, without a deadline, until a GPU has finished all work of this process."""
    mps: Final[bool]
    """Whether this process uses the GPU as a client of MPS, if the driver reports that."""
    peers: Final[list[str]]
    """UUIDs of this process's other GPUs whose memory it can map."""

def host() -> Device: ...

def gpu(uuid: str, libraries: Sequence[str] = (), cache: str | None = None) -> Device:
    """Returns a GPU of this process, with its kernels compiled and loaded.  libraries: possible paths of NVRTC.  cache:
    folder for compiled kernels.  UnsupportedError says why the GPU cannot be used."""

@final
class Memory:
    """Memory that another process can map: memory of a GPU, or of the host (a sealed memfd), mapped and faulted in.
    control: it holds only events."""
    def __new__(cls, nbytes: int, device: Device | None = None, control: bool = False) -> Self: ...
    @staticmethod
    def from_fd(fd: int, nbytes: int, device: Device | None = None) -> Memory: ...
    @staticmethod
    def borrow(fd: int, device: Device | None = None) -> Memory:
        """Maps shared memory read-only, with all bytes that the descriptor has now.  PeerRefusedError: `fd` is not
        shared memory."""
    def fileno(self) -> int: ...
    def retire(self) -> bool:
        """Returns whether memory of BufferTable.lend may be given back, because no process that needs it has it open.
        If this returns True, no process can open the memory from now on."""
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
        written.  Keeps the plan or route and both tables alive until the stream has run the copies."""
    def quantise(self, quantiser: Quantiser, sources: BufferTable, results: BufferTable, codes: bool) -> None:
        """Enqueues one pass of a quantiser over its rank's parameters.  results: the spans of the image and of the
        table of amaxes.  codes: True writes codes and scales into the image; False merges the amaxes of pieces into the
        table, which begins with 0.  Keeps the quantiser and both tables alive until the stream has run the pass."""
    def record(self, event: Event, value: int) -> None:
        """Sets the event to `value` once all earlier work of the stream is done."""
    def wait(self, event: Event, value: int) -> None:
        """Makes later work of the stream wait until the event is at least `value`."""
    def abandon(self, timeout: float = 60.0) -> bool:
        """Drops work that has not begun, gives up waits, and returns once none of the enqueued work runs any more.
        Returns False if a GPU needs longer than `timeout` seconds (at most 60); its work then keeps what it uses."""
    def look(self) -> None:
        """If an error has ended all work on the stream's GPU, raises it.  Waits for nothing."""
    def synchronize(self, timeout: float, check: Check = None) -> None:
        """Waits for the enqueued work; DeadlineError after `timeout` seconds."""
    def trace(self, capacity: int, /) -> list[tuple[int, int, int, int]]:
        """Returns (index, phase, begin, end), in ns of CLOCK_MONOTONIC, of the copies that ran since the last call.
        The next `capacity` calls of copy that write anything are recorded (0: none).  Call it on an idle stream."""
    def close(self) -> None:
        """Waits for the enqueued work, up to the first wait whose event has not come, and ends the threads."""

# --- sessions (csrc/python/exporter.c, importer.c) -------------------------------------------

@final
class Exporter:
    def __new__(cls, directory: str | None = None) -> Self: ...
    address: Final[str]
    """The address for a worker to connect to: "<token in hex>@<socket path>"."""
    @property
    def loaded(self) -> int:
        """Rounds of this update that the worker is known to have finished; waits for nothing."""
    @property
    def worker_uuid(self) -> str:
        """The UUID of the worker's GPU, known once the worker has been accepted.  "": the worker uses the host."""
    def accept(self, timeout: float, check: Check = None) -> bytes:
        """Waits for the worker; returns its first message."""
    def attach(self, ring: Memory, manifest: bytes, timeout: float, check: Check = None) -> None:
        """Gives the worker a ring, and the manifest of the ring's contents."""
    def lend(self, memory: Memory, timeout: float, check: Check = None) -> int:
        """Lends a segment of memory to the worker, until a call of bind leaves it out; returns its number."""
    def bind(self, bindings: bytes, timeout: float, check: Check = None) -> None:
        """Gives the places of the manifest's buffers: for each, three uint64 with segment (2**64 - 1: none), offset and
        size."""
    def begin(self, update: int, rounds: int, timeout: float, check: Check = None) -> None:
        """Starts an update."""
    def begun(self, timeout: float, check: Check = None) -> None:
        """Waits until the worker has seen the start, and has mapped all that was lent before it."""
    def acquire(self, wait_round: int, stream: Stream | None, timeout: float, check: Check = None) -> None:
        """Makes the stream wait until the worker has finished a round.  If `stream` is None, waits here.  If the round
        is -1, waits for nothing."""
    def look(self) -> None:
        """If the worker has failed or is gone, raises an error that says so.  Waits for nothing, and does nothing
        during another call."""
    def post(self, round: int, stream: Stream, timeout: float, check: Check = None) -> None:
        """Announces a round, which is ready when the stream gets here."""
    def prepared(self, timeout: float, check: Check = None) -> tuple[int, int, int]:
        """Waits until the worker has loaded everything; returns (tensors, bytes, nanoseconds of the audit)."""
    def commit(self, timeout: float, check: Check = None, park: bool = False) -> None:
        """Ends the update; with `park`, park() must follow."""
    def park(self, timeout: float, check: Check = None) -> None:
        """Gives the ring's memory back on both sides until the next begin.  PeerRefusedError: somebody has a view of
        the memory, so it stays; the session goes on."""
    def abort(self, text: str) -> None:
        """Ends the update with an error, and the session with it."""
    def close(self) -> None: ...

@final
class Importer:
    def __new__(cls, address: str, blob: bytes, timeout: float, device: Device | None = None) -> Self: ...
    def begin(self, timeout: float, check: Check = None) -> tuple[int, int]:
        """Waits for an update; returns (update, rounds)."""
    @property
    def generation(self) -> int:
        """How often a ring was attached.  If this number changes, ring and manifest are new."""
    @property
    def ring(self) -> Memory: ...
    @property
    def manifest(self) -> bytes: ...
    @property
    def bound(self) -> BufferTable | None:
        """The places of the manifest's buffers in lent memory, which stays mapped.  None: the buffers are in the
        ring."""
    @property
    def segments(self) -> tuple[Memory, ...]:
        """The lent segments, in the order in which they were lent."""
    def take(self, round: int, stream: Stream | None, timeout: float, check: Check = None) -> None:
        """Makes the stream wait until a round is in the ring (None: waits here)."""
    def wait(self, round: int, timeout: float, check: Check = None) -> None:
        """Waits here until a round that was taken is in the ring."""
    @property
    def arrived(self) -> int:
        """Rounds of this update that were taken and are known to be in the ring."""
    def done(self, round: int, stream: Stream | None, timeout: float, check: Check = None) -> None:
        """Frees the round's slot when the stream gets here (None: now)."""
    def prepared(self, tensors: int, nbytes: int, audit_ns: int, timeout: float, check: Check = None) -> None:
        """Tells the trainer that everything is loaded."""
    def verdict(self, timeout: float, check: Check = None) -> None:
        """Waits for the commit.  If the commit asks for it, the ring is parked: before the next begin, it has neither
        views nor buffers."""
    def fail(self, text: str) -> None:
        """Tells the trainer that the update failed here; ends the session."""
    def close(self) -> None: ...

# --- exchange between ranks (csrc/python/exchange.c) ----------------------------------------

@final
class Exchange:
    """Messages between the ranks of a plan, one step for each round."""
    @staticmethod
    def shared(rank: int, ranks: int, staging_nbytes: int, directory: str | None = None,
               device: Device | None = None) -> Exchange:
        """Makes the exchange of ranks on one host, which read each other's send staging."""
    @staticmethod
    def nccl(rank: int, ranks: int, send_nbytes: int, recv_nbytes: int, timeout: float,
             device: Device | None) -> Exchange:
        """Makes the exchange of ranks with a GPU each.  Streams, not the host, wait for NCCL's transfers.  timeout:
        seconds of a round.  UnsupportedError: there is no NCCL; DeviceError: NCCL fails."""
    @staticmethod
    def nccl_address(device: Device | None) -> str:
        """Returns the address of nccl() on a rank other than 0.  UnsupportedError: there is no NCCL."""
    name: Final[str]
    """Either "shared" or "nccl"."""
    address: Final[str]
    """Text for all ranks; see connect()."""
    @property
    def nbytes(self) -> int:
        """Bytes of this rank's own staging, both halves together."""
    def connect(self, addresses: Sequence[str], timeout: float, check: Check = None) -> None:
        """Meets the other ranks; addresses[i] is rank i's address."""
    def begin(self, plan: Plan) -> None:
        """Starts an update."""
    def acquire(self, round: int, timeout: float, check: Check = None) -> None:
        """Waits until the send staging of a round may be written."""
    def spans(self, round: int) -> BufferTable:
        """Returns where the messages of a round are packed to and unpacked from."""
    def post(self, round: int, stream: Stream) -> None:
        """Sends the packed messages when the stream gets here."""
    def wait(self, round: int, stream: Stream, timeout: float, check: Check = None) -> None:
        """Returns once later work of the stream can read the messages of the other ranks."""
    def release(self, round: int, stream: Stream) -> None:
        """Says that the messages of the others have been read when the stream gets here."""
    def check(self) -> None:
        """Raises an error that has occurred outside a wait; a wait raises its own errors.  After a stream has passed
        all rounds, their bytes are right only if this raises nothing on any rank."""
    def park(self) -> None:
        """Gives back staging that only this rank uses, until the next update."""
    def close(self) -> None:
        """Leaves the exchange.  In the middle of an update, the other ranks raise PeerClosedError."""

# --- the GPU's memory for torch (csrc/python/exportable.c) -------------------------------------
#
# The module's file also exports two C functions, of the form that torch.cuda.memory.CUDAPluggableAllocator calls:
# void *wsync_exportable_alloc(ssize_t nbytes, int ordinal, cudaStream_t stream), which returns NULL on failure, and
# void wsync_exportable_free(void *at, ssize_t nbytes, int ordinal, cudaStream_t stream), which waits for the stream.

def exportable_check(ordinal: int, /) -> None:
    """Raises UnsupportedError unless wsync_exportable_alloc works for a GPU (`ordinal` counts as in cuda_devices)."""

def exportable_refusal() -> str:
    """Returns why wsync_exportable_alloc last failed in this thread.  If it has succeeded since, returns ""."""

# --- the GPU (csrc/python/device.c) -----------------------------------------------------------

def cuda_devices() -> tuple[int, list[tuple[str, str, int, tuple[int, int]]]]:
    """Returns the CUDA version of the driver (12080 is 12.8), and (uuid, name, bytes of memory, compute capability) of
    each GPU that this process sees.  Loads and initialises the driver.  UnsupportedError says why none can be used."""

def nccl_library(libraries: Sequence[str] = ()) -> tuple[int, str]:
    """Returns (version, path) of NCCL; the first call loads it.  The version 22809 is 2.28.9.  libraries: possible
    paths.  They are tried after WSYNC_NCCL_LIB and the process's loaded libraries, and before the system's folders.
    UnsupportedError says why no NCCL can be used."""

def host_register(address: int, nbytes: int, device: Device, owner: object) -> object:
    """Makes host memory accessible to a GPU as long as the result lives.  The result keeps `owner`.  Does nothing if
    the device is the host.  DeviceError: the driver refuses the memory."""

@final
class IpcMemory:
    """Memory of GPU `ordinal` (counted as in cuda_devices) that processes without wsync open by its handle.  It is an
    allocation of its own, of at least nbytes, and is not cleared."""
    def __new__(cls, ordinal: int, nbytes: int) -> Self: ...
    address: Final[int]
    nbytes: Final[int]
    handle: Final[bytes]
    def close(self) -> None:
        """Frees the memory.  No work on it may be under way, and no process may have it open."""

def checksum(data: Any, /) -> int:
    """Returns a 64-bit checksum (FNV-style over 8-byte words), which is never 0.  `data` is a contiguous buffer, or a
    TensorTable with one contiguous tensor in host memory."""

def count_down(counter: Any, least: int, /) -> bool:
    """Subtracts 1 from an integer of 4 or 8 bytes, unless it is at most `least`.  Other processes may change it, too.
    Returns whether it did."""
