"""Weights read from safetensors files, tensor by tensor, or piece by piece."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from partita.errors import PartitaError
from partita.plan.box import Box


class Weights:
    """The tensors of a safetensors file, or of a ``folder`` of them.

    Raises:
        PartitaError: there is no such file or folder, or no safetensors file in it, or one is damaged.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        self.title, self.folder = f"weights '{path}'", path if path.is_dir() else None
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files or not all(file.is_file() for file in files):
            raise PartitaError(f"weights: '{path}' is no safetensors file and no folder that holds any")
        self._found = {name: (file, shape) for file in files for name, shape in _contents(file)}

    def find(self, names: Sequence[str]) -> str | None:
        """The first of the names that there is a tensor of."""
        return next((name for name in names if name in self._found), None)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._found[name][1]

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A tensor, or the piece of it that ``box`` says; nothing else of the file is touched."""
        with safe_open(self._found[name][0], framework="pt") as opened:
            if box is None or not box.sizes:
                tensor = opened.get_tensor(name)
            else:
                places = (slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))
                tensor = opened.get_slice(name)[tuple(places)]
        assert isinstance(tensor, torch.Tensor)
        return tensor


def _contents(file: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes."""
    try:
        with safe_open(file, framework="pt") as opened:
            names = list(opened.keys())
            for name in names:
                yield name, tuple(opened.get_slice(name).get_shape())
    except (OSError, SafetensorError) as error:
        raise PartitaError(f"weights: '{file}' cannot be read as safetensors: {error}") from error
