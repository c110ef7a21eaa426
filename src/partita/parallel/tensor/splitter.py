"""Split of a model over the tensor ranks, and a record of it. Each rule adds its decisions about modules."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from partita.parallel.applied import AppliedParallelism
from partita.parallel.tensor.functions import CopyToTensorRanks
from partita.parallel.tensor.linear import ColumnSplit, Ranges, RowSplit, num_inputs, num_outputs, output_dim
from partita.parallel.tensor.parameter import TensorSharding, UseLocalShards
from partita.table.place import Place, even
from partita.table.share import Share
from partita.transforms.modules import Order

TENSOR = "tensor"


@dataclass(frozen=True)
class Decision:
    """The decision about a module: a description of its split, and the name of the rule that decided it
    (``rule_name``).
    """

    split: str
    rule_name: str


class Splitter:
    """Splits the modules of a model over the ranks of ``copy_input.group``, and records the decisions.

    Args:
        device: the device on which forwards run.

    Attributes:
        names: the names of the modules, by id.
        decisions: by the module's name; at most one per module.
    """

    def __init__(
        self, model: nn.Module, copy_input: CopyToTensorRanks, parallel: AppliedParallelism, device: torch.device
    ) -> None:
        self.model = model
        self.copy_input = copy_input
        self.parallel = parallel
        self.changes = parallel.transforms.at(Order.TENSOR)
        self.size = copy_input.group.size
        self.rank = copy_input.group.index
        self.names = {id(module): name for name, module in model.named_modules()}
        self.decisions = dict[str, Decision]()
        self._device = device
        self._num_owners = _count_owners(model)

    def is_free(self, module: nn.Module) -> bool:
        """Return whether the module has no decision yet, and shares no parameter with another module."""
        return self.name(module) not in self.decisions and not self.is_tied(module)

    def is_tied(self, module: nn.Module) -> bool:
        """Return whether another module also has one of its parameters."""
        return any(self._num_owners[id(param)] > 1 for param in module.parameters(recurse=False))

    def name(self, module: nn.Module) -> str:
        name: str = self.names[id(module)]
        return name

    def record(self, module: nn.Module, split: str, rule_name: str) -> None:
        self.decisions[self.name(module)] = Decision(split, rule_name)

    def lines(self) -> list[str]:
        """Return a line for each module that has a decision, in the model's order."""
        decided = [(name, self.decisions[name]) for name in self.names.values() if name in self.decisions]
        width = max((len(name) for name, _ in decided), default=0)
        return [f"{name:<{width}}  {decision.split} ({decision.rule_name})" for name, decision in decided]

    # ------------------------------------------------------------------- parameters

    def shard(self, param: nn.Parameter, dim: int, ranges: Sequence[Ranges]) -> None:
        """Shard a parameter: rank ``r`` gets the ranges ``ranges[r]`` of ``dim``."""
        places = tuple(Place(tuple(param.shape), dim, of_rank) for of_rank in ranges)
        self._share(param, place=places[self.rank], averaged=())
        self.parallel.parts[id(param)] = TensorSharding(self.copy_input.group, places)

    def replicate(self, param: nn.Parameter) -> None:
        """Keep a copy of a parameter on every rank. Its gradient is the sum of the ranks' partial gradients."""
        self._share(param, averaged=(), summed=(TENSOR,))
        self.parallel.parts[id(param)] = TensorSharding(self.copy_input.group)

    def replicate_own(self, module: nn.Module) -> None:
        """Keep a copy of a module's own parameters on every rank, and apply it to this rank's heads or features."""
        params = [param for param in module.parameters(recurse=False) if id(param) not in self.parallel.parts]
        for param in params:
            self.replicate(param)
        if params:
            self.changes.wrap_forward(module, self.use_local_shards(module))

    def use_local_shards(self, module: nn.Module) -> UseLocalShards:
        """Return the context in which the module computes with this rank's shards of its parameters."""
        parts = self.parallel.parts
        own = {name: parts.get(id(param)) for name, param in module._parameters.items()}
        return UseLocalShards(module, {name: each for name, each in own.items() if each is not None})

    def _share(self, param: nn.Parameter, **changed: Any) -> None:
        """Set fields of this rank's share of a parameter. It already has one if other pipeline stages have a copy."""
        shares = self.parallel.shares
        shares[id(param)] = replace(shares.get(id(param), Share(Place(tuple(param.shape)))), **changed)

    # ---------------------------------------------------------------------- layers

    def column(
        self, module: nn.Module, rule_name: str, ranges: Sequence[Ranges] | None = None, *, gathers: bool
    ) -> None:
        """Split the outputs of a linear layer: each rank computes ``ranges[rank]`` (None: equal ranges).

        If several ranks need an output, every rank has a copy of the layer's parameters.

        Args:
            gathers: the outputs are all-gathered.
        """
        num = num_outputs(module)
        given = [(each,) for each in even(num, self.size)] if ranges is None else list(ranges)
        bias = module._parameters.get("bias")
        sizes = tuple(length(each) for each in given)
        chosen = None
        if sum(sizes) == num and len({place for each in given for place in indices(each)}) == num:
            self.shard(module.get_parameter("weight"), output_dim(module), given)
            if bias is not None:
                self.shard(bias, 0, given)
            split = f"outputs {'+'.join(map(str, sizes))} of {num}"
        else:
            # Parameters may still be on the host or on `meta`: the index is on the device to which they are moved.
            chosen = torch.tensor(indices(given[self.rank]), device=self._device)
            for param in module.parameters(recurse=False):
                self.replicate(param)
            split = f"copies, of which each rank uses {'+'.join(map(str, sizes))} outputs of {num}; gradients summed"
        forward = ColumnSplit(
            module, self.copy_input, self.use_local_shards(module), sizes if gathers else None, chosen
        )
        self.changes.wrap_forward(module, forward)
        self.record(module, split + ", gathered" * gathers, rule_name)

    def row(
        self, module: nn.Module, rule_name: str, ranges: Sequence[Ranges] | None = None, *, splits: bool = False
    ) -> None:
        """Split the inputs of a linear layer: each rank has ``ranges[rank]`` (None: equal ranges), and the products are
        summed.

        Args:
            splits: the layer gets all inputs, and takes this rank's.
        """
        num = num_inputs(module)
        given = [(each,) for each in even(num, self.size)] if ranges is None else list(ranges)
        sizes = tuple(length(each) for each in given)
        self.shard(module.get_parameter("weight"), 1 - output_dim(module), given)
        self.changes.wrap_forward(
            module, RowSplit(module, self.copy_input, self.use_local_shards(module), sizes, splits=splits)
        )
        self.record(module, f"inputs {'+'.join(map(str, sizes))} of {num}, outputs summed", rule_name)


def _count_owners(model: nn.Module) -> dict[int, int]:
    """Return the number of modules that own each parameter, by the parameter's id."""
    found = dict[int, int]()
    for module in model.modules():
        for param in module.parameters(recurse=False):
            found[id(param)] = found.get(id(param), 0) + 1
    return found


def length(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


def indices(ranges: Ranges) -> list[int]:
    return [place for start, stop in ranges for place in range(start, stop)]


def scaled(ranges: Ranges, unit: int, offset: int = 0) -> Ranges:
    """Convert ranges of units to ranges of elements. A unit has ``unit`` elements, and the first unit begins at element
    ``offset``.
    """
    return tuple((offset + start * unit, offset + stop * unit) for start, stop in ranges)


def adjacent(numbers: Sequence[int]) -> Ranges:
    """Merge numbers into ranges: each run of consecutive numbers is one range."""
    found = list[tuple[int, int]]()
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return tuple(found)
