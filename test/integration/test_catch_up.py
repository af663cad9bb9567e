#!/usr/bin/python3
"""Instances that come later, or that a failed attempt has left without the version: fed by the trainer or by each other."""
import unittest
import unittest.mock

import nodes
from rig import *

ONE_IS_ENOUGH = [pb.LayoutPolicy(layout_name="rollout", min_instances=1)]


def half(d, source=None, **more):
    """A fleet of which instance 1 (ranks 2 and 3) is not there yet."""
    f = Fleet(d, source or small_source(), small_destination(), [0, 1, 2, 3], [4, 5], **more)
    return f


def rest(f, automatic=True, receive=pb.RECEIVE_STAGED):
    """Instance 1, attached now."""
    return [Worker(f.rollout, "m", pb.SIDE_DESTINATION, small_destination(), r, 4 + r, receive, automatic)
            for r in (2, 3)]


def caught_up_bytes(d, since=0):
    """What the daemon says that catch-ups have landed since its start, when one has ended well."""
    d.wait_log("catch-up: COMMITTED", since)
    return int(d.wait_log(r"catch-ups since the start: .* (\d+) bytes landed", since)[1])


def overwrite(workers, version, base=0):
    """The trainer's next weights, in the memory that it was told it may write."""
    for w in workers:
        w.write(version, base)


class OneNode(unittest.TestCase):
    def check_newcomers(self, workers, version):
        for w in workers:
            w.event("committed", version)
            self.assertEqual(w.wrong(version, w.shadow), [])
            self.assertEqual(w.apply(version).applied, version)
            self.assertEqual(w.wrong(version), [])

    def test_a_newcomer_is_fed_by_the_instance_that_is_there_and_not_by_the_trainer(self):
        with Daemon() as d:
            f = half(d)
            before = f.refit(1, policy=ONE_IS_ENOUGH)
            for w in f.destinations:
                w.apply(1)
            overwrite(f.sources, 9)  # released: it may
            mark = d.log_mark()
            newcomers = rest(f)
            self.check_newcomers(newcomers, 1)
            self.assertEqual(caught_up_bytes(d, mark), sum(w.n_bytes for w in newcomers))
            self.assertEqual(f.final(1).bytes, before.bytes)  # the version's own record is what it was
            self.assertEqual(f.final(1).phase, pb.PHASE_COMMITTED)
            m = d.status("m").models[0]
            self.assertEqual({w.state for w in m.workers if w.side == pb.SIDE_DESTINATION}, {pb.WORKER_CURRENT})
            f.destinations += newcomers
            f.publish(2)
            f.submit(2)
            for w in f.destinations[:2]:
                w.accept(2, w.event("accept_requested", 2).attempt)
            self.assertEqual(f.final(2).phase, pb.PHASE_COMMITTED)
            for w in f.destinations:
                self.assertEqual(w.wrong(2, w.shadow), [])

    def test_live_memory_feeds_where_the_shadow_holds_something_else(self):
        with Daemon() as d:
            f = half(d, automatic=True)
            f.refit(1, policy=ONE_IS_ENOUGH)
            for w in f.destinations:
                w.apply(1)
            f.publish(2)  # lands in the shadows and is rejected: what is served stays version 1
            late = Worker(Client(d), "m", pb.SIDE_DESTINATION,
                          Layout("judge", 1, [mesh("one", [1])], [tensor("norm", [12], "float32", "one", [None])]),
                          0, 6, pb.RECEIVE_STAGED)
            late.event("accept_requested", 1)
            late.accept(1)
            late.event("committed", 1)
            f.submit(2, policy=[pb.LayoutPolicy(layout_name="judge", min_instances=1)] + ONE_IS_ENOUGH)
            late.apply(1)
            late.accept(2, late.event("accept_requested", 2).attempt, reject=True, reason="no")
            self.assertEqual(f.final(2).phase, pb.PHASE_ABORTED)
            for w in f.destinations:
                self.assertEqual(w.wrong(2, w.shadow), [])
            newcomers = rest(f)
            self.check_newcomers(newcomers, 1)

    def test_without_feeding_the_trainer_feeds_once_it_has_published_the_version_again(self):
        with Daemon(refit__feed="no") as d:
            f = half(d, automatic=True)
            f.refit(1, policy=ONE_IS_ENOUGH)
            for w in f.destinations:
                w.apply(1)
                w.memory[:] = bytes([POISON]) * len(w.memory)  # nothing is read from there
            newcomers = rest(f)
            f.publish(1)
            self.check_newcomers(newcomers, 1)

    def test_with_catch_up_off_a_newcomer_waits_for_the_next_version(self):
        with Daemon(refit__catch_up="no") as d:
            f = half(d, automatic=True)
            f.refit(1, policy=ONE_IS_ENOUGH)
            for w in f.destinations:
                w.apply(1)
            f.destinations += rest(f)
            f.refit(2)
            for w in f.destinations:
                w.apply(2)
                self.assertEqual(w.wrong(2), [])
            self.assertNotIn("catch-up", "\n".join(d.lines))

    def test_in_place_newcomers_are_asked_to_pause(self):
        with Daemon() as d:
            f = half(d, automatic=True)
            f.refit(1, policy=ONE_IS_ENOUGH)
            newcomers = rest(f, receive=pb.RECEIVE_IN_PLACE)
            for w in newcomers:
                w.event("ready_requested", 1)
                self.assertEqual(w.memory[0], POISON)
            for w in newcomers:
                w.ready(1)
            for w in newcomers:
                w.event("committed", 1)
                self.assertEqual(w.wrong(1), [])

    def test_a_layout_that_would_cast_twice_is_not_fed(self):
        wide = Layout("wide", 1, [mesh("one", [1])], [tensor("w1", [16, 12], "float32", "one", [None], cast=True)])
        source = Layout("train", 1, [mesh("one", [1])], [tensor("w1", [16, 12], "float32", "one", [None])])
        narrow = Layout("rollout", 1, [mesh("one", [1])], [tensor("w1", [16, 12], "bfloat16", "one", [None], cast=True)])
        with Daemon() as d:
            f = Fleet(d, source, narrow, [0], [4], automatic=True)
            f.publish(1)
            f.submit(1)
            self.assertEqual(f.final(1).phase, pb.PHASE_COMMITTED)
            late = Worker(f.rollout, "m", pb.SIDE_DESTINATION, wide, 0, 5, pb.RECEIVE_STAGED, True)
            d.wait_log("catch-up: ABORTED: planning: .*'w1'.*cast twice")
            self.assertEqual(late.memory[late.shadow], POISON)
            f.publish(1)  # the trainer has it in the dtype that is asked for
            late.event("committed", 1)
            self.assertEqual(late.wrong(1, late.shadow), [])

    def stray_write(self, w, memory):
        """Through a stray pointer, into memory that holds a version."""
        w.memory[memory + 3] ^= 1

    def test_shadow_memory_that_is_not_the_version_any_more_feeds_nobody_and_live_memory_does(self):
        for known in (True, False):  # what the newcomers have to hold
            with self.subTest(known=known), Daemon() as d:
                f = (Fleet(d, small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7], automatic=True) if known
                     else half(d, automatic=True))
                f.refit(1, policy=ONE_IS_ENOUGH)
                for w in f.destinations:
                    w.apply(1)
                for w in f.destinations[2:]:
                    w.goodbye()
                self.stray_write(f.destinations[0], f.destinations[0].shadow)
                newcomers = rest(f)
                d.wait_log("catch-up: ABORTED: .*layout 'rollout' rank 0, which was to feed others, does not hold "
                           "version 1 any more: its shadow memory was written over")
                self.check_newcomers(newcomers, 1)
                # Its live memory is what it was.
                states = {w.rank: w.state for w in d.status("m").models[0].workers if w.side == pb.SIDE_DESTINATION}
                self.assertEqual(states[0], pb.WORKER_CURRENT)
                self.assertEqual(f.destinations[0].wrong(1), [])

    def test_a_feeder_that_holds_another_content_is_void_and_brought_up_again_like_the_newcomer(self):
        with Daemon() as d:
            f = half(d, automatic=True)
            f.refit(1, policy=ONE_IS_ENOUGH)
            bad = f.destinations[0]  # has not applied it: the shadow is all that it has
            self.stray_write(bad, bad.shadow)
            newcomers = rest(f)
            d.wait_log("catch-up: ABORTED: .*layout 'rollout' rank 0, which was to feed others")
            held = {w.rank: w.held for w in d.status("m").models[0].workers if w.side == pb.SIDE_DESTINATION}
            self.assertEqual(held, {0: 0, 1: 1, 2: 0, 3: 0})  # void, and nobody has got anything of it
            self.assertEqual({w.memory[w.shadow] for w in newcomers}, {POISON})
            mark = d.log_mark()
            f.publish(1)
            d.wait_log("catch-up: COMMITTED", mark)
            self.check_newcomers(newcomers, 1)
            self.assertEqual(bad.wrong(1, bad.shadow), [])
            bad.apply(1)
            self.assertEqual(bad.wrong(1), [])

    def test_where_one_of_two_feeders_is_wrong_the_other_feeds_the_newcomer_and_it(self):
        # Both are on one node and send parts of the same tensors: they differ, and it is known which of them is wrong.
        judge = Layout("judge", 1, [mesh("one", [1])], [tensor("norm", [12], "float32", "one", [None]),
                                                        tensor("w1", [16, 12], "bfloat16", "one", [None])])
        for receive in (pb.RECEIVE_STAGED, pb.RECEIVE_IN_PLACE):
            with self.subTest(receive=receive), Daemon() as d:
                f = Fleet(d, small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7], automatic=True, receive=receive)
                in_place = receive == pb.RECEIVE_IN_PLACE
                f.publish(1)
                f.submit(1)
                for w in f.destinations if in_place else ():
                    w.event("ready_requested", 1)
                    w.ready(1)
                self.assertEqual(f.final(1).phase, pb.PHASE_COMMITTED)
                bad = f.destinations[3]
                bad.event("committed", 1)
                self.stray_write(bad, bad.shadow)
                late = Worker(Client(d), "m", pb.SIDE_DESTINATION, judge, 0, 6, pb.RECEIVE_STAGED, True)
                d.wait_log("catch-up: ABORTED: .*layout 'rollout' rank 3, which was to feed others")
                state = next(w.state for w in d.status("m").models[0].workers
                             if w.layout_name == "rollout" and w.rank == 3)
                self.assertIn(state, (pb.WORKER_TORN,) if in_place else (pb.WORKER_EMPTY, pb.WORKER_STALE))
                if in_place:
                    for w in f.destinations[2:]:  # as one: they serve together
                        w.event("ready_requested", 1)
                        w.ready(1)
                late.event("committed", 1)
                self.assertEqual(late.wrong(1, late.shadow), [])
                bad.event("committed", 1)
                self.assertEqual(bad.wrong(1, bad.shadow), [])

    def test_newcomers_are_believed_after_a_restart_like_those_that_were_there(self):
        with Daemon() as d:
            f = half(d, automatic=True)
            f.refit(1, policy=ONE_IS_ENOUGH)
            f.destinations += rest(f)
            for w in f.destinations[2:]:
                w.event("committed", 1)
            for w in f.destinations:
                w.apply(1)
            d.kill()
            d.start()
            for w in f.destinations:
                w.client = again(d, w)
                w.attach(live_version=1, shadow_version=1)
                self.assertEqual((w.attached.applied, w.attached.held), (1, 1), w.rank)


def again(d, w):
    """A client of the restarted daemon with the worker's old memory."""
    client = Client(d)
    w.segment = client.register(w.memory)
    return client


class Overtaken(unittest.TestCase):
    """A catch-up makes way."""

    def slow(self, d):
        f = SlowFleet(d, automatic=True)
        for w in f.destinations[2:]:
            w.goodbye()
        f.publish(1)
        f.submit(1, policy=ONE_IS_ENOUGH)
        self.assertEqual(f.final(1).phase, pb.PHASE_COMMITTED)
        for w in f.destinations[:2]:
            w.apply(1)
        return f

    def newcomers(self, f, d):
        """On the other domain: the way there is slow."""
        mark = d.log_mark()
        f.destinations[2:] = [Worker(f.rollout, "m", pb.SIDE_DESTINATION, slow_destination(), r, r - 2,
                                     pb.RECEIVE_STAGED, True) for r in (2, 3)]
        d.wait_log("catch-up: TRANSFERRING", mark)
        return mark

    def test_a_newer_version_calls_the_catch_up_off_and_brings_the_newcomer_along(self):
        with Daemon(**SlowFleet.RATE) as d:
            f = self.slow(d)
            f.publish(2)
            mark = self.newcomers(f, d)
            f.submit(2)
            d.wait_log("catch-up: ABORTED: version 2 was submitted", mark)
            self.assertEqual(f.final(2).phase, pb.PHASE_COMMITTED)
            f.apply_everywhere(2)

    def test_a_trainer_that_goes_on_is_asked_to_try_again_and_gets_through(self):
        with Daemon(refit__feed="no", **SlowFleet.RATE) as d:
            f = self.slow(d)
            f.publish_again(1)
            f.destinations[2:] = [Worker(f.rollout, "m", pb.SIDE_DESTINATION, slow_destination(), r, r + 4,
                                         pb.RECEIVE_STAGED, True) for r in (2, 3)]
            d.wait_log("catch-up: TRANSFERRING")
            with refused(self, grpc.StatusCode.UNAVAILABLE, "newcomer", "try again"):
                f.sources[0].publish(2)
            d.wait_log("catch-up: ABORTED")
            f.publish(2)
            f.submit(2)
            self.assertEqual(f.final(2).phase, pb.PHASE_COMMITTED)
            f.apply_everywhere(2)


class Released(unittest.TestCase):
    """The trainer writes over the version before every instance has it."""

    def staged_and_rejected(self, d, f):
        """Both instances hold version 1, instance 1 has rejected it, and the trainer goes on with its next weights."""
        f.publish(1)
        f.submit(1, "one", release_at=pb.RELEASE_AT_READ)
        for w in f.destinations:
            w.event("accept_requested", 1)
        f.destinations[2].accept(1, reject=True, reason="not yet")
        s = f.final(1)
        self.assertEqual(s.phase, pb.PHASE_ABORTED)
        for w in f.sources:
            w.event("source_released", 1)
        overwrite(f.sources, 9)
        return s

    def test_what_everybody_holds_is_committed_without_the_trainer_and_believed_after_a_restart(self):
        with Daemon() as d:
            f = Fleet(d, small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7])
            first = self.staged_and_rejected(d, f)
            f.submit(1, "two", release_at=pb.RELEASE_AT_READ)
            f.accept(1, first.attempt + 1)
            s = f.final(1)
            self.assertEqual((s.phase, s.bytes.landed), (pb.PHASE_COMMITTED, 0))
            for w in f.destinations:
                w.apply(1)
                self.assertEqual(w.wrong(1), [])
            d.kill()
            d.start()
            for w in f.destinations:
                w.client = again(d, w)
                w.attach(live_version=1, shadow_version=1)
                self.assertEqual((w.attached.applied, w.attached.held), (1, 1), w.rank)

    def test_an_instance_that_came_back_empty_is_fed_by_the_complete_one(self):
        with Daemon() as d:
            f = Fleet(d, small_source(), small_destination(), [0, 1, 2, 3], [4, 5, 6, 7])
            first = self.staged_and_rejected(d, f)
            for w in f.destinations[2:]:
                w.goodbye()
                w.memory[:] = bytes([POISON]) * len(w.memory)
                w.attach()
            f.submit(1, "two", release_at=pb.RELEASE_AT_READ)
            f.accept(1, first.attempt + 1)
            s = f.final(1)
            self.assertEqual(s.phase, pb.PHASE_COMMITTED)
            self.assertEqual(s.bytes.landed, sum(w.n_bytes for w in f.destinations[2:]))
            for w in f.destinations:
                w.apply(1)
                self.assertEqual(w.wrong(1), [])

    def test_without_a_complete_holder_the_source_is_gone(self):
        # Fan-out in a domain goes on when the trainer's weights are read, for a tenth of a second.
        for tries_left in reversed(range(20)):
            with Daemon() as d:
                f = SlowFleet(d, automatic=True)
                for w in f.destinations[2:]:
                    w.goodbye()
                one = Client(d)
                f.destinations[2:] = [Worker(one, "m", pb.SIDE_DESTINATION, slow_destination(), r, 4 + r,
                                             pb.RECEIVE_STAGED, True) for r in (2, 3)]
                f.publish(1)
                f.submit(1, policy=ONE_IS_ENOUGH, release_at=pb.RELEASE_AT_READ)
                f.sources[0].event("source_released", 1)
                one.close()
                s = f.final(1)
                if s.phase != pb.PHASE_COMMITTED:
                    break
                self.assertGreater(tries_left, 0, "all was there each time before an instance left")
        self.assertEqual(s.phase, pb.PHASE_ABORTED)
        self.assertIn("SOURCE_GONE", s.reason)


class Retry(unittest.TestCase):
    """An attempt ends in the middle of its bytes: what has landed in shadow memory is not moved again, but verified."""

    def stop(self, f, version):
        """Called off by hand after some bytes have landed; returns how it ended."""
        f.until_bytes_move(version)
        f.daemon.admin(f.trainer.token).Abort(pb.AbortRequest(model="m", version=version, reason="to see what is kept"),
                                              timeout=WAIT_S)
        s = f.final(version)
        self.assertEqual(s.phase, pb.PHASE_ABORTED)
        return s

    def stopped(self, d):
        """A fleet whose version 1 was stopped so, and how it ended."""
        f = SlowFleet(d, automatic=True)
        f.publish(1)
        f.submit(1, "one")
        return f, self.stop(f, 1)

    def check_kept(self, first, second):
        self.assertEqual(second.phase, pb.PHASE_COMMITTED, second.reason)
        self.assertGreater(second.bytes.skipped, 0)
        self.assertEqual(second.bytes.skipped + second.bytes.landed, second.bytes.total)
        self.assertLess(second.bytes.network, second.bytes.network_minimum)

    def test_what_has_landed_is_not_moved_again(self):
        with Daemon(**SlowFleet.RATE) as d:
            f, first = self.stopped(d)
            f.publish_again(1)
            f.submit(1, "two")
            self.check_kept(first, f.final(1))
            f.apply_everywhere(1)

    def test_what_has_landed_and_was_written_over_since_is_caught(self):
        with Daemon(**SlowFleet.RATE) as d:
            f, _ = self.stopped(d)
            for w in f.destinations:  # a stray write over all of it
                w.memory[w.shadow:] = bytes([POISON]) * (len(w.memory) - w.shadow)
            f.publish_again(1)
            f.submit(1, "two")
            s = f.final(1)
            self.assertEqual(s.phase, pb.PHASE_ABORTED)
            self.assertIn("tensor 'big'", s.reason)
            f.publish_again(1)
            f.submit(1, "three")  # nothing is believed any more: all is moved
            s = f.final(1)
            self.assertEqual((s.phase, s.bytes.skipped), (pb.PHASE_COMMITTED, 0))
            f.apply_everywhere(1)

    def test_other_content_is_moved_whole(self):
        with Daemon(**SlowFleet.RATE) as d:
            f, _ = self.stopped(d)
            f.publish(2)
            f.submit(2)
            s = f.final(2)
            self.assertEqual((s.phase, s.bytes.skipped), (pb.PHASE_COMMITTED, 0))
            f.apply_everywhere(2)

    def test_a_worker_that_came_back_with_other_memory_is_given_all_of_it(self):
        with Daemon(**SlowFleet.RATE) as d:
            f, _ = self.stopped(d)
            f.destinations[2].goodbye()
            f.destinations[2] = Worker(Client(d), "m", pb.SIDE_DESTINATION, slow_destination(), 2, 6, pb.RECEIVE_STAGED, True)
            f.publish_again(1)
            f.submit(1, "two")
            self.assertEqual(f.final(1).phase, pb.PHASE_COMMITTED)
            f.apply_everywhere(1)

    def test_both_ends_of_a_network_leave_out_the_same(self):
        cluster = nodes.of_case(self, nodes.Nodes(2, rate="40mbit", devices__chunk_bytes=16384))
        cluster.need_namespaces(self)
        f = nodes.Fleet(cluster, nodes.bulk("train", [1], [None]), nodes.bulk("rollout", [2], [0], instances=[[0, 1]]),
                        ["n0:0"], ["n1:0", "n0:1"], worker=nodes.BulkWorker)
        f.publish(1)
        f.submit(1, "one")
        first = self.stop(f, 1)
        for w in f.sources:
            w.publish(1)
        f.submit(1, "two")
        self.check_kept(first, f.final(1))
        f.check(1)


class TwoNodes(unittest.TestCase):
    def test_a_newcomer_on_another_node_is_fed_over_the_network(self):
        cluster = nodes.of_case(self, nodes.Nodes(2))
        f = nodes.Fleet(cluster, small_source(), small_destination(), ["n0:0", "n0:1", "n0:2", "n0:3"],
                        ["n0:0", "n0:1", None, None])
        f.refit(1, policy=ONE_IS_ENOUGH)
        f.check(1)
        overwrite(f.sources, 9)
        mark = cluster.head.log_mark()
        newcomers = [f.attach_destination(r, f"n1:{r}") for r in (2, 3)]
        for w in newcomers:
            w.event("committed", 1)
        self.assertEqual(caught_up_bytes(cluster.head, mark), sum(w.n_bytes for w in newcomers))
        f.destinations = newcomers
        f.check(1)

    def test_a_newcomer_that_gets_wrong_bytes_is_blamed_and_not_who_fed_it(self):
        cluster = nodes.Nodes(2)
        start = cluster.start

        def start_damaged(names=None):
            with unittest.mock.patch.dict(os.environ, RESHARD_DAMAGE="flipped-bit:1"):
                cluster["n1"].start(wait=None)  # nothing lands there before the catch-up
            start([x for x in cluster.names if x != "n1"])
            cluster.wait_joined(cluster.names)
            return cluster

        cluster.start = start_damaged
        nodes.of_case(self, cluster)
        f = nodes.Fleet(cluster, small_source(), small_destination(), ["n0:0", "n0:1", "n0:2", "n0:3"],
                        ["n0:0", "n0:1", None, None])
        f.refit(1, policy=ONE_IS_ENOUGH)
        overwrite(f.sources, 9)
        newcomers = [f.attach_destination(r, f"n1:{r}") for r in (2, 3)]
        cluster.head.wait_log("catch-up: ABORTED: .*layout 'rollout' rank [23] holds fingerprint")
        held = {w.rank: w.held for w in cluster.head.status("m").models[0].workers if w.side == pb.SIDE_DESTINATION}
        self.assertEqual((held[0], held[1]), (1, 1))
        for w in newcomers:
            w.event("committed", 1)
        f.destinations = newcomers
        f.check(1)


if __name__ == "__main__":
    main()
