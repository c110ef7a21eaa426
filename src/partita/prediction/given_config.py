"""Forecast of one configuration: bytes from closed forms and a trace, and seconds of a step."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from partita.activation.apply import inputs_tier
from partita.config.load import load_config
from partita.config.resolve import Resolved, resolve
from partita.config.schema import Config
from partita.config.write import writing
from partita.engine.profile import PREDICTED, PROCESS, Span, read_trace, rows, write_trace
from partita.errors import ConfigError, PartitaError
from partita.layout.placement import has_auto_tiers, resolve_tiers
from partita.layout.units import group_units
from partita.parallel.pipeline.apply import schedule_of
from partita.parallel.pipeline.schedule import Schedule
from partita.prediction.chunk_activations import schedule_states
from partita.prediction.estimate import activation_bytes, sent_by_axes, state_and_working_bytes, step_time
from partita.prediction.machine import Machine
from partita.prediction.model_source import ModelSource
from partita.prediction.pending_gradients import bytes_per_chunk, pending_gradients
from partita.prediction.rank_model import RankModel, trace_rank
from partita.prediction.stages import Stage
from partita.prediction.step_cost import StepCost
from partita.prediction.step_timeline import Job, StepTime
from partita.prediction.trace.block_trace import Trace
from partita.table.planned import PlannedUnit
from partita.table.residence import Tier
from partita.table.state_plan import Tiers


@dataclass(frozen=True)
class Estimate:
    """The predicted memory, traffic and time of one config.

    ``stages`` are the pipeline stages; ``units`` has the units of a rank of each stage. ``offload_tier``: the tier of
    the inputs of blocks that are recomputed in backward.
    """

    resolved: Resolved
    rank_model: RankModel
    stages: tuple[Stage, ...]
    units: Mapping[Stage, list[PlannedUnit]]
    offload_tier: Tier = Tier.DEVICE

    @property
    def trace(self) -> Trace:
        """The trace of a micro-batch."""
        ((_, trace),) = self.rank_model.traces.items()
        return replace(trace, offload_tier=self.offload_tier)

    def held(self, stage: Stage) -> dict[tuple[str, str], int]:
        """Return the bytes by (state, tier), on the rank of a stage with the most.

        The keys include ``working`` memory and ``activations``, as in :class:`~partita.prediction.search.Forecast`.
        """
        resolved, trace, units = self.resolved, self.trace, self.units[stage]
        moments = self.rank_model.optimizer.moments
        held = state_and_working_bytes(units, resolved.config, moments, on_host=resolved.on_host)
        per_chunk = bytes_per_chunk(stage, pending_gradients(stage, units, trace), trace)
        held.update(activation_bytes(schedule_states(self.schedule, stage.index), per_chunk, self.offload_tier))
        held["activations", Tier.DEVICE.value] += resolved.batch.accumulate * trace.batch_bytes
        return dict(held)

    @cached_property
    def schedule(self) -> Schedule:
        """The order of work on each rank of the pipeline."""
        return schedule_of(self.resolved)

    def sent(self, stage: Stage) -> Mapping[str, int]:
        """Return the bytes sent in a step, by axes, by the rank of a stage that has the most positions."""
        work = self.rank_model.optimizer.work
        return sent_by_axes(self.units[stage], stage, self.trace, self.resolved.batch.accumulate, work)

    def time(self, machine: Machine) -> StepTime:
        """Return the time of a step on the pipeline stage that takes longest."""
        micros = self.resolved.batch.accumulate
        return step_time(self._step_cost(machine), self.rank_model, self.units, self.trace, micros)

    def _step_cost(self, machine: Machine) -> StepCost:
        resolved = self.resolved
        return StepCost(
            machine, resolved.mesh.num_ranks, machine.compute_dtype, self.rank_model.optimizer, resolved.config
        )

    def write_trace(self, path: Path, machine: Machine, more: Sequence[dict[str, Any]] = ()) -> None:
        """Write a step of the pipeline's first stage for Perfetto (ui.perfetto.dev) or chrome://tracing.

        There is a row for each resource, with at most three micro-batches. A ``path`` that ends in ``.gz`` is
        compressed. ``more`` are further events for the same file.

        Raises:
            ConfigError: the file cannot be written.
        """
        with _writable(path):
            write_trace(path, {"traceEvents": [*self._rows(machine, 0), *more]})

    def add_to_trace(self, path: Path, machine: Machine) -> None:
        """Add the predicted step to a rank's trace (:meth:`partita.Engine.profile`), at the start of its first step.

        Raises:
            ConfigError: the file is not a trace of an engine, or cannot be read or written.
        """
        with _writable(path):
            content = read_trace(path)
            starts = [event["ts"] for event in content["traceEvents"] if event.get("pid") == PROCESS and "ts" in event]
            if not starts:
                raise ConfigError(f"'{path}' has no rows of an engine: expected a trace that engine.profile wrote")
            kept = [event for event in content["traceEvents"] if event.get("pid") != PREDICTED]
            write_trace(path, {**content, "traceEvents": kept + self._rows(machine, int(1e3 * min(starts)))})

    def _rows(self, machine: Machine, start_ns: int) -> list[dict[str, Any]]:
        step_cost = self._step_cost(machine)
        stage, jobs = self.stages[0], list[Job]()
        step_cost.step(self.rank_model, stage, self.units[stage], self.trace, self.resolved.batch.accumulate, jobs)
        names = [self.rank_model.specs[number].name or "the model itself" for number in stage.units]
        spans = [
            Span(
                job.what,
                names[job.unit] if job.unit < len(names) else "loss",
                job.resource,
                start_ns + int(1e9 * job.start_s),
                start_ns + int(1e9 * job.stop_s),
            )
            for job in jobs
        ]
        return rows(spans, 0, f"predicted, {machine.name}", PREDICTED)


@contextmanager
def _writable(path: Path) -> Iterator[None]:
    try:
        with writing(path):
            yield
    except ValueError as error:
        if isinstance(error, PartitaError):
            raise
        raise ConfigError(f"'{path}' is not a trace: {error}; expected a trace that engine.profile wrote") from None


def _check_traceable(settings: Config) -> None:
    """Raise ConfigError if the config has settings of activations that traces do not cover."""
    activations = settings.activations
    untraced = {
        "activations.partition": activations.partition,
        "activations.keep_bytes": activations.keep_bytes != "none",
        "activations.offload": activations.offload != "none" and not isinstance(activations.checkpoint, str),
    }
    for key, is_set in untraced.items():
        if is_set:
            raise ConfigError(
                f"{key}: partita plan cannot predict this key; of offloaded inputs, only those of "
                "activations.checkpoint: units or selective; leave the key out, or use partita simulate"
            )


def estimate_config(
    source: ModelSource,
    config: str | Path | Mapping[str, Any] | Config | None,
    num_ranks: int,
    kind: str = "cpu",
    ranks_per_node: int | None = None,
) -> Estimate:
    """Forecast the training of a model under ``config``.

    Args:
        kind: device type, in PyTorch's words.
        ranks_per_node: None: all ranks are on one node.

    Raises:
        ConfigError: the configuration does not fit the ranks, or leaves the placement open; the model's forward cannot
            be traced.
    """
    settings = load_config(config)
    resolved = resolve(settings, num_ranks, kind, ranks_per_node or num_ranks)
    if has_auto_tiers(settings.zero.offload):
        raise ConfigError(
            "zero.offload: auto depends on the free memory of the machine that trains: name a tier for each state"
        )
    checkpoint = settings.activations.checkpoint
    _check_traceable(settings)
    specs = group_units(source.model, settings.zero.units)
    batch = resolved.batch
    rank_model = trace_rank(source, specs, resolved, (checkpoint,), batch.micro, kind=kind)
    tiers = resolve_tiers(settings.zero.offload, Tiers())
    stages = tuple(rank_model.stages(resolved.mesh.pipeline, settings.parallel.num_chunks))
    units = {stage: rank_model.planned(resolved, tiers, stage) for stage in stages}
    tier = inputs_tier(settings.activations, torch.device(kind)) if checkpoint != "none" else Tier.DEVICE
    return Estimate(resolved, rank_model, stages, units, offload_tier=tier)
