"""Updates beside the caller: unit by unit, in the order in which the next forward needs them.

Where states rest off the device, the update of a unit (and reading, writing, copying its states) runs under the
forward of those before it. Nothing that is computed depends on it: the global norm is known before the first unit is
updated, and every hyperparameter is the one of :meth:`Engine.step`'s moment.

Source: Ren et al., "ZeRO-Offload", 2021, section 5 (one-step delayed update, which this is not: the next forward sees
every update).
"""

import copy
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from partita.memory.streams import Stream
from partita.memory.tiers import Lease
from partita.optim.moments import Leases, Moments
from partita.optim.views import View, Views
from partita.plan.residence import Tier
from partita.plan.steps import AllGather, steps
from partita.sharding.runtime import Runtime
from partita.sharding.unit import Member, Segment, Unit

DATA = ("data",)


@dataclass
class _Job:
    """The update of one unit. ``gradients`` are those that autograd left in place; ``segments``, what is trained at the
    step (more may be unfrozen while the update goes on).
    """

    unit: Unit
    segments: list[Segment]
    gathers: bool
    groups: list[dict[str, Any]]
    members: list[tuple[Member, View]]
    gradients: dict[int, Tensor | None]
    masters: list[tuple[Segment, Lease]] = field(default_factory=list)
    shards: dict[int, Lease] = field(default_factory=dict)
    moments: list[tuple[Moments, Leases]] = field(default_factory=list)
    is_open: bool = False


class HiddenUpdates:
    """Runs the optimizer on the units whose states rest off the device."""

    def __init__(self, runtime: Runtime, views: Views, optimizer: Optimizer) -> None:
        self._runtime, self._views, self._optimizer = runtime, views, optimizer
        self._units = [unit for unit in runtime.units if not unit.segments[0].plan.updates_on_device]
        self._executor, self._buckets, self._memory = runtime.executor, runtime.reducer.buckets, runtime.memory
        mesh = runtime.collectives.mesh
        self._row = mesh.index(DATA)
        self._stream = Stream(mesh.device, "updates", waits=True)
        self._moments: dict[int, Moments] = {}
        self._started: list[_Job] = []
        self._hyper: list[dict[str, Any]] = []

    # ------------------------------------------------------------------- starting

    @property
    def under_way(self) -> bool:
        """Whether updates may go on beside the caller."""
        return bool(self._started)

    def note_settings(self) -> None:
        """Take the groups' settings as they are before any parameter is updated: some optimizers count in them."""
        self._hyper = [_hyperparameters(group) for group in self._optimizer.param_groups]

    def restore_settings(self) -> None:
        """Undo what the updates counted in the groups, for those parameters whose update is still to come."""
        for group, before in zip(self._optimizer.param_groups, self._hyper, strict=True):
            group.update(_hyperparameters(before))

    def start(self, used: set[int], factor: float) -> None:
        """Queue the update of every unit, with the gradients times ``factor`` and the settings that were noted.

        Args:
            used: ids of the members that got a gradient on any rank.
        """
        units = sorted(self._units, key=self._place)
        jobs = [job for unit in units if (job := self._job(unit, used)) is not None]
        for job, following in zip(jobs, [*jobs[1:], None], strict=False):
            updating = self._stream.run(partial(self._update, job, following, factor))
            if job.gathers:
                updating = self._executor.run_after(updating, partial(self._deliver, job))
            self._executor.await_update(job.unit, updating)
        self._started = jobs

    def _place(self, unit: Unit) -> int:
        """When the next forward will need a unit. Those that are gathered after their update keep the order that is the
        same on all ranks: the model's, with the root unit, which spans all others, first.
        """
        order = self._runtime.residency.forward_order
        if unit in order and not self._gathers(unit):
            return order.index(unit)
        return unit.number if unit.name else -1

    def _job(self, unit: Unit, used: set[int]) -> _Job | None:
        """None where the unit stays as it is. A rank that owns nothing of what changes takes part in the gathers."""
        changing = [member for member in unit.members if id(member) in used and member.param.requires_grad]
        if not changing:
            return None
        members = [(member, view) for member in changing if (view := self._trained(member)) is not None]
        wanted = {id(view.tensor) for _, view in members}
        groups = [
            {**copy.copy(hyper), "params": [param for param in group["params"] if id(param) in wanted]}
            for hyper, group in zip(self._hyper, self._optimizer.param_groups, strict=True)
        ]
        return _Job(
            unit,
            unit.trained,
            self._gathers(unit),
            groups,
            members,
            {id(member): member.param.grad for member, _ in members},
        )

    def _trained(self, member: Member) -> View | None:
        view = self._views.of(member.param)
        return view if view is not None and view.num_elements and member.segment.master is not None else None

    @staticmethod
    def _gathers(unit: Unit) -> bool:
        return any(
            isinstance(op, AllGather)
            for segment in unit.trained
            for op in steps(segment.plan.master, segment.plan.param_rest, segment.mesh)
        )

    def settle(self) -> None:
        """Wait until every update is done, and parameters are what they will be in the next forward."""
        jobs, self._started = self._started, []
        for job in jobs:
            job.unit.updated.wait()
            self._executor.finish_update(job.unit)
        for job in jobs:  # what an optimizer counts in its groups
            for group, before, after in zip(self._optimizer.param_groups, self._hyper, job.groups, strict=True):
                group.update({key: after[key] for key in before if not _same(before[key], after[key])})

    def close(self) -> None:
        """Let go of the thread."""
        self._stream.close()

    # ------------------------------------------------------------ beside the caller

    def _update(self, job: _Job, following: _Job | None, factor: float) -> None:
        self._open(job)
        if following is not None:
            self._open(following)
        for segment, lease in job.masters:
            values = lease.wait()
            for view in self._views_of(segment):
                if view.on_disk:
                    view.connect(values)
        for moments, leases in job.moments:
            moments.connect(leases)
        for member, view in job.members:
            grad = self._gradient(job, member)
            if factor != 1.0:
                grad.mul_(factor)
            view.tensor.grad = grad.to(view.tensor.device, view.tensor.dtype)
        if job.members:
            self._step(job.groups)
        self._close(job)

    def _open(self, job: _Job) -> None:
        """Begin to read what the update needs."""
        if job.is_open:
            return
        job.is_open = True
        for segment in job.segments:
            assert segment.master is not None
            job.masters.append((segment, segment.master.lend()))
            if segment.plan.moments.tier is Tier.DISK:
                moments = self.moments_of(segment)
                job.moments.append((moments, moments.lend()))
        for bucket in self._buckets:
            if bucket.shard is not None and any(segment in job.segments for segment in bucket.segments):
                job.shards[id(bucket)] = bucket.shard.lend()

    def _gradient(self, job: _Job, member: Member) -> Tensor:
        bucket = next(b for b in self._buckets if member.segment in b.segments)
        lease = job.shards.get(id(bucket))
        grad = job.gradients[id(member)] if lease is None else bucket.grad_of(member, self._row, lease.wait())
        assert grad is not None
        return grad

    def _step(self, groups: list[dict[str, Any]]) -> None:
        """The optimizer's own step on some of its parameters, with the groups' settings as they were.

        It runs on a second object with the same state, so that nobody who changes a rate meanwhile is in its way. The
        hooks on the optimizer's step are not this one's.
        """
        shadow = object.__new__(type(self._optimizer))
        shadow.__dict__.update(self._optimizer.__dict__)
        shadow.__dict__.pop("step", None)  # a scheduler's wrapper around the other object's
        shadow.param_groups = groups
        for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            setattr(shadow, hooks, OrderedDict())
        shadow.step()
        for group in groups:
            for param in group["params"]:
                param.grad = None

    def _close(self, job: _Job) -> None:
        for moments, leases in job.moments:
            moments.put_back(leases, changed=True)
        for lease in job.shards.values():
            lease.end(changed=False)
        for segment, _ in job.masters:
            for view in self._views_of(segment):
                if view.on_disk:
                    view.disconnect()
        if not job.gathers:
            self._deliver(job)

    def _deliver(self, job: _Job) -> None:
        for segment, lease in job.masters:
            self._executor.deliver(segment, lease.tensor)
            lease.end(changed=True)

    # -------------------------------------------------------------------- looking

    def _views_of(self, segment: Segment) -> list[View]:
        return [view for view in self._views if view.member.segment is segment]

    def state_of(self, view: View) -> dict[str, Any]:
        """What the optimizer keeps of one parameter, wherever it rests."""
        if view.member.segment.plan.moments.tier is Tier.DISK:
            return self.moments_of(view.member.segment).load(view)
        return dict(self._optimizer.state.get(view.tensor, {}))

    def moments_of(self, segment: Segment) -> Moments:
        """The states of a segment on the disk tier."""
        if id(segment) not in self._moments:
            state = self._optimizer.state
            self._moments[id(segment)] = Moments(segment, self._views_of(segment), state, self._memory)
        return self._moments[id(segment)]


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    named = ((key, value) for key, value in group.items() if key != "params")
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in named}


def _same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return one is other or bool(one == other)
