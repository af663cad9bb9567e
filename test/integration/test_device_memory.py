#!/usr/bin/python3
"""GPU memory of workers through the real daemon, on the stand-in for GPUs (make check-standin). What needs no CUDA runs
everywhere."""
import contextlib
import json
import random
import unittest
import unittest.mock

from gpu_memory import *
from standin_counters import *


HANDED_OVER = "memfd:", "standin-vmm", "pipe:", "/dev/zero"  # what may have come from a client; gRPC opens and closes others as it likes


def descriptors(pid, *words):
    """How many of a process's descriptors are of a kind that has one of these words in its link."""
    count = 0
    for x in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            count += any(word in os.readlink(x) for word in words)
    return count


@on_gpus
class Refits(unittest.TestCase):
    """Every element is compared, and every byte around the segments."""

    def check(self, f):
        for w in f.sources + f.destinations:
            self.assertTrue(w.memory.guards_hold(), f"{w.layout.name} rank {w.rank}")

    def staged(self, d, f, versions, between=None):
        served = None
        for version in versions:
            s = f.refit(version)
            self.assertEqual(s.bytes.landed, s.bytes.total)
            for w in f.destinations:
                if w.shadow:
                    self.assertEqual(w.wrong(version, w.shadow), [])
                if served is not None and w.shadow:  # what is served stays until Apply
                    self.assertEqual(w.wrong(served), [])
                w.apply(version)
                self.assertEqual(w.wrong(version), [])
            served = version
            if between is not None:
                between()
        self.check(f)

    def replace_data_plane(self, d):
        mark, pid = d.log_mark(), d.data_plane_pid()
        os.kill(pid, signal.SIGKILL)
        d.wait_log("data plane ready", mark)
        d.wait_log("data plane serves", mark)
        self.assertNotEqual(d.data_plane_pid(), pid)

    def test_staged_on_other_devices_with_a_new_data_plane_in_between(self):
        with Daemon() as d:
            f = GpuFleet(d, CUDA, small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7])
            self.staged(d, f, (1, 2, 7), lambda: self.replace_data_plane(d))

    def test_staged_on_the_sources_own_devices(self):
        with Daemon() as d:
            f = GpuFleet(d, CUDA, small_source(), small_destination(), [0, 1, 2, 3], [2, 3, 0, 1])
            self.staged(d, f, (1, 2))

    def test_in_place(self):
        with Daemon() as d:
            f = GpuFleet(d, CUDA, small_source(), small_destination(), [0, 1, 2, 3], [2, 3, 4, 5],
                         receive=pb.RECEIVE_IN_PLACE)
            for version in (1, 2):
                f.refit(version)
                for w in f.destinations:
                    self.assertEqual(w.wrong(version), [])
                self.replace_data_plane(d)
            self.check(f)

    def test_shadow_in_pinned_host_memory(self):
        with Daemon() as d:
            f = GpuFleet(d, CUDA, small_source(), small_destination(), [0, 1, 2, 3], [2, 3, 4, 5],
                         destination_worker=HostShadowWorker)
            for w in f.destinations:
                w.shadow = 0
            self.staged(d, f, (1, 2), lambda: self.replace_data_plane(d))

    def test_vmm_allocations(self):
        with Daemon() as d:
            f = GpuFleet(d, CUDA, small_source(), small_destination(), [0, 1, 2, 3], [2, 3, 4, 5], kind=VMM)
            self.staged(d, f, (1, 2), lambda: self.replace_data_plane(d))

    def several_allocations(self, receive, rows=1 << 14):
        # 4 MiB from the middle of the first allocation into the third, as torch's expandable segments have it; staged twice that
        with Counters() as counters, Daemon() as d:
            f = GpuFleet(d, CUDA, one_source(rows), one_destination(rows), [0], [1], receive=receive, kind=PARTS)
            workers = f.sources + f.destinations
            n = [len(w.memory.handles) for w in workers]
            opened = lambda: [counters.of(i, Counters.OPEN) for i in range(2)]
            self.assertEqual(n, [3, 3 if receive == pb.RECEIVE_IN_PLACE else 5])
            self.assertEqual(opened(), n)
            for version in (1, 2):
                f.refit(version)
                w = f.destinations[0]
                if w.shadow:
                    self.assertEqual(w.wrong(version, w.shadow), [])
                    w.apply(version)
                self.assertEqual(w.wrong(version), [])
                before = opened()
                self.replace_data_plane(d)  # killed: what it had open stays in the count
                self.assertEqual(opened(), [x + y for x, y in zip(before, n)])
            self.check(f)
            self.assertEqual(self.descriptors(d), (sum(n), sum(n)))  # the stand-in keeps one for each mapping, the data plane none
            left = [x - y for x, y in zip(opened(), n)]
            for w in workers:
                w.goodbye()
                w.memory_free()
            self.assertEqual(opened(), left)
            self.assertEqual(self.descriptors(d), (0, 0))

    def descriptors(self, d):
        """Of VMM allocations, that the control process and the data plane have."""
        return tuple(descriptors(pid, "standin-vmm") for pid in (d.process.pid, d.data_plane_pid()))

    @on_standin
    def test_one_tensor_over_three_vmm_allocations_in_place(self):
        self.several_allocations(pb.RECEIVE_IN_PLACE)

    @on_standin
    def test_one_tensor_over_three_vmm_allocations_staged(self):
        self.several_allocations(pb.RECEIVE_STAGED)

    def test_vmm_memory_of_several_allocations_staged(self):
        with Daemon() as d:
            f = GpuFleet(d, CUDA, small_source(), small_destination(), [0, 1, 2, 3], [2, 3, 4, 5], kind=PARTS)
            self.staged(d, f, (1, 2), lambda: self.replace_data_plane(d))

    def test_device_copies_in_the_place_of_messages(self):
        for kind in (IPC, VMM, PARTS):
            with self.subTest(kind), Daemon(**COPIES) as d:
                f = GpuFleet(d, CUDA, small_source(), small_destination(), [0, 1, 2, 3], [2, 3, 4, 5], kind=kind)
                self.staged(d, f, (1, 2), lambda: self.replace_data_plane(d))

    @on_standin
    def test_a_domain_whose_gpus_do_not_reach_each_other_is_refused_and_no_gpu_is_the_worse_for_it(self):
        d = Daemon()
        self.addCleanup(d.close)
        with unittest.mock.patch.dict(os.environ, STANDIN_PEER="0"):
            d.start()
        pid = d.data_plane_pid()
        f = GpuFleet(d, CUDA, small_source(), small_destination(), [0, 1, 2, 3], [2, 3, 4, 5])
        f.publish(1)
        f.submit(1)
        s = f.final(1)
        self.assertEqual(s.phase, pb.PHASE_ABORTED)
        self.assertRegex(s.reason, r"device [0-5] can't write into memory of device [0-5]: there is no peer access.*domains")
        self.assertEqual(d.data_plane_pid(), pid)

    @on_standin
    def test_case_b23_the_daemon_adds_its_ring_and_no_second_copy(self):
        rows, ring = 1 << 14, 4 * (64 << 10)  # 4 MiB of weights; slots of 64 KiB
        with Counters() as counters, Daemon(devices__ring_slots=4, devices__chunk_bytes=64 << 10) as d:
            f = GpuFleet(d, CUDA, one_source(rows), one_destination(rows), [0], [1])
            before = [counters.of(i, Counters.ALLOCATED) for i in range(2)]
            f.publish(1)
            f.submit(1)
            self.assertEqual(f.final(1).phase, pb.PHASE_COMMITTED)
            for i in range(2):
                self.assertLessEqual(counters.of(i, Counters.ALLOCATED) - before[i], 2 * ring + (1 << 20))
                self.assertEqual(counters.of(i, Counters.OPEN), 1)

    @on_standin
    def test_case_b23_64_mib_of_weights_take_no_more_of_the_daemon_than_its_staging(self):
        rows, columns, half, limit = 1 << 13, 1 << 13, 1 << 12, 8 << 20
        content = random.Random(23).randbytes(rows * columns)
        source = Layout("train", 1, [mesh("x", [1])], [tensor("w", [rows, columns], "uint8", "x", [None])])
        split = Layout("rollout", 2, [mesh("x", [2])], [tensor("w", [rows, columns], "uint8", "x", [1])])
        with Counters() as counters, Daemon(devices__ring_slots=4, devices__chunk_bytes=limit // 4) as d:
            f = GpuFleet(d, CUDA, source, split, [0], [4, 5], receive=pb.RECEIVE_IN_PLACE)
            before = {i: counters.of(i, Counters.ALLOCATED) for i in (0, 4, 5)}
            f.sources[0].memory[:] = content
            f.sources[0].publish(1)
            f.submit(1)
            for w in f.destinations:
                w.event("ready_requested", 1)
                w.ready(1)
            self.assertEqual(f.final(1).phase, pb.PHASE_COMMITTED)
            for w in f.destinations:
                got = bytes(w.memory[:])
                self.assertTrue(all(got[r * half:(r + 1) * half] ==
                                    content[r * columns + w.rank * half:r * columns + (w.rank + 1) * half]
                                    for r in range(rows)), w.rank)
            moved = {i: rows * columns if i == 0 else rows * half for i in before}
            end = time.monotonic() + WAIT_S
            while True:  # what is taken of the GPUs is asked for when the bytes are there, and may come after the commit
                gpus = d.status().gpu_memory
                if [gpus[i].registered_message_bytes for i in moved] == list(moved.values()) or time.monotonic() > end:
                    break
                threading.Event().wait(0.01)
            for i in before:
                gpu = gpus[i]
                # The stand-in's own count of what was allocated, and the daemon's of what it took.
                peak = counters.of(i, Counters.PEAK)
                self.assertGreaterEqual(peak - before[i], limit)
                self.assertLessEqual(peak, 2 * limit + gpu.work_bytes)
                self.assertLessEqual(peak, gpu.peak_bytes)
                self.assertLessEqual(gpu.peak_bytes - gpu.context_bytes - gpu.communicator_bytes, 2 * limit + gpu.work_bytes)
                self.assertEqual(gpu.ring_bytes, limit)
                # The ring is registered, and all that was packed or is to be unpacked went through it.
                self.assertEqual((gpu.registrations, gpu.refused_registrations, gpu.registered_bytes), (1, 0, limit))
                self.assertEqual(gpu.registered_message_bytes, moved[i], i)
                self.assertGreaterEqual(gpu.registered_messages, moved[i] // (limit // 4))
            self.assertEqual([g.registrations for i, g in enumerate(gpus) if i not in before], [0] * 5)
            ask = lambda *a: subprocess.run([BUILD / "reshardctl", *a, "--socket", d.socket], check=True, text=True,
                                            capture_output=True, timeout=WAIT_S).stdout
            shown = json.loads(ask("status", "--json"))["gpu_memory"][4]
            self.assertEqual((int(shown["peak_bytes"]), int(shown["registered_message_bytes"])), (gpus[4].peak_bytes, rows * half))
            self.assertIn("PEAK", ask("status"))


@on_gpus
class HandedOver(MemoryRefusals):
    """What of a GPU's memory is taken, and what is refused, before and at Attach."""

    def worker(self, c, segment, device=0, n=64 * 64 * 4, attach=True):
        """A source of one tensor on a segment that is there already."""
        w = Worker.__new__(Worker)
        w.client, w.model, w.side, w.layout, w.rank, w.device = c, "m", pb.SIDE_SOURCE, one_source(), 0, device
        w.receive, w.automatic, w.pieces, w.hello, w.shadow, w.segment = 0, False, None, {}, 0, segment
        w.digest, w.place = c.put_layout(w.layout), {"w": [(0, ([0, 0], [64, 64]))]}
        return w.attach() if attach else w

    def test_case_c18_a_range_that_leaves_its_allocation_is_refused(self):
        with Daemon() as d:
            c = GpuClient(d, CUDA)
            p = CUDA.malloc(0, 64 << 10)
            ask = lambda offset, n, whole=64 << 10: c.hand_over(IPC, n, CUDA.uuid(0), offset, whole, CUDA.ipc_handle(p))
            ask(0x1200, 0x800)
            ask((64 << 10) - 0x800, 0x800)
            with self.refused(-1, "leave the allocation", "65536"):
                ask((64 << 10) - 0x800 + 1, 0x800)
            with self.refused(-1, "leave the allocation"):
                ask(2 ** 64 - 1, 2)
            with self.refused(-8, "max_segment_bytes"):
                ask(0, 16, 2 ** 63)
            CUDA.free(p)

    def test_case_c25_devices_are_known_by_uuid_and_another_ones_memory_is_refused(self):
        with Daemon() as d:
            c = GpuClient(d, CUDA)
            p = CUDA.malloc(3, 1 << 16)
            ask = lambda name: c.hand_over(IPC, 64 * 64 * 4, name, 0, 1 << 16, CUDA.ipc_handle(p))
            name = CUDA.uuid(3)
            for same in (name, name.upper(), "MIG-" + name[4:], "gpu-" + name[4:].upper()):
                segment = ask(same)
                self.assertEqual(c.local(), 3)
            with self.refused(-2, "GPU-ffffffff", CUDA.uuid(0), CUDA.uuid(7)):
                ask("GPU-ffffffff-0000-0000-0000-000000000000")
            with self.refused(-2):
                ask("3")
            with refused(self, grpc.StatusCode.INVALID_ARGUMENT, "device 3", name, "device 2", CUDA.uuid(2)):
                self.worker(c, segment, device=2)
            self.worker(c, segment, device=3).publish(1)
            CUDA.free(p)

    @on_standin
    def test_case_c19_c20_one_open_handle_closed_before_the_last_answer(self):
        with Counters() as counters, Daemon() as d:
            c = GpuClient(d, CUDA)
            p, n = CUDA.malloc(0, 3 << 14), 1 << 14
            segments = [c.hand_over(IPC, n, CUDA.uuid(0), i * n, 3 * n, CUDA.ipc_handle(p)) for i in range(3)]
            workers = []
            for i, segment in enumerate(segments):
                w = self.worker(c, segment, attach=False)
                w.model = f"m{i}"
                workers.append(w.attach())
                self.assertEqual(counters.of(0, Counters.OPEN), 1)
            with self.refused(-4, "detach"):
                c.drop(segments[0])
            for i in range(3):
                self.assertEqual(counters.of(0, Counters.OPEN), 1)
                workers[i].goodbye()
                c.drop(segments[i])
            self.assertEqual(counters.of(0, Counters.OPEN), 0)
            CUDA.free(p)
            with self.refused(-2):
                c.drop(segments[0])

    def test_overlapping_segments_of_one_allocation_are_seen_as_one_memory(self):
        with Daemon() as d:
            c = GpuClient(d, CUDA)
            p, n = CUDA.malloc(0, 1 << 16), 64 * 64 * 4
            ask = lambda offset: c.hand_over(IPC, n, CUDA.uuid(0), offset, 1 << 16, CUDA.ipc_handle(p))
            w = self.worker(c, ask(0), attach=False)
            with refused(self, grpc.StatusCode.INVALID_ARGUMENT, "same memory"):
                w.attach(segments=[w.segment, ask(n - 1)])
            w.attach(segments=[w.segment, ask(n)])
            CUDA.free(p)

    def test_stale_handles_are_refused_and_the_data_plane_lives_on(self):
        exporter = ("import sys; sys.path.insert(0, sys.argv[1])\nfrom gpu_memory import *\nc = cuda(*backends.libraries(BUILD))\n"
                    "print(c.ipc_handle(c.malloc(0, 1 << 16)).hex())")
        dead = bytes.fromhex(subprocess.run([sys.executable, "-c", exporter, os.path.dirname(os.path.abspath(__file__))],
                                            capture_output=True, text=True, check=True, timeout=WAIT_S).stdout)
        with Daemon() as d:
            pid, c = d.data_plane_pid(), GpuClient(d, CUDA)
            p = CUDA.malloc(0, 1 << 16)
            freed, q = CUDA.ipc_handle(p), CUDA.malloc(0, 1 << 15)
            CUDA.free(p)
            ask = lambda handle, whole=1 << 16: c.hand_over(IPC, 64 * 64 * 4, CUDA.uuid(0), 0, whole, handle)
            for handle in (dead, freed, bytes(64)):
                with refused(self, grpc.StatusCode.INVALID_ARGUMENT, "owner must be alive"):
                    self.worker(c, ask(handle))
            with refused(self, grpc.StatusCode.INVALID_ARGUMENT, "32768", "65536 were declared"):
                self.worker(c, ask(CUDA.ipc_handle(q)))
            self.worker(c, ask(CUDA.ipc_handle(q), 1 << 15)).publish(1)
            self.assertEqual(d.data_plane_pid(), pid)
            CUDA.free(q)

    def test_case_c17_a_descriptor_that_is_no_vmm_allocation_is_refused(self):
        with Daemon() as d:
            c = GpuClient(d, CUDA)
            fd = memfd(1 << 16)
            with refused(self, grpc.StatusCode.INVALID_ARGUMENT, "no VMM allocation", "cuMemExportToShareableHandle"):
                self.worker(c, c.hand_over(VMM, 64 * 64 * 4, CUDA.uuid(0), 0, 1 << 16, fds=[fd]))
            with self.refused(-1, "descriptor"):
                c.hand_over(VMM, 4096, CUDA.uuid(0), 0, 1 << 16)
            with self.refused(-1, "without a descriptor"):
                c.hand_over(IPC, 4096, CUDA.uuid(0), 0, 1 << 16, fds=[fd])
            os.close(fd)

    def parts(self, c, fds, n=64 * 64 * 4, offset=0, whole=3 * VMM_GRANULE):
        return c.hand_over(PARTS, n, CUDA.uuid(0), offset, whole, fds=fds)

    def test_what_is_said_of_several_vmm_allocations_must_agree_with_what_comes(self):
        with Daemon() as d:
            c, pid = GpuClient(d, CUDA), d.data_plane_pid()
            p, fds, handles = CUDA.vmm_parts_new(0, 3)
            good, opened = [(VMM_GRANULE, 11), (VMM_GRANULE, 12), (VMM_GRANULE, 13)], descriptors(d.process.pid, *HANDED_OVER)

            def refused_table(parts, *words, come=fds, **more):
                table = parts_table(parts, **{k: v for k, v in more.items() if k == "seals"})
                with self.refused(-1, *words):
                    self.parts(c, [table, *come], **{k: v for k, v in more.items() if k != "seals"})
                os.close(table)

            refused_table(good, "2 descriptors", "32 bytes", come=fds[:2])
            refused_table(good[:2], "3 descriptors", "48 bytes")
            refused_table(good + [(1, 14)] * 1000, "3 descriptors", "48 bytes")
            refused_table([(2 ** 64 - VMM_GRANULE, 11), (VMM_GRANULE, 12), (3 * VMM_GRANULE, 13)], "allocation 2 of 3")
            refused_table([(3 * VMM_GRANULE, 11), (0, 12), (0, 13)], "allocation 2 of 3", "0 bytes")
            refused_table(good, "6291456 bytes together, not 6291457", whole=3 * VMM_GRANULE + 1)
            refused_table(good, "leave the allocation", offset=3 * VMM_GRANULE - 4096)
            refused_table(good, "sealed", seals=0)
            refused_table([(VMM_GRANULE, 11)] * 3, "number 11 comes twice")
            for first in (fds[0], os.pipe()[0], os.open("/dev/zero", os.O_RDONLY)):
                with self.refused(-1, "first descriptor must be a memfd"):
                    self.parts(c, [first, *fds])
            table = parts_table(good)
            with self.refused(-1, "no descriptor"):
                self.parts(c, [])
            with self.refused(-1, "1 descriptors"):
                self.parts(c, [table])
            with self.refused(-1, "kind 5"):
                c.hand_over(5, 4096, CUDA.uuid(0), 0, VMM_GRANULE, fds=[table])
            end = time.monotonic() + WAIT_S  # what was refused is closed a little after it has been told
            while descriptors(d.process.pid, *HANDED_OVER) != opened:
                self.assertLess(time.monotonic(), end, "descriptors of what was refused stay open")
                threading.Event().wait(0.02)
            # What only the device sees: sizes that are not so, and what is no VMM allocation. Nothing stays mapped, all goes on.
            lies = parts_table([(VMM_GRANULE, 21), (2 * VMM_GRANULE, 22), (VMM_GRANULE, 23)])
            with refused(self, grpc.StatusCode.INVALID_ARGUMENT, "4194304 bytes of VMM allocation 2 of 3", "declare the size"):
                self.worker(c, self.parts(c, [lies, *fds], whole=4 * VMM_GRANULE))
            host = memfd(VMM_GRANULE)
            with refused(self, grpc.StatusCode.INVALID_ARGUMENT, "VMM allocation 3 of 3", "no VMM allocation"):
                self.worker(c, self.parts(c, [parts_table([(VMM_GRANULE, 0)] * 3), *fds[:2], host]))
            segment = self.parts(c, [table, *fds])
            self.worker(c, segment).publish(1)
            self.assertEqual(d.data_plane_pid(), pid)
            CUDA.vmm_parts_free(0, p, handles)

    def test_as_many_vmm_allocations_as_one_message_takes_are_one_segment(self):
        most, n = 252, 64 * 64 * 4
        with Daemon() as d:
            c = GpuClient(d, CUDA)
            p, fd, handle = CUDA.vmm_new(0, VMM_GRANULE)
            segment = self.parts(c, [parts_table([(VMM_GRANULE, 0)] * most), *[fd] * most],
                                 offset=(most - 1) * VMM_GRANULE - n // 2, whole=most * VMM_GRANULE)
            w = self.worker(c, segment)
            w.publish(1)
            w.goodbye()
            c.drop(segment)
            CUDA.vmm_free(0, p, VMM_GRANULE, handle)

    def test_segments_that_share_vmm_allocations_are_places_in_one_memory(self):
        with Daemon() as d:
            c, n = GpuClient(d, CUDA), 64 * 64 * 4
            p, fds, handles = CUDA.vmm_parts_new(0, 5)
            ask = lambda first, last, offset: self.parts(
                c, [parts_table([(VMM_GRANULE, 31 + i) for i in range(first, last)]), *fds[first:last]], offset=offset,
                whole=(last - first) * VMM_GRANULE)
            alone = lambda i, offset: c.hand_over(VMM, n, CUDA.uuid(0), offset, VMM_GRANULE, fds=[fds[i]], allocation=31 + i)
            w = self.worker(c, ask(0, 2, VMM_GRANULE), attach=False)  # in 1
            with refused(self, grpc.StatusCode.INVALID_ARGUMENT, "same memory"):
                w.attach(segments=[w.segment, alone(1, n - 1)])
            with refused(self, grpc.StatusCode.INVALID_ARGUMENT, "same memory"):
                w.attach(segments=[w.segment, ask(1, 3, n - 1)])
            # 3 and 4 lie apart from the others, until a segment has 2 and 3.
            last = ask(3, 5, VMM_GRANULE - n // 2)
            bridge = self.parts(c, [parts_table([(VMM_GRANULE, 32), (VMM_GRANULE, 33), (VMM_GRANULE, 34)]), *fds[1:4]],
                                offset=3 * VMM_GRANULE - n)  # the end of 3
            with refused(self, grpc.StatusCode.INVALID_ARGUMENT, "same memory"):
                w.attach(segments=[w.segment, bridge, last])
            with self.refused(-1, "other neighbours"):
                self.parts(c, [parts_table([(VMM_GRANULE, 35), (VMM_GRANULE, 31), (VMM_GRANULE, 99)]), *fds[:3]])
            with self.refused(-1, "another size"):
                self.parts(c, [parts_table([(2 * VMM_GRANULE, 31), (VMM_GRANULE, 98)]), *fds[:2]])
            w.attach(segments=[w.segment, alone(1, n), ask(1, 4, VMM_GRANULE), last]).publish(1)
            CUDA.vmm_parts_free(0, p, handles)

    @on_standin  # one GPU shown as several does not know where another process has allocated
    def test_a_vmm_allocation_on_another_gpu_than_it_is_said_to_be_on_is_refused(self):
        with Daemon() as d:
            c = GpuClient(d, CUDA)
            p, fd, handle = CUDA.vmm_new(1, VMM_GRANULE)
            with refused(self, grpc.StatusCode.INVALID_ARGUMENT, "GPU 1"):  # whatever it was said to be on
                self.worker(c, c.hand_over(VMM, 64 * 64 * 4, CUDA.uuid(0), 0, VMM_GRANULE, fds=[fd]))
            CUDA.vmm_free(1, p, VMM_GRANULE, handle)
            os.close(fd)

    def test_case_c24_a_client_of_another_pid_namespace_is_told_why(self):
        program = ("import sys; sys.path.insert(0, sys.argv[1])\nfrom gpu_memory import *\n"
                   "class There:\n  socket, clients = sys.argv[2], []\n  refit = admin = lambda self, token: None\n"
                   "c = GpuClient(There(), None)\n"
                   "try:\n  c.hand_over(IPC, 16, sys.argv[3], 0, 16, bytes(64))\n"
                   "except MemoryError_ as e:\n  print(*e.args)\n")
        with Daemon() as d:
            r = subprocess.run(["unshare", "--pid", "--fork", sys.executable, "-c", program,
                                os.path.dirname(os.path.abspath(__file__)), d.socket, CUDA.uuid(0)],
                               capture_output=True, text=True, timeout=WAIT_S)
            if "unshare failed" in r.stderr or "Operation not permitted" in r.stderr:
                self.skipTest("no right to make a pid namespace")
            self.assertIn("-4 ", r.stdout, r.stderr)
            for word in ("pid namespace", "--pid=host", "VMM"):
                self.assertIn(word, r.stdout)


    @on_standin
    def test_case_c24_two_clients_of_equal_pid_in_two_namespaces_are_two(self):
        program = ("import sys; sys.path.insert(0, sys.argv[1])\nfrom gpu_memory import *\n"
                   "class There:\n  clients, channels, lines = [], [], []\n  channel, admin, refit = Daemon.channel, "
                   "Daemon.admin, Daemon.refit\n  socket = sys.argv[2]\n"
                   "l = Layout('train', 1, [mesh('x', [1])], [tensor('w', [64, 64], 'int32', 'x', [None])])\n"
                   "c = GpuClient(There(), cuda(*backends.libraries(BUILD)), VMM)\n"
                   "w = GpuWorker(c, sys.argv[3], pb.SIDE_SOURCE, l, 0, 0)\n"
                   "w.publish(1)\nprint(os.getpid(), flush=True)\nsys.stdin.read()\n")
        with Counters() as counters, Daemon() as d:
            argv = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", program,
                    os.path.dirname(os.path.abspath(__file__)), d.socket]
            with contextlib.ExitStack() as stack:
                clients = []
                for model in ("a", "b"):
                    p = stack.enter_context(subprocess.Popen(
                        [*argv, model], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                        env={k: v for k, v in os.environ.items() if k != "STANDIN_COUNTERS"}))
                    stack.callback(p.kill)
                    clients.append(p)
                said = [p.stdout.readline() for p in clients]
                if any(s == "" for s in said) and "Operation not permitted" in clients[0].stderr.read():
                    self.skipTest("no right to make a pid namespace")
                self.assertEqual(said, ["1\n", "1\n"])  # each the first of its own
                workers = lambda: {m.model: [(w.worker, w.pid) for w in m.workers if w.state != pb.WORKER_GONE]
                                   for m in d.admin().Status(pb.StatusRequest(), timeout=WAIT_S).models}
                both = workers()
                (a, pid_a), = both["a"]
                (b, pid_b), = both["b"]
                self.assertNotEqual((a, pid_a), (b, pid_b))
                self.assertNotEqual(pid_a, pid_b)  # the daemon's numbers, not theirs
                self.assertEqual(counters.of(0, Counters.OPEN), 2)
                os.kill(pid_a, signal.SIGKILL)
                counters.wait_open(0, 1, 2 * SLOW)
                self.assertEqual(workers()["b"], [(b, pid_b)])
                self.assertEqual(workers().get("a", []), [])


    def test_case_c24_a_client_that_the_daemon_can_not_see_is_told_why_and_vmm_memory_is_taken(self):
        class Inside(Daemon):
            def argv(self):
                return ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *super().argv()]

        if subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True).returncode != 0:
            self.skipTest("no right to make a pid namespace")
        with Inside() as d:
            c = GpuClient(d, CUDA)
            p = CUDA.malloc(0, 1 << 16)
            with self.refused(-4, "pid namespace", "--pid=host", "VMM"):
                c.hand_over(IPC, 4096, CUDA.uuid(0), 0, 1 << 16, CUDA.ipc_handle(p))
            CUDA.free(p)
            f = GpuFleet(d, CUDA, one_source(), one_destination(), [0], [1], kind=VMM)
            f.refit(1)
            f.destinations[0].apply(1)
            self.assertEqual(f.destinations[0].wrong(1), [])


@on_gpus
class Lives(unittest.TestCase):
    """Memory that goes: freed and made again, asleep, with its owner."""

    @on_standin
    def test_case_b24_c21_versions_in_memory_that_is_freed_and_allocated_again_each_time(self):
        with Counters() as counters, Daemon() as d:
            rollout = GpuClient(d, CUDA)
            w = GpuWorker(rollout, "m", pb.SIDE_DESTINATION, one_destination(), 0, 1, pb.RECEIVE_STAGED, True)
            trainer, allocated, addresses = GpuClient(d, CUDA), None, []
            for version in range(1, 201):
                s = GpuWorker(trainer, "m", pb.SIDE_SOURCE, one_source(), 0, 0)
                addresses.append(s.memory.base)
                s.write(version)
                s.publish(version)
                trainer.stub.Submit(pb.SubmitRequest(model="m", version=version, request_id=f"r{version}"), timeout=WAIT_S)
                w.event("committed", version)
                w.apply(version)
                self.assertEqual(w.wrong(version), [])
                s.goodbye()
                s.memory_free()
                self.assertEqual([counters.of(i, Counters.OPEN) for i in range(2)], [0, 1])
                if version == 2:
                    allocated = [counters.of(i, Counters.ALLOCATED) for i in range(2)]
            self.assertEqual([counters.of(i, Counters.ALLOCATED) for i in range(2)], allocated)
            self.assertLess(len(set(addresses)), len(addresses))  # some came to lie where another had been

    def device_memory(self, d):
        """Files of GPUs' memory that the daemon's processes have mapped or open: (how many, their bytes)."""
        files = {}
        for pid in (d.process.pid, d.data_plane_pid()):
            for fd in pathlib.Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if "standin-device" in os.readlink(fd):
                        files[os.stat(fd).st_ino] = os.stat(fd).st_size
            for line in pathlib.Path(f"/proc/{pid}/maps").read_text().splitlines():
                if "standin-device" in line:
                    begin, end = (int(x, 16) for x in line.split()[0].split("-"))
                    files.setdefault(int(line.split()[4]), end - begin)
        return len(files), sum(files.values())

    @on_standin
    def test_case_c22_memory_of_a_killed_client_is_let_go(self):
        megabytes = 32
        program = ("import sys; sys.path.insert(0, sys.argv[1])\nfrom gpu_memory import *\n"
                   "class There:\n  clients, channels, lines = [], [], []\n  channel, admin, refit = Daemon.channel, "
                   "Daemon.admin, Daemon.refit\n  socket = sys.argv[2]\n"
                   "l = Layout('train', 1, [mesh('x', [1])], [tensor('w', [int(sys.argv[3]), 1 << 20], 'uint8', 'x', [None])])\n"
                   "t = There()\nw = GpuWorker(GpuClient(t, cuda(*backends.libraries(BUILD))), 'm', pb.SIDE_SOURCE, l, 0, 0)\n"
                   "print('attached', flush=True)\nsys.stdin.read()\n")
        with Counters() as counters, Daemon() as d:
            before = self.device_memory(d)
            p = subprocess.Popen([sys.executable, "-c", program, os.path.dirname(os.path.abspath(__file__)), d.socket, str(megabytes)],
                                 stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                 env={k: v for k, v in os.environ.items() if k != "STANDIN_COUNTERS"})
            self.assertEqual(p.stdout.readline(), b"attached\n")
            self.assertEqual(counters.of(0, Counters.OPEN), 1)
            files, n = self.device_memory(d)
            self.assertEqual(files, before[0] + 1)
            self.assertGreaterEqual(n, before[1] + (megabytes << 20))
            p.kill()
            p.wait()
            p.stdin.close()
            p.stdout.close()
            end = time.monotonic() + 2 * SLOW
            counters.wait_open(0, 0, 2 * SLOW)
            while self.device_memory(d) != before:  # its pages go with the last who has them
                self.assertLess(time.monotonic(), end, f"{self.device_memory(d)}, before {before}")

    def test_case_b29_memory_that_sleeps_is_no_place_to_write_to_until_it_wakes(self):
        with Daemon() as d:
            f = GpuFleet(d, CUDA, one_source(), one_destination(), [0], [1], receive=pb.RECEIVE_IN_PLACE, kind=VMM)
            w = f.destinations[0]
            f.refit(1)
            self.assertEqual(w.wrong(1), [])
            w.goodbye()
            f.rollout.drop(w.segment)
            w.memory.free()
            f.publish(2)
            pid = d.data_plane_pid()
            f.submit(2)
            waiting = f.watch(2, lambda s: s.waiting_for)
            self.assertIn("inference worker", " ".join(waiting.waiting_for))
            again = f.destinations[0] = GpuWorker(f.rollout, "m", pb.SIDE_DESTINATION, one_destination(), 0, 1,
                                                  pb.RECEIVE_IN_PLACE, True)
            again.event("ready_requested", 2)
            again.ready(2)
            self.assertEqual(f.final(2).phase, pb.PHASE_COMMITTED)
            self.assertEqual(again.wrong(2), [])
            self.assertTrue(again.memory.guards_hold())
            self.assertEqual(d.data_plane_pid(), pid)


@on_gpus
class Events(unittest.TestCase):
    """A trainer that publishes while its writes are still to come, with an event behind them."""

    class Writes:
        """Writes of a trainer that its GPU does not begin before `go`."""

        def __init__(self, w, version):
            self.runtime, self.memory, self.gate = CUDA.runtime, w.memory, threading.Event()
            self.stream, self.event = ctypes.c_void_p(), ctypes.c_void_p()
            before = w.memory[:]
            w.write(version)
            self.data = ctypes.create_string_buffer(w.memory[:], len(w.memory))
            w.memory[:] = before
            self.callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: self.gate.wait(WAIT_S))
            CUDA.use(w.device)
            CUDA.ok(self.runtime.cudaStreamCreateWithPriority(ctypes.byref(self.stream), 1, 0))
            CUDA.ok(self.runtime.cudaEventCreateWithFlags(ctypes.byref(self.event), 2 | 4))
            CUDA.ok(self.runtime.cudaLaunchHostFunc(self.stream, self.callback, None))
            CUDA.ok(self.runtime.cudaMemcpyAsync(ctypes.c_void_p(w.memory.base + w.memory.offset), self.data,
                                                 ctypes.c_size_t(len(self.data)), 1, self.stream))
            CUDA.ok(self.runtime.cudaEventRecord(self.event, self.stream))

        def handle(self):
            out = ctypes.create_string_buffer(64)
            CUDA.ok(self.runtime.cudaIpcGetEventHandle(out, self.event))
            return out.raw

        def go(self):
            self.gate.set()

        def close(self):
            self.go()
            CUDA.ok(self.runtime.cudaStreamSynchronize(self.stream))
            CUDA.ok(self.runtime.cudaEventDestroy(self.event))
            CUDA.ok(self.runtime.cudaStreamDestroy(self.stream))

    def publish(self, w, version, event):
        return w.client.stub.Publish.future(pb.PublishRequest(worker=w.id, version=version, cuda_event=event),
                                            timeout=WAIT_S)

    def waits(self, future):
        with self.assertRaises(grpc.FutureTimeoutError):
            future.result(timeout=0.3)

    def refit_behind_an_event(self, d, publish):
        f = GpuFleet(d, CUDA, one_source(), one_destination(), [0], [1])
        f.refit(1)
        f.destinations[0].apply(1)
        writes = self.Writes(f.sources[0], 2)
        published = publish(f.sources[0], writes)
        self.waits(published)
        writes.go()
        published.result(timeout=WAIT_S)
        f.submit(2)
        self.assertEqual(f.final(2).phase, pb.PHASE_COMMITTED)
        f.destinations[0].apply(2)
        self.assertEqual(f.destinations[0].wrong(2), [])
        writes.close()

    def test_nothing_is_read_before_the_event_has_happened(self):
        for verify in ("full", "off"):
            with Daemon(refit__verify=verify) as d:
                self.refit_behind_an_event(d, lambda w, x: self.publish(w, 2, x.handle()))

    def test_other_publishes_on_that_device_are_not_held_up(self):
        with Daemon() as d:
            f = GpuFleet(d, CUDA, one_source(), one_destination(), [0], [1])
            g = GpuFleet(d, CUDA, one_source(), one_destination(), [0], [1], model="other")
            writes = self.Writes(f.sources[0], 1)
            published = self.publish(f.sources[0], 1, writes.handle())
            self.waits(published)
            g.refit(1)
            self.assertFalse(published.done())
            writes.close()
            published.result(timeout=WAIT_S)

    def test_an_event_that_does_not_happen_is_told_and_the_worker_goes_on(self):
        for ms in deadlines(600):
            try:
                return self.event_that_does_not_happen(ms)
            except grpc.RpcError as e:  # attaching, publishing and the like have the same deadline
                if e.code() != grpc.StatusCode.DEADLINE_EXCEEDED or ms == deadlines(600)[-1]:
                    raise

    def event_that_does_not_happen(self, ms):
        with Daemon(refit__memory_timeout_ms=ms) as d:
            f = GpuFleet(d, CUDA, one_source(), one_destination(), [0], [1])
            pid, writes = d.data_plane_pid(), self.Writes(f.sources[0], 1)
            with contextlib.closing(writes):
                with refused(self, grpc.StatusCode.DEADLINE_EXCEEDED, "event", f"{ms // 2} ms", "record it before publishing"):
                    self.publish(f.sources[0], 1, writes.handle()).result(timeout=WAIT_S)
            f.refit(1)
            self.assertEqual(d.data_plane_pid(), pid)

    @on_standin
    def test_a_worker_that_leaves_is_not_held_by_its_event(self):
        with Counters() as counters, Daemon() as d:
            f = GpuFleet(d, CUDA, one_source(), one_destination(), [0], [1])
            writes = self.Writes(f.sources[0], 1)
            published = self.publish(f.sources[0], 1, writes.handle())
            self.waits(published)
            f.sources[0].goodbye()
            self.assertIsNotNone(published.exception(timeout=WAIT_S))
            f.trainer.drop(f.sources[0].segment)
            self.assertEqual(counters.of(0, Counters.OPEN), 0)
            writes.close()

    def test_what_is_no_event_is_refused(self):
        with Daemon() as d:
            f = GpuFleet(d, CUDA, one_source(), one_destination(), [0], [1])
            for handle, words in ((bytes(64), ("opening an event", "cudaEventInterprocess")), (bytes(10), ("10 bytes",))):
                with refused(self, grpc.StatusCode.INVALID_ARGUMENT, *words):
                    self.publish(f.sources[0], 1, handle).result(timeout=WAIT_S)
            f.refit(1)


class Host(unittest.TestCase):
    def test_backend_host_refuses_gpu_memory_with_the_remedy(self):
        with Daemon(devices__backend="host", devices__transport="memory") as d:
            c = GpuClient(d, None)
            fd = os.memfd_create("x")
            for kind, fds in ((IPC, []), (VMM, [fd])):
                with self.assertRaises(MemoryError_) as caught:
                    c.hand_over(kind, 4096, "GPU-00000000-0000-0000-0000-000000000000", 0, 4096, bytes(64), fds)
                self.assertEqual(caught.exception.args[0], -4)
                for word in ("'host'", "memfd", "backend = cuda"):
                    self.assertIn(word, caught.exception.args[1])
            os.close(fd)


if __name__ == "__main__":
    main()
