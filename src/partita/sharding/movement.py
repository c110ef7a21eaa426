"""The one interpreter of :func:`~partita.plan.steps.steps`: parameters, gradients and updates all move through it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from partita.comm.collectives import Collectives, Handle
from partita.plan.steps import AllGather, Copy, Encode, Read, ReduceScatter, Slice, Step, Write, in_phases


class Movement:
    """Runs operations between residences on flat tensors in memory."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self.mesh = collectives.mesh
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
        """Begin to bring ``source`` into ``target``, whatever they are of a state; handles of what is under way.

        A reduction, and what comes before one, has ended when this returns.

        Args:
            tag: ranks that gather under different tags wait for each other.
            accumulate: what arrives is added to what the target has.
            received: scratch memory of :meth:`scratch_elements`, where ``ops`` reduce.

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
                    if (source.dtype, source.device) != (target.dtype, target.device):  # what is sent lies in its place
                        source = self._part(target, axes).copy_(source, non_blocking=True)
                    handles.append(self._collectives.all_gather(target, source, axes, purpose, tag))
                    source = target
                case ReduceScatter(axes):
                    num = self.mesh.shape.group_size(axes)
                    part = target if target.numel() * num == source.numel() else self._part(target, axes)
                    assert received is not None
                    self._collectives.reduce_scatter(part, source, received, axes, accumulate=accumulate)
                    source = part
                case Slice(axes):
                    source = self._part(source, axes)
                case Encode() | Copy():
                    pass  # the copy into the target, or into what is gathered, does both at once
                case Read() | Write():
                    pass  # what rests on disk is lent: whoever lends it reads and writes
                case _:
                    raise NotImplementedError(f"no way to run {op} of {list(ops)}")
        if source.data_ptr() != target.data_ptr():
            if accumulate:
                target.add_(source.to(target.device))
            else:
                target.copy_(source, non_blocking=target.device == self.device)
        return handles

    def _part(self, whole: Tensor, axes: tuple[str, ...]) -> Tensor:
        """This rank's part of what is whole over ``axes``."""
        return whole.view(self.mesh.shape.group_size(axes), -1)[self.mesh.index(axes)]

    def scratch_elements(self, ops: Sequence[Step], num_elements: int, itemsize: int) -> int:
        """Elements of scratch memory that the reduction in ``ops``, if there is one, needs for what is sent."""
        return sum(
            self._collectives.received_elements(num_elements, itemsize, op.axes)
            for op in in_phases(ops)
            if isinstance(op, ReduceScatter)
        )


def finish_all(handles: Sequence[Handle]) -> None:
    """Wait for all of them."""
    for handle in handles:
        handle.wait()
