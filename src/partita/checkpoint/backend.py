"""What saving and loading go through. Another format, or a store that is no folder, is one more :class:`Backend`.

A checkpoint is made by all ranks, each of which writes a part. Nothing here communicates, and nobody sees anything of
a checkpoint before the first rank has committed it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from partita.plan.box import Box
from partita.plan.flat_range import FlatRange

# Of a box that is saved: it is read and checked whole, so that no more memory than that is needed for it.
MOST_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Value:
    """What is saved under a key: a ``box`` of a global tensor, or (without a box) any plain ``value``."""

    key: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.uint8
    box: Box | None = None
    value: Any = None


def saved_boxes(elements: FlatRange, dtype: torch.dtype) -> Iterator[tuple[Box, slice]]:
    """The boxes as which a range is saved, each with its place in the range."""
    return elements.boxes(max(1, MOST_BYTES // dtype.itemsize))


@dataclass(frozen=True)
class Request:
    """A checkpoint to be made in ``folder`` (an absolute path), of which the ``keep`` saved last stay.

    ``about`` describes it; ``aliases`` are the other names of tied parameters, by key.
    """

    folder: Path
    step: int
    keep: int
    background: bool
    about: Mapping[str, Any]
    aliases: Mapping[str, list[str]]


class Draft(ABC):
    """One rank's part of a checkpoint that is being made: begun, joined, written, and committed by the first rank."""

    @abstractmethod
    def begin(self, boxes: Sequence[Value], others: Sequence[Value]) -> None:
        """Take up what this rank saves; the first rank makes room for the checkpoint."""

    @abstractmethod
    def join(self) -> None:
        """Show that this rank writes, until :meth:`leave`. Not before the first rank has begun."""

    @property
    @abstractmethod
    def snapshot_bytes(self) -> int:
        """Host memory that :meth:`snapshot` has yet to take."""

    @abstractmethod
    def snapshot(self, batches: Iterable[list[Tensor]]) -> None:
        """Copy the boxes' values, flat, some at a time, into host memory. Not before all ranks have joined."""

    @abstractmethod
    def write(self, batches: Iterable[list[Tensor]] | None = None) -> None:
        """Write this rank's part, from the snapshot, or streamed from ``batches``. It lasts when this returns."""

    @abstractmethod
    def commit(self) -> None:
        """Wait for the other ranks' parts, and make the checkpoint visible. By the first rank alone.

        Raises:
            PartitaError: a rank failed, ended, or has not written within ``communication.timeout_s``.
        """

    @abstractmethod
    def leave(self, error: Exception | None = None) -> None:
        """This rank writes no more: because of an ``error``, of which the first rank learns, if that can be."""

    @abstractmethod
    def discard(self) -> None:
        """Remove what was written. By the first rank alone, when all have left."""


@dataclass(frozen=True)
class Chunk:
    """Where a value, or a box of a tensor, is stored. Without ``head_bytes`` only ``torch.load`` knows where the values
    are in it.
    """

    key: str
    box: Box | None
    file: str
    offset: int
    num_bytes: int
    head_bytes: int | None = None
    checksum: str | None = None


@dataclass
class StoredTensor:
    """A global tensor, and where its boxes are."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: list[Chunk] = field(default_factory=list)


@dataclass
class Stored(ABC):
    """Everything in one checkpoint: ``tensors`` and plain ``values`` by key. Others' checkpoints have no ``manifest``,
    and may have ``paths``: where a key was in the nested state dict.
    """

    folder: Path
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    values: dict[str, Chunk] = field(default_factory=dict)
    manifest: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)

    @property
    def keys(self) -> list[str]:
        return [*self.tensors, *self.values]

    @abstractmethod
    def value(self, key: str) -> Any:
        """A plain value, or a small tensor whole.

        Raises:
            PartitaError: what holds it is missing or damaged.
        """

    @abstractmethod
    def read(self, chunks: Sequence[Chunk]) -> AbstractContextManager[Iterator[Tensor]]:
        """The values of chunks, in their order, each in the shape of its box; raises as :meth:`value` does."""


class Backend(ABC):
    """Where checkpoints are, and in what form; one for all checkpoints of a run."""

    @abstractmethod
    def draft(self, request: Request, token: str) -> Draft:
        """A checkpoint that is about to be made; the ``token`` is of no other, and the same on all ranks."""

    @abstractmethod
    def open(self, folder: Path) -> Stored:
        """The checkpoint that ``folder`` is, or the one in it that was saved last.

        Raises:
            PartitaError: there is none, or it is damaged.
        """
