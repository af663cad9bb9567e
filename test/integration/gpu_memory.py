"""Clients whose weights are GPU memory and that know what they hand over, for test_device_memory.py and test_device_library.py."""
from cuda_memory import *
from rig import *


def one_source(rows=64):
    return Layout("train", 1, [mesh("x", [1])], [tensor("w", [rows, 64], "int32", "x", [None])])


def one_destination(rows=64):
    return Layout("rollout", 1, [mesh("x", [1])], [tensor("w", [rows, 64], "int32", "x", [None])])


class MemoryRefusals(unittest.TestCase):
    """`with self.refused(code, word, …)`: the memory socket refuses what is in the block, with these words."""

    @contextlib.contextmanager
    def refused(self, code, *words):
        with self.assertRaises(MemoryError_) as caught:
            yield
        self.assertEqual(caught.exception.args[0], code, caught.exception.args[1])
        for word in words:
            self.assertIn(word, caught.exception.args[1])


class GpuClient(Client):
    """Segments in GPU memory; `gpu` is the device that the next one is made on."""

    def __init__(self, daemon, cuda, kind=IPC):
        super().__init__(daemon)
        self.cuda, self.kind, self.gpu = cuda, kind, 0

    def read(self):
        self.last = super().read()
        return self.last

    def local(self):
        """The node's number of the device, by the last reply."""
        return DEVICE.unpack_from(self.last.text)[5]

    def hand_over(self, kind, n_bytes, name, offset, allocation_bytes, handle=b"", fds=(), allocation=0):
        device = DEVICE.pack(name.encode(), handle, offset, allocation_bytes, allocation, 0, 0)
        return self.ask(fds, type=SEGMENT, kind=kind, bytes=n_bytes, text=device)

    def new_memory(self, n_bytes, *_):
        return Memory(self.cuda, self.gpu, self.kind, n_bytes)


class GpuWorker(Worker):
    def __init__(self, client, model, side, layout, rank, device, *rest, **more):
        client.gpu = device
        super().__init__(client, model, side, layout, rank, device, *rest, **more)

    def memory_free(self):
        """Takes the segment back, then frees the memory."""
        self.client.drop(self.segment)
        self.memory.free()


class HostShadowWorker(GpuWorker):
    """Live memory on the GPU, shadow memory in a memfd that the daemon pins."""

    def __init__(self, client, model, side, layout, rank, device, receive, automatic=False):
        super().__init__(client, model, side, layout, rank, device, receive, automatic, attach=False)
        self.shadow_memory = HostMemory(self.n_bytes)
        self.shadow_segment = client.register(self.shadow_memory)
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
