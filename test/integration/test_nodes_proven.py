#!/usr/bin/python3
"""An attempt over several nodes ends before all of it is there: who may feed the next one in the trainer's place.

n0 decides, n1 has the trainer, n2 and n3 an instance each, and n3's data plane is stopped in the middle of it. What n2 has got whole feeds n3
only where it was compared with what the trainer sent; wrong bytes are never committed, whoever tells of them and when."""
import unittest
import unittest.mock

from nodes import *

RATE = "24mbit"  # 3 MB/s: 1 MB into each of two nodes, long before the silence of a third is noticed


class Case(unittest.TestCase):
    def nodes(self, damage=None):
        """damage: RESHARD_DAMAGE of n2."""
        nodes = Nodes(4, rate=RATE, refit__relay="no", refit__least_piece_bytes=4 << 20, refit__transfer_timeout_ms=int(20000 * SLOW),
                      refit__prepare_timeout_ms=int(4000 * SLOW))
        start = nodes.start

        def start_damaged(names=None):
            with unittest.mock.patch.dict(os.environ, RESHARD_DAMAGE=damage):
                nodes["n2"].start(wait=None)
            for name in ("n0", "n1", "n3"):
                nodes[name].start(wait=None)
            nodes.wait_joined(nodes.names)
            return nodes

        nodes.start = start_damaged if damage else start
        of_case(self, nodes)
        nodes.start = start
        nodes.need_namespaces(self)
        # Two replicas of one tensor: one sends to n2 and one to n3, and does not wait for the other.
        big = lambda name, **more: Layout(name, 2, [mesh("m", [2])], [tensor("big", [512, 2048], "uint8", "m", [None])], **more)
        self.f = Fleet(nodes, big("train"), big("rollout", instances=[[0], [1]]), ["n1:0", "n1:1"], ["n2:0", "n3:0"],
                       worker=BulkWorker, submit_at="n0")
        return nodes

    def moving(self, nodes, **options):
        """Version 1 is on its way; n3 gets nothing more of it."""
        self.options = dict(options, release_at=pb.RELEASE_AT_READ)
        self.f.publish(1)
        self.f.submit(1, **self.options)
        self.f.until_bytes_move(1)
        os.kill(nodes["n3"].data_plane_pid(), signal.SIGSTOP)  # it is ended and replaced when it does not let go

    def until_n2_has_staged(self, nodes):
        nodes["n0"].wait_status("m", lambda m: any(w.node == "n2" and w.side == pb.SIDE_DESTINATION and w.held == 1 for w in m.workers),
                                "n2 has got version 1 whole")

    def ended(self, attempt=1):
        s = self.f.watch(1, lambda s: s.attempt >= attempt and s.phase in (pb.PHASE_ABORTED, pb.PHASE_COMMITTED))
        self.assertEqual(s.phase, pb.PHASE_ABORTED, s)
        return s

    def again(self, request):
        return self.f.submit(1, request, **self.options).attempt

    def committed(self, attempt):
        s = self.f.watch(1, lambda s: s.attempt >= attempt and s.phase in (pb.PHASE_ABORTED, pb.PHASE_COMMITTED))
        self.assertEqual(s.phase, pb.PHASE_COMMITTED, s.reason)
        self.f.check(1)
        return s

    def nobody_has_it(self, nodes):
        for name in ("n0", "n2", "n3"):
            with self.assertRaises(grpc.RpcError) as e:
                nodes[name].refit().GetCommitted(pb.GetCommittedRequest(model="m"), timeout=WAIT_S)
            self.assertEqual(e.exception.code(), grpc.StatusCode.NOT_FOUND, name)


class Right(Case):
    def test_who_was_compared_feeds_the_rest_though_the_trainers_node_is_gone(self):
        self.fed()

    def test_where_nothing_is_verified_whoever_has_got_all_feeds(self):
        self.fed(verify=pb.VERIFY_OFF)

    def fed(self, **options):
        nodes = self.nodes()
        self.moving(nodes, **options)
        self.until_n2_has_staged(nodes)
        nodes["n1"].kill()
        self.f.forget("n1")
        self.ended()
        s = self.committed(self.again("again"))
        self.assertLessEqual(s.bytes.landed, self.f.destinations[1].n_bytes)  # n2 gets nothing


class Wrong(Case):
    DAMAGE = "flipped-bit:1"

    def test_who_has_got_wrong_bytes_feeds_nobody_though_the_trainers_daemon_says_no_more(self):
        nodes = self.nodes(self.DAMAGE)
        self.moving(nodes)
        nodes["n1"].freeze()  # its data plane sends on while its lease lasts; what it has sent nobody will tell
        try:
            self.ended()
        finally:
            nodes["n1"].kill()
        self.f.forget("n1")
        self.assertIn(1, {len(w.wrong(1, w.shadow)) for w in self.f.destinations[:1]})  # n2 got all, and it is wrong
        self.ended(self.again("without the trainer"))
        self.nobody_has_it(nodes)
        nodes["n1"].restart()
        self.f.sources = [self.f.attach_source(r, f"n1:{r}") for r in (0, 1)]
        self.f.publish(1)
        self.committed(self.again("with the trainer"))

    def test_it_is_found_before_the_attempt_is_through_and_a_retry_without_the_trainer_ends_as_source_gone(self):
        nodes = self.nodes(self.DAMAGE)
        self.moving(nodes)
        s = self.ended()
        self.assertIn("layout 'rollout' rank 0 holds fingerprint", s.reason)
        for w in self.f.sources:
            w.event("source_released", 1)
            w.write(9)  # it goes on
        s = self.ended(self.again("without the trainer"))
        self.assertIn("SOURCE_GONE", s.reason)
        self.nobody_has_it(nodes)
        self.f.publish(1)
        self.committed(self.again("with the trainer"))


if __name__ == "__main__":
    main()
