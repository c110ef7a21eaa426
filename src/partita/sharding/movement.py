"""The one interpreter of :func:`~partita.plan.steps.steps`: parameters, gradients and updates all move through it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from partita.comm.collectives import Collectives
from partita.comm.group import Group, Handle
from partita.plan.steps import AllGather, Copy, Encode, Read, ReduceScatter, Slice, Step, Write, in_phases


class Movement:
    """Runs operations between residences on flat tensors in memory."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self.device = collectives.mesh.device

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
    ) -> list[Handle]:
        """Begin to bring ``source`` into ``target``; handles of what is under way. Only gathers are, on return.

        Args:
            tag: ranks that gather under different tags wait for each other.
            accumulate: what arrives is added to what the target has.
            received: scratch memory of :meth:`scratch_bytes`, where ``ops`` reduce.

        Raises:
            NotImplementedError: an operation that it does not know.
        """
        ops = in_phases(ops)
        if target.device != self.device and any(isinstance(op, AllGather) for op in ops):
            whole = torch.empty_like(target, device=self.device)
            finish_all(self.begin(ops, source, whole, purpose=purpose, tag=tag, received=received))
            target.copy_(whole)
            return []
        handles = list[Handle]()
        for op in ops:
            match op:
                case AllGather(axes):
                    group = self._collectives.group(axes)
                    if (source.dtype, source.device) != (target.dtype, target.device):
                        source = _part(target, group).copy_(source, non_blocking=True)
                    handles.append(group.all_gather(target, source, purpose, tag))
                    source = target
                case ReduceScatter(axes):
                    assert received is not None
                    group = self._collectives.group(axes)
                    part = _part(target, group) if target.numel() == source.numel() else target
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
        """Scratch memory that the reductions in ``ops``, one after the other, need for what is sent."""
        most = 0
        for op in in_phases(ops):
            if isinstance(op, ReduceScatter):
                group = self._collectives.group(op.axes)
                most = max(most, group.received_elements(num_elements, itemsize))
                num_elements //= group.size
        return itemsize * most


def _part(whole: Tensor, group: Group) -> Tensor:
    """This rank's part of what is whole in the group."""
    return whole.view(group.size, -1)[group.index]


def finish_all(handles: Sequence[Handle]) -> None:
    """Wait for all of them."""
    for handle in handles:
        handle.wait()
