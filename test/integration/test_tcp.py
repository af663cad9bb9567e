#!/usr/bin/python3
"""Refits through the real daemon whose data plane moves bytes over TCP."""
import socket
import unittest

from rig import *

TCP = {"devices__transport": "tcp", "devices__local_pairs": "transport"}


def sockets_of(pid):
    """Inodes of the process's sockets."""
    inodes = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/{pid}/fd/{fd}")
            if target.startswith("socket:["):
                inodes.add(target[len("socket:["):-1])
    return inodes


def tcp_sockets(pid):
    """(local address, remote address, state) of the process's TCP sockets, from the kernel's own table."""
    mine = sockets_of(pid)
    rows = [line.split() for line in pathlib.Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return [(r[1], r[2], r[3]) for r in rows if r[9] in mine]


LISTEN, ESTABLISHED = "0A", "01"


def data_address(pid):
    (address,) = {local for local, _, state in tcp_sockets(pid) if state == LISTEN}
    host, port = address.split(":")
    return socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)


class Tcp(unittest.TestCase):
    def test_versions_land_over_connections_of_the_data_plane_to_itself(self):
        with Daemon(**TCP) as d:
            pid = d.data_plane_pid()
            host, port = data_address(pid)
            self.assertEqual(host, "127.0.0.1")
            f = Fleet(d, small_source(), small_destination(), [0, 1, 2, 3], [2, 3, 4, 5])
            for version in (1, 2, 7):
                s = f.refit(version)
                self.assertEqual(s.bytes.network, s.bytes.network_minimum)
                for w in f.destinations:
                    self.assertEqual(w.wrong(version, w.shadow), [])
                    w.apply(version)
                    self.assertEqual(w.wrong(version), [])
            used = [s for s in tcp_sockets(pid) if s[2] == ESTABLISHED]
            self.assertTrue(used)
            self.assertEqual({local.split(":")[0] for local, _, _ in used}, {"0100007F"})  # nothing leaves the machine

    def test_strangers_at_the_data_port_change_nothing(self):
        with Daemon(**TCP, **SlowFleet.RATE) as d:
            f = SlowFleet(d, automatic=True)
            f.publish(1)
            f.submit(1)
            f.until_bytes_move(1)
            address = data_address(d.data_plane_pid())
            strangers = [socket.create_connection(address, timeout=WAIT_S) for _ in range(20)]
            for i, s in enumerate(strangers):
                s.sendall(os.urandom(64) if i % 2 else b"resh" + os.urandom(60))
                with contextlib.suppress(ConnectionResetError):
                    self.assertEqual(s.recv(1), b"")  # shown the door
                s.close()
            self.assertEqual(f.final(1).phase, pb.PHASE_COMMITTED)
            f.apply_everywhere(1)

    def test_an_abort_while_bytes_move_leaves_a_clean_next_version(self):
        with Daemon(**TCP, **SlowFleet.RATE) as d:
            f = SlowFleet(d, automatic=True)
            f.publish(1)
            f.submit(1)
            f.until_bytes_move(1)
            f.trainer.admin.Abort(pb.AbortRequest(model="m", version=1), timeout=WAIT_S)
            self.assertEqual(f.final(1).phase, pb.PHASE_ABORTED)
            f.publish(2)
            f.submit(2)
            self.assertEqual(f.final(2).phase, pb.PHASE_COMMITTED)
            f.apply_everywhere(2)

    def test_an_unknown_transport_is_refused_at_the_start(self):
        d = Daemon(devices__transport="udp")
        try:
            r = subprocess.run([BUILD / "reshardd", "--config", d.write_config(), "--check-config"],
                               capture_output=True, text=True, timeout=WAIT_S)
            self.assertNotEqual(r.returncode, 0)
            self.assertIn("transport: 'udp' is unknown; use memory, tcp or nccl", r.stdout + r.stderr)
        finally:
            shutil.rmtree(d.dir)


if __name__ == "__main__":
    main()
