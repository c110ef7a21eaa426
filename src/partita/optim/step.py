"""Updates at the step: agree, finish the reductions, measure, clip, update, publish.

Every stage runs the same code on the same cuts: the norm is the rank-ordered sum of what each rank's shards contribute,
and gradients are scaled before they are spread, so the numbers do not depend on the stage.
"""

import math
import warnings

import torch
from torch import Tensor

from partita.errors import PartitaError
from partita.memory.streams import Event
from partita.optim.updater import Agreed, StepResult, Updater
from partita.plan.residence import Tier
from partita.sharding.buckets import Bucket, square


class StepUpdater(Updater):
    """Runs the optimizer at the step, when all gradients of a batch are known."""

    _measured: tuple[Agreed, float] | None = None  # the batch's gradients, where their norm was asked for
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
        self.settle()

    def use(self, bucket: Bucket) -> Event:
        """Never called: gradients rest until the step."""
        raise AssertionError(f"gradients of {bucket.members[0].fqn} rest")

    def give_up(self) -> None:
        self._measured = self._clip_once = None

    def clip(self, max_norm: float) -> float:
        """End the batch's reductions; the next update clips to ``max_norm``. Returns the norm before."""
        self._reducer.join()
        self._measured, self._clip_once = (
            self._measured or self._measure(f"engine.clip_grad_norm({max_norm:g})"),
            max_norm,
        )
        return self._measured[1]

    def _measure(self, call: str = "engine.step") -> tuple[Agreed, float]:
        """Finish the gradients of a complete batch: what the ranks agreed on, and the global norm."""
        self._check_kept()
        self.settle()
        self._runtime.written.take()
        self.views.attach(self.optimizer)
        agreed = self._agree(call)
        self._finish_gradients(agreed)
        return agreed, self._norm() / agreed.scale

    def update(self) -> StepResult:
        """Update the parameters after a complete batch, unless a gradient is not finite."""
        agreed, norm = self._measured or self._measure()
        max_norm = self._clip_norm if self._clip_once is None else self._clip_once
        self.give_up()
        self._runtime.written.take()  # since it was measured
        lr = self.rates
        self.steps += 1
        if not math.isfinite(norm):
            scale = self.scale.value
            self._skip(agreed.scale)
            return StepResult(False, norm, scale, True, lr)
        factor = self._factor(norm, agreed.scale, max_norm)
        self._scale_gradients(factor)
        self._reducer.spread()
        self.hidden.note_settings()
        if self._has_step_hooks:  # they find everything updated
            self.hidden.start(agreed.used, factor)
            self.settle()
            self.hidden.restore_settings()
            self._update_on_device(agreed.used)
        else:
            self._update_on_device(agreed.used)
            self.hidden.start(agreed.used, factor)
        self._forget()
        result = StepResult(True, norm, self.scale.value, False, lr)
        if agreed.scale == self.scale.value:
            self.scale.succeeded()
        if not self.hidden.under_way:
            self._count_moments()
        return result

    # ---------------------------------------------------------------- gradients

    def _check_kept(self) -> None:
        """The user has not tried to drop gradients that are not in ``.grad``."""
        with torch._C.DisableTorchFunctionSubclass():
            gone = next((m.fqn for m in self._reducer.covered if m.param.grad is None), None)
        if gone is not None:
            raise PartitaError(
                f"the .grad of '{gone}' was set to None between backward and engine.step() (model.zero_grad()?); its "
                "gradient is in a buffer, and would stay: to drop a batch call engine.zero_grad()"
            )

    def _finish_gradients(self, agreed: Agreed) -> None:
        while self._reducer.waves < agreed.waves:
            self._reducer.end_wave()
        if any(agreed.leftovers):
            self._reducer.launch(agreed.leftovers)
        self._reducer.drain()
        self._reducer.complete_unreduced()

    def _norm(self) -> float:
        """The global norm of the (still scaled) gradients; the same number on every rank."""
        parts = [part for bucket in self._buckets for part in self._squares(bucket)]
        if len({part.device for part in parts}) > 1:
            parts = [part.cpu() for part in parts]
        mine = torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64, device="cpu")
        every = self._group.exchange(mine.cpu().view(1), "the norm of engine.step").wait()
        total = 0.0
        for part in every.view(-1).tolist():
            total += part
        return math.sqrt(total) if total >= 0 else math.nan

    def _squares(self, bucket: Bucket) -> list[Tensor]:
        if bucket.plan.grad_step.tier is Tier.DISK:
            return bucket.squares
        return [square(grad) for grad in self._owned(bucket)]

    def _owned(self, bucket: Bucket) -> list[Tensor]:
        """What this rank owns of a bucket's reduced gradient, a tensor for each segment (or parameter, if not
        collected).
        """
        if bucket.shard is None:
            return [m.param.grad for m in bucket.members if m.param.grad is not None]
        return bucket.parts(bucket.shard.lend().tensor, bucket.used)

    def _scale_gradients(self, factor: float) -> None:
        if factor != 1.0:
            for bucket in self._buckets_on_device:
                for grad in self._owned(bucket):
                    grad.mul_(factor)

    @property
    def _buckets_on_device(self) -> list[Bucket]:
        return [bucket for bucket in self._buckets if not self.hidden.takes(bucket.segments[0])]

    # ------------------------------------------------------------------- update

    def _update_on_device(self, used: set[int]) -> None:
        """Update what the optimizer finds on the device, all at once, and bring it into what rests."""
        for bucket in self._buckets_on_device:
            shard = None if bucket.shard is None else bucket.shard.lend().tensor
            for member in bucket.members:
                view = self.views.of(member.param)
                if view is not None and view.connected and id(member) in used and member.param.requires_grad:
                    grad = bucket.grad_of(member, self._group.index, shard)
                    view.tensor.grad = None if grad is None else grad.to(view.tensor.dtype)
        units = [unit for unit in self._runtime.units if not self.hidden.takes(unit.segments[0])]
        self._call_optimizer(always=bool(units))
        if units:
            self._runtime.executor.publish(units)

    def _skip(self, scale: float) -> None:
        """Leave an update out: name the parameter, lower the loss scale if it is the gradients', forget them."""
        self.culprit = culprit = self._culprit()
        before = self.scale.value
        self._forget()
        self._reducer.trace()
        if scale == before:
            self.scale.overflowed(culprit)
        lowered = f"; loss scale {before:g} -> {self.scale.value:g}" if self.scale.value != before else ""
        warnings.warn(f"step {self.steps}: {culprit}; the update is skipped{lowered}", stacklevel=4)

    def _culprit(self) -> str:
        """The first parameter whose gradient is not finite, and the ranks it came from if they were traced."""
        first = len(self._members)
        for number, (bucket, member) in enumerate((b, m) for b in self._buckets for m in b.members):
            grad = bucket.owned_of(member, self._group.index, None if bucket.shard is None else bucket.shard.load())
            if grad is not None and not bool(torch.isfinite(grad).all()):
                first = number
                break
        every = self._group.exchange_objects((first, self._reducer.suspect), "engine.step")
        ranks = [str(rank) for rank, (_, suspect) in enumerate(every) if suspect]
        first = min(number for number, _ in every)
        if first == len(self._members):
            return "the gradients are finite one by one, but their norm is not"
        source = f"from rank {', '.join(ranks)}" if ranks else "from a rank that is named if it happens again"
        if self._group.size == 1:
            source = "on rank 0"
        return f"the gradient of '{self._members[first].fqn}' is not finite ({source})"
