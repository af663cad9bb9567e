#!/usr/bin/python3
"""Workers whose engine lets the memory of its weights go, and takes new memory later (CASES B29): the daemon's side by raw calls,
libreshard's by its Python package, over one daemon and several."""
import json
import sys
import unittest

import nodes
from rig import *


def sleep(w):
    w.client.stub.Sleep(pb.SleepRequest(worker=w.id), timeout=WAIT_S)


def inode(memory):
    """Of the file that the memory lies in, the stand-in's GPU memory, too."""
    if hasattr(memory, "fd") and not hasattr(memory, "base"):
        return os.fstat(memory.fd).st_ino
    for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(x, 16) for x in line.split()[0].split("-"))
        if first <= memory.base < last:
            return int(line.split()[4])
    raise AssertionError("it is mapped nowhere")


def mapped(d, number):
    """How often the data plane has that file mapped."""
    return sum(line.split()[4] == str(number)
               for line in pathlib.Path(f"/proc/{d.data_plane_pid()}/maps").read_text().splitlines())


def give_memory_back(w):
    """What an engine does once Sleep has been answered."""
    w.client.drop(w.segment)
    if hasattr(w.memory, "free"):
        w.memory.free()
    w.memory = None


def wake(w, **changes):
    w.segment, w.memory = w.client.segment(w.n_bytes * (2 if w.shadow else 1), (w.side, w.rank, w.device))
    w.memory[:] = bytes([POISON]) * len(w.memory)
    return w.attach(**changes)


def states(d, model="m"):
    return {(w.layout_name, w.rank): w.state for m in d.status(model).models for w in m.workers}


def ctl_status(d):
    return subprocess.run([BUILD / "reshardctl", "status", "--socket", d.socket], check=True, text=True, capture_output=True,
                          timeout=WAIT_S).stdout


def without_one():
    return [pb.LayoutPolicy(layout_name="rollout", min_instances=1)]


class OneDaemon(unittest.TestCase):
    def fleet(self, d, **more):
        return Fleet(d, small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7], automatic=True, **more)

    def refit(self, f, version, **options):
        f.refit(version, **options)
        for w in f.destinations:
            if w.memory is not None and w.shadow:
                w.apply(version)
            if w.memory is not None:
                self.assertEqual(w.wrong(version), [], w.rank)

    def test_case_b29_a_transfer_to_who_sleeps_is_refused_and_goes_to_its_new_memory_once_it_wakes(self):
        for receive in (pb.RECEIVE_STAGED, pb.RECEIVE_IN_PLACE):
            with self.subTest(receive), Daemon() as d:
                f = self.fleet(d, receive=receive)
                self.refit(f, 1)
                pid, w = d.data_plane_pid(), f.destinations[1]
                number = inode(w.memory)
                self.assertGreater(mapped(d, number), 0)
                sleep(w)
                self.assertEqual(mapped(d, number), 0)  # before the answer
                sleep(w)
                give_memory_back(w)
                self.assertEqual(states(d)["rollout", 1], pb.WORKER_ASLEEP)
                f.publish(2)
                with refused(self, grpc.StatusCode.FAILED_PRECONDITION, "rollout/rank 1 is asleep", "wake it up"):
                    f.submit(2)
                self.assertEqual(d.data_plane_pid(), pid)
                old, stream = w.id, w.events
                wake(w)
                self.assertNotEqual(w.id, old)
                self.assertEqual((w.attached.held, w.attached.applied), (0, 0))
                self.assertEqual(stream.get(timeout=WAIT_S)[0], "committed")  # of version 1
                self.assertEqual(stream.get(timeout=WAIT_S)[0], "end")  # its old lease's
                if w.shadow:  # it catches up, and would hold the next version up with what it has not applied
                    w.event("committed", 1)
                    w.apply(1)
                f.submit(2, "again")
                if receive == pb.RECEIVE_IN_PLACE:
                    for x in f.destinations:
                        x.event("ready_requested", 2)
                        x.ready(2)
                self.assertEqual(f.final(2).phase, pb.PHASE_COMMITTED)
                for x in f.destinations:
                    if x.shadow:
                        x.apply(2)
                    self.assertEqual(x.wrong(2), [], x.rank)
                self.assertEqual(d.data_plane_pid(), pid)

    def test_a_policy_that_can_do_without_goes_on_and_who_wakes_gets_the_version_by_itself(self):
        with Daemon() as d:
            f = self.fleet(d)
            self.refit(f, 1)
            w = f.destinations[3]
            sleep(w)
            give_memory_back(w)
            f.publish(2)
            f.submit(2, policy=without_one())
            self.assertEqual(f.final(2).phase, pb.PHASE_COMMITTED)
            for x in f.destinations[:2]:
                x.apply(2)
                self.assertEqual(x.wrong(2), [])
            wake(w)
            w.event("committed", 2)
            self.assertEqual(w.wrong(2, w.shadow), [])
            w.apply(2)
            self.assertEqual(w.wrong(2), [])

    def test_who_falls_asleep_while_others_accept_waits_for_the_decision_and_status_says_so(self):
        with Daemon() as d:
            f = Fleet(d, small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7])
            f.publish(1)
            f.submit(1, policy=without_one())
            asked = [w.event("accept_requested", 1) for w in f.destinations]
            w = f.destinations[3]
            number = inode(w.memory)
            answer = w.client.stub.Sleep.future(pb.SleepRequest(worker=w.id), timeout=WAIT_S)
            d.wait_status("m", lambda m: "letting go when the version is decided" in [x.doing for x in m.workers], "who waits")
            self.assertFalse(answer.done())
            for x, e in zip(f.destinations[:2], asked):
                x.accept(1, e.attempt)
            answer.result()
            self.assertEqual(mapped(d, number), 0)
            self.assertEqual(f.final(1).phase, pb.PHASE_COMMITTED)
            self.assertEqual({x.doing for x in d.status("m").models[0].workers}, {""})

    def test_that_wait_ends_with_the_accept_deadline(self):
        with Daemon() as d:
            f = Fleet(d, small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7])
            f.publish(1)
            f.submit(1, policy=without_one(), accept_timeout_ms=int(500 * SLOW))
            f.destinations[3].event("accept_requested", 1)
            sleep(f.destinations[3])  # and nobody says what it thinks
            s = f.final(1)
            self.assertEqual(s.phase, pb.PHASE_ABORTED)
            self.assertIn("accept deadline", s.reason)

    def test_who_wakes_when_nobody_holds_the_version_any_more_is_explained(self):
        with Daemon() as d:
            f = self.fleet(d)
            self.refit(f, 1)
            for w in f.destinations:
                sleep(w)
                give_memory_back(w)
            self.assertEqual(d.status("m").models[0].newcomers, "")  # nobody waits
            for w in f.destinations[:2]:
                wake(w)
            why = d.status("m").models[0].newcomers
            for words in ("rollout/instance 0: version 1 is not there", "nobody", "publish it again", "next version"):
                self.assertIn(words, why)
            self.assertIn(f"newcomers    {why}\n", ctl_status(d))
            f.publish(1)  # what it says
            for w in f.destinations[:2]:
                w.event("committed", 1)
                w.apply(1)
                self.assertEqual(w.wrong(1), [])
            self.assertEqual(d.status("m").models[0].newcomers, "")
            self.assertNotIn("newcomers", ctl_status(d))

    def test_who_falls_asleep_in_a_transfer_ends_it_and_its_memory_is_let_go_before_the_answer(self):
        with Daemon(**SlowFleet.RATE) as d:
            f = SlowFleet(d, automatic=True)
            f.publish(1)
            f.submit(1)
            f.until_bytes_move(1)
            pid, w = d.data_plane_pid(), f.destinations[2]
            number = inode(w.memory)
            sleep(w)
            self.assertEqual(mapped(d, number), 0)
            give_memory_back(w)
            s = f.final(1)
            self.assertEqual(s.phase, pb.PHASE_ABORTED)
            self.assertIn("rollout/rank 2 has gone to sleep", s.reason)
            self.assertEqual(d.data_plane_pid(), pid)

    def test_a_transfer_goes_on_without_who_fell_asleep_where_the_policy_can(self):
        with Daemon(**SlowFleet.RATE) as d:
            f = SlowFleet(d, automatic=True)
            f.publish(1)
            f.submit(1, policy=without_one())
            f.until_bytes_move(1)
            w = f.destinations[2]
            sleep(w)
            give_memory_back(w)
            f.publish_again(1)
            self.assertEqual(f.final(1).phase, pb.PHASE_COMMITTED)
            for x in f.destinations[:2]:
                x.apply(1)
                self.assertTrue(f.live_is(x, 1))

    def test_calls_on_who_sleeps_and_refits_of_a_trainer_that_sleeps_are_refused(self):
        with Daemon() as d:
            f = self.fleet(d)
            f.publish(1)
            source, w = f.sources[2], f.destinations[0]
            sleep(source)
            give_memory_back(source)
            with refused(self, grpc.StatusCode.FAILED_PRECONDITION, "is asleep", "wake it up"):
                source.publish(1)
            with refused(self, grpc.StatusCode.FAILED_PRECONDITION, "train/rank 2 is asleep", "wake it up"):
                f.submit(1)
            wake(source)
            source.write(1)
            source.publish(1)
            f.submit(1)
            self.assertEqual(f.final(1).phase, pb.PHASE_COMMITTED)
            sleep(w)
            with refused(self, grpc.StatusCode.FAILED_PRECONDITION, "is asleep", "wake it up"):
                w.apply(1)
            with refused(self, grpc.StatusCode.FAILED_PRECONDITION, "is asleep", "wake it up"):
                w.ready(2)

    def test_others_can_not_wake_it_and_a_sleeper_names_no_memory(self):
        with Daemon() as d:
            f = self.fleet(d)
            w = f.destinations[0]
            sleep(w)
            other = Client(d)
            with refused(self, grpc.StatusCode.ALREADY_EXISTS, "rank 0"):
                Worker(other, "m", pb.SIDE_DESTINATION, w.layout, 0, w.device, pb.RECEIVE_STAGED)
            with refused(self, grpc.StatusCode.PERMISSION_DENIED):
                other.stub.Sleep(pb.SleepRequest(worker=w.id), timeout=WAIT_S)
            with refused(self, grpc.StatusCode.INVALID_ARGUMENT, "asleep has no segments"):
                w.attach(asleep=True)
            self.assertEqual(states(d)["rollout", 0], pb.WORKER_ASLEEP)

    def test_a_daemon_with_as_many_workers_as_it_may_have_wakes_a_sleeper(self):
        with Daemon(clients__max_workers=8) as d:
            f = self.fleet(d)
            self.refit(f, 1)
            w = f.destinations[1]
            for _ in range(2):
                sleep(w)
                give_memory_back(w)
                wake(w)
            other = small_destination("other")
            with refused(self, grpc.StatusCode.RESOURCE_EXHAUSTED, "max_workers"):
                Worker(f.rollout, "m", pb.SIDE_DESTINATION, other, 0, 4, pb.RECEIVE_STAGED)

    def test_a_new_data_plane_maps_nothing_of_who_sleeps(self):
        with Daemon() as d:
            f = self.fleet(d)
            w = f.destinations[0]
            number = inode(w.memory)
            sleep(w)
            mark = d.log_mark()
            os.kill(d.data_plane_pid(), signal.SIGKILL)
            d.wait_log("data plane serves", mark)
            self.assertEqual(mapped(d, number), 0)
            self.assertEqual(states(d)["rollout", 0], pb.WORKER_ASLEEP)
            wake(w)
            self.refit(f, 1)

    def test_who_dies_in_its_sleep_is_gone(self):
        with Daemon() as d:
            f = self.fleet(d)
            for w in f.destinations:
                sleep(w)
            f.rollout.close()
            d.wait_status("m", lambda m: all(w.state == pb.WORKER_GONE for w in m.workers
                                             if w.side == pb.SIDE_DESTINATION), "gone")

    def test_a_daemon_stops_while_someone_sleeps(self):
        with Daemon() as d:
            f = self.fleet(d)
            sleep(f.destinations[0])
            sleep(f.sources[0])
            d.stop()
            self.assertEqual(d.process.returncode, 0)

    def test_reshardctl_says_who_sleeps(self):
        with Daemon() as d:
            f = self.fleet(d)
            sleep(f.destinations[1])
            out = subprocess.run([BUILD / "reshardctl", "status", "--json", "--socket", d.socket], check=True, text=True,
                                 capture_output=True, timeout=WAIT_S).stdout
            workers = json.loads(out)["models"][0]["workers"]
            self.assertEqual([w["rank"] for w in workers if w["state"] == "asleep"], [1])
            self.assertIn("asleep", ctl_status(d))


@unittest.skipIf(SLOW != 1, "a sanitizer's runtime wants to be loaded first")
class Library(unittest.TestCase):
    """reshard_sleep and reshard_wake, by the Python package."""

    SIDE = {"ranks": 1, "meshes": [{"name": "tp", "shape": [1], "ranks": [0]}], "tensors": [
        {"name": "w", "shape": [64, 32], "dtype": "uint8", "mesh": "tp", "placements": ["Replicate"]}]}

    def setUp(self):
        root = pathlib.Path(__file__).resolve().parents[2]
        os.environ["RESHARD_LIBRARY"] = str(BUILD / "libreshard.so")
        sys.path.insert(0, str(root / "client" / "python"))
        import reshard
        self.reshard = reshard
        self.daemon = self.enterContext(Daemon())
        self.trainer, self.engine = (self.enterContext(reshard.Client(self.daemon.socket)) for _ in range(2))
        self.layouts = {side: reshard.Layout(json.dumps({"name": side, **self.SIDE})) for side in ("source", "destination")}
        self.source = self.trainer.attach("m", "source", self.layouts["source"], 0, device=0, timeout=WAIT_S)
        self.worker = self.engine.attach("m", "destination", self.layouts["destination"], 0, device=4, accept_automatically=True,
                                         timeout=WAIT_S)

    def refit(self, version):
        self.source.live[0].segment.data[:2048] = bytes([version]) * 2048
        self.source.publish(version, timeout=WAIT_S)
        self.trainer.submit("m", version, timeout=WAIT_S)
        self.trainer.wait("m", version, timeout=WAIT_S)
        self.worker.apply(version, timeout=WAIT_S)
        self.assertEqual(bytes(self.worker.live[0].segment.data[:2048]), bytes([version]) * 2048)

    def wake(self):
        segment = self.engine.segment(8192, timeout=WAIT_S)
        pieces = lambda at: self.reshard.pieces_dense(self.layouts["destination"], 0, segment, at)[0]
        self.worker.wake(pieces(0), pieces(4096), timeout=WAIT_S)

    def free(self, pieces):
        for segment in {id(p.segment): p.segment for p in pieces}.values():
            segment.free(WAIT_S)

    def test_sleep_lets_segments_go_and_wake_takes_new_ones(self):
        self.refit(1)
        with self.assertRaisesRegex(self.reshard.FailedPrecondition, "not asleep"):
            self.wake()
        for version in (2, 3):
            pieces = self.worker.live + self.worker.shadow
            with self.assertRaises(self.reshard.FailedPrecondition):
                self.free(pieces)
            self.worker.sleep(WAIT_S)
            self.worker.sleep(WAIT_S)
            self.free(pieces)
            self.assertEqual((self.worker.info().held, self.worker.info().applied), (0, 0))
            with self.assertRaisesRegex(self.reshard.FailedPrecondition, "destination/rank 0 is asleep"):
                self.trainer.submit("m", version, timeout=WAIT_S)
            with self.assertRaisesRegex(self.reshard.FailedPrecondition, "asleep"):
                self.worker.apply(1, timeout=WAIT_S)
            self.wake()
            self.refit(version)

    def test_a_wake_that_is_refused_leaves_it_asleep(self):
        self.worker.sleep(WAIT_S)
        segment = self.engine.segment(4096, timeout=WAIT_S)
        pieces = self.reshard.pieces_dense(self.layouts["destination"], 0, segment)[0]
        with self.assertRaises(self.reshard.InvalidArgument):
            self.worker.wake(pieces, pieces, timeout=WAIT_S)  # the same memory twice
        segment.free(WAIT_S)
        self.assertEqual(states(self.daemon)["destination", 0], pb.WORKER_ASLEEP)
        self.wake()
        self.refit(1)

    def in_thread(self, call):
        """Calls it in a thread of its own; what it returns waits for its end, and gives its exception."""
        ended = queue.Queue()

        def run():
            try:
                call()
                ended.put(None)
            except self.reshard.Error as e:
                ended.put(e)

        threading.Thread(target=run, daemon=True).start()
        return lambda: ended.get(timeout=WAIT_S)

    def test_sleep_and_wake_of_two_threads_do_not_mix(self):
        d, old = self.daemon, self.worker.live + self.worker.shadow
        self.refit(1)
        os.kill(d.data_plane_pid(), signal.SIGSTOP)  # nothing is mapped or closed
        mark = d.log_mark()
        slept = self.in_thread(lambda: self.worker.sleep(WAIT_S))
        d.wait_log("goes to sleep", mark)
        with self.assertRaisesRegex(self.reshard.FailedPrecondition, "going to sleep"):
            self.wake()
        os.kill(d.data_plane_pid(), signal.SIGCONT)
        self.assertIsNone(slept())
        self.free(old)
        os.kill(d.data_plane_pid(), signal.SIGSTOP)
        segment = self.engine.segment(8192, timeout=WAIT_S)
        pieces = [self.reshard.pieces_dense(self.layouts["destination"], 0, segment, at)[0] for at in (0, 4096)]

        def wake():
            while True:
                with contextlib.suppress(self.reshard.FailedPrecondition):  # the loop below was first
                    return self.worker.wake(*pieces, timeout=WAIT_S)

        woken = self.in_thread(wake)
        with self.assertRaisesRegex(self.reshard.FailedPrecondition, "being woken"):
            while True:  # until the other thread's has begun; the same memory twice is refused
                with contextlib.suppress(self.reshard.InvalidArgument):
                    self.worker.wake(pieces[0], pieces[0], timeout=WAIT_S)
        with self.assertRaisesRegex(self.reshard.DeadlineExceeded, "being woken"):
            self.worker.sleep(0.1)
        os.kill(d.data_plane_pid(), signal.SIGCONT)
        self.assertIsNone(woken())
        self.worker.sleep(WAIT_S)
        self.wake()
        self.refit(2)

    def test_a_daemon_that_comes_back_is_told_of_the_sleeper(self):
        self.refit(1)
        self.worker.sleep(WAIT_S)
        before = self.engine.reconnects
        self.daemon.kill()
        self.daemon.wait()
        self.daemon.start()
        self.daemon.wait_status("m", lambda m: any(w.state == pb.WORKER_ASLEEP for w in m.workers), "asleep again")
        self.assertGreater(self.engine.reconnects, before)
        with self.assertRaisesRegex(self.reshard.FailedPrecondition, "asleep"):
            self.trainer.submit("m", 2, timeout=WAIT_S)
        self.wake()
        self.refit(2)


class ManyNodes(unittest.TestCase):
    def fleet(self, cluster):
        return nodes.Fleet(cluster, small_source(), small_destination(), [f"n1:{i}" for i in range(4)],
                           ["n1:0", "n1:1", "n2:0", "n2:1"])

    def wait_state(self, cluster, rank, state):
        end = time.monotonic() + WAIT_S
        while True:
            models = cluster.status_stub().Status(pb.StatusRequest(), timeout=WAIT_S, wait_for_ready=True).models
            if any((w.layout_name, w.rank, w.state) == ("rollout", rank, state) for m in models for w in m.workers):
                return
            if time.monotonic() > end:
                raise Deadline(f"rank {rank} is never in state {state}:\n{models}\n{cluster.tails()}")
            threading.Event().wait(0.02)

    def test_a_members_worker_sleeps_through_the_coordinators_restart(self):
        cluster = nodes.of_case(self, nodes.Nodes(3))
        f = self.fleet(cluster)
        f.refit(1)
        f.check(1)
        w = f.destinations[3]
        sleep(w)
        self.assertEqual(mapped(cluster["n2"], inode(w.memory)), 0)
        give_memory_back(w)
        self.wait_state(cluster, 3, pb.WORKER_ASLEEP)
        with refused(self, grpc.StatusCode.FAILED_PRECONDITION, "rollout/rank 3 is asleep"):
            f.submit(2)
        cluster["n0"].kill()
        cluster["n0"].wait()
        cluster["n0"].start()
        cluster.wait_joined(["n0", "n1", "n2"])
        self.wait_state(cluster, 3, pb.WORKER_ASLEEP)
        f.publish(2)
        with refused(self, grpc.StatusCode.FAILED_PRECONDITION, "rollout/rank 3 is asleep"):
            f.submit(2, "after the restart")
        wake(w)
        w.event("committed", 1)  # it catches up, and would hold the next version up with what it has not applied
        w.apply(1)
        f.submit(2, "awake")
        self.assertEqual(f.final(2).phase, pb.PHASE_COMMITTED)
        f.check(2)


if __name__ == "__main__":
    main()
