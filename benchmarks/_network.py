"""Networks for the ranks of a run, and counts of sent bytes.

A network is a private loopback interface, or hosts (network namespaces) joined by lines of a given rate.
"""

import fcntl
import os
import shutil
import socket
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_GET_FLAGS, _SET_FLAGS = 0x8913, 0x8914  # SIOCGIFFLAGS, SIOCSIFFLAGS
_UP = 0x1


LOOPBACK = "lo"
# Bytes that a line may send in a burst above its rate, and how long a packet may wait, as on a switch.
BURST, LATENCY = "512kb", "200ms"
# Linux's default, whatever this machine uses: other algorithms sometimes probe the line, and steps then vary by 10 %.
CONGESTION_CONTROL = "cubic"


@dataclass(frozen=True)
class Network:
    """The network of a run.

    Attributes:
        hosts: for each host, the prefix that runs a command on it.
        address: the address of the first host.
        interface: the name of the interface that joins the hosts.
        is_dealt: successive ranks are on successive hosts; otherwise each host has successive ranks.
    """

    hosts: tuple[tuple[str, ...], ...] = ((),)
    address: str = "127.0.0.1"
    interface: str = LOOPBACK
    is_dealt: bool = False

    def place(self, rank: int, num_ranks: int) -> tuple[int, int]:
        """Return a rank's host, and its local rank there."""
        num = len(self.hosts)
        return divmod(rank, num)[::-1] if self.is_dealt else divmod(rank, num_ranks // num)


@contextmanager
def joined_hosts(num: int, rate: str | None) -> Iterator[Network]:
    """Create ``num`` hosts on a switch, each with a line of ``rate``.

    The rate is in ``tc``'s notation, e.g. ``100mbit``; None is unlimited.

    Raises:
        RuntimeError: the system does not permit it (root and iproute2 are needed).
    """
    prefix = f"bench{os.getpid()}"
    switch, hosts = f"{prefix}s", [f"{prefix}h{number}" for number in range(num)]
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for number, host in enumerate(hosts):
            line = f"line{number}"
            _ip("netns", "add", host)
            _ip("link", "add", "eth0", "netns", host, "type", "veth", "peer", "name", line, "netns", switch)
            _ip("-n", switch, "link", "set", line, "master", "switch", "up")
            _ip("-n", host, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0", "noprefixroute")
            for name in (LOOPBACK, "eth0"):
                _ip("-n", host, "link", "set", name, "up")
            _ip("-n", host, "route", "add", "10.77.0.0/24", "dev", "eth0", "congctl", CONGESTION_CONTROL)
            if rate is not None:
                # Limit outgoing bytes at the host, and incoming bytes where they leave the switch.
                shape = ["root", "tbf", "rate", rate, "burst", BURST, "latency", LATENCY]
                _call("tc", "-n", host, "qdisc", "add", "dev", "eth0", *shape)
                _call("tc", "-n", switch, "qdisc", "add", "dev", line, *shape)
        yield Network(tuple(("ip", "netns", "exec", host) for host in hosts), "10.77.0.1", "eth0")
    finally:
        for name in (*hosts, switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _ip(*words: str) -> None:
    _call("ip", *words)


def _call(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = error.stderr if isinstance(error, subprocess.CalledProcessError) else error
        raise RuntimeError(
            f"cannot create hosts here (root and iproute2 are needed): {' '.join(command)}: {reason}"
        ) from error


def sent_bytes(interface: str = LOOPBACK) -> int:
    """Return the bytes that an interface of this network has sent so far (0 if the system does not report them)."""
    try:
        lines = Path("/proc/self/net/dev").read_text().splitlines()
    except OSError:
        return 0
    counts = (line.partition(":")[2].split() for line in lines if line.strip().startswith(f"{interface}:"))
    return next((int(fields[8]) for fields in counts), 0)


def private_network() -> list[str]:
    """Return the command that runs another one in a new network namespace; empty if this is not allowed."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return []
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    command = [unshare, "--net", *as_root]
    tried = subprocess.run([*command, "true"], capture_output=True, check=False)
    return command if tried.returncode == 0 else []


def bring_up() -> None:
    """Turn the loopback interface on, which is off in a new namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(control, _GET_FLAGS, request))[1]
        if not flags & _UP:
            fcntl.ioctl(control, _SET_FLAGS, struct.pack("16sH14x", b"lo", flags | _UP))
