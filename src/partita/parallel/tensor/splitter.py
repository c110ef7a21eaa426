"""Record of how a model is split over the tensor ranks. Each rule adds its decisions about modules."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from partita.parallel.applied import Parallel
from partita.parallel.tensor.functions import Entrance
from partita.parallel.tensor.linear import Column, Ranges, Row, num_inputs, num_outputs, output_dim
from partita.parallel.tensor.parameter import OwnParts, Part
from partita.plan.place import Place, even
from partita.plan.share import Share
from partita.transforms.modules import Order

TENSOR = "tensor"


@dataclass(frozen=True)
class Decision:
    """The decision about a module: ``split`` says how it is split, ``by`` which rule decided it."""

    split: str
    by: str


class Splitter:
    """Division of a model's modules over the ranks of ``entrance``, and a record of it.

    Attributes:
        names: the names of the modules, by id.
        decisions: the decisions, by the module's name. A module is decided on once.
    """

    def __init__(self, model: nn.Module, entrance: Entrance, parallel: Parallel) -> None:
        self.model = model
        self.entrance = entrance
        self.parallel = parallel
        self.changes = parallel.transforms.at(Order.TENSOR)
        self.size = entrance.group.size
        self.rank = entrance.group.index
        self.names = {id(module): name for name, module in model.named_modules()}
        self.decisions = dict[str, Decision]()
        self._num_owners = _owners(model)

    def is_free(self, module: nn.Module) -> bool:
        """Return whether the module has no decision, and shares no parameter with another module."""
        return self.name(module) not in self.decisions and not self.is_tied(module)

    def is_tied(self, module: nn.Module) -> bool:
        """Return whether another module also has one of its parameters."""
        return any(self._num_owners[id(param)] > 1 for param in module.parameters(recurse=False))

    def name(self, module: nn.Module) -> str:
        name: str = self.names[id(module)]
        return name

    def decide(self, module: nn.Module, split: str, by: str) -> None:
        self.decisions[self.name(module)] = Decision(split, by)

    def lines(self) -> list[str]:
        """Return a line for each module that was decided on, in the model's order."""
        decided = [(name, self.decisions[name]) for name in self.names.values() if name in self.decisions]
        width = max((len(name) for name, _ in decided), default=0)
        return [f"{name:<{width}}  {decision.split} ({decision.by})" for name, decision in decided]

    # ------------------------------------------------------------------- parameters

    def cut(self, param: nn.Parameter, dim: int, ranges: Sequence[Ranges]) -> None:
        """Split a parameter: rank ``r`` gets the ranges ``ranges[r]`` of ``dim``."""
        places = tuple(Place(tuple(param.shape), dim, of_rank) for of_rank in ranges)
        self._share(param, place=places[self.rank], averaged=())
        self.parallel.parts[id(param)] = Part(self.entrance.group, places)

    def sum_copies(self, param: nn.Parameter) -> None:
        """Give every rank a copy of a parameter. Each computes a part of its gradient; the parts are summed."""
        self._share(param, averaged=(), summed=(TENSOR,))
        self.parallel.parts[id(param)] = Part(self.entrance.group)

    def own_parts(self, module: nn.Module) -> OwnParts:
        """Return the context in which the module computes with this rank's parts of its parameters."""
        parts = self.parallel.parts
        own = {name: parts.get(id(param)) for name, param in module._parameters.items()}
        return OwnParts(module, {name: part for name, part in own.items() if part is not None})

    def _share(self, param: nn.Parameter, **changed: Any) -> None:
        """Change fields of this rank's share of a parameter, which already exists if other stages have a copy."""
        shares = self.parallel.shares
        shares[id(param)] = replace(shares.get(id(param), Share(Place(tuple(param.shape)))), **changed)

    # ---------------------------------------------------------------------- layers

    def column(self, module: nn.Module, by: str, ranges: Sequence[Ranges] | None = None, *, gathers: bool) -> None:
        """Split a linear layer by outputs: each rank computes ``ranges[rank]`` (None: equal parts).

        If several ranks need an output, every rank has a copy of the layer's parameters.
        """
        num = num_outputs(module)
        given = [(part,) for part in even(num, self.size)] if ranges is None else list(ranges)
        bias = module._parameters.get("bias")
        sizes = tuple(length(part) for part in given)
        chosen = None
        if sum(sizes) == num and len({place for part in given for place in indices(part)}) == num:
            self.cut(module.get_parameter("weight"), output_dim(module), given)
            if bias is not None:
                self.cut(bias, 0, given)
            split = f"outputs {'+'.join(map(str, sizes))} of {num}"
        else:
            chosen = torch.tensor(indices(given[self.rank]), device=module.get_parameter("weight").device)
            for param in module.parameters(recurse=False):
                self.sum_copies(param)
            split = f"copies, of which each rank uses {'+'.join(map(str, sizes))} outputs of {num}; gradients summed"
        forward = Column(module, self.entrance, self.own_parts(module), sizes if gathers else None, chosen)
        self.changes.wrap_forward(module, forward)
        self.decide(module, split + ", gathered" * gathers, by)

    def row(self, module: nn.Module, by: str, ranges: Sequence[Ranges] | None = None, *, splits: bool = False) -> None:
        """Split a linear layer by inputs: each rank has ``ranges[rank]`` (None: equal parts), and the products are
        summed.
        """
        num = num_inputs(module)
        given = [(part,) for part in even(num, self.size)] if ranges is None else list(ranges)
        sizes = tuple(length(part) for part in given)
        self.cut(module.get_parameter("weight"), 1 - output_dim(module), given)
        self.changes.wrap_forward(module, Row(module, self.entrance, self.own_parts(module), sizes, splits=splits))
        self.decide(module, f"inputs {'+'.join(map(str, sizes))} of {num}, outputs summed", by)


def _owners(model: nn.Module) -> dict[int, int]:
    """Return the number of modules that have each parameter, by its id."""
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
    """Return ranges of units as ranges of elements. A unit has ``unit`` elements, and the first one begins at
    ``offset``.
    """
    return tuple((offset + start * unit, offset + stop * unit) for start, stop in ranges)


def adjacent(numbers: Sequence[int]) -> Ranges:
    """Return the ranges that consecutive numbers form."""
    found = list[tuple[int, int]]()
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return tuple(found)
