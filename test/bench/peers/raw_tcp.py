#!/usr/bin/python3
"""Plain TCP of so many bytes over the links of a testnet: what the wire can do, for everything else to be held against.

    measure(net, [("n0", "n1", bytes), …], streams)   seconds from the first byte sent to the last received, all flows at once

Each flow is so many connections, each between two processes, one on each node, straight into a buffer of the whole size. What
came is compared with what was sent, after the clock has stopped.
"""
import json
import pathlib
import random
import socket
import subprocess
import sys
import time

BLOCK = 1 << 20
WAIT_S = 600


def block(seed):
    return random.Random(seed).randbytes(BLOCK)


def receive(address, n, seed):
    server = socket.create_server((address, 0))
    print(json.dumps({"port": server.getsockname()[1]}), flush=True)
    server.settimeout(WAIT_S)
    s, _ = server.accept()
    s.settimeout(WAIT_S)
    memory = bytearray(n)
    memory[::4096] = b"\1" * len(range(0, n, 4096))  # the pages are there before the clock starts
    view, at = memoryview(memory), 0
    while at < n:
        got = s.recv_into(view[at:at + BLOCK])
        if got == 0:
            break
        at += got
    end = time.monotonic()
    wanted = block(seed)
    wrong = sum(view[i:i + BLOCK] != wanted[:min(BLOCK, n - i)] for i in range(0, n, BLOCK))
    print(json.dumps({"end": end, "bytes": at, "wrong_blocks": wrong}), flush=True)


def send(address, port, n, seed):
    data = memoryview(block(seed))
    s = socket.create_connection((address, port), timeout=WAIT_S)
    print(json.dumps({"connected": True}), flush=True)
    sys.stdin.readline()
    begin = time.monotonic()
    for i in range(0, n, BLOCK):
        s.sendall(data[:min(BLOCK, n - i)])
    print(json.dumps({"begin": begin}), flush=True)
    s.close()


def start(net, node, *args):
    return net.popen(node, [sys.executable, __file__, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def said(p):
    line = p.stdout.readline()
    if not line:
        raise RuntimeError(f"raw TCP: a process ended with {p.wait()}")
    return json.loads(line)


def stop(p):
    p.stdin.close()
    p.stdout.close()
    try:
        p.wait(5)
    except subprocess.TimeoutExpired:
        p.kill()
        p.wait()


def measure(net, flows, streams=1):
    flows = [(a, b, n // streams + (i < n % streams)) for a, b, n in flows for i in range(streams)]
    flows = [f for f in flows if f[2] > 0]
    processes = []
    try:
        ends = [start(net, to, "receive", net.address(to), str(n), str(i)) for i, (_, to, n) in enumerate(flows)]
        processes += ends
        begins = []
        for i, ((sender, to, n), end) in enumerate(zip(flows, ends)):
            begins.append(start(net, sender, "send", net.address(to), str(said(end)["port"]), str(n), str(i)))
        processes += begins
        for p in begins:
            said(p)
        for p in begins:
            p.stdin.write("go\n")
            p.stdin.flush()
        began = min(said(p)["begin"] for p in begins)
        results = [said(p) for p in ends]
    finally:
        for p in processes:
            stop(p)
    for (sender, to, n), r in zip(flows, results):
        if r["bytes"] != n or r["wrong_blocks"]:
            raise RuntimeError(f"raw TCP: {sender} to {to}: {r['bytes']} of {n} bytes came, {r['wrong_blocks']} blocks wrong")
    return max(r["end"] for r in results) - began


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        send(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
