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
    with Introduction() as introduction:
        cards = group.exchange(introduction.card)
        tried = group.exchange(introduction.readable(cards))
        known = {i: cards[i] for i, why in tried[own].items() if why is None and tried[i].get(own, "") is None}
        try:
            neighbors = introduction.connect(own, known, group.purposes)
        except OSError as error:
            failed = str(error)
        unanswered = [why for why in group.exchange(failed) if why is not None]
    problems = [why for row in tried for why in row.values() if why is not None] + unanswered
    if problems and required:
        raise PartitaError(
            f"communication.within_node memory: ranks cannot read each other's memory ({problems[0]}): allow "
            "process_vm_readv (ptrace) in the container, or set it to network, or to auto"
        )
    if problems and own == 0:
        _log.info("ranks of a node cannot read each other's memory (%s): they use the network", problems[0])
    for neighbor in neighbors.values():
        neighbor.set_timeout(group.timeout_s)
        if unanswered:  # some may have lines to ranks that have none
            neighbor.close()
    return {} if unanswered else neighbors


@dataclass(frozen=True)
class Card:
    """What a rank tells the others of itself: on which node it is, where a token lies that proves a reading, and the
    name of the socket that it listens on.
    """

    node: object
    process: int
    address: int
    token: bytes
    door: str


class Introduction:
    """Finds the neighbors among the ranks of a group. A context manager: its token and socket are there meanwhile."""

    def __init__(self) -> None:
        self._token = torch.frombuffer(bytearray(secrets.token_bytes(TOKEN_BYTES)), dtype=torch.uint8)
        self._listener, self._problem = socket.socket(socket.AF_UNIX), ""
        door = f"\0partita-{secrets.token_hex(16)}"  # in no folder: the name is gone with the socket
        try:
            _admit_siblings()
            self._listener.bind(door)
            self._listener.listen()
        except (OSError, AttributeError) as error:  # another system than Linux, or less than all of it
            self._problem = str(error)
        self.card = Card(_node(), os.getpid(), self._token.data_ptr(), bytes(self._token.tolist()), door)

    def readable(self, cards: Sequence[Card]) -> dict[int, str | None]:
        """For each other rank of the node: None, or why its memory cannot be read."""
        return {
            index: self._problem or _trial(card)
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
                    calling.settimeout(CONNECT_S)
                    calling.connect(card.door)
                    calling.sendall(HELLO.pack(card.token, own, number))
                    lines[index][purpose] = Line(calling)
            self._listener.settimeout(CONNECT_S)
            for _ in range(len(purposes) * sum(index > own for index in cards)):
                called = opened.enter_context(self._listener.accept()[0])
                called.settimeout(CONNECT_S)
                token, index, number = HELLO.unpack(received(called, HELLO.size))
                if token != self.card.token:
                    raise OSError(0, "a stranger has called")
                lines[index][purposes[number]] = Line(called)
            opened.pop_all()
        return {index: Neighbor(card.process, lines[index]) for index, card in cards.items()}

    def __enter__(self) -> "Introduction":
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()


def _trial(card: Card) -> str | None:
    room = torch.empty(TOKEN_BYTES, dtype=torch.uint8)
    try:
        read_memory(card.process, card.address, room)
    except OSError as error:
        return str(error.strerror)
    return None if bytes(room.tolist()) == card.token else "its process number means another process here"


def _node() -> object:
    """The same for processes that know each other's numbers and sockets, and for no others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return boot, Path("/proc/self/ns/pid").stat().st_ino, Path("/proc/self/ns/net").stat().st_ino
    except OSError:
        return secrets.token_hex(8)


def _admit_siblings() -> None:
    system().prctl(PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)  # an error where nobody asks for it
