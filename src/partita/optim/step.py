"""Updates at the step, when all gradients of a batch are known.

:class:`StepUpdater` synchronizes the ranks, finishes the reductions, measures the norm, clips, updates and publishes.
Every stage runs the same code on the same shards: the norm is the sum of each rank's contribution in rank order, and
gradients are scaled before they are gathered (in fp16, by the update), so the results do not depend on the stage.
"""

import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from partita.errors import PartitaError
from partita.memory.streams import Event
from partita.optim.extension import ComingUpdate
from partita.optim.updater import StepResult, Updater, factor_of
from partita.optim.updates import Factors
from partita.sharding.buckets import Bucket
from partita.sharding.parameter import Member
from partita.sharding.squared_norm import total_squared_norm
from partita.table.residence import Tier


@dataclass(frozen=True)
class Measured:
    """The gradients of a complete batch: ids of the members that got one on any rank (``used``), the global ``norm``,
    the loss ``scale``, and ``has_hooks``, which is True if any rank's user had hooks on the optimizer's step.
    """

    used: set[int]
    norm: float
    scale: float
    has_hooks: bool


class StepUpdater(Updater):
    """Runs the optimizer at the step, when all gradients of a batch are known."""

    _measured: Measured | None = None  # the batch's gradients, if their norm was requested
    _clip_once: float | None = None

    def begin(self) -> None:
        """Wait for running updates before a backward. Drop the batch whose gradients the user has dropped
        (``module.zero_grad()``).

        Raises:
            PartitaError: the gradients of this batch were already measured, or some were dropped.
        """
        if self._measured is not None:
            raise PartitaError(
                "a backward between engine.clip_grad_norm() and engine.step(): the norm would not be that of all "
                "gradients; call clip_grad_norm after the last backward of the batch"
            )
        if dropped := self._reducer.dropped_members:
            if len(dropped) < len(self._reducer.placeholder_members):
                raise PartitaError(
                    f"a backward after the .grad of '{dropped[0].fqn}' was set to None, but not that of all "
                    "parameters: call engine.step() before it, or drop all gradients by engine.zero_grad()"
                )
            self.zero()
            self._consensus.num_drops += 1
        self.wait_for_updates()

    def use(self, bucket: Bucket) -> Event:
        """Never called: gradients are stored until the step."""
        raise AssertionError(f"the gradient of '{bucket.members[0].fqn}' is stored")

    def give_up(self) -> None:
        self._measured = None
        self._clip_once = None

    def clip(self, max_norm: float) -> float:
        """End the batch's reductions, and clip the next update to ``max_norm``. Returns the norm before clipping."""
        self._reducer.join()
        if self._measured is None:
            self._measured = self._measure(f"engine.clip_grad_norm({max_norm:g})")
            self._reducer.set_placeholders()  # also of gradients that only the measurement has collected
        self._clip_once = max_norm
        return self._measured.norm

    def update(self) -> StepResult:
        """Update the parameters after a complete batch, unless a gradient is not finite."""
        measured = self._measured
        if measured is None:
            measured = self._measure("engine.step")
        elif late := [member.fqn for member in self._reducer.dropped_members if id(member) in measured.used]:
            raise PartitaError(
                f"the .grad of '{late[0]}' was set to None after engine.clip_grad_norm(), which agrees with the other "
                "ranks on the gradients to use: set it to None before that call"
            )
        norm = measured.norm
        max_norm = self._clip_norm if self._clip_once is None else self._clip_once
        self.give_up()
        self._runtime.store_written()  # values written since the measurement
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
        self._run(measured, factor_of(norm, measured.scale, max_norm))
        if is_warming_up and not self.is_warming_up:
            self.after_load()
        self._reducer.zero()
        if any(listener.reads_weights for listener in self._listeners):
            self.wait_for_updates()
        for listener in self._listeners:
            listener.after_update(self.steps, is_warming_up=is_warming_up)
        if measured.scale == self.scale.value:
            self.scale.succeeded()
        return result

    def update_by_closure(self, evaluate: Callable[[], Any]) -> StepResult:
        """Run the step of an optimizer that evaluates the loss in it (LBFGS, SAM).

        Each evaluation finds the weights that the optimizer has written, and gives its parameters the reduced and
        clipped gradients. It returns the mean loss over the ranks, so that all of them take the same steps.

        Args:
            evaluate: runs forward and backward, and returns the loss.

        Raises:
            PartitaError: a feature is used that needs one evaluation per step, or a gradient is not finite.
        """
        kind = type(self.optimizer).__name__
        problem = "overlapped updates (zero.offload)" if not self._updates.are_inline else ""
        problem = problem or ("an fp16 loss scale (precision.compute: fp16)" if self.scale.dynamic else "")
        problem = problem or next((listener.setting for listener in self._listeners), "")
        if problem:
            raise PartitaError(f"engine.step(closure): {kind} evaluates the loss several times; not with {problem}")
        norm = 0.0

        def closure() -> Any:
            nonlocal norm
            self._runtime.publish()
            loss = evaluate()
            norm = self._give_gradients()
            return self._mean_loss(loss)

        self.take_written()
        if self._reducer.holds_batch:  # of a backward before the step, as for SAM
            norm = self._give_gradients()
        try:
            self._guard.step(True, torch.enable_grad()(closure))
        finally:
            for view in self.views:
                view.tensor.grad = None
        self._runtime.publish()
        self._guard.call_hooks(closure)
        self.steps += 1
        return StepResult(True, norm, self.scale.value, False, self.rates)

    def _give_gradients(self) -> float:
        """Complete the gradients of a backward, and give the optimizer's parameters copies of them. Return their norm
        before clipping.

        Raises:
            PartitaError: a gradient is not finite.
        """
        measured = self._measure("engine.step(closure)")
        max_norm = self._clip_norm if self._clip_once is None else self._clip_once
        self.give_up()
        if not math.isfinite(measured.norm):
            culprit = self._find_culprit()
            self._reducer.zero()
            raise PartitaError(f"engine.step(closure): {culprit}; a step that evaluates the loss cannot be skipped")
        self._reducer.gather(measured.used, 1.0)
        factor = factor_of(measured.norm, measured.scale, max_norm)
        gradients = self._updates.gradients(measured.used)
        for view in self.views:
            grad = gradients.get(view.tensor)
            view.tensor.grad = grad if grad is None or factor == 1.0 else grad.mul_(factor)
        self._reducer.zero()
        return measured.norm

    def _mean_loss(self, loss: Any) -> Any:
        """Return the mean of the ranks' losses, in the form of this rank's: a tensor or a number."""
        if loss is None:
            return None
        own = torch.as_tensor(loss, dtype=torch.float64, device="cpu").detach().reshape(1)
        mean = self._runtime.collectives.all_ranks.exchange(own, "the loss of a closure").wait().mean()
        return mean.to(loss.device, loss.dtype) if isinstance(loss, Tensor) else mean.item()

    def _measure(self, call: str) -> Measured:
        """Complete the gradients of a batch and measure their norm."""
        self.wait_for_updates()
        self._runtime.store_written()
        self.views.attach(self.optimizer)
        agreed = self._consensus.before_update(call, has_hooks=self._guard.watched)
        self._check_backward(agreed, call)
        while self._reducer.num_passes < agreed.num_passes:
            self._reducer.end_pass()
        if any(agreed.leftovers):
            self._reducer.launch(agreed.leftovers)
        self._reducer.drain()
        self._reducer.complete_unreduced()
        self._reducer.sync_states.drop_unused(agreed.used)
        self._reducer.add_copies()
        for bucket in self._reducer.buckets if agreed.dropped else ():
            bucket.drop(agreed.dropped)
        measured = [bucket for bucket in self._reducer.buckets if bucket.is_measured and not bucket.has_earlier_sum()]
        norms = [each for bucket in measured for each in _squared_norms(bucket, agreed.used)]
        norm, scale = self._consensus.norm(norms, agreed, self.steps + 1)
        if not math.isfinite(norm):  # on all ranks: the squares of finite gradients may be too large for fp32
            norms = [each for bucket in measured for each in _squared_norms_in_fp64(bucket, agreed.used)]
            norm, scale = self._consensus.norm(norms, agreed, self.steps + 1)
        return Measured(agreed.used, norm / scale, scale, agreed.has_hooks)

    def after_load(self) -> None:
        """Use the strategies of the next step, after the warm-up or after loading. A collective."""
        self.wait_for_updates()
        self._runtime.warm_up(self.is_warming_up)
        if not self.is_warming_up:
            self._reducer.sync_states.start(self._state_of)

    def _state_of(self, member: Member, name: str) -> Tensor | None:
        """Return this rank's flat slice of a member's optimizer state; None if there is none."""
        view = self.views.of(member.param)
        own = None if view is None else self.optimizer.state.get(view.tensor, {}).get(name)
        return member.flat(own) if own is not None and member.segment.has_full_master else own

    def _run(self, measured: Measured, factor: float) -> None:
        used = measured.used
        # Error-feedback residuals are of gradients as the optimizer gets them.
        scales_all = bool(self._reducer.sync_states)
        at_once = self._reducer.buckets if scales_all else self._updates.inline_buckets
        # Without the loss scale, small gradients would be zero in fp16: the update multiplies them in fp32.
        in_fp16 = any(bucket.dtype == torch.float16 for bucket in self._reducer.buckets)
        applied, remaining = (1.0, factor) if in_fp16 else (factor, 1.0)
        if applied != 1.0:
            for grad in (grad for bucket in at_once for grad in _owned(bucket, used)):
                grad.mul_(applied)
        self._reducer.gather(used, applied, scale=1.0 / remaining)
        self._reducer.sync_states.commit(used)
        factors = Factors(inline=remaining, overlapped=remaining if scales_all else factor)
        self._updates.run(used, factors, self._guard, has_hooks=measured.has_hooks)

    def _skip(self, scale: float) -> None:
        """Skip an update: find the parameter, lower the loss scale, and drop the gradients.

        Args:
            scale: the loss scale of the gradients. The current one is lowered only if it is the same.
        """
        self.culprit = self._find_culprit()
        before = self.scale.value
        self._reducer.zero()
        self._reducer.finite.traces = True
        if scale == before:
            self.scale.overflowed(self.culprit)
        lowered = f"; loss scale {before:g} -> {self.scale.value:g}" if self.scale.value != before else ""
        warnings.warn(f"step {self.steps}: {self.culprit}; the update is skipped{lowered}", stacklevel=4)

    def _find_culprit(self) -> str:
        """Return a message with the first parameter whose gradient is not finite, and the ranks it came from."""
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
        """Return the index of the first member with such a gradient on this rank; the number of members if none has."""
        number = 0
        for bucket in self._reducer.buckets:
            if bucket.has_earlier_sum():
                number += len(bucket.members)
                continue
            shard = None if bucket.shard is None else bucket.shard.load()
            for member in bucket.members:
                grad = bucket.owned_slice(member, shard)
                if grad is not None and not bool(torch.isfinite(grad).all()):
                    return number
                number += 1
        return number


def _squared_norms(bucket: Bucket, used: set[int]) -> list[Tensor]:
    """Return squared norms of this rank's shards of the reduced gradients."""
    if bucket.plan.grad_step.tier is not Tier.DEVICE:
        return bucket.squared_norms
    owned = _owned(bucket, used)
    return [total_squared_norm(owned)] if owned else []


def _squared_norms_in_fp64(bucket: Bucket, used: set[int]) -> list[Tensor]:
    """Return the same, computed in fp64: finite gradients do not overflow."""
    owned = _owned(bucket, used) if bucket.shard is None else bucket.norm_slices(bucket.shard.load(), used)
    return [total_squared_norm(owned, dtype=torch.float64)] if owned else []


def _owned(bucket: Bucket, used: set[int]) -> list[Tensor]:
    """Return this rank's slices of a bucket's reduced gradients, per segment (per parameter, if they are not in a
    buffer).

    ``used``: ids of the members that got a gradient on any rank, which may be of another pipeline stage.
    """
    if bucket.shard is None:
        return [member.param.grad for member in bucket.members if member.param.grad is not None]
    return bucket.norm_slices(bucket.shard.lease().wait(), used)
