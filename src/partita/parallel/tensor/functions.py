"""Collectives of the tensor ranks inside forward and backward, as autograd functions.

M. Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", section 3: f
(:func:`copy_to_ranks`) is the identity, and sums gradients over the ranks in backward. g (:func:`sum_over_ranks`) is
the sum over the ranks, and the identity in backward. Sums are in rank order, so that all ranks have the same bits.
Between a g and the next f every rank computes the same values, in forward and in backward.

Each backward calls the conjugate function, so that gradients are differentiable to any order.
"""

import weakref
from typing import Any

import torch
from torch import Tensor

from partita.comm.group import Group
from partita.errors import PartitaError
from partita.sharding.compiler import eager

PURPOSE = "tensor"


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return sum_over_ranks(gradients[0], ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.sum(x, PURPOSE)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return copy_to_ranks(gradients[0], ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, sizes: tuple[int, ...]) -> Tensor:
        ctx.group = group
        ctx.sizes = sizes
        return _all_gather(x, group, sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient = gradients[0]
        if gradient.requires_grad:
            return scatter_to_ranks(gradient, ctx.group, ctx.sizes), None, None
        return gradient.split(ctx.sizes, -1)[ctx.group.index], None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, sizes: tuple[int, ...]) -> Tensor:
        ctx.group = group
        ctx.sizes = sizes
        own: Tensor = x.split(sizes, -1)[group.index].contiguous()
        return own

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gather_from_ranks(gradients[0], ctx.group, ctx.sizes), None, None


def _all_gather(x: Tensor, group: Group, sizes: tuple[int, ...]) -> Tensor:
    return torch.cat(group.gather(x, [(*x.shape[:-1], size) for size in sizes], PURPOSE), -1)


@eager
def copy_to_ranks(x: Tensor, group: Group) -> Tensor:
    """Apply f: return ``x``, which all ranks have. In backward, sum the ranks' partial gradients."""
    out: Tensor = _Copy.apply(x, group) if x.requires_grad else x  # type: ignore[no-untyped-call]
    return out


@eager
def sum_over_ranks(x: Tensor, group: Group) -> Tensor:
    """Apply g: return the sum of the ranks' ``x``, which have one shape. In backward, pass the gradient through."""
    out: Tensor = _Sum.apply(x, group)  # type: ignore[no-untyped-call]
    return out


@eager
def gather_from_ranks(x: Tensor, group: Group, sizes: tuple[int, ...]) -> Tensor:
    """All-gather the ranks' slices ``[..., sizes[rank]]`` along the last dim. All ranks must compute the same values
    from the result. In backward, return this rank's slice of the gradient.
    """
    out: Tensor = _Gather.apply(x, group, sizes)  # type: ignore[no-untyped-call]
    return out


@eager
def scatter_to_ranks(x: Tensor, group: Group, sizes: tuple[int, ...]) -> Tensor:
    """Return this rank's slice ``[..., sizes[rank]]`` of ``x`` ``[..., sum(sizes)]``, which all ranks have. In
    backward, all-gather the gradient.
    """
    out: Tensor = _Scatter.apply(x, group, sizes)  # type: ignore[no-untyped-call]
    return out


class CopyToTensorRanks:
    """Function f that is applied only once to an input of several consecutive layers (query, key and value projections;
    gate and up projections). Their gradients are accumulated before they are summed over the ranks.

    Attributes:
        inside_split: the running code is after a column-parallel and before a row-parallel layer.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.inside_split = False
        self._last: weakref.ref[Tensor] | None = None
        self._entered: tuple[int, Tensor] | None = None  # the input's version, and f's result

    @eager
    def __call__(self, x: Tensor) -> Tensor:
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x
        if self._last is not None and self._last() is x and self._entered is not None:
            version, entered = self._entered
            if version == x._version:
                return entered
        entered = copy_to_ranks(x, self.group)
        self._last = weakref.ref(x, self._forget)
        self._entered = (x._version, entered)
        return entered

    def forget(self) -> None:
        """Drop the last input and the result for it."""
        self._last = self._entered = None

    def _forget(self, input_: weakref.ref[Tensor]) -> None:
        if input_ is self._last:
            self.forget()


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, sizes: tuple[int, ...], ignored: int, group: Group
    ) -> Tensor:
        num_rows, width = logits.shape
        most = logits.amax(-1) if width else logits.new_full((num_rows,), -torch.inf)
        largest = torch.stack(group.gather(most, [most.shape] * group.size, PURPOSE)).amax(0)
        weights = (logits - largest[:, None]).exp_()
        low, num = sum(sizes[: group.index]), sum(sizes)
        inside = (targets >= low) & (targets < low + width)
        of_others = ~inside & (targets >= 0) & (targets < num)
        # A target outside the vocabulary stays out of range on every rank, and `gather` raises an error.
        place = (targets - low).masked_fill(of_others | (~inside & (targets == ignored)), 0)
        own = logits.gather(1, place[:, None])[:, 0].masked_fill(~inside, 0.0)
        total, chosen = group.sum(torch.stack((weights.sum(-1), own)), PURPOSE)
        ctx.save_for_backward(weights.div_(total[:, None]), inside, place, targets == ignored)
        losses: Tensor = total.log() + largest - chosen
        return losses.masked_fill(targets == ignored, 0.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise PartitaError(
                "the cross-entropy of logits that are split over the tensor ranks was differentiated with "
                "create_graph=True, and has no second derivative: set parallel.tensor_rules of the output layer (and "
                "of an embedding with the same weight) to 'whole'"
            )
        probabilities, inside, place, is_ignored = ctx.saved_tensors
        gradient = gradients[0].masked_fill(is_ignored, 0.0)
        out = probabilities * gradient[:, None]
        out[torch.arange(len(place), device=place.device), place] -= inside * gradient
        return out, None, None, None, None


@eager
def cross_entropy(logits: Tensor, targets: Tensor, sizes: tuple[int, ...], ignored: int, group: Group) -> Tensor:
    """Return -log softmax at the target for each row: ``[rows]``, 0 where the target is ``ignored``.

    Args:
        logits: ``[rows, sizes[rank]]``: the logits of this rank's part of the vocabulary.
        sizes: the number of classes of each rank.
        targets: ``[rows]``: indices into the full vocabulary.
        ignored: the target that is ignored (``ignore_index``).
    """
    out: Tensor = _CrossEntropy.apply(logits, targets, sizes, ignored, group)  # type: ignore[no-untyped-call]
    return out
