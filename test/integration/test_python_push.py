#!/usr/bin/python3
"""Worker.push of the Python client where it comes to nothing: every rank hears it, soon and with the reason."""
import json
import subprocess
import threading
import unittest
import unittest.mock

import rig
from rig import WAIT_S
from test_python import SOURCE, World, fill, layout, wrong

import reshard


def versions_of(w):
    """{version: phase}, as an operator sees them."""
    out = subprocess.run([rig.BUILD / "reshardctl", "versions", "m", "--json", "--socket", w.daemon.socket], capture_output=True,
                         text=True, check=True).stdout
    return {v["version"]: v["phase"] for v in json.loads(out)["versions"]}


class Step:
    """Something that a thread waits for another to have done."""

    def __init__(self):
        self.event = threading.Event()

    def done(self):
        self.event.set()

    def wait(self):
        if not self.event.wait(WAIT_S):
            raise rig.Deadline("the other never came that far")


class Withdrawn(unittest.TestCase):
    """Who does not submit hears that a push has come to nothing, and why: nobody waits for its timeout here (an hour)."""

    def pushing(self, worker, version, submit=False, **options):
        """(thread, list that gets what it ended with)"""
        ends = []

        def run():
            try:
                worker.push(version, submit=submit, timeout=3600, **options)
                ends.append(None)
            except BaseException as e:
                ends.append(e)
        fill(worker, version)
        t = threading.Thread(target=run, daemon=True)
        t.start()
        return t, ends

    def ended(self, pushing):
        t, ends = pushing
        t.join(WAIT_S)
        self.assertFalse(t.is_alive(), "it waits still")
        return ends[0]

    def hears(self, pushing, *words, kind=reshard.Aborted):
        end = self.ended(pushing)
        self.assertIsInstance(end, kind)
        for word in words:
            self.assertIn(word, str(end))

    def published(self, w, rank, version):
        """Waits until the daemon has it."""
        w.daemon.wait_status("m", lambda s: any(x.layout_name == "trainer" and x.rank == rank and x.published == version
                                                for x in s.workers), f"rank {rank} to publish version {version}")

    def goes_on(self, w, version):
        self.assertEqual(w.push(version), [None, None])
        for e in w.engines:
            e.wait(version)
            self.assertEqual(wrong(e.worker, version), [])

    def test_where_the_submit_is_refused(self):
        w = World(self)
        other = self.pushing(w.sources[1], 1)
        self.published(w, 1, 1)
        with self.assertRaisesRegex(reshard.InvalidArgument, "policy wants 5 instances"):
            w.sources[0].push(1, submit={"policy": {"rollout": 5}}, timeout=3600)
        self.hears(other, "version 1 of m was withdrawn: trainer/rank 0 has given it up: policy wants 5 instances")
        self.goes_on(w, 1)  # the same number, with options that fit

    def test_by_a_rank_that_publishes_afterwards(self):
        w = World(self)
        with self.assertRaises(reshard.InvalidArgument):
            w.sources[0].push(1, submit={"policy": {"rollout": 5}}, timeout=3600)
        self.hears(self.pushing(w.sources[1], 1), "trainer/rank 0 has given it up: policy wants 5 instances")
        self.goes_on(w, 1)

    def test_where_the_one_that_submits_fails_before(self):
        w = World(self)
        other = self.pushing(w.sources[1], 1)
        self.published(w, 1, 1)
        with self.assertRaisesRegex(reshard.InvalidArgument, "strategy 'fast'"):
            w.sources[0].push(1, submit={"strategy": "fast"}, timeout=3600)
        self.hears(other, "strategy 'fast'")

    def test_where_the_version_is_committed_with_other_options(self):
        w = World(self)
        self.goes_on(w, 1)
        for version, options in ((1, {"release_at": "read"}), (1, {"verify": "sampled"})):
            other = self.pushing(w.sources[1], version)
            with self.assertRaisesRegex(reshard.AlreadyExists, "with other content"):
                w.sources[0].push(version, submit=options, timeout=3600)
            self.hears(other, "has given it up", "with other content", kind=reshard.AlreadyExists)
        self.goes_on(w, 2)

    def test_by_nobody_where_an_operator_is_refused(self):
        w = World(self)
        other = self.pushing(w.sources[1], 1)
        self.published(w, 1, 1)
        ctl = subprocess.run([rig.BUILD / "reshardctl", "submit", "m", "1", "--policy", "rollout=5", "--socket", w.daemon.socket],
                             capture_output=True, text=True)
        self.assertNotEqual(ctl.returncode, 0)
        self.assertIn("policy wants 5 instances", ctl.stderr)
        self.assertEqual(self.ended(self.pushing(w.sources[0], 1, submit=True)), None)
        self.assertEqual(self.ended(other), None)

    def test_when_it_has_ended_where_another_has_submitted_the_version(self):
        w = World(self)
        w.clients[3].submit("m", 1, verify="sampled", timeout=WAIT_S)
        with self.assertRaisesRegex(reshard.AlreadyExists, "with other content"):
            w.sources[0].push(1, submit=True, timeout=3600)
        self.hears(self.pushing(w.sources[1], 1), "has given it up", kind=(reshard.Aborted, reshard.AlreadyExists))
        w.clients[3].wait("m", 1, timeout=WAIT_S)  # what was submitted is not harmed
        self.assertEqual(versions_of(w), {1: "committed"})
        self.goes_on(w, 2)

    def test_where_the_attempts_are_used_up_while_it_publishes(self):
        def check(version):
            if version == 1:
                raise ValueError("row 3 looks odd")
        w = World(self, "in_place", check)
        late, publish, over = w.sources[1], w.sources[1].publish, Step()
        published = []

        def late_publish(version, **options):
            if published and version == 1:  # for the retry, which goes on, and ends, without it
                over.wait()
            publish(version, **options)
            published.append(version)
        with unittest.mock.patch.object(late, "publish", late_publish), \
                unittest.mock.patch.object(late, "_over_without", lambda *_: None):  # the abort comes just behind that look
            other = self.pushing(late, 1, attempts=2)
            first = self.pushing(w.sources[0], 1, submit={"release_at": "committed"}, attempts=2)
            self.hears(first, "aborted 2 times", "row 3 looks odd")
            over.done()
            self.hears(other, "row 3 looks odd")
        self.assertEqual(published, [1, 1])
        self.goes_on(w, 2)

    def test_where_the_one_that_submits_dies(self):
        w = World(self)
        other = self.pushing(w.sources[1], 1)
        self.published(w, 1, 1)
        w.sources[0].detach()
        self.hears(other, "trainer/rank 0 left before it was submitted")
        w.sources[0] = w.client().attach("m", "source", layout(SOURCE), 0, device=0, timeout=WAIT_S)
        self.goes_on(w, 1)

    def test_after_a_restart_of_the_daemon(self):
        w = World(self)
        with self.assertRaises(reshard.InvalidArgument):
            w.sources[0].push(1, submit={"policy": {"rollout": 5}}, timeout=3600)
        w.daemon.kill()
        w.daemon.start()
        self.hears(self.pushing(w.sources[1], 1), "trainer/rank 0 has given it up: policy wants 5 instances")
        self.goes_on(w, 1)

    def test_a_push_of_the_committed_version_ends_over_a_restart_of_the_daemon(self):
        w = World(self)
        self.goes_on(w, 1)
        w.clients[0].wait("m", 1, timeout=WAIT_S)
        submit, submitted = w.clients[0].submit, Step()

        def and_say(*args, **options):
            submit(*args, **options)
            submitted.done()
        with unittest.mock.patch.object(w.clients[0], "submit", and_say):
            first = self.pushing(w.sources[0], 1, submit=True)
            submitted.wait()
            w.daemon.kill()
            w.daemon.start()
            self.assertIsNone(self.ended(first))
        self.assertIsNone(self.ended(self.pushing(w.sources[1], 1)))  # it comes after the restart
        self.goes_on(w, 2)


if __name__ == "__main__":
    rig.main()
