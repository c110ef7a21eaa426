"""Batch check: ranks that compute one model together must be fed the same samples.

Otherwise they would continue training, and nobody would notice.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from partita.comm.several_axes import SeveralAxes
from partita.errors import PartitaError
from partita.memory import accelerator
from partita.plan.mesh_shape import AXES, BATCH_AXES
from partita.sharding.pytree import tensors_in

# The axes along which ranks are fed the same samples.
SAMPLE_AXES = tuple(axis for axis in AXES if axis not in BATCH_AXES)
# A comparison waits for the inputs and the other ranks: after the first forwards, only every EVERY-th is compared.
NUM_FIRST, EVERY = 8, 64

Print = tuple[str, tuple[int, ...], int]


class SameSamples:
    """Comparison of the inputs of the ranks of ``group``. ``data``: their coordinate on the data axis."""

    def __init__(self, group: SeveralAxes, data: int) -> None:
        self._group = group
        self._data = data
        self._number = 0

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Compare a forward's arguments with those of the other ranks.

        Raises:
            PartitaError: on all ranks: they differ. The message names the input and two ranks.
        """
        number, self._number = self._number, self._number + 1
        if self._group.size == 1 or (number >= NUM_FIRST and number % EVERY):
            return
        every: list[list[Print]] = self._group.exchange_objects(list(_prints(args, kwargs)), "a look at the samples")
        for index, other in enumerate(every):
            if other != every[0]:
                raise PartitaError(self._difference(index, every[0], other))

    def _difference(self, index: int, first: list[Print], other: list[Print]) -> str:
        names = [one[0] for one, two in zip(first, other, strict=False) if one != two] or ["the number of inputs"]
        shapes = [{name: shape for name, shape, _ in prints}.get(names[0]) for prints in (first, other)]
        axes = ", ".join(self._group.axes)
        return (
            f"ranks with one data coordinate ({self._data}) were fed different samples: {names[0]} of ranks 0 and "
            f"{index} along {axes} differs (shapes {shapes[0]} and {shapes[1]}). They compute one model together: draw "
            "samples by engine.mesh.coordinate('data') of engine.mesh.size('data'), as a DistributedSampler does with "
            "these as rank and num_replicas, and seed what shuffles or augments by that coordinate"
        )


def _prints(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Print]:
    """Yield the name, shape and checksum of each tensor."""
    named = [*((f"argument {number}", value) for number, value in enumerate(args)), *kwargs.items()]
    for name, value in named:
        for tensor in tensors_in(value):
            yield name if name.startswith("argument") else f"'{name}'", tuple(tensor.shape), _checksum(tensor)


def _checksum(tensor: Tensor) -> int:
    flat = accelerator.read(tensor).contiguous().view(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else 0
