"""The index of a checkpoint of torch.distributed.checkpoint (``.metadata``), read without running what is in it.

The index is a pickle, which can name any function to be called with any arguments. Those that
torch.distributed.checkpoint writes name its own classes and a few of torch's: no other name is looked up.
"""

import io
import pickle
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import metadata as sharded_tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata

from partita.checkpoint.system import read_small
from partita.errors import PartitaError

_ADMITTED = {
    (module.__name__, name): getattr(module, name)
    for module, names in (
        (
            metadata,
            "Metadata MetadataIndex StorageMeta TensorStorageMetadata TensorProperties ChunkStorageMetadata "
            "BytesStorageMetadata _MEM_FORMAT_ENCODING",
        ),
        (filesystem, "_StorageInfo _StoragePrefix"),
        (sharded_tensor, "TensorProperties MEM_FORMAT_ENCODING"),  # as torch 2.2 and earlier wrote them
        (torch.serialization, "_get_layout"),
        (torch, "Size"),
    )
    for name in names.split()
}
# Where the checkpoint was when it was written, which nobody asks for: no path that could touch the disk is made of it.
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, path: Path) -> None:
        super().__init__(io.BytesIO(content))
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ADMITTED:
            return _ADMITTED[module, name]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return PurePath
        raise PartitaError(
            f"checkpoint: '{self._path}' names '{module}.{name}', which torch.distributed.checkpoint does not write "
            "and which could run any code: nothing of it was loaded; use checkpoints of those whom you trust"
        )


def read_metadata(path: Path) -> Metadata:
    """The index at ``path``.

    Raises:
        PartitaError: it cannot be read, is damaged, or names what torch.distributed.checkpoint does not write.
    """
    content = read_small(path)
    try:
        found = _Unpickler(content, path).load()
    except PartitaError:
        raise
    except Exception as error:  # bytes that are no pickle raise anything
        raise PartitaError(f"checkpoint: '{path}' is damaged: it is no index ({error}); load an earlier one") from error
    if not isinstance(found, Metadata):
        raise PartitaError(
            f"checkpoint: '{path}' holds a {type(found).__name__}: expected an index of torch.distributed.checkpoint"
        )
    return found
