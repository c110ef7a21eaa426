"""Block-sparse attention over gathered blocks: each block of queries attends to its gathered blocks of keys.

Torch's flash kernel for the CPU runs without a mask on the blocks that are seen in full, and with a mask on the other
blocks. The two results are merged by their log-sum-exps (T. Dao et al., "FlashAttention", 2022, section 3.1). The
backward is that kernel's, with the merged log-sum-exps. Memory grows linearly with the number of positions.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from partita.attention.block_pairs import BlockPairs

# The largest number of elements of keys or values that one piece gathers; its memory is a small multiple of this.
PIECE = 4 << 20
_MASKED_AT_ONCE = 1 << 20

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class RowGroup:
    """Rows (blocks of queries) that read the same number of blocks of keys: ``rows`` [n], ``cols`` [n, count].

    ``mask`` [n or 1, block, count x block] is True where a query sees a key; None: every query sees every key.
    """

    rows: Tensor
    cols: Tensor
    mask: Tensor | None


def row_groups_of(block_pairs: BlockPairs) -> list[RowGroup]:
    """Group all block pairs: first the pairs without a mask, then those with a mask."""
    made: list[RowGroup] = []
    sample = block_pairs.row.div(block_pairs.num_rows, rounding_mode="floor")
    col = sample * block_pairs.num_cols + block_pairs.col
    for masked in (False, True):
        chosen = block_pairs.whole != masked
        rows, counts = block_pairs.row[chosen].unique_consecutive(return_counts=True)
        starts = counts.cumsum(0) - counts
        for count in counts.unique().tolist():
            those = counts == count
            cols = col[chosen][starts[those, None] + torch.arange(count, device="cpu")]
            made += _masked(block_pairs, rows[those], cols) if masked else [RowGroup(rows[those], cols, None)]
    return made


def _masked(block_pairs: BlockPairs, rows: Tensor, cols: Tensor) -> Iterator[RowGroup]:
    """Yield the groups of rows with a mask. Rows with the same mask as the middle row share it, as in a sliding
    window.
    """
    middle = _mask(block_pairs, rows[len(rows) // 2, None], cols[len(rows) // 2, None])
    step = max(1, _MASKED_AT_ONCE // middle.numel())
    is_shared, masks = [], []
    for start in range(0, len(rows), step):
        mask = _mask(block_pairs, rows[start : start + step], cols[start : start + step])
        is_shared.append((mask == middle).flatten(1).all(1))
        masks.append(mask[~is_shared[-1]])
    shared = torch.cat(is_shared)
    yield RowGroup(rows[shared], cols[shared], middle)
    if not bool(shared.all()):
        yield RowGroup(rows[~shared], cols[~shared], torch.cat(masks))


def _mask(block_pairs: BlockPairs, rows: Tensor, cols: Tensor) -> Tensor:
    """Return the mask [n, block, count x block] of rows [n] and blocks [n, count]."""
    inside = torch.arange(block_pairs.block, device="cpu")
    sample = rows.div(block_pairs.num_rows, rounding_mode="floor")[:, None, None]
    query = ((rows % block_pairs.num_rows)[:, None] * block_pairs.block + inside)[:, :, None]
    key = ((cols % block_pairs.num_cols)[:, :, None] * block_pairs.block + inside).flatten(1)[:, None, :]
    return block_pairs.mask_function(sample, query, key)


@dataclass(frozen=True)
class Dropout:
    """Dropout of attention weights. Each piece draws from a seed of its own, the same in forward and backward."""

    probability: float
    seed: int

    def kept(self, weights: Tensor, number: int) -> Tensor:
        """Return 0 or 1 / (1 - probability) for each weight of piece ``number``."""
        generator = torch.Generator(weights.device).manual_seed((self.seed + number) % 2**63)
        drawn = torch.rand(weights.shape, generator=generator, device=weights.device, dtype=torch.float32)
        return (drawn >= self.probability).to(weights.dtype) / (1 - self.probability)


@dataclass(frozen=True)
class GatherPlan:
    """The row groups and settings of a batch. The flash kernel (``flash``) does not support dropout, or values of
    another width than the keys.
    """

    row_groups: list[RowGroup]
    sizes: tuple[int, int, int]  # queries and keys of a sample, and positions of a block
    scale: float
    dropout: Dropout | None
    flash: bool

    def pieces(self, heads: int, width: int) -> Iterator[tuple[int, Tensor, Tensor, Tensor | None]]:
        """Yield (number, rows, blocks of keys [rows, count], mask [1, rows or 1, block, keys]) of limited size."""
        number, block = 0, self.sizes[2]
        for group in self.row_groups:
            step = max(1, PIECE // (heads * group.cols.shape[1] * block * width))
            for start in range(0, len(group.rows), step):
                stop = start + step
                mask = group.mask if group.mask is None or len(group.mask) == 1 else group.mask[start:stop]
                yield number, group.rows[start:stop], group.cols[start:stop], None if mask is None else mask[None]
                number += 1


class GatheredAttention(torch.autograd.Function):
    """Attention of queries [samples, key heads, groups, queries, width] to keys and values [samples, key heads, keys,
    width].

    The query heads (groups) of a key head share its keys. The result is [samples, key heads, groups, queries, width of
    the values].
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: GatherPlan) -> Tensor:
        num_queries, _, block = plan.sizes
        queries, keys, values = _blocked(q, block), _blocked(k, block), _blocked(v, block)
        exact = torch.promote_types(q.dtype, torch.float32)
        out = queries.new_zeros((*queries.shape[:-1], v.shape[-1]), dtype=exact)
        sums = out.new_full(out.shape[:-1], -math.inf)
        run_piece = _flash_piece if plan.flash else _matmul_piece
        for number, rows, cols, mask in plan.pieces(k.shape[1], k.shape[-1]):
            some_keys, some_values = _gather(keys, cols), _gather(values, cols)
            bias = _bias(mask, q.dtype)
            for group in range(q.shape[2]):
                new, new_sums = run_piece(
                    queries[:, group, rows], some_keys, some_values, bias, plan, number * q.shape[2] + group
                )
                before, total = sums[:, group, rows], torch.logaddexp(sums[:, group, rows], new_sums)
                finite = total.masked_fill(total == -math.inf, 0.0)
                old = out[:, group, rows] * (before - finite).exp().unsqueeze(-1)
                out[:, group, rows] = old + new.to(exact) * (new_sums - finite).exp().unsqueeze(-1)
                sums[:, group, rows] = total
        result = _unblocked(out, num_queries, q.shape[0]).to(q.dtype)
        ctx.save_for_backward(q, k, v, result, sums)
        ctx.plan = plan
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, result, sums = ctx.saved_tensors
        plan: GatherPlan = ctx.plan
        num_queries, num_keys, block = plan.sizes
        queries, keys, values, out, d_out = (_blocked(x, block) for x in (q, k, v, result, gradient))
        exact = torch.promote_types(q.dtype, torch.float32)
        d_queries, d_keys, d_values = (torch.zeros_like(x, dtype=exact) for x in (queries, keys, values))
        sums = sums.masked_fill(sums == -math.inf, 0.0)  # a query that sees nothing: exp(-inf - 0) is 0
        run_piece = _flash_piece_backward if plan.flash else _matmul_piece_backward
        for number, rows, cols, mask in plan.pieces(k.shape[1], k.shape[-1]):
            some_keys, some_values = _gather(keys, cols), _gather(values, cols)
            bias = _bias(mask, q.dtype)
            for group in range(q.shape[2]):
                given = [x[:, group, rows] for x in (d_out, queries, out, sums)]
                found = run_piece(given, some_keys, some_values, bias, plan, number * q.shape[2] + group)
                d_queries[:, group, rows] += found[0]
                for total, new in ((d_keys, found[1]), (d_values, found[2])):
                    shape = (total.shape[0], cols.numel(), *total.shape[2:])
                    total.index_add_(1, cols.flatten(), new.to(exact).reshape(shape))
        d_q = _unblocked(d_queries, num_queries, q.shape[0]).to(q.dtype)
        d_k, d_v = (_unblocked(x, num_keys, q.shape[0]).to(q.dtype) for x in (d_keys, d_values))
        return d_q, d_k, d_v, None


def _blocked(x: Tensor, block: int) -> Tensor:
    """Reshape [samples, ..., positions, width] to [..., samples x blocks, block, width], as a view where possible."""
    length = x.shape[-2]
    if length % block:
        x = torch.nn.functional.pad(x, (0, 0, 0, -length % block))
    blocks: Tensor = x.unflatten(-2, (-1, block))
    return blocks.movedim(0, -4).flatten(-4, -3)


def _unblocked(x: Tensor, length: int, num_samples: int) -> Tensor:
    """Reshape [..., samples x blocks, block, width] to [samples, ..., positions, width]."""
    samples: Tensor = x.unflatten(-3, (num_samples, -1))
    return samples.movedim(-4, 0).flatten(-3, -2)[..., :length, :]


def _gather(x: Tensor, cols: Tensor) -> Tensor:
    """Return the blocks ``cols`` [n, count] of [heads, blocks, block, width] as [heads, n, count x block, width]."""
    return x[:, cols].flatten(2, 3)


def _bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)


Part = Callable[..., Any]


def _flash_piece(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, plan: GatherPlan, number: int
) -> tuple[Tensor, Tensor]:
    """Return the result [heads, rows, block, width], and the log-sum-exp [heads, rows, block]."""
    out, sums = _flash(q, k, v, 0.0, False, attn_mask=bias, scale=plan.scale)
    if bias is not None:  # the kernel returns NaN for a query that sees no key
        blind = (bias == -math.inf).all(-1)
        out, sums = out.masked_fill(blind.unsqueeze(-1), 0.0), sums.masked_fill(blind, -math.inf)
    return out, sums


def _flash_piece_backward(
    given: list[Tensor], k: Tensor, v: Tensor, bias: Tensor | None, plan: GatherPlan, number: int
) -> tuple[Tensor, Tensor, Tensor]:
    d_out, q, out, sums = given
    found: tuple[Tensor, Tensor, Tensor] = _flash_backward(
        d_out, q, k, v, out, sums, 0.0, False, attn_mask=bias, scale=plan.scale
    )
    return found


def _matmul_piece(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, plan: GatherPlan, number: int
) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, bias, plan.scale)
    sums = scores.logsumexp(-1)
    weights = (scores - sums.masked_fill(sums == -math.inf, 0.0).unsqueeze(-1)).exp()
    if plan.dropout is not None:
        weights = weights * plan.dropout.kept(weights, number)
    return weights @ v.to(weights.dtype), sums


def _matmul_piece_backward(
    given: list[Tensor], k: Tensor, v: Tensor, bias: Tensor | None, plan: GatherPlan, number: int
) -> tuple[Tensor, Tensor, Tensor]:
    d_out, q, out, sums = given
    weights = (_scores(q, k, bias, plan.scale) - sums.unsqueeze(-1)).exp()
    d_out, out, v = (x.to(weights.dtype) for x in (d_out, out, v))
    d_weights, used = d_out @ v.mT, weights
    if plan.dropout is not None:
        kept = plan.dropout.kept(weights, number)
        d_weights, used = d_weights * kept, weights * kept
    d_scores = weights * (d_weights - (d_out * out).sum(-1, keepdim=True)) * plan.scale
    return d_scores @ k.to(weights.dtype), d_scores.mT @ q.to(weights.dtype), used.mT @ d_out


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    exact = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(exact) @ k.to(exact).mT) * scale
    return scores if bias is None else scores + bias.to(exact)
