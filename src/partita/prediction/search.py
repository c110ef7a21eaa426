"""Search for plans of a model on a machine: their memory and step time, or the memory that they lack."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from partita.config.extension import installed
from partita.config.resolve import Resolved, ResolvedBatch
from partita.config.schema import Config
from partita.layout.budget import MemoryBudget
from partita.layout.placement import resolve_tiers
from partita.layout.units import group_units
from partita.memory import accelerator
from partita.parallel.pipeline.schedule import Shape, make_schedule
from partita.prediction.chunk_activations import ScheduleState, representative, schedule_states
from partita.prediction.estimate import (
    BytesByTier,
    Units,
    activation_bytes,
    most_sent,
    state_and_working_bytes,
    step_time,
)
from partita.prediction.machine import Machine
from partita.prediction.model_source import ModelSource
from partita.prediction.optimizer_plan import plan_optimizer
from partita.prediction.pending_gradients import PendingGradients, bytes_per_chunk, pending_gradients
from partita.prediction.plan_settings import (
    CHECKPOINTS,
    ON_DEVICE,
    ON_HOST,
    PlanSettings,
    RecomputeSettings,
    Sections,
    StateSettings,
    meshes,
    sequence_sizes,
    state_settings_by_tier,
    with_sections,
)
from partita.prediction.rank_model import RankModel, trace_rank
from partita.prediction.stages import Cuts, Stage
from partita.prediction.step_cost import StepCost
from partita.prediction.step_timeline import StepTime
from partita.prediction.trace.block_trace import Trace
from partita.table.mesh_shape import STATE_AXES, MeshShape
from partita.table.planned import PlannedUnit
from partita.table.residence import Tier
from partita.table.state_plan import Tiers

# The results for one stage that do not depend on the batch: bytes of states and of working memory, and its gradients.
BatchIndependent = tuple[BytesByTier, PendingGradients]
# Number of micro-batch sizes considered in a pipeline, from the largest that fits: larger ones cause a larger bubble.
PIPELINE_MICROS = 4


@dataclass(frozen=True)
class Forecast:
    """The predicted memory, traffic and time of a plan.

    ``held``: bytes by (state, tier), on the rank with the most. ``budget``: the bytes that a rank may use. ``time``:
    the time of a step. ``sent``: bytes sent in a step, by axes, on the rank that sends most.
    """

    settings: PlanSettings
    held: BytesByTier
    budget: MemoryBudget
    time: StepTime | None = None
    sent: Mapping[str, int] | None = None

    @cached_property
    def by_tier(self) -> Counter[Tier]:
        sums = Counter[Tier]()
        for (_, tier), num in self.held.items():
            sums[Tier(tier)] += num
        return sums

    @property
    def shortfall(self) -> dict[Tier, int]:
        """Missing bytes of each memory that is too small."""
        used = self.by_tier
        if self.budget.one_memory:
            used = Counter({Tier.DEVICE: used[Tier.DEVICE] + used[Tier.HOST], Tier.DISK: used[Tier.DISK]})
        return {tier: used[tier] - self.budget.of(tier) for tier in self.budget.shortfall(self.by_tier)}

    @property
    def fits_without_activations(self) -> bool:
        """True if the plan would fit without activations."""
        activations = sum(num for (what, tier), num in self.held.items() if (what, tier) == ("activations", "device"))
        return set(self.shortfall) == {Tier.DEVICE} and self.shortfall[Tier.DEVICE] <= activations

    @property
    def fits(self) -> bool:
        return not self.shortfall

    @property
    def rank(self) -> tuple[bool, float]:
        """The sort key: plans that fit come first, by time; then those that do not fit, by missing bytes."""
        if self.time is None:
            return True, float(sum(self.shortfall.values()))
        return False, self.time.total_s


@dataclass
class Search:
    """Search for plans of ``source`` on ``num_gpus`` of ``machine``, with ``samples`` in a step.

    ``config`` has the settings of every plan: units, fp32 modules, optimizer. ``dtype``: the compute dtype
    (empty: the machine's). ``only``: the single mesh to consider; None: all meshes. ``lean``: lossy states are wanted,
    too, where exact ones fit.
    """

    source: ModelSource
    machine: Machine
    num_gpus: int
    samples: int
    config: Config = field(default_factory=Config)
    dtype: str = ""
    only: MeshShape | None = None
    lean: bool = False
    _rank_models: dict[tuple[int, int, bool, int | None], RankModel] = field(default_factory=dict)
    _configs: dict[StateSettings, Config] = field(default_factory=dict)
    _scaled_traces: dict[tuple[int, str, int], tuple[Trace, Trace]] = field(default_factory=dict)
    _schedule_states: dict[tuple[MeshShape, int, int], frozenset[ScheduleState]] = field(default_factory=dict)
    _states_by_shape: dict[tuple[Shape, tuple[int, ...]], frozenset[ScheduleState]] = field(default_factory=dict)
    _gradients: dict[PendingGradients, PendingGradients] = field(default_factory=dict)
    _activations: dict[tuple[int, int, int, int], BytesByTier] = field(default_factory=dict)
    _best: dict[StateSettings, float] = field(default_factory=dict)
    _compute_times: dict[tuple[int, int, int, str, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.budget = self.machine.budget(self.num_gpus)
        self.dtype = self.dtype or self.machine.compute_dtype
        self.optimizer = plan_optimizer(self.source.model, self.config)
        self.step_cost = StepCost(self.machine, self.num_gpus, self.dtype, self.optimizer, self.config)
        self._specs = group_units(self.source.model, self.config.zero.units)
        self._cuts = Cuts(self.source.model)

    def run(self) -> list[Forecast]:
        """Return every plan that was considered, sorted by :attr:`Forecast.rank`.

        Samples are sliced along the sequence if full samples do not fit on a rank, or if there are fewer samples than
        ranks. Inputs of recomputed blocks are offloaded to the host if no plan fits with these on the device.
        """
        found = list[Forecast]()
        settings_by_tier = state_settings_by_tier(self.dtype, self.machine.one_memory)
        for number, level in enumerate(settings_by_tier):
            tried = [(level, ON_DEVICE)]
            if number > 0 and self._can_offload_inputs:
                tried += (
                    [(settings_by_tier[0], (ON_HOST,)), (level, (ON_HOST,))] if number == 1 else [(level, (ON_HOST,))]
                )
            for sizes in self._sequence_sizes:
                new = [each for level, kept in tried for each in self._forecasts_of(level, kept, sizes)]
                found += new
                fits = [each for each in found if each.fits]
                if any(each.settings.mesh.sequence > 1 or not each.settings.shares_samples for each in fits):
                    break
                if not any(each.fits_without_activations for each in new):
                    break
            if any(each.fits and (self.lean or each.settings.states.precision.is_exact) for each in found):
                break
        return sorted(found, key=lambda each: each.rank)

    @property
    def _can_offload_inputs(self) -> bool:
        """True if inputs of recomputed blocks can be offloaded to the host."""
        return self._recomputes and not self.machine.one_memory and self.budget.host > 0

    @cached_property
    def _sequence_sizes(self) -> list[list[int]]:
        """Sizes of the sequence axis; those in one list are tried together."""
        if self.only is not None:
            return [[self.only.sequence]]
        on_node = self.machine.gpus_on_node(self.num_gpus)
        full, *sliced = sequence_sizes(self.num_gpus, on_node, self.source.context)
        if self.samples < self.num_gpus and sliced:  # too few full samples for all ranks
            full = full + sliced.pop(0)
        return [full, *sliced]

    def _forecasts_of(
        self, level: Sequence[StateSettings], kept: Sequence[RecomputeSettings], sizes: Sequence[int]
    ) -> Iterator[Forecast]:
        for mesh in self._meshes(sizes):
            for states in level:
                # On one rank all ZeRO stages are the same.
                if mesh.group_size(STATE_AXES) > 1 or states == replace(states, stage=Config().zero.stage):
                    yield from self._best_micro_batches(mesh, states, kept)

    def _meshes(self, sizes: Sequence[int]) -> Iterator[MeshShape]:
        num_stages = len(self.rank_model(MeshShape()).blocks) // self.config.parallel.chunks
        on_node = self.machine.gpus_on_node(self.num_gpus)
        every = meshes(self.num_gpus, on_node, max(1, num_stages), sizes) if self.only is None else [self.only]
        return (mesh for mesh in every if self.samples % mesh.data == 0)

    def rank_model(self, mesh: MeshShape, samples: int | None = None) -> RankModel:
        """Return a rank's part of the model under ``mesh``, traced with ``samples`` samples; None: for any number.

        It depends on the number of ranks that compute one sample, and on the presence of a pipeline.
        """
        key = (mesh.sequence, mesh.tensor, mesh.pipeline > 1, samples)
        if key not in self._rank_models:
            shape = MeshShape(min(mesh.pipeline, 2), sequence=mesh.sequence, tensor=mesh.tensor)
            choices = CHECKPOINTS if self._recomputes else CHECKPOINTS[:1]
            resolved = self._resolved(shape, StateSettings(1))
            kind = accelerator.usual_kind(self.machine.one_memory)
            self._rank_models[key] = trace_rank(self.source, self._specs, resolved, choices, samples, self._cuts, kind)
        return self._rank_models[key]

    def trace(self, settings: PlanSettings) -> Trace:
        """Return the trace of a micro-batch."""
        # A slice of one sample's positions is a view, which keeps the full tensor; one of several samples is a copy.
        traced_samples = 1 if settings.micro == 1 and settings.mesh.sequence > 1 else None
        traced = self.rank_model(settings.mesh, traced_samples).traces[settings.checkpoint]
        key = (id(traced), settings.inputs, settings.micro)
        if key not in self._scaled_traces:
            tier = Tier.DEVICE if settings.inputs == "none" else Tier(settings.inputs)
            self._scaled_traces[key] = traced, replace(traced, offload_tier=tier).of(settings.micro)
        return self._scaled_traces[key][1]

    @cached_property
    def _recomputes(self) -> bool:
        """True if the model has units, other than the root, that can be recomputed."""
        return any(spec.name and any(True for _ in spec.module.children()) for spec in self._specs)

    def _resolved(self, mesh: MeshShape, states: StateSettings) -> Resolved:
        """Return a config that is resolved only for states and units, without the checks of a full config."""
        if states not in self._configs:
            self._configs[states] = self.merged(states.sections())
        batch = ResolvedBatch(1, 1, mesh.data)
        config, on_host = self._configs[states], self.machine.one_memory
        return Resolved(config, mesh, batch, self.dtype, on_host, extension=installed())

    def merged(self, sections: Sections) -> Config:
        """Return the config of a plan with these sections."""
        return Config(**with_sections(self.config, sections))

    # ----------------------------------------------------------------------------------------------------- forecasts

    def _best_micro_batches(
        self, mesh: MeshShape, states: StateSettings, recompute_options: Sequence[RecomputeSettings]
    ) -> Iterator[Forecast]:
        """Yield forecasts of the largest micro-batches that fit, for each setting of recomputation.

        If none fits, yield the forecast of a micro-batch of one sample.
        """
        per_rank, traces = self.samples // mesh.data, self.rank_model(mesh).traces
        units = self.planned(mesh, states)
        independent = {stage: self._batch_independent(stage, of_stage) for stage, of_stage in units.items()}
        recompute_options = [(checkpoint, inputs) for checkpoint, inputs in recompute_options if checkpoint in traces]
        least = self._largest_stage(PlanSettings(mesh, states, 1, per_rank, *recompute_options[-1]), independent)
        if states.precision.one_micro_batch and mesh.pipeline > 1:
            return
        if not least.fits:
            yield least
            return
        for recompute in recompute_options:
            num_fitting = 0
            for micro in halvings(per_rank):
                settings = PlanSettings(mesh, states, micro, per_rank // micro, *recompute)
                found = self._largest_stage(settings, independent)
                if found.fits and not (states.precision.one_micro_batch and settings.accumulate > 1):
                    num_fitting += 1
                    if self._compute_s(settings, list(units)) < self._best.get(states, float("inf")):
                        timed = self._timed(found, units)
                        assert timed.time is not None
                        best_s = self._best.get(states, float("inf"))
                        self._best[states] = min(timed.time.total_s, best_s)
                        yield timed
                if num_fitting == (1 if mesh.pipeline == 1 else PIPELINE_MICROS):
                    break

    def forecast(self, settings: PlanSettings) -> Forecast:
        """Return the forecast of one plan, without a time if it does not fit.

        Raises:
            ConfigError: the model has fewer blocks than the pipeline has stages.
        """
        units = self.planned(settings.mesh, settings.states)
        found = self._largest_stage(
            settings, {stage: self._batch_independent(stage, of_stage) for stage, of_stage in units.items()}
        )
        return self._timed(found, units) if found.fits else found

    def _timed(self, found: Forecast, units: Units) -> Forecast:
        """Return a forecast with the time and the traffic of a step."""
        rank_model, trace, micros = (
            self.rank_model(found.settings.mesh),
            self.trace(found.settings),
            found.settings.accumulate,
        )
        time = step_time(self.step_cost, rank_model, units, trace, micros)
        return replace(found, time=time, sent=most_sent(units, trace, micros, self.optimizer.work))

    def planned(self, mesh: MeshShape, states: StateSettings) -> dict[Stage, list[PlannedUnit]]:
        """Return one pipeline stage of each kind, with its units."""
        rank_model, resolved = self.rank_model(mesh), self._resolved(mesh, states)
        tiers = resolve_tiers(resolved.config.zero.offload, Tiers())
        return {stage: rank_model.planned(resolved, tiers, stage) for stage in self._stage_kinds(mesh)}

    def _stage_kinds(self, mesh: MeshShape) -> dict[Stage, list[int]]:
        return self.rank_model(mesh).kinds(mesh.pipeline, self.config.parallel.chunks if mesh.pipeline > 1 else 1)

    def with_config(self, config: Config) -> "Search":
        """Return a search with another config. The config must have the same units: both searches share the traces."""
        search = Search(self.source, self.machine, self.num_gpus, self.samples, config, self.dtype)
        search.only = self.only
        search._rank_models = self._rank_models
        search._cuts = self._cuts
        return search

    def _largest_stage(self, settings: PlanSettings, independent: Mapping[Stage, BatchIndependent]) -> Forecast:
        """Return the forecast of the stage that misses most memory. If all fit, return that with most device memory."""
        every = (self._with_activations(settings, stage, *of_stage) for stage, of_stage in independent.items())
        return max(every, key=lambda each: (sum(each.shortfall.values()), each.by_tier[Tier.DEVICE]))

    def _batch_independent(self, stage: Stage, units: Sequence[PlannedUnit]) -> BatchIndependent:
        held = state_and_working_bytes(units, self.config, self.optimizer.moments, on_host=self.machine.one_memory)
        mesh = units[0].segments[0].mesh
        gradients = pending_gradients(stage, units, next(iter(self.rank_model(mesh).traces.values())))
        return dict(held), self._gradients.setdefault(gradients, gradients)

    def _with_activations(
        self, settings: PlanSettings, stage: Stage, independent: BytesByTier, gradients: PendingGradients
    ) -> Forecast:
        trace, found = self.trace(settings), self._states_of(settings, stage)
        key = (id(trace), id(stage), id(gradients), id(found))
        if key not in self._activations:
            per_chunk = bytes_per_chunk(stage, gradients, trace)
            self._activations[key] = activation_bytes(found, per_chunk, trace.offload_tier)
        held = {**independent, **self._activations[key]}
        held["activations", Tier.DEVICE.value] += settings.accumulate * trace.batch_bytes
        return Forecast(settings, held, self.budget)

    def _states_of(self, settings: PlanSettings, stage: Stage) -> frozenset[ScheduleState]:
        """Return the schedule states of all ranks that have the same units and blocks as the rank of this stage."""
        key = (settings.mesh, id(stage), settings.accumulate)
        if key not in self._schedule_states:
            name, ranks = self.config.parallel.schedule, tuple(self._stage_kinds(settings.mesh)[stage])
            shape = representative(name, Shape(settings.mesh.pipeline, settings.accumulate, len(stage.chunks)))
            if (shape, ranks) not in self._states_by_shape:
                schedule = make_schedule(name, shape)
                every = frozenset[ScheduleState]().union(*(schedule_states(schedule, rank) for rank in ranks))
                self._states_by_shape[shape, ranks] = every
            self._schedule_states[key] = self._states_by_shape[shape, ranks]
        return self._schedule_states[key]

    def _compute_s(self, settings: PlanSettings, stages: Sequence[Stage]) -> float:
        """Return the seconds of a step without communication, including the bubble of the pipeline."""
        mesh, micros = settings.mesh, settings.accumulate
        key = (mesh.tensor, mesh.sequence, mesh.pipeline, settings.checkpoint, settings.micro)
        if key not in self._compute_times:
            trace = self.trace(settings)
            self._compute_times[key] = max(self.step_cost.compute_s(trace, stage, mesh, micros) for stage in stages)
        return self._compute_times[key]


def halvings(num: int) -> list[int]:
    """Return ``num``, repeatedly halved while it is even, and 1. The largest comes first."""
    found, size = list[int](), num
    while size:
        found.append(size)
        if size % 2:
            break
        size //= 2
    return found if 1 in found else [*found, 1]
