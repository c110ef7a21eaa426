"""Checkpoints without an engine: what is in one, whether it is whole, what differs from another, its weights alone.

No process group, and never more than one tensor in memory.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from partita.checkpoint.export import WeightsWriter, say_left_out
from partita.checkpoint.file import checksum
from partita.checkpoint.names import is_extra_state, model_keys
from partita.checkpoint.stored import METADATA, Chunk, Stored, StoredTensor
from partita.checkpoint.system import read_small
from partita.errors import PartitaError

NUM_THREADS = 4


def verify(stored: Stored) -> Iterator[str]:
    """What is wrong with the files: one line for each record that is missing, cut off, damaged or cannot be loaded, and
    for each tensor with elements that no record holds.
    """
    if stored.manifest and checksum(read_small(stored.folder / METADATA)) != stored.manifest["metadata"]:
        yield f"'{stored.folder / METADATA}' is damaged: torch.distributed.checkpoint would not read it"

    def problem(chunk: Chunk) -> str | None:
        try:
            content = stored.read(chunk)
            if not chunk.is_framed:
                stored.loaded(chunk, content)
        except PartitaError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(NUM_THREADS, "partita verify") as pool:
        yield from filter(None, pool.map(problem, dict.fromkeys(stored.chunks())))
    for key, tensor in stored.tensors.items():
        held = sum(chunk.box.num_elements for chunk in tensor.chunks if chunk.box is not None)
        if held != torch.Size(tensor.shape).numel():
            yield f"'{key}': {held} of {torch.Size(tensor.shape).numel()} elements are there"


def differences(one: Stored, other: Stored) -> Iterator[tuple[str, str]]:
    """(key, how it differs) for every tensor and value that is not the same, bit by bit, in both."""
    for key in sorted(one.tensors.keys() | other.tensors.keys()):
        first, second = one.tensors.get(key), other.tensors.get(key)
        if first is None or second is None:
            yield key, f"only in '{(one if second is None else other).folder}'"
        elif (first.shape, first.dtype) != (second.shape, second.dtype):
            yield key, f"{_kind(first)} and {_kind(second)}"
        else:
            mine, theirs = one.value(key), other.value(key)
            if not torch.equal(_bits(mine), _bits(theirs)):
                yield key, f"largest difference {(mine.double() - theirs.double()).abs().max().item():.3g}"
    for key in sorted(one.values.keys() | other.values.keys()):
        if key not in one.values or key not in other.values:
            yield key, f"only in '{(one if key in one.values else other).folder}'"
        elif bytes(one.read(one.values[key])) != bytes(other.read(other.values[key])):
            yield key, "other values"


def export_weights(
    stored: Stored, folder: Path, dtype: torch.dtype | None, config: Path | None, prefix: str | None = None
) -> int:
    """Write the model's weights as safetensors in Hugging Face's layout; returns how many tensors.

    Args:
        dtype: of floating-point tensors; None: as they are stored.
        config: a folder whose configuration and tokenizer are copied, as ``from_pretrained`` looks for them.
        prefix: what the keys of the weights begin with; None: ``model``, or the only one there is.

    Raises:
        PartitaError: the folder cannot be written, the checkpoint is damaged, or it takes ``prefix`` to choose a copy.
    """
    num, names = 0, model_keys(stored, prefix)
    aliases = {other for others in stored.manifest.get("aliases", {}).values() for other in others}
    with WeightsWriter(folder) as writer:
        for name, key in names.items():
            if key not in aliases:
                value = stored.value(key)
                writer.add(name, value.to(dtype) if dtype is not None and value.is_floating_point() else value)
                num += 1
        say_left_out(name for name in stored.values if is_extra_state(name))
        writer.finish(config)
    if writer.problem is not None:
        raise PartitaError(writer.problem)
    return num


def _kind(tensor: StoredTensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _bits(value: Tensor) -> Tensor:
    return value.contiguous().view(-1).view(torch.uint8)
