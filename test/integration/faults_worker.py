#!/usr/bin/python3
"""One worker as a process of its own for scripts/faults, which kills and stops it.

usage: faults_worker.py SOCKET source|staged|in_place RANK DEVICE

It does by itself what a good client does: publishes what it was told to offer, says Ready, checks its memory element by
element before it accepts, applies what is committed, and attaches again, claiming what it last knew, whenever its stream
ends. Its memory stays mapped all the time, so what it says of it does not depend on any daemon.

stdin, a JSON object a line:  {"do": "offer", "version": V}   a source writes V into its memory and publishes it
                              {"do": "audit", "versions": [V…]}  which of these versions its memory holds, whole
stdout: {"reply": …} to each, and {"said": …, "version": …, "wrong": [tensor…]} about what happened.
"""
import json
import select
import sys

from rig import *

PAUSE_S = 0.02
UNAVAILABLE = -13  # the daemon knows its GPUs only once its data plane has started


def source_layout():
    return Layout("train", 2, [mesh("tp", [2])], tensors("tp", [0], [0], [None]))


def destination_layout():
    return Layout("rollout", 4, [mesh("dptp", [2, 2], dim_names=["dp", "tp"])],
                  tensors("dptp", [None, 1], [None, 0], [None, None]), instances=[[0, 1], [2, 3]])


def tensors(mesh_name, big, odd, norm):
    return [tensor("big", [64, 128], "int32", mesh_name, big), tensor("odd", [7, 5], "int32", mesh_name, odd),
            tensor("norm", [12], "float32", mesh_name, norm)]


class There(Daemon):
    """As much of a Daemon as a Client needs, for one that somebody else starts and kills."""

    def __init__(self, path):
        self.socket, self.clients, self.channels, self.log = path, [], [], None

    def close(self):
        for channel in self.channels:
            channel.close()
        for client in self.clients:
            client.socket.close()


class Process:
    def __init__(self, path, kind, rank, device):
        self.path, self.kind = path, kind
        self.inbox = queue.Queue()
        self.live = self.shadow = 0      # what it believes to hold, as it claims at the next attach
        self.offered = self.to_apply = 0
        self.published = True
        self.daemon = There(path)
        self.w = None
        self.rank, self.device = rank, device
        self.attached = False
        self.incarnation = None
        threading.Thread(target=self.read_commands, daemon=True).start()

    # -- saying

    @staticmethod
    def say(**what):
        print(json.dumps(what), flush=True)

    def read_commands(self):
        for line in sys.stdin:
            self.inbox.put(("command", json.loads(line)))
        os._exit(0)

    # -- attaching

    def connect(self):
        """A new client; the memory is that of before."""
        if self.w is not None:
            self.w.client = None
        self.daemon.close()
        self.daemon = There(self.path)
        client = Client(self.daemon)
        self.incarnation = client.incarnation
        if self.w is None:
            source = self.kind == "source"
            receive = {"source": pb.RECEIVE_UNSPECIFIED, "staged": pb.RECEIVE_STAGED, "in_place": pb.RECEIVE_IN_PLACE}
            self.w = Worker(client, "m", pb.SIDE_SOURCE if source else pb.SIDE_DESTINATION,
                            source_layout() if source else destination_layout(), self.rank, self.device,
                            receive[self.kind], attach=False)
            self.w.id = 0
            return
        self.w.segment = client.register(self.w.memory)
        client.put_layout(self.w.layout)
        self.w.id = 0
        self.w.client = client  # only now is it one to go on with

    def same_client(self):
        """The daemon still holds the other end of the memory socket."""
        if self.w is None or self.w.client is None:
            return False
        return not select.select([self.w.client.socket], [], [], 0)[0]  # nothing comes there unasked but its end

    def attach(self):
        try:
            if not self.same_client():
                self.connect()
            if self.w.requests is not None:
                self.w.break_stream()
            self.w.attach(resume=self.w.id, live_version=self.live, shadow_version=self.shadow)
        except grpc.RpcError as e:
            if self.w is not None and e.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.PERMISSION_DENIED):
                self.w.id = 0
            return False
        except MemoryError_ as e:
            if e.args[0] != UNAVAILABLE:
                raise
            return False
        except (OSError, AssertionError, StopIteration):
            return False
        self.attached = True
        self.published = False
        a = self.w.attached
        if self.kind != "source":
            self.believe(a)
        threading.Thread(target=self.pump, args=(self.w.events,), daemon=True).start()
        return True

    def believe(self, a):
        """What the daemon says this memory holds must be there."""
        if a.applied:
            self.say(said="attached applied", version=a.applied, wrong=self.w.wrong(a.applied))
        # A shadow that has been applied is free: the next version may be on its way into it already.
        if a.held and a.held != a.applied and self.kind == "staged":
            self.say(said="attached held", version=a.held, wrong=self.w.wrong(a.held, self.w.shadow))
        self.live = a.applied
        if self.kind == "staged":
            self.shadow = a.held
            if a.committed and a.held == a.committed != a.applied:
                self.to_apply = a.committed

    def pump(self, events):
        while True:
            kind, e = events.get()
            self.inbox.put((kind, (events, e)))
            if kind == "end":
                return

    # -- calls that may fail and are tried again

    def pending(self):
        return not self.attached or (self.offered and not self.published) or self.to_apply

    def work(self):
        if not self.attached and not self.attach():
            return
        try:
            if self.offered and not self.published:
                self.w.publish(self.offered)
                self.published = True
            if self.to_apply:
                self.apply(self.to_apply)
        except grpc.RpcError as e:
            if e.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.NOT_FOUND):
                self.to_apply = 0
            if e.code() == grpc.StatusCode.DATA_LOSS:
                self.say(said="apply refused", version=self.to_apply, wrong=[])
                self.to_apply = 0

    def apply(self, version):
        applied = self.w.apply(version).applied
        self.to_apply = 0
        self.live = applied
        self.say(said="applied", version=applied, wrong=self.w.wrong(applied))

    # -- events

    def on_publish_requested(self, e):
        if e.version == self.offered:
            self.published = False

    def on_ready_requested(self, e):
        # self.live stays as it is, though bytes may land from now on: a claim that a torn memory must not pass
        self.w.ready(e.version)

    def on_accept_requested(self, e):
        wrong = self.w.wrong(e.version, self.w.shadow)
        self.say(said="staged", version=e.version, wrong=wrong)
        self.shadow = e.version if self.kind == "staged" and not wrong else self.shadow
        if self.kind == "in_place" and not wrong:
            self.live = e.version  # whole; whether it was committed, a daemon that restarts will say
        self.w.accept(e.version, e.attempt, reject=bool(wrong), reason="wrong elements: " + ", ".join(wrong) if wrong else "")

    def on_committed(self, e):
        self.say(said="committed", version=e.version, wrong=[])
        if self.kind == "staged":
            self.to_apply = e.version
        elif self.kind == "in_place" and not self.w.wrong(e.version):
            self.live = e.version

    # -- commands

    def command(self, c):
        if c["do"] == "offer":
            if self.offered != c["version"]:
                self.w.write(c["version"])
            self.offered, self.published = c["version"], False
            self.say(reply=c["version"])
        elif c["do"] == "audit":
            if self.w is None or self.kind == "source":
                self.say(reply={"live": [], "shadow": []})
                return
            shadow = [v for v in c["versions"] if not self.w.wrong(v, self.w.shadow)] if self.w.shadow else []
            self.say(reply={"live": [v for v in c["versions"] if not self.w.wrong(v)], "shadow": shadow})

    def event(self, kind, events, e):
        if events is not self.w.events:
            return  # of a stream before
        if kind == "end":
            self.attached = False
        elif hasattr(self, "on_" + kind):
            try:
                getattr(self, "on_" + kind)(e)
            except grpc.RpcError:
                pass  # the stream's end or a later event says what to do

    def run(self):
        while True:
            self.work()
            try:
                kind, what = self.inbox.get(timeout=PAUSE_S if self.pending() else None)
            except queue.Empty:
                continue
            if kind == "command":
                self.command(what)
            else:
                self.event(kind, *what)


if __name__ == "__main__":
    Process(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])).run()
