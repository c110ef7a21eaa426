"""Block-sparse attention with sequence parallelism: each rank computes its own queries, and receives only the blocks of
keys and values that they read. If it sends fewer bytes, ranks exchange heads for positions instead.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from partita.attention.batch_blocks import BatchBlocks, RecentResults, blocks_of_batch
from partita.attention.block_pairs import BlockPairs, block_pairs
from partita.attention.layout import Layout
from partita.attention.segments import Sizes, segments_of
from partita.errors import PartitaError
from partita.parallel.sequence import choose
from partita.parallel.sequence.attention import AttentionCall, attention_by_heads
from partita.parallel.sequence.exchange import exchange_rows
from partita.parallel.sequence.slices import Slices


@dataclass(frozen=True)
class SlicedBatch:
    """A batch whose sequence is sliced over ranks. The fields are arguments of
    :func:`partita.attention.block_sparse`.
    """

    layout: Layout
    slices: Slices
    seen: Tensor | None
    documents: Tensor | None

    def check(self, q: Tensor, k: Tensor) -> None:
        """Check that q and k have this rank's positions, and ``seen`` and ``documents`` have all positions.

        Raises:
            PartitaError: they do not.
        """
        own, whole = self.slices.num_own, [q.shape[0], self.slices.length]
        where = f"where this rank has {own} of {self.slices.length} positions (parallel.sequence)"
        if q.shape[2] != own or k.shape[2] != own:
            raise PartitaError(
                f"block-sparse attention from {q.shape[2]} queries to {k.shape[2]} keys, {where}: only self-attention "
                "within the input of a block is supported"
            )
        for name, given in (("seen", self.seen), ("documents", self.documents)):
            if given is not None and list(given.shape) != whole:
                raise PartitaError(
                    f"block_sparse: {name}: expected {whole} (samples, all positions); got {list(given.shape)}, {where}"
                )


@dataclass(frozen=True, eq=False)
class KeyFetch:
    """The blocks of keys that this rank's queries read, and the rows that the ranks send each other.

    Attributes:
        batch_blocks: the block pairs over the blocks of keys that this rank reads.
        counts: for each rank, the numbers of positions that it reads from each rank; samples with the same mask are
            counted once.
        sent: for each rank, the rows of this rank [samples x own positions] that it reads.
        places: for each rank, the indices in [samples x blocks x block] of the rows that are received from it.
    """

    batch_blocks: BatchBlocks
    counts: tuple[tuple[int, ...], ...]
    sent: list[Tensor]
    places: list[Tensor]


_recent = RecentResults[KeyFetch]()


def sliced_attention(batch: SlicedBatch, q: Tensor, k: Tensor, v: Tensor, dropout: float, scale: float) -> Tensor:
    """Compute the attention of this rank's positions. Shapes are those of :func:`partita.attention.block_sparse`."""
    batch.check(q, k)
    slices, layout = batch.slices, batch.layout
    num_samples = 1 if batch.seen is None and batch.documents is None else q.shape[0]
    whole, call = Sizes(num_samples, slices.length, slices.length), AttentionCall(q, k, v, None, False)

    def own(call: AttentionCall) -> Tensor:
        batch_blocks = blocks_of_batch(layout, whole, batch.seen, batch.documents)
        return batch_blocks.attention(call.query, call.key, call.value, dropout, scale)

    if slices.group.size == 1:
        return own(call)
    kind = layout, num_samples, slices.ranges, slices.group.index, q.device
    found = _recent.found(kind, (batch.seen, batch.documents), lambda: key_fetch(batch, num_samples, q.device))
    samples_per_mask = q.shape[0] // num_samples
    positions = tuple(stop - start for start, stop in slices.ranges)
    sizes = choose.Sizes(
        q.shape[1],
        k.shape[1],
        *(k.shape[3], v.shape[3], positions, q.shape[0], q.itemsize),
        reads=tuple(tuple(samples_per_mask * count for count in of_rank) for of_rank in found.counts),
    )
    if choose.choose(sizes, ring=False) == choose.ALL_TO_ALL:
        return attention_by_heads(call, slices, own, sizes)
    keys, values = _read(k, v, found, slices, num_samples)
    return found.batch_blocks.attention(q, keys, values, dropout, scale)


def _read(k: Tensor, v: Tensor, found: KeyFetch, slices: Slices, num_samples: int) -> tuple[Tensor, Tensor]:
    """Return the keys and the values that this rank reads, [samples, key heads, positions of the read blocks,
    width].
    """
    num_all, heads = k.shape[:2]
    both = torch.cat((k, v), -1).reshape(num_samples, -1, k.shape[2], k.shape[3] + v.shape[3])
    rows = both.transpose(1, 2).flatten(0, 1)
    num = found.batch_blocks.block_pairs.sizes.keys
    read = exchange_rows(rows, found.sent, found.places, num_samples * num, slices)
    back = read.unflatten(0, (num_samples, num)).transpose(1, 2).reshape(num_all, heads, num, -1)
    return back[..., : k.shape[3]], back[..., k.shape[3] :]


def key_fetch(batch: SlicedBatch, num_samples: int, device: torch.device) -> KeyFetch:
    """Compute the rows that this rank reads and sends. Every rank computes them from the masks of all positions.

    Args:
        num_samples: the number of samples; 1 if all samples have the same mask.
    """
    slices, own = batch.slices, batch.slices.group.index
    seen, documents = (None if each is None else each.cpu() for each in (batch.seen, batch.documents))
    segments = segments_of(Sizes(num_samples, slices.length, slices.length), seen, documents)
    by_rank = [
        block_pairs(
            batch.layout, Sizes(num_samples, stop - start, slices.length), segments.of_queries(start, stop), seen
        )
        for start, stop in slices.ranges
    ]
    counts, sent = [], []
    for found in by_rank:
        sample, position, _ = _positions(found)
        owners = [(position >= start) & (position < stop) for start, stop in slices.ranges]
        counts.append(tuple(int(each.sum()) for each in owners))
        mine = owners[own]
        sent.append((sample[mine] * slices.num_own + position[mine] - slices.own.start).to(device))
    read = by_rank[own].of_read()
    sample, position, number = _positions(by_rank[own])
    place = sample * read.sizes.keys + number
    places = [place[(position >= start) & (position < stop)].to(device) for start, stop in slices.ranges]
    return KeyFetch(BatchBlocks(read), tuple(counts), sent, places)


def _positions(found: BlockPairs) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sample, the position and the index among the sample's read positions of every key in the read
    blocks.
    """
    sample, col, number = found.read
    position, number = (
        (each[:, None] * found.block + torch.arange(found.block, device="cpu")).flatten() for each in (col, number)
    )
    is_there = position < found.sizes.keys
    return sample.repeat_interleave(found.block)[is_there], position[is_there], number[is_there]
