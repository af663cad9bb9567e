"""Daemons on several nodes that work as one: what the tests of many nodes are written with.

    with Nodes(3) as nodes:
        f = Fleet(nodes, source, destination, ["n0:0", "n1:0"], ["n2:0", "n2:1"])
        f.refit(1); f.check(1)

One reshardd.conf serves all nodes; node i is a network namespace of a testnet (test/lib/testnet.py), or an address of the
loopback where namespaces are not permitted. Each worker is attached to the daemon of its node, as a local client. Every
destination element is compared with what it must be. Daemons, and what they leave, end with the `with` block.
"""
import random

import rig
from rig import *  # noqa: F403

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "test" / "lib"))
import testnet  # noqa: E402

PORT = 7070


class Node(rig.Daemon):
    """One daemon of several; shares folder and settings with the others."""

    def __init__(self, nodes, name):
        self.nodes, self.name, self.dir = nodes, name, nodes.dir
        self.socket = str(self.dir / f"{name}.sock")
        self.process, self.log, self.changed = None, None, threading.Condition()
        self.channels, self.clients = [], []
        self.env = {}  # of this node alone, from its next start on

    def argv(self):
        env = ["env", *(f"{k}={v}" for k, v in self.env.items())] if self.env else []
        return self.nodes.net.argv(self.name, [*env, BUILD / "reshardd", "--config", self.nodes.config, "--node", self.name])

    @property
    def log_path(self):
        return self.dir / f"{self.name}.log"

    def tail(self, n=30):
        """Without gRPC's own lines."""
        return "\n".join(line[:400] for line in [x for x in self.lines if " grpc: " not in x][-n:])

    def log_text(self):
        """Of all its starts."""
        return self.log_path.read_text() if self.log_path.exists() else ""

    def freeze(self):
        """SIGSTOP of the control process; its data plane goes on until its lease is over."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self):
        self.process.send_signal(signal.SIGCONT)

    def restart(self):
        """After a kill: the same node, the same folder, another incarnation. Waits until it has joined."""
        self.start()
        self.nodes.wait_joined([self.name])
        return self

    def close(self):
        self.end_process()  # the folder is the others' too


class Nodes:
    """n daemons; n0 is the coordinator. Settings as rig.Daemon takes them: devices__devices=4."""

    def __init__(self, n, rate=None, offload=True, coordinator="n0", **settings):
        self.net = testnet.Testnet.up(n, rate, prefix="test", offload=offload)
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="reshard-nodes-"))
        self.names, self.coordinator = self.net.nodes, coordinator
        addresses = "\n  ".join(f"{name}={self.net.address(name)}:{PORT}" for name in self.names)
        self.settings = {"daemon": {"socket": self.dir / "%n.sock", "state_dir": self.dir / "state-%n", "log_level": "debug"},
                         "devices": {"devices": 4, "chunk_bytes": 65536},
                         "refit": {"least_piece_bytes": 64, "prepare_timeout_ms": int(30000 * SLOW),
                                   "quiesce_timeout_ms": int(3000 * SLOW)},
                         "clients": {"grace_ms": int(2000 * SLOW)},
                         "cluster": {"nodes": addresses, "coordinator": coordinator, "insecure_network": "yes",
                                     "lease_ms": int(2500 * SLOW)}}
        self.settings["devices"].update(backends.settings(transport="tcp"))
        for key, value in settings.items():
            section, name = key.split("__")
            self.settings.setdefault(section, {})[name] = value
        self.config = self.dir / "reshardd.conf"
        self.config.write_text("".join(f"[{s}]\n" + "".join(f"{k} = {v}\n" for k, v in keys.items())
                                       for s, keys in self.settings.items()))
        self.stub = None
        self.daemons = {name: Node(self, name) for name in self.names}
        if backends.STANDIN:
            for name, d in self.daemons.items():
                d.env = {"STANDIN_COUNTERS": self.dir / f"{name}.counters"}
        elif backends.BACKEND == "gpu":  # nodes are of one machine here: NCCL takes their links all the same
            for d in self.daemons.values():
                d.env = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}

    def __getitem__(self, name):
        return self.daemons[name]

    def need_namespaces(self, case):
        if self.net.mode != testnet.NAMESPACES:
            case.skipTest("network namespaces are not permitted here")

    @property
    def head(self):
        return self.daemons[self.coordinator]

    def start(self, names=None):
        for name in names or self.names:
            self.daemons[name].start(wait=None)
        for name in names or self.names:
            self.daemons[name].wait_log("data plane serves")
        self.wait_joined(names or self.names)
        return self

    def moved(self):
        """What has come into each node and left it, over all its starts: by the counters of its links, or on the stand-in,
        whose NCCL takes no links, by those of its NCCL."""
        if not backends.STANDIN:
            return self.net.counters()
        return {name: nccl_counters(self.dir / f"{name}.counters") for name in self.names}

    def node_status(self):
        return {n.name: n for n in self.status_stub().Status(pb.StatusRequest(), timeout=WAIT_S, wait_for_ready=True).nodes}

    def node_states(self):
        """As the coordinator sees them: here (with a data plane that is ready), starting, silent, away."""
        return {name: "starting" if n.state == "here" and n.data_plane != "ready" else n.state
                for name, n in self.node_status().items()}

    def wait_joined(self, names, state="here"):
        """Until the coordinator says of these nodes that they are in that state."""
        self.wait_nodes(lambda states: all(states.get(n) == state for n in names), f"{names} {state}")

    def wait_nodes(self, predicate, what, timeout=WAIT_S):
        end = time.monotonic() + timeout
        while True:
            states = self.node_states()
            if predicate(states):
                return states
            if time.monotonic() >= end:
                raise Deadline(f"the nodes are {states}, never {what}\n{self.tails()}")
            threading.Event().wait(0.02)

    def tails(self, n=15):
        return "\n".join(f"--- {name}:\n{d.tail(n)}" for name, d in self.daemons.items())

    def status_stub(self):
        """Of the coordinator; its channel finds a restarted one by itself."""
        if self.stub is None:
            self.stub = self.head.admin()
        return self.stub

    def close(self):
        for d in self.daemons.values():
            d.close()
        self.net.down()
        shutil.rmtree(self.dir, ignore_errors=True)

    def __enter__(self):
        try:
            return self.start()
        except BaseException:
            print(self.tails(40), file=sys.stderr)
            self.close()
            raise

    def __exit__(self, kind, value, trace):
        if kind is not None and not issubclass(kind, unittest.SkipTest):
            print(self.tails(40), file=sys.stderr)
        self.close()


def nccl_counters(path):
    """Of all devices of a node: what the stand-in's NCCL has sent and received ."""
    devices = cuda_memory.read_counters(path)
    return testnet.Counters(*(sum(d[x] for d in devices) for x in ("sent_bytes", "received_bytes")), 0, 0)


def of_case(case, nodes):
    """Starts them for a test case, ends them with it, and shows their logs where it has failed."""
    def end():
        result = case._outcome.result
        bad = any(test is case for test, _ in result.failures + result.errors)
        nodes.__exit__(AssertionError if bad else None, None, None)

    nodes.__enter__()
    case.addCleanup(end)
    return nodes


# --- workers on nodes ---------------------------------------------------------------------------------


def content(tensor, version, shape):
    """The bytes of a whole tensor of uint8 in a version."""
    n = 1
    for s in shape:
        n *= s
    return random.Random(f"{tensor}/{version}").randbytes(n)


def bulk(name, mesh_shape, placements, rows=1024, columns=2048, ranks=None, instances=()):
    """One large tensor of bytes and a small one."""
    total = 1
    for s in mesh_shape:
        total *= s
    return Layout(name, total, [mesh("m", mesh_shape, ranks)],
                  [tensor("big", [rows, columns], "uint8", "m", placements),
                   tensor("bias", [rows], "uint8", "m", [None] * len(mesh_shape))], instances=instances)


class BulkWorker(Worker):
    """A worker whose tensors are uint8 with one or two dims and random content: megabytes in little time."""

    def cut(self, name, box, version):
        shape = self.layout.tensors[name]["shape"]
        whole = content(name, version, shape)
        if len(shape) == 1:
            return whole[box[0][0]:box[0][0] + box[1][0]]
        (row, column), (rows, columns) = box
        if columns == shape[1]:
            return whole[row * columns:(row + rows) * columns]
        return b"".join(whole[r * shape[1] + column:r * shape[1] + column + columns] for r in range(row, row + rows))

    def write(self, version, base=0):
        for name, boxes in self.place.items():
            for offset, box in boxes:
                data = self.cut(name, box, version)
                self.memory[base + offset:base + offset + len(data)] = data

    def wrong(self, version, base=0):
        bad = []
        for name, boxes in self.place.items():
            for offset, box in boxes:
                data = self.cut(name, box, version)
                if self.memory[base + offset:base + offset + len(data)] != data:
                    bad.append(name)
        return bad


class Fleet(rig.Fleet):
    """Workers of both sides spread over nodes: places are "node:device", in the order of ranks; one client per node and side.
    None in the place of a rank: it is attached later, by `attach`."""

    def __init__(self, nodes, source, destination, source_places, destination_places, model="m", receive=pb.RECEIVE_STAGED,
                 automatic=True, worker=Worker, submit_at=None):
        self.nodes, self.daemon, self.model = nodes, nodes.head, model
        self.receive, self.automatic, self.worker = receive, automatic, worker
        self.source, self.destination = source, destination
        self.side_clients = {}
        self.sources = [self.attach_source(r, p) for r, p in enumerate(source_places) if p]
        self.destinations = [self.attach_destination(r, p) for r, p in enumerate(destination_places) if p]
        self.trainer = self.client(submit_at or source_places[0].split(":")[0], "trainer")

    def client(self, node, side):
        key = (node, side)
        if key not in self.side_clients:
            self.side_clients[key] = Client(self.nodes[node])
        return self.side_clients[key]

    def forget(self, node):
        """Its daemon has ended, and with it its workers' attaches."""
        for key in [k for k in self.side_clients if k[0] == node]:
            del self.side_clients[key]
        self.sources = [w for w in self.sources if w.node != node]
        self.destinations = [w for w in self.destinations if w.node != node]

    def attach_source(self, rank, place):
        node, device = place.split(":")
        w = self.worker(self.client(node, "trainer"), self.model, pb.SIDE_SOURCE, self.source, rank, int(device))
        w.node = node
        return w

    def attach_destination(self, rank, place):
        node, device = place.split(":")
        w = self.worker(self.client(node, "rollout"), self.model, pb.SIDE_DESTINATION, self.destination, rank, int(device),
                        self.receive, self.automatic)
        w.node = node
        return w

    def check(self, version, apply=True):
        """Every element of every destination, in the shadow, and after Apply in live memory."""
        for w in self.destinations:
            if self.receive == pb.RECEIVE_STAGED:
                bad = w.wrong(version, w.shadow)
                assert not bad, f"version {version}, rank {w.rank} on {w.node}, shadow: {bad}"
                if not apply:
                    continue
                w.apply(version)
            bad = w.wrong(version)
            assert not bad, f"version {version}, rank {w.rank} on {w.node}: {bad}"

    def until_bytes_move(self, version):
        return self.watch(version, lambda s: s.phase == pb.PHASE_TRANSFERRING and 0 < s.bytes.landed < s.bytes.total)
