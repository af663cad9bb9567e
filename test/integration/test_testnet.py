#!/usr/bin/python3
"""The test hosts themselves: limits, counters and cuts are real, and nothing of them stays."""
import json
import socket
import unittest

from rig import *

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "test" / "lib"), str(ROOT / "test" / "bench" / "peers")]
import raw_tcp  # noqa: E402
import testnet  # noqa: E402
from testnet import Testnet  # noqa: E402

TOOL = str(ROOT / "scripts" / "testnet")
# Names that no other test run beside this one takes, and among which a number that is free again leads to no name a second time.
MINE, UP = f"s{os.getpid()}x", f"u{os.getpid()}x"


def namespaces(name):
    return {p.name for p in pathlib.Path("/run/netns").glob(f"rs-{name}-*")}


def tool(*args, env=None):
    return subprocess.run([TOOL, *args], capture_output=True, text=True, timeout=WAIT_S, env=dict(os.environ, **(env or {})))


class Case(unittest.TestCase):
    def up(self, n, **more):
        net = Testnet.up(n, prefix=UP, **more)
        self.addCleanup(net.down)
        if net.mode != testnet.NAMESPACES:
            self.skipTest("network namespaces are not permitted here")
        return net

    def gone(self, name):
        end = time.monotonic() + WAIT_S
        while namespaces(name) or (testnet.state_folder() / f"{name}.json").exists():
            self.assertLess(time.monotonic(), end, f"testnet {name} is still there")
            threading.Event().wait(0.02)


class Links(Case):
    def test_a_rate_limits_each_direction_by_itself(self):
        net = self.up(2, rate="80mbit")
        n = 6_000_000  # 0.6 s at 10 MB/s
        least = (n - 100_000) / 10e6  # what may burst is ahead of the limit
        # Two ways at once take no longer than one; two into one node take twice as long.
        for flows, times in (([("n0", "n1", n)], 1), ([("n0", "n1", n), ("n1", "n0", n)], 1),
                             ([("n0", "n1", n), ("n0", "n1", n)], 2)):
            for tries_left in reversed(range(10)):  # the machine may be busy
                s = raw_tcp.measure(net, flows)
                self.assertGreater(s, least * times * 0.97, flows)
                if s < least * times * 1.5 * SLOW:
                    break
                self.assertGreater(tries_left, 0, f"{flows}: {s} s")
        net.set_rate(None)
        self.assertLess(min(raw_tcp.measure(net, [("n0", "n1", n)]) for _ in range(5)), least * 0.8)  # again: it may be busy

    def test_counters_see_what_was_sent_and_little_else(self):
        net = self.up(3)
        n = 20_000_000
        before = net.counters()
        raw_tcp.measure(net, [("n0", "n2", n)])
        moved = testnet.difference(net.counters(), before)
        self.assertGreaterEqual(moved["n0"].tx_bytes, n)
        self.assertGreaterEqual(moved["n2"].rx_bytes, n)
        self.assertLess(moved["n2"].rx_bytes, n * 1.03)
        self.assertLess(moved["n1"].rx_bytes, 20_000)  # who has no part hears nothing
        self.assertLess(moved["n2"].tx_bytes, n * 0.1)  # acknowledgements

    def test_without_offload_every_frame_is_counted(self):
        # 66 bytes of headers to each 1448 of payload: 4.56 %. At a rate at which no frame is dropped and sent again.
        net = self.up(2, offload=False, rate="200mbit")
        n = 1_000_000
        before = net.counters()
        raw_tcp.measure(net, [("n0", "n1", n)])
        moved = testnet.difference(net.counters(), before)["n1"]
        self.assertGreater(moved.rx_bytes, n * 1.0455)
        self.assertLess(moved.rx_bytes, n * 1.06)
        self.assertGreaterEqual(moved.rx_packets, n // 1448)

    def test_both_families_reach_every_node(self):
        net = self.up(3)
        for family, address in ((socket.AF_INET, net.address("n1")), (socket.AF_INET6, net.address6("n1"))):
            code = (f"import socket; s = socket.socket({int(family)}); s.bind(('{address}', 0)); s.listen(); "
                    "print(s.getsockname()[1], flush=True); c, a = s.accept(); print(a[0])")
            server = net.popen("n1", [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
            port = int(server.stdout.readline())
            net.popen("n2", [sys.executable, "-c", f"import socket; socket.create_connection(('{address}', {port}))"]).wait(WAIT_S)
            self.assertIn(server.communicate(timeout=WAIT_S)[0].strip(), (net.address("n2"), net.address6("n2")))

    def test_a_cut_passes_nothing_and_a_mend_lets_the_connection_go_on(self):
        net = self.up(2)
        code = ("import socket, sys; s = socket.create_server(('', 0)); print(s.getsockname()[1], flush=True); "
                "c, _ = s.accept()\nwhile True:\n b = c.recv(1)\n print(b, flush=True)")
        server = net.popen("n1", [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        self.addCleanup(server.stdout.close)
        port = server.stdout.readline().strip()
        code = f"import socket, sys; s = socket.create_connection(('{net.address('n1')}', {port}))\nfor l in sys.stdin: s.send(b'x')"
        self.addCleanup(server.wait)
        self.addCleanup(server.kill)
        client = net.popen("n0", [sys.executable, "-c", code], stdin=subprocess.PIPE, text=True)
        self.addCleanup(client.stdin.close)
        self.addCleanup(client.wait)
        self.addCleanup(client.kill)

        def send():
            client.stdin.write("\n")
            client.stdin.flush()

        send()
        self.assertEqual(server.stdout.readline(), "b'x'\n")
        net.cut("n1")
        before = net.counters()
        send()
        end = time.monotonic() + 10
        while net.counters()["n0"].tx_packets == before["n0"].tx_packets:  # it did send
            self.assertLess(time.monotonic(), end)
        after = net.counters()
        self.assertEqual(after["n1"].rx_bytes, before["n1"].rx_bytes)
        self.assertIsNone(client.poll())  # and heard of no error
        net.mend("n1")
        self.assertEqual(server.stdout.readline(), "b'x'\n")  # what was lost is sent again


class Lives(Case):
    def test_two_at_once_do_not_meet(self):
        a, b = self.up(2), self.up(2)
        self.assertNotEqual(a.name, b.name)
        self.assertEqual(a.address("n0"), b.address("n0"))
        before = b.counters()
        raw_tcp.measure(a, [("n0", "n1", 1_000_000)])
        self.assertLess(testnet.difference(b.counters(), before)["n1"].rx_bytes, 20_000)

    def test_down_ends_what_runs_in_it_and_leaves_nothing(self):
        net = self.up(3)
        p = net.popen("n2", ["sleep", "1000"])
        keeper = net.state["keeper"]
        self.assertEqual(len(namespaces(net.name)), 4)
        net.down()
        self.assertEqual(p.wait(WAIT_S), -signal.SIGKILL)
        self.assertEqual(namespaces(net.name), set())
        self.assertFalse(testnet.lives(keeper))
        net.down()  # again: nothing to do

    def test_down_again_leaves_another_one_of_that_name_alone(self):
        net = self.up(1)
        gone = Testnet(dict(net.state, id="of one that was removed before"))
        p = net.popen("n0", ["sleep", "1000"])
        gone.down()
        self.assertEqual(len(namespaces(net.name)), 2)
        self.assertIsNone(p.poll())
        net.down()
        self.assertEqual(namespaces(net.name), set())
        self.assertEqual(p.wait(WAIT_S), -signal.SIGKILL)

    HOLDER = ("import sys; sys.path.insert(0, {lib!r}); from testnet import *; net = Testnet.up(2, prefix='{prefix}'); "
              "p = net.popen('n1', ['sleep', '1000']); print(net.name, net.state['keeper']['pid'], net.mode, flush=True); "
              "sys.stdin.read()")

    def holder(self):
        """A process that has a testnet: (process, name, the keeper's pid)."""
        p = subprocess.Popen([sys.executable, "-c", self.HOLDER.format(lib=str(ROOT / "test" / "lib"), prefix=MINE)], text=True,
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        name, keeper, mode = p.stdout.readline().split()
        if mode != testnet.NAMESPACES:
            p.kill()
            self.skipTest("network namespaces are not permitted here")
        self.addCleanup(p.stdout.close)
        self.addCleanup(p.stdin.close)
        return p, name, int(keeper)

    def test_kill_9_of_the_holder_leaves_nothing(self):
        p, name, _ = self.holder()
        self.assertEqual(len(namespaces(name)), 3)
        p.kill()
        p.wait()
        self.gone(name)

    def test_kill_9_of_holder_and_keeper_is_made_good_by_the_next_up(self):
        p, name, keeper = self.holder()
        with testnet.locked():  # no other run's `up` does it before ours
            os.kill(keeper, signal.SIGKILL)
            p.kill()
            p.wait()
            self.assertEqual(len(namespaces(name)), 3)
        self.up(1)
        self.assertEqual(namespaces(name), set())

    def test_a_half_made_one_is_removed(self):
        # As if killed between the first namespaces and the rest.
        self.up(1)
        with testnet.locked():
            net = Testnet.begin(MINE, 3, {"pid": 1, "start": -1}, True)
            testnet.command("ip", "netns", "add", net.bridge())
            testnet.command("ip", "netns", "add", net.namespace("n0"))
        self.up(1)
        self.assertEqual(namespaces(net.name), set())
        self.assertNotIn(net.name, [n.name for n in testnet.testnets()])

    def test_the_tool_makes_shows_runs_cuts_and_removes(self):
        # A name of its own: after `down` another test's `up` may take this one's number, and its name where they are called alike.
        r = tool("up", "2", "--name", MINE, "--rate", "1gbit", "--owner", str(os.getpid()))
        self.assertEqual(r.returncode, 0, r.stderr)
        name = r.stdout.strip()
        net = Testnet.open(name)
        self.addCleanup(net.down)
        if net.mode != testnet.NAMESPACES:
            self.skipTest("network namespaces are not permitted here")
        mine = {"TESTNET": name}
        r = tool("exec", "n1", "cat", "/proc/net/fib_trie", env=mine)
        self.assertIn(net.address("n1"), r.stdout)
        self.assertEqual(tool("exec", "n1", "sh", "-c", "exit 7", env=mine).returncode, 7)
        self.assertEqual(set(json.loads(tool("counters", "--json", env=mine).stdout)), {"n0", "n1"})
        self.assertEqual(tool("cut", "n1", env=mine).returncode, 0)
        self.assertIn("cut: n1", tool("list").stdout)
        self.assertEqual(tool("mend", "n1", env=mine).returncode, 0)
        r = tool("cut", "n7", env=mine)
        self.assertEqual(r.returncode, 1)
        self.assertIn("there is no node 'n7'", r.stderr)
        self.assertEqual(tool("down", env=mine).returncode, 0)
        self.assertEqual(namespaces(name), set())
        r = tool("down", env=mine)
        self.assertEqual(r.returncode, 1)
        self.assertIn(f"there is no testnet '{name}'", r.stderr)

    def test_bad_requests_make_nothing(self):
        for args, words in ((("0",), "1 to"), (("300",), "1 to"), (("2", "--rate", "fast"), "rate 'fast'"),
                            (("2", "--rate", "0mbit"), "rate"), (("2", "--owner", "4194305"), "no process")):
            r = tool("up", *args, "--name", MINE)
            self.assertEqual(r.returncode, 1, args)
            self.assertIn(words, r.stderr)
        self.assertIn("name 'a/b'", tool("up", "2", "--name", "a/b").stderr)
        self.assertEqual([n.name for n in testnet.testnets() if n.name.startswith((MINE, "a/b"))], [])


class Loopback(unittest.TestCase):
    """Where namespaces are not permitted."""

    def setUp(self):
        os.environ["RESHARD_TESTNET"] = "loopback"
        self.addCleanup(os.environ.pop, "RESHARD_TESTNET")

    def test_nodes_are_addresses_and_what_is_missing_is_said(self):
        r = tool("up", "2", "--name", MINE, "--owner", str(os.getpid()))
        self.assertIn("no counters, no limits, no cuts", r.stderr)
        net = Testnet.open(r.stdout.strip())
        self.addCleanup(net.down)
        self.assertEqual(len({net.address("n0"), net.address("n1")}), 2)
        self.assertGreater(raw_tcp.measure(net, [("n0", "n1", 1_000_000)]), 0)
        for what in (net.counters, lambda: net.cut("n0")):
            with self.assertRaisesRegex(testnet.Error, "loopback addresses only"):
                what()
        net.down()
        with self.assertRaises(testnet.Error):
            Testnet.open(net.name)

    def test_two_at_once_have_different_addresses(self):
        with Testnet.up(2, prefix="test") as a, Testnet.up(2, prefix="test") as b:
            self.assertEqual(len({x.address(n) for x in (a, b) for n in x.nodes}), 4)


if __name__ == "__main__":
    main()
