"""Weights read from safetensors files, tensor by tensor or box by box."""

import json
from collections.abc import Container, Iterator, KeysView, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from partita.errors import PartitaError
from partita.table.box import Box

# Hugging Face's names for the only file of weights in a folder, and for the index of several files.
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Weights:
    """The tensors of a safetensors file, or of the safetensors files in a ``folder``.

    In a folder these are the files that its index names, or else ``model.safetensors``, or else the only file.

    Raises:
        PartitaError: there is no such file or folder, no safetensors file in it, or several without an index; one is
            damaged.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        self.title = f"weights '{path}'"
        self.folder = path if path.is_dir() else None
        where = read_index(path)
        files = [path / name for name in sorted(set(where.values()))] or [_only_file(path)]
        self._found = {
            name: (file, shape)
            for file in files
            for name, shape in _contents(file)
            if not where or where.get(name) == file.name
        }

    @property
    def names(self) -> KeysView[str]:
        """The names of all tensors."""
        return self._found.keys()

    def find(self, names: Sequence[str]) -> str | None:
        """Return the first of the names for which there is a tensor; None if there is none."""
        return next((name for name in names if name in self._found), None)

    def unused(self, names: Container[str]) -> list[str]:
        """Return the tensors that have none of these names."""
        return [name for name in self._found if name not in names]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._found[name][1]

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """Read a tensor, or the ``box`` of it. Nothing else in the file is read."""
        with safe_open(self._found[name][0], framework="pt") as opened:
            if box is None or not box.sizes:
                tensor = opened.get_tensor(name)
            else:
                tensor = opened.get_slice(name)[box.slices]
        assert isinstance(tensor, torch.Tensor)
        return tensor


def read_index(folder: Path) -> Mapping[str, str]:
    """Return the file of each tensor from the index in a folder; empty if there is no index.

    Raises:
        PartitaError: the index is damaged.
    """
    path = folder / INDEX
    if not path.is_file():
        return {}
    try:
        where = json.loads(path.read_text())["weight_map"]
        if where and all(isinstance(file, str) and Path(file).name == file for file in where.values()):
            return dict(where)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass
    raise PartitaError(
        f"weights: '{path}' is not an index of safetensors files: replace it by a complete one, or remove it"
    )


def _only_file(path: Path) -> Path:
    if not path.is_dir():
        files = [path]
    elif (path / SINGLE).is_file():
        files = [path / SINGLE]
    else:
        files = sorted(file for file in path.glob("*.safetensors") if not file.name.startswith("."))
    if len(files) > 1:
        raise PartitaError(
            f"weights: '{path}' holds {len(files)} safetensors files ('{files[0].name}', '{files[1].name}', ...) and "
            f"no {INDEX} that lists the ones of one model: name one of the files, or add the index"
        )
    if not files or not files[0].is_file():
        raise PartitaError(f"weights: '{path}' is not a safetensors file, nor a folder that holds any")
    return files[0]


def _contents(file: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of each tensor in a file."""
    try:
        with safe_open(file, framework="pt") as opened:
            names = list(opened.keys())
            for name in names:
                yield name, tuple(opened.get_slice(name).get_shape())
    except (OSError, SafetensorError) as error:
        raise PartitaError(f"weights: '{file}' cannot be read as safetensors: {error}") from error
