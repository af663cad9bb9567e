#!/usr/bin/python3
"""Verification end to end: whatever goes wrong with the bytes, on whichever side, is caught before the commit and named by
tensor, box and rank; what was served before is still served, and the next attempt is right.

Workers do their harm by themselves (they write memory that they should not, or declare what is not so). What a data plane
does wrong it does by RESHARD_DAMAGE (daemon/base/crash.h). That a blamed box really is the wrong one is read from the
destination's memory here."""
import unittest
import unittest.mock

import nodes as cluster
from rig import *

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "lib"))
from fingerprint import fingerprint  # noqa: E402

# By one node about its own memory, and by the coordinator about what nodes have told.
BLAME = re.compile(r"tensor '([^']+)'(?:, box)? \[([^]]*)\][,:] layout '([^']+)' rank (\d+)")


def source(dtype="int32"):
    """Four ranks: rows, columns, one replicated."""
    return Layout("train", 4, [mesh("tp", [4])],
                  [tensor("rows", [64, 48], dtype, "tp", [0]), tensor("columns", [48, 64], dtype, "tp", [1]),
                   tensor("norm", [96], "int32", "tp", [None])])


def destination(dtype="int32", cast=False):
    """TP2 × DP2, two instances."""
    return Layout("rollout", 4, [mesh("dptp", [2, 2])],
                  [tensor("rows", [64, 48], dtype, "dptp", [None, 1], cast=cast),
                   tensor("columns", [48, 64], dtype, "dptp", [None, 0], cast=cast),
                   tensor("norm", [96], "int32", "dptp", [None, None])], instances=[[0, 1], [2, 3]])


def blamed(reason):
    """(tensor, box, layout, rank) of a reason."""
    m = BLAME.search(reason)
    assert m, reason
    spans = [tuple(map(int, x.split(":"))) for x in m[2].split(", ") if x] if m[2] else []
    return m[1], ([a for a, _ in spans], [b - a for a, b in spans]), m[3], int(m[4])


def part(w, name, box, base):
    """The bytes of a box of a tensor in a worker's memory, and what they must be is values() of the same box."""
    t = w.layout.tensors[name]
    n = DTYPES[t["dtype"]][1]
    for at, (offset, size) in w.place[name]:
        if all(o <= b and b + s <= o + z for o, z, b, s in zip(offset, size, box[0], box[1])):
            strides = [n]
            for z in reversed(size[1:]):
                strides.insert(0, strides[0] * z)
            local = [b - o for o, b in zip(offset, box[0])]
            starts = [base + at + sum(i * s for i, s in zip(local, strides))]
            for s, stride in list(zip(box[1], strides))[:-1]:
                starts = [x + i * stride for x in starts for i in range(s)]
            return b"".join(w.memory[x:x + box[1][-1] * n] for x in starts)
    raise AssertionError(f"rank {w.rank} has no box {box} of {name}")


def expected(layout, version, only=None):
    """What a framework would say that whole tensors are, computed its own way."""
    out = []
    for name, t in layout.tensors.items():
        if only is None or name in only:
            n = DTYPES[t["dtype"]][1]
            data = values(name, t["shape"], ([0] * len(t["shape"]), t["shape"]), n, version)
            out.append(pb.ExpectedFingerprint(tensor=name, fingerprint=fingerprint(data, t["shape"], n)))
    return out


class Case(unittest.TestCase):
    def daemon(self, damage="", **settings):
        env = {"RESHARD_DAMAGE": damage} if damage else {}
        with unittest.mock.patch.dict(os.environ, env):
            d = Daemon(**settings).start()

        def end():
            if any(t is self for t, _ in self._outcome.result.failures + self._outcome.result.errors):
                print(f"--- the daemon's log:\n{d.tail(40)}", file=sys.stderr)
            d.close()

        self.addCleanup(end)
        return d

    def fleet(self, d, **more):
        more.setdefault("automatic", True)
        return Fleet(d, source(), destination(), [0, 1, 2, 3], [4, 5, 6, 7], **more)

    def serves(self, f, version):
        for w in f.destinations:
            self.assertEqual(w.wrong(version), [], f"rank {w.rank}")

    def aborted(self, f, version, *words):
        s = f.final(version)
        self.assertEqual(s.phase, pb.PHASE_ABORTED, s)
        for word in words:
            self.assertIn(word, s.reason)
        return s

    def not_committed(self, d, f, version):
        """Nobody has it, by any question."""
        with self.assertRaises(grpc.RpcError):
            f.rollout.stub.GetCommitted(pb.GetCommittedRequest(model="m"), timeout=WAIT_S)
        for w in f.destinations:
            with self.assertRaises(grpc.RpcError):
                w.apply(version)

    def again(self, f, version):
        """The same version once more; then it is everywhere."""
        f.publish(version)
        f.submit(version, "again")
        s = f.watch(version, lambda s: s.attempt > 1 and s.phase in (pb.PHASE_COMMITTED, pb.PHASE_ABORTED))
        self.assertEqual(s.phase, pb.PHASE_COMMITTED, s.reason)
        for w in f.destinations:
            w.apply(version)
        self.serves(f, version)
        return s


class OnTheWay(Case):
    """The data plane itself does it wrong."""

    def caught(self, damage, **settings):
        d = self.daemon(damage, **settings)
        f = self.fleet(d)
        f.publish(1)
        f.submit(1)
        s = self.aborted(f, 1, "what has landed differs from its source")
        name, box, layout, rank = blamed(s.reason)
        self.assertEqual(layout, "rollout")
        w = f.destinations[rank]
        t = w.layout.tensors[name]
        self.assertNotEqual(part(w, name, box, w.shadow), values(name, t["shape"], box, 4, 1), "the blamed box is right")
        self.not_committed(d, f, 1)
        self.again(f, 1)
        return name, box

    def test_a_flipped_bit_is_blamed_on_its_box(self):
        places = {str(self.caught(f"flipped-bit:{n}")) for n in (1, 4, 7)}
        for n in (2, 3, 5, 6, 8, 9):  # which box the n-th copy is of is not the same each time
            if len(places) > 1:
                return
            places.add(str(self.caught(f"flipped-bit:{n}")))
        self.assertGreater(len(places), 1)  # not one box whatever was flipped

    def test_a_lost_chunk_is_blamed_on_its_box(self):
        for n in (1, 5):
            self.caught(f"lost-chunk:{n}")

    def test_bytes_at_the_wrong_address_are_blamed_on_their_box(self):
        # All of the right bytes are there, in another order.
        for n in (1, 5):
            self.caught(f"wrong-address:{n}")

    def test_a_copy_that_was_not_made_is_blamed_on_its_box(self):
        # Packing, unpacking and fan-out inside the domain are copies; over TCP connections, too.
        for n in (1, 6):
            self.caught(f"lost-copy:{n}")
        if not backends.CUDA:
            self.caught("lost-copy:3", devices__transport="tcp", devices__local_pairs="transport")

    def test_device_copies_in_the_place_of_messages_are_caught_like_those(self):
        by_cpu = [] if backends.CUDA else ["flipped-bit:2"]
        for damage in ("lost-chunk:3", "wrong-address:1", "lost-copy:4", *by_cpu):
            with self.subTest(damage):
                self.caught(damage, **COPIES)

    def test_everything_lost_from_some_moment_on(self):
        d = self.daemon("lost-chunk:3:1000")
        f = self.fleet(d)
        f.publish(1)
        f.submit(1)
        self.aborted(f, 1, "what has landed differs")
        self.not_committed(d, f, 1)

    def test_a_wrong_cast_is_caught_whoever_did_it(self):
        # The cast that goes wrong is one of those on the way, or one of those that it is compared with.
        for n in (1, 2, 9, 14):
            with self.subTest(n):
                d = self.daemon(f"wrong-cast:{n}")
                f = Fleet(d, source("float32"), destination("bfloat16", cast=True), [0, 1, 2, 3], [4, 5, 6, 7], automatic=True)

                def publish(version):
                    for w in f.sources:
                        w.write(version)
                        w.publish(version)

                publish(1)
                f.submit(1)
                s = self.aborted(f, 1)
                name, _, _, _ = blamed(s.reason)
                self.assertIn(name, ("rows", "columns"))
                self.not_committed(d, f, 1)
                publish(1)
                f.submit(1, "again")
                s = f.watch(1, lambda s: s.attempt > 1 and s.phase in (pb.PHASE_COMMITTED, pb.PHASE_ABORTED))
                self.assertEqual(s.phase, pb.PHASE_COMMITTED, s.reason)
                for w in f.destinations:
                    w.apply(1)
                    for name in ("rows", "columns"):
                        at, box = w.place[name][0]
                        wide = values(name, w.layout.tensors[name]["shape"], box, 4, 1)
                        self.assertEqual(w.memory[at:at + len(wide) // 2], nearest_bfloat16(wide))

    def test_a_cast_that_is_wrong_in_the_same_way_each_time_is_found_by_the_scalar_kernel(self):
        # What is compared with it has been made by it: fingerprints agree everywhere.
        def layout(name, ranks, dtype, cast, side):
            return Layout(name, ranks, [mesh("tp", [ranks])],
                          [tensor("small", [8, 16], dtype, "tp", [side], cast=cast),
                           tensor("large", [256, 256], dtype, "tp", [side], cast=cast)])

        for verify, only in ((pb.VERIFY_FULL, None), (pb.VERIFY_FULL, "small"), (pb.VERIFY_FULL, "large"),
                             (pb.VERIFY_SAMPLED, None)):
            with self.subTest(verify=verify, only=only):
                d = self.daemon("wrong-cast:1:1000000")
                train, rollout = layout("train", 2, "float32", False, 0), layout("rollout", 2, "bfloat16", True, 1)
                for x in (train, rollout):
                    x.tensors = {n: t for n, t in x.tensors.items() if only in (None, n)}
                f = Fleet(d, train, rollout, [0, 1], [4, 5], automatic=True)
                for w in f.sources:
                    w.write(1)
                    w.publish(1)
                f.submit(1, verify=verify)
                s = self.aborted(f, 1, "kernel of device", "float32 to bfloat16", "the scalar one")
                name, _, layout_name, _ = blamed(s.reason)
                self.assertIn(name, train.tensors)
                self.assertEqual(layout_name, "train")
                self.assertRegex(s.reason, "the (avx512|avx2|portable|cuda) kernel")
                self.not_committed(d, f, 1)
                self.assertEqual({b for w in f.destinations for b in set(w.memory[:])}, {POISON})  # before any byte moved

    def test_an_apply_that_does_not_copy_is_told_and_repaired(self):
        # Rows of 4 KiB and more go straight from worker memory into worker memory: the first copy is Apply's.
        d = self.daemon("lost-copy:1", refit__least_piece_bytes=1 << 20)
        big = lambda name: Layout(name, 1, [mesh("m", [1])], [tensor("w", [4, 8192], "uint8", "m", [None])])
        f = Fleet(d, big("train"), big("rollout"), [0], [4], automatic=True)
        f.refit(1)
        w = f.destinations[0]
        self.assertEqual(w.wrong(1, w.shadow), [])
        with refused(self, grpc.StatusCode.DATA_LOSS, "'w'", "rank 0"):
            w.apply(1)
        self.assertEqual(w.wrong(1), ["w"])
        states = {x.side: x.state for x in d.status("m").models[0].workers}
        self.assertEqual(states[pb.SIDE_DESTINATION], pb.WORKER_TORN)
        w.apply(1)  # the shadow is good
        self.serves(f, 1)
        f.refit(2)
        w.apply(2)
        self.serves(f, 2)

    def test_a_shadow_that_is_not_what_was_verified_is_skipped_and_the_next_version_repairs(self):
        d = self.daemon()
        f = self.fleet(d)
        f.refit(1)
        w = f.destinations[2]
        w.memory[w.shadow + w.place["columns"][0][0] + 40] ^= 1
        for _ in range(2):
            with refused(self, grpc.StatusCode.DATA_LOSS, "'columns'", "rank 2"):
                w.apply(1)
        w.apply(1, skip=True)
        for x in f.destinations:
            if x is not w:
                x.apply(1)
        f.refit(2)
        for x in f.destinations:
            x.apply(2)
        self.serves(f, 2)


def nearest_bfloat16(wide):
    """float32 → bfloat16, to nearest even; no NaN here."""
    out = []
    for (x,) in struct.iter_unpack("<I", wide):
        out.append(struct.pack("<H", (x + 0x7FFF + (x >> 16 & 1)) >> 16))
    return b"".join(out)


class AtTheSource(Case):
    def test_a_replica_that_was_not_updated_is_named(self):
        d = self.daemon()
        f = self.fleet(d)
        f.refit(1)
        for w in f.destinations:
            w.apply(1)
        for w in f.sources:
            w.write(2)
        stale = f.sources[3]
        at, box = stale.place["norm"][0]
        stale.memory[at:at + 4 * 96] = values("norm", [96], box, 4, 1)
        for w in f.sources:
            w.publish(2)
        f.submit(2)
        self.aborted(f, 2, "'norm'", "0 and 3")
        self.serves(f, 1)
        for w in f.destinations:
            w.event("aborted", 2)
        f.refit(3)

    def test_replicas_that_disagree_in_two_tensors_are_told_in_both(self):
        d = self.daemon()
        t = [tensor(n, [8], "int32", "dp", [None]) for n in ("a", "b", "c")]
        f = Fleet(d, Layout("train", 2, [mesh("dp", [2])], t), Layout("rollout", 1, [mesh("m", [1])],
                  [tensor(n, [8], "int32", "m", [None]) for n in ("a", "b", "c")]), [0, 1], [4], automatic=True)
        for w in f.sources:
            w.write(1)
        for name in ("a", "c"):
            f.sources[1].memory[f.sources[1].place[name][0][0]] ^= 1
        for w in f.sources:
            w.publish(1)
        f.submit(1)
        s = self.aborted(f, 1, "'a'", "'c'", "0 and 1")
        self.assertNotIn("'b'", s.reason)

    def test_a_stale_shard_that_has_no_replica_shows_by_the_frameworks_own_fingerprints(self):
        d = self.daemon()
        f = self.fleet(d)
        for w in f.sources:
            w.write(2)
        stale = f.sources[1]
        at, box = stale.place["rows"][0]
        stale.memory[at:at + 4 * 16 * 48] = values("rows", [64, 48], box, 4, 1)
        for w in f.sources:
            w.publish(2, expected=expected(w.layout, 2) if w.rank == 0 else [])
        f.submit(2)
        s = self.aborted(f, 2, "tensor 'rows'", "expects fingerprint")
        self.assertNotIn("'columns'", s.reason)
        self.assertEqual({b for w in f.destinations for b in set(w.memory[:])}, {POISON})  # before any byte moved

    def test_a_source_written_between_its_publication_and_the_refit_is_named(self):
        d = self.daemon()
        f = self.fleet(d)
        f.publish(1)
        w = f.sources[2]
        w.memory[w.place["columns"][0][0] + 5] ^= 0x20
        f.submit(1)
        self.aborted(f, 1, "tensor 'columns'", "layout 'train' rank 2")
        self.not_committed(d, f, 1)

    def test_a_source_written_while_it_is_sent_is_named(self):
        d = self.daemon(**SlowFleet.RATE)
        f = SlowFleet(d, automatic=True)
        f.publish(1)
        f.submit(1)
        f.until_bytes_move(1)
        f.sources[3].memory[:] = bytes(x ^ 1 for x in f.sources[3].memory[:])
        s = self.aborted(f, 1, "tensor 'big'")
        name, box, layout, rank = blamed(s.reason)
        # Named is the source that changed, or the box where its late bytes have landed: rows 768 to 1023 are rank 3's.
        self.assertTrue(layout == "train" and rank == 3 or layout == "rollout" and box[0][0] >= 768, s.reason)
        self.not_committed(d, f, 1)
        f.publish(2)
        f.submit(2)
        self.assertEqual(f.final(2).phase, pb.PHASE_COMMITTED)
        f.apply_everywhere(2)

    def test_a_source_written_after_its_release_changes_nothing(self):
        d = self.daemon()
        f = self.fleet(d, automatic=False)
        f.publish(1)
        f.submit(1)
        for w in f.sources:
            w.event("source_released", 1)
            w.memory[:] = bytes(len(w.memory))
        f.accept(1)
        self.assertEqual(f.final(1).phase, pb.PHASE_COMMITTED)
        for w in f.destinations:
            w.apply(1)
        self.serves(f, 1)


class Declarations(Case):
    """What a layout or a binding says is not what the buffers hold. Only who knows the tensors can tell: the framework."""

    def refit(self, f, version, **options):
        for w in f.sources:
            w.publish(version, expected=expected(f.sources[0].layout, version) if w.rank == 1 else [])
        f.submit(version, **options)

    def test_true_ones_pass_on_every_layout(self):
        d = self.daemon()
        f = self.fleet(d)
        for w in f.sources:
            w.write(1)
        self.refit(f, 1)
        self.assertEqual(f.final(1).phase, pb.PHASE_COMMITTED)
        for w in f.destinations:
            w.apply(1)
        self.serves(f, 1)

    def test_two_columns_that_changed_places(self):
        d = self.daemon()
        f = self.fleet(d)
        for w in f.sources:
            w.write(1)
        w = f.sources[2]
        at, (_, size) = w.place["columns"][0]
        for row in range(size[0]):
            x = at + row * size[1] * 4
            w.memory[x:x + 8] = w.memory[x + 4:x + 8] + w.memory[x:x + 4]
        self.refit(f, 1)
        s = self.aborted(f, 1, "tensor 'columns'", "the layout or a binding says something else")
        self.assertNotIn("'rows'", s.reason)
        self.not_committed(d, f, 1)

    def test_shards_cut_in_another_order_than_declared(self):
        # FSDP over TP: the inner mesh dim cuts first; declared is the other order. Each shard is whole, in the wrong place.
        made = Layout("train", 4, [mesh("m", [2, 2])], [tensor("w", [8, 8], "int32", "m", [0, 0], shard_order=[1, 0])])
        said = Layout("train", 4, [mesh("m", [2, 2])], [tensor("w", [8, 8], "int32", "m", [0, 0])])
        taker = Layout("rollout", 1, [mesh("m", [1])], [tensor("w", [8, 8], "int32", "m", [None])])
        for layout, right in ((said, False), (made, True)):
            d = self.daemon()
            f = Fleet(d, layout, taker, [0, 1, 2, 3], [4], automatic=True)
            for w in f.sources:
                box = made.shards("w", w.rank)[0]
                w.memory[:64] = values("w", [8, 8], box, 4, 1)
            self.refit(f, 1)
            if right:
                self.assertEqual(f.final(1).phase, pb.PHASE_COMMITTED)
                f.destinations[0].apply(1)
                self.serves(f, 1)
            else:
                self.aborted(f, 1, "tensor 'w'", "the layout or a binding says something else")
                self.assertEqual(set(f.destinations[0].memory[:]), {POISON})

    def test_names_bound_to_each_others_memory(self):
        d = self.daemon()
        t = [tensor(n, [4, 4], "int32", "m", [None]) for n in ("gate", "up")]
        f = Fleet(d, Layout("train", 1, [mesh("m", [1])], t), Layout("rollout", 1, [mesh("m", [1])], t), [0], [4], automatic=True)
        w = f.sources[0]
        w.write(1)
        w.goodbye()
        w.pieces = [pb.BindingPiece(tensor="gate", segment=0, offset_bytes=64), pb.BindingPiece(tensor="up", segment=0)]
        w.attach()
        w.publish(1, expected=expected(w.layout, 1))
        f.submit(1)
        self.aborted(f, 1, "'gate'", "'up'", "binding")

    def test_rows_read_with_the_strides_of_another_shape(self):
        # A transposed buffer: [6, 4] in memory as [4, 6].
        d = self.daemon()
        one = lambda name: Layout(name, 1, [mesh("m", [1])], [tensor("w", [6, 4], "int32", "m", [None])])
        for strides, right in (([16, 4], False), ([4, 24], True)):
            model = f"m{right}"
            trainer = Client(d)
            w = Worker(trainer, model, pb.SIDE_SOURCE, one("train"), 0, 0, attach=False)
            w.pieces = [pb.BindingPiece(tensor="w", segment=0, stride_bytes=strides)]
            w.attach()
            f = Fleet(d, one("train"), one("rollout"), [], [4], model=model, automatic=True)
            f.sources, f.trainer = [w], trainer
            data = values("w", [6, 4], ([0, 0], [6, 4]), 4, 1)
            w.memory[:] = b"".join(data[(r * 4 + c) * 4:(r * 4 + c) * 4 + 4] for c in range(4) for r in range(6))
            w.publish(1, expected=expected(one("train"), 1))
            f.submit(1)
            if right:
                self.assertEqual(f.final(1).phase, pb.PHASE_COMMITTED)
                f.destinations[0].apply(1)
                self.serves(f, 1)
            else:
                self.aborted(f, 1, "tensor 'w'")

    def test_a_wrong_expectation_of_right_buffers_is_refused_as_well(self):
        d = self.daemon()
        f = self.fleet(d)
        for w in f.sources:
            w.write(1)
        wrong = expected(f.sources[0].layout, 1, ["norm"])
        wrong[0].fingerprint ^= 1
        for w in f.sources:
            w.publish(1, expected=wrong if w.rank == 0 else [])
        f.sources[0].publish(1, expected=wrong)  # the answer was lost: the same again
        f.submit(1)
        self.aborted(f, 1, "tensor 'norm'", f"{wrong[0].fingerprint:016x}", "rank 0")

    def test_expectations_that_come_too_late_are_not_passed_over(self):
        d = self.daemon()
        f = self.fleet(d)
        f.publish(1)
        with refused(self, grpc.StatusCode.ALREADY_EXISTS, "first Publish"):
            f.sources[0].publish(1, expected=expected(f.sources[0].layout, 1))
        f.sources[0].publish(1)
        f.submit(1)
        self.assertEqual(f.final(1).phase, pb.PHASE_COMMITTED)

    def test_expectations_where_no_fingerprints_are_taken_are_refused(self):
        d = self.daemon(refit__verify="off")
        f = self.fleet(d)
        with refused(self, grpc.StatusCode.FAILED_PRECONDITION, "verify = off"):
            f.sources[0].publish(1, expected=expected(f.sources[0].layout, 1))
        f.refit(1)

    def test_expectations_are_checked_whatever_the_mode(self):
        for mode in (pb.VERIFY_SAMPLED, pb.VERIFY_OFF):
            with self.subTest(mode):
                d = self.daemon()
                f = self.fleet(d)
                for w in f.sources:
                    w.write(1)
                f.sources[0].memory[0] ^= 1
                self.refit(f, 1, verify=mode)
                self.aborted(f, 1, "tensor 'rows'")


class AcrossNodes(Case):
    """Sources, receivers, and the data planes that do harm are on different nodes."""

    def nodes(self, n, damage=None, **settings):
        """damage: (node, RESHARD_DAMAGE)."""
        nodes = cluster.Nodes(n, devices__domains="", **settings)
        start = nodes.start

        def start_one_damaged(names=None):
            with unittest.mock.patch.dict(os.environ, RESHARD_DAMAGE=damage[1]):
                nodes[damage[0]].start(wait=None)
            rest = [x for x in nodes.names if x != damage[0]]
            for x in rest:
                nodes[x].start(wait=None)
            nodes.wait_joined(nodes.names)
            return nodes

        if damage is not None:
            nodes.start = start_one_damaged
        cluster.of_case(self, nodes)
        nodes.start = start
        return nodes

    def fleet(self, nodes, places=("n1:0", "n1:1", "n2:0", "n2:1"), sources=("n0:0", "n0:1", "n0:2", "n1:2"), **more):
        return cluster.Fleet(nodes, source(), destination(), list(sources), list(places), **more)

    def test_a_copy_that_was_not_made_at_either_end_is_blamed_on_its_box(self):
        # At the sender something else goes out than was read; at the receiver it does not arrive in its memory.
        self.caught((("n0", "lost-copy:2"), ("n2", "lost-copy:2")))

    def test_a_bit_that_flips_between_two_nodes_is_blamed_on_its_box(self):
        self.caught((("n1", "flipped-bit:1"), ("n2", "flipped-bit:3")))

    def caught(self, damages):
        for damage in damages:
            with self.subTest(damage):
                nodes = self.nodes(3, damage)
                f = self.fleet(nodes)
                f.publish(1)
                f.submit(1)
                s = self.aborted(f, 1)
                name, box, layout, rank = blamed(s.reason)
                self.assertEqual(layout, "rollout")
                w = f.destinations[rank]
                self.assertNotEqual(part(w, name, box, w.shadow), values(name, w.layout.tensors[name]["shape"], box, 4, 1))
                for x in nodes.names:
                    with refused(self, grpc.StatusCode.NOT_FOUND):
                        nodes[x].refit().GetCommitted(pb.GetCommittedRequest(model="m"), timeout=WAIT_S)
                self.one_retry(f, 1)

    def one_retry(self, f, version):
        """Everybody who has got wrong bytes is known after the first attempt, also who was passed them on and was through
        before: the next attempt commits."""
        f.publish(version)
        attempt = f.submit(version, "again").attempt
        s = f.watch(version, lambda s: s.attempt >= attempt and s.phase in (pb.PHASE_COMMITTED, pb.PHASE_ABORTED))
        self.assertEqual((s.phase, s.attempt), (pb.PHASE_COMMITTED, attempt), s.reason)
        f.check(version)

    def test_a_wrong_cast_of_one_node_is_caught(self):
        for node, n in (("n0", 1), ("n0", 6), ("n1", 1)):
            with self.subTest(f"{node} {n}"):
                nodes = self.nodes(3, (node, f"wrong-cast:{n}"))
                f = cluster.Fleet(nodes, source("float32"), destination("bfloat16", cast=True), ["n0:0", "n0:1", "n1:2", "n1:3"],
                                  ["n1:0", "n1:1", "n2:0", "n2:1"])
                for w in f.sources:
                    w.write(1)
                    w.publish(1)
                f.submit(1)
                s = self.aborted(f, 1)
                self.assertIn(blamed(s.reason)[0], ("rows", "columns"))

    def test_sampled_finds_a_node_on_which_nothing_lands(self):
        nodes = self.nodes(3, ("n2", "lost-copy:1:1000000"), refit__least_piece_bytes=1 << 20)
        t = lambda m, p: [tensor(f"t{i:02}", [16, 16], "int32", m, p) for i in range(64)]
        f = cluster.Fleet(nodes, Layout("train", 2, [mesh("tp", [2])], t("tp", [0])),
                          Layout("rollout", 2, [mesh("tp", [2])], t("tp", [1])), ["n0:0", "n1:0"], ["n1:1", "n2:0"])
        f.publish(1)
        f.submit(1, verify=pb.VERIFY_SAMPLED)
        s = self.aborted(f, 1)
        self.assertEqual(blamed(s.reason)[2:], ("rollout", 1))

    def test_an_apply_that_fails_on_a_member_is_told_there_and_at_the_coordinator(self):
        nodes = self.nodes(2, ("n1", "lost-copy:1"), refit__least_piece_bytes=1 << 20)
        big = lambda name: Layout(name, 1, [mesh("m", [1])], [tensor("w", [4, 65536], "uint8", "m", [None])])
        f = cluster.Fleet(nodes, big("train"), big("rollout"), ["n0:0"], ["n1:0"])
        f.refit(1)
        w = f.destinations[0]
        self.assertEqual(w.wrong(1, w.shadow), [])
        with refused(self, grpc.StatusCode.DATA_LOSS, "'w'", "rank 0"):
            w.apply(1)
        states = {x.side: x.state for x in nodes.head.status("m").models[0].workers}
        self.assertEqual(states[pb.SIDE_DESTINATION], pb.WORKER_TORN)
        w.apply(1)
        f.refit(2)
        f.check(2)

    def test_source_replicas_of_two_nodes_that_disagree_are_named(self):
        nodes = self.nodes(3)
        f = self.fleet(nodes)
        for w in f.sources:
            w.write(1)
        w = f.sources[3]  # on n1, the others are on n0
        w.memory[w.place["norm"][0][0] + 8] ^= 4
        for x in f.sources:
            x.publish(1)
        f.submit(1)
        self.aborted(f, 1, "'norm'", "0 and 3")
        self.assertEqual({b for w in f.destinations for b in set(w.memory[:])}, {POISON})

    def test_a_source_on_another_node_written_after_its_publication_is_named(self):
        nodes = self.nodes(3)
        f = self.fleet(nodes)
        f.publish(1)
        w = f.sources[3]
        w.memory[w.place["columns"][0][0] + 5] ^= 0x20
        f.submit(1)
        self.aborted(f, 1, "tensor 'columns'", "layout 'train' rank 3")

    def test_expected_fingerprints_of_parts_on_two_nodes(self):
        nodes = self.nodes(3)
        f = self.fleet(nodes)
        for version, wrong in ((1, False), (2, True)):
            for w in f.sources:
                w.write(version)
            if wrong:
                w = f.sources[3]
                at, (_, size) = w.place["rows"][0]
                row = size[1] * 4
                w.memory[at:at + 2 * row] = w.memory[at + row:at + 2 * row] + w.memory[at:at + row]
            for w in f.sources:
                w.publish(version, expected=expected(w.layout, version) if w.rank == 3 else [])
            f.submit(version)
            if wrong:
                self.aborted(f, version, "tensor 'rows'", "rank 3 expects")
            else:
                self.assertEqual(f.final(version).phase, pb.PHASE_COMMITTED)
                f.check(version)


class Modes(Case):
    def test_sampled_finds_what_goes_wrong_everywhere(self):
        d = self.daemon("lost-chunk:1:100000")
        n = 64
        t = lambda m, p: [tensor(f"t{i:02}", [16, 16], "int32", m, p) for i in range(n)]
        f = Fleet(d, Layout("train", 2, [mesh("tp", [2])], t("tp", [0])), Layout("rollout", 2, [mesh("tp", [2])], t("tp", [1])),
                  [0, 1], [4, 5], automatic=True)
        f.publish(1)
        f.submit(1, verify=pb.VERIFY_SAMPLED)
        s = self.aborted(f, 1, "what has landed differs")
        name, box, layout, rank = blamed(s.reason)
        w = f.destinations[rank]
        self.assertNotEqual(part(w, name, box, w.shadow), values(name, [16, 16], box, 4, 1))

    def test_off_lets_it_through_and_full_at_apply_does_not_know_better(self):
        # The price of off: a refit that asks for it commits what has landed, right or wrong.
        d = self.daemon("flipped-bit:1:1")
        f = self.fleet(d)
        s = f.refit(1, verify=pb.VERIFY_OFF)
        self.assertEqual(s.phase, pb.PHASE_COMMITTED)
        wrong = [name for w in f.destinations for name in w.wrong(1, w.shadow)]
        self.assertEqual(len(set(wrong)), 1)
        for w in f.destinations:
            w.apply(1)
        s = f.refit(2)  # full again, and the damage is over
        for w in f.destinations:
            w.apply(2)
        self.serves(f, 2)

    def test_the_mode_of_the_settings_counts_where_a_submit_says_nothing(self):
        for mode, caught in (("full", True), ("off", False)):
            d = self.daemon("flipped-bit:1:1", refit__verify=mode)
            f = self.fleet(d)
            f.publish(1)
            f.submit(1)
            self.assertEqual(f.final(1).phase, pb.PHASE_ABORTED if caught else pb.PHASE_COMMITTED)


if __name__ == "__main__":
    main()
