"""The handshake by which ranks of one node become peers: each publishes the address of a token in its memory and the
name of a socket, and tries to read the tokens of the others.

Every process of the machine can find that socket. The kernel reports the process at the other end of a connection;
connections from processes outside the group are closed unread.
"""

import contextlib
import logging
import os
import secrets
import socket
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from partita.comm.node.peers import Channel, NodePeer, read_memory, receive_bytes
from partita.comm.node.ptrace_permission import grant, revoke
from partita.errors import PartitaError

_log = logging.getLogger("partita")
TOKEN_BYTES = 32
CONNECT_S = 30.0
MAX_PENDING = 4096  # backlog of the socket; the system may allow fewer
# The token of the accepting rank, and the number of the purpose.
HELLO = struct.Struct(f"<{TOKEN_BYTES}sq")
# Process, user and group at the other end; seconds and microseconds (unix(7), socket(7)).
CREDENTIALS, TIME = struct.Struct("iII"), struct.Struct("@ll")


def find_node_peers(
    own: int, exchange: Callable[[object], list[Any]], purposes: Sequence[str], *, timeout_s: float, required: bool
) -> dict[int, NodePeer]:
    """Return the ranks of a group that can read this one's memory and whose memory it can read, by index. Collective.

    Args:
        own: this rank's index in the group.
        exchange: all-gathers a value.
        purposes: purposes of the channels to each peer.
        timeout_s: how long to wait for a message on a channel.
        required: raise unless all ranks of each node can be peers.

    Raises:
        PartitaError: on all ranks: peers are ``required``, and some ranks cannot be.
    """
    peers, failed = dict[int, NodePeer](), None
    with Handshake(timeout_s) as handshake:
        endpoints = exchange(handshake.endpoint)
        handshake.grant(endpoints)
        exchange(None)  # a barrier: nobody reads before all ranks have given permission
        tried = exchange(handshake.readable(endpoints))
        known = {i: endpoints[i] for i, why in tried[own].items() if why is None and tried[i].get(own, "") is None}
        try:
            peers = handshake.connect(own, known, purposes)
        except OSError as error:
            failed = str(error)
        unanswered = [why for why in exchange(failed) if why is not None]
    problems = [endpoint.problem for endpoint in endpoints if endpoint.problem]
    problems += [why for row in tried for why in row.values() if why is not None] + unanswered
    if unanswered or (problems and required):  # a rank may have channels to a rank that has none
        for peer in peers.values():
            peer.close()
    if problems and required:
        raise PartitaError(
            f"communication.within_node memory: ranks cannot read each other's memory ({problems[0]}): on Linux, allow "
            "process_vm_readv (ptrace) and unix sockets in the container; or set it to network, or to auto"
        )
    if problems and own == 0:
        _log.info("ranks of a node cannot read each other's memory (%s): they use the network", problems[0])
    return {} if unanswered else peers


@dataclass(frozen=True)
class Endpoint:
    """The address of a rank.

    Attributes:
        address: the memory address of the token.
        token: random bytes, to check that a read reaches this process.
        socket_name: the name of the socket on which the rank listens.
        problem: the reason why the rank cannot have peers; empty if it can.
    """

    node: str
    process: int
    address: int
    token: bytes
    socket_name: str
    problem: str


class Handshake:
    """One handshake among the ranks of a group. A context manager: its token and socket exist during the block.

    Args:
        timeout_s: the time-out of the channels. Connecting may take half of it, at most ``CONNECT_S``.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._listener = None
        problem = ""
        self._granted: list[int] = []
        self._token = torch.frombuffer(bytearray(secrets.token_bytes(TOKEN_BYTES)), dtype=torch.uint8)
        name = f"\0partita-{secrets.token_hex(16)}"  # an abstract socket, not in the file system
        node = secrets.token_hex(8)
        try:
            node = _node()
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(name)
            self._listener.listen(MAX_PENDING)
        except (OSError, AttributeError) as error:  # not Linux, or a restricted one
            problem = str(error)
        token = bytes(self._token.tolist())
        self.endpoint = Endpoint(node, os.getpid(), self._token.data_ptr(), token, name, problem)

    def grant(self, endpoints: Sequence[Endpoint]) -> None:
        """Permit the ranks of this node to read this one's memory during the handshake."""
        self._granted = [other.process for other in self._others(endpoints).values()]
        grant(self._granted)

    def readable(self, endpoints: Sequence[Endpoint]) -> dict[int, str | None]:
        """Return, for each other rank of the node, None or the reason why its memory cannot be read."""
        problem, others = self.endpoint.problem, self._others(endpoints)
        return {index: problem or other.problem or _trial(other) for index, other in others.items()}

    def _others(self, endpoints: Sequence[Endpoint]) -> dict[int, Endpoint]:
        own = self.endpoint
        return {
            i: other for i, other in enumerate(endpoints) if other.node == own.node and other.process != own.process
        }

    def connect(self, own: int, endpoints: Mapping[int, Endpoint], purposes: Sequence[str]) -> dict[int, NodePeer]:
        """Connect channels to the ranks at these endpoints, which make the same call.

        Raises:
            OSError: one does not answer.
        """
        channels: dict[int, dict[str, Channel]] = defaultdict(dict)
        end = time.monotonic() + min(CONNECT_S, self._timeout_s / 2)
        with contextlib.ExitStack() as opened:
            for index, other in endpoints.items():
                for number, purpose in enumerate(purposes) if index < own else ():
                    connection = opened.enter_context(socket.socket(socket.AF_UNIX))
                    _connect(connection, other, _remaining_s(end))
                    connection.sendall(HELLO.pack(other.token, number))
                    channels[index][purpose] = Channel(connection, self._timeout_s)
            awaited = {other.process: index for index, other in endpoints.items() if index > own}
            num_connections = len(purposes) * len(awaited)
            while num_connections:
                connection = self._accept(end)
                source = awaited.get(_who(connection))
                if source is None:
                    connection.close()
                    continue
                opened.enter_context(connection).settimeout(_remaining_s(end))
                token, number = HELLO.unpack(receive_bytes(connection, HELLO.size))
                if token != self.endpoint.token:
                    raise OSError(0, "a rank has connected to another's socket")
                channels[source][purposes[number]] = Channel(connection, self._timeout_s)
                num_connections -= 1
            opened.pop_all()
        return {index: NodePeer(other.process, channels[index]) for index, other in endpoints.items()}

    def _accept(self, end: float) -> socket.socket:
        assert self._listener is not None
        self._listener.settimeout(_remaining_s(end))
        return self._listener.accept()[0]

    def __enter__(self) -> "Handshake":
        return self

    def __exit__(self, *_: object) -> None:
        revoke(self._granted)
        if self._listener is not None:
            self._listener.close()


def _connect(connection: socket.socket, other: Endpoint, wait_s: float) -> None:
    # With SO_SNDTIMEO the kernel waits for a free entry in the backlog, which other processes can fill. With Python's
    # time-out it would fail at once.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, TIME.pack(*divmod(int(wait_s * 1e6), 10**6)))
    connection.connect(other.socket_name)
    connection.settimeout(wait_s)
    if _who(connection) != other.process:
        raise OSError(0, "another process has the socket of a rank")


def _who(connection: socket.socket) -> int:
    """Return the process id at the other end; 0 if it belongs to another user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    process, user, _ = CREDENTIALS.unpack(credentials)
    return int(process) if user == os.geteuid() else 0


def _remaining_s(end: float) -> float:
    """Return the seconds until ``end``. Raises TimeoutError: it has passed."""
    remaining = end - time.monotonic()
    if remaining <= 0:
        raise TimeoutError("timed out")
    return remaining


def _trial(other: Endpoint) -> str | None:
    buffer = torch.empty(TOKEN_BYTES, dtype=torch.uint8, device="cpu")
    try:
        read_memory(other.process, other.address, buffer)
    except OSError as error:
        return str(error.strerror)
    return None if bytes(buffer.tolist()) == other.token else "its process number means another process here"


def _node() -> str:
    """Return an id of this boot and of this process's pid and network namespaces. Processes with equal ids see each
    other's process ids and sockets.

    Raises:
        OSError: /proc does not have them.
    """
    spaces = (Path("/proc/self/ns", kind).stat().st_ino for kind in ("pid", "net"))
    return " ".join([Path("/proc/sys/kernel/random/boot_id").read_text().strip(), *map(str, spaces)])
