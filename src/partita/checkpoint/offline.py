"""Verification and comparison of checkpoints without an engine.

They need no process group, and never more than one tensor of each checkpoint in memory.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from partita.checkpoint.backend import StoredTensor
from partita.checkpoint.format.manifest import METADATA, has_own_metadata
from partita.checkpoint.format.stored import StoredFiles

NUM_THREADS = 4


def verify(stored: StoredFiles) -> Iterator[str]:
    """Yield a line for each problem in the files.

    Problems are records that are missing, cut off, damaged or cannot be loaded, and elements of tensors that are in no
    record.
    """
    if not has_own_metadata(stored):
        yield f"'{stored.folder / METADATA}' is damaged: torch.distributed.checkpoint would not read it"
    for name, num_bytes in stored.manifest.get("files", {}).items():
        if (path := stored.folder / name).is_file() and path.stat().st_size > num_bytes:  # records show missing bytes
            yield f"'{path}' is damaged: {path.stat().st_size} bytes, but {num_bytes} were written"
    with ThreadPoolExecutor(NUM_THREADS, "partita verify") as pool:
        yield from filter(None, pool.map(stored.problem, dict.fromkeys(stored.chunks())))
    for key, tensor in stored.tensors.items():
        present = sum(chunk.box.num_elements for chunk in tensor.chunks if chunk.box is not None)
        if present != torch.Size(tensor.shape).numel():
            yield f"'{key}': {present} of {torch.Size(tensor.shape).numel()} elements are in the files"


def differences(one: StoredFiles, other: StoredFiles) -> Iterator[tuple[str, str]]:
    """Yield (key, how it differs) for every tensor and value that is not bitwise equal in both."""
    for key in sorted(one.tensors.keys() | other.tensors.keys()):
        first, second = one.tensors.get(key), other.tensors.get(key)
        if first is None or second is None:
            yield key, f"only in '{(one if second is None else other).folder}'"
        elif (first.shape, first.dtype) != (second.shape, second.dtype):
            yield key, f"{_kind(first)} and {_kind(second)}"
        else:
            left, right = one.value(key), other.value(key)
            if not torch.equal(_bits(left), _bits(right)):
                yield key, f"largest difference {(left.double() - right.double()).abs().max().item():.3g}"
    for key in sorted(one.values.keys() | other.values.keys()):
        if key not in one.values or key not in other.values:
            yield key, f"only in '{(one if key in one.values else other).folder}'"
        elif bytes(one.record(one.values[key])) != bytes(other.record(other.values[key])):
            yield key, "values differ"


def _kind(tensor: StoredTensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _bits(value: Tensor) -> Tensor:
    return value.contiguous().view(-1).view(torch.uint8)
