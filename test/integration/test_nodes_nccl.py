#!/usr/bin/python3
"""Communicators of GPUs on several nodes, on the stand-in for GPUs (make check-standin): who names them, when one is used again,
and what becomes of a refit whose communicator fails, hangs or loses a member. Elsewhere they are skipped."""
import json
import unittest

from nodes import *

ANSWER_S = 6 * SLOW  # lease, slack, and what a busy machine takes
NEW = "a new communicator"


@unittest.skipUnless(backends.STANDIN, "needs the stand-in for GPUs: make check-standin")
class Case(unittest.TestCase):
    def nodes(self, count, env=None, **more):
        """env: what injects faults, by node."""
        nodes = Nodes(count, **more)
        for name, pairs in (env or {}).items():
            nodes[name].env = pairs
        return of_case(self, nodes)

    def fleet(self, nodes, receivers=None):
        """n0 sends 2 MiB; each receiver is an instance of its own."""
        receivers = receivers or nodes.names[1:]
        k = len(receivers)
        self.places = [f"{x}:0" for x in receivers]
        return Fleet(nodes, bulk("train", [1], [None]), bulk("rollout", [k], [None], instances=[[i] for i in range(k)]), ["n0:0"],
                     self.places, worker=BulkWorker)

    def made(self, nodes):
        """How many communicators each node has made since its start."""
        return {name: sum(NEW in line for line in d.lines) for name, d in nodes.daemons.items()}

    def communicators(self, nodes, **expected):
        """The same, of these nodes; the log comes a little after what it tells of."""
        end = time.monotonic() + WAIT_S
        while True:
            made = {name: n for name, n in self.made(nodes).items() if name in expected}
            if made == expected:
                return
            self.assertLess(time.monotonic(), end, f"{made} communicators were made, not {expected}")
            threading.Event().wait(0.02)

    def aborted(self, f, version, *words, within=ANSWER_S):
        begin = time.monotonic()
        s = f.watch(version, lambda s: s.phase in (pb.PHASE_ABORTED, pb.PHASE_COMMITTED), timeout=within + WAIT_S)
        self.assertEqual(s.phase, pb.PHASE_ABORTED)
        for word in words:
            self.assertIn(word, s.reason)
        self.assertLess(time.monotonic() - begin, within, s.reason)
        return s

    def begin(self, f, version, **options):
        f.publish(version)
        f.submit(version, **options)

    def clean(self, f, version):
        """Commits at its first attempt, every element right."""
        s = f.refit(version)
        self.assertEqual(s.bytes.network, s.bytes.network_minimum)
        f.check(version)

    def attach_again(self, f, node):
        f.forget(node)
        for rank, place in enumerate(self.places):
            if place.split(":")[0] == node:
                f.destinations.insert(rank, f.attach_destination(rank, place))


class Epochs(Case):
    def test_one_communicator_serves_all_refits_of_an_epoch(self):
        nodes = self.nodes(3)
        f = self.fleet(nodes)
        for version in (1, 2, 3):
            self.clean(f, version)
        self.communicators(nodes, n0=1, n1=1, n2=1)

    def test_a_new_member_makes_an_epoch_with_a_communicator_of_its_own(self):
        nodes = self.nodes(3)
        f = self.fleet(nodes, ["n1"])
        self.clean(f, 1)
        self.communicators(nodes, n0=1, n1=1, n2=0)
        late = BulkWorker(f.client("n2", "rollout"), "m", pb.SIDE_DESTINATION, bulk("eval", [1], [None]), 0, 3, pb.RECEIVE_STAGED, True)
        late.node = "n2"
        late.event("committed", 1)  # n1 has fed it, by one of their own
        late.apply(1)
        f.destinations.append(late)
        self.clean(f, 2)
        self.communicators(nodes, n0=2)
        nodes["n2"].wait_log(NEW)

    def test_only_devices_with_workers_take_part(self):
        # 5 nodes of 4 devices are more than the 16 ranks that the stand-in's communicators have.
        nodes = self.nodes(5)
        self.clean(self.fleet(nodes), 1)

    def test_two_models_on_the_same_nodes_have_a_communicator_each(self):
        nodes = self.nodes(2)
        for model, device in (("a", 0), ("b", 1)):
            f = Fleet(nodes, bulk("train", [1], [None]), bulk("rollout", [1], [None]), [f"n0:{device}"], [f"n1:{device}"],
                      model=model, worker=BulkWorker)
            self.clean(f, 1)
        self.communicators(nodes, n0=2, n1=2)


class Shrinking(Case):
    """[nccl] shrink: whole nodes that leave between refits. C12."""

    LEFT = "what is left of the communicator"

    def left(self, nodes, name):
        return sum(self.LEFT in line for line in list(nodes[name].lines))

    def leave(self, nodes, f, name):
        nodes[name].kill()
        f.forget(name)
        nodes.wait_joined([name], "away")

    def shrinks(self, env=None, **more):
        """Three nodes of which one goes after version 1; what the nodes that are left do for version 2."""
        nodes = self.nodes(3, env=env, **more)
        f = self.fleet(nodes)
        self.clean(f, 1)
        self.leave(nodes, f, "n2")
        return nodes, f

    def refit_of_the_rest(self, f, version):
        """The instance of the node that has left is not waited for."""
        f.publish(version)
        f.submit(version, policy=[pb.LayoutPolicy(layout_name="rollout", min_instances=1)])
        s = f.final(version)
        self.assertEqual(s.phase, pb.PHASE_COMMITTED, s.reason)
        f.check(version)

    def test_those_who_are_left_keep_what_they_have_and_no_new_one_is_made(self):
        nodes, f = self.shrinks(nccl__shrink="yes")
        self.refit_of_the_rest(f, 2)
        nodes["n0"].wait_log("its communicator of 3 ranks is shrunk: 1 have left")
        nodes["n1"].wait_log(self.LEFT)
        self.assertEqual((self.left(nodes, "n0"), self.left(nodes, "n1")), (1, 1))
        self.communicators(nodes, n0=1, n1=1)
        self.refit_of_the_rest(f, 3)  # and serves on
        self.assertEqual((self.left(nodes, "n0"), self.left(nodes, "n1")), (1, 1))

    def test_it_is_off_unless_it_is_asked_for(self):
        nodes, f = self.shrinks()
        self.refit_of_the_rest(f, 2)
        self.communicators(nodes, n0=2, n1=2)

    def test_where_nccl_refuses_a_new_one_is_made_in_the_same_attempt_and_said(self):
        fails = {"STANDIN_FAIL": "ncclCommShrink:1:5"}
        nodes, f = self.shrinks(env={"n0": fails, "n1": fails}, nccl__shrink="yes")
        self.refit_of_the_rest(f, 2)
        nodes["n1"].wait_log("a communicator could not be shrunk, and a new one was made")

    def test_one_that_cannot_and_one_that_waits_meet_in_a_new_one(self):
        nodes, f = self.shrinks(env={"n1": {"STANDIN_HANG": "shrink:1"}}, nccl__shrink="yes")
        self.refit_of_the_rest(f, 2)


class Making(Case):
    def test_health_is_answered_while_members_are_waited_for(self):  # C01
        nodes = self.nodes(2, env={"n1": {"STANDIN_HANG": "init:1"}})
        f = self.fleet(nodes)
        self.begin(f, 1, prepare_timeout_ms=int(3000 * SLOW))
        nodes["n0"].wait_log(NEW)
        stubs = [health_pb2_grpc.HealthStub(d.channel()) for d in nodes.daemons.values()]
        slowest, over = 0.0, threading.Thread(target=f.final, args=(1,))
        over.start()
        while over.is_alive():
            for stub in stubs:
                begin = time.monotonic()
                self.assertEqual(stub.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S).status, 1)
                slowest = max(slowest, time.monotonic() - begin)
        self.aborted(f, 1, "n1")
        self.assertLess(slowest, 1 * SLOW)
        self.clean(f, 2)

    def test_a_member_that_hangs_in_init_ends_it_at_the_deadline_by_name(self):
        for ms in deadlines(1500):
            nodes = self.nodes(3, env={"n2": {"STANDIN_HANG": "init:1"}})
            f = self.fleet(nodes)
            self.begin(f, 1, prepare_timeout_ms=ms)
            begin = time.monotonic()
            f.final(1)
            took = time.monotonic() - begin
            if set(self.made(nodes).values()) == {1}:
                break
            nodes.close()  # not all had come as far as that
        self.assertLess(took, ANSWER_S + (ms - deadlines(1500)[0]) / 1000)
        self.aborted(f, 1, "n2")
        self.clean(f, 2)
        self.communicators(nodes, n0=2, n1=2, n2=2)

    def test_a_data_plane_that_stands_still_in_init_is_named(self):
        nodes = self.nodes(3, env={"n1": {"STANDIN_HANG": "ncclCommInitRankConfig:1"}}, refit__prepare_timeout_ms=int(1500 * SLOW),
                           refit__quiesce_timeout_ms=int(1000 * SLOW))
        f = self.fleet(nodes)
        self.begin(f, 1)
        self.aborted(f, 1, "n1", within=2 * ANSWER_S)

    def test_a_member_that_fails_in_init_ends_it_at_once(self):
        nodes = self.nodes(3, env={"n1": {"STANDIN_ASYNC": "init:1:3"}})
        f = self.fleet(nodes)
        self.begin(f, 1)
        self.aborted(f, 1, "NCCL")
        self.clean(f, 2)

    def test_each_of_a_nodes_ranks_is_asked_how_it_does(self):
        nodes = self.nodes(2, env={"n1": {"STANDIN_ASYNC": "init:2:3"}})
        f = Fleet(nodes, bulk("train", [1], [None]), bulk("rollout", [2], [0]), ["n0:0"], ["n1:0", "n1:1"], worker=BulkWorker)
        self.begin(f, 1)
        self.aborted(f, 1, "NCCL", "of 3")
        self.clean(f, 2)

    def test_an_id_that_cannot_be_made_is_told_and_the_next_refit_works(self):
        nodes = self.nodes(2, env={"n0": {"STANDIN_FAIL": "ncclGetUniqueId:1"}})
        f = self.fleet(nodes)
        self.begin(f, 1)
        self.aborted(f, 1, "communicator's id", "NCCL")
        self.clean(f, 2)

    def test_an_abort_that_hangs_costs_that_data_plane_alone(self):
        nodes = self.nodes(2, env={"n1": {"STANDIN_HANG": "ncclCommAbort:1,group:2"}}, refit__transfer_timeout_ms=int(1500 * SLOW))
        f = self.fleet(nodes)
        before = {name: nodes[name].data_plane_pid() for name in nodes.names}
        self.begin(f, 1)
        self.aborted(f, 1, within=20 * SLOW)
        nodes.wait_joined(nodes.names)
        nodes["n1"].wait_log("data plane lost")
        self.assertEqual(nodes["n0"].data_plane_pid(), before["n0"])


class Deaths(Case):
    def stuck(self, count):
        """A refit whose bytes stop half way into n1."""
        nodes = self.nodes(count, env={"n1": {"STANDIN_HANG": "group:3"}}, refit__transfer_timeout_ms=int(60000 * SLOW))
        f = self.fleet(nodes)
        self.begin(f, 1)
        f.until_bytes_move(1)
        return nodes, f

    def test_a_member_that_is_killed_in_the_middle_ends_it_and_comes_back(self):
        nodes, f = self.stuck(3)
        nodes["n1"].kill()
        self.aborted(f, 1, "n1")
        nodes["n1"].env = {}
        nodes["n1"].restart()
        self.attach_again(f, "n1")
        self.clean(f, 2)

    def test_a_data_plane_that_is_killed_in_the_middle_is_replaced(self):
        nodes, f = self.stuck(2)
        os.kill(nodes["n1"].data_plane_pid(), signal.SIGKILL)
        self.aborted(f, 1, "n1")
        nodes.wait_joined(nodes.names)
        self.assertEqual(nodes.head.status("m").models[0].committed, 0)

    def test_an_error_that_nobody_asked_for_ends_it(self):
        nodes = self.nodes(3, env={"n1": {"STANDIN_ASYNC": "group:2:6"}})
        f = self.fleet(nodes)
        self.begin(f, 1)
        self.aborted(f, 1, "NCCL")
        self.clean(f, 2)


class Joining(Case):
    def refused(self, said, env, head=None):
        """n1 has this environment; the coordinator refuses it, and this is what stands in n1's log."""
        nodes = Nodes(2)
        self.addCleanup(nodes.close)
        nodes["n0"].env, nodes["n1"].env = head or {}, env
        nodes["n0"].start()
        nodes["n1"].start(wait=None)
        nodes["n1"].wait_log(said)
        self.assertEqual(nodes.node_states()["n1"], "away")
        self.assertGreater(nodes.node_status()["n1"].refused, 0)

    def test_another_nccl_is_refused_by_both_versions(self):
        self.refused(r"nccl differs: node n1 has 2\.29\.7, the coordinator n0 has 2\.28\.9", {"STANDIN_NCCL_VERSION": "22907"},
                     {"STANDIN_NCCL_VERSION": "22809"})

    def test_another_cuda_is_refused_by_both_versions(self):
        self.refused("cuda differs: node n1 has 12, the coordinator n0 has 13", {"STANDIN_CUDA_VERSION": "12080"})

    def test_another_cuda_of_the_same_number_joins(self):
        self.nodes(2, env={"n1": {"STANDIN_CUDA_VERSION": "13010"}})

    def test_a_transport_switch_of_nccl_that_differs_is_refused_by_name(self):
        self.refused("NCCL_CUMEM_ENABLE differs: node n1 has 0, the coordinator n0 has none", {"NCCL_CUMEM_ENABLE": "0"})

    def test_what_a_machine_has_of_its_own_may_differ(self):
        nodes = self.nodes(2, env={"n1": {"NCCL_SOCKET_IFNAME": "eth0,lo", "NCCL_DEBUG": "WARN"}})
        self.clean(self.fleet(nodes), 1)
        nodes["n0"].wait_log("NCCL: interface .*, which has the data address")
        self.assertFalse([x for x in nodes["n1"].lines if "NCCL: interface" in x])  # the operator's stays

    def test_an_interface_that_is_not_there_is_named_at_the_start(self):
        nodes = Nodes(2)
        self.addCleanup(nodes.close)
        nodes["n0"].env = {"NCCL_SOCKET_IFNAME": "=eth99"}
        nodes["n0"].start(wait=None)
        nodes["n0"].wait_log("NCCL_SOCKET_IFNAME==eth99 matches no interface of this machine .*lo.*unset it and set data_address")

    def test_a_cuda_node_and_a_host_node_are_no_cluster(self):
        nodes = Nodes(2)
        self.addCleanup(nodes.close)
        text = nodes.config.read_text()
        nodes["n0"].start()
        nodes.config.write_text(text.replace("backend = cuda", "backend = host").replace("transport = nccl", "transport = tcp"))
        nodes["n1"].start(wait=None)
        nodes["n0"].wait_log("backend differs: node n1 has host, the coordinator n0 has cuda")


class Paper(Case):
    """What bench_plan_paper says of a refit is what the stand-in's NCCL counts when it is done."""

    @staticmethod
    def counted(path):
        return cuda_memory.read_counters(path)[:4]

    def layout_file(self, path, name, shape, placements, instances=None):
        mesh_json = {"name": "m", "shape": shape, "ranks": list(range(shape[0] * shape[-1] if len(shape) > 1 else shape[0]))}
        words = ["Replicate" if x is None else f"Shard({x})" for x in placements]
        path.write_text(json.dumps({
            "name": name, "ranks": len(mesh_json["ranks"]), "meshes": [mesh_json], **({"instances": instances} if instances else {}),
            "tensors": [{"name": "big", "shape": [1024, 2048], "dtype": "uint8", "mesh": "m", "placements": words},
                        {"name": "bias", "shape": [1024], "dtype": "uint8", "mesh": "m",
                         "placements": ["Replicate"] * len(shape)}]}))

    def paper(self, folder):
        self.layout_file(folder / "source.json", "train", [4], [0])
        self.layout_file(folder / "destination.json", "rollout", [2, 2], [None, 1], [[0, 1], [2, 3]])
        (folder / "topology.json").write_text(json.dumps({
            "nodes": [{"name": "n0", "devices": 4}, {"name": "n1", "devices": 4}], "source": [f"n0:{i}" for i in range(4)],
            "destination": [f"n1:{i}" for i in range(4)]}))
        out = subprocess.run([BUILD / "bench" / "bench_plan_paper", *(folder / f"{x}.json" for x in ("source", "destination", "topology")),
                              "65536", "8", "64"], stdout=subprocess.PIPE, check=True)
        return {d["device"]: d for d in json.loads(out.stdout)["devices"]}

    def test_messages_bytes_and_groups_of_each_device_are_those_of_the_plan(self):
        with tempfile.TemporaryDirectory(prefix="reshard-paper-") as folder:
            folder = pathlib.Path(folder)
            nodes = self.nodes(2, env={n: {"STANDIN_COUNTERS": str(folder / n)} for n in ("n0", "n1")}, devices__ring_slots=8)
            f = Fleet(nodes, bulk("train", [4], [0]), bulk("rollout", [2, 2], [None, 1], instances=[[0, 1], [2, 3]]),
                      [f"n0:{i}" for i in range(4)], [f"n1:{i}" for i in range(4)], worker=BulkWorker)
            self.clean(f, 1)
            paper, counted = self.paper(folder), self.counted(folder / "n0") + self.counted(folder / "n1")
        self.assertGreater(sum(x["messages"] for x in paper.values()), 64)
        for device, real in enumerate(counted):
            plan = paper.get(device, {"messages": 0, "sent": 0, "received": 0, "groups_least": 0, "groups_most": 0})
            said = f"device {device}: the plan says {plan}, NCCL counted {real}"
            self.assertEqual((real["messages"], real["sent_bytes"], real["received_bytes"]),
                             (plan["messages"], plan["sent"], plan["received"]), said)
            self.assertTrue(plan["groups_least"] <= real["groups"] <= plan["groups_most"], said)

    def test_launches_of_packing_and_unpacking_are_no_more_than_the_plan_says(self):
        with tempfile.TemporaryDirectory(prefix="reshard-paper-") as folder:
            folder = pathlib.Path(folder)
            nodes = self.nodes(2, env={n: {"STANDIN_COUNTERS": str(folder / n)} for n in ("n0", "n1")}, devices__ring_slots=8,
                               refit__verify="off")  # fingerprints are launches, too
            f = Fleet(nodes, bulk("train", [4], [0]), bulk("rollout", [2, 2], [None, 1], instances=[[0, 1], [2, 3]]),
                      [f"n0:{i}" for i in range(4)], [f"n1:{i}" for i in range(4)], worker=BulkWorker)
            f.refit(1)
            paper, counted = self.paper(folder), self.counted(folder / "n0") + self.counted(folder / "n1")
            f.check(1)
        self.assertGreater(sum(real["launches"] for real in counted), 16)
        for device, real in enumerate(counted):
            most = paper.get(device, {"launches_most": 0})["launches_most"]
            self.assertLessEqual(real["launches"], most, f"device {device}: {real}")


    def test_what_is_relayed_between_domains_of_a_node_is_copied(self):
        # Two domains of n1 need all of it. Each byte comes to n1 by NCCL at least once; what one domain hands to the other does not.
        size = 1024 * 2048 + 1024
        for local_pairs in ("copy", "transport"):
            with tempfile.TemporaryDirectory(prefix="reshard-paper-") as folder:
                folder = pathlib.Path(folder)
                nodes = self.nodes(2, env={n: {"STANDIN_COUNTERS": str(folder / n), "STANDIN_NVLINK": "2"} for n in ("n0", "n1")},
                                   devices__local_pairs=local_pairs)
                f = Fleet(nodes, bulk("train", [1], [None]), bulk("rollout", [4], [None], instances=[[0, 1], [2, 3]]),
                          ["n0:0"], [f"n1:{i}" for i in range(4)], worker=BulkWorker)
                self.clean(f, 1)
                n0, n1 = ({k: sum(d[k] for d in self.counted(folder / n)) for k in ("sent_bytes", "received_bytes")} for n in ("n0", "n1"))
                nodes.close()
            relayed = 2 * size - n0["sent_bytes"]
            self.assertGreater(relayed, 0)
            self.assertEqual(n1["sent_bytes"], 0 if local_pairs == "copy" else relayed)
            self.assertEqual(n1["received_bytes"], n0["sent_bytes"] + n1["sent_bytes"])


class Domains(Case):
    def domains(self, count, env, **more):
        nodes = self.nodes(count, env={f"n{i}": env for i in range(count)}, **more)
        return nodes, {name: list(n.domains) for name, n in nodes.node_status().items()}

    def test_nvlink_parts_a_node(self):
        nodes, found = self.domains(2, {"STANDIN_NVLINK": "2"})
        self.assertEqual(found["n0"], ["n0/0", "n0/0", "n0/1", "n0/1"])
        self.assertEqual(found["n1"], ["n1/0", "n1/0", "n1/1", "n1/1"])
        nodes["n1"].wait_log(r"domains n1/0: 0-1; n1/1: 2-3 by NVLink")

    def test_a_fabric_joins_nodes_and_its_bytes_are_no_network_bytes(self):
        nodes, found = self.domains(2, {"STANDIN_CLIQUE": "7"})
        self.assertEqual(set(found["n0"] + found["n1"]), {"fabric " + "5a" * 16 + ".7"})
        f = self.fleet(nodes)
        s = f.refit(1)
        f.check(1)
        self.assertEqual(s.bytes.network, 0)
        self.assertEqual(s.bytes.domain, 1024 * 2048 + 1024)

    def test_the_config_overrides_what_is_found(self):
        _, found = self.domains(2, {"STANDIN_CLIQUE": "7", "STANDIN_NVLINK": "2"}, devices__domains="0 1-3")
        self.assertEqual(found["n1"], ["n1/0", "n1/1", "n1/1", "n1/1"])

    def test_without_nvlink_peer_access_decides(self):
        _, found = self.domains(2, {"STANDIN_PEER": "1"})
        self.assertEqual(set(found["n0"]), {"n0"})


if __name__ == "__main__":
    main()
