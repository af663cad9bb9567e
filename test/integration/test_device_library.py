#!/usr/bin/python3
"""GPU memory that a C trainer hands over by libreshard, on the stand-in for GPUs (make check-standin)."""
import unittest

from gpu_memory import *
from standin_counters import *


class Library:
    """libreshard by ctypes: a C trainer's calls."""

    class Error(ctypes.Structure):
        _fields_ = [("code", ctypes.c_int), ("text", ctypes.c_char * 1024)]

    class Export(ctypes.Structure):
        _fields_ = [("device", ctypes.c_char_p), ("ipc_handle", ctypes.c_char_p), ("vmm_fd", ctypes.c_int),
                    ("allocation_bytes", ctypes.c_uint64), ("offset_bytes", ctypes.c_uint64),
                    ("allocation", ctypes.c_uint64)]

    class Attach(ctypes.Structure):
        _fields_ = [("model", ctypes.c_char_p), ("side", ctypes.c_int), ("layout", ctypes.c_void_p),
                    ("rank", ctypes.c_uint32), ("device", ctypes.c_uint32), ("receive", ctypes.c_int),
                    ("accept_automatically", ctypes.c_bool), ("live", ctypes.c_void_p), ("n_live", ctypes.c_size_t),
                    ("shadow", ctypes.c_void_p), ("n_shadow", ctypes.c_size_t), ("live_version", ctypes.c_uint64),
                    ("shadow_version", ctypes.c_uint64)]

    def __init__(self, daemon):
        self.library = ctypes.CDLL(str(backends.client_library(BUILD)))
        self.library.reshard_segment_data.restype = ctypes.c_void_p
        self.library.reshard_segment_device.restype = ctypes.c_uint32
        self.client = self.out(self.library.reshard_connect, daemon.socket.encode(), 0)

    def call(self, f, *args):
        e = self.Error()
        r = f(*args, ctypes.byref(e))
        if r != 0:
            raise MemoryError_(r, e.text.decode())

    def out(self, f, *args):
        p = ctypes.c_void_p()
        self.call(f, *args, ctypes.byref(p))
        return p

    def segment(self, p, n):
        return self.out(self.library.reshard_segment_cuda, self.client, ctypes.c_void_p(p), ctypes.c_uint64(n), 0)

    def exported(self, n, **fields):
        return self.out(self.library.reshard_segment_cuda_exported, self.client, ctypes.byref(self.Export(**fields)),
                        ctypes.c_uint64(n), 0)

    def device(self, segment):
        return self.library.reshard_segment_device(segment)

    def source(self, layout_json, segment, device):
        text = layout_json.encode()
        self.layout = self.out(self.library.reshard_layout_from_json, text, ctypes.c_size_t(len(text)))
        pieces, n, end = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_uint64()
        self.call(self.library.reshard_pieces_dense, self.layout, 0, segment, ctypes.c_uint64(0), 0, ctypes.byref(pieces),
                  ctypes.byref(n), ctypes.byref(end))
        a = self.Attach(model=b"m", side=1, layout=self.layout, device=device, live=pieces, n_live=n)
        w = self.out(self.library.reshard_attach, self.client, ctypes.byref(a), 0)
        self.library.reshard_pieces_free(pieces)
        return w

    def publish(self, w, version):
        self.call(self.library.reshard_publish, w, ctypes.c_uint64(version), None, ctypes.c_size_t(0), 0)

    def publish_after(self, w, version, event):
        self.call(self.library.reshard_publish_after, w, ctypes.c_uint64(version), event, None, ctypes.c_size_t(0), 0)

    def free(self, segment):
        self.call(self.library.reshard_segment_free, segment, 0)

    def close(self):
        self.library.reshard_close(self.client)
        self.library.reshard_layout_free(self.layout) if hasattr(self, "layout") else None


ONE_JSON = """{"name": "train", "ranks": 1, "meshes": [{"name": "x", "shape": [1], "ranks": [0]}],
 "tensors": [{"name": "w", "shape": [64, 64], "dtype": "int32", "mesh": "x", "placements": ["Replicate"]}]}"""


@on_gpus
class Libreshard(MemoryRefusals):
    N = 64 * 64 * 4

    def content(self, version):
        return values("w", [64, 64], ([0, 0], [64, 64]), 4, version)

    def write_late(self, p, data):
        """Enqueues the write on a stream that is slow to begin, and does not wait."""
        stream = ctypes.c_void_p()
        CUDA.use(2)
        CUDA.ok(CUDA.runtime.cudaStreamCreateWithPriority(ctypes.byref(stream), 1, 0))
        source = ctypes.c_void_p()
        CUDA.ok(CUDA.runtime.cudaHostAlloc(ctypes.byref(source), ctypes.c_size_t(len(data)), 0))
        ctypes.memmove(source, data, len(data))
        self.addCleanup(os.environ.__setitem__, "STANDIN_DELAY_US", os.environ["STANDIN_DELAY_US"])
        os.environ["STANDIN_DELAY_US"] = "300000"
        CUDA.ok(CUDA.runtime.cudaMemcpyAsync(ctypes.c_void_p(p), source, ctypes.c_size_t(len(data)), 1, stream))
        return stream

    def event_behind(self, stream, flags):
        event = ctypes.c_void_p()
        CUDA.ok(CUDA.runtime.cudaEventCreateWithFlags(ctypes.byref(event), flags))
        CUDA.ok(CUDA.runtime.cudaEventRecord(event, stream))
        return event

    def refit(self, d, library, worker, p, w, version, after=False):
        before = os.environ["STANDIN_DELAY_US"]
        CUDA.write(p, bytes([POISON]) * self.N)
        stream = self.write_late(p, self.content(version))
        if after:
            library.publish_after(worker, version, self.event_behind(stream, 2 | 4))
        else:
            library.publish(worker, version)
        os.environ["STANDIN_DELAY_US"] = before
        w.client.stub.Submit(pb.SubmitRequest(model="m", version=version, request_id=f"r{version}"), timeout=WAIT_S)
        w.event("committed", version)
        w.apply(version)
        self.assertEqual(w.wrong(version), [])

    def trainer(self, d, kind):
        """GPU memory of this process, handed over by its pointer alone: (library, worker, pointer)."""
        library = Library(d)
        if kind == IPC:
            base = CUDA.malloc(2, 1 << 16)
        elif kind == VMM:
            base, fd, _ = CUDA.vmm_new(2, VMM_GRANULE)
            os.close(fd)
        else:  # N bytes over the end of the first of two
            base, fds, _ = CUDA.vmm_parts_new(2, 2)
            for fd in fds:
                os.close(fd)
            base += VMM_GRANULE - self.N // 2
        p = base + BEFORE
        segment = library.segment(p, self.N)
        self.assertEqual(library.device(segment), 2)
        self.assertEqual(library.library.reshard_segment_data(segment), p)
        return library, library.source(ONE_JSON, segment, library.device(segment)), p

    def test_publish_after_an_event_leaves_the_waiting_to_the_daemon(self):
        with Daemon() as d:
            library, worker, p = self.trainer(d, IPC)
            w = GpuWorker(GpuClient(d, CUDA), "m", pb.SIDE_DESTINATION, one_destination(), 0, 3, pb.RECEIVE_STAGED, True)
            for version in range(1, 6):
                self.refit(d, library, worker, p, w, version, after=True)
            stream = ctypes.c_void_p()
            CUDA.ok(CUDA.runtime.cudaStreamCreateWithPriority(ctypes.byref(stream), 1, 0))
            with self.refused(-1, "cudaEventInterprocess"):
                library.publish_after(worker, 6, self.event_behind(stream, 2))
            library.close()

    def test_publish_waits_for_the_gpu_and_a_restarted_daemon_gets_the_memory_again(self):
        for kind in (IPC, VMM, PARTS):
            with self.subTest(kind=kind), Daemon() as d:
                library, worker, p = self.trainer(d, kind)
                destination = lambda: GpuWorker(GpuClient(d, CUDA), "m", pb.SIDE_DESTINATION, one_destination(), 0, 3,
                                                pb.RECEIVE_STAGED, True)
                self.refit(d, library, worker, p, destination(), 1)
                d.kill()
                d.start()
                self.refit(d, library, worker, p, destination(), 2)
                library.close()

    def test_what_is_no_gpu_allocation_is_refused_and_an_export_by_hand_is_taken(self):
        with Daemon() as d:
            library = Library(d)
            host = ctypes.create_string_buffer(4096)
            with self.refused(-1, "no GPU memory", "reshard_segment_new"):
                library.segment(ctypes.addressof(host), 4096)
            pooled = ctypes.c_void_p()  # CASES.md C17
            CUDA.use(1)
            CUDA.ok(CUDA.runtime.cudaMallocAsync(ctypes.byref(pooled), ctypes.c_size_t(4096), None))
            with self.refused(-1, "no CUDA IPC handle", "cudaMallocAsync", "cudaMalloc, or VMM"):
                library.segment(pooled.value, 4096)
            p = CUDA.malloc(1, 1 << 16)
            with self.refused(-1, "leave the allocation of 65536 bytes", "one segment for each"):
                library.segment(p + 1, 1 << 16)
            library.free(library.segment(p + 1, (1 << 16) - 1))
            by_hand = dict(device=CUDA.uuid(1).upper().encode(), ipc_handle=CUDA.ipc_handle(p), allocation_bytes=1 << 16)
            with self.refused(-1, "leave the allocation"):
                library.exported((1 << 16) - 63, offset_bytes=64, **by_hand)
            segment = library.exported(self.N, offset_bytes=64, **by_hand)
            self.assertEqual(library.device(segment), 1)
            library.publish(library.source(ONE_JSON, segment, 1), 1)
            with self.refused(-1, "descriptor"):
                library.exported(16, device=b"GPU-x", vmm_fd=-1, allocation_bytes=16)
            library.close()
            CUDA.free(p)

    def test_backend_host_is_told_with_the_remedy(self):
        with Daemon(devices__backend="host", devices__transport="memory") as d:
            library, p = Library(d), CUDA.malloc(0, 4096)
            with self.refused(-4, "'host'", "memfd"):
                library.segment(p, 4096)
            library.close()
            CUDA.free(p)


if __name__ == "__main__":
    main()
