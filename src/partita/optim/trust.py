"""Norms of whole parameters and their updates, of which the ranks have pieces: one small message for all of them."""

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from functools import partial

import torch
from torch import Tensor

from partita.memory import accelerator
from partita.optim.onebit_lamb import OnebitLamb
from partita.optim.views import View, Views
from partita.planner.blueprint import NUMBERS
from partita.sharding.buckets import Bucket
from partita.sharding.runtime import Runtime
from partita.sharding.unit import Member


class TrustRatios:
    """Tells the optimizer, before a step, what the pieces of each parameter came to on all ranks."""

    def __init__(self, runtime: Runtime, optimizer: OnebitLamb, views: Views) -> None:
        self._runtime, self._optimizer, self._views = runtime, optimizer, views

    def agree(self, used: AbstractSet[int]) -> None:
        """Of the gradients that are ``used`` (ids of members), which lie where the optimizer will find them. A
        collective. Each rank measures the part whose sums it makes, wherever the optimizer works on more: so the bits
        are those of every stage.
        """
        buckets = self._runtime.reducer.buckets
        members = [(bucket, member) for bucket in buckets for member in bucket.members]
        groups = self._optimizer.group_of()
        found = torch.zeros(len(members), NUMBERS, dtype=torch.float64, device="cpu")
        views = [self._views.of(member.param) if id(member) in used else None for _, member in members]
        chosen = [(number, view) for number, view in enumerate(views) if view is not None and view.tensor in groups]
        for number, view in chosen:
            if (own := self._piece(*members[number], view)) is not None:
                piece, grad = own
                measured = self._optimizer.measure(view.tensor, grad, groups[view.tensor], piece)
                found[number] = accelerator.read(measured)
        every = self._runtime.gradient_group.exchange(found.view(-1), "trust ratios").wait()
        of_ranks = every.view(-1, len(members), NUMBERS)
        total = of_ranks[0].clone()
        for row in of_ranks[1:]:
            total[:, :2] += row[:, :2]
            total[:, 2] = torch.maximum(total[:, 2], row[:, 2])
        for number, view in chosen:
            self._optimizer.trust(view.tensor, total[number], groups[view.tensor])

    def _piece(self, bucket: Bucket, member: Member, view: View) -> tuple[Callable[[Tensor], Tensor], Tensor] | None:
        """What takes this rank's part out of a view's values, with its gradient, flat; None where it has none."""
        index = self._runtime.part_index
        shard = None if bucket.shard is None else bucket.shard.lend().tensor
        grad = bucket.owned_of(member, index, shard)
        if grad is None:
            return None
        if not member.segment.holds_whole_master:
            return _as_it_is, grad.to(view.tensor.device, view.tensor.dtype)
        flat = grad if grad.dim() == 1 and shard is not None else member.flat(grad)
        place = next(piece for piece in bucket.layout.pieces[id(member)] if piece.row == index)
        begin, end = (place.start, place.stop) if shard is not None else (0, flat.numel())
        return partial(_slice, member, begin, end), flat.to(view.tensor.device, view.tensor.dtype)


def _as_it_is(values: Tensor) -> Tensor:
    return values


def _slice(member: Member, begin: int, end: int, whole: Tensor) -> Tensor:
    return member.flat(whole)[begin:end]
