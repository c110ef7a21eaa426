"""Updates in backward: parameters change as soon as their gradient is reduced, and the gradient rests nowhere.

A gradient lasts from its reduction until the update has used it, two buckets of them at a time. So no norm of all is
known when the first unit is updated: gradients are clipped unit by unit (a unit's parameters of another dtype apart,
and under tensor those that ranks hold parts of from those they have copies of), and one that is not finite leaves out
the update of its unit alone. Units are the same at every stage, and so are the numbers; without clipping they are those
of updates at the step.

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
from partita.optim.step import StepResult, Updater, factor_of
from partita.optim.updates import Update
from partita.sharding.buckets import Bucket
from partita.sharding.reducer import factor_under_way
from partita.sharding.segment import Segment
from partita.sharding.squared_norm import square


@dataclass
class _Queued:
    """The updates of one bucket's units. When ``judged`` has passed, ``squares`` are those of each segment's gradient
    over all ranks.
    """

    bucket: Bucket
    updates: list[Update]
    judged: Event = field(default_factory=Event)
    squares: list[float] = field(default_factory=list)


class BackwardUpdater(Updater):
    """Runs the optimizer on each bucket when backward has brought its gradients."""

    _queued: tuple[_Queued, ...] = ()

    def loaded(self) -> None:
        pass  # nothing is held back here

    def update(self) -> StepResult:
        """Wait until every gradient of the batch is judged; updates may still go on."""
        agreed = self._consensus.before_update("engine.step")
        self._check_backward(agreed, "engine.step")
        self._consensus.check(agreed, self.steps + 1)
        while self._reducer.num_passes < agreed.num_passes:
            self._reducer.end_pass()
        buckets = zip(self._reducer.buckets, agreed.leftovers, strict=True)
        late = [bucket.members[0].fqn for bucket, left in buckets if left]
        self._reducer.drain()
        for queued in self._queued:
            queued.judged.wait()
        squares = [pair for q in self._queued for pair in zip(q.bucket.segments, q.squares, strict=True)]
        norm = math.sqrt(sum(value for _, value in squares))
        lr = self.rates
        self.steps += 1
        if self._guard.watched:  # the step that calls the hooks counts what these have
            self._updates.wait(takes_up=not self._queued)
        self._queued = ()
        self._guard.step(False)
        left_out = [segment for segment, value in squares if not math.isfinite(value)]
        if left_out:
            self._tell(left_out)
        self._reducer.zero()
        if late:
            raise PartitaError(
                f"step {self.steps}: a gradient came after the update of its unit (that of '{late[0]}'): under "
                "precision.gradients: in_backward each unit's gradients come in one backward, on every rank"
            )
        return StepResult(len(left_out) < max(len(squares), 1), norm, 1.0, bool(left_out), lr)

    def give_up(self) -> None:
        """Keep the updates of earlier backwards."""
        if self._queued:
            self._await_updates()
        self._queued = ()

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
        self.wait_for_updates()
        self._runtime.written.take()
        self.views.attach(self.optimizer)
        self._updates.note_settings()

    def use(self, bucket: Bucket) -> Event:
        """Queue the update of a bucket whose reduction is queued; returns when its sums are used up."""
        if not self._queued:
            self.begin()
        queued = _Queued(bucket, self._updates.of_bucket(bucket))
        self._queued = (*self._queued, queued)
        assert bucket.shard is not None
        judge = partial(self._judge, queued, bucket.shard.lend().tensor, frozenset(bucket.arrivals.used))
        queued.judged = self._runtime.collectives.mesh.stream("gradients").run(judge)
        self._updates.queue(queued.updates, queued.judged)
        if len(self._queued) == len(self._reducer.buckets):  # backward needs no parameter any more
            self._await_updates()
        return queued.updates[-1].done

    def _await_updates(self) -> None:
        """Have whoever uses parameters wait for what is queued."""
        self._updates.await_all([update for queued in self._queued for update in queued.updates])

    def _judge(self, queued: _Queued, sums: Tensor, used: AbstractSet[int]) -> None:
        """After the reduction: what changes, and by which factor, is agreed on in one small sum.

        Args:
            used: ids of the members that brought this rank a gradient.
        """
        queued.updates[0].open()
        bucket = queued.bucket
        columns = [segment.layout.part_elements for segment in bucket.segments]
        squares = torch.stack([square(part) for part in sums.split(columns)])
        if not bucket.is_measured:
            squares.zero_()
        flags = torch.tensor([id(member) in used for member in bucket.members], dtype=torch.float64, device="cpu")
        told = self._consensus.sums(squares, flags)
        queued.squares = told[: len(columns)]
        chosen = {id(member) for member, num in zip(bucket.members, told[len(columns) :], strict=True) if num}
        segments = [segment for update in queued.updates for segment in update.segments]
        for segment, value in zip(segments, queued.squares, strict=True):
            if math.isfinite(value):
                segment.choose(bucket.members, chosen, factor_of(math.sqrt(value), 1.0, self._clip_norm))

    def _tell(self, left_out: Sequence[Segment]) -> None:
        """Warn of gradients that were not finite."""
        found = self._consensus.culprit(0, "")
        source = f" (from rank {', '.join(found.ranks)})" if found.ranks else ""
        names = dict.fromkeys(self._updates.unit_of(segment).title for segment in left_out)
        self.culprit = f"the gradient of {', '.join(names)} is not finite{source}{found.arguments}"
        warnings.warn(
            f"step {self.steps}: {self.culprit}; these updates are skipped, those of other units are done", stacklevel=4
        )
