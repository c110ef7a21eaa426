"""The base class of updaters, which run the optimizer on reduced gradients: at the step (:mod:`partita.optim.step`),
or in backward (:mod:`partita.optim.in_backward`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from partita.errors import PartitaError
from partita.layout.off_stage import is_off_stage
from partita.layout.parameters import find_all_parameters, find_quantized_params, is_quantized
from partita.memory.streams import Event
from partita.optim.consensus import Agreed, Consensus, LossScale
from partita.optim.extension import CollectiveOptimizer, UpdateListener
from partita.optim.full_updates import FullUpdates
from partita.optim.fused import rule_for
from partita.optim.optimizer import Guard, carry_overrides, copies
from partita.optim.segment_update import Context
from partita.optim.states import OptimizerStates, Views
from partita.optim.updates import Updates
from partita.sharding.buckets import Bucket
from partita.sharding.runtime import Runtime
from partita.sharding.segment import Segment

# torch.nn.utils.clip_grad_norm_ adds this to the norm that it divides by.
CLIP_EPS = 1e-6


@dataclass(frozen=True)
class StepResult:
    """The outcome of :meth:`Engine.step`.

    ``stepped``: the parameters were updated. ``skipped``: the batch was complete, but a gradient was not finite and the
    update was skipped. ``grad_norm``: the global norm before clipping (None before the batch is complete). ``lr``: the
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

    Attributes:
        steps: the number of complete batches.
        skipped: the number of these whose update was skipped.
        culprit: the cause of the last skipped update.
        is_closed: True after :meth:`close`.

    Args:
        clip_norm: the maximum gradient norm; None for no clipping.
        counted: the names of the optimizer's attributes that its step changes.
        warmup_steps: the number of updates before the row's second strategy is used.
        on_full_parameters: True if the optimizer needs full parameters, and ranks have slices.
    """

    def __init__(
        self,
        runtime: Runtime,
        optimizer: Optimizer,
        scale: LossScale,
        clip_norm: float | None,
        counted: Sequence[str] = (),
        warmup_steps: int = 0,
        *,
        on_full_parameters: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self.scale = scale
        self.steps = 0
        self.skipped = 0
        self.culprit = ""
        self.is_closed = False
        everywhere = [*find_all_parameters(runtime.model), *find_quantized_params(runtime.model)]
        others = [info for info in everywhere if is_off_stage(info.param) or is_quantized(info.param)]
        self.views = Views(runtime.units, runtime.memory, others)
        name = type(optimizer).__name__
        self._full_updates = FullUpdates(runtime, self.views, name) if on_full_parameters else None
        self.views.attach(optimizer)
        if isinstance(optimizer, CollectiveOptimizer):
            optimizer.connect(runtime, self.views)
        self._take_back_overrides = carry_overrides(optimizer, self.views)
        self.states = OptimizerStates(optimizer, self.views, runtime.memory)
        context = Context(
            rule_for(optimizer),
            self.views,
            self.states,
            runtime.publisher,
            runtime.memory,
            runtime.device,
            self._full_updates,
        )
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
        self._guard = Guard(optimizer, runtime, lambda: self._reducer.holds_batch, self._writes)

    @property
    def listeners(self) -> tuple[UpdateListener, ...]:
        """The listeners that are called at updates."""
        return self._listeners

    def set_listeners(self, listeners: tuple[UpdateListener, ...]) -> None:
        """Set the listeners that are called at updates from now on."""
        self._listeners = listeners

    @abstractmethod
    def begin(self) -> None:
        """Called before the first gradient of a backward."""

    @abstractmethod
    def use(self, bucket: Bucket) -> Event:
        """Update with gradients that are not stored, whose reduction is queued. Returns the event of their last use."""

    def unfreeze(self, segment: Segment) -> None:
        """Prepare a segment that begins to train."""
        self.views.unfreeze(segment)

    @abstractmethod
    def update(self) -> StepResult:
        """End a batch: on return its gradients are measured and its updates are complete or running."""

    @abstractmethod
    def give_up(self) -> None:
        """Forget queued updates and measured gradients since the last update."""

    def zero(self) -> None:
        """Drop the gradients collected so far."""
        self.give_up()
        self.wait_for_updates()
        self._reducer.drain()
        self._reducer.zero()

    def close(self) -> None:
        """Give the optimizer back to the user."""
        self.is_closed = True
        self._updates.close()
        self._guard.remove()
        self._take_back_overrides()

    def _check_backward(self, agreed: Agreed, call: str) -> None:
        """Check that a parameter has a gradient. (A pipeline stage may have no parameters that train.)

        Raises:
            PartitaError: on all ranks: no parameter has one on any rank. A backward may follow.
        """
        if agreed.used or self._runtime.collectives.mesh.shape.size("pipeline") > 1:
            return
        self.zero()
        raise PartitaError(
            f"{call}: no parameter has a gradient on any rank; call engine.backward(loss) before it, once for each "
            "micro-batch, or remove the call"
        )

    @contextmanager
    def _writes(self) -> Iterator[None]:
        """Context in which the optimizer may write parameters outside a step; they are published at its end. A
        collective.

        Raises:
            PartitaError: the optimizer cannot access the weights between steps.
        """
        if self._full_updates is not None or any(view.only_during_update for view in self.views):
            raise PartitaError(
                f"{type(self.optimizer).__name__} writes parameters outside its step (train(), eval()), but cannot "
                "access them there: set zero.offload.optimizer to none or host, and precision.master to fp32; where "
                "ranks have slices of parameters, use an elementwise optimizer"
            )
        self.take_written()
        yield
        self._runtime.publish()

    def wait_for_updates(self) -> None:
        """Wait until overlapped updates are complete."""
        self._updates.wait()

    def gradient_scale(self) -> float:
        """Return the loss scale of the gradients collected so far. A collective.

        Raises:
            PartitaError: they have several loss scales.
        """
        return self._consensus.gradient_scale(self.steps + 1)

    def take_written(self) -> None:
        """Copy values that the user has written into parameters to the master weights. A collective.

        Raises:
            PartitaError: the ranks wrote different values, or a parameter has other memory with other values.
        """
        self.wait_for_updates()
        self._runtime.structure.check_values()
        if self._runtime.written:
            self._runtime.store_written()
            self._consensus.compare_written(self.steps + 1)

    @property
    def loss_scale(self) -> float:
        """The factor that losses are multiplied by."""
        return self.scale.value

    @property
    def is_warming_up(self) -> bool:
        """True in the warm-up, which lasts for a number of updates."""
        return self.steps - self.skipped < self._warmup_steps

    def prepare_for_checkpoint(self) -> None:
        """Reduce all states to what a checkpoint saves, as if this run had loaded it. A collective."""
        for listener in self._listeners:
            listener.prepare_for_checkpoint(self.steps, is_warming_up=self.is_warming_up)
        self._runtime.prepare_for_checkpoint()

    @abstractmethod
    def after_load(self) -> None:
        """Called after states were loaded. A collective."""

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rate of each parameter group."""
        return tuple(float(group["lr"]) for group in self.optimizer.param_groups)

    def groups_by_name(self) -> list[dict[str, Any]]:
        """Return the optimizer's groups, with the names of their parameters."""
        names = self.views.names_in_groups
        return [{**group, "params": names[number]} for number, group in enumerate(self.optimizer.param_groups)]

    def counters(self) -> dict[str, Any]:
        """Return the counters that a run continues from."""
        counted = {"optimizer": copies(self.optimizer.__dict__, self._counted)} if self._counted else {}
        return {"steps": self.steps, "skipped": self.skipped, **self.scale.counters(), **counted}

    def restore_counters(self, counters: dict[str, Any]) -> None:
        """Continue from an earlier result of :meth:`counters`."""
        self.steps = int(counters["steps"])
        self.skipped = int(counters.get("skipped", 0))  # checkpoints of earlier versions have none
        self.scale.restore(counters)
        found = counters.get("optimizer", {})
        self.optimizer.__dict__.update({name: found[name] for name in self._counted if name in found})


def factor_of(norm: float, scale: float, max_norm: float | None) -> float:
    """Return the factor of gradients that removes the loss ``scale`` and clips the norm."""
    factor = 1.0 / scale
    if max_norm is not None:
        factor *= min(1.0, max_norm / (norm + CLIP_EPS))
    return factor
