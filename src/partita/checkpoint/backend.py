"""The interface that checkpoints are saved and loaded through.

Implement :class:`Backend` to add another format, or a store other than a folder. All ranks write a checkpoint together,
each its own part. Nothing here communicates. A checkpoint is invisible until the first rank commits it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from partita.table.box import Box
from partita.table.flat_range import FlatRange

# Limit of one saved box. A box is read and checked as one piece, so this also limits the memory for reading it.
MOST_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Value:
    """An item saved under ``key``: a ``box`` of a global tensor, or, if ``box`` is None, a plain ``value``."""

    key: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.uint8
    box: Box | None = None
    value: Any = None


def saved_boxes(elements: FlatRange, dtype: torch.dtype) -> Iterator[tuple[Box, slice]]:
    """Return the boxes in which a range is saved, each with its slice of the range."""
    return elements.boxes(max(1, MOST_BYTES // dtype.itemsize))


@dataclass(frozen=True)
class Request:
    """A request to write a checkpoint into ``folder`` (an absolute path) and to keep the last ``keep`` ones.

    ``about``: entries that describe the checkpoint; ``aliases``: further names of tied parameters, by key.
    """

    folder: Path
    step: int
    keep: int
    background: bool
    about: Mapping[str, Any]
    aliases: Mapping[str, list[str]]


class Draft(ABC):
    """One rank's part of a checkpoint in progress. Each rank begins, joins and writes; the first rank commits."""

    @abstractmethod
    def begin(self, boxes: Sequence[Value], others: Sequence[Value]) -> None:
        """Register the values that this rank saves. The first rank also prepares the store for the checkpoint."""

    @abstractmethod
    def join(self) -> None:
        """Mark this rank as writing, until :meth:`leave`. Call this after the first rank has called :meth:`begin`."""

    @property
    @abstractmethod
    def snapshot_bytes(self) -> int:
        """The additional host memory that :meth:`snapshot` would allocate."""

    @abstractmethod
    def snapshot(self, batches: Iterable[list[Tensor]]) -> None:
        """Copy the flat values of the boxes, in batches, into host memory. Call this after all ranks have joined."""

    @abstractmethod
    def write(self, batches: Iterable[list[Tensor]] | None = None) -> None:
        """Write this rank's part, from the snapshot or streamed from ``batches``. It is durable on return."""

    @abstractmethod
    def commit(self) -> None:
        """Wait for the other ranks' parts, and make the checkpoint visible. Only the first rank calls this.

        Raises:
            PartitaError: a rank failed, ended, or did not write within ``communication.timeout_s``.
        """

    @abstractmethod
    def leave(self, error: Exception | None = None) -> None:
        """Mark this rank as no longer writing. If there is an ``error``, report it to the first rank if possible."""

    @abstractmethod
    def discard(self) -> None:
        """Remove everything that was written. Only the first rank calls this, after all ranks have left."""


@dataclass(frozen=True)
class Chunk:
    """The location of a stored value, or of a box of a stored tensor.

    ``head_bytes``: the number of bytes before the values. If it is None, only ``torch.load`` can find the values.
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
    """A global tensor, and the locations of its boxes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: list[Chunk] = field(default_factory=list)


@dataclass
class Stored(ABC):
    """The contents of one checkpoint: ``tensors`` and plain ``values``, by key.

    Checkpoints of other libraries have no ``manifest``. They may have ``paths``: the path of each key in the original
    nested state dict.
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
        """Return a plain value, or a small tensor in full.

        Raises:
            PartitaError: the file that holds it is missing or damaged.
        """

    @abstractmethod
    def read(self, chunks: Sequence[Chunk]) -> AbstractContextManager[Iterator[Tensor]]:
        """Return the values of chunks, in order, each in the shape of its box. Raises the errors of :meth:`value`."""


class Backend(ABC):
    """A store of checkpoints in one format. A run uses one instance for all its checkpoints."""

    @abstractmethod
    def draft(self, request: Request, token: str) -> Draft:
        """Return a new partial checkpoint. The ``token`` is unique to it and the same on all ranks."""

    @abstractmethod
    def open(self, folder: Path) -> Stored:
        """Open ``folder`` if it is a checkpoint, or else the checkpoint in it that was saved last.

        Rank 0 opens the folder of a run, and the other ranks the ``folder`` of the result: it must open as itself.

        Raises:
            PartitaError: there is none, or it is damaged.
        """
