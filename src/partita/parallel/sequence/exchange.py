"""Exchange of slices of a sequence between the ranks in forward, and of their gradients in backward.

Parameter gradients are averaged over the sequence ranks, as over data-parallel ranks. Each rank computes the loss of
its slice, and the gradient must be the sum over the slices. So :func:`sum_over_slices`, which sums the losses of the
slices, multiplies the gradient by the number of ranks. Code that runs on all positions has the same gradient on every
rank, and averaging does not change it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from partita.comm.group import Group
from partita.errors import PartitaError
from partita.parallel.sequence.slices import Slices
from partita.sharding.compiler import eager

PURPOSE = "sequence"
Heads = Sequence[Sequence[int]]
Gradients = tuple[Tensor | None, ...]

_forwards = Counter[Group]()  # the number of running forwards of models on slices, by group
_checks = set[Group]()  # groups whose first batch is being checked


def forward_begins(group: Group) -> None:
    """Record that a forward of a model on slices begins."""
    _forwards[group] += 1


def forward_ends(group: Group) -> None:
    """Record that a forward of a model on slices has ended, with or without an error."""
    _forwards[group] -= 1
    if _forwards[group] <= 0:
        del _forwards[group]


@contextmanager
def checking(group: Group) -> Iterator[None]:
    """Allow gradients of slices in the ``with`` block; the caller knows that they are partial."""
    _checks.add(group)
    try:
        yield
    finally:
        _checks.discard(group)


def is_checking() -> bool:
    """Return whether a block is being checked before its first call. The check's calls are not part of training."""
    return bool(_checks)


def check_backward(slices: Slices) -> None:
    """Refuse backwards whose gradients are used before they are averaged over the ranks.

    Raises:
        PartitaError: the model's forward is still running, or the backward has create_graph=True.
    """
    group, problem = slices.group, None
    if _forwards[group] and group not in _checks:
        problem = "gradients are computed inside the model's forward (torch.autograd.grad, or a backward)"
    elif torch.is_grad_enabled():
        problem = "create_graph=True computes gradients of gradients"
    if problem is not None:
        raise PartitaError(
            f"parallel.{PURPOSE}: {group.size}: {problem}, and each rank has only the gradient of its own slice of the "
            f"sequence; set parallel.{PURPOSE}: 1 and split the model in another way (zero.stage: 3)"
        )


@eager
def slice_for_rank(whole: Tensor, dim: int, slices: Slices) -> Tensor:
    """Return this rank's slice along ``dim`` of a tensor that all ranks have. The gradient is 0 outside the slice."""
    result: Tensor = _SliceForRank.apply(whole, dim, slices)  # type: ignore[no-untyped-call]
    return result


@eager
def gather(own: Tensor, dim: int, slices: Slices) -> Tensor:
    """All-gather the ranks' slices along ``dim``.

    The gradient of a slice is the sum of the ranks' gradients, in rank order.
    """
    result: Tensor = _Gather.apply(own, dim, slices)  # type: ignore[no-untyped-call]
    return result


def gradient_of_slice(whole: Tensor, dim: int, slices: Slices) -> Tensor:
    """Return the gradient of this rank's slice along ``dim``: the sum of all ranks' gradients for it.

    Args:
        whole: this rank's gradient for all positions.
    """
    check_backward(slices)
    all_slices = slices.split(whole, dim)
    own = all_slices[slices.group.index]
    received = slices.group.all_to_all(all_slices, [own.shape] * len(all_slices), PURPOSE)
    total = received[0]
    for gradient in received[1:]:
        total = total.add_(gradient)
    return total


@eager
def heads_for_positions(x: Tensor, heads: Heads, slices: Slices) -> Tensor:
    """Exchange ``[batch, heads, own positions, size]`` for ``[batch, own heads, all positions, size]`` by all-to-all.

    Rank ``r`` gets ``heads[r]``. Several ranks may get the same head, and a rank may get a head several times. S. A.
    Jacobs et al., "DeepSpeed Ulysses", 2023, section 3.1.
    """
    result: Tensor = _HeadsForPositions.apply(x, heads, slices)  # type: ignore[no-untyped-call]
    return result


def take_heads(x: Tensor, heads: Sequence[int]) -> Tensor:
    """Return ``x[:, heads]``. An index would be copied to the device, which blocks the caller: this needs none."""
    first, last = heads[0], heads[-1]
    if tuple(heads) == tuple(range(first, last + 1)):
        return x[:, first : last + 1]
    return torch.cat([x[:, head : head + 1] for head in heads], 1)


@eager
def positions_for_heads(x: Tensor, heads: Heads, slices: Slices) -> Tensor:
    """Exchange ``[batch, own heads, all positions, size]`` for ``[batch, heads, own positions, size]`` by all-to-all.
    Each head is on one rank, in rank order.
    """
    result: Tensor = _PositionsForHeads.apply(x, heads, slices)  # type: ignore[no-untyped-call]
    return result


@eager
def exchange_rows(x: Tensor, sent: Sequence[Tensor], places: Sequence[Tensor], num_read: int, slices: Slices) -> Tensor:
    """Exchange rows between the ranks: send each rank the rows that it reads, and return those that this rank reads.

    The gradient of a row is the sum of its readers' gradients, in rank order.

    Args:
        x: ``[rows, ...]``: this rank's rows.
        sent: for each rank, the rows of ``x`` that it reads, without duplicates.
        places: for each rank, the indices in the result of the rows that it sends.
        num_read: the number of rows of the result.

    Returns:
        ``[num_read, ...]``; 0 in rows that no rank sends.
    """
    result: Tensor = _ExchangeRows.apply(x, sent, places, num_read, slices)  # type: ignore[no-untyped-call]
    return result


@eager
def sum_over_slices(value: Tensor, slices: Slices) -> Tensor:
    """Sum the values that the ranks have computed from their slices.

    The gradient is multiplied by the number of ranks, because gradients are averaged over them (see the module).
    """
    result: Tensor = _SumOverSlices.apply(value, slices)  # type: ignore[no-untyped-call]
    return result


class _SliceForRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, dim: int, slices: Slices) -> Tensor:
        ctx.shape = whole.shape
        ctx.dim = dim
        ctx.slices = slices
        return slices.take(whole, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        check_backward(ctx.slices)
        whole = gradients[0].new_zeros(ctx.shape)
        ctx.slices.take(whole, ctx.dim).copy_(gradients[0])
        return whole, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, dim: int, slices: Slices) -> Tensor:
        ctx.dim = dim
        ctx.slices = slices
        return torch.cat(slices.group.gather(own, slices.shapes(own, dim), PURPOSE), dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        return gradient_of_slice(gradients[0], ctx.dim, ctx.slices), None, None


class _HeadsForPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, heads: Heads, slices: Slices) -> Tensor:
        ctx.heads = heads
        ctx.slices = slices
        ctx.num_heads = x.shape[1]
        sent = [take_heads(x, taken) for taken in heads]
        shapes = slices.shapes(sent[slices.group.index], 2)
        return torch.cat(slices.group.all_to_all(sent, shapes, PURPOSE), 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        check_backward(ctx.slices)
        slices, gradient = ctx.slices, gradients[0]
        batch, _, _, size = gradient.shape
        shapes = [[batch, len(taken), slices.num_own, size] for taken in ctx.heads]
        received = slices.group.all_to_all(slices.split(gradient, 2), shapes, PURPOSE)
        if sum(map(len, ctx.heads)) == ctx.num_heads:  # each is taken once
            return torch.cat(received, 1), None, None
        total = gradient.new_zeros(batch, ctx.num_heads, slices.num_own, size)
        for taken, received_slice in zip(ctx.heads, received, strict=True):
            for at, head in enumerate(taken):  # in rank order, and one at a time: the same bits in every run
                total[:, head] += received_slice[:, at]
        return total, None, None


class _PositionsForHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, heads: Heads, slices: Slices) -> Tensor:
        ctx.heads = heads
        ctx.slices = slices
        batch, _, _, size = x.shape
        shapes = [[batch, len(taken), slices.num_own, size] for taken in heads]
        return torch.cat(slices.group.all_to_all(slices.split(x, 2), shapes, PURPOSE), 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        check_backward(ctx.slices)
        slices, gradient = ctx.slices, gradients[0]
        batch, _, _, size = gradient.shape
        own = gradient.new_empty(batch, len(ctx.heads[slices.group.index]), 0, size)
        sent = gradient.split([len(taken) for taken in ctx.heads], 1)
        return torch.cat(slices.group.all_to_all(sent, slices.shapes(own, 2), PURPOSE), 2), None, None


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sent: Sequence[Tensor], places: Sequence[Tensor], num_read: int, slices: Slices
    ) -> Tensor:
        ctx.sent = sent
        ctx.places = places
        ctx.slices = slices
        ctx.num_rows = len(x)
        shapes = [[len(place), *x.shape[1:]] for place in places]
        received = slices.group.all_to_all([x.index_select(0, rows) for rows in sent], shapes, PURPOSE)
        read = x.new_zeros(num_read, *x.shape[1:])
        for place, received_slice in zip(places, received, strict=True):
            read[place] = received_slice
        return read

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        check_backward(ctx.slices)
        gradient, slices = gradients[0], ctx.slices
        shapes = [[len(rows), *gradient.shape[1:]] for rows in ctx.sent]
        sent = [gradient.index_select(0, place) for place in ctx.places]
        total = gradient.new_zeros(ctx.num_rows, *gradient.shape[1:])
        for rows, received_slice in zip(ctx.sent, slices.group.all_to_all(sent, shapes, PURPOSE), strict=True):
            total[rows] += received_slice  # the rows have no duplicates
        return total, None, None, None, None


class _SumOverSlices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, slices: Slices) -> Tensor:
        ctx.size = slices.group.size
        return slices.group.sum(value.clone(), PURPOSE)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        return gradients[0] * ctx.size, None
