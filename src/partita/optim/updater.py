"""What every way to update shares: the optimizer on its views, what the ranks tell each other, what is forgotten after.

An :class:`Updater` runs the optimizer on reduced gradients: at the step (:mod:`partita.optim.step`), where all of them
are known, or in backward (:mod:`partita.optim.in_backward`), where none of them rests.
"""

import math
import struct
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from partita.errors import PartitaError
from partita.memory.streams import Event
from partita.optim.counted import copies
from partita.optim.guard import Guard
from partita.optim.hidden import HiddenUpdates
from partita.optim.loss_scale import LossScale
from partita.optim.shadow import run_step
from partita.optim.views import Views
from partita.plan.residence import Tier
from partita.sharding.buckets import Bucket
from partita.sharding.runtime import Runtime
from partita.sharding.unit import Member, Segment

# torch.nn.utils.clip_grad_norm_ adds this to the norm that it divides by.
CLIP_EPS = 1e-6
# What precedes the flags in the message before an update: waves, digest of what was written, scale of the gradients.
HEADER = "<qqd"
NO_SCALE, MANY_SCALES = 0.0, math.nan


@dataclass(frozen=True)
class StepResult:
    """What :meth:`Engine.step` did.

    ``stepped``: the parameters were updated. ``skipped``: the batch was complete, but a gradient was not finite and the
    update was left out. ``grad_norm``: the global norm before clipping (None before the batch is complete). ``lr``: the
    learning rate of each parameter group in this update, or in the one that this micro-batch belongs to.
    ``rewound_to``: the step of the checkpoint that training went back to (``precision.nonfinite: rewind``).
    """

    stepped: bool
    grad_norm: float | None = None
    loss_scale: float = 1.0
    skipped: bool = False
    lr: tuple[float, ...] = ()
    rewound_to: int | None = None


@dataclass(frozen=True)
class Agreed:
    """What the ranks told each other before the update; ``scale``: what their gradients are multiplied by."""

    waves: int
    leftovers: list[bool]
    used: set[int]
    scale: float


class Updater(ABC):
    """Runs the optimizer on the reduced gradients.

    Args:
        clip_norm: the largest norm of what is clipped together; None leaves gradients as they are.
        counted: attributes that the optimizer counts in.
    """

    def __init__(
        self,
        runtime: Runtime,
        optimizer: torch.optim.Optimizer,
        scale: LossScale,
        clip_norm: float | None,
        counted: Sequence[str] = (),
    ) -> None:
        self.optimizer, self.scale, self._clip_norm, self._counted = optimizer, scale, clip_norm, counted
        self._runtime, self._reducer = runtime, runtime.reducer
        self._group = runtime.gradient_group
        self._buckets = self._reducer.buckets
        self.steps = 0
        self.culprit = ""  # why the last update that was left out was
        if scale.dynamic:
            self._reducer.trace()
        self._num_states = -1
        self._told_unscaled = False
        self.views = Views(runtime.units, runtime.memory)
        self.views.attach(optimizer)
        self.hidden = HiddenUpdates(runtime, self.views, optimizer, counted)
        self._reducer.connect(self)
        self._guard = Guard(optimizer, lambda: self._reducer.holds_batch)

    @abstractmethod
    def begin(self) -> None:
        """Before the first gradient of a backward."""

    @abstractmethod
    def use(self, bucket: Bucket) -> Event:
        """Update with gradients that rest nowhere, whose reduction is queued; returns when they are used up."""

    def unfreeze(self, segment: Segment) -> None:
        """A segment begins to train."""
        self.views.unfreeze(segment)

    @abstractmethod
    def update(self) -> StepResult:
        """End a batch: when it returns, its gradients are measured and its updates are at least under way."""

    @abstractmethod
    def give_up(self) -> None:
        """Let go of what was queued since the last update."""

    def zero(self) -> None:
        """Drop the gradients collected so far."""
        self.give_up()
        self.settle()
        self._reducer.drain()
        self._reducer.zero()

    def close(self) -> None:
        """The optimizer is the user's own again."""
        self.hidden.close()
        self._guard.remove()

    def settle(self) -> None:
        """Wait until the updates that run beside the caller are done."""
        self.hidden.settle()
        self._count_moments()

    def groups_by_name(self) -> list[dict[str, Any]]:
        """The optimizer's groups, with the names of their parameters."""
        names = self.views.names_in_groups
        return [{**group, "params": names[number]} for number, group in enumerate(self.optimizer.param_groups)]

    def counters(self) -> dict[str, Any]:
        """What a run goes on from, beside states and settings."""
        counted = {"optimizer": copies(self.optimizer, self._counted)} if self._counted else {}
        return {"steps": self.steps, **self.scale.counters(), **counted}

    def restore_counters(self, counters: dict[str, Any]) -> None:
        """Go on from what :meth:`counters` was."""
        self.steps = int(counters["steps"])
        found = counters.get("optimizer", {})
        self.optimizer.__dict__.update({name: found[name] for name in self._counted if name in found})
        self.scale.restore(counters)

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rate of each parameter group."""
        return tuple(float(group["lr"]) for group in self.optimizer.param_groups)

    @property
    def _members(self) -> list[Member]:
        return [member for bucket in self._buckets for member in bucket.members]

    # ------------------------------------------------------------------ for both

    def _agree(self, call: str = "engine.step") -> Agreed:
        """Exchange which parameters were used and what is left to reduce, in one small message, at ``call``."""
        used = [id(member) in bucket.used for bucket in self._buckets for member in bucket.members]
        header = struct.pack(HEADER, self._reducer.waves, self._runtime.written.digest, self._own_scale)
        message = header + bytes([*self._reducer.leftovers(), *used])
        every = self._group.exchange(torch.frombuffer(bytearray(message), dtype=torch.uint8), call).wait()
        rows = [bytes(row.tolist()) for row in every]
        waves, digests, scales = zip(*(struct.unpack_from(HEADER, row) for row in rows), strict=True)
        if any(digests):
            self._compare_written()
        flags = [any(column) for column in zip(*(row[struct.calcsize(HEADER) :] for row in rows), strict=True)]
        num = len(self._buckets)
        taken = {id(m) for m, flag in zip(self._members, flags[num:], strict=True) if flag}
        return Agreed(max(waves), flags[:num], taken, self._one_scale(scales))

    def gradient_scale(self) -> float:
        """What the gradients collected so far are multiplied by. A collective.

        Raises:
            PartitaError: not all of them by the same factor.
        """
        self._reducer.join()  # another rank's backward may wait for this one in a reduction
        return self._one_scale(self._group.exchange_objects(self._own_scale, "engine.gradient"))

    @property
    def _own_scale(self) -> float:
        """The factor of this rank's gradients."""
        scales = self._reducer.scales
        return MANY_SCALES if len(scales) > 1 else next(iter(scales), NO_SCALE)

    def _one_scale(self, scales: Sequence[float]) -> float:
        """The factor of all ranks' gradients: its own, another engine's, or 1 where nobody scaled the loss."""
        found = {scale for scale in scales if scale != NO_SCALE}
        if len(found) > 1 or any(map(math.isnan, found)):
            raise PartitaError(
                f"step {self.steps + 1}: the gradients of this batch came from losses with several loss scales (by "
                "engine.backward, plain loss.backward(), or engine.backward of another engine): call backward of one "
                "engine for all of them, or drop what came from the others by engine.zero_grad()"
            )
        scale = found.pop() if found else self.scale.value
        if scale == 1.0 != self.scale.value and not self._told_unscaled:
            self._told_unscaled = True
            warnings.warn(
                "loss.backward() was called where engine.backward(loss) multiplies by the loss scale "
                f"({self.scale.value:g}): gradients too small for fp16 are lost; call engine.backward(loss)",
                stacklevel=7,
            )
        return scale

    def take_written(self) -> None:
        """Have master weights take up what was written into the parameters. A collective.

        Raises:
            PartitaError: the ranks wrote different values.
        """
        self.settle()
        if self._runtime.written:
            self._runtime.written.take()
            self._compare_written()

    def _compare_written(self) -> None:
        written = self._runtime.written
        every = self._group.exchange_objects((written.names, written.digest), "what was written")
        written.agreed()
        for rank, (names, digest) in enumerate(every):
            first, expected = every[0]
            if digest != expected:
                name = next(iter({*first} ^ {*names}), (names or first)[0])
                raise PartitaError(
                    f"step {self.steps + 1}: rank {rank} wrote other values into parameters than rank 0, or into "
                    f"others (of {len({*first, *names})}: '{name}'); write the same on every rank, or write inside "
                    "`with engine.gathered(..., modify=True)`, where rank 0's values become those of all"
                )

    def _factor(self, norm: float, scale: float, max_norm: float | None) -> float:
        """What gradients are multiplied by: the loss ``scale`` undone, and the norm clipped."""
        factor = 1.0 / scale
        if max_norm is not None:
            factor *= min(1.0, max_norm / (norm + CLIP_EPS))
        return factor

    def _call_optimizer(self, *, always: bool = False) -> None:
        """The step on what has a gradient; where nothing has, it does no more than to call the hooks."""
        if always or self._has_step_hooks:
            self._guard.ours = True
            try:
                run_step(self.optimizer)
            finally:
                self._guard.ours = False
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers look for it

    @property
    def _has_step_hooks(self) -> bool:
        return self._guard.watched

    def _forget(self) -> None:
        for view in self.views:
            if not self.hidden.takes(view.member.segment):  # the others' are those of an update that may be going on
                view.tensor.grad = None
        self._reducer.zero()

    def _count_moments(self) -> None:
        num_states = sum(len(state) for state in self.optimizer.state.values())
        if num_states != self._num_states:
            self._num_states = num_states
            for tier, num_bytes in self.views.moment_bytes(self.optimizer).items():
                if tier is not Tier.DISK:
                    self._runtime.memory.ledger.set("moments", num_bytes, tier)
