"""What the update of one segment takes: its states in memory, the optimizer pointed at them, and the way back.

Names: ``master`` is this rank's part of the master weights (of a split master, the low bits); ``param`` the same part
of the 16-bit parameters, which a fused optimizer reads (a split master's high bits) and writes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from partita.kernels.state import Weights
from partita.memory.tiers import Lease, StateMemory
from partita.optim.fused import FusedOptimizer, Operands, flat
from partita.optim.moments import Leases, Moments
from partita.optim.views import View
from partita.plan.residence import FP32, SPLIT, Tier
from partita.plan.steps import AllGather, steps
from partita.sharding.buckets import Bucket
from partita.sharding.executor import Executor
from partita.sharding.unit import Member, Segment


@dataclass(frozen=True)
class Surroundings:
    """What all updates share; ``row`` is this rank's index among those that sum gradients."""

    optimizer: torch.optim.Optimizer
    executor: Executor
    memory: StateMemory
    row: int


class SegmentUpdate:
    """One update of one segment: :meth:`open`, :meth:`connect`, the optimizer's step, :meth:`close`, :meth:`deliver`.

    What trained when it was made is updated, whatever is unfrozen meanwhile.

    Attributes: ``changing`` (the members that got a gradient on any rank, with this rank's views of them) and
    ``factor`` (what gradients are multiplied by) may be set until :meth:`connect`.

    Args:
        views: all views of the segment.
        moments: where its states are on the disk tier.
    """

    def __init__(
        self,
        segment: Segment,
        changing: Sequence[tuple[Member, View]],
        views: Sequence[View],
        bucket: Bucket,
        moments: Moments | None,
        around: Surroundings,
    ) -> None:
        self.segment, self.changing, self._views, self._bucket = segment, changing, views, bucket
        self._moments, self._around = moments, around
        self.factor = 1.0
        self._in_place = {id(member): member.param.grad for member, _ in changing} if bucket.shard is None else {}
        self._states: Leases = {}
        self._shard: Lease | None = None
        self._param: Lease | None = None
        self._master: Lease
        master = segment.plan.master
        self._splits = master.encoding == SPLIT
        fused = isinstance(around.optimizer, FusedOptimizer)
        self._writes_param = fused and segment.layout.encoding != FP32
        self._updated_at = replace(
            master,
            encoding=segment.layout.encoding if self._writes_param else master.encoding,
            tier=Tier.DEVICE if master.tier is Tier.DEVICE else Tier.HOST,
        )

    @property
    def gathers(self) -> bool:
        """Whether bringing the result into what rests takes the other ranks."""
        row = self.segment.plan
        return any(isinstance(op, AllGather) for op in steps(row.master, row.param_rest, self.segment.mesh))

    @property
    def _updates_rest(self) -> bool:
        """Whether the parameters at rest can be written where they are."""
        device = self._around.executor.device if self._updated_at.tier is Tier.DEVICE else torch.device("cpu")
        rest = self.segment.plan.param_rest
        there = self._around.executor.device if rest.tier is Tier.DEVICE else torch.device("cpu")
        return self._writes_param and not self.gathers and device == there

    def open(self) -> None:
        """Begin to bring states into memory."""
        assert self.segment.master is not None
        self._master = self.segment.master.lend()
        if self._moments is not None:
            self._states = self._moments.lend()
        if self._bucket.shard is not None:
            self._shard = self._bucket.shard.lend()
        if self._updates_rest:
            self._param = self.segment.rest.lend(read=self._splits)

    def connect(self) -> None:
        """Point the optimizer at the states and the gradients."""
        master = self._master.wait()
        param = self._connect_param()
        for view in self._views:
            if view.lent:
                view.connect(master if param is None or not self._splits else param)
        if self._moments is not None:
            self._moments.connect(self._states)
        for member, view in self.changing:
            grad = self._gradient(member)
            optimizer = self._around.optimizer
            if isinstance(optimizer, FusedOptimizer):
                weights = self._weights(view, master, param)
                flat_grad = member.flat(grad) if self.segment.holds_whole_master else grad
                optimizer.operands[view.tensor] = Operands(weights, flat_grad.to(weights.like.device), self.factor)
            else:
                if self.factor != 1.0:
                    grad.mul_(self.factor)
                view.tensor.grad = grad.to(view.tensor.device, view.tensor.dtype)

    def _connect_param(self) -> Tensor | None:
        """The 16-bit parameters of this rank's part: those at rest, or room for them, filled where they are read."""
        if not self._writes_param:
            return None
        if self._param is not None:
            return self._param.wait()
        segment = self.segment
        num_elements = segment.plan.master.num_elements(segment.layout.padded, segment.mesh)
        self._param = self._around.memory.scratch(num_elements, segment.dtype, self._updated_at.tier)
        param = self._param.wait()
        if self._splits:
            rest = segment.rest.lend()
            param.copy_(segment.part_of_rest(rest.wait()))
            rest.end(changed=False)
        return param

    def _gradient(self, member: Member) -> Tensor:
        if self._shard is None:
            grad = self._in_place[id(member)]
        else:
            grad = self._bucket.grad_of(member, self._around.row, self._shard.wait())
        assert grad is not None
        return grad

    def _weights(self, view: View, master: Tensor, param: Tensor | None) -> Weights:
        own_master = flat(view.over(master))
        own_param = None if param is None else flat(view.over(param))
        if self._splits:
            return Weights(param=own_param, low=own_master)
        return Weights(param=own_param, master=own_master)

    def close(self) -> None:
        """The optimizer has stepped: take the states out of it again."""
        if self._moments is not None:
            self._moments.put_back(self._states)
        if self._shard is not None:
            self._shard.end(changed=False)
        for view in self._views:
            view.tensor.grad = None
            if view.lent:
                view.disconnect()

    def deliver(self) -> None:
        """Bring the result into what rests."""
        executor = self._around.executor
        if self._param is None:
            executor.deliver(self.segment, self._master.tensor, self.segment.plan.master)
        elif not self._updates_rest:
            executor.deliver(self.segment, self._param.tensor, self._updated_at)
        self._master.end(changed=True)
        if self._param is not None:
            self._param.end(changed=True)
