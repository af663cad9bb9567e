#!/usr/bin/python3
"""What is told of a version's times: one meaning everywhere, before and after a restart, and the wait in the queue apart."""
import json

from nodes import *
from test_operator import ctl, ctl_json


def times(reply):
    """Of each version of a Versions reply."""
    return {v.version: (v.phase, v.total_ns, v.wire_ns, v.stall_ns) for v in reply.versions}


def versions_of(daemon):
    return daemon.admin().Versions(pb.VersionsRequest(model="m"), timeout=WAIT_S)


def phases(daemon, version):
    """Of one version, in their order in time."""
    [v] = ctl_json(daemon, "timeline", "m", version)["versions"]
    return v["record"], sorted(v["phases"], key=lambda p: p["from_ns"])


def add_up(case, daemon, version):
    record, told = phases(daemon, version)
    case.assertEqual(sum(p["took_ns"] for p in told if p["phase"] != "apply"), record["total_ns"], told)
    case.assertGreater(record["total_ns"], 0)


class Restart(unittest.TestCase):
    def ended(self, daemon, fleet):
        """Versions that ended in all ways; then one more record, behind which nothing of theirs can be missing."""
        fleet.refit(1, release_at=pb.RELEASE_AT_COMMITTED)
        fleet.submit(2)  # nobody publishes it
        fleet.submit(3)
        fleet.submit(4)
        self.assertEqual(fleet.final(3).phase, pb.PHASE_SUPERSEDED)
        for version in (2, 4):
            fleet.trainer.admin.Abort(pb.AbortRequest(model="m", version=version), timeout=WAIT_S)
        for version in (1, 2, 3, 4):
            add_up(self, daemon, version)
        before = times(versions_of(daemon))
        fleet.submit(5)
        return before

    def same_after(self, daemon, before):
        after = times(versions_of(daemon))
        self.assertEqual({v: t for v, t in after.items() if v in before}, before)
        self.assertEqual(after[5][:2], (pb.PHASE_ABORTED, 0))  # it ended with the coordinator, and nobody knows when
        for version in before:
            add_up(self, daemon, version)

    def test_times_are_the_same_after_the_daemon_was_killed(self):
        with Daemon() as daemon:
            before = self.ended(daemon, rig.Fleet(daemon, small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7],
                                                  automatic=True))
            daemon.kill()
            daemon.wait()
            daemon.start()
            self.same_after(daemon, before)

    def test_times_are_the_same_at_every_node_and_after_the_coordinator_ended(self):
        nodes = of_case(self, Nodes(2))
        fleet = Fleet(nodes, small_source(), small_destination(), ["n0:0", "n0:1", "n0:2", "n0:3"],
                      ["n1:0", "n1:1", "n1:2", "n1:3"], automatic=True)
        before = self.ended(nodes["n0"], fleet)
        self.assertEqual({v: t for v, t in times(versions_of(nodes["n1"])).items() if v in before}, before)
        nodes["n0"].stop()
        nodes["n0"].restart()
        nodes.wait_joined(nodes.names)
        for name in nodes.names:
            self.same_after(nodes[name], before)


class Queue(unittest.TestCase):
    def setUp(self):
        self.daemon = self.enterContext(Daemon())
        self.fleet = rig.Fleet(self.daemon, small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7], automatic=True)

    def test_the_wait_behind_a_version_that_nobody_publishes_is_queue_and_not_plan(self):
        f = self.fleet
        for i, wait_ms in enumerate(deadlines(700)):
            one, two = 2 * i + 1, 2 * i + 2
            f.submit(one, prepare_timeout_ms=wait_ms)
            f.publish(two)
            f.submit(two)
            [m] = self.daemon.status("m").models
            self.assertEqual(f.final(one).phase, pb.PHASE_ABORTED)
            self.assertEqual(f.final(two).phase, pb.PHASE_COMMITTED)
            add_up(self, self.daemon, one)
            add_up(self, self.daemon, two)
            took = {v: {p["phase"]: p["took_ns"] / 1e6 for p in phases(self.daemon, v)[1]} for v in (one, two)}
            # The one waited for publications; the other, submitted a little later, for the one.
            self.assertGreaterEqual(took[one]["gather"], wait_ms)
            seen = m.in_flight.version, list(m.queued), took[two]["queue"] > wait_ms / 2, took[two]["plan"] + took[two]["gather"] < wait_ms / 2
            if seen == (one, [two], True, True):  # it is published, and waits for its turn all the same
                break
            for w in f.destinations:  # a longer wait, beside which all else is short
                w.apply(two)
        self.assertEqual(seen, (one, [two], True, True), took)
        text = ctl(self.daemon, "timeline", "m", two)[1]
        self.assertIn("phases, slowest first: queue ", text)
        trace = json.loads(ctl(self.daemon, "timeline", "m", two, "--chrome", "-")[1])["traceEvents"]
        [span] = [e for e in trace if e["name"] == "queue: submitted → begun"]
        self.assertAlmostEqual(span["dur"] / 1e3, took[two]["queue"], places=2)

    def test_the_last_refit_is_the_one_that_ended_last(self):
        f = self.fleet
        f.submit(9)
        f.trainer.admin.Abort(pb.AbortRequest(model="m", version=9), timeout=WAIT_S)
        f.refit(5)  # smaller, since nothing above it is committed
        for start in ("first", "second"):
            [m] = self.daemon.status("m").models
            self.assertEqual((m.last.version, m.last.phase), (5, pb.PHASE_COMMITTED), start)
            self.assertIn("last refit   version 5 committed", ctl(self.daemon, "status")[1])
            if start == "first":
                self.assertEqual(self.daemon.stop()[0], 0)
                self.daemon.start()


if __name__ == "__main__":
    main()
