"""What the benchmark over several nodes moves: layouts, and the nodes that their ranks are on.

Every tensor is bfloat16 with two dims, so that the peers (test/bench/peers) need no more than rectangles. Layouts are the
JSON that clients read; shards are cut here by an own reading of torch.chunk, so that what a peer moves and what is the least
that must cross a link do not come from the program under test.
"""
import array
import collections
import itertools
import json

ELEMENT_BYTES = 2
MAGIC = 0x4A4F4231
BUCKET_BYTES = 16 << 20  # whole tensors that a peer gathers and broadcasts at once

Shard = collections.namedtuple("Shard", "rank tensor row column rows columns")


def chunk(length, n, i):
    c = -(-length // n) if length else 0
    return min(i * c, length), min((i + 1) * c, length)


class Side:
    """One layout: a mesh over all ranks; placements per tensor, one per mesh dim (None: replicated)."""

    def __init__(self, name, shape, tensors, instances=None):
        self.name, self.shape, self.tensors, self.instances = name, list(shape), tensors, instances
        self.ranks = 1
        for n in shape:
            self.ranks *= n

    def json(self):
        words = lambda p: "Replicate" if p is None else f"Shard({p})"
        out = {"name": self.name, "ranks": self.ranks,
               "meshes": [{"name": "m", "shape": self.shape, "ranks": list(range(self.ranks))}],
               "tensors": [{"name": n, "shape": list(s), "dtype": "bfloat16", "mesh": "m",
                            "placements": [words(p) for p in placements]} for n, s, placements in self.tensors]}
        if self.instances:
            out["instances"] = self.instances
        return json.dumps(out)

    def shard(self, tensor, rank):
        """The one box of a rank; None where it is empty."""
        _, shape, placements = self.tensors[tensor]
        begin, end = [0, 0], list(shape)
        position = rank
        coordinates = []
        for n in reversed(self.shape):
            coordinates.insert(0, position % n)
            position //= n
        for n, at, p in zip(self.shape, coordinates, placements):
            if p is not None:
                b, e = chunk(end[p] - begin[p], n, at)
                begin[p], end[p] = begin[p] + b, begin[p] + e
        rows, columns = end[0] - begin[0], end[1] - begin[1]
        return Shard(rank, tensor, *begin, rows, columns) if rows and columns else None

    def shards(self):
        for rank in range(self.ranks):
            for t in range(len(self.tensors)):
                s = self.shard(t, rank)
                if s:
                    yield s


def overlap(a, b):
    row, column = max(a.row, b.row), max(a.column, b.column)
    rows = min(a.row + a.rows, b.row + b.rows) - row
    columns = min(a.column + a.columns, b.column + b.columns) - column
    return (row, column, rows, columns) if rows > 0 and columns > 0 else None


class Case:
    """source_nodes[r] and destination_nodes[r]: the number of the node of each rank."""

    def __init__(self, name, title, source, destination, source_nodes, destination_nodes, large="*"):
        self.name, self.title, self.source, self.destination = name, title, source, destination
        self.source_nodes, self.destination_nodes = source_nodes, destination_nodes
        self.large = large  # glob of the tensors that a hybrid moves by reshard; it broadcasts the rest

    def nodes(self):
        return sorted({*self.source_nodes, *self.destination_nodes})

    def unique_bytes(self):
        return sum(s[0] * s[1] for _, s, _ in self.source.tensors) * ELEMENT_BYTES

    def source_first(self):
        """Per tensor, its source shards without repeats of replicas."""
        first = collections.defaultdict(dict)
        for s in self.source.shards():
            first[s.tensor].setdefault(s[2:], s)
        return {t: list(boxes.values()) for t, boxes in first.items()}

    def moves(self):
        """Point to point: each destination shard from the source shards that make it up; of replicas, in turn."""
        replicas = collections.defaultdict(lambda: collections.defaultdict(list))
        for s in self.source.shards():
            replicas[s.tensor][s[2:]].append(s.rank)
        for d in self.destination.shards():
            for box, ranks in replicas[d.tensor].items():
                o = overlap(Shard(0, d.tensor, *box), d)
                if o:
                    yield ranks[d.rank % len(ranks)], d.rank, d.tensor, o

    def needed_bytes(self):
        """{node: unique bytes that its destination ranks need}; no source rank is on such a node in these cases."""
        boxes = collections.defaultdict(set)
        for d in self.destination.shards():
            boxes[self.destination_nodes[d.rank]].add(d[1:])
        out = {}
        for node, all_boxes in boxes.items():
            per_tensor = collections.defaultdict(list)
            for b in all_boxes:
                per_tensor[b[0]].append(b)
            out[node] = sum(union_elements(b) for b in per_tensor.values()) * ELEMENT_BYTES
        return out

    def flows(self):
        """[(from, to, bytes)] of plain TCP connections that load the links with the least that is possible: every
        destination node is sent what it needs, once, at the same time; evenly by the source nodes, or, where there are more
        destination nodes than source nodes and all need all, in a chain."""
        needed = self.needed_bytes()
        senders = sorted(set(self.source_nodes))
        everything = all(n == self.unique_bytes() for n in needed.values())
        if everything and len(needed) > len(senders):
            chain = senders[:1] + sorted(needed)
            return [(a, b, needed[b]) for a, b in itertools.pairwise(chain)]
        return [(s, to, n // len(senders)) for to, n in needed.items() for s in senders]

    # ---- for the peers -------------------------------------------------------------------------------------------------

    def buckets(self):
        out, begin, size = [], 0, 0
        for t, (_, shape, _) in enumerate(self.source.tensors):
            n = shape[0] * shape[1] * ELEMENT_BYTES
            if size and size + n > BUCKET_BYTES:
                out.append((begin, t))
                begin, size = t, 0
            size += n
        return out + [(begin, len(self.source.tensors))]

    def write_job(self, path):
        """The case as the peers read it: int64 numbers. Peer ranks are the source ranks, then the destination ranks.

        magic, n_ranks, n_source, n_tensors, n_shards, n_moves, n_buckets; per rank its node; per tensor rows, columns; per shard (by rank, then
        tensor) rank, tensor, row, column, rows, columns, 1 if it is gathered, its place in the rank's memory in elements; per
        move (by sender, then receiver) sender, receiver, tensor, row, column, rows, columns; per bucket first tensor, end.
        """
        n_source = self.source.ranks
        gathered = {tuple(s) for shards in self.source_first().values() for s in shards}
        shards, place = [], collections.Counter()
        for first, side in ((0, self.source), (n_source, self.destination)):
            for s in side.shards():
                rank = first + s.rank
                shards.append((rank, *s[1:], int(first == 0 and tuple(s) in gathered), place[rank]))
                place[rank] += s.rows * s.columns
        moves = sorted((a, n_source + b, t, *box) for a, b, t, box in self.moves())
        buckets = self.buckets()
        numbers = array.array("q", [MAGIC, n_source + self.destination.ranks, n_source, len(self.source.tensors),
                                    len(shards), len(moves), len(buckets), *self.peer_nodes()])
        for group in ([s for _, s, _ in self.source.tensors], shards, moves, buckets):
            for entry in group:
                numbers.extend(entry)
        with open(path, "wb") as f:
            numbers.tofile(f)

    def peer_nodes(self):
        return self.source_nodes + self.destination_nodes


def union_elements(boxes):
    """Elements in the union of rectangles of one tensor."""
    if len(boxes) == 1:
        return boxes[0][3] * boxes[0][4]
    rows = sorted({r for b in boxes for r in (b[1], b[1] + b[3])})
    columns = sorted({c for b in boxes for c in (b[2], b[2] + b[4])})
    return sum((r1 - r0) * (c1 - c0) for r0, r1 in itertools.pairwise(rows) for c0, c1 in itertools.pairwise(columns)
               if any(b[1] <= r0 and r1 <= b[1] + b[3] and b[2] <= c0 and c1 <= b[2] + b[4] for b in boxes))


# ---- the cases -------------------------------------------------------------------------------------------------------------

def dense_layers(layers, outer):
    """Layers of Qwen3-0.6B (31.5 MB each), cut as Megatron and vLLM do it; outer: placements of the mesh dims before tp."""
    for i in range(layers):
        for name, shape, cut in (("q", (2048, 1024), 0), ("k", (1024, 1024), 0), ("v", (1024, 1024), 0),
                                 ("o", (1024, 2048), 1), ("gate", (3072, 1024), 0), ("up", (3072, 1024), 0),
                                 ("down", (1024, 3072), 1), ("norm1", (1, 1024), None), ("norm2", (1, 1024), None)):
            yield f"layers.{i}.{'mlp' if name in ('gate', 'up', 'down') else 'attn'}.{name}", shape, [*outer, cut]


def tensors(generator):
    return list(generator)


def tp4_to_tp2dp2(layers):
    return Case("tp4-tp2dp2", "TP4 on one node to TP2 x DP2 on another",
                Side("trainer", [4], tensors(dense_layers(layers, []))),
                Side("rollout", [2, 2], tensors(dense_layers(layers, [None])), [[0, 1], [2, 3]]),
                [0] * 4, [1] * 4, "*.mlp.*")


def spread(layers):
    """Two instances of TP4, each with two ranks on either of two nodes; so each node needs a half."""
    return Case("spread", "TP4 on two nodes to two instances of TP4 that span two others",
                Side("trainer", [4], tensors(dense_layers(layers, []))),
                Side("rollout", [2, 4], tensors(dense_layers(layers, [None])), [[0, 1, 2, 3], [4, 5, 6, 7]]),
                [0, 0, 1, 1], [2, 2, 3, 3] * 2, "*.mlp.*")


def one_to_four(layers):
    return Case("one-to-four", "one source to four domains that need everything",
                Side("trainer", [1], tensors(dense_layers(layers, []))),
                Side("rollout", [4, 1], tensors(dense_layers(layers, [None])), [[0], [1], [2], [3]]),
                [0], [1, 2, 3, 4], "*.mlp.*")


def mixture(experts):
    """Whole experts on EP4, two ranks on either of two nodes; TP4 cuts rows of 768 elements into runs of 384 bytes."""
    stack = [(f"experts.{e}.down", (2048, 768)) for e in range(experts)]
    per = experts // 4
    source = ExpertSide("trainer", 4, [(n, s, e // per) for e, (n, s) in enumerate(stack)])
    return Case("moe-ep-tp", "experts, EP4 on two nodes to TP4 across two others, runs of 384 bytes", source,
                Side("rollout", [4], [(n, s, [1]) for n, s in stack]), [0, 0, 1, 1], [2, 2, 3, 3])


class ExpertSide(Side):
    """Each tensor whole on one rank."""

    def __init__(self, name, ranks, owned):
        super().__init__(name, [ranks], [(n, s, [None]) for n, s, _ in owned])
        self.owner = [rank for _, _, rank in owned]

    def shard(self, tensor, rank):
        return Shard(rank, tensor, 0, 0, *self.tensors[tensor][1]) if self.owner[tensor] == rank else None

    def json(self):
        out = json.loads(super().json())
        for t, owner in zip(out["tensors"], self.owner):
            del t["mesh"], t["placements"]
            t["regions"] = [{"rank": owner, "offset": [0, 0], "size": t["shape"]}]
        return json.dumps(out)


def small(n):
    """Tensors of 2 KiB."""
    names = [(f"blocks.{i // 100}.part.{i % 100}", (8, 128)) for i in range(n)]
    return Case("small-tensors", f"{n:,} tensors of 2 KiB, TP4 on one node to TP2 x DP2 on another",
                Side("trainer", [4], [(n, s, [0]) for n, s in names]),
                Side("rollout", [2, 2], [(n, s, [None, 1]) for n, s in names], [[0, 1], [2, 3]]), [0] * 4, [1] * 4)


def growth(n_tensors, ranks, domains, total_bytes=16 << 20):
    """The same bytes in more tensors, by more ranks, into more domains: `ranks` of each side; sources on node 0."""
    columns = total_bytes // n_tensors // 16 // ELEMENT_BYTES
    names = [(f"t{i}", (16, columns)) for i in range(n_tensors)]
    per = ranks // domains
    return Case(f"growth-{n_tensors}t-{ranks}r-{domains}d",
                f"16 MiB in {n_tensors:,} tensors, {ranks} ranks on each side, {domains} domains",
                Side("trainer", [ranks], [(n, s, [0]) for n, s in names]),
                Side("rollout", [ranks], [(n, s, [1]) for n, s in names]), [0] * ranks,
                [1 + r // per for r in range(ranks)])
