"""Choice of the method for attention over a split sequence: a pure function of its sizes.

The ranks can exchange positions for heads by all-to-all (S. A. Jacobs et al., "DeepSpeed Ulysses", 2023). Each rank can
all-gather the keys and values for its own queries (A. Dubey et al., "The Llama 3 Herd of Models", 2024, section 3.3.2).
Keys and values can be passed around a ring while each rank accumulates the results of its queries (H. Liu et al., "Ring
Attention", 2023). With a sparse pattern, each rank can gather only the blocks of keys and values that its queries read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from partita.table.place import even

ALL_TO_ALL, GATHER_KEYS, GATHER_BLOCKS, RING = "heads", "keys", "blocks", "ring"
# The largest size of the gathered keys and values of one attention on a rank. Each layer keeps them for backward.
MAX_GATHERED_BYTES = 1 << 30


@dataclass(frozen=True)
class Sizes:
    """The sizes of one attention.

    Attributes:
        heads: the number of query heads.
        key_heads: the number of key and value heads, which the query heads share evenly.
        head_dim: elements of a query or key head.
        value_dim: elements of a value head.
        positions: the number of positions of each rank.
        batch: the number of samples.
        itemsize: bytes of a number.
        reads: with a sparse pattern, the number of positions, in all samples, that a rank (first index) reads from
            another rank (second index).
    """

    heads: int
    key_heads: int
    head_dim: int
    value_dim: int
    positions: tuple[int, ...]
    batch: int = 1
    itemsize: int = 4
    reads: tuple[tuple[int, ...], ...] | None = None

    @cached_property
    def own_heads(self) -> tuple[tuple[int, ...], ...]:
        """Each rank's query heads, in order."""
        return tuple(tuple(range(start, stop)) for start, stop in even(self.heads, len(self.positions)))

    @cached_property
    def own_key_heads(self) -> tuple[tuple[int, ...], ...]:
        """The key heads that each rank's query heads read; repeated for each query head if not shared evenly."""
        group = self.heads // self.key_heads
        return tuple(_shared_evenly([head // group for head in own]) for own in self.own_heads)

    def sent_bytes(self, method: str, *, backward: bool = False) -> tuple[int, ...]:
        """Return the bytes that each rank sends in forward, or in backward.

        In backward a rank sends the gradients of the tensors that it received in forward. In a ring, keys and values
        are sent again, together with their fp32 gradients.
        """
        element, length, num = self.batch * self.itemsize, sum(self.positions), len(self.positions)
        per_position = (self.head_dim + self.value_dim) * element
        if method == RING:
            whole = self.key_heads * (self.head_dim + self.value_dim) * self.batch
            if backward:
                return (length * whole * (self.itemsize + 4),) * num
            return tuple((length - self.positions[(rank + 1) % num]) * whole * self.itemsize for rank in range(num))
        if method in (GATHER_KEYS, GATHER_BLOCKS):
            read = self._read_from_others
            counts = [sum(of_rank) for of_rank in (read if backward else zip(*read, strict=True))]
            return tuple(count * self.key_heads * per_position // self.batch for count in counts)
        sent = []
        for rank, own in enumerate(self.positions):
            queries, keys = len(self.own_heads[rank]), len(self.own_key_heads[rank])
            exchanged = (self.heads - queries) * own, queries * (length - own)  # sent before attention, and after it
            out_of, into = (self.value_dim, self.head_dim) if backward else (self.head_dim, self.value_dim)
            moved = keys * (length - own) if backward else (sum(map(len, self.own_key_heads)) - keys) * own
            sent.append((exchanged[0] * out_of + exchanged[1] * into) * element + moved * per_position)
        return tuple(sent)

    @property
    def _read(self) -> tuple[tuple[int, ...], ...]:
        everything = tuple(self.batch * own for own in self.positions)
        return (everything,) * len(self.positions) if self.reads is None else self.reads

    @property
    def _read_from_others(self) -> list[list[int]]:
        return [[0 if of == rank else n for of, n in enumerate(row)] for rank, row in enumerate(self._read)]

    @property
    def gathered_bytes(self) -> int:
        """The bytes of the keys and values that a rank reads; the maximum over the ranks."""
        per_position = self.key_heads * (self.head_dim + self.value_dim)
        return max(map(sum, self._read)) * per_position * self.itemsize

    @property
    def mask_bytes(self) -> int:
        """The bytes of a mask of a rank's queries over all keys; the maximum over the ranks."""
        return max(self.positions) * sum(self.positions) * self.itemsize


def _shared_evenly(used: Sequence[int]) -> tuple[int, ...]:
    counts = {used.count(head) for head in used}
    return tuple(dict.fromkeys(used)) if len(counts) == 1 else tuple(used)


def choose(
    sizes: Sizes,
    *,
    needs_all_heads: bool = False,
    ring: bool = True,
    causal: bool = False,
    max_gathered_bytes: int = MAX_GATHERED_BYTES,
) -> str:
    """Return the method that fits and sends fewer bytes.

    :data:`ALL_TO_ALL` needs a query head for each rank. :data:`GATHER_KEYS` (:data:`GATHER_BLOCKS` with a sparse
    pattern) needs memory for the gathered keys and values. :data:`RING` is chosen if neither fits.

    Args:
        needs_all_heads: each rank needs all heads, because the attention reads other tensors by head.
        ring: attention can be accumulated over pieces of the keys. If not, and the heads cannot be split, keys are
            gathered at any size.
        causal: the attention is causal without a mask. Over gathered keys it would need a mask of positions x
            positions, which each layer keeps for backward. All-to-all needs none, and is chosen if the heads fit.
    """
    heads_fit = sizes.heads >= len(sizes.positions) and not needs_all_heads
    kept_bytes = sizes.gathered_bytes + (sizes.mask_bytes if causal else 0)
    keys_fit = kept_bytes <= max_gathered_bytes or not (ring or heads_fit)
    keys = GATHER_KEYS if sizes.reads is None else GATHER_BLOCKS
    if heads_fit and keys_fit and not causal:
        return keys if sum(sizes.sent_bytes(keys)) < sum(sizes.sent_bytes(ALL_TO_ALL)) else ALL_TO_ALL
    return ALL_TO_ALL if heads_fit else keys if keys_fit else RING
