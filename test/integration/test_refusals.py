#!/usr/bin/python3
"""Bad input at every door: refused by name, and nothing else is disturbed."""
import unittest

from rig import *

INVALID, PRECONDITION, EXISTS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION,
                                 grpc.StatusCode.ALREADY_EXISTS)
NOT_FOUND, UNAUTHENTICATED, DENIED = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAUTHENTICATED,
                                      grpc.StatusCode.PERMISSION_DENIED)
EXHAUSTED, DEADLINE = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED


class Shared(DaemonCase):
    def setUp(self):
        super().setUp()
        self.client = Client(self.daemon)

    def tearDown(self):
        self.assertIsNone(self.daemon.process.poll(), self.daemon.tail())


def one(name="train", dtype="int32"):
    return Layout(name, 1, [mesh("m", [1])], [tensor("a", [4, 3], dtype, "m", [None]), tensor("b", [2], dtype, "m", [None])])


def piece(name, offset=0, **more):
    return pb.BindingPiece(tensor=name, segment=0, offset_bytes=offset, **more)


class Attach(Shared):
    def refuse(self, code, *words, pieces=None, layout=None, side=pb.SIDE_SOURCE, client=None, **hello):
        w = Worker(client or self.client, self.model, side, layout or one(), 0, 0,
                   pb.RECEIVE_UNSPECIFIED if side == pb.SIDE_SOURCE else pb.RECEIVE_IN_PLACE, pieces=pieces, attach=False)
        with refused(self, code, *words):
            w.attach(**hello)

    def test_binding_beyond_its_segment(self):
        self.refuse(INVALID, "'a'", "segment", pieces=[piece("a", 12), piece("b", 0)])

    def test_binding_that_overlaps_another_tensor_on_a_destination(self):
        self.refuse(INVALID, "'b'", pieces=[piece("a"), piece("b", 40)], side=pb.SIDE_DESTINATION)

    def test_binding_that_misses_a_part(self):
        self.refuse(INVALID, "'a'", pieces=[piece("a", box=pb.Box(offset=[0, 0], size=[3, 3])), piece("b", 48)])

    def test_binding_missing_altogether(self):
        self.refuse(INVALID, "'b'", pieces=[piece("a")])

    def test_binding_of_an_unknown_tensor(self):
        self.refuse(INVALID, "'c'", "train", pieces=[piece("a"), piece("b", 48), piece("c", 0)])

    def test_binding_with_strides_of_another_rank(self):
        self.refuse(INVALID, "'a'", "strides", pieces=[piece("a", stride_bytes=[4]), piece("b", 48)])

    def test_binding_with_a_negative_stride(self):
        self.refuse(INVALID, "'a'", pieces=[piece("a", 44, stride_bytes=[-12, -4]), piece("b", 48)])

    def test_binding_whose_offset_wraps(self):
        self.refuse(INVALID, "'a'", pieces=[piece("a", 2**64 - 8), piece("b", 48)])

    def test_box_with_unequal_dims(self):
        self.refuse(INVALID, "'a'", pieces=[piece("a", box=pb.Box(offset=[0], size=[4, 3])), piece("b", 48)])

    def test_segment_that_the_hello_does_not_name(self):
        self.refuse(INVALID, "segment 1", pieces=[pb.BindingPiece(tensor="a", segment=1), piece("b", 48)])

    def test_segment_of_another_client(self):
        segment, _ = Client(self.daemon).segment(64)
        self.refuse(NOT_FOUND, f"segment {segment}", segments=[segment])

    def test_read_only_segment_for_a_destination(self):
        segment, _ = self.client.segment(64, writable=0)
        self.refuse(INVALID, "read-only", segments=[segment], side=pb.SIDE_DESTINATION)

    def test_unknown_layout(self):
        self.refuse(NOT_FOUND, "PutLayout", layout_digest=b"\1" * 16)

    def test_digest_of_wrong_length(self):
        self.refuse(INVALID, "16", layout_digest=b"\1" * 15)

    def test_layout_under_another_name(self):
        self.refuse(INVALID, "'train'", layout_name="other")

    def test_rank_and_device_that_are_not_there(self):
        self.refuse(INVALID, "rank 1", rank=1)
        self.refuse(INVALID, "device 8", "0 … 7", device=8)

    def test_open_enums(self):
        # A number that no enum has is refused, not taken as something.
        w = Worker(self.client, self.model, pb.SIDE_SOURCE, one(), 0, 0, attach=False)
        for field, number in (("side", 99), ("side", 0), ("receive", 7), ("receive", -1)):
            with refused(self, INVALID, field):
                w.attach(**{field: number})

    def test_source_that_receives_and_destination_that_does_not(self):
        self.refuse(INVALID, "receive", receive=pb.RECEIVE_STAGED)
        self.refuse(INVALID, "receive", receive=pb.RECEIVE_UNSPECIFIED, side=pb.SIDE_DESTINATION)

    def test_shadow_bindings_of_an_in_place_worker(self):
        w = Worker(self.client, self.model, pb.SIDE_DESTINATION, one(), 0, 0, pb.RECEIVE_IN_PLACE, attach=False)
        w.shadow = 1
        with refused(self, INVALID, "STAGED"):
            w.attach()

    def test_names_that_are_not_names(self):
        # Empty, more than a line, too long, with a NUL.
        for bad in ("", "a\nb", "x" * 513, "a\0b"):
            self.refuse(INVALID, "model", model=bad)

    def test_rank_that_is_attached_already(self):
        first = Worker(self.client, self.model, pb.SIDE_SOURCE, one(), 0, 0)
        self.refuse(EXISTS, "rank 0", f"{first.id:016x}")
        self.refuse(EXISTS, "rank 0", client=Client(self.daemon))
        first.publish(1)  # it is not disturbed

    def test_worker_whose_layout_differs_from_its_peers(self):
        two = Layout("train", 2, [mesh("m", [2])], [tensor("a", [4, 3], "int32", "m", [0])])
        other = Layout("train", 2, [mesh("m", [2])], [tensor("a", [4, 3], "int32", "m", [1])])
        first = Worker(self.client, self.model, pb.SIDE_SOURCE, two, 0, 0)
        second = Worker(self.client, self.model, pb.SIDE_SOURCE, other, 1, 1, attach=False)
        with refused(self, PRECONDITION, "train"):
            second.attach()
        first.publish(1)

    def test_messages_out_of_order(self):
        w = Worker(self.client, self.model, pb.SIDE_SOURCE, one(), 0, 0, attach=False)
        hello, page, done = w.messages()
        for order in ([page, hello], [done], [hello, hello], [hello, page, done, done], [hello, page, done, page],
                      [pb.AttachRequest()]):
            requests = queue.Queue()
            for m in order:
                requests.put(m)
            with self.assertRaises(grpc.RpcError) as caught:
                for _ in self.client.stub.Attach(iter(requests.get, None), timeout=WAIT_S):
                    pass
            self.assertIn(caught.exception.code(), (INVALID, PRECONDITION), caught.exception.details())
            requests.put(None)

    def test_nothing_is_left_of_a_refused_worker(self):
        self.refuse(INVALID, "'b'", pieces=[piece("a")])
        w = Worker(self.client, self.model, pb.SIDE_SOURCE, one(), 0, 0)
        self.assertEqual([x.rank for x in self.daemon.status(self.model).models[0].workers], [0])
        w.goodbye()


class Segments(Shared):
    def refuse(self, code, word, fd, n_bytes, **fields):
        with self.assertRaises(MemoryError_) as caught:
            self.client.ask([fd] if fd is not None else [], type=SEGMENT, bytes=n_bytes, **fields)
        self.assertEqual(caught.exception.args[0], code, caught.exception.args)
        self.assertIn(word, caught.exception.args[1])
        if fd is not None:
            os.close(fd)

    def test_unsealed_memory(self):
        self.refuse(-1, "seal", memfd(4096, seal=False), 4096)

    def test_memory_that_is_shorter_than_it_says(self):
        self.refuse(-1, "", memfd(4096), 8192)

    def test_memory_without_pages_is_given_them(self):
        fd = memfd(1 << 20, allocate=False)
        self.client.ask([fd], type=SEGMENT, bytes=1 << 20)
        self.assertGreaterEqual(os.fstat(fd).st_blocks * 512, 1 << 20)  # no later fault can hit the daemon
        os.close(fd)

    def test_what_is_no_shared_memory(self):
        self.refuse(-1, "", os.open("/dev/null", os.O_RDWR), 4096)

    def test_no_descriptor_and_no_bytes(self):
        self.refuse(-1, "descriptor", None, 4096)
        self.refuse(-1, "0 bytes", memfd(4096), 0)

    def test_unknown_kind(self):
        self.refuse(-1, "kind", memfd(4096), 4096, kind=77)

    def test_drop_while_a_worker_uses_it_and_after(self):
        w = Worker(self.client, self.model, pb.SIDE_SOURCE, one(), 0, 0)
        with self.assertRaises(MemoryError_) as caught:
            self.client.drop(w.segment)
        self.assertEqual(caught.exception.args[0], -4)
        w.goodbye()
        self.assertEqual(self.client.drop(w.segment), w.segment)  # answered once it is unmapped
        with self.assertRaises(MemoryError_) as caught:
            self.client.drop(w.segment)
        self.assertEqual(caught.exception.args[0], -2)

    def test_garbage_ends_that_client_alone(self):
        other = Client(self.daemon)
        self.client.socket.sendall(os.urandom(RECORD.size))
        with self.assertRaises((ConnectionError, TimeoutError)):
            self.client.read()
        other.segment(4096)

    def test_other_protocol_is_told(self):
        s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        s.settimeout(WAIT_S)
        s.connect(self.daemon.socket + ".mem")
        s.sendall(record(type=HELLO, protocol=9))
        r = Record(*RECORD.unpack(s.recv(RECORD.size, socket.MSG_WAITALL)))
        self.assertLess(r.code, 0)
        self.assertIn(b"protocol 9", r.text)
        s.close()


class Identity(Shared):
    def test_calls_without_a_token(self):
        stub = self.daemon.refit()
        with refused(self, UNAUTHENTICATED, "memory socket"):
            stub.Submit(pb.SubmitRequest(model="m", version=1, request_id="x"), timeout=WAIT_S)
        with refused(self, UNAUTHENTICATED):
            stub.PutLayout(iter(one().pages()), timeout=WAIT_S)
        with refused(self, UNAUTHENTICATED):
            list(stub.Attach(iter([]), timeout=WAIT_S))

    def test_a_token_of_nobody(self):
        for token in ("0" * 32, "x", "f" * 100):
            with refused(self, UNAUTHENTICATED, "say hello"):
                self.daemon.refit(token).GetCommitted(pb.GetCommittedRequest(model="m"), timeout=WAIT_S)

    def test_a_token_whose_client_has_ended(self):
        self.client.close()
        w = Client(self.daemon)
        w.segment(1)  # the daemon has turned at least once
        with refused(self, UNAUTHENTICATED):
            self.client.stub.Submit(pb.SubmitRequest(model="m", version=1, request_id="x"), timeout=WAIT_S)

    def test_calls_on_another_clients_worker(self):
        w = Worker(self.client, self.model, pb.SIDE_SOURCE, one(), 0, 0)
        other = Client(self.daemon).stub
        with refused(self, DENIED, f"{w.id:016x}"):
            other.Publish(pb.PublishRequest(worker=w.id, version=1), timeout=WAIT_S)
        with refused(self, DENIED):
            other.GetCommitted(pb.GetCommittedRequest(model=self.model, worker=w.id), timeout=WAIT_S)
        with refused(self, NOT_FOUND, "attach again"):
            self.client.stub.Publish(pb.PublishRequest(worker=12345, version=1), timeout=WAIT_S)


class Submits(Shared):
    def fleet(self, **more):
        return Fleet(self.daemon, small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7], model=self.model, **more)

    def test_model_that_nobody_attached_to(self):
        with refused(self, NOT_FOUND, self.model):
            self.client.stub.Submit(pb.SubmitRequest(model=self.model, version=1, request_id="x"), timeout=WAIT_S)

    def test_versions_out_of_order(self):
        # 5, 7, then 6; 7 again; 0; 2^63.
        f = self.fleet(automatic=True)
        for version in (5, 7):
            f.refit(version)
            for w in f.destinations:
                w.apply(version)
        with refused(self, PRECONDITION, "6", "7"):
            f.submit(6)
        self.assertEqual(f.submit(7, "r7").phase, f.submit(7, "r7").phase)  # the same answer again
        with refused(self, INVALID, "0"):
            f.submit(0)
        with refused(self, INVALID):
            f.submit(2**63)

    def test_same_version_with_other_content(self):
        # The same version again with the same content, and with other content.
        f = self.fleet()
        first = f.submit(3, "one")
        self.assertEqual(f.submit(3, "one"), first)
        with refused(self, EXISTS, "3", "SUBMITTED", "now release at committed"):
            f.submit(3, "two", release_at=pb.RELEASE_AT_COMMITTED)
        self.assertEqual(f.submit(3, "same").phase, pb.PHASE_SUBMITTED)  # joins the one in flight
        f.trainer.admin.Abort(pb.AbortRequest(model=self.model, version=3), timeout=WAIT_S)
        for w in f.sources:
            w.goodbye()
        with refused(self, EXISTS, "3", "ABORTED", "then source layout 'train'"):
            f.submit(3, "three")
        with refused(self, EXISTS, "one"):
            f.submit(4, "one")

    def test_destination_tensor_without_source(self):
        # Names that differ by a prefix: refused before anything moves, by name.
        source = Layout("train", 1, [mesh("m", [1])], [tensor("blk.0.base_layer.weight", [2], "int32", "m", [None])])
        destination = Layout("rollout", 1, [mesh("m", [1])], [tensor("blk.0.weight", [2], "int32", "m", [None])])
        f = Fleet(self.daemon, source, destination, [0], [4], model=self.model)
        f.publish(1)
        f.submit(1)
        s = f.final(1)
        self.assertEqual(s.phase, pb.PHASE_ABORTED)
        self.assertIn("blk.0.weight", s.reason)
        self.assertEqual(set(f.destinations[0].memory[:]), {POISON})

    def test_dtype_that_differs_without_a_cast(self):
        f = Fleet(self.daemon, small_source(), small_destination(dtype="float16"), [0, 1, 2, 3], [4, 5, 6, 7],
                  model=self.model)
        f.publish(1)
        f.submit(1)
        s = f.final(1)
        self.assertEqual(s.phase, pb.PHASE_ABORTED)
        self.assertIn("w1", s.reason)
        self.assertIn("cast", s.reason)

    def test_sources_that_never_publish_are_named(self):
        f = self.fleet()
        for w in f.sources[:2]:
            w.write(1)
            w.publish(1)
        f.submit(1, prepare_timeout_ms=int(300 * SLOW))
        f.sources[2].event("publish_requested", 1)
        s = f.final(1)
        self.assertEqual(s.phase, pb.PHASE_ABORTED)
        self.assertIn("train/rank 2", s.reason)
        self.assertIn("train/rank 3", s.reason)
        self.assertNotIn("train/rank 1", s.reason)
        f.refit(2)  # usable at once for the next version

    def test_options_that_are_not_known(self):
        f = self.fleet()
        for bad in ({"strategy": 9}, {"verify": 9}, {"release_at": -1},
                    {"rules": [pb.StrategyRule(glob="*", strategy=42)]}, {"rules": [pb.StrategyRule()]}):
            with refused(self, INVALID):
                f.submit(1, **bad)
        with refused(self, INVALID, "rollout"):
            f.submit(1, policy=[pb.LayoutPolicy(layout_name="rollout", min_instances=3)])

    def test_verdicts_and_applies_in_the_wrong_state(self):
        f = self.fleet()
        w = f.destinations[0]
        for call in (lambda: w.accept(1), lambda: w.apply(1), lambda: w.publish(1), lambda: f.sources[0].apply(1)):
            with self.assertRaises(grpc.RpcError) as caught:
                call()
            self.assertIn(caught.exception.code(), (PRECONDITION, NOT_FOUND, INVALID), caught.exception.details())

    def test_second_verdict_that_differs(self):
        f = self.fleet()
        f.publish(1)
        f.submit(1)
        w = f.destinations[0]
        e = w.event("accept_requested", 1)
        w.accept(1, e.attempt)
        w.accept(1, e.attempt)
        with refused(self, PRECONDITION):
            w.accept(1, e.attempt, reject=True, reason="changed my mind")

    def test_abort_of_a_committed_version(self):
        f = self.fleet(automatic=True)
        f.refit(1)
        with refused(self, PRECONDITION, "1"):
            f.trainer.admin.Abort(pb.AbortRequest(model=self.model, version=1), timeout=WAIT_S)
        self.assertEqual(self.daemon.status(self.model).models[0].committed, 1)


class Layouts(Shared):
    def refuse(self, word, layout=None, pages=None):
        with refused(self, INVALID, word):
            self.client.stub.PutLayout(iter(pages if pages is not None else layout.pages()), timeout=WAIT_S)

    def header(self, **more):
        return pb.LayoutHeader(name="l", ranks=2, meshes=[pb.Mesh(name="m", shape=[2], ranks=[0, 1])], **more)

    def tensor_pages(self, **tensor):
        base = dict(name="w", shape=[4], dtype=pb.DTYPE_INT32, mesh="m", placements=[pb.Placement(kind=1, dim=0)])
        base.update(tensor)
        return [pb.PutLayoutRequest(header=self.header(n_tensors=1), tensors=[pb.Tensor(**base)])]

    def test_equal_layouts_have_one_digest(self):
        a = self.client.stub.PutLayout(iter(small_source().pages()), timeout=WAIT_S)
        b = self.client.stub.PutLayout(iter(small_source().pages(page=1)), timeout=WAIT_S)
        self.assertEqual((len(a.digest), a.digest, b.known), (16, b.digest, True))

    def test_shape_in_three_spellings_is_one_layout(self):
        # Repeated numbers as protobuf may send them: unpacked, packed, two packed runs.
        # Tensor.shape is field 2 of field 2 of the request.
        rest = (pb.Tensor(name="w", dtype=pb.DTYPE_INT32, mesh="m").SerializeToString(),
                pb.Tensor(placements=[pb.Placement(kind=1, dim=0)]).SerializeToString())
        head = pb.PutLayoutRequest(header=self.header(n_tensors=1)).SerializeToString()
        raw = self.client.stub_raw("/reshard.v1.Refit/PutLayout")
        digests = set()
        for shape in (b"\x10\x04\x10\x06", b"\x12\x02\x04\x06", b"\x12\x01\x04\x12\x01\x06"):
            t = rest[0] + shape + rest[1]
            data = raw(iter([head + b"\x12" + bytes([len(t)]) + t]), timeout=WAIT_S)
            digests.add(pb.PutLayoutReply.FromString(data).digest)
        self.assertEqual(len(digests), 1)

    def test_bad_tensors_are_named(self):
        self.refuse("dtype 99", pages=self.tensor_pages(dtype=99))
        self.refuse("dtype -1", pages=self.tensor_pages(dtype=-1))
        self.refuse("'w'", pages=self.tensor_pages(placements=[pb.Placement(kind=1, dim=3)]))
        self.refuse("'w'", pages=self.tensor_pages(placements=[]))
        self.refuse("kind", pages=self.tensor_pages(placements=[pb.Placement(kind=2)]))
        self.refuse("'x'", pages=self.tensor_pages(mesh="x"))
        self.refuse("'w'", pages=self.tensor_pages(shape=[2**62, 4]))
        self.refuse("9 dims", pages=self.tensor_pages(shape=[1] * 9))
        self.refuse("shard_order", pages=self.tensor_pages(shard_order=[5]))
        self.refuse("block_scale", pages=self.tensor_pages(derived=pb.Derived(**{"from": "w", "rule": "x", "block": [1, 1]})))

    def test_bad_meshes_are_named(self):
        # Repeated ranks, too many, shape and ranks that differ.
        for bad in ([0, 0], [0], [0, 1, 2], [0, 5]):
            header = pb.LayoutHeader(name="l", ranks=2, n_tensors=0, meshes=[pb.Mesh(name="m", shape=[2], ranks=bad)])
            self.refuse("'m'", pages=[pb.PutLayoutRequest(header=header)])

    def test_one_name_twice(self):
        # With the same shape, and with another.
        t = tensor("x.scale", [2], "int32", "m", [None])
        header = pb.LayoutHeader(name="l", ranks=1, n_tensors=2, meshes=[pb.Mesh(**mesh("m", [1]))])
        for second in (t, dict(t, shape=[3])):
            tensors = [Layout.tensor_message(t), Layout.tensor_message(second)]
            self.refuse("x.scale", pages=[pb.PutLayoutRequest(header=header, tensors=tensors)])

    def test_counts_that_do_not_agree(self):
        pages = self.tensor_pages()
        self.refuse("1 tensors", pages=[pb.PutLayoutRequest(header=self.header(n_tensors=2), tensors=pages[0].tensors)])
        self.refuse("n_tensors", pages=[pb.PutLayoutRequest(header=self.header(n_tensors=0), tensors=pages[0].tensors)])
        self.refuse("header", pages=[pb.PutLayoutRequest(tensors=pages[0].tensors)])
        self.refuse("header", pages=[])
        self.refuse("header", pages=[pages[0], pages[0]])

    def test_overlapping_regions(self):
        regions = [pb.Region(rank=0, box=pb.Box(offset=[0], size=[3])), pb.Region(rank=1, box=pb.Box(offset=[2], size=[2]))]
        self.refuse("'w'", pages=self.tensor_pages(mesh="", placements=[], regions=regions))

    def test_hostile_bytes(self):
        # Truncated and malformed bytes as a whole request: refused with
        # INVALID_ARGUMENT or RESOURCE_EXHAUSTED, or accepted by rule; never a crash.
        good = pb.SubmitRequest(model="m", version=1, request_id="x").SerializeToString()
        bodies = [b"\x88\x80\x80\x80\x41\x00", b"\x10" + b"\xff" * 11, b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x05abc",
                  b"\x0b", b"\x0c", b"\x0e", b"\x0f", b"\x02\x00", b"\x0a\x02\xf0\x80", b"\x0a\x03a\x00b",
                  os.urandom(4096), b"\x22\x00" * 30000]
        bodies += [good[:i] for i in range(len(good))]
        submit = self.client.stub_raw("/reshard.v1.Refit/Submit", unary=True)
        for body in bodies:
            with self.assertRaises(grpc.RpcError) as caught:
                submit(body, timeout=WAIT_S)
            self.assertIn(caught.exception.code(), (INVALID, EXHAUSTED, NOT_FOUND), (body[:20], caught.exception))
        put = self.client.stub_raw("/reshard.v1.Refit/PutLayout")
        for body in (b"\x12\x00" * 1_000_000, b"\x12" + b"\x80\x80\x7f" + b"\x00" * 100):
            with self.assertRaises(grpc.RpcError) as caught:
                put(iter([body]), timeout=WAIT_S)
            self.assertIn(caught.exception.code(), (INVALID, EXHAUSTED))

    def test_message_sizes_at_the_limit(self):
        # 4 MiB is taken, one byte more is not, and the connection goes on.
        put = self.client.stub_raw("/reshard.v1.Refit/PutLayout")
        for n, code in ((4 << 20, INVALID), ((4 << 20) + 1, EXHAUSTED)):
            field, length = b"\xfa\x01", n - 6  # an unknown field 31 that fills the message
            varint = bytes([length & 0x7F | 0x80, length >> 7 & 0x7F | 0x80, length >> 14 & 0x7F | 0x80, length >> 21])
            with self.assertRaises(grpc.RpcError) as caught:
                put(iter([field + varint + b"x" * length]), timeout=WAIT_S)
            self.assertEqual(caught.exception.code(), code, caught.exception.details())
        self.client.put_layout(small_source())


if __name__ == "__main__":
    main()
