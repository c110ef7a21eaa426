"""The one interpreter of :func:`~partita.plan.steps.steps`: parameters, gradients and updates all move through it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from partita.comm.collectives import Collectives
from partita.comm.exchange import Work
from partita.comm.group import Group
from partita.plan.steps import AllGather, Copy, Encode, Read, ReduceScatter, Slice, Step, Write, in_phases
from partita.plan.wire import hops, scratch_bytes
from partita.sharding.coded import Rounding, begin_gather, reduce_scatter


class Movement:
    """Runs operations between residences on flat tensors in memory.

    Args:
        seed: of random numbers, where codes are rounded by such.
        held: what codes have held back so far, of each sum over a group and each gather of sums, one after the other;
            it changes with each.
    """

    def __init__(self, collectives: Collectives, seed: int = 0, held: Sequence[Tensor] = ()) -> None:
        self._collectives, self._seed, self._held = collectives, seed, held
        self.device = collectives.mesh.device

    def seeded(self, seed: int) -> "Movement":
        """The same with other random numbers."""
        return Movement(self._collectives, seed, self._held)

    def holding(self, held: Sequence[Tensor]) -> "Movement":
        """The same with what was ``held`` back."""
        return Movement(self._collectives, self._seed, held)

    def begin(
        self,
        ops: Sequence[Step],
        source: Tensor,
        target: Tensor,
        *,
        purpose: str = "parameters",
        tag: int = 0,
        accumulate: bool = False,
        received: Tensor | None = None,
    ) -> list[Work]:
        """Begin to bring ``source`` into ``target``; handles of what is under way. Only gathers are, on return.

        Args:
            tag: ranks that gather under different tags wait for each other.
            accumulate: what arrives is added to what the target has.
            received: scratch memory of :meth:`scratch_bytes`, where ``ops`` reduce or codes are gathered.

        Raises:
            NotImplementedError: an operation that it does not know.
        """
        ops = in_phases(ops)
        if target.device != self.device and any(isinstance(op, AllGather) for op in ops):
            whole = torch.empty_like(target, device=self.device)
            finish_all(self.begin(ops, source, whole, purpose=purpose, tag=tag, received=received))
            target.copy_(whole)
            return []
        handles, held = list[Work](), list(self._held)
        for op in ops:
            match op:
                case AllGather(axes, wire):
                    group = self._collectives.group(axes)
                    if (source.dtype, source.device) != (target.dtype, target.device):
                        source = _part(target, group).copy_(source, non_blocking=True)
                    if wire.is_coded:
                        assert received is not None
                        how = Rounding(self._seed, held.pop(0) if wire.feedback else None)
                        begun = begin_gather(group, wire, source, target, received, how=how, purpose=purpose, tag=tag)
                        handles.append(begun)
                    else:
                        handles.append(group.all_gather(target, source, purpose, tag))
                    source = target
                case ReduceScatter(axes, wire):
                    assert received is not None
                    group = self._collectives.group(axes)
                    part = _part(target, group) if target.numel() == source.numel() else target
                    if wire.is_coded:
                        groups = self._hops(axes)
                        kept = [held.pop(0) for _ in groups] if wire.feedback else []
                        reduce_scatter(
                            groups, wire, source, part, received, seed=self._seed, accumulate=accumulate, held=kept
                        )
                    else:
                        room = received[: group.received_elements(source.numel(), source.itemsize)]
                        group.reduce_scatter(part, source, room, accumulate=accumulate)
                    source = part
                case Slice(axes):
                    source = _part(source, self._collectives.group(axes))
                case Encode() | Copy():
                    pass  # the copy into the target, or into this rank's part of what is gathered, does both at once
                case Read() | Write():
                    pass  # what rests on disk is lent: whoever lends it reads and writes
                case _:
                    raise NotImplementedError(f"no way to run {op} of {list(ops)}")
        if source.data_ptr() != target.data_ptr():
            if accumulate:
                target.add_(source.to(target.device))
            else:  # what the host has, it may use at once
                target.copy_(source, non_blocking=target.device == self.device)
        return handles

    def scratch_bytes(self, ops: Sequence[Step], num_elements: int, itemsize: int) -> int:
        """Scratch memory that ``ops``, one after the other, need for what is received, and for codes."""
        most = 0
        for op in in_phases(ops):
            if isinstance(op, ReduceScatter):
                group = self._collectives.group(op.axes)
                if op.wire.is_coded:
                    sizes = [hop.size for hop in self._hops(op.axes)]
                    most = max(most, scratch_bytes(op.wire, num_elements, sizes))
                else:
                    most = max(most, itemsize * group.received_elements(num_elements, itemsize))
                num_elements //= group.size
            elif isinstance(op, AllGather):
                num_elements *= self._collectives.group(op.axes).size
                most = max(most, op.wire.num_bytes(num_elements) if op.wire.is_coded else 0)
        return most

    def _hops(self, axes: tuple[str, ...]) -> list[Group]:
        """The groups that a sum in codes goes over."""
        return [self._collectives.group(hop) for hop in hops(axes, self._collectives.mesh.shape)]


def _part(whole: Tensor, group: Group) -> Tensor:
    """This rank's part of what is whole in the group."""
    return whole.view(group.size, -1)[group.index]


def finish_all(handles: Sequence[Work]) -> None:
    """Wait for all of them."""
    for handle in handles:
        handle.wait()
