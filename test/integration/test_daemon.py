#!/usr/bin/python3
"""The daemon itself: start, stop, sockets, settings, polls and streams, what operators see."""
import select
import unittest

from rig import *


def reshardd(*args):
    r = subprocess.run([BUILD / "reshardd", *map(str, args)], capture_output=True, text=True, timeout=WAIT_S, check=False)
    return r.returncode, r.stdout, r.stderr


class Settings(unittest.TestCase):
    def setUp(self):
        self.dir = tempfile.TemporaryDirectory(prefix="reshard-test-")
        self.addCleanup(self.dir.cleanup)

    def check(self, text):
        path = pathlib.Path(self.dir.name) / "c.conf"
        path.write_text(text)
        return reshardd("--config", path, "--check-config")

    def test_shipped_file_is_good_and_says_the_defaults(self):
        shipped = pathlib.Path(__file__).resolve().parents[2] / "config" / "reshardd.conf"
        self.assertEqual(reshardd("--config", shipped, "--check-config")[:2],
                         reshardd("--check-config")[:2])

    def test_bad_settings_are_named_with_their_line(self):
        for text, *words in (("[daemon]\nsockett = x\n", ":2:", "sockett"), ("[x]\ny = 1\n", ":2:", "[x]"),
                             ("[devices]\ndevices = many\n", ":2:", "devices", "many"),
                             ("[devices]\ndevices = 65\n", ":2:", "1 … 64"),
                             ("[devices]\n\nchunk_bytes = 8 MB\n", ":3:", "MiB"),
                             ("[devices]\ndevices = 4\ndomains = 0-3 3-4\n", "domains", "3"),
                             ("[devices]\ndevices = 4\ndomains = 0-2\n", "domains", "device 3"),
                             ("[daemon]\ntcp = 0.0.0.0:7070\n", "tcp", "outside", "127.0.0.1"),
                             ("[daemon]\ntcp = everywhere\n", "tcp", "everywhere"),
                             ("[devices]\nbackend = cuda\n", "transport = nccl"),
                             ("[devices]\ntransport = nccl\n", "backend = cuda"),
                             ("[devices]\nbackend = rocm\n", "rocm", "'host' or 'cuda'"),
                             ("[refit]\nverify = maybe\n", "verify", "full"),
                             ("[refit]\nrelay = true\nrelay = false\n", ":3:", "twice"),
                             ("nonsense\n", ":1:"), ("[daemon]\nsocket = /" + "x" * 104 + "\n", "socket", "103")):
            code, _, err = self.check(text)
            self.assertEqual(code, 2, text)
            for word in words:
                self.assertIn(word, err, text)

    def test_a_state_dir_that_cannot_be_made_is_refused_with_the_remedy_checked_or_started(self):
        folder = pathlib.Path(self.dir.name)
        self.assertEqual(self.check(f"[daemon]\nstate_dir = {folder}/new/\n")[0], 0)
        code, out, err = self.check(f"[daemon]\nstate_dir = {folder}/no/where\n")
        self.assertEqual((code, out), (2, ""))
        self.assertIn(f"state_dir {folder}/no/where: there is no folder {folder}/no to make it in; make that one", err)
        self.assertEqual(reshardd("--config", folder / "c.conf"), (2, "", err))
        self.assertIn("is no folder", self.check(f"[daemon]\nstate_dir = {folder}/c.conf\n")[2])

    def test_usage(self):
        self.assertEqual(reshardd("--version")[0], 0)
        self.assertEqual(reshardd("--nonsense")[0], 2)
        self.assertEqual(reshardd("surplus")[0], 2)
        self.assertEqual(reshardd("--config", "/nowhere/x.conf")[0], 2)
        self.assertEqual(reshardd("--data-plane", "x")[0], 2)


class Life(unittest.TestCase):
    def test_stops_cleanly_with_calls_in_progress(self):
        # Open polls and streams end with UNAVAILABLE, a second signal changes nothing.
        with Daemon() as d:
            f = Fleet(d, small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7])
            f.submit(1)
            stub = f.trainer.stub
            ends = [stub.GetCommitted.future(pb.GetCommittedRequest(model="m", wait_ms=60000), timeout=60) for _ in range(5)]
            streams = [stub.WatchCommitted(pb.WatchCommittedRequest(model="m")),
                       stub.WatchRefit(pb.WatchRefitRequest(model="m", version=1))]
            next(streams[1])
            d.status()
            d.process.send_signal(signal.SIGTERM)
            code, seconds = d.stop()
            self.assertEqual(code, 0)
            self.assertLess(seconds, 5 * SLOW)
            for e in ends:
                self.assertEqual(e.exception().code(), grpc.StatusCode.UNAVAILABLE)
            for s in streams:
                with self.assertRaises(grpc.RpcError) as caught:
                    list(s)
                self.assertEqual(caught.exception.code(), grpc.StatusCode.UNAVAILABLE)
            self.assertFalse(os.path.exists(d.socket + ".mem"))
            self.assertNotIn("handles were left open", "\n".join(d.lines))

    def test_stop_while_bytes_move(self):
        with Daemon(**SlowFleet.RATE) as d:
            f = SlowFleet(d, automatic=True)
            f.publish(1)
            f.submit(1)
            f.until_bytes_move(1)
            code, seconds = d.stop()
            self.assertEqual(code, 0)
            self.assertLess(seconds, 5 * SLOW)

    def test_stop_during_start(self):
        d = Daemon()
        try:
            d.start(wait="reshardd serves")
            self.assertEqual(d.stop()[0], 0)
        finally:
            d.close()

    def test_second_daemon_on_the_same_socket_gives_up_and_the_first_serves_on(self):
        # A slow daemon is not a dead one: only a refused connection shows that a socket is left over.
        with Daemon() as d:
            other = Daemon(daemon__socket=d.socket)
            other.start(wait="not started")
            self.assertEqual(other.wait(), 1)
            other.close()
            Client(d).segment(1)
            d.status()

    def test_second_daemon_on_the_same_state_gives_up(self):
        with Daemon() as d:
            other = Daemon(daemon__state_dir=d.dir / "state")
            other.start(wait="not started")
            self.assertEqual(other.wait(), 1)
            other.close()
            d.status()

    def test_left_over_sockets_are_replaced_and_other_files_are_not(self):
        # A socket left over from a killed daemon; a regular file and a symlink at the path.
        with Daemon() as d:
            d.kill()
            self.assertTrue(os.path.exists(d.socket))
            d.start()
            d.stop()
            for path in (d.socket, d.socket + ".mem"):
                pathlib.Path(path).write_text("mine")
                d.start(wait="not started")
                self.assertEqual(d.wait(), 1)
                self.assertEqual(pathlib.Path(path).read_text(), "mine")
                os.unlink(path)
            d.start()

    def test_the_data_plane_goes_with_its_daemon(self):
        with Daemon() as d:
            child = os.pidfd_open(d.data_plane_pid())
            d.kill()
            poll = select.poll()
            poll.register(child, select.POLLIN)
            self.assertTrue(poll.poll(2000 * SLOW), "the data plane outlived its daemon")
            os.close(child)

    def test_no_descriptor_leaks_over_many_clients_and_refusals(self):
        # Registered and dropped over and over: descriptors and address space stay as they were.
        with Daemon() as d:
            def count():
                return len(os.listdir(f"/proc/{d.process.pid}/fd")), len(os.listdir(f"/proc/{d.data_plane_pid()}/fd"))

            def once():
                client = Client(d)
                client.segment(4096)
                w = Worker(client, "m", pb.SIDE_SOURCE, small_source(), 0, 0, pieces=[], attach=False)
                with self.assertRaises(grpc.RpcError):
                    w.attach()
                w.pieces = None
                w.attach()
                w.goodbye()
                client.drop(w.segment)
                client.close()
                d.clients.remove(client)
                for channel in d.channels:
                    channel.close()
                d.channels.clear()
                d.wait_status("m", lambda m: not m.workers or m.workers[0].state == pb.WORKER_GONE, "gone")

            once()
            before = count()
            for _ in range(20):
                once()
            d.wait_status("m", lambda m: count()[0] <= before[0] + 6 and count()[1] <= before[1], f"fds back to {before}")


class Standard(unittest.TestCase):
    """Health, reflection and gRPC's manners, as a foreign tool meets them."""

    def test_health(self):
        with Daemon() as d:
            stub = health_pb2_grpc.HealthStub(d.channel())
            for service in ("", "reshard.v1.Refit", "reshard.v1.Admin"):
                self.assertEqual(stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=WAIT_S).status, 1)
            with refused(self, grpc.StatusCode.NOT_FOUND):
                stub.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=WAIT_S)
            watch = stub.Watch(health_pb2.HealthCheckRequest())
            self.assertEqual(next(watch).status, 1)
            d.process.send_signal(signal.SIGTERM)
            self.assertEqual(next(watch).status, 2)

    def test_reflection_gives_the_whole_api(self):
        with Daemon() as d:
            call = d.channel().stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
            answer = next(call(iter([b"\x22\x10reshard.v1.Refit"]), timeout=WAIT_S))  # file_containing_symbol
            self.assertIn(b"AttachHello", answer)
            services = next(call(iter([b"\x3a\x00"]), timeout=WAIT_S))
            for name in (b"reshard.v1.Refit", b"reshard.v1.Admin", b"grpc.health.v1.Health"):
                self.assertIn(name, services)

    def test_unknown_method_is_told_at_once(self):
        with Daemon() as d:
            with refused(self, grpc.StatusCode.UNIMPLEMENTED):
                d.channel().unary_unary("/reshard.v1.Refit/Nothing")(b"", timeout=WAIT_S)

    def test_deadline_and_cancel_end_a_poll(self):
        with Daemon() as d:
            c = Client(d)
            call = c.stub.GetCommitted.future(pb.GetCommittedRequest(model="m", wait_ms=60000))
            call.cancel()
            self.assertTrue(call.cancelled())
            calls = [c.stub.GetCommitted.future(pb.GetCommittedRequest(model="m", wait_ms=60000), timeout=60)
                     for _ in range(200)]
            for call in calls:
                call.cancel()
            self.assertEqual(d.stop()[0], 0)  # nothing of them holds the stop up


class Committed(unittest.TestCase):
    def fleet(self, d):
        return Fleet(d, small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7], automatic=True)

    def test_before_any_version(self):
        # No version yet: at once, or at the end of the wait; never an invented version.
        with Daemon() as d:
            c = Client(d)
            with refused(self, grpc.StatusCode.NOT_FOUND):
                c.stub.GetCommitted(pb.GetCommittedRequest(model="m"), timeout=WAIT_S)
            begin = time.monotonic()
            with refused(self, grpc.StatusCode.NOT_FOUND):
                c.stub.GetCommitted(pb.GetCommittedRequest(model="m", wait_ms=500), timeout=WAIT_S)
            self.assertGreater(time.monotonic() - begin, 0.39)

    def test_one_commit_wakes_every_poller_and_watcher(self):
        with Daemon() as d:
            f = self.fleet(d)
            stub = d.refit(f.rollout.token)
            polls = [stub.GetCommitted.future(pb.GetCommittedRequest(model="m", wait_ms=60000), timeout=60) for _ in range(200)]
            own = f.rollout.stub.GetCommitted.future(
                pb.GetCommittedRequest(model="m", wait_ms=60000, worker=f.destinations[0].id), timeout=60)
            watch = stub.WatchCommitted(pb.WatchCommittedRequest(model="m"))
            f.refit(4)
            for p in polls:
                self.assertEqual(p.result(timeout=WAIT_S).version, 4)
            self.assertEqual((own.result(timeout=WAIT_S).held, own.result().applied), (4, 0))
            self.assertEqual(next(watch).version, 4)
            for w in f.destinations:
                w.apply(4)
            f.refit(5)
            self.assertEqual(next(watch).version, 5)
            late = stub.WatchCommitted(pb.WatchCommittedRequest(model="m"))
            self.assertEqual(next(late).version, 5)  # the newest there is, first

    def test_ends_of_polls_are_spread(self):
        # No thundering herd: polls that began together do not end together, and all within 20 % of what they asked for.
        def ends_of_a_hundred(wait_ms):
            """In shares of what they asked for."""
            ends, done = [], threading.Event()

            def ended(_):
                ends.append((time.monotonic() - begin) * 1000 / wait_ms)
                if len(ends) == 100:
                    done.set()

            begin = time.monotonic()
            for _ in range(100):
                c.stub.GetCommitted.future(pb.GetCommittedRequest(model="m", wait_ms=wait_ms), timeout=WAIT_S).add_done_callback(ended)
            self.assertTrue(done.wait(WAIT_S))
            return ends

        with Daemon() as d:
            c = Client(d)
            for wait_ms in (1000, 4000, 16000):
                ends = ends_of_a_hundred(wait_ms)
                self.assertGreater(min(ends), 0.79)
                self.assertGreater(max(ends) - min(ends), 0.2)
                if max(ends) < 1.2 + SLOW:  # else the machine is busy: a longer one
                    return
            self.fail(f"the last ended after {max(ends)} times what it asked for")

    def test_poll_answers_before_the_calls_own_deadline(self):
        with Daemon() as d:
            f = self.fleet(d)
            f.refit(1)
            for ms in deadlines(500):  # it keeps a share of them for its answer
                try:
                    r = f.trainer.stub.GetCommitted(pb.GetCommittedRequest(model="m", newer_than=1, wait_ms=600000), timeout=ms / 1000)
                    break
                except grpc.RpcError as e:  # the machine may be busy
                    self.assertEqual(e.code(), grpc.StatusCode.DEADLINE_EXCEEDED)
            self.assertEqual(r.version, 1)


class Operators(unittest.TestCase):
    def test_status_versions_and_timeline_agree(self):
        with Daemon() as d:
            f = Fleet(d, small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7])
            f.refit(1)
            for w in f.destinations:
                w.apply(1)
            f.trainer.stub.Mark(pb.MarkRequest(model="m", version=1, name="first_request_served",
                                               worker=f.sources[0].id), timeout=WAIT_S)
            f.publish(2)
            f.submit(2)
            f.watch(2, lambda s: s.phase == pb.PHASE_ACCEPTING)
            s = d.status()
            self.assertEqual((s.node, s.backend, s.devices, list(s.domain_of_device)),
                             ("n0", d.settings["devices"].get("backend", "host"), 8, [0, 0, 0, 0, 1, 1, 1, 1]))
            self.assertEqual((s.data_plane, s.clients), ("ready", 2))
            m = s.models[0]
            self.assertEqual((m.committed, m.in_flight.version, m.in_flight.phase), (1, 2, pb.PHASE_ACCEPTING))
            self.assertEqual(len(m.in_flight.waiting_for), 4)
            self.assertEqual([(i.instance, list(i.ranks), i.applied) for i in m.instances], [(0, [0, 1], 1), (1, [2, 3], 1)])
            self.assertEqual((m.source_layout, list(m.destination_layouts)), ("train", ["rollout"]))
            self.assertEqual({w.segment_bytes for w in m.workers if w.side == pb.SIDE_SOURCE} != {0}, True)
            f.accept(2)
            f.final(2)
            v = d.admin().Versions(pb.VersionsRequest(model="m"), timeout=WAIT_S).versions
            self.assertEqual([(x.version, x.phase) for x in v], [(2, pb.PHASE_COMMITTED), (1, pb.PHASE_COMMITTED)])
            self.assertEqual(v[0].bytes.network, v[0].bytes.network_minimum)
            self.assertEqual((len(v[0].plan_digest), v[0].strategy, v[0].plan_digest == v[1].plan_digest), (16, "reshard", True))
            t = d.admin().Timeline(pb.TimelineRequest(model="m", last=5), timeout=WAIT_S).versions
            self.assertEqual([x.record.version for x in t], [2, 1])
            names = {mark.name for mark in t[1].marks}
            self.assertLessEqual({"submitted", "planned", "prepared", "committed", "applied", "source_released",
                                  "first_request_served"}, names)
            times = [mark.at_ns for mark in t[1].marks]
            self.assertEqual(times, sorted(times))
            self.assertEqual({m.who for m in t[1].marks if m.name == "applied"},
                             {f"rollout/rank {r}" for r in range(4)})

    def test_a_timeline_is_of_the_newest_submission_of_a_number(self):
        def marks(version):
            t, = d.admin().Timeline(pb.TimelineRequest(model="m", version=version), timeout=WAIT_S).versions
            return t.marks

        def until_accepting(version, request):
            f.publish(version)
            attempt = f.submit(version, request).attempt
            self.assertEqual({w.event("accept_requested", version, attempt).attempt for w in f.destinations}, {attempt})
            return attempt

        def abort(version):
            f.trainer.admin.Abort(pb.AbortRequest(model="m", version=version), timeout=WAIT_S)

        with Daemon() as d:
            f = Fleet(d, small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7])
            first = until_accepting(5, "a")
            f.trainer.stub.Mark(pb.MarkRequest(model="m", version=5, name="generation_begin"), timeout=WAIT_S)
            abort(5)
            self.assertEqual({m.attempt for m in marks(5)}, {first})
            self.assertLessEqual({"submitted", "generation_begin", "aborted"}, {m.name for m in marks(5)})
            # A number that waits, submitted again: nothing has happened to it yet.
            until_accepting(4, "b")
            f.submit(5, "c")
            self.assertEqual([m.name for m in marks(5)], [])
            f.trainer.stub.Mark(pb.MarkRequest(model="m", version=5, name="update_end"), timeout=WAIT_S)
            f.submit(6, "d")
            self.assertEqual(f.final(5).phase, pb.PHASE_SUPERSEDED)
            names = ["source_released", "submitted", "superseded", "update_end"]
            self.assertEqual(sorted(m.name for m in marks(5)), names)
            abort(4)
            f.watch(6, lambda s: s.attempt > 0)
            abort(6)
            # Submitted once more, and committed.
            last = until_accepting(5, "e")
            for w in f.destinations:
                w.accept(5, last)
            self.assertEqual(f.final(5).phase, pb.PHASE_COMMITTED)
            whole = [(m.name, m.who, m.attempt) for m in marks(5)]
            self.assertEqual({a for _, _, a in whole}, {last})
            self.assertEqual([n for n, _, _ in whole].count("submitted"), 1)
            self.assertLessEqual({"submitted", "published", "committed", "accepted"}, {n for n, _, _ in whole})
            d.stop()
            d.start()
            self.assertEqual([(m.name, m.who, m.attempt) for m in marks(5)], whole)

    def test_a_submission_that_never_began_has_nothing_of_earlier_retries(self):
        def marks(version):
            t, = d.admin().Timeline(pb.TimelineRequest(model="m", version=version), timeout=WAIT_S).versions
            return t.marks

        def abort(version):
            f.trainer.admin.Abort(pb.AbortRequest(model="m", version=version), timeout=WAIT_S)

        with Daemon() as d:
            f = Fleet(d, small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7], receive=pb.RECEIVE_IN_PLACE)
            f.publish(5)
            policy = [pb.LayoutPolicy(layout_name="rollout", min_instances=1)]
            first = f.submit(5, "a", policy=policy).attempt
            for w in f.destinations:
                w.event("ready_requested", 5)
            f.destinations[3].goodbye()
            f.watch(5, lambda s: s.attempt == first + 1 and s.phase == pb.PHASE_PREPARED)
            abort(5)
            self.assertEqual({m.attempt for m in marks(5) if m.name == "begun"}, {first, first + 1})
            # Behind one whose sources have not published it gives way before its turn comes.
            f.submit(4, "b")
            f.submit(5, "c", policy=policy)
            f.submit(6, "d")
            self.assertEqual(f.final(5).phase, pb.PHASE_SUPERSEDED)
            names = ["source_released", "submitted", "superseded"]
            self.assertEqual(sorted(m.name for m in marks(5)), names)
            d.stop()
            d.start()
            self.assertEqual(sorted(m.name for m in marks(5)), names)

    def test_a_reason_does_not_say_the_same_twice(self):
        with Daemon(**SlowFleet.RATE) as d:
            f = SlowFleet(d)
            for options, says in ((dict(strategy=9), "options: strategy 9 is not known; use 0 … 3"),
                                  (dict(rules=[pb.StrategyRule(glob="x", strategy=9)]), "options: rules: strategy 9 is not known; use 0 … 3")):
                with self.assertRaises(grpc.RpcError) as caught:
                    f.submit(1, **options)
                self.assertEqual(caught.exception.details(), says)
            odd = Worker(Client(d), "m", pb.SIDE_DESTINATION, Layout("odd", 1, [mesh("m", [1])], [tensor("x", [4], "uint8", "m", [0])]),
                         0, 4, pb.RECEIVE_STAGED)
            f.publish(1)
            f.submit(1)
            self.assertEqual(f.final(1).reason, "planning: layout 'odd' against source 'train': 1 missing at the source: 'x'; "
                                                "1 unexpected, in the source only: 'big'")
            odd.goodbye()
            f.publish(2)
            f.submit(2)
            f.until_bytes_move(2)
            os.kill(d.data_plane_pid(), signal.SIGKILL)
            self.assertRegex(f.final(2).reason, r"^the data plane of node n0 is gone: (?!.*(node n0|data plane))")

    def test_unknown_models_and_versions(self):
        with Daemon() as d:
            for call in (lambda: d.status("x"), lambda: d.admin().Versions(pb.VersionsRequest(model="x"), timeout=WAIT_S),
                         lambda: d.admin().Timeline(pb.TimelineRequest(model="x"), timeout=WAIT_S)):
                with refused(self, grpc.StatusCode.NOT_FOUND, "x"):
                    call()
            with refused(self, grpc.StatusCode.NOT_FOUND):
                list(d.refit().WatchRefit(pb.WatchRefitRequest(model="x", version=1), timeout=WAIT_S))


if __name__ == "__main__":
    main()
