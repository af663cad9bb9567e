#!/usr/bin/python3
"""bfloat16 and float32 trainers into float8 rollouts with block scales: every byte is that of a brute force in Python."""
import bisect
import math
import struct
import unittest
import unittest.mock

import gpu_memory
import nodes
from rig import *
from standin_counters import CUDA, on_gpus

INVALID = grpc.StatusCode.INVALID_ARGUMENT
BLOCK = 128


# --- the brute force ----------------------------------------------------------------------------------


def e4m3_value(bits):
    return math.ldexp(bits, -9) if bits < 8 else math.ldexp(8 + bits % 8, bits // 8 - 10)


FINITE = [e4m3_value(i) for i in range(127)]  # 0 to 448, ascending


def e4m3(v):
    """The nearest float8, ties to even; saturates at 448."""
    if math.isnan(v):
        return 0x7F
    sign, a = (0x80 if math.copysign(1, v) < 0 else 0), abs(v)
    if a >= FINITE[-1]:
        return sign | 126
    high = bisect.bisect_right(FINITE, a)
    low = high - 1
    down, up = a - FINITE[low], FINITE[high] - a
    return sign | (low if down < up or down == up and low % 2 == 0 else high)


def float32(v):
    return struct.unpack("<f", struct.pack("<f", v))[0]


class Matrix:
    """A tensor's content in a version: values, and what they become by blocks."""

    def __init__(self, rows, columns, dtype, version, block=BLOCK):
        self.rows, self.columns, self.dtype, self.block = rows, columns, dtype, block
        self.across = -(-columns // block)
        self.values = [self.value(i, version) for i in range(rows * columns)]
        self.scales = [self.scale(i, k) for i in range(-(-rows // block)) for k in range(self.across)]

    def value(self, i, version):
        bits = mix(i * 2654435761 + version & 0xFFFFFFFF)
        kind, bits = bits % 101, bits & 0x807FFFFF | (110 + bits % 23) << 23
        row = i // self.columns // self.block
        bits = 0x7FC00000 if kind == 1 else 0xFF800000 if kind == 2 else bits & 0x80000000 if kind == 3 or row == 1 else bits
        if self.dtype == "bfloat16":
            bits &= 0xFFFF0000
        return struct.unpack("<f", struct.pack("<I", bits))[0]

    def scale(self, i, k):
        top = 0.0
        for r in range(i * self.block, min((i + 1) * self.block, self.rows)):
            begin = r * self.columns
            row = self.values[begin + k * self.block:begin + min((k + 1) * self.block, self.columns)]
            top = max([top] + [abs(v) for v in row if math.isfinite(v)])
        return float32(top / 448) if top > 0 else 1.0

    def source(self, i):
        data = struct.pack("<f", self.values[i])
        return data[2:] if self.dtype == "bfloat16" else data

    def quantised(self, i):
        r, c = divmod(i, self.columns)
        return bytes([e4m3(float32(self.values[i] / self.scales[r // self.block * self.across + c // self.block]))])


class Model:
    """Weights by name; each rank's bytes of them, and of their scales."""

    def __init__(self, version, shapes, dtype, block=BLOCK):
        self.matrices = {name: Matrix(*shape, dtype, version, block) for name, shape in shapes.items()}

    def piece(self, name, shape, box, source):
        scales = name.endswith(".scale")
        m = self.matrices[name.removesuffix(".scale")]
        one = m.source if source else m.quantised
        return b"".join(struct.pack("<f", m.scales[i]) if scales else one(i) for i in indices(shape, box))


def quantised(name, shape, mesh_name, placements, scale_placements=None, block=BLOCK):
    """A weight and its scales."""
    blocks = [-(-n // block) for n in shape]
    return [tensor(name, shape, "float8_e4m3fn", mesh_name, placements, cast=True),
            tensor(f"{name}.scale", blocks, "float32", mesh_name, scale_placements or placements,
                   derived={"from": name, "rule": "block_scale", "block": [block, block]})]


# --- tests --------------------------------------------------------------------------------------------


class Landing(unittest.TestCase):
    @staticmethod
    def pieces(worker):
        for name, boxes in worker.place.items():
            for offset, box in boxes:
                yield name, worker.layout.tensors[name]["shape"], offset, box

    def lands(self, f, version, model):
        """A refit of the model's content: all bytes of all destinations, live after their Apply."""
        for w in f.sources:
            for name, shape, offset, box in self.pieces(w):
                data = model.piece(name, shape, box, True)
                w.memory[offset:offset + len(data)] = data
            w.publish(version)
        f.submit(version)
        s = f.final(version)
        self.assertEqual(s.phase, pb.PHASE_COMMITTED, s)
        for w in f.destinations:
            w.event("committed", version)
            w.apply(version)
            for name, shape, offset, box in self.pieces(w):
                data = model.piece(name, shape, box, False)
                self.assertTrue(w.memory[offset:offset + len(data)] == data, f"{name} {box} of rank {w.rank}")


class Casts(DaemonCase, Landing):
    def fleet(self, source, destination, source_devices, destination_devices):
        return Fleet(self.daemon, source, destination, source_devices, destination_devices, model=self.model, automatic=True)

    def test_a_bfloat16_trainer_feeds_two_float8_instances_with_their_scales(self):
        shapes = {"up": (256, 300), "down": (200, 256)}
        source = Layout("train", 2, [mesh("tp", [2])], [tensor("up", [256, 300], "bfloat16", "tp", [0]),
                                                       tensor("down", [200, 256], "bfloat16", "tp", [1])])
        destination = Layout("rollout", 4, [mesh("dptp", [2, 2])], [
            *quantised("up", [256, 300], "dptp", [None, 0]), *quantised("down", [200, 256], "dptp", [None, 1])],
            instances=[[0, 1], [2, 3]])
        f = self.fleet(source, destination, [0, 1], [4, 5, 6, 7])
        for version in (1, 2):
            self.lands(f, version, Model(version, shapes, "bfloat16"))

    def test_a_shard_edge_inside_a_block_gives_both_ranks_its_scale(self):
        # Edge 100 lies inside the first block of rows: both ranks are given its scales, as the layout declares.
        source = Layout("train", 1, [mesh("m", [1])], [tensor("w", [200, 300], "float32", "m", [None])])
        destination = Layout("rollout", 2, [mesh("tp", [2])], quantised("w", [200, 300], "tp", [0], [None]))
        f = self.fleet(source, destination, [0], [4, 5])
        self.lands(f, 1, Model(1, {"w": (200, 300)}, "float32"))

    def test_one_scale_for_a_whole_tensor(self):
        source = Layout("train", 1, [mesh("m", [1])], [tensor("w", [64, 96], "bfloat16", "m", [None])])
        destination = Layout("rollout", 2, [mesh("tp", [2])], quantised("w", [64, 96], "tp", [1], [None], block=4096))
        f = self.fleet(source, destination, [0], [4, 5])
        self.lands(f, 1, Model(1, {"w": (64, 96)}, "bfloat16", block=4096))

    def test_a30_half_a_scale_is_refused_with_the_edge_named(self):
        destination = Layout("rollout", 2, [mesh("tp", [2])], quantised("w", [200, 300], "tp", [0]))
        with refused(self, INVALID, "w.scale", "edge 100", "dim 0"):
            Client(self.daemon).put_layout(destination)

    def aborted(self, f, *words):
        before = [w.memory[:] for w in f.destinations]
        f.publish(1)
        f.submit(1)
        s = f.final(1)
        self.assertEqual(s.phase, pb.PHASE_ABORTED, s)
        for word in words:
            self.assertIn(word, s.reason)
        self.assertEqual([w.memory[:] for w in f.destinations], before)

    def test_a_block_over_two_trainer_ranks_is_refused_with_the_remedy(self):
        source = Layout("train", 2, [mesh("tp", [2])], [tensor("w", [200, 300], "bfloat16", "tp", [0])])
        destination = Layout("rollout", 1, [mesh("m", [1])], quantised("w", [200, 300], "m", [None]))
        self.aborted(self.fleet(source, destination, [0, 1], [4]), "'w'", "edge 100", "multiples of 128")

    def test_b03_a_quantised_weight_without_its_scale_is_refused_by_name(self):
        # The weight came, the scale did not and was uninitialised memory.
        source = Layout("train", 1, [mesh("m", [1])], [tensor("w", [128, 128], "bfloat16", "m", [None])])
        destination = Layout("rollout", 1, [mesh("m", [1])], [
            tensor("w", [128, 128], "float8_e4m3fn", "m", [None], cast=True), tensor("w.scale", [1, 1], "float32", "m", [None])])
        self.aborted(self.fleet(source, destination, [0], [4]), "w.scale", "missing")


class Wrong(unittest.TestCase):
    def test_what_is_made_wrong_in_the_same_way_each_time_is_found_by_the_scalar_kernel(self):
        # Publication, sending and what is compared with them have all been made by it: fingerprints agree everywhere.
        for dtype, shape, block in (("bfloat16", [256, 300], 128), ("float32", [130, 90], 128), ("bfloat16", [64, 96], 4096),
                                    ("float32", [700, 500], 4096), ("bfloat16", [384, 640], 384)):
            with self.subTest(dtype=dtype, shape=shape, block=block):
                source = Layout("train", 1, [mesh("m", [1])], [tensor("w", shape, dtype, "m", [None])])
                destination = Layout("rollout", 2, [mesh("tp", [2])], quantised("w", shape, "tp", [None], [None], block=block))
                with unittest.mock.patch.dict(os.environ, {"RESHARD_DAMAGE": "wrong-scale:1:1000000"}):
                    daemon = self.enterContext(Daemon(refit__prepare_timeout_ms=600000))  # the kernels run on CPUs here, which may be busy
                f = Fleet(daemon, source, destination, [0], [4, 5], automatic=True)
                f.publish(1)
                before = [w.memory[:] for w in f.destinations]
                f.submit(1)
                s = f.final(1)
                self.assertEqual(s.phase, pb.PHASE_ABORTED, s)
                self.assertRegex(s.reason, f"tensor 'w(.scale)?'.* layout 'train' rank 0.* kernel of device 0 makes "
                                           f"({dtype} to float8_e4m3fn by the block's scale|the scale of a block of {dtype}) .*"
                                           "the scalar one")
                self.assertEqual([w.memory[:] for w in f.destinations], before)  # before any byte moved


class OverNodes(Landing):
    """Whoever sends a part makes it, on its own node; relays on others pass it on."""

    def test_three_nodes_get_what_two_made(self):
        source = Layout("train", 2, [mesh("tp", [2])], [tensor("up", [256, 300], "bfloat16", "tp", [0]),
                                                       tensor("down", [200, 256], "bfloat16", "tp", [1])])
        destination = Layout("rollout", 4, [mesh("dptp", [2, 2])], [
            *quantised("up", [256, 300], "dptp", [None, 0]), *quantised("down", [200, 256], "dptp", [None, 1])],
            instances=[[0, 1], [2, 3]])
        shapes = {"up": (256, 300), "down": (200, 256)}
        cluster = nodes.of_case(self, nodes.Nodes(3))
        f = nodes.Fleet(cluster, source, destination, ["n0:0", "n1:0"], ["n1:1", "n1:2", "n2:0", "n2:1"])
        for version in (1, 2):
            self.lands(f, version, Model(version, shapes, "bfloat16"))

    def test_one_scale_of_a_tensor_that_is_greater_than_what_is_worked_on_at_once(self):
        source = Layout("train", 1, [mesh("m", [1])], [tensor("w", [700, 500], "float32", "m", [None])])
        destination = Layout("rollout", 2, [mesh("tp", [2])], quantised("w", [700, 500], "tp", [0], [None], block=4096))
        cluster = nodes.of_case(self, nodes.Nodes(2))
        f = nodes.Fleet(cluster, source, destination, ["n0:0"], ["n0:1", "n1:0"])
        self.lands(f, 1, Model(1, {"w": (700, 500)}, "float32", block=4096))


@on_gpus
class InGpuMemory(Landing):
    """Weights of both sides in memory of GPUs, which the CPU can't touch."""

    def refits(self, source_devices, destination_devices):
        source = Layout("train", 2, [mesh("tp", [2])], [tensor("w", [256, 300], "bfloat16", "tp", [0])])
        destination = Layout("rollout", 2, [mesh("tp", [2])], quantised("w", [256, 300], "tp", [0]))
        with Daemon() as d:
            f = gpu_memory.GpuFleet(d, CUDA, source, destination, source_devices, destination_devices)
            for version in (1, 2):
                self.lands(f, version, Model(version, {"w": (256, 300)}, "bfloat16"))
            for w in f.sources + f.destinations:
                self.assertTrue(w.memory.guards_hold(), f"{w.layout.name} rank {w.rank}")

    def test_on_other_gpus(self):
        self.refits([0, 1], [4, 5])

    def test_on_the_sources_own_gpus(self):
        self.refits([0, 1], [1, 0])


main()
