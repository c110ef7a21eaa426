"""The update of one segment: states brought into memory, the optimizer pointed at them, and the way back.

Names: ``master`` is this rank's part of the master weights (of a split master, the low bits); ``param`` the same part
of the 16-bit parameters, which a fused optimizer reads (a split master's high bits) and writes.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from partita.memory import accelerator
from partita.memory.tiers import Lease, StateMemory
from partita.optim.fused import FusedOptimizer
from partita.optim.rules import InMemory, UpdateRule
from partita.optim.states import Leases, OptimizerStates
from partita.optim.views import View, Views
from partita.plan.residence import SPLIT, Residence, Tier
from partita.sharding.buckets import Bucket
from partita.sharding.executor import Executor
from partita.sharding.unit import Member, Segment


@dataclass(frozen=True)
class Context:
    """The objects that all updates share."""

    rule: UpdateRule[FusedOptimizer] | UpdateRule[Optimizer]
    views: Views
    states: OptimizerStates
    executor: Executor
    memory: StateMemory

    def device_of(self, tier: Tier) -> torch.device:
        """Return the device that computes with states of a tier."""
        device = self.executor.device
        return device if tier is Tier.DEVICE else accelerator.host_of(device)


class SegmentUpdate:
    """One update of one segment from the gradients of its bucket: :meth:`choose` and :meth:`open`, in any order, then
    :meth:`connect`, the optimizer's step, :meth:`close`, and :meth:`deliver`.

    Attributes: ``changing``: this rank's views of what is updated, each with its gradient where that is in place.
    """

    def __init__(self, segment: Segment, bucket: Bucket, context: Context) -> None:
        self.segment = segment
        self.changing: list[tuple[View, Tensor | None]] = []
        self._bucket = bucket
        self._context = context
        self._factor = 1.0
        self._views = context.views.of_segment(segment)
        self._disk = context.states.on_disk(segment)
        self._leases: Leases = {}
        self._shard: Lease | None = None
        self._param: Lease | None = None
        self._master: Lease
        self._splits = segment.plan.master.encoding == SPLIT
        self._writes_param = context.rule.writes_param(segment)

    @property
    def _result(self) -> Residence:
        """The residence of the updated weights in memory."""
        master = self.segment.plan.master
        encoding = self.segment.layout.encoding if self._writes_param else master.encoding
        return replace(master, encoding=encoding, tier=Tier.DEVICE if master.tier is Tier.DEVICE else Tier.HOST)

    @property
    def gathers(self) -> bool:
        """True if publishing the result is a collective."""
        return self.segment.planned.update_is_gathered

    @property
    def _writes_rest(self) -> bool:
        """True if the stored parameters can be written in place."""
        where = self._context.device_of
        at_rest = self.segment.plan.param_rest.tier
        return self._writes_param and not self.gathers and where(self._result.tier) == where(at_rest)

    def choose(self, members: Sequence[Member], used: AbstractSet[int], factor: float) -> None:
        """Update those of the ``members`` that are ``used`` (by id), train now, and lie in the segment.

        Args:
            factor: what their gradients are multiplied by.
        """
        self._factor = factor
        views, is_in_place = self._context.views, not self._bucket.buffer.collects
        for member in members:
            param = member.param
            if member.segment is not self.segment or id(member) not in used:
                continue
            with torch._C.DisableTorchFunctionSubclass():
                trains = param.requires_grad
            if trains:
                view = views.of(param)
                grad = param.grad if is_in_place else None
                dropped = is_in_place and grad is None  # by the user
                if view is not None and view.num_elements and not dropped:
                    self.changing.append((view, grad))

    def open(self) -> None:
        """Begin to bring states into memory."""
        assert self.segment.master is not None
        self._master = self.segment.master.lend()
        if self._disk is not None:
            self._leases = self._disk.lend()
        if self._bucket.shard is not None:
            self._shard = self._bucket.shard.lend()
        if self._writes_rest:
            self._param = self.segment.rest.lend(read=self._splits)

    def connect(self) -> None:
        """Point the optimizer at the states and the gradients."""
        master = self._master.wait()
        param = self._lent_param()
        for view in self._views:
            if view.lent:
                view.connect(master if param is None or not self._splits else param)
        if self._disk is not None:
            self._disk.connect(self._leases)
        weights = InMemory(master, param, self._splits)
        for view, in_place in self.changing:
            grad = self._reduced(view) if in_place is None else in_place
            self._context.rule.connect(view, grad, self._factor, weights)

    def _lent_param(self) -> Tensor | None:
        """The 16-bit parameters of this rank's part: those at rest, or room for them, filled where they are read."""
        if not self._writes_param:
            return None
        if self._param is not None:
            return self._param.wait()
        segment = self.segment
        num_elements = segment.plan.master.num_elements(segment.layout.padded, segment.mesh)
        self._param = self._context.memory.scratch(num_elements, segment.dtype, self._result.tier)
        param = self._param.wait()
        if self._splits:
            rest = segment.rest.lend()
            param.copy_(segment.part_of_rest(rest.wait()))
            rest.end(changed=False)
        return param

    def _reduced(self, view: View) -> Tensor:
        assert self._shard is not None
        grad = self._bucket.grad_of(view.member, self._shard.wait())
        assert grad is not None
        return grad

    def close(self) -> None:
        """The optimizer has stepped: take the states out of it again."""
        if self._disk is not None:
            self._disk.put_back(self._leases)
        if self._shard is not None:
            self._shard.end(changed=False)
        self._context.rule.disconnect()
        for view in self._views:
            view.tensor.grad = None
            if view.lent:
                view.disconnect()

    def deliver(self) -> None:
        """Bring the result into what rests."""
        executor = self._context.executor
        takes_master = self.segment.planned.publish.needs_master  # deltas make up for what 16 bits lose, too
        if self._param is None or takes_master:
            executor.deliver(self.segment, self._master.tensor, self.segment.plan.master)
        elif not self._writes_rest:
            executor.deliver(self.segment, self._param.tensor, self._result)
        self._master.end(changed=True)
        if self._param is not None:
            self._param.end(changed=True)
