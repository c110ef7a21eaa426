"""One update of one segment: its states and gradients are connected to the optimizer, and its results published."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from partita.kernels.chunks import chunks
from partita.memory import accelerator
from partita.memory.streams import record_for_host
from partita.memory.tiers import Lease, StateMemory
from partita.optim.full_updates import FullUpdates
from partita.optim.fused import FusedOptimizer
from partita.optim.optimizer import LeasedWeights, UpdateRule
from partita.optim.states import Leases, OptimizerStates, View, Views, flat
from partita.sharding.buckets import Bucket
from partita.sharding.parameter import Member
from partita.sharding.publish import Publisher
from partita.sharding.segment import Segment
from partita.table.residence import SPLIT, Residence, Tier


@dataclass(frozen=True)
class Context:
    """The objects that all updates share."""

    rule: UpdateRule[FusedOptimizer] | UpdateRule[Optimizer]
    views: Views
    states: OptimizerStates
    publisher: Publisher
    memory: StateMemory
    device: torch.device
    full_updates: FullUpdates | None = None

    def device_of(self, tier: Tier) -> torch.device:
        """Return the device that updates states of a tier."""
        return self.device if tier is Tier.DEVICE else accelerator.host_of(self.device)

    def on_host(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Return copies of gradients in pinned memory, complete on return; valid until the next call."""
        device, copied = self.device, self.memory.on_host_like(grads)
        for grad, copy in zip(grads, copied, strict=True):
            copy.copy_(grad, non_blocking=True)
        record_for_host(device).wait()
        return copied


class SegmentUpdate:
    """One update of one segment with the gradients of its bucket.

    Call :meth:`choose` and :meth:`open`, in any order, then :meth:`scaled_grads`, :meth:`connect`, the optimizer's
    step, :meth:`fill`, :meth:`close`, and :meth:`deliver`.

    Attributes: ``coming``: the parameters to update, on whichever rank; ``changing``: this rank's views of them, each
    with its gradient if that is in ``.grad``.
    """

    def __init__(self, segment: Segment, bucket: Bucket, context: Context) -> None:
        self.segment = segment
        self.coming: list[Member] = []
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
    def _writes_stored(self) -> bool:
        """True if the stored parameters can be written in place."""
        where = self._context.device_of
        at_rest = self.segment.plan.param_stored.tier
        return self._writes_param and not self.gathers and where(self._result.tier) == where(at_rest)

    def choose(self, members: Sequence[Member], used: AbstractSet[int], factor: float) -> None:
        """Choose the members to update: those that are used, trainable, and in the segment.

        Args:
            used: ids of the members that have a gradient.
            factor: the factor that their gradients are multiplied by.
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
                self.coming.append(member)
                view = views.of(param)
                grad = param.grad if is_in_place else None
                dropped = is_in_place and grad is None  # by the user
                if view is not None and view.num_elements and not dropped:
                    self.changing.append((view, grad))

    def open(self) -> None:
        """Start to move states into memory."""
        assert self.segment.master is not None
        self._master = self.segment.master.lease()
        if self._disk is not None:
            self._leases = self._disk.lease()
        if self._bucket.shard is not None:
            self._shard = self._bucket.shard.lease()
        if self._writes_stored:
            self._param = self.segment.stored.lease(read=self._splits)

    def scaled_grads(self) -> list[Tensor]:
        """Return the gradients of ``changing``, multiplied by their factor unless the update does it."""
        grads = [self._reduced(view) if in_place is None else in_place for view, in_place in self.changing]
        self._factor = self._context.rule.scale(grads, self._factor)
        return grads

    def is_copied(self, grad: Tensor) -> bool:
        """Return whether a gradient is copied to the host, which updates the states."""
        device, host = self._context.device, self._context.device_of(self._result.tier)
        return grad.device == device != host and grad.layout is torch.strided

    def connect(self, grads: Sequence[Tensor]) -> None:
        """Point the optimizer at the states and the gradients of ``changing``."""
        master = self._master.wait()
        param = self._param_values()
        for view in self._views:
            if view.only_during_update:
                view.connect(master if param is None or not self._splits else param)
        if self._disk is not None:
            self._disk.connect(self._leases)
        weights = LeasedWeights(master, param, self._splits)
        for (view, _), grad in zip(self.changing, grads, strict=True):
            self._context.rule.connect(view, grad, self._factor, weights)

    def _param_values(self) -> Tensor | None:
        """Return memory for this rank's 16-bit parameters: the stored ones or scratch, with values if they are read."""
        if not self._writes_param:
            return None
        if self._param is not None:
            return self._param.wait()
        segment = self.segment
        num_elements = segment.plan.master.num_elements(segment.layout.padded, segment.mesh)
        self._param = self._context.memory.scratch(num_elements, segment.dtype, self._result.tier)
        param = self._param.wait()
        if self._splits:
            stored = segment.stored.lease()
            param.copy_(segment.slice_for_master(stored.wait()))
            stored.end(changed=False)
        return param

    def _reduced(self, view: View) -> Tensor:
        assert self._shard is not None
        grad = self._bucket.optimizer_grad(view.member, self._shard.wait())
        assert grad is not None
        return grad

    def fill(self) -> None:
        """Fill memory for 16-bit parameters that had no values before the step: round the master weights that the step
        has not updated, and zero the padding.
        """
        has_values = self._splits or (self._writes_stored and self.segment.stored.tier is not Tier.DISK)
        if self._param is None or has_values:
            return
        self.segment.clear_gaps(self._param.tensor)
        updated = {id(view) for view, _ in self.changing if self._context.rule.has_updated(view)}
        for view in self._views:
            if id(view) not in updated:
                param, master = flat(view.over(self._param.tensor)), flat(view.over(self._master.tensor))
                for at in chunks(master):
                    param[at] = self.segment.rounded(master[at])

    def close(self) -> None:
        """Remove states and gradients from the optimizer after its step."""
        if self._disk is not None:
            self._disk.put_back(self._leases)
        if self._shard is not None:
            self._shard.end(changed=False)
        self._context.rule.disconnect()
        for view in self._views:
            view.tensor.grad = None
            if view.only_during_update:
                view.disconnect()

    def deliver(self) -> None:
        """Publish the result to the stored parameters."""
        publisher = self._context.publisher
        # parameter deltas also contain the rounding errors of 16 bits
        takes_master = self.segment.planned.publish.needs_master
        if self._param is None or takes_master:
            publisher.deliver(self.segment, self._master.tensor, self.segment.plan.master)
        elif not self._writes_stored:
            publisher.deliver(self.segment, self._param.tensor, self._result)
        self._master.end(changed=True)
        if self._param is not None:
            self._param.end(changed=True)
