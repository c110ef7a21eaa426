"""Updates beside the caller: unit by unit, in the order in which the next forward needs them.

Where states rest off the device, the update of a unit (and reading, writing, copying its states) runs under the
forward of those before it. Nothing that is computed depends on it: the global norm is known before the first unit is
updated, and every hyperparameter is the one of :meth:`Engine.step`'s moment.

Source: Ren et al., "ZeRO-Offload", 2021, section 5 (one-step delayed update, which this is not: the next forward sees
every update).
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from partita.memory.streams import Event, Stream, finish
from partita.optim.counted import copied, copies
from partita.optim.fused import FusedOptimizer
from partita.optim.moments import Moments
from partita.optim.segment_update import SegmentUpdate, Surroundings
from partita.optim.shadow import run_step, shadow_of
from partita.optim.views import View, Views
from partita.plan.residence import Tier
from partita.sharding.buckets import Bucket
from partita.sharding.runtime import Runtime
from partita.sharding.unit import Member, Segment, Unit


@dataclass
class Job:
    """The update of one unit, not before ``ready``; ``groups`` are the optimizer's, with its parameters alone, and
    ``counts`` the attributes that it counts in, after the update.
    """

    unit: Unit
    segments: list[SegmentUpdate]
    ready: Event = field(default_factory=Event)
    groups: list[dict[str, Any]] = field(default_factory=list)
    counts: dict[str, Any] = field(default_factory=dict)
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
    ours. ``started`` are the jobs that are not known to be done; ``counted`` names the attributes that
    the optimizer counts in.
    """

    def __init__(self, runtime: Runtime, views: Views, optimizer: Optimizer, counted: Sequence[str]) -> None:
        self._runtime, self._views, self._optimizer, self._counted = runtime, views, optimizer, counted
        mesh = runtime.collectives.mesh
        self._device = mesh.device
        self.units = [unit for unit in runtime.units if not unit.segments[0].plan.updates_on_device]
        if isinstance(optimizer, FusedOptimizer):
            self.units = runtime.units
        self._hidden = {id(segment) for unit in self.units for segment in unit.segments}
        self._around = Surroundings(optimizer, runtime.executor, runtime.memory, runtime.gradient_group.index)
        self._stream = Stream(mesh.device, "updates", waits=True)
        self._moments: dict[int, Moments] = {}
        self.started: list[Job] = []
        self._hyper: list[dict[str, Any]] = []
        self._counts: dict[str, Any] = {}
        runtime.wait_for_updates(self.units)

    def takes(self, segment: Segment) -> bool:
        """Whether the segment is updated here."""
        return id(segment) in self._hidden

    # ------------------------------------------------------------------- starting

    @property
    def under_way(self) -> bool:
        """Whether updates may go on beside the caller."""
        return bool(self.started)

    def note_settings(self) -> None:
        """Take the groups' settings as they are before any parameter is updated: some optimizers count in them."""
        self._hyper = [_hyperparameters(group) for group in self._optimizer.param_groups]
        self._counts = copies(self._optimizer, self._counted)

    def restore_settings(self) -> None:
        """Undo what the updates counted in the groups, for those parameters whose update is still to come."""
        for group, before in zip(self._optimizer.param_groups, self._hyper, strict=True):
            group.update(_hyperparameters(before))
        self.restore_counts()

    def restore_counts(self) -> None:
        """The same for what an optimizer counts in attributes."""
        self._optimizer.__dict__.update(self._counts)

    def start(self, used: set[int], factor: float) -> None:
        """Queue the update of every unit, with the gradients times ``factor`` and the settings that were noted.

        Args:
            used: ids of the members that got a gradient on any rank.
        """
        if self.units:  # what was launched so far may read states that the host will write, or write those it will read
            finish(self._device)
        found = [job for unit in self.units if (job := self._job(unit, used, factor)) is not None]
        jobs = sorted(found, key=self._place)
        for job, following in zip(jobs, [*jobs[1:], None], strict=False):
            updating = self.queue(job, following)
            self._runtime.executor.await_update(job.unit, updating)
        self.started = jobs

    def queue(self, job: Job, following: Job | None = None) -> Event:
        """Run a job beside the caller, with the states of the ``following`` one on their way meanwhile."""
        updating = self._stream.run(partial(self._update, job, following))
        return self._runtime.executor.run_after(updating, job.deliver) if job.gathers else updating

    def _place(self, job: Job) -> int:
        """When the next forward will need a unit. Those that are gathered after their update keep the order that is the
        same on all ranks: the model's, with the root unit, which spans all others, first.
        """
        order, unit = self._runtime.residency.forward_order, job.unit
        if unit in order and not job.gathers:
            return order.index(unit)
        return unit.number if unit.name else -1

    def _job(self, unit: Unit, used: AbstractSet[int], factor: float) -> Job | None:
        """None where the unit stays as it is. A rank that owns nothing of what changes takes part in the gathers."""
        if not any(id(member) in used and member.param.requires_grad for member in unit.members):
            return None
        buckets, updates = self._runtime.reducer.buckets, list[SegmentUpdate]()
        for segment in unit.trained:
            bucket = next(bucket for bucket in buckets if segment in bucket.segments)
            updates.append(self.segment_update(segment, bucket, self.changing(segment, unit.members, used)))
            updates[-1].factor = factor
        return Job(unit, updates)

    def changing(
        self, segment: Segment, members: Sequence[Member], used: AbstractSet[int]
    ) -> list[tuple[Member, View]]:
        """Those of the members that are ``used``, train, and lie in the segment, with what this rank owns of them."""
        return [
            (member, view)
            for member in members
            if member.segment is segment and id(member) in used and member.param.requires_grad
            if (view := self._views.of(member.param)) is not None and view.num_elements
        ]

    def segment_update(
        self, segment: Segment, bucket: Bucket, changing: Sequence[tuple[Member, View]] = ()
    ) -> SegmentUpdate:
        """An update of a segment from the gradients of its bucket."""
        moments = self.moments_of(segment) if segment.plan.moments.tier is Tier.DISK else None
        return SegmentUpdate(segment, changing, self._views.of_segment(segment), bucket, moments, self._around)

    def settle(self) -> None:
        """Wait until every update is done, and parameters are what they will be in the next forward."""
        jobs, self.started = self.started, []
        for job in jobs:
            job.unit.updated.wait()
            self._runtime.executor.finish_update(job.unit)
            job.segments.clear()  # with the gradients, which the event of the update would keep
        for job in jobs:  # what an optimizer counts in its groups and attributes
            for group, before, after in zip(self._optimizer.param_groups, self._hyper, job.groups, strict=True):
                group.update({key: after[key] for key in before if not _same(before[key], after[key])})
            self._optimizer.__dict__.update(job.counts)

    def close(self) -> None:
        """Let go of the thread."""
        self._stream.close()

    # ------------------------------------------------------------ beside the caller

    def _update(self, job: Job, following: Job | None) -> None:
        job.ready.wait()
        job.open()
        if following is not None:
            following.open()
        for segment in job.segments:
            segment.connect()
        wanted = {id(view.tensor) for segment in job.segments for _, view in segment.changing}
        job.groups = [
            {**hyper, "params": [param for param in group["params"] if id(param) in wanted]}
            for hyper, group in zip(self._hyper, self._optimizer.param_groups, strict=True)
        ]
        job.counts = self._step(job.groups)
        for segment in job.segments:
            segment.close()
        if not job.gathers:
            job.deliver()

    def _step(self, groups: list[dict[str, Any]]) -> dict[str, Any]:
        """The optimizer's own step on some of its parameters, with the groups' settings as they were.

        Returns what it has counted, which it does on all ranks, also on those that own nothing of what changes.

        It runs on a second object with the same state, so that nobody who changes a rate meanwhile is in its way.
        """
        if not any(group["params"] for group in groups) and not self._counted:
            return {}
        shadow = shadow_of(self._optimizer, groups, self._optimizer.state)
        shadow.__dict__.update({name: copied(value) for name, value in self._counts.items()})
        run_step(shadow)
        if isinstance(shadow, FusedOptimizer):
            shadow.operands.clear()
        return copies(shadow, self._counted)

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
