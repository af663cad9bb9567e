#!/usr/bin/python3
"""reshardctl serve: the page, the metrics and the answers for programs, against the real daemon."""
import http.client
import json
import re
import signal
import subprocess
import unittest

from rig import *

SAMPLE = re.compile(r'([a-z_]+)(\{(?:[a-z_]+="(?:[^"\\\n]|\\["\\n])*",?)+\})? (\S+)')


class Server:
    def __init__(self, daemon, *options):
        self.process = subprocess.Popen([BUILD / "reshardctl", "serve", "--listen", "127.0.0.1:0", "--json", "--timeout", "5",
                                         "--socket", daemon.socket, *options], stdout=subprocess.PIPE, text=True)
        self.address = json.loads(self.process.stdout.readline())["listen"]

    def ask(self, path, method="GET", body=None):
        """(status, headers, body)."""
        c = http.client.HTTPConnection(self.address, timeout=WAIT_S)
        c.request(method, path, body)
        r = c.getresponse()
        try:
            return r.status, r.headers, r.read().decode()
        finally:
            c.close()

    def json(self, path, status=200):
        got = self.ask(path)
        assert got[0] == status, got
        return json.loads(got[2])

    def metrics(self):
        """{(name, labels): value}; the text must be what Prometheus reads: each family once, typed, its samples together."""
        status, headers, text = self.ask("/metrics")
        assert status == 200 and headers["Content-Type"].startswith("text/plain; version=0.0.4"), (status, headers)
        out, family, seen = {}, None, set()
        for line in text.splitlines():
            if line.startswith("# HELP "):
                family = line.split()[2]
                assert family not in seen, family
                seen.add(family)
            elif line.startswith("# TYPE "):
                assert line.split()[2:] in ([family, "gauge"], [family, "counter"]), line
                assert line.endswith("counter") or not family.endswith("_total"), line
            else:
                m = SAMPLE.fullmatch(line)
                assert m and m[1] == family, line
                key = m[1], m[2] or ""
                assert key not in out, line
                out[key] = float(m[3])
        return out

    def stop(self, sig=signal.SIGTERM):
        self.process.send_signal(sig)
        status = self.process.wait(WAIT_S)
        self.process.stdout.close()
        return status


class Serve(unittest.TestCase):
    def world(self, model="m"):
        self.daemon = self.enterContext(Daemon())
        fleet = Fleet(self.daemon, small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7], model=model)
        self.server = Server(self.daemon)
        self.addCleanup(lambda: self.server.process.poll() is None and self.server.stop())
        return fleet

    @staticmethod
    def refit(f, version):
        f.refit(version)
        for w in f.destinations:
            w.apply(version)

    def until(self, predicate, what):
        """The next metrics that do: what the server knows is half a second old at most."""
        end = time.monotonic() + WAIT_S
        while not predicate(self.server.metrics()):
            self.assertLess(time.monotonic(), end, what)

    def test_metrics_say_what_status_says(self):
        f = self.world()
        self.refit(f, 1)
        f.refit(3)
        got = self.server.metrics()
        self.assertEqual(got["reshard_up", ""], 1)
        self.assertEqual(got["reshard_committed_version", '{model="m"}'], 3)
        self.assertEqual(got["reshard_in_flight_version", '{model="m"}'], 0)
        self.assertEqual(got["reshard_node_up", '{node="n0"}'], 1)
        last = [m for m in self.daemon.status("m").models][0].last
        self.assertAlmostEqual(got["reshard_last_total_seconds", '{model="m"}'], last.total_ns / 1e9, places=6)
        self.assertEqual(got["reshard_last_bytes", '{model="m",tier="network"}'], last.bytes.network)
        phases = {k[1]: v for k, v in got.items() if k[0] == "reshard_last_phase_seconds"}
        self.assertLessEqual({f'{{model="m",phase="{p}"}}' for p in ("queue", "gather", "plan", "wire", "commit")}, set(phases))
        self.assertAlmostEqual(sum(v for k, v in phases.items() if "apply" not in k), last.total_ns / 1e9, places=6)
        self.assertGreater(last.bytes.network, 0)
        states = {k[1]: v for k, v in got.items() if k[0] == "reshard_workers"}
        self.assertEqual(sum(states.values()), 4)  # of the destination
        self.assertEqual(states['{model="m",state="stale"}'], 4)  # the newest is not applied yet

    def test_a_model_name_can_break_neither_metrics_nor_page(self):
        name = 'a"b\\c</script><b>'
        f = self.world(name)
        f.refit(1)
        escaped = name.replace("\\", "\\\\").replace('"', '\\"')
        self.assertEqual(self.server.metrics()["reshard_committed_version", f'{{model="{escaped}"}}'], 1)
        status, headers, page = self.server.ask("/")
        self.assertEqual((status, headers["Content-Type"]), (200, "text/html; charset=utf-8"))
        self.assertIn("default-src 'self'", headers["Content-Security-Policy"])
        self.assertNotIn("innerHTML", page)  # names go in as text

    def test_programs_get_what_the_command_prints(self):
        f = self.world()
        for version in (1, 2, 5):
            self.refit(f, version)

        def printed(*args):
            return json.loads(subprocess.run([BUILD / "reshardctl", *args, "--json", "--socket", self.daemon.socket],
                                             capture_output=True, text=True, check=True).stdout)
        self.assertEqual([v["version"] for v in self.server.json("/api/versions?model=m")["versions"]], [5, 2, 1])
        self.assertEqual(self.server.json("/api/versions?model=m&last=2"), printed("versions", "m", "--last", "2"))
        self.assertEqual(self.server.json("/api/timeline?model=m&version=2"), printed("timeline", "m", "2"))
        timeline = self.server.json("/api/timeline?model=m&last=3")
        self.assertEqual(len(timeline["versions"]), 3)
        self.assertIn("steady", timeline["over"])
        status = self.server.json("/api/status")
        self.assertEqual(status["models"][0]["committed"], 5)
        self.assertEqual(len(status["models"][0]["workers"]), 8)

    def test_what_is_not_there_or_not_allowed_says_so(self):
        self.world()
        s = self.server
        for path, code, text in (("/api/versions", 400, "model="), ("/api/versions?model=" + "x" * 600, 400, "512"),
                                 ("/api/versions?model=m&last=0", 400, "last="), ("/api/timeline?model=m&version=-1", 400, "version="),
                                 ("/api/timeline?model=m&version=9", 404, "no version 9"), ("/api/versions?model=none", 404, "none")):
            self.assertIn(text, s.json(path, code)["error"])
        self.assertEqual(s.ask("/nothing")[0], 404)
        self.assertEqual(s.ask("/../etc/passwd")[0], 404)
        for method in ("POST", "PUT", "DELETE"):
            status, headers, _ = s.ask("/api/status", method, b"x" * 100000)
            self.assertEqual((status, headers["Allow"]), (405, "GET, HEAD"))
        status, _, body = s.ask("/metrics", "HEAD")
        self.assertEqual((status, body), (200, ""))

    def test_it_outlives_the_daemon_and_finds_it_again(self):
        f = self.world()
        f.refit(1)
        self.assertEqual(self.server.metrics()["reshard_up", ""], 1)
        before = self.server.json("/api/status")["incarnation"]
        self.daemon.kill()
        self.until(lambda got: got == {("reshard_up", ""): 0}, "it never saw that the daemon was gone")
        self.assertIn("d.sock", self.server.json("/api/status", 503)["error"])
        self.daemon.start()
        self.until(lambda got: got.get(("reshard_committed_version", '{model="m"}')) == 1, "it never found the new one")
        self.assertNotEqual(self.server.json("/api/status")["incarnation"], before)

    def test_many_that_ask_are_one_for_the_daemon(self):
        self.world()
        self.server.metrics()
        clients = self.daemon.status("m").clients
        answers = []
        threads = [threading.Thread(target=lambda: answers.append(self.server.metrics())) for _ in range(24)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        self.assertEqual(len(answers), 24)
        self.assertEqual(self.daemon.status("m").clients, clients)

    def test_signals_end_it_and_bad_addresses_are_refused(self):
        self.world()
        self.assertEqual(self.server.stop(), 0)
        again = Server(self.daemon)
        port = again.address.rpartition(":")[2]
        for listen, code in (("nonsense", 2), ("127.0.0.1", 2), ("127.0.0.1:70000", 2), (f"127.0.0.1:{port}", 1)):
            r = subprocess.run([BUILD / "reshardctl", "serve", "--listen", listen, "--socket", self.daemon.socket],
                               capture_output=True, text=True, timeout=WAIT_S)
            self.assertEqual(r.returncode, code, r.stderr)
            self.assertIn(listen, r.stderr)
        self.assertEqual(again.stop(signal.SIGINT), 0)


if __name__ == "__main__":
    main()
