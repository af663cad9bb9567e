#!/usr/bin/python3
"""Refits through the real daemon: the good ways."""
import unittest

from rig import *


class Good(unittest.TestCase):
    def check_bytes(self, s):
        self.assertEqual(s.bytes.network, s.bytes.network_minimum)
        self.assertEqual(s.bytes.landed, s.bytes.total)

    def test_staged_three_versions_land_and_are_applied(self):
        with Daemon() as d:
            f = Fleet(d, small_source(), small_destination(), [0, 1, 2, 3], [2, 3, 4, 5])
            for version in (1, 2, 7):
                s = f.refit(version)
                self.check_bytes(s)
                for w in f.destinations:
                    self.assertEqual(w.wrong(version, w.shadow), [])
                    if version > 1:  # what is served is the version before until Apply
                        self.assertEqual(w.wrong(served), [])
                    self.assertEqual(w.apply(version).applied, version)
                    self.assertEqual(w.wrong(version), [])
                served = version
            m = d.status("m").models[0]
            self.assertEqual(m.committed, 7)
            self.assertEqual({w.state for w in m.workers if w.side == pb.SIDE_DESTINATION}, {pb.WORKER_CURRENT})

    def test_in_place_waits_for_ready_and_lands_in_live_memory(self):
        with Daemon() as d:
            f = Fleet(d, small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7], receive=pb.RECEIVE_IN_PLACE)
            f.publish(1)
            f.submit(1)
            waiting = f.watch(1, lambda s: len(s.waiting_for) == 4)
            self.assertIn("rollout", waiting.waiting_for[0])
            self.assertEqual(f.destinations[0].memory[0], POISON)  # nothing is written before all are ready
            for w in f.destinations:
                w.event("ready_requested", 1)
                w.ready(1)
            f.accept(1)
            self.assertEqual(f.final(1).phase, pb.PHASE_COMMITTED)
            for w in f.destinations:
                self.assertEqual(w.wrong(1), [])
                self.assertEqual(w.event("committed").version, 1)

    def test_sources_are_told_when_they_may_write_again(self):
        with Daemon() as d:
            f = Fleet(d, small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7], automatic=True)
            for version, at in ((1, pb.RELEASE_AT_STAGED), (2, pb.RELEASE_AT_READ), (3, pb.RELEASE_AT_COMMITTED)):
                f.refit(version, release_at=at)
                for w in f.sources:
                    w.event("source_released", version)
                for w in f.destinations:  # shadow memory is free again only then
                    w.apply(version)


class Ways(unittest.TestCase):
    """Other layouts, options and orders that must come to the same content."""

    def one(self, source, destination, source_devices, destination_devices, daemon=(), **options):
        with Daemon(**dict(daemon)) as d:
            f = Fleet(d, source, destination, source_devices, destination_devices, automatic=True)
            s = f.refit(1, **options)
            for w in f.destinations:
                self.assertEqual(w.wrong(1, w.shadow), [])
                w.apply(1)
                self.assertEqual(w.wrong(1), [])
            return s

    def test_every_strategy_lands_the_same_content(self):
        moved = {}
        for strategy in (pb.STRATEGY_RESHARD, pb.STRATEGY_DIRECT, pb.STRATEGY_GATHER_BROADCAST):
            s = self.one(small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7], strategy=strategy)
            moved[strategy] = s.bytes.network
        norm, rest = 48, 956 - 48  # bytes of the replicated tensor and of the others: 2 * 2 * 192 + 7 * 5 * 4
        self.assertEqual(moved[pb.STRATEGY_RESHARD], rest + norm)
        self.assertEqual(moved[pb.STRATEGY_DIRECT], 2 * rest + 4 * norm)  # each replica is sent its own

    def test_a_rule_picks_one_tensors_strategy(self):
        self.one(small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7],
                 rules=[pb.StrategyRule(glob="w*", strategy=pb.STRATEGY_DIRECT)])

    def test_one_slot_of_one_page_is_enough(self):
        self.one(small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7],
                 daemon={"devices__ring_slots": 1, "devices__chunk_bytes": 4096})

    def test_messages_inside_the_node_may_be_device_copies(self):
        # Four source devices are a domain, the others another one: what crosses is counted as network all the same.
        for delays in ({}, {"test__host_seed": 5, "test__host_max_delay_us": 200}):
            with Daemon(**COPIES, **delays) as d:
                d.wait_log("messages between devices of this node: device copies")
                self.assertEqual(d.status().local_pairs, "device copies")
                f = Fleet(d, small_source(), small_destination(), [0, 1, 2, 3], [2, 3, 4, 5], automatic=True)
                for version in (1, 2, 3):
                    s = f.refit(version)
                    self.assertGreater(s.bytes.network, 0)
                    self.assertEqual(s.bytes.network, s.bytes.network_minimum)
                    for w in f.destinations:
                        self.assertEqual(w.wrong(version, w.shadow), [])
                        w.apply(version)

    def test_delays_and_poison_in_the_device_change_nothing(self):
        self.one(small_source(), small_destination(), [0, 1, 2, 3], [2, 3, 4, 5],
                 daemon={"test__host_seed": 7, "test__host_max_delay_us": 300})

    def test_unchecked_and_sampled_refits_land(self):
        for verify in (pb.VERIFY_OFF, pb.VERIFY_SAMPLED):
            self.one(small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7], verify=verify)

    def test_a_daemon_that_never_verifies_still_refits(self):
        self.one(small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7], daemon={"refit__verify": "off"})

    def test_empty_scalar_and_shuffled_tensors(self):
        # Ranks without rows, no elements at all, no dims, rank ids out of order.
        source = Layout("train", 4, [mesh("x", [4], ranks=[2, 0, 3, 1])], [
            tensor("rows", [6, 3], "int32", "x", [0]), tensor("none", [0, 4], "int32", "x", [0]),
            tensor("scalar", [], "float32", "x", [None]), tensor("one", [1], "int64", "x", [0])])
        destination = Layout("rollout", 3, [mesh("y", [3], ranks=[1, 2, 0])], [
            tensor("rows", [6, 3], "int32", "y", [1]), tensor("none", [0, 4], "int32", "y", [1]),
            tensor("scalar", [], "float32", "y", [None]), tensor("one", [1], "int64", "y", [0])])
        self.one(source, destination, [0, 1, 2, 3], [4, 5, 6])

    def test_nested_orders_and_explicit_regions(self):
        # TP before DP; regions that no chunk rule gives.
        source = Layout("train", 4, [mesh("m", [2, 2])],
                        [tensor("a", [10, 4], "int32", "m", [0, 0], shard_order=[1, 0]),
                         {"name": "b", "shape": [10], "dtype": "int32",
                          "regions": [{"rank": 0, "offset": [0], "size": [7]}, {"rank": 3, "offset": [7], "size": [3]}]}])
        destination = Layout("rollout", 2, [mesh("m", [2])],
                             [tensor("a", [10, 4], "int32", "m", [1]), tensor("b", [10], "int32", "m", [0])])
        self.one(source, destination, [0, 1, 2, 3], [4, 5])

    def test_declared_cast_rounds_to_nearest_even_once(self):
        # What a public fault report says that these values must become.
        source = Layout("train", 1, [mesh("m", [1])], [tensor("w", [6], "float32", "m", [None])])
        destination = Layout("rollout", 2, [mesh("m", [2])], [tensor("w", [6], "bfloat16", "m", [None], cast=True)])
        with Daemon() as d:
            f = Fleet(d, source, destination, [0], [4, 5], automatic=True)
            f.sources[0].memory[:] = struct.pack("<6f", 1.00390625, 1.01171875, 3.4e38, -0.0, 65504.0, float("nan"))
            f.sources[0].publish(1)
            f.submit(1)
            self.assertEqual(f.final(1).phase, pb.PHASE_COMMITTED)
            for w in f.destinations:
                w.apply(1)
                got = struct.unpack("<6H", w.memory[:12])
                self.assertEqual(got, (0x3F80, 0x3F82, 0x7F80, 0x8000, 0x4780, 0x7FC0))

    def test_fused_bindings_receive_their_parts(self):
        # q and k as rows of one fused buffer, gate beside up as columns of another.
        source = Layout("train", 1, [mesh("m", [1])], [tensor("q", [4, 3], "int32", "m", [None]),
                                                       tensor("k", [2, 3], "int32", "m", [None]),
                                                       tensor("gate", [2, 2], "int32", "m", [None]),
                                                       tensor("up", [2, 2], "int32", "m", [None])])
        destination = Layout("rollout", 1, [mesh("m", [1])], list(source.tensors.values()))

        def piece(name, offset, strides):
            return pb.BindingPiece(tensor=name, segment=0, offset_bytes=offset, stride_bytes=strides)

        fused = [piece("q", 0, [12, 4]), piece("k", 48, [12, 4]), piece("gate", 72, [16, 4]), piece("up", 80, [16, 4])]
        with Daemon() as d:
            trainer, rollout = Client(d), Client(d)
            s = Worker(trainer, "m", pb.SIDE_SOURCE, source, 0, 0)
            w = Worker(rollout, "m", pb.SIDE_DESTINATION, destination, 0, 4, pb.RECEIVE_IN_PLACE, True, pieces=fused)
            s.write(1)
            s.publish(1)
            trainer.stub.Submit(pb.SubmitRequest(model="m", version=1, request_id="a"), timeout=WAIT_S)
            w.event("ready_requested", 1)
            w.ready(1)
            w.event("committed", 1)
            part = {n: values(n, t["shape"], ([0, 0], t["shape"]), 4, 1) for n, t in source.tensors.items()}
            rows = part["gate"][:8] + part["up"][:8] + part["gate"][8:] + part["up"][8:]
            self.assertEqual(w.memory[:104], part["q"] + part["k"] + rows)

    def test_one_refit_serves_every_destination_layout(self):
        evaluation = Layout("eval", 1, [mesh("m", [1])], [tensor("w1", [16, 12], "bfloat16", "m", [None])])
        with Daemon() as d:
            f = Fleet(d, small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7], automatic=True)
            extra = Worker(f.rollout, "m", pb.SIDE_DESTINATION, evaluation, 0, 3, pb.RECEIVE_STAGED, True)
            f.refit(1)
            for w in f.destinations + [extra]:
                w.apply(1)
                self.assertEqual(w.wrong(1), [])
            self.assertEqual(sorted(d.status("m").models[0].destination_layouts), ["eval", "rollout"])

    def test_two_models_on_the_same_devices_do_not_disturb_each_other(self):
        with Daemon(**SlowFleet.RATE) as d:
            fleets = [SlowFleet(d, model=m, automatic=True) for m in ("a", "b")]
            for f in fleets:
                f.publish(1)
            for f in fleets:
                f.submit(1)
            for f in fleets:
                self.assertEqual(f.final(1).phase, pb.PHASE_COMMITTED)
                f.apply_everywhere(1)
            lines = "\n".join(d.lines)
            waited = re.search(r"model (\w) version 1 attempt \d+: waits for devices of model (\w)", lines)
            first, second = waited[2], waited[1]
            staged = lines.index(f"model {first} version 1 attempt 1: STAGED")
            self.assertLess(staged, lines.index(f"model {second} version 1 attempt 1: TRANSFERRING"))


if __name__ == "__main__":
    main()
