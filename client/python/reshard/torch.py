"""torch tensors as a worker's memory, and layouts of DTensors. Imports torch; the rest of the package does not.

    trainer (FSDP2, TP: parameters are DTensors)
        parameters = dict(model.named_parameters())
        layout = reshard.torch.layout("trainer", parameters)             # the same on every rank
        worker = client.attach("policy", "source", layout, rank, device=local_rank,
                               live=reshard.torch.bind(client, layout, rank, parameters))

    host memory that the daemon gave (no GPU)
        worker = client.attach("policy", "source", layout, rank)
        weights = reshard.torch.views(worker.live, layout)               # name → torch.Tensor in that memory
"""
import bisect
import json
from typing import Dict, Iterable, List, Mapping, Optional, Sequence

import torch

from . import errors
from .client import Box, Client, Layout, Piece, Segment
from .client import rehearse_check as _rehearse_check
from .client import rehearse_fill as _rehearse_fill


def dtype_name(dtype: torch.dtype) -> str:
    """As layouts name it: "bfloat16"."""
    return str(dtype).rsplit(".", 1)[-1]


def local(tensor):
    """This rank's part of a DTensor; a plain tensor (parameter) is its own."""
    t = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return t.detach()


# ---- views of what was bound ----


def views(pieces: Iterable[Piece], layout: Layout) -> Dict[str, torch.Tensor]:
    """Tensors in the pieces' host memory, which the segment must outlive: name → the rank's shard. For tensors of one box, as
    those on a mesh have; InvalidArgument for others, and for float8 where this torch has no such dtype."""
    out: Dict[str, torch.Tensor] = {}
    for p in pieces:
        t = layout.tensor(p.tensor)
        if p.tensor in out:
            raise errors.InvalidArgument(f"{p.tensor} has several pieces: view them one by one")
        dtype = getattr(torch, t.dtype, None)
        if dtype is None:
            raise errors.InvalidArgument(f"{p.tensor}: this torch has no {t.dtype}")
        if p.box is None:
            raise errors.InvalidArgument(f"{p.tensor}: the piece names no box")
        strides = p.strides or _dense_strides(p.box.size, t.element_bytes)
        whole = torch.frombuffer(p.segment.data, dtype=torch.uint8)
        span = sum((n - 1) * s for n, s in zip(p.box.size, strides)) + t.element_bytes if 0 not in p.box.size else 0
        flat = whole[p.offset:p.offset + span].view(dtype)
        out[p.tensor] = torch.as_strided(flat, p.box.size, [s // t.element_bytes for s in strides])
    return out


def _dense_strides(size: Sequence[int], element_bytes: int) -> List[int]:
    strides, step = [], element_bytes
    for n in reversed(size):
        strides.append(step)
        step *= max(1, n)
    return strides[::-1]


# ---- bindings of what torch has ----


class _Memory:
    """Finds the segment of an address: given ones, and one more for each GPU storage that none has."""

    def __init__(self, client: Client, segments: Sequence[Segment]):
        self.client, self.segments = client, sorted(segments, key=lambda s: s.address or 0)

    def find(self, name: str, tensor: torch.Tensor) -> Segment:
        begin = tensor.data_ptr()
        i = bisect.bisect_right([s.address or 0 for s in self.segments], begin) - 1
        if i >= 0 and begin < (self.segments[i].address or 0) + self.segments[i].bytes:
            return self.segments[i]
        if not tensor.is_cuda:
            raise errors.InvalidArgument(f"{name} is in memory that the daemon can't map: make its weights in a Segment "
                                         "(views(), or torch.frombuffer(segment.data, …)) and give that in `segments`")
        storage = tensor.untyped_storage()
        made = self.client.segment_cuda(storage.data_ptr(), storage.nbytes())
        self.segments.insert(i + 1, made)
        return made


def bind(client: Client, layout: Layout, rank: int, tensors: Mapping[str, torch.Tensor],
         segments: Sequence[Segment] = ()) -> List[Piece]:
    """The pieces of this rank's shards: each where its torch tensor is, by its strides.

    tensors: name in the layout → the rank's shard, or a DTensor; names that the layout lacks are an error, and so is a shape or
    dtype other than the layout's. GPU memory is handed over by itself, one segment for each storage; host memory must be in
    one of `segments`. Names whose shard is empty on this rank may be left out."""
    memory, pieces = _Memory(client, segments), []
    for t in layout.tensors:
        boxes = layout.shards(t.name, rank)
        if not boxes:
            continue
        if len(boxes) > 1:
            raise errors.InvalidArgument(f"{t.name}: rank {rank} holds {len(boxes)} boxes: make their pieces by hand")
        if t.name not in tensors:
            raise errors.InvalidArgument(f"{t.name}: the layout has it on rank {rank}, the tensors given have not")
        shard = local(tensors[t.name])
        if tuple(shard.shape) != boxes[0].size or dtype_name(shard.dtype) != t.dtype:
            raise errors.InvalidArgument(f"{t.name}: {dtype_name(shard.dtype)} {list(shard.shape)} is given, the layout has "
                                         f"{t.dtype} {list(boxes[0].size)} on rank {rank}")
        segment = memory.find(t.name, shard)
        strides = tuple(s * shard.element_size() for s in shard.stride())
        pieces.append(Piece(t.name, segment, shard.data_ptr() - segment.address, boxes[0], strides))
    unknown = sorted(set(tensors) - {t.name for t in layout.tensors})
    if unknown:
        raise errors.InvalidArgument(f"the layout has no {', '.join(unknown[:3])}{' …' if len(unknown) > 3 else ''}")
    return pieces


# ---- layouts of DTensors ----


def layout(name: str, tensors: Mapping[str, torch.Tensor], ranks: Optional[int] = None,
           instances: Optional[Sequence[Sequence[int]]] = None) -> Layout:
    """The layout that DTensors have by their own account: mesh, placements, global shape. The same text on every rank. A
    plain tensor is one that every rank holds whole; ranks: how many there are, needed where no DTensor tells.

    FSDP2 over TP says _StridedShard: the dim was cut by later mesh dims first, and so `shard_order` has it. InvalidArgument:
    a pending sum (Partial), or a shard order that the layout can't say."""
    meshes: Dict[tuple, dict] = {}
    entries = []
    for key, t in tensors.items():
        if not hasattr(t, "placements"):
            entries.append((key, t, None, None, None))
            continue
        grid = t.device_mesh.mesh
        names = tuple(t.device_mesh.mesh_dim_names or ())
        identity = (tuple(grid.shape), tuple(int(r) for r in grid.flatten().tolist()), names)
        mesh = meshes.setdefault(identity, {"name": f"mesh{len(meshes)}", "shape": list(identity[0]), "ranks": list(identity[1]),
                                            **({"dim_names": list(names)} if names else {})})
        placements, order = _placements(key, t)
        entries.append((key, t, mesh["name"], placements, order))
    n = ranks or 1 + max((max(m["ranks"]) for m in meshes.values()), default=-1)
    if n == 0:
        raise errors.InvalidArgument("no DTensor among the tensors: say how many ranks there are")
    if any(mesh is None for _, _, mesh, _, _ in entries):
        meshes[()] = {"name": "everyone", "shape": [n], "ranks": list(range(n))}
    text = {"name": name, "ranks": n, "meshes": list(meshes.values()), "tensors": [
        {"name": key, "shape": list(t.shape), "dtype": dtype_name(t.dtype), "mesh": mesh or "everyone",
         "placements": placements or ["Replicate"], **({"shard_order": order} if order else {})}
        for key, t, mesh, placements, order in entries]}
    if instances is not None:
        text["instances"] = [list(i) for i in instances]
    return Layout(json.dumps(text))


def _placements(key: str, tensor):
    """(placements, shard_order or None) of a DTensor, in a layout's words."""
    kinds = [type(p).__name__ for p in tensor.placements]
    sizes, out = list(tensor.device_mesh.mesh.shape), []
    for kind, p in zip(kinds, tensor.placements):
        if kind == "Replicate":
            out.append("Replicate")
        elif kind in ("Shard", "_StridedShard"):
            out.append(f"Shard({p.dim})")
        else:
            raise errors.InvalidArgument(f"{key}: placement {kind} can't be moved; redistribute it first, to Replicate or Shard")
    strided = [i for i, kind in enumerate(kinds) if kind == "_StridedShard"]
    for i in strided:
        p, later = tensor.placements[i], 1
        for j in range(i + 1, len(sizes)):
            if kinds[j] == "Shard" and tensor.placements[j].dim == p.dim:
                later *= sizes[j]
        if p.split_factor != later:
            raise errors.InvalidArgument(f"{key}: _StridedShard with split factor {p.split_factor}, where the later mesh dims cut "
                                         f"dim {p.dim} into {later}: write this tensor's regions by hand")
    if not strided:
        return out, None
    return out, [i for i in range(len(sizes)) if i not in strided] + strided


# ---- rehearsal through torch's own views ----


def rehearse_fill(name: str, box: Box, tensor: torch.Tensor) -> None:
    """Writes the coordinates of `box` into a tensor (of host memory) as the framework sees it."""
    _rehearse_fill(name, *_as_view(name, box, tensor))


def rehearse_check(name: str, box: Box, tensor: torch.Tensor) -> None:
    """DataLoss names the first element that is another."""
    _rehearse_check(name, *_as_view(name, box, tensor))


def _as_view(name, box, tensor):
    t = local(tensor)
    if t.is_cuda:
        raise errors.InvalidArgument(f"{name} is on a GPU: fill a copy in host memory, or check one")
    if tuple(t.shape) != box.size:
        raise errors.InvalidArgument(f"{name}: {list(t.shape)} is given, the box has {list(box.size)}")
    return dtype_name(t.dtype), box, t.data_ptr(), [s * t.element_size() for s in t.stride()]
