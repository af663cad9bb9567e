#!/usr/bin/python3
"""Refits over several daemons that work as one: the good ways, and what crosses the network, by the interfaces' counters."""
import unittest

from nodes import *

QUIET = 150_000  # bytes of beats, orders and reports of one node in the time of a small refit


class Case(unittest.TestCase):
    def nodes(self, count, **more):
        return of_case(self, Nodes(count, **more))

    def refit(self, f, version=1, **options):
        """A version that commits, lands everywhere, and crosses the network no more than it must; returns its state."""
        s = f.refit(version, **options)
        f.check(version)
        self.assertEqual(s.bytes.landed + s.bytes.skipped, s.bytes.total)
        return s

    def counted(self, f, version=1, **options):
        """The same on namespaces, and what came into the nodes and left them from submit to commit: (state, counters)."""
        f.nodes.need_namespaces(self)
        f.publish(version)
        before = f.nodes.moved()
        f.submit(version, **options)
        s = f.final(version)
        self.assertEqual(s.phase, pb.PHASE_COMMITTED, s.reason)
        moved = testnet.difference(f.nodes.moved(), before)
        f.check(version)
        return s, moved


class Layouts(Case):
    def test_one_node_feeds_another(self):
        nodes = self.nodes(2)
        f = Fleet(nodes, small_source(), small_destination(), [f"n0:{i}" for i in range(4)], [f"n1:{i}" for i in range(4)])
        for version in (1, 2, 7):
            s = self.refit(f, version)
            self.assertEqual(s.bytes.network, 956)  # each byte once into the other domain
            self.assertEqual(s.bytes.network_minimum, 956)

    def test_node_sets_that_overlap(self):
        # Rank 2 of the sources and rank 0 of the destinations share a node: what it holds there crosses no network.
        nodes = self.nodes(3)
        f = Fleet(nodes, small_source(), small_destination(), ["n0:0", "n0:1", "n1:0", "n1:1"], ["n1:2", "n1:3", "n2:0", "n2:1"])
        s = self.refit(f)
        # n1 lacks the halves of w1, w2 (2 * 192) and odd's rows of ranks 0 and 1 (4 rows of 5 words) that n0 holds; n2 lacks all.
        self.assertEqual(s.bytes.network_minimum, 2 * 192 + 4 * 5 * 4 + 956)
        self.assertEqual(s.bytes.network, s.bytes.network_minimum)

    def test_every_node_is_source_and_destination(self):
        nodes = self.nodes(3)
        source = Layout("train", 3, [mesh("m", [3])], [tensor("w", [12, 6], "int32", "m", [0])])
        destination = Layout("rollout", 3, [mesh("m", [3])], [tensor("w", [12, 6], "int32", "m", [1])])
        f = Fleet(nodes, source, destination, [f"n{i}:0" for i in range(3)], [f"n{i}:1" for i in range(3)])
        s = self.refit(f)
        self.assertEqual(s.bytes.network, 2 * 12 * 6 * 4 // 3)  # each node lacks two thirds of its third
        self.assertEqual(s.bytes.network, s.bytes.network_minimum)

    def test_uneven_shards_regions_and_empty_ranks_over_five_nodes(self):
        nodes = self.nodes(5)
        source = Layout("train", 4, [mesh("m", [4], ranks=[2, 0, 3, 1])], [
            tensor("rows", [6, 3], "int32", "m", [0]), tensor("none", [0, 4], "int32", "m", [0]),
            tensor("scalar", [], "float32", "m", [None]), tensor("one", [1], "int64", "m", [0]),
            {"name": "parts", "shape": [10], "dtype": "int32",
             "regions": [{"rank": 0, "offset": [0], "size": [7]}, {"rank": 3, "offset": [7], "size": [3]}]}])
        destination = Layout("rollout", 3, [mesh("m", [3], ranks=[1, 2, 0])], [
            tensor("rows", [6, 3], "int32", "m", [1]), tensor("none", [0, 4], "int32", "m", [1]),
            tensor("scalar", [], "float32", "m", [None]), tensor("one", [1], "int64", "m", [0]),
            tensor("parts", [10], "int32", "m", [0])])
        f = Fleet(nodes, source, destination, ["n0:0", "n0:1", "n1:0", "n1:1"], ["n2:0", "n3:0", "n4:3"])
        for version in (1, 2):
            s = self.refit(f, version)
            self.assertEqual(s.bytes.network, s.bytes.network_minimum)

    def test_an_instance_across_two_nodes_receives_in_place_after_ready(self):
        nodes = self.nodes(3)
        f = Fleet(nodes, small_source(), small_destination(), [f"n0:{i}" for i in range(4)], ["n1:0", "n2:0", "n1:1", "n2:1"],
                  receive=pb.RECEIVE_IN_PLACE, automatic=False)
        for version in (1, 2):
            f.refit(version)
            f.check(version)

    def test_a_cast_is_done_once_on_the_sending_side(self):
        nodes = self.nodes(2)
        source = Layout("train", 1, [mesh("m", [1])], [tensor("w", [6], "float32", "m", [None])])
        destination = Layout("rollout", 2, [mesh("m", [2])], [tensor("w", [6], "bfloat16", "m", [None], cast=True)])
        f = Fleet(nodes, source, destination, ["n0:0"], ["n1:0", "n1:1"])
        f.sources[0].memory[:] = struct.pack("<6f", 1.00390625, 1.01171875, 3.4e38, -0.0, 65504.0, float("nan"))
        f.sources[0].publish(1)
        f.submit(1)
        s = f.final(1)
        self.assertEqual(s.phase, pb.PHASE_COMMITTED, s.reason)
        self.assertEqual(s.bytes.network, 12)
        for w in f.destinations:
            w.apply(1)
            self.assertEqual(struct.unpack("<6H", w.memory[:12]), (0x3F80, 0x3F82, 0x7F80, 0x8000, 0x4780, 0x7FC0))

    def test_every_strategy_lands_the_same_content(self):
        nodes = self.nodes(3)
        f = Fleet(nodes, small_source(), small_destination(), ["n0:0", "n0:1", "n1:0", "n1:1"], ["n2:0", "n2:1", "n2:2", "n2:3"])
        norm, rest = 48, 956 - 48
        for version, (strategy, network) in enumerate(((pb.STRATEGY_RESHARD, 956), (pb.STRATEGY_DIRECT, 2 * rest + 4 * norm),
                                                       (pb.STRATEGY_GATHER_BROADCAST, None)), 1):
            s = self.refit(f, version, strategy=strategy)
            if network:
                self.assertEqual(s.bytes.network, network)
            else:  # a gather of what n1 holds of the tensors whose most is elsewhere, then all of it into n2
                self.assertGreater(s.bytes.network, 956)

    def test_two_destination_layouts_on_different_nodes_in_one_refit(self):
        nodes = self.nodes(3)
        evaluation = Layout("eval", 1, [mesh("m", [1])], [tensor("w1", [16, 12], "bfloat16", "m", [None])])
        f = Fleet(nodes, small_source(), small_destination(), [f"n0:{i}" for i in range(4)], [f"n1:{i}" for i in range(4)])
        extra = Worker(f.client("n2", "rollout"), "m", pb.SIDE_DESTINATION, evaluation, 0, 0, pb.RECEIVE_STAGED, True)
        s = self.refit(f)
        extra.apply(1)
        self.assertEqual(extra.wrong(1), [])
        self.assertEqual(s.bytes.network, 956 + 384)


class Network(Case):
    """What the interfaces say. Payload of 2 MiB, so that headers and the daemons' talk are little beside it."""

    NEED = 1024 * 2048 + 1024

    def near(self, got, payload, acknowledgements=0):
        self.assertGreaterEqual(got, payload)
        self.assertLess(got, payload * 1.06 + QUIET + acknowledgements)

    def test_each_byte_enters_a_node_once_although_two_instances_there_need_it(self):
        nodes = self.nodes(2)
        f = Fleet(nodes, bulk("train", [4], [0]), bulk("rollout", [2, 2], [None, 1], instances=[[0, 1], [2, 3]]),
                  [f"n0:{i}" for i in range(4)], [f"n1:{i}" for i in range(4)], worker=BulkWorker)
        s, moved = self.counted(f)
        self.assertEqual(s.bytes.network, self.NEED)
        self.near(moved["n1"].rx_bytes, self.NEED)
        self.near(moved["n0"].tx_bytes, self.NEED)

    def test_an_instance_across_two_nodes_takes_half_into_each(self):
        nodes = self.nodes(3)
        f = Fleet(nodes, bulk("train", [2], [0]), bulk("rollout", [2, 2], [None, 1], instances=[[0, 1], [2, 3]]),
                  ["n0:0", "n0:1"], ["n1:0", "n2:0", "n1:1", "n2:1"], worker=BulkWorker)
        s, moved = self.counted(f)
        half = 1024 * 1024 + 1024
        self.assertEqual(s.bytes.network, 2 * half)
        for node in ("n1", "n2"):
            self.near(moved[node].rx_bytes, half)

    def test_more_domains_than_sources_are_fed_by_relays(self):
        nodes = self.nodes(5)
        f = self.one_to_four(nodes)
        s, moved = self.counted(f)
        self.assertEqual(s.bytes.network, 4 * self.NEED)
        for node in ("n1", "n2", "n3", "n4"):
            self.near(moved[node].rx_bytes, self.NEED, 0.03 * moved[node].tx_bytes)
        # One source alone would send four times; shared with the relays it sends little more than once.
        self.assertLess(moved["n0"].tx_bytes, 1.6 * self.NEED + QUIET)
        self.assertGreater(sum(moved[x].tx_bytes for x in ("n1", "n2", "n3", "n4")), 2.2 * self.NEED)

    def test_without_relays_the_source_sends_to_each(self):
        nodes = self.nodes(5, refit__relay="no")
        s, moved = self.counted(self.one_to_four(nodes))
        self.assertEqual(s.bytes.network, 4 * self.NEED)
        self.near(moved["n0"].tx_bytes, 4 * self.NEED)

    def one_to_four(self, nodes):
        return Fleet(nodes, bulk("train", [1], [None]), bulk("rollout", [4], [None], instances=[[0], [1], [2], [3]]), ["n0:0"],
                     ["n1:0", "n2:0", "n3:0", "n4:0"], worker=BulkWorker)

    def test_source_replicas_on_two_nodes_share_the_load(self):
        nodes = self.nodes(4)
        f = Fleet(nodes, bulk("train", [2], [None]), bulk("rollout", [2], [None], instances=[[0], [1]]), ["n0:0", "n1:0"],
                  ["n2:0", "n3:0"], worker=BulkWorker)
        s, moved = self.counted(f)
        self.assertEqual(s.bytes.network, 2 * self.NEED)
        for node in ("n0", "n1"):
            self.assertLess(moved[node].tx_bytes, 1.25 * self.NEED + QUIET)

    def test_a_source_in_the_domain_costs_no_network(self):
        nodes = self.nodes(2)
        f = Fleet(nodes, bulk("train", [2], [None]), bulk("rollout", [2], [1]), ["n0:0", "n1:0"], ["n1:1", "n1:2"],
                  worker=BulkWorker)
        s, moved = self.counted(f)
        self.assertEqual(s.bytes.network, 0)
        self.assertLess(moved["n1"].rx_bytes, QUIET)

    def test_over_ipv4_limits_hold_and_the_refit_uses_them(self):
        nodes = self.nodes(2, rate="40mbit")
        f = Fleet(nodes, bulk("train", [1], [None]), bulk("rollout", [2], [1]), ["n0:0"], ["n1:0", "n1:1"], worker=BulkWorker)
        begin = time.monotonic()
        self.counted(f)
        self.assertGreater(time.monotonic() - begin, self.NEED / 5e6 * 0.9)


class Clients(Case):
    def test_any_node_takes_a_submit_and_answers_what_is_committed(self):
        nodes = self.nodes(3)
        f = Fleet(nodes, small_source(), small_destination(), [f"n1:{i}" for i in range(4)], [f"n2:{i}" for i in range(4)],
                  submit_at="n2")
        self.refit(f, 1)
        f.trainer = f.client("n1", "trainer")
        self.refit(f, 2)
        for name in nodes.names:
            stub = nodes[name].refit()
            end = time.monotonic() + WAIT_S
            while stub.GetCommitted(pb.GetCommittedRequest(model="m"), timeout=WAIT_S).version != 2:
                self.assertLess(time.monotonic(), end, name)
            got = nodes[name].admin().Versions(pb.VersionsRequest(model="m"), timeout=WAIT_S).versions
            self.assertEqual([(v.version, v.phase) for v in got], [(2, pb.PHASE_COMMITTED), (1, pb.PHASE_COMMITTED)])

    def test_watchers_at_every_node_hear_of_a_commit(self):
        nodes = self.nodes(3)
        f = Fleet(nodes, small_source(), small_destination(), [f"n0:{i}" for i in range(4)], [f"n1:{i}" for i in range(4)])
        streams = {name: nodes[name].refit().WatchCommitted(pb.WatchCommittedRequest(model="m"), timeout=WAIT_S)
                   for name in nodes.names}
        f.refit(3)
        for name, stream in streams.items():
            self.assertEqual(next(v for v in (m.version for m in stream) if v), 3, name)
            stream.cancel()

    def test_long_polls_at_members_end_with_the_commit(self):
        nodes = self.nodes(2)
        f = Fleet(nodes, small_source(), small_destination(), [f"n0:{i}" for i in range(4)], [f"n1:{i}" for i in range(4)])
        poll = nodes["n1"].refit().GetCommitted.future(
            pb.GetCommittedRequest(model="m", newer_than=0, wait_ms=int(WAIT_S * 1000)), timeout=WAIT_S)
        f.refit(1)
        self.assertEqual(poll.result(timeout=WAIT_S).version, 1)


if __name__ == "__main__":
    main()
