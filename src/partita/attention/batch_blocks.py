"""Attention over the block pairs of a batch, on any device. Data derived from the pairs is cached for all layers."""

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from typing import Generic, TypeVar

import torch
from torch import Tensor

from partita.attention import flex
from partita.attention.block_pairs import BlockPairs, block_pairs
from partita.attention.gathered_blocks import Dropout, GatheredAttention, GatherPlan, RowGroup, row_groups_of
from partita.attention.layout import Layout
from partita.attention.segments import Sizes, segments_of
from partita.memory import accelerator

T = TypeVar("T")


class BatchBlocks:
    """The block pairs of a batch, and the work lists derived from them. All layers share one object."""

    def __init__(self, block_pairs: BlockPairs) -> None:
        self.block_pairs = block_pairs
        self._row_groups: dict[torch.device, list[RowGroup]] = {}

    def attention(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, scale: float) -> Tensor:
        """Compute attention over the block pairs. Shapes and arguments are those of
        :func:`partita.attention.block_sparse`.
        """
        sizes = self.block_pairs.sizes
        if flex.runs_on(q.device) and not dropout:
            return flex.flex_block_attention(q, k, v, self.block_pairs, scale)
        groups = q.shape[1] // k.shape[1]
        samples = sizes.samples
        heads = q.shape[0] // samples * k.shape[1]
        queries = q.reshape(samples, heads, groups, *q.shape[2:])
        keys, values = (x.reshape(samples, heads, *x.shape[2:]) for x in (k, v))
        drop = Dropout(dropout, int(torch.randint(2**62, (), device="cpu"))) if dropout else None
        is_host = accelerator.is_host(q.device)
        if not is_host and not flex.runs_on(q.device):
            _warn_of_slow_kernel(q.device)
        flash = is_host and drop is None and q.shape[-1] == v.shape[-1]
        plan = GatherPlan(
            self._row_groups_on(q.device), (sizes.queries, sizes.keys, self.block_pairs.block), scale, drop, flash
        )
        out: Tensor = GatheredAttention.apply(queries, keys, values, plan)  # type: ignore[no-untyped-call]
        return out.reshape(*q.shape[:-1], v.shape[-1])

    def _row_groups_on(self, device: torch.device) -> list[RowGroup]:
        if device not in self._row_groups:
            row_groups = row_groups_of(self.block_pairs)
            self._row_groups[device] = [
                RowGroup(
                    group.rows.to(device), group.cols.to(device), None if group.mask is None else group.mask.to(device)
                )
                for group in row_groups
            ]
        return self._row_groups[device]


@cache
def _warn_of_slow_kernel(device: torch.device) -> None:
    warnings.warn(
        f"block-sparse attention on {device} is computed by matrix products over gathered blocks, which is slower: "
        "FlexAttention needs Triton, which is not available for this device",
        stacklevel=4,
    )


class RecentResults(Generic[T]):
    """A cache of results for the most recent batches. Layers that get the same tensors share a result."""

    LIMIT = 8

    def __init__(self) -> None:
        self._results: OrderedDict[object, tuple[T, list[weakref.ref[Tensor]]]] = OrderedDict()

    def found(self, kind: object, given: tuple[Tensor | None, ...], make: Callable[[], T]) -> T:
        """Return the result of ``make`` for the key ``kind``, cached as long as the ``given`` tensors are unchanged."""
        tensors = [tensor for tensor in given if tensor is not None]
        if any(tensor.is_inference() for tensor in tensors):  # has no version counter, so it may be changed unnoticed
            return make()
        key = kind, tuple(tensor if tensor is None else (id(tensor), tensor._version) for tensor in given)
        if key in self._results:
            found, owners = self._results[key]
            if all(owner() is tensor for owner, tensor in zip(owners, tensors, strict=True)):
                self._results.move_to_end(key)
                return found
        found = make()
        self._results[key] = found, [weakref.ref(tensor) for tensor in tensors]
        while len(self._results) > self.LIMIT:
            self._results.popitem(last=False)
        return found


_recent = RecentResults[BatchBlocks]()


def blocks_of_batch(layout: Layout, sizes: Sizes, seen: Tensor | None, documents: Tensor | None) -> BatchBlocks:
    """Return the block pairs of a batch. Arguments are those of :func:`partita.attention.block_sparse`."""

    def make() -> BatchBlocks:
        host_seen, host_documents = (None if each is None else each.cpu() for each in (seen, documents))
        segments = segments_of(sizes, host_seen, host_documents)
        return BatchBlocks(block_pairs(layout, sizes, segments, host_seen))

    return _recent.found((layout, sizes), (seen, documents), make)
