#!/usr/bin/python3
"""Daemons that become a cluster: joining, refusals, silence, restarts, certificates, roles, and calls that a member passes on.

All on 127.0.0.x, from one settings file; no bytes of models move here (test_nodes.py)."""
import unittest
from concurrent import futures

from rig import *

NAMES = ("n0", "n1", "n2")
ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def free_port():
    """A port that is free on all of 127.0.0.x now."""
    with socket.socket() as s:
        s.bind(("0.0.0.0", 0))
        return s.getsockname()[1]


class Member(Daemon):
    """One daemon of a cluster: its settings are the cluster's, its name comes by --node."""

    def __init__(self, cluster, name, **more):
        super().__init__()
        self.name = name
        self.settings = {"daemon": {"socket": self.dir / "%n.sock", "state_dir": self.dir / "state-%n", "log_level": "debug"},
                         "devices": {"devices": 2, **backends.settings(transport="tcp")},
                         "cluster": dict(cluster)}
        self.socket = str(self.dir / f"{name}.sock")
        for key, value in more.items():
            section, key = key.split("__")
            self.settings.setdefault(section, {})[key] = value

    def argv(self):
        return super().argv() + ["--node", self.name]

    def start(self, wait="reshardd serves"):
        return super().start(wait)


class Case(unittest.TestCase):
    def setUp(self):
        self.port = free_port()
        self.cluster = {"coordinator": "n0",
                        "nodes": " ".join(f"{n}=127.0.0.{i + 1}:{self.port}" for i, n in enumerate(NAMES))}

    def member(self, name, **more):
        m = Member(self.cluster, name, **more)
        self.addCleanup(m.close)
        return m

    def all(self, **more):
        """Three daemons, joined."""
        daemons = [self.member(n, **more) for n in NAMES]
        for d in daemons:
            d.start()
        for d in daemons[1:]:
            d.wait_log("joined the coordinator n0")
        return daemons

    def refused(self, name, *words, **more):
        """A daemon whose JOIN is refused: what it says has all the words. Before that the coordinator may say that it is starting."""
        m = self.member(name, **more).start()
        said = m.wait_log(f"could not join the coordinator.*{re.escape(words[0])}.*")[0]
        for word in words:
            self.assertIn(word, said)
        return m


class Joining(Case):
    def test_members_join_and_say_goodbye(self):
        n0, n1, n2 = self.all()
        self.assertEqual(n2.stop()[0], 0)
        n0.wait_log("node n2 is away: it has stopped")
        self.assertEqual(n1.stop()[0], 0)
        self.assertEqual(n0.stop()[0], 0)

    def test_a_member_that_is_killed_and_started_at_once_is_another_one(self):
        n0, n1, _ = self.all()
        first = n0.wait_log("node n1 has joined: incarnation ([0-9a-f]+)")[1]
        mark = n0.log_mark()
        n1.kill()
        n1.start("joined the coordinator n0")
        second = n0.wait_log("node n1 has joined: incarnation ([0-9a-f]+)(?! again)", mark)[1]
        self.assertNotEqual(first, second)

    def test_a_member_that_stands_still_is_silent_within_3_s_and_comes_back(self):
        n0, n1, _ = self.all()
        mark, begin = n0.log_mark(), time.monotonic()
        n1.process.send_signal(signal.SIGSTOP)
        n0.wait_log("node n1 is silent", mark)
        self.assertLess(time.monotonic() - begin, 3 + 0.5 * SLOW)
        n0.wait_log("node n1 is away: its lease is over", mark)
        n1.process.send_signal(signal.SIGCONT)
        n0.wait_log("node n1 has joined: .* again", mark)

    def test_members_find_a_coordinator_that_was_killed(self):
        n0, n1, n2 = self.all()
        marks = {m: m.log_mark() for m in (n1, n2)}
        n0.kill()
        for m, mark in marks.items():
            m.wait_log("session with the coordinator over", mark)
        n0.start()
        for m, mark in marks.items():
            m.wait_log("joined the coordinator n0", mark)
        n0.wait_log("node n1 has joined")
        n0.wait_log("node n2 has joined")

    def test_a_member_may_be_first(self):
        n1 = self.member("n1").start()
        n0 = self.member("n0").start()
        n1.wait_log("joined the coordinator n0")
        n0.wait_log("node n1 has joined")


class Refusals(Case):
    def test_a_second_daemon_of_a_name(self):
        n0, n1, _ = self.all()
        # The same name at another address, as a mistaken copy of the settings would have it.
        other = dict(self.cluster, nodes=self.cluster["nodes"].replace("n1=127.0.0.2", "n1=127.0.0.9"))
        self.cluster = other
        self.refused("n1", "another daemon is node n1", "--node")
        self.assertIsNone(n1.process.poll())

    def test_lists_of_nodes_that_differ(self):
        self.member("n0").start()
        nodes = self.cluster["nodes"].split()
        self.cluster = dict(self.cluster, nodes=" ".join([nodes[0], nodes[2], nodes[1]]))
        self.refused("n1", "number 2 of its own", "number 1 of the coordinator's", "same order")

    def test_a_node_that_the_coordinator_does_not_know(self):
        self.member("n0").start()
        self.cluster = dict(self.cluster, nodes=self.cluster["nodes"] + f" n9=127.0.0.10:{self.port}")
        self.refused("n9", "there is no node 'n9'", "same list")

    def test_another_coordinator(self):
        n0 = self.member("n0").start()
        address = self.cluster["nodes"].split()[0].split("=")[1]
        # By its settings n2 is the coordinator, at n0's address.
        self.cluster = dict(self.cluster, coordinator="n2", nodes=f"n0=127.0.0.3:{self.port} n1=127.0.0.2:{self.port} n2={address}")
        self.refused("n1", "takes 'n2' for the coordinator", "reached n0")
        self.assertIsNone(n0.process.poll())

    def test_what_must_be_alike(self):
        self.member("n0").start()
        self.refused("n1", "chunk_bytes differs", "node n1 has 4096", "the coordinator n0 has 8388608", devices__chunk_bytes=4096)

    def test_address_families(self):  # CASES C09
        self.member("n0").start()
        self.refused("n1", "IPv6", "IPv4", "data_address", cluster__data_address="::1")

    def test_a_daemon_that_is_no_coordinator_is_told_from_one(self):
        self.all()
        # Joins n1, which is a member.
        nodes = self.cluster["nodes"].replace("n0=127.0.0.1:", "n0=127.0.0.77:").replace("n1=127.0.0.2:", "n0x=127.0.0.78:")
        self.cluster = dict(self.cluster, coordinator="boss", nodes=nodes + f" boss=127.0.0.2:{self.port} n7=127.0.0.8:{self.port}")
        self.refused("n7", "this is node n1, a member", "the coordinator is n0")


class Settings(Case):
    def run_check(self, daemon):
        return subprocess.run(daemon.argv() + ["--check-config"], capture_output=True, text=True)

    def test_one_file_is_checked_for_every_node(self):
        for i, n in enumerate(NAMES):
            r = self.run_check(self.member(n))
            self.assertEqual(r.returncode, 0, r.stderr)
            self.assertIn(f"3 nodes, coordinator n0 at 127.0.0.1:{self.port}, this one at 127.0.0.{i + 1}:{self.port}", r.stdout)

    def test_what_this_machine_does_not_have(self):  # CASES C07
        for key, value, words in (("data_address", "eth99", ("eth99", "lo")),
                                  ("data_address", "192.0.2.9", ("192.0.2.9",)),
                                  ("nodes", "n0=192.0.2.1:7070", ("n0=192.0.2.1:7070", "does not have"))):
            r = self.run_check(self.member("n0", **{"cluster__" + key: value, "cluster__insecure_network": "yes"}))
            self.assertEqual(r.returncode, 2, r.stdout)
            for word in words:
                self.assertIn(word, r.stderr)

    def test_nodes_beyond_loopback_need_certificates_or_a_loud_word(self):
        nodes = self.cluster["nodes"] + f" n3=192.0.2.1:{self.port}"
        r = self.run_check(self.member("n0", cluster__nodes=nodes))
        self.assertEqual(r.returncode, 2)
        self.assertIn("insecure_network", r.stderr)
        n0 = self.member("n0", cluster__nodes=nodes, cluster__insecure_network="yes").start()
        n0.wait_log("warn .*INSECURE")


class PassedOn(Case):
    def test_layouts_are_kept_by_both(self):
        n0, n1, n2 = self.all()
        layout = small_source()
        at_n1, at_n0, at_n2 = Client(n1), Client(n0), Client(n2)
        first = at_n1.stub.PutLayout(iter(layout.pages(1)), timeout=WAIT_S)
        self.assertFalse(first.known)
        for client in (at_n1, at_n0):  # n1's own answer is the coordinator's
            again = client.stub.PutLayout(iter(layout.pages()), timeout=WAIT_S)
            self.assertTrue(again.known)
            self.assertEqual(again.digest, first.digest)
        self.assertTrue(at_n2.stub.PutLayout(iter(layout.pages()), timeout=WAIT_S).known)

    def test_the_coordinators_word_comes_back_as_it_is(self):
        _, n1, _ = self.all()
        client = Client(n1)
        with refused(self, grpc.StatusCode.NOT_FOUND, "no model 'm'"):
            client.admin.Versions(pb.VersionsRequest(model="m"), timeout=WAIT_S)
        with refused(self, grpc.StatusCode.NOT_FOUND, "no model 'm'"):
            client.admin.Abort(pb.AbortRequest(model="m"), timeout=WAIT_S)
        with refused(self, grpc.StatusCode.NOT_FOUND, "never submitted"):
            list(client.stub.WatchRefit(pb.WatchRefitRequest(model="m", version=1), timeout=WAIT_S))
        with refused(self, grpc.StatusCode.NOT_FOUND, "nobody has attached"):
            client.stub.Submit(pb.SubmitRequest(model="m", version=1, request_id="a"), timeout=WAIT_S)
        with refused(self, grpc.StatusCode.UNAUTHENTICATED, "token"):
            n1.refit().Submit(pb.SubmitRequest(model="m", version=1, request_id="a"), timeout=WAIT_S)

    def test_without_the_coordinator_it_is_unavailable(self):
        n1 = self.member("n1").start()
        n1.wait_log(rf"warn .*the coordinator n0 at 127\.0\.0\.1:{self.port} is not reachable, and is tried again: .*refused")
        with refused(self, grpc.StatusCode.UNAVAILABLE, f"the coordinator n0 at 127.0.0.1:{self.port} is not reachable"):
            n1.admin().Versions(pb.VersionsRequest(model="m"), timeout=WAIT_S)
        n1.status()  # its own is told all the same

    def test_a_call_under_way_ends_when_the_coordinator_does(self):
        n0, n1, _ = self.all()
        n0.process.send_signal(signal.SIGSTOP)
        call = n1.admin().Versions.future(pb.VersionsRequest(model="m"), timeout=WAIT_S)
        n0.kill()
        self.assertEqual(call.exception(timeout=WAIT_S).code(), grpc.StatusCode.UNAVAILABLE)


class Certificates(Case):
    def setUp(self):
        super().setUp()
        self.certs = pathlib.Path(tempfile.mkdtemp(prefix="reshard-certs-"))
        self.addCleanup(shutil.rmtree, self.certs)
        self.make(self.certs, *NAMES, "trainer-1", "ops")
        self.cluster |= {"tls_ca": self.certs / "ca.pem", "tls_certificate": self.certs / "%n.pem", "tls_key": self.certs / "%n.key"}

    def make(self, folder, *names):
        subprocess.run([ROOT / "scripts/dev-certs", folder, *names], check=True, stdout=subprocess.DEVNULL)

    def remote(self, name, node=1, certs=None):
        """A channel to a node's cluster address by a certificate of that name; None: without one."""
        read = lambda file: ((certs or self.certs) / file).read_bytes()
        mine = (read(name + ".key"), read(name + ".pem")) if name else (None, None)
        channel = grpc.secure_channel(f"127.0.0.{node + 1}:{self.port}", grpc.ssl_channel_credentials(read("ca.pem"), *mine),
                                      (("grpc.ssl_target_name_override", f"n{node}"), ("grpc.use_local_subchannel_pool", 1)))
        self.addCleanup(channel.close)
        return channel

    def test_nodes_join_by_the_certificate_of_their_name_alone(self):
        n0, _, n2 = self.all()
        n2.stop()
        (self.certs / "n2.pem").write_bytes((self.certs / "n1.pem").read_bytes())
        (self.certs / "n2.key").write_bytes((self.certs / "n1.key").read_bytes())
        self.refused("n2", "certificate 'n1' is not that of node n2")
        n0.wait_log("refused a caller of Peer.Join")

    def test_another_authority_is_not_believed(self):
        self.member("n0").start()
        foreign = pathlib.Path(tempfile.mkdtemp(prefix="reshard-certs-"))
        self.addCleanup(shutil.rmtree, foreign)
        self.make(foreign, "n1")
        n1 = self.member("n1", cluster__tls_certificate=foreign / "n1.pem", cluster__tls_key=foreign / "n1.key").start()
        with refused(self, grpc.StatusCode.UNAVAILABLE, "not reachable"):
            n1.admin().Versions(pb.VersionsRequest(model="m"), timeout=WAIT_S)

    def test_certificates_are_read_again_at_a_signal(self):
        # Another authority, so that who trusts the old one alone is out; the connections that stand stay.
        def ask(channel):
            with refused(self, grpc.StatusCode.NOT_FOUND):
                pb_grpc.AdminStub(channel).Versions(pb.VersionsRequest(model="m"), timeout=WAIT_S)

        def turned_away(channel):
            with refused(self, grpc.StatusCode.UNAVAILABLE):
                pb_grpc.AdminStub(channel).Versions(pb.VersionsRequest(model="m"), timeout=WAIT_S)

        def signal_to(daemon, answer):
            mark = daemon.log_mark()
            daemon.process.send_signal(signal.SIGHUP)
            daemon.wait_log(answer, mark)

        def keep_asking():  # a Python channel without a call answers no ping, and is cut off for that
            while not over.wait(0.2):
                ask(standing)

        n0, n1, n2 = self.all(roles__operator="ops")
        standing, over = self.remote("ops", 0), threading.Event()
        ask(standing)
        asking = futures.ThreadPoolExecutor(1).submit(keep_asking)
        self.addCleanup(over.set)
        for name in ("n1", "n2"):
            n0.wait_log(f"node {name} has joined")
        joined = n0.log_mark()
        before, renewed = (pathlib.Path(tempfile.mkdtemp(prefix="reshard-certs-")) for _ in range(2))
        for folder in (before, renewed):
            self.addCleanup(shutil.rmtree, folder)
        shutil.copytree(self.certs, before, dirs_exist_ok=True)
        self.make(renewed, *NAMES, "ops")
        shutil.copytree(renewed, self.certs, dirs_exist_ok=True)
        turned_away(self.remote("ops", 0))  # files alone change nothing
        for d in (n0, n1, n2):
            signal_to(d, f"SIGHUP: certificates were read again: authority {self.certs}/ca.pem, certificate {self.certs}/{d.name}")
        for node in (0, 1):
            ask(self.remote("ops", node))
            turned_away(self.remote("ops", node, before))
        (self.certs / "n0.pem").write_text("nonsense")
        signal_to(n0, f"SIGHUP: the certificates stay as they were: .*{self.certs}/n0.pem")
        ask(self.remote("ops", 0))
        over.set()
        asking.result(WAIT_S)
        self.assertEqual([line for line in n0.lines[joined:] if "has joined" in line], [])
        # What a member calls the coordinator with is renewed too: it finds the next start of it, which knows only the new.
        shutil.copy(renewed / "n0.pem", self.certs)
        marks = {d: d.log_mark() for d in (n1, n2)}
        n0.kill()
        n0.start()
        for d, mark in marks.items():
            d.wait_log("joined the coordinator n0", mark)

    def test_a_signal_without_certificates_ends_nothing(self):
        self.cluster = {"coordinator": "n0", "nodes": self.cluster["nodes"]}
        n0 = self.member("n0").start()
        n0.process.send_signal(signal.SIGHUP)
        n0.wait_log("SIGHUP: there are no certificates to read again")
        n0.status()

    def test_roles_of_remote_clients_hold_at_every_node(self):
        self.all(roles__trainer="trainer-*", roles__operator="ops")
        versions, submit = pb.VersionsRequest(model="m"), pb.SubmitRequest(model="m", version=1, request_id="a")
        for node in (0, 1):
            trainer, ops = self.remote("trainer-1", node), self.remote("ops", node)
            with refused(self, grpc.StatusCode.PERMISSION_DENIED, "role operator", "'trainer-1' has trainer"):
                pb_grpc.AdminStub(trainer).Versions(versions, timeout=WAIT_S)
            with refused(self, grpc.StatusCode.NOT_FOUND):
                pb_grpc.AdminStub(ops).Versions(versions, timeout=WAIT_S)
            with refused(self, grpc.StatusCode.NOT_FOUND):
                pb_grpc.RefitStub(trainer).Submit(submit, timeout=WAIT_S)
            with refused(self, grpc.StatusCode.PERMISSION_DENIED, "role trainer", "'ops' has operator"):
                pb_grpc.RefitStub(ops).Submit(submit, timeout=WAIT_S)
            with refused(self, grpc.StatusCode.UNAVAILABLE):
                pb_grpc.AdminStub(self.remote(None, node)).Versions(versions, timeout=WAIT_S)

    def test_a_remote_client_attaches_no_worker(self):
        self.all(roles__trainer="trainer-*")
        hello = pb.AttachRequest(hello=pb.AttachHello(model="m", side=pb.SIDE_SOURCE, layout_name="train", layout_digest=b"0" * 16))
        with refused(self, grpc.StatusCode.PERMISSION_DENIED, "own node's daemon"):
            list(pb_grpc.RefitStub(self.remote("trainer-1")).Attach(iter([hello]), timeout=WAIT_S))

    def test_a_client_that_plays_a_member_is_not_believed(self):
        self.all(roles__operator="ops uid:0")
        stub = pb_grpc.AdminStub(self.remote("trainer-1", 0))
        lie = (("reshard-peer", "00" * 16), ("reshard-origin", "local 0 1"))
        with refused(self, grpc.StatusCode.UNAVAILABLE, "session"):
            stub.Abort(pb.AbortRequest(model="m"), timeout=WAIT_S, metadata=lie)
        with refused(self, grpc.StatusCode.PERMISSION_DENIED, "has none"):
            stub.Abort(pb.AbortRequest(model="m"), timeout=WAIT_S, metadata=lie[1:])

    def test_local_clients_have_the_roles_that_name_their_uid(self):
        _, n1, _ = self.all(roles__operator=f"uid:{os.getuid() + 1}")
        with refused(self, grpc.StatusCode.PERMISSION_DENIED, "role operator", f"uid {os.getuid()} has none"):
            Client(n1).admin.Abort(pb.AbortRequest(model="m"), timeout=WAIT_S)


if __name__ == "__main__":
    main()
