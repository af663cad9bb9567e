#!/usr/bin/python3
"""Nodes that die, hang, are cut off and come back in the middle of a refit: what is answered, and that the next one is clean."""
import unittest

from nodes import *

RATE = "24mbit"  # 3 MB/s: the payload takes 0.7 s into each node
DELAY_US = 8000  # of the stand-in, whose NCCL takes no links: at most, before each thing that a stream does, some 3 for each 64 KiB
ANSWER_S = 6 * SLOW  # lease, slack, and what a busy machine takes


class Case(unittest.TestCase):
    """n0: coordinator and source; the others receive, each an instance of its own."""

    def nodes(self, count, source_node="n0", receivers=None, **more):
        nodes = Nodes(count, rate=RATE, refit__transfer_timeout_ms=int(15000 * SLOW), **more)
        if backends.STANDIN:
            for d in nodes.daemons.values():
                d.env["STANDIN_DELAY_US"] = DELAY_US
        of_case(self, nodes)
        nodes.need_namespaces(self)
        receivers = receivers or [x for x in nodes.names if x != source_node]
        k = len(receivers)
        self.f = Fleet(nodes, bulk("train", [1], [None]), bulk("rollout", [k], [None], instances=[[i] for i in range(k)]),
                       [f"{source_node}:0"], [f"{x}:0" for x in receivers], worker=BulkWorker)
        self.places = [f"{x}:0" for x in receivers]
        return nodes

    def begin(self, version):
        self.f.publish(version)
        self.f.submit(version)
        self.f.until_bytes_move(version)

    def aborted(self, version, *words, within=ANSWER_S):
        """The version ends ABORTED in time, and the reason names what must be named."""
        begin = time.monotonic()
        s = self.f.watch(version, lambda s: s.phase in (pb.PHASE_ABORTED, pb.PHASE_COMMITTED), timeout=within + WAIT_S)
        self.assertEqual(s.phase, pb.PHASE_ABORTED)
        for word in words:
            self.assertIn(word, s.reason)
        self.assertLess(time.monotonic() - begin, within, s.reason)
        return s

    def attach_again(self, node):
        self.f.forget(node)
        for rank, place in enumerate(self.places):
            if place.split(":")[0] == node:
                self.f.destinations.insert(rank, self.f.attach_destination(rank, place))

    def clean(self, nodes, version):
        """A refit with nothing in its way, at full speed: commits at its first attempt, every element right."""
        nodes.net.set_rate(None)
        s = self.f.refit(version)
        self.assertEqual(s.bytes.network, s.bytes.network_minimum)
        self.f.check(version)


class Deaths(Case):
    def test_a_destination_daemon_that_is_killed_ends_the_attempt_and_comes_back(self):
        nodes = self.nodes(3)
        self.f.refit(1)
        self.f.check(1)
        self.begin(2)
        nodes["n2"].kill()
        self.aborted(2, "n2")
        self.assertEqual(nodes.head.status("m").models[0].committed, 1)
        keeps = next(w for w in self.f.destinations if w.node == "n1")
        self.assertEqual(keeps.wrong(1), [])  # what is served elsewhere is untouched
        nodes["n2"].restart()
        self.attach_again("n2")
        back = next(w for w in self.f.destinations if w.node == "n2")
        back.event("committed", 1)  # what the other serves comes by itself
        back.apply(1)
        self.assertEqual(back.wrong(1), [])
        self.clean(nodes, 3)

    def test_a_node_joins_a_new_coordinator_once_what_the_old_one_had_applied_is_over(self):
        nodes = self.nodes(2, cluster__lease_ms=600000)  # which ends no copy, however long the new coordinator takes
        self.f.refit(1)
        worker, (node, pid) = self.f.destinations[0], (nodes["n1"], nodes["n1"].data_plane_pid())
        os.kill(pid, signal.SIGSTOP)  # in the middle of the copy to live memory
        try:
            first = worker.client.stub.Apply.future(pb.ApplyRequest(worker=worker.id, version=1), timeout=WAIT_S)
            nodes.head.wait_status("m", lambda m: any(w.doing == "applying" for w in m.workers), "applying")
            with self.assertRaises(grpc.RpcError) as refused:
                worker.ready(1)  # a staged worker has none to say: the answer comes behind the order to apply
            self.assertEqual(refused.exception.code(), grpc.StatusCode.FAILED_PRECONDITION)
            nodes.head.kill()
            nodes.head.start()
            self.assertEqual(first.code(), grpc.StatusCode.UNAVAILABLE)
            with self.assertRaises(grpc.RpcError) as again:  # a second copy would run beside the first
                worker.apply(1)
            self.assertEqual(again.exception.code(), grpc.StatusCode.UNAVAILABLE)
        finally:
            os.kill(pid, signal.SIGCONT)
        nodes.wait_joined(["n1"])
        nodes.head.wait_status("m", lambda m: [w.applied for w in m.workers if w.worker == worker.id] == [1], "applied")
        self.assertEqual(worker.wrong(1), [])
        self.assertEqual(worker.apply(1).applied, 1)

    def test_the_death_of_a_relay_is_named_and_nobody_hangs(self):
        nodes = self.nodes(5)
        self.begin(1)
        before = nodes.net.counters()
        relay = max(nodes.names[1:], key=lambda x: before[x].tx_bytes)
        nodes[relay].kill()
        self.aborted(1, relay)
        nodes[relay].restart()
        self.attach_again(relay)
        self.clean(nodes, 2)

    def test_a_data_plane_that_dies_is_replaced_and_only_it(self):
        nodes = self.nodes(3)
        self.begin(1)
        os.kill(nodes["n1"].data_plane_pid(), signal.SIGKILL)
        self.aborted(1, "n1")
        self.clean(nodes, 2)

    def test_the_coordinators_death_in_the_middle_leaves_what_was_committed(self):
        nodes = self.nodes(3, source_node="n1", receivers=["n2"])
        self.f.refit(1)
        self.f.check(1)
        self.begin(2)
        nodes["n0"].kill()
        nodes["n0"].start()
        nodes.wait_joined(nodes.names)
        end = time.monotonic() + WAIT_S
        while True:
            versions = {v.version: v.phase for v in nodes.head.admin().Versions(pb.VersionsRequest(model="m"),
                                                                                timeout=WAIT_S).versions}
            if versions.get(2) == pb.PHASE_ABORTED:
                break
            self.assertLess(time.monotonic(), end, versions)
        self.assertEqual(versions[1], pb.PHASE_COMMITTED)
        self.assertEqual(nodes.head.status("m").models[0].committed, 1)
        self.assertEqual(self.f.destinations[0].wrong(1), [])
        self.clean(nodes, 3)


class Silence(Case):
    def test_a_link_that_is_cut_is_noticed_and_named(self):
        nodes = self.nodes(3)
        self.f.refit(1)
        self.f.check(1)
        self.begin(2)
        nodes.net.cut("n2")
        begin = time.monotonic()
        nodes.wait_nodes(lambda states: states["n2"] != "here", "n2 away", timeout=ANSWER_S)
        self.assertLess(time.monotonic() - begin, 3.5 * SLOW)
        self.aborted(2, "n2")
        nodes.net.mend("n2")
        nodes.wait_joined(nodes.names)
        self.clean(nodes, 3)

    def test_the_coordinators_link_is_cut_and_mended(self):
        nodes = self.nodes(3, source_node="n1", receivers=["n2"])
        self.begin(1)
        nodes.net.cut("n0")
        nodes.wait_nodes(lambda states: states["n1"] != "here" and states["n2"] != "here", "members away", timeout=ANSWER_S)
        nodes.net.mend("n0")
        nodes.wait_joined(nodes.names)
        self.aborted(1)
        self.clean(nodes, 2)

    def test_a_daemon_that_is_stopped_is_expelled_and_may_come_back(self):
        nodes = self.nodes(3)
        self.begin(1)
        nodes["n1"].freeze()
        try:
            self.aborted(1, "n1")
        finally:
            nodes["n1"].thaw()
        nodes.wait_joined(nodes.names)
        self.clean(nodes, 2)

    def test_a_data_plane_that_is_stopped_ends_the_attempt(self):
        nodes = self.nodes(3)
        self.begin(1)
        os.kill(nodes["n2"].data_plane_pid(), signal.SIGSTOP)
        self.f.trainer.admin.Abort(pb.AbortRequest(model="m", version=1), timeout=WAIT_S)
        self.aborted(1)
        self.clean(nodes, 2)


class Strangers(Case):
    CODE = ("import os, socket, sys\n"
            "for i in range(20):\n"
            "    s = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=10)\n"
            "    try:\n"
            "        s.sendall(os.urandom(64) if i % 2 else b'resh' + os.urandom(200))\n"
            "        assert s.recv(1) == b''\n"
            "    except ConnectionResetError:\n"
            "        pass\n"
            "print('shown the door')")

    def test_strangers_at_data_ports_are_refused_and_the_attempt_goes_on(self):
        nodes = self.nodes(3)
        self.begin(1)
        for name in ("n0", "n1"):
            s = nodes.node_status()[name]
            p = nodes.net.popen("n2", [sys.executable, "-c", self.CODE, s.data_address, str(s.data_port)], stdout=subprocess.PIPE,
                                text=True)
            self.assertEqual(p.communicate(timeout=WAIT_S)[0], "shown the door\n")
        self.assertEqual(self.f.final(1).phase, pb.PHASE_COMMITTED)
        self.f.check(1)

    def test_garbage_at_the_peer_port_is_refused_and_the_attempt_goes_on(self):
        nodes = self.nodes(3)
        self.begin(1)
        code = ("import os, socket, sys\n"
                "for i in range(20):\n"
                "    s = socket.create_connection((sys.argv[1], 7070), timeout=10)\n"
                "    s.sendall(os.urandom(5000) if i % 2 else b'PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n' + os.urandom(500))\n"
                "    s.close()\n")
        p = nodes.net.popen("n2", [sys.executable, "-c", code, nodes.net.address("n0")])
        self.assertEqual(p.wait(WAIT_S), 0)
        self.assertEqual(self.f.final(1).phase, pb.PHASE_COMMITTED)
        self.f.check(1)
        self.assertEqual(set(nodes.node_states().values()), {"here"})


class AtRandom(Case):
    """SEED=n repeats a schedule; TRIES=n makes it longer."""

    def test_kills_stops_and_cuts_at_random_moments_each_with_a_clean_refit_after(self):
        seed = int(os.environ.get("SEED", time.time_ns() % 100000))
        dice, tries = random.Random(seed), int(os.environ.get("TRIES", 3))
        nodes = self.nodes(4)
        version = 0
        for i in range(tries):
            kind, victim = dice.choice(("kill", "stop", "cut", "plane")), dice.choice(nodes.names[1:])
            with self.subTest(seed=seed, round=i, kind=kind, victim=victim):
                nodes.net.set_rate(RATE)
                version += 1
                self.f.publish(version)
                self.f.submit(version)
                self.wait_landed(version, dice.random())
                self.hurt(nodes, kind, victim)
                self.f.final(version)  # either way, but at an end
                self.heal(nodes, kind, victim)
                version += 1
                self.clean(nodes, version)

    def wait_landed(self, version, share):
        self.f.watch(version, lambda s: s.phase >= pb.PHASE_STAGED or s.bytes.total and s.bytes.landed >= share * s.bytes.total)

    def hurt(self, nodes, kind, victim):
        {"kill": lambda: nodes[victim].kill(), "stop": nodes[victim].freeze, "cut": lambda: nodes.net.cut(victim),
         "plane": lambda: os.kill(nodes[victim].data_plane_pid(), signal.SIGKILL)}[kind]()

    def heal(self, nodes, kind, victim):
        if kind == "kill":
            nodes[victim].restart()
            self.attach_again(victim)
        elif kind == "stop":
            nodes[victim].thaw()
        elif kind == "cut":
            nodes.net.mend(victim)
        nodes.wait_joined(nodes.names)
        self.apply_what_waits(nodes)

    def apply_what_waits(self, nodes):
        """A version that committed all the same is applied, and right, so that it is out of the way of the next one. Whoever has
        come back empty is brought up to it by itself."""
        by_id = {w.id: w for w in self.f.destinations}

        def waits(m):
            return [x for x in m.workers if x.worker in by_id and x.applied < m.committed]

        end = time.monotonic() + WAIT_S
        while True:
            m = nodes.head.status("m").models[0]
            if not waits(m):
                return
            for x in (x for x in waits(m) if x.held == m.committed):
                with contextlib.suppress(grpc.RpcError):  # its data plane is on its way
                    by_id[x.worker].apply(m.committed)
                    self.assertEqual(by_id[x.worker].wrong(m.committed), [])
            self.assertLess(time.monotonic(), end, "a committed version can't be applied")


if __name__ == "__main__":
    main()
