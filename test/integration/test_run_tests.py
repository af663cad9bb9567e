#!/usr/bin/python3
"""scripts/run-tests: what it counts, in what order it runs, and that a queue is served to its end."""
import json
import os
import pathlib
import subprocess
import tempfile
import unittest

import rig

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOOL = ROOT / "scripts" / "run-tests"


class RunTests(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory(prefix="reshard-run-tests-")))
        self.tally = self.folder / "tally"

    def program(self, name, text):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n" + text + "\n")
        path.chmod(0o755)
        return str(path)

    def run_tests(self, *args, cpus=None, **env):
        """cpus: those that it may have; None: all."""
        environment = {k: v for k, v in os.environ.items() if k != "RUN_TESTS_QUEUE"}
        return subprocess.run([TOOL, "--log", self.folder / "log", *args], capture_output=True, text=True, timeout=rig.WAIT_S,
                              env=environment | env, preexec_fn=cpus and (lambda: os.sched_setaffinity(0, cpus)))

    def counted(self):
        return [tuple(map(int, line.split())) for line in self.tally.read_text().splitlines()]

    def test_each_kind_of_end_counts_as_what_it_is(self):
        for text, expected, code in (
                ('echo "100%: Checks: 7, Failures: 0, Errors: 0"', (7, 0, 0), 0),
                ('echo "60%: Checks: 5, Failures: 1, Errors: 1"; exit 1', (3, 2, 0), 1),
                ('echo "4 passed, 0 failed, 2 skipped"', (4, 0, 2), 0),
                ('echo "4 passed, 0 failed"; exit 3', (4, 1, 0), 1),     # died after it had counted
                ('echo nothing', (0, 1, 0), 1), ("true", (0, 1, 0), 1),  # what ran nothing proves nothing
                ('echo "1 passed, 0 failed"; kill -9 $$', (1, 1, 0), 1), ('echo "0 passed, 0 failed"', (0, 1, 0), 1)):
            with self.subTest(text):
                self.tally.unlink(missing_ok=True)
                r = self.run_tests("--tally", self.tally, "--", self.program("p", text))
                self.assertEqual((self.counted(), r.returncode), ([expected], code), r.stdout)

    def test_one_that_is_missing_and_one_that_goes_on_are_failures(self):
        r = self.run_tests("--tally", self.tally, "--timeout", "0.3", "--", self.program("goes_on", "exec tail -f /dev/null"), "--",
                           str(self.folder / "missing"))
        self.assertEqual((self.counted(), r.returncode), ([(0, 2, 0)], 1))
        self.assertIn("over its time of 0.3 s", r.stdout)
        self.assertIn("can't be started", r.stdout)

    def test_what_failed_is_said_whatever_comes_after_it_and_again_at_the_end(self):
        queue = self.folder / "queue"
        says = ("FAIL: test_a (__main__.A)", "AssertionError: 3 != 4 : communicators", "grpc._channel._InactiveRpcError: <_InactiveRpcError of",
                "test/test_x.c:224:F:core:name:0: Assertion 'a == b' failed", "SUMMARY: ThreadSanitizer: data race daemon/a.c:9 in f")
        text = "".join(f'echo "{line}"\n' for line in ("ok line", "2026-11-30T02:25:01Z warn reshardd: attempt 2 failed", *says))
        queue.write_text(json.dumps({"command": [self.program("p", text + 'seq 1000; echo "1 passed, 2 failed"; exit 1')], "label": "x ",
                                     "log": str(self.folder / "log"), "timeout": 60, "env": dict(os.environ)}) + "\n" + json.dumps("end") + "\n")
        out = self.run_tests("--serve", queue).stdout
        self.assertEqual([line[7:] for line in out.splitlines() if line.startswith("     | ")][:6], [*says, "…"])
        self.assertEqual([line[5:] for line in out.split("failed: x p: exit status 1, 2 failed\n")[1].splitlines()], list(says))

    def test_no_program_runs_twice_at_once(self):
        # All of a name take what is there once.
        work = f'mkdir {self.folder}/taken || exit 1; seq 300000 >/dev/null; rmdir {self.folder}/taken; echo "1 passed, 0 failed"'
        commands = [self.program(f"{x}/same", work) for x in "abcd"]
        r = self.run_tests("--tally", self.tally, *[w for c in commands for w in ("--", c)])
        self.assertEqual((self.counted(), r.returncode), ([(4, 0, 0)], 0), r.stdout)

    def test_the_longest_begins(self):
        # By test/times. With one CPU there is one that begins first, which with several is not seen.
        begun = self.folder / "begun"
        note = lambda name: self.program(f"n/{name}", f'echo {name} >>{begun}; echo "1 passed, 0 failed"')
        times = {}
        for line in (ROOT / "test" / "times").read_text().splitlines():
            words = line.split()
            if len(words) == 2 and words[1].isdigit():
                times[words[0]] = int(words[1])
        longest = max(times, key=times.get)
        one = {min(os.sched_getaffinity(0))}
        r = self.run_tests("--tally", self.tally, *[w for x in ("short", "brief", longest) for w in ("--", note(x))], cpus=one)
        self.assertEqual((self.counted(), r.returncode), ([(3, 0, 0)], 0), r.stdout)
        self.assertEqual(begun.read_text().split()[0], longest)

    def test_a_queue_is_served_with_each_ones_environment_until_its_end(self):
        queue = self.folder / "queue"
        queue.touch()
        p = self.program("asks", 'echo "$COLOUR passed, 0 failed"')
        server = subprocess.Popen([TOOL, "--serve", queue, "--tally", self.tally], stdout=subprocess.PIPE, text=True)
        self.addCleanup(server.kill)
        for n in (3, 40):
            r = self.run_tests("--label", f"l{n} ", "--", p, COLOUR=str(n), RUN_TESTS_QUEUE=str(queue))
            self.assertEqual((r.returncode, r.stdout), (0, ""))
        with open(queue, "a") as f:
            f.write(json.dumps("end") + "\n")
        out, _ = server.communicate(timeout=rig.WAIT_S)
        self.assertEqual((self.counted(), server.returncode), ([(43, 0, 0)], 0))
        for n in (3, 40):
            self.assertRegex(out, rf"ok +l{n} asks +{n} passed")
        self.assertIn("2 programs in", out)

    def test_a_server_ends_with_who_fills_its_queue(self):
        queue = self.folder / "queue"
        queue.touch()
        r = subprocess.run(["bash", "-c", f"{TOOL} --serve {queue} --filler $$ &"], capture_output=True, text=True,
                           timeout=rig.WAIT_S)  # returns when the server, which has the pipes too, has ended
        self.assertIn("who fills the queue is gone", r.stderr)


if __name__ == "__main__":
    rig.main()
