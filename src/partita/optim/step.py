"""Updates at the step: agree, finish the reductions, measure, clip, update, publish.

Every stage runs the same code on the same cuts: the norm is the rank-ordered sum of what each rank's shards contribute,
and gradients are scaled before they are spread, so the numbers do not depend on the stage.
"""

import math
import sys
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from partita.errors import PartitaError
from partita.memory.streams import Event
from partita.optim.extension import ComingUpdate
from partita.optim.updater import StepResult, Updater, factor_of
from partita.plan.residence import Tier
from partita.sharding.buckets import Bucket
from partita.sharding.squares import sum_of_squares
from partita.sharding.unit import Member


@dataclass(frozen=True)
class Measured:
    """The gradients of a complete batch: ids of the members that got one on any rank, the global ``norm``, and the
    ``scale`` that they are multiplied by.
    """

    used: set[int]
    norm: float
    scale: float


class StepUpdater(Updater):
    """Runs the optimizer at the step, when all gradients of a batch are known."""

    _measured: Measured | None = None  # the batch's gradients, where their norm was asked for
    _clip_once: float | None = None

    def begin(self) -> None:
        """Nothing may be under way.

        Raises:
            PartitaError: the gradients of this batch were measured already, or some were dropped.
        """
        if self._measured is not None:
            raise PartitaError(
                "a backward between engine.clip_grad_norm() and engine.step(): the norm would not be that of all "
                "gradients; call clip_grad_norm after the last backward of the batch"
            )
        self._check_kept()
        self.wait_for_updates()

    def use(self, bucket: Bucket) -> Event:
        """Never called: gradients rest until the step."""
        raise AssertionError(f"the gradient of '{bucket.members[0].fqn}' rests")

    def give_up(self) -> None:
        self._measured = None
        self._clip_once = None

    def clip(self, max_norm: float) -> float:
        """End the batch's reductions; the next update clips to ``max_norm``. Returns the norm before."""
        self._reducer.join()
        self._measured = self._measured or self._measure(f"engine.clip_grad_norm({max_norm:g})")
        self._clip_once = max_norm
        return self._measured.norm

    def update(self) -> StepResult:
        """Update the parameters after a complete batch, unless a gradient is not finite."""
        measured = self._measured or self._measure("engine.step")
        norm = measured.norm
        max_norm = self._clip_norm if self._clip_once is None else self._clip_once
        self.give_up()
        self._runtime.written.take()  # since it was measured
        is_warming_up = self.is_warming_up
        self.steps += 1
        is_finite = math.isfinite(norm)
        result = StepResult(is_finite, norm, self.scale.value, not is_finite, self.rates)
        if not is_finite:
            self.skipped += 1
            self._skip(measured.scale)
            return result
        for listener in self._listeners:
            listener.before_update(ComingUpdate(self.steps, measured.used, is_warming_up))
        self._run(measured.used, factor_of(norm, measured.scale, max_norm))
        if is_warming_up and not self.is_warming_up:
            self.loaded()
        self._reducer.zero()
        if any(listener.reads_weights for listener in self._listeners):
            self.wait_for_updates()
        for listener in self._listeners:
            listener.after_update(self.steps, is_warming_up=is_warming_up)
        if measured.scale == self.scale.value:
            self.scale.succeeded()
        return result

    def _measure(self, call: str) -> Measured:
        """Finish the gradients of a complete batch."""
        self._check_kept()
        self.wait_for_updates()
        self._runtime.written.take()
        self.views.attach(self.optimizer)
        agreed = self._consensus.before_update(call)
        self._check_backward(agreed, call)
        while self._reducer.waves < agreed.waves:
            self._reducer.end_wave()
        if any(agreed.leftovers):
            self._reducer.launch(agreed.leftovers)
        self._reducer.drain()
        self._reducer.complete_unreduced()
        self._reducer.sync_states.drop_unused(agreed.used)
        self._reducer.add_copies()
        measured = [bucket for bucket in self._reducer.buckets if bucket.is_measured]
        squares = [part for bucket in measured for part in _squares(bucket, agreed.used)]
        norm, scale = self._consensus.norm(squares, agreed, self.steps + 1)
        if not math.isfinite(norm):  # on all ranks: the squares of finite gradients may be too large for fp32
            squares = [part for bucket in measured for part in _squares_in_fp64(bucket, agreed.used)]
            norm, scale = self._consensus.norm(squares, agreed, self.steps + 1)
        return Measured(agreed.used, norm / scale, scale)

    def _check_kept(self) -> None:
        """The user has not tried to drop gradients that are not in ``.grad``."""
        with torch._C.DisableTorchFunctionSubclass():
            gone = next((m.fqn for m in self._reducer.covered if m.param.grad is None), None)
        if gone is not None:
            raise PartitaError(
                f"the .grad of '{gone}' was set to None between backward and engine.step() (model.zero_grad()?); its "
                "gradient is in a buffer, and would stay: to drop a batch call engine.zero_grad()"
            )

    def loaded(self) -> None:
        """Counters or states changed: use the strategies of the step that comes. A collective."""
        self.wait_for_updates()
        self._runtime.warm_up(self.is_warming_up)
        if not self.is_warming_up:
            self._reducer.sync_states.start(self._state_of)

    def _state_of(self, member: Member, name: str) -> Tensor | None:
        """Return this rank's part of a member's optimizer state, flat; None where there is none."""
        view = self.views.of(member.param)
        own = None if view is None else self.optimizer.state.get(view.tensor, {}).get(name)
        return member.flat(own) if own is not None and member.segment.holds_whole_master else own

    def _run(self, used: set[int], factor: float) -> None:
        # Errors that syncs keep are of sums as the optimizer gets them.
        scales_all = bool(self._reducer.sync_states)
        at_once = self._reducer.buckets if scales_all else self._updates.inline_buckets
        if factor != 1.0:
            for grad in (grad for bucket in at_once for grad in _owned(bucket, used)):
                grad.mul_(factor)
        self._reducer.gather(used, factor)
        if scales_all:
            factor = 1.0
        self._reducer.sync_states.commit(used)
        self._updates.run(used, factor, self._guard)

    def _skip(self, scale: float) -> None:
        """Leave an update out: name the parameter, lower the loss scale if it is the gradients', forget them."""
        self.culprit = self._find_culprit()
        before = self.scale.value
        self._reducer.zero()
        self._reducer.finite.traces = True
        if scale == before:
            self.scale.overflowed(self.culprit)
        lowered = f"; loss scale {before:g} -> {self.scale.value:g}" if self.scale.value != before else ""
        warnings.warn(f"step {self.steps}: {self.culprit}; the update is skipped{lowered}", stacklevel=4)

    def _find_culprit(self) -> str:
        """The first parameter whose gradient is not finite, and the ranks it came from if they were traced."""
        members = self._consensus.members
        number = self._first_not_finite()
        name = members[number].fqn if number < len(members) else ""
        found = self._consensus.culprit(number if name else sys.maxsize, name)
        if not found.name:
            return "the gradients are finite one by one, but their norm is not"
        source = (
            f"from rank {', '.join(found.ranks)}" if found.ranks else "from a rank that is named if it happens again"
        )
        if self._runtime.collectives.all_ranks.size == 1:
            source = "on rank 0"
        return f"the gradient of '{found.name}' is not finite ({source}){found.arguments}"

    def _first_not_finite(self) -> int:
        """Which of the members has such a gradient on this rank; their number where none has."""
        number = 0
        for bucket in self._reducer.buckets:
            shard = None if bucket.shard is None else bucket.shard.load()
            for member in bucket.members:
                grad = bucket.owned_of(member, shard)
                if grad is not None and not bool(torch.isfinite(grad).all()):
                    return number
                number += 1
        return number


def _squares(bucket: Bucket, used: set[int]) -> list[Tensor]:
    """Sums of squares of the reduced gradients that this rank owns."""
    if bucket.plan.grad_step.tier is Tier.DISK:
        return bucket.squares
    owned = _owned(bucket, used)
    return [sum_of_squares(owned)] if owned else []


def _squares_in_fp64(bucket: Bucket, used: set[int]) -> list[Tensor]:
    """The same without an overflow of finite gradients."""
    owned = _owned(bucket, used) if bucket.shard is None else bucket.parts(bucket.shard.load(), used)
    return [sum_of_squares(owned, dtype=torch.float64)] if owned else []


def _owned(bucket: Bucket, used: set[int]) -> list[Tensor]:
    """What this rank owns of a bucket's reduced gradient, per segment (per parameter, where it is not collected), of
    what any rank has ``used``: another stage may, and not this one.
    """
    if bucket.shard is None:
        return [member.param.grad for member in bucket.members if member.param.grad is not None]
    return bucket.parts(bucket.shard.lend().tensor, used)
