"""The units and blocks of each pipeline rank, from the same cut as in training, on a model without weights."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from partita.errors import ConfigError
from partita.layout.units import UnitSpec
from partita.parallel.pipeline.cut import StageCut, cut
from partita.parallel.pipeline.schedule import Shape
from partita.table.mesh_shape import part_of_pipeline
from partita.table.share import Copies
from partita.table.span import Entry

META = torch.device("meta")


@dataclass(frozen=True, eq=False)
class Stage:
    """The units and blocks of one pipeline rank.

    ``units``: numbers of the model's units. ``entries``: the rank's entries of each of them. ``block_numbers``: the
    number of the block around each of them; None: it is in no block. ``chunks``: the blocks ``[start, stop)`` of each
    of the rank's stages.
    """

    index: int
    units: tuple[int, ...]
    entries: tuple[tuple[Entry, ...], ...]
    block_numbers: tuple[int | None, ...]
    chunks: tuple[tuple[int, int], ...]


@dataclass
class Cuts:
    """The cuts of a ``model`` into stages, by the number of stages.

    ``names``: names of the blocks at which stages begin; None: the cut is automatic (``parallel.cut``).
    """

    model: nn.Module
    names: tuple[str, ...] | None = None
    _found: dict[int, StageCut] = field(default_factory=dict)

    def of(self, num_stages: int) -> StageCut:
        """Return the cut into ``num_stages`` stages.

        Raises:
            ConfigError: the model has fewer blocks, or its blocks do not match the names.
        """
        if num_stages not in self._found:
            self._found[num_stages] = cut(self.model, num_stages, self.names, META)
        return self._found[num_stages]


def single_stage(specs: Sequence[UnitSpec], entries: Sequence[Sequence[Entry]], blocks: Sequence[str]) -> Stage:
    """Return the only stage of a model that is not cut."""
    block_numbers = tuple(_block_numbers(specs, blocks))
    return Stage(0, tuple(range(len(specs))), tuple(map(tuple, entries)), block_numbers, ((0, len(blocks)),))


def stages_of(
    found: StageCut, shape: Shape, specs: Sequence[UnitSpec], entries: Sequence[Sequence[Entry]], blocks: Sequence[str]
) -> list[Stage]:
    """Return the stage of each rank of a pipeline.

    Args:
        entries: the entries of each unit of ``specs``, in the order of its parameters.
        blocks: the names of the traced blocks.

    Raises:
        ConfigError: the model is cut between other blocks than the traced ones.
    """
    if found.blocks != tuple(blocks):
        raise ConfigError(
            f"parallel.pipeline: {shape.ranks}: the model is cut between {', '.join(found.blocks)}, but was traced by "
            f"{', '.join(blocks) or 'no blocks'}; use partita simulate, which covers all models"
        )
    per_rank: list[dict[int, list[Entry]]] = [{} for _ in range(shape.ranks)]
    for number, (spec, of_unit) in enumerate(zip(specs, entries, strict=True)):
        for info, entry in zip(spec.infos, of_unit, strict=True):
            ranks = tuple(sorted({stage % shape.ranks for stage in found.stages[id(info.param)]}))
            for rank in ranks:
                per_rank[rank].setdefault(number, []).append(entry if len(ranks) == 1 else _tied(entry, ranks))
    block_numbers = list(_block_numbers(specs, blocks))
    return [
        Stage(
            rank,
            tuple(of_rank),
            tuple(map(tuple, of_rank.values())),
            tuple(block_numbers[number] for number in of_rank),
            tuple(_bounds(found, shape, rank)),
        )
        for rank, of_rank in enumerate(per_rank)
    ]


def _bounds(found: StageCut, shape: Shape, rank: int) -> Iterator[tuple[int, int]]:
    for chunk in range(shape.chunks):
        stage = shape.stage(rank, chunk)
        yield found.block_bounds[stage], found.block_bounds[stage + 1]


def _tied(entry: Entry, ranks: tuple[int, ...]) -> Entry:
    """Return the entry of a parameter that several stages hold."""
    return replace(entry, copies=Copies(entry.copies.averaged, (part_of_pipeline(ranks), *entry.copies.summed)))


def _block_numbers(specs: Sequence[UnitSpec], blocks: Sequence[str]) -> Iterator[int | None]:
    at: Mapping[str, int] = {name: number for number, name in enumerate(blocks)}
    for spec in specs:
        yield next((at[name] for name in enclosing_modules(spec.name) if name in at), None)


def enclosing_modules(name: str) -> Iterator[str]:
    """Yield a module's name, then those of the modules around it."""
    while name:
        yield name
        name = name.rpartition(".")[0]
