#!/usr/bin/env python3
"""reshardctl doctor: what it sees on this machine, and on made-up ones (libraries in place of a driver's, made here)."""
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import traceback

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("RESHARD_BUILD", ROOT / "build")).resolve()

# Two devices; the first's uuid is all of the byte 0x0a, the second's 0x0b; the second is too old, can't be reached by the first, and has 1 GiB left.
DRIVER = """
#include <string.h>
int cuInit(unsigned f) { return f != 0 ? 1 : (INIT); }
int cuDriverGetVersion(int *r) { *r = 13010; return 0; }
int cuDeviceGetCount(int *r) { *r = DEVICES; return 0; }
int cuDeviceGet(int *r, int i) { *r = 70 + i; return 0; }
int cuDeviceGetName(char *r, int n, int d) { strncpy(r, d == 70 ? "First" : "Second", n); return 0; }
int cuDeviceGetAttribute(int *r, int a, int d) { *r = a == 75 ? (d == 70 ? 9 : 7) : a == 76 ? 0 : 1; return 0; }
int cuDeviceGetUuid_v2(unsigned char *r, int d) { memset(r, UUID, 16); return 0; }
int cuDeviceCanAccessPeer(int *r, int a, int b) { *r = a > b; return 0; }
"""
NVML = """
#include <string.h>
struct memory { unsigned long long total, free, used; };
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *u, void **r)
{ *r = (void *)(long)(u[5] - 'a' + 1);
  return strcmp(u, "GPU-0a0a0a0a-0a0a-0a0a-0a0a-0a0a0a0a0a0a") && strcmp(u, "GPU-0b0b0b0b-0b0b-0b0b-0b0b-0b0b0b0b0b0b"); }
int nvmlDeviceGetMemoryInfo(void *d, struct memory *m)
{ m->total = 80ULL << 30; m->free = d == (void *)1 ? 40ULL << 30 : 1ULL << 30; m->used = m->total - m->free; return 0; }
"""
NCCL = "int ncclGetVersion(int *r) { *r = 22703; return 0; }"


def library(folder, name, source, **define):
    define.setdefault("UUID", "(d == 70 ? 0x0a : 0x0b)")
    code = folder / (name + ".c")
    code.write_text(source)
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-Wl,-soname," + name, *(f"-D{k}={v}" for k, v in define.items()),
                    "-o", folder / name, code], check=True)


def doctor(folder, *args, limit=None, before=(), **environment):
    """limit: of its locked memory, in bytes; before: a program that runs it."""
    env = {**os.environ, "LD_LIBRARY_PATH": str(folder), "RESHARD_SOCKET": str(folder / "nobody.sock"), **environment}
    lower = None if limit is None else lambda: resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
    r = subprocess.run([*before, BUILD / "reshardctl", "doctor", "--json", *map(str, args)], capture_output=True, text=True, env=env,
                       preexec_fn=lower)
    return r.returncode, json.loads(r.stdout)["findings"]


def seen(findings, check):
    return [(f["result"], f["says"]) for f in findings if f["check"] == check]


def a_machine_is_looked_at_without_a_daemon(folder):
    code, findings = doctor(folder, "--state-dir", folder)
    assert code == 0, findings
    assert seen(findings, "shared memory") == [("ok", "memfd can be allocated and sealed")]
    assert any("a synced write takes" in says for _, says in seen(findings, "ledger")), findings
    assert seen(findings, "daemon")[0][0] == "note"
    assert not list(folder.glob(".reshard-doctor*")), "it left its file behind"


def every_warning_and_failure_says_what_to_do(folder):
    for args in ((), ("--backend", "cuda", "--nodes", "--state-dir", "/proc/nowhere/at/all")):
        for f in doctor(folder, *args)[1]:
            assert f["result"] in ("ok", "note") or f["remedy"], f


def a_ledger_folder_that_is_not_there_is_a_failure(folder):
    code, findings = doctor(folder, "--state-dir", folder / "no" / "where")
    assert code == 1 and ("failed", f"there is no folder {folder / 'no'}") in seen(findings, "ledger"), findings


def settings_are_read_by_the_daemon_itself(folder):
    config = folder / "conf"
    config.write_text(f"[daemon]\nsocket = {folder}/sock\nstate_dir = {folder}\n")
    code, findings = doctor(folder, "--config", config)
    assert code == 0 and seen(findings, "config")[0][0] == "ok", findings
    assert any(says.endswith(f" free in {folder}") for _, says in seen(findings, "ledger")), findings
    config.write_text("[daemon]\nstate_dirr = /somewhere\n")
    code, findings = doctor(folder, "--config", config)
    [(result, says)] = seen(findings, "config")
    assert code == 1 and result == "failed" and "state_dirr" in says, findings


def a_ledger_that_nobody_tells_of_is_said_to_be_a_guess(folder):
    findings = doctor(folder)[1]
    assert ("note", "looked for in /var/lib/reshard, the default: no daemon answers to tell") in seen(findings, "ledger"), findings


def a_ledger_in_memory_is_a_warning(folder):
    code, findings = doctor(folder, "--state-dir", "/dev/shm")
    assert code == 0 and any(r == "warning" and "in memory" in says for r, says in seen(findings, "ledger")), findings


def devices_are_found_with_what_each_lacks(folder):
    library(folder, "libcuda.so.1", DRIVER, DEVICES=2, INIT=0)
    library(folder, "libnvidia-ml.so.1", NVML)
    library(folder, "libnccl.so.2", NCCL)
    code, findings = doctor(folder, "--backend", "cuda", "--state-dir", folder, NCCL_ALGO="Ring")
    assert code == 1
    assert seen(findings, "driver") == [("ok", "CUDA 13.1")]
    assert seen(findings, "device") == [("ok", "0: First, compute capability 9.0"), ("failed", "1: Second, compute capability 7.0")]
    assert seen(findings, "peer access") == [("warning", "missing between some of 2 devices")]
    assert seen(findings, "device memory") == [("ok", "0: 42.9 GB of 85.9 GB free"), ("warning", "1: 1.07 GB of 85.9 GB free")]
    assert seen(findings, "NCCL")[0] == ("failed", "2.27.3")
    assert ("note", "NCCL_ALGO=Ring (has to be alike on all nodes)") in seen(findings, "NCCL")
    code, findings = doctor(folder, "--state-dir", folder)
    assert code == 0 and ("note", "1: Second, compute capability 7.0") in seen(findings, "device"), findings


def free_memory_is_that_of_the_device_whatever_its_number_is(folder):
    """As with CUDA_VISIBLE_DEVICES=1,0; and one that NVML does not know."""
    library(folder, "libnvidia-ml.so.1", NVML)
    library(folder, "libcuda.so.1", DRIVER, DEVICES=2, INIT=0, UUID="(d == 70 ? 0x0b : 0x0a)")
    told = seen(doctor(folder)[1], "device memory")
    assert told == [("warning", "0: 1.07 GB of 85.9 GB free"), ("ok", "1: 42.9 GB of 85.9 GB free")], told
    library(folder, "libcuda.so.1", DRIVER, DEVICES=1, INIT=0, UUID="0x0c")
    findings = doctor(folder)[1]
    assert seen(findings, "device memory") == [("warning", "0: NVML does not tell how much is free")], findings
    assert seen(findings, "peer access") == [("ok", "one device needs none")], findings


def each_device_says_how_its_memory_can_be_shared(folder):
    library(folder, "libcuda.so.1", DRIVER, DEVICES=2, INIT=0)
    assert seen(doctor(folder)[1], "sharing memory") == [("ok", f"{i}: IPC handles, VMM descriptors") for i in (0, 1)]
    # The attributes of unified addressing and of memory by descriptors: the first has both, the second neither.
    library(folder, "libcuda.so.1", DRIVER.replace(": 1; return 0; }", ": d == 70 && (a == 41 || a == 103); return 0; }"), DEVICES=2, INIT=0)
    code, findings = doctor(folder, "--backend", "cuda", "--state-dir", folder)
    none = "1: no IPC handles, no VMM descriptors (torch expandable segments, sleep mode)"
    assert code == 1 and seen(findings, "sharing memory") == [("ok", "0: IPC handles, VMM descriptors"), ("failed", none)], findings
    remedy, = (f["remedy"] for f in findings if f["says"] == none)
    assert "host segments" in remedy, remedy


def a_limit_of_locked_memory_is_told_where_gpus_are_wanted(folder):
    """Pinned memory counts against it."""
    limit, most = 1 << 20, resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    told = [(args, doctor(folder, *args, limit=limit)[1]) for args in ((), ("--backend", "cuda"))]
    for (args, findings), result in zip(told, ("note", "warning")):
        assert seen(findings, "locked memory") == [(result, "1.05 MB at most")], (args, findings)
        assert any("LimitMEMLOCK=infinity" in f["remedy"] for f in findings if f["check"] == "locked memory"), findings
    if most == resource.RLIM_INFINITY:
        assert seen(doctor(folder)[1], "locked memory") == [("ok", "no limit")]


def interfaces_that_others_may_reach_are_told_and_loopback_alone_is_none(folder):
    """On machines of one's own: network namespaces."""
    if subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode != 0:
        print("no right to make a network namespace: interfaces are not looked at")
        return
    inside = lambda script: ["unshare", "--net", "sh", "-ec", script + '\nexec "$@"', "sh"]
    for args, grade in ((("--state-dir", folder), "note"), (("--nodes", "--state-dir", folder), "failed")):
        code, findings = doctor(folder, *args, before=inside("ip link set lo up"))
        assert seen(findings, "interface") == [(grade, "only loopback: enough for one node, not for several")], findings
        assert code == (grade == "failed"), findings
    pair = ("ip link add near0 type veth peer name far0; ip address add 192.0.2.10/24 dev near0; "
            "ip address add 192.0.2.20/24 dev far0; ip link set near0 up")
    assert seen(doctor(folder, before=inside(pair))[1], "interface") == [("note", "near0 has 192.0.2.10, but no carrier")]
    code, findings = doctor(folder, "--nodes", "--state-dir", folder, before=inside(pair + "; ip link set far0 up"))
    assert code == 0, findings  # fe80::… of both, link-local, count for nothing
    assert {says.split(",")[0] for _, says in seen(findings, "interface")} == {"near0 has 192.0.2.10", "far0 has 192.0.2.20"}, findings


def the_clock_is_told(folder):
    [(result, says)] = seen(doctor(folder)[1], "clock")
    assert (result, says) == ("warning", "not synchronised") or says.startswith(("synchronised, off by ", "its state can't be read: ")), says


def a_driver_that_does_not_start_is_told_with_its_error(folder):
    library(folder, "libcuda.so.1", DRIVER, DEVICES=2, INIT=803)
    code, findings = doctor(folder, "--backend", "cuda", "--state-dir", folder)
    assert code == 1 and seen(findings, "driver") == [("failed", "libcuda.so.1 is there, but it does not start (error 803)")], findings
    library(folder, "libcuda.so.1", DRIVER, DEVICES=0, INIT=0)
    assert seen(doctor(folder)[1], "driver") == [("note", "libcuda.so.1 is there, but no device is visible")]


def bad_usage_ends_with_2(folder):
    for args in (("--backend", "gpu"), ("somewhere",)):
        r = subprocess.run([BUILD / "reshardctl", "doctor", *args], capture_output=True, text=True)
        assert r.returncode == 2 and r.stderr.startswith("reshardctl doctor: "), r


TESTS = (a_machine_is_looked_at_without_a_daemon, every_warning_and_failure_says_what_to_do,
         settings_are_read_by_the_daemon_itself, a_ledger_that_nobody_tells_of_is_said_to_be_a_guess,
         a_ledger_folder_that_is_not_there_is_a_failure, a_ledger_in_memory_is_a_warning, devices_are_found_with_what_each_lacks,
         free_memory_is_that_of_the_device_whatever_its_number_is, each_device_says_how_its_memory_can_be_shared, a_limit_of_locked_memory_is_told_where_gpus_are_wanted,
         interfaces_that_others_may_reach_are_told_and_loopback_alone_is_none, the_clock_is_told,
         a_driver_that_does_not_start_is_told_with_its_error, bad_usage_ends_with_2)


def main():
    passed = failed = 0
    for test in TESTS:
        with tempfile.TemporaryDirectory(prefix="reshard-doctor-", dir="/var/tmp") as folder:
            try:
                test(pathlib.Path(folder))
                passed += 1
            except Exception:
                failed += 1
                print(f"--- {test.__name__}")
                traceback.print_exc(file=sys.stdout)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
