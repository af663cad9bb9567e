#!/usr/bin/env python3
"""reshardctl layout and plan, without a daemon: what they accept, refuse, print and return.

Plans are simulated here from their JSON alone, element by element, with an own reading of torch.chunk: nothing of the
project is used but the binary (RESHARDCTL, else build/reshardctl). Prints what fails, then "N passed, N failed".
"""
import itertools
import json
import math
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import unittest
import weakref

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
BUILD = pathlib.Path(os.environ.get("RESHARD_BUILD", "build")).resolve()
CTL = os.environ.get("RESHARDCTL", str(BUILD / "reshardctl"))
SLOW = float(os.environ.get("RESHARD_SLOW", "1"))


def ctl(*arguments, text=None):
    return subprocess.run([CTL, *map(str, arguments)], capture_output=True, text=True, input=text, timeout=120 * SLOW)


# --- layouts by hand ------------------------------------------------------------------------------------


def mesh(name, shape, ranks):
    return {"name": name, "shape": shape, "ranks": ranks}


def tensor(name, shape, placements, mesh_name="m", dtype="float32", **more):
    return {"name": name, "shape": shape, "dtype": dtype, "mesh": mesh_name, "placements": placements, **more}


def layout(name, ranks, meshes, tensors, **more):
    return {"name": name, "ranks": ranks, "meshes": meshes, "tensors": tensors, **more}


def holds(l, t, rank, at):
    """Whether a rank holds an element, by the chunk rule applied to its index."""
    if "regions" in t:
        return any(r["rank"] == rank and all(o <= x < o + s for o, s, x in zip(r["offset"], r["size"], at))
                   for r in t["regions"])
    m = next(m for m in l["meshes"] if m["name"] == t["mesh"])
    if rank not in m["ranks"]:
        return False
    position, coordinates = m["ranks"].index(rank), []
    for size in reversed(m["shape"]):
        coordinates.insert(0, position % size)
        position //= size
    left, index = list(t["shape"]), list(at)
    for i in t.get("shard_order", range(len(m["shape"]))):
        if t["placements"][i] == "Replicate":
            continue
        d = int(t["placements"][i][6:-1])
        chunk = -(-left[d] // m["shape"][i])
        if index[d] // chunk != coordinates[i]:
            return False
        index[d] -= coordinates[i] * chunk
        left[d] = min(chunk, left[d] - coordinates[i] * chunk)
    return True


def elements(t):
    return itertools.product(*(range(n) for n in t["shape"]))


class Files:
    """Layouts and a topology as files in a folder of their own."""

    def __init__(self, source, destinations, topology):
        self.folder = tempfile.mkdtemp(prefix="reshard-test-")
        weakref.finalize(self, shutil.rmtree, self.folder)
        self.source, self.destinations, self.topology = source, destinations, topology
        self.arguments = ["--source", self.write("s.json", source)]
        for i, d in enumerate(destinations):
            self.arguments += ["--destination", self.write(f"d{i}.json", d)]
        self.arguments += ["--topology", self.write("t.json", topology)]

    def write(self, name, value):
        path = pathlib.Path(self.folder) / name
        path.write_text(value if isinstance(value, str) else json.dumps(value))
        return path

    def plan(self, *more):
        return ctl("plan", *self.arguments, *more)

    def domain(self, device):
        node = device.rsplit(":", 1)[0]
        return next(n.get("domain", node) for n in self.topology["nodes"] if n["name"] == node)


def example():
    """config/samples' matrix: two row shards to four column shards, on two nodes."""
    source = layout("trainer", 2, [mesh("m", [2], [0, 1])], [tensor("w", [8, 8], ["Shard(0)"], dtype="bfloat16")])
    rollout = layout("rollout", 4, [mesh("m", [4], [0, 1, 2, 3])],
                     [tensor("w", [8, 8], ["Shard(1)"], dtype="bfloat16")])
    topology = {"nodes": [{"name": "n0", "devices": 8}, {"name": "n1", "devices": 8, "domain": "rack1"}],
                "source": ["n0:0", "n0:1"], "destination": ["n1:0", "n1:1", "n1:2", "n1:3"],
                "network_gbytes_per_s": 50, "domain_gbytes_per_s": 400}
    return Files(source, [rollout], topology)


# --- simulating a plan ------------------------------------------------------------------------------------


class Simulation:
    """Runs a plan's transfers; the test case's assertions judge them."""

    def __init__(self, case, files, plan):
        self.case, self.files, self.plan = case, files, plan
        self.by_id = {t["id"]: t for t in plan["transfers"]}
        self.landed = {}  # (layout, rank, tensor, at): how often
        self.at_device = {}  # (device, tensor, at): ids of the transfers that brought it
        self.entered = {}  # (domain, tensor, at): how often over the network
        self.source = {t["name"]: t for t in files.source["tensors"]}

    def place(self, side, rank):
        return self.files.topology[side][rank]

    def check_sender(self, t, at):
        name, sender = t["tensor"], t["from"]
        if sender["side"] == "source":
            self.case.assertTrue(holds(self.files.source, self.source[name], sender["rank"], at), t)
            self.case.assertEqual(t["after"], [])
            self.case.assertEqual(self.place("source", sender["rank"]), sender["device"])
            return
        brought = self.at_device.get((sender["device"], name, at), set())
        self.case.assertTrue(brought & set(t["after"]), f"{t} sends {at}, which none of 'after' brought")

    def check_tier(self, t):
        a, b = t["from"]["device"], t["to"]["device"]
        tier = "device" if a == b else "domain" if self.files.domain(a) == self.files.domain(b) else "network"
        self.case.assertEqual(t["tier"], tier)

    def run_one(self, t):
        self.check_tier(t)
        if t["from"]["side"] == "staging":
            self.case.assertNotIn("rank", t["from"])
        size = 1
        for n in t["size"]:
            size *= n
        self.case.assertIn(t["bytes"], (4 * size, 2 * size))
        for delta in itertools.product(*(range(n) for n in t["size"])):
            at = tuple(o + x for o, x in zip(t["offset"], delta))
            self.check_sender(t, at)
            self.at_device.setdefault((t["to"]["device"], t["tensor"], at), set()).add(t["id"])
            if "rank" in t["to"]:
                key = (t["to"]["layout"], t["to"]["rank"], t["tensor"], at)
                self.landed[key] = self.landed.get(key, 0) + 1
            if t["tier"] == "network":
                key = (self.files.domain(t["to"]["device"]), t["tensor"], at)
                self.entered[key] = self.entered.get(key, 0) + 1

    def run(self):
        waiting, done = list(self.plan["transfers"]), set()
        while waiting:
            ready = [t for t in waiting if all(a in done for a in t["after"])]
            self.case.assertTrue(ready, "transfers wait for each other in a circle")
            for t in ready:
                self.run_one(t)
            done |= {t["id"] for t in ready}
            waiting = [t for t in waiting if t["id"] not in done]

    def check(self, once):
        needed, minimum = {}, {}
        for d in self.files.destinations:
            places = self.files.topology["destination"]
            places = places[d["name"]] if isinstance(places, dict) else places
            for t, rank in itertools.product(d["tensors"], range(d["ranks"])):
                for at in elements(t):
                    if not holds(d, t, rank, at):
                        continue
                    needed[d["name"], rank, t["name"], at] = 1
                    domain = self.files.domain(places[rank])
                    if not any(holds(self.files.source, self.source[t["name"]], s, at) and
                               self.files.domain(device) == domain
                               for s, device in enumerate(self.files.topology["source"])):
                        minimum[domain, t["name"], at] = 1
        self.case.assertEqual(self.landed, needed)
        if once:
            self.case.assertEqual(self.entered, minimum)
        s = self.plan["summary"]
        self.case.assertEqual(s["network_bytes_minimum"], 4 * len(minimum))
        self.case.assertEqual(s["destination_bytes"], 4 * len(needed))
        for tier in ("network", "domain", "device"):
            self.case.assertEqual(s[tier + "_bytes"],
                                  sum(t["bytes"] for t in self.plan["transfers"] if t["tier"] == tier))


def random_layout(rng, name, ranks, shapes):
    meshes = []
    for i in range(2):
        shape = rng.choice([[ranks], [1, ranks], [2, ranks // 2], [ranks // 2, 2]] if ranks >= 2 else [[1]])
        shape = [max(1, n) for n in shape]
        count = 1
        for n in shape:
            count *= n
        meshes.append(mesh(f"m{i}", shape, rng.sample(range(ranks), count)))
    tensors = []
    for i, shape in enumerate(shapes):
        m = rng.choice(meshes)
        placements = [rng.choice(["Replicate"] + [f"Shard({d})" for d in range(len(shape))]) for _ in m["shape"]]
        t = tensor(f"t{i}", shape, placements, m["name"])
        if len(placements) == 2 and rng.random() < 0.4:
            t["shard_order"] = [1, 0]
        tensors.append(t)
    return layout(name, ranks, meshes, tensors)


def random_files(rng):
    nodes = [{"name": f"n{i}", "devices": rng.randint(1, 3)} for i in range(rng.randint(1, 5))]
    for n in nodes:
        if rng.random() < 0.3:
            n["domain"] = "shared"
    devices = [f"{n['name']}:{d}" for n in nodes for d in range(n["devices"])]
    shapes = [[rng.randint(0, 7) for _ in range(rng.randint(0, 3))] for _ in range(3)]
    layouts = [random_layout(rng, name, rng.randint(1, len(devices)), shapes) for name in ("s", "d", "e")]
    places = {l["name"]: rng.sample(devices, l["ranks"]) for l in layouts}
    several = rng.random() < 0.4
    topology = {"nodes": nodes, "source": places["s"],
                "destination": {k: places[k] for k in "de"} if several else places["d"]}
    return Files(layouts[0], layouts[1:] if several else layouts[1:2], topology)


class Plan(unittest.TestCase):
    def test_the_pinned_example(self):
        r = example().plan("--json")
        self.assertEqual(r.returncode, 0, r.stderr)
        plan = json.loads(r.stdout)
        s = plan["summary"]
        self.assertEqual({k: s[k] for k in ("tensors", "logical_bytes", "destination_bytes", "network_bytes",
                                            "network_bytes_minimum", "domain_bytes", "device_bytes")},
                         {"tensors": 1, "logical_bytes": 128, "destination_bytes": 128, "network_bytes": 128,
                          "network_bytes_minimum": 128, "domain_bytes": 0, "device_bytes": 0})
        self.assertEqual(s["gather_broadcast"], {"gather_bytes": 64, "broadcast_bytes": 512, "network_bytes": 128})
        self.assertEqual(s["bottleneck"], {"device": "n0:0", "direction": "egress", "bytes": 64, "lower_bound": 64})
        self.assertEqual(plan["transfers"][0],
                         {"id": 0, "tensor": "w", "offset": [0, 0], "size": [4, 2], "bytes": 16, "tier": "network",
                          "from": {"device": "n0:0", "rank": 0, "side": "source"},
                          "to": {"device": "n1:0", "rank": 0, "layout": "rollout"}, "after": []})
        self.assertEqual(len(plan["transfers"]), 8)
        self.assertRegex(s["plan_digest"], "^[0-9a-f]{32}$")

    def test_random_plans_simulated_from_their_json(self):
        for seed in range(40):
            rng = random.Random(seed)
            files = random_files(rng)
            strategy = rng.choice(["reshard", "reshard", "direct", "gather-broadcast"])
            more = rng.choice([[], ["--no-relay"], ["--no-staging-ingest"], ["--ring-slots", "1"]])
            with self.subTest(seed=seed, strategy=strategy):
                r = files.plan("--json", "--strategy", strategy, "--least-piece-bytes", 16, "--chunk-bytes", 64, *more)
                self.assertEqual(r.returncode, 0, r.stderr)
                simulation = Simulation(self, files, json.loads(r.stdout))
                simulation.run()
                simulation.check(once=strategy == "reshard")

    def test_summary_alone_has_no_transfers_and_the_same_digest(self):
        whole, summary = example().plan("--json"), example().plan("--json", "--summary")
        self.assertNotIn("transfers", json.loads(summary.stdout))
        self.assertEqual(json.loads(summary.stdout)["summary"]["plan_digest"],
                         json.loads(whole.stdout)["summary"]["plan_digest"])

    def test_the_table_names_what_a_person_looks_for(self):
        r = example().plan()
        self.assertEqual(r.returncode, 0, r.stderr)
        for words in ("unique bytes", "network", "1.000 x the minimum", "gather-broadcast", "busiest device n0:0",
                      "lower bound", "predicted time"):
            self.assertIn(words, r.stdout)

    def test_simulate_tells_a_time_line_that_adds_up(self):
        """Two sources send 64 B each at 50 GB/s; two engine devices take 32 B each of 128."""
        r = example().plan("--simulate", "--json")
        self.assertEqual(r.returncode, 0, r.stderr)
        out = json.loads(r.stdout)
        s, summary = out["simulation"], out["summary"]
        self.assertNotIn("transfers", out)
        network = s["tiers"][0]
        self.assertEqual([t["tier"] for t in s["tiers"]], ["network", "domain", "device"])
        self.assertEqual([t["bytes"] for t in s["tiers"]],
                         [summary["network_bytes"], summary["domain_bytes"], summary["device_bytes"]])
        self.assertEqual((network["first_ms"], network["last_ms"]), (0, s["makespan_ms"]))
        self.assertAlmostEqual(s["lower_bound_ms"], 64 / 50e9 * 1e3)
        self.assertGreaterEqual(s["makespan_ms"], s["lower_bound_ms"])
        self.assertEqual(summary["predicted_ms"], s["makespan_ms"])
        self.assertEqual(sum(p["bytes"] for p in s["busiest"] if p["direction"] == "egress"), 128)
        # What the links were busy, over the columns and in all, is what the bytes take at both ends.
        for busy in (network["busy_share"] * s["makespan_ms"],
                     sum(b * (min((i + 1) * s["bucket_ms"], s["makespan_ms"]) - i * s["bucket_ms"])
                         for i, b in enumerate(network["busy"]))):
            self.assertAlmostEqual(busy * network["links"] / (2 * 128 / 50e9 * 1e3), 1, delta=0.02)
        text = example().plan("--simulate").stdout
        for words in ("makespan", "the lower bound", "critical device", "busiest links", "planned in", "simulated in"):
            self.assertIn(words, text)

    def test_simulate_pays_latency_per_message_and_needs_rates(self):
        at = lambda *more: json.loads(example().plan("--simulate", "--json", *more).stdout)["simulation"]
        one, many = at("--chunk-latency-us", "10"), at("--chunk-latency-us", "10", "--peers", "8")
        self.assertGreaterEqual(one["makespan_ms"], 0.04)  # a source has four messages, one at a time
        self.assertLess(many["makespan_ms"], 0.02)
        files = example()
        del files.topology["network_gbytes_per_s"]
        files.write("t.json", files.topology)
        r = files.plan("--simulate")
        self.assertEqual((r.returncode, r.stdout), (2, ""))
        self.assertIn("network_gbytes_per_s", r.stderr)
        for bad in (["--peers", "2"], ["--simulate", "--peers", "0"], ["--simulate", "--chunk-latency-us", "-1"],
                    ["--simulate", "--chunk-latency-us", "nan"], ["--simulate", "--explain", "w"]):
            self.assertEqual(example().plan(*bad).returncode, 2, bad)

    def test_explain_tells_hops_and_reasons(self):
        r = example().plan("--explain", "w", "2")
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertIn("rank 2 of 'rollout' on n1:2 (domain 'rack1') holds 32 B of 'w'", r.stdout)
        self.assertIn("[4:8, 4:6] (16 B) from source rank 1 on n0:1", r.stdout)
        self.assertIn("no device of domain 'rack1' holds it", r.stdout)
        [rank] = json.loads(example().plan("--explain", "w", "2", "--json").stdout)["ranks"]
        self.assertEqual((rank["layout"], rank["rank"], rank["device"], rank["domain"], rank["bytes"]),
                         ("rollout", 2, "n1:2", "rack1", 32))
        self.assertEqual([(h["from"]["rank"], h["tier"], h["bytes"], h["boxes"]) for h in rank["hops"]],
                         [(s, "network", 16, [{"offset": [4 * s, 4], "size": [4, 2]}]) for s in (0, 1)])
        self.assertEqual(example().plan("--explain", "v").returncode, 2)
        r = example().plan("--explain", "w", "9")
        n = max(d["ranks"] for d in example().destinations)
        self.assertEqual((r.returncode, r.stderr),
                         (2, f"reshardctl plan: no destination of 'w' has a rank 9: there are 0 … {n - 1}\n"))

    def test_transfers_of_one_route_are_explained_as_one_hop(self):
        """Staging on n1:1 takes in half of what the one taker in rack1 needs; small pieces make many transfers."""
        source = layout("trainer", 1, [mesh("m", [1], [0])], [tensor("w", [64, 64], ["Replicate"])])
        rollout = layout("rollout", 2, [mesh("m", [2], [0, 1])], [tensor("w", [64, 64], ["Replicate"])])
        f = Files(source, [rollout], {"nodes": [{"name": "n0", "devices": 1}, {"name": "n1", "devices": 2}],
                                      "source": ["n0:0"], "destination": ["n1:0", "n1:1"]})
        small = "--chunk-bytes", "1024", "--least-piece-bytes", "1"
        transfers = [t for t in json.loads(f.plan(*small, "--json").stdout)["transfers"] if t["to"]["rank"] == 0]
        ends = lambda t: json.dumps([t["from"], t["to"]["device"], t["tier"]], sort_keys=True)
        [rank] = json.loads(f.plan(*small, "--explain", "w", "0", "--json").stdout)["ranks"]
        self.assertGreaterEqual(len(transfers), 16)
        self.assertEqual(len(rank["hops"]), len({ends(t) for t in transfers}))
        for hop in rank["hops"]:
            of = [t for t in transfers if t["from"]["device"] == hop["from"]["device"]]
            self.assertEqual((hop["transfers"], hop["bytes"]), (len(of), sum(t["bytes"] for t in of)))
            inside = lambda b: set(itertools.product(*(range(o, o + s) for o, s in zip(b["offset"], b["size"]))))
            self.assertEqual(set().union(*map(inside, hop["boxes"])), set().union(*map(inside, of)))
            self.assertEqual(sum(math.prod(b["size"]) for b in hop["boxes"]) * 4, hop["bytes"])
            self.assertLess(len(hop["boxes"]), len(of))
            self.assertEqual(bool(hop["after"]), hop["from"]["side"] != "source")
        text = f.plan(*small, "--explain", "w", "0").stdout
        self.assertIn(" transfers) from source rank 0 on n0:0", text)
        self.assertLess(text.count("\n"), 8)

    def test_a_rule_that_matches_nothing_is_told(self):
        r = example().plan("--rule", "xyz*=direct", "--rule", "w=direct")
        self.assertEqual((r.returncode, r.stderr),
                         (0, "reshardctl plan: warning: --rule 'xyz*=direct' matches no tensor\n"))

    def test_a_rule_picks_the_strategy_of_the_tensors_that_match(self):
        f = example()
        self.assertEqual(f.plan("--rule", "w*=gather-broadcast", "--json").stdout.count("staging"),
                         f.plan("--strategy", "gather-broadcast", "--json").stdout.count("staging"))
        self.assertEqual(f.plan("--rule", "x*=gather-broadcast", "--json").stdout.count("staging"), 0)

    def test_sizes_are_taken_as_in_the_config(self):
        f = example()
        transfers = {}
        for chunk, piece in ((16, 1), ("1KiB", "1 KiB"), ("1 KiB", "1KiB"), (1024, 1024)):
            r = f.plan("--strategy", "direct", "--chunk-bytes", chunk, "--least-piece-bytes", piece, "--json")
            self.assertEqual(r.returncode, 0, r.stderr)
            transfers[chunk] = {k: v for k, v in json.loads(r.stdout).items() if k != "summary"}
        self.assertEqual(transfers["1KiB"], transfers[1024])
        self.assertEqual(transfers["1 KiB"], transfers[1024])
        self.assertNotEqual(transfers[16], transfers[1024])
        self.assertIn("use bytes, or KiB, MiB", f.plan("--chunk-bytes", "8MB").stderr)

    def test_a_second_layout_to_check_is_told_of_source(self):
        r = ctl("layout", "check", "a.json", "b.json")
        self.assertEqual((r.returncode, r.stderr), (2, "reshardctl layout: one FILE is needed, there are 2: a destination is "
                                                       "compared with its source by layout check DESTINATION --source SOURCE (reshardctl layout --help tells more)\n"))
        self.assertIn("one FILE is needed (", ctl("layout", "check").stderr)

    def test_bad_usage_and_input_exit_2_with_the_cause(self):
        f = example()
        for arguments, says in ((["--strategy", "fast"], "'fast'"), (["--rule", "w"], "GLOB=STRATEGY"),
                                (["--ring-slots", "0"], "--ring-slots"), (["--chunk-bytes", "x"], "--chunk-bytes"),
                                (["extra"], "'extra'"), (["--nonsense"], "no option '--nonsense'"),
                                (["--source"], "'--source' needs a value")):
            r = f.plan(*arguments)
            self.assertEqual((r.returncode, r.stdout), (2, ""), arguments)
            self.assertIn(says, r.stderr)
            self.assertRegex(r.stderr, r"^reshardctl plan: [^\n]*\n$")
            r = f.plan("--json", *arguments)
            self.assertEqual(r.returncode, 2, arguments)
            self.assertIn(says, json.loads(r.stdout)["error"])
        self.assertEqual(ctl("plan").returncode, 2)
        self.assertEqual(ctl("plan", "--source", "/nonexistent", *f.arguments[2:]).returncode, 2)

    def test_layouts_that_do_not_fit_are_refused_by_name(self):
        f = example()
        f.destinations[0]["tensors"].append(tensor("v", [8], ["Replicate"]))
        r = Files(f.source, f.destinations, f.topology).plan()
        self.assertEqual(r.returncode, 2)
        self.assertIn("1 missing at the source: 'v'", r.stderr)
        f = example()
        f.topology["destination"] = f.topology["destination"][:3]
        r = Files(f.source, f.destinations, f.topology).plan()
        self.assertEqual(r.returncode, 2)
        self.assertIn("rank 3", r.stderr)

    def test_output_that_can_not_be_written_is_a_failure(self):
        f = example()
        with open("/dev/full", "w") as full:
            r = subprocess.run([CTL, "plan", *map(str, f.arguments), "--json"], stdout=full,
                               stderr=subprocess.PIPE, text=True, timeout=60)
        self.assertEqual(r.returncode, 1)
        self.assertIn("can't write", r.stderr)

    def test_zoo_presets_enter_each_domain_once_and_balance(self):
        for preset, within in (("four-to-8x4", 1.05), ("straddling", 1.05), ("llama-70b-rollout-eval", 1.05)):
            with self.subTest(preset=preset), tempfile.TemporaryDirectory() as out:
                line = subprocess.run([ROOT / "scripts" / "zoo", "--preset", preset, "--out", out],
                                      capture_output=True, text=True, check=True).stdout
                r = ctl(*line.split()[1:], "--json")
                self.assertEqual(r.returncode, 0, r.stderr)
                plan = json.loads(r.stdout)
                s, landed = plan["summary"], {}
                for t in plan["transfers"]:
                    if "rank" in t["to"]:
                        key = t["to"]["layout"], t["to"]["rank"]
                        landed[key] = landed.get(key, 0) + t["bytes"]
                for path in sorted(pathlib.Path(out).glob("destination*.json")):
                    shown = json.loads(ctl("layout", "show", path, "--json").stdout)
                    for rank, held in enumerate(shown["totals"]["rank_bytes"]):
                        self.assertEqual(landed[shown["name"], rank], held)
                self.assertEqual(s["network_bytes"], s["network_bytes_minimum"])
                self.assertLessEqual(s["bottleneck"]["bytes"], within * s["bottleneck"]["lower_bound"])


class Layout(unittest.TestCase):
    def check(self, value, *more):
        text = value if isinstance(value, str) else json.dumps(value)
        return ctl("layout", "check", "-", *more, text=text)

    def test_a_good_layout_is_ok(self):
        r = self.check(example().source)
        self.assertEqual((r.returncode, r.stderr), (0, ""))
        self.assertRegex(r.stdout, r"^ok: layout 'trainer', 1 tensors?, 128 B, 2 ranks, 1 instance, digest [0-9a-f]{32}\n$")

    def test_the_samples_are_right(self):
        samples = ROOT / "config" / "samples"
        for name in ("matrix-source", "matrix-destination", "everything"):
            r = ctl("layout", "check", samples / f"{name}.json")
            self.assertEqual(r.returncode, 0, r.stderr)
        r = ctl("plan", "--source", samples / "matrix-source.json", "--destination", samples / "matrix-destination.json",
                "--topology", samples / "matrix-topology.json", "--json")
        self.assertEqual(json.loads(r.stdout)["summary"]["network_bytes"], 128)

    def test_refusals_name_tensor_cause_and_exit_2(self):
        def with_tensor(t):
            return layout("l", 4, [mesh("m", [2, 2], [0, 1, 2, 3])], [t])
        for value, says in (
                (with_tensor(tensor("w", [4, 4], ["Partial", "Replicate"])), "tensor 'w': placement Partial"),
                (with_tensor(tensor("w", [4, 4], ["Shard(2)", "Replicate"])), "the tensor has 2 dims"),
                (with_tensor(tensor("w", [4, 4], ["Shard(0)"])), "1 placements for the 2 dims"),
                (with_tensor(tensor("w", [2 ** 40, 2 ** 40], ["Shard(0)", "Shard(1)"])), "2^63"),
                (layout("l", 4, [mesh("m", [2, 2], [0, 1, 1, 3])], []), "rank 1 stands in two places"),
                ("{\"name\": \"l\",\n \"ranks\": 1,", "line 2"),
                ("", "line 1")):
            r = self.check(value)
            self.assertEqual((r.returncode, r.stdout), (2, ""), value)
            self.assertIn(says, r.stderr)

    def test_a_gap_is_refused_unless_nobody_needs_it(self):
        gap = layout("l", 2, [], [{"name": "w", "shape": [8], "dtype": "int8", "regions": [
            {"rank": 0, "offset": [0], "size": [3]}, {"rank": 1, "offset": [5], "size": [3]}]}])
        r = self.check(gap)
        self.assertEqual(r.returncode, 2)
        self.assertIn("tensor 'w': no rank holds [3:5]", r.stderr)
        self.assertEqual(self.check(gap, "--allow-gaps").returncode, 0)
        whole = layout("s", 1, [mesh("m", [1], [0])], [tensor("w", [8], ["Replicate"], dtype="int8")])
        with tempfile.TemporaryDirectory() as folder:
            source = pathlib.Path(folder) / "s.json"
            source.write_text(json.dumps(gap))
            self.assertIn("[3:5]", self.check(whole, "--source", source).stderr)
            source.write_text(json.dumps(whole))
            r = self.check(gap, "--source", source)
            self.assertEqual(r.returncode, 0)
            digest = json.loads(ctl("layout", "check", source, "--json").stdout)["digest"]
            self.assertEqual(r.stdout.splitlines()[1:], [f"    can be filled from source layout 's', digest {digest}"])
            self.assertEqual(json.loads(self.check(gap, "--source", source, "--json").stdout)["source"],
                             {"name": "s", "digest": digest})

    def test_json_answers_say_the_same(self):
        good = json.loads(self.check(example().source, "--json").stdout)
        self.assertEqual((good["ok"], good["tensors"], good["bytes"]), (True, 1, 128))
        bad = self.check("{}", "--json", "--bogus")
        self.assertEqual((bad.returncode, json.loads(bad.stdout)["error"]), (2, "there is no option '--bogus'"))
        self.assertTrue(bad.stderr.startswith("reshardctl layout: "), bad.stderr)
        self.assertFalse(json.loads(ctl("layout", "show", "/nonexistent", "--json").stdout)["ok"])
        bad = self.check("{}", "--json")
        self.assertEqual(bad.returncode, 2)
        self.assertFalse(json.loads(bad.stdout)["ok"])
        self.assertIn("'name' is missing", json.loads(bad.stdout)["error"])

    def test_an_instance_without_the_whole_model_is_warned_of(self):
        def two(instances, placements, **more):
            return layout("l", 4, [mesh("m", [2, 2], [0, 1, 2, 3])],
                          [tensor("b", [8], ["Replicate", "Replicate"]), tensor("w", [8, 8], placements)],
                          instances=instances, **more)
        for placements, instances, lacks in (
                (["Replicate", "Shard(0)"], [[0, 1], [2, 3]], None),
                (["Replicate", "Replicate"], [[0, 2], [1, 3]], None),
                (["Replicate", "Shard(0)"], [[0, 2], [1, 3]], "instance 0 (ranks 0, 2) holds 32 of the 64 elements of tensor 'w'; 1 of 2"),
                (["Shard(0)", "Shard(1)"], [[0, 1, 2], [3]], "instance 0 (ranks 0, 1, 2) holds 48 of the 64")):
            r = self.check(two(instances, placements))
            warnings = json.loads(self.check(two(instances, placements), "--json").stdout)["warnings"]
            self.assertEqual((r.returncode, r.stderr, len(warnings)), (0, "", 0 if lacks is None else 1), lacks)
            self.assertEqual(r.stdout.count("\n"), 1 if lacks is None else 2)
            if lacks is not None:
                self.assertIn("\nwarning: " + lacks, r.stdout)
                self.assertIn(lacks, warnings[0])
        l = two([[0, 2], [1, 3]], ["Replicate", "Shard(0)"])
        l["tensors"] += [tensor(f"w{i}", [8, 8], ["Replicate", "Shard(0)"]) for i in range(3)] + [
            tensor("x", [8, 8], ["Shard(0)", "Replicate"]), tensor("y", [8, 8], ["Replicate", "Shard(0)"])]
        self.assertIn("of tensor 'w'; 5 of 7 tensors", self.check(l).stdout)
        regions = layout("l", 2, [], [{"name": "w", "shape": [8], "dtype": "int8", "regions": [
            {"rank": 0, "offset": [0], "size": [8]}, {"rank": 1, "offset": [0], "size": [8]}]},
            {"name": "x", "shape": [8], "dtype": "int8", "regions": [{"rank": 0, "offset": [0], "size": [8]}]}],
            instances=[[0], [1]])
        self.assertIn("instance 1 (ranks 1) holds 0 of the 8 elements of tensor 'x'; 1 of 2 tensors", self.check(regions).stdout)

    def show(self, value, *more):
        return ctl("layout", "show", "-", *more, text=json.dumps(value))

    def test_show_groups_names_that_differ_in_numbers_only(self):
        tensors = [tensor(f"layers.{i}.experts.{e}.w", [4, 6], ["Shard(1)"]) for i in range(3) for e in range(5)]
        r = self.show(layout("l", 2, [mesh("m", [2], [0, 1])], tensors + [tensor("norm", [5], ["Replicate"])]))
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertRegex(r.stdout, r"15  layers\.\*\.experts\.\*\.w  +\[4, 6\]  +float32 .* 2 +x1 +48 B +1\.44 kB")
        self.assertIn("16 tensors, 1.46 kB unique, 1.48 kB held", r.stdout)

    def test_show_json_counts_what_each_rank_holds(self):
        rng = random.Random(7)
        for _ in range(10):
            l = random_layout(rng, "l", 4, [[5, 3], [7], [2, 3, 4]])
            shown = json.loads(self.show(l, "--json").stdout)
            expected = [sum(4 for t in l["tensors"] for at in elements(t) if holds(l, t, rank, at))
                        for rank in range(4)]
            self.assertEqual(shown["totals"]["rank_bytes"], expected)
            self.assertEqual(shown["totals"]["held_bytes"], sum(expected))
            one = json.loads(self.show(l, "--json", "--rank", "2").stdout)
            self.assertEqual(sum(s["bytes"] for t in one["tensors"] for s in t["shards"]), expected[2])

    def test_help_is_an_answer_not_a_fault(self):
        for arguments in (["layout", "--help"], ["layout", "check", "--help"], ["plan", "--help"],
                          ["plan", "--json", "--help"]):
            r = ctl(*arguments)
            self.assertEqual((r.returncode, r.stderr), (0, ""), arguments)
            self.assertIn("usage: reshardctl", r.stdout)

    def test_show_names_what_is_not_there(self):
        self.assertEqual(self.show(example().source, "--tensor", "x").returncode, 2)
        self.assertEqual(self.show(example().source, "--rank", "2").returncode, 2)
        self.assertEqual(self.show(example().source, "--rank", "x").returncode, 2)
        self.assertIn("[4:8, 0:8]", self.show(example().source, "--tensor", "w").stdout)


def main():
    result = unittest.main(exit=False).result
    failed = len({t.id().split(" ")[0] for t, _ in result.failures + result.errors})
    print(f"{result.testsRun - failed} passed, {failed} failed")
    return 0 if result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
