"""Partition of inputs that are equal on several ranks: each rank stores a shard, which is all-gathered for backward.

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
# Not the connections of activations, which the collectives inside backward use at the same time.
_CONNECTIONS = "parameters"


class InputShards:
    """Equal shards of the bytes of a tensor, one for each rank of ``group`` (which may have only one rank)."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def shard_bytes(self, num_bytes: int) -> int:
        """Return the bytes of one shard, rounded up."""
        return -(-num_bytes // self._group.size)

    def full_bytes(self, num_bytes: int) -> int:
        """Return the bytes of all shards."""
        return self.shard_bytes(num_bytes) * self._group.size

    def own(self, flat: Tensor) -> Tensor:
        """Return this rank's shard of the bytes ``[n]``. If they do not divide evenly, the last shards are shorter."""
        shard = self.shard_bytes(flat.numel())
        return flat[shard * self._group.index : shard * (self._group.index + 1)]

    def gather(self, whole: Tensor) -> None:
        """All-gather the shards into ``whole`` ``[full_bytes]``, which already contains this rank's shard."""
        if self._group.size > 1:
            self._group.all_gather(whole, self.own(whole), PURPOSE, connections=_CONNECTIONS).wait()


class Partition:
    """Shards inputs that are equal on the ranks of ``group``, and keeps other inputs full.

    Inputs differ if they are already split, as they may be under tensor parallelism.

    Args:
        single: a group of only this rank.
    """

    def __init__(self, group: Group, single: Group) -> None:
        self._group = group
        self._sharded = InputShards(group)
        self._full = InputShards(single)
        self._is_equal = dict[tuple[str, int], bool]()

    def shards(self, module: str, place: int, flat: Tensor) -> InputShards:
        """Return the sharding of a module's input.

        At the first call of each module, the ranks compare the bytes of the input.

        Args:
            place: the index of the input among the module's arguments.
            flat: the bytes of the input.
        """
        if self._group.size == 1:
            return self._full
        if (module, place) not in self._is_equal:
            self._is_equal[module, place] = self._is_equal_on_ranks(flat)
            if not self._is_equal[module, place]:
                warnings.warn(
                    f"{KEY}: the inputs of '{module}' differ between the ranks of {', '.join(self._group.axes)} and "
                    "are not partitioned; to partition inputs, name in activations.checkpoint a module that contains "
                    "it",
                    stacklevel=2,
                )
        return self._sharded if self._is_equal[module, place] else self._full

    def _is_equal_on_ranks(self, flat: Tensor) -> bool:
        digest = hashlib.blake2b(accelerator.read(flat).numpy().data, digest_size=7).digest()
        number = torch.tensor([int.from_bytes(digest, "big")], dtype=torch.int64, device="cpu")
        all_numbers = self._group.exchange(number, KEY).wait()
        return bool((all_numbers == number).all())
