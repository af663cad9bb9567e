#!/usr/bin/python3
"""One worker as a process of its own, for tests that kill it: argv is what it does; it says on stdout what has happened.

usage: client_process.py SOCKET source|destination RANK DEVICE [publish VERSION | automatic | silent] [memfd]
"""
import sys

from rig import *


class There:
    """As much of a Daemon as a Client needs, for one that somebody else has started."""

    def __init__(self, path):
        self.socket, self.clients, self.channels, self.lines = path, [], [], []

    channel, admin, refit, tail = Daemon.channel, Daemon.admin, Daemon.refit, Daemon.tail


def run(path, side, rank, device, *what):
    client = Client(There(path), host_memory="memfd" in what)
    source = side == "source"
    w = Worker(client, "m", pb.SIDE_SOURCE if source else pb.SIDE_DESTINATION,
               slow_source() if source else slow_destination(), int(rank), int(device),
               pb.RECEIVE_UNSPECIFIED if source else pb.RECEIVE_STAGED, automatic="automatic" in what)
    print("attached", flush=True)
    if "publish" in what:
        w.memory[:] = os.urandom(len(w.memory))
        w.publish(int(what[what.index("publish") + 1]))
        print("published", flush=True)
    sys.stdin.read()  # until the test's end or its kill


run(*sys.argv[1:])
