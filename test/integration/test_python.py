#!/usr/bin/python3
"""The Python client against the real daemon, and against reshard.h as a C compiler reads it."""
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import types
import unittest
import unittest.mock

import rig
from rig import SLOW, WAIT_S, Daemon

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEADER = ROOT / "client" / "reshard.h"
os.environ["RESHARD_LIBRARY"] = str(rig.BUILD / "libreshard.so")
sys.path.insert(0, str(ROOT / "client" / "python"))
if SLOW != 1:
    print("a sanitizer's runtime wants to be loaded first\n0 passed, 0 failed, 1 skipped")
    sys.exit(0)
import reshard  # noqa: E402
from reshard import _native as native  # noqa: E402
try:
    import torch
    import reshard.torch
except ImportError:
    torch = None

SOURCE = {"name": "trainer", "ranks": 2, "meshes": [{"name": "tp", "shape": [2], "ranks": [0, 1]}], "tensors": [
    {"name": "q", "shape": [8, 6], "dtype": "float32", "mesh": "tp", "placements": ["Shard(0)"]},
    {"name": "k", "shape": [4, 6], "dtype": "float32", "mesh": "tp", "placements": ["Shard(0)"]}]}
DESTINATION = {"name": "rollout", "ranks": 2, "meshes": [{"name": "tp", "shape": [2], "ranks": [0, 1]}], "tensors": [
    {"name": "q", "shape": [8, 6], "dtype": "float32", "mesh": "tp", "placements": ["Shard(1)"]},
    {"name": "k", "shape": [4, 6], "dtype": "float32", "mesh": "tp", "placements": ["Replicate"]}]}


def layout(text):
    return reshard.Layout(json.dumps(text))


def number(tensor, row, column, version):
    """A float32 that no other element, tensor or version has."""
    return float(version * 10000 + (5000 if tensor == "k" else 0) + row * 100 + column)


def elements(worker, pieces):
    """(piece, row, column, offset in bytes) of each element of dense pieces."""
    for p in pieces:
        rows, columns = p.box.size
        for r in range(rows):
            for c in range(columns):
                yield p, p.box.offset[0] + r, p.box.offset[1] + c, p.offset + 4 * (r * columns + c)


def fill(worker, version):
    for p, row, column, at in elements(worker, worker.live):
        p.segment.data[at:at + 4].cast("f")[0] = number(p.tensor, row, column, version)


def wrong(worker, version, pieces=None):
    return [(p.tensor, row, column) for p, row, column, at in elements(worker, pieces or worker.live)
            if p.segment.data[at:at + 4].cast("f")[0] != number(p.tensor, row, column, version)]


class Engine(threading.Thread):
    """A destination's thread in serve(), and what its engine was told."""

    def __init__(self, worker, check=None):
        super().__init__(daemon=True)
        self.worker, self.check, self.told, self.failed = worker, check, [], None
        self.changed, self.stop = threading.Condition(), threading.Event()
        self.start()

    def run(self):
        try:
            self.worker.serve(lambda: self.tell("pause"), self.tell, self.check, self.stop)
        except BaseException as e:
            self.failed = e
            self.tell("failed")

    def tell(self, what):
        with self.changed:
            self.told.append(what)
            self.changed.notify_all()

    def wait(self, what):
        with self.changed:
            if not self.changed.wait_for(lambda: what in self.told or self.failed, WAIT_S):
                raise rig.Deadline(f"{what} never came: {self.told}")
            if self.failed:
                raise self.failed

    def end(self):
        self.stop.set()
        self.join()


class World:
    """A daemon, two trainers and two engines, each with a client of its own."""

    def __init__(self, case, receive="staged", check=None):
        self.case, self.clients = case, []
        self.daemon = case.enterContext(Daemon())
        case.addCleanup(self.close)
        self.sources = [self.client().attach("m", "source", layout(SOURCE), r, device=r, timeout=WAIT_S) for r in (0, 1)]
        self.destinations = [self.client().attach("m", "destination", layout(DESTINATION), r, device=4 + r, receive=receive,
                                                  timeout=WAIT_S) for r in (0, 1)]
        self.engines = [Engine(w, check) for w in self.destinations]

    def client(self):
        self.clients.append(reshard.Client(self.daemon.socket, timeout=WAIT_S))
        return self.clients[-1]

    def push(self, version, attempts=3, holds=None, **options):
        """All trainers at once; what each ended with. holds: the version whose weights they have, where it is another;
        options: of the submit."""
        ends = [None, None]

        def one(i):
            try:
                self.sources[i].push(version, submit=(options or True) if i == 0 else False, attempts=attempts, timeout=WAIT_S)
            except BaseException as e:
                ends[i] = e
        for w in self.sources:
            fill(w, holds or version)
        threads = [threading.Thread(target=one, args=(i,)) for i in (0, 1)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        return ends

    def close(self):
        if any(t is self.case for t, _ in self.case._outcome.result.failures + self.case._outcome.result.errors):
            print(f"--- what the engines were told: {[e.told for e in self.engines]}; the daemon's log:\n{self.daemon.tail(80)}",
                  file=sys.stderr)
        for e in self.engines:
            e.end()
        for c in self.clients:
            c.close()


class Refits(unittest.TestCase):
    def test_staged_engines_serve_each_version_after_one_pause(self):
        w = World(self)
        for version in (1, 2, 3):
            self.assertEqual(w.push(version), [None, None])
            for e in w.engines:
                e.wait(version)
                self.assertEqual(wrong(e.worker, version), [])
        for e in w.engines:
            self.assertEqual(e.told, ["pause", 1, "pause", 2, "pause", 3])
            self.assertEqual(e.worker.info().applied, 3)
        c = w.client().committed("m")
        self.assertEqual(c.version, 3)

    def test_in_place_engines_are_paused_before_a_byte_lands(self):
        w = World(self, "in_place")
        for version in (1, 2):
            self.assertEqual(w.push(version), [None, None])
            for e in w.engines:
                e.wait(version)
                self.assertEqual(wrong(e.worker, version), [])
        self.assertEqual([e.told for e in w.engines], [["pause", 1, "pause", 2]] * 2)

    def test_a_version_that_an_engine_refuses_is_aborted_with_its_reason_and_the_next_one_repairs(self):
        asked = []

        def check(version):
            asked.append(version)
            if version == 1:
                raise ValueError("row 3 looks odd")
        w = World(self, "in_place", check)
        for end in w.push(1, attempts=2, release_at="committed"):
            self.assertIsInstance(end, reshard.Aborted)
            self.assertIn("ValueError: row 3 looks odd", str(end))
        self.assertEqual([e.told for e in w.engines], [["pause"]] * 2)  # in place: paused until it is whole again
        self.assertGreaterEqual(asked.count(1), 2)                      # one retry
        self.assertEqual(w.push(2), [None, None])
        for e in w.engines:
            e.wait(2)
            self.assertEqual(e.told, ["pause", 2])
            self.assertEqual(wrong(e.worker, 2), [])

    def test_a_rank_that_is_late_for_a_retry_hears_that_it_was_the_last(self):
        # Receivers that hold the version feed the retry: it runs, and ends, without the publication of the one that is late.
        def check(version):
            raise ValueError("row 3 looks odd")
        w = World(self, "in_place", check)
        late, over, released = w.sources[1], threading.Event(), w.sources[1]._released

        def first_then_late(version, end):
            self.assertFalse(over.is_set(), "it took part in the retry")
            ended = released(version, end)
            self.assertTrue(over.wait(WAIT_S))
            return ended
        push = w.sources[0].push

        def push_and_say(*args, **options):
            try:
                push(*args, **options)
            finally:
                over.set()
        with unittest.mock.patch.object(late, "_released", first_then_late), unittest.mock.patch.object(w.sources[0], "push", push_and_say):
            for end in w.push(1, attempts=2, release_at="committed"):
                self.assertIsInstance(end, reshard.Aborted)
                self.assertIn("ValueError: row 3 looks odd", str(end))

    def test_a_push_of_the_committed_version_ends_and_with_other_weights_is_refused(self):
        w = World(self)
        self.assertEqual(w.push(1), [None, None])
        for e in w.engines:
            e.wait(1)
        w.clients[0].wait("m", 1, timeout=WAIT_S)
        self.assertEqual(w.push(1), [None, None])
        for rank, s in enumerate(w.sources):  # restarted
            s.detach()
            w.sources[rank] = w.client().attach("m", "source", layout(SOURCE), rank, device=rank, timeout=WAIT_S)
        self.assertEqual(w.push(1), [None, None])
        for end in w.push(1, holds=7):
            self.assertIsInstance(end, reshard.AlreadyExists)
            self.assertIn("version 1 is committed already, with other weights than are published", str(end))
        self.assertEqual(w.push(2), [None, None])
        for e in w.engines:
            e.wait(2)
            self.assertEqual(e.told, ["pause", 1, "pause", 2])

    def test_a_layout_that_is_none_is_said_so(self):
        w = World(self)
        with self.assertRaisesRegex(reshard.InvalidArgument, r"layout: a reshard\.Layout .*, not dict"):
            w.clients[0].attach("m", "source", {}, 0)

    def test_an_abort_from_before_the_publication_is_none_of_this_push(self):
        w = World(self)
        w.clients[0].submit("m", 1, timeout=WAIT_S)  # by somebody who does not wait for the trainers
        ctl = subprocess.run([rig.BUILD / "reshardctl", "abort", "m", "--socket", w.daemon.socket], capture_output=True, text=True)
        self.assertEqual(ctl.returncode, 0, ctl.stderr)
        self.assertEqual(w.push(1, attempts=1), [None, None])
        for e in w.engines:
            e.wait(1)
            self.assertEqual(wrong(e.worker, 1), [])

    def test_trainers_and_engines_go_on_after_the_daemon_was_killed(self):
        w = World(self)
        self.assertEqual(w.push(1), [None, None])
        for e in w.engines:
            e.wait(1)
        before = w.clients[0].incarnation
        w.daemon.kill()
        w.daemon.start()
        self.assertEqual(w.push(2), [None, None])
        for e in w.engines:
            e.wait(2)
            self.assertEqual(wrong(e.worker, 2), [])
            self.assertEqual(e.told, ["pause", 1, "pause", 2])  # none for what it had applied before
        self.assertNotEqual(w.clients[0].incarnation, before)
        self.assertEqual(w.clients[0].reconnects, 1)

    def test_a_kill_in_the_middle_of_a_push_ends_it_well(self):
        w = World(self)
        killed = threading.Event()

        def check(version):  # both receivers have it, none has accepted
            if version == 1 and not killed.is_set():
                killed.set()
                w.daemon.kill()
                w.daemon.start()
        for e in w.engines:
            e.end()
        w.engines = [Engine(d, check) for d in w.destinations]
        self.assertEqual(w.push(1, release_at="committed"), [None, None])
        for e in w.engines:
            e.wait(1)
            self.assertEqual(wrong(e.worker, 1), [])
        self.assertTrue(killed.is_set())

    def test_an_evicted_worker_is_told_so(self):
        w = World(self)
        ctl = subprocess.run([rig.BUILD / "reshardctl", "evict", f"{w.destinations[0].info().worker:016x}", "--socket",
                              w.daemon.socket], capture_output=True, text=True)
        self.assertEqual(ctl.returncode, 0, ctl.stderr)
        with self.assertRaisesRegex(reshard.FailedPrecondition, "evicted"):
            w.engines[0].wait("never")


class Versions(unittest.TestCase):
    def test_wait_tells_progress_and_what_it_raises_ends_it(self):
        w = World(self)
        for s in w.sources:
            fill(s, 1)
            s.publish(1, timeout=WAIT_S)
        client, seen = w.clients[0], []
        self.assertGreater(client.submit("m", 1, verify="sampled", strategy="direct", rules={"q*": "gather-broadcast"},
                                         policy={"rollout": 1}, release_at="committed", timeout=WAIT_S), 0)
        state = client.wait("m", 1, "committed", seen.append, timeout=WAIT_S)
        self.assertEqual((state.phase, state.version), ("committed", 1))
        self.assertEqual(state.bytes.landed, 4 * (48 + 2 * 24))  # q once over the ranks, k on each
        self.assertEqual(seen[-1].phase, "committed")

        class Enough(Exception):
            pass

        def stop(_):
            raise Enough
        with self.assertRaises(Enough):
            client.wait("m", 1, "final", stop, timeout=WAIT_S)
        record = json.loads(subprocess.run([rig.BUILD / "reshardctl", "versions", "m", "--json", "--socket", w.daemon.socket],
                                           capture_output=True, text=True, check=True).stdout)["versions"][0]
        self.assertEqual(record["strategy"], "direct")

    def test_newly_committed_versions_come_once_each(self):
        w = World(self)
        client, got = w.client(), []
        with self.assertRaises(reshard.NotFound):
            client.committed("m")
        for version in (1, 4):
            self.assertEqual(w.push(version), [None, None])
            got.append(next(client.versions("m", newer_than=got[-1] if got else 0, timeout=WAIT_S)).version)
        self.assertEqual(got, [1, 4])
        self.assertEqual(list(client.versions("m", newer_than=4, timeout=0.01)), [])

    def test_marks_stand_in_the_timeline(self):
        w = World(self)
        self.assertEqual(w.push(1), [None, None])
        w.clients[2].mark("m", 1, "generation_begin", w.destinations[0])
        out = subprocess.run([rig.BUILD / "reshardctl", "timeline", "m", "1", "--socket", w.daemon.socket], capture_output=True,
                             text=True, check=True).stdout
        self.assertRegex(out, r"generation_begin +rollout/rank 0")


class Errors(unittest.TestCase):
    def test_a_layout_that_is_none_is_refused_with_the_place(self):
        with self.assertRaisesRegex(reshard.InvalidArgument, "line 1"):
            reshard.Layout("{")
        with self.assertRaisesRegex(reshard.InvalidArgument, "Shard"):
            layout({**SOURCE, "tensors": [dict(SOURCE["tensors"][0], placements=["Partial"])]})

    def test_no_daemon_is_unavailable(self):
        with tempfile.TemporaryDirectory() as folder, self.assertRaises(reshard.Unavailable):
            reshard.Client(f"{folder}/none.sock", timeout=0.05)

    def test_names_that_there_are_not_are_listed(self):
        with Daemon() as d, reshard.Client(d.socket, timeout=WAIT_S) as client:
            with self.assertRaisesRegex(reshard.InvalidArgument, "'source', 'destination'"):
                client.attach("m", "sauce", layout(SOURCE), 0)
            with self.assertRaisesRegex(reshard.InvalidArgument, "'gather-broadcast'"):
                client.submit("m", 1, strategy="broadcast")
            with self.assertRaises(reshard.NotFound):
                layout(SOURCE).tensor("v")

    def test_a_rank_twice_and_a_binding_beyond_its_segment_are_refused_and_leave_no_memory(self):
        with Daemon() as d, reshard.Client(d.socket, timeout=WAIT_S) as client:
            first = client.attach("m", "source", layout(SOURCE), 0, timeout=WAIT_S)
            n = len(client._segments)
            with self.assertRaises(reshard.AlreadyExists):
                client.attach("m", "source", layout(SOURCE), 0, timeout=WAIT_S)
            self.assertEqual(len(client._segments), n)
            small = client.segment(4096, timeout=WAIT_S)
            pieces = [reshard.Piece("q", small, 4090), reshard.Piece("k", small, 0)]
            with self.assertRaisesRegex(reshard.InvalidArgument, "q"):
                client.attach("m", "source", layout(SOURCE), 1, live=pieces, timeout=WAIT_S)
            with self.assertRaises(reshard.FailedPrecondition):
                first.live[0].segment.free(WAIT_S)
            first.detach()
            first.live[0].segment.free(WAIT_S)
            with self.assertRaises(reshard.FailedPrecondition):
                first.publish(1)

    def test_what_is_closed_says_so(self):
        with Daemon() as d:
            client = reshard.Client(d.socket, timeout=WAIT_S)
            worker = client.attach("m", "source", layout(SOURCE), 0, timeout=WAIT_S)
            client.close()
            client.close()
            for use in (lambda: client.submit("m", 1), worker.info, lambda: worker.live[0].segment.data):
                self.assertRaises(reshard.FailedPrecondition, use)


class Header(unittest.TestCase):
    """The package says nothing else than reshard.h."""

    @classmethod
    def setUpClass(cls):
        cls.text = HEADER.read_text()

    def compiled(self, lines):
        with tempfile.TemporaryDirectory() as folder:
            source = pathlib.Path(folder, "a.c")
            source.write_text('#include <stdio.h>\n#include "client/reshard.h"\nint main(void)\n{\n' + "\n".join(lines) + "\n}\n")
            subprocess.run(["cc", "-I", ROOT, "-o", f"{folder}/a", source], check=True)
            return subprocess.run([f"{folder}/a"], capture_output=True, text=True, check=True).stdout.split()

    def test_structs_have_the_same_places(self):
        lines, here = [], []
        for s in native.STRUCTS:
            lines.append(f'printf("%zu\\n", sizeof(struct reshard_{s.__name__}));')
            here.append(native.ctypes.sizeof(s))
            for name, _ in s._fields_:
                lines.append(f'printf("%zu\\n", offsetof(struct reshard_{s.__name__}, {name}));')
                here.append(getattr(s, name).offset)
        self.assertEqual([int(n) for n in self.compiled(lines)], here)

    def test_enumerators_have_the_same_values(self):
        from reshard import client
        tables = {"RELEASE": client._RELEASES, "VERIFY": client._VERIFIES, "STRATEGY": client._STRATEGIES, "UNTIL": client._UNTIL,
                  "RECEIVE": client._RECEIVES}
        said = {f"RESHARD_{n.upper()}": v for n, v in client._SIDES.items()}
        for prefix, table in tables.items():
            said |= {f"RESHARD_{prefix}_{(n or 'default').upper().replace('-', '_')}": v for n, v in table.items()}
        values = self.compiled([f'printf("%d\\n", (int){name});' for name in said])
        self.assertEqual([int(v) for v in values], list(said.values()))

    def test_every_error_code_has_a_class(self):
        codes = {int(v) for v in re.findall(r"RESHARD_E[A-Z]+ = (-\d+)", self.text)}
        self.assertEqual(codes, set(reshard.errors.OF_CODE))

    def test_every_call_is_there_but_the_watch_that_versions_stands_for(self):
        calls = set(re.findall(r"^RESHARD_API [^;]*?\breshard_([a-z_]+)\(", self.text, re.M))
        self.assertEqual(calls - set(native._CALLS), {"watch"})
        self.assertEqual(set(native._CALLS) - calls, set())


def dtensor(shape, local, mesh, placements, names=None):
    """As torch's DTensor shows itself."""
    kinds = {"S": lambda d: type("Shard", (), {"dim": d})(), "R": lambda: type("Replicate", (), {})(),
             "P": lambda: type("Partial", (), {})(),
             "X": lambda d, f: type("_StridedShard", (), {"dim": d, "split_factor": f})()}
    return types.SimpleNamespace(shape=shape, dtype=local.dtype, to_local=lambda: local,
                                 device_mesh=types.SimpleNamespace(mesh=torch.tensor(mesh), mesh_dim_names=names),
                                 placements=[kinds[p[0]](*p[1:]) for p in placements])


@unittest.skipIf(torch is None, "python3-torch is not installed")
class Torch(unittest.TestCase):
    def test_a_fused_parameter_is_bound_by_its_own_strides(self):
        with Daemon() as d, reshard.Client(d.socket, timeout=WAIT_S) as client:
            source, whole = layout(SOURCE), {}
            for rank in (0, 1):  # q and k side by side in rows of 6: [q; k] as one [6, 6], transposed in memory
                segment = client.segment(4096, timeout=WAIT_S)
                fused = torch.frombuffer(segment.data, dtype=torch.float32)[:36].view(6, 6).t()
                parts = {"q": fused[:4], "k": fused[4:]}
                for name, t in parts.items():
                    t.copy_(torch.randn(t.shape))
                    whole[name] = torch.cat([whole[name], t]) if name in whole else t.clone()
                worker = client.attach("m", "source", source, rank, timeout=WAIT_S,
                                       live=reshard.torch.bind(client, source, rank, parts, [segment]))
                self.assertEqual(worker.live[0].strides, (4, 24))
                worker.publish(1, timeout=WAIT_S)
            receivers = [client.attach("m", "destination", layout(DESTINATION), r, device=4, accept_automatically=True,
                                       timeout=WAIT_S) for r in (0, 1)]
            client.submit("m", 1, timeout=WAIT_S)
            client.wait("m", 1, timeout=WAIT_S)
            for r, w in enumerate(receivers):
                got = reshard.torch.views(w.shadow, w.layout)
                self.assertTrue(torch.equal(got["q"], whole["q"][:, 3 * r:3 * r + 3]))
                self.assertTrue(torch.equal(got["k"], whole["k"]))

    def test_what_does_not_fit_the_layout_is_refused_by_name(self):
        with Daemon() as d, reshard.Client(d.socket, timeout=WAIT_S) as client:
            source, good = layout(SOURCE), {"q": torch.zeros(4, 6), "k": torch.zeros(2, 6)}
            for change, text in (({"q": torch.zeros(6, 4)}, r"q: float32 \[6, 4\] is given, .* float32 \[4, 6\]"),
                                 ({"k": torch.zeros(2, 6, dtype=torch.float16)}, "k: float16"),
                                 ({"v": torch.zeros(1)}, "no v"), ({}, "can't map")):
                segment = client.segment(4096, timeout=WAIT_S)
                held = {n: torch.frombuffer(segment.data, dtype=t.dtype)[:t.numel()].view(t.shape)
                        for n, t in good.items()} if change else good
                with self.assertRaisesRegex(reshard.InvalidArgument, text):
                    reshard.torch.bind(client, source, 0, {**held, **change}, [segment])
            with self.assertRaisesRegex(reshard.InvalidArgument, "k: the layout has it"):
                reshard.torch.bind(client, source, 0, {"q": held["q"]}, [segment])

    def test_dtensors_tell_their_layout(self):
        part = torch.zeros(2, 3, dtype=torch.bfloat16)
        made = reshard.torch.layout("trainer", {
            "column": dtensor((8, 3), part, [[0, 1], [2, 3]], ["R", ("S", 0)], ("dp", "tp")),
            "fsdp of tp": dtensor((8, 3), part, [[0, 1], [2, 3]], [("X", 0, 2), ("S", 0)], ("dp", "tp")),
            "row": dtensor((2, 6), part, [1, 3], [("S", 1)]), "norm": torch.zeros(5)})
        self.assertEqual((made.name, made.n_ranks), ("trainer", 4))
        boxes = {t.name: [[(b.offset, b.size) for b in made.shards(t.name, r)] for r in range(4)] for t in made.tensors}
        self.assertEqual(boxes["column"], [[((0, 0), (4, 3))], [((4, 0), (4, 3))]] * 2)
        # tp cuts first, into rows 0-3 and 4-7; then dp cuts each
        self.assertEqual(boxes["fsdp of tp"], [[((0, 0), (2, 3))], [((4, 0), (2, 3))], [((2, 0), (2, 3))], [((6, 0), (2, 3))]])
        self.assertEqual(boxes["row"], [[], [((0, 0), (2, 3))], [], [((0, 3), (2, 3))]])
        self.assertEqual(boxes["norm"], [[((0,), (5,))]] * 4)
        self.assertEqual(made.tensor("norm").dtype, "float32")

    def test_a_pending_sum_and_an_order_that_no_layout_has_are_refused(self):
        part = torch.zeros(2, 3)
        with self.assertRaisesRegex(reshard.InvalidArgument, "w: placement Partial"):
            reshard.torch.layout("t", {"w": dtensor((2, 3), part, [0, 1], ["P"])})
        with self.assertRaisesRegex(reshard.InvalidArgument, "w: _StridedShard with split factor 4"):
            reshard.torch.layout("t", {"w": dtensor((8, 3), part, [[0, 1], [2, 3]], [("X", 0, 4), ("S", 0)])})
        with self.assertRaisesRegex(reshard.InvalidArgument, "how many ranks"):
            reshard.torch.layout("t", {"w": part})

    def test_a_rehearsal_finds_rows_that_the_binding_swaps(self):
        with Daemon() as d, reshard.Client(d.socket, timeout=WAIT_S) as client:
            sources = [client.attach("m", "source", layout(SOURCE), r, timeout=WAIT_S) for r in (0, 1)]
            receivers = [client.attach("m", "destination", layout(DESTINATION), r, device=4, timeout=WAIT_S) for r in (0, 1)]
            for w in sources:
                for name, t in reshard.torch.views(w.live, w.layout).items():
                    reshard.torch.rehearse_fill(name, w.layout.shards(name, w.rank)[0], t)
                w.publish(1, timeout=WAIT_S)
            client.submit("m", 1, rehearsal=True, timeout=WAIT_S)
            for w in receivers:
                e = w.next_event(WAIT_S)
                self.assertEqual(e.type, "accept_requested")
                for name, t in reshard.torch.views(w.shadow, w.layout).items():
                    box = w.layout.shards(name, w.rank)[0]
                    reshard.torch.rehearse_check(name, box, t)
                    with self.assertRaisesRegex(reshard.DataLoss, name):
                        reshard.torch.rehearse_check(name, box, t.flip(0))
                w.accept(e.version, e.attempt, WAIT_S)
            self.assertEqual(client.wait("m", 1, "final", timeout=WAIT_S).phase, "rehearsed")


if __name__ == "__main__":
    rig.main()
