#!/usr/bin/python3
"""A data plane that does not start, for good: what its node says of it, who hears of it at once, and that it comes back.

The daemon runs from a copy of its binary, which is then replaced by a program that ends at once (or by nothing)."""
import shutil

from nodes import *
from test_operator import ctl, ctl_json


class Binary:
    """A daemon's program, to be broken and mended while it runs: it is started again by the path that it began with, which
    for a file that was removed ends in " (deleted)"."""

    def __init__(self, daemon, folder, name):
        self.path = folder / f"reshardd-{name}"
        self.again = folder / f"reshardd-{name} (deleted)"
        shutil.copy2(BUILD / "reshardd", self.path)
        argv = daemon.argv
        daemon.argv = lambda: [self.path if str(a) == str(BUILD / "reshardd") else a for a in argv()]

    def break_it(self, daemon, with_program=True):
        self.path.unlink()
        if with_program:
            self.again.write_text("#!/bin/sh\nexit 7\n")
            self.again.chmod(0o755)
        os.kill(daemon.data_plane_pid(), signal.SIGKILL)
        daemon.wait_log("starts that failed in a row 3")

    def mend(self):
        fresh = self.again.with_suffix(".new")
        shutil.copy2(BUILD / "reshardd", fresh)
        fresh.rename(self.again)


class Broken(unittest.TestCase):
    def data_plane(self, daemon):
        return ctl_json(daemon, "status")["data_plane"]

    def test_one_node(self):
        for with_program, why in ((True, "exit status 7"), (False, "could not be run")):
            with self.subTest(why=why), tempfile.TemporaryDirectory() as folder:
                daemon = Daemon(refit__prepare_timeout_ms=600000)
                binary = Binary(daemon, pathlib.Path(folder), "n0")
                with daemon:
                    f = rig.Fleet(daemon, small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7], automatic=True)
                    f.refit(1)
                    for w in f.destinations:
                        w.apply(1)
                    mark = daemon.log_mark()
                    binary.break_it(daemon, with_program)
                    said = self.data_plane(daemon)
                    self.assertRegex(said, r"^not starting: \d+ starts failed in a row: .*" + why)
                    self.assertRegex(said, r"SIGHUP.* tries at once, else in \d+ s$")
                    self.assertIn("not starting", ctl(daemon, "status")[1])
                    # Whoever needs it hears at once, not at the prepare deadline of ten minutes.
                    f.submit(2)
                    end = f.final(2)
                    self.assertEqual(end.phase, pb.PHASE_ABORTED)
                    self.assertIn("node n0, which has train/rank 0, can't take part: its data plane does not start", end.reason)
                    self.assertIn(why, end.reason)
                    with refused(self, grpc.StatusCode.UNAVAILABLE, "not starting", why):
                        f.sources[0].publish(2)
                    # Each start later than the one before.
                    daemon.wait_log("starts that failed in a row 4, the next in", since=mark)
                    waits = [int(m[1]) for m in (re.search(r"failed in a row \d+, the next in (\d+) ms", x) for x in daemon.lines)
                             if m]
                    self.assertEqual(waits, sorted(set(waits)), waits)
                    self.assertLess(waits[-1], 30001)
                    binary.mend()
                    daemon.process.send_signal(signal.SIGHUP)
                    daemon.wait_log("data plane serves", since=mark)
                    self.assertEqual(self.data_plane(daemon), "ready")
                    f.refit(3)

    def test_of_several_nodes(self):
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        nodes = Nodes(3, refit__prepare_timeout_ms=600000)
        binary = Binary(nodes["n2"], folder, "n2")
        nodes = of_case(self, nodes)
        f = Fleet(nodes, small_source(), small_destination(), ["n0:0", "n0:1", "n0:2", "n0:3"],
                  ["n1:0", "n1:1", "n2:0", "n2:1"], automatic=True)
        f.refit(1)
        f.check(1)
        lost = [n for n in nodes["n0"].status().nodes if n.name == "n2"][0].lost
        binary.break_it(nodes["n2"])
        nodes.wait_nodes(lambda _: "does not start" in nodes.node_status()["n2"].lacks, "n2 told")
        for name in nodes.names:
            n2 = [n for n in nodes[name].status().nodes if n.name == "n2"][0]
            self.assertEqual(n2.state, "here")
            self.assertIn("exit status 7", n2.lacks)
            self.assertIn("does not start", n2.data_plane)
            self.assertEqual(n2.lost, lost + 1)  # once: what has not started can't be lost
            self.assertIn("does not start", ctl(nodes[name], "status")[1])
        f.publish(2)
        f.submit(2)
        end = f.final(2)
        self.assertEqual(end.phase, pb.PHASE_ABORTED)
        self.assertIn("node n2, which has rollout/rank 2, can't take part", end.reason)
        # Where the policy can do without, nobody waits for it.
        f.destinations, left = f.destinations[:2], f.destinations[2:]
        f.refit(3, policy=[pb.LayoutPolicy(layout_name="rollout", min_instances=1)])
        f.check(3)
        binary.mend()
        nodes["n2"].process.send_signal(signal.SIGHUP)
        nodes.wait_joined(nodes.names)
        for w in left:  # brought up to it without being asked
            w.event("committed", 3)

    def test_a_coordinator_that_was_restarted_is_told_again(self):
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        nodes = Nodes(2)
        binary = Binary(nodes["n1"], folder, "n1")
        nodes = of_case(self, nodes)
        binary.break_it(nodes["n1"])
        nodes.wait_nodes(lambda _: "does not start" in nodes.node_status()["n1"].data_plane, "n1 told")
        nodes["n0"].kill()
        nodes.stub = None  # its connection may break in the middle of the next call
        nodes["n0"].restart()
        nodes.wait_nodes(lambda _: "does not start" in nodes.node_status()["n1"].data_plane, "n1 told again")
        binary.mend()
        nodes.wait_joined(nodes.names)  # its next try


if __name__ == "__main__":
    main()
