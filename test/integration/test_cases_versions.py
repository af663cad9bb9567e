#!/usr/bin/python3
"""Public fault reports about weight hand-over in RL frameworks, rebuilt with the real daemon; about the daemon itself:
test_cases_daemon.py.

Where each kind of fault is shown to come out right (U unit, S simulation, I integration; "here" is this file):

weights handed over
  names in one order, bytes in another   I test_cases: dtypes_in_turn…, swapped_tensors_are_named…; here: swapped_names…
  dtypes that differ                      I test_refit: declared_cast…, test_refusals: dtype_that_differs…; U kernels_cast
  a weight without its scale              I test_cases: a_quantised_weight…
  another dtype at the second update      I test_cases: a_buffer_that_comes_back…; here: a_buffer_replaced_while…
  one name twice                          I test_refusals: one_name_twice
  tied weights                            I test_cases: tied_weights…, a_tied_name…
  one tensor of two owners                here: two_owners…, owners_of_one_layout…; I test_faults: replicas_that_differ…
  prefixes and suffixes of names          I test_cases: names_on_both_sides…
  a pair cut by a chunk's edge            I test_cases: half_of_a_fused_parameter…
  coverage                                I test_cases: a_hundred_tensors… (there is no partial mode)
  larger than staging                     I test_cases: tensors_around_the_size…, test_cases_daemon: a_daemon_with_another_staging…
  bucket size                             I test_cases: the_result_does_not_depend…
  the next update's set of receivers      I test_faults: an_instance_that_is_away…; U refit: versions_to_changing_sets…
  one receiver's failure reaches all      here: a_bad_chunk_of_one…; U refit_failure: one_receivers_failure…
  spans of ranks                          here: instances_of_unequal_size…, leaders…; U layout_json: instances that overlap
  a failed chunk, then "finish"           here: a_failed_chunk_is_never_finished; I test_faults: aborted_version_may_be…
  a fleet left mixed                      here: one_of_four_fails…; I test_cases_daemon: one_of_four_daemons…,
                                          test_refusals: second_verdict…, abort_of_a_committed…; S
  a new engine is believed                here: an_empty_engine…; I test_cases_daemon: a_restarted_rollout_node…, test_crash: in_place_memory_reads_torn…
  no deadline                             here: who_dies_after_ready…; I test_faults: who_never_answers…, who_is_never_ready…;
                                          U exec_nodes_connect: a_peer_that_never_prepares…, rpc_link: a_server_that_says_nothing…
  the old version dropped under a reader  here: what_a_reader_serves…; U refit_workers: a_version_is_not_prepared_over…
  acknowledged too early, ring of streams here: one_slot_two_receivers…; U device: a_missing_dependency…; U exec: …delays…
  double memory                           here: a_refit_needs_its_staging_and_no_more
  memory is not given back                here: memory_that_comes_and_goes…; I test_daemon: no_descriptor_leaks…
  a dead rank in a group                  here: a_dead_rank_of_four…; I test_nodes_faults: a_destination_daemon_that_is_killed…
  the label taken at the wrong time       here: the_commit_is_heard_before…
  an expert map with holes                here: experts_dealt_in_turn…
  the registry lost its table             I test_faults: old_tokens_and_workers…, test_cases: one_memory_handed_over_twice…
  memory that sleeps                      here: memory_that_sleeps…; I test_refusals: drop_while_a_worker_uses_it…
"""
from cases_rig import *


class Names(Case):
    def test_swapped_names_are_both_told(self):
        # a, b, c, d by name; the bytes of b and c lie under each other's name.
        d = self.daemon()
        t = [(n, [4], "int32") for n in "abcd"]
        f = Fleet(d, whole("train", t), whole("rollout", t), [0], [4], automatic=True)
        w = f.sources[0]
        w.write(1)
        b, c = w.memory[16:32], w.memory[32:48]
        w.memory[16:48] = c + b
        w.publish(1, expected=[pb.ExpectedFingerprint(
            tensor=n, fingerprint=fingerprint(values(n, [4], ([0], [4]), 4, 1), [4], 4)) for n in "abcd"])
        f.submit(1)
        s = self.ends_aborted(f, 1, "'b'", "'c'")
        self.assertNotIn("'a'", s.reason)
        self.assertNotIn("'d'", s.reason)
        self.assertEqual(set(f.destinations[0].memory[:]), {POISON})

    def test_a_buffer_replaced_while_its_update_is_on_its_way(self):
        # The registration that version 2 began with goes; the new one has another dtype of the same size.
        d = self.daemon()
        f = Fleet(d, whole("train", [("w", [8], "float16")]), whole("rollout", [("w", [8], "float16")]), [0], [4], automatic=True)
        f.refit(1)
        apply_all(f, 1)
        f.submit(2)
        f.watch(2, lambda s: s.waiting_for)
        f.destinations[0].goodbye()
        f.destinations = [Worker(f.rollout, "m", pb.SIDE_DESTINATION, whole("rollout", [("w", [8], "bfloat16")]), 0, 4,
                                 pb.RECEIVE_STAGED, True)]
        f.publish(2)
        self.ends_aborted(f, 2)
        self.assertEqual(set(f.destinations[0].memory[:]), {POISON})
        f.publish(3)
        f.submit(3)
        self.ends_aborted(f, 3, "w", "cast")
        self.assertEqual(committed(d), 1)

    def test_two_owners_of_one_tensor_are_refused(self):
        # Ranks 0 and 1 hold emb by rows; so do 6 and 7, under another layout's name.
        d = self.daemon()
        rows = lambda name, ranks: Layout(name, max(ranks) + 1, [mesh("m", [2], ranks)], [tensor("emb", [8, 2], "int32", "m", [0])])
        client = Client(d)
        first = Worker(client, "m", pb.SIDE_SOURCE, rows("train", [0, 1]), 0, 0)
        second = Worker(client, "m", pb.SIDE_SOURCE, rows("other", [6, 7]), 6, 2, attach=False)
        with refused(self, PRECONDITION, "train", "other"):
            second.attach()
        first.publish(1)

    def test_owners_of_one_layout_must_hold_the_same(self):
        d = self.daemon()
        source = Layout("train", 8, [mesh("m", [2, 2], [0, 1, 6, 7])], [tensor("emb", [8, 2], "int32", "m", [None, 0])])
        trainer, rollout = Client(d), Client(d)
        sources = [Worker(trainer, "m", pb.SIDE_SOURCE, source, r, r % 4) for r in (0, 1, 6, 7)]
        taker = Worker(rollout, "m", pb.SIDE_DESTINATION, whole("rollout", [("emb", [8, 2], "int32")]), 0, 4,
                       pb.RECEIVE_STAGED, True)
        f = Fleet(d, source, taker.layout, [], [])
        f.sources, f.destinations, f.trainer = sources, [taker], trainer
        f.refit(1)
        taker.apply(1)
        self.serves(f, 1)
        for w in sources:
            w.write(2)
        sources[3].memory[0] ^= 1
        for w in sources:
            w.publish(2)
        f.submit(2)
        self.ends_aborted(f, 2, "'emb'", "1 and 7")
        self.serves(f, 1)


class Fleets(Case):
    def four(self, d, **more):
        """Four instances of one rank."""
        t = [("w", [20480], "uint8")]
        source = whole("train", t)
        destination = Layout("rollout", 4, [mesh("dp", [4])], [tensor("w", [20480], "uint8", "dp", [None])],
                             instances=[[0], [1], [2], [3]])
        return Fleet(d, source, destination, [0], [4, 5, 6, 7], **more)

    def test_a_bad_chunk_of_one_receiver_ends_all_four(self):
        # Five chunks of one message; the second goes wrong.
        d = self.enter(damaged_daemon("flipped-bit:1", devices__domains="0 1 2 3 4-7", devices__network_gbytes_per_s=1))
        f = self.four(d, automatic=True)
        begin = time.monotonic()
        f.publish(1)
        f.submit(1)
        self.ends_aborted(f, 1, "'w'")
        self.assertLess(time.monotonic() - begin, 5 * SLOW)
        for w in f.destinations:
            w.event("aborted", 1)
            with self.assertRaises(grpc.RpcError):
                w.apply(1)
        with refused(self, NOT_FOUND):
            committed(d)
        f.refit(2)
        apply_all(f, 2)
        self.serves(f, 2)

    def test_a_failed_chunk_is_never_finished(self):
        d = self.enter(damaged_daemon("lost-chunk:9", devices__domains="0 1 2 3 4-7"))
        f = self.four(d)
        version = 4
        while True:  # up to the version whose chunk goes wrong
            f.publish(version)
            f.submit(version)
            if not all([asked_to_accept(w, version) for w in f.destinations]):
                break
            for w in f.destinations:
                w.accept(version)
            self.assertEqual(f.final(version).phase, pb.PHASE_COMMITTED)
            apply_all(f, version)
            version += 1
        self.assertGreater(version, 4)
        self.ends_aborted(f, version, "'w'")
        for w in f.destinations:
            with refused(self, grpc.StatusCode.ABORTED):
                w.accept(version)
        self.assertEqual(committed(d), version - 1)
        self.serves(f, version - 1)
        f.refit(version + 1)
        for w in f.destinations:
            with self.assertRaises(grpc.RpcError):
                w.accept(version)
        self.assertEqual({v.version: v.phase for v in f.trainer.admin.Versions(pb.VersionsRequest(model="m"), timeout=WAIT_S)
                          .versions}[version], pb.PHASE_ABORTED)

    def test_one_of_four_fails_and_none_serves_two_versions(self):
        d = self.daemon()
        f = self.four(d)
        f.refit(1)
        apply_all(f, 1)
        f.publish(2)
        f.submit(2)
        for w in f.destinations:
            e = w.event("accept_requested", 2)
            if w.rank != 2:
                w.accept(2, e.attempt)
        progress = f.watch(2, lambda s: s.phase == pb.PHASE_ACCEPTING and len(s.waiting_for) == 1)
        self.assertIn("rank 2", progress.waiting_for[0])  # who is ready and who is not
        f.destinations[2].goodbye()
        self.ends_aborted(f, 2, "rank 2")
        self.serves(f, 1)
        f.destinations[2].attach(live_version=1)
        f.publish(2)
        attempt = f.submit(2, "again").attempt
        for w in f.destinations:
            e = w.event("accept_requested", 2, attempt)
            w.accept(2, e.attempt)
            w.accept(2, e.attempt)  # the answer was lost: the same again
        self.assertEqual(f.final(2).phase, pb.PHASE_COMMITTED)
        f.destinations[0].accept(2, attempt)  # even now
        with refused(self, PRECONDITION, "2"):
            f.trainer.admin.Abort(pb.AbortRequest(model="m", version=2), timeout=WAIT_S)
        apply_all(f, 2)
        self.serves(f, 2)

    def test_instances_of_unequal_size_accept_by_themselves(self):
        # Engines of one and of two ranks, at 1 and at 3 and 4; no rank is 0 or 2.
        d = self.daemon()
        destination = Layout("rollout", 5, [mesh("m", [3], [1, 3, 4])], [tensor("w", [6, 4], "int32", "m", [None])],
                             instances=[[1], [3, 4]])
        f = Fleet(d, whole("train", [("w", [6, 4], "int32")]), destination, [0], [])
        f.destinations = [Worker(f.rollout, "m", pb.SIDE_DESTINATION, destination, r, 4 + n, pb.RECEIVE_STAGED)
                          for n, r in enumerate((1, 3, 4))]
        f.publish(1)
        f.submit(1, policy=[pb.LayoutPolicy(layout_name="rollout", min_instances=1)])
        for w in reversed(f.destinations):
            e = w.event("accept_requested", 1)
            w.accept(1, e.attempt, reject=w.rank == 4, reason="not me" if w.rank == 4 else "")
        self.assertEqual(f.final(1).phase, pb.PHASE_COMMITTED)
        f.destinations[0].apply(1)
        self.assertEqual(f.destinations[0].wrong(1), [])
        self.assertEqual([list(i.ranks) for i in d.status("m").models[0].instances], [[1], [3, 4]])
        with self.assertRaises(grpc.RpcError):  # of the instance that rejected, the other rank has no version 1 either
            f.destinations[1].apply(1)
        overlap = Layout("rollout", 3, [mesh("m", [3])], [tensor("w", [6], "int32", "m", [None])], instances=[[0, 1], [1, 2]])
        with refused(self, INVALID, "rank 1"):
            f.rollout.put_layout(overlap)

    def test_eight_ranks_by_two_are_four_that_accept(self):
        d = self.daemon()
        destination = Layout("rollout", 8, [mesh("m", [4, 2], dim_names=["dp", "tp"])], [tensor("w", [6, 4], "int32", "m", [None, 0])],
                             instances=[[0, 1], [2, 3], [4, 5], [6, 7]])
        f = Fleet(d, whole("train", [("w", [6, 4], "int32")]), destination, [0], range(8))
        f.refit(1)
        apply_all(f, 1)
        self.serves(f, 1)
        self.assertEqual([i.ranks[0] for i in d.status("m").models[0].instances], [0, 2, 4, 6])
        marks = f.trainer.admin.Timeline(pb.TimelineRequest(model="m", version=1), timeout=WAIT_S)
        names = [m.who for v in marks.versions for m in v.marks if m.name == "accepted"]
        self.assertEqual(len(set(names)), 4, names)

    def test_an_empty_engine_is_not_taken_for_one_with_weights(self):
        d = self.daemon()
        f = small(d)
        f.refit(7)
        apply_all(f, 7)
        d.kill()
        d.start()
        client = Client(d)
        engine = Worker(client, "m", pb.SIDE_DESTINATION, small_destination(), 0, 4, pb.RECEIVE_STAGED)
        a = engine.attached
        self.assertEqual((a.committed, a.held, a.applied), (7, 0, 0))
        c = client.stub.GetCommitted(pb.GetCommittedRequest(model="m", worker=engine.id), timeout=WAIT_S)
        self.assertEqual((c.version, c.held, c.applied), (7, 0, 0))
        self.assertEqual(states(d)["rollout", 0], pb.WORKER_EMPTY)
        with self.assertRaises(grpc.RpcError):
            engine.apply(7)
        self.assertEqual(set(engine.memory[:]), {POISON})
        liar = Worker(client, "m", pb.SIDE_DESTINATION, small_destination(), 1, 5, pb.RECEIVE_STAGED, attach=False)
        liar.attach(live_version=7)  # its memory is poison
        self.assertEqual((liar.attached.held, liar.attached.applied), (0, 0))

    def test_who_dies_after_ready_frees_the_others(self):
        d = self.daemon()
        f = small(d, receive=pb.RECEIVE_IN_PLACE)
        f.publish(1)
        f.submit(1)
        for w in f.destinations[:2]:
            w.event("ready_requested", 1)
            w.ready(1)
        begin = time.monotonic()
        f.destinations[0].goodbye()
        self.ends_aborted(f, 1, "rank 0")
        self.assertLess(time.monotonic() - begin, 2 * SLOW)
        for w in f.destinations[1:]:
            w.event("aborted", 1)
        f.destinations[0].attach()
        f.refit(2)
        self.serves(f, 2)

    def test_what_a_reader_serves_stays_until_it_lets_go(self):
        # It holds version 3; 4 commits, 5 is asked for. It never sees a byte of 5 under the name of 3 or 4.
        d = self.daemon()
        f = small(d, automatic=True)
        f.refit(3)
        apply_all(f, 3)
        f.refit(4)
        f.publish(5)
        f.submit(5)
        f.watch(5, lambda s: s.waiting_for)
        self.serves(f, 3)
        apply_all(f, 4)
        self.serves(f, 4)
        self.assertEqual(f.final(5).phase, pb.PHASE_COMMITTED)
        self.serves(f, 4)
        for w in f.destinations:
            for late in (3, 4):
                with contextlib.suppress(grpc.RpcError):
                    self.assertEqual(w.apply(late).applied, 4)  # it is there already, or refused
        self.serves(f, 4)
        f.destinations[0].apply(5, skip=True)
        self.assertEqual(f.destinations[0].wrong(4), [])

    def test_a_dead_rank_of_four_comes_back_and_the_others_keep_their_ids(self):
        d = self.daemon(**SlowFleet.RATE)
        f = SlowFleet(d, automatic=True)
        f.publish(1)
        f.submit(1)
        f.until_bytes_move(1)
        ids, epoch = {w.rank: w.id for w in f.destinations}, d.status("m").models[0].epoch
        f.destinations[2].client = Client(d)
        f.destinations[2].goodbye()
        self.ends_aborted(f, 1, "rollout/rank 2")
        now = {w.rank: w.worker for w in d.status("m").models[0].workers
               if w.side == pb.SIDE_DESTINATION and w.state != pb.WORKER_GONE}
        self.assertEqual(now, {r: ids[r] for r in (0, 1, 3)})
        f.publish(2)
        f.submit(2, policy=[pb.LayoutPolicy(layout_name="rollout", min_instances=1)])
        s = f.final(2)
        self.assertEqual(s.phase, pb.PHASE_COMMITTED, s.reason)
        for w in f.destinations[:2]:
            w.apply(2)
            self.assertTrue(f.live_is(w, 2))
        without = d.status("m").models[0].epoch
        self.assertGreater(without, epoch)
        w = f.destinations[2] = Worker(Client(d), "m", pb.SIDE_DESTINATION, slow_destination(), 2, 6, pb.RECEIVE_STAGED, True)
        self.assertNotEqual(w.id, ids[2])
        for w in f.destinations[2:]:  # whole again, the instance is brought up to what the other serves
            w.event("committed", 2)
            w.apply(2)
            self.assertTrue(f.live_is(w, 2))
        f.publish(3)
        f.submit(3)
        self.assertEqual(f.final(3).phase, pb.PHASE_COMMITTED)
        f.apply_everywhere(3)
        self.assertGreater(d.status("m").models[0].epoch, without)
        self.assertEqual({w.rank: w.id for w in f.destinations if w.rank != 2}, {r: ids[r] for r in (0, 1, 3)})

    def test_the_commit_is_heard_before_anybody_can_apply_it(self):
        d = self.daemon()
        f = small(d)
        f.refit(1)
        apply_all(f, 1)
        watch = f.rollout.stub.WatchCommitted(pb.WatchCommittedRequest(model="m"), timeout=WAIT_S)
        self.assertEqual(next(watch).version, 1)
        f.publish(2)
        f.submit(2)
        w = f.destinations[0]
        requests = [x.event("accept_requested", 2) for x in f.destinations]
        with self.assertRaises(grpc.RpcError) as caught:  # received, but not committed
            w.apply(2)
        self.assertEqual(caught.exception.code(), PRECONDITION, caught.exception.details())
        for x, e in zip(f.destinations, requests):
            self.assertEqual(x.client.stub.GetCommitted(pb.GetCommittedRequest(model="m"), timeout=WAIT_S).version, 1)
            x.accept(2, e.attempt)
        w.event("committed", 2)
        self.assertEqual(next(watch).version, 2)
        c = f.rollout.stub.GetCommitted(pb.GetCommittedRequest(model="m", worker=w.id), timeout=WAIT_S)
        self.assertEqual((c.version, c.held, c.applied), (2, 2, 1))  # what it serves is told apart from what there is
        self.serves(f, 1)
        w.apply(2)
        c = f.rollout.stub.GetCommitted(pb.GetCommittedRequest(model="m", worker=w.id), timeout=WAIT_S)
        self.assertEqual((c.version, c.applied), (2, 2))
        watch.cancel()

    def test_experts_dealt_in_turn_reach_their_ranks(self):
        # Sixteen experts by name, e on rank e mod 4, and a second copy of expert 3 on rank 0; beside them one tensor of all
        # sixteen, whose rule means consecutive ones.
        d = self.daemon()
        names = [f"experts.{e}" for e in range(16)]
        source = Layout("train", 4, [mesh("ep", [4])] + [mesh(f"m{r}", [1], [r]) for r in range(4)],
                        [tensor(n, [5, 3], "int32", f"m{e // 4}", [None]) for e, n in enumerate(names)]
                        + [tensor("stacked", [16, 3], "int32", "ep", [0])])
        destination = Layout("rollout", 4, [mesh("ep", [4]), mesh("copy", [2], [3, 0])] + [mesh(f"m{r}", [1], [r]) for r in range(4)],
                             [tensor(n, [5, 3], "int32", "copy" if e == 3 else f"m{e % 4}", [None]) for e, n in enumerate(names)]
                             + [tensor("stacked", [16, 3], "int32", "ep", [0])])
        f = Fleet(d, source, destination, range(4), range(4, 8), automatic=True)
        f.refit(1)
        apply_all(f, 1)
        self.serves(f, 1)
        held = [sorted(int(n.split(".")[1]) for n in w.place if n != "stacked") for w in f.destinations]
        self.assertEqual(held, [[0, 3, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]])
        self.assertEqual([w.place["stacked"][0][1] for w in f.destinations], [([4 * r, 0], [4, 3]) for r in range(4)])

    def test_memory_that_sleeps_is_not_written_and_wakes_anew(self):
        d = self.daemon()
        f = small(d, automatic=True)
        f.refit(1)
        apply_all(f, 1)
        w = f.destinations[1]
        with self.assertRaises(MemoryError_):  # not while it is bound
            f.rollout.drop(w.segment)
        w.goodbye()
        f.rollout.drop(w.segment)
        asleep = w.memory[:]
        f.publish(2)
        f.submit(2, prepare_timeout_ms=int(300 * SLOW))
        self.ends_aborted(f, 2, "rollout/rank 1")
        self.assertEqual(w.memory[:], asleep)
        with self.assertRaises(grpc.RpcError):  # the old handle is of no use
            w.attach()
        w.segment, w.memory = f.rollout.segment(len(asleep), (w.side, w.rank, w.device))
        w.attach()
        w.event("committed", 1)  # what the others serve comes by itself
        w.apply(1)
        self.assertEqual(w.wrong(1), [])
        f.refit(3)
        apply_all(f, 3)
        self.serves(f, 3)


class Memory(Case):
    def test_one_slot_two_receivers_and_a_slow_one_keep_the_chunks_apart(self):
        # One staging slot, six chunks and more of columns, streams that wait at random before each item, and poison in
        # what was given back: first all ones, then all twos.
        for seed in (3, 11):
            with Daemon(devices__ring_slots=1, devices__chunk_bytes=4096, test__host_seed=seed,
                        test__host_max_delay_us=2000) as d:
                source = whole("train", [("w", [512, 64], "uint8")])
                destination = Layout("rollout", 2, [mesh("m", [2])], [tensor("w", [512, 64], "uint8", "m", [1])])
                f = Fleet(d, source, destination, [0], [4, 5], automatic=True)
                for version in (1, 2):
                    f.sources[0].memory[:] = bytes([version]) * (512 * 64)
                    f.sources[0].publish(version)
                    f.submit(version)
                    self.assertEqual(f.final(version).phase, pb.PHASE_COMMITTED)
                    for w in f.destinations:
                        w.apply(version)
                        self.assertEqual(set(w.memory[:512 * 32]), {version})

    def test_a_refit_needs_its_staging_and_no_more(self):
        # 64 MiB of weights in columns through rings of 8 slots of 1 MiB, on two devices.
        mib = 1 << 20
        d = self.daemon(devices__chunk_bytes=mib, devices__ring_slots=8)
        source = whole("train", [("w", [65536, 1024], "uint8")])
        destination = Layout("rollout", 1, [mesh("m", [1])],
                             [{"name": "w", "shape": [65536, 1024], "dtype": "uint8",
                               "regions": [{"rank": 0, "offset": [0, 0], "size": [65536, 512]},
                                           {"rank": 0, "offset": [0, 512], "size": [65536, 512]}]}])
        f = Fleet(d, source, destination, [0], [4], automatic=True, receive=pb.RECEIVE_IN_PLACE)
        own = lambda: int(re.search(r"RssAnon:\s+(\d+)", pathlib.Path(f"/proc/{d.data_plane_pid()}/status").read_text())[1]) * 1024
        before, most, done = own(), 0, threading.Event()

        def follow():
            nonlocal most
            while not done.wait(0.002):
                most = max(most, own())

        t = threading.Thread(target=follow)
        t.start()
        try:
            for version in (1, 2):
                row = os.urandom(1024)
                f.sources[0].memory[:] = row * 65536
                f.sources[0].publish(version)
                f.submit(version)
                f.destinations[0].event("ready_requested", version)
                f.destinations[0].ready(version)
                self.assertEqual(f.final(version).phase, pb.PHASE_COMMITTED)
                self.assertEqual(f.destinations[0].memory[:], row[:512] * 65536 + row[512:] * 65536)
        finally:
            done.set()
            t.join()
        self.assertGreater(most, before)
        if SLOW == 1:  # a sanitizer has memory of its own
            self.assertLess(most, 2 * 8 * mib + 12 * mib, "bytes of the data plane's own")

    def test_memory_that_comes_and_goes_is_given_back(self):
        # Both sides free and allocate anew for each version.
        d = self.daemon()
        t = [("w", [1 << 20], "uint8")]
        maps = lambda: pathlib.Path(f"/proc/{d.data_plane_pid()}/maps").read_text().count("memfd:test")
        fds = lambda: [len(os.listdir(f"/proc/{pid}/fd")) for pid in (d.process.pid, d.data_plane_pid())]
        rss = lambda: int(re.search(r"RssAnon:\s+(\d+)", pathlib.Path(f"/proc/{d.data_plane_pid()}/status").read_text())[1])
        for version in range(1, 26):
            client = Client(d, host_memory=True)
            s = Worker(client, "m", pb.SIDE_SOURCE, whole("train", t), 0, 0)
            w = Worker(client, "m", pb.SIDE_DESTINATION, whole("rollout", t), 0, 4, pb.RECEIVE_IN_PLACE, True)
            s.memory[:] = bytes([version]) * (1 << 20)
            s.publish(version)
            client.stub.Submit(pb.SubmitRequest(model="m", version=version, request_id=f"{version}"), timeout=WAIT_S)
            w.event("ready_requested", version)
            w.ready(version)
            w.event("committed", version)
            self.assertEqual(set(w.memory[:]), {version})
            self.assertEqual(maps(), 2)  # one for each live registration
            for x in (s, w):
                x.goodbye()
                client.drop(x.segment)
            self.assertEqual(maps(), 0)
            client.close()
            while d.channels:
                d.channels.pop().close()
            if version == 2:
                first_fds, first_rss = fds(), rss()
        for now, first in zip(fds(), first_fds):
            self.assertLessEqual(now, first + 2)
        if SLOW == 1:
            self.assertLess(rss(), first_rss + 1024)


if __name__ == "__main__":
    main()
