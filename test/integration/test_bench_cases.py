#!/usr/bin/python3
"""What the benchmark over several nodes takes for the least that must cross the links, and what its peers are told to move,
against the planner and against a count of elements."""
import json
import tempfile
import unittest
from unittest import mock

from rig import *

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "test" / "bench"), str(ROOT / "test" / "bench" / "peers")]
import cases  # noqa: E402
import peers  # noqa: E402

ALL = [cases.tp4_to_tp2dp2(1), cases.spread(1), cases.one_to_four(1), cases.mixture(8), cases.small(300),
       cases.growth(50, 2, 2), cases.growth(50, 16, 16)]


def planned(case, strategy, folder):
    """The summary of `reshardctl plan`, each node a domain."""
    used, places = {}, []
    for n in case.source_nodes + case.destination_nodes:
        places.append(f"n{n}:{used.setdefault(n, 0)}")
        used[n] += 1
    n_source = len(case.source_nodes)
    topology = {"nodes": [{"name": f"n{n}", "devices": used[n]} for n in sorted(used)], "source": places[:n_source],
                "destination": places[n_source:]}
    files = {}
    for name, text in (("source", case.source.json()), ("destination", case.destination.json()), ("topology", json.dumps(topology))):
        files[name] = pathlib.Path(folder, f"{name}.json")
        files[name].write_text(text)
    r = subprocess.run([BUILD / "reshardctl", "plan", *(f"--{k}={v}" for k, v in files.items()), f"--strategy={strategy}", "--json",
                        "--summary"], capture_output=True, text=True, timeout=WAIT_S)
    assert r.returncode == 0, r.stderr
    out = json.loads(r.stdout)
    return out.get("summary", out)


class Cases(unittest.TestCase):
    def test_what_crosses_the_links_is_what_the_planner_says(self):
        for case in ALL:
            with self.subTest(case.name), tempfile.TemporaryDirectory() as folder:
                needed = sum(case.needed_bytes().values())
                reshard = planned(case, "reshard", folder)
                self.assertEqual(reshard["network_bytes_minimum"], needed)
                self.assertEqual(reshard["network_bytes"], needed)
                self.assertEqual(reshard["logical_bytes"], case.unique_bytes())
                moved = sum(box[2] * box[3] for _, _, _, box in case.moves()) * 2
                self.assertEqual(planned(case, "direct", folder)["network_bytes"], moved)

    def test_plain_connections_carry_as_much(self):
        for case in ALL:
            into = {}
            for _, to, n in case.flows():
                into[to] = into.get(to, 0) + n
            for node, n in case.needed_bytes().items():
                self.assertLess(n - into[node], 8, case.name)  # what does not divide by the senders

    def test_moves_and_gathers_cover_each_element_once(self):
        for case in ALL:
            count = {}
            for s in (s for shards in case.source_first().values() for s in shards):
                count[s.tensor] = count.get(s.tensor, 0) + s.rows * s.columns
            self.assertEqual(count, {t: s[0] * s[1] for t, (_, s, _) in enumerate(case.source.tensors)}, case.name)
            landed = {}
            for _, to, t, (_, _, rows, columns) in case.moves():
                landed[to, t] = landed.get((to, t), 0) + rows * columns
            self.assertEqual(landed, {(s.rank, s.tensor): s.rows * s.columns for s in case.destination.shards()}, case.name)


class Peers(unittest.TestCase):
    def test_one_that_is_not_there_is_told_with_its_remedy_and_no_error(self):
        said = []
        with mock.patch.object(peers, "installed", lambda package: False), mock.patch.object(os, "getuid", lambda: 1000):
            peers.setup(said.append)
            for peer in peers.PACKAGES:
                self.assertIn("scripts/bench --setup", peers.missing(peer))
        self.assertEqual(len(said), len(peers.PACKAGES))
        for text, packages in zip(said, peers.PACKAGES.values()):
            self.assertIn("apt-get install " + " ".join(packages), text)

    def test_one_that_cant_be_installed_is_told_and_no_error(self):
        said, asked = [], []

        def apt(*args):
            asked.append(args)
            return subprocess.CompletedProcess(args, 0 if "--assume-no" in args else 100, "Need to get 7 kB of archives.\n",
                                               "E: no network")

        with mock.patch.object(peers, "installed", lambda package: False), mock.patch.object(os, "getuid", lambda: 0), \
                mock.patch.object(peers, "apt", apt):
            peers.setup(said.append)
        self.assertIn("Need to get 7 kB", said[0])
        self.assertIn("E: no network", said[1])
        self.assertEqual(len(asked), 2 * len(peers.PACKAGES))

    def test_a_wrong_or_a_missing_element_is_a_failure(self):
        case = ALL[0]
        n = sum(s.rows * s.columns for s in case.destination.shards())
        line = '{{"mode": "point-to-point", "seconds": 1.5, "elements": {}, "wrong": {}}}\n'
        self.assertEqual(peers.seconds(line.format(n, 0), case, ["point-to-point"]), {"point-to-point": 1.5})
        for text, modes in ((line.format(n, 1), ["point-to-point"]), (line.format(n - 1, 0), ["point-to-point"]),
                            (line.format(n, 0), ["point-to-point", "gather-broadcast"]), ("", ["point-to-point"])):
            with self.assertRaises(peers.Failed):
                peers.seconds(text, case, modes)


if __name__ == "__main__":
    main()
