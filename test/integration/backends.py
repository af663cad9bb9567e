#!/usr/bin/python3
"""What the integration tests run on, and which of them run on what: the only place that knows.

RESHARD_BACKEND   host (the default): backend = host.
                  standin: the same tests with backend = cuda and transport = nccl, on the stand-in for GPUs
                  (test/standin/standin.h): the daemon of a build with CUDA, on libraries that run on the CPU. Results on it
                  say nothing about the speed of a GPU.
                  gpu: the same on a GPU, with the real libraries. One GPU is shown as eight by test/gpu/one_gpu.c, which
                  LD_PRELOAD has (scripts/gpu-check does all this).
RESHARD_SEGMENTS  where workers have their memory on these two: host (memfds that the daemon pins), ipc or vmm (memory of
                  their GPU, handed over by CUDA IPC or as a VMM allocation), or mixed (the default): each worker one of these,
                  by the seed.
STANDIN_SEED      of the streams' delays and of mixed; a random one where it isn't given. A failed run says which it was.

    RESHARD_BACKEND=standin STANDIN_SEED=7 test/integration/test_refit.py
    backends.py list     the files that run on the stand-in; fails where a test file is missing in FILES below
    backends.py count    how many these are
    backends.py sees SANITIZER   the files that a sanitizer ("address", "thread"; "" for none: all) can find anything in
    backends.py run PROGRAM [ARG…]   runs another program with the environment that the stand-in's daemons need
"""
import dataclasses
import os
import pathlib
import random
import sys

HERE = pathlib.Path(__file__).resolve().parent


@dataclasses.dataclass(frozen=True)
class File:
    """Whether a test file runs on the stand-in as well."""
    not_on_standin: str = ""  # why not; "": it does
    runs: str = "daemon"      # or "reshardctl" (offline: one thread), "python" (nothing that is compiled): tells which sanitizers see anything
    without: dict = dataclasses.field(default_factory=dict)  # tests that don't: Class.test (or function) -> why


OFFLINE = "no daemon takes part"
PORT = "with NCCL a daemon has no data port of its own"
LINKS = "is about the rate of links, and the stand-in's NCCL takes shared memory"
EVERYWHERE = File()
# Every test file must be here: say of a new one whether it runs on the stand-in.
FILES = {
    "test_bench_cases.py": File(OFFLINE, "reshardctl"),
    "test_broken.py": EVERYWHERE,
    "test_cases.py": EVERYWHERE,
    "test_cases_daemon.py": EVERYWHERE,
    "test_cases_versions.py": EVERYWHERE,
    "test_cases_nccl.py": File(OFFLINE, "python"),
    "test_casts.py": EVERYWHERE,
    "test_catch_up.py": EVERYWHERE,
    "test_crash.py": EVERYWHERE,
    "test_daemon.py": EVERYWHERE,
    "test_device_library.py": EVERYWHERE,
    "test_device_memory.py": EVERYWHERE,
    "test_device_settings.py": EVERYWHERE,
    "test_disk.py": EVERYWHERE,
    "test_doctor.py": File("looks at machines made of libraries of its own; no daemon takes part", "reshardctl"),
    "test_faults.py": EVERYWHERE,
    "test_gpu_check.py": File("tries a script that wants a GPU; no daemon takes part", "python"),
    "test_hostile.py": EVERYWHERE,
    "test_members.py": EVERYWHERE,
    "test_nodes.py": File(without={
        "Network.test_over_ipv4_limits_hold_and_the_refit_uses_them": LINKS}),
    "test_nodes_faults.py": File(without={
        "Strangers.test_strangers_at_data_ports_are_refused_and_the_attempt_goes_on": PORT}),
    "test_nodes_nccl.py": EVERYWHERE,
    "test_nodes_proven.py": File("flips bits on the way between nodes, which is the TCP transport's doing"),
    "test_offline.py": File(OFFLINE, "reshardctl"),
    "test_operator.py": File(without={
        "Status.test_strangers_are_counted_where_they_came_and_seen_from_everywhere": PORT}),
    "test_python.py": EVERYWHERE,
    "test_python_push.py": EVERYWHERE,
    "test_refit.py": EVERYWHERE,
    "test_refusals.py": EVERYWHERE,
    "test_reshardctl.py": EVERYWHERE,
    "test_run_tests.py": File(OFFLINE, "python"),
    "test_serve.py": EVERYWHERE,
    "test_tcp.py": File("is about transport = tcp, which backend = cuda refuses"),
    "test_sleep.py": EVERYWHERE,
    "test_testnet.py": File(OFFLINE, "python"),
    "test_times.py": EVERYWHERE,
    "test_verify.py": EVERYWHERE,
}

HOST, IPC, VMM = "host", "ipc", "vmm"
SEGMENTS = {"host": [HOST], "ipc": [IPC], "vmm": [VMM], "mixed": [HOST, IPC, VMM]}
LIBRARIES = ("libcudart.so.13", "libcuda.so.1", "libnvidia-ml.so.1", "libnccl.so.2")


def choice(variable, options):
    value = os.environ.get(variable) or options[0]
    if value not in options:
        sys.exit(f"{variable}={value}: use {', '.join(options[:-1])} or {options[-1]}")
    return value


BACKEND = choice("RESHARD_BACKEND", ["host", "standin", "gpu"])
STANDIN = BACKEND == "standin"
CUDA = BACKEND != "host"  # what calls itself CUDA
kinds = SEGMENTS[choice("RESHARD_SEGMENTS", ["mixed", "host", "ipc", "vmm"])]


def settings(transport):
    """Of [devices]: what the backend makes of a test that would have this transport on the host."""
    return {"backend": "cuda", "transport": "nccl"} if CUDA else {"transport": transport}


def one_gpu():
    """The library that shows one GPU as several (test/gpu/one_gpu.c), as this process has it loaded."""
    found = [p for p in os.environ.get("LD_PRELOAD", "").split(":") if p.endswith("libone-gpu.so")]
    if not found:
        sys.exit("RESHARD_BACKEND=gpu: LD_PRELOAD has no libone-gpu.so: scripts/gpu-check --integration makes it and runs this")
    return found[0]


def libraries(build):
    """(libcudart's, libcuda's) for this process; a sanitized build's stand-in can't be loaded here."""
    if BACKEND == "gpu":
        return one_gpu(), one_gpu()
    folder = standin_folder(build)
    return str(folder / "libcudart.so.13"), str(folder / "libcuda.so.1")


def standin_folder(build):
    return pathlib.Path(os.environ.get("RESHARD_CLIENT_STANDIN") or build / "standin").resolve()


def client_library(build):
    """libreshard.so for this process: beside the stand-in that it can load."""
    return standin_folder(build).parent / "libreshard.so" if STANDIN else build / "libreshard.so"


def begin(build):
    """Once in each process that imports rig: what the daemons that it starts need."""
    os.environ.setdefault("STANDIN_SEED", str(random.SystemRandom().randrange(1, 1 << 16)))
    os.environ.setdefault("STANDIN_DELAY_US", "50")
    if BACKEND == "gpu":
        one_gpu()
        return
    folder = build / "standin"
    missing = [name for name in LIBRARIES for place in (folder, standin_folder(build)) if not (place / name).exists()]
    if missing:
        sys.exit(f"RESHARD_BACKEND=standin: no {missing[0]} in {folder}; it needs a build with CUDA=1: make check-standin")
    os.environ.setdefault("STANDIN_DELAY_US", "50")
    os.environ.setdefault("STANDIN_DEVICES", "8")
    paths = [str(folder), *filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":"))]
    os.environ["LD_LIBRARY_PATH"] = ":".join(dict.fromkeys(paths))


def segment_kind(*what):
    """Where the memory of this worker lies: by the seed and what it is, so that a seed gives the same again."""
    return random.Random(f"{os.environ.get('STANDIN_SEED')}/{'/'.join(map(str, what))}").choice(kinds) if CUDA else HOST


def again():
    """How to run this program so again; "": there is nothing to say."""
    if not CUDA:
        return ""
    given = [f"{k}={os.environ[k]}" for k in ("STANDIN_SEED", "STANDIN_DELAY_US", "RESHARD_SEGMENTS") if k in os.environ]
    where = "a GPU" if BACKEND == "gpu" else "the stand-in for GPUs"
    return f"on {where}; the same again: RESHARD_BACKEND={BACKEND} {' '.join(given)} {' '.join(sys.argv)}"


def of(program):
    """What FILES says of a program; one that isn't a test file runs everywhere."""
    name = pathlib.Path(program).name
    if name.startswith("test_") and pathlib.Path(program).resolve().parent == HERE and name not in FILES:
        sys.exit(f"{name} is not in FILES of test/integration/backends.py: say there whether it runs on the stand-in")
    return FILES.get(name, EVERYWHERE)


def skipped(program):
    """Names of this program's tests that don't run on the backend at hand -> why."""
    return of(program).without if CUDA else {}


def check():
    there = {p.name for p in HERE.glob("test_*.py")}
    wrong = [f"{n} is not in FILES: say there whether it runs on the stand-in" for n in sorted(there - FILES.keys())]
    wrong += [f"{n} can't be executed" for n in sorted(there) if not os.access(HERE / n, os.X_OK)]
    wrong += [f"{n} is in FILES, but there is no such file" for n in sorted(FILES.keys() - there)]
    if wrong:
        sys.exit("test/integration/backends.py: " + "; ".join(wrong))


if __name__ == "__main__":
    check()
    on_both = sorted(n for n, f in FILES.items() if not f.not_on_standin)
    what = sys.argv[1:] or ["list"]
    if what == ["list"]:
        print("\n".join(f"test/integration/{n}" for n in on_both))
    elif what == ["count"]:
        print(len(on_both))
    elif what[0] == "sees" and len(what) == 2:
        blind = {"address": {"python"}, "thread": {"python", "reshardctl"}, "": set()}[what[1]]
        print("\n".join(f"test/integration/{n}" for n in sorted(FILES) if FILES[n].runs not in blind))
    elif what[0] == "run" and len(what) > 1:
        os.environ["RESHARD_BACKEND"] = "standin"
        begin(pathlib.Path(os.environ.get("RESHARD_BUILD", "build")).resolve())
        os.execv(what[1], what[1:])
    else:
        sys.exit("usage: backends.py list | count | sees SANITIZER | run PROGRAM [ARG…]")
