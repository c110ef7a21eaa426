"""One optimizer step: agree, finish the reductions, measure, clip, update, publish.

Every stage runs the same code on the same cuts: the norm is the rank-ordered sum of what each rank's shards contribute,
and gradients are scaled before they are spread, so the numbers do not depend on the stage.
"""

import math
import struct
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from partita.comm.collectives import Collectives
from partita.optim.hidden import HiddenUpdates
from partita.optim.loss_scale import LossScale
from partita.optim.views import Views
from partita.plan.residence import Tier
from partita.sharding.buckets import Bucket, square
from partita.sharding.runtime import Runtime
from partita.sharding.unit import Member

DATA = ("data",)
# torch.nn.utils.clip_grad_norm_ adds this to the norm that it divides by.
CLIP_EPS = 1e-6


@dataclass(frozen=True)
class StepResult:
    """What :meth:`Engine.step` did.

    ``stepped``: the parameters were updated. ``skipped``: the batch was complete, but a gradient was not finite and the
    update was left out. ``grad_norm``: the global norm before clipping (None before the batch is complete). ``lr``: the
    learning rate of each parameter group in this update, or in the one that this micro-batch belongs to.
    """

    stepped: bool
    grad_norm: float | None = None
    loss_scale: float = 1.0
    skipped: bool = False
    lr: tuple[float, ...] = ()


@dataclass(frozen=True)
class _Agreed:
    """What the ranks told each other before the update."""

    waves: int
    leftovers: list[bool]
    used: set[int]


class Updater:
    """Runs the optimizer on the reduced gradients.

    Args:
        clip_norm: the largest global norm; None leaves gradients as they are.
    """

    def __init__(
        self,
        runtime: Runtime,
        optimizer: torch.optim.Optimizer,
        scale: LossScale,
        clip_norm: float | None,
    ) -> None:
        self.optimizer, self.scale, self._clip_norm = optimizer, scale, clip_norm
        self._runtime, self._reducer = runtime, runtime.reducer
        self._collectives: Collectives = runtime.collectives
        self._row = self._collectives.mesh.index(DATA)
        self._buckets = self._reducer.buckets
        self._steps = 0
        self._reducer.trace = scale.dynamic
        self._num_states = -1
        self.views = Views(runtime.units, runtime.memory)
        self.views.attach(optimizer)
        runtime.on_unfreeze = self.views.unfreeze
        self.hidden = HiddenUpdates(runtime, self.views, optimizer)
        self._reducer.before_backward = self.settle

    def update(self) -> StepResult:
        """Finish the gradients of a complete batch and update the parameters, unless a gradient is not finite."""
        self.settle()
        self.views.attach(self.optimizer)
        agreed = self._agree()
        self._finish_gradients(agreed)
        norm = self._norm() / self.scale.value
        lr = self.rates
        self._steps += 1
        if not math.isfinite(norm):
            scale = self.scale.value
            self._skip()
            return StepResult(False, norm, scale, True, lr)
        factor = self._factor(norm)
        self._scale_gradients(factor)
        self._reducer.spread()
        self.hidden.note_settings()
        if _has_step_hooks(self.optimizer):  # they find everything updated
            self.hidden.start(agreed.used, factor)
            self.settle()
            self.hidden.restore_settings()
            self._update_on_device(agreed.used)
        else:
            self._update_on_device(agreed.used)
            self.hidden.start(agreed.used, factor)
        self._forget()
        result = StepResult(True, norm, self.scale.value, False, lr)
        self.scale.succeeded()
        if not self.hidden.under_way:
            self._count_moments()
        return result

    def settle(self) -> None:
        """Wait until the updates that run beside the caller are done."""
        self.hidden.settle()
        self._count_moments()

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rate of each parameter group."""
        return tuple(float(group["lr"]) for group in self.optimizer.param_groups)

    @property
    def _members(self) -> list[Member]:
        return [member for bucket in self._buckets for member in bucket.members]

    # ---------------------------------------------------------------- gradients

    def _agree(self) -> _Agreed:
        """Exchange which parameters were used and what is left to reduce, in one small message."""
        used = [id(member) in bucket.used for bucket in self._buckets for member in bucket.members]
        message = struct.pack("<q", self._reducer.waves) + bytes([*self._reducer.leftovers(), *used])
        every, handle = self._collectives.exchange(torch.frombuffer(bytearray(message), dtype=torch.uint8), DATA)
        handle.wait()
        rows = [bytes(row.tolist()) for row in every]
        waves = max(struct.unpack_from("<q", row)[0] for row in rows)
        flags = [any(column) for column in zip(*(row[8:] for row in rows), strict=True)]
        num = len(self._buckets)
        taken = {id(m) for m, flag in zip(self._members, flags[num:], strict=True) if flag}
        return _Agreed(waves, flags[:num], taken)

    def _finish_gradients(self, agreed: _Agreed) -> None:
        while self._reducer.waves < agreed.waves:
            self._reducer.end_wave()
        if any(agreed.leftovers):
            self._reducer.launch(agreed.leftovers)
        self._reducer.drain()
        self._reducer.collect_unreduced()

    def _norm(self) -> float:
        """The global norm of the (still scaled) gradients; the same number on every rank."""
        parts = [part for bucket in self._buckets for part in self._squares(bucket)]
        if len({part.device for part in parts}) > 1:
            parts = [part.cpu() for part in parts]
        mine = torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64)
        every, handle = self._collectives.exchange(mine.cpu().view(1), DATA)
        handle.wait()
        total = 0.0
        for part in every.view(-1).tolist():
            total += part
        return math.sqrt(total) if total >= 0 else math.nan

    def _squares(self, bucket: Bucket) -> list[Tensor]:
        if bucket.plan.grad_step.tier is Tier.DISK:
            return bucket.squares if bucket.filled else []
        return [square(grad) for grad in self._owned(bucket)]

    def _owned(self, bucket: Bucket) -> list[Tensor]:
        """What this rank owns of a bucket's reduced gradient, a tensor for each segment (or parameter, if not
        collected).
        """
        if bucket.shard is None:
            return [m.param.grad for m in bucket.members if m.param.grad is not None]
        return bucket.parts(bucket.shard.lend().tensor, bucket.used)

    def _factor(self, norm: float) -> float:
        """What gradients are multiplied by: the loss scale undone, and the norm clipped."""
        factor = 1.0 / self.scale.value
        if self._clip_norm is not None:
            factor *= min(1.0, self._clip_norm / (norm + CLIP_EPS))
        return factor

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
                    grad = bucket.grad_of(member, self._row, shard)
                    view.tensor.grad = None if grad is None else grad.to(view.tensor.dtype)
        units = [unit for unit in self._runtime.units if not self.hidden.takes(unit.segments[0])]
        if units:
            self.optimizer.step()
            self._runtime.executor.publish(units)
        elif _has_step_hooks(self.optimizer):
            self.optimizer.step()  # without a gradient, it does no more than to call them
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers look for it

    def _forget(self) -> None:
        for view in self.views:
            if not self.hidden.takes(view.member.segment):  # the others' are those of an update that may be going on
                view.tensor.grad = None
        self._reducer.zero()

    def _skip(self) -> None:
        """Leave an update out: name the parameter, lower the loss scale, forget the gradients."""
        culprit = self._culprit()
        before = self.scale.value
        self._forget()
        self._reducer.trace = True
        self.scale.overflowed(culprit)
        lowered = f"; loss scale {before:g} -> {self.scale.value:g}" if self.scale.value != before else ""
        warnings.warn(f"step {self._steps}: {culprit}; the update is skipped{lowered}", stacklevel=4)

    def _culprit(self) -> str:
        """The first parameter whose gradient is not finite, and the ranks it came from if they were traced."""
        first = len(self._members)
        for number, (bucket, member) in enumerate((b, m) for b in self._buckets for m in b.members):
            grad = bucket.owned_of(member, self._row, None if bucket.shard is None else bucket.shard.load())
            if grad is not None and not bool(torch.isfinite(grad).all()):
                first = number
                break
        every = self._collectives.exchange_objects((first, self._reducer.suspect), DATA)
        ranks = [str(rank) for rank, (_, suspect) in enumerate(every) if suspect]
        first = min(number for number, _ in every)
        if first == len(self._members):
            return "the gradients are finite one by one, but their norm is not"
        source = f"from rank {', '.join(ranks)}" if ranks else "from a rank that is named if it happens again"
        if self._collectives.mesh.num_ranks == 1:
            source = "on rank 0"
        return f"the gradient of '{self._members[first].fqn}' is not finite ({source})"

    def _count_moments(self) -> None:
        num_states = sum(len(state) for state in self.optimizer.state.values())
        if num_states != self._num_states:
            self._num_states = num_states
            for tier, num_bytes in self.views.moment_bytes(self.optimizer).items():
                if tier is not Tier.DISK:
                    self._runtime.memory.ledger.set("moments", num_bytes, tier)


def _has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
