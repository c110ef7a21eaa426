"""Exponential moving averages (EMA) of the weights, sharded over the ranks."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from partita.comm.synchronization_check import check_synchronized
from partita.errors import PartitaError
from partita.kernels.chunks import in_chunks
from partita.memory.tiers import StoredState
from partita.optim.extension import ComingUpdate, UpdateListener
from partita.optim.updater import Updater
from partita.sharding.runtime import Runtime
from partita.sharding.segment import Segment
from partita.sharding.weights import weights_read, write_weights
from partita.table.residence import Tier

Decay = float | Callable[[int], float]
BatchCheck = Callable[[str, str], None]  # raises if a batch is in progress; see MicroBatches.check_between_batches


class Ema(UpdateListener):
    """An exponential moving average of the weights, made by :meth:`Engine.ema`.

    After every update, ``average = decay * average + (1 - decay) * weights``, in fp32. Each rank keeps the average of
    the weights that it updates: 4 bytes per parameter, divided by the number of ranks that shard the optimizer states
    at stage 3. The first average is the weights themselves. Buffers and frozen parameters are not averaged.

    Attributes:
        name: the prefix of the average's keys in checkpoints.
        decay: the decay, or the function that returns it for a step.
    """

    setting = "engine.ema"

    def __init__(
        self, name: str, decay: Decay, runtime: Runtime, updater: Updater, between_batches: BatchCheck
    ) -> None:
        self.name = name
        self.average = f"{name}."
        self.decay = decay
        self._runtime = runtime
        self._updater = updater
        self._states = dict[int, StoredState]()
        self._check_between_batches = between_batches
        self._due: int | None = None  # the step whose weights are not yet in the average
        self._is_applied = False
        for segment in self._segments():
            self._state_of(segment)

    def __repr__(self) -> str:
        return f"Ema(name={self.name!r}, decay={self.decay!r})"

    def _segments(self) -> list[Segment]:
        return [segment for unit in self._runtime.units for segment in unit.trained]

    def _state_of(self, segment: Segment) -> StoredState:
        """Return the average of this rank's shard of a segment. One that begins to train has none yet."""
        if id(segment) not in self._states:
            # States on disk are saved from memory, so the average is on the host then.
            tier = Tier.HOST if segment.plan.master.tier is Tier.DISK else segment.plan.master.tier
            with weights_read(segment) as weights:
                kept = self._runtime.memory.keep_values("average", weights, torch.float32, tier)
            self._states[id(segment)] = kept
        return self._states[id(segment)]

    # --------------------------------------------------------------------- updates

    def before_update(self, coming: ComingUpdate) -> None:
        """Average the weights of the last update, for which nothing has waited until now."""
        self.complete()

    def after_update(self, step: int, *, is_warming_up: bool) -> None:
        self._due = step

    def prepare_for_checkpoint(self, step: int, *, is_warming_up: bool) -> None:
        self.complete()

    def complete(self) -> None:
        """Average the weights of the last update, which must be complete, if that is not done yet."""
        if self._due is None:
            return
        decay = self._decay_of(self._due)
        for segment in self._segments():
            average = self._state_of(segment).lease().wait()
            with weights_read(segment) as weights:
                for mean, new in in_chunks(average, weights):
                    mean.mul_(decay).add_(new.to(mean.device, torch.float32) * (1.0 - decay))
        self._due = None

    def _decay_of(self, step: int) -> float:
        decay = self.decay(step) if callable(self.decay) else self.decay
        if not 0.0 <= decay <= 1.0:
            raise PartitaError(f"engine.ema: expected a decay between 0 and 1; got {decay!r} for step {step}")
        return float(decay)

    # ----------------------------------------------------------------- checkpoints

    def prepare(self, segment: Segment) -> None:
        self._state_of(segment)

    def clear(self) -> None:
        self._due = None

    def saved(self, segment: Segment) -> Mapping[str, Tensor]:
        state = self._states.get(id(segment))
        return {} if state is None else {self.average: state.lease().tensor}

    # --------------------------------------------------------------------- reading

    @property
    def is_applied(self) -> bool:
        """True inside :meth:`applied`."""
        return self._is_applied

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the model's weights by the average inside a ``with`` block, for evaluation and export.

        :meth:`Engine.eval_batch`, :meth:`Engine.export`, :meth:`Engine.state_dict`, forwards and
        :meth:`Engine.gathered` then read the average. Afterwards, also after an error on all ranks, the weights have
        their own values again, bit by bit. No copy is made: the weights and the average change places, unit by unit. A
        collective.

        Raises:
            PartitaError: inside a batch, or inside the block of an average; or some ranks leave the block and others do
                not.
        """
        self._swap_checked()
        self._is_applied = True
        try:
            yield
        finally:
            if not self._updater.is_closed:
                self._is_applied = False
                self._swap()

    def _swap_checked(self) -> None:
        if self._updater.is_closed:
            raise PartitaError("ema.applied: the engine is closed: make a new one with partita.initialize")
        if any(isinstance(each, Ema) and each.is_applied for each in self._updater.listeners):
            raise PartitaError("engine.ema: an average is applied already: leave its block first")
        remedy = "apply the average after the step that updates the parameters"
        self._check_between_batches("ema.applied", remedy)
        if self._runtime.reducer.holds_batch:
            raise PartitaError(f"ema.applied() after a backward: its gradients are those of the weights; {remedy}")
        self._updater.take_written()
        self.complete()
        self._swap()

    def _swap(self) -> None:
        """Exchange the weights and the average. An error of one rank inside the block does not leave others waiting."""
        collectives = self._runtime.collectives
        check_synchronized(collectives.all_ranks, collectives.mesh.watchdog, "ema.applied")
        for segment in self._segments():
            average = self._state_of(segment).lease().wait()
            with weights_read(segment) as weights:
                before = weights.to(average.device, torch.float32, copy=True)
            write_weights(self._runtime, segment, average)
            average.copy_(before)
        self._runtime.rewritten()


class Averages:
    """The averages of an engine."""

    def __init__(self, runtime: Runtime, updater: Updater, between_batches: BatchCheck) -> None:
        self._runtime = runtime
        self._updater = updater
        self._check_between_batches = between_batches

    def add(self, decay: Decay, name: str) -> Ema:
        """Start an average of the current weights. See :meth:`Engine.ema`."""
        if not callable(decay) and not 0.0 <= decay <= 1.0:
            raise PartitaError(f"engine.ema: expected a decay between 0 and 1, or a function; got {decay!r}")
        taken = [each.name for each in self._updater.listeners if isinstance(each, Ema)]
        if not name.isidentifier() or name in (*taken, "model", "optimizer", "scheduler", "partita"):
            problem = "is another average's" if name in taken else "cannot be the prefix of keys in a checkpoint"
            raise PartitaError(f"engine.ema: name {name!r} {problem}: pass another one, such as name='ema_slow'")
        if self._runtime.row.separate_axes:
            raise PartitaError(
                "engine.ema: replicas that train separately (communication.every) have different weights between two "
                "rounds: leave communication.every out"
            )
        self.check_none_applied("engine.ema")
        self._updater.take_written()
        ema = Ema(name, decay, self._runtime, self._updater, self._check_between_batches)
        self._updater.set_listeners((*self._updater.listeners, ema))
        return ema

    def check_none_applied(self, call: str) -> None:
        """Check that the model has its own weights.

        Raises:
            PartitaError: an average is applied.
        """
        for each in self._updater.listeners:
            if isinstance(each, Ema) and each.is_applied:
                raise PartitaError(
                    f"{call}: inside the block of {each.name}.applied() the model has averaged weights: leave it first"
                )
