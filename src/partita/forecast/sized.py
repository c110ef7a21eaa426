"""A model on ranks that share a sample: its units as they would be laid out, and what its forward and backward take."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from partita.activation.caches import NoCaches
from partita.activation.recompute import Recomputation, chosen_modules
from partita.activation.tiled_loss import TiledHeads, find_heads
from partita.activation.tiles import tiled_modules
from partita.comm.collectives import Collectives
from partita.config.resolve import Resolved
from partita.config.schema import Config
from partita.errors import ConfigError
from partita.forecast.pieces import Trace
from partita.forecast.ranks import ranks_on_paper
from partita.forecast.shortened import shortened
from partita.forecast.source import Source
from partita.forecast.trace import trace
from partita.parallel.applied import Parallel
from partita.parallel.sequence.apply import SEQUENCE, SequenceParallel
from partita.parallel.tensor.functions import Entrance
from partita.parallel.tensor.rules import split_model
from partita.parallel.tensor.splitter import TENSOR, Splitter
from partita.plan.place import even
from partita.plan.planned import PlannedSegment, PlannedUnit
from partita.plan.residence import Encoding
from partita.plan.share import Copies
from partita.plan.span import Entry, lay_out
from partita.plan.state_plan import StatePlan, Tiers
from partita.planner.blueprint import row_of, unit_entries
from partita.planner.dtypes import dtype_of
from partita.planner.group_units import UnitSpec, find_blocks

# What ``activations.checkpoint`` says.
Checkpoint = str | tuple[str, ...]


@dataclass(frozen=True)
class Stage:
    """What one pipeline coordinate holds: ``units`` by number, ``blocks`` ``[start, stop)`` of the trace's."""

    units: tuple[int, ...]
    blocks: tuple[int, int]


@dataclass
class Sized:
    """A rank's share of a model: ``entries`` of each unit of ``specs``, and ``traces`` of one sample (or as many as
    ``samples``) by what ``activations.checkpoint`` says.
    """

    specs: Sequence[UnitSpec]
    entries: Sequence[Sequence[Entry]]
    traces: dict[Checkpoint, Trace]
    samples: int
    _planned: dict[Any, PlannedUnit] = field(default_factory=dict)
    _rows: dict[Any, tuple[Config, StatePlan]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        numbers = dict[object, int]()
        self._kinds = list[int]()  # of units: those of one kind are laid out alike
        for spec, entries in zip(self.specs, self.entries, strict=True):
            alike = tuple((entry.place, entry.encoding, entry.trainable, entry.copies) for entry in entries)
            self._kinds.append(numbers.setdefault((alike, bool(spec.name), tuple(spec.inside)), len(numbers)))

    @property
    def num_blocks(self) -> int:
        return len(next(iter(self.traces.values())).names)

    def stages(self, num: int) -> list[Stage]:
        """The model in so many stages of as many blocks: units outside blocks are where they stand among these, and
        those around them on the first and on the last.

        Raises:
            ConfigError: there are fewer blocks.
        """
        names = next(iter(self.traces.values())).names
        if num > max(1, len(names)):
            raise ConfigError(f"pipeline {num}: the model has {len(names)} blocks")
        at = {name: number for number, name in enumerate(names)}
        position, seen = list[int | None](), 0
        for spec in self.specs:
            block = next((at[name] for name in _outwards(spec.name) if name in at), None)
            around = any(name == spec.name or name.startswith(f"{spec.name}.") or not spec.name for name in names)
            position.append(None if block is None and around else seen if block is None else block)
            seen = seen if block is None else block
        found = []
        for number, (start, stop) in enumerate(even(len(names), num)):
            ends = number in (0, num - 1)
            held = [
                u
                for u, place in enumerate(position)
                if (ends if place is None else start <= place < max(stop, start + 1))
            ]
            found.append(Stage(tuple(held), (start, stop)))
        return found

    def planned(self, resolved: Resolved, tiers: Tiers, stage: Stage) -> list[PlannedUnit]:
        """The units of a stage under a row of the table."""
        return [self._unit(number, resolved, tiers) for number in stage.units]

    def _unit(self, number: int, resolved: Resolved, tiers: Tiers) -> PlannedUnit:
        """Units that are laid out alike are one object."""
        spec, entries = self.specs[number], self.entries[number]
        key = (self._kinds[number], id(resolved.config), resolved.mesh, tiers)
        if key not in self._planned:
            row = self._row(resolved, tiers, None, Copies())
            size = resolved.mesh.group_size

            def num_copies(copies: Copies) -> int:
                return size(row.alike_axes) * size(copies.axes)

            layouts = lay_out(entries, size(row.part_axes), num_copies)
            rows = [self._row(resolved, tiers, layout.encoding, layout.copies) for layout in layouts]
            segments = (PlannedSegment(layout, own, resolved.mesh) for layout, own in zip(layouts, rows, strict=True))
            self._planned[key] = PlannedUnit(spec.name, tuple(segments), tuple(spec.inside))
        return self._planned[key]

    def _row(self, resolved: Resolved, tiers: Tiers, encoding: Encoding | None, copies: Copies) -> StatePlan:
        key = (id(resolved.config), resolved.mesh, tiers, encoding, copies)
        if key not in self._rows:
            self._rows[key] = resolved.config, row_of(resolved, tiers, encoding, copies)
        return self._rows[key][1]


def size_model(
    source: Source, specs: Sequence[UnitSpec], resolved: Resolved, choices: Sequence[Checkpoint], samples: int = 1
) -> Sized:
    """The share of the fullest of the ranks of ``resolved`` that share a sample; what it says of units and dtypes
    counts.

    Args:
        specs: the model's units.
        choices: of ``activations.checkpoint``, each of which is traced, of a micro-batch of ``samples``.

    Raises:
        ConfigError: the model cannot be split so, or not be run without data.
    """
    model, cut = source.model, resolved.mesh.sequence > 1
    named = bool(resolved.config.tiled.mlp) or not all(
        isinstance(choice, str) for choice in choices
    )  # maybe one of many
    with (
        nullcontext(list(find_blocks(model))) if named else shortened(model, last_apart=cut) as stand,
        ranks_on_paper(resolved.mesh) as collectives,
        _split(model, resolved, collectives) as parallel,
    ):
        short, entries = unit_entries(model, resolved, parallel.shares)
        dtypes = {
            id(holding.param): dtype_of(entry.encoding)
            for spec, of_unit in zip(short, entries, strict=True)
            for holding, entry in zip(spec.holdings, of_unit, strict=True)
        }
        names = {id(module): name for name, module in model.named_modules()}
        stands_for = {name: names[id(block)] for name, block in stand}
        traces, batch = dict[Checkpoint, Trace](), source.batch(samples, "meta")
        for choice in choices:
            with _keeping_less(model, [spec.name for spec in short], choice, resolved):
                traces[choice] = trace(model, stand, batch, dtypes, collectives, parallel.shares)
    of_name = {spec.name: of_unit for spec, of_unit in zip(short, entries, strict=True)}
    return Sized(specs, [of_name[_stand_in(spec.name, stands_for)] for spec in specs], traces, samples)


def _stand_in(unit: str, stands_for: Mapping[str, str]) -> str:
    """The unit that stands for this one: inside the block that stands for the block around it."""
    block = next((name for name in _outwards(unit) if name in stands_for), None)
    return unit if block is None else stands_for[block] + unit[len(block) :]


@contextmanager
def _split(model: nn.Module, resolved: Resolved, collectives: Collectives) -> Iterator[Parallel]:
    """The model as the first of the ranks has it; its parameters stay whole."""
    parallel, mesh = Parallel(), collectives.mesh
    try:
        if mesh.size(TENSOR) > 1:
            splitter = Splitter(model, Entrance(collectives.group((TENSOR,))), parallel)
            split_model(splitter, mesh, resolved.config.parallel.tensor_rules)
        if mesh.size(SEQUENCE) > 1:
            SequenceParallel(model, mesh, collectives.group((SEQUENCE,)), parallel.changes)
        yield parallel
    finally:
        parallel.remove()


@contextmanager
def _keeping_less(model: nn.Module, units: Sequence[str], choice: Checkpoint, resolved: Resolved) -> Iterator[None]:
    """The model with modules that run again in backward, and what the config has in tiles; without caches where the
    engine's has none.
    """
    config, mesh = resolved.config, resolved.mesh
    modules, tiled = chosen_modules(model, units, choice), tiled_modules(model, config.tiled.mlp)
    heads = find_heads(model, config.loss, units)
    no_caches = NoCaches(model) if modules or tiled or mesh.sequence > 1 or mesh.pipeline > 1 else None
    recomputation = Recomputation(modules, selective=choice == "selective", tiled=tiled, inputs=None, kept=None)
    in_tiles = TiledHeads(heads, config.loss)
    try:
        yield
    finally:
        in_tiles.remove()
        recomputation.remove()
        if no_caches is not None:
            no_caches.remove()


def _outwards(name: str) -> Iterator[str]:
    """A module's name, and those of the modules around it."""
    while name:
        yield name
        name = name.rpartition(".")[0]
