"""The plans for a model on a machine: which fit, how long a step of each takes, and what the others lack."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from partita.config.resolve import Resolved, ResolvedBatch
from partita.config.schema import Config
from partita.forecast.choice import (
    CHECKPOINTS,
    ON_DEVICE,
    ON_HOST,
    Choice,
    Kept,
    Sections,
    StateSettings,
    meshes,
    reaches,
    restings,
)
from partita.forecast.chunk_activations import Moment, moments, representative
from partita.forecast.costs import Rates
from partita.forecast.estimate import (
    Held,
    Units,
    activation_bytes,
    most_sent,
    state_and_working_bytes,
    step_time,
)
from partita.forecast.pending_gradients import Gradients, gradients_of, parts_of
from partita.forecast.pieces import Trace
from partita.forecast.sized import Sized, size_model
from partita.forecast.source import Source
from partita.forecast.stages import Cuts, Stage
from partita.memory import accelerator
from partita.parallel.pipeline.schedule import Shape, make_schedule
from partita.plan.mesh_shape import STATE_AXES, MeshShape
from partita.plan.planned import PlannedUnit
from partita.plan.residence import Tier
from partita.plan.state_plan import Tiers
from partita.planner.budget import MemoryBudget
from partita.planner.group_units import group_units
from partita.planner.machine import Machine
from partita.planner.memory import ADAM_MOMENTS
from partita.planner.placement import chosen_tiers
from partita.planner.timeline import StepTime

# What does not depend on the batch, for one stage: states and working memory, and where its gradients are.
Fixed = tuple[Held, Gradients]
# In a pipeline, larger micro-batches cost more waiting: this many sizes are considered, from the largest that fits.
PIPELINE_MICROS = 4


@dataclass(frozen=True)
class Forecast:
    """The predicted memory, traffic and time of a plan.

    ``held``: bytes by (what, tier), on the rank that holds most. ``budget``: the bytes that a rank may hold. ``time``:
    the time of a step. ``sent``: bytes sent in a step, by axes, by the rank that sends most.
    """

    choice: Choice
    held: Held
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
    def lacking(self) -> dict[Tier, int]:
        """Missing bytes of each memory that is too small."""
        used = self.by_tier
        if self.budget.one_memory:
            used = Counter({Tier.DEVICE: used[Tier.DEVICE] + used[Tier.HOST], Tier.DISK: used[Tier.DISK]})
        return {tier: used[tier] - self.budget.of(tier) for tier in self.budget.lacking(self.by_tier)}

    @property
    def lacks_activations(self) -> bool:
        """True if the plan would fit without activations."""
        there = sum(num for (what, tier), num in self.held.items() if (what, tier) == ("activations", "device"))
        return set(self.lacking) == {Tier.DEVICE} and self.lacking[Tier.DEVICE] <= there

    @property
    def fits(self) -> bool:
        return not self.lacking

    @property
    def rank(self) -> tuple[bool, float]:
        """The sort key: plans that fit come first, by their time, then the others by the bytes that they lack."""
        if self.time is None:
            return True, float(sum(self.lacking.values()))
        return False, self.time.total_s


@dataclass
class Search:
    """Search for plans of ``source`` on ``num_gpus`` of ``machine``, with ``samples`` in a step.

    ``config`` has the settings of every plan: units, what computes in fp32, optimizer. ``dtype``: the compute dtype
    (empty: the machine's). ``only``: the one mesh to consider (None: all).
    """

    source: Source
    machine: Machine
    num_gpus: int
    samples: int
    config: Config = field(default_factory=Config)
    num_moments: int = ADAM_MOMENTS
    dtype: str = ""
    only: MeshShape | None = None
    _sized: dict[tuple[int, int, bool, int | None], Sized] = field(default_factory=dict)
    _configs: dict[StateSettings, Config] = field(default_factory=dict)
    _scaled: dict[tuple[int, str, int], tuple[Trace, Trace]] = field(default_factory=dict)
    _moments: dict[tuple[MeshShape, int, int], frozenset[Moment]] = field(default_factory=dict)
    _moments_by_shape: dict[tuple[Shape, tuple[int, ...]], frozenset[Moment]] = field(default_factory=dict)
    _gradients: dict[Gradients, Gradients] = field(default_factory=dict)
    _activations: dict[tuple[int, int, int, int], Held] = field(default_factory=dict)
    _best: dict[StateSettings, float] = field(default_factory=dict)
    _computing: dict[tuple[int, int, int, str, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.budget = self.machine.budget(self.num_gpus)
        self.dtype = self.dtype or self.machine.compute_dtype
        self.rates = Rates(self.machine, self.num_gpus, self.dtype, self.num_moments, self.config)
        self._specs = group_units(self.source.model, self.config.zero.units)
        self._cuts = Cuts(self.source.model)

    def run(self) -> list[Forecast]:
        """Return every plan that was considered, sorted by :attr:`Forecast.rank`.

        Those that fit are sorted by their time, then follow the others by the bytes that they lack. Slices of samples
        are tried where full samples do not fit on a rank, or are too few for all ranks. Inputs of blocks are offloaded
        to the host where nothing fits with them on the device.
        """
        found = list[Forecast]()
        levels = restings(self.dtype, self.machine.one_memory)
        for number, level in enumerate(levels):
            tried = [(level, ON_DEVICE)]
            if number > 0 and self._has_host:
                tried += [(levels[0], (ON_HOST,)), (level, (ON_HOST,))] if number == 1 else [(level, (ON_HOST,))]
            for sizes in self._reaches:
                weighed = [each for way in tried for each in self._all_of(*way, sizes)]
                found += weighed
                fits = [each for each in found if each.fits]
                if any(each.choice.mesh.sequence > 1 or not each.choice.shares_samples for each in fits):
                    break
                if not any(each.lacks_activations for each in weighed):
                    break
            if any(each.fits for each in found):
                break
        return sorted(found, key=lambda each: each.rank)

    @property
    def _has_host(self) -> bool:
        """True if inputs of recomputed blocks can be offloaded to the host."""
        return self._recomputes and not self.machine.one_memory and self.budget.host > 0

    @cached_property
    def _reaches(self) -> list[list[int]]:
        """Sizes of the sequence axis; those in one list are tried together."""
        if self.only is not None:
            return [[self.only.sequence]]
        on_node = self.machine.gpus_on_node(self.num_gpus)
        whole, *sliced = reaches(self.num_gpus, on_node, self.source.context)
        if self.samples < self.num_gpus and sliced:  # too few full samples for all ranks
            whole = whole + sliced.pop(0)
        return [whole, *sliced]

    def _all_of(self, level: Sequence[StateSettings], kept: Sequence[Kept], sizes: Sequence[int]) -> Iterator[Forecast]:
        for mesh in self._shapes(sizes):
            for state_settings in level:
                # On one rank every stage is the same.
                if mesh.group_size(STATE_AXES) > 1 or state_settings == replace(
                    state_settings, stage=Config().zero.stage
                ):
                    yield from self._weighed(mesh, state_settings, kept)

    def _shapes(self, sizes: Sequence[int]) -> Iterator[MeshShape]:
        num_stages = len(self.sized(MeshShape()).blocks) // self.config.parallel.chunks
        on_node = self.machine.gpus_on_node(self.num_gpus)
        every = meshes(self.num_gpus, on_node, max(1, num_stages), sizes) if self.only is None else [self.only]
        return (mesh for mesh in every if self.samples % mesh.data == 0)

    def sized(self, mesh: MeshShape, samples: int | None = None) -> Sized:
        """Return a rank's share of the model under ``mesh``, traced with ``samples`` samples, or for any number.

        It depends on how many ranks share a sample, and on whether there is a pipeline.
        """
        key = (mesh.sequence, mesh.tensor, mesh.pipeline > 1, samples)
        if key not in self._sized:
            shape = MeshShape(min(mesh.pipeline, 2), sequence=mesh.sequence, tensor=mesh.tensor)
            choices = CHECKPOINTS if self._recomputes else CHECKPOINTS[:1]
            resolved = self._resolved(shape, StateSettings(1))
            kind = accelerator.usual_kind(self.machine.one_memory)
            self._sized[key] = size_model(self.source, self._specs, resolved, choices, samples, self._cuts, kind)
        return self._sized[key]

    def trace(self, choice: Choice) -> Trace:
        """Return the trace of a micro-batch."""
        # A slice of one sample's positions is a view, which keeps the full tensor; that of several samples is a copy.
        alone = 1 if choice.micro == 1 and choice.mesh.sequence > 1 else None
        traced = self.sized(choice.mesh, alone).traces[choice.checkpoint]
        key = (id(traced), choice.inputs, choice.micro)
        if key not in self._scaled:
            tier = Tier.DEVICE if choice.inputs == "none" else Tier(choice.inputs)
            self._scaled[key] = traced, replace(traced, inputs_rest=tier).of(choice.micro)
        return self._scaled[key][1]

    @cached_property
    def _recomputes(self) -> bool:
        """True if the model has units, other than the root, that can be recomputed."""
        return any(spec.name and any(True for _ in spec.module.children()) for spec in self._specs)

    def _resolved(self, mesh: MeshShape, state_settings: StateSettings) -> Resolved:
        """Return a resolved config for states and units alone, without the checks of a full config."""
        if state_settings not in self._configs:
            self._configs[state_settings] = self.merged(state_settings.sections())
        batch = ResolvedBatch(1, 1, mesh.data)
        return Resolved(self._configs[state_settings], mesh, batch, self.dtype, self.machine.one_memory)

    def merged(self, sections: Sections) -> Config:
        """Return the config of every plan with these sections added."""
        given = self.config.model_dump(exclude_unset=True)
        return Config(**{name: {**given.get(name, {}), **sections.get(name, {})} for name in {*given, *sections}})

    # ----------------------------------------------------------------------------------------------------- forecasts

    def _weighed(self, mesh: MeshShape, state_settings: StateSettings, ways: Sequence[Kept]) -> Iterator[Forecast]:
        """Yield the largest micro-batches that fit, for each way to keep activations.

        If none fits, yield what is missing for a micro-batch of one sample.
        """
        per_rank, traces = self.samples // mesh.data, self.sized(mesh).traces
        units = self.planned(mesh, state_settings)
        fixed = {stage: self._fixed(stage, of_stage) for stage, of_stage in units.items()}
        ways = [(checkpoint, inputs) for checkpoint, inputs in ways if checkpoint in traces]
        least = self._worst(Choice(mesh, state_settings, 1, per_rank, *ways[-1]), fixed)
        if state_settings.form.once and mesh.pipeline > 1:
            return
        if not least.fits:
            yield least
            return
        for way in ways:
            taken = 0
            for micro in _divisors(per_rank):
                choice = Choice(mesh, state_settings, micro, per_rank // micro, *way)
                found = self._worst(choice, fixed)
                if found.fits and not (state_settings.form.once and choice.accumulate > 1):
                    taken += 1
                    if self._computing_s(choice, list(units)) < self._best.get(state_settings, float("inf")):
                        timed = self._timed(found, units)
                        assert timed.time is not None
                        best_s = self._best.get(state_settings, float("inf"))
                        self._best[state_settings] = min(timed.time.total_s, best_s)
                        yield timed
                if taken == (1 if mesh.pipeline == 1 else PIPELINE_MICROS):
                    break

    def forecast(self, choice: Choice) -> Forecast:
        """Return the forecast of one plan, without a time if it does not fit.

        Raises:
            ConfigError: the model has fewer blocks than the pipeline has stages.
        """
        units = self.planned(choice.mesh, choice.state_settings)
        found = self._worst(choice, {stage: self._fixed(stage, of_stage) for stage, of_stage in units.items()})
        return self._timed(found, units) if found.fits else found

    def _timed(self, found: Forecast, units: Units) -> Forecast:
        """Return a forecast with the time and the traffic of a step."""
        sized, trace, micros = self.sized(found.choice.mesh), self.trace(found.choice), found.choice.accumulate
        time = step_time(self.rates, sized, units, trace, micros)
        return replace(found, time=time, sent=most_sent(units, trace, micros))

    def planned(self, mesh: MeshShape, state_settings: StateSettings) -> dict[Stage, list[PlannedUnit]]:
        """Return the units of one stage of each kind."""
        sized, resolved = self.sized(mesh), self._resolved(mesh, state_settings)
        tiers = chosen_tiers(resolved.config.zero.offload, Tiers())
        return {stage: sized.planned(resolved, tiers, stage) for stage in self._kinds(mesh)}

    def _kinds(self, mesh: MeshShape) -> dict[Stage, list[int]]:
        return self.sized(mesh).kinds(mesh.pipeline, self.config.parallel.chunks if mesh.pipeline > 1 else 1)

    def with_config(self, config: Config) -> "Search":
        """Return a search under a config with the same units, which shares the traces of the model."""
        search = Search(self.source, self.machine, self.num_gpus, self.samples, config, self.num_moments, self.dtype)
        search.only = self.only
        search._sized = self._sized
        search._cuts = self._cuts
        return search

    def _worst(self, choice: Choice, fixed: Mapping[Stage, Fixed]) -> Forecast:
        """Return the forecast of the stage that lacks most memory, or, if none lacks any, holds most on its device."""
        every = (self._with_activations(choice, stage, *of_stage) for stage, of_stage in fixed.items())
        return max(every, key=lambda each: (sum(each.lacking.values()), each.by_tier[Tier.DEVICE]))

    def _fixed(self, stage: Stage, units: Sequence[PlannedUnit]) -> Fixed:
        held = state_and_working_bytes(units, self.config, self.num_moments, on_host=self.machine.one_memory)
        mesh = units[0].segments[0].mesh
        gradients = gradients_of(stage, units, next(iter(self.sized(mesh).traces.values())))
        return dict(held), self._gradients.setdefault(gradients, gradients)

    def _with_activations(self, choice: Choice, stage: Stage, fixed: Held, gradients: Gradients) -> Forecast:
        trace, found = self.trace(choice), self._moments_of(choice, stage)
        key = (id(trace), id(stage), id(gradients), id(found))
        if key not in self._activations:
            parts = parts_of(stage, gradients, trace)
            self._activations[key] = activation_bytes(found, parts, trace.inputs_rest)
        held = {**fixed, **self._activations[key]}
        held["activations", Tier.DEVICE.value] += choice.accumulate * trace.batch_bytes
        return Forecast(choice, held, self.budget)

    def _moments_of(self, choice: Choice, stage: Stage) -> frozenset[Moment]:
        """Return the moments of all ranks that hold the same as the rank of this stage."""
        key = (choice.mesh, id(stage), choice.accumulate)
        if key not in self._moments:
            name, ranks = self.config.parallel.schedule, tuple(self._kinds(choice.mesh)[stage])
            shape = representative(name, Shape(choice.mesh.pipeline, choice.accumulate, len(stage.chunks)))
            if (shape, ranks) not in self._moments_by_shape:
                schedule = make_schedule(name, shape)
                every = frozenset[Moment]().union(*(moments(schedule, rank) for rank in ranks))
                self._moments_by_shape[shape, ranks] = every
            self._moments[key] = self._moments_by_shape[shape, ranks]
        return self._moments[key]

    def _computing_s(self, choice: Choice, stages: Sequence[Stage]) -> float:
        """Return the seconds of a step if the device waited only for the pipeline."""
        mesh, micros = choice.mesh, choice.accumulate
        key = (mesh.tensor, mesh.sequence, mesh.pipeline, choice.checkpoint, choice.micro)
        if key not in self._computing:
            trace = self.trace(choice)
            self._computing[key] = max(self.rates.computing(trace, stage, mesh, micros) for stage in stages)
        return self._computing[key]


def _divisors(num: int) -> list[int]:
    """Return ``num``, its halves as long as these are whole numbers, and 1, from the largest on."""
    found, size = list[int](), num
    while size:
        found.append(size)
        if size % 2:
            break
        size //= 2
    return found if 1 in found else [*found, 1]
