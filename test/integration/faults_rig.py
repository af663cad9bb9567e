"""What scripts/faults kills: daemons and their workers as processes, the questions that they are asked, and what has been
promised so far. One daemon, or several on the nodes of a testnet that work as one.

Every check raises Wrong with the kind of promise that was not kept."""
import collections
import contextlib
import json
import os
import pathlib
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time

import nodes as cluster
import rig
from rig import grpc, pb, pb_grpc

HERE = pathlib.Path(__file__).resolve().parent
ANSWER_S = 5 * rig.SLOW    # the promise
SETTLE_S = 15 * rig.SLOW   # for everything to be whole again
PAUSE_S = 0.01
INSTANCES = [("rollout", 0), ("rollout", 1)]  # that must accept
FINAL = (pb.PHASE_COMMITTED, pb.PHASE_ABORTED, pb.PHASE_SUPERSEDED)
Place = collections.namedtuple("Place", "kind rank node device")
# By name: two trainers in one domain, an instance of two staged and one of two in_place ranks in another.
WORKERS = {"trainer 0": Place("source", 0, 0, 0), "trainer 1": Place("source", 1, 0, 1), "staged 0": Place("staged", 0, 0, 4),
           "staged 1": Place("staged", 1, 0, 5), "in_place 2": Place("in_place", 2, 0, 6),
           "in_place 3": Place("in_place", 3, 0, 7)}
# Over several nodes: a trainer at the coordinator and one beside a receiver, an instance across two nodes, one on the last.
SPREAD = {"trainer 0": Place("source", 0, 0, 0), "trainer 1": Place("source", 1, 1, 0), "staged 0": Place("staged", 0, 1, 1),
          "staged 1": Place("staged", 1, 2, 0), "in_place 2": Place("in_place", 2, -1, 1),
          "in_place 3": Place("in_place", 3, -1, 2)}
SETTINGS = dict(devices__network_gbytes_per_s=0.0002, refit__prepare_timeout_ms=int(4000 * rig.SLOW),
                refit__accept_timeout_ms=int(4000 * rig.SLOW), refit__transfer_timeout_ms=int(6000 * rig.SLOW),
                refit__quiesce_timeout_ms=int(1000 * rig.SLOW), clients__grace_ms=int(1000 * rig.SLOW),
                daemon__log_level="info")


class Wrong(Exception):
    """A promise that was not kept: (kind, text)."""

    def __init__(self, kind, text):
        super().__init__(text)
        self.kind = kind


class WorkerProcess:
    """One faults_worker.py: its commands, what it has said."""

    def __init__(self, daemon, name, place):
        self.name, self.kind, self.rank = name, place.kind, place.rank
        self.p = subprocess.Popen([sys.executable, HERE / "faults_worker.py", daemon.socket, place.kind, str(place.rank),
                                   str(place.device)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.said, self.replies, self.changed = [], [], threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.p.stdout:
            m = json.loads(line)
            with self.changed:
                (self.replies if "reply" in m else self.said).append(m)
                self.changed.notify_all()

    def ask(self, **command):
        with self.changed:
            self.replies.clear()
        try:
            self.p.stdin.write(json.dumps(command) + "\n")
            self.p.stdin.flush()
        except BrokenPipeError:
            raise Wrong("worker", f"{self.name} has ended by itself") from None
        with self.changed:
            if not self.changed.wait_for(lambda: self.replies, SETTLE_S):
                raise Wrong("worker", f"{self.name} does not answer {command}")
            return self.replies.pop()["reply"]

    def take_said(self):
        with self.changed:
            said, self.said = self.said, []
        return said

    def end(self):
        self.p.kill()
        self.p.wait()
        self.p.stdin.close()


def committed_of(channel, timeout):
    try:
        return pb_grpc.RefitStub(channel).GetCommitted(pb.GetCommittedRequest(model="m"), timeout=timeout).version
    except grpc.RpcError as e:
        if e.code() == grpc.StatusCode.NOT_FOUND:
            return 0
        raise


def versions_of(channel, timeout):
    try:
        return pb_grpc.AdminStub(channel).Versions(pb.VersionsRequest(model="m", last=1000), timeout=timeout).versions
    except grpc.RpcError as e:
        if e.code() == grpc.StatusCode.NOT_FOUND:
            return []
        raise


def status_of(channel, timeout):
    return pb_grpc.AdminStub(channel).Status(pb.StatusRequest(), timeout=timeout)


class Rig:
    """The daemon, its workers, and what has been promised so far."""

    places = WORKERS

    def __init__(self, **settings):
        self.daemon = rig.Daemon(**SETTINGS, **settings)
        self.daemon.start()
        self.begin()

    def begin(self):
        self.workers, self.history = {}, []
        for name in self.places:
            self.start_worker(name)
        self.version = 0        # the newest that was offered
        self.told = 0           # the newest that anybody was told to be committed
        self.accepted = {}      # submits that were answered: version -> attempt
        self.requests = 0
        self.stale = []         # stopped data planes of daemons that are gone
        self.refit_s = 0.0      # of an undisturbed refit, submit to commit
        self.newcomers = set()  # ranks whose process is new since the last whole version: they may still be empty

    def daemon_of(self, name):
        """The one that a worker is a client of."""
        return self.daemon

    def start_worker(self, name):
        self.workers[name] = WorkerProcess(self.daemon_of(name), name, self.places[name])

    def close(self):
        for w in self.workers.values():
            w.end()
        for pid in self.stale:
            kill(pid, signal.SIGKILL)
        self.end()

    def end(self):
        self.daemon.close()

    # -- calls

    def call(self, fn, until, what, daemon=None):
        """fn(channel, timeout) on fresh channels until it answers; anything but an answer by `until` is a broken promise."""
        while True:
            channel = grpc.insecure_channel("unix:" + (daemon or self.daemon).socket,
                                            options=[("grpc.use_local_subchannel_pool", 1)])
            try:
                return fn(channel, max(until - time.monotonic(), 0.05))
            except grpc.RpcError as e:
                if time.monotonic() >= until:
                    raise Wrong("answer", f"{what}: no answer in time: {e.code().name} {e.details()}") from None
                time.sleep(PAUSE_S)
            finally:
                channel.close()

    def model(self, until=None):
        models = [m for m in self.call(status_of, until or time.monotonic() + ANSWER_S, "status").models if m.model == "m"]
        return models[0] if models else pb.ModelStatus()

    def versions(self, until=None, daemon=None):
        return {v.version: v for v in self.call(versions_of, until or time.monotonic() + ANSWER_S, "versions", daemon)}

    def committed(self, until=None, daemon=None):
        return self.call(committed_of, until or time.monotonic() + ANSWER_S, "get_committed", daemon)

    def submit(self, version, daemon=None):
        """The attempt, or None: not answered, or refused since things are not back yet."""
        self.requests += 1
        daemon = daemon or self.daemon
        request = pb.SubmitRequest(model="m", version=version, request_id=f"r{self.requests}")
        channel = grpc.insecure_channel("unix:" + daemon.socket, options=[("grpc.use_local_subchannel_pool", 1)])
        try:
            client = rig.Client(daemon)
            stub = pb_grpc.RefitStub(grpc.intercept_channel(channel, rig.TokenInterceptor(client.token)))
            reply = stub.Submit(request, timeout=ANSWER_S)
            self.accepted[version] = reply.attempt
            return reply.attempt
        except (grpc.RpcError, OSError, ConnectionError, AssertionError):
            return None
        finally:
            channel.close()

    # -- what was said

    def listen(self):
        """Takes in what the workers have said; torn claims are found here."""
        for w in self.workers.values():
            for m in w.take_said():
                if m["wrong"]:
                    raise Wrong("torn", f"{w.name}: {m['said']} version {m['version']}, but wrong are {m['wrong']}")
                if m["said"] in ("committed", "applied"):
                    self.told = max(self.told, m["version"])

    def check_questions(self, since):
        """Asks all three; returns the seconds until the last was answered."""
        until = since + ANSWER_S
        self.listen()
        told, accepted = self.told, list(self.accepted)
        model, versions, committed = self.model(until), self.versions(until), self.committed(until)
        seconds = time.monotonic() - since
        if seconds > ANSWER_S:
            raise Wrong("answer", f"answers took {seconds:.2f} s")
        for name, value in (("status", model.committed), ("get_committed", committed)):
            if value < told:
                raise Wrong("lost", f"{name} says {value} is the newest committed; version {told} was told")
        if told and (told not in versions or versions[told].phase != pb.PHASE_COMMITTED):
            raise Wrong("lost", f"versions does not show {told} as committed")
        for version in accepted:
            if version not in versions:
                raise Wrong("lost", f"the submit of version {version} was answered, and now nobody knows it")
        self.told = max(self.told, committed)
        return seconds

    def claims(self):
        """(state, held, applied) of each rollout worker by rank, as the daemon says."""
        return {w.rank: (w.state, w.held, w.applied) for w in self.model().workers
                if w.side == pb.SIDE_DESTINATION and w.state != pb.WORKER_GONE and not w.doing}

    def check_claims(self):
        """What did not change while we looked must be what is in memory."""
        before = self.claims()
        names = [n for n, w in self.workers.items() if w.kind != "source"]
        recent = list(range(max(1, self.version - 3), self.version + 1))
        audits = {self.workers[n].rank: self.workers[n].ask(do="audit", versions=recent) for n in names}
        after = self.claims()
        for n in names:
            rank = self.workers[n].rank
            if rank not in before or before[rank] != after.get(rank):
                continue
            state, held, applied = before[rank]
            served = state in (pb.WORKER_CURRENT, pb.WORKER_STALE)
            if served and applied in recent and applied not in audits[rank]["live"]:
                raise Wrong("torn", f"{n} is called {pb.WorkerState.Name(state)} with version {applied} applied; its memory "
                                    f"holds {audits[rank]['live'] or 'a mixture'}")
            memory = audits[rank]["shadow" if self.workers[n].kind == "staged" else "live"]
            if held in recent and state != pb.WORKER_TORN and held not in memory:
                raise Wrong("torn", f"{n} is said to hold version {held}; its memory holds {memory or 'a mixture'}")
        self.listen()
        return before

    # -- refits

    def attached(self):
        model = self.model()
        return sum(1 for w in model.workers if w.state != pb.WORKER_GONE) == len(self.places)

    def wait(self, predicate, what, timeout=SETTLE_S):
        end = time.monotonic() + timeout
        while not predicate():
            self.listen()
            for w in self.workers.values():
                if w.p.poll() is not None:
                    raise Wrong("worker", f"{w.name} has ended by itself")
            if time.monotonic() >= end:
                raise Wrong("hang", f"{what}: not within {timeout:.0f} s\n{self.describe()}")
            time.sleep(PAUSE_S)

    def log(self):
        """All lines so far of the daemon that decides, over restarts."""
        return self.history + self.daemon.lines

    def phase(self, mark):
        """How far the version had come, by the log, when something went wrong; "-": not begun."""
        phase = "-"
        for line in self.log()[mark:]:
            m = re.search(rf"version {self.version} attempt \d+: ([A-Z]+)", line)
            if "ledger read" in line or m is not None and m[1] == "ABORTING":
                break
            phase = m[1] if m is not None else phase
        return phase

    def describe(self):
        try:
            return str(self.model())
        except Wrong as e:
            return str(e)

    def offer(self, version):
        for name in ("trainer 0", "trainer 1"):
            self.workers[name].ask(do="offer", version=version)

    def final(self, version):
        v = self.versions().get(version)
        return v is None or v.phase in FINAL

    def settle(self, version, most):
        """Brings a version to its commit with at most that many further attempts; returns how many it took."""
        self.wait(self.attached, "all workers attached")
        for n in range(most + 1):
            self.wait(lambda: self.final(version), f"version {version} ends")
            v = self.versions().get(version)
            if v is not None and v.phase == pb.PHASE_COMMITTED:
                self.told = max(self.told, version)
                self.wait(lambda: self.whole(version), f"version {version} is applied")
                return n
            if n < most:
                self.wait(self.attached, "all workers attached")
                self.offer(version)
                self.submit(version)
        raise Wrong("next", f"version {version} is not committed after {most} attempts: "
                            + (v.reason if v is not None else "nobody knows it") + "\n" + self.describe())

    def whole(self, version):
        """Every rollout worker has it, says the daemon; then its memory must."""
        claims = self.claims()
        empty = {rank for rank, c in claims.items() if c == (pb.WORKER_EMPTY, 0, 0)} & self.newcomers
        if len(claims) != 4 or any(c != (pb.WORKER_CURRENT, c[1], version) for r, c in claims.items() if r not in empty):
            return False
        self.check_claims()
        return True

    def submit_at(self):
        """The daemon that a clean version is asked for at."""
        return self.daemon

    def clean(self):
        """A refit that nothing disturbs."""
        self.version += 1
        self.newcomers.clear()
        self.offer(self.version)
        if self.submit(self.version, self.submit_at()) is None:
            raise Wrong("next", f"submit of version {self.version} was refused")
        if self.settle(self.version, 0) != 0:
            raise Wrong("next", f"version {self.version} needed more than one attempt")
        self.refit_s = self.versions()[self.version].total_ns / 1e9

    def restart(self, daemon=None, crash=None, wait="reshardd serves"):
        daemon = daemon or self.daemon
        if daemon is self.daemon:
            self.history += daemon.lines
        if crash is not None:
            os.environ["RESHARD_CRASH"] = crash
        daemon.start(wait=wait)
        os.environ.pop("RESHARD_CRASH", None)

    def target(self, t):
        """The daemon that a try is aimed at."""
        return self.daemon

    def ask_without(self, daemon):
        """While a daemon can't answer: whoever else there is."""

    # -- the files

    def ledgers(self):
        """(file of the ledger of record, files of the others)."""
        return pathlib.Path(self.daemon.settings["daemon"]["state_dir"]) / "reshard.db", []

    def check_ledger(self):
        """What sqlite3 reads: all that was told is there, each commit with the acceptances of its own attempt: exactly one of
        each instance (the policy names both), whoever was brought up to that version later."""
        ours, others = self.ledgers()
        known = self.versions()
        with contextlib.closing(sqlite3.connect(f"file:{ours}?mode=ro", uri=True, timeout=ANSWER_S)) as db:
            if db.execute("PRAGMA quick_check").fetchone() != ("ok",):
                raise Wrong("lost", "the ledger's file is damaged")
            newest = db.execute("SELECT committed FROM models WHERE model = 'm'").fetchone()[0]
            rows = {v: (phase, attempt) for v, phase, attempt in
                    db.execute("SELECT version, phase, attempt FROM versions WHERE model = 'm'")}
            accepted = collections.defaultdict(list)
            for v, attempt, layout, instance in db.execute(
                    "SELECT version, attempt, layout, instance FROM acceptances WHERE model = 'm' AND accepted ORDER BY instance"):
                accepted[v, attempt].append((layout, instance))
        if newest != self.told:
            raise Wrong("lost", f"the ledger has {newest} as the newest committed; told was {self.told}")
        for v, record in known.items():
            phase, attempt = rows[v]
            if record.phase == pb.PHASE_COMMITTED and phase != rows[newest][0]:
                raise Wrong("lost", f"version {v} is called committed; the ledger has phase {phase}")
            if record.phase == pb.PHASE_ABORTED and phase == rows[newest][0]:
                raise Wrong("lost", f"version {v} is called aborted; the ledger has it committed")
            if record.phase == pb.PHASE_COMMITTED and accepted[v, attempt] != INSTANCES:
                raise Wrong("lost", f"version {v} is committed; its attempt {attempt} was accepted by {accepted[v, attempt]}, "
                                    f"not {INSTANCES}")
        for other in others:
            with contextlib.closing(sqlite3.connect(f"file:{other}?mode=ro", uri=True, timeout=ANSWER_S)) as db:
                if db.execute("PRAGMA quick_check").fetchone() != ("ok",):
                    raise Wrong("lost", f"{other} is damaged")
                if db.execute("SELECT count(*) FROM versions").fetchone() != (0,):
                    raise Wrong("lost", f"{other} has versions, which are the coordinator's")


class NodesRig(Rig):
    """Daemons on several nodes; the first is the coordinator. Whoever lives is asked; the answers of one do not contradict
    those of another."""

    def __init__(self, n):
        self.nodes = cluster.Nodes(n, **SETTINGS)
        names = self.nodes.names
        self.places = {name: p._replace(node=min(p.node, n - 1) % n) for name, p in SPREAD.items()}
        self.node_of = {name: names[p.node] for name, p in self.places.items()}
        self.away = set()  # nodes that can't be asked now
        try:
            self.nodes.start()
            self.daemon = self.nodes.head
            self.begin()
        except BaseException:
            self.nodes.close()
            raise

    def daemon_of(self, name):
        return self.nodes[self.node_of[name]]

    def end(self):
        self.nodes.close()

    def submit_at(self):
        return self.nodes[self.nodes.names[self.version % len(self.nodes.names)]]

    def ledgers(self):
        files = [self.nodes.dir / f"state-{name}" / "reshard.db" for name in self.nodes.names]
        return files[0], [f for f in files[1:] if f.exists()]

    def target(self, t):
        return self.nodes[self.nodes.names[t.get("node", 0)]]

    def ask_without(self, daemon):
        self.away = {daemon.name}
        try:
            self.check_questions(time.monotonic())
        finally:
            self.away = set()

    def ask_apart(self, daemon):
        """While a node's link is cut: each side of the cut."""
        if daemon is not self.daemon:
            self.ask_without(daemon)
            return
        self.away = set(self.nodes.names[1:])
        try:
            self.check_questions(time.monotonic())
        finally:
            self.away = set()
        self.ask_without(daemon)

    def members(self):
        return [self.nodes[n] for n in self.nodes.names[1:] if n not in self.away]

    def check_questions(self, since):
        until = since + ANSWER_S
        if self.daemon.name in self.away:
            return self.check_copies(until)
        super().check_questions(since)
        for d in self.members():
            newest, known = self.committed(until, d), self.versions(until, d)
            if newest > self.committed(until):
                raise Wrong("lost", f"{d.name} says that {newest} is committed, the coordinator does not")
            if self.told and known[self.told].phase != pb.PHASE_COMMITTED:
                raise Wrong("lost", f"versions at {d.name} does not show {self.told} as committed")
            self.call(status_of, until, f"status at {d.name}", d)
        self.wait_copies(until)
        seconds = time.monotonic() - since
        if seconds > ANSWER_S:
            raise Wrong("answer", f"answers took {seconds:.2f} s")
        return seconds

    def wait_copies(self, until):
        """A member's copy of what is committed may be a little behind, not more."""
        for d in self.members():
            told = self.told
            while self.committed(until, d) < told:
                if time.monotonic() >= until:
                    raise Wrong("lost", f"{d.name} says that {self.committed(until, d)} is the newest committed; "
                                        f"version {told} was told")
                time.sleep(PAUSE_S)

    def check_copies(self, until):
        """Without a coordinator: what members say of what is committed is not more than there may be."""
        for d in self.members():
            newest = self.committed(until, d)
            if newest > self.version:
                raise Wrong("lost", f"{d.name} says that {newest} is committed, which nobody has asked for")
            self.call(status_of, until, f"status at {d.name}", d)

    def joined(self):
        return set(self.nodes.node_states().values()) == {"here"}

    def wait(self, predicate, what, timeout=SETTLE_S):
        try:
            super().wait(predicate, what, timeout)
        except Wrong as e:
            if e.kind != "hang":
                raise
            raise Wrong("hang", f"{e}\n{self.nodes.tails(10)}") from None


def kill(pid, sig):
    try:
        os.kill(pid, sig)
    except ProcessLookupError:
        pass
