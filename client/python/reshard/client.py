"""Connection, memory, layouts, workers and versions: what client/reshard.h has, as Python objects.

Calls block and let other Python threads run meanwhile. Times are seconds (float); every call takes `timeout`, None is the
library's 30 s. Offsets and sizes of boxes are in elements, all else in bytes. Versions are 1 … 2^63-1, 0 means none. What
fails raises a subclass of reshard.Error (errors.py). Objects may be used from any threads, except that nothing may be in progress
on what is being closed, freed or detached, and that one thread at a time waits for one worker's events. A process that has a
client must not fork without exec: start workers with multiprocessing's "spawn".
"""
import contextlib
import ctypes
import dataclasses
import os
import threading
import time
from typing import Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

from . import _native as native
from . import errors

_SIDES = {"source": 1, "destination": 2}
_RECEIVES = {"none": 0, "staged": 1, "in_place": 2}
_RELEASES = {None: 0, "read": 1, "staged": 2, "committed": 3}
_VERIFIES = {None: 0, "off": 1, "sampled": 2, "full": 3}
_STRATEGIES = {None: 0, "reshard": 1, "direct": 2, "gather-broadcast": 3}
_UNTIL = {"released": 1, "committed": 2, "final": 3}
_SLICE_S = 0.2  # a wait for events is cut so, that an interrupt is heard
_WITHDRAW_S = 5.0  # who raises does not wait longer for its peers' sake
_NO_DEVICE = 2**32 - 1


def _ms(timeout: Optional[float]) -> int:
    return 0 if timeout is None else min(max(1, round(timeout * 1000)), 2**32 - 1)


def _chosen(what: str, names: Mapping, name):
    if name not in names:
        raise errors.InvalidArgument(f"{what} {name!r}: one of {', '.join(map(repr, names))}")
    return names[name]


def _text(array: bytes) -> str:
    return array.decode(errors="replace")


@dataclasses.dataclass(frozen=True)
class Box:
    """An axis-aligned part of a tensor, in elements."""
    offset: Tuple[int, ...]
    size: Tuple[int, ...]

    def _native(self) -> native.box:
        if len(self.offset) != len(self.size) or len(self.size) > native.MAX_DIMS:
            raise errors.InvalidArgument(f"{self}: as many offsets as sizes, at most {native.MAX_DIMS}")
        b = native.box(n_dims=len(self.size))
        b.offset[:len(self.offset)], b.size[:len(self.size)] = self.offset, self.size
        return b

    @staticmethod
    def _of(b: native.box) -> "Box":
        return Box(tuple(b.offset[:b.n_dims]), tuple(b.size[:b.n_dims]))


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a layout: torch name of the dtype, global shape."""
    name: str
    dtype: str
    element_bytes: int
    shape: Tuple[int, ...]


class Layout:
    """One side's description of a model (JSON: config/FORMATS.md). Immutable; needs no daemon."""

    def __init__(self, text: Union[str, bytes]):
        """Parses and checks; InvalidArgument has line and column, or tensor, cause and remedy."""
        data = text.encode() if isinstance(text, str) else bytes(text)
        handle = ctypes.c_void_p()
        native.call("layout_from_json", data, len(data), ctypes.byref(handle))
        self._handle = handle
        self.name: str = native.get("layout_name", handle).decode()
        self.n_ranks: int = native.get("layout_n_ranks", handle)
        self.tensors: List[Tensor] = [self._tensor(i) for i in range(native.get("layout_n_tensors", handle))]
        self._number = {t.name: i for i, t in enumerate(self.tensors)}

    @staticmethod
    def load(path: Union[str, os.PathLike]) -> "Layout":
        with open(path, "rb") as f:
            return Layout(f.read())

    def _tensor(self, i: int) -> Tensor:
        t = native.tensor()
        native.get("layout_tensor", self._handle, i, ctypes.byref(t))
        return Tensor(t.name.decode(), t.dtype.decode(), t.element_bytes, tuple(t.shape[:t.n_dims]))

    def tensor(self, name: str) -> Tensor:
        if name not in self._number:
            raise errors.NotFound(f"layout {self.name} has no tensor {name!r}")
        return self.tensors[self._number[name]]

    def shards(self, name: str, rank: int) -> List[Box]:
        """The boxes that `rank` holds of a tensor: at most one where it is on a mesh. Empty ones are left out."""
        self.tensor(name)
        i = self._number[name]
        n = native.get("layout_shards", self._handle, i, rank, None, 0)
        boxes = (native.box * n)()
        native.get("layout_shards", self._handle, i, rank, boxes, n)
        return [Box._of(b) for b in boxes]

    def rank_bytes(self, rank: int) -> int:
        """Bytes that `rank` holds over all tensors."""
        return native.get("layout_rank_bytes", self._handle, rank)

    def __del__(self):
        if getattr(self, "_handle", None):
            native.get("layout_free", self._handle)

    def __repr__(self):
        return f"<reshard.Layout {self.name}: {self.n_ranks} ranks, {len(self.tensors)} tensors>"


class Segment:
    """One allocation that the daemon can map too. Made by Client.segment, .adopt and .segment_cuda."""

    def __init__(self, client: "Client", handle: ctypes.c_void_p):
        self._client, self._handle = client, handle
        self.address: Optional[int] = native.get("segment_data", handle)
        self.bytes: int = native.get("segment_bytes", handle)
        device = native.get("segment_device", handle)
        self.device: Optional[int] = None if device == _NO_DEVICE else device
        client._segments.add(self)

    @property
    def data(self) -> memoryview:
        """Host memory, writable, as bytes. Neither it nor what was made of it may be touched after free()."""
        if not self._handle or self.device is not None:
            raise errors.FailedPrecondition("a segment of GPU memory, or one that is freed, has no bytes to show")
        return memoryview((ctypes.c_uint8 * self.bytes).from_address(self.address)).cast("B")

    def free(self, timeout: Optional[float] = None) -> None:
        """Takes it back from the daemon. FailedPrecondition while a worker is attached with it. Twice is fine."""
        if self._handle:
            native.call("segment_free", self._handle, _ms(timeout))
            self._gone()

    def _gone(self):
        self._handle = None
        self._client._segments.discard(self)


@dataclasses.dataclass(frozen=True)
class Piece:
    """A strided piece of a segment that holds a box of a tensor; the pieces of a worker tile its shards exactly."""
    tensor: str
    segment: Segment
    offset: int = 0                            # bytes, from the segment's start to the box's first element
    box: Optional[Box] = None                  # None: the whole of the rank's one box
    strides: Optional[Tuple[int, ...]] = None  # bytes per tensor dim; None: row-major without gaps

    def _native(self) -> native.piece:
        p = native.piece(tensor=self.tensor.encode(), segment=self.segment._handle, offset_bytes=self.offset,
                         whole_shard=self.box is None, dense=self.strides is None)
        if self.box is not None:
            p.box = self.box._native()
        if self.strides is not None:
            if len(self.strides) > native.MAX_DIMS:
                raise errors.InvalidArgument(f"{self.tensor}: {len(self.strides)} strides, {native.MAX_DIMS} are the most")
            p.box.n_dims = len(self.strides)
            p.stride_bytes[:len(self.strides)] = self.strides
        return p


def _native_pieces(pieces: Sequence[Piece]):
    return (native.piece * len(pieces))(*(p._native() for p in pieces))


@dataclasses.dataclass(frozen=True)
class Event:
    """What the daemon tells a worker: publish_requested, ready_requested, accept_requested, committed, aborted,
    source_released, withdrawn, evicted, reattached (see reshard.h)."""
    type: str
    version: int
    attempt: int
    reason: str


@dataclasses.dataclass(frozen=True)
class WorkerInfo:
    worker: int      # this attach's incarnation; a re-attach changes it
    committed: int   # newest committed version of the model when it attached
    held: int        # what the receiving memory holds, verified; 0: nothing
    applied: int     # what live memory holds; 0: nothing
    reattached: int  # how often the library attached it again
    evicted: bool


@dataclasses.dataclass(frozen=True)
class Bytes:
    """By tier, as the daemon counts them; unique bytes are never mixed with received ones."""
    landed: int
    total: int
    network: int
    domain: int
    device: int
    skipped: int
    network_minimum: int


@dataclasses.dataclass(frozen=True)
class State:
    """A version in flight, or its end."""
    version: int
    attempt: int
    phase: str  # submitted planned prepared transferring staged accepting committed aborting aborted superseded rehearsed
    bytes: Bytes
    source_released: bool
    elapsed: float
    reason: str
    waiting_for: str

    @staticmethod
    def _of(s: native.state) -> "State":
        counts = Bytes(*(getattr(s.bytes, f.name) for f in dataclasses.fields(Bytes)))
        return State(s.version, s.attempt, native.get("phase_name", s.phase).decode(), counts, s.source_released,
                     s.elapsed_ns / 1e9, _text(s.reason), _text(s.waiting_for))


@dataclasses.dataclass(frozen=True)
class Committed:
    version: int
    wall: float   # seconds since 1970; for people
    held: int     # by the asking worker; 0 without one
    applied: int


class Client:
    """A connection to the node's daemon. Close it, or use it as a context manager."""

    def __init__(self, socket: Union[str, os.PathLike, None] = None, timeout: Optional[float] = None):
        """socket None: RESHARD_SOCKET of the environment, else /run/reshard/reshardd.sock. Tries until the timeout, so a
        trainer may start before its daemon; then Unavailable."""
        handle = ctypes.c_void_p()
        self._segments, self._workers = set(), set()
        native.call("connect", os.fsencode(socket) if socket is not None else None, _ms(timeout), ctypes.byref(handle))
        self._handle = handle

    def close(self) -> None:
        """Detaches its workers and frees its segments, whose memory is gone after it. Twice is fine."""
        handle, self._handle = self._handle, None
        if handle:
            for worker in list(self._workers):
                worker.detach()
            native.get("close", handle)
            for segment in list(self._segments):
                segment._gone()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    @property
    def _open(self):
        if not self._handle:
            raise errors.FailedPrecondition("the client is closed")
        return self._handle

    @property
    def incarnation(self) -> int:
        """The running daemon's start id."""
        return native.get("incarnation", self._open)

    @property
    def reconnects(self) -> int:
        return native.get("reconnects", self._open)

    # ---- memory ----

    def segment(self, size: int, timeout: Optional[float] = None) -> Segment:
        """Zeroed host shared memory of `size` bytes, rounded up to pages. One per arena, never one per tensor."""
        return self._segment("segment_new", size, _ms(timeout))

    def adopt(self, fd: int, size: int, timeout: Optional[float] = None) -> Segment:
        """A memfd that the caller has, sealed with F_SEAL_SHRINK; fd stays the caller's."""
        return self._segment("segment_adopt", fd, size, _ms(timeout))

    def segment_cuda(self, address: int, size: int, timeout: Optional[float] = None) -> Segment:
        """GPU memory from a device pointer on: any part of one allocation of this process, or of up to 252 VMM allocations one
        behind the other (torch's expandable segments), which must not be freed or remapped before Segment.free (or
        Client.close) has returned."""
        return self._segment("segment_cuda", address, size, _ms(timeout))

    def _segment(self, call: str, *arguments) -> Segment:
        handle = ctypes.c_void_p()
        native.call(call, self._open, *arguments, ctypes.byref(handle))
        return Segment(self, handle)

    # ---- workers ----

    def attach(self, model: str, side: str, layout: Layout, rank: int, *, device: int = 0, receive: Optional[str] = None,
               accept_automatically: bool = False, live: Optional[Sequence[Piece]] = None,
               shadow: Optional[Sequence[Piece]] = None, live_version: int = 0, shadow_version: int = 0,
               timeout: Optional[float] = None) -> "Worker":
        """Attaches this process as one (model, side, layout, rank), on the node's device of that number.

        side: "source" or "destination"; receive, of a destination: "staged" (the default) or "in_place". live and
        shadow (staged only) bind its shards to memory; None: dense in a new segment of host memory, which the
        worker's `live` and `shadow` then tell. AlreadyExists: that rank is attached; FailedPrecondition: its layout differs from
        its peers'; InvalidArgument: a binding that leaves its segment, overlaps another or misses a part."""
        number = _chosen("side", _SIDES, side)
        if not isinstance(layout, Layout):
            raise errors.InvalidArgument(f"layout: a reshard.Layout (from JSON text, or Layout.load(path)), not {type(layout).__name__}")
        receive = receive or ("none" if side == "source" else "staged")
        made: List[Segment] = []
        try:
            if live is None:
                live = self._dense(layout, rank, made, timeout)
            if shadow is None and receive == "staged":
                shadow = self._dense(layout, rank, made, timeout)
            live, shadow = list(live), list(shadow or ())
            live_c, shadow_c = _native_pieces(live), _native_pieces(shadow)
            a = native.attach(model=model.encode(), side=number, layout=layout._handle, rank=rank, device=device,
                              receive=_chosen("receive", _RECEIVES, receive), accept_automatically=accept_automatically,
                              live=live_c, n_live=len(live), shadow=shadow_c, n_shadow=len(shadow), live_version=live_version,
                              shadow_version=shadow_version)
            handle = ctypes.c_void_p()
            native.call("attach", self._open, ctypes.byref(a), _ms(timeout), ctypes.byref(handle))
        except BaseException:
            for segment in made:
                segment.free(timeout)
            raise
        return Worker(self, handle, model, side, layout, rank, receive, accept_automatically, live, shadow)

    def _dense(self, layout, rank, made, timeout):
        made.append(self.segment(max(1, pieces_dense(layout, rank)[1]), timeout))
        return pieces_dense(layout, rank, made[-1])[0]

    # ---- versions ----

    def submit(self, model: str, version: int, *, release_at: Optional[str] = None, verify: Optional[str] = None,
               strategy: Optional[str] = None, rules: Optional[Mapping[str, str]] = None,
               policy: Optional[Mapping[str, int]] = None, prepare_timeout: float = 0, transfer_timeout: float = 0,
               accept_timeout: float = 0, request_id: Optional[str] = None, rehearsal: bool = False,
               timeout: Optional[float] = None) -> int:
        """Asks for a refit; returns when the request is durable at the daemon: the attempt, 0 where it was queued.

        release_at: "read", "staged" or "committed", when the sources may write again; verify: "off", "sampled", "full";
        strategy: "reshard", "direct", "gather-broadcast", and rules: glob on tensor names → strategy, the first that
        matches; policy: layout name → instances that must accept, 0: the layout is optional, layouts not named: all. The timeouts
        of the phases are the daemon's; 0: as its config says. FailedPrecondition: not above the newest committed or in flight."""
        rules_c = (native.strategy_rule * len(rules or ()))(
            *((g.encode(), _chosen("strategy", _STRATEGIES, s)) for g, s in (rules or {}).items()))
        policy_c = (native.policy * len(policy or ()))(*((n.encode(), k) for n, k in (policy or {}).items()))
        milliseconds = [_ms(t) if t else 0 for t in (prepare_timeout, transfer_timeout, accept_timeout)]
        options = native.submit(_chosen("release_at", _RELEASES, release_at), _chosen("verify", _VERIFIES, verify),
                                _chosen("strategy", _STRATEGIES, strategy), rules_c, len(rules_c), policy_c, len(policy_c),
                                *milliseconds, request_id.encode() if request_id else None, rehearsal)
        attempt = ctypes.c_uint64()
        native.call("submit", self._open, model.encode(), version, ctypes.byref(options), _ms(timeout), ctypes.byref(attempt))
        return attempt.value

    def wait(self, model: str, version: int, until: str = "committed", progress: Optional[Callable[[State], object]] = None,
             timeout: Optional[float] = None) -> State:
        """Waits until the version is "released" (sources may write again), "committed" or "final"; its state then.

        progress is called with each change, and about ten times a second while bytes move, on this thread; what it raises ends
        the wait and is raised here. It must not use this client. Aborted: the version has ended so, with its reason (for
        "released" too); FailedPrecondition: it was superseded. DeadlineExceeded names the phase and who is missing."""
        raised: List[BaseException] = []

        def told(state, _):
            try:
                progress(State._of(state.contents))
                return 0
            except BaseException as e:  # ctypes would print and drop it
                raised.append(e)
                return 1

        last = native.state()
        hook = native.progress(told) if progress else native.progress()
        try:
            native.call("wait", self._open, model.encode(), version, _chosen("until", _UNTIL, until), hook, None, _ms(timeout),
                        ctypes.byref(last))
        except errors.Canceled:
            if raised:
                raise raised[0] from None
            raise
        return State._of(last)

    def committed(self, model: str, newer_than: int = 0, wait: float = 0, worker: Optional["Worker"] = None,
                  timeout: Optional[float] = None) -> Committed:
        """The newest committed version. wait > 0: returns early when one above newer_than is committed, at its end with the
        newest there is. NotFound: none yet. timeout counts beyond wait."""
        c = native.committed()
        native.call("committed", self._open, model.encode(), newer_than, round(wait * 1000), worker._open if worker else None,
                    _ms(timeout), ctypes.byref(c))
        return Committed(c.version, c.committed_wall_ns / 1e9, c.held, c.applied)

    def versions(self, model: str, newer_than: int = 0, timeout: Optional[float] = None) -> Iterator[Committed]:
        """The newest committed version above newer_than, whenever there is one: none twice, over restarts of the daemon; those
        that a newer one has overtaken are left out. Ends when `timeout` is over; None: never."""
        end = None if timeout is None else time.monotonic() + timeout
        while end is None or time.monotonic() < end:
            try:
                c = self.committed(model, newer_than, 1.0 if end is None else max(0.001, min(1.0, end - time.monotonic())))
            except errors.NotFound:  # none yet: the daemon answers at once
                threading.Event().wait(_SLICE_S)
                continue
            if c.version > newer_than:
                newer_than = c.version
                yield c

    def mark(self, model: str, version: int, name: str, worker: Optional["Worker"] = None,
             timeout: Optional[float] = None) -> None:
        """Adds a time mark of the caller's own to a version's timeline ("generation_begin")."""
        native.call("mark", self._open, model.encode(), version, name.encode(), worker._open if worker else None, _ms(timeout))


class Worker:
    """A lease at the daemon until detach() or the process's end. Made by Client.attach."""

    def __init__(self, client, handle, model, side, layout, rank, receive, accept_automatically, live, shadow):
        self._client, self._handle = client, handle
        self.model, self.side, self.layout, self.rank, self.receive = model, side, layout, rank, receive
        self.accept_automatically = accept_automatically
        self.live: List[Piece] = live
        self.shadow: List[Piece] = shadow
        client._workers.add(self)

    @property
    def _open(self):
        if not self._handle:
            raise errors.FailedPrecondition("the worker is detached")
        return self._handle

    def detach(self) -> None:
        """Ends the lease, as the end of the process would. Its segments stay. Twice is fine."""
        handle, self._handle = self._handle, None
        if handle:
            native.get("detach", handle)
            self._client._workers.discard(self)

    def sleep(self, timeout: Optional[float] = None) -> None:
        """Before the engine lets the memory of its weights go (vLLM's sleep, SGLang's release_memory_occupation). Returns when
        the daemon has closed every mapping of it: then its segments may be freed (Segment.free) and the memory unmapped. The
        lease stays; what it holds is forgotten, and no refit waits for it: one that needs it is FailedPrecondition."""
        native.call("sleep", self._open, _ms(timeout))
        self.live, self.shadow = [], []

    def wake(self, live: Sequence[Piece], shadow: Sequence[Piece] = (), timeout: Optional[float] = None) -> None:
        """The memory is back, in new segments on the same device: the worker attaches anew with these pieces, and gets the
        newest committed version like any newcomer. FailedPrecondition: it is not asleep."""
        live, shadow = list(live), list(shadow)
        native.call("wake", self._open, _native_pieces(live), len(live), _native_pieces(shadow), len(shadow), _ms(timeout))
        self.live, self.shadow = live, shadow

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.detach()

    def info(self) -> WorkerInfo:
        """Never blocks; held and applied are as of the daemon's last answer."""
        i = native.worker_info()
        native.get("worker_info", self._open, ctypes.byref(i))
        return WorkerInfo(*(getattr(i, f.name) for f in dataclasses.fields(WorkerInfo)))

    def next_event(self, timeout: Optional[float] = None) -> Optional[Event]:
        """The next event, in the daemon's order; None: none came until the timeout (None: waits for ever)."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _SLICE_S if end is None else min(_SLICE_S, end - time.monotonic())
            e = native.event()
            with contextlib.suppress(errors.DeadlineExceeded):
                native.call("next_event", self._open, _ms(max(left, 0)), ctypes.byref(e))
                return Event(native.get("event_name", e.type).decode(), e.version, e.attempt, _text(e.reason))
            if end is not None and time.monotonic() >= end:
                return None

    # ---- a source ----

    def publish(self, version: int, expected: Optional[Mapping[str, int]] = None, timeout: Optional[float] = None,
                cuda_event: Optional[int] = None) -> None:
        """"My memory holds `version`, and I will not write it until it is released." Returns when the daemon has fingerprinted it.
        expected: tensor → fingerprint of all of it in source dtype, checked before a byte moves. With Client.segment_cuda's
        memory it first waits for all work of this process on those GPUs; with cuda_event (the cudaEvent_t of an interprocess
        event without timing, recorded behind the writes: torch.cuda.Event(interprocess=True).cuda_event) the daemon waits
        for that instead."""
        e = (native.expected * len(expected or ()))(*((n.encode(), f) for n, f in (expected or {}).items()))
        if cuda_event is None:
            native.call("publish", self._open, version, e, len(e), _ms(timeout))
        else:
            native.call("publish_after", self._open, version, cuda_event, e, len(e), _ms(timeout))

    def push(self, version: int, submit: Union[bool, Dict] = False, attempts: int = 3, timeout: float = 600) -> None:
        """A trainer's step: publishes, submits where this is the worker that does (True, or Client.submit's options), and
        returns when the memory may be written again: received and verified everywhere, unless the submit's release_at says
        "read" or "committed". An attempt that is aborted before that is published (and submitted) again, by every worker of the
        side, `attempts` times in all; then Aborted. After the loss of a daemon it publishes again where it is asked to.
        The newest committed version with the same content is nothing new: it returns when newcomers of now have been fed from it;
        with other weights it is AlreadyExists. Where the worker that submits raises (its submit is refused, …), it withdraws the
        version, and the others raise Aborted (AlreadyExists, where it is committed) at once with its reason; where another's
        submission of that version is on its way, when that has ended. So do all where one of them leaves before the submit; where
        one is not there, when the daemon's prepare timeout is over. Every worker calls it equally often for a version.
        Client.wait tells whether the version was committed, too."""
        native.get("push_begin", self._open, version)
        try:
            self._push(version, submit, attempts, time.monotonic() + timeout)
        except BaseException as e:
            if submit:
                self._give_up(version, e)
            raise

    def withdraw(self, version: int, reason: str = "", timeout: Optional[float] = None) -> None:
        """Gives a version up for the whole side: pushes of it by the other workers end with this reason. What is on its way for it
        goes on. push does so by itself."""
        native.call("withdraw", self._open, version, reason.encode(errors="replace"), _ms(timeout))

    def _give_up(self, version: int, why: BaseException) -> None:
        """What can't be said now (no daemon, no lease) the others hear by the end of this worker's lease."""
        with contextlib.suppress(errors.Error):
            self.withdraw(version, str(why) or type(why).__name__, _WITHDRAW_S)

    def _push(self, version: int, submit: Union[bool, Dict], attempts: int, end: float) -> None:
        last = 0
        for left in reversed(range(attempts)):
            over = None if submit else self._over_without(version, last)
            if over is None:
                self.publish(version, timeout=max(0.001, end - time.monotonic()))
                if submit:
                    self._client.submit(self.model, version, **(submit if isinstance(submit, dict) else {}))
                over = self._released(version, end)
            if over is None:
                return
            last, reason = over.attempt, over.reason or "no reason given"
        if self._known_committed(version):
            raise errors.AlreadyExists(f"{self.model}: {reason}")
        raise errors.Aborted(f"version {version} of {self.model} was aborted {attempts} times: {reason}")

    def _over_without(self, version: int, last: int) -> Optional[Event]:
        """The end of a retry (an attempt after `last`, the last one that this worker was in) that was aborted before this worker
        has published again: receivers that hold the version feed each other. None: there was none."""
        while last != 0 and (e := self.next_event(0)) is not None:
            if e.type == "evicted":
                raise self._evicted(e)
            if e.type == "withdrawn" and e.version == version:
                raise self._withdrawn(e)
            if e.type == "aborted" and e.version == version and e.attempt > last:
                return e
        return None

    def _known_committed(self, version: int) -> bool:
        try:
            return self._client.committed(self.model).version >= version
        except errors.NotFound:
            return False

    def _released(self, version: int, end: float) -> Optional[Event]:
        """Waits for the release. None, or the abort that it follows. An abort may be older than the publication: of an attempt
        that this worker had not published for yet, which releases nothing."""
        aborted, withdrawn, lost = None, None, False
        while True:
            e = self.next_event(max(0, end - time.monotonic()))
            if e is None:
                raise errors.DeadlineExceeded(f"version {version} of {self.model} was not released in time")
            if e.type == "evicted":
                raise self._evicted(e)
            if e.type == "reattached":
                lost = True
            elif e.version != version:
                continue
            elif e.type == "publish_requested" and lost:
                self.publish(version, timeout=max(0.001, end - time.monotonic()))
            elif e.type == "aborted":
                aborted = e
            elif e.type == "withdrawn":
                withdrawn = e
            elif e.type == "source_released":
                if withdrawn is not None:
                    raise self._withdrawn(withdrawn)
                return aborted if aborted is not None and e.attempt <= aborted.attempt else None

    def _withdrawn(self, event: Event) -> errors.Error:
        kind = errors.AlreadyExists if self._known_committed(event.version) else errors.Aborted
        return kind(f"version {event.version} of {self.model} was withdrawn: {event.reason}")

    # ---- a destination ----

    def ready(self, version: int, timeout: Optional[float] = None) -> None:
        """in_place: "my engine is paused, the daemon may write my memory for this version"."""
        native.call("ready", self._open, version, _ms(timeout))

    def accept(self, version: int, attempt: int, timeout: Optional[float] = None) -> None:
        """The verdict on what was received and verified; attempt as in the accept_requested event."""
        native.call("accept", self._open, version, attempt, _ms(timeout))

    def reject(self, version: int, attempt: int, reason: str, timeout: Optional[float] = None) -> None:
        native.call("reject", self._open, version, attempt, reason.encode(), _ms(timeout))

    def apply(self, version: int, timeout: Optional[float] = None) -> float:
        """staged: the daemon copies the version from shadow to live memory and verifies it; the engine must not read its
        weights meanwhile. The daemon's seconds."""
        ns = ctypes.c_uint64()
        native.call("apply", self._open, version, _ms(timeout), ctypes.byref(ns))
        return ns.value / 1e9

    def skip(self, version: int, timeout: Optional[float] = None) -> None:
        """staged: this version will never be applied here; the shadow is free for the next one."""
        native.call("skip", self._open, version, _ms(timeout))

    def serve(self, pause: Callable[[], object], resume: Callable[[int], object],
              check: Optional[Callable[[int], Optional[str]]] = None, stop: Optional[threading.Event] = None) -> None:
        """An engine's loop: receives versions until `stop` is set.

        pause(): the engine must not touch its weights when it returns; resume(version): it may again, they hold that version.
        check(version): looks at what was received (the shadow, or live memory in place) and returns why it is refused, or
        None; what it raises is a refusal, too. In place the engine stays paused from ready_requested until a version is
        committed: an abort leaves its memory partly written, and the retry or a later version repairs it. Staged, it is
        paused only while a committed version is applied. What pause and resume raise ends the loop."""
        if self.accept_automatically:
            raise errors.FailedPrecondition("serve() accepts by itself: attach without accept_automatically")
        accepted, paused = 0, False
        while stop is None or not stop.is_set():
            e = self.next_event(_SLICE_S)
            if e is None:
                continue
            if e.type == "evicted":
                raise self._evicted(e)
            if e.type == "ready_requested":
                if not paused:
                    pause()
                    paused = True
                self._try(self.ready, e.version)
            elif e.type == "accept_requested":
                if self._verdict(e, check):
                    accepted = e.version
            elif e.type == "committed" and e.version == accepted:
                if self.receive == "staged":
                    pause()
                    self.apply(e.version)
                resume(e.version)
                paused = False

    def _evicted(self, event: Event) -> errors.Error:
        remedy = "" if "attach" in event.reason else "; attach again"
        return errors.FailedPrecondition(f"{self.model}, rank {self.rank} was evicted: {event.reason}{remedy}")

    def _verdict(self, event: Event, check) -> bool:
        try:
            reason = check(event.version) if check else None
        except Exception as e:
            reason = f"{type(e).__name__}: {e}"
        if reason is None:
            return self._try(self.accept, event.version, event.attempt)
        self._try(self.reject, event.version, event.attempt, reason)
        return False

    @staticmethod
    def _try(call, *arguments) -> bool:
        """False where the attempt that it answers is over already: the next event tells what became of it."""
        try:
            call(*arguments)
            return True
        except (errors.FailedPrecondition, errors.Aborted, errors.NotFound):
            return False


def pieces_dense(layout: Layout, rank: int, segment: Optional[Segment] = None, offset: int = 0,
                 align: int = 64) -> Tuple[List[Piece], int]:
    """The plain arrangement: every shard of `rank` dense, in the layout's order, each box from a multiple of `align` on.
    (pieces, first byte beyond); without a segment no pieces, to size one by."""
    pieces, n, end = ctypes.POINTER(native.piece)(), ctypes.c_size_t(), ctypes.c_uint64()
    native.call("pieces_dense", layout._handle, rank, segment._handle if segment else None, offset, align,
                ctypes.byref(pieces) if segment else None, ctypes.byref(n), ctypes.byref(end))
    try:
        return [Piece(p.tensor.decode(), segment, p.offset_bytes, Box._of(p.box)) for p in pieces[:n.value]] \
            if segment else [], end.value
    finally:
        if segment:
            native.get("pieces_free", pieces)


# ---- rehearsal ----


def _view(tensor, dtype, box, address, strides):
    v = native.view(tensor=tensor.encode(), dtype=dtype.encode(), box=box._native(), data=address, dense=strides is None)
    if strides is not None:
        v.stride_bytes[:len(strides)] = strides
    return ctypes.byref(v)


def rehearse_fill(tensor: str, dtype: str, box: Box, address: int, strides: Optional[Sequence[int]] = None) -> None:
    """Writes each element's coordinates through the framework's own view of a tensor (its first element's address, byte
    strides; None: dense). See reshard.h, "rehearsal"."""
    native.call("rehearse_fill", _view(tensor, dtype, box, address, strides))


def rehearse_check(tensor: str, dtype: str, box: Box, address: int, strides: Optional[Sequence[int]] = None) -> None:
    """DataLoss names the tensor, the first element that is another, and how many are."""
    native.call("rehearse_check", _view(tensor, dtype, box, address, strides))
