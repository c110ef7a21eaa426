"""Weights in safetensors files, in the layout of Hugging Face: streamed unit by unit, no rank holding more than a file.

A tied parameter is written once, under its first name; buffers that belong to the state dict are written too.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from partita.checkpoint.whole import Whole, _persistent_buffers
from partita.errors import PartitaError

FILE_BYTES = 4 * 2**30
INDEX = "model.safetensors.index.json"


def export(whole: Whole, model: nn.Module, folder: Path, is_writer: bool, file_bytes: int = FILE_BYTES) -> None:
    """Write the model's weights, in the compute dtype, into ``folder``. A collective; rank 0 (``is_writer``) writes.

    The model's ``config`` (a Hugging Face configuration) is saved beside them where it has one.

    Raises:
        PartitaError: the folder cannot be written.
    """
    writer = _Writer(folder, file_bytes) if is_writer else None
    for member, weight in whole.weights(master=False):
        if writer is not None:
            writer.add(member.fqn, weight)
    if writer is None:
        return
    for name, buffer in _persistent_buffers(model):
        writer.add(name, buffer)
    writer.finish()
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        config.save_pretrained(folder)


class _Writer:
    """Collects tensors into files of at most ``file_bytes`` (one tensor may be larger)."""

    def __init__(self, folder: Path, file_bytes: int) -> None:
        self._folder, self._file_bytes = folder, file_bytes
        self._pending: dict[str, Tensor] = {}
        self._files: list[tuple[Path, list[str]]] = []
        self._total = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PartitaError(f"engine.export: cannot make the folder '{folder}': {error}") from error

    def add(self, name: str, tensor: Tensor) -> None:
        if self._pending and self._bytes() + tensor.nbytes > self._file_bytes:
            self._flush()
        self._pending[name] = tensor.detach().cpu().clone().contiguous()

    def _bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._pending.values())

    def _flush(self) -> None:
        path = self._folder / f"part-{len(self._files)}.safetensors"
        try:
            save_file(self._pending, path, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise PartitaError(f"engine.export: cannot write '{path}': {error}") from error
        path.chmod(0o666 & ~_umask())
        self._files.append((path, list(self._pending)))
        self._total += self._bytes()
        self._pending = {}

    def finish(self) -> None:
        """Write what is left and give the files their names: one file, or numbered ones with an index."""
        self._flush()
        num = len(self._files)
        for stale in (*self._folder.glob("model*.safetensors"), self._folder / INDEX):
            stale.unlink(missing_ok=True)
        if num == 1:
            self._files[0][0].rename(self._folder / "model.safetensors")
            return
        where = {}
        for number, (path, names) in enumerate(self._files, 1):
            name = f"model-{number:05d}-of-{num:05d}.safetensors"
            path.rename(self._folder / name)
            where.update(dict.fromkeys(names, name))
        index = {"metadata": {"total_size": self._total}, "weight_map": where}
        (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _umask() -> int:
    """The process's file mode mask: safetensors makes files that only their owner can read."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def open_weights(path: str | Path) -> Callable[[list[str]], Tensor | None]:
    """A source of tensors by name from a safetensors file, or a folder of them.

    Raises:
        PartitaError: there is no such file or folder, or no safetensors file in it, or one is damaged.
    """
    path = Path(path)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise PartitaError(f"weights: '{path}' is no safetensors file and no folder that holds any")
    where: dict[str, Path] = {}
    for file in files:
        for name in _names(file):
            where[name] = file

    def read(names: list[str]) -> Tensor | None:
        name = next((n for n in names if n in where), None)
        if name is None:
            return None
        with safe_open(where[name], framework="pt") as opened:
            tensor = opened.get_tensor(name)
        assert isinstance(tensor, torch.Tensor)
        return tensor

    return read


def _names(file: Path) -> Iterator[str]:
    try:
        with safe_open(file, framework="pt") as opened:
            yield from opened.keys()
    except (OSError, SafetensorError) as error:
        raise PartitaError(f"weights: '{file}' cannot be read as safetensors: {error}") from error
