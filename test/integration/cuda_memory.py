"""Memory of a GPU in a client's process: CUDA by ctypes, on the libraries that backends.py says.

A segment lies in the middle of its allocation, and what is around it is checked to stay what it was.
"""
import ctypes
import fcntl
import functools
import itertools
import os
import pathlib
import re
import struct

DEVICE = struct.Struct("=48s64sQQQII")  # struct memory_device of daemon/memory/memory_socket.h
PART = struct.Struct("=QQ")  # struct memory_part
IPC, VMM, PARTS = 2, 3, 4
BEFORE, AFTER, GUARD = 0x1200, 0x800, 0xEE
VMM_GRANULE = 2 << 20
HEADER = pathlib.Path(__file__).resolve().parent.parent / "standin" / "standin.h"


def counters():
    """The fields of struct standin_device_counters, all of 64 bits, as its header has them."""
    body = re.search(r"struct standin_device_counters \{(.*?)\};", HEADER.read_text(), re.S)[1]
    return re.findall(r"(\w+)(?=[,;])", re.sub(r"/\*.*?\*/", "", body, flags=re.S))


COUNTERS = counters()


def read_counters(path):
    """What a file of STANDIN_COUNTERS says of each device."""
    return [dict(zip(COUNTERS, x)) for x in struct.iter_unpack(f"={len(COUNTERS)}Q", path.read_bytes())]


class Cuda:
    """What a trainer does with CUDA: the runtime for memory, the driver for VMM."""

    def __init__(self, runtime, driver):
        self.runtime, self.driver = ctypes.CDLL(runtime), ctypes.CDLL(driver)

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
        handle, fd = self.vmm_create(device, n)
        return self.vmm_map(device, n, handle), fd, handle

    def vmm_create(self, device, n):
        self.use(device)
        properties = struct.pack("=iiiiQQ", 1, 1, 1, device, 0, 0)
        handle, fd = ctypes.c_ulonglong(), ctypes.c_int(-1)
        self.ok(self.driver.cuMemCreate(ctypes.byref(handle), ctypes.c_size_t(n), properties, ctypes.c_ulonglong(0)))
        self.ok(self.driver.cuMemExportToShareableHandle(ctypes.byref(fd), handle, 1, ctypes.c_ulonglong(0)))
        return handle, fd.value

    def vmm_map(self, device, n, handle):
        p = ctypes.c_ulonglong()
        self.ok(self.driver.cuMemAddressReserve(ctypes.byref(p), ctypes.c_size_t(n), ctypes.c_size_t(0),
                                                ctypes.c_ulonglong(0), ctypes.c_ulonglong(0)))
        self.ok(self.driver.cuMemMap(p, ctypes.c_size_t(n), ctypes.c_size_t(0), handle, ctypes.c_ulonglong(0)))
        self.ok(self.driver.cuMemSetAccess(p, ctypes.c_size_t(n), struct.pack("=iii", 1, device, 3), ctypes.c_size_t(1)))
        return p.value

    def vmm_parts_new(self, device, n_parts, part=VMM_GRANULE):
        """As torch's expandable segments: so many VMM allocations, one behind the other: (address, descriptors, handles)."""
        made = [self.vmm_create(device, part) for _ in range(n_parts)]
        p = ctypes.c_ulonglong()
        self.ok(self.driver.cuMemAddressReserve(ctypes.byref(p), ctypes.c_size_t(n_parts * part), ctypes.c_size_t(0),
                                                ctypes.c_ulonglong(0), ctypes.c_ulonglong(0)))
        for i, (handle, _) in enumerate(made):
            self.ok(self.driver.cuMemMap(ctypes.c_ulonglong(p.value + i * part), ctypes.c_size_t(part), ctypes.c_size_t(0), handle,
                                         ctypes.c_ulonglong(0)))
        self.ok(self.driver.cuMemSetAccess(p, ctypes.c_size_t(n_parts * part), struct.pack("=iii", 1, device, 3), ctypes.c_size_t(1)))
        return p.value, [fd for _, fd in made], [handle for handle, _ in made]

    def vmm_parts_free(self, device, p, handles, part=VMM_GRANULE):
        self.use(device)
        for i, handle in enumerate(handles):
            self.ok(self.driver.cuMemUnmap(ctypes.c_ulonglong(p + i * part), ctypes.c_size_t(part)))
            self.ok(self.driver.cuMemRelease(handle))
        self.ok(self.driver.cuMemAddressFree(ctypes.c_ulonglong(p), ctypes.c_size_t(len(handles) * part)))

    def vmm_free(self, device, p, n, handle):
        """Sleep: the address and the memory are given back."""
        self.use(device)
        self.ok(self.driver.cuMemUnmap(ctypes.c_ulonglong(p), ctypes.c_size_t(n)))
        self.ok(self.driver.cuMemAddressFree(ctypes.c_ulonglong(p), ctypes.c_size_t(n)))
        self.ok(self.driver.cuMemRelease(handle))


def parts_table(parts, seals=0xF):
    """The memfd that goes with several VMM allocations: (bytes, number) of each."""
    fd = os.memfd_create("parts", os.MFD_ALLOW_SEALING)
    os.write(fd, b"".join(PART.pack(*x) for x in parts))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


class Memory:
    """Bytes of a GPU as the rig's workers read and write them: as much of mmap as they use. What lies around them in the
    allocation is checked to stay what it was. Freed when nobody has it any more."""

    trespasses = []  # what was found when memory was freed
    numbers = itertools.count(1)

    def __init__(self, cuda, device, kind, n):
        self.cuda, self.device, self.kind, self.n, self.offset = cuda, device, kind, n, BEFORE
        self.fd, self.handle, self.base, self.number = -1, None, None, next(self.numbers)
        if kind == PARTS:  # from the middle of the first allocation into the last one
            self.offset = VMM_GRANULE - min(n // 2, VMM_GRANULE // 2) // 256 * 256
        whole = self.offset + n + AFTER
        if kind == IPC:
            base = cuda.malloc(device, whole)
            self.allocation_bytes = whole
        elif kind == PARTS:
            n_parts = -(-whole // VMM_GRANULE)
            self.allocation_bytes = n_parts * VMM_GRANULE
            base, self.part_fds, self.handles = cuda.vmm_parts_new(device, n_parts)
            self.table = parts_table((VMM_GRANULE, next(self.numbers)) for _ in range(n_parts))
        else:
            self.allocation_bytes = -(-whole // VMM_GRANULE) * VMM_GRANULE
            base, self.fd, self.handle = cuda.vmm_new(device, self.allocation_bytes)
        self.base = base
        cuda.write(base, bytes([GUARD]) * whole)

    def hand_over(self):
        """What the record of this segment says: (its text, descriptors)."""
        handle = self.cuda.ipc_handle(self.base) if self.kind == IPC else b""
        device = DEVICE.pack(self.cuda.uuid(self.device).encode(), handle, self.offset, self.allocation_bytes, self.number, 0, 0)
        return device, [self.fd] if self.kind == VMM else [self.table, *self.part_fds] if self.kind == PARTS else []

    def __len__(self):
        return self.n

    def _range(self, key):
        start, stop, step = slice(key, key + 1).indices(self.n) if isinstance(key, int) else key.indices(self.n)
        assert step == 1
        return self.base + self.offset + start, stop - start

    def __getitem__(self, key):
        data = self.cuda.read(*self._range(key))
        return data[0] if isinstance(key, int) else data

    def __setitem__(self, key, data):
        p, n = self._range(key)
        data = bytes([data]) if isinstance(key, int) else data
        if n != len(data):
            raise IndexError(f"{len(data)} bytes for {n}")  # as mmap does
        self.cuda.write(p, data)

    def __bytes__(self):
        return self[:]

    def guards_hold(self):
        around = self.cuda.read(self.base, self.offset) + self.cuda.read(self.base + self.offset + self.n, AFTER)
        return set(around) == {GUARD}

    def free(self):
        base, self.base = self.base, None
        if base is None:
            return
        if self.kind == IPC:
            self.cuda.free(base)
        elif self.kind == PARTS:
            self.cuda.vmm_parts_free(self.device, base, self.handles)
            for fd in (self.table, *self.part_fds):
                os.close(fd)
        else:
            self.cuda.vmm_free(self.device, base, self.allocation_bytes, self.handle)
            os.close(self.fd)

    def __del__(self):
        if self.base is None:
            return
        if not self.guards_hold():
            self.trespasses.append(f"bytes around the memory of {self.n} bytes on device {self.device} were written")
        self.free()


@functools.cache
def cuda(runtime, driver):
    """This process's CUDA, from these libraries."""
    return Cuda(runtime, driver)
