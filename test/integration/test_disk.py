#!/usr/bin/python3
"""The ledger's disk fails: what was committed stays, what is not known is not told, and a restart goes on from there."""
import contextlib
import resource
import unittest

from rig import *


def fleet(d):
    return Fleet(d, small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7])


def refit(f, version):
    """Committed and applied."""
    f.refit(version)
    for w in f.destinations:
        w.apply(version)


def again(d, f):
    """New clients for all workers of a fleet after a restart; their memory claims nothing."""
    client = Client(d)
    f.trainer = f.rollout = client
    for w in f.sources + f.destinations:
        w.client = client
        w.segment = client.register(w.memory)
        client.put_layout(w.layout)
        w.attach()


def committed(d):
    return d.refit().GetCommitted(pb.GetCommittedRequest(model="m"), timeout=WAIT_S).version


@contextlib.contextmanager
def small_disk(n_bytes=1 << 20):
    """A tmpfs of its own; the test is skipped where it may not be mounted."""
    path = tempfile.mkdtemp(prefix="reshard-disk-")
    try:
        r = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={n_bytes}", "reshard-test", path], capture_output=True, text=True)
        if r.returncode != 0:
            raise unittest.SkipTest(f"no tmpfs may be mounted here: {r.stderr.strip()}")
        try:
            yield pathlib.Path(path)
        finally:
            subprocess.run(["umount", "-l", path], check=True)
    finally:
        os.rmdir(path)


def remount(path, how):
    subprocess.run(["mount", "-o", f"remount,{how}", path], check=True)


def fill(path):
    """Leaves no byte free."""
    with open(path / "ballast", "wb", buffering=0) as f, contextlib.suppress(OSError):
        while f.write(b"x" * 4096):
            pass


def limit_ledger(d):
    """The ledger's log may not grow any more: its next write fails with EFBIG."""
    n = max(os.path.getsize(p) for p in pathlib.Path(d.settings["daemon"]["state_dir"]).glob("reshard.db*"))
    resource.prlimit(d.process.pid, resource.RLIMIT_FSIZE, (n, n))


class WriteErrors(unittest.TestCase):
    def test_a_failed_write_stops_the_daemon_and_the_next_start_knows_how_it_ended(self):
        with Daemon() as d:
            f = fleet(d)
            refit(f, 1)
            f.publish(2)
            f.submit(2)
            for w in f.destinations:
                e = w.event("accept_requested", 2)
                if w.rank == 3:
                    limit_ledger(d)
                w.accept(2, e.attempt)  # the last one's leads to the commit's record
            self.assertEqual(d.wait(), 1)
            d.wait_log("<end of log>")
            self.assertIn("ledger", d.lines[-2])
            self.assertIn("error", d.lines[-2])
            for w in f.destinations:  # nobody was told that it is committed
                while not w.events.empty():
                    kind, e = w.events.get()
                    self.assertFalse(kind == "committed" and e.version == 2)
            d.start()
            self.assertEqual(committed(d), 1)
            again(d, f)
            refit(f, 3)
            for w in f.destinations:
                self.assertEqual(w.wrong(3), [])

    def test_a_layout_that_can_not_be_written_stops_the_daemon_too(self):
        with Daemon() as d:
            refit(fleet(d), 1)
            limit_ledger(d)
            with self.assertRaises(grpc.RpcError):
                Client(d).put_layout(small_destination("other"))
            self.assertEqual(d.wait(), 1)
            d.start()
            self.assertEqual(committed(d), 1)


class FullDisks(unittest.TestCase):
    def test_a_full_disk_is_a_refusal_and_room_makes_it_good(self):
        with small_disk() as disk, Daemon(daemon__state_dir=disk / "state") as d:
            f = fleet(d)
            refit(f, 1)
            fill(disk)
            with self.assertRaises(grpc.RpcError) as caught:
                for v in range(2, 40):  # until the log's spare pages are used up
                    f.submit(v)
                    f.trainer.admin.Abort(pb.AbortRequest(model="m", version=v), timeout=WAIT_S)
            self.assertEqual(caught.exception.code(), grpc.StatusCode.RESOURCE_EXHAUSTED, caught.exception.details())
            self.assertIn("full", caught.exception.details())
            self.assertEqual(committed(d), 1)
            self.assertEqual(d.status("m").models[0].committed, 1)
            (disk / "ballast").unlink()
            refit(f, 50)
            self.assertEqual(committed(d), 50)

    def test_a_drain_that_a_full_disk_has_no_room_for_is_none(self):
        with small_disk() as disk, Daemon(daemon__state_dir=disk / "state") as d:
            f = fleet(d)
            refit(f, 1)
            node = d.status().node
            fill(disk)
            with self.assertRaises(grpc.RpcError) as caught:
                for _ in range(1000):  # until the log's spare pages are used up
                    f.trainer.admin.Drain(pb.DrainRequest(node=node, undrain=True), timeout=WAIT_S)
            self.assertEqual(caught.exception.code(), grpc.StatusCode.RESOURCE_EXHAUSTED, caught.exception.details())
            with refused(self, grpc.StatusCode.RESOURCE_EXHAUSTED, "full"):
                f.trainer.admin.Drain(pb.DrainRequest(node=node), timeout=WAIT_S)
            self.assertEqual([n.draining for n in d.status().nodes], [False])
            (disk / "ballast").unlink()
            refit(f, 2)
            f.trainer.admin.Drain(pb.DrainRequest(node=node), timeout=WAIT_S)
            self.assertEqual([n.draining for n in d.status().nodes], [True])

    def test_a_read_only_disk_is_named_at_the_start_and_no_version_is_lost(self):
        with small_disk(8 << 20) as disk, Daemon(daemon__state_dir=disk / "state") as d:
            f = fleet(d)
            refit(f, 1)
            d.kill()
            remount(disk, "ro")
            d.start(wait="not started")
            self.assertEqual(d.wait(), 1)
            self.assertIn(str(disk), d.wait_log("not started.*")[0])
            remount(disk, "rw")
            d.start()
            self.assertEqual(committed(d), 1)
            again(d, f)
            refit(f, 2)


class DamagedFiles(unittest.TestCase):
    def damaged(self, damage, *words):
        with Daemon() as d:
            refit(fleet(d), 1)
            d.stop()
            path = d.dir / "state" / "reshard.db"
            good = path.read_bytes()
            path.write_bytes(damage(good))
            d.start(wait="not started")
            self.assertEqual(d.wait(), 1)
            line = d.wait_log("not started.*")[0]
            for word in (str(path), *words):
                self.assertIn(word, line)
            path.write_bytes(good)
            d.start()
            self.assertEqual(committed(d), 1)

    def test_an_overwritten_page_is_refused_and_named(self):
        self.damaged(lambda b: b[:4096] + b"\xff" * 4096 + b[8192:], "damaged", "good copy")

    def test_a_cut_off_file_is_refused_and_named(self):
        self.damaged(lambda b: b[:len(b) // 2 // 4096 * 4096], "damaged", "good copy")

    def test_another_kind_of_file_is_refused_and_named(self):
        self.damaged(lambda b: b"not a ledger at all" * 500, "damaged or no SQLite file")


if __name__ == "__main__":
    main()
