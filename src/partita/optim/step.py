"""One optimizer step: agree, finish the reductions, measure, clip, update, publish.

Every stage runs the same code on the same cuts: the norm is the rank-ordered sum of what each rank's shards contribute,
and gradients are scaled before they are spread, so the numbers do not depend on the stage.
"""

import math
import struct
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from partita.comm.collectives import Collectives
from partita.memory.ledger import Ledger
from partita.optim.loss_scale import LossScale
from partita.optim.views import Views, moment_bytes
from partita.sharding.buckets import Bucket
from partita.sharding.executor import Executor
from partita.sharding.reducer import GradientReducer
from partita.sharding.unit import Member, Unit

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
        units: the model's units, in order.
        clip_norm: the largest global norm; None leaves gradients as they are.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        views: Views,
        optimizer: torch.optim.Optimizer,
        reducer: GradientReducer,
        executor: Executor,
        scale: LossScale,
        clip_norm: float | None,
        ledger: Ledger,
    ) -> None:
        self._units, self._views, self.optimizer = units, views, optimizer
        self._reducer, self._executor, self.scale, self._clip_norm, self._ledger = (
            reducer,
            executor,
            scale,
            clip_norm,
            ledger,
        )
        self._collectives: Collectives = reducer.collectives
        self._row = self._collectives.mesh.index(DATA)
        self._buckets = reducer.buckets
        self._steps = 0
        reducer.trace = scale.dynamic
        self._num_states = -1

    def update(self) -> StepResult:
        """Finish the gradients of a complete batch and update the parameters, unless a gradient is not finite."""
        self._views.attach(self.optimizer)
        agreed = self._agree()
        self._finish_gradients(agreed)
        norm = self._norm() / self.scale.value
        lr = self.rates
        self._steps += 1
        if not math.isfinite(norm):
            scale = self.scale.value
            self._skip()
            return StepResult(False, norm, scale, True, lr)
        self._scale_gradients(norm)
        self._reducer.spread()
        self._assign(agreed.used)
        self.optimizer.step()
        self._publish()
        result = StepResult(True, norm, self.scale.value, False, lr)
        self.scale.succeeded()
        self._count_moments()
        return result

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
        parts = [_square(grad) for bucket in self._buckets for grad in self._owned(bucket)]
        mine = torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64)
        every, handle = self._collectives.exchange(mine.cpu().view(1), DATA)
        handle.wait()
        total = 0.0
        for part in every.view(-1).tolist():
            total += part
        return math.sqrt(total) if total >= 0 else math.nan

    def _owned(self, bucket: Bucket) -> list[Tensor]:
        """What this rank owns of a bucket's reduced gradient, a tensor for each segment (or parameter, if not
        collected).
        """
        if bucket.in_place:
            return [m.param.grad for m in bucket.members if m.param.grad is not None]
        assert bucket.shard is not None
        sizes = [segment.layout.part_elements for segment in bucket.segments]
        return list(bucket.shard.split(sizes))

    def _scale_gradients(self, norm: float) -> None:
        factor = 1.0 / self.scale.value
        if self._clip_norm is not None:
            factor *= min(1.0, self._clip_norm / (norm + CLIP_EPS))
        if factor != 1.0:
            for bucket in self._buckets:
                for grad in self._owned(bucket):
                    grad.mul_(factor)

    def _assign(self, used: set[int]) -> None:
        for bucket in self._buckets:
            for member in bucket.members:
                view = self._views.of(member.param)
                if view is None or not view.connected:
                    continue
                grad = bucket.grad_of(member, self._row) if id(member) in used and member.param.requires_grad else None
                view.tensor.grad = None if grad is None else grad.to(view.tensor.dtype)

    # ------------------------------------------------------------------- update

    def _publish(self) -> None:
        """Bring the updated master weights into what rests, and let the gradients go."""
        segments = [segment for unit in self._units for segment in unit.segments]
        self._executor.publish([segment for segment in segments if segment.master is not None and segment.trains])
        self._forget()

    def _forget(self) -> None:
        for view in self._views:
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
            grad = bucket.owned_of(member, self._row)
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
            self._ledger.set("moments", moment_bytes(self.optimizer))


def _square(grad: Tensor) -> Tensor:
    """The sum of squares, in float64."""
    norm: Tensor = torch.linalg.vector_norm(grad, dtype=torch.float32)
    return norm.double().square()
