"""Block-sparse attention by FlexAttention, torch's compiled kernel for GPUs, over lists of block pairs."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._triton import has_triton

from partita.attention.block_pairs import BlockPairs
from partita.errors import PartitaError
from partita.memory import accelerator

if TYPE_CHECKING:  # this import loads torch's compiler, which takes longer than importing the rest of partita
    from torch.nn.attention.flex_attention import BlockMask

# The largest number of compiled kernels: one for each layout, kind of mask, and length in blocks. The default limit of
# torch.compile is 8; beyond it attention would run uncompiled, with the scores of all pairs of positions in memory.
MAX_KERNELS = 256
_LIMITS = ("recompile_limit", "accumulated_recompile_limit")

_masks: WeakKeyDictionary[BlockPairs, dict[torch.device, "BlockMask"]] = WeakKeyDictionary()


def runs_on(device: torch.device) -> bool:
    """Return whether the kernel can be compiled for a device. (On the CPU it has no backward.)"""
    return not accelerator.is_host(device) and bool(has_triton())


def flex_block_attention(q: Tensor, k: Tensor, v: Tensor, block_pairs: BlockPairs, scale: float) -> Tensor:
    """Compute attention by FlexAttention. Shapes are those of :func:`partita.attention.block_sparse`.

    Positions are padded to full blocks, because the kernel's backward can otherwise return NaN (pytorch issue 153799).

    Raises:
        PartitaError: the kernel cannot compute blocks of this size, or too many kernels were compiled.
    """
    made = _masks.setdefault(block_pairs, {})
    if q.device not in made:
        made[q.device] = block_mask(block_pairs, q.device)
    num_queries, block = q.shape[2], block_pairs.block
    options = _tiles(block)
    q, k, v = (F.pad(x, (0, 0, 0, -x.shape[2] % block)) for x in (q, k, v))
    mask, grouped = made[q.device], q.shape[1] != k.shape[1]
    with _kernel_limit():
        out: Tensor = _compiled()(q, k, v, block_mask=mask, scale=scale, kernel_options=options, enable_gqa=grouped)
    return out[:, :, :num_queries]


def _tiles(block: int) -> dict[str, int] | None:
    """Return kernel options with tile sizes that divide a block. (The kernel's default, up to 128, may not.)

    Raises:
        PartitaError: no supported tile size divides a block.
    """
    if block % 128 == 0:
        return None
    tile = math.gcd(block, 64)
    if tile < 16:
        raise PartitaError(
            f"attention.block: expected a multiple of 16 on a GPU (128 is fastest), so that the kernel's tiles divide "
            f"it; got {block}"
        )
    return dict.fromkeys(("BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2"), tile)


@contextmanager
def _kernel_limit() -> Iterator[None]:
    """Raise the limit of torch.compile to :data:`MAX_KERNELS` kernels in the ``with`` block.

    Raises:
        PartitaError: the limit is reached.
    """
    from torch._dynamo import config
    from torch._dynamo.exc import FailOnRecompileLimitHit

    limits = {name: max(MAX_KERNELS, getattr(config, name)) for name in _LIMITS}
    try:
        with config.patch(**limits, fail_on_recompile_limit_hit=True, suppress_errors=False):
            yield
    except FailOnRecompileLimitHit as error:
        raise PartitaError(
            f"attention: torch.compile has compiled kernels for {limits['recompile_limit']} layouts and sequence "
            "lengths (in blocks of attention.block), which is the limit; pad batches to fewer different lengths"
        ) from error


@cache
def _compiled() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def block_mask(block_pairs: BlockPairs, device: torch.device) -> "BlockMask":
    """Convert block pairs to FlexAttention's lists of blocks, with a mask and without one, ordered by column."""
    from torch.nn.attention.flex_attention import BlockMask

    mask_function, num_samples = block_pairs.mask_function.to(device), block_pairs.sizes.samples
    block, num_rows, num_cols = block_pairs.block, block_pairs.num_rows, block_pairs.num_cols
    listed: list[tuple[Tensor, Tensor]] = []
    for chosen in (~block_pairs.whole, block_pairs.whole):
        row, col = block_pairs.row[chosen], block_pairs.col[chosen]
        counts = torch.bincount(row, minlength=num_samples * num_rows)
        place = torch.arange(len(row), device="cpu") - (counts.cumsum(0) - counts)[row]
        indices = torch.zeros(num_samples * num_rows, num_cols, dtype=torch.int32, device="cpu")
        indices[row, place] = col.int()
        shape = (num_samples, 1, num_rows)
        listed.append((counts.int().view(shape).to(device), indices.view(*shape, num_cols).to(device)))

    def sees(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return mask_function(sample if num_samples > 1 else sample * 0, query, key)

    lengths = (num_rows * block, num_cols * block)
    (partial, whole) = listed
    return BlockMask.from_kv_blocks(*partial, *whole, BLOCK_SIZE=block, mask_mod=sees, seq_lengths=lengths)
