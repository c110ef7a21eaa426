"""The loopback interface: what it carried, and a network of our own, where nothing else is on it."""

import fcntl
import os
import shutil
import socket
import struct
import subprocess
from pathlib import Path

_GET_FLAGS, _SET_FLAGS = 0x8913, 0x8914  # SIOCGIFFLAGS, SIOCSIFFLAGS
_UP = 0x1


def sent_bytes() -> int:
    """Bytes that this network's loopback interface sent so far (0 where the system does not say)."""
    try:
        lines = Path("/proc/self/net/dev").read_text().splitlines()
    except OSError:
        return 0
    counts = (line.partition(":")[2].split() for line in lines if line.strip().startswith("lo:"))
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
