"""Open MPI and Gloo over the nodes of a testnet: set-up, start, and what they say.

A peer that is not there is no error: `setup` says what it did and what is missing, `missing` why a peer can't run.
"""
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
PYTHON = "/usr/bin/python3"  # where Debian's torch is
PACKAGES = {"openmpi": ["openmpi-bin", "libopenmpi-dev"], "gloo": ["python3-torch"]}
MODES = ("gather-broadcast", "point-to-point")
LIMIT_S, TRIES = 75, 2  # mpirun hangs now and then before its processes are up
MPI = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--mca", "plm_rsh_agent", str(HERE / "netns_rsh"),
       "--mca", "plm_rsh_no_tree_spawn", "1", "--mca", "btl", "tcp,vader,self", "--mca", "pml", "ob1",
       "--mca", "btl_tcp_if_include", "eth0", "--mca", "oob_tcp_if_include", "eth0",
       "--mca", "mpi_yield_when_idle", "1",  # more ranks than cores
       # A pipelined chain: what Open MPI chooses by itself for nine ranks sends everything eight times from one node.
       "--mca", "coll_tuned_use_dynamic_rules", "1", "--mca", "coll_tuned_bcast_algorithm", "3",
       "--mca", "coll_tuned_bcast_algorithm_segmentsize", str(1 << 20)]


class Failed(Exception):
    pass


def installed(package):
    r = subprocess.run(["dpkg-query", "-W", "-f=${db:Status-Status}", package], capture_output=True, text=True, check=False)
    return r.stdout == "installed"


def absent(peer):
    return [p for p in PACKAGES[peer] if not installed(p)]


def setup(say):
    """Installs what the peers need, where that can be done. Tells `say` what it does; never fails."""
    for peer, packages in PACKAGES.items():
        lacks = absent(peer)
        if not lacks:
            continue
        if os.getuid() != 0:
            say(f"{peer} is not installed; its rows are left out (as root: apt-get install {' '.join(lacks)})")
            continue
        size = apt("install", "--no-install-recommends", "--assume-no", *lacks).stdout
        need = [line for line in size.splitlines() if line.startswith("Need to get")] or ["size unknown"]
        say(f"installing {' '.join(lacks)} ({need[0].rstrip('.')}) …")
        r = apt("install", "--no-install-recommends", "-y", "-qq", *lacks)
        if r.returncode != 0:
            say(f"{' '.join(lacks)} can't be installed; {peer}'s rows are left out: {r.stderr.strip()[-300:]}")


def apt(*args):
    return subprocess.run(["apt-get", *args], capture_output=True, text=True, check=False,
                          env=dict(os.environ, DEBIAN_FRONTEND="noninteractive", LC_ALL="C"))


def missing(peer):
    """Why it can't run, or None."""
    lacks = absent(peer)
    return f"{' '.join(lacks)} not installed; scripts/bench --setup installs it as root" if lacks else None


def run(argv, **kw):
    for left in reversed(range(TRIES)):
        try:
            r = subprocess.run([str(a) for a in argv], capture_output=True, text=True, timeout=LIMIT_S, check=False, **kw)
            break
        except subprocess.TimeoutExpired:
            if left == 0:
                raise Failed(f"not done in {LIMIT_S} s, {TRIES} times") from None
    if r.returncode != 0:
        raise Failed(f"exit status {r.returncode}: {(r.stderr.strip() or r.stdout.strip())[-400:]}")
    return r.stdout


def seconds(output, case, modes):
    """{mode: seconds}; every element that the destinations hold must have been compared, and none be wrong."""
    elements = sum(s.rows * s.columns for s in case.destination.shards())
    out = {}
    for line in output.splitlines():
        if not line.startswith("{"):
            continue
        r = json.loads(line)
        if r["wrong"] or r["elements"] != elements:
            raise Failed(f"{r['mode']}: {r['wrong']} of {r['elements']} elements wrong, {elements} were to be compared")
        out[r["mode"]] = r["seconds"]
    if set(out) != set(modes):
        raise Failed(f"no result for {set(modes) - set(out)}")
    return out


def job_file(case):
    f = tempfile.NamedTemporaryFile(prefix="reshard-job-")
    case.write_job(f.name)
    return f


def build_mpi(build):
    program = build / "bench" / "mpi_refit"
    source = HERE / "mpi_refit.c"
    if not program.exists() or program.stat().st_mtime < source.stat().st_mtime:
        run(["mpicc", "-std=c17", "-D_GNU_SOURCE", "-O3", "-o", program, source])
    return program


def openmpi(net, case, build, modes=MODES):
    program = build_mpi(build)
    nodes = [net.nodes[i] for i in case.peer_nodes()]
    parts, i = [], 0
    with job_file(case) as job, tempfile.TemporaryDirectory(prefix="reshard-mpi-") as tmp:
        while i < len(nodes):  # ranks that follow each other on one node are one part of the command line
            n = next((k for k in range(i, len(nodes)) if nodes[k] != nodes[i]), len(nodes)) - i
            address = net.address(nodes[i])
            parts += [":"] * bool(parts) + ["-H", f"{address}:{n}", "-np", str(n), str(program), job.name, *modes]
            i += n
        hosts = " ".join(f"{net.address(n)}={net.namespace(n)}" for n in net.nodes)
        env = dict(os.environ, NETNS_HOSTS=hosts, NETNS_TMP=tmp)
        mpirun = [str(HERE / "netns_rsh"), net.address(nodes[0]), "mpirun", *MPI, *parts]
        return seconds(run(mpirun, env=env), case, modes)


def gloo(net, case, build, modes=MODES):
    nodes = [net.nodes[i] for i in case.peer_nodes()]
    with job_file(case) as job:
        return seconds(run([PYTHON, HERE / "gloo_refit.py", "--namespaces", ",".join(map(net.namespace, nodes)),
                            "--address", net.address(nodes[0]), job.name, *modes]), case, modes)


RUN = {"openmpi": openmpi, "gloo": gloo}
