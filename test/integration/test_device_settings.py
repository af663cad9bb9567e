#!/usr/bin/python3
"""Which GPUs a daemon takes, and how much of them: through the real daemon on the stand-in for GPUs (make check-standin)."""
import json
import unittest
import unittest.mock

from gpu_memory import *
from standin_counters import *

MIB = 1 << 20
CONTEXT, TABLES = 512 * MIB, 16 * MIB  # what daemon/exec/budget.c expects


def one_layout(name):
    return Layout(name, 1, [mesh("x", [1])], [tensor("w", [64, 64], "int32", "x", [None])])


class Named(Cuda):
    """Counts GPUs as a daemon does that was given these."""

    def __init__(self, gpus):
        super().__init__(*backends.libraries(BUILD))
        self.gpus = gpus

    def use(self, device):
        super().use(self.gpus[device])

    def uuid(self, device):
        return super().uuid(self.gpus[device])


def refuses(case, settings, *words):
    """The daemon does not start with these settings, and says why."""
    d = Daemon(**settings)
    try:
        r = subprocess.run(d.argv() + ["--check-config"], capture_output=True, text=True, timeout=WAIT_S)
        case.assertNotEqual(r.returncode, 0, r.stdout)
        for word in words:
            case.assertIn(word, r.stderr)
    finally:
        shutil.rmtree(d.dir)


@on_standin
class Names(unittest.TestCase):
    def test_case_c25_devices_are_the_gpus_that_are_named_in_that_order(self):
        with Counters() as counters, Daemon(devices__devices=2, devices__domains="",
                                            devices__gpus=f"{CUDA.uuid(3).upper()} {CUDA.uuid(1)[4:]}") as d:
            f = GpuFleet(d, Named([3, 1]), one_layout("train"), one_layout("rollout"), [0], [1])
            self.assertEqual([f.trainer.local(), f.rollout.local()], [0, 1])
            self.assertEqual([counters.of(i, Counters.OPEN) for i in range(4)], [0, 1, 0, 1])
            f.refit(1)
            f.destinations[0].apply(1)
            self.assertEqual(f.destinations[0].wrong(1), [])

    def test_names_that_are_none_twice_or_too_few_are_refused_at_the_start(self):
        refuses(self, {"devices__devices": 1, "devices__domains": "", "devices__gpus": "GPU-ffffffff-0000-0000-0000-000000000000"},
                "GPU-ffffffff", "is not there", CUDA.uuid(0))
        refuses(self, {"devices__devices": 2, "devices__domains": "", "devices__gpus": f"{CUDA.uuid(1)} 1"},
                "one GPU", CUDA.uuid(1), "name each once")
        refuses(self, {"devices__devices": 2, "devices__domains": "", "devices__gpus": "0"}, "1 are named", "devices = 2")


@on_standin
class Missing(unittest.TestCase):
    """backend = cuda where it can't run is refused before the daemon begins anything, with what is missing and the remedy."""

    def libraries(self, *names):
        """Of the stand-in's, these alone."""
        folder = tempfile.mkdtemp(prefix="standin-libraries-")
        self.addCleanup(shutil.rmtree, folder)
        for name in names:
            os.symlink(BUILD / "standin" / name, f"{folder}/{name}")
        return folder

    def refused(self, environment, *words):
        """By the settings' check, and by a start, whose log has nothing of a data plane."""
        with unittest.mock.patch.dict(os.environ, environment):
            refuses(self, {"devices__devices": 2, "devices__domains": ""}, *words)
            d = Daemon(devices__devices=2, devices__domains="")
            self.addCleanup(shutil.rmtree, d.dir)
            r = subprocess.run(d.argv(), capture_output=True, text=True, timeout=WAIT_S)
            self.assertNotEqual(r.returncode, 0)
            self.assertIn(words[0], r.stderr)
            self.assertNotIn("data plane", r.stdout + r.stderr)

    def test_a_machine_without_a_driver_is_told_so(self):
        here = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}
        if subprocess.run([sys.executable, "-c", "import ctypes; ctypes.CDLL('libcuda.so.1')"], env=here, capture_output=True).returncode == 0:
            self.skipTest("this machine has a driver")
        # The runtime is the real one, by the program's own path, and looks for a driver.
        self.refused({"LD_LIBRARY_PATH": self.libraries("libnvidia-ml.so.1", "libnccl.so.2")}, "no NVIDIA driver", "use backend 'host'")

    def test_a_machine_without_a_visible_gpu_or_with_too_few_is_told_so(self):
        self.refused({"STANDIN_DEVICES": "0"}, "is a GPU visible here?", "use backend 'host'")
        self.refused({"STANDIN_DEVICES": "1"}, "2 devices are set, 1 GPUs are there")

    def test_a_machine_without_nccl_or_with_an_old_one_is_told_so(self):
        folder = self.libraries(*backends.LIBRARIES[:3])
        pathlib.Path(folder, "libnccl.so.2").touch()  # found before one that the machine may have
        self.refused({"LD_LIBRARY_PATH": folder}, "libnccl.so.2", "install NCCL 2.28 or newer")
        self.refused({"STANDIN_NCCL_VERSION": "22703"}, "version 2.27.3 is installed, 2.28 or newer is needed")


@on_standin
class Shares(unittest.TestCase):
    def test_kernels_and_communicators_take_no_more_blocks_than_are_set(self):
        for blocks, ctas in ((1, 2), (3, 5)):
            with Counters() as counters, Daemon(devices__max_kernel_blocks=blocks, nccl__max_ctas=ctas) as d:
                f = GpuFleet(d, CUDA, small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7])
                f.refit(1)
                self.assertEqual({counters.of(i, Counters.CTAS) for i in range(8)}, {ctas})
                self.assertEqual(max(counters.of(i, Counters.BLOCKS) for i in range(8)), blocks)

    def test_what_is_out_of_range_is_refused(self):
        refuses(self, {"nccl__max_ctas": 65}, "max_ctas", "1 … 64")
        refuses(self, {"nccl__max_ctas": 0}, "max_ctas", "1 … 64")
        refuses(self, {"devices__max_kernel_blocks": 65536}, "max_kernel_blocks", "65535")


class TwoNodes(Daemon):
    """A daemon that sees a machine of two NUMA nodes, GPU 1 on the second: a sysfs of its own, in a mount namespace."""

    def argv(self):
        devices, online = self.dir / "pci", self.dir / "online"
        online.write_text("0-1\n")
        for i in range(2):
            (devices / f"0000:{i + 1:02x}:00.0").mkdir(parents=True, exist_ok=True)
            (devices / f"0000:{i + 1:02x}:00.0" / "numa_node").write_text(f"{i}\n")
        script = (f"mount --bind {online} /sys/devices/system/node/online && mount --bind {devices} /sys/bus/pci/devices && "
                  'exec "$@"')
        return ["unshare", "--mount", "sh", "-c", script, "sh", *super().argv()]


@on_standin
class Numa(unittest.TestCase):
    SETTINGS = {"devices__devices": 2, "devices__domains": ""}

    def policies(self, d):
        """Of the data plane's mappings of the clients' segments: what the kernel has."""
        with open(f"/proc/{d.data_plane_pid()}/numa_maps") as f:
            return {line.split()[1] for line in f if "/memfd:test" in line}

    def staged_in_host_memory(self, d):
        f = GpuFleet(d, CUDA, one_layout("train"), one_layout("rollout"), [0], [0], destination_worker=HostShadowWorker)
        f.refit(1)
        f.destinations[0].apply(1)
        self.assertEqual(f.destinations[0].wrong(1), [])

    def test_a_pinned_shadow_is_asked_for_near_its_gpu_and_the_log_says_so(self):
        if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode != 0:
            self.skipTest("no right to make a mount namespace")
        with TwoNodes(**self.SETTINGS) as d:
            d.wait_log(r"GPUs: 2 devices.*, pinned memory near NUMA nodes 0 1$")
            self.staged_in_host_memory(d)
            if os.path.exists("/proc/self/numa_maps"):
                self.assertEqual(self.policies(d), {"prefer:0"})

    def test_with_one_node_nothing_is_asked_for_and_nothing_said(self):
        if len(pathlib.Path("/sys/devices/system/node/online").read_text().strip()) > 1:
            self.skipTest("this machine has several")
        with Daemon(**self.SETTINGS) as d:
            self.assertNotIn("NUMA", d.wait_log(r"GPUs: 2 devices.*").group())
            self.staged_in_host_memory(d)
            if os.path.exists("/proc/self/numa_maps"):
                self.assertEqual(self.policies(d), {"default"})


@on_standin
class Ranges(unittest.TestCase):
    def test_a_profiler_sees_attempts_groups_packs_unpacks_fan_outs_and_fingerprints(self):
        fd, path = tempfile.mkstemp(prefix="standin-ranges-")
        os.close(fd)
        tool = BUILD / "standin" / "libnvtx-ranges.so"
        os.environ.update(NVTX_INJECTION64_PATH=str(tool), STANDIN_RANGES=path)
        try:
            with Counters() as counters, Daemon() as d:
                f = GpuFleet(d, CUDA, small_source(), small_destination(), [0, 1, 2, 3], [2, 3, 4, 5])
                for version in (1, 2):
                    f.refit(version)
                    for w in f.destinations:
                        w.apply(version)
                groups = sum(counters.of(i, 6) for i in range(8))
            lines = [line.split(" ", 1) for line in pathlib.Path(path).read_text().splitlines()]
            kinds = collections.Counter(line[0] for line in lines)
            attempts = [line[1] for line in lines if line[0] == "start"]
            self.assertEqual([a.split(" ", 2)[2] for a in attempts], ["version 1 attempt 1", "version 2 attempt 2"])
            self.assertEqual(kinds["end"], 2)
            self.assertEqual(kinds["push"], kinds["pop"])
            streams = collections.Counter(line[1].split()[1] for line in lines if line[0] == "push")
            self.assertEqual(set(streams), {"pack", "net", "unpack", "fan-out", "fingerprint"})
            self.assertEqual(streams["net"], groups)
            self.assertGreater(groups, 0)
        finally:
            del os.environ["NVTX_INJECTION64_PATH"], os.environ["STANDIN_RANGES"]
            os.unlink(path)


@on_standin
class Budget(unittest.TestCase):
    """One device, so a communicator is its tables alone."""

    def settings(self, limit):
        return {"devices__devices": 1, "devices__domains": "", "devices__threads": 1, "devices__ring_slots": 2,
                "devices__chunk_bytes": MIB, "devices__max_gpu_memory_bytes": limit}

    STREAMS = 3 * (5 * MIB // 4 + 65536 + 256) + MIB + 5 * 65536
    LEAST = CONTEXT + TABLES + STREAMS + 2 * MIB

    def refit(self, d, model):
        f = GpuFleet(d, CUDA, one_layout("train"), one_layout("rollout"), [0], [0], model=model)
        f.publish(1)
        f.submit(1)
        return f.final(1)

    def test_what_can_not_fit_is_refused_at_the_start(self):
        refuses(self, self.settings(self.LEAST - 1), "max_gpu_memory_bytes", "context 512 MiB (estimated)",
                "communicators 16 MiB", "staging ring 2 MiB", "max_ctas")

    def test_a_second_models_communicator_that_does_not_fit_ends_its_attempt_and_nothing_else(self):
        with Daemon(**self.settings(self.LEAST)) as d:
            pid = d.data_plane_pid()
            self.assertEqual(self.refit(d, "a").phase, pb.PHASE_COMMITTED)
            s = self.refit(d, "b")
            self.assertEqual(s.phase, pb.PHASE_ABORTED)
            for word in ("max_gpu_memory_bytes", "communicators 32 MiB", "raise it"):
                self.assertIn(word, s.reason)
            self.assertEqual(d.data_plane_pid(), pid)

    def test_status_and_doctor_show_the_parts_and_a_measured_context(self):
        os.environ.update(STANDIN_CONTEXT=str(48 * MIB), STANDIN_MEMORY=str(512 * MIB))
        try:
            with Counters(), Daemon(**self.settings(self.LEAST)) as d:
                self.assertEqual(self.refit(d, "a").phase, pb.PHASE_COMMITTED)
                end = time.monotonic() + WAIT_S
                while True:  # the parts are asked for after the attempt
                    g, = d.admin().Status(pb.StatusRequest(), timeout=WAIT_S).gpu_memory
                    if g.communicator_bytes or time.monotonic() > end:
                        break
                    threading.Event().wait(0.01)
                self.assertEqual((g.name, g.limit_bytes), (CUDA.uuid(0), self.LEAST))
                self.assertEqual((g.context_bytes, g.context_measured), (48 * MIB, True))
                self.assertEqual((g.communicator_bytes, g.communicator_measured), (TABLES, False))
                self.assertEqual(g.work_bytes, self.STREAMS)
                self.assertEqual(g.total_bytes, 512 * MIB)
                ask = lambda *a: subprocess.run([BUILD / "reshardctl", *a, "--socket", d.socket], capture_output=True,
                                                text=True, timeout=WAIT_S).stdout
                table = ask("status")
                for word in ("COMMUNICATORS", CUDA.uuid(0), "50.3 MB", "<= 16.8 MB"):
                    self.assertIn(word, table)
                said = [x["says"] for x in json.loads(ask("doctor", "--json"))["findings"] if x["check"] == "GPU memory"]
                self.assertEqual(len(said), 1)
                self.assertIn("context 50.3 MB, communicators 16.8 MB", said[0])
        finally:
            del os.environ["STANDIN_CONTEXT"], os.environ["STANDIN_MEMORY"]


if __name__ == "__main__":
    main()
