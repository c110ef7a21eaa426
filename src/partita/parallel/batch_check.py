"""Batch check: ranks that compute one model together must get the same batch.

With different batches training would continue without an error, and compute wrong gradients.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from partita.comm.several_axes import SeveralAxes
from partita.errors import PartitaError
from partita.memory import accelerator
from partita.sharding.pytree import tensors_in
from partita.sharding.unit_events import levels
from partita.table.mesh_shape import AXES, BATCH_AXES

# The axes along which ranks get the same batch.
SAME_BATCH_AXES = tuple(axis for axis in AXES if axis not in BATCH_AXES)
# A check reads the inputs on the host and waits for all ranks: after the first forwards, only each EVERY-th is checked.
NUM_FIRST, EVERY = 8, 64

Fingerprint = tuple[str, tuple[int, ...], int]


class BatchCheck:
    """Comparison of the batches of the ranks of ``group``, whose coordinate on the data axis is ``data``."""

    def __init__(self, group: SeveralAxes, data: int) -> None:
        self._group = group
        self._data = data
        self._number = 0

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Compare the arguments of a forward with those of the other ranks.

        Raises:
            PartitaError: the arguments differ. Raised on all ranks; the message names the input and two ranks.
        """
        number, self._number = self._number, self._number + 1
        if self._group.size == 1 or (number >= NUM_FIRST and number % EVERY):
            return
        all_fingerprints: list[list[Fingerprint]] = self._group.exchange_objects(
            list(_fingerprints(args, kwargs)), "the batch check"
        )
        for index, other in enumerate(all_fingerprints):
            if other != all_fingerprints[0]:
                raise PartitaError(self._difference(index, all_fingerprints[0], other))

    def _difference(self, index: int, first: list[Fingerprint], other: list[Fingerprint]) -> str:
        names = [one[0] for one, two in zip(first, other, strict=False) if one != two] or ["the number of inputs"]
        shapes = [{name: shape for name, shape, _ in fingerprints}.get(names[0]) for fingerprints in (first, other)]
        axes = ", ".join(self._group.axes)
        return (
            f"ranks with one data coordinate ({self._data}) got different batches: {names[0]} of ranks 0 and "
            f"{index} along {axes} differs (shapes {shapes[0]} and {shapes[1]}). These ranks compute one model "
            "together and need the same samples: pass rank=engine.mesh.coordinate('data') and "
            "num_replicas=engine.mesh.size('data') to the DistributedSampler, and seed shuffling and augmentation by "
            "that coordinate"
        )


def _fingerprints(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Fingerprint]:
    """Yield the name, shape and checksum of each tensor."""
    named = [*((f"argument {number}", value) for number, value in enumerate(args)), *kwargs.items()]
    for name, value in named:
        for tensor in tensors_in(value):
            yield name if name.startswith("argument") else f"'{name}'", tuple(tensor.shape), _checksum(tensor)


def _checksum(tensor: Tensor) -> int:
    *_, plain = levels(tensor)
    flat = accelerator.read(plain).contiguous().view(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else 0
