#!/usr/bin/python3
"""Faults that public reports tell of, rebuilt with the real daemon and real memory where a unit test can't show them."""
import unittest

from rig import *

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "lib"))
from fingerprint import fingerprint  # noqa: E402

PRECONDITION, EXISTS, INVALID = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.ALREADY_EXISTS,
                                 grpc.StatusCode.INVALID_ARGUMENT)


def ranks(name, begin, n, shape=None):
    return mesh(name, shape or [n], list(range(begin, begin + n)))


def whole(name, tensors, rank=0):
    """A layout of one rank that holds everything."""
    return Layout(name, rank + 1, [mesh("m", [1], [rank])],
                  [tensor(t, shape, dtype, "m", [None]) for t, shape, dtype in tensors])


class Case(DaemonCase):
    def fleet(self, source, destination, source_devices, destination_devices, **more):
        more.setdefault("automatic", True)
        return Fleet(self.daemon, source, destination, source_devices, destination_devices, model=self.model, **more)

    def lands(self, f, version=1):
        s = f.refit(version)
        for w in f.destinations:
            if w.receive == pb.RECEIVE_STAGED:
                w.apply(version)
            self.assertEqual(w.wrong(version), [], f"rank {w.rank}")
        return s

    def aborted(self, f, version, *words, **options):
        """A submitted version ends ABORTED, its reason has all the words, and nothing was written."""
        before = [w.memory[:] for w in f.destinations]
        f.submit(version, **options)
        s = f.final(version)
        self.assertEqual(s.phase, pb.PHASE_ABORTED, s)
        for word in words:
            self.assertIn(word, s.reason)
        self.assertEqual([w.memory[:] for w in f.destinations], before)
        return s


class Resharding(Case):
    def test_published_layouts_land_by_value(self):
        # One refit of all of them.
        s, d = [], []

        def pair(name, shape, source, destination):
            s.append(tensor(name, shape, "int32", *source[:2], **(source[2] if len(source) > 2 else {})))
            d.append(tensor(name, shape, "int32", *destination[:2], **(destination[2] if len(destination) > 2 else {})))

        order = {"shard_order": [1, 0]}
        pair("a01", [5, 10], ("r4", [0]), ("r3", [1]))
        pair("a01.whole", [5, 10], ("r4", [0]), ("r1", [None]))
        pair("a03", [3], ("r222", [0, 0, 0]), ("r8", [0]))
        pair("a05", [8, 8], ("r22", [0, 0], order), ("r3", [1]))
        pair("a05.uneven", [5], ("r22", [0, 0], order), ("r1", [None]))
        pair("a09", [7, 3], ("r3", [0]), ("r2", [0]))
        pair("a11", [5, 3], ("r22", [0, 0]), ("r1", [None]))
        pair("a11.ten", [10], ("r23", [0, 0]), ("r4", [0]))
        pair("a12", [8], ("shuffled", [0, 0]), ("r3", [0]))
        pair("a14", [4, 8, 6], ("r22", [1, 1]), ("r22", [1, 2]))
        pair("a22", [8, 4], ("r4", [None]), ("r22", [0, None]))
        pair("a25", [2, 3, 4, 5], ("r2", [3]), ("r3", [1]))
        pair("a25.eight", [2, 1, 3, 1, 2, 1, 2, 3], ("r3", [2]), ("r2", [7]))
        pair("a26", [8, 6, 4], ("r42", [0, 1]), ("r24", [0, 1]))
        pair("a27", [10, 9], ("r22", [0, 0], order), ("r3", [1]))
        pair("a29", [6, 4], ("r22", [None, 0]), ("r32", [1, None]))
        pair("a32", [9, 2], ("r6", [0]), ("r2", [0]))
        pair("a32.back", [9, 2], ("r2", [0]), ("r6", [0]))
        pair("a36", [16], ("r42", [0, None]), ("r1", [None]))
        meshes = [ranks(f"r{n}", 0, n) for n in (1, 2, 3, 4, 6, 8)]
        meshes += [ranks("r" + "".join(map(str, x)), 0, eval("*".join(map(str, x))), x)
                   for x in ([2, 2], [2, 3], [3, 2], [4, 2], [2, 4], [2, 2, 2])]
        meshes.append(mesh("shuffled", [4, 2], [2, 5, 6, 1, 4, 7, 3, 0]))
        f = self.fleet(Layout("train", 8, meshes, s), Layout("rollout", 8, meshes, d), [0, 1, 2, 3] * 2, range(8))
        for version in (1, 2):
            self.lands(f, version)

    def test_a_rank_without_rows_needs_no_memory(self):
        # 512, 512, 512 and 0 elements; the last rank has no segment at all.
        source = Layout("train", 4, [mesh("m", [4])], [tensor("w", [6, 256], "float32", "m", [0])])
        trainer, rollout = Client(self.daemon), Client(self.daemon)
        workers = [Worker(trainer, self.model, pb.SIDE_SOURCE, source, r, r, attach=r < 3) for r in range(4)]
        workers[3].attach(segments=[])
        w = Worker(rollout, self.model, pb.SIDE_DESTINATION, whole("rollout", [("w", [6, 256], "float32")]), 0, 4,
                   pb.RECEIVE_STAGED, True)
        for x in workers:
            x.write(1)
            x.publish(1)
        trainer.stub.Submit(pb.SubmitRequest(model=self.model, version=1, request_id="a"), timeout=WAIT_S)
        w.event("committed", 1)
        w.apply(1)
        self.assertEqual(w.wrong(1), [])

    def test_gaps_of_a_strided_destination_keep_their_poison(self):
        # [4, 31, 10] in memory that is padded to 32 rows per plane; in bf16-sized and 4-byte elements.
        for dtype, n in (("int32", 4), ("bfloat16", 2)):
            model, shape = f"{self.model}.{dtype}", [4, 31, 10]
            source = Layout("train", 2, [mesh("m", [2])], [tensor("w", shape, dtype, "m", [1])])
            destination = whole("rollout", [("w", shape, dtype)])
            trainer, rollout = Client(self.daemon), Client(self.daemon)
            sources = [Worker(trainer, model, pb.SIDE_SOURCE, source, r, r) for r in range(2)]
            w = Worker(rollout, model, pb.SIDE_DESTINATION, destination, 0, 4, pb.RECEIVE_IN_PLACE, True, attach=False)
            segment, memory = rollout.segment(4 * 320 * n)
            memory[:] = bytes([POISON]) * len(memory)

            def bind(plane):
                w.pieces = [pb.BindingPiece(tensor="w", segment=0, stride_bytes=[plane * n, 10 * n, n])]
                return w.attach(segments=[segment])

            with refused(self, INVALID, "'w'"):
                bind(300)
            bind(320)
            for s in sources:
                s.write(1)
                s.publish(1)
            trainer.stub.Submit(pb.SubmitRequest(model=model, version=1, request_id="a"), timeout=WAIT_S)
            w.event("ready_requested", 1)
            w.ready(1)
            w.event("committed", 1)
            dense = values("w", shape, ([0, 0, 0], shape), n, 1)
            for plane in range(4):
                at, of = plane * 320 * n, plane * 310 * n
                self.assertEqual(memory[at:at + 310 * n], dense[of:of + 310 * n])
                self.assertEqual(set(memory[at + 310 * n:at + 320 * n]), {POISON})

    def test_equal_bytes_are_no_replicas(self):
        # 5120 elements of 1.0 over 8 ranks.
        source = Layout("train", 8, [mesh("m", [8])], [tensor("w", [5120], "float32", "m", [0])])
        f = self.fleet(source, whole("rollout", [("w", [5120], "float32")]), range(4, 8), [0])
        rest = [Worker(f.trainer, self.model, pb.SIDE_SOURCE, source, r, r) for r in range(4, 8)]
        one = struct.pack("<f", 1.0)
        for w in f.sources + rest:
            w.memory[:] = one * 640
            w.publish(1)
        f.submit(1)
        s = f.final(1)
        self.assertEqual((s.phase, s.bytes.landed), (pb.PHASE_COMMITTED, 5120 * 4))
        f.destinations[0].apply(1)
        self.assertEqual(f.destinations[0].memory[:5120 * 4], one * 5120)

    def test_fused_gate_and_up_of_three_ranks(self):
        # Eight source ranks, one row of each; three destinations with one fused buffer, gate first.
        t = [("gate", [8, 2], "int32"), ("up", [8, 2], "int32")]
        source = Layout("train", 8, [mesh("m", [8])], [tensor(*x, "m", [0]) for x in t])
        destination = Layout("rollout", 3, [mesh("m", [3])], [tensor(*x, "m", [0]) for x in t])
        f = self.fleet(source, destination, [0, 1, 2, 3] * 2, [4, 5, 6])
        for w in f.sources:
            w.memory[:16] = struct.pack("<4i", 2 * w.rank, 2 * w.rank + 1, 100 + 2 * w.rank, 101 + 2 * w.rank)
            w.publish(1)
        f.submit(1)
        self.assertEqual(f.final(1).phase, pb.PHASE_COMMITTED)
        for w, (begin, end) in zip(f.destinations, ((0, 3), (3, 6), (6, 8))):
            w.apply(1)
            expected = list(range(2 * begin, 2 * end)) + list(range(100 + 2 * begin, 100 + 2 * end))
            self.assertEqual(list(struct.unpack(f"<{len(expected)}i", w.memory[:4 * len(expected)])), expected)

    def test_fused_qkv_rows_cut_across_heads(self):
        # 136 rows in two groups (64 Q, 2 K, 2 V), 17 raw rows on each of 8 ranks, three rows wide.
        groups = ([("q", i) for i in range(64)] + [("k", i) for i in range(2)] + [("v", i) for i in range(2)]
                  + [("q", 64 + i) for i in range(64)] + [("k", 2 + i) for i in range(2)] + [("v", 2 + i) for i in range(2)])
        shapes = {"q": [128, 3], "k": [4, 3], "v": [4, 3]}
        pieces = {r: [] for r in range(8)}  # per rank: [tensor, first row of it, rows, first row of the buffer]
        for row, (name, i) in enumerate(groups):
            mine = pieces[row // 17]
            if mine and mine[-1][0] == name and mine[-1][1] + mine[-1][2] == i:
                mine[-1][2] += 1
            else:
                mine.append([name, i, 1, row % 17])
        self.assertEqual(pieces[3], [["q", 51, 13, 0], ["k", 0, 2, 13], ["v", 0, 2, 15]])  # as published
        regions = {n: [{"rank": r, "offset": [p[1], 0], "size": [p[2], 3]} for r in range(8) for p in pieces[r]
                       if p[0] == n] for n in shapes}
        source = Layout("train", 8, [], [{"name": n, "shape": s, "dtype": "int32", "regions": regions[n]}
                                         for n, s in shapes.items()])
        destination = Layout("rollout", 2, [mesh("m", [2])], [tensor(n, s, "int32", "m", [0]) for n, s in shapes.items()])
        trainer, rollout = Client(self.daemon), Client(self.daemon)
        for r in range(8):
            bound = [pb.BindingPiece(tensor=p[0], segment=0, offset_bytes=p[3] * 12,
                                     box=pb.Box(offset=[p[1], 0], size=[p[2], 3])) for p in pieces[r]]
            w = Worker(trainer, self.model, pb.SIDE_SOURCE, source, r, r % 4, pieces=bound)
            w.memory[:] = b"".join(values(p[0], shapes[p[0]], ([p[1], 0], [p[2], 3]), 4, 1) for p in pieces[r])
            w.publish(1)
        takers = [Worker(rollout, self.model, pb.SIDE_DESTINATION, destination, r, 4 + r, pb.RECEIVE_STAGED, True)
                  for r in range(2)]
        trainer.stub.Submit(pb.SubmitRequest(model=self.model, version=1, request_id="a"), timeout=WAIT_S)
        for w in takers:
            w.event("committed", 1)
            w.apply(1)
            self.assertEqual(w.wrong(1), [])

    def test_a_tensor_that_differs_in_shape_between_the_sides(self):
        # 32008 rows here, 32064 there. No padding rule: refused, both shapes named.
        f = self.fleet(whole("train", [("w", [32008, 4], "uint8")]), whole("rollout", [("w", [32064, 4], "uint8")]), [0], [4])
        f.publish(1)
        self.aborted(f, 1, "w", "32008", "32064")

    def test_a_layout_changed_between_versions(self):
        # [8] over four to two; then, under the same names, whole on one to three.
        first = self.fleet(Layout("train", 4, [ranks("m", 0, 4)], [tensor("w", [8], "int32", "m", [0])]),
                           Layout("rollout", 2, [ranks("m", 0, 2)], [tensor("w", [8], "int32", "m", [0])]), range(4), [4, 5])
        self.lands(first, 1)
        for w in first.sources + first.destinations:
            w.goodbye()
        self.daemon.wait_status(self.model, lambda m: all(w.state == pb.WORKER_GONE or w.side == pb.SIDE_SOURCE
                                                          for w in m.workers), "all gone")
        second = self.fleet(whole("train", [("w", [8], "int32")]),
                            Layout("rollout", 3, [ranks("m", 0, 3)], [tensor("w", [8], "int32", "m", [0])]), [0], [4, 5, 6])
        self.lands(second, 2)
        records = second.trainer.admin.Versions(pb.VersionsRequest(model=self.model), timeout=WAIT_S).versions
        self.assertNotEqual(records[0].plan_digest, records[1].plan_digest)

    def shared(self, source, destination, source_pieces, destination_pieces, n_bytes):
        """A source and a destination worker of one client on one segment: (source, destination, memory)."""
        client = Client(self.daemon)
        segment, memory = client.segment(n_bytes)
        pair = [Worker(client, self.model, pb.SIDE_SOURCE, source, 0, 4, pieces=source_pieces, attach=False),
                Worker(client, self.model, pb.SIDE_DESTINATION, destination, 0, 4, pb.RECEIVE_IN_PLACE, True,
                       pieces=destination_pieces, attach=False)]
        for w in pair:
            w.memory = memory
            w.attach(segments=[segment])
        return *pair, memory

    def test_a_rank_of_both_sides_keeps_what_it_has(self):
        # With equal layouts in the same memory: nothing is copied, the version commits.
        t = [("w", [8, 4], "int32")]
        s, d, memory = self.shared(whole("train", t), whole("rollout", t), None, None, 128)
        for version in (1, 2):
            s.write(version)
            s.publish(version)
            s.client.stub.Submit(pb.SubmitRequest(model=self.model, version=version, request_id=f"{version}"), timeout=WAIT_S)
            d.event("ready_requested", version)
            d.ready(version)
            d.event("committed", version)
            self.assertEqual(d.wrong(version), [])

    def test_overlapping_memory_of_both_sides_is_refused_before_anything_is_written(self):
        # The destination wants the rows elsewhere in memory that the source is still read from.
        t = [("a", [8, 4], "int32"), ("b", [8, 4], "int32")]
        at = lambda name, offset: pb.BindingPiece(tensor=name, segment=0, offset_bytes=offset)
        for name, pieces in (("swapped", [at("a", 128), at("b", 0)]), ("shifted", [at("a", 16), at("b", 144)])):
            self.model = f"overlap.{name}"
            s, d, memory = self.shared(whole("train", t), whole("rollout", t), None, pieces, 512)
            s.write(1)
            before = memory[:]
            s.publish(1)
            s.client.stub.Submit(pb.SubmitRequest(model=self.model, version=1, request_id="a",
                                                  options=pb.RefitOptions(prepare_timeout_ms=3000)), timeout=WAIT_S)
            watch = list(s.client.stub.WatchRefit(pb.WatchRefitRequest(model=self.model, version=1), timeout=WAIT_S))
            self.assertEqual(watch[-1].phase, pb.PHASE_ABORTED, name)
            self.assertIn("overlap", watch[-1].reason)
            self.assertIn("rollout", watch[-1].reason)
            self.assertEqual(memory[:], before)


    def test_two_receivers_of_the_same_memory_are_refused(self):
        # Two ranks of one instance were given one buffer.
        source = whole("train", [("w", [64], "int32")])
        destination = Layout("rollout", 2, [mesh("m", [2])], [tensor("w", [64], "int32", "m", [0])])
        f = self.fleet(source, destination, [0], [])
        segment, memory = f.rollout.segment(4096)
        for r in range(2):
            w = Worker(f.rollout, self.model, pb.SIDE_DESTINATION, destination, r, 4 + r, pb.RECEIVE_IN_PLACE, True, attach=False)
            w.memory = memory
            f.destinations.append(w.attach(segments=[segment]))
        f.publish(1)
        self.aborted(f, 1, "'rollout' rank 0", "'rollout' rank 1", "overlap in memory")

    def test_shadow_that_is_live_memory_is_refused(self):
        # What is served would change while the next version comes in.
        w = Worker(Client(self.daemon), self.model, pb.SIDE_DESTINATION, whole("rollout", [("w", [64], "int32")]), 0, 4,
                   pb.RECEIVE_STAGED, attach=False)
        w.shadow = 252  # the last element of live memory is the first of the shadow
        with refused(self, INVALID, "'w'", "live", "shadow", "overlap"):
            w.attach()
        w.shadow = 256
        w.attach()

    def test_one_memory_handed_over_twice_is_refused(self):
        client = Client(self.daemon)
        w = Worker(client, self.model, pb.SIDE_DESTINATION, whole("rollout", [("w", [64], "int32")]), 0, 4, pb.RECEIVE_STAGED,
                   attach=False)
        again = client.register(w.memory)
        with refused(self, INVALID, f"segments {w.segment} and {again}", "hand it over once"):
            w.attach(segments=[w.segment, again])
        w.attach()


class Frameworks(Case):
    def test_dtypes_in_turn_are_addressed_by_name(self):
        # Tensors a bf16, b fp32, c bf16, d fp32; the payload lies grouped by dtype.
        t = [("a", [4], "bfloat16"), ("b", [2], "float32"), ("c", [4], "bfloat16"), ("d", [2], "float32")]
        f = self.fleet(whole("train", t), whole("rollout", t), [0], [4])
        self.lands(f)

    def test_swapped_tensors_are_named_by_the_clients_own_fingerprints(self):
        # Tensor b's bytes under c's name. Equal sizes, equal dtypes: only the framework's own fingerprint can tell.
        t = [("a", [4], "int32"), ("b", [4], "int32"), ("c", [4], "int32")]
        f = self.fleet(whole("train", t), whole("rollout", t), [0], [4])
        w = f.sources[0]
        w.write(1)
        w.memory[16:48] = w.memory[32:48] + w.memory[16:32]
        expected = [pb.ExpectedFingerprint(tensor=n, fingerprint=fingerprint(values(n, [4], ([0], [4]), 4, 1), [4], 4))
                    for n, _, _ in t]
        w.publish(1, expected=expected)
        s = self.aborted(f, 1)
        self.assertTrue("'b'" in s.reason or "'c'" in s.reason or " b" in s.reason or " c" in s.reason, s.reason)
        self.assertNotIn("'a'", s.reason)

    def test_a_quantised_weight_without_its_scale(self):
        # The missing name is told before a byte moves.
        f = self.fleet(whole("train", [("w", [8], "uint8")]), whole("rollout", [("w", [8], "uint8"), ("w.scale", [2], "float32")]),
                       [0], [4])
        f.publish(1)
        self.aborted(f, 1, "w.scale")

    def test_a_buffer_that_comes_back_with_another_dtype(self):
        # Version 1 commits; the destination attaches anew as float16, without a cast; then as bfloat16 with one.
        source = whole("train", [("w", [8], "float32")])
        f = self.fleet(source, whole("rollout", [("w", [8], "float32")]), [0], [4])
        self.lands(f, 1)
        old = f.destinations[0]
        old.goodbye()
        half = whole("rollout", [("w", [8], "float16")])
        new = Worker(f.rollout, self.model, pb.SIDE_DESTINATION, half, 0, 4, pb.RECEIVE_STAGED, True)
        f.destinations = [new]
        f.publish(2)
        self.aborted(f, 2, "w", "cast")
        with self.assertRaises(grpc.RpcError) as caught:  # the old registration is over
            old.apply(1)
        self.assertEqual(caught.exception.code(), grpc.StatusCode.NOT_FOUND)
        new.goodbye()
        cast = Layout("rollout", 1, [mesh("m", [1])], [tensor("w", [8], "bfloat16", "m", [None], cast=True)])
        w = Worker(f.rollout, self.model, pb.SIDE_DESTINATION, cast, 0, 4, pb.RECEIVE_STAGED, True)
        f.destinations = []
        f.sources[0].memory[:32] = struct.pack("<8f", *range(8))
        f.sources[0].publish(3)
        f.submit(3)
        self.assertEqual(f.final(3).phase, pb.PHASE_COMMITTED)
        w.apply(3)
        self.assertEqual(w.memory[:16], b"".join(struct.pack("<f", x)[2:] for x in range(8)))

    def test_tied_weights_reach_both_holders(self):
        # Tensors emb and head are one buffer at the source and two, on two ranks, at the destination.
        t = [("emb", [6, 4], "int32"), ("head", [6, 4], "int32")]
        source = whole("train", t)
        destination = Layout("rollout", 2, [mesh("m0", [1], [0]), mesh("m1", [1], [1])],
                             [tensor(*t[0], "m0", [None]), tensor(*t[1], "m1", [None])])
        trainer, rollout = Client(self.daemon), Client(self.daemon)
        tied = [pb.BindingPiece(tensor=n, segment=0, offset_bytes=0) for n in ("emb", "head")]
        s = Worker(trainer, self.model, pb.SIDE_SOURCE, source, 0, 0, pieces=tied)
        takers = [Worker(rollout, self.model, pb.SIDE_DESTINATION, destination, r, 4 + r, pb.RECEIVE_STAGED, True)
                  for r in range(2)]
        for version in (1, 2):
            content = os.urandom(96)
            s.memory[:96] = content
            s.publish(version)
            trainer.stub.Submit(pb.SubmitRequest(model=self.model, version=version, request_id=f"{version}"), timeout=WAIT_S)
            for w in takers:
                w.event("committed", version)
                w.apply(version)
                self.assertEqual(w.memory[:96], content)

    def test_a_tied_name_that_only_the_destination_has(self):
        # A source that lists emb alone is refused, not half done.
        f = self.fleet(whole("train", [("emb", [6], "int32")]), whole("rollout", [("emb", [6], "int32"), ("head", [6], "int32")]),
                       [0], [4])
        f.publish(1)
        self.aborted(f, 1, "head")

    def test_names_on_both_sides_are_listed(self):
        # One of three differs; the one that is missing and the one that nobody wants are both told.
        t = [(f"blk.{i}.weight", [4], "int32") for i in range(2)]
        f = self.fleet(whole("train", t + [("blk.2.base_layer.weight", [4], "int32")]),
                       whole("rollout", t + [("blk.2.weight", [4], "int32")]), [0], [4])
        f.publish(1)
        self.aborted(f, 1, "blk.2.weight", "blk.2.base_layer.weight")

    def test_a_hundred_tensors_of_which_one_has_no_source(self):
        # Refused, counted and named.
        t = [(f"t{i:03}", [3], "int32") for i in range(100)]
        f = self.fleet(whole("train", t[:57] + t[58:]), whole("rollout", t), [0], [4])
        f.publish(1)
        self.aborted(f, 1, "t057", "1 ")

    def test_the_result_does_not_depend_on_chunks_or_slots(self):
        # A thousand tensors of 1 to 97 elements. The digests are of what landed, so they must be those of the values.
        t = [(f"t{i:04}", [1 + i * 37 % 97], "uint8") for i in range(1000)]
        source = Layout("train", 3, [mesh("m", [3])], [tensor(*x, "m", [0]) for x in t])
        destination = Layout("rollout", 2, [mesh("m", [2])], [tensor(*x, "m", [0]) for x in t])
        for chunk, slots, piece in ((4096, 1, 64), (4096, 8, 1), (1 << 16, 2, 4096), (64 << 20, 1, 64)):
            with Daemon(devices__chunk_bytes=chunk, devices__ring_slots=slots, refit__least_piece_bytes=piece) as d:
                f = Fleet(d, source, destination, [0, 1, 2], [4, 5], automatic=True)
                self.lands(f)

    def test_tensors_around_the_size_of_the_staging_ring(self):
        # One slot of 1 MiB; columns, so that all goes through it. Bytes on the wire are the bytes needed.
        mib = 1 << 20
        shapes = {"vocabulary": [151936, 16], "same": [mib // 4, 4], "less": [mib - 1, 1], "more": [mib + 1, 1]}
        source = whole("train", [(n, s, "uint8") for n, s in shapes.items()])
        destination = Layout("rollout", 2, [mesh("m", [2])],
                             [tensor(n, s, "uint8", "m", [1 if s[1] > 1 else None]) for n, s in shapes.items()])
        with Daemon(devices__chunk_bytes=mib, devices__ring_slots=1) as d:
            f = Fleet(d, source, destination, [0], [4, 5], automatic=True)
            w = f.sources[0]
            content = os.urandom(w.n_bytes)
            w.memory[:] = content
            w.publish(1)
            f.submit(1)
            s = f.final(1)
            self.assertEqual(s.phase, pb.PHASE_COMMITTED, s.reason)
            self.assertEqual(s.bytes.network, sum(a * b for a, b in shapes.values()))
            for x in f.destinations:
                x.apply(1)
                for name, boxes in x.place.items():
                    (to, (offset, size)), (at, _) = boxes[0], w.place[name][0]
                    n, wide = size[1], shapes[name][1]
                    rows = content[at:at + shapes[name][0] * wide]
                    expected = rows if n == wide else b"".join(rows[r * wide + offset[1]:r * wide + offset[1] + n]
                                                               for r in range(size[0]))
                    self.assertEqual(x.memory[to:to + len(expected)], expected, name)

    def test_half_of_a_fused_parameter_does_not_count(self):
        # Rows of q and kv in one fused buffer, from two ranks; kv's owner is evicted while bytes move.
        rows, wide = 768, 512
        shapes = {"q": [rows * 2 // 3, wide], "kv": [rows // 3, wide]}
        source = Layout("train", 2, [mesh("m0", [1], [0]), mesh("m1", [1], [1])],
                        [tensor("q", shapes["q"], "uint8", "m0", [None]), tensor("kv", shapes["kv"], "uint8", "m1", [None])])
        destination = Layout("rollout", 1, [mesh("m", [1])], [tensor(n, s, "uint8", "m", [None]) for n, s in shapes.items()])
        with Daemon(**SlowFleet.RATE) as d:
            f = Fleet(d, source, destination, [0, 1], [4], automatic=True)
            w = f.destinations[0]

            def publish(version):
                for s in f.sources:
                    s.memory[:] = bytes([version]) * len(s.memory)
                    s.publish(version)

            publish(1)
            f.submit(1)
            self.assertEqual(f.final(1).phase, pb.PHASE_COMMITTED)
            w.apply(1)
            publish(2)
            f.submit(2)
            f.watch(2, lambda s: s.phase == pb.PHASE_TRANSFERRING and 0 < s.bytes.landed < s.bytes.total)
            f.trainer.admin.Evict(pb.EvictRequest(worker=f.sources[1].id, reason="test"), timeout=WAIT_S)
            s = f.final(2)
            self.assertEqual(s.phase, pb.PHASE_ABORTED)
            self.assertIn("rank 1", s.reason)
            self.assertEqual(d.status("m").models[0].committed, 1)
            self.assertEqual(set(w.memory[:rows * wide]), {1})  # what readers see
            with self.assertRaises(grpc.RpcError):
                w.apply(2)


class ControlPlane(Case):
    def test_the_same_submit_at_the_same_instant(self):
        # One attempt; both callers get it.
        f = self.fleet(small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7])
        clients, answers = [Client(self.daemon) for _ in range(8)], queue.Queue()
        gate = threading.Barrier(len(clients))

        def one(client):
            gate.wait()
            try:
                answers.put(client.stub.Submit(pb.SubmitRequest(model=self.model, version=5, request_id="x"), timeout=WAIT_S))
            except grpc.RpcError as e:
                answers.put(e)

        threads = [threading.Thread(target=one, args=(c,)) for c in clients]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        got = [answers.get() for _ in clients]
        self.assertEqual({getattr(g, "attempt", g) for g in got}, {got[0].attempt})
        with refused(self, EXISTS, "5"):
            f.submit(5, "other", verify=pb.VERIFY_OFF)

    def test_the_same_content_again_after_its_commit(self):
        # Repeats get the first answer, published again or not; other content does not become version 5.
        f = self.fleet(small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7])
        for w in f.sources:
            w.write(5)
        self.assertEqual(f.sources[0].publish(5), f.sources[0].publish(5))
        for w in f.sources[1:]:
            w.publish(5)
        first = f.submit(5, "x")
        self.assertEqual(f.final(5).phase, pb.PHASE_COMMITTED)
        for w in f.sources:
            w.event("source_released", 5)
            w.write(6)
            w.publish(5)
        self.assertEqual(f.submit(5, "x"), first)
        with refused(self, EXISTS, "5", "other weights"):
            f.submit(5, "y")
        for w in f.destinations:
            w.apply(5)
            self.assertEqual(w.wrong(5), [])

    def test_without_verification_an_aborted_version_may_be_tried_again(self):
        # Nothing is known of the content then, so it can't be said to differ.
        with Daemon(refit__verify="off", **SlowFleet.RATE) as d:
            f = SlowFleet(d, automatic=True)
            f.publish(1)
            f.submit(1)
            f.until_bytes_move(1)
            f.trainer.admin.Abort(pb.AbortRequest(model="m", version=1), timeout=WAIT_S)
            f.publish_again(1)
            f.submit(1, "again")
            s = f.watch(1, lambda s: s.attempt == 2 and s.phase in (pb.PHASE_COMMITTED, pb.PHASE_ABORTED))
            self.assertEqual(s.phase, pb.PHASE_COMMITTED, s.reason)
            f.apply_everywhere(1)

    def test_the_data_plane_has_no_listening_socket(self):
        # Nothing of the servers is inherited by the process that is spawned beside them.
        listening = {line.split()[6] for line in pathlib.Path("/proc/net/unix").read_text().splitlines()[1:]
                     if line.split()[3] == "00010000"}
        fds = pathlib.Path(f"/proc/{self.daemon.data_plane_pid()}/fd")
        links = [os.readlink(x) for x in fds.iterdir()]
        self.assertTrue(any(x.startswith("socket:") for x in links))  # its own pair
        for x in links:
            self.assertNotIn(x.removeprefix("socket:[").rstrip("]"), listening)


if __name__ == "__main__":
    main()
