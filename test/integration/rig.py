"""A foreign client and its daemon: what the integration tests are written with.

Nothing here comes from the project but the .proto and the memory socket's record: layouts are cut by an own reading of
torch.chunk, memory is filled and read element by element. Daemons run in folders of their own, on Unix sockets, and are
ended by their pid. Every wait is for an event and has a deadline; nothing sleeps to wait.
"""
import collections
import contextlib
import fcntl
import gc
import mmap
import os
import pathlib
import queue
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest

BUILD = pathlib.Path(os.environ.get("RESHARD_BUILD", "build")).resolve()
sys.path.insert(0, str(BUILD / "py"))
os.environ["no_proxy"] = "*"
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import backends  # noqa: E402
import cuda_memory  # noqa: E402
import grpc  # noqa: E402
import health_pb2  # noqa: E402
import health_pb2_grpc  # noqa: E402
import reshard_pb2 as pb  # noqa: E402
import reshard_pb2_grpc as pb_grpc  # noqa: E402

# Sanitized binaries are slower; every deadline is stretched by this.
SLOW = float(os.environ.get("RESHARD_SLOW", "1"))
WAIT_S = 60 * SLOW  # a guard against hangs, nothing that is measured
DTYPES = {"float32": (pb.DTYPE_FLOAT32, 4), "int32": (pb.DTYPE_INT32, 4), "bfloat16": (pb.DTYPE_BFLOAT16, 2),
          "float16": (pb.DTYPE_FLOAT16, 2), "uint8": (pb.DTYPE_UINT8, 1), "int64": (pb.DTYPE_INT64, 8),
          "float8_e4m3fn": (pb.DTYPE_FLOAT8_E4M3FN, 1)}
POISON = 0xA5
if backends.CUDA:
    backends.begin(BUILD)


class Deadline(AssertionError):
    """Something that should have happened has not, in its time."""


def deadlines(first_ms):
    """Of refits, in ms, for a test that has something to do before one is over: it takes the next longer one where it was too late."""
    return [int(first_ms * SLOW) * 4 ** i for i in range(4)]


# --- the daemon ---------------------------------------------------------------------------------------


class Log:
    """What one start of a daemon says, through a pipe. A thread follows it for those who wait for a line; whoever looks takes what
    is there already, and need not wait for the thread."""

    def __init__(self, fd, path, changed):
        self.fd, self.file, self.changed = fd, open(path, "ab", buffering=0), changed
        self.lines, self.part, self.ended = [], b"", False
        os.set_blocking(fd, False)

    def follow(self):
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self):
        ready = select.poll()
        ready.register(self.fd, select.POLLIN)
        while not self.ended:
            ready.poll()
            self.taken()
        os.close(self.fd)
        self.file.close()

    def taken(self):
        """The lines so far, with what is in the pipe."""
        with self.changed:
            with contextlib.suppress(BlockingIOError):
                while not self.ended:
                    self._take(os.read(self.fd, 1 << 16))
            return self.lines

    def _take(self, data):
        self.part += data
        self.ended = not data
        *whole, self.part = self.part.split(b"\n")
        if self.ended and self.part:
            whole.append(self.part)
        self.file.write(b"".join(line + b"\n" for line in whole))
        self.lines += [line.decode(errors="replace") for line in whole] + ["<end of log>"] * self.ended
        self.changed.notify_all()


# Settings with which messages between devices of the node are device copies.
COPIES = {"devices__local_pairs": "copy", **({} if backends.CUDA else {"devices__transport": "tcp"})}


class Daemon:
    """One reshardd: its folder, its process, its log. Restarts keep the folder."""

    def __init__(self, **settings):
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="reshard-test-"))
        self.socket = str(self.dir / "d.sock")
        self.settings = {"daemon": {"node": "n0", "socket": self.socket, "state_dir": str(self.dir / "state"),
                                    "log_level": "debug"},
                         "devices": {"devices": 8, "domains": "0-3 4-7", "chunk_bytes": 4096},
                         "refit": {"least_piece_bytes": 64, "prepare_timeout_ms": int(30000 * SLOW),
                                   "quiesce_timeout_ms": int(3000 * SLOW)},
                         "clients": {"grace_ms": int(2000 * SLOW)}}
        self.settings["devices"].update(backends.settings(transport="memory"))
        if backends.CUDA:
            # Messages between its devices by NCCL, which the tests are about, though they reach each other; COPIES is the other way.
            self.settings["devices"]["local_pairs"] = "transport"
        for key, value in settings.items():
            section, name = key.split("__")
            self.settings.setdefault(section, {})[name] = value
        self.process = None
        self.log = None
        self.changed = threading.Condition()
        self.channels = []
        self.clients = []

    def write_config(self):
        path = self.dir / "reshardd.conf"
        path.write_text("".join(f"[{s}]\n" + "".join(f"{k} = {v}\n" for k, v in keys.items())
                                for s, keys in self.settings.items()))
        return path

    def argv(self):
        return [BUILD / "reshardd", "--config", self.write_config()]

    def start(self, wait="data plane serves"):
        read, write = os.pipe()
        self.log = Log(read, self.log_path, self.changed)
        self.process = subprocess.Popen(self.argv(), stderr=write, stdin=subprocess.DEVNULL)
        os.close(write)
        self.log.follow()
        if wait:
            self.wait_log(wait)
        return self

    @property
    def log_path(self):
        return self.dir / "log"

    @property
    def lines(self):
        """Of the last start, all that it has said by now: what a daemon logged before it answered is there with the answer."""
        return self.log.taken() if self.log is not None else []

    def wait_log(self, pattern, since=0, timeout=WAIT_S):
        """Waits for a line that matches; returns the match."""
        end = time.monotonic() + timeout
        with self.changed:
            while True:
                for line in self.lines[since:]:
                    m = re.search(pattern, line)
                    if m:
                        return m
                    if line == "<end of log>":
                        raise AssertionError(f"the daemon ended before it said {pattern!r}:\n{self.tail()}")
                if not self.changed.wait(end - time.monotonic()):
                    if time.monotonic() >= end:
                        raise Deadline(f"no line {pattern!r} in {timeout} s:\n{self.tail()}")

    def log_mark(self):
        with self.changed:
            return len(self.lines)

    def tail(self, n=30):
        return "\n".join(self.lines[-n:])

    def data_plane_pid(self):
        with self.changed:
            pids = [m[1] for m in (re.search(r"data plane ready: pid (\d+)", line) for line in self.lines) if m]
        return int(pids[-1])

    def kill(self, sig=signal.SIGKILL):
        self.process.send_signal(sig)
        return self.wait()

    def wait(self, timeout=WAIT_S):
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise Deadline(f"the daemon did not end in {timeout} s:\n{self.tail()}") from None

    def stop(self):
        """SIGTERM; returns (exit status, seconds)."""
        begin = time.monotonic()
        return self.kill(signal.SIGTERM), time.monotonic() - begin

    def channel(self, token=None):
        """A channel of its own, with the token in every call."""
        channel = grpc.insecure_channel("unix:" + self.socket, options=[("grpc.use_local_subchannel_pool", 1)])
        self.channels.append(channel)
        return grpc.intercept_channel(channel, TokenInterceptor(token)) if token else channel

    def admin(self, token=None):
        return pb_grpc.AdminStub(self.channel(token))

    def refit(self, token=None):
        return pb_grpc.RefitStub(self.channel(token))

    def status(self, model=""):
        return self.admin().Status(pb.StatusRequest(model=model), timeout=WAIT_S)

    def wait_status(self, model, predicate, what, timeout=WAIT_S):
        """Follows the model's status (by the daemon's own pace of answering) until predicate holds."""
        stub = self.admin()
        end = time.monotonic() + timeout
        while True:
            s = [m for m in stub.Status(pb.StatusRequest(), timeout=WAIT_S).models if m.model == model]
            if s and predicate(s[0]):
                return s[0]
            if time.monotonic() >= end:
                raise Deadline(f"status of {model} never showed: {what}\n{s}\n{self.tail()}")
            threading.Event().wait(0.01)

    def end_process(self):
        """Its process and what is connected to it; the folder stays."""
        for channel in self.channels:
            channel.close()
        for client in self.clients:
            client.close()
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def close(self):
        self.end_process()
        shutil.rmtree(self.dir, ignore_errors=True)

    def __enter__(self):
        return self.start()

    def __exit__(self, kind, value, trace):
        if kind is not None and not issubclass(kind, unittest.SkipTest):
            print(f"--- the daemon's log:\n{self.tail(60)}", file=sys.stderr)
        self.close()


class DaemonCase(unittest.TestCase):
    """One daemon for all tests of a class, which must end well; each uses a model of its own."""

    @classmethod
    def setUpClass(cls):
        cls.daemon = Daemon().start()

    @classmethod
    def tearDownClass(cls):
        code, _ = cls.daemon.stop()
        cls.daemon.close()
        assert code == 0, f"the daemon ended with {code}"

    def setUp(self):
        self.model = self.id().rsplit(".", 1)[1]


class TokenInterceptor(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor,
                       grpc.StreamUnaryClientInterceptor, grpc.StreamStreamClientInterceptor):
    def __init__(self, token):
        self.token = token

    def _call(self, continuation, details, request):
        metadata = list(details.metadata or []) + [("reshard-token", self.token)]
        return continuation(CallDetails(details.method, details.timeout, metadata, details.credentials,
                                        details.wait_for_ready, details.compression), request)

    intercept_unary_unary = intercept_unary_stream = intercept_stream_unary = intercept_stream_stream = _call


class CallDetails(collections.namedtuple("CallDetails", "method timeout metadata credentials wait_for_ready compression"),
                  grpc.ClientCallDetails):
    pass


# --- the memory socket --------------------------------------------------------------------------------

RECORD = struct.Struct("=IIIiQQQQQII40s512s")
MAGIC = 0x52534D31
HELLO, WELCOME, SEGMENT, SEGMENT_REPLY, SEGMENT_DROP = range(1, 6)
Record = collections.namedtuple("Record", "magic type protocol code request segment bytes incarnation client kind "
                                          "writable token text")


def record(**fields):
    r = dict(magic=MAGIC, type=0, protocol=1, code=0, request=0, segment=0, bytes=0, incarnation=0, client=0, kind=1,
             writable=1, token=b"", text=b"")
    r.update(fields)
    return RECORD.pack(*(r[f] for f in Record._fields))


class MemoryError_(Exception):
    """A refusal on the memory socket: (code, text)."""


def memfd(n_bytes, seal=True, allocate=True):
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(fd, n_bytes)
    if allocate and n_bytes:
        os.posix_fallocate(fd, 0, n_bytes)
    if seal:
        fcntl.fcntl(fd, 1033, 0x0002)  # F_ADD_SEALS, F_SEAL_SHRINK
    return fd


class HostMemory(mmap.mmap):
    """Memory of a client in a sealed memfd."""

    kind = 1

    def __new__(cls, n_bytes):
        fd = memfd(n_bytes)
        self = super().__new__(cls, fd, n_bytes)
        self.fd = fd
        return self

    def hand_over(self):
        """What the record of this segment says: (its text, descriptors)."""
        return b"", [self.fd]

    def __del__(self):
        os.close(self.fd)


class Client:
    """One connection to the memory socket: identity and segments. host_memory: where its workers' memory must be memfds,
    whatever the backend."""

    def __init__(self, daemon, host_memory=False):
        self.daemon, self.host_memory = daemon, host_memory
        daemon.clients.append(self)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(WAIT_S)
        self.socket.connect(daemon.socket + ".mem")
        self.requests = 0
        self.socket.sendall(record(type=HELLO))
        w = self.read()
        assert w.type == WELCOME and w.code == 0, w
        self.token, self.incarnation, self.id = w.token.rstrip(b"\0").decode(), w.incarnation, w.client
        self.stub = daemon.refit(self.token)
        self.admin = daemon.admin(self.token)

    def read(self):
        data = b""
        while len(data) < RECORD.size:
            part = self.socket.recv(RECORD.size - len(data))
            if not part:
                raise ConnectionError("the memory socket was closed")
            data += part
        return Record(*RECORD.unpack(data))

    def ask(self, fds=(), **fields):
        self.requests += 1
        socket.send_fds(self.socket, [record(request=self.requests, **fields)], list(fds))
        r = self.read()
        assert r.type == SEGMENT_REPLY and r.request == self.requests, r
        if r.code != 0:
            raise MemoryError_(r.code, r.text.rstrip(b"\0").decode())
        return r.segment

    def segment(self, n_bytes, worker=None, **fields):
        """(id, memory): in a memfd, or where backends.py says that the memory of a worker (side, rank, device) lies."""
        memory = self.new_memory(max(n_bytes, 1), worker)
        return self.register(memory, **fields), memory

    def new_memory(self, n_bytes, worker):
        kind = backends.HOST if worker is None or self.host_memory else backends.segment_kind(n_bytes, *worker)
        if kind == backends.HOST:
            return HostMemory(n_bytes)
        cuda = cuda_memory.cuda(*backends.libraries(BUILD))
        return cuda_memory.Memory(cuda, worker[-1], cuda_memory.IPC if kind == backends.IPC else cuda_memory.VMM, n_bytes)

    def register(self, memory, **fields):
        """Hands memory over: a new segment, also of what another client has handed over before."""
        text, fds = memory.hand_over()
        return self.ask(fds, type=SEGMENT, kind=memory.kind, bytes=len(memory), text=text, **fields)

    def drop(self, segment):
        return self.ask(type=SEGMENT_DROP, segment=segment)

    def stub_raw(self, path, unary=False):
        """A method that sends and receives bytes as they are."""
        channel = self.daemon.channel(self.token)
        return channel.unary_unary(path) if unary else channel.stream_unary(path)

    def put_layout(self, layout):
        return self.stub.PutLayout(iter(layout.pages()), timeout=WAIT_S).digest

    def close(self):
        self.socket.close()


# --- layouts ------------------------------------------------------------------------------------------


def chunk(length, n, i):
    c = -(-length // n) if length else 0
    return min(i * c, length), min((i + 1) * c, length)


class Layout:
    """The JSON form of a layout, its shards by an own reading of the rules, and its messages."""

    def __init__(self, name, ranks, meshes, tensors, instances=()):
        self.name, self.ranks, self.meshes, self.instances = name, ranks, {m["name"]: m for m in meshes}, instances
        self.tensors = {t["name"]: t for t in tensors}

    def shards(self, tensor, rank):
        """Boxes [(offset, size)] of `rank`, without empty ones."""
        t = self.tensors[tensor]
        if "regions" in t:
            return [(list(r["offset"]), list(r["size"])) for r in t["regions"] if r["rank"] == rank]
        m = self.meshes[t["mesh"]]
        if rank not in m["ranks"]:
            return []
        position, coordinates = m["ranks"].index(rank), []
        for n in reversed(m["shape"]):
            coordinates.insert(0, position % n)
            position //= n
        begin, end = [0] * len(t["shape"]), list(t["shape"])
        for i in t.get("shard_order", range(len(m["shape"]))):
            p = t["placements"][i]
            if p is None:
                continue
            b, e = chunk(end[p] - begin[p], m["shape"][i], coordinates[i])
            begin[p], end[p] = begin[p] + b, begin[p] + e
        size = [e - b for b, e in zip(begin, end)]
        return [] if 0 in size else [(begin, size)]

    def pages(self, page=1000):
        header = pb.LayoutHeader(name=self.name, ranks=self.ranks, n_tensors=len(self.tensors),
                                 meshes=[pb.Mesh(**m) for m in self.meshes.values()],
                                 instances=[pb.Instance(ranks=i) for i in self.instances])
        tensors = [self.tensor_message(t) for t in self.tensors.values()]
        yield pb.PutLayoutRequest(header=header, tensors=tensors[:page])
        for i in range(page, len(tensors), page):
            yield pb.PutLayoutRequest(tensors=tensors[i:i + page])

    @staticmethod
    def tensor_message(t):
        m = pb.Tensor(name=t["name"], shape=t["shape"], dtype=DTYPES[t["dtype"]][0], cast=t.get("cast", False),
                      shard_order=t.get("shard_order", []))
        if "derived" in t:
            m.derived.CopyFrom(pb.Derived(**t["derived"]))
        if "regions" in t:
            for r in t["regions"]:
                m.regions.add(rank=r["rank"], box=pb.Box(offset=r["offset"], size=r["size"]))
            return m
        m.mesh = t["mesh"]
        for p in t["placements"]:
            m.placements.add(kind=pb.Placement.REPLICATE if p is None else pb.Placement.SHARD, dim=p or 0)
        return m


def indices(shape, box):
    """Global linear index of each element of a box, row-major."""
    offset, size = box
    out = [0]
    for d, n in enumerate(shape):
        out = [i * n + offset[d] + j for i in out for j in range(size[d])]
    return out


def mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ (x >> 15)) * 0x846CA68B & 0xFFFFFFFF
    return x ^ (x >> 16)


def values(name, shape, box, n_bytes, version):
    """The bytes that a box of a tensor has in a version: each element its own, none of them zero."""
    salt = mix(sum(ord(c) * 131 ** i for i, c in enumerate(name)) + version * 7919 & 0xFFFFFFFF)
    top = (1 << (8 * min(n_bytes, 4) - 2)) - 1  # clear of NaN and infinity, should it be read as a float
    return b"".join(((mix(i + salt) & top) | 1).to_bytes(n_bytes, "little") for i in indices(shape, box))


# --- workers ------------------------------------------------------------------------------------------


class Worker:
    """One attached worker: memory for its shards, its stream, its events."""

    def __init__(self, client, model, side, layout, rank, device, receive=pb.RECEIVE_UNSPECIFIED, automatic=False,
                 pieces=None, attach=True, **hello):
        self.client, self.model, self.side, self.layout, self.rank = client, model, side, layout, rank
        self.device, self.receive, self.automatic = device, receive, automatic
        self.place = {}  # tensor -> [(offset bytes, box)]
        n = 0
        for t in layout.tensors.values():
            for box in layout.shards(t["name"], rank):
                self.place.setdefault(t["name"], []).append((n, box))
                n += self.box_bytes(t, box)
        self.n_bytes = n
        two = receive == pb.RECEIVE_STAGED
        self.segment, self.memory = client.segment(n * (2 if two else 1), (side, rank, device))
        self.memory[:] = bytes([POISON]) * len(self.memory)
        self.shadow = n if two else 0
        self.pieces, self.hello = pieces, hello
        self.events = queue.Queue()
        self.requests = None
        # Not before the memory, which takes time: a Python channel without a call answers no ping, and is cut off for that.
        self.digest = client.put_layout(layout)
        if attach:
            self.attach()

    @staticmethod
    def box_bytes(t, box):
        n = DTYPES[t["dtype"]][1]
        for s in box[1]:
            n *= s
        return n

    # -- attach

    def hello_message(self, **changes):
        fields = dict(model=self.model, side=self.side, layout_name=self.layout.name, layout_digest=self.digest,
                      rank=self.rank, device=self.device, receive=self.receive,
                      accept_automatically=self.automatic, segments=[self.segment])
        fields.update(self.hello)
        fields.update(changes)
        return pb.AttachHello(**fields)

    def binding_pieces(self, base=0):
        for name, boxes in self.place.items():
            for offset, box in boxes:
                yield pb.BindingPiece(tensor=name, segment=0, offset_bytes=base + offset,
                                      box=pb.Box(offset=box[0], size=box[1]))

    def messages(self, **changes):
        yield pb.AttachRequest(hello=self.hello_message(**changes))
        live = list(self.binding_pieces()) if self.pieces is None else self.pieces
        yield pb.AttachRequest(bindings=pb.BindingPage(pieces=live))
        if self.shadow:
            yield pb.AttachRequest(bindings=pb.BindingPage(shadow=True, pieces=list(self.binding_pieces(self.shadow))))
        yield pb.AttachRequest(done=pb.AttachDone())

    def attach(self, **changes):
        """Opens the stream and waits for `attached`; a refusal is raised as grpc.RpcError."""
        self.requests = queue.Queue()
        for m in self.messages(**changes):
            self.requests.put(m)
        self.stream = self.client.stub.Attach(iter(self.requests.get, None))
        first = next(self.stream)
        assert first.WhichOneof("event") == "attached", first
        self.attached = first.attached
        self.id = first.attached.worker
        self.events = queue.Queue()
        threading.Thread(target=self._read, args=(self.stream, self.events), daemon=True).start()
        return self

    @staticmethod
    def _read(stream, events):
        try:
            for m in stream:
                kind = m.WhichOneof("event")
                events.put((kind, getattr(m, kind)))
            events.put(("end", None))
        except grpc.RpcError as e:
            events.put(("end", e))

    def event(self, kind, version=None, attempt=0, timeout=WAIT_S, unless=None):
        """The next event of that kind (and version, and not of an older attempt); others are skipped. None: one of the kind `unless`
        came first."""
        end = time.monotonic() + timeout
        while True:
            try:
                k, e = self.events.get(timeout=max(end - time.monotonic(), 0.001))
            except queue.Empty:
                raise Deadline(f"rank {self.rank} of {self.layout.name}: no event {kind} {version or ''}\n"
                               + self.client.daemon.tail()) from None
            if k in (kind, unless) and (version is None or e.version == version and e.attempt >= attempt):
                return e if k == kind else None
            if k == "end":
                raise AssertionError(f"rank {self.rank} of {self.layout.name}: the stream ended ({e}) before {kind}")

    def goodbye(self):
        self.requests.put(None)
        self.event("end")

    def break_stream(self):
        self.stream.cancel()
        self.requests.put(None)

    # -- content

    def write(self, version, base=0):
        for name, boxes in self.place.items():
            t = self.layout.tensors[name]
            for offset, box in boxes:
                data = values(name, t["shape"], box, DTYPES[t["dtype"]][1], version)
                self.memory[base + offset:base + offset + len(data)] = data

    def wrong(self, version, base=0):
        """Names of tensors whose memory is not that version."""
        return [name for name, boxes in self.place.items() for offset, box in boxes
                if self.memory[base + offset:base + offset + self.box_bytes(self.layout.tensors[name], box)]
                != values(name, self.layout.tensors[name]["shape"], box,
                          DTYPES[self.layout.tensors[name]["dtype"]][1], version)]

    # -- calls

    def publish(self, version, **fields):
        return self.client.stub.Publish(pb.PublishRequest(worker=self.id, version=version, **fields), timeout=WAIT_S)

    def ready(self, version):
        return self.client.stub.Ready(pb.ReadyRequest(worker=self.id, version=version), timeout=WAIT_S)

    def accept(self, version, attempt=0, reject=False, reason=""):
        return self.client.stub.Accept(pb.AcceptRequest(worker=self.id, version=version, attempt=attempt,
                                                        reject=reject, reason=reason), timeout=WAIT_S)

    def apply(self, version, skip=False):
        return self.client.stub.Apply(pb.ApplyRequest(worker=self.id, version=version, skip=skip), timeout=WAIT_S)


class Fleet:
    """A trainer side and a rollout side of one model, each worker a client of its own unless `client` is given."""

    def __init__(self, daemon, source, destination, source_devices, destination_devices, model="m",
                 receive=pb.RECEIVE_STAGED, automatic=False):
        self.daemon, self.model = daemon, model
        self.trainer, self.rollout = Client(daemon), Client(daemon)
        self.sources = [Worker(self.trainer, model, pb.SIDE_SOURCE, source, r, d)
                        for r, d in enumerate(source_devices)]
        self.destinations = [Worker(self.rollout, model, pb.SIDE_DESTINATION, destination, r, d, receive, automatic)
                             for r, d in enumerate(destination_devices)]

    def publish(self, version):
        for w in self.sources:
            w.write(version)
            w.publish(version)

    def submit(self, version, request=None, **options):
        return self.trainer.stub.Submit(pb.SubmitRequest(model=self.model, version=version,
                                                         request_id=request or f"r{version}",
                                                         options=pb.RefitOptions(**options)), timeout=WAIT_S)

    def watch(self, version, until, timeout=WAIT_S):
        """Follows a refit; returns the first state for which until(state) holds."""
        stream = self.trainer.stub.WatchRefit(pb.WatchRefitRequest(model=self.model, version=version), timeout=timeout)
        last = None
        try:
            for last in stream:
                if until(last):
                    stream.cancel()
                    return last
        except grpc.RpcError as e:
            raise AssertionError(f"WatchRefit ended with {e.code()} {e.details()}; last state:\n{last}\n"
                                 + self.daemon.tail()) from None
        raise AssertionError(f"WatchRefit ended; last state:\n{last}\n{self.daemon.tail()}")

    def final(self, version):
        return self.watch(version, lambda s: s.phase in (pb.PHASE_COMMITTED, pb.PHASE_ABORTED, pb.PHASE_SUPERSEDED))

    def accept(self, version, attempt=0):
        for w in self.destinations:
            e = w.event("accept_requested", version, attempt)
            w.accept(version, e.attempt)

    def refit(self, version, **options):
        """A whole good refit, up to the commit."""
        self.publish(version)
        self.submit(version, **options)
        if self.destinations[0].receive == pb.RECEIVE_IN_PLACE:
            for w in self.destinations:
                w.event("ready_requested", version)
                w.ready(version)
        if not self.destinations[0].automatic:
            self.accept(version)
        s = self.final(version)
        assert s.phase == pb.PHASE_COMMITTED, s
        return s


@contextlib.contextmanager
def refused(case, code, *words):
    """The block ends with that status, and its text has all the words."""
    with case.assertRaises(grpc.RpcError) as caught:
        yield caught
    e = caught.exception
    case.assertEqual(e.code(), code, e.details())
    for word in words:
        case.assertIn(word, e.details())


def leave_out(file):
    """Skips what backends.py says of this file on the stand-in; a name that isn't there is an error."""
    if backends.CUDA and file.not_on_standin:
        print(f"not on the stand-in: {file.not_on_standin}\n0 passed, 0 failed, 1 skipped")
        sys.exit(0)
    for name, why in (file.without if backends.CUDA else {}).items():
        case, _, test = name.partition(".")
        case = getattr(sys.modules["__main__"], case)
        setattr(case, test, unittest.skip("not on the stand-in: " + why)(getattr(case, test)))


def main():
    """Runs the tests of the file; the last line is what scripts/run-tests counts."""
    leave_out(backends.of(sys.argv[0]))
    program = unittest.main(exit=False, module="__main__", verbosity=2)
    r = program.result
    bad = len(r.failures) + len(r.errors) + len(r.unexpectedSuccesses)
    gc.collect()  # memory that nobody has any more looks around itself
    for text in cuda_memory.Memory.trespasses:
        print(text)
        bad += 1
    if bad and backends.CUDA:
        print(backends.again())
    print(f"{r.testsRun - bad - len(r.skipped)} passed, {bad} failed, {len(r.skipped)} skipped", flush=True)
    sys.exit(1 if bad or r.testsRun == 0 else 0)


# --- the models that the tests use ----------------------------------------------------------------------


def mesh(name, shape, ranks=None, dim_names=()):
    n = 1
    for s in shape:
        n *= s
    return {"name": name, "shape": list(shape), "ranks": list(ranks if ranks is not None else range(n)),
            "dim_names": list(dim_names)}


def tensor(name, shape, dtype, mesh_name, placements, **more):
    return {"name": name, "shape": list(shape), "dtype": dtype, "mesh": mesh_name, "placements": list(placements), **more}


def small_source():
    """Four trainer ranks, TP4: rows, columns, one replicated, one uneven."""
    return Layout("train", 4, [mesh("tp", [4])], [
        tensor("w1", [16, 12], "bfloat16", "tp", [0]), tensor("w2", [12, 16], "bfloat16", "tp", [1]),
        tensor("norm", [12], "float32", "tp", [None]), tensor("odd", [7, 5], "int32", "tp", [0])])


def small_destination(name="rollout", dtype="bfloat16", cast=False):
    """TP2 × DP2: two instances."""
    return Layout(name, 4, [mesh("dptp", [2, 2], dim_names=["dp", "tp"])], [
        tensor("w1", [16, 12], dtype, "dptp", [None, 1], cast=cast),
        tensor("w2", [12, 16], dtype, "dptp", [None, 0], cast=cast),
        tensor("norm", [12], "float32", "dptp", [None, None]), tensor("odd", [7, 5], "int32", "dptp", [None, 0])],
        instances=[[0, 1], [2, 3]])


def slow_source(rows=1024):
    """One large tensor, TP4: what a refit in the middle of its bytes is shown with."""
    return Layout("train", 4, [mesh("tp", [4])], [tensor("big", [rows, 1024], "uint8", "tp", [0])])


def slow_destination():
    return Layout("rollout", 4, [mesh("dptp", [2, 2])], [tensor("big", [1024, 1024], "uint8", "dptp", [None, 1])],
                  instances=[[0, 1], [2, 3]])


class SlowFleet(Fleet):
    """A refit whose bytes take a while: random content, compared as a whole."""

    RATE = {"devices__network_gbytes_per_s": 0.0004}

    def __init__(self, daemon, **more):
        super().__init__(daemon, slow_source(), slow_destination(), [0, 1, 2, 3], [4, 5, 6, 7], **more)
        self.content = {}

    def publish(self, version):
        self.content[version] = os.urandom(1 << 20)
        for w in self.sources:
            w.memory[:] = self.content[version][w.rank << 18:(w.rank + 1) << 18]
            w.publish(version)

    def publish_again(self, version):
        """The same content: an ended attempt has released the sources."""
        for w in self.sources:
            w.publish(version)

    def expected(self, w, version):
        column = (w.rank % 2) * 512
        return b"".join(self.content[version][r * 1024 + column:r * 1024 + column + 512] for r in range(1024))

    def live_is(self, w, version):
        return w.memory[:1 << 19] == self.expected(w, version)

    def apply_everywhere(self, version):
        """Each destination applies it, and its live memory is then that version's to the byte."""
        for w in self.destinations:
            w.apply(version)
            if not self.live_is(w, version):
                raise AssertionError(f"rank {w.rank}: its live memory is not version {version}")

    def until_bytes_move(self, version):
        return self.watch(version, lambda s: s.phase == pb.PHASE_TRANSFERRING and 0 < s.bytes.landed < s.bytes.total)
