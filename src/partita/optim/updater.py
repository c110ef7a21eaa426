"""What every way to update shares: the optimizer on its views, what the ranks tell each other, what is forgotten after.

An :class:`Updater` runs the optimizer on reduced gradients: at the step (:mod:`partita.optim.step`), where all of them
are known, or in backward (:mod:`partita.optim.in_backward`), where none of them rests.
"""

import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from partita.comm.collectives import Collectives
from partita.optim.hidden import HiddenUpdates
from partita.optim.loss_scale import LossScale
from partita.optim.views import Views
from partita.plan.residence import Tier
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
    """What the ranks told each other before the update."""

    waves: int
    leftovers: list[bool]
    used: set[int]


class Updater(ABC):
    """Runs the optimizer on the reduced gradients.

    Args:
        clip_norm: the largest norm of what is clipped together; None leaves gradients as they are.
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
        self.steps = 0
        self.culprit = ""  # why the last update that was left out was
        self._reducer.trace = scale.dynamic
        self._num_states = -1
        self.views = Views(runtime.units, runtime.memory)
        self.views.attach(optimizer)
        runtime.on_unfreeze = self.views.unfreeze
        self.hidden = HiddenUpdates(runtime, self.views, optimizer)
        self._reducer.before_backward = self.begin

    @abstractmethod
    def begin(self) -> None:
        """Before the first gradient of a backward."""

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

    def settle(self) -> None:
        """Wait until the updates that run beside the caller are done."""
        self.hidden.settle()
        self._count_moments()

    def groups_by_name(self) -> list[dict[str, Any]]:
        """The optimizer's groups, with the names of their parameters."""
        names = self.views.names_in_groups
        return [{**group, "params": names[number]} for number, group in enumerate(self.optimizer.param_groups)]

    def counters(self) -> dict[str, float]:
        """What a run goes on from, beside states and settings."""
        return {"steps": self.steps, **self.scale.counters()}

    def restore_counters(self, counters: dict[str, float]) -> None:
        """Go on from what :meth:`counters` was."""
        self.steps = int(counters["steps"])
        self.scale.restore(counters)

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rate of each parameter group."""
        return tuple(float(group["lr"]) for group in self.optimizer.param_groups)

    @property
    def _members(self) -> list[Member]:
        return [member for bucket in self._buckets for member in bucket.members]

    # ------------------------------------------------------------------ for both

    def _agree(self) -> Agreed:
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
        return Agreed(waves, flags[:num], taken)

    def _factor(self, norm: float) -> float:
        """What gradients are multiplied by: the loss scale undone, and the norm clipped."""
        factor = 1.0 / self.scale.value
        if self._clip_norm is not None:
            factor *= min(1.0, self._clip_norm / (norm + CLIP_EPS))
        return factor

    def _call_optimizer(self, *, always: bool = False) -> None:
        """The step on what has a gradient; where nothing has, it does no more than to call the hooks."""
        if always or self._has_step_hooks:
            self.optimizer.step()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers look for it

    @property
    def _has_step_hooks(self) -> bool:
        return bool(self.optimizer._optimizer_step_pre_hooks or self.optimizer._optimizer_step_post_hooks)

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
