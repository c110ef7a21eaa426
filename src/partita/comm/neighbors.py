"""Ranks of one node read each other's memory (``process_vm_readv``): the kernel copies once, where a socket takes two
copies and a protocol.

Neighbors tell each other where the memory is, and when it was read, over a socket of the node: whoever waits there
sleeps until the word comes, the other's process ends, or the time is up.
"""

import contextlib
import ctypes
import functools
import os
import secrets
import socket
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

TOKEN_BYTES = 32
CONNECT_S = 30.0
# The token of who is called; who calls, and for which purpose.
HELLO = struct.Struct(f"<{TOKEN_BYTES}sqq")
# What it is about, the tag of its exchange; address and size of memory.
WORD = struct.Struct("<qqqq")
OFFERED, TAKEN = 0, 1
# Lets a process, and those that it started, look into this one (where the Yama security module asks for it).
PR_SET_PTRACER = 0x59616D61


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


@dataclass(frozen=True)
class Neighbor:
    """A rank whose memory this one can read, and that can read this one's; ``lines`` by purpose."""

    process: int
    lines: Mapping[str, "Line"]

    def close(self) -> None:
        for line in self.lines.values():
            line.close()


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
                token, index, number = HELLO.unpack(_received(called, HELLO.size))
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


@functools.cache
def _system() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _admit_siblings() -> None:
    _system().prctl(PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)  # an error where nobody asks for it


class _Range(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


def read_memory(process: int, address: int, into: Tensor) -> None:
    """Fill a contiguous host tensor from the memory of another process.

    Raises:
        OSError: the system does not let it, or the process has ended.
    """
    call = getattr(_system(), "process_vm_readv", None)
    if call is None:
        raise OSError(0, "this system has no process_vm_readv")
    call.restype = ctypes.c_ssize_t
    done = 0
    while done < into.nbytes:
        here = _Range(into.data_ptr() + done, into.nbytes - done)
        there = _Range(address + done, into.nbytes - done)
        one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
        moved = call(ctypes.c_int(process), ctypes.byref(here), one, ctypes.byref(there), one, none)
        if moved <= 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        done += moved


class Line:
    """Words to and from one neighbor, for one purpose. Several threads may wait for words of their own."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._heard: dict[tuple[int, int], deque[tuple[int, int]]] = defaultdict(deque)
        self._listening, self._changed = False, threading.Condition()  # one thread listens, for all

    def set_timeout(self, seconds: float) -> None:
        """How long to wait for a word."""
        self._socket.settimeout(seconds)

    def tell(self, about: int, tag: int, address: int = 0, num_bytes: int = 0) -> None:
        try:
            self._socket.sendall(WORD.pack(about, tag, address, num_bytes))
        except OSError as error:
            raise RuntimeError(f"telling a rank of this node: {error}") from error

    def hear(self, about: int, tag: int) -> tuple[int, int]:
        """Wait for a word under a tag; others are kept until they are asked for.

        Raises:
            RuntimeError: the neighbor has ended, or does not say it in time.
        """
        with self._changed:
            while not self._heard[about, tag]:
                if self._listening:
                    self._changed.wait()
                else:
                    self._listen()
            return self._heard[about, tag].popleft()

    def _listen(self) -> None:
        """Take one word in, while the others may look for theirs."""
        self._listening = True
        self._changed.release()
        try:
            about, tag, address, num_bytes = WORD.unpack(_received(self._socket, WORD.size))
        except OSError as error:
            raise RuntimeError(f"waiting for a rank of this node: {error}") from error
        finally:
            self._changed.acquire()
            self._listening = False
            self._changed.notify_all()
        self._heard[about, tag].append((address, num_bytes))

    def close(self) -> None:
        with contextlib.suppress(OSError):  # so that whoever waits in another thread is told
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _received(connection: socket.socket, num_bytes: int) -> bytes:
    content = b""
    while len(content) < num_bytes:
        more = connection.recv(num_bytes - len(content))
        if not more:
            raise ConnectionError("its process has ended")
        content += more
    return content


class Offer:
    """Memory that a neighbor reads. It stays as it is until :meth:`wait` returns."""

    def __init__(self, values: Tensor, line: Line, tag: int) -> None:
        self._values, self._line, self._tag = values, line, tag
        line.tell(OFFERED, tag, values.data_ptr(), values.nbytes)

    def wait(self) -> None:
        self._line.hear(TAKEN, self._tag)


class Fetch:
    """Memory to be filled from a neighbor's, which is done in :meth:`wait`. Wait for it before any :class:`Offer`, for
    which the neighbor does the same.
    """

    def __init__(self, into: Tensor, process: int, line: Line, tag: int) -> None:
        self._into, self._process, self._line, self._tag = into, process, line, tag

    def wait(self) -> None:
        """Raises RuntimeError: the neighbor has ended, or offers something else."""
        address, num_bytes = self._line.hear(OFFERED, self._tag)
        if num_bytes != self._into.nbytes:
            raise RuntimeError(f"process {self._process} offers {num_bytes} bytes, not {self._into.nbytes}")
        try:
            read_memory(self._process, address, self._into)
        except OSError as error:
            raise RuntimeError(f"reading the memory of process {self._process}: {error.strerror}") from error
        self._line.tell(TAKEN, self._tag)
