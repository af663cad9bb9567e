#!/usr/bin/python3
"""What the crash tests of scripts/faults stand on: crash points, and that no data plane outlives its control process."""
import unittest
import unittest.mock

from rig import *


def gone(pid):
    """Ended, or a zombie that nobody has reaped yet: either way it runs no instruction any more."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def wait_gone(pid, what):
    end = time.monotonic() + 2 * SLOW
    while not gone(pid):
        if time.monotonic() >= end:
            raise Deadline(f"{what}: process {pid} still there")
        threading.Event().wait(0.005)


class Orphans(unittest.TestCase):
    def test_data_plane_dies_with_its_control_process(self):
        with Daemon() as d:
            pid = d.data_plane_pid()
            d.kill()
            wait_gone(pid, "a data plane without a control process")

    def test_even_one_that_is_stopped_does(self):
        # Else it would wake up later and finish the copy that it was in the middle of, into memory that a newer attempt
        # has written by then.
        with Daemon(**SlowFleet.RATE) as d:
            f = SlowFleet(d, automatic=True)
            f.publish(1)
            f.submit(1)
            f.until_bytes_move(1)
            pid = d.data_plane_pid()
            os.kill(pid, signal.SIGSTOP)
            try:
                d.kill()
                wait_gone(pid, "a stopped data plane without a control process")
            finally:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass


class CrashPoints(unittest.TestCase):
    def points(self):
        out = subprocess.run([BUILD / "reshardd", "--crash-points"], capture_output=True, text=True, check=True).stdout
        return [line.split()[0] for line in out.splitlines()]

    def test_every_step_of_a_commit_has_one(self):
        points = self.points()
        self.assertEqual(len(points), len(set(points)))
        for name in ("submit-recorded", "submit-durable", "commit-decided", "commit-recorded", "commit-durable"):
            self.assertIn(name, points)

    def test_unknown_ones_are_refused(self):
        for text in ("nowhere", "commit", "commit-durable:0", "commit-durable:", "commit-durable:x", ":1", ""):
            r = subprocess.run([BUILD / "reshardd"], env=dict(os.environ, RESHARD_CRASH=text), capture_output=True,
                               text=True, timeout=WAIT_S)
            self.assertEqual(r.returncode, 2, text)
            self.assertIn("RESHARD_CRASH", r.stderr)

    def test_data_plane_crashes_once_and_its_successor_is_not_armed(self):
        with unittest.mock.patch.dict(os.environ, RESHARD_CRASH="exec-prepared"), Daemon() as d:
            f = Fleet(d, small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7], automatic=True)
            mark = d.log_mark()
            f.publish(1)
            f.submit(1)
            self.assertEqual(f.final(1).phase, pb.PHASE_ABORTED)
            d.wait_log("data plane serves", since=mark)
            f.publish(1)
            f.submit(1, "again")
            self.assertEqual(f.final(1).phase, pb.PHASE_COMMITTED)
            self.assertEqual(d.status().data_plane_restarts, 1)


class Missed(unittest.TestCase):
    """What a worker is told and believed when it attaches again."""

    def again(self, d, f):
        """The same memory under a daemon that was killed and started anew; attaching is left to the caller."""
        d.kill()
        d.start()
        contents = [bytes(w.memory) for w in f.sources + f.destinations]
        trainer, rollout = Client(d), Client(d)
        for w, content in zip(f.sources + f.destinations, contents):
            w.client = trainer if w in f.sources else rollout
            w.digest = w.client.put_layout(w.layout)
            w.segment, w.memory = w.client.segment(len(content), (w.side, w.rank, w.device))
            w.memory[:] = content
        f.trainer, f.rollout = trainer, rollout

    def test_in_place_memory_reads_torn_until_a_refit_repairs_it(self):
        with Daemon() as d:
            f = Fleet(d, small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7], receive=pb.RECEIVE_IN_PLACE,
                      automatic=True)
            f.refit(1)
            f.publish(2)
            f.submit(2)
            f.destinations[0].event("ready_requested", 2)
            torn, whole, done, fresh = f.destinations
            self.again(d, f)
            torn.memory[0] ^= 0x55  # as far as the bytes of version 2 had come
            torn.attach(live_version=1, opened_version=2)
            whole.attach(live_version=1, opened_version=2)  # paused, but not a byte had come
            done.attach(live_version=0, opened_version=1)   # its commit was not heard of any more
            fresh.attach()
            self.assertEqual([w.attached.applied for w in f.destinations], [0, 1, 1, 0])
            states = {w.worker: w.state for w in d.status("m").models[0].workers}
            self.assertEqual([states[w.id] for w in f.destinations],
                             [pb.WORKER_TORN, pb.WORKER_CURRENT, pb.WORKER_CURRENT, pb.WORKER_EMPTY])
            for w in (torn, whole):
                e = w.event("aborted", 2)
                self.assertIn("restarted", e.reason)
                self.assertNotIn("SUBMITTED", e.reason)
            done.event("committed", 1)
            for w in f.sources:
                w.attach(live_version=2)
                w.event("aborted", 2)
                w.event("source_released", 2)
            f.refit(3)
            states = {w.worker: w.state for w in d.status("m").models[0].workers}
            self.assertEqual({states[w.id] for w in f.destinations}, {pb.WORKER_CURRENT})
            for w in f.destinations:
                self.assertEqual(w.wrong(3), [])

    def test_a_source_hears_on_its_next_stream_what_was_said_between_two(self):
        with Daemon() as d:
            f = Fleet(d, small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7], automatic=True)
            f.publish(1)
            worker = f.sources[0].id
            mark = d.log_mark()
            f.sources[0].break_stream()
            d.wait_log("broke", since=mark)
            f.submit(1)
            self.assertEqual(f.final(1).phase, pb.PHASE_COMMITTED)
            f.sources[0].attach(resume=worker, live_version=1)
            self.assertEqual(f.sources[0].id, worker)
            f.sources[0].event("committed", 1)
            f.sources[0].event("source_released", 1)


if __name__ == "__main__":
    main()
