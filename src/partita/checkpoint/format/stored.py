"""The contents of a checkpoint's folder: tensors in global coordinates, cut into chunks, and plain values.

For partita's own checkpoints, the locations and checksums of chunks are in a table next to each rank's file. For any
other checkpoint of torch.distributed.checkpoint, the locations are in its ``.metadata``, without checksums.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from partita.checkpoint.backend import Chunk, Stored
from partita.checkpoint.format.folder import resolve_checkpoint
from partita.checkpoint.format.manifest import MANIFEST, METADATA, read_manifest
from partita.checkpoint.format.reading import ReadAhead
from partita.checkpoint.format.record import read_tensor
from partita.checkpoint.format.system import checksum, damaged, read_range
from partita.checkpoint.serializable import read_object
from partita.errors import PartitaError


class StoredFiles(Stored):
    """The contents of one checkpoint folder."""

    def value(self, key: str) -> Any:
        if key in self.values:
            return self.loaded(self.values[key], self.record(self.values[key]))
        found = self.tensors[key]
        full = torch.empty(found.shape, dtype=found.dtype, device="cpu")
        for chunk in found.chunks:
            assert chunk.box is not None
            full[chunk.box.slices].copy_(self.decoded(chunk, self.record(chunk)))
        return full

    def read(self, chunks: Sequence[Chunk]) -> ReadAhead:
        return ReadAhead(self.folder, chunks, self.check, self.decoded)

    def record(self, chunk: Chunk) -> memoryview:
        """Read a chunk's bytes, and check them.

        Raises:
            PartitaError: the file is missing or too short, or the bytes are not those that were written.
        """
        content = read_range(self.folder / chunk.file, chunk.offset, chunk.num_bytes)
        self.check(chunk, content)
        return content

    def check(self, chunk: Chunk, content: memoryview) -> None:
        """Check a chunk's bytes against its checksum. Raises the errors of :meth:`record`."""
        if chunk.checksum is not None and checksum(content) != chunk.checksum:
            raise PartitaError(
                f"checkpoint: '{self.folder / chunk.file}' is damaged: bytes {chunk.offset} to "
                f"{chunk.offset + chunk.num_bytes} ('{chunk.key}') are not those that were written (checksum "
                f"{checksum(content)}, expected {chunk.checksum}); load an earlier checkpoint"
            )

    def loaded(self, chunk: Chunk, content: memoryview) -> Any:
        """Load the value in a chunk's bytes with ``torch.load``.

        Raises:
            PartitaError: it is damaged, or holds classes that are not loaded.
        """
        try:
            return read_object(content)
        except Exception as error:  # invalid archives and refused classes raise exceptions of any type
            reason = next(iter(str(error).strip().splitlines()), "")
            raise PartitaError(
                f"checkpoint: '{chunk.key}' in '{self.folder / chunk.file}' cannot be loaded: it is damaged, or "
                f"contains other classes than numbers, text, tensors and containers of them ({type(error).__name__}: "
                f"{reason}); load an earlier checkpoint, or only this one's weights with only_model=True"
            ) from error

    def decoded(self, chunk: Chunk, content: memoryview) -> Tensor:
        """Return a tensor's chunk in the shape of its box; a view of the bytes if partita wrote them."""
        if chunk.head_bytes is None or chunk.box is None:
            loaded = self.loaded(chunk, content)
            assert isinstance(loaded, Tensor)
            return loaded
        return read_tensor(content, chunk.head_bytes, self.tensors[chunk.key].dtype, chunk.box.sizes)

    def problem(self, chunk: Chunk) -> str | None:
        """Return the problem of a chunk (missing, cut off, damaged, cannot be loaded); None if it is intact."""
        try:
            content = self.record(chunk)
            if chunk.box is None or chunk.head_bytes is None:
                self.loaded(chunk, content)
        except PartitaError as error:
            return str(error)
        return None

    def chunks(self) -> Iterator[Chunk]:
        for found in self.tensors.values():
            yield from found.chunks
        yield from self.values.values()


def open_stored(folder: Path) -> StoredFiles:
    """Open a checkpoint of partita or torch.distributed.checkpoint: ``folder``, or the one in it that was saved last.

    Raises:
        PartitaError: there is none, or its index is damaged or names classes that do not belong in an index.
    """
    stored = StoredFiles(resolve_checkpoint(folder))
    index = stored.folder / (MANIFEST if (stored.folder / MANIFEST).exists() else METADATA)
    try:
        if index.name == MANIFEST:
            read_manifest(stored)
        else:
            from partita.checkpoint.format.metadata import add_metadata, read_metadata

            add_metadata(stored, read_metadata(index))
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise damaged(index) from error
    return stored
