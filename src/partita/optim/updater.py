"""The base of all updaters: the optimizer on its views, and what the engine and its checkpoints need of it.

An :class:`Updater` runs the optimizer on reduced gradients: at the step (:mod:`partita.optim.step`), where all of them
are known, or in backward (:mod:`partita.optim.in_backward`), where none of them rests.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from partita.errors import PartitaError
from partita.memory.streams import Event
from partita.optim.consensus import Agreed, Consensus
from partita.optim.extension import UpdateListener
from partita.optim.guard import Guard
from partita.optim.loss_scale import LossScale
from partita.optim.overrides import carry_overrides
from partita.optim.rules import rule_for
from partita.optim.segment_update import Context
from partita.optim.snapshot import copies
from partita.optim.states import OptimizerStates
from partita.optim.updates import Updates
from partita.optim.views import Views
from partita.planner.elsewhere import is_elsewhere
from partita.planner.parameters import find_everywhere, find_quantized, is_quantized
from partita.sharding.buckets import Bucket
from partita.sharding.runtime import Runtime
from partita.sharding.unit import Segment

# torch.nn.utils.clip_grad_norm_ adds this to the norm that it divides by.
CLIP_EPS = 1e-6


@dataclass(frozen=True)
class StepResult:
    """The outcome of :meth:`Engine.step`.

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


class Updater(ABC):
    """Runs the optimizer on the reduced gradients.

    Attributes: ``steps``: complete batches so far, of which the updates of ``skipped`` were left out; ``culprit``: why
    the last of these was.

    Args:
        clip_norm: the largest norm of what is clipped together; None leaves gradients as they are.
        counted: attributes that the optimizer counts in.
        warmup_steps: updates before the second strategy of the row takes over.
    """

    def __init__(
        self,
        runtime: Runtime,
        optimizer: Optimizer,
        scale: LossScale,
        clip_norm: float | None,
        counted: Sequence[str] = (),
        warmup_steps: int = 0,
    ) -> None:
        self.optimizer = optimizer
        self.scale = scale
        self.steps = 0
        self.skipped = 0
        self.culprit = ""
        everywhere = [*find_everywhere(runtime.model), *find_quantized(runtime.model)]
        others = [holding for holding in everywhere if is_elsewhere(holding.param) or is_quantized(holding.param)]
        self.views = Views(runtime.units, runtime.memory, others)
        self.views.attach(optimizer)
        self._take_back_overrides = carry_overrides(optimizer, self.views)
        self.states = OptimizerStates(optimizer, self.views, runtime.memory)
        context = Context(rule_for(optimizer), self.views, self.states, runtime.executor, runtime.memory)
        self._updates = Updates(runtime, context, counted)
        self._consensus = Consensus(runtime, scale)
        self._counted = counted
        self._warmup_steps = warmup_steps
        self._listeners: tuple[UpdateListener, ...] = ()
        self._clip_norm = clip_norm
        self._runtime = runtime
        self._reducer = runtime.reducer
        self._reducer.connect(self)
        runtime.warm_up(self.is_warming_up)
        if scale.dynamic:
            self._reducer.finite.traces = True
        self._guard = Guard(optimizer, lambda: self._reducer.holds_batch, self._writes)

    @property
    def listeners(self) -> tuple[UpdateListener, ...]:
        """The listeners that are told of updates."""
        return self._listeners

    def tell(self, listeners: tuple[UpdateListener, ...]) -> None:
        """Tell ``listeners`` of all updates from here on."""
        self._listeners = listeners

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
        self.wait_for_updates()
        self._reducer.drain()
        self._reducer.zero()

    def close(self) -> None:
        """The optimizer is the user's own again."""
        self._updates.close()
        self._guard.remove()
        self._take_back_overrides()

    def _check_backward(self, agreed: Agreed, call: str) -> None:
        """See that a parameter has a gradient. (A stage of a pipeline may have none that trains.)

        Raises:
            PartitaError: on all ranks: no parameter has one on any of them. A backward may follow.
        """
        if agreed.used or self._runtime.collectives.mesh.shape.size("pipeline") > 1:
            return
        self.zero()
        raise PartitaError(
            f"{call}: no parameter has a gradient on any rank; call engine.backward(loss) before it, once for each "
            "micro-batch, or leave the call out"
        )

    @contextmanager
    def _writes(self) -> Iterator[None]:
        """Let the optimizer write its parameters outside a step, and bring what it wrote to all ranks. A collective.

        Raises:
            PartitaError: weights are stored where the optimizer cannot reach them between steps.
        """
        if any(view.lent for view in self.views):
            raise PartitaError(
                f"{type(self.optimizer).__name__} writes parameters outside its step (train(), eval()), but cannot "
                "reach them there: set zero.offload.optimizer to none or host, and precision.master to fp32"
            )
        self.take_written()
        yield
        self._runtime.publish()

    def wait_for_updates(self) -> None:
        """Wait until the updates that run beside the caller are done."""
        self._updates.wait()

    def gradient_scale(self) -> float:
        """Return the factor of the gradients collected so far. A collective.

        Raises:
            PartitaError: not all of them by the same factor.
        """
        return self._consensus.gradient_scale(self.steps + 1)

    def take_written(self) -> None:
        """Have master weights take up what was written into the parameters. A collective.

        Raises:
            PartitaError: the ranks wrote different values, or a parameter was given other memory with other values.
        """
        self.wait_for_updates()
        self._runtime.structure.check_values()
        if self._runtime.written:
            self._runtime.written.take()
            self._consensus.compare_written(self.steps + 1)

    @property
    def loss_scale(self) -> float:
        """The factor of losses."""
        return self.scale.value

    @property
    def is_warming_up(self) -> bool:
        """True in the warm-up, which counts the updates that were made."""
        return self.steps - self.skipped < self._warmup_steps

    def settle(self) -> None:
        """Make what is saved of this run all there is to go on from, in this run, too. A collective."""
        for listener in self._listeners:
            listener.settle(self.steps, is_warming_up=self.is_warming_up)
        self._runtime.settle()

    @abstractmethod
    def loaded(self) -> None:
        """States were replaced. A collective."""

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rate of each parameter group."""
        return tuple(float(group["lr"]) for group in self.optimizer.param_groups)

    def groups_by_name(self) -> list[dict[str, Any]]:
        """The optimizer's groups, with the names of their parameters."""
        names = self.views.names_in_groups
        return [{**group, "params": names[number]} for number, group in enumerate(self.optimizer.param_groups)]

    def counters(self) -> dict[str, Any]:
        """Return the counters that a run continues from."""
        counted = {"optimizer": copies(self.optimizer.__dict__, self._counted)} if self._counted else {}
        return {"steps": self.steps, "skipped": self.skipped, **self.scale.counters(), **counted}

    def restore_counters(self, counters: dict[str, Any]) -> None:
        """Go on from what :meth:`counters` was."""
        self.steps = int(counters["steps"])
        self.skipped = int(counters.get("skipped", 0))  # checkpoints of earlier versions have none
        self.scale.restore(counters)
        found = counters.get("optimizer", {})
        self.optimizer.__dict__.update({name: found[name] for name in self._counted if name in found})


def factor_of(norm: float, scale: float, max_norm: float | None) -> float:
    """Return the factor of gradients that undoes the loss ``scale`` and clips the norm."""
    factor = 1.0 / scale
    if max_norm is not None:
        factor *= min(1.0, max_norm / (norm + CLIP_EPS))
    return factor
