"""Networks for the ranks of a run: a loopback interface of their own, where nothing else is on it, or hosts (network
namespaces) joined by lines of a given rate. What an interface has carried.
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
# What a line may send at once before its rate holds, and how long a packet may wait for it, as a switch would have it.
BURST, LATENCY = "512kb", "200ms"
# Linux's default, whatever this machine is set to: others probe the line at times, and steps are 10 % apart.
CONGESTION_CONTROL = "cubic"


@dataclass(frozen=True)
class Network:
    """Where ranks run: the command that runs another one on each host, the first host's address, and the name of the
    interface that joins the hosts. A host has successive ranks; where they are dealt, successive ranks are on
    successive hosts.
    """

    hosts: tuple[tuple[str, ...], ...] = ((),)
    address: str = "127.0.0.1"
    interface: str = LOOPBACK
    is_dealt: bool = False

    def place(self, rank: int, num_ranks: int) -> tuple[int, int]:
        """The host of a rank, and its number there."""
        num = len(self.hosts)
        return divmod(rank, num)[::-1] if self.is_dealt else divmod(rank, num_ranks // num)


@contextmanager
def joined_hosts(num: int, rate: str | None) -> Iterator[Network]:
    """``num`` hosts on a switch, whose lines send at ``rate`` (as ``tc`` has it: ``100mbit``) each; None: as fast as
    they can.

    Raises:
        RuntimeError: the system does not permit it (it takes root and iproute2).
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
                # What a host sends is held back where it leaves, what it receives where it leaves the switch.
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
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else error
        raise RuntimeError(
            f"hosts cannot be made here (root and iproute2 are needed): {' '.join(command)}: {said}"
        ) from error


def sent_bytes(interface: str = LOOPBACK) -> int:
    """Bytes that an interface of this network sent so far (0 where the system does not say)."""
    try:
        lines = Path("/proc/self/net/dev").read_text().splitlines()
    except OSError:
        return 0
    counts = (line.partition(":")[2].split() for line in lines if line.strip().startswith(f"{interface}:"))
    return next((int(fields[8]) for fields in counts), 0)


def private_network() -> list[str]:
    """The command that runs another one in a network namespace of its own; empty where this is not allowed."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return []
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    command = [unshare, "--net", *as_root]
    tried = subprocess.run([*command, "true"], capture_output=True, check=False)
    return command if tried.returncode == 0 else []


def bring_up() -> None:
    """Switch the loopback interface on, as it is not in a new namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(control, _GET_FLAGS, request))[1]
        if not flags & _UP:
            fcntl.ioctl(control, _SET_FLAGS, struct.pack("16sH14x", b"lo", flags | _UP))
