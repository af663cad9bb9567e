"""Daemons on the nodes of a testnet that work as one, and worker processes (client/demo_worker.c) attached to them: for the
demo and the benchmark. Knows the programs, their files and what they print; no gRPC.

    with Cluster(net, build) as cluster:
        cluster.start()
        group = cluster.workers("m", source_file, destination_file, source_places, destination_places)
        group.wait("published", 1); cluster.submit("m", 1); group.wait("checked", 1)
"""
import contextlib
import ctypes
import json
import os
import pathlib
import selectors
import shutil
import signal
import subprocess
import tempfile
import time

PORT = 7070
START_S = 30


class Failure(Exception):
    """A program did not do what it had to; the text says which and what."""


def die_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def end_processes(processes):
    """Ends our own processes, by id: asks, waits, then insists."""
    for p in processes:
        if p.stdin:
            with contextlib.suppress(OSError):
                p.stdin.close()
    for p in processes:
        for sign in (lambda: None, p.terminate, p.kill):
            sign()
            try:
                p.wait(timeout=10)
                break
            except subprocess.TimeoutExpired:
                pass


class Cluster:
    """n0 is the coordinator. Settings: {"devices": {"devices": 4}}, over what is set here."""

    def __init__(self, net, build, settings=None, env=None):
        self.net, self.build, self.env = net, pathlib.Path(build).resolve(), env or {}
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="reshard-cluster-"))
        self.daemons, self.groups = {}, []
        sections = {"daemon": {"socket": self.folder / "%n.sock", "state_dir": self.folder / "state-%n", "log_level": "info"},
                    "devices": {"backend": "host", "transport": "tcp", "devices": 8},
                    "cluster": {"nodes": "\n  ".join(f"{n}={net.address(n)}:{PORT}" for n in net.nodes), "coordinator": "n0",
                                "insecure_network": "yes"}}
        for section, keys in (settings or {}).items():
            sections.setdefault(section, {}).update(keys)
        self.config = self.folder / "reshardd.conf"
        self.config.write_text("".join(f"[{s}]\n" + "".join(f"{k} = {v}\n" for k, v in keys.items())
                                       for s, keys in sections.items()))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        for group in self.groups:
            group.end()
        for p in self.daemons.values():
            if p.poll() is None:
                p.terminate()
        end_processes(self.daemons.values())
        shutil.rmtree(self.folder, ignore_errors=True)

    # ---- daemons -------------------------------------------------------------------------------------------------------

    def socket(self, node):
        return self.folder / f"{node}.sock"

    def log(self, node):
        return self.folder / f"{node}.log"

    def start(self):
        for node in self.net.nodes:
            self.start_daemon(node)
        deadline = time.monotonic() + START_S
        while True:
            away = self.away()
            if not away:
                return
            for node, p in self.daemons.items():
                if p.poll() is not None:
                    raise Failure(f"the daemon of {node} ended with {p.returncode}: {self.tail(node, 5)}")
            if time.monotonic() > deadline:
                raise Failure(f"not joined in {START_S} s: {', '.join(away)}")
            time.sleep(0.05)

    def start_daemon(self, node):
        env = dict(os.environ, **{k: str(v).replace("%n", node) for k, v in self.env.items()})
        with open(self.log(node), "a") as log:
            self.daemons[node] = self.net.popen(
                node, [self.build / "reshardd", "--config", self.config, "--node", node], stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True, preexec_fn=die_with_parent, env=env)

    def away(self):
        """Nodes of which the coordinator does not say that they are here; all, while it does not answer."""
        r = self.run_ctl("n0", "status", "--json", "--timeout", "2")
        if r.returncode != 0:
            return list(self.net.nodes)
        here = {n["name"] for n in json.loads(r.stdout).get("nodes", []) if n["state"] == "here" and n["data_plane"] == "ready"}
        return [n for n in self.net.nodes if n not in here]

    def tail(self, node, n=15):
        try:
            return "\n".join(self.log(node).read_text().splitlines()[-n:])
        except OSError:
            return ""

    # ---- reshardctl ----------------------------------------------------------------------------------------------------

    def run_ctl(self, node, *args):
        return subprocess.run([self.build / "reshardctl", *map(str, args), "--socket", self.socket(node)],
                              capture_output=True, text=True, check=False)

    def ctl(self, node, *args):
        r = self.run_ctl(node, *args)
        if r.returncode != 0:
            raise Failure(f"reshardctl {' '.join(map(str, args))} at {node}: exit {r.returncode}: {r.stderr.strip()}")
        return r.stdout

    def submit(self, model, version, *options, node="n0"):
        """Returns the version's record once it is final."""
        self.run_ctl(node, "submit", model, version, "--wait", *options)
        return self.record(model, version, node)

    def records(self, model, node="n0"):
        return json.loads(self.ctl(node, "versions", model, "--json", "--last", 1000))["versions"]

    def record(self, model, version, node="n0"):
        found = [v for v in self.records(model, node) if v["version"] == version]
        if not found:
            raise Failure(f"{model}: version {version} is not known")
        return found[0]

    # ---- workers -------------------------------------------------------------------------------------------------------

    def workers(self, model, source, destination, source_places, destination_places, versions, in_place=(), fused=False,
                lead=False):
        """Starts a process per rank: places are (node, device) by rank; source and destination are layout files; ranks in
        in_place receive without shadow memory. lead: source rank 0 submits each version by itself."""
        group = Group(self)
        self.groups.append(group)
        common = [self.build / "demo_worker", "--model", model, "--versions", versions]
        for rank, (node, device) in enumerate(destination_places):
            argv = [*common, "--socket", self.socket(node), "--layout", destination, "--rank", rank, "--device", device]
            argv += ["--in-place"] * (rank in in_place) + ["--fused"] * fused
            group.add("rollout", rank, node, argv)
        for rank, (node, device) in enumerate(source_places):
            argv = [*common, "--socket", self.socket(node), "--layout", source, "--source", "--rank", rank, "--device", device]
            group.add("trainer", rank, node, argv + ["--leader"] * (lead and rank == 0))
        return group


class Group:
    """The worker processes of one model, and what they say: a JSON object per line, each with its event."""

    def __init__(self, cluster):
        self.cluster, self.workers, self.said = cluster, [], []
        self.selector = selectors.DefaultSelector()

    def add(self, side, rank, node, argv):
        p = self.cluster.net.popen(node, argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   start_new_session=True, preexec_fn=die_with_parent)
        p.side, p.rank, p.node, p.buffer = side, rank, node, b""
        self.workers.append(p)
        self.selector.register(p.stdout, selectors.EVENT_READ, p)

    def follow(self, timeout_s):
        """Events that have come, at once or within timeout_s: [(worker, event)]. The end of a worker is a Failure."""
        out = []
        for key, _ in self.selector.select(timeout=timeout_s):
            p = key.data
            data = os.read(p.stdout.fileno(), 65536)
            if not data:
                p.wait()
                why = p.stderr.read().decode(errors="replace").strip()
                raise Failure(f"{p.side} {p.rank} on {p.node} (pid {p.pid}) ended with {p.returncode}: {why}")
            *whole, p.buffer = (p.buffer + data).split(b"\n")
            out += [(p, json.loads(line)) for line in whole]
        self.said += out
        for node, d in self.cluster.daemons.items():
            if d.poll() is not None:
                raise Failure(f"the daemon of {node} ended with {d.returncode}: {self.cluster.tail(node, 5)}")
        return out

    def wait(self, event, version=None, side=None, timeout_s=90):
        """Until each worker (of that side) has said it; returns the events."""
        side = side or {"published": "trainer", "released": "trainer", "checked": "rollout"}.get(event)
        wanted = {p for p in self.workers if side in (None, p.side)}
        deadline = time.monotonic() + timeout_s
        while True:
            found = {p: e for p, e in self.said if e["event"] == event and (version is None or e.get("version") == version)}
            if wanted <= set(found):
                return [found[p] for p in wanted]
            if time.monotonic() > deadline:
                who = ", ".join(f"{p.side} {p.rank} on {p.node}" for p in wanted - set(found))
                raise Failure(f"no '{event}' of version {version} in {timeout_s} s from: {who}")
            self.follow(0.5)

    def end(self):
        for p in self.workers:
            if p.poll() is None:
                p.terminate()
        end_processes(self.workers)
        for p in self.workers:
            p.stdout.close()
            p.stderr.close()
        self.workers = []
