"""A rank's part of a model: the layout of its units, and the trace of its forward and backward."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from partita.activation.apply import SelectedModules
from partita.config.resolve import Resolved
from partita.config.schema import Config
from partita.engine.transform import apply_axes, apply_to_forwards, find_attention
from partita.errors import ConfigError
from partita.layout.blueprint import layouts_of, plan_unit, row_of, unit_entries
from partita.layout.dtypes import dtype_of
from partita.layout.full_precision import find_full_precision
from partita.layout.units import UnitSpec, find_blocks
from partita.memory.accelerator import HOST, SIMULATED, simulating
from partita.parallel.pipeline.schedule import Shape, make_schedule
from partita.prediction.model_source import ModelSource
from partita.prediction.optimizer_plan import OptimizerPlan, plan_optimizer
from partita.prediction.stages import Cuts, Stage, enclosing_modules, single_stage, stages_of
from partita.prediction.trace.block_trace import Trace
from partita.prediction.trace.counted_groups import counted_groups
from partita.prediction.trace.fewer_blocks import BlockMap, fewer_blocks
from partita.prediction.trace.run import TracedRank, coprime_batch, trace
from partita.sharding.precision import cast_buffers, forward_precision
from partita.table.planned import PlannedUnit
from partita.table.residence import ENCODINGS, Encoding
from partita.table.share import Copies
from partita.table.span import Entry
from partita.table.state_plan import StatePlan, Tiers
from partita.transforms.modules import ModuleTransforms

# A value of ``activations.checkpoint``.
Checkpoint = str | tuple[str, ...]


@dataclass
class RankModel:
    """A rank's part of a model.

    ``entries`` has the entries of each unit of ``specs``. ``traces`` has a micro-batch's trace for each value of
    ``activations.checkpoint``. ``cuts``: the cuts of the model into stages. ``optimizer``: what the optimizer needs for
    each parameter of the model.
    """

    specs: Sequence[UnitSpec]
    entries: Sequence[Sequence[Entry]]
    traces: dict[Checkpoint, Trace]
    cuts: Cuts
    optimizer: OptimizerPlan = field(default_factory=OptimizerPlan)
    _planned: dict[Any, PlannedUnit] = field(default_factory=dict)
    _rows: dict[Any, tuple[Config, StatePlan]] = field(default_factory=dict)
    _kinds: dict[object, int] = field(default_factory=dict)
    _kind_of: dict[int, tuple[object, int]] = field(default_factory=dict)
    _stages: dict[Shape, list[Stage]] = field(default_factory=dict)
    _alike: dict[tuple[int, int], dict[Stage, list[int]]] = field(default_factory=dict)

    @property
    def blocks(self) -> tuple[str, ...]:
        """Names of the blocks."""
        return next(iter(self.traces.values())).names

    def stages(self, num: int, chunks: int = 1) -> list[Stage]:
        """Return the stage of each rank of a pipeline of ``num`` ranks, with ``chunks`` stages of the model per rank.

        Raises:
            ConfigError: the model cannot be cut into these stages.
        """
        shape = Shape(num, 1, chunks)
        if shape not in self._stages:
            if shape.num_stages == 1:
                self._stages[shape] = [single_stage(self.specs, self.entries, self.blocks)]
            else:
                found = self.cuts.of(shape.num_stages)
                self._stages[shape] = stages_of(found, shape, self.specs, self.entries, self.blocks)
        return self._stages[shape]

    def kinds(self, num: int, chunks: int = 1) -> dict[Stage, list[int]]:
        """Return one of each kind of :meth:`stages`, with the pipeline ranks of that kind.

        Ranks of one kind have the same memory and computation.
        """
        if (num, chunks) in self._alike:
            return self._alike[num, chunks]
        found = dict[object, tuple[Stage, list[int]]]()
        trace = next(iter(self.traces.values()))
        for stage in self.stages(num, chunks):
            units = tuple(map(self._kind, stage.units, stage.entries))
            blocks = tuple(
                (start == 0, stop == len(trace.blocks), *map(id, trace.blocks[start : stop + 1]))
                for start, stop in stage.chunks
            )
            found.setdefault((units, blocks), (stage, []))[1].append(stage.index)
        self._alike[num, chunks] = dict(found.values())
        return self._alike[num, chunks]

    def planned(self, resolved: Resolved, tiers: Tiers, stage: Stage) -> list[PlannedUnit]:
        """Return the units of a stage under a row of the state table."""
        held = zip(stage.units, stage.entries, strict=True)
        return [self._unit(number, entries, resolved, tiers) for number, entries in held]

    def _unit(self, number: int, entries: Sequence[Entry], resolved: Resolved, tiers: Tiers) -> PlannedUnit:
        """Return a planned unit. Units with the same layout are one object."""
        spec = self.specs[number]
        key = (self._kind(number, entries), id(resolved.config), resolved.mesh, tiers)
        if key not in self._planned:
            layouts = layouts_of(entries, resolved, lambda copies: self._row(resolved, tiers, None, copies))
            self._planned[key] = plan_unit(spec, layouts, resolved.mesh, partial(self._row, resolved, tiers))
        return self._planned[key]

    def _kind(self, number: int, entries: Sequence[Entry]) -> int:
        """Return the number of a unit's kind. Units of one kind have the same layout."""
        if id(entries) not in self._kind_of:
            spec = self.specs[number]
            moments, costs = self.optimizer.moments, self.optimizer.work.costs
            alike = tuple(
                (e.place, e.encoding, e.trainable, e.copies, moments.of(e.fqn), costs.get(e.fqn)) for e in entries
            )
            kind = self._kinds.setdefault((alike, bool(spec.name), tuple(spec.enclosing_units)), len(self._kinds))
            self._kind_of[id(entries)] = entries, kind
        return self._kind_of[id(entries)][1]

    def _row(self, resolved: Resolved, tiers: Tiers, encoding: Encoding | None, copies: Copies) -> StatePlan:
        key = (id(resolved.config), resolved.mesh, tiers, encoding, copies)
        if key not in self._rows:
            self._rows[key] = resolved.config, row_of(resolved, tiers, encoding, copies)
        return self._rows[key][1]


def trace_rank(
    source: ModelSource,
    specs: Sequence[UnitSpec],
    resolved: Resolved,
    choices: Sequence[Checkpoint],
    samples: int | None = None,
    cuts: Cuts | None = None,
    kind: str = HOST.type,
) -> RankModel:
    """Trace the model as the first of the ranks that compute one sample, which has the most positions.

    The result depends on the units and dtypes of ``resolved``, and on the presence of a pipeline.

    Args:
        specs: the model's units.
        choices: values of ``activations.checkpoint`` to trace.
        samples: samples of a micro-batch; None: the trace can be scaled to any number (:meth:`Trace.of`).
        cuts: the cuts of the model into stages, to share them between calls.
        kind: device type, as ``torch.device`` takes it: autocast differs between them.

    Raises:
        ConfigError: the model cannot be split in this way, or cannot run without data.
    """
    model, mesh, config, transforms = source.model, resolved.mesh, resolved.config, ModuleTransforms()
    asked = config.parallel
    cuts = cuts or Cuts(model, None if asked.cut == "auto" else tuple(asked.cut))
    coprime_samples = coprime_batch(model, source.batch(1, "meta")) if samples is None else 1
    optimizer = plan_optimizer(model, config)
    traces, batch = dict[Checkpoint, Trace](), source.batch(samples or coprime_samples, "meta")
    with (
        simulating(kind),
        _blocks(source, resolved, choices, cuts) as block_map,
        counted_groups(mesh) as collectives,
        transforms.temporary(),
    ):
        parallel = apply_axes(model, resolved, collectives, transforms)  # parameters keep their full shapes
        compute, kept = dtype_of(ENCODINGS[resolved.compute_dtype]), find_full_precision(model, resolved)
        is_narrow = forward_precision(model, resolved, SIMULATED, kept, transforms) is not None
        half = compute if config.precision.mode == "mixed" and is_narrow else None
        buffers = partial(cast_buffers, model, compute, kept) if resolved.casts_buffers else None
        short, entries = unit_entries(model, resolved, parallel.shares)
        dtypes = {
            id(info.param): dtype_of(entry.encoding)
            for spec, of_unit in zip(short, entries, strict=True)
            for info, entry in zip(spec.infos, of_unit, strict=True)
        }
        names = {id(module): name for name, module in model.named_modules()}
        representatives = {name: names[id(block)] for name, block in block_map}
        shape = Shape(mesh.pipeline, resolved.batch.accumulate, asked.chunks if mesh.pipeline > 1 else 1)
        splits = make_schedule(asked.schedule, shape).splits_weights
        attention = find_attention(model, config)
        rank = TracedRank(
            block_map,
            dtypes,
            collectives,
            parallel.shares,
            half,
            buffers,
            mesh.pipeline > 1,
            copy_input=parallel.copy_input,
        )
        for choice in choices:
            own = config.model_copy(
                update={"activations": config.activations.model_copy(update={"checkpoint": choice})}
            )
            chosen = SelectedModules.of(model, own, [spec.name for spec in short])
            with transforms.temporary():
                transformed = apply_to_forwards(model, own, parallel, attention, chosen, splits_weights=splits)
                rank = replace(rank, weights=transformed.weights)
                if attention is not None:  # the first run fills the cache of visited blocks
                    trace(model, batch, rank)
                try:
                    traces[choice] = trace(model, batch, rank, coprime_samples)
                except ConfigError:
                    if samples is not None:
                        raise
                    # Some models accept only one sample: all of their sizes are assumed to grow with the samples.
                    traces[choice] = trace(model, source.batch(1, "meta"), rank)
    of_fqn = {entry.fqn: entry for of_unit in entries for entry in of_unit}
    of_specs = [_entries(spec, of_fqn, representatives) for spec in specs]
    return RankModel(specs, of_specs, traces, cuts, optimizer)


@contextmanager
def _blocks(source: ModelSource, resolved: Resolved, choices: Sequence[Checkpoint], cuts: Cuts) -> Iterator[BlockMap]:
    """Yield the model's blocks until exit, each with the block that represents it.

    Only a few of equal blocks are kept, unless the config names modules, since these may be blocks.
    """
    model, mesh, chunks = source.model, resolved.mesh, resolved.config.parallel.chunks
    blocks = list(find_blocks(model))
    if mesh.pipeline > 1:
        names = cuts.of(mesh.pipeline * chunks).blocks
        if names != tuple(name for name, _ in blocks):
            yield [(name, model.get_submodule(name)) for name in names]
            return
    named = bool(resolved.config.tiled.mlp) or not all(isinstance(choice, str) for choice in choices)
    # A named module may be one of several equal blocks.
    if named or _names_modules(model, resolved.config) or not isinstance(resolved.config.attention.layers, str):
        yield blocks
        return
    with fewer_blocks(model, keep_last=mesh.sequence > 1 or mesh.pipeline > 1) as block_map:
        yield block_map


def _names_modules(model: nn.Module, config: Config) -> bool:
    """Return whether settings are given for modules by name, not only by class: units, full precision, tensor rules,
    rules of Muon.
    """
    if config.optimizer.name == "muon" and config.optimizer.muon.rules:
        return True
    units = () if isinstance(config.zero.units, str) else config.zero.units
    rules = (pattern for pattern, _ in config.parallel.tensor_rules)
    classes = {type(module).__name__ for module in model.modules()}
    return not classes.issuperset([*units, *config.precision.keep_fp32, *rules])


def _entries(spec: UnitSpec, of_fqn: Mapping[str, Entry], representatives: Mapping[str, str]) -> list[Entry]:
    """Return the entries of a unit of the full model, from those of the model with fewer blocks, by name.

    Units in blocks have the parameter names of the block that represents theirs, as the traces have. Other units may
    have parameters of many equal blocks, whose names must differ.
    """
    names = [info.fqns[0] for info in spec.infos]
    found = [of_fqn[_representative(name, representatives)] for name in names]
    if any(name in representatives for name in enclosing_modules(spec.name)):
        return found
    return [replace(entry, fqn=name) for entry, name in zip(found, names, strict=True)]


def _representative(name: str, representatives: Mapping[str, str]) -> str:
    """Return a parameter's name in the block that represents the block around it, or its own name outside blocks."""
    block = next((module for module in enclosing_modules(name) if module in representatives), None)
    return name if block is None else representatives[block] + name[len(block) :]
