"""Weights in safetensors files, in the layout of Hugging Face: streamed unit by unit, no rank holding more than a file.

A tied parameter is written once, under its first name; buffers that belong to the state dict are written too.
"""

import json
import os
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from partita.checkpoint.whole import Whole, persistent_buffers

FILE_BYTES = 4 * 2**30
INDEX = "model.safetensors.index.json"


# Beside weights, in a folder of Hugging Face's: configuration, tokenizer, chat template, code of the model's own.
BESIDE_SUFFIXES = (".json", ".model", ".txt", ".jinja", ".tiktoken", ".py")


def export(
    whole: Whole,
    model: nn.Module,
    folder: Path,
    beside: Path | None = None,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write the model's weights, in the compute dtype, into ``folder``. A collective; rank 0 writes.

    Configuration and tokenizer in the folder ``beside`` are copied; what the model itself knows of its configuration
    (a Hugging Face model's ``config`` and ``generation_config``) replaces them.

    Raises:
        PartitaError: the folder cannot be written.
    """
    writer = WeightsWriter(folder, file_bytes) if whole.is_first else None
    for member, weight in whole.weights(master=False):
        if writer is not None:
            writer.add(member.fqn, weight)
    if writer is not None:
        for name, buffer in persistent_buffers(model):
            writer.add(name, buffer)
        writer.finish(beside, [getattr(model, "config", None), getattr(model, "generation_config", None)])
    whole.raise_together(writer.problem if writer is not None else None)


class WeightsWriter:
    """Collects tensors into files of at most ``file_bytes`` (one tensor may be larger).

    ``problem`` is the first that came up; nothing is written after it, while the other ranks go on.
    """

    def __init__(self, folder: Path, file_bytes: int = FILE_BYTES) -> None:
        self._folder, self._file_bytes = folder, file_bytes
        self._pending: dict[str, Tensor] = {}
        self._files: list[tuple[Path, list[str]]] = []
        self._total = self._num_bytes = 0
        self.problem: str | None = None
        with self._noting("make the folder"):
            folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def _noting(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            self.problem = f"engine.export: cannot {what} '{self._folder}': {error}"

    def add(self, name: str, tensor: Tensor) -> None:
        if self._pending and self._num_bytes + tensor.nbytes > self._file_bytes:
            self._flush()
        if self.problem is None:
            self._pending[name] = tensor.detach().cpu().clone().contiguous()
            self._num_bytes += tensor.nbytes

    def _flush(self) -> None:
        path = self._folder / f"part-{len(self._files)}.safetensors"
        if self.problem is None:
            with self._noting("write into"):
                save_file(self._pending, path, metadata={"format": "pt"})
                path.chmod(0o666 & ~_umask())
        self._files.append((path, list(self._pending)))
        self._total += self._num_bytes
        self._pending, self._num_bytes = {}, 0

    def finish(self, beside: Path | None = None, configs: Sequence[Any] = ()) -> None:
        """Write what is left and what stands beside weights, and give the files their names."""
        self._flush()
        if self.problem is None:
            with self._noting("write into"):
                self._name_files()
                if beside is not None:
                    self._copy(beside)
                for config in configs:
                    if hasattr(config, "save_pretrained"):
                        self._save(config)

    def _copy(self, beside: Path) -> None:
        if beside.resolve() == self._folder.resolve():
            return
        for path in beside.iterdir():
            if path.suffix in BESIDE_SUFFIXES and path.is_file() and ".safetensors" not in path.name:
                shutil.copyfile(path, self._folder / path.name)  # whoever may not write the one may write the other

    def _save(self, config: Any) -> None:
        """Weights are worth more than a configuration that transformers finds wrong."""
        try:
            config.save_pretrained(self._folder)
        except OSError:
            raise
        except Exception as error:
            warnings.warn(f"engine.export: the {type(config).__name__} was not saved: {error}", stacklevel=2)

    def _name_files(self) -> None:
        """One file, or numbered ones with an index."""
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
