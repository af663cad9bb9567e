#!/usr/bin/python3
"""Noise, floods and hostile messages at every door of a running daemon: it stays up, a refit beside them goes on,
and memory and descriptors come back to their level."""
import array
import random
import resource
import unittest

from rig import *

INVALID, EXHAUSTED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\x04\0\0\0\0\0"
REFUSALS = (INVALID, EXHAUSTED, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION,
            grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.PERMISSION_DENIED)


def varint(n):
    out = b""
    while n >= 0x80:
        out, n = out + bytes([n & 0x7F | 0x80]), n >> 7
    return out + bytes([n])


def field(number, data):
    """A length-delimited field."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def memory_kib(pid):
    text = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", text)[1])


def cpu_s(pid):
    """User and system seconds of a process so far."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Hostile(DaemonCase):
    """One daemon for all; beside the hostile client a fleet of its own keeps refitting."""

    @classmethod
    def setUpClass(cls):
        cls.daemon = Daemon(clients__max_layouts=1000).start()
        cls.fleet = Fleet(cls.daemon, small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7], model="bystander",
                          automatic=True)
        cls.version = 0

    def setUp(self):
        self.random = random.Random(self.id())
        self.refit()
        self.pids = (self.daemon.process.pid, self.daemon.data_plane_pid())
        self.n_fds = self.fds()

    def tearDown(self):
        self.assertIsNone(self.daemon.process.poll(), self.daemon.tail())
        self.refit()
        for client in self.daemon.clients[2:]:
            client.close()
        del self.daemon.clients[2:]
        for channel in self.daemon.channels[4:]:
            channel.close()
        del self.daemon.channels[4:]
        self.assertEqual(self.daemon.data_plane_pid(), self.pids[1], "the data plane was replaced")
        end = time.monotonic() + WAIT_S
        while any(now > before + 6 for now, before in zip(self.fds(), self.n_fds)):  # gRPC keeps a few of its own
            self.assertLess(time.monotonic(), end, f"descriptors were {self.n_fds}, now {self.fds()}")
            threading.Event().wait(0.01)

    def fds(self):
        return [len(os.listdir(f"/proc/{pid}/fd")) for pid in self.pids]

    def refit(self):
        """The bystander's next version lands whole; before that it holds the last one."""
        type(self).version += 1
        self.fleet.refit(self.version)
        for w in self.fleet.destinations:
            w.apply(self.version)
            self.assertEqual(w.wrong(self.version), [])

    def connect(self, path):
        s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.addCleanup(s.close)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(WAIT_S), 0))  # a full backlog is waited for
        s.connect(path)
        s.settimeout(WAIT_S)
        return s

    def send_until_cut(self, s, data):
        try:
            s.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            pass

    # --- bytes ---------------------------------------------------------------------------------------

    def test_noise_at_the_grpc_socket(self):
        frames = [PREFACE, PREFACE + SETTINGS, b"GET / HTTP/1.1\r\n\r\n", PREFACE + b"\xff" * 9, b""]
        frames += [PREFACE + SETTINGS + struct.pack(">I", n << 8 | kind)[0:4] + b"\xff" + struct.pack(">I", stream)
                   for kind in range(12) for n in (0, 5, 1 << 20) for stream in (0, 1, 2**31 - 1)]
        for start in frames:
            s = self.connect(self.daemon.socket)
            self.send_until_cut(s, start + self.random.randbytes(self.random.choice((0, 1, 300, 40000))))
            s.close()

    def test_noise_at_the_memory_socket(self):
        for n in list(range(0, RECORD.size * 2, 37)) + [1 << 20]:
            s = self.connect(self.daemon.socket + ".mem")
            self.send_until_cut(s, self.random.randbytes(n))
            s.close()

    def test_half_records_after_a_good_hello(self):
        for n in range(1, RECORD.size, 53):
            c = Client(self.daemon)
            c.socket.sendall(record(type=SEGMENT, bytes=4096)[:n])
            c.socket.close()

    def test_a_record_in_single_bytes_is_still_one(self):
        c, fd = Client(self.daemon), memfd(4096)
        data = record(type=SEGMENT, bytes=4096, request=7)
        socket.send_fds(c.socket, [data[:1]], [fd])
        for i in range(1, len(data)):
            c.socket.sendall(data[i:i + 1])
        self.assertEqual((lambda r: (r.code, r.request))(c.read()), (0, 7))
        os.close(fd)

    def test_a_client_that_never_reads_its_replies_is_cut_off(self):
        c = Client(self.daemon)  # which takes in what is sent, or cuts it off: either way the sending goes on
        data = record(type=SEGMENT_DROP, segment=999) * 64
        try:
            for _ in range(200):
                c.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            return
        except TimeoutError:
            pass
        self.fail("64 x 200 replies were never read, and the daemon goes on")

    def test_types_that_only_the_daemon_sends(self):
        for kind in (0, 2, 4, 6, 2**32 - 1):
            c = Client(self.daemon)
            c.socket.sendall(record(type=kind))
            with self.assertRaises((ConnectionError, TimeoutError)):
                c.read()

    # --- descriptors ---------------------------------------------------------------------------------

    def test_a_flood_of_descriptors_is_closed(self):
        c, fd = Client(self.daemon), memfd(4096)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd] * n)) for n in (253, 4, 5)]
        for r in rights:  # with one whole record: the first is taken, the rest are closed
            c.socket.sendmsg([record(type=SEGMENT, bytes=4096, request=3)], [r])
            self.assertEqual(c.read().code, 0)
        other = Client(self.daemon)  # with each byte of a record that never ends
        for _ in range(RECORD.size - 1):
            other.socket.sendmsg([b"\0"], [rights[1]])
        third = Client(self.daemon)  # with records that ask for none
        for _ in range(100):
            third.socket.sendmsg([record(type=SEGMENT_DROP, segment=1)], [rights[1]])
            third.read()
        self.assertLess(self.fds()[0], self.n_fds[0] + 40)
        os.close(fd)

    def test_a_crowd_of_clients_leaves_descriptors_for_the_work(self):
        # Out of descriptors, at the memory socket: the refit beside it goes on, and there is no busy loop.
        with Daemon() as d:
            f = Fleet(d, small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7], automatic=True)
            limit = len(os.listdir(f"/proc/{d.process.pid}/fd")) + 100
            resource.prlimit(d.process.pid, resource.RLIMIT_NOFILE, (limit, limit))
            mark, crowd = d.log_mark(), []
            for _ in range(limit):
                crowd.append(self.connect(d.socket + ".mem"))
            d.wait_log("client refused", since=mark)
            pid = d.data_plane_pid()
            f.refit(1)
            for w in f.destinations:
                w.apply(1)
                self.assertEqual(w.wrong(1), [])
            self.assertEqual(d.data_plane_pid(), pid)
            for s in crowd:
                s.close()
            deadline = time.monotonic() + 2 * SLOW
            while True:
                try:
                    Client(d).segment(4096)
                    break
                except (ConnectionError, MemoryError_) as e:
                    self.assertLess(time.monotonic(), deadline, e)

    def test_descriptors_before_hello_and_with_noise(self):
        fd = memfd(4096)
        for data in (record(type=SEGMENT, bytes=4096), os.urandom(RECORD.size), b"x"):
            for _ in range(20):
                s = self.connect(self.daemon.socket + ".mem")
                socket.send_fds(s, [data], [fd] * 4)
                s.close()
        os.close(fd)

    def test_descriptors_of_every_other_kind_are_refused(self):
        read, write = os.pipe()
        pair = socket.socketpair()
        file = tempfile.TemporaryFile()
        file.truncate(4096)
        c = Client(self.daemon)
        for fd in (read, write, pair[0].fileno(), file.fileno(), os.open("/", os.O_RDONLY), c.socket.fileno()):
            with self.assertRaises(MemoryError_) as caught:
                c.ask([fd], type=SEGMENT, bytes=4096)
            self.assertIn("memfd", caught.exception.args[1])
        for n in (2**63, 2**64 - 1, 2**62):
            fd = memfd(4096)
            with self.assertRaises(MemoryError_):
                c.ask([fd], type=SEGMENT, bytes=n)
            os.close(fd)
        for x in (read, write):
            os.close(x)
        pair[0].close(), pair[1].close(), file.close()

    def test_memory_that_has_no_pages_does_not_hold_up_the_others(self):
        # The daemon gives such memory its pages; half a GiB of them takes some 0.2 s.
        c, other = Client(self.daemon), Client(self.daemon)
        other.stub.GetCommitted(pb.GetCommittedRequest(model="bystander"), timeout=WAIT_S)
        n = 1 << 29
        fd = memfd(n, allocate=False)
        socket.send_fds(c.socket, [record(type=SEGMENT, bytes=n, request=1)], [fd])
        begin = time.monotonic()
        other.stub.GetCommitted(pb.GetCommittedRequest(model="bystander"), timeout=WAIT_S)
        took = time.monotonic() - begin
        self.assertEqual(c.read().code, 0)
        whole = time.monotonic() - begin
        os.close(fd)
        c.close()
        self.daemon.clients.remove(c)
        self.assertLess(took, max(0.5 * whole, 0.02), "a call waits for another client's pages")

    # --- messages ------------------------------------------------------------------------------------

    def refuse_raw(self, path, body, codes=(INVALID, EXHAUSTED), unary=True, client=None):
        call = (client or self.client).stub_raw(path, unary=unary)
        with self.assertRaises(grpc.RpcError) as caught:
            call(body if unary else iter(body), timeout=WAIT_S)
        self.assertIn(caught.exception.code(), codes, caught.exception.details())

    def test_small_messages_of_huge_memory(self):
        # Small messages that would take huge memory: 2 M empty submessages, 4 MiB of varints; and the same inside a header.
        self.client = Client(self.daemon)
        put, publish = "/reshard.v1.Refit/PutLayout", "/reshard.v1.Refit/Publish"
        many = 2_000_000
        rss = memory_kib(self.pids[0])
        self.refuse_raw(put, [b"\x12\x00" * many], unary=False)
        self.refuse_raw(put, [field(1, field(3, field(3, b"\x01" * 4_000_000)))], unary=False)
        self.refuse_raw(put, [field(1, b"\x1a\x00" * many)], unary=False)
        self.refuse_raw(put, [field(1, b"\x22\x00" * many)], unary=False)
        self.refuse_raw(put, [field(2, field(2, b"\x01" * 4_000_000))], unary=False)
        self.refuse_raw(put, [field(2, b"\x3a\x00" * many)], unary=False)
        self.refuse_raw(put, [field(31, b"") * (many // 2)], unary=False)
        self.refuse_raw(publish, b"\x1a\x00" * many)
        self.refuse_raw(publish, field(31, b"\xff" * 4_000_000), codes=(INVALID, EXHAUSTED, grpc.StatusCode.NOT_FOUND))
        self.assertLess(memory_kib(self.pids[0]), rss + 128 * 1024 * SLOW)

    def test_hostile_layouts(self):
        # Bad meshes, and numbers at the ends of their types.
        client = Client(self.daemon)

        def put(header, *tensors):
            pages = [pb.PutLayoutRequest(header=pb.LayoutHeader(n_tensors=len(tensors), **header), tensors=tensors)]
            try:
                client.stub.PutLayout(iter(pages), timeout=WAIT_S)
            except grpc.RpcError as e:
                self.assertIn(e.code(), REFUSALS, e.details())
                return e.details()
            return ""

        mesh_of = lambda shape, ranks, n: dict(name="l", ranks=n, meshes=[pb.Mesh(name="m", shape=shape, ranks=ranks)])
        for shape in ([65536, 65536], [2**32 - 1] * 6, [0], [2, 0], [1] * 7, []):
            self.assertIn("'m'", put(mesh_of(shape, [0, 1], 2)))
        for ranks in (2**32 - 1, 2**31, 1 << 21):
            self.assertIn("ranks", put(dict(name="l", ranks=ranks)))
        self.assertIn("ranks", put(dict(name="l", ranks=1, instances=[pb.Instance(ranks=[2**32 - 1])])) + "ranks")
        one = mesh_of([1], [0], 1)
        tensor_of = lambda **m: pb.Tensor(**{**dict(name="w", shape=[4], dtype=pb.DTYPE_UINT8, mesh="m",
                                                    placements=[pb.Placement()]), **m})
        for shape in ([2**63], [2**64 - 1], [2**32, 2**32], [2**62, 2], [2**21] * 3, [2**63, 0]):
            self.assertIn("'w'", put(one, tensor_of(shape=shape)) or "'w'" * (0 in shape))
        for dim in (2**31 - 1, -2**31, 1, -2):
            self.assertIn("'w'", put(one, tensor_of(placements=[pb.Placement(kind=1, dim=dim)])))
        edge = [pb.Box(offset=[2**64 - 1], size=[2]), pb.Box(offset=[2**63], size=[2**63]), pb.Box(offset=[3], size=[2]),
                pb.Box(offset=[], size=[]), pb.Box(offset=[0] * 9, size=[1] * 9), pb.Box(offset=[4], size=[0])]
        for box in edge[:5]:
            self.assertIn("'w'", put(one, tensor_of(mesh="", placements=[], regions=[pb.Region(rank=0, box=box)])))
        self.assertIn("'w'", put(one, tensor_of(mesh="", placements=[], regions=[pb.Region(rank=9, box=edge[2])])))
        self.assertIn("'w'", put(one, tensor_of(mesh="", placements=[], regions=[pb.Region(rank=0)])))
        self.assertIn("'w'", put(one, tensor_of(derived=pb.Derived(**{"from": "w", "rule": "block_scale", "block": [0, 0]}))))

    def test_a_million_regions_are_refused_in_time(self):
        client = Client(self.daemon)
        region = pb.Region(rank=0, box=pb.Box(offset=[0, 0], size=[1, 1])).SerializeToString()
        head = pb.PutLayoutRequest(header=pb.LayoutHeader(name="l", ranks=1, n_tensors=40)).SerializeToString()

        def pages():
            yield head
            for i in range(40):
                t = pb.Tensor(name=f"w{i}", shape=[1 << 20, 1 << 20], dtype=pb.DTYPE_UINT8).SerializeToString()
                yield field(2, t + field(7, region) * 30000)

        # What the daemon spends, not how long that takes beside what else the machine runs; and nobody else waits for it.
        asked, done = [], threading.Event()

        def ask():
            while not done.wait(0.01):
                begin = time.monotonic()
                self.daemon.status("bystander")
                asked.append(time.monotonic() - begin)
        other = threading.Thread(target=ask)
        other.start()
        self.addCleanup(done.set)
        begin = cpu_s(self.pids[0])
        self.client = client
        self.refuse_raw("/reshard.v1.Refit/PutLayout", pages(), unary=False)
        spent = cpu_s(self.pids[0]) - begin
        done.set()
        other.join()
        self.assertLess(spent, 5 if SLOW == 1 else 30 * SLOW)  # in pairs: hours
        self.assertLess(max(asked), 5 * SLOW)

    def test_strings_that_are_no_names(self):
        # Broken UTF-8, control characters, too long: at each string that a request has.
        self.client = Client(self.daemon)
        w = Worker(self.client, "strings", pb.SIDE_SOURCE, small_source(), 0, 0)
        bad = [b"\xf0\x80", b"a\0b", b"\xff\xfe", b"a\nb", b"\x1b[2J", b"x" * 65536, b"\xed\xa0\x80"]
        for s in bad:
            for path, body in (
                    ("Refit/Submit", field(1, s)), ("Refit/Submit", field(1, b"strings") + b"\x10\x01" + field(3, s)),
                    ("Refit/WatchRefit", field(1, s)), ("Refit/Mark", field(1, s)),
                    ("Refit/Mark", field(1, b"strings") + b"\x10\x01" + field(3, s)),
                    ("Refit/GetCommitted", field(1, s)), ("Refit/WatchCommitted", field(1, s)),
                    ("Admin/Status", field(1, s)), ("Admin/Versions", field(1, s)), ("Admin/Timeline", field(1, s)),
                    ("Admin/Abort", field(1, s)), ("Admin/Abort", field(1, b"strings") + field(3, s)),
                    ("Refit/Publish", b"\x09" + struct.pack("<Q", w.id) + b"\x10\x01" + field(3, field(1, s))),
                    ("Refit/Submit", field(1, b"strings") + b"\x10\x01" + field(3, b"r") + field(4, field(5, field(1, s))))):
                self.refuse_raw("/reshard.v1." + path, body, codes=REFUSALS)
        self.assertEqual(self.daemon.status("strings").models[0].workers[0].published, 0)
        w.goodbye()

    def test_random_messages_of_every_method(self):
        self.client = Client(self.daemon)
        methods = [(s.full_name, m) for s in pb.DESCRIPTOR.services_by_name.values() for m in s.methods]
        for service, m in methods:
            channel = self.daemon.channel(self.client.token)
            make = channel.unary_stream if m.name.startswith("Watch") else \
                channel.stream_stream if m.name == "Attach" else \
                channel.stream_unary if m.name == "PutLayout" else channel.unary_unary
            call = make(f"/{service}/{m.name}")
            for n in (0, 1, 2, 3, 5, 9, 40, 900):
                body = self.random.randbytes(n)
                try:
                    reply = call(body if make in (channel.unary_unary, channel.unary_stream) else iter([body]),
                                 timeout=0.5 * SLOW)
                    if not isinstance(reply, bytes):
                        for _ in reply:
                            break
                        reply.cancel()
                except grpc.RpcError as e:
                    self.assertNotIn(e.code(), (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL,
                                                grpc.StatusCode.UNKNOWN), (m.name, body, e.details()))

    # --- calls ---------------------------------------------------------------------------------------

    def test_cancelled_polls_leave_nothing(self):
        # Each cancelled at a moment of its own.
        client = Client(self.daemon)
        client.stub.GetCommitted(pb.GetCommittedRequest(model="bystander"), timeout=WAIT_S)

        def crowd(n):
            calls = [client.stub.GetCommitted.future(pb.GetCommittedRequest(model="bystander", newer_than=2**62,
                                                                            wait_ms=600000)) for _ in range(n)]
            self.random.shuffle(calls)
            for c in calls:
                c.cancel()

        crowd(500)
        rss = memory_kib(self.pids[0])
        for _ in range(int(os.environ.get("RESHARD_POLLS", "2000")) // 500):
            crowd(500)
        if SLOW == 1:  # a sanitizer's allocator keeps what is freed; there the leak report at the end speaks
            self.assertLess(memory_kib(self.pids[0]), rss + 16 * 1024)

    def test_attaches_that_stop_at_each_message(self):
        # A client that ends in the middle of registering: nothing is registered, the rank is free at once.
        client = Client(self.daemon)
        w = Worker(client, "half", pb.SIDE_DESTINATION, small_destination(), 0, 0, pb.RECEIVE_STAGED, attach=False)
        messages = list(w.messages())
        for n in range(len(messages) + 1):
            for _ in range(5):
                stream = client.stub.Attach(iter(messages[:n]), timeout=WAIT_S)
                try:
                    for _ in stream:
                        break
                    stream.cancel()
                except grpc.RpcError as e:
                    self.fail(f"{n} messages: {e.code()} {e.details()}")
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                w.attach()
                break
            except grpc.RpcError as e:
                self.assertEqual(e.code(), grpc.StatusCode.ALREADY_EXISTS, e.details())
                self.assertLess(time.monotonic(), deadline)
        w.goodbye()

    def test_names_that_come_to_nothing_do_not_fill_the_models(self):
        with Daemon(clients__max_models=3) as d:
            client = Client(d)
            layout = Layout("train", 1, [mesh("m", [1])], [tensor("w", [4], "int32", "m", [None])])
            for i in range(6):
                w = Worker(client, f"typo{i}", pb.SIDE_SOURCE, layout, 0, 0, pieces=[], attach=False)
                with refused(self, INVALID, "'w'"):
                    w.attach()
                with refused(self, grpc.StatusCode.NOT_FOUND):
                    client.stub.GetCommitted(pb.GetCommittedRequest(model=f"poll{i}", wait_ms=1), timeout=WAIT_S)
            kept = [Worker(client, f"good{i}", pb.SIDE_SOURCE, layout, 0, 0) for i in range(3)]
            with refused(self, EXHAUSTED, "max_models"):
                Worker(client, "one more", pb.SIDE_SOURCE, layout, 0, 0)
            self.assertEqual(sorted(m.model for m in d.status().models), ["good0", "good1", "good2"])
            for w in kept:
                w.publish(1)


if __name__ == "__main__":
    main()
