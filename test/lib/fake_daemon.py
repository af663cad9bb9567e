#!/usr/bin/python3
"""A stand-in for reshardd that moves no bytes: what libreshard says to a daemon, and how a daemon may treat it.

    fake_daemon.py --socket PATH [--gen DIR] [--log FILE]

Speaks the memory socket and reshard.v1 (stubs are generated into DIR from proto/reshard.proto). A submitted version is
committed once every attached source has published it and every destination has accepted. It keeps nothing: a restarted one
knows no token, worker or layout. Names choose its moods: model "busy" answers each kind of call UNAVAILABLE twice before it
works; a mark "late" has every worker of the model asked to accept that version; model "stranger" answers UNAUTHENTICATED to the first Publish of each start; "reject" aborts what is submitted.
FAKE_SLOW_MS in the environment: it thinks as long before each answer on the memory socket.
Each call is a line of JSON in --log.
"""
import argparse
import collections
import hashlib
import json
import os
import pathlib
import queue
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time

RECORD = struct.Struct("=IIIiQQQQQII40s512s")
assert RECORD.size == 616
MAGIC, HELLO, WELCOME, SEGMENT, REPLY, DROP = 0x52534D31, 1, 2, 3, 4, 5
lock = threading.RLock()
changed = threading.Condition(lock)


class State:
    def __init__(self, log):
        self.incarnation = int.from_bytes(secrets.token_bytes(8), "little") | 1
        self.tokens, self.segments, self.layouts = set(), {}, {}
        self.workers, self.versions = {}, {}  # id → dict; (model, version) → dict
        self.committed = collections.defaultdict(int)
        self.moods = collections.Counter()
        self.log_file = log

    def log(self, **what):
        with lock:
            if self.log_file:
                self.log_file.write(json.dumps(what) + "\n")
                self.log_file.flush()


def quietly(requests):
    """The rest of a stream, also of one that breaks."""
    try:
        yield from requests
    except Exception:
        return


def memory_client(state, connection):
    token = None
    while True:
        data, fds = b"", []
        while len(data) < RECORD.size:
            try:
                part, got, _, _ = socket.recv_fds(connection, RECORD.size - len(data), 4)
            except ConnectionError:  # it closed with an answer unread
                part, got = b"", []
            fds += got
            if not part:
                with lock:
                    state.tokens.discard(token)
                return
            data += part
        time.sleep(int(os.environ.get("FAKE_SLOW_MS", "0")) / 1000)
        magic, kind, _, _, request, segment, size, _, _, _, _, _, _ = RECORD.unpack(data)
        code, text, out, answer = 0, b"", segment, REPLY
        with lock:
            if magic != MAGIC:
                return
            if kind == HELLO:
                token, answer = secrets.token_hex(16), WELCOME
                state.tokens.add(token)
            elif kind == SEGMENT:
                if len(fds) != 1 or os.fstat(fds[0]).st_size < size:
                    code, text = -1, b"segment: smaller than it says"
                else:
                    out = secrets.randbits(63) | 1
                    state.segments[out] = size
            elif kind == DROP and state.segments.pop(segment, None) is None:
                code, text = -2, b"segment: not known"
        for fd in fds:
            os.close(fd)
        state.log(call="memory", kind=kind, bytes=size, code=code)
        connection.sendall(RECORD.pack(MAGIC, answer, 1, code, request, out, size, state.incarnation, 7, 0, 0,
                                       (token or "").encode(), text))


def memory_socket(state, path):
    s = socket.socket(socket.AF_UNIX)
    s.bind(path)
    s.listen(16)
    while True:
        connection, _ = s.accept()
        threading.Thread(target=memory_client, args=(state, connection), daemon=True).start()


def services(state, pb, grpc_pb, grpc):
    def caller(context):
        token = dict(context.invocation_metadata()).get("reshard-token")
        if token not in state.tokens:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is not known")

    def mood(context, model, call):
        with lock:
            state.moods[model, call] += 1
            n = state.moods[model, call]
        if model == "busy" and n <= 2:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the data plane is being replaced")
        if model == "stranger" and call == "Publish" and n == 1:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is not known")

    def worker(context, number):
        w = state.workers.get(number)
        if w is None:
            context.abort(grpc.StatusCode.NOT_FOUND, f"worker {number:016x} is not attached")
        return w

    def tell(w, kind, version, reason="", withdrawn=False):
        w["events"].put(pb.AttachEvent(**{kind: pb.AttachEvent.VersionEvent(version=version, attempt=1, reason=reason,
                                                                            withdrawn=withdrawn)}))

    def step(model, version):
        """Commits what has all it needs. Under the lock."""
        v = state.versions.get((model, version))
        if v is None or v["phase"] >= pb.PHASE_COMMITTED:
            return
        members = [w for w in state.workers.values() if w["model"] == model]
        sources = [w for w in members if w["side"] == pb.SIDE_SOURCE]
        destinations = [w for w in members if w["side"] == pb.SIDE_DESTINATION]
        if model == "reject":
            v["phase"], v["reason"] = pb.PHASE_ABORTED, "because the test wants it"
            for w in members:
                tell(w, "aborted", version, v["reason"])
        elif v["phase"] < pb.PHASE_STAGED and sources and all(w["published"] == version for w in sources):
            v["phase"] = pb.PHASE_STAGED
            for w in sources:
                tell(w, "source_released", version)
            for w in destinations:
                tell(w, "accept_requested", version)
        if v["phase"] == pb.PHASE_STAGED and all(w["accepted"] == version or w["automatic"] for w in destinations):
            v["phase"] = pb.PHASE_COMMITTED
            state.committed[model] = version
            for w in members:
                tell(w, "committed", version)
        changed.notify_all()

    class Refit(grpc_pb.RefitServicer):
        def PutLayout(self, requests, context):
            caller(context)
            digest, n, want = hashlib.md5(), 0, 0
            for r in requests:
                digest.update(r.SerializeToString(deterministic=True))
                n += len(r.tensors)
                want = r.header.n_tensors if r.HasField("header") else want
            if n != want:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{n} tensors came, the header says {want}")
            with lock:
                known = digest.digest() in state.layouts
                state.layouts[digest.digest()] = n
            state.log(call="PutLayout", tensors=n, known=known)
            return pb.PutLayoutReply(digest=digest.digest(), known=known)

        def Attach(self, requests, context):
            caller(context)
            hello = next(requests).hello
            pieces = 0
            for r in requests:
                if r.HasField("done"):
                    break
                pieces += len(r.bindings.pieces)
            mood(context, hello.model, "Attach")
            if hello.layout_digest not in state.layouts:
                context.abort(grpc.StatusCode.NOT_FOUND, "the layout is not known")
            for s in hello.segments:
                if s not in state.segments:
                    context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"segment {s:x} is not known")
            number, events = secrets.randbits(63) | 1, queue.Queue()
            with lock:
                if any((w["model"], w["side"], w["rank"]) == (hello.model, hello.side, hello.rank) and not w["asleep"]
                       for w in state.workers.values()):
                    context.abort(grpc.StatusCode.ALREADY_EXISTS, f"rank {hello.rank} is attached")
                state.workers[number] = dict(model=hello.model, side=hello.side, rank=hello.rank, events=events, published=0,
                                             accepted=0, automatic=hello.accept_automatically, applied=hello.live_version,
                                             asleep=hello.asleep, context=context)
            state.log(call="Attach", model=hello.model, rank=hello.rank, pieces=pieces, live=hello.live_version,
                      shadow=hello.shadow_version, segments=len(hello.segments), push=hello.push, again=hello.again)
            context.add_callback(lambda: events.put(None))
            threading.Thread(target=lambda: (collections.deque(quietly(requests), 0), events.put(None)), daemon=True).start()
            yield pb.AttachEvent(attached=pb.Attached(worker=number, daemon_incarnation=state.incarnation, grace_ms=1000,
                                                      committed=state.committed[hello.model], held=hello.shadow_version,
                                                      applied=hello.live_version))
            while True:
                event = events.get()
                if event is None:
                    break
                yield event
                if event.HasField("evicted"):
                    break
            with lock:
                state.workers.pop(number, None)
            state.log(call="Detach", model=hello.model, rank=hello.rank)

        def Publish(self, r, context):
            caller(context)
            w = worker(context, r.worker)
            mood(context, w["model"], "Publish")
            with lock:
                w["published"] = r.version
                step(w["model"], r.version)
            state.log(call="Publish", version=r.version, expected={e.tensor: e.fingerprint for e in r.expected}, push=r.push)
            return pb.PublishReply(publication=1)

        def Withdraw(self, r, context):
            caller(context)
            tell(worker(context, r.worker), "source_released", r.version)
            state.log(call="Withdraw", version=r.version, push=r.push, reason=r.reason, again=r.again)
            return pb.WithdrawReply()

        def Submit(self, r, context):
            caller(context)
            mood(context, r.model, "Submit")
            with lock:
                v = state.versions.setdefault((r.model, r.version), dict(phase=pb.PHASE_SUBMITTED, reason="", id=r.request_id))
                if v["id"] != r.request_id:
                    context.abort(grpc.StatusCode.ALREADY_EXISTS, "that version was submitted with other content")
                step(r.model, r.version)
            state.log(call="Submit", version=r.version, id=r.request_id, rules=[x.glob for x in r.options.rules],
                      policy={p.layout_name: p.min_instances for p in r.options.policy})
            return pb.SubmitReply(attempt=1, phase=v["phase"])

        def WatchRefit(self, r, context):
            caller(context)
            mood(context, r.model, "WatchRefit")
            if (r.model, r.version) not in state.versions:
                context.abort(grpc.StatusCode.NOT_FOUND, f"version {r.version} was never submitted")
            told = None
            while context.is_active():
                with changed:
                    v = state.versions[r.model, r.version]
                    if v["phase"] == told:
                        changed.wait(0.1)
                        continue
                    told = v["phase"]
                yield pb.RefitState(model=r.model, version=r.version, attempt=1, phase=told, reason=v["reason"],
                                    source_released=told >= pb.PHASE_STAGED, elapsed_ns=1,
                                    waiting_for=["rank 0 to publish"] if told == pb.PHASE_SUBMITTED else [],
                                    bytes=pb.Bytes(landed=50, total=100, network=25, network_minimum=25))
                if told >= pb.PHASE_COMMITTED:
                    return

        def Ready(self, r, context):
            caller(context)
            worker(context, r.worker)
            return pb.ReadyReply()

        def Accept(self, r, context):
            caller(context)
            w = worker(context, r.worker)
            mood(context, w["model"], "Accept")
            with lock:
                w["accepted"] = r.version
                step(w["model"], r.version)
            return pb.AcceptReply()

        def Apply(self, r, context):
            caller(context)
            w = worker(context, r.worker)
            w["applied"] = 0 if r.skip else r.version
            return pb.ApplyReply(applied=w["applied"], elapsed_ns=5)

        def Sleep(self, r, context):
            caller(context)
            worker(context, r.worker)["asleep"] = True
            return pb.SleepReply()

        def Mark(self, r, context):
            caller(context)
            with lock:
                for w in state.workers.values():
                    if r.name == "late" and w["model"] == r.model:
                        tell(w, "accept_requested", r.version)
                    if r.name == "refused" and w["model"] == r.model:
                        tell(w, "aborted", r.version, "a peer was refused", withdrawn=True)
                        tell(w, "source_released", r.version)
            state.log(call="Mark", name=r.name, version=r.version)
            return pb.MarkReply()

        def GetCommitted(self, r, context):
            caller(context)
            mood(context, r.model, "GetCommitted")
            end = time.monotonic() + r.wait_ms / 1000
            with changed:
                while state.committed[r.model] <= r.newer_than and time.monotonic() < end:
                    changed.wait(end - time.monotonic())
                if state.committed[r.model] == 0:
                    context.abort(grpc.StatusCode.NOT_FOUND, "nothing is committed yet")
                return pb.Committed(model=r.model, version=state.committed[r.model])

        def WatchCommitted(self, r, context):
            caller(context)
            told = 0
            while context.is_active():
                with changed:
                    if state.committed[r.model] == told:
                        changed.wait(0.1)
                        continue
                    told = state.committed[r.model]
                yield pb.Committed(model=r.model, version=told)

    class Admin(grpc_pb.AdminServicer):
        def Status(self, r, context):
            caller(context)
            reply = pb.StatusReply(node="fake", release="0", incarnation=state.incarnation, backend="none", data_plane="ready")
            with lock:
                for model in sorted({w["model"] for w in state.workers.values()}):
                    m = reply.models.add(model=model, committed=state.committed[model])
                    for number, w in state.workers.items():
                        if w["model"] == model:
                            m.workers.add(worker=number, side=w["side"], rank=w["rank"], applied=w["applied"])
            return reply

        def Evict(self, r, context):
            caller(context)
            w = worker(context, r.worker)
            tell(w, "evicted", 0, r.reason)
            return pb.EvictReply()

    return Refit(), Admin()


def stubs(gen):
    proto = pathlib.Path(__file__).resolve().parent.parent.parent / "proto"
    plugin = subprocess.run(["which", "grpc_python_plugin"], capture_output=True, text=True, check=True).stdout.strip()
    if not (gen / "reshard_pb2_grpc.py").exists():
        gen.mkdir(parents=True, exist_ok=True)
        subprocess.run(["protoc", f"--python_out={gen}", f"--grpc_python_out={gen}", f"--proto_path={proto}",
                        f"--plugin=protoc-gen-grpc_python={plugin}", "reshard.proto"], check=True)
    sys.path.insert(0, str(gen))
    import reshard_pb2
    import reshard_pb2_grpc
    return reshard_pb2, reshard_pb2_grpc


def main():
    from concurrent import futures

    import grpc
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--socket", required=True)
    p.add_argument("--gen", type=pathlib.Path, required=True)
    p.add_argument("--log", type=argparse.FileType("a"))
    args = p.parse_args()
    pb, grpc_pb = stubs(args.gen)
    state = State(args.log)
    refit, admin = services(state, pb, grpc_pb, grpc)
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=32))
    grpc_pb.add_RefitServicer_to_server(refit, server)
    grpc_pb.add_AdminServicer_to_server(admin, server)
    for path in (args.socket, args.socket + ".mem"):
        pathlib.Path(path).unlink(missing_ok=True)
    if server.add_insecure_port("unix:" + args.socket) == 0:
        sys.exit("the socket could not be bound")
    server.start()
    memory_socket(state, args.socket + ".mem")


if __name__ == "__main__":
    main()
