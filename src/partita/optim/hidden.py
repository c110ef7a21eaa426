"""Updates beside the caller: unit by unit, in the order in which the next forward needs them.

Where states rest off the device, the update of a unit (and reading, writing, copying its states) runs under the
forward of those before it. Nothing that is computed depends on it: the global norm is known before the first unit is
updated, and every hyperparameter is the one of :meth:`Engine.step`'s moment.

Source: Ren et al., "ZeRO-Offload", 2021, section 5 (one-step delayed update, which this is not: the next forward sees
every update).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from partita.memory.streams import Stream, finish
from partita.optim.fused import FusedOptimizer
from partita.optim.moments import Moments
from partita.optim.segment_update import SegmentUpdate, Surroundings
from partita.optim.shadow import shadow_of
from partita.optim.views import View, Views
from partita.plan.residence import Tier
from partita.sharding.runtime import Runtime
from partita.sharding.unit import Segment, Unit

DATA = ("data",)


@dataclass
class _Job:
    """The update of one unit; ``groups`` are the optimizer's, with the unit's parameters alone."""

    unit: Unit
    groups: list[dict[str, Any]]
    segments: list[SegmentUpdate]
    is_open: bool = False

    def open(self) -> None:
        """Begin to bring states into memory."""
        if not self.is_open:
            self.is_open = True
            for segment in self.segments:
                segment.open()

    def deliver(self) -> None:
        for segment in self.segments:
            segment.deliver()

    @property
    def gathers(self) -> bool:
        return any(segment.gathers for segment in self.segments)


class HiddenUpdates:
    """Runs the optimizer on the units whose states rest off the device, and on all where its update is a kernel of
    ours.
    """

    def __init__(self, runtime: Runtime, views: Views, optimizer: Optimizer) -> None:
        self._runtime, self._views, self._optimizer = runtime, views, optimizer
        mesh = runtime.collectives.mesh
        self._device = mesh.device
        self.units = [unit for unit in runtime.units if not unit.segments[0].plan.updates_on_device]
        if isinstance(optimizer, FusedOptimizer):
            self.units = runtime.units
        self._hidden = {id(segment) for unit in self.units for segment in unit.segments}
        self._around = Surroundings(optimizer, runtime.executor, runtime.memory, mesh.index(DATA))
        self._stream = Stream(mesh.device, "updates", waits=True)
        self._moments: dict[int, Moments] = {}
        self._started: list[_Job] = []
        self._hyper: list[dict[str, Any]] = []
        runtime.wait_for_updates(self.units)

    def takes(self, segment: Segment) -> bool:
        """Whether the segment is updated here."""
        return id(segment) in self._hidden

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
        if self.units:  # what was launched so far may read states that the host will write, or write those it will read
            finish(self._device)
        found = [job for unit in self.units if (job := self._job(unit, used)) is not None]
        jobs = sorted(found, key=self._place)
        for job, following in zip(jobs, [*jobs[1:], None], strict=False):
            updating = self._stream.run(partial(self._update, job, following, factor))
            if job.gathers:
                updating = self._runtime.executor.run_after(updating, job.deliver)
            self._runtime.executor.await_update(job.unit, updating)
        self._started = jobs

    def _place(self, job: _Job) -> int:
        """When the next forward will need a unit. Those that are gathered after their update keep the order that is the
        same on all ranks: the model's, with the root unit, which spans all others, first.
        """
        order, unit = self._runtime.residency.forward_order, job.unit
        if unit in order and not job.gathers:
            return order.index(unit)
        return unit.number if unit.name else -1

    def _job(self, unit: Unit, used: set[int]) -> _Job | None:
        """None where the unit stays as it is. A rank that owns nothing of what changes takes part in the gathers."""
        if not any(id(member) in used and member.param.requires_grad for member in unit.members):
            return None
        segments = [self._segment_update(unit, segment, used) for segment in unit.trained]
        wanted = {id(view.tensor) for update in segments for _, view in update.changing}
        groups = [
            {**hyper, "params": [param for param in group["params"] if id(param) in wanted]}
            for hyper, group in zip(self._hyper, self._optimizer.param_groups, strict=True)
        ]
        return _Job(unit, groups, segments)

    def _segment_update(self, unit: Unit, segment: Segment, used: set[int]) -> SegmentUpdate:
        changing = [
            (member, view)
            for member in unit.members
            if member.segment is segment and id(member) in used and member.param.requires_grad
            if (view := self._views.of(member.param)) is not None and view.num_elements
        ]
        bucket = next(bucket for bucket in self._runtime.reducer.buckets if segment in bucket.segments)
        moments = self.moments_of(segment) if segment.plan.moments.tier is Tier.DISK else None
        return SegmentUpdate(segment, changing, self._views.of_segment(segment), bucket, moments, self._around)

    def settle(self) -> None:
        """Wait until every update is done, and parameters are what they will be in the next forward."""
        jobs, self._started = self._started, []
        for job in jobs:
            job.unit.updated.wait()
            self._runtime.executor.finish_update(job.unit)
            job.segments.clear()  # with the gradients, which the event of the update would keep
        for job in jobs:  # what an optimizer counts in its groups
            for group, before, after in zip(self._optimizer.param_groups, self._hyper, job.groups, strict=True):
                group.update({key: after[key] for key in before if not _same(before[key], after[key])})

    def close(self) -> None:
        """Let go of the thread."""
        self._stream.close()

    # ------------------------------------------------------------ beside the caller

    def _update(self, job: _Job, following: _Job | None, factor: float) -> None:
        job.open()
        if following is not None:
            following.open()
        for segment in job.segments:
            segment.connect(factor)
        self._step(job.groups)
        for segment in job.segments:
            segment.close()
        if not job.gathers:
            job.deliver()

    def _step(self, groups: list[dict[str, Any]]) -> None:
        """The optimizer's own step on some of its parameters, with the groups' settings as they were.

        It runs on a second object with the same state, so that nobody who changes a rate meanwhile is in its way.
        """
        if not any(group["params"] for group in groups):
            return
        shadow = shadow_of(self._optimizer, groups, self._optimizer.state)
        shadow.step()
        if isinstance(shadow, FusedOptimizer):
            shadow.operands.clear()

    # -------------------------------------------------------------------- looking

    def state_of(self, view: View) -> dict[str, Any]:
        """What the optimizer keeps of one parameter, wherever and however it rests."""
        if view.member.segment.plan.moments.tier is Tier.DISK:
            state = self.moments_of(view.member.segment).load(view)
        else:
            state = dict(self._optimizer.state.get(view.tensor, {}))
        return self._optimizer.readable(state) if isinstance(self._optimizer, FusedOptimizer) else state

    def moments_of(self, segment: Segment) -> Moments:
        """The states of a segment on the disk tier."""
        if id(segment) not in self._moments:
            state, views = self._optimizer.state, self._views.of_segment(segment)
            self._moments[id(segment)] = Moments(segment, views, state, self._runtime.memory)
        return self._moments[id(segment)]


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    named = ((key, value) for key, value in group.items() if key != "params")
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in named}


def _same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return one is other or bool(one == other)
