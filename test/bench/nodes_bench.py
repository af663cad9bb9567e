"""The rows of the benchmark that need several nodes: refits through real daemons on shaped links, held against plain TCP of
the unique bytes, the conventional ways on the same transport, Open MPI and Gloo; all on the same links in the same run.

One testnet of five nodes, a daemon on each. For each case (test/bench/cases.py) worker processes attach, a first version
warms up without limits, and each strategy then moves a version of its own at each rate; every worker compares every element
of every version. Then the workers go and the peers move the same bytes between as many processes on the same nodes.

A refit's time is from submit to durable commit, as `reshardctl versions` has it: planning, connecting, verification and the
commit included. A peer's time is the transfer alone, with its connections up.
"""
import dataclasses
import json
import pathlib
import struct
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "peers"), str(HERE.parent / "lib")]
import cases  # noqa: E402
import peers  # noqa: E402
import raw_tcp  # noqa: E402
from cluster import Cluster, Failure  # noqa: E402
from testnet import NAMESPACES, Error, Testnet, difference  # noqa: E402

SLOW, FAST = "200mbit", "1gbit"
STRATEGIES = ("reshard", "direct", "gather-broadcast", "hybrid")
EMPTY_VERSIONS, EMPTY_WARM = 60, 5
ROWS = ("wire_ratio", "shaped_network", "vs_gather_broadcast", "vs_direct", "vs_hybrid", "vs_openmpi", "vs_gloo", "empty_commit",
        "get_committed")
NODES = 5
RAW_STREAMS = (1, 4)
LEAST_RATIO = 0.9  # no refit is so much faster than the wire
DOUBT = "; well ahead of raw TCP, which other work on this machine held up: not judged, run it again alone"
POLLS, POLL_ROUNDS = 2000, 5


@dataclasses.dataclass
class Task:
    """What is measured of a case: rate → strategies, rate → peers."""
    case: cases.Case
    strategies: dict
    peers: dict


def tasks():
    everything, both = STRATEGIES, ("openmpi", "gloo")
    return [
        Task(cases.tp4_to_tp2dp2(2), {SLOW: ("reshard",)}, {SLOW: both}),
        Task(cases.spread(2), {SLOW: everything}, {SLOW: both}),
        Task(cases.one_to_four(1), {SLOW: ("reshard", "direct", "gather-broadcast")}, {SLOW: ("openmpi",)}),
        Task(cases.mixture(24), {SLOW: ("reshard", "gather-broadcast")}, {SLOW: ("openmpi",)}),
        Task(cases.small(20_000), {SLOW: ("reshard",)}, {SLOW: ("openmpi",)}),
        Task(cases.tp4_to_tp2dp2(8), {FAST: ("reshard",)}, {FAST: ("openmpi",)}),
        Task(cases.spread(8), {FAST: ("reshard", "gather-broadcast")}, {}),
    ]


def growth_tasks():
    """The same 16 MiB: the base, then one thing grown at a time."""
    return [cases.growth(500, 2, 2), cases.growth(5_000, 2, 2), cases.growth(500, 16, 2), cases.growth(500, 16, 16)]


@dataclasses.dataclass
class Refit:
    """One version, by the daemon's own record and by the interfaces."""
    strategy: str
    rate: str
    record: dict
    moved: dict  # node name → Counters

    @property
    def seconds(self):
        return self.record["total_ns"] / 1e9

    def busiest(self):
        """Bytes of the busiest direction of the busiest link."""
        return max(max(c.tx_bytes, c.rx_bytes) for c in self.moved.values())


@dataclasses.dataclass
class Result:
    task: Task
    refits: dict = dataclasses.field(default_factory=dict)  # (rate, strategy) → Refit
    raw: dict = dataclasses.field(default_factory=dict)     # rate → seconds; None: unshaped
    peers: dict = dataclasses.field(default_factory=dict)   # (rate, peer, mode) → seconds
    problems: list = dataclasses.field(default_factory=list)


class Bench:
    def __init__(self, build, say, net, cluster):
        self.build, self.say, self.net, self.cluster = build, say, net, cluster
        self.models = 0

    # ---- one case ------------------------------------------------------------------------------------------------------

    def places(self, nodes):
        """(node name, device) of each rank: the devices of a node in turn."""
        used, out = {}, []
        for n in nodes:
            out.append((self.net.nodes[n], used.setdefault(n, 0)))
            used[n] += 1
        return out

    def attach(self, case, versions):
        self.models += 1
        model = f"{case.name}-{self.models}"
        files = []
        for name, side in (("source", case.source), ("destination", case.destination)):
            files.append(self.cluster.folder / f"{model}-{name}.json")
            files[-1].write_text(side.json())
        group = self.cluster.workers(model, *files, self.places(case.source_nodes), self.places(case.destination_nodes), versions)
        group.wait("attached")
        return model, group

    def refit(self, model, group, version, strategy, rate, case):
        """A version from publish to every element compared; its record and what passed the interfaces meanwhile."""
        options = {"hybrid": ["--strategy", "gather-broadcast", "--rule", f"{case.large}=reshard"]}.get(
            strategy, ["--strategy", strategy])
        group.wait("published", version)
        before = self.net.counters()
        record = self.cluster.submit(model, version, "--release-at", "committed", *options)
        after = self.net.counters()
        if record["phase"] != "committed":
            raise Failure(f"{model} version {version} ({strategy}): {record['phase']}: {record['reason']}")
        group.wait("checked", version)
        return Refit(strategy, rate, record, difference(after, before))

    def raw(self, case, rate):
        """The better of one and of several connections a flow."""
        self.net.set_rate(rate)
        flows = [(self.net.nodes[a], self.net.nodes[b], n) for a, b, n in case.flows()]
        return min(raw_tcp.measure(self.net, flows, streams) for streams in RAW_STREAMS)

    def measure(self, task):
        case, result = task.case, Result(task)
        plan = [(rate, s) for rate, strategies in task.strategies.items() for s in strategies]
        self.say(f"{case.title}: {case.unique_bytes() / 1e6:.0f} MB …")
        try:
            model, group = self.attach(case, 1 + len(plan))
            try:
                self.net.set_rate(None)
                warm = self.refit(model, group, 1, "reshard", None, case)
                result.refits[None, "reshard"] = warm
                result.raw[None] = self.raw(case, None)
                for version, (rate, strategy) in enumerate(plan, 2):
                    self.net.set_rate(rate)
                    r = result.refits[rate, strategy] = self.refit(model, group, version, strategy, rate, case)
                    self.say(f"  {rate} {strategy}: {r.seconds:.3f} s (wire {r.record['wire_ns'] / 1e9:.3f} s)")
            finally:
                group.end()
        except Failure as e:
            result.problems.append(str(e))
            self.say(f"  failed: {e}")
        for rate in task.strategies:
            result.raw[rate] = self.raw(case, rate)
            self.say(f"  {rate} raw TCP of the unique bytes: {result.raw[rate]:.3f} s")
        for rate, names in task.peers.items():
            self.net.set_rate(rate)
            for peer in names:
                self.measure_peer(result, peer, rate)
        return result

    def measure_peer(self, result, peer, rate):
        why = peers.missing(peer)
        if why:
            return
        try:
            for mode, s in peers.RUN[peer](self.net, result.task.case, self.build).items():
                result.peers[rate, peer, mode] = s
                self.say(f"  {rate} {peer} {mode}: {s:.3f} s")
        except peers.Failed as e:
            result.problems.append(f"{peer}: {e}")
            self.say(f"  {peer} failed: {e}")


# ---- rows ------------------------------------------------------------------------------------------------------------------

def row(name, value=None, unit="", against="", ratio=None, aim=None, holds=None, note=""):
    return {"name": name, "value": value, "unit": unit, "against": against, "ratio": ratio, "aim": aim, "holds": holds,
            "note": note}


def with_main(name, parts, worst, aim, what, absent):
    """The worst part stands for the row; without any the row stays and says why."""
    if not parts:
        return [row(name, note=absent)]
    w = worst(parts, key=lambda r: r["ratio"])
    label = w["name"].split("/", 1)[1]
    verdicts = {r["holds"] for r in parts}
    main = row(name, w["value"], w["unit"], what, w["ratio"], aim, False if False in verdicts else True if True in verdicts else None,
               f"the worst of {len(parts)}: {label}" + (f"; {w['note']}" if w["note"] else ""))
    return [main, *parts]


def label(result, rate):
    case = result.task.case
    return f"{case.name}-{case.unique_bytes() / 1e6:.0f}mb-{rate or 'unshaped'}"


def problems(results):
    return "; ".join(p for r in results for p in r.problems)


def wire_rows(results):
    """Into each destination node: payload by the transport, and bytes by the interface, over what it needs."""
    parts = []
    for result in results:
        needed = result.task.case.needed_bytes()
        for (rate, strategy), r in result.refits.items():
            if strategy != "reshard" or rate is None:
                continue
            payload = r.record["bytes"]["network"] / sum(needed.values())
            counters = max(r.moved[f"n{node}"].rx_bytes / n for node, n in needed.items())
            parts.append(row(f"wire_ratio/{label(result, rate)}", payload, "times", "unique bytes needed", payload,
                             "1.000; counters <= 1.06", payload == 1.0 and 1 <= counters <= 1.06,
                             f"interface counters {counters:.4f}, the worst node's; acknowledgements and what the daemons say "
                             "to each other included"))
    return with_main("wire_ratio", parts, max, "1.000; counters <= 1.06", "unique bytes that each node needs",
                     problems(results) or "nothing was measured")


def shaped_rows(results):
    parts = []
    for result in results:
        for (rate, strategy), r in result.refits.items():
            if strategy != "reshard" or rate not in result.raw:
                continue
            ratio = r.seconds / result.raw[rate]
            shaped, doubtful = rate is not None, ratio < LEAST_RATIO
            parts.append(row(f"shaped_network/{label(result, rate)}", r.seconds, "s",
                             "raw TCP of the unique bytes", ratio, "<= 1.05" if shaped else None, ratio <= 1.05 if shaped and not doubtful else None,
                             f"raw TCP {result.raw[rate]:.3f} s; wire {r.record['wire_ns'] / 1e9:.3f} s"
                             + (DOUBT if shaped and doubtful else "")
                             + ("" if shaped else "; first version of its workers, no limit: two cores' worth of TCP, no aim")))
    judged = [p for p in parts if p["aim"] is not None]
    rows = with_main("shaped_network", judged, max, "<= 1.05", "raw TCP of the unique bytes, same links", problems(results)
                     or "nothing was measured")
    return rows + [p for p in parts if p["aim"] is None]


def strategy_rows(name, strategy, results):
    """How much faster reshard is, over what the busiest link's bytes say."""
    parts = []
    for result in results:
        for (rate, s), r in result.refits.items():
            ours = result.refits.get((rate, "reshard"))
            if s != strategy or ours is None:
                continue
            times, says = r.seconds / ours.seconds, r.busiest() / ours.busiest()
            parts.append(row(f"{name}/{label(result, rate)}", times, "times", "what the busiest link's bytes say",
                             times / says, ">= 0.9", times / says >= 0.9,
                             f"{r.seconds:.3f} s, reshard {ours.seconds:.3f} s; the bytes say {says:.2f} times"))
    return with_main(name, parts, min, ">= 0.9", "what the busiest link's bytes say", problems(results) or "nothing was measured")


def peer_rows(name, peer, results):
    parts = []
    for result in results:
        for (rate, p, mode), s in result.peers.items():
            ours = result.refits.get((rate, "reshard"))
            if p == peer and ours is not None:
                parts.append(row(f"{name}/{label(result, rate)}-{mode}", s / ours.seconds, "times", f"{peer} {mode}",
                                 s / ours.seconds, "> 1", s > ours.seconds, f"{s:.3f} s; the refit {ours.seconds:.3f} s"))
    absent = peers.missing(peer)
    return with_main(name, parts, min, "> 1", f"{peer}, the same bytes and links",
                     f"skipped: {absent}" if absent else problems(results) or "nothing was measured")


def growth_rows(results):
    """No aim: what grows with the work beyond its bytes."""
    out = []
    for result, s, raw in results:
        out.append(row(f"shaped_network/{result.name}", s, "s", "raw TCP of the unique bytes", s / raw if raw else None,
                       note=f"{result.title}, at 1 Gbit/s; {s - raw:.3f} s beyond raw TCP; no aim"))
    return out


# ---- a commit of nothing ---------------------------------------------------------------------------------------------------

EMPTY = ('{"name": "%s", "ranks": 1, "meshes": [{"name": "m", "shape": [1], "ranks": [0]}], "tensors": [{"name": "w", '
         '"shape": [0, 16], "dtype": "bfloat16", "mesh": "m", "placements": ["Replicate"]}]}')


def fsyncs(folder, nodes):
    """(calls, ns) that fsync_clock.so has counted in all daemons."""
    calls = ns = 0
    for node in nodes:
        c, t = struct.unpack("QQ", (folder / f"fsyncs-{node}").read_bytes()[:16])
        calls, ns = calls + c, ns + t
    return calls, ns


def empty_commit(build, say):
    """submit → commit with nothing to move, a source on one node and a destination on another, less the fsyncs."""
    with Testnet.up(2, prefix="bench") as net:
        clock = build / "bench" / "fsync_clock.so"
        with Cluster(net, build) as cluster:
            for node in net.nodes:
                (cluster.folder / f"fsyncs-{node}").write_bytes(bytes(16))
            cluster.env = {"LD_PRELOAD": clock, "RESHARD_FSYNC_CLOCK": cluster.folder / "fsyncs-%n"}
            cluster.start()
            group = empty_group(cluster, "n0", "n1", EMPTY_WARM + EMPTY_VERSIONS)
            total, synced, calls = [], [], 0
            for v in range(1, EMPTY_WARM + EMPTY_VERSIONS + 1):
                group.wait("published", v)
                before = fsyncs(cluster.folder, net.nodes)
                record = cluster.submit("empty", v)
                after = fsyncs(cluster.folder, net.nodes)
                if record["phase"] != "committed":
                    raise Failure(f"version {v}: {record['phase']}: {record['reason']}")
                group.wait("checked", v)
                if v > EMPTY_WARM:
                    total.append(record["total_ns"] / 1e6)
                    synced.append((after[1] - before[1]) / 1e6)
                    calls += after[0] - before[0]
            group.end()
    if calls == 0:
        raise Failure("the daemons made no fsync: fsync_clock.so is not in them, or commits don't last")
    net_ms = sorted(t - s for t, s in zip(total, synced))
    middle = net_ms[len(net_ms) // 2]
    return [row("empty_commit", middle, "ms", "fsyncs alone", sorted(total)[len(total) // 2] / sorted(synced)[len(synced) // 2],
                "<= 10 ms", middle <= 10,
                f"median of {EMPTY_VERSIONS} versions, two daemons, less their own fsyncs ({calls / EMPTY_VERSIONS:.1f} a version, "
                f"{sorted(synced)[len(synced) // 2]:.2f} ms); most {net_ms[-1]:.2f} ms; fsyncs included: median "
                f"{sorted(total)[len(total) // 2]:.2f} ms")]


# ---- many who poll ---------------------------------------------------------------------------------------------------------

def empty_group(cluster, source, destination, versions):
    """Workers of a model without elements: a source on one node, a destination on another."""
    files = []
    for name in ("train", "rollout"):
        files.append(cluster.folder / f"{name}.json")
        files[-1].write_text(EMPTY % name)
    group = cluster.workers("empty", *files, [(source, 0)], [(destination, 0)], versions)
    group.wait("attached")
    return group


def many_polls(build, say, net, cluster):
    """How long after a commit long polls at all nodes have it."""
    group = empty_group(cluster, net.nodes[0], net.nodes[-1], 1 + POLL_ROUNDS)
    each = POLLS // len(net.nodes)
    rounds = []
    group.wait("published", 1)
    cluster.submit("empty", 1)
    group.wait("checked", 1)
    for v in range(2, 2 + POLL_ROUNDS):
        group.wait("published", v)
        p = subprocess.Popen([build / "bench" / "bench_client_pollers", "empty", str(v - 1), str(each),
                              *(str(cluster.socket(n)) for n in net.nodes)], stdout=subprocess.PIPE, text=True)
        if p.stdout.readline() != "ready\n":
            raise Failure(f"bench_client_pollers ended with {p.wait()}")
        record = cluster.submit("empty", v)
        if record["phase"] != "committed":
            p.kill()
            raise Failure(f"version {v}: {record['phase']}: {record['reason']}")
        line = p.communicate(timeout=60)[0]
        if p.returncode != 0:
            raise Failure(f"bench_client_pollers ended with {p.returncode}")
        rounds.append(json.loads(line))
        group.wait("checked", v)
    group.end()
    middle = sorted(rounds, key=lambda r: r["p99_ms"])[len(rounds) // 2]
    say(f"  {POLLS:,} long polls over {len(net.nodes)} nodes: 99 % know within {middle['p99_ms']:.1f} ms")
    return [row(f"get_committed/{POLLS}-polls-{len(net.nodes)}-nodes", middle["p99_ms"], "ms", "the limit", middle["p99_ms"] / 250,
                "<= 250 ms", middle["p99_ms"] <= 250,
                f"from the commit until 99 % of {middle['answers']:,} long polls at all nodes have it; median "
                f"{middle['median_ms']:.1f}, most {middle['most_ms']:.1f} ms; the middle one of {POLL_ROUNDS} versions")]


# ---- all -------------------------------------------------------------------------------------------------------------------

def measure_growth(build, say, rate=FAST):
    """[(case, seconds, raw seconds)]; each on a testnet of its own size."""
    out = []
    for case in growth_tasks():
        with Testnet.up(max(case.nodes()) + 1, rate, prefix="bench") as net, \
                Cluster(net, build, {"devices": {"devices": 16}}) as cluster:
            cluster.start()
            bench = Bench(build, say, net, cluster)
            model, group = bench.attach(case, 2)
            bench.refit(model, group, 1, "reshard", rate, case)
            r = bench.refit(model, group, 2, "reshard", rate, case)
            group.end()
            raw = bench.raw(case, rate)
            say(f"  {case.title}: {r.seconds:.3f} s, raw TCP {raw:.3f} s")
            out.append((case, r.seconds, raw))
    return out


def rows_of(wanted, results):
    made = {"wire_ratio": lambda: wire_rows(results), "shaped_network": lambda: shaped_rows(results),
            "vs_gather_broadcast": lambda: strategy_rows("vs_gather_broadcast", "gather-broadcast", results),
            "vs_direct": lambda: strategy_rows("vs_direct", "direct", results),
            "vs_hybrid": lambda: strategy_rows("vs_hybrid", "hybrid", results),
            "vs_openmpi": lambda: peer_rows("vs_openmpi", "openmpi", results),
            "vs_gloo": lambda: peer_rows("vs_gloo", "gloo", results)}
    return [r for name in ROWS if name in wanted and name in made for r in made[name]()]


def needed_for(task, wanted):
    """The task without what no wanted row looks at."""
    by_row = {"direct": "vs_direct", "gather-broadcast": "vs_gather_broadcast", "hybrid": "vs_hybrid"}
    keep = lambda s: s == "reshard" or by_row[s] in wanted
    return Task(task.case, {rate: tuple(filter(keep, ss)) for rate, ss in task.strategies.items()},
                {rate: tuple(p for p in ps if f"vs_{p}" in wanted) for rate, ps in task.peers.items()})


def measure(build, wanted, say):
    """(rows, what broke): of the wanted rows those that need nodes; none where there are no namespaces."""
    rows, broken = [], []
    wanted = [name for name in ROWS if name in wanted]
    if not wanted:
        return [], []
    with Testnet.up(NODES, prefix="bench") as net:
        if net.mode != NAMESPACES:
            return [row(n, note="not measured: needs network namespaces, which are not permitted here") for n in wanted], []
        if {"vs_openmpi", "vs_gloo"} & set(wanted):
            peers.setup(say)
        with Cluster(net, build) as cluster:
            cluster.start()
            if "get_committed" in wanted:
                try:
                    rows += many_polls(build, say, net, cluster)
                except Failure as e:
                    broken.append(str(e))
            if set(wanted) - {"empty_commit", "get_committed"}:
                bench = Bench(build, say, net, cluster)
                results = [bench.measure(needed_for(t, wanted)) for t in tasks()]
                rows += rows_of(wanted, results)
                broken += [p for r in results for p in r.problems]
    for name, job in (("shaped_network", lambda: growth_rows(measure_growth(build, say))),
                      ("empty_commit", lambda: empty_commit(build, say))):
        if name in wanted:
            try:
                rows += job()
            except (Failure, Error) as e:
                broken.append(str(e))
                rows += [row(name, note=f"failed: {e}")] if name == "empty_commit" else []
    return rows, broken
