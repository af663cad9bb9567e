#!/usr/bin/python3
"""torch.distributed over Gloo as a peer of the benchmark: the same bytes between the same ranks.

    gloo_refit.py --namespaces NS,NS,… --address ADDRESS JOB MODE …

JOB is written by test/bench/cases.py. One process per rank, forked from here into the network namespace of its node;
ADDRESS is that of rank 0. Modes:

    gather-broadcast   buckets of whole tensors: sent to rank 0, broadcast to every destination rank, each takes its part
    point-to-point     each pair of ranks that share something: packed, one message, unpacked

Prints a JSON line per mode, as mpi_refit does: seconds from the first rank's begin to the last one's end, elements compared
and wrong. Exit status 1 where a rank failed.
"""
import argparse
import array
import collections
import ctypes
import datetime
import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

MAGIC = 0x4A4F4231
POISON = -23131  # 0xa5a5
Shard = collections.namedtuple("Shard", "rank tensor row column rows columns gathered place")
Move = collections.namedtuple("Move", "sender receiver tensor row column rows columns")
WAIT = datetime.timedelta(seconds=120)


class Job:
    def __init__(self, path):
        n = array.array("q")
        with open(path, "rb") as f:
            n.frombytes(f.read())
        magic, self.n_ranks, self.n_source, n_tensors, n_shards, n_moves, n_buckets = n[:7]
        if magic != MAGIC:
            raise SystemExit(f"{path}: that is no job")
        at = 7 + self.n_ranks  # Gloo's broadcast is a tree by rank: nodes do not matter to it

        def take(count, width):
            nonlocal at
            rows = [tuple(n[i:i + width]) for i in range(at, at + count * width, width)]
            at += count * width
            return rows

        self.tensors = take(n_tensors, 2)
        self.shards = [Shard(*s) for s in take(n_shards, 8)]
        self.moves = [Move(*m) for m in take(n_moves, 7)]
        self.buckets = take(n_buckets, 2)


class Rank:
    def __init__(self, job, me):
        self.job, self.me, self.source = job, me, me < job.n_source
        mine = [s for s in job.shards if s.rank == me]
        self.memory = torch.full((sum(s.rows * s.columns for s in mine),), POISON, dtype=torch.int16)
        self.of = {s.tensor: (s, self.memory[s.place:s.place + s.rows * s.columns].view(s.rows, s.columns)) for s in mine}
        if self.source:
            for s, box in self.of.values():
                box.copy_(self.values(s))
        takers = [0] + list(range(job.n_source, job.n_ranks))
        self.broadcasters = dist.new_group(takers)
        self.takes = me in takers
        self.ready_gather()
        self.ready_pairs()
        self.meet()

    def values(self, s):
        width = self.job.tensors[s.tensor][1]
        rows = torch.arange(s.row, s.row + s.rows).unsqueeze(1) * width
        element = rows + torch.arange(s.column, s.column + s.columns).unsqueeze(0)
        h = (element * 0x9E3779B1 + s.tensor * 0x85EBCA77) & 0xFFFFFFFF
        return ((h >> 15) & 0xFFFF).to(torch.int16)

    def meet(self):
        """Connections stand before the clock starts: every pair talks once, and the group of the broadcast."""
        one = torch.zeros(1, dtype=torch.uint8)
        others = [r for r in range(self.job.n_ranks) if r != self.me]
        work = [dist.isend(one, r) for r in others] + [dist.irecv(torch.zeros(1, dtype=torch.uint8), r) for r in others]
        for w in work:
            w.wait()
        if self.takes:
            dist.broadcast(one, 0, group=self.broadcasters)

    # ---- gather, then broadcast ----

    def ready_gather(self):
        self.plan = []
        most = 0
        for begin, end in self.job.buckets:
            place, at = {}, 0
            for t in range(begin, end):
                place[t] = at
                at += self.job.tensors[t][0] * self.job.tensors[t][1]
            most = max(most, at)
            self.plan.append((place, at, collections.defaultdict(list)))
        number = {t: b for b, (begin, end) in enumerate(self.job.buckets) for t in range(begin, end)}
        for s in self.job.shards:
            if s.gathered:
                self.plan[number[s.tensor]][2][s.rank].append(s)
        self.whole = torch.full((most if self.takes else 0,), POISON, dtype=torch.int16)
        self.pieces = {r: torch.full((most,), POISON, dtype=torch.int16)
                       for r in (range(1, self.job.n_source) if self.me == 0 else ())}

    def gather_broadcast(self):
        for place, n, by_rank in self.plan:
            if self.source:
                self.gather(place, by_rank)
            if not self.takes:
                continue
            dist.broadcast(self.whole[:n].view(torch.uint8), 0, group=self.broadcasters)
            if self.me != 0:
                for t, at in place.items():
                    if t in self.of:
                        s, box = self.of[t]
                        box.copy_(self.cut(t, at)[s.row:s.row + s.rows, s.column:s.column + s.columns])

    def cut(self, tensor, at):
        rows, columns = self.job.tensors[tensor]
        return self.whole[at:at + rows * columns].view(rows, columns)

    def gather(self, place, by_rank):
        if self.me != 0:
            if by_rank[self.me]:
                packed = torch.cat([self.of[s.tensor][1].reshape(-1) for s in by_rank[self.me]])
                dist.send(packed.view(torch.uint8), 0)
            return
        sizes = {r: sum(s.rows * s.columns for s in shards) for r, shards in by_rank.items()}
        work = {r: dist.irecv(self.pieces[r][:sizes[r]].view(torch.uint8), r) for r in by_rank if r != 0}
        for r, shards in by_rank.items():
            if r != 0:
                work[r].wait()
            at = 0
            for s in shards:
                n = s.rows * s.columns
                piece = self.of[s.tensor][1] if r == 0 else self.pieces[r][at:at + n].view(s.rows, s.columns)
                self.cut(s.tensor, place[s.tensor])[s.row:s.row + s.rows, s.column:s.column + s.columns].copy_(piece)
                at += n

    # ---- point to point ----

    def ready_pairs(self):
        self.pairs = collections.defaultdict(list)
        for m in self.job.moves:
            if self.me in (m.sender, m.receiver):
                self.pairs[m.receiver if self.source else m.sender].append(m)
        self.packed = {} if self.source else {
            other: torch.full((sum(m.rows * m.columns for m in moves),), POISON, dtype=torch.int16)
            for other, moves in self.pairs.items()}

    def box(self, m):
        s, whole = self.of[m.tensor]
        row, column = m.row - s.row, m.column - s.column
        return whole[row:row + m.rows, column:column + m.columns]

    def point_to_point(self):
        if self.source:
            work = []
            for other, moves in self.pairs.items():
                packed = torch.cat([self.box(m).reshape(-1) for m in moves])
                work.append((dist.isend(packed.view(torch.uint8), other), packed))
            for w, _ in work:
                w.wait()
            return
        work = {other: dist.irecv(packed.view(torch.uint8), other) for other, packed in self.packed.items()}
        for other, w in work.items():
            w.wait()
            at = 0
            for m in self.pairs[other]:
                n = m.rows * m.columns
                self.box(m).copy_(self.packed[other][at:at + n].view(m.rows, m.columns))
                at += n

    # ---- one mode ----

    def measure(self, mode):
        run = {"gather-broadcast": self.gather_broadcast, "point-to-point": self.point_to_point}[mode]
        if not self.source:
            self.memory.fill_(POISON)
        dist.barrier()
        begin = time.monotonic()
        run()
        span = torch.tensor([-begin, time.monotonic()], dtype=torch.float64)
        dist.all_reduce(span, dist.ReduceOp.MAX)
        counts = torch.zeros(2, dtype=torch.int64)
        if not self.source:
            for s, box in self.of.values():
                counts += torch.tensor([box.numel(), int((box != self.values(s)).sum())])
        dist.all_reduce(counts)
        if self.me == 0:
            print(json.dumps({"mode": mode, "seconds": float(span.sum()), "elements": int(counts[0]), "wrong": int(counts[1])}),
                  flush=True)


def rank_main(job, me, args, namespace):
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    if libc.setns(fd, 0x40000000) != 0:  # CLONE_NEWNET
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.environ.update(GLOO_SOCKET_IFNAME="eth0", TP_SOCKET_IFNAME="eth0", MASTER_ADDR=args.address, MASTER_PORT="29500")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=me, world_size=job.n_ranks, timeout=WAIT)
    rank = Rank(job, me)
    for mode in args.modes:
        rank.measure(mode)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--namespaces", required=True)
    p.add_argument("--address", required=True)
    p.add_argument("job")
    p.add_argument("modes", nargs="+")
    args = p.parse_args()
    job = Job(args.job)
    pids = set()
    for me, namespace in enumerate(args.namespaces.split(",")):
        pid = os.fork()
        if pid == 0:
            try:
                rank_main(job, me, args, namespace)
            except BaseException as e:  # a child must not go on in its parent's code
                print(f"gloo_refit: rank {me}: {type(e).__name__}: {e}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        pids.add(pid)
    failed = False
    while pids:
        pid, status = os.wait()
        pids.discard(pid)
        if status != 0 and not failed:
            failed = True
            for other in pids:
                os.kill(other, signal.SIGKILL)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
