"""N nodes on one machine: network namespaces with a link each to one bridge, for tests, benchmarks and the demo.

    with Testnet.up(3, rate="200mbit") as net:
        net.popen("n0", ["reshardd", …]); net.address("n1"); net.counters()["n1"].rx_bytes; net.cut("n2")

Each node n0, n1, … is a namespace with lo and eth0; eth0 is a veth pair to a bridge that has a namespace of its own. Nothing
lies in the namespace of the caller, so several testnets at once are in nobody's way, with the same addresses in each:
10.90.0.1, 10.90.0.2, … /24 and fd00::1, fd00::2, … /64. A rate limits each direction of each link (tbf).

A testnet ends with `down`, and with its owner: a keeper process waits for the owner's end, kill -9 included, ends what runs
in the namespaces and removes them. Should the keeper be killed too, the next `up` does it. What is to be removed is written
to a state file before it is made.

Where namespaces are not permitted, the nodes are addresses 127.64.0.1, … of the caller's own loopback: no counters, no
limits, no cuts. `mode` says which it is; up() says so on stderr. RESHARD_TESTNET=loopback asks for that.
"""
import collections
import contextlib
import ctypes
import fcntl
import json
import os
import pathlib
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time

MOST_NODES = 250  # of a /24
NAMESPACES, LOOPBACK = "namespaces", "loopback"
UNITS = {"bit": 1, "kbit": 10 ** 3, "mbit": 10 ** 6, "gbit": 10 ** 9}
LATENCY_MS = 100       # of a full queue at a limit
BURST_S, LEAST_BURST_BYTES = 0.004, 64 << 10  # what may go out at once: some ticks' worth, a whole super-frame at least

Counters = collections.namedtuple("Counters", "tx_bytes rx_bytes tx_packets rx_packets")


class Error(Exception):
    """A testnet could not be made, or can't do what was asked; the text says why."""


def state_folder():
    folder = pathlib.Path("/run/reshard-testnet") if os.getuid() == 0 else \
        pathlib.Path(tempfile.gettempdir(), f"reshard-testnet-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@contextlib.contextmanager
def locked():
    """One at a time makes, looks for and removes testnets."""
    with open(state_folder() / "lock", "w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


def process(pid):
    """A process as it can be told from a later one with the same id; start is None where there is none (a zombie is none)."""
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return {"pid": pid, "start": None}
    return {"pid": pid, "start": None if fields[0] in "ZX" else int(fields[19])}


def lives(p):
    return p is not None and p["start"] is not None and process(p["pid"]) == p


def bits_per_s(rate):
    m = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(bit|kbit|mbit|gbit)", str(rate).lower())
    if not m or float(m[1]) <= 0:
        raise Error(f"rate '{rate}': use a number and bit, kbit, mbit or gbit (per second), as in 200mbit")
    return float(m[1]) * UNITS[m[2]]


def command(*argv, input=None):
    try:
        r = subprocess.run([str(a) for a in argv], input=input, capture_output=True, text=True, check=False)
    except OSError as e:
        raise Error(f"{argv[0]}: {e.strerror}") from None
    if r.returncode != 0:
        raise Error(f"{' '.join(map(str, argv))}: {r.stderr.strip() or r.stdout.strip()}")
    return r.stdout


def ip(namespace, lines):
    """`ip` commands in a namespace, stopping at the first that fails."""
    command("ip", "-n", namespace, "-batch", "-", input="\n".join(lines) + "\n")


def in_namespace(namespace, function, *args):
    """Calls function in a child that is in that network namespace; raises what it says on its way out."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            fd = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(fd, 0x40000000) != 0:  # CLONE_NEWNET
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            function(*args)
            os._exit(0)
        except BaseException as e:  # a child must not go on in its parent's code
            os.write(write, str(e).encode()[:4000])
            os._exit(1)
    os.close(write)
    with os.fdopen(read) as f:
        text = f.read()
    if os.waitpid(pid, 0)[1] != 0:
        raise Error(f"namespace {namespace}: {text}")


def offload_off(interfaces):
    """No segmentation or receive offload: the counters then see the frames that a wire carries. What ethtool -K does."""
    import socket
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for name in interfaces:
            for what in (0x1F, 0x24, 0x2C):  # ETHTOOL_STSO, ETHTOOL_SGSO, ETHTOOL_SGRO
                value = ctypes.create_string_buffer(struct.pack("II", what, 0))
                fcntl.ioctl(s, 0x8946, struct.pack("16sP16x", name.encode(), ctypes.addressof(value)))  # SIOCETHTOOL


class Testnet:
    """A handle; the testnet itself is in the kernel and in the state file."""

    def __init__(self, state):
        self.state = state
        self.name, self.mode = state["name"], state["mode"]
        self.nodes = [f"n{i}" for i in range(state["n"])]

    # ---- making and removing -------------------------------------------------------------------------------------------

    @classmethod
    def up(cls, n, rate=None, prefix="t", offload=True, owner=None, keep=True):
        """Makes a testnet of n nodes that lasts until `down` or until its owner ends (a process id; default: this process).
        keep=False: until `down` alone."""
        if not 1 <= n <= MOST_NODES:
            raise Error(f"{n} nodes: 1 to {MOST_NODES} are possible")
        if not re.fullmatch(r"[a-z0-9]{1,12}", prefix):
            raise Error(f"name '{prefix}': use 1 to 12 of a-z and 0-9")
        if rate is not None:
            bits_per_s(rate)
        owner = process(os.getpid() if owner is None else owner) if keep else None
        if keep and owner["start"] is None:
            raise Error(f"owner: there is no process {owner['pid']}")
        with locked():
            remove_stale()
            net = cls.begin(prefix, n, owner, offload)
            try:
                net.make()
                if rate is not None:
                    net.set_rate(rate)
                if keep:
                    net.state["keeper"] = process(start_keeper(net.name))
                    net.save()
            except BaseException:
                net.remove()
                raise
        return net

    @classmethod
    def begin(cls, prefix, n, owner, offload):
        """Takes a name and a number that no other testnet has; one that is gone may have had them, but not the id."""
        others = [net.state for net in testnets()]
        number = next(i for i in range(1 << 14) if i not in [s["number"] for s in others])
        name = f"{prefix}{number}"
        mode = LOOPBACK if os.environ.get("RESHARD_TESTNET") == LOOPBACK else NAMESPACES
        net = cls(dict(name=name, number=number, id=os.urandom(8).hex(), n=n, mode=mode, owner=owner, keeper=None, offload=offload,
                       rate=None, cut=[]))
        net.save()
        return net

    def make(self):
        if self.mode == NAMESPACES:
            try:
                command("ip", "netns", "add", self.bridge())
            except Error as e:
                self.mode = self.state["mode"] = LOOPBACK
                self.save()
                why = str(e)
            else:
                self.make_namespaces()
                return
        else:
            why = "RESHARD_TESTNET=loopback"
        print(f"testnet: no network namespaces ({why}); the nodes are loopback addresses {self.address('n0')}, …: no counters, "
              "no limits, no cuts", file=sys.stderr, flush=True)

    def make_namespaces(self):
        for node in self.nodes:
            command("ip", "netns", "add", self.namespace(node))
        # No addresses in the bridge's namespace: its own talk would be in the nodes' counters.
        lines = ["link add br0 type bridge stp_state 0 mcast_snooping 0", "link set br0 addrgenmode none", "link set br0 up"]
        for i, node in enumerate(self.nodes):
            lines += [f"link add p{i} type veth peer name eth0 netns {self.namespace(node)}", f"link set p{i} addrgenmode none",
                      f"link set p{i} master br0", f"link set p{i} up"]
        ip(self.bridge(), lines)
        for i, node in enumerate(self.nodes):
            ip(self.namespace(node), ["link set lo up", f"addr add {self.address(node)}/24 dev eth0",
                                      f"addr add {self.address6(node)}/64 dev eth0 nodad", "link set eth0 up"])
            if not self.state["offload"]:
                in_namespace(self.namespace(node), offload_off, ["eth0"])
        if not self.state["offload"]:
            in_namespace(self.bridge(), offload_off, [f"p{i}" for i in range(len(self.nodes))])

    @classmethod
    def open(cls, name):
        try:
            return cls(json.loads((state_folder() / f"{name}.json").read_text()))
        except FileNotFoundError:
            names = ", ".join(net.name for net in testnets()) or "none"
            raise Error(f"there is no testnet '{name}'; there are: {names}") from None

    def save(self):
        path = state_folder() / f"{self.name}.json"
        new = path.with_suffix(".new")
        new.write_text(json.dumps(self.state))
        new.rename(path)

    def down(self):
        """Removes it; where it is gone already, nothing: another one may have its name by now."""
        path = state_folder() / f"{self.name}.json"
        with locked():
            now = Testnet(json.loads(path.read_text())) if path.exists() else None
            if now is not None and now.state.get("id") == self.state.get("id"):
                now.remove()

    def remove(self):
        """Under the lock: ends what runs in it, removes it, then forgets it. Done again, it does what is left."""
        keeper = self.state["keeper"]
        if lives(keeper) and keeper["pid"] != os.getpid():
            os.kill(keeper["pid"], signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):  # where it was started by somebody else
                os.waitpid(keeper["pid"], 0)
        mine = {self.bridge(), *map(self.namespace, self.nodes)}
        there = mine & {p.name for p in pathlib.Path("/run/netns").glob("rs-*")} if self.mode == NAMESPACES else ()
        for namespace in there:
            end_processes(namespace)
        for namespace in there:
            command("ip", "netns", "del", namespace)
        (state_folder() / f"{self.name}.json").unlink(missing_ok=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.down()

    # ---- nodes ---------------------------------------------------------------------------------------------------------

    def number(self, node):
        if node not in self.nodes:
            raise Error(f"there is no node '{node}' in testnet {self.name}; there are: {' '.join(self.nodes)}")
        return self.nodes.index(node)

    def bridge(self):
        return f"rs-{self.name}-br"

    def namespace(self, node):
        return f"rs-{self.name}-n{self.number(node)}"

    def address(self, node):
        i = self.number(node) + 1
        number = self.state["number"]
        return f"10.90.0.{i}" if self.mode == NAMESPACES else f"127.{64 + number // 256}.{number % 256}.{i}"

    def address6(self, node):
        return f"fd00::{self.number(node) + 1:x}" if self.mode == NAMESPACES else "::1"

    def argv(self, node, argv):
        """The command line that runs argv on a node; the process that starts is the one that argv becomes."""
        self.number(node)
        enter = ["nsenter", f"--net=/run/netns/{self.namespace(node)}", "--"] if self.mode == NAMESPACES else []
        return enter + [str(a) for a in argv]

    def popen(self, node, argv, **kw):
        return subprocess.Popen(self.argv(node, argv), **kw)

    # ---- links ---------------------------------------------------------------------------------------------------------

    def need_namespaces(self, what):
        if self.mode != NAMESPACES:
            raise Error(f"testnet {self.name} has loopback addresses only: no {what}")

    def set_rate(self, rate):
        """Limits each direction of each link; None: no limit. Counters go on."""
        if self.mode != NAMESPACES:
            print(f"testnet: {rate} is not held: loopback addresses have no limits", file=sys.stderr, flush=True)
            return
        ends = [(self.namespace(node), "eth0") for node in self.nodes]
        ends += [(self.bridge(), f"p{i}") for i in range(len(self.nodes))]
        if rate is not None:
            bits = bits_per_s(rate)
            burst = max(LEAST_BURST_BYTES, int(bits / 8 * BURST_S))
            for namespace, name in ends:
                command("tc", "-n", namespace, "qdisc", "replace", "dev", name, "root", "tbf", "rate", f"{bits:.0f}bit",
                        "burst", burst, "latency", f"{LATENCY_MS}ms")
        elif self.state["rate"] is not None:
            for namespace, name in ends:
                command("tc", "-n", namespace, "qdisc", "del", "dev", name, "root")
        self.state["rate"] = rate
        self.save()

    def cut(self, node):
        """Nothing passes between the node and the others any more, in silence: its link stays up, but leads nowhere."""
        self.need_namespaces("cuts")
        ip(self.bridge(), [f"link set p{self.number(node)} nomaster"])
        self.state["cut"] = sorted({*self.state["cut"], node})
        self.save()

    def mend(self, node):
        self.need_namespaces("cuts")
        ip(self.bridge(), [f"link set p{self.number(node)} master br0"])
        self.state["cut"] = sorted({*self.state["cut"]} - {node})
        self.save()

    def counters(self):
        """Of each node's eth0, as the node sees it (tx: what it sent)."""
        self.need_namespaces("counters")
        out = {}
        for node in self.nodes:
            text = command("ip", "-n", self.namespace(node), "-s", "-j", "link", "show", "dev", "eth0")
            s = json.loads(text)[0]["stats64"]
            out[node] = Counters(s["tx"]["bytes"], s["rx"]["bytes"], s["tx"]["packets"], s["rx"]["packets"])
        return out


def difference(after, before):
    """Counters of what passed in between, per node."""
    return {node: Counters(*(a - b for a, b in zip(after[node], before[node]))) for node in after}


# ---- all testnets of this user ---------------------------------------------------------------------------------------------

def testnets():
    """Those that there are, in order of their names; a file that is none is passed over."""
    out = []
    for path in sorted(state_folder().glob("*.json")):
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError):
            out.append(Testnet(json.loads(path.read_text())))
    return out


def remove_stale():
    """Under the lock: those whose owner has ended and whose keeper has not seen to it."""
    for net in testnets():
        owner = net.state["owner"]
        if owner is not None and not lives(owner):
            net.remove()


def end_processes(namespace):
    """Kills what runs in one of our namespaces, and waits for its end."""
    deadline = time.monotonic() + 10
    while True:
        pids = [int(p) for p in command("ip", "netns", "pids", namespace).split()]
        pids = [p for p in pids if p != os.getpid()]
        if not pids:
            return
        if time.monotonic() > deadline:
            raise Error(f"namespace {namespace}: processes {pids} do not end")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                fd = os.pidfd_open(pid)
                try:
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
                    select.select([fd], [], [], 1)
                finally:
                    os.close(fd)


# ---- the keeper ------------------------------------------------------------------------------------------------------------

def start_keeper(name):
    """Detached, so that it outlives what ends its owner; returns its process id once it watches."""
    read, write = os.pipe()
    p = subprocess.Popen([sys.executable, __file__, "--keep", name], stdin=subprocess.DEVNULL, stdout=write,
                         stderr=subprocess.DEVNULL, start_new_session=True)
    os.close(write)
    with os.fdopen(read) as f:
        if f.readline() != "watches\n":
            raise Error("the keeper process did not start")
    p.returncode = 0  # not ours to wait for: it ends after us
    return p.pid


def keep(name):
    net = Testnet.open(name)
    try:
        owner = os.pidfd_open(net.state["owner"]["pid"])
    except ProcessLookupError:
        owner = None
    os.write(1, b"watches\n")
    os.dup2(2, 1)  # whoever waits for the end of our output need not
    if owner is not None and lives(net.state["owner"]):
        select.select([owner], [], [])
    net.down()


if __name__ == "__main__":
    keep(sys.argv[sys.argv.index("--keep") + 1])
