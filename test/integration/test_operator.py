#!/usr/bin/python3
"""What an operator does and sees over several nodes: drain, rehearsal, status at any node, strangers that are counted, and
what changed between versions."""
import json

from nodes import *


def ctl(daemon, *args, timeout=WAIT_S):
    """reshardctl at that daemon's socket: (exit code, stdout, stderr)."""
    r = subprocess.run([BUILD / "reshardctl", *map(str, args), "--socket", daemon.socket], capture_output=True, text=True,
                       timeout=timeout)
    return r.returncode, r.stdout, r.stderr


def ctl_json(daemon, *args):
    code, out, err = ctl(daemon, *args, "--json")
    assert code == 0, f"reshardctl {args}: exit {code}: {out} {err}"
    return json.loads(out)


class Drain(unittest.TestCase):
    """Trainer on n0 and n1; one instance on n1, one on n2."""

    def setUp(self):
        self.nodes = of_case(self, Nodes(3))
        self.fleet = Fleet(self.nodes, small_source(), small_destination(), ["n0:0", "n0:1", "n0:2", "n0:3"],
                           ["n1:0", "n1:1", "n2:0", "n2:1"])

    def test_workers_of_a_drained_node_leave_and_the_others_go_on(self):
        self.fleet.refit(1)
        self.fleet.check(1)
        reply = ctl_json(self.nodes["n0"], "drain", "n2")
        self.assertEqual((reply["node"], reply["workers_gone"], reply["drained_before"]), ("n2", 2, False))
        left = [w for w in self.fleet.destinations if w.node == "n2"]
        for w in left:
            self.assertIn("node n2 is drained", w.event("evicted").reason)
        self.fleet.destinations = [w for w in self.fleet.destinations if w.node == "n1"]
        self.fleet.refit(2, policy=[pb.LayoutPolicy(layout_name="rollout", min_instances=1)])
        self.fleet.check(2)
        with refused(self, grpc.StatusCode.UNAVAILABLE, "drained"):
            left[0].attach()
        n2 = [n for n in self.nodes["n0"].status().nodes if n.name == "n2"][0]
        self.assertTrue(n2.draining)
        self.assertIn("here, drained", ctl(self.nodes["n0"], "status")[1])
        # Back in use: the same ranks attach again, get what is committed by themselves, and take part.
        self.assertIn("in use again", ctl(self.nodes["n1"], "drain", "n2", "--undo")[1])
        for w in left:
            w.attach()
        for w in left:
            w.event("committed", 2)
            w.apply(2)
        self.fleet.destinations += left
        self.fleet.refit(3)
        self.fleet.check(3)

    def test_a_member_drains_itself_and_a_model_that_comes_later_is_refused_there(self):
        with refused(self, grpc.StatusCode.INVALID_ARGUMENT, "node", "name one"):  # an empty message drains nobody
            Client(self.nodes["n1"]).admin.Drain(pb.DrainRequest(), timeout=WAIT_S)
        self.assertEqual([n.name for n in self.nodes["n0"].status().nodes if n.draining], [])
        code, out, err = ctl(self.nodes["n1"], "drain", "--json")
        self.assertEqual(code, 0, err)
        self.assertEqual((json.loads(out)["node"], json.loads(out)["workers_gone"]), ("n1", 2))
        self.assertEqual(err, "reshardctl drain: node n1, whose daemon is asked\n")
        for w in self.fleet.destinations[:2]:
            w.event("evicted")
        with refused(self, grpc.StatusCode.UNAVAILABLE, "drained"):
            Worker(Client(self.nodes["n1"]), "later", pb.SIDE_SOURCE, small_source(), 0, 0)
        Worker(Client(self.nodes["n2"]), "later", pb.SIDE_SOURCE, small_source(), 0, 0)

    def drain_that_goes_on(self, name):
        """The wait of this command is over before the drain is, which has begun."""
        for seconds in (0.3, 1, 4, 16):
            code, out, err = ctl(self.nodes["n0"], "drain", name, "--timeout", seconds)
            if self.node(name).draining:
                break
        self.assertEqual(code, 1, out + err)
        self.assertTrue(self.node(name).draining)

    def test_a_drain_waits_for_the_attempt_in_flight(self):
        for w in self.fleet.destinations:
            w.goodbye()
        self.fleet.destinations = []
        for rank, place in enumerate(("n1:0", "n1:1", "n2:0", "n2:1")):
            self.fleet.automatic = False
            self.fleet.destinations.append(self.fleet.attach_destination(rank, place))
        self.fleet.publish(1)
        self.fleet.submit(1)
        asked = [(w, w.event("accept_requested", 1)) for w in self.fleet.destinations]
        self.drain_that_goes_on("n2")
        waiting = self.nodes["n0"].admin(self.fleet.trainer.token).Drain.future(pb.DrainRequest(node="n2"), timeout=WAIT_S)
        for w, e in asked:
            w.accept(1, e.attempt)
        self.assertEqual(self.fleet.final(1).phase, pb.PHASE_COMMITTED)
        self.assertEqual((waiting.result().workers_gone, waiting.result().drained_before), (2, True))

    def test_what_there_is_nothing_to_do_about_is_said(self):
        for node in ("n0", "n1"):  # the coordinator, and by a member
            code, out, err = ctl(self.nodes[node], "drain", "n2", "--undo")
            self.assertEqual((code, out), (0, "node n2 was not drained: there is nothing to undo\n"), err)
        self.assertEqual(ctl_json(self.nodes["n0"], "drain", "n2", "--undo")["drained_before"], False)
        self.assertEqual(ctl(self.nodes["n0"], "drain", "n2")[1],
                         "node n2 drained: 2 workers have gone, none is there any more\n")
        self.assertEqual(ctl(self.nodes["n1"], "drain", "n2")[1],
                         "node n2 drained (it was before): 2 workers have gone, none is there any more\n")
        self.assertEqual(ctl(self.nodes["n1"], "drain", "n2", "--undo")[:2], (0, "node n2 in use again\n"))
        self.assertEqual(ctl(self.nodes["n1"], "drain", "n2", "--undo")[:2],
                         (0, "node n2 was not drained: there is nothing to undo\n"))

    def node(self, name):
        return [n for n in self.nodes["n0"].status().nodes if n.name == name][0]

    def restart_coordinator(self):
        """Killed; with it went the trainer, which comes back."""
        f = self.fleet
        self.nodes["n0"].kill()
        self.nodes["n0"].restart()
        self.nodes.wait_joined(self.nodes.names)
        f.side_clients.clear()
        f.sources = [f.attach_source(rank, f"n0:{rank}") for rank in range(4)]
        f.trainer = f.client("n0", "trainer")

    def test_a_drain_outlives_the_coordinator_and_its_end_too(self):
        f = self.fleet
        f.refit(1)
        f.check(1)
        begin = time.time_ns()
        self.assertEqual(ctl_json(self.nodes["n1"], "drain", "n2")["workers_gone"], 2)
        since = self.node("n2").drained_wall_ns
        self.assertTrue(begin <= since <= time.time_ns(), since)
        left = [w for w in f.destinations if w.node == "n2"]
        f.destinations = [w for w in f.destinations if w.node == "n1"]
        self.restart_coordinator()
        n2 = self.node("n2")
        self.assertEqual((n2.draining, n2.drained_wall_ns, n2.lacks), (True, since, "drained"))
        self.assertGreaterEqual(n2.drained_age_ns, 1)
        self.assertFalse(self.node("n1").draining)
        with refused(self, grpc.StatusCode.UNAVAILABLE, "n2", "drained"):
            left[0].attach()
        f.refit(2, policy=[pb.LayoutPolicy(layout_name="rollout", min_instances=1)])
        f.check(2)
        for w in left:
            self.assertEqual(w.wrong(1), [])  # left alone
        self.assertEqual(ctl_json(self.nodes["n0"], "drain", "n2")["drained_before"], True)  # once more: it goes on
        self.assertEqual(self.node("n2").drained_wall_ns, since)
        ctl_json(self.nodes["n0"], "drain", "n2", "--undo")
        for w in left:
            w.attach()
        for w in left:
            w.event("committed", 2)
            w.apply(2)
        f.destinations += left
        f.refit(3)
        f.check(3)
        self.restart_coordinator()
        self.assertEqual((self.node("n2").draining, self.node("n2").drained_wall_ns), (False, 0))
        f.refit(4)
        f.check(4)

    def test_workers_that_had_not_left_when_the_coordinator_ended_leave_when_it_is_back(self):
        f = self.fleet
        for w in f.destinations:
            w.goodbye()
        f.automatic = False
        f.destinations = [f.attach_destination(rank, place) for rank, place in enumerate(("n1:0", "n1:1", "n2:0", "n2:1"))]
        f.publish(1)
        f.submit(1)
        for w in f.destinations:
            w.event("accept_requested", 1)
        self.drain_that_goes_on("n2")  # the attempt uses them
        self.restart_coordinator()
        for w in f.destinations[2:]:
            self.assertIn("node n2 is drained", w.event("evicted").reason)
        workers = {w.rank: w.state for m in self.nodes["n0"].status("m").models for w in m.workers if w.side == pb.SIDE_DESTINATION}
        self.assertEqual({rank for rank, state in workers.items() if state != pb.WORKER_GONE}, {0, 1})

    def test_a_node_that_is_not_there(self):
        code, _, err = ctl(self.nodes["n1"], "drain", "n9")
        self.assertEqual(code, 1)
        self.assertIn("no node 'n9'", err)


class Status(unittest.TestCase):
    def setUp(self):
        self.nodes = of_case(self, Nodes(3))

    def status(self, node, model=""):
        return self.nodes[node].status(model)

    def wait_strangers(self, data):
        """Until n0 and n2 both show these counts of the data ports."""
        end = time.monotonic() + WAIT_S
        while True:
            seen = [{n.name: n.strangers.data for n in self.status(node).nodes} for node in ("n0", "n2")]
            if seen == [data, data]:
                return
            self.assertLess(time.monotonic(), end, seen)
            threading.Event().wait(0.05)

    def test_any_node_shows_the_whole_cluster_and_itself(self):
        f = Fleet(self.nodes, small_source(), small_destination(), ["n0:0", "n0:1", "n0:2", "n0:3"],
                  ["n1:0", "n1:1", "n2:0", "n2:1"])
        f.refit(1)
        end = time.monotonic() + WAIT_S
        while (member := self.status("n2")).session != "joined" and time.monotonic() < end:
            threading.Event().wait(0.05)  # on a busy machine its session may be a new one
        head = self.status("n0")
        self.assertEqual((head.node, head.session), ("n0", ""))
        self.assertEqual((member.node, member.session), ("n2", "joined"))
        self.assertNotEqual(head.incarnation, member.incarnation)
        self.assertEqual(member.clients, 1)
        self.assertEqual([n.name for n in member.nodes], ["n0", "n1", "n2"])
        self.assertEqual([w.worker for w in member.models[0].workers], [w.worker for w in head.models[0].workers])
        self.assertEqual(len(member.models[0].workers), 8)
        self.assertEqual(member.models[0].committed, 1)
        out = ctl(self.nodes["n1"], "status")[1]
        for words in ("node n1: ", "coordinator: joined; what follows is what it has", "version 1,", "n2:1", "STRANGERS"):
            self.assertIn(words, out)
        with refused(self, grpc.StatusCode.NOT_FOUND, "no model 'other'"):  # the coordinator's word
            self.status("n1", "other")

    def test_without_the_coordinator_a_node_shows_what_it_knows_and_says_so(self):
        f = Fleet(self.nodes, small_source(), small_destination(), ["n0:0", "n0:1", "n0:2", "n0:3"],
                  ["n1:0", "n1:1", "n2:0", "n2:1"])
        f.refit(1)
        for w in f.destinations:
            w.event("committed", 1)  # their nodes know it
        self.nodes["n0"].freeze()
        begin = time.monotonic()
        status = self.status("n1")
        self.assertLess(time.monotonic() - begin, 2.5 * SLOW)
        self.assertIn("not reachable", status.session)
        self.assertEqual(len(status.nodes), 0)
        self.assertEqual([(m.model, m.committed) for m in status.models], [("m", 1)])
        self.assertEqual(len(self.status("n1", "other").models), 0)
        out = ctl(self.nodes["n1"], "status")[1]
        self.assertIn("what this node knows by itself", out)
        self.assertIn("committed    version 1, ", out)
        for unknown in ("in flight", "queue", "layouts", "coordinator: the coordinator"):
            self.assertNotIn(unknown, out)
        begin = time.monotonic()
        code, out, err = ctl(self.nodes["n1"], "watch", "m", 1, "--timeout", SLOW)
        self.assertLess(time.monotonic() - begin, 6 * SLOW)  # it asks again for one call's time, and says so once
        self.assertEqual((code, err.count("looking for it")), (1, 1), err)
        self.assertIn("not reachable", err)
        for args in (("versions", "m"), ("submit", "m", 2), ("drain", "n1")):  # the daemon is there: not 3
            self.assertEqual(ctl(self.nodes["n1"], *args)[0], 1, args)
        self.nodes["n0"].thaw()

    def test_strangers_are_counted_where_they_came_and_seen_from_everywhere(self):
        # The coordinator has looked at the members' data ports as they joined, and left without a word: that is no stranger.
        self.wait_strangers({"n0": 0, "n1": 0, "n2": 0})
        port = {n.name: n.data_port for n in self.status("n0").nodes}["n1"]
        address = self.nodes.net.address("n1")
        strangers = ("import socket, sys\n"
                     "for i in range(3):\n"
                     "    s = socket.create_connection((sys.argv[1], int(sys.argv[2])), 10)\n"
                     "    s.sendall(b'GET / HTTP/1.0\\r\\n\\r\\n' * 64)\n"
                     "    try:\n"
                     "        while s.recv(100): pass\n"
                     "    except ConnectionError: pass\n")
        subprocess.run(self.nodes.net.argv("n2", [sys.executable, "-c", strangers, address, str(port)]), check=True,
                       timeout=WAIT_S)
        self.wait_strangers({"n0": 0, "n1": 3, "n2": 0})
        self.assertEqual(self.status("n1").strangers.data, 3)
        self.assertEqual(self.status("n2").strangers.data, 0)
        self.assertIn("3 at the data port", ctl(self.nodes["n1"], "status")[1])

    def test_a_daemon_that_is_refused_is_counted(self):
        with grpc.insecure_channel(f"unix:{self.nodes['n0'].socket}") as channel:
            join = channel.stream_stream("/reshard.v1.Peer/Join")
            with self.assertRaises(grpc.RpcError):
                list(join(iter([b"\xff\xff"]), timeout=WAIT_S))
        self.assertGreaterEqual(self.status("n1").nodes[0].strangers.peers, 1)


# --- rehearsal: coordinates by an own reading of daemon/layout/coordinates.h ------------------------------

M32 = 0xFFFFFFFF
FLOATS = {"float32": (31, 23, 127), "float16": (15, 10, 15), "bfloat16": (15, 7, 127)}


def mixed(h):
    h = (h ^ (h >> 16)) * 0x7FEB352D & M32
    h = (h ^ (h >> 15)) * 0x846CA68B & M32
    return h ^ (h >> 16)


def coordinate(name, at, dtype):
    h = 0x811C9DC5
    for c in name.encode():
        h = (h ^ c) * 0x01000193 & M32
    h = mixed(h)
    for i in at[:-1]:
        h = (mixed(h ^ mixed((i + 0x9E3779B9) & M32)) + (i >> 32)) & M32
    h = (h + (at[-1] & M32) * 0x9E3779B1 + mixed(at[-1] >> 32)) & M32
    h = (h ^ (h >> 15)) * 0x85EBCA77 & M32
    h ^= h >> 13
    if dtype in FLOATS:
        sign, mantissa, bias = FLOATS[dtype]
        return (h >> 31) << sign | ((h >> 28 & 7) + bias) << mantissa | (h >> 26 & 3) << (mantissa - 2)
    n = DTYPES[dtype][1]
    return h >> (32 - 8 * n) if n <= 4 else h << 32 | h * 0x2545F491 & M32


def coordinates(name, shape, box, dtype):
    """The bytes of a box."""
    n = DTYPES[dtype][1]
    out = []
    for i in indices(shape, box):
        at = []
        for size in reversed(shape):
            at.insert(0, i % size)
            i //= size
        out.append(coordinate(name, at, dtype).to_bytes(n, "little"))
    return b"".join(out)


class CoordinateWorker(Worker):
    """A worker whose framework writes and reads coordinates."""

    def write_coordinates(self):
        for name, t, offset, box in self.parts():
            data = coordinates(name, t["shape"], box, t["dtype"])
            self.memory[offset:offset + len(data)] = data

    def misplaced(self):
        """Names of tensors whose receiving memory is not their coordinates."""
        return [name for name, t, offset, box in self.parts()
                if self.memory[self.shadow + offset:self.shadow + offset + self.box_bytes(t, box)]
                != coordinates(name, t["shape"], box, t["dtype"])]

    def parts(self):
        for name, boxes in self.place.items():
            for offset, box in boxes:
                yield name, self.layout.tensors[name], offset, box


def cast_source():
    return Layout("train", 2, [mesh("tp", [2])], [tensor("w", [8, 6], "float32", "tp", [0]), tensor("v", [6, 4], "bfloat16", "tp", [1]),
                                                  tensor("ids", [10], "int64", "tp", [None])])


def cast_destination():
    return Layout("rollout", 2, [mesh("tp", [2])], [tensor("w", [8, 6], "bfloat16", "tp", [1], cast=True),
                                                    tensor("v", [6, 4], "bfloat16", "tp", [0]),
                                                    tensor("ids", [10], "int64", "tp", [None])], instances=[[0, 1]])


class Rehearsal(unittest.TestCase):
    def setUp(self):
        self.nodes = of_case(self, Nodes(2, **self.settings()))
        self.fleet = Fleet(self.nodes, cast_source(), cast_destination(), ["n0:0", "n0:1"], ["n1:0", "n1:1"], automatic=False,
                           receive=pb.RECEIVE_IN_PLACE if "tears" in self._testMethodName else pb.RECEIVE_STAGED,
                           worker=CoordinateWorker)

    def settings(self):
        return {"refit__verify": "off"} if "off" in self._testMethodName else {}

    def workers(self, layout):
        return [w for w in self.nodes["n1"].status("m").models[0].workers if w.layout_name == layout]

    def rehearse(self, version=1):
        for w in self.fleet.sources:
            w.publish(version)
        return self.fleet.submit(version, request=f"rehearsal {version}", rehearsal=True)

    def end(self, version=1):
        return self.fleet.watch(version, lambda s: s.phase in (pb.PHASE_REHEARSED, pb.PHASE_ABORTED, pb.PHASE_COMMITTED))

    def write(self):
        for w in self.fleet.sources:
            w.write_coordinates()

    def test_a_good_one_commits_nothing_and_its_number_stays_free(self):
        self.write()
        self.rehearse()
        for w in self.fleet.destinations:
            e = w.event("accept_requested", 1)
            self.assertEqual(w.misplaced(), [])
            w.accept(1, e.attempt)
        s = self.end()
        self.assertEqual((s.phase, s.reason), (pb.PHASE_REHEARSED, "the rehearsal has ended well"))
        self.assertGreater(s.bytes.landed, 0)
        for w in self.fleet.sources + self.fleet.destinations:
            self.assertIn("rehearsal has ended well", w.event("aborted", 1).reason)
        m = self.nodes["n1"].status("m").models[0]
        self.assertEqual((m.committed, m.rehearsed.phase, m.rehearsed.version), (0, pb.PHASE_REHEARSED, 1))
        self.assertEqual([w.held for w in m.workers], [0] * 4)
        self.assertIn("rehearsal    as version 1: rehearsed", ctl(self.nodes["n1"], "status")[1])
        self.nodes["n0"].wait_log("the sources hold their coordinates: 5 of 5 parts computed")
        # The same number, now with the same memory as weights.
        for w in self.fleet.sources:
            w.publish(1)
        self.fleet.submit(1)
        self.fleet.accept(1)
        self.assertEqual(self.fleet.final(1).phase, pb.PHASE_COMMITTED)
        # A restart of the coordinator leaves it known.
        self.nodes["n0"].kill()
        self.nodes["n0"].restart()
        self.nodes.wait_joined(self.nodes.names)
        m = self.nodes["n1"].status("m").models[0]
        self.assertEqual((m.rehearsed.phase, m.rehearsed.version, m.rehearsed.attempt, m.rehearsed.reason),
                         (pb.PHASE_REHEARSED, 1, s.attempt, s.reason))

    def test_swapped_columns_are_named_by_tensor_box_and_rank(self):
        self.write()
        w = self.fleet.sources[1]
        (offset, box), = w.place["v"]  # 6 rows of 2 columns
        for row in range(6):
            at = offset + row * 4
            w.memory[at:at + 4] = w.memory[at + 2:at + 4] + w.memory[at:at + 2]
        self.rehearse()
        s = self.end()
        self.assertEqual(s.phase, pb.PHASE_ABORTED)
        for words in ("tensor 'v'", "[0:6, 2:4]", "source rank 1"):
            self.assertIn(words, s.reason)
        self.assertEqual(self.fleet.destinations[0].memory[:], bytes([POISON]) * len(self.fleet.destinations[0].memory))

    def test_one_that_fails_before_a_byte_moves_tears_nobody(self):
        self.fleet.refit(1)
        self.write()
        self.assertEqual({w.state for w in self.workers("rollout")}, {pb.WORKER_CURRENT})
        w = self.fleet.sources[1]
        (offset, _), = w.place["v"]
        w.memory[offset] ^= 1
        self.rehearse(2)
        s = self.end(2)
        self.assertEqual(s.phase, pb.PHASE_ABORTED)
        self.assertIn("source rank 1", s.reason)
        self.assertEqual({(w.state, w.held, w.applied) for w in self.workers("rollout")}, {(pb.WORKER_CURRENT, 1, 1)})

    def test_a_binding_with_other_strides_than_the_framework_has_is_caught(self):
        old = self.fleet.sources[0]
        old.goodbye()
        pieces = list(old.binding_pieces())
        (offset, box), = old.place["w"]  # 4 rows of 6: bound as if it were stored by columns
        for p in pieces:
            if p.tensor == "w":
                p.stride_bytes.extend([4, 4 * box[1][0]])
        new = CoordinateWorker(self.fleet.client("n0", "trainer"), "m", pb.SIDE_SOURCE, cast_source(), 0, 0, pieces=pieces)
        for p in new.pieces:
            p.segment = 0
        self.fleet.sources[0] = new
        self.write()
        self.rehearse()
        s = self.end()
        self.assertEqual(s.phase, pb.PHASE_ABORTED)
        for words in ("tensor 'w'", "[0:4, 0:6]", "source rank 0"):
            self.assertIn(words, s.reason)

    def test_an_engine_that_does_not_find_its_coordinates_rejects(self):
        self.write()
        self.rehearse()
        for w in self.fleet.destinations:
            e = w.event("accept_requested", 1)
            w.accept(1, e.attempt, reject=w.rank == 1, reason="tensor 'v': 3 elements" if w.rank == 1 else "")
        s = self.end()
        self.assertEqual(s.phase, pb.PHASE_ABORTED)
        self.assertIn("tensor 'v': 3 elements", s.reason)
        self.assertEqual(self.nodes["n0"].status("m").models[0].committed, 0)

    def test_with_verify_off_nothing_would_be_proven(self):
        self.write()
        self.rehearse()
        s = self.end()
        self.assertEqual(s.phase, pb.PHASE_ABORTED)
        self.assertIn("without fingerprints", s.reason)

    def test_by_reshardctl(self):
        self.write()
        for w in self.fleet.sources:
            w.publish(7)
        acceptors = [threading.Thread(target=lambda w=w: w.accept(7, w.event("accept_requested", 7).attempt))
                     for w in self.fleet.destinations]
        for t in acceptors:
            t.start()
        code, out, err = ctl(self.nodes["n1"], "submit", "m", 7, "--rehearse", "--wait")
        for t in acceptors:
            t.join()
        self.assertEqual(code, 0, out + err)
        self.assertIn("rehearsed", out)


class Timeline(unittest.TestCase):
    def test_what_changed_between_versions_may_be_the_settings(self):
        with Daemon() as daemon:
            for chunk_bytes, versions in ((4096, (1, 2)), (65536, (3, 4))):
                daemon.settings["devices"]["chunk_bytes"] = chunk_bytes
                if daemon.process.poll() is None:
                    self.assertEqual(daemon.stop()[0], 0)
                daemon.start()
                f = rig.Fleet(daemon, small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7], automatic=True)
                for v in versions:
                    f.refit(v)
                    for w in f.destinations:
                        w.apply(v)
            same = ctl_json(daemon, "timeline", "m", "--compare", "1,2")
            self.assertNotIn("config", same["changed"])
            self.assertEqual(len(same["sets"][0]["configs"][0]), 32)
            self.assertIn("config", ctl_json(daemon, "timeline", "m", "--compare", "1-2,3-4")["changed"])

    def test_published_is_a_mark_of_each_source(self):
        with Daemon() as daemon:
            f = rig.Fleet(daemon, small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7], automatic=True)
            for w in f.sources[:3]:
                w.write(1)
                w.publish(1)
            f.submit(1)
            f.sources[3].event("publish_requested", 1)
            f.sources[3].write(1)
            f.sources[3].publish(1)
            self.assertEqual(f.final(1).phase, pb.PHASE_COMMITTED)
            reply = daemon.admin().Timeline(pb.TimelineRequest(model="m", version=1), timeout=WAIT_S)
            marks = {m.who: m.at_ns for m in reply.versions[0].marks if m.name == "published"}
            self.assertEqual(sorted(marks), [f"train/rank {r}" for r in range(4)])
            self.assertEqual([marks[f"train/rank {r}"] for r in range(3)], [0, 0, 0])  # they had by then
            self.assertGreater(marks["train/rank 3"], 0)
            self.assertIn("train/rank 3", ctl(daemon, "timeline", "m", 1)[1])


class OneNode(unittest.TestCase):
    def test_status_says_that_the_only_node_is_drained(self):
        with Daemon() as daemon:
            for drained in (True, False):
                self.assertEqual(ctl(daemon, "drain", *([] if drained else ["--undo"]))[0], 0)
                self.assertEqual("workers are refused until reshardctl drain --undo" in ctl(daemon, "status")[1], drained)

    def test_a_committed_version_is_told_as_such_where_no_trainer_is_there_any_more(self):
        with Daemon() as daemon:
            f = rig.Fleet(daemon, small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7], automatic=True)
            for v in (1, 2):
                f.refit(v)
                for w in f.destinations:
                    w.apply(v)
            f.trainer.close()
            end = time.monotonic() + WAIT_S
            while any(w.side == pb.SIDE_SOURCE and w.state != pb.WORKER_GONE for w in daemon.status("m").models[0].workers):
                self.assertLess(time.monotonic(), end)
                time.sleep(0.01)
            code, out, err = ctl(daemon, "submit", "m", 2)
            self.assertEqual((code, err), (0, ""), out)
            code, out, err = ctl(daemon, "submit", "m", 1)
            self.assertEqual(code, 1)
            self.assertIn("version 1 is not above 2, which is committed", err)

    def test_a_committed_version_is_the_same_when_its_trainers_were_evicted(self):
        with Daemon() as daemon:
            f = rig.Fleet(daemon, small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7], automatic=True)
            f.refit(1)
            for w in daemon.status("m").models[0].workers:
                if w.side == pb.SIDE_SOURCE:
                    code, _, err = ctl(daemon, "evict", f"{w.worker:016x}")
                    self.assertEqual(code, 0, err)
            self.assertEqual([w for w in daemon.status("m").models[0].workers if w.side == pb.SIDE_SOURCE], [])
            code, out, err = ctl(daemon, "submit", "m", 1)
            self.assertEqual((code, err), (0, ""), out)
            code, out, err = ctl(daemon, "submit", "m", 1, "--verify", "off")
            self.assertEqual(code, 1)
            self.assertIn("version 1 is committed already, with other content", err)


if __name__ == "__main__":
    main()
