"""Updates in backward: parameters are updated as soon as their gradient is reduced, and gradients are not stored.

A gradient exists from its reduction until the update has used it, in at most two buckets at a time. So the global norm
is not known when the first unit is updated: gradients are clipped segment by segment (a unit has several segments if
its parameters have several dtypes, or if, under tensor parallelism, some are split and some are copies). A gradient
that is not finite skips the update of its segment only. Units are the same at every stage, and so are the results;
without clipping they equal those of updates at the step.

Source: Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources" (LOMO), 2023,
section 3.
"""

import math
import warnings
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from partita.errors import PartitaError
from partita.memory.streams import Event
from partita.optim.updater import StepResult, Updater, factor_of
from partita.optim.updates import Update
from partita.sharding.buckets import Bucket
from partita.sharding.reducer import factor_under_way
from partita.sharding.segment import Segment
from partita.sharding.squared_norm import square


@dataclass
class _Queued:
    """Updates of the units in one bucket, which wait in a queue.

    When ``measured`` has passed, ``squared_norms`` are those of each segment's gradient over all ranks.
    """

    bucket: Bucket
    updates: list[Update]
    measured: Event = field(default_factory=Event)
    squared_norms: list[float] = field(default_factory=list)


class BackwardUpdater(Updater):
    """Runs the optimizer on each bucket as soon as its gradients are reduced in backward."""

    _queued: tuple[_Queued, ...] = ()

    def after_load(self) -> None:
        pass  # no sync keeps states here

    def update(self) -> StepResult:
        """Wait until all gradients of the batch are measured; updates may still be running.

        Raises:
            PartitaError: a gradient arrived after the update of its unit, or was dropped after it.
        """
        if dropped := self._reducer.dropped_members:
            raise PartitaError(
                f"the .grad of '{dropped[0].fqn}' was set to None before engine.step(), but "
                "precision.gradients: in_backward has already updated the parameter: freeze it before the forward "
                "(requires_grad_(False)), or set precision.gradients to fp32"
            )
        self._runtime.store_written()  # values written since the backward
        agreed = self._consensus.before_update("engine.step")
        self._check_backward(agreed, "engine.step")
        self._consensus.check(agreed, self.steps + 1)
        while self._reducer.num_passes < agreed.num_passes:
            self._reducer.end_pass()
        buckets = zip(self._reducer.buckets, agreed.leftovers, strict=True)
        late = [bucket.members[0].fqn for bucket, is_unreduced in buckets if is_unreduced]
        self._reducer.drain()
        for queued in self._queued:
            queued.measured.wait()
        squared_norms = [pair for q in self._queued for pair in zip(q.bucket.segments, q.squared_norms, strict=True)]
        norm = math.sqrt(sum(value for _, value in squared_norms))
        lr = self.rates
        self.steps += 1
        if self._guard.watched:  # the step that calls the hooks does the counting
            self._updates.wait(copies_counters=not self._queued)
        self._queued = ()
        self._guard.step(False)
        self._guard.call_hooks()
        skipped = [segment for segment, value in squared_norms if not math.isfinite(value)]
        if skipped:
            self._warn_of_skipped(skipped)
        self._reducer.zero()
        if late:
            raise PartitaError(
                f"step {self.steps}: a gradient arrived after the update of its unit (that of '{late[0]}'): under "
                "precision.gradients: in_backward, all gradients of a unit must arrive in one backward, on every rank"
            )
        return StepResult(len(skipped) < max(len(squared_norms), 1), norm, 1.0, bool(skipped), lr)

    def give_up(self) -> None:
        """Keep the updates of earlier backwards."""
        if self._queued:
            self._await_updates()
        self._queued = ()

    # ---------------------------------------------------------------- in backward

    def begin(self) -> None:
        """Take the settings for the updates of this backward.

        Raises:
            PartitaError: another backward updated the parameters since the last step, or the loss was scaled.
        """
        if self._queued:
            raise PartitaError(
                "a second backward before engine.step(): precision.gradients: in_backward updates the parameters in "
                "each; call engine.step() between them (or engine.zero_grad() after one that failed), sum the "
                "losses for one backward, or set precision.gradients to fp32"
            )
        if factor_under_way() != 1.0:
            raise PartitaError(
                f"the loss was multiplied by another engine's loss scale ({factor_under_way():g}), and "
                "precision.gradients: in_backward updates before the scale is removed: call backward of this engine, "
                "or set its precision.gradients to fp32"
            )
        self.wait_for_updates()
        self._runtime.store_written()
        self.views.attach(self.optimizer)
        self._updates.note_settings()

    def use(self, bucket: Bucket) -> Event:
        """Queue the update of a bucket whose reduction is queued. Returns the event of the gradients' last use."""
        if not self._queued:
            self.begin()
        queued = _Queued(bucket, self._updates.of_bucket(bucket))
        self._queued = (*self._queued, queued)
        assert bucket.shard is not None
        used = frozenset(bucket.arrivals.used)
        measure = partial(self._measure, queued, bucket.shard.lease().tensor, bucket.squared_norms, used)
        queued.measured = self._runtime.collectives.mesh.stream("gradients").run(measure)
        self._updates.queue(queued.updates, queued.measured)
        if len(self._queued) == len(self._reducer.buckets):  # backward needs no more parameters
            self._await_updates()
            self._runtime.note_values()
        return queued.updates[-1].done

    def _await_updates(self) -> None:
        """Make each use of parameters wait for the queued updates."""
        self._updates.await_all([update for queued in self._queued for update in queued.updates])

    def _measure(self, queued: _Queued, sums: Tensor, measured: list[Tensor], used: AbstractSet[int]) -> None:
        """Measure reduced gradients, and agree with one small all-reduce on what to update, and by which factor.

        Args:
            measured: the squared norms of the segments' sums, if these are not on the device.
            used: ids of the members that got a gradient on this rank.
        """
        queued.updates[0].open()
        bucket = queued.bucket
        columns = [segment.layout.shard_elements for segment in bucket.segments]
        squared_norms = torch.stack(measured or [square(part) for part in sums.split(columns)])
        if not bucket.is_measured:
            squared_norms.zero_()
        flags = torch.tensor([id(member) in used for member in bucket.members], dtype=torch.float64, device="cpu")
        totals = self._consensus.sums(squared_norms, flags)
        queued.squared_norms = totals[: len(columns)]
        chosen = {id(member) for member, num in zip(bucket.members, totals[len(columns) :], strict=True) if num}
        segments = [segment for update in queued.updates for segment in update.segments]
        for segment, value in zip(segments, queued.squared_norms, strict=True):
            if math.isfinite(value):
                segment.choose(bucket.members, chosen, factor_of(math.sqrt(value), 1.0, self._clip_norm))

    def _warn_of_skipped(self, skipped: Sequence[Segment]) -> None:
        """Warn of gradients that were not finite."""
        found = self._consensus.culprit(0, "")
        source = f" (from rank {', '.join(found.ranks)})" if found.ranks else ""
        names = dict.fromkeys(self._updates.unit_of(segment).title for segment in skipped)
        self.culprit = f"the gradient of {', '.join(names)} is not finite{source}{found.arguments}"
        warnings.warn(
            f"step {self.steps}: {self.culprit}; these updates are skipped, those of other units are made", stacklevel=4
        )
