"""Updates in backward: parameters change as soon as their gradient is reduced, and the gradient rests nowhere.

A gradient lasts from its reduction until the update has used it, two buckets of them at a time. So no norm of all is
known when the first unit is updated: gradients are clipped unit by unit (a unit's parameters of another dtype apart),
and one that is not finite leaves out the update of its unit alone. Units are the same at every stage, and so are the
numbers; without clipping they are those of updates at the step.

Source: Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources" (LOMO), 2023,
section 3.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

import torch
from torch.optim import Optimizer

from partita.errors import PartitaError
from partita.memory.streams import Event
from partita.memory.tiers import Kept
from partita.optim.hidden import Job
from partita.optim.loss_scale import LossScale
from partita.optim.updater import StepResult, Updater
from partita.sharding.buckets import Bucket, square
from partita.sharding.runtime import Runtime
from partita.sharding.scaled import factor_under_way
from partita.sharding.unit import Segment


@dataclass
class _Queued:
    """The update of one bucket, a job for each unit in it; ``used``: members that brought this rank a gradient.

    When ``judged`` has passed, ``squares`` are those of each segment's gradient over all ranks.
    """

    bucket: Bucket
    sums: Kept
    used: frozenset[int]
    jobs: list[Job]
    judged: Event = field(default_factory=Event)
    updated: Event = field(default_factory=Event)
    squares: list[float] = field(default_factory=list)


class BackwardUpdater(Updater):
    """Runs the optimizer on each bucket when backward has brought its gradients."""

    def __init__(
        self,
        runtime: Runtime,
        optimizer: Optimizer,
        scale: LossScale,
        clip_norm: float | None,
        counted: Sequence[str] = (),
    ) -> None:
        super().__init__(runtime, optimizer, scale, clip_norm, counted)
        self._queued = list[_Queued]()
        self._gradients = runtime.collectives.mesh.stream("gradients")
        self._unit_of = {id(segment): unit for unit in runtime.units for segment in unit.segments}

    def update(self) -> StepResult:
        """Wait until every gradient of the batch is judged; updates may still go on."""
        agreed = self._agree()
        while self._reducer.waves < agreed.waves:
            self._reducer.end_wave()
        late = [bucket.members[0].fqn for bucket, left in zip(self._buckets, agreed.leftovers, strict=True) if left]
        self._reducer.drain()
        for queued in self._queued:
            queued.judged.wait()
        squares = [pair for q in self._queued for pair in zip(q.bucket.segments, q.squares, strict=True)]
        norm, lr = math.sqrt(sum(value for _, value in squares)), self.rates
        self.steps += 1
        if self._has_step_hooks:
            self.settle()
            if self._queued:  # the step that calls the hooks counts, too
                self.hidden.restore_counts()
        self._queued.clear()
        self._call_optimizer()
        left_out = [segment for segment, value in squares if not math.isfinite(value)]
        if left_out:
            self._tell(left_out)
        self._forget()
        if late:
            raise PartitaError(
                f"step {self.steps}: a gradient came after the update of its unit (that of '{late[0]}'): under "
                "precision.gradients: in_backward each unit's gradients come in one backward, on every rank"
            )
        return StepResult(len(left_out) < max(len(squares), 1), norm, 1.0, bool(left_out), lr)

    def give_up(self) -> None:
        """What a backward has updated stays."""
        self._await_updates()
        self._queued.clear()

    # ---------------------------------------------------------------- in backward

    def begin(self) -> None:
        """Note the settings that hold for the updates of this backward.

        Raises:
            PartitaError: the parameters were updated by another one since the last step, or the loss was scaled.
        """
        if self._queued:
            raise PartitaError(
                "a second backward before engine.step(): precision.gradients: in_backward updates the parameters in "
                "each; call engine.step() between them (or engine.zero_grad() after one that failed), add up the "
                "losses for a common backward, or set precision.gradients to fp32"
            )
        if factor_under_way() != 1.0:
            raise PartitaError(
                f"the loss was multiplied by another engine's loss scale ({factor_under_way():g}), and "
                "precision.gradients: in_backward uses gradients up before it is undone: call backward of this engine, "
                "or set its precision.gradients to fp32"
            )
        self.settle()
        self._runtime.written.take()
        self.views.attach(self.optimizer)
        self.hidden.note_settings()

    def use(self, bucket: Bucket) -> Event:
        """Queue the update of a bucket whose reduction is queued; returns when its sums are used up."""
        if not self._queued:
            self.begin()
        assert bucket.shard is not None
        by_unit = groupby(bucket.segments, lambda segment: self._unit_of[id(segment)])
        jobs = [Job(unit, [self.hidden.segment_update(s, bucket) for s in segments]) for unit, segments in by_unit]
        queued = _Queued(bucket, bucket.shard, frozenset(bucket.used), jobs)
        self._queued.append(queued)
        queued.judged = self._gradients.run(partial(self._judge, queued))
        for job, following in zip(jobs, [*jobs[1:], None], strict=True):
            job.ready = queued.judged
            queued.updated = self.hidden.queue(job, following)
            if not job.unit.rests_whole:
                self._runtime.executor.await_update(job.unit, queued.updated)
        if len(self._queued) == len(self._buckets):  # backward needs no parameter any more
            self._await_updates()
        return queued.updated

    def _await_updates(self) -> None:
        """Have whoever uses parameters wait for what is queued."""
        for queued in self._queued:
            for job in queued.jobs:
                self._runtime.executor.await_update(job.unit, queued.updated)
        self.hidden.started = [job for queued in self._queued for job in queued.jobs]

    def _judge(self, queued: _Queued) -> None:
        """After the reduction: what changes, and by which factor, is agreed on in one small sum."""
        bucket = queued.bucket
        queued.jobs[0].open()
        columns = [segment.layout.part_elements for segment in bucket.segments]
        squares = torch.stack([square(part) for part in queued.sums.lend().tensor.split(columns)])
        used = torch.tensor([id(member) in queued.used for member in bucket.members], dtype=torch.float64, device="cpu")
        device = self._runtime.executor.device
        told = self._group.all_reduce(torch.cat([squares.to(device), used.to(device)])).tolist()
        queued.squares = told[: len(columns)]
        chosen = {id(member) for member, num in zip(bucket.members, told[len(columns) :], strict=True) if num}
        updates = [update for job in queued.jobs for update in job.segments]
        for update, value in zip(updates, queued.squares, strict=True):
            if math.isfinite(value):
                update.factor = self._factor(math.sqrt(value), 1.0, self._clip_norm)
                update.changing = self.hidden.changing(update.segment, bucket.members, chosen)

    def _tell(self, left_out: list[Segment]) -> None:
        """Warn of gradients that were not finite."""
        every = self._group.exchange_objects(self._reducer.suspect, "engine.step")
        ranks = [str(rank) for rank, suspect in enumerate(every) if suspect]
        source = f" (from rank {', '.join(ranks)})" if ranks else ""
        names = dict.fromkeys(self._unit_of[id(segment)].title for segment in left_out)
        self.culprit = f"the gradient of {', '.join(names)} is not finite{source}"
        warnings.warn(
            f"step {self.steps}: {self.culprit}; these updates are skipped, those of other units are done", stacklevel=4
        )
