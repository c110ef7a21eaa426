"""Export of weights to safetensors files in the layout of Hugging Face, unit by unit. No rank holds more than one file.

A tied parameter is written once, under its first name. Buffers that belong to the state dict are written too. For a
transformers model, the names are those that ``save_pretrained`` writes.

Files are written into a temporary folder and renamed when all of them are durable, so a failed export leaves existing
files unchanged. An export replaces an earlier one: the files that its index names, and ``model.safetensors``.
"""

import json
import os
import secrets
import shutil
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from partita.checkpoint.backend import Stored
from partita.checkpoint.format.system import Lock, is_locked, sync_folder, write_small
from partita.checkpoint.names import model_keys, some_of
from partita.errors import PartitaError
from partita.huggingface.conversion import FileTensors, is_of_transformers
from partita.huggingface.weights import INDEX, SINGLE, read_index
from partita.inspection.full_tensors import FullTensors
from partita.inspection.modules import EXTRA_STATE, extra_states, is_extra_state, persistent_buffers
from partita.layout.parameters import find_quantized_params

FILE_BYTES = 4 * 2**30
# Lock file in the temporary folder, held while the process that writes it runs.
LOCK = "lock"

# Files next to weights in a Hugging Face folder: configuration, tokenizer, chat template, the model's own code.
COMPANION_SUFFIXES = (".json", ".model", ".txt", ".jinja", ".tiktoken", ".py")


def export(
    full: FullTensors,
    model: nn.Module,
    folder: Path,
    companions: Path | None = None,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write the model's weights, in the compute dtype, into ``folder``. A collective; rank 0 writes.

    Configuration and tokenizer files in the folder ``companions`` are copied. A Hugging Face model's own ``config`` and
    ``generation_config`` replace the copies. Modules' extra states (``get_extra_state``) cannot be exported; there is a
    warning.

    Raises:
        PartitaError: the folder cannot be written, or parameters are quantized.
    """
    if quantized := find_quantized_params(model):
        raise PartitaError(
            f"engine.export: '{quantized[0].fqns[0]}' is quantized, and quantized parameters cannot be exported: save "
            "the trainable ones by engine.state_dict(trainable=True), or all of them by the model's own "
            "save_pretrained after engine.close(whole=True)"
        )
    entries = full.buffers_and_extra_states()
    names = {id(info): _kept_name(model, info.fqns) for info in full.infos}
    tensors = FileTensors(model, [*names.values(), *(name for name, _ in persistent_buffers(model))])
    with WeightsWriter(folder, file_bytes) if full.is_first else nullcontext() as writer:
        for info, weight in full.weights(master=False):
            if writer is not None:
                writer.add_all(tensors.of(names[id(info)], weight))
        if writer is not None:
            for name, _ in persistent_buffers(model):
                writer.add_all(tensors.of(name, entries[name]))
            warn_about_extra_states(name for name, _ in extra_states(model))
            writer.finish(companions, [_saved_config(model), getattr(model, "generation_config", None)])
    full.raise_on_all_ranks(writer.problem if writer is not None else None)


def _kept_name(model: nn.Module, fqns: Sequence[str]) -> str:
    """Return the name under which a tied parameter is written. A transformers model may define it."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return next((fqn for fqn in fqns if fqn not in tied), fqns[0])


def _saved_config(model: nn.Module) -> Any:
    """Return the model's configuration, with the architecture and dtype that ``save_pretrained`` adds to it."""
    config: Any = getattr(model, "config", None)
    if is_of_transformers(model):
        config = deepcopy(config)
        config.dtype = str(model.dtype).removeprefix("torch.")
        config.architectures = [type(model).__name__]
    return config


def export_checkpoint(
    stored: Stored, folder: Path, dtype: torch.dtype | None, config: Path | None, prefix: str | None = None
) -> int:
    """Write the weights in a checkpoint into ``folder``; return the number of tensors.

    Args:
        dtype: the dtype of floating-point tensors; None: as they are stored.
        config: a folder whose configuration and tokenizer files are copied, for ``from_pretrained``.
        prefix: the prefix of the keys of the weights; None: ``model``, or the only one there is.

    Raises:
        PartitaError: the folder cannot be written, the checkpoint is damaged, or ``prefix`` is needed to choose a copy.
    """
    names = model_keys(stored, prefix)
    aliases = {other for others in stored.manifest.get("aliases", {}).values() for other in others}
    untied = {name: key for name, key in names.items() if key not in aliases}
    with WeightsWriter(folder) as writer:
        for name, key in untied.items():
            value = stored.value(key)
            writer.add(name, value.to(dtype) if dtype is not None and value.is_floating_point() else value)
        warn_about_extra_states(name for name in stored.values if is_extra_state(name))
        writer.finish(config)
    if writer.problem is not None:
        raise PartitaError(writer.problem)
    return len(untied)


def files_of_weights(folder: Path) -> list[Path]:
    """Return the files in a folder from which ``from_pretrained`` might read weights."""
    patterns = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "adapter_model*.bin")
    return sorted(path for pattern in patterns for path in folder.glob(pattern))


def warn_about_extra_states(names: Iterable[str]) -> None:
    """Warn that extra states are not exported, because safetensors files only hold tensors."""
    modules = [name.removesuffix(EXTRA_STATE).rstrip(".") for name in names]
    if modules:
        warnings.warn(
            f"export: the extra state of {some_of(repr(module) for module in modules)} is not exported, as "
            "safetensors files hold only tensors; checkpoints and engine.state_dict() contain it",
            stacklevel=3,
        )


class WeightsWriter:
    """A context manager that collects tensors into files of at most ``file_bytes`` (one tensor may be larger).

    ``problem`` is the first error. Nothing is written after it, while the other ranks continue. Leaving the context
    removes unfinished files from the folder.
    """

    def __init__(self, folder: Path, file_bytes: int = FILE_BYTES) -> None:
        self._folder = folder
        self._file_bytes = file_bytes
        self._pending: dict[str, Tensor] = {}
        self._files: list[tuple[Path, list[str]]] = []
        self._total = self._num_bytes = 0
        self.problem: str | None = None
        self._temporary = folder / f".export-{secrets.token_hex(4)}"
        self._lock: Lock | None = None
        with self._recording("make the folder"):
            folder.mkdir(parents=True, exist_ok=True)
            for stale in folder.glob(".export-*"):
                if not is_locked(stale / LOCK):
                    shutil.rmtree(stale, ignore_errors=True)
            self._temporary.mkdir()
            self._lock = Lock(self._temporary / LOCK)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._temporary, ignore_errors=True)
        if self._lock is not None:
            self._lock.release()

    @contextmanager
    def _recording(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError, PartitaError) as error:
            self.problem = f"engine.export: cannot {what} '{self._folder}': {error}"

    def add(self, name: str, tensor: Tensor) -> None:
        if self._pending and self._num_bytes + tensor.nbytes > self._file_bytes:
            self._flush()
        if self.problem is None:
            self._pending[name] = tensor.detach().cpu().clone().contiguous()
            self._num_bytes += tensor.nbytes

    def add_all(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            self.add(name, tensor)

    def _flush(self) -> None:
        path = self._temporary / f"{len(self._files)}.safetensors"
        if self.problem is None:
            with self._recording("write into"):
                save_file(self._pending, path, metadata={"format": "pt"})
                path.chmod(0o666 & ~_umask())
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        self._files.append((path, list(self._pending)))
        self._total += self._num_bytes
        self._pending = {}
        self._num_bytes = 0

    def finish(self, companions: Path | None = None, configs: Sequence[Any] = ()) -> None:
        """Write the remaining tensors and the files next to weights, and give all files their final names."""
        self._flush()
        if self.problem is None:
            with self._recording("write into"):
                self._name_files()
                if companions is not None:
                    self._copy(companions)
                for config in configs:
                    if hasattr(config, "save_pretrained"):
                        self._save(config)

    def _copy(self, companions: Path) -> None:
        if companions.resolve() == self._folder.resolve():
            return
        for path in companions.iterdir():
            if path.suffix in COMPANION_SUFFIXES and path.is_file() and ".safetensors" not in path.name:
                shutil.copyfile(path, self._folder / path.name)  # without its mode: the copy must be writable

    def _save(self, config: Any) -> None:
        """Save a configuration. If transformers rejects it, warn instead of losing the weights."""
        try:
            config.save_pretrained(self._folder)
        except OSError:
            raise
        except Exception as error:
            warnings.warn(f"engine.export: the {type(config).__name__} was not saved: {error}", stacklevel=2)

    def _name_files(self) -> None:
        """Rename the files to one file, or to numbered ones with an index. No index ever names files of two exports."""
        num, index = len(self._files), self._folder / INDEX
        names = (
            [f"model-{number:05d}-of-{num:05d}.safetensors" for number in range(1, num + 1)] if num > 1 else [SINGLE]
        )
        earlier = {SINGLE, *read_index(self._folder).values()}
        if num > 1:
            where = {tensor: name for name, (_, tensors) in zip(names, self._files, strict=True) for tensor in tensors}
            content = {"metadata": {"total_size": self._total}, "weight_map": where}
            write_small(self._temporary / INDEX, (json.dumps(content, indent=2) + "\n").encode())
            if not earlier.isdisjoint(names):
                index.unlink(missing_ok=True)
        for name, (path, _) in zip(names, self._files, strict=True):
            path.rename(self._folder / name)
        if num > 1:
            (self._temporary / INDEX).rename(index)
        else:
            index.unlink(missing_ok=True)
        for stale in earlier.difference(names):
            (self._folder / stale).unlink(missing_ok=True)
        sync_folder(self._folder)


def _umask() -> int:
    """Return the process's file mode mask.

    It is needed because safetensors creates files that only their owner can read.
    """
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
