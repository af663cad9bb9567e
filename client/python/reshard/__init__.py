"""reshard: what a trainer or an inference server says to its node's reshardd.

A trainer's worker:

    client = reshard.Client()
    layout = reshard.Layout.load("trainer.json")
    worker = client.attach("policy", "source", layout, rank, device=local_rank)   # weights live in worker.live
    for version in itertools.count(1):
        update(worker.live)
        worker.push(version, submit=rank == 0)      # until the weights may be written again

An inference server's:

    worker = client.attach("policy", "destination", layout, rank, device=local_rank, receive="in_place")
    worker.serve(engine.pause, engine.resume)

reshard.torch binds torch tensors, and makes layouts of DTensors. The README tells more; reshard.h has every rule.
"""
from .client import (Box, Bytes, Client, Committed, Event, Layout, Piece, Segment, State, Tensor, Worker, WorkerInfo,
                     pieces_dense, rehearse_check, rehearse_fill)
from .errors import *  # noqa: F403
from .errors import Error

__all__ = ["Box", "Bytes", "Client", "Committed", "Error", "Event", "Layout", "Piece", "Segment", "State", "Tensor", "Worker",
           "WorkerInfo", "pieces_dense", "rehearse_check", "rehearse_fill", *(c.__name__ for c in errors.OF_CODE.values())]
