"""Ranks of one node read each other's memory (``process_vm_readv``): the kernel copies once, where a socket takes two
copies and a protocol.

Where the memory is, and word that it was read, are messages over the process group. So an exchange between neighbors
waits, fails and is explained as one over the network.
"""

import ctypes
import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

# Below, two messages more take longer than what they save.
LEAST_BYTES = 64 * 2**10
TOKEN_BYTES = 32
# Lets a process, and those that it started, look into this one (where the Yama security module asks for it).
PR_SET_PTRACER = 0x59616D61


class Work(Protocol):
    def wait(self) -> object: ...


class Post(Protocol):
    """Messages between the ranks of a group, those in ``reply`` apart from others."""

    def send(self, values: Tensor, target: int, *, reply: bool = False) -> Work: ...
    def receive(self, into: Tensor, source: int, *, reply: bool = False) -> Work: ...


@dataclass(frozen=True)
class Card:
    """What a rank tells the others of itself: on which node it is, and where a token lies that proves a reading."""

    node: object
    process: int
    address: int
    token: bytes


@dataclass
class Introduction:
    """Finds out which ranks can be read. The token stays until all have tried."""

    _token: Tensor = field(
        default_factory=lambda: torch.frombuffer(bytearray(secrets.token_bytes(TOKEN_BYTES)), dtype=torch.uint8)
    )

    def card(self) -> Card:
        _admit_siblings()
        return Card(_node(), os.getpid(), self._token.data_ptr(), bytes(self._token.tolist()))

    def readable(self, cards: Sequence[Card]) -> dict[int, str | None]:
        """For each other rank of the node: None, or why its memory cannot be read."""
        own = self.card()
        return {
            index: _trial(card)
            for index, card in enumerate(cards)
            if card.node == own.node and card.process != own.process
        }


def _trial(card: Card) -> str | None:
    room = torch.empty(TOKEN_BYTES, dtype=torch.uint8)
    try:
        read_memory(card.process, card.address, room)
    except OSError as error:
        return str(error.strerror)
    return None if bytes(room.tolist()) == card.token else "its process number means another process here"


def _node() -> object:
    """The same for processes that know each other's numbers, and for no others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return boot, Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return secrets.token_hex(8)


def _admit_siblings() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)  # an error: no such module


class _Range(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


def read_memory(process: int, address: int, into: Tensor) -> None:
    """Fill a contiguous host tensor from the memory of another process.

    Raises:
        OSError: the system does not let it, or the process has ended.
    """
    call = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
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


class Offer:
    """Memory that a neighbor reads. It stays as it is until :meth:`wait` returns."""

    def __init__(self, values: Tensor, target: int, post: Post) -> None:
        self._values = values
        self._place = torch.tensor([values.data_ptr(), values.nbytes])
        self._word = torch.empty(1, dtype=torch.int64)
        self._works = [post.send(self._place, target), post.receive(self._word, target, reply=True)]

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class Fetch:
    """Memory to be filled from a neighbor's, which is done in :meth:`wait`. Wait for it before any :class:`Offer`, for
    which the neighbor does the same.
    """

    def __init__(self, into: Tensor, source: int, process: int, post: Post) -> None:
        self._into, self._source, self._process, self._post = into, source, process, post
        self._place = torch.empty(2, dtype=torch.int64)
        self._told = post.receive(self._place, source)

    def wait(self) -> None:
        """Raises RuntimeError: the neighbor has ended, or offers something else."""
        self._told.wait()
        address, num_bytes = self._place.tolist()
        if num_bytes != self._into.nbytes:
            raise RuntimeError(f"rank {self._source} of the group offers {num_bytes} bytes, not {self._into.nbytes}")
        try:
            read_memory(self._process, address, self._into)
        except OSError as error:
            raise RuntimeError(f"reading the memory of process {self._process}: {error.strerror}") from error
        self._post.send(torch.zeros(1, dtype=torch.int64), self._source, reply=True).wait()
