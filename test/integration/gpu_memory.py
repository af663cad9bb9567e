"""Clients whose weights are GPU memory, for test_device_memory.py: CUDA by ctypes, on the stand-in's libraries.

A segment lies in the middle of its allocation, and what is around it is checked to stay what it was.
"""
import ctypes
import struct

from rig import *

DEVICE = struct.Struct("=48s64sQQQII")  # struct memory_device of daemon/memory/memory_socket.h
IPC, VMM = 2, 3
BEFORE, AFTER, GUARD = 0x1200, 0x800, 0xEE
VMM_GRANULE = 2 << 20


class Cuda:
    """What a trainer does with CUDA: the runtime for memory, the driver for VMM."""

    def __init__(self):
        self.runtime, self.driver = ctypes.CDLL("libcudart.so.13"), ctypes.CDLL("libcuda.so.1")

    @staticmethod
    def ok(code):
        assert code == 0, f"CUDA error {code}"

    def use(self, device):
        self.ok(self.runtime.cudaSetDevice(device))

    def malloc(self, device, n):
        p = ctypes.c_void_p()
        self.use(device)
        self.ok(self.runtime.cudaMalloc(ctypes.byref(p), ctypes.c_size_t(n)))
        return p.value

    def free(self, p):
        self.ok(self.runtime.cudaFree(ctypes.c_void_p(p)))

    def write(self, p, data):
        self.ok(self.runtime.cudaMemcpy(ctypes.c_void_p(p), ctypes.c_char_p(bytes(data)), ctypes.c_size_t(len(data)), 1))

    def read(self, p, n):
        out = ctypes.create_string_buffer(n)
        self.ok(self.runtime.cudaMemcpy(out, ctypes.c_void_p(p), ctypes.c_size_t(n), 2))
        return out.raw

    def ipc_handle(self, p):
        out = ctypes.create_string_buffer(64)
        self.ok(self.runtime.cudaIpcGetMemHandle(out, ctypes.c_void_p(p)))
        return out.raw

    def uuid(self, device):
        out = ctypes.create_string_buffer(16)
        self.ok(self.driver.cuDeviceGetUuid_v2(out, device))
        h = out.raw.hex()
        return f"GPU-{h[:8]}-{h[8:12]}-{h[12:16]}-{h[16:20]}-{h[20:]}"

    def vmm_new(self, device, n):
        """A VMM allocation, mapped here: (address, its descriptor, handle)."""
        properties = struct.pack("=iiiiQQ", 1, 1, 1, device, 0, 0)
        handle, fd = ctypes.c_ulonglong(), ctypes.c_int(-1)
        self.ok(self.driver.cuMemCreate(ctypes.byref(handle), ctypes.c_size_t(n), properties, ctypes.c_ulonglong(0)))
        self.ok(self.driver.cuMemExportToShareableHandle(ctypes.byref(fd), handle, 1, ctypes.c_ulonglong(0)))
        return self.vmm_map(device, n, handle), fd.value, handle

    def vmm_map(self, device, n, handle):
        p = ctypes.c_ulonglong()
        self.ok(self.driver.cuMemAddressReserve(ctypes.byref(p), ctypes.c_size_t(n), ctypes.c_size_t(0),
                                                ctypes.c_ulonglong(0), ctypes.c_ulonglong(0)))
        self.ok(self.driver.cuMemMap(p, ctypes.c_size_t(n), ctypes.c_size_t(0), handle, ctypes.c_ulonglong(0)))
        self.ok(self.driver.cuMemSetAccess(p, ctypes.c_size_t(n), struct.pack("=iii", 1, device, 3), ctypes.c_size_t(1)))
        return p.value

    def vmm_free(self, p, n, handle):
        """Sleep: the address and the memory are given back."""
        self.ok(self.driver.cuMemUnmap(ctypes.c_ulonglong(p), ctypes.c_size_t(n)))
        self.ok(self.driver.cuMemAddressFree(ctypes.c_ulonglong(p), ctypes.c_size_t(n)))
        self.ok(self.driver.cuMemRelease(handle))


class Memory:
    """Bytes of a GPU as the rig's workers read and write them."""

    def __init__(self, cuda, base, allocation_bytes, offset, n):
        self.cuda, self.base, self.allocation_bytes, self.offset, self.n = cuda, base, allocation_bytes, offset, n
        cuda.write(base, bytes([GUARD]) * allocation_bytes)

    def __len__(self):
        return self.n

    def _range(self, key):
        start, stop, step = key.indices(self.n) if isinstance(key, slice) else (key, key + 1, 1)
        assert step == 1
        return self.base + self.offset + start, stop - start

    def __getitem__(self, key):
        data = self.cuda.read(*self._range(key))
        return data if isinstance(key, slice) else data[0]

    def __setitem__(self, key, data):
        p, n = self._range(key)
        assert n == len(data)
        self.cuda.write(p, data)

    def guards_hold(self):
        around = self.cuda.read(self.base, self.offset) + self.cuda.read(
            self.base + self.offset + self.n, self.allocation_bytes - self.offset - self.n)
        return set(around) == {GUARD}


class GpuClient(Client):
    """Segments in GPU memory; `gpu` is the device that the next one is made on."""

    def __init__(self, daemon, cuda, kind=IPC):
        super().__init__(daemon)
        self.cuda, self.kind, self.gpu, self.allocations = cuda, kind, 0, 0

    def read(self):
        self.last = super().read()
        return self.last

    def local(self):
        """The node's number of the device, by the last reply."""
        return DEVICE.unpack_from(self.last.text)[5]

    def hand_over(self, kind, n_bytes, name, offset, allocation_bytes, handle=b"", fds=(), allocation=0):
        device = DEVICE.pack(name.encode(), handle, offset, allocation_bytes, allocation, 0, 0)
        return self.ask(fds, type=SEGMENT, kind=kind, bytes=n_bytes, text=device)

    def segment(self, n_bytes, **fields):
        n_bytes, name = max(n_bytes, 1), self.cuda.uuid(self.gpu)
        self.allocations += 1
        if self.kind == IPC:
            whole = BEFORE + n_bytes + AFTER
            base, fd = self.cuda.malloc(self.gpu, whole), os.memfd_create("none")
            whole = -(-whole // 4096) * 4096  # what the stand-in makes of it
            segment = self.hand_over(IPC, n_bytes, name, BEFORE, whole, self.cuda.ipc_handle(base),
                                     allocation=self.allocations)
        else:
            whole = -(-(BEFORE + n_bytes + AFTER) // VMM_GRANULE) * VMM_GRANULE
            base, fd, self.handle = self.cuda.vmm_new(self.gpu, whole)
            segment = self.hand_over(VMM, n_bytes, name, BEFORE, whole, fds=[fd], allocation=self.allocations)
        self.fds.append(fd)
        return segment, Memory(self.cuda, base, whole, BEFORE, n_bytes)


class GpuWorker(Worker):
    def __init__(self, client, model, side, layout, rank, device, *rest, **more):
        client.gpu = device
        super().__init__(client, model, side, layout, rank, device, *rest, **more)

    def memory_free(self):
        """Takes the segment back, then frees the memory."""
        self.client.drop(self.segment)
        if self.client.kind == IPC:
            self.client.cuda.free(self.memory.base)


class HostShadowWorker(GpuWorker):
    """Live memory on the GPU, shadow memory in a memfd that the daemon pins."""

    def __init__(self, client, model, side, layout, rank, device, receive, automatic=False):
        super().__init__(client, model, side, layout, rank, device, receive, automatic, attach=False)
        self.shadow_segment, self.shadow_memory = Client.segment(client, self.n_bytes)
        self.attach()

    def messages(self):
        yield pb.AttachRequest(hello=self.hello_message(segments=[self.segment, self.shadow_segment]))
        yield pb.AttachRequest(bindings=pb.BindingPage(pieces=list(self.binding_pieces())))
        shadow = list(self.binding_pieces())
        for p in shadow:
            p.segment = 1
        yield pb.AttachRequest(bindings=pb.BindingPage(shadow=True, pieces=shadow))
        yield pb.AttachRequest(done=pb.AttachDone())


class GpuFleet(Fleet):
    def __init__(self, daemon, cuda, source, destination, source_devices, destination_devices, model="m",
                 receive=pb.RECEIVE_STAGED, automatic=True, kind=IPC, destination_worker=GpuWorker):
        self.daemon, self.model = daemon, model
        self.trainer, self.rollout = GpuClient(daemon, cuda, kind), GpuClient(daemon, cuda, kind)
        self.sources = [GpuWorker(self.trainer, model, pb.SIDE_SOURCE, source, r, d) for r, d in enumerate(source_devices)]
        self.destinations = [destination_worker(self.rollout, model, pb.SIDE_DESTINATION, destination, r, d, receive,
                                                automatic) for r, d in enumerate(destination_devices)]
