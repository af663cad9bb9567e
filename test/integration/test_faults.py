#!/usr/bin/python3
"""Things that die, stall, or change their mind in the middle of a refit: what was committed stays, nothing is torn
unsaid, and the next version works."""
import unittest

from rig import *

FINAL_S = 5 * SLOW  # a dead process ends the attempt within this


class Process:
    """A worker in a process of its own."""

    def __init__(self, daemon, *args):
        here = pathlib.Path(__file__).resolve().parent
        self.p = subprocess.Popen([sys.executable, here / "client_process.py", daemon.socket, *map(str, args)],
                                  stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                  env=dict(os.environ, RESHARD_BUILD=str(BUILD)))

    def wait(self, word):
        line = self.p.stdout.readline().strip()
        assert line == word, (line, word)
        return self

    def kill(self):
        self.p.kill()
        self.p.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.p.poll() is None:
            self.kill()
        self.p.stdin.close()
        self.p.stdout.close()


class Verdicts(unittest.TestCase):
    def fleet(self, d, **more):
        return Fleet(d, small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7], **more)

    def test_one_rejection_aborts_and_keeps_what_is_served(self):
        with Daemon() as d:
            f = self.fleet(d)
            f.refit(1)
            for w in f.destinations:
                w.apply(1)
            f.publish(2)
            f.submit(2)
            for w in f.destinations:
                e = w.event("accept_requested", 2)
                if w.rank == 2:
                    w.accept(2, e.attempt, reject=True, reason="loss is NaN")
                elif w.rank < 2:
                    w.accept(2, e.attempt)
            s = f.final(2)
            self.assertEqual(s.phase, pb.PHASE_ABORTED)
            self.assertIn("loss is NaN", s.reason)
            self.assertIn("rollout", s.reason)
            for w in f.destinations:
                self.assertEqual(w.wrong(1), [])
                w.event("aborted", 2)
            self.assertEqual(d.status("m").models[0].committed, 1)
            f.refit(3)

    def test_a_minimum_of_instances_commits_without_the_rest(self):
        with Daemon() as d:
            f = self.fleet(d)
            f.publish(1)
            f.submit(1, policy=[pb.LayoutPolicy(layout_name="rollout", min_instances=1)])
            for w in reversed(f.destinations):
                e = w.event("accept_requested", 1)
                w.accept(1, e.attempt, reject=w.rank >= 2, reason="not me" if w.rank >= 2 else "")
            self.assertEqual(f.final(1).phase, pb.PHASE_COMMITTED)
            self.assertEqual(f.destinations[0].apply(1).applied, 1)

    def test_an_instance_that_is_away_is_left_out_where_the_policy_allows(self):
        # What one version's set of receivers leaves behind must not hold up the next:
        # v1 to both, v2 to one, v3 to both again.
        with Daemon() as d:
            f = self.fleet(d)
            f.refit(1)
            for w in f.destinations:
                w.apply(1)
            for w in f.destinations[2:]:
                w.goodbye()
            here, away = f.destinations[:2], f.destinations[2:]
            f.destinations = here
            f.refit(2, policy=[pb.LayoutPolicy(layout_name="rollout", min_instances=1)])
            for w in here:
                w.apply(2)
                self.assertEqual(w.wrong(2), [])
            self.assertEqual([w.wrong(1) for w in away], [[], []])  # untouched
            for w in away:
                w.attach(live_version=1)
                self.assertEqual((w.attached.committed, w.attached.applied), (2, 1))
            f.destinations = here + away
            f.refit(3)
            for w in f.destinations:
                w.apply(3)
                self.assertEqual(w.wrong(3), [])

    def test_a_source_rank_that_is_away_is_named(self):
        source = Layout("train", 2, [mesh("dp", [2])], [tensor("w", [8], "int32", "dp", [None])])
        destination = Layout("rollout", 1, [mesh("m", [1])], [tensor("w", [8], "int32", "m", [None])])
        with Daemon() as d:
            f = Fleet(d, source, destination, [0, 1], [4], automatic=True)
            f.refit(1)
            f.destinations[0].apply(1)
            f.sources.pop().goodbye()
            f.publish(2)
            f.submit(2, prepare_timeout_ms=int(300 * SLOW))
            s = f.final(2)
            self.assertEqual(s.phase, pb.PHASE_ABORTED)
            self.assertIn("train/rank 1", s.reason)
            f.sources.append(Worker(f.trainer, "m", pb.SIDE_SOURCE, source, 1, 1))
            f.refit(3)

    def before_its_end(self, f, asked, answer, *workers):
        """Workers answer version 1 when they are asked; False: its deadline was over before one of them had."""
        for w in workers:
            e = w.event(asked, 1, unless="aborted")
            try:
                if e is None:
                    return False
                answer(w, e)
            except grpc.RpcError:
                self.assertEqual(f.final(1).phase, pb.PHASE_ABORTED)
                return False
        return True

    def test_who_never_answers_is_named_at_the_accept_deadline(self):
        for ms in deadlines(300):
            with Daemon() as d:
                f = self.fleet(d)
                f.publish(1)
                f.submit(1, accept_timeout_ms=ms)
                if not self.before_its_end(f, "accept_requested", lambda w, e: w.accept(1, e.attempt), *f.destinations[:3]):
                    continue
                s = f.final(1)
                self.assertEqual(s.phase, pb.PHASE_ABORTED)
                self.assertIn("rollout/rank 3", s.reason)
                self.assertNotIn("rollout/rank 2", s.reason)
                return
        self.fail("nobody answers in time")

    def test_who_is_never_ready_is_named_at_the_prepare_deadline(self):
        for ms in deadlines(300):
            with Daemon() as d:
                f = self.fleet(d, receive=pb.RECEIVE_IN_PLACE)
                f.publish(1)
                f.submit(1, prepare_timeout_ms=ms)
                if not self.before_its_end(f, "ready_requested", lambda w, e: w.ready(1), f.destinations[0]):
                    continue
                s = f.final(1)
                self.assertIn("rollout/rank 1", s.reason)
                self.assertNotIn("rollout/rank 0", s.reason)
                self.assertEqual(set(f.destinations[0].memory[:]), {POISON})
                return
        self.fail("nobody is ready in time")

    def test_aborted_version_may_be_tried_again(self):
        # Never committed by what came late; a new attempt may.
        with Daemon() as d:
            f = self.fleet(d)
            f.publish(1)
            f.submit(1, "one")
            late = f.destinations[0].event("accept_requested", 1)
            self.assertEqual(f.trainer.admin.Abort(pb.AbortRequest(model="m", reason="operator says so"),
                                                   timeout=WAIT_S).version, 1)
            self.assertIn("operator says so", f.final(1).reason)
            with self.assertRaises(grpc.RpcError):
                f.destinations[0].accept(1, late.attempt)
            again = f.submit(1, "two")
            self.assertGreater(again.attempt, late.attempt)
            f.publish(1)
            f.accept(1, again.attempt)
            s = f.final(1)
            self.assertEqual(s.phase, pb.PHASE_COMMITTED)
            for w in f.destinations:
                w.apply(1)
                self.assertEqual(w.wrong(1), [])

    def test_a_retry_moves_only_what_is_missing(self):
        with Daemon() as d:
            f = self.fleet(d)
            f.publish(1)
            f.submit(1, "one")
            for w in f.destinations:
                e = w.event("accept_requested", 1)
            f.destinations[0].accept(1, e.attempt, reject=True, reason="try me again")
            first = f.final(1)
            self.assertEqual(first.bytes.skipped, 0)
            f.publish(1)
            f.submit(1, "two")
            f.accept(1)
            s = f.final(1)
            self.assertEqual(s.phase, pb.PHASE_COMMITTED)
            self.assertGreater(s.bytes.skipped, 0)
            for w in f.destinations:
                w.apply(1)
                self.assertEqual(w.wrong(1), [])

    def test_a_waiting_version_is_superseded_by_a_newer(self):
        with Daemon() as d:
            f = self.fleet(d)
            f.submit(1)
            self.assertEqual(f.submit(2).attempt, 0)
            f.submit(3)
            s = f.final(2)
            self.assertEqual(s.phase, pb.PHASE_SUPERSEDED)
            self.assertIn("3", s.reason)
            f.trainer.admin.Abort(pb.AbortRequest(model="m", version=1), timeout=WAIT_S)
            f.publish(3)
            f.accept(3)
            self.assertEqual(f.final(3).phase, pb.PHASE_COMMITTED)
            m = d.status("m").models[0]
            self.assertEqual((m.committed, m.superseded, m.aborted), (3, 1, 1))


class Content(unittest.TestCase):
    def fleet(self, d):
        return Fleet(d, small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7], automatic=True)

    def test_replicas_that_differ_are_named(self):
        with Daemon() as d:
            f = self.fleet(d)
            for w in f.sources:
                w.write(1)
                offset, _ = w.place["norm"][0]
                if w.rank == 2:
                    w.memory[offset + 5] ^= 1
                w.publish(1)
            f.submit(1)
            s = f.final(1)
            self.assertEqual(s.phase, pb.PHASE_ABORTED)
            for word in ("'norm'", "0 and 2"):
                self.assertIn(word, s.reason)
            self.assertEqual(set(f.destinations[0].memory[:]), {POISON})  # found before any byte moved

    def test_weights_written_too_early_are_caught(self):
        with Daemon() as d:
            f = self.fleet(d)
            f.publish(1)
            offset, _ = f.sources[1].place["w1"][0]
            f.sources[1].memory[offset] ^= 0x40
            f.submit(1)
            s = f.final(1)
            self.assertEqual(s.phase, pb.PHASE_ABORTED)
            self.assertIn("tensor 'w1'", s.reason)
            self.assertIn("layout 'train' rank 1", s.reason)
            f.refit(2)

    def test_expected_fingerprints_catch_a_wrong_declaration(self):
        with Daemon() as d:
            f = self.fleet(d)
            for w in f.sources:
                w.write(1)
                w.publish(1, expected=[pb.ExpectedFingerprint(tensor="w2", fingerprint=12345)] if w.rank == 0 else [])
            f.submit(1)
            s = f.final(1)
            self.assertEqual(s.phase, pb.PHASE_ABORTED)
            self.assertIn("'w2'", s.reason)
            with refused(self, grpc.StatusCode.INVALID_ARGUMENT, "'zz'"):
                f.sources[0].publish(2, expected=[pb.ExpectedFingerprint(tensor="zz", fingerprint=1)])

    def test_shadow_that_is_written_before_apply_is_not_served(self):
        with Daemon() as d:
            f = self.fleet(d)
            f.refit(1)
            w = f.destinations[3]
            w.memory[w.shadow + w.place["odd"][0][0]] ^= 1
            with self.assertRaises(grpc.RpcError) as caught:
                w.apply(1)
            self.assertIn("'odd'", caught.exception.details())
            self.assertIn("rank 3", caught.exception.details())
            states = {x.rank: x.state for x in d.status("m").models[0].workers if x.side == pb.SIDE_DESTINATION}
            self.assertEqual(states[3], pb.WORKER_TORN)


class Deaths(unittest.TestCase):
    def test_data_plane_killed_while_bytes_move(self):
        with Daemon(**SlowFleet.RATE) as d:
            f = SlowFleet(d, automatic=True)
            f.publish(1)
            f.submit(1)
            f.until_bytes_move(1)
            mark, begin = d.log_mark(), time.monotonic()
            os.kill(d.data_plane_pid(), signal.SIGKILL)
            s = f.final(1)
            self.assertLess(time.monotonic() - begin, FINAL_S)
            self.assertEqual(s.phase, pb.PHASE_ABORTED)
            self.assertIn("data plane", s.reason)
            d.wait_log("data plane serves", since=mark)
            f.publish_again(1)
            f.submit(1, "again")
            self.assertEqual(f.final(1).phase, pb.PHASE_COMMITTED)
            f.apply_everywhere(1)
            self.assertEqual(d.status().data_plane_restarts, 1)

    def test_data_plane_killed_five_times_in_a_row(self):
        with Daemon() as d:
            f = Fleet(d, small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7], automatic=True)
            for version in range(1, 6):
                mark = d.log_mark()
                os.kill(d.data_plane_pid(), signal.SIGKILL)
                d.wait_log("data plane serves", since=mark)
                d.wait_status("m", lambda m: True, "the model")
                f.refit(version)
                for w in f.destinations:
                    w.apply(version)
                    self.assertEqual(w.wrong(version), [])

    def test_data_plane_that_hangs_is_replaced(self):
        with Daemon(refit__quiesce_timeout_ms=500, **SlowFleet.RATE) as d:
            f = SlowFleet(d, automatic=True)
            f.publish(1)
            f.submit(1)
            f.until_bytes_move(1)
            mark = d.log_mark()
            os.kill(d.data_plane_pid(), signal.SIGSTOP)
            f.trainer.admin.Abort(pb.AbortRequest(model="m"), timeout=WAIT_S)
            self.assertEqual(f.final(1).phase, pb.PHASE_ABORTED)
            d.wait_log("data plane serves", since=mark)
            f.publish_again(1)
            f.submit(1, "again")
            self.assertEqual(f.final(1).phase, pb.PHASE_COMMITTED)

    def test_in_place_memory_is_called_torn_after_a_death(self):
        with Daemon(**SlowFleet.RATE) as d:
            f = SlowFleet(d, automatic=True, receive=pb.RECEIVE_IN_PLACE)
            f.publish(1)
            f.submit(1)
            for w in f.destinations:
                w.ready(1)
            f.until_bytes_move(1)
            os.kill(d.data_plane_pid(), signal.SIGKILL)
            self.assertEqual(f.final(1).phase, pb.PHASE_ABORTED)
            states = {x.state for x in d.status("m").models[0].workers if x.side == pb.SIDE_DESTINATION}
            self.assertEqual(states, {pb.WORKER_TORN})

    def test_trainer_killed_while_bytes_move(self):
        with Daemon(**SlowFleet.RATE) as d:
            f = SlowFleet(d, automatic=True)
            f.sources[1].goodbye()
            with Process(d, "source", 1, 1, "publish", 1) as victim:
                victim.wait("attached").wait("published")
                f.sources.pop(1)
                f.publish(1)
                f.submit(1)
                f.until_bytes_move(1)
                begin = time.monotonic()
                victim.kill()
                s = f.final(1)
            self.assertLess(time.monotonic() - begin, FINAL_S)
            self.assertEqual(s.phase, pb.PHASE_ABORTED)
            self.assertIn("train/rank 1", s.reason)
            self.assertEqual(d.status().data_plane_restarts, 0)

    def test_rollout_killed_while_bytes_move(self):
        with Daemon(**SlowFleet.RATE) as d:
            f = SlowFleet(d, automatic=True)
            f.destinations[2].goodbye()
            with Process(d, "destination", 2, 6, "automatic") as victim:
                victim.wait("attached")
                f.publish(1)
                f.submit(1)
                f.until_bytes_move(1)
                begin = time.monotonic()
                victim.kill()
                s = f.final(1)
            self.assertLess(time.monotonic() - begin, FINAL_S)
            self.assertEqual(s.phase, pb.PHASE_ABORTED)
            self.assertIn("rollout/rank 2", s.reason)
            gone = d.wait_status("m", lambda m: any(w.state == pb.WORKER_GONE for w in m.workers), "a worker gone")
            self.assertEqual([(w.layout_name, w.rank) for w in gone.workers if w.state == pb.WORKER_GONE], [("rollout", 2)])
            f.destinations[2] = Worker(Client(d), "m", pb.SIDE_DESTINATION, slow_destination(), 2, 6, pb.RECEIVE_STAGED, True)
            f.publish_again(1)
            f.submit(1, "again")
            self.assertEqual(f.final(1).phase, pb.PHASE_COMMITTED)
            f.apply_everywhere(1)

    def test_rollout_killed_before_its_verdict(self):
        with Daemon() as d:
            f = SlowFleet(d, automatic=True)
            f.destinations[2].goodbye()
            with Process(d, "destination", 2, 6) as victim:
                victim.wait("attached")
                f.publish(1)
                f.submit(1)
                f.watch(1, lambda s: s.phase == pb.PHASE_ACCEPTING)
                victim.kill()
                s = f.final(1)
            self.assertEqual(s.phase, pb.PHASE_ABORTED)
            self.assertIn("rollout/rank 2", s.reason)

    def test_client_killed_while_idle_frees_its_memory(self):
        # Mappings closed and rank free within two seconds.
        with Daemon() as d:
            with Process(d, "source", 0, 0, "memfd") as victim:
                victim.wait("attached")
                maps = pathlib.Path(f"/proc/{d.data_plane_pid()}/maps")
                self.assertIn("memfd:test", maps.read_text())
                begin = time.monotonic()
                victim.kill()
                d.wait_status("m", lambda m: m.workers[0].state == pb.WORKER_GONE, "gone")
                while "memfd:test" in maps.read_text():
                    self.assertLess(time.monotonic() - begin, 2 * SLOW)
                    d.status()
            Worker(Client(d), "m", pb.SIDE_SOURCE, slow_source(), 0, 0)

    def test_evicted_worker_is_told_and_gone(self):
        with Daemon() as d:
            f = Fleet(d, small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7])
            w = f.destinations[1]
            f.rollout.admin.Evict(pb.EvictRequest(worker=w.id, reason="maintenance"), timeout=WAIT_S)
            self.assertIn("maintenance", w.event("evicted").reason)
            with refused(self, grpc.StatusCode.NOT_FOUND):
                w.apply(1)
            with refused(self, grpc.StatusCode.NOT_FOUND):
                f.rollout.admin.Evict(pb.EvictRequest(worker=w.id), timeout=WAIT_S)
            w.attach()


class Streams(unittest.TestCase):
    def test_a_worker_that_gets_no_cpu_for_a_while_keeps_its_stream(self):
        # gRPC's pings go unanswered meanwhile. What lasts some 5 s: another client's poll, for what does not come.
        with Daemon() as d:
            f = SlowFleet(d, automatic=True)
            f.destinations[2].goodbye()
            with Process(d, "destination", 2, 6, "automatic") as stopped:
                stopped.wait("attached")
                mark = d.log_mark()
                stopped.p.send_signal(signal.SIGSTOP)
                with refused(self, grpc.StatusCode.NOT_FOUND):
                    f.trainer.stub.GetCommitted(pb.GetCommittedRequest(model="m", wait_ms=6000), timeout=WAIT_S)
                stopped.p.send_signal(signal.SIGCONT)
                f.publish(1)
                f.submit(1)
                self.assertEqual(f.final(1).phase, pb.PHASE_COMMITTED)
                self.assertEqual([line for line in d.lines[mark:] if "broke" in line], [])

    def test_broken_stream_is_resumed_in_its_grace_time(self):
        with Daemon() as d:
            f = Fleet(d, small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7])
            f.refit(1)
            w, mark = f.destinations[0], d.log_mark()
            before = w.id
            w.break_stream()
            d.wait_log("stream of layout rollout rank 0 broke", since=mark)
            w.attach(resume=before)
            self.assertEqual((w.id, w.attached.held, w.attached.committed), (before, 1, 1))
            w.apply(1)
            f.refit(2) if all(x.apply(1) for x in f.destinations[1:]) else None

    def test_grace_time_over_frees_the_rank(self):
        with Daemon(clients__grace_ms=200) as d:
            w = Worker(Client(d), "m", pb.SIDE_SOURCE, small_source(), 0, 0)
            w.break_stream()
            d.wait_log("did not attach again in its grace time")
            with refused(self, grpc.StatusCode.NOT_FOUND, "attach anew"):
                w.attach(resume=w.id)
            w.attach()

    def test_late_end_of_an_old_stream_does_not_end_the_new_one(self):
        # It came back on a new connection; the clean-up of the old one must not remove the new entry.
        with Daemon() as d:
            w = Worker(Client(d), "m", pb.SIDE_SOURCE, small_source(), 0, 0)
            old = w.stream
            w.attach(resume=w.id)  # the daemon still believes in the old stream
            old.cancel()
            w.write(1)
            w.publish(1)
            self.assertNotEqual(d.status("m").models[0].workers[0].state, pb.WORKER_GONE)

    def test_another_client_cannot_resume(self):
        with Daemon() as d:
            w = Worker(Client(d), "m", pb.SIDE_SOURCE, small_source(), 0, 0)
            thief = Worker(Client(d), "m", pb.SIDE_SOURCE, small_source(), 0, 0, attach=False)
            with refused(self, grpc.StatusCode.PERMISSION_DENIED):
                thief.attach(resume=w.id)


class Restarts(unittest.TestCase):
    def again(self, d, f):
        """New clients for all workers of a fleet, with what their memory claims to hold."""
        client = Client(d)
        for w in f.sources + f.destinations:
            w.client = client
            w.segment = client.register(w.memory)
        f.trainer = f.rollout = client
        for w in f.sources + f.destinations:
            client.put_layout(w.layout)

    def test_committed_versions_survive_and_memory_is_believed_after_a_check(self):
        with Daemon() as d:
            f = Fleet(d, small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7])
            f.refit(1)
            for w in f.destinations:
                w.apply(1)
            f.refit(2)
            d.kill()
            d.start()
            self.again(d, f)
            self.assertEqual(f.trainer.stub.GetCommitted(pb.GetCommittedRequest(model="m"), timeout=WAIT_S).version, 2)
            f.destinations[3].memory[f.destinations[3].shadow] ^= 1  # one of them lies
            for w in f.destinations:
                w.attach(live_version=1, shadow_version=2)
                held = (1 if w.rank != 3 else 1, 2 if w.rank != 3 else 0)
                self.assertEqual((w.attached.applied, w.attached.held), held, w.rank)
            for w in f.destinations[:3]:
                w.apply(2)
                self.assertEqual(w.wrong(2), [])
            for w in f.sources:
                w.attach()
            with refused(self, grpc.StatusCode.FAILED_PRECONDITION):
                f.submit(1, "old")
            f.refit(3)

    def test_a_refit_in_flight_is_aborted_by_a_restart_and_may_be_tried_again(self):
        with Daemon(**SlowFleet.RATE) as d:
            f = SlowFleet(d, automatic=True)
            f.publish(1)
            attempt = f.submit(1).attempt
            f.until_bytes_move(1)
            d.kill()
            d.start()
            self.again(d, f)
            v = f.trainer.admin.Versions(pb.VersionsRequest(model="m"), timeout=WAIT_S).versions[0]
            self.assertEqual((v.version, v.phase), (1, pb.PHASE_ABORTED))
            for w in f.sources + f.destinations:
                w.attach()
            for w in f.sources:
                w.publish(1)
            self.assertGreater(f.submit(1, "again").attempt, attempt)  # ids are never used again
            self.assertEqual(f.final(1).phase, pb.PHASE_COMMITTED)
            f.apply_everywhere(1)

    def test_old_tokens_and_workers_are_refused_after_a_restart(self):
        # Clients live on with the ids of a daemon that is gone; leases in its ledger have no connection.
        with Daemon() as d:
            w = Worker(Client(d), "m", pb.SIDE_SOURCE, small_source(), 0, 0)
            before = w.client.incarnation
            d.stop()
            d.start()
            with refused(self, grpc.StatusCode.UNAUTHENTICATED, "attach again"):
                d.refit(w.client.token).Publish(pb.PublishRequest(worker=w.id, version=1), timeout=WAIT_S)
            fresh = Client(d)
            self.assertNotEqual(fresh.incarnation, before)
            with refused(self, grpc.StatusCode.NOT_FOUND):
                fresh.stub.Publish(pb.PublishRequest(worker=w.id, version=1), timeout=WAIT_S)

    def test_the_answer_to_a_request_id_survives(self):
        with Daemon() as d:
            f = Fleet(d, small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7], automatic=True)
            f.refit(1)
            first = f.submit(1, "r1")
            d.kill()
            d.start()
            self.again(d, f)
            self.assertEqual(f.submit(1, "r1").attempt, first.attempt)


if __name__ == "__main__":
    main()
