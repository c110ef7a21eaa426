"""What a checkpoint's folder holds, whoever wrote it: tensors in global coordinates, cut into chunks, and plain values.

Of partita's own the chunks' places and checksums are in a table beside each rank's file; of any other checkpoint of
torch.distributed.checkpoint they are in its ``.metadata``, without checksums.
"""

import json
import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from partita.checkpoint.file import checksum
from partita.checkpoint.layout import Record
from partita.checkpoint.metadata import read_metadata
from partita.checkpoint.record import read_object, read_tensor
from partita.checkpoint.system import read_range, read_small
from partita.errors import PartitaError
from partita.memory.collector import collector_paused
from partita.plan.box import Box

METADATA = ".metadata"
MANIFEST = "manifest.json"
# In a manifest: raised when readers of earlier versions would take something for what it is not.
FORMAT = 1
KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class Chunk:
    """A record in a file. Without ``head_bytes`` only ``torch.load`` knows where the values are."""

    key: str
    box: Box | None
    file: str
    offset: int
    num_bytes: int
    head_bytes: int | None = None
    checksum: str | None = None

    @property
    def is_framed(self) -> bool:
        """Whether it is values between a known head and tail; else it is anything that torch saves."""
        return self.box is not None and self.head_bytes is not None


@dataclass
class StoredTensor:
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: list[Chunk] = field(default_factory=list)


@dataclass
class Stored:
    """Everything in one folder: ``tensors`` and plain ``values`` by key. Others' checkpoints have no ``manifest``, and
    may have ``paths``: where a key was in the nested state dict.
    """

    folder: Path
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    values: dict[str, Chunk] = field(default_factory=dict)
    manifest: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, KeyPath] = field(default_factory=dict)

    def path(self, key: str) -> KeyPath:
        """Where a value is in the nested state dict that was saved."""
        return self.paths.get(key) or _path(key)

    def read(self, chunk: Chunk) -> memoryview:
        """A record's bytes.

        Raises:
            PartitaError: the file is missing or shorter, or the bytes are not those that were written.
        """
        content = read_range(self.folder / chunk.file, chunk.offset, chunk.num_bytes)
        self.check(chunk, content)
        return content

    def check(self, chunk: Chunk, content: memoryview) -> None:
        """Hold a record's bytes against its checksum. Raises as :meth:`read` does."""
        if chunk.checksum is not None and checksum(content) != chunk.checksum:
            raise PartitaError(
                f"checkpoint: '{self.folder / chunk.file}' is damaged: bytes {chunk.offset} to "
                f"{chunk.offset + chunk.num_bytes} ('{chunk.key}') are not those that were written (checksum "
                f"{checksum(content)}, expected {chunk.checksum}); load an earlier checkpoint"
            )

    def loaded(self, chunk: Chunk, content: memoryview) -> Any:
        """What a record holds that is not framed.

        Raises:
            PartitaError: it is not of the classes that are loaded, or damaged.
        """
        try:
            return read_object(content)
        except Exception as error:  # bytes that are no archive, or name any class, raise anything
            reason = next(iter(str(error).strip().splitlines()), "")
            raise PartitaError(
                f"checkpoint: '{chunk.key}' in '{self.folder / chunk.file}' cannot be loaded, as it is damaged or "
                f"holds more than numbers, text, tensors and containers of them ({type(error).__name__}: {reason}); "
                "load an earlier checkpoint, or this one's weights alone with only_model=True"
            ) from error

    def decoded(self, chunk: Chunk, content: memoryview) -> Tensor:
        """A chunk's values, in the shape of its box: a view of the record's bytes where it is partita's own."""
        if chunk.head_bytes is None or chunk.box is None:
            loaded = self.loaded(chunk, content)
            assert isinstance(loaded, Tensor)
            return loaded
        return read_tensor(content, chunk.head_bytes, self.tensors[chunk.key].dtype, chunk.box.sizes)

    def value(self, key: str) -> Any:
        """A plain value, or a small tensor whole."""
        if key in self.values:
            return self.loaded(self.values[key], self.read(self.values[key]))
        found = self.tensors[key]
        whole = torch.empty(found.shape, dtype=found.dtype, device="cpu")
        for chunk in found.chunks:
            assert chunk.box is not None
            narrowed(whole, chunk.box).copy_(self.decoded(chunk, self.read(chunk)))
        return whole

    def chunks(self) -> Iterator[Chunk]:
        for found in self.tensors.values():
            yield from found.chunks
        yield from self.values.values()


def narrowed(tensor: Tensor, box: Box) -> Tensor:
    """A box of a tensor, as a view."""
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


# ---------------------------------------------------------------------------------------------------- partita's own


@collector_paused()
def table_of(file: str, records: Iterable[Record], sums: Iterable[str], num_bytes: int) -> bytes:
    """What is known of a rank's file, as JSON."""
    rows = [
        {
            "key": record.value.key,
            "at": [record.offset, record.num_bytes, record.head_bytes],
            "checksum": digest,
            **(
                {}
                if record.value.box is None
                else {
                    "shape": record.value.shape,
                    "dtype": str(record.value.dtype).removeprefix("torch."),
                    "box": [record.value.box.offsets, record.value.box.sizes],
                }
            ),
        }
        for record, digest in zip(records, sums, strict=True)
    ]
    return json.dumps({"file": file, "num_bytes": num_bytes, "records": rows}, separators=(",", ":")).encode()


def add_table(stored: Stored, table: bytes) -> int:
    """Take up what a table says; returns the number of bytes of its file."""
    made = json.loads(table)
    file = _inside(stored.folder, made["file"])
    for row in made["records"]:
        offset, num_bytes, head_bytes = row["at"]
        box = Box(*map(tuple, row["box"])) if "box" in row else None
        chunk = Chunk(row["key"], box, file, offset, num_bytes, head_bytes, row["checksum"])
        if box is None:
            stored.values[chunk.key] = chunk
        else:
            dtype = getattr(torch, row["dtype"])
            stored.tensors.setdefault(chunk.key, StoredTensor(tuple(row["shape"]), dtype)).chunks.append(chunk)
    return int(made["num_bytes"])


def add_aliases(stored: Stored, aliases: dict[str, list[str]]) -> None:
    for key, others in aliases.items():
        for other in others:
            stored.tensors[other] = stored.tensors[key]


def metadata_of(stored: Stored) -> bytes:
    """The index that torch.distributed.checkpoint reads."""
    # Equal parts are one object, which pickle writes once.
    properties, size = lru_cache(maxsize=None)(TensorProperties), lru_cache(maxsize=None)(torch.Size)
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for key, found in stored.tensors.items():
        chunks = []
        for chunk in found.chunks:
            assert chunk.box is not None
            offsets = size(chunk.box.offsets)
            chunks.append(ChunkStorageMetadata(offsets, size(chunk.box.sizes)))
            places[MetadataIndex(key, offsets)] = _StorageInfo(chunk.file, chunk.offset, chunk.num_bytes)
        described[key] = TensorStorageMetadata(properties(found.dtype), size(found.shape), chunks)
    for key, chunk in stored.values.items():
        described[key] = BytesStorageMetadata()
        places[MetadataIndex(key)] = _StorageInfo(chunk.file, chunk.offset, chunk.num_bytes)
    nested = {key: _path(key) for key in described}
    return pickle.dumps(Metadata(described, planner_data=nested, storage_data=places))


def _path(key: str) -> KeyPath:
    """The same for keys of partita's own."""
    if key.startswith("optimizer.state."):
        param, _, state = key.removeprefix("optimizer.state.").rpartition(".")
        return ("optimizer", "state", param, state)
    if key.startswith("optimizer.param_groups."):
        number, _, setting = key.removeprefix("optimizer.param_groups.").partition(".")
        return ("optimizer", "param_groups", int(number), setting)
    return ("model", key.removeprefix("model.")) if key.startswith("model.") else (key,)


# ------------------------------------------------------------------------------------------------------- anybody's


def open_stored(folder: Path) -> Stored:
    """What is in a checkpoint's folder (``step-N``, or one that torch.distributed.checkpoint wrote).

    Raises:
        PartitaError: it is no checkpoint, or its index is damaged or names what no index does.
    """
    stored = Stored(folder)
    index = next((folder / name for name in (MANIFEST, METADATA) if (folder / name).exists()), None)
    if index is None:
        raise PartitaError(f"checkpoint: '{folder}' holds none: it has neither {MANIFEST} nor {METADATA}")
    try:
        if index.name == MANIFEST:
            _add_manifest(stored)
        else:
            _add_metadata(stored, read_metadata(index))
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise _damaged(index) from error
    return stored


def _add_manifest(stored: Stored) -> None:
    stored.manifest = _known(json.loads(_checked_manifest(stored.folder)), stored.folder)
    for name, digest in stored.manifest["tables"].items():
        table = read_small(stored.folder / _inside(stored.folder, name))
        if checksum(table) != digest:
            raise _damaged(stored.folder / name)
        add_table(stored, table)
    add_aliases(stored, stored.manifest["aliases"])


def manifest_bytes(manifest: dict[str, Any]) -> bytes:
    """A manifest whose last line is its checksum."""
    content = json.dumps(manifest, indent=1)
    return f"{content}\n{checksum(content.encode())}\n".encode()


def _checked_manifest(folder: Path) -> str:
    content, _, digest = read_small(folder / MANIFEST).decode(errors="replace").rstrip("\n").rpartition("\n")
    if checksum(content.encode()) != digest:
        raise _damaged(folder / MANIFEST)
    return content


def _known(manifest: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A manifest, if it is of a format that is known here."""
    if manifest["format"] > FORMAT:
        by = manifest.get("versions", {}).get("partita", "a later version")
        raise PartitaError(
            f"checkpoint: '{folder}' has format {manifest['format']} (written by partita {by}): expected at most "
            f"{FORMAT}; update partita"
        )
    return manifest


def _inside(folder: Path, name: str) -> str:
    """A file's name that an index gives, which stays in the checkpoint's folder."""
    if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
        raise PartitaError(
            f"checkpoint: the index of '{folder}' names '{name}', which is outside the folder: nothing of it was "
            "loaded; use checkpoints of those whom you trust"
        )
    return name


def _damaged(path: Path) -> PartitaError:
    return PartitaError(f"checkpoint: '{path}' is damaged: it is not what was written; load an earlier checkpoint")


def _add_metadata(stored: Stored, metadata: Metadata) -> None:
    stored.paths = dict(metadata.planner_data or {})
    sizes_at = {
        (key, tuple(chunk.offsets)): tuple(chunk.sizes)
        for key, found in metadata.state_dict_metadata.items()
        if isinstance(found, TensorStorageMetadata)
        for chunk in found.chunks
    }
    for index, place in metadata.storage_data.items():
        found = metadata.state_dict_metadata[index.fqn]
        at = (_inside(stored.folder, place.relative_path), place.offset, place.length)
        if isinstance(found, BytesStorageMetadata):
            stored.values[index.fqn] = Chunk(index.fqn, None, *at)
            continue
        shape = tuple(found.size)
        offsets = tuple(index.offset) if index.offset is not None else (0,) * len(shape)
        box = Box(offsets, sizes_at[index.fqn, offsets])
        tensor = stored.tensors.setdefault(index.fqn, StoredTensor(shape, found.properties.dtype))
        tensor.chunks.append(Chunk(index.fqn, box, *at))
