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


if __name__ == "__main__":
    unittest.main()
