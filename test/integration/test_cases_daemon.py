#!/usr/bin/python3
"""Public fault reports about control-plane daemons, rebuilt with the real one: death, ledger, several daemons, clocks.

Where each kind of fault is shown to come out right (U unit, S simulation, I integration; "here" is this file):

the daemon itself
  a torn end of the log                   here: a_log_cut_at_any_byte…; U ledger: after_kill_9…
  zeros at the end, damage in the middle  here: zeros_behind…, a_log_damaged_in_the_middle…, a_ledger_that_is_behind…;
                                          I test_disk: DamagedFiles
  a full disk                             here: what_was_refused_on_a_full_disk…; I test_disk: FullDisks; U ledger
  durable before told                     here: nobody_is_told_before_the_disk…
  the log of another store                here: the_log_of_another_store…
  a crash at each step                    scripts/faults (make faults), I test_crash, S
  the same version, other content         I test_cases: the_same_submit_at_the_same_instant, the_same_content_again…
  order of versions                       I test_refusals: versions_out_of_order (first number is 1; there is no rollback)
  clocks that jump                        here: Clocks, Reboots
  pids used again                         here: a_lock_file_with_a_living_pid…; U rpc_listen: a_locked_path…
  the socket's file                       U rpc_listen; I test_daemon: left_over_sockets…
  a late end of an old connection         I test_faults: late_end_of_an_old_stream…
  restarts faster than a heartbeat        here: a_restart_that_nobody_saw…; I test_faults: Restarts; scripts/faults: twice
  a client killed while it registers      I test_hostile: attaches_that_stop_at_each_message; here: killed_while_registering…
  a thundering herd                       here: a_herd_of_pollers…; I test_daemon: one_commit_wakes…, ends_of_polls_are_spread;
                                          U client_fake: a_restarted_daemon…; make bench: get_committed/commit-1000-polls
  before any version                      I test_daemon: before_any_version

a death that no library reports           here: a_killed_process_is_found_within_two_seconds
"""
from cases_rig import *


class Death(Case):
    def victim(self, d, *args):
        here = pathlib.Path(__file__).resolve().parent
        p = subprocess.Popen([sys.executable, here / "client_process.py", d.socket, *map(str, args)], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True, env=dict(os.environ, RESHARD_BUILD=str(BUILD)))

        def end():
            p.kill()
            p.wait()
            p.stdin.close()
            p.stdout.close()

        self.addCleanup(end)
        self.assertEqual(p.stdout.readline().strip(), "attached")
        return p

    def test_a_killed_process_is_found_within_two_seconds(self):
        # In mid-transfer: a trainer, a rollout worker, the data plane. No library says so.
        for kind in ("source", "destination", "data plane"):
            with self.subTest(kind), Daemon(**SlowFleet.RATE) as d:
                f = SlowFleet(d, automatic=True)
                if kind == "source":
                    f.sources[1].goodbye()
                    p = self.victim(d, "source", 1, 1, "publish", 1)
                    self.assertEqual(p.stdout.readline().strip(), "published")
                    f.sources.pop(1)
                elif kind == "destination":
                    f.destinations[2].goodbye()
                    p = self.victim(d, "destination", 2, 6, "automatic")
                f.publish(1)
                f.submit(1)
                f.until_bytes_move(1)
                begin = time.monotonic()
                os.kill(d.data_plane_pid(), signal.SIGKILL) if kind == "data plane" else p.kill()
                s = f.final(1)
                self.assertLess(time.monotonic() - begin, 2 * SLOW)
                self.assertEqual(s.phase, pb.PHASE_ABORTED)
                self.assertIn({"source": "train/rank 1", "destination": "rollout/rank 2"}.get(kind, "data plane"), s.reason)

    def test_a_client_killed_while_registering_leaves_the_rank_free(self):
        # After the second message of four, after its memory went over, and after the answer was sent but not read.
        d = self.daemon()
        code = ("import sys; sys.path.insert(0, sys.argv[1]); from rig import *; from test_cases_daemon import half; "
                "half(sys.argv[2], sys.argv[3])")
        here = str(pathlib.Path(__file__).resolve().parent)
        for stage in ("half", "memory", "unread"):
            p = subprocess.Popen([sys.executable, "-c", code, here, d.socket, stage], stdout=subprocess.PIPE, text=True,
                                 env=dict(os.environ, RESHARD_BUILD=str(BUILD)))
            self.assertEqual(p.stdout.readline().strip(), "there")
            p.kill()
            p.wait()
            p.stdout.close()
            begin = time.monotonic()
            while True:
                try:
                    w = Worker(Client(d, host_memory=True), "m", pb.SIDE_DESTINATION, small_destination(), 0, 4,
                               pb.RECEIVE_STAGED)
                    break
                except grpc.RpcError as e:
                    self.assertEqual(e.code(), EXISTS)
                    self.assertLess(time.monotonic() - begin, 2 * SLOW, stage)
            self.assertEqual([(x.rank, x.worker) for x in d.status("m").models[0].workers], [(0, w.id)])
            self.assertEqual(pathlib.Path(f"/proc/{d.data_plane_pid()}/maps").read_text().count("memfd:test"), 1)
            w.goodbye()


def half(path, stage):
    """What a client does that is killed in the middle of registering; runs in a process of its own."""
    d = Daemon()
    shutil.rmtree(d.dir)
    d.socket = path
    client = Client(d, host_memory=True)
    w = Worker(client, "m", pb.SIDE_DESTINATION, small_destination(), 0, 4, pb.RECEIVE_STAGED, attach=False)
    messages = list(w.messages())
    requests = queue.Queue()
    for m in messages if stage == "unread" else messages[:2] if stage == "half" else messages[:0]:
        requests.put(m)
    stream = client.stub.Attach(iter(requests.get, None))
    if stage == "unread":
        while not any(x.rank == 0 and x.state != pb.WORKER_GONE for m in d.status().models for x in m.workers):
            pass
    print("there", flush=True)
    threading.Event().wait()
    del stream


class Herds(Case):
    def test_a_herd_of_pollers_does_not_hold_up_commits(self):
        # A thousand long polls, woken by each commit, and again at once.
        d = self.daemon()
        f = small(d, automatic=True)
        f.refit(1)
        apply_all(f, 1)
        median = lambda times: sorted(times)[len(times) // 2]
        for first in range(2, 60, 14):
            took = median(self.commits_before_a_herd(d, f, first, first + 6))
            if took < 0.5 * SLOW:
                return
            alone = median(self.commits_before_a_herd(d, f, first + 7, first + 13, herd=0))  # the machine may be busy with other things
            if took < 5 * alone:
                return
        self.fail(f"from submit to commit {took} s, without a herd {alone} s")

    def commits_before_a_herd(self, d, f, first, last, herd=1000):
        """Seconds from submit to commit of these versions; everybody hears of the last."""
        stub, ended, failures = d.refit(), threading.Semaphore(0), []

        def poll(newer):
            call = stub.GetCommitted.future(pb.GetCommittedRequest(model="m", newer_than=newer, wait_ms=20000), timeout=WAIT_S)
            call.add_done_callback(answered)

        def answered(call):
            if call.exception() is not None:
                failures.append(call.exception())
            elif call.result().version < last:
                poll(call.result().version)
                return
            ended.release()

        for _ in range(herd):
            poll(first - 1)
        times = []
        for version in range(first, last + 1):
            f.publish(version)
            begin = time.monotonic()
            f.submit(version)
            f.destinations[0].event("committed", version)
            times.append(time.monotonic() - begin)
            apply_all(f, version)
        for _ in range(herd):
            self.assertTrue(ended.acquire(timeout=WAIT_S))
        self.assertEqual(failures, [])
        return times


# --- the ledger ---------------------------------------------------------------------------------------


def ledger_of(d):
    return pathlib.Path(d.settings["daemon"]["state_dir"]) / "reshard.db"


def read_ledger(path):
    """Committed version and {version: phase}, as sqlite3 reads a copy of the files."""
    with tempfile.TemporaryDirectory(prefix="reshard-ledger-") as copy:
        for f in path.parent.glob("reshard.db*"):
            shutil.copy(f, copy)
        db = sqlite3.connect(pathlib.Path(copy) / "reshard.db")
        try:
            assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            newest = db.execute("SELECT committed FROM models WHERE model = 'm'").fetchone()
            return (newest or (0,))[0], dict(db.execute("SELECT version, phase FROM versions WHERE model = 'm'"))
        finally:
            db.close()


class Ledgers(Case):
    def history(self, n=4):
        """A daemon killed after n commits, its files, and the log's length after each commit."""
        d = self.daemon()
        f = small(d, automatic=True)
        lengths = []
        for version in range(1, n + 1):
            f.refit(version)
            apply_all(f, version)
            lengths.append(os.path.getsize(str(ledger_of(d)) + "-wal"))
        d.kill()
        self.assertEqual(lengths, sorted(set(lengths)))  # nothing was checkpointed meanwhile
        return d, {p.name: p.read_bytes() for p in ledger_of(d).parent.glob("reshard.db*")}, lengths

    def put(self, d, files):
        for p in ledger_of(d).parent.glob("reshard.db*"):
            p.unlink()
        for name, data in files.items():
            (ledger_of(d).parent / name).write_bytes(data)

    def start(self, d):
        d.start(wait="reshardd serves")
        now = committed(d)
        d.kill()
        return now

    def test_a_log_cut_at_any_byte_gives_a_prefix_of_what_was_committed(self):
        d, files, lengths = self.history()
        log = files["reshard.db-wal"]
        seen = []
        for cut in sorted({*range(lengths[1], len(log), 1499), *lengths, *(n - 1 for n in lengths[1:]), len(log)}):
            self.put(d, dict(files, **{"reshard.db-wal": log[:cut]}))
            newest, phases = read_ledger(ledger_of(d))
            complete = sum(1 for n in lengths if n <= cut)
            self.assertIn(newest, (complete, complete + 1), cut)  # its commit is durable before the length was taken
            self.assertEqual([v for v, p in phases.items() if p == phases[1]], list(range(1, newest + 1)))
            seen.append((cut, newest))
        self.assertEqual([v for _, v in seen], sorted(v for _, v in seen))
        self.assertEqual(seen[-1][1], 4)
        for cut in (lengths[2] - 1, lengths[2] + 5000, len(log) - 1):  # the daemon itself says the same
            self.put(d, dict(files, **{"reshard.db-wal": log[:cut]}))
            newest = read_ledger(ledger_of(d))[0]
            self.assertEqual(self.start(d), newest)

    def test_zeros_behind_the_log_are_its_end(self):
        d, files, _ = self.history(3)
        self.put(d, dict(files, **{"reshard.db-wal": files["reshard.db-wal"] + bytes(4096)}))
        self.assertEqual(self.start(d), 3)

    def test_a_log_damaged_in_the_middle_ends_there_and_nothing_is_invented(self):
        # SQLite by design takes what is before the damage. That the ledger is behind is said by those who know more: here
        # a worker that claims a version which is not in it is not believed.
        d, files, lengths = self.history()
        log = bytearray(files["reshard.db-wal"])
        log[(lengths[1] + lengths[2]) // 2] ^= 0x10
        self.put(d, dict(files, **{"reshard.db-wal": bytes(log)}))
        newest, phases = read_ledger(ledger_of(d))
        self.assertIn(newest, (2, 3))
        d.start()
        self.assertEqual(committed(d), newest)
        w = Worker(Client(d), "m", pb.SIDE_DESTINATION, small_destination(), 0, 4, pb.RECEIVE_STAGED, attach=False)
        w.write(4)
        w.attach(live_version=4)
        self.assertEqual((w.attached.committed, w.attached.applied), (newest, 0))

    def test_a_restored_ledger_is_said_to_be_behind_by_the_workers_that_know_better(self):
        d = self.daemon()
        f = small(d, automatic=True)
        f.refit(1)
        apply_all(f, 1)
        d.stop()
        copy = ledger_of(d).read_bytes()
        d.start()
        f = small(d, automatic=True)
        f.refit(3)
        d.stop()
        self.put(d, {"reshard.db": copy})
        d.start()
        self.assertEqual(committed(d), 1)
        f = small(d, automatic=True)
        self.assertEqual(d.status("m").models[0].worker_committed, 0)
        w = f.destinations[2]
        w.goodbye()
        w.attach(live_version=3)
        m = d.status("m").models[0]
        self.assertEqual((m.worker_committed, m.worker_committed_by, m.known_committed), (3, "rollout/rank 2", 0))
        text = subprocess.run([BUILD / "reshardctl", "status", "--socket", d.socket], check=True, text=True,
                              capture_output=True, timeout=WAIT_S).stdout
        self.assertIn("ledger       is behind, by a worker's word: rollout/rank 2 came with version 3", text)
        f.refit(2)  # a worker's word does not count
        self.assertEqual(d.status("m").models[0].worker_committed, 3)
        apply_all(f, 2)
        f.refit(3)
        self.assertEqual(d.status("m").models[0].worker_committed, 0)

    def test_memory_that_was_being_written_says_nothing_about_the_ledger(self):
        d = self.daemon()
        f = small(d, automatic=True)
        f.destinations[0].goodbye()
        w = Worker(f.rollout, "m", pb.SIDE_DESTINATION, small_destination(), 0, 4, pb.RECEIVE_IN_PLACE, attach=False)
        w.attach(live_version=7, opened_version=7)
        self.assertEqual(d.status("m").models[0].worker_committed, 0)

    def test_the_log_of_another_store_is_refused(self):
        a, files_a, _ = self.history(2)
        b, files_b, _ = self.history(3)
        b.start(wait="reshardd serves")
        b.stop()  # its log is in the file now
        mixed = {"reshard.db": ledger_of(b).read_bytes(), "reshard.db-wal": files_a["reshard.db-wal"]}
        self.put(b, mixed)
        self.assertIn(str(ledger_of(b)), self.not_started(b))
        self.assertEqual(ledger_of(b).read_bytes(), mixed["reshard.db"])  # nothing of the other one has come into it
        self.put(b, {"reshard.db": mixed["reshard.db"]})
        self.assertEqual(self.start(b), 3)

    def not_started(self, d):
        """The error that it ends with."""
        d.start(wait="not started|reshardd serves")
        line = [x for x in d.lines if "not started" in x or "serves" in x][0]
        self.assertIn("not started", line)
        self.assertEqual(d.wait(), 1)
        return line

    def test_an_older_copy_is_refused_until_somebody_means_it(self):
        d = self.daemon()
        f = small(d, automatic=True)
        f.refit(1)
        d.stop()
        copy = ledger_of(d).read_bytes()
        for version in (2, 3):  # two starts: what the first one wrote is not in the log of the second
            d.start()
            f = small(d, automatic=True)
            f.refit(version)
            with contextlib.closing(sqlite3.connect(ledger_of(d))) as db, contextlib.closing(sqlite3.connect(":memory:")) as to:
                db.backup(to)
                backup = to.serialize()  # as sqlite3's .backup makes it, while it runs
            d.kill()
        log, stamp = (pathlib.Path(f"{ledger_of(d)}{x}") for x in ("-wal", ".stamp"))
        newest = ledger_of(d).read_bytes()
        ledger_of(d).write_bytes(copy)
        line = self.not_started(d)
        for words in (str(ledger_of(d)), "an older copy is in its place", f"move {log} and {stamp} away"):
            self.assertIn(words, line)
        self.assertEqual(ledger_of(d).read_bytes(), copy)
        files = {p: p.read_bytes() for p in (log, stamp)}
        log.unlink()
        self.assertIn("an older copy", self.not_started(d))  # by the stamp
        stamp.unlink()
        self.assertEqual(self.start(d), 1)
        self.put(d, {p.name: b for p, b in files.items()} | {"reshard.db": newest})  # what belongs together
        self.assertEqual(self.start(d), 3)
        self.put(d, {"reshard.db": backup})
        self.assertEqual(self.start(d), 3)

    def test_what_was_refused_on_a_full_disk_never_shows_up(self):
        path = tempfile.mkdtemp(prefix="reshard-disk-")
        self.addCleanup(os.rmdir, path)
        r = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1M", "reshard-test", path], capture_output=True, text=True)
        if r.returncode != 0:
            self.skipTest(f"no tmpfs may be mounted here: {r.stderr.strip()}")
        self.addCleanup(subprocess.run, ["umount", "-l", path], check=True)
        d = self.daemon(daemon__state_dir=f"{path}/state")
        f = small(d, automatic=True)
        f.refit(1)
        apply_all(f, 1)
        with open(f"{path}/ballast", "wb", buffering=0) as ballast, contextlib.suppress(OSError):
            while ballast.write(b"x" * 4096):
                pass
        answered, failed = [], None
        for version in range(2, 60):
            try:
                f.submit(version)
                answered.append(version)
                f.trainer.admin.Abort(pb.AbortRequest(model="m", version=version), timeout=WAIT_S)
            except grpc.RpcError as e:
                self.assertEqual(e.code(), grpc.StatusCode.RESOURCE_EXHAUSTED, e.details())
                failed = version
                break
        os.unlink(f"{path}/ballast")
        self.assertIsNotNone(failed)
        for version in (100, 101):
            f.refit(version)
            apply_all(f, version)
        d.kill()
        newest, phases = read_ledger(ledger_of(d))
        self.assertEqual(newest, 101)
        self.assertTrue(set(answered) <= set(phases), (answered, phases))
        if failed not in answered:  # its submit was refused, not only its abort
            self.assertNotIn(failed, phases)
        self.assertEqual(self.start(d), 101)

    def test_after_a_kill_at_each_step_the_file_has_all_of_a_commit_or_nothing(self):
        for point, newest in (("submit-recorded", 1), ("submit-durable", 1), ("prepare-sent", 1), ("commit-decided", 1),
                              ("commit-recorded", None), ("commit-durable", 2)):
            with self.subTest(point), Daemon() as d:
                f = small(d, automatic=True)
                f.refit(1)
                apply_all(f, 1)
                d.kill()
                with unittest.mock.patch.dict(os.environ, RESHARD_CRASH=point):
                    d.start()
                client = Client(d)
                f.trainer = f.rollout = client
                for w in f.sources + f.destinations:
                    w.client = client
                    w.segment = client.register(w.memory)
                    client.put_layout(w.layout)
                    w.attach(live_version=1)
                f.publish(2)
                with contextlib.suppress(grpc.RpcError):
                    f.submit(2)
                self.assertEqual(d.wait(), -signal.SIGKILL)
                path = ledger_of(d)
                now, phases = read_ledger(path)
                self.assertIn(now, (1, 2) if newest is None else (newest,))
                with tempfile.TemporaryDirectory(prefix="reshard-ledger-") as copy:
                    for p in path.parent.glob("reshard.db*"):
                        shutil.copy(p, copy)
                    db = sqlite3.connect(pathlib.Path(copy) / "reshard.db")
                    accepted = db.execute("SELECT layout, instance FROM acceptances WHERE version = 2 AND accepted = 1").fetchall()
                    db.close()
                self.assertEqual(len(accepted), 2 if now == 2 else 0)  # in one transaction with the decision
                d.start()
                self.assertEqual(committed(d), now)
                v = [x for x in d.admin().Versions(pb.VersionsRequest(model="m"), timeout=WAIT_S).versions if x.version == 2]
                if point != "submit-recorded":  # it may have become durable or not
                    self.assertEqual(v[0].phase, pb.PHASE_COMMITTED if now == 2 else pb.PHASE_ABORTED)

    def test_a_lock_file_with_a_living_pid_in_it_is_no_lock(self):
        sleeper = subprocess.Popen(["/bin/sleep", "1000"])
        self.addCleanup(lambda: (sleeper.kill(), sleeper.wait()))
        d = Daemon()
        state = pathlib.Path(d.settings["daemon"]["state_dir"])
        state.mkdir()
        for p in (state / "reshard.db.lock", pathlib.Path(d.socket + ".lock")):
            p.write_text(f"{sleeper.pid}\n")
        self.enter(d.start())
        self.assertIsNone(sleeper.poll())
        d.stop()
        self.assertIsNone(sleeper.poll())

    def test_a_restart_that_nobody_saw_is_told_by_the_incarnation(self):
        d = self.daemon()
        f = small(d, automatic=True)
        f.refit(1)
        before = d.status().incarnation
        old = f.trainer
        for tries_left in reversed(range(10)):  # the machine may be busy
            begin = time.monotonic()
            d.kill()
            d.start(wait="reshardd serves")
            took = time.monotonic() - begin
            if took < 1 * SLOW:  # less than anybody's beat
                break
            self.assertGreater(tries_left, 0, took)
        self.assertNotEqual(d.status().incarnation, before)
        with refused(self, grpc.StatusCode.UNAUTHENTICATED):
            d.refit(old.token).GetCommitted(pb.GetCommittedRequest(model="m"), timeout=WAIT_S)
        self.assertEqual([w for m in d.status().models for w in m.workers if w.state != pb.WORKER_GONE], [])
        d.wait_log("data plane serves")
        Worker(Client(d), "m", pb.SIDE_SOURCE, small_source(), 0, 0)  # the rank is free at once


# --- several daemons ------------------------------------------------------------------------------------


class ManyDaemons(Case):
    def nodes(self, n, **settings):
        return cluster.of_case(self, cluster.Nodes(n, **settings))

    def rollouts(self, nodes, receivers, **more):
        """The coordinator has the source; each receiver is an instance of its own."""
        k = len(receivers)
        source = whole("train", [("w", [64, 48], "int32")])
        destination = Layout("rollout", k, [mesh("dp", [k])], [tensor("w", [64, 48], "int32", "dp", [None])],
                             instances=[[i] for i in range(k)])
        return cluster.Fleet(nodes, source, destination, ["n0:0"], [f"{x}:0" for x in receivers], **more)

    def committed_everywhere(self, nodes, version, names=None):
        """Every daemon says so, within the age that it tells of its copy."""
        for name in names or nodes.names:
            reply = nodes[name].refit().GetCommitted(pb.GetCommittedRequest(model="m", newer_than=version - 1, wait_ms=5000),
                                                     timeout=WAIT_S)
            self.assertEqual(reply.version, version, name)

    def test_one_of_four_daemons_dies_before_the_commit_and_none_has_it(self):
        nodes = self.nodes(5)
        f = self.rollouts(nodes, ["n1", "n2", "n3", "n4"], automatic=False)
        f.refit(1)
        f.check(1)
        f.publish(2)
        f.submit(2)
        for w in f.destinations:
            e = w.event("accept_requested", 2)
            if w.node != "n3":
                w.accept(2, e.attempt)
        waiting = f.watch(2, lambda s: s.phase == pb.PHASE_ACCEPTING and len(s.waiting_for) == 1)
        self.assertIn("rank 2", waiting.waiting_for[0])
        nodes["n3"].kill()
        self.ends_aborted(f, 2, "rollout/rank 2")
        self.committed_everywhere(nodes, 1, ["n0", "n1", "n2", "n4"])
        for w in f.destinations:
            self.assertEqual(w.wrong(1), [])
            if w.node != "n3":
                with self.assertRaises(grpc.RpcError):
                    w.apply(2)
        nodes["n3"].restart()
        f.forget("n3")
        f.destinations.insert(2, f.attach_destination(2, "n3:0"))
        f.publish(2)
        attempt = f.submit(2, "again").attempt
        for w in f.destinations:
            e = w.event("accept_requested", 2, attempt)
            w.accept(2, e.attempt)
            w.accept(2, e.attempt)  # the answer was lost: the same again
        self.assertEqual(f.watch(2, lambda s: s.attempt >= attempt and s.phase in (pb.PHASE_COMMITTED, pb.PHASE_ABORTED)).phase,
                         pb.PHASE_COMMITTED)
        self.committed_everywhere(nodes, 2)
        for name in nodes.names:
            with refused(self, PRECONDITION, "2"):
                Client(nodes[name]).admin.Abort(pb.AbortRequest(model="m", version=2), timeout=WAIT_S)
        f.check(2)

    def test_a_ledger_that_is_behind_its_members_is_said(self):
        # The coordinator's log loses its last commit; a member was told of it.
        nodes = self.nodes(2)
        f = self.rollouts(nodes, ["n1"])
        lengths = []
        log = nodes.dir / "state-n0" / "reshard.db-wal"
        for version in (1, 2, 3):
            f.refit(version)
            f.check(version)
            self.committed_everywhere(nodes, version)
            lengths.append(log.stat().st_size)
        nodes["n0"].kill()
        os.truncate(log, lengths[1])
        newest, phases = read_ledger(log.parent / "reshard.db")
        self.assertEqual(newest, 2)
        nodes["n0"].restart()
        nodes.wait_joined(nodes.names)
        f.side_clients.clear()
        f.sources = [f.attach_source(0, "n0:0")]
        f.trainer = f.client("n0", "trainer")
        with refused(self, PRECONDITION, "3", "ledger is behind"):
            f.submit(3, "three")
        f.refit(4)
        f.check(4)
        self.committed_everywhere(nodes, 4)

    def test_a_restarted_rollout_node_says_that_its_engine_is_empty(self):
        nodes = self.nodes(3)
        f = self.rollouts(nodes, ["n1", "n2"])
        f.refit(7)
        f.check(7)
        nodes["n2"].kill()
        nodes["n2"].restart()
        f.forget("n2")
        w = f.attach_destination(1, "n2:0")
        self.assertEqual((w.attached.committed, w.attached.applied), (7, 0))
        c = w.client.stub.GetCommitted(pb.GetCommittedRequest(model="m", worker=w.id), timeout=WAIT_S)
        self.assertEqual((c.version, c.applied), (7, 0))
        self.assertEqual(set(w.memory[:w.shadow]), {POISON})
        f.destinations.append(w)
        w.event("committed", 7)  # from the other one, by itself, into its shadow memory; then it is current
        w.apply(7)
        f.check(7)
        f.refit(8)
        f.check(8)

    def test_a_daemon_with_another_staging_size_is_refused_by_name_on_both_sides(self):
        nodes = self.nodes(2)
        nodes["n1"].kill()
        same, nodes.config = nodes.config, nodes.dir / "other.conf"
        nodes.config.write_text(same.read_text().replace("chunk_bytes = 65536", "chunk_bytes = 4096"))
        mark = nodes["n0"].log_mark()
        nodes["n1"].start(wait=None)
        m = nodes["n0"].wait_log("chunk_bytes differs: .*", since=mark)
        for word in ("n1 has 4096", "65536"):
            self.assertIn(word, m[0])
        nodes["n1"].wait_log("chunk_bytes differs")
        self.assertIn("chunk_bytes differs", nodes["n1"].status().session)
        nodes["n1"].kill()
        nodes.config = same
        nodes["n1"].restart()
        f = self.rollouts(nodes, ["n1"])
        f.refit(1)
        f.check(1)


# --- what the daemon's calls to the system show ---------------------------------------------------------

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

/* A page shared with the test: seconds that the wall clock is moved by; whether to hold up syncs; how many wait. */
static struct { volatile int64_t seconds, hold, waiting, synced; } *page;

__attribute__((constructor)) static void start(void)
{
    int fd = open(getenv("SHIM_PAGE"), O_RDWR | O_CLOEXEC);
    page = fd < 0 ? NULL : mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (page == NULL || page == MAP_FAILED)
        abort();
    close(fd);
}

int clock_gettime(clockid_t id, struct timespec *t)
{
    static int (*real)(clockid_t, struct timespec *);
    if (real == NULL)
        real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int r = real(id, t);
    if (r == 0 && page != NULL && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE))
        t->tv_sec += page->seconds;
    return r;
}

int gettimeofday(struct timeval *restrict t, void *restrict zone)
{
    struct timespec now;
    (void)zone;
    int r = clock_gettime(CLOCK_REALTIME, &now);
    t->tv_sec = now.tv_sec;
    t->tv_usec = now.tv_nsec / 1000;
    return r;
}

time_t time(time_t *ret)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (ret != NULL)
        *ret = now.tv_sec;
    return now.tv_sec;
}

static void hold(void)
{
    __atomic_add_fetch(&page->waiting, 1, __ATOMIC_SEQ_CST);
    while (page->hold)
        usleep(1000);
    __atomic_add_fetch(&page->synced, 1, __ATOMIC_SEQ_CST);
}

int fdatasync(int fd)
{
    static int (*real)(int);
    if (real == NULL)
        real = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
    hold();
    return real(fd);
}

int fsync(int fd)
{
    static int (*real)(int);
    if (real == NULL)
        real = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    hold();
    return real(fd);
}
"""


def ends_when_it_should(case, f, version, meanwhile=lambda: None):
    """A version that nobody publishes ends at its prepare deadline, within a few times that; a busy machine gets a longer one, and
    another version. Returns the last of them."""
    for ms in deadlines(500):
        f.submit(version, prepare_timeout_ms=ms)
        begin = time.monotonic()
        meanwhile()
        case.ends_aborted(f, version, "train/rank 0")
        took = time.monotonic() - begin
        if took < 6 * ms / 1000:
            return version
        version += 1
    case.fail(f"the deadline of {ms} ms came after {took} s")


class Shim:
    """A library that a daemon is started under: the wall clock moves, syncs are held up."""

    def __init__(self, case):
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            case.skipTest("no C compiler here")
        if SLOW != 1:
            case.skipTest("a sanitizer's runtime wants to be loaded first")
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="reshard-shim-"))
        case.addCleanup(shutil.rmtree, self.dir)
        (self.dir / "shim.c").write_text(SHIM)
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", self.dir / "shim.so", self.dir / "shim.c", "-ldl"], check=True)
        (self.dir / "page").write_bytes(bytes(4096))
        with open(self.dir / "page", "r+b") as f:
            self.page = mmap.mmap(f.fileno(), 4096)

    def start(self, d):
        with unittest.mock.patch.dict(os.environ, LD_PRELOAD=str(self.dir / "shim.so"), SHIM_PAGE=str(self.dir / "page")):
            return d.start()

    def get(self, n):
        return struct.unpack_from("<q", self.page, 8 * n)[0]

    def put(self, n, value):
        struct.pack_into("<q", self.page, 8 * n, value)


class Clocks(Case):
    def test_an_hour_back_and_forth_ends_no_lease_and_no_deadline(self):
        d, shim = Daemon(), Shim(self)
        self.enter(shim.start(d))
        f = small(d, automatic=True)
        wall = lambda version: [v for v in f.trainer.admin.Versions(pb.VersionsRequest(model="m"), timeout=WAIT_S).versions
                                if v.version == version][0]
        for version, seconds in enumerate((0, -3600, 3600, 1, -10 * 365 * 86400, 0), 1):
            f.publish(version)
            f.submit(version)
            shim.put(0, seconds)
            self.assertEqual(f.final(version).phase, pb.PHASE_COMMITTED)
            apply_all(f, version)
            self.serves(f, version)
            v = wall(version)
            self.assertLess(v.total_ns, 60e9)  # a span, not a difference of wall clocks
            self.assertGreaterEqual(d.status().uptime_ns, 0)
        moved = [wall(v).submitted_wall_ns for v in range(1, 7)]
        self.assertLess(moved[2], moved[1])  # the clock was really moved: -1 h, when version 3 was asked for
        broken = f.destinations[0]
        shim.put(0, 86400)
        mark = d.log_mark()
        before = broken.id
        broken.break_stream()
        d.wait_log("broke", since=mark)
        shim.put(0, -86400)
        broken.attach(resume=before)  # its grace time is of another clock
        self.assertEqual(broken.id, before)
        f.publish(7)
        f.submit(7)
        self.assertEqual(f.final(7).phase, pb.PHASE_COMMITTED)

    def test_a_deadline_comes_when_it_should_though_the_clock_stands_a_day_back(self):
        d, shim = Daemon(), Shim(self)
        self.enter(shim.start(d))
        f = small(d)
        ends_when_it_should(self, f, 1, lambda: shim.put(0, -86400))
        f.submit(9, prepare_timeout_ms=600000)
        shim.put(0, 86400)
        f.publish(9)  # ten minutes are not over
        f.accept(9)
        self.assertEqual(f.final(9).phase, pb.PHASE_COMMITTED)

    def test_order_is_by_number_and_survives_a_restart_into_the_past(self):
        d, shim = Daemon(), Shim(self)
        shim.put(0, 86400)
        self.enter(shim.start(d))
        f = small(d, automatic=True)
        f.refit(5)
        d.kill()
        shim.put(0, -86400)
        shim.start(d)
        self.assertEqual(committed(d), 5)
        m = d.status("m").models[0]
        self.assertEqual(m.committed, 5)
        self.assertLess(m.committed_age_ns, 2**62)  # a commit of tomorrow is of age 0, not of 584 years
        again = small(d, automatic=True)
        with refused(self, PRECONDITION, "5"):
            again.submit(4)
        again.refit(6)
        self.assertEqual(committed(d), 6)


class OtherTime(Daemon):
    """Started with a monotonic clock that is ahead by so many seconds, as of a machine that has run longer."""

    ahead_s = 0

    def argv(self):
        ahead = ["unshare", "-T", "--monotonic", str(self.ahead_s), "--boottime", str(self.ahead_s)] if self.ahead_s else []
        return ahead + list(super().argv())


class Reboots(Case):
    def test_a_monotonic_clock_that_begins_anew_ends_nothing_early_and_nothing_late(self):
        # The machine had run for 11 days more, then it was booted: what was stored says nothing about the new clock.
        probe = subprocess.run(["unshare", "-T", "--monotonic", "1000000", "--boottime", "1000000", sys.executable, "-c",
                                "import time; print(time.monotonic())"], capture_output=True, text=True)
        if probe.returncode != 0 or float(probe.stdout) - time.monotonic() < 900000:
            self.skipTest(f"no time namespaces here: {probe.stderr.strip()}")
        d = OtherTime()
        d.ahead_s = 1000000
        self.enter(d.start())
        f = small(d, automatic=True)
        f.refit(1)
        apply_all(f, 1)
        f.submit(2)
        f.trainer.stub.Mark(pb.MarkRequest(model="m", version=1, name="generation_begin"), timeout=WAIT_S)
        with contextlib.closing(sqlite3.connect(f"file:{ledger_of(d)}?mode=ro", uri=True)) as db:
            end = time.monotonic() + WAIT_S
            while db.execute("SELECT count(*) FROM marks WHERE name = 'generation_begin'").fetchone() == (0,):
                self.assertLess(time.monotonic(), end)  # marks are written when there is time
        d.kill()
        d.ahead_s = 0
        d.start()
        self.assertEqual(committed(d), 1)
        admin = Client(d).admin
        v = {x.version: x for x in admin.Versions(pb.VersionsRequest(model="m"), timeout=WAIT_S).versions}
        self.assertEqual(v[2].phase, pb.PHASE_ABORTED)
        for x in v.values():
            self.assertLess(x.total_ns, 60e9)
            self.assertLess(x.wire_ns + x.stall_ns, 60e9)
        m = d.status("m").models[0]
        self.assertLess(m.committed_age_ns, 600e9)
        again = small(d)
        last = ends_when_it_should(self, again, 3) + 1
        again.refit(last)
        apply_all(again, last)
        self.serves(again, last)
        timelines = admin.Timeline(pb.TimelineRequest(model="m", last=10), timeout=WAIT_S).versions
        self.assertEqual(sorted(t.record.version for t in timelines), list(range(1, last + 1)))
        for t in timelines:
            times = [x.at_ns for x in t.marks]
            self.assertEqual(times, sorted(times), t.record.version)
            self.assertLess(max(times, default=0), 600 * 10 ** 9, t.record.version)
            self.assertTrue(times or t.record.version == 2)  # whose marks may be lost with the crash


class Durable(Case):
    def test_nobody_is_told_before_the_disk_has_it(self):
        d, shim = Daemon(), Shim(self)
        self.enter(shim.start(d))
        f = small(d)
        f.refit(1)
        apply_all(f, 1)
        # A submit is not answered while its record is not synced.
        f.publish(2)
        shim.put(1, 1)
        waiting = shim.get(2)
        call = f.trainer.stub.Submit.future(pb.SubmitRequest(model="m", version=2, request_id="two"), timeout=WAIT_S)
        self.until(lambda: shim.get(2) > waiting)
        threading.Event().wait(0.1)
        self.assertFalse(call.done())
        shim.put(1, 0)
        call.result()
        requests = [w.event("accept_requested", 2) for w in f.destinations]
        watch = f.rollout.stub.WatchCommitted(pb.WatchCommittedRequest(model="m"), timeout=WAIT_S)
        self.assertEqual(next(watch).version, 1)
        # Nor is the commit heard of, by anybody, in any way.
        heard = queue.Queue()
        threading.Thread(target=lambda: heard.put(next(watch).version), daemon=True).start()
        poll = f.rollout.stub.GetCommitted.future(pb.GetCommittedRequest(model="m", newer_than=1, wait_ms=10000), timeout=WAIT_S)
        shim.put(1, 1)
        waiting = shim.get(2)
        for w, e in zip(f.destinations, requests):
            w.accept(2, e.attempt)
        self.until(lambda: shim.get(2) > waiting)
        threading.Event().wait(0.1)
        self.assertTrue(heard.empty())
        self.assertFalse(poll.done())
        self.assertEqual(committed(d), 1)
        self.assertEqual(d.status("m").models[0].committed, 1)
        for w in f.destinations:
            self.assertFalse(any(k == "committed" and e.version == 2 for k, e in list(w.events.queue)))
            with self.assertRaises(grpc.RpcError):
                w.apply(2)
        # Killed now, the version is not committed, or is: the disk alone says so, and nobody has been told otherwise.
        shim.put(1, 0)
        self.assertEqual(heard.get(timeout=WAIT_S), 2)
        self.assertEqual(poll.result().version, 2)
        watch.cancel()

    def until(self, predicate):
        end = time.monotonic() + WAIT_S
        while not predicate():
            if time.monotonic() > end:
                raise Deadline("the sync never came")
            threading.Event().wait(0.005)


if __name__ == "__main__":
    main()
