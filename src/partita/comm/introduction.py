"""How ranks of one node come to be neighbors: each shows a token in its memory, and a socket's name, and tries those of
the others.
"""

import contextlib
import ctypes
import logging
import os
import secrets
import socket
import struct
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from partita.comm.neighbors import Line, Neighbor, read_memory, received, system
from partita.errors import PartitaError

_log = logging.getLogger("partita")
TOKEN_BYTES = 32
CONNECT_S = 30.0
MOST_CALLS = 4096  # that wait at a time; the system may allow fewer
# The token of who is called; who calls, and for which purpose.
HELLO = struct.Struct(f"<{TOKEN_BYTES}sqq")
# Lets a process, and those that it started, look into this one (where the Yama security module asks for it).
PR_SET_PTRACER = 0x59616D61


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
        tried = group.exchange(introduction.readable(cards))
        known = {i: cards[i] for i, why in tried[own].items() if why is None and tried[i].get(own, "") is None}
        try:
            neighbors = introduction.connect(own, known, group.purposes)
        except OSError as error:
            failed = str(error)
        unanswered = [why for why in group.exchange(failed) if why is not None]
    for neighbor in neighbors.values():
        neighbor.set_timeout(group.timeout_s)
        if unanswered:  # some may have lines to ranks that have none
            neighbor.close()
    problems = [card.problem for card in cards if card.problem]
    problems += [why for row in tried for why in row.values() if why is not None] + unanswered
    if problems and required:
        for neighbor in neighbors.values():
            neighbor.close()
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
        self._token = torch.frombuffer(bytearray(secrets.token_bytes(TOKEN_BYTES)), dtype=torch.uint8)
        door, node = f"\0partita-{secrets.token_hex(16)}", secrets.token_hex(8)  # a name in no folder
        try:
            node = _node()
            _admit_siblings()
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(door)
            self._listener.listen(MOST_CALLS)
        except (OSError, AttributeError) as error:  # another system than Linux, or less than all of it
            problem = str(error)
        self.card = Card(node, os.getpid(), self._token.data_ptr(), bytes(self._token.tolist()), door, problem)

    def readable(self, cards: Sequence[Card]) -> dict[int, str | None]:
        """For each other rank of the node: None, or why its memory cannot be read."""
        return {
            index: self.card.problem or card.problem or _trial(card)
            for index, card in enumerate(cards)
            if card.node == self.card.node and card.process != self.card.process
        }

    def connect(self, own: int, cards: Mapping[int, Card], purposes: Sequence[str]) -> dict[int, Neighbor]:
        """Have lines to the ranks of these cards, which do the same.

        Raises:
            OSError: one does not answer.
        """
        lines: dict[int, dict[str, Line]] = defaultdict(dict)
        with contextlib.ExitStack() as opened:
            for index, card in cards.items():
                for number, purpose in enumerate(purposes) if index < own else ():
                    calling = opened.enter_context(socket.socket(socket.AF_UNIX))
                    calling.settimeout(self._wait_s)
                    calling.connect(card.door)
                    calling.sendall(HELLO.pack(card.token, own, number))
                    lines[index][purpose] = Line(calling)
            num_calls = len(purposes) * sum(index > own for index in cards)
            for _ in range(num_calls):
                assert self._listener is not None
                self._listener.settimeout(self._wait_s)
                called = opened.enter_context(self._listener.accept()[0])
                called.settimeout(self._wait_s)
                token, index, number = HELLO.unpack(received(called, HELLO.size))
                if token != self.card.token:
                    raise OSError(0, "a stranger has called")
                lines[index][purposes[number]] = Line(called)
            opened.pop_all()
        return {index: Neighbor(card.process, lines[index]) for index, card in cards.items()}

    def __enter__(self) -> "Introduction":
        return self

    def __exit__(self, *_: object) -> None:
        if self._listener is not None:
            self._listener.close()


def _trial(card: Card) -> str | None:
    room = torch.empty(TOKEN_BYTES, dtype=torch.uint8)
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


def _admit_siblings() -> None:
    system().prctl(PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)  # an error where nobody asks for it
