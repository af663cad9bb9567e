"""What the tests of public fault reports about versions and daemons share."""
import contextlib
import ctypes.util
import sqlite3
import unittest
import unittest.mock

import nodes as cluster
from rig import *

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "lib"))
from fingerprint import fingerprint  # noqa: E402

PRECONDITION, EXISTS, INVALID, NOT_FOUND = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.ALREADY_EXISTS,
                                            grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)


def whole(name, tensors, rank=0):
    """A layout of one rank that holds everything."""
    return Layout(name, rank + 1, [mesh("m", [1], [rank])],
                  [tensor(t, shape, dtype, "m", [None]) for t, shape, dtype in tensors])


def small(d, **more):
    return Fleet(d, small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7], **more)


def apply_all(f, version):
    for w in f.destinations:
        w.apply(version)


def damaged_daemon(damage, **settings):
    """A daemon whose first data plane does harm (base/crash.h)."""
    with unittest.mock.patch.dict(os.environ, RESHARD_DAMAGE=damage):
        return Daemon(**settings).start()


def states(d, model="m"):
    return {(w.layout_name, w.rank): w.state for w in d.status(model).models[0].workers}


def committed(d, model="m"):
    return d.refit().GetCommitted(pb.GetCommittedRequest(model=model), timeout=WAIT_S).version


def asked_to_accept(w, version):
    """Whether the worker is asked for its verdict; False: the version was aborted."""
    while True:
        kind, e = w.events.get(timeout=WAIT_S)
        if kind in ("accept_requested", "aborted") and e.version == version:
            return kind == "accept_requested"
        assert kind != "end", e


class Case(unittest.TestCase):
    def daemon(self, **settings):
        return self.enter(Daemon(**settings))

    def enter(self, d):
        if d.process is None:
            d.start()

        def end():
            if any(t is self for t, _ in self._outcome.result.failures + self._outcome.result.errors):
                print(f"--- the daemon's log:\n{d.tail(60)}", file=sys.stderr)
            d.close()

        self.addCleanup(end)
        return d

    def serves(self, f, version):
        for w in f.destinations:
            self.assertEqual(w.wrong(version), [], f"rank {w.rank}")

    def ends_aborted(self, f, version, *words):
        s = f.final(version)
        self.assertEqual(s.phase, pb.PHASE_ABORTED, s)
        for word in words:
            self.assertIn(word, s.reason)
        return s
