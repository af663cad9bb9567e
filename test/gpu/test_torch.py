#!/usr/bin/env python3
"""torch and the daemon on a GPU, as users have them: trainer processes whose parameters are DTensors in the caching allocator's
memory, engine processes with plain tensors of another layout, three versions, every element compared on the GPU.

    RESHARD_BUILD=build test/gpu/test_torch.py [--devices 2] [--mib 64] [--expandable] [--receive in_place|staged]

Trainer rank r and engine rank r are on device r % devices; with one GPU, several devices are test/gpu/one_gpu.c's (in LD_PRELOAD).
Ends with the times of each version's push; exit code 1 where an element is wrong.
"""
import argparse
import json
import multiprocessing
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("RESHARD_BUILD", ROOT / "build")).resolve()
VERSIONS, RANKS, WAIT_S = 4, 2, 60


def shapes(mib):
    """name → (shape, dtype, trainer's shard dim or None, engine's)"""
    rows = mib * 1024 // 4  # of 2048 bfloat16
    return {"embed": ((rows, 2048), "bfloat16", 0, 1), "up": ((2816, 1024), "bfloat16", 0, 0),
            "down": ((1024, 2816), "bfloat16", 1, 1), "uneven": ((1001, 64), "float32", 0, None), "norm": ((1024,), "float32", None, None)}


def values(torch, shape, dtype, offset, size, version):
    """A function of the element's global coordinates, the tensor's shape and the version, exact in bfloat16."""
    flat = torch.zeros(size, dtype=torch.int64, device="cuda")
    step = 1
    for dim in reversed(range(len(shape))):
        view = [1] * len(shape)
        view[dim] = size[dim]
        flat += (torch.arange(offset[dim], offset[dim] + size[dim], device="cuda") * step).view(view)
        step *= shape[dim]
    mixed = (flat * 2654435761 + version * 40503 + shape[0]) >> 7
    return (mixed % 251 - 125).to(getattr(torch, dtype))


def part(shape, dim, rank):
    """(offset, size) as torch.chunk cuts."""
    offset, size = [0] * len(shape), list(shape)
    if dim is not None:
        each = -(-shape[dim] // RANKS)
        offset[dim] = min(each * rank, shape[dim])
        size[dim] = min(each, shape[dim] - offset[dim])
    return offset, size


def imports():
    os.environ["RESHARD_LIBRARY"] = str(BUILD / "libreshard.so")
    sys.path.insert(0, str(ROOT / "client" / "python"))
    import torch
    import reshard
    import reshard.torch
    return torch, reshard


def trainer(rank, device, socket, store, mib, times):
    torch, reshard = imports()
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    torch.cuda.set_device(device)
    mesh = init_device_mesh("cuda", (RANKS,), mesh_dim_names=("fsdp",))
    torch.cuda.set_device(device)
    parameters = {}
    for name, (shape, dtype, dim, _) in shapes(mib).items():
        here = torch.empty(part(shape, dim, rank)[1], dtype=getattr(torch, dtype), device="cuda")
        stride = torch.empty(shape, device="meta").stride()
        parameters[name] = DTensor.from_local(here, mesh, [Replicate() if dim is None else Shard(dim)], run_check=False,
                                              shape=torch.Size(shape), stride=stride)
    client = reshard.Client(socket)
    layout = reshard.torch.layout("trainer", parameters)
    worker = client.attach("m", "source", layout, rank, device=device, live=reshard.torch.bind(client, layout, rank, parameters))
    for version in range(1, VERSIONS):
        for name, (shape, dtype, dim, _) in shapes(mib).items():
            parameters[name].to_local().copy_(values(torch, shape, dtype, *part(shape, dim, rank), version))
        torch.cuda.synchronize()
        dist.barrier()
        begin = time.monotonic()
        worker.push(version, submit=rank == 0, timeout=WAIT_S)
        times.put((version, rank, time.monotonic() - begin))
        client.wait("m", version, "committed", timeout=WAIT_S)
    worker.detach()


def engine(rank, device, socket, mib, receive, wrong, done):
    torch, reshard = imports()
    torch.cuda.set_device(device)
    layout = reshard.Layout(json.dumps({"name": "rollout", "ranks": RANKS, "meshes": [
        {"name": "tp", "shape": [RANKS], "ranks": list(range(RANKS))}], "tensors": [
        {"name": name, "shape": list(shape), "dtype": dtype, "mesh": "tp",
         "placements": ["Replicate" if dim is None else f"Shard({dim})"]} for name, (shape, dtype, _, dim) in shapes(mib).items()]}))

    def tensors():
        return {name: torch.zeros(part(shape, dim, rank)[1], dtype=getattr(torch, dtype), device="cuda")
                for name, (shape, dtype, _, dim) in shapes(mib).items()}
    weights, shadow = tensors(), tensors()
    torch.cuda.synchronize()
    client = reshard.Client(socket)
    where = {"live": reshard.torch.bind(client, layout, rank, weights)}
    if receive == "staged":
        where["shadow"] = reshard.torch.bind(client, layout, rank, shadow)
    worker = client.attach("m", "destination", layout, rank, device=device, receive=receive, **where)
    stop = threading.Event()

    def resume(version):
        for name, (shape, dtype, _, dim) in shapes(mib).items():
            differ = int((weights[name] != values(torch, shape, dtype, *part(shape, dim, rank), version)).sum())
            if differ:
                wrong.put(f"version {version}, engine {rank}: {differ} elements of {name} are wrong")
        done.put((version, rank))
        if version == VERSIONS - 1:
            stop.set()
    worker.serve(lambda: None, resume, stop=stop)
    worker.detach()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--devices", type=int, default=1)
    p.add_argument("--mib", type=int, default=16, help="of the largest tensor")
    p.add_argument("--expandable", action="store_true", help="torch's expandable segments (VMM) in the place of cudaMalloc")
    p.add_argument("--receive", default="staged", choices=["staged", "in_place"])
    a = p.parse_args()
    if a.devices == 1:
        os.environ.pop("LD_PRELOAD", None)
    if a.expandable:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    daemons = dict(os.environ)  # torch has an NCCL of its own
    os.environ["LD_LIBRARY_PATH"] = ":".join(p for p in os.environ.get("LD_LIBRARY_PATH", "").split(":") if not p.endswith("/nccl"))
    folder = pathlib.Path(tempfile.mkdtemp(prefix="reshard-torch-"))
    socket = str(folder / "d.sock")
    (folder / "d.conf").write_text(f"[daemon]\nnode = n0\nsocket = {socket}\nstate_dir = {folder}/state\n\n[devices]\ndevices = {a.devices}\n"
                                   "backend = cuda\ntransport = nccl\n")
    (folder / "state").mkdir()
    log = open(folder / "log", "w")
    daemon = subprocess.Popen([BUILD / "reshardd", "--config", folder / "d.conf"], stdout=log, stderr=log, env=daemons)
    spawn = multiprocessing.get_context("spawn")
    wrong, done, times = spawn.Queue(), spawn.Queue(), spawn.Queue()
    workers = [spawn.Process(target=trainer, args=(r, r % a.devices, socket, str(folder / "store"), a.mib, times)) for r in range(RANKS)]
    workers += [spawn.Process(target=engine, args=(r, r % a.devices, socket, a.mib, a.receive, wrong, done)) for r in range(RANKS)]
    failed = []
    try:
        for w in workers:
            w.start()
        landed = sorted(done.get(timeout=2 * WAIT_S) for _ in range(RANKS * (VERSIONS - 1)))
        for w in workers:
            w.join(WAIT_S)
            failed += [f"a worker's exit code is {w.exitcode}"] if w.exitcode != 0 else []
        while not wrong.empty():
            failed.append(wrong.get())
        pushes = sorted(times.get(timeout=WAIT_S) for _ in range(RANKS * (VERSIONS - 1)))
        subprocess.run([BUILD / "reshardctl", "--socket", socket, "status"])
        subprocess.run([BUILD / "reshardctl", "--socket", socket, "timeline", "m"])
    except Exception as e:
        failed.append(f"{type(e).__name__}: {e}")
        landed, pushes = [], []
    finally:
        for w in workers:
            if w.is_alive():
                w.kill()
        daemon.terminate()
        daemon.wait(WAIT_S)
        log.close()
    if failed:
        print((folder / "log").read_text()[-6000:])
    print("\n".join(failed))
    moved = sum(2 * s[0] * (s[1] if len(s) > 1 else 1) for s, *_ in shapes(a.mib).values()) / 1e6
    print(f"{len(landed)} of {RANKS * (VERSIONS - 1)} applied and compared; {moved:.0f} MB, pushes of version 2 on: "
          + " ".join(f"{1000 * t:.1f}" for v, _, t in pushes if v > 1) + " ms")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
