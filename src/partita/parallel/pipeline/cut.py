"""Division of a model into stages, and the stages that use each of its parameters."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from partita.errors import ConfigError, PartitaError
from partita.layout.parameters import find_all_parameters
from partita.layout.units import find_text_blocks
from partita.parallel.pipeline.off_stage import all_off_stage
from partita.parallel.pipeline.placeholder_output import PlaceholderOutput
from partita.sharding.buffers import buffers_kept
from partita.transforms.modules import ModuleTransforms, Order

KEY = "parallel.cut"


@dataclass(frozen=True)
class StageCut:
    """The division of a model into stages.

    Attributes:
        blocks: the names of the blocks, in the order in which the forward calls them.
        block_bounds: stage ``s`` runs the blocks of ``range(block_bounds[s], block_bounds[s + 1])``.
        stages: for each parameter, by id, the stages that compute with it.
    """

    blocks: tuple[str, ...]
    block_bounds: tuple[int, ...]
    stages: Mapping[int, tuple[int, ...]]

    def blocks_of(self, stage: int) -> tuple[str, ...]:
        return self.blocks[self.block_bounds[stage] : self.block_bounds[stage + 1]]


def cut(model: nn.Module, num_stages: int, names: Sequence[str] | None, device: torch.device) -> StageCut:
    """Cut a model into stages of about equal cost (elements of matrices), or before the blocks ``names``.

    Raises:
        ConfigError: there are fewer blocks than stages, or a name is not that of a module that can begin a stage.
    """
    blocks, reads = _call_order(model, _blocks(model, names or ()), device)
    if num_stages > len(blocks):
        raise ConfigError(
            f"parallel.pipeline x parallel.chunks: {num_stages} stages, but {type(model).__name__} has {len(blocks)} "
            f"blocks to cut between ({_listed(blocks)}); lower their product to at most {len(blocks)}, or name in "
            f"{KEY} the modules that begin stages"
        )
    costs = [sum(map(_cost, model.get_submodule(name).parameters())) for name in blocks]
    entries = find_all_parameters(model)
    for entry in entries:
        is_looked_up = any(isinstance(owner, nn.Embedding) for owner, _ in entry.owners)
        for position in reads[id(entry.param)][is_looked_up:]:  # an embedding multiplies nothing, a tied head does
            costs[max(position - 1, 0)] += _cost(entry.param)
    block_bounds = _even(costs, num_stages) if names is None else _at(blocks, names, num_stages)
    stage_of = [stage for stage, (start, stop) in enumerate(pairwise(block_bounds)) for _ in range(start, stop)]
    stages = dict[int, tuple[int, ...]]()
    for entry in entries:
        found = {stage_of[max(position - 1, 0)] for position in reads[id(entry.param)]}
        found |= {stage_of[at] for at, name in enumerate(blocks) if any(_inside(fqn, name) for fqn in entry.fqns)}
        stages[id(entry.param)] = tuple(sorted(found))
    return StageCut(blocks, block_bounds, stages)


def _inside(fqn: str, module: str) -> bool:
    return fqn.startswith(module + ".")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 5 else f"{names[0]}, {names[1]}, ... {names[-1]}"


# -- blocks ------------------------------------------------------------------------------------------------------------


def _blocks(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Return the modules that can begin a stage: repeated blocks, the layers of a Sequential, and the modules
    ``names``.

    Raises:
        ConfigError: a name is not that of a module, or it is that of a module inside a block.
    """
    found = [name for name, _ in find_text_blocks(model)]
    if isinstance(model, nn.Sequential):
        top_level = [name for name, child in model.named_children() if any(True for _ in child.parameters())]
        found += [name for name in top_level if not any(_inside(block, name) or block == name for block in found)]
    modules = dict(model.named_modules())
    for name in names:
        if name not in modules or not name:
            raise ConfigError(
                f"{KEY}: '{name}' is no module of {type(model).__name__}; the blocks that can begin a stage are "
                f"{_listed(found)}"
            )
        around = [block for block in found if _inside(name, block)]
        if around:
            raise ConfigError(
                f"{KEY}: '{name}' is inside the block '{around[0]}', and a block cannot be cut; name that block, or "
                "another one"
            )
        found = [block for block in found if not _inside(block, name)] + [name] * (name not in found)
    order = {name: at for at, name in enumerate(modules)}
    return sorted(found, key=order.__getitem__)


Reads = Mapping[int, Sequence[int]]


def _call_order(model: nn.Module, blocks: Sequence[str], device: torch.device) -> tuple[tuple[str, ...], Reads]:
    """Return the blocks in the order in which the forward calls them, and the positions at which code outside the
    blocks reads each parameter.

    The position of a read is the number of blocks that were called before it. Reads are by the parameter's id. If the
    model has example inputs (``dummy_inputs``, as models of transformers have), both are found by a run without data.
    If not, modules are expected to be called in the order in which they are registered.
    """
    order, reads = _run(model, blocks, device)
    registered = _registered(model, blocks)
    missed = [name for name in blocks if name not in order]
    known = {param: sorted(positions) for param, positions in reads.items()} if not missed else {}
    return (tuple(order) if not missed else tuple(blocks)), {
        param: known.get(param, positions) for param, positions in registered.items()
    }


def _run(model: nn.Module, blocks: Sequence[str], device: torch.device) -> tuple[list[str], Mapping[int, set[int]]]:
    """Run the model without data. Return the order of the blocks and the reads, up to the first error."""
    order, reads = list[str](), defaultdict[int, set[int]](set)
    inputs = getattr(model, "dummy_inputs", None)
    if not isinstance(inputs, Mapping):
        return order, reads
    recorded = [_RecordedBlock(model.get_submodule(name), name, order, device) for name in blocks]
    transforms = ModuleTransforms()

    def on_read(param: Tensor) -> None:
        if not any(block.runs for block in recorded):
            reads[id(param)].add(len(order))

    with (
        transforms.temporary(),
        suppress(Exception),
    ):  # the inputs may not fit the forward; the records up to the error are used
        for block in recorded:
            transforms.at(Order.STAGE).wrap_call(block.module, block)
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices=[]),
            buffers_kept(model),
            all_off_stage(model, device, on_read),
        ):
            model(**{name: value.to(device) for name, value in inputs.items()})
    return order, reads


class _RecordedBlock:
    """Wrapper of a block's call that records the call, and returns a placeholder output."""

    def __init__(self, module: nn.Module, name: str, order: list[str], device: torch.device) -> None:
        self.module = module
        self._name = name
        self._order = order
        self._placeholder = PlaceholderOutput(module, name, device, lambda _: nullcontext())
        self.runs = False

    def __call__(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._name in self._order:
            raise PartitaError(f"'{self._name}' is called twice")
        self._order.append(self._name)
        self.runs = True
        try:
            return self._placeholder(args, kwargs)
        finally:
            self.runs = False


def _registered(model: nn.Module, blocks: Sequence[str]) -> dict[int, list[int]]:
    """Return, by the parameter's id, the numbers of blocks that are registered before its owners outside the blocks.

    A parameter of a module that contains blocks may be read at any position between them.
    """
    before, num = dict[str, int](), 0
    for name, _ in model.named_modules(remove_duplicate=False):
        before[name] = num
        num += name in blocks
    found = dict[int, list[int]]()
    for entry in find_all_parameters(model):
        positions = set[int]()
        for fqn in entry.fqns:
            owner = fqn.rpartition(".")[0]
            if any(_inside(block, owner) or not owner for block in blocks):
                positions.update(range(len(blocks) + 1))
            elif not any(_inside(fqn, block) for block in blocks):
                positions.add(before[owner])
        found[id(entry.param)] = sorted(positions)
    return found


# -- balance -----------------------------------------------------------------------------------------------------------


def _cost(param: Tensor) -> int:
    """Return the cost of a parameter in forward and backward: the number of elements of a matrix, 0 for a vector."""
    return param.numel() if param.ndim > 1 else 0


def _even(costs: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Return the bounds of ``num_stages`` non-empty ranges of blocks with the lowest possible maximum cost."""
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    num = len(costs)
    best: dict[tuple[int, int], tuple[int, tuple[int, ...]]]
    best = {(1, stop): (sums[stop], (0, stop)) for stop in range(1, num + 1)}
    for stages in range(2, num_stages + 1):
        for stop in range(stages, num + 1):
            best[stages, stop] = min(
                (max(best[stages - 1, start][0], sums[stop] - sums[start]), (*best[stages - 1, start][1], stop))
                for start in range(stages - 1, stop)
            )
    return best[num_stages, num][1]


def _at(blocks: Sequence[str], names: Sequence[str], num_stages: int) -> tuple[int, ...]:
    """Return the bounds of stages that begin with the blocks ``names``.

    Raises:
        ConfigError: these are not ``num_stages`` stages.
    """
    starts = sorted({blocks.index(name) for name in names} - {0})
    if len(starts) != num_stages - 1:
        raise ConfigError(
            f"{KEY} names {len(starts)} blocks after the first one, which makes {len(starts) + 1} stages; "
            f"parallel.pipeline x parallel.chunks is {num_stages}: name {num_stages - 1} blocks"
        )
    return (0, *starts, len(blocks))


def modules_outside_blocks(
    model: nn.Module, blocks: Sequence[str], param_ids: set[int]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules outside the blocks that contain no block and own a parameter whose id is in ``param_ids``."""
    for name, module in model.named_modules():
        around = not name or any(_inside(block, name) for block in blocks)
        within = any(name == block or _inside(name, block) for block in blocks)
        if not around and not within and any(id(param) in param_ids for param in module.parameters(recurse=False)):
            yield name, module
