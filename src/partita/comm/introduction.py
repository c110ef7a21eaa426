"""How ranks of one node come to be neighbors: each shows a token in its memory, and a socket's name, and tries those of
the others.

Every process of the machine can find that socket. The kernel tells who is at the other end of a connection; whoever is
no rank of the group is turned away unheard.
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

from partita.comm.admission import admit, withdraw
from partita.comm.neighbors import Line, Neighbor, read_memory, received
from partita.errors import PartitaError

_log = logging.getLogger("partita")
TOKEN_BYTES = 32
CONNECT_S = 30.0
MOST_CALLS = 4096  # that wait at a time; the system may allow fewer
# The token of who is called, and for which purpose.
HELLO = struct.Struct(f"<{TOKEN_BYTES}sq")
# Process, user and group at the other end; seconds and microseconds (unix(7), socket(7)).
CREDENTIALS, TIME = struct.Struct("iII"), struct.Struct("@ll")


@dataclass(frozen=True)
class Group:
    """The group whose ranks are introduced: this rank's index in it, how its ranks ``exchange`` objects (a collective),
    the purposes of lines, and the time-out of words on them.
    """

    own: int
    exchange: Callable[[object], list[Any]]
    purposes: Sequence[str]
    timeout_s: float


def find_neighbors(group: Group, *, required: bool) -> dict[int, Neighbor]:
    """The ranks of a group that can read this one's memory and be read, by index; called on all of them.

    Args:
        required: all ranks of a node have to be neighbors.

    Raises:
        PartitaError: on all ranks, where they are ``required`` and cannot.
    """
    neighbors, failed, own = dict[int, Neighbor](), None, group.own
    with Introduction(min(CONNECT_S, group.timeout_s / 2)) as introduction:
        cards = group.exchange(introduction.card)
        introduction.admit(cards)
        group.exchange(None)  # nobody tries before all have admitted the others
        tried = group.exchange(introduction.readable(cards))
        known = {i: cards[i] for i, why in tried[own].items() if why is None and tried[i].get(own, "") is None}
        try:
            neighbors = introduction.connect(own, known, group.purposes)
        except OSError as error:
            failed = str(error)
        unanswered = [why for why in group.exchange(failed) if why is not None]
    problems = [card.problem for card in cards if card.problem]
    problems += [why for row in tried for why in row.values() if why is not None] + unanswered
    for neighbor in neighbors.values():
        neighbor.set_timeout(group.timeout_s)
        if unanswered or (problems and required):  # some may have lines to ranks that have none
            neighbor.close()
    if problems and required:
        raise PartitaError(
            f"communication.within_node memory: ranks cannot read each other's memory ({problems[0]}): on Linux, allow "
            "process_vm_readv (ptrace) and unix sockets in the container; or set it to network, or to auto"
        )
    if problems and own == 0:
        _log.info("ranks of a node cannot read each other's memory (%s): they use the network", problems[0])
    return {} if unanswered else neighbors


@dataclass(frozen=True)
class Card:
    """What a rank tells the others of itself: on which node it is, where a token lies that proves a reading, the name
    of the socket that it listens on, and the ``problem`` where it can have no neighbors.
    """

    node: str
    process: int
    address: int
    token: bytes
    door: str
    problem: str


class Introduction:
    """Finds the neighbors among the ranks of a group. A context manager: its token and socket are there meanwhile."""

    def __init__(self, wait_s: float = CONNECT_S) -> None:
        self._wait_s, self._listener, problem = wait_s, None, ""
        self._admitted: list[int] = []
        self._token = torch.frombuffer(bytearray(secrets.token_bytes(TOKEN_BYTES)), dtype=torch.uint8)
        door, node = f"\0partita-{secrets.token_hex(16)}", secrets.token_hex(8)  # a name in no folder
        try:
            node = _node()
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(door)
            self._listener.listen(MOST_CALLS)
        except (OSError, AttributeError) as error:  # another system than Linux, or less than all of it
            problem = str(error)
        self.card = Card(node, os.getpid(), self._token.data_ptr(), bytes(self._token.tolist()), door, problem)

    def admit(self, cards: Sequence[Card]) -> None:
        """Let the ranks of this node try to read; neighbors may later, too."""
        self._admitted = [card.process for card in self._others(cards).values()]
        admit(self._admitted)

    def readable(self, cards: Sequence[Card]) -> dict[int, str | None]:
        """For each other rank of the node: None, or why its memory cannot be read."""
        return {index: self.card.problem or card.problem or _trial(card) for index, card in self._others(cards).items()}

    def _others(self, cards: Sequence[Card]) -> dict[int, Card]:
        own = self.card
        return {i: card for i, card in enumerate(cards) if card.node == own.node and card.process != own.process}

    def connect(self, own: int, cards: Mapping[int, Card], purposes: Sequence[str]) -> dict[int, Neighbor]:
        """Have lines to the ranks of these cards, which do the same.

        Raises:
            OSError: one does not answer.
        """
        lines: dict[int, dict[str, Line]] = defaultdict(dict)
        end = time.monotonic() + self._wait_s
        with contextlib.ExitStack() as opened:
            for index, card in cards.items():
                for number, purpose in enumerate(purposes) if index < own else ():
                    calling = opened.enter_context(socket.socket(socket.AF_UNIX))
                    _call(calling, card, _left(end))
                    calling.sendall(HELLO.pack(card.token, number))
                    lines[index][purpose] = Line(calling)
            callers = {card.process: index for index, card in cards.items() if index > own}
            num_calls = len(purposes) * len(callers)
            while num_calls:
                called = self._next_call(end)
                caller = callers.get(_who(called))
                if caller is None:
                    called.close()
                    continue
                opened.enter_context(called).settimeout(_left(end))
                token, number = HELLO.unpack(received(called, HELLO.size))
                if token != self.card.token:
                    raise OSError(0, "a rank has called another's number")
                lines[caller][purposes[number]] = Line(called)
                num_calls -= 1
            opened.pop_all()
        return {index: Neighbor(card.process, lines[index]) for index, card in cards.items()}

    def _next_call(self, end: float) -> socket.socket:
        assert self._listener is not None
        self._listener.settimeout(_left(end))
        return self._listener.accept()[0]

    def __enter__(self) -> "Introduction":
        return self

    def __exit__(self, *_: object) -> None:
        withdraw(self._admitted)
        if self._listener is not None:
            self._listener.close()


def _call(calling: socket.socket, card: Card, wait_s: float) -> None:
    # The kernel then waits for a place among the calls, of which strangers can make many. With Python's time-out it
    # would not.
    calling.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, TIME.pack(*divmod(int(wait_s * 1e6), 10**6)))
    calling.connect(card.door)
    calling.settimeout(wait_s)
    if _who(calling) != card.process:
        raise OSError(0, "another process has the socket of a rank")


def _who(connection: socket.socket) -> int:
    """The process at the other end, if it is the same user's; else 0."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    process, user, _ = CREDENTIALS.unpack(told)
    return int(process) if user == os.geteuid() else 0


def _left(end: float) -> float:
    """Seconds until then."""
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def _trial(card: Card) -> str | None:
    room = torch.empty(TOKEN_BYTES, dtype=torch.uint8, device="cpu")
    try:
        read_memory(card.process, card.address, room)
    except OSError as error:
        return str(error.strerror)
    return None if bytes(room.tolist()) == card.token else "its process number means another process here"


def _node() -> str:
    """The same for processes that know each other's numbers and sockets, and for no others.

    Raises:
        OSError: the system does not say.
    """
    spaces = (Path("/proc/self/ns", kind).stat().st_ino for kind in ("pid", "net"))
    return " ".join([Path("/proc/sys/kernel/random/boot_id").read_text().strip(), *map(str, spaces)])
