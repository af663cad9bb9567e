"""What the stand-in for GPUs counts, for tests that run on it (make check-standin)."""
import mmap
import unittest

from gpu_memory import *

on_gpus = unittest.skipUnless(backends.CUDA, "runs on the stand-in for GPUs (make check-standin) and on a GPU")
on_standin = unittest.skipUnless(backends.STANDIN, "runs on the stand-in for GPUs: make check-standin")
CUDA = cuda(*backends.libraries(BUILD)) if backends.CUDA else None
if backends.CUDA:
    CUDA.free(CUDA.malloc(0, 1))  # this process's counters are its own: see Counters


class Counters:
    """What the daemons that are started meanwhile have open and allocated, by the stand-in's own count."""

    FIELDS = len(COUNTERS)
    ALLOCATED, OPEN, BLOCKS, CTAS, PEAK = (COUNTERS.index(x) for x in ("allocated_bytes", "open_handles", "most_blocks", "most_ctas",
                                                                        "peak_bytes"))

    def __enter__(self):
        self.fd, self.path = tempfile.mkstemp(prefix="standin-counters-")
        os.ftruncate(self.fd, 16 * self.FIELDS * 8)
        self.map = mmap.mmap(self.fd, 0)
        os.environ["STANDIN_COUNTERS"] = self.path
        return self

    def __exit__(self, *_):
        del os.environ["STANDIN_COUNTERS"]
        self.map.close()
        os.close(self.fd)
        os.unlink(self.path)

    def of(self, device, field):
        return struct.unpack_from("=Q", self.map, (device * self.FIELDS + field) * 8)[0]

    def wait_open(self, device, n, timeout):
        end = time.monotonic() + timeout
        while self.of(device, self.OPEN) != n:
            if time.monotonic() > end:
                raise Deadline(f"{self.of(device, self.OPEN)} handles of device {device} are open, not {n}")
            threading.Event().wait(0.005)
