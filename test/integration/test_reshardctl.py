#!/usr/bin/env python3
"""reshardctl against a real daemon with real workers (demo_worker): what it prints, and its exit codes.

Needs build/reshardd, build/reshardctl and build/demo_worker (RESHARD_BUILD names another folder). Prints what fails, then
"N passed, N failed".
"""
import json
import os
import pathlib
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import traceback

import backends

BUILD = pathlib.Path(os.environ.get("RESHARD_BUILD", "build")).resolve()
SLOW = float(os.environ.get("RESHARD_SLOW", "1"))
if backends.CUDA:
    backends.begin(BUILD)
BACKEND = backends.settings(transport="memory")
OK, FAILED, USAGE, NO_DAEMON = 0, 1, 2, 3
PHASES = ["submitted", "planned", "prepared", "transferring", "staged", "accepting", "committed"]
TENSOR = {"name": "w", "shape": [64, 48], "dtype": "bfloat16", "mesh": "m"}
SOURCE = {"name": "trainer", "ranks": 2, "meshes": [{"name": "m", "shape": [2], "ranks": [0, 1]}],
          "tensors": [{**TENSOR, "placements": ["Shard(0)"]}]}
DESTINATION = {"name": "rollout", "ranks": 4, "instances": [[0, 1], [2, 3]],
               "meshes": [{"name": "m", "shape": [2, 2], "ranks": [0, 1, 2, 3]}],
               "tensors": [{**TENSOR, "placements": ["Replicate", "Shard(1)"]}]}


class World:
    """A daemon, two trainer and four inference processes that have moved three versions and stay attached."""

    def __init__(self):
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="reshardctl-"))
        self.socket = self.dir / "d.sock"
        self.processes = []
        (self.dir / "d.conf").write_text(
            f"[daemon]\nnode = n0\nsocket = {self.socket}\nstate_dir = {self.dir}\n[devices]\ndevices = 8\ndomains = 0-3 4-7\n"
            + "".join(f"{k} = {v}\n" for k, v in BACKEND.items()))
        for name, layout in ("s", SOURCE), ("d", DESTINATION):
            (self.dir / f"{name}.json").write_text(json.dumps(layout))
        self.daemon = self.start("reshardd", "--config", self.dir / "d.conf", stdout=open(self.dir / "log", "w"),
                                 stderr=subprocess.STDOUT)
        end = time.monotonic() + 20 * SLOW
        while self.ctl("status").returncode != OK:
            assert time.monotonic() < end and self.daemon.poll() is None, "no daemon"
            time.sleep(0.02)

    def start(self, program, *args, **kw):
        p = subprocess.Popen([BUILD / program, *map(str, args)], stdin=subprocess.PIPE, **kw)
        self.processes.append(p)
        return p

    def workers(self):
        common = ("--socket", self.socket, "--model", "m", "--versions", 3)
        started = [self.start("demo_worker", *common, "--layout", self.dir / "d.json", "--rank", r, "--device", 4 + r,
                              *(["--in-place"] if r > 1 else []), stdout=subprocess.PIPE, text=True) for r in range(4)]
        started += [self.start("demo_worker", *common, "--layout", self.dir / "s.json", "--source", "--rank", r, "--device", r,
                               *(["--leader"] if r == 0 else []), stdout=subprocess.PIPE, text=True) for r in range(2)]
        for p in started:
            if not any(json.loads(line)["event"] == "done" for line in p.stdout):
                raise AssertionError(f"a worker ended with {p.wait()}")

    def ctl(self, *args, socket=None, **kw):
        return subprocess.run([BUILD / "reshardctl", *map(str, args), "--socket", socket or self.socket], capture_output=True,
                              text=True, timeout=60 * SLOW, **kw)

    def json(self, *args):
        r = self.ctl(*args, "--json")
        assert r.returncode == OK, (args, r)
        return json.loads(r.stdout)

    def close(self):
        for p in reversed(self.processes):
            p.stdin.close()
            if p is self.daemon:
                p.terminate()
            try:
                p.wait(timeout=20 * SLOW)
            except subprocess.TimeoutExpired:
                p.kill()
                p.wait()
        log = (self.dir / "log").read_text()
        shutil.rmtree(self.dir)
        return [f"pid {p.pid}: {p.returncode}" for p in self.processes if p.returncode != 0], log


def fails(w, code, *args, says="", **kw):
    r = w.ctl(*args, **kw)
    assert r.returncode == code, (args, r.returncode, r.stderr)
    assert says in r.stderr, (args, r.stderr)
    if "--json" not in args:
        assert r.stdout == "", (args, r.stdout)
        return
    answer = json.loads(r.stdout)
    assert answer["ok"] is False and says in answer["error"] and answer["error"] in r.stderr, (args, r)


# ---- offline ---------------------------------------------------------------------------------------------------------------


def without_a_daemon_each_command_ends_with_3(w):
    nowhere = w.dir / "nobody.sock"
    says = f"no daemon at '{nowhere}': No such file or directory; is reshardd running? (--socket PATH or RESHARD_SOCKET "
    for args in (("status",), ("versions", "m"), ("watch", "m", 1), ("submit", "m", 1), ("abort", "m"),
                 ("evict", "00000000000000ab"), ("timeline", "m")):
        fails(w, NO_DAEMON, *args, socket=nowhere, says=says)
        fails(w, NO_DAEMON, *args, "--json", socket=nowhere, says=says)


def bad_usage_ends_with_2_daemon_or_not(w):
    nowhere = w.dir / "nobody.sock"
    for args in (("status", "--bogus"), ("status", "a", "b"), ("status", "--timeout", "0"), ("status", "--timeout", "1s"),
                 ("versions", "m", "--last", "0"), ("watch", "m", "x"), ("watch", "m", "0"), ("submit", "m"),
                 ("submit", "m", "-1"), ("submit", "m", "9223372036854775808"), ("submit", "m", 1, "--release-at", "never"),
                 ("submit", "m", 1, "--strategy", "best"), ("submit", "m", 1, "--verify", "maybe"),
                 ("submit", "m", 1, "--rule", "w"), ("submit", "m", 1, "--policy", "rollout=many"), ("abort",),
                 ("evict", "xyz"), ("evict", "0"), ("evict", "0123"), ("timeline", "m", "--last", "x")):
        for socket in (nowhere, w.socket):
            fails(w, USAGE, *args, socket=socket, says=f"reshardctl {args[0]}: ")
            assert w.ctl(*args, socket=socket).stderr.count("\n") == 1
            fails(w, USAGE, *args, "--json", socket=socket)


def help_is_on_stdout_and_no_command_is_bad_usage(w):
    run = lambda *a: subprocess.run([BUILD / "reshardctl", *a], capture_output=True, text=True)
    assert run().returncode == USAGE and run().stdout == ""
    assert run("frobnicate").returncode == USAGE and run("frobnicate").stderr.count("\n") == 1
    assert run("--version").stdout.split() == ["reshardctl", subprocess.run([BUILD / "reshardd", "--version"], text=True,
                                                                          capture_output=True).stdout.split()[1]]
    for args in (("help",), ("--help",), ("help", "watch"), ("watch", "--help"), ("timeline", "-h")):
        r = run(*args)
        assert r.returncode == OK and r.stdout.startswith("usage: reshardctl"), (args, r)


def the_socket_may_come_from_the_environment(w):
    run = lambda socket: subprocess.run([BUILD / "reshardctl", "status"], capture_output=True,
                                        env={**os.environ, "RESHARD_SOCKET": str(socket)}).returncode
    assert run(w.socket) == OK and run(w.dir / "nobody.sock") == NO_DAEMON


# ---- online ----------------------------------------------------------------------------------------------------------------


def status_shows_models_instances_and_workers(w):
    s = w.json("status", "m")
    assert s["node"] == "n0" and s["backend"] == BACKEND.get("backend", "host") and s["data_plane"].startswith("ready")
    assert s["domain_of_device"][:4] != s["domain_of_device"][4:8] and s["devices"] == 8
    [m] = s["models"]
    assert m["committed"] == 3 and m["committed_age_ns"] > 0 and "in_flight" not in m and m["queued"] == []
    assert [i["state"] for i in m["instances"]] == ["current", "current"]
    assert {(x["side"], x["rank"]) for x in m["workers"]} == {("source", 0), ("source", 1), *(("destination", r) for r in range(4))}
    assert all(x["applied"] == 3 and x["state"] == "current" for x in m["workers"] if x["side"] == "destination")
    assert all(x["pid"] in [p.pid for p in w.processes] for x in m["workers"])
    assert m["last"]["bytes"]["landed"] == 2 * 64 * 48 * 2 and m["last"]["bytes"]["network"] == 64 * 48 * 2
    text = w.ctl("status").stdout
    for part in ("committed    version 3, ", "in flight    none", "trainer → rollout", "(1.000 of the minimum)", "rollout         1  2,3",
                 "in_place", f"backend {BACKEND.get('backend', 'host')}: 8 devices in 2 domains"):
        assert part in text, (part, text)


def versions_and_timeline_tell_what_happened(w):
    v = w.json("versions")["versions"]
    assert [x["version"] for x in v] == [3, 2, 1] and all(x["phase"] == "committed" for x in v)
    assert [x["version"] for x in w.json("versions", "m", "--last", 1)["versions"]] == [3]
    [t] = w.json("timeline", "m", 2)["versions"]
    names = [x["name"] for x in t["marks"]]
    assert [x["at_ns"] for x in t["marks"]] == sorted(x["at_ns"] for x in t["marks"])
    for name in ("submitted", "begun", "gathered", "planned", "prepared", "first_byte", "last_byte", "verified", "source_released", "committed"):
        assert name in names, (name, names)
    assert names.count("accepted") == 2 and names.count("resume") == 4 and names.count("applied") >= 2
    text = w.ctl("timeline", "m", "--last", 3).stdout
    for part in ("version 3: committed", "wire ", "trainer stall ", "pause to resume ", "first_byte", "cycle: ",
                 "phases, slowest first: ", "SLOWEST", "rollout/instance 0", "first of an epoch", "P99"):
        assert part in text, (part, text)
    # The head counts this version's attempts, the rows have ids; no line of the phases is long.
    assert "version 3: committed, 1 attempt in all, " in text and "ATTEMPT ID  MARK" in text, text
    one = w.ctl("timeline", "m", 3).stdout
    phases = one[one.index("  phases, slowest first: "):one.index(" ATTEMPT ID ")].splitlines()[:-1]
    assert len(phases) >= 2 and all(len(line) <= 100 for line in phases), phases
    # Phases to the commit add up to the time from submission to commit; who was slowest comes first.
    at = {x["name"]: x["at_ns"] for x in t["marks"] if x["who"] == ""}
    to_commit = [p for p in t["phases"] if p["phase"] != "apply"]
    assert sum(p["took_ns"] for p in to_commit) == at["committed"] - at["submitted"] == t["record"]["total_ns"], t
    assert {p["phase"] for p in to_commit} >= {"queue", "gather", "plan", "prepare", "wire", "verify", "accept", "commit"}, t
    assert sum(p["took_ns"] for p in to_commit if p["from_ns"] < at["gathered"]) == at["gathered"], t
    took = [s["took_ns"] for s in t["slowest"]]
    assert took == sorted(took, reverse=True) and {s["phase"] for s in t["slowest"]} >= {"accept", "apply", "pause"}
    over = w.json("timeline", "m", "--last", 3)["over"]
    assert (over["first_of_epoch"]["n"], over["steady"]["n"]) == (1, 2), over


def two_sets_of_versions_are_compared(w):
    records = {v["version"]: v for v in w.json("versions", "m")["versions"]}
    a, b = w.json("timeline", "m", "--compare", "1-2,3-9")["sets"]
    assert (a["from"], a["to"], a["first_of_epoch"]["n"], a["steady"]["n"]) == (1, 2, 1, 1)
    assert (b["first_of_epoch"]["n"], b["steady"]["n"], b["not_committed"]) == (0, 1, 0)
    for key in ("total_ns", "wire_ns", "stall_ns"):
        assert a["first_of_epoch"][key]["median"] == records[1][key]
        assert all(b["steady"][key][q] == records[3][key] for q in ("least", "median", "p90", "most"))
    assert a["strategies"] == ["reshard"] and a["plans"] == [records[1]["plan_digest"]]
    text = w.ctl("timeline", "m", "--compare", "1-2,3").stdout
    assert "first of an epoch" in text and "median of the second over the first, steady: total " in text, text
    assert "strategy, membership, plan and config are alike in both" in text, text
    fails(w, FAILED, "timeline", "m", "--compare", "1-2,7-9", says="versions 7 to 9: none was committed")
    for bad in ("1-2", "2-1,3", "1,", "0-1,2-3", "a,b"):
        fails(w, USAGE, "timeline", "m", "--compare", bad, says="--compare")


def a_chrome_trace_has_spans_and_instants(w):
    path = w.dir / "trace.json"
    assert w.ctl("timeline", "m", 3, "--chrome", path).returncode == OK
    events = json.loads(path.read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert spans and all(e["dur"] >= 0 and e["ts"] > 1e15 for e in spans)
    names = {e["name"] for e in spans}
    assert names >= {"queue: submitted → begun", "gather: begun → gathered", "wire: first_byte → last_byte"}, names
    assert {e["name"] for e in events if e["ph"] == "i"} >= {"submitted", "committed", "resume"}
    assert json.loads(w.ctl("timeline", "m", 3, "--chrome", "-").stdout) == json.loads(path.read_text())
    assert len({e["ts"] for e in events}) > 3
    fails(w, USAGE, "timeline", "m", 3, "--chrome", w.dir / "no" / "where", says="No such file")


def what_the_daemon_refuses_ends_with_1(w):
    fails(w, FAILED, "submit", "m", 2, says="")
    fails(w, FAILED, "watch", "m", 99, says="99")
    fails(w, FAILED, "abort", "m", says="reshardctl abort: ")
    fails(w, FAILED, "versions", "nobody", says="nobody")
    fails(w, FAILED, "evict", "123456789abcdef0", says="reshardctl evict: ")


def numbers_that_are_none_are_told_by_name_and_range(w):
    version = "use a whole number, 1 … 9223372036854775807"
    for command in ("submit", "abort", "watch", "timeline"):
        for bad in ("-1", "-15x", "0", "1.5", "x", str(2**63)):
            fails(w, USAGE, command, "m", bad, says=f"VERSION '{bad}': {version}")
    for args, says in ((("versions", "m", "--last", "-4"), "--last '-4': use a whole number, 1 … 100000"),
                       (("timeline", "m", "--last", "0"), "--last '0': use a whole number, 1 … 10000"),
                       (("submit", "m", 20, "--policy", "rollout=-1"), "N a whole number, 0 … 4294967295"),
                       (("status", "--timeout", "-1"), "--timeout '-1': use seconds, 0.001 … 86400"),
                       (("submit", "m", "-1", "2"), "one argument too many: '2'"),
                       (("submit", "m"), "an argument is missing: usage: reshardctl submit MODEL VERSION"),
                       (("submit", "m", "1", "--last", "1"), "there is no option '--last'"),
                       (("submit", "m", "1", "-x"), "there is no option '-x'")):
        fails(w, USAGE, *args, says=says)
    assert w.json("submit", "--request-id", "-7", "m", 3)["request_id"] == "-7"  # a value may look like an option


def doctor_looks_at_the_ledger_of_the_daemon_that_answers(w):
    says = [f["says"] for f in w.json("doctor")["findings"] if f["check"] == "ledger"]
    assert any(text.endswith(f" free in {w.dir}") for text in says) and not any("/var/lib" in text for text in says), says


def a_committed_version_is_watched_to_its_end_at_once(w):
    r = w.ctl("watch", "m", 3)
    assert r.returncode == OK and "version 3 committed after" in r.stdout, r
    lines = [json.loads(line) for line in w.ctl("watch", "m", 3, "--json").stdout.splitlines()]
    assert lines[-1]["phase"] == "committed" and lines[-1]["version"] == 3


def a_committed_version_submitted_again_is_said_to_be_committed(w):
    r = w.ctl("submit", "m", 3)
    assert r.returncode == OK and "version 3 is committed already" in r.stdout, r
    answer = w.json("submit", "m", 3)
    assert answer["phase"] == "committed" and not answer["queued"], answer
    fails(w, FAILED, "submit", "m", 3, "--verify", "off", says="version 3 is committed already, with other content (now verify off)")


def a_version_that_nobody_publishes_can_be_aborted(w):
    first = w.json("submit", "m", 10, "--request-id", "ten", "--release-at", "committed", "--rule", "w=direct",
                   "--policy", "rollout=1")
    assert first["version"] == 10 and first["request_id"] == "ten"
    assert w.json("submit", "m", 10, "--request-id", "ten", "--release-at", "committed", "--rule", "w=direct",
                  "--policy", "rollout=1")["version"] == 10
    watched = []
    watch = threading.Thread(target=lambda: watched.append(w.ctl("watch", "m", 10)))
    watch.start()
    end = time.monotonic() + 10 * SLOW
    while "in_flight" not in w.json("status")["models"][0]:
        assert time.monotonic() < end
    assert "waiting for" in w.ctl("status").stdout
    while "(has not published this version)" not in (text := w.ctl("status").stdout):
        assert time.monotonic() < end
    assert "; waiting for trainer/ranks 0-1 (has not published this version)\n" in text, text
    assert w.json("abort", "m", "--reason", "tea time")["version"] == 10
    watch.join()
    assert "waiting for the ledger  the" not in watched[0].stdout
    assert watched[0].returncode == FAILED and "tea time" in watched[0].stdout, watched
    assert w.json("versions", "m", "--last", 1)["versions"][0]["phase"] == "aborted"
    assert ", plan -, " in w.ctl("timeline", "m", 10).stdout  # it never had one
    fails(w, FAILED, "timeline", "m", "--compare", "1-2,10-11", says="versions 10 to 11: none was committed (1 was not); see")


def a_version_whose_marks_are_lost_says_so(w):
    assert "no marks" not in w.ctl("timeline", "m", 1).stdout
    with sqlite3.connect(w.dir / "reshard.db", timeout=10 * SLOW) as ledger:
        assert ledger.execute("DELETE FROM marks WHERE version = 1").rowcount > 0
    ledger.close()
    text = w.ctl("timeline", "m", 1).stdout
    assert "version 1: committed" in text and "no marks: " in text and "SINCE" not in text, text


def submit_with_wait_ends_as_its_version_does(w):
    for more in ((), ("--json",)):
        ended = []
        version = 12 + len(more)
        waiting = threading.Thread(target=lambda: ended.append(w.ctl("submit", "m", version, "--wait", *more)))
        waiting.start()
        end = time.monotonic() + 10 * SLOW
        while w.json("status")["models"][0].get("in_flight", {}).get("version") != version:
            assert time.monotonic() < end
        assert w.ctl("abort", "m", version).returncode == OK
        waiting.join()
        assert ended[0].returncode == FAILED and "aborted by request: reshardctl abort" in ended[0].stdout, ended
        states = [json.loads(line) for line in ended[0].stdout.splitlines()] if more else None
        assert states[-1]["phase"] == "aborted" if more else f"version {version} aborted" in ended[0].stdout, ended


def an_evicted_worker_is_gone(w):
    workers = w.json("status")["models"][0]["workers"]
    victim = next(x for x in workers if x["side"] == "destination" and x["rank"] == 3)
    assert "evicted" in w.ctl("evict", victim["worker"], "--reason", "moved").stdout
    m = w.json("status")["models"][0]
    assert [x["state"] for x in m["workers"] if x["side"] == "destination" and x["rank"] == 3] in ([], ["gone"])
    assert next(i for i in m["instances"] if 3 in i["ranks"])["state"] == "gone"


TESTS = (without_a_daemon_each_command_ends_with_3, bad_usage_ends_with_2_daemon_or_not,
         help_is_on_stdout_and_no_command_is_bad_usage, the_socket_may_come_from_the_environment,
         status_shows_models_instances_and_workers, versions_and_timeline_tell_what_happened,
         two_sets_of_versions_are_compared, a_chrome_trace_has_spans_and_instants, what_the_daemon_refuses_ends_with_1,
         numbers_that_are_none_are_told_by_name_and_range, doctor_looks_at_the_ledger_of_the_daemon_that_answers,
         a_committed_version_is_watched_to_its_end_at_once, a_committed_version_submitted_again_is_said_to_be_committed,
         a_version_that_nobody_publishes_can_be_aborted, a_version_whose_marks_are_lost_says_so,
         submit_with_wait_ends_as_its_version_does, an_evicted_worker_is_gone)


def main():
    passed = failed = 0
    w = World()
    try:
        w.workers()
        for test in TESTS:
            try:
                test(w)
                passed += 1
            except Exception:
                failed += 1
                print(f"--- {test.__name__}")
                traceback.print_exc(file=sys.stdout)
    finally:
        bad, log = w.close()
    if bad:
        failed += 1
        print("ended badly:", *bad)
    if failed:
        print(log[-4000:], backends.again(), sep="\n")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
