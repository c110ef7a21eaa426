"""Partition of inputs that are equal on several ranks: each rank keeps a part, and all gather it ahead of backward.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, section 6.1
(Pa).
"""

import hashlib
import warnings

import torch
from torch import Tensor

from partita.comm.group import Group
from partita.memory import accelerator

KEY = "activations.partition"
PURPOSE = "activations"
# Backward itself exchanges on the connections of activations, meanwhile.
_CONNECTIONS = "parameters"


class Parts:
    """Equal parts of the bytes of a tensor, one for each rank of ``group``; a group of one rank has all of them."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def part_bytes(self, num_bytes: int) -> int:
        """Return the bytes of one part, rounded up."""
        return -(-num_bytes // self._group.size)

    def whole_bytes(self, num_bytes: int) -> int:
        """Return the bytes of all parts together."""
        return self.part_bytes(num_bytes) * self._group.size

    def own(self, flat: Tensor) -> Tensor:
        """Return this rank's part of the bytes ``[n]``; if they do not divide evenly, the last parts are shorter."""
        part = self.part_bytes(flat.numel())
        return flat[part * self._group.index : part * (self._group.index + 1)]

    def complete(self, whole: Tensor) -> None:
        """All-gather the other ranks' parts into ``whole`` ``[whole_bytes]``, which contains this rank's part."""
        if self._group.size > 1:
            self._group.all_gather(whole, self.own(whole), PURPOSE, connections=_CONNECTIONS).wait()


class Partition:
    """Splits inputs that are equal on the ranks of ``group``, and leaves others as they are.

    Inputs differ where they are split already, as those of layers under tensor parallelism may be.

    Args:
        alone: the group of this rank.
    """

    def __init__(self, group: Group, alone: Group) -> None:
        self._group = group
        self._split = Parts(group)
        self._whole = Parts(alone)
        self._alike = dict[tuple[str, int], bool]()

    def parts(self, module: str, place: int, flat: Tensor) -> Parts:
        """Return how the bytes are split that a module's call is given at a place.

        At the first call of each module the ranks compare the bytes to find whether they are equal.
        """
        if self._group.size == 1:
            return self._whole
        if (module, place) not in self._alike:
            self._alike[module, place] = self._are_alike(flat)
            if not self._alike[module, place]:
                warnings.warn(
                    f"{KEY}: the ranks of {', '.join(self._group.axes)} have different inputs of '{module}', of which "
                    "each keeps its own whole; name modules around it in activations.checkpoint to have it split",
                    stacklevel=2,
                )
        return self._split if self._alike[module, place] else self._whole

    def _are_alike(self, flat: Tensor) -> bool:
        digest = hashlib.blake2b(accelerator.read(flat).numpy().data, digest_size=7).digest()
        number = torch.tensor([int.from_bytes(digest, "big")], dtype=torch.int64, device="cpu")
        every = self._group.exchange(number, KEY).wait()
        return bool((every == number).all())
