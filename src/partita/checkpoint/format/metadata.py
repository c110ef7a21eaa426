"""The index of torch.distributed.checkpoint (``.metadata``): writing it, and reading it without executing its contents.

The index is a pickle, which can name any function to be called with any arguments. An index that
torch.distributed.checkpoint writes names only its own classes and a few of torch's. No other name is looked up.
"""

import io
import pickle
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import metadata as sharded_tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from partita.checkpoint.backend import Chunk, Stored, StoredTensor
from partita.checkpoint.format.system import inside_folder, read_small
from partita.checkpoint.names import path_of
from partita.errors import PartitaError
from partita.table.box import Box


class _Sealed(type):
    """A metaclass that forbids setting class attributes. A pickle could otherwise change the classes that it names, for
    the whole process.
    """

    def __setattr__(cls, name: str, value: object) -> None:
        raise AttributeError(f"it sets '{name}' of the class {cls.__name__}")


def _as_callable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a separate function that calls ``function``, so that a pickle cannot change attributes of the original."""
    return lambda *args: function(*args)


def _named(module: ModuleType, names: str) -> dict[tuple[str, str], Any]:
    return {(module.__name__, name): getattr(module, name) for name in names.split()}


_ADMITTED = {
    place: _Sealed(made.__name__, (made,), {})
    for place, made in {
        **_named(
            metadata,
            "Metadata MetadataIndex StorageMeta TensorStorageMetadata TensorProperties ChunkStorageMetadata "
            "BytesStorageMetadata",
        ),
        **_named(filesystem, "_StorageInfo _StoragePrefix"),
        **_named(sharded_tensor, "TensorProperties"),  # as torch 2.2 and earlier wrote them
    }.items()
} | {
    place: _as_callable(made)
    for place, made in {
        **_named(metadata, "_MEM_FORMAT_ENCODING"),
        **_named(sharded_tensor, "MEM_FORMAT_ENCODING"),
        **_named(torch.serialization, "_get_layout"),
    }.items()
}
_SIZE = ("torch", "Size")
# Types of the path at which the checkpoint was written. The path is not used, so a pure path, which has no access to
# the disk, replaces it.
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, path: Path) -> None:
        super().__init__(io.BytesIO(content))
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ADMITTED:
            return _ADMITTED[module, name]
        if (module, name) == _SIZE:
            return torch.Size
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return _as_callable(PurePath)
        raise PartitaError(
            f"checkpoint: '{self._path}' names '{module}.{name}', which torch.distributed.checkpoint does not write "
            "and which could run any code: nothing was loaded; use only checkpoints from sources that you trust"
        )


def read_metadata(path: Path) -> Metadata:
    """Read the index at ``path``.

    Raises:
        PartitaError: it cannot be read, is damaged, or names something that torch.distributed.checkpoint does not
            write.
    """
    content = read_small(path)
    try:
        found = _Unpickler(content, path).load()
    except PartitaError:
        raise
    except Exception as error:  # invalid pickles raise exceptions of any type
        raise PartitaError(
            f"checkpoint: '{path}' is damaged: it is not an index ({error}); load an earlier checkpoint"
        ) from error
    if not isinstance(found, Metadata):
        raise PartitaError(
            f"checkpoint: '{path}' holds a {type(found).__name__}: expected an index of torch.distributed.checkpoint"
        )
    return found


def add_metadata(stored: Stored, metadata: Metadata, below: str = "") -> None:
    """Add the entries of an index to ``stored``. ``below``: the subfolder of the checkpoint's folder with its files."""
    stored.paths |= metadata.planner_data or {}
    sizes_at = {
        (key, tuple(chunk.offsets)): tuple(chunk.sizes)
        for key, found in metadata.state_dict_metadata.items()
        if isinstance(found, TensorStorageMetadata)
        for chunk in found.chunks
    }
    for index, place in metadata.storage_data.items():
        found = metadata.state_dict_metadata[index.fqn]
        file = inside_folder(stored.folder, place.relative_path)
        at = (f"{below}/{file}" if below else file, place.offset, place.length)
        if isinstance(found, BytesStorageMetadata):
            stored.values[index.fqn] = Chunk(index.fqn, None, *at)
            continue
        shape = tuple(found.size)
        offsets = tuple(index.offset) if index.offset is not None else (0,) * len(shape)
        box = Box(offsets, sizes_at[index.fqn, offsets])
        tensor = stored.tensors.setdefault(index.fqn, StoredTensor(shape, found.properties.dtype))
        tensor.chunks.append(Chunk(index.fqn, box, *at))


def metadata_of(stored: Stored) -> bytes:
    """Return the index of a partita checkpoint in the format of torch.distributed.checkpoint."""
    # Equal values are the same object, which pickle writes once.
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
    nested = {key: path_of(key) for key in described}
    return pickle.dumps(Metadata(described, planner_data=nested, storage_data=places))
