"""Ring attention: keys and values are passed around the ranks, and each rank computes attention of its queries.

No rank ever has all keys and values. H. Liu et al., "Ring Attention with Blockwise Transformers", 2023. Results of
pieces are merged by the log-sum-exp of their scores, and backward recomputes each piece (T. Dao et al.,
"FlashAttention", 2022, appendix B).
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from partita.parallel.sequence.exchange import PURPOSE, Gradients, check_backward
from partita.parallel.sequence.slices import Slices

# The number of keys whose scores are computed at a time.
PIECE = 1024


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, slices: Slices, scale: float
) -> Tensor:
    """Compute ``softmax(query @ key^T * scale + mask) @ value`` over all positions: ``[batch, heads, own positions,
    size]``.

    Args:
        query: ``[batch, heads, own positions, size]``.
        key: ``[batch, key heads, own positions, size]``; the number of heads is a multiple of the number of key heads.
        value: like ``key``.
        mask: of this rank's queries and all keys, ``[..., own positions or 1, positions]``. It is bool (True where a
            query sees a key), or is added to the scores. The result for a query that sees no key is 0.
    """
    result: Tensor = _Ring.apply(query, key, value, mask, slices, scale)  # type: ignore[no-untyped-call]
    return result


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, slices: Slices, scale: float
    ) -> Tensor:
        grouped = _grouped(query, key.shape[1])
        total = grouped.new_zeros((*grouped.shape[:-1], value.shape[-1]))
        log_sum = grouped.new_full((*grouped.shape[:-1], 1), -math.inf)
        for source, (keys, values) in _around_ring([key, value], slices):
            for at, piece_keys, piece_values in _pieces(keys, values, slices.ranges[source][0]):
                scores = _scores(grouped, piece_keys, mask, at, scale)
                of_piece = scores.logsumexp(-1, keepdim=True)
                merged = torch.logaddexp(log_sum, of_piece)
                total *= _ratio(log_sum, merged)
                total += _ratio(scores, merged) @ piece_values
                log_sum = merged
        result = _merged(total, query)
        ctx.save_for_backward(query, key, value, mask, result, log_sum)
        ctx.slices = slices
        ctx.scale = scale
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        check_backward(ctx.slices)
        query, key, value, mask, result, log_sum = ctx.saved_tensors
        slices, scale, num_keys = ctx.slices, ctx.scale, key.shape[1]
        grouped, gradient = _grouped(query, num_keys), _grouped(gradients[0], num_keys)
        inner = (gradient * _grouped(result, num_keys)).sum(-1, keepdim=True)
        of_query = torch.zeros_like(grouped)
        passed = [key, value, torch.zeros_like(key).float(), torch.zeros_like(value).float()]
        for source, (keys, values, of_keys, of_values) in _around_ring(passed, slices, home=True):
            start = slices.ranges[source][0]
            for at, piece_keys, piece_values in _pieces(keys, values, start):
                weights = _ratio(_scores(grouped, piece_keys, mask, at, scale), log_sum)
                of_scores = weights * (gradient @ piece_values.mT - inner) * scale
                of_query += of_scores @ piece_keys
                own = slice(at.start - start, at.stop - start)
                of_keys[:, :, own] += (of_scores.mT @ grouped).sum(2)
                of_values[:, :, own] += (weights.mT @ gradient).sum(2)
        returned = passed[2:]
        return _merged(of_query, query), returned[0].to(key.dtype), returned[1].to(value.dtype), None, None, None


def _around_ring(
    tensors: list[Tensor], slices: Slices, *, home: bool = False
) -> Iterator[tuple[int, Sequence[Tensor]]]:
    """Yield each rank's index and tensors, beginning with this rank's own. Between two yields, each rank sends its
    current tensors to the next rank.

    With ``home``, the tensors are also sent back at the end, and the list ``tensors`` then has this rank's own tensors
    with the changes of all ranks.
    """
    group = slices.group
    current, dim = list(tensors), 2
    for turn in range(group.size):
        source = (group.index - turn) % group.size
        yield source, current
        if turn + 1 < group.size or home:
            current = [_send_to_next(tensor, slices, (source - 1) % group.size, dim) for tensor in current]
    tensors[:] = current


def _send_to_next(tensor: Tensor, slices: Slices, source: int, dim: int) -> Tensor:
    """Send ``tensor`` to the next rank; receive the tensor of rank ``source`` from the previous rank."""
    group = slices.group
    nothing, sizes = tensor.narrow(dim, 0, 0), slices.shapes(tensor, dim)
    sent, shapes = [nothing] * group.size, [list(nothing.shape)] * group.size
    sent[(group.index + 1) % group.size] = tensor
    before = (group.index - 1) % group.size
    shapes[before] = sizes[source]
    return group.all_to_all(sent, shapes, PURPOSE)[before]


def _pieces(keys: Tensor, values: Tensor, start: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield the positions, keys and values of each piece; the first key is at position ``start``. Keys and values are
    in fp32, with an added dim for the query heads.
    """
    for at, (key, value) in enumerate(zip(keys.split(PIECE, 2), values.split(PIECE, 2), strict=True)):
        first = start + at * PIECE
        yield slice(first, first + key.shape[2]), key.unsqueeze(2).float(), value.unsqueeze(2).float()


def _grouped(x: Tensor, num_keys: int) -> Tensor:
    """Return ``[batch, heads, positions, size]`` as ``[batch, key heads, heads of each, positions, size]``, in fp32."""
    grouped: Tensor = x.unflatten(1, (num_keys, -1)).float()
    return grouped


def _merged(x: Tensor, like: Tensor) -> Tensor:
    return x.flatten(1, 2).to(like.dtype)


def _scores(query: Tensor, keys: Tensor, mask: Tensor | None, at: slice, scale: float) -> Tensor:
    scores = query @ keys.mT * scale
    if mask is None:
        return scores
    seen = mask[..., at]
    if seen.dim() == 4:
        seen = seen.unsqueeze(2) if seen.shape[1] == 1 else seen.unflatten(1, scores.shape[1:3])
    return scores.masked_fill(~seen, -math.inf) if seen.dtype is torch.bool else scores + seen


def _ratio(logarithm: Tensor, of: Tensor) -> Tensor:
    """Return ``exp(logarithm - of)``; 0 if both are -inf."""
    return (logarithm - of).exp().nan_to_num(0.0)
