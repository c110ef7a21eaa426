"""Rank 0's first values, whole, on every rank, of which each then takes its share: a part, or what its stage holds.

Ranks that hold the same need none of it: they exchange what they hold (:mod:`partita.sharding.assemble`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from partita.comm.collectives import Collectives
from partita.plan.mesh_shape import STATE_AXES
from partita.planner.elsewhere import is_elsewhere
from partita.planner.parameters import Holding, find_everywhere
from partita.sharding.initialize import initialize_modules
from partita.sharding.unit import Unit, replace_data


class FirstValues:
    """Gives the values of a few parameters at a time, in one order on all ranks: stage by stage, unit by unit.

    Attributes: ``needed``: whether ranks take other shares; ``turns``: the names that are given together, each with
    this rank's unit that holds them (None: another stage's does).

    Args:
        has: whether values for a parameter of these names come from elsewhere.
    """

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], collectives: Collectives, has: Callable[..., bool]
    ) -> None:
        self._model = model
        self._all_ranks = collectives.all_ranks
        self._has = has
        self._device = collectives.mesh.device
        self.needed = self._all_ranks.size > collectives.group(STATE_AXES).size
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._holdings = {holding.fqns[0]: holding for holding in find_everywhere(model)}
        own = {tuple(member.fqn for member in unit.members): unit for unit in units}
        every = self._all_ranks.exchange_objects(list(own), "partita.initialize") if self.needed else [list(own)]
        names = dict.fromkeys(unit for of_rank in every for unit in of_rank)
        self.turns = [(unit, own.get(unit)) for unit in names]
        self._given = set[str]()

    def _wanted(self, names: Sequence[str]) -> list[Holding]:
        """Those that have not been given yet, and whose values no source brings."""
        found = [self._holdings[name] for name in names if self.needed and name not in self._given]
        return [holding for holding in found if not self._has(*holding.fqns)]

    def make(self, names: Sequence[str]) -> None:
        """Have values for parameters on the ``meta`` device: their modules initialize them, whole."""
        wanted = self._wanted(names)
        given = [holding.param for holding in wanted if not holding.param.is_meta]
        fresh = [holding for holding in wanted if holding.param.is_meta]
        owners = {id(owner): owner for holding in fresh for owner, _ in holding.owners}
        with _as_held_here(wanted):
            for holding in fresh:
                replace_data(holding.param, torch.empty_like(holding.param.data, device=self._device))
            # Parents last: they may set what is inside them anew.
            chosen = [(self._paths[key], owner) for key, owner in reversed(owners.items())]
            initialize_modules(self._model, chosen, given, self._device)

    @torch.no_grad()
    def send(self, names: Sequence[str]) -> None:
        """Give every rank rank 0's."""
        with torch._C.DisableTorchFunctionSubclass():
            own = [holding.param.data for holding in self._wanted(names)]
        sent = [values.to(self._device) for values in own]
        self._all_ranks.broadcast(sent, "start")
        for values, received in zip(own, sent, strict=True):
            if received is not values:
                values.copy_(received)

    def drop(self, names: Sequence[str]) -> None:
        """Let go of the values of those that other stages hold."""
        for name in names:
            self._given.add(name)
            param = self._holdings[name].param
            if is_elsewhere(param):
                with torch._C.DisableTorchFunctionSubclass():
                    replace_data(param, torch.empty_like(param.data, device="meta"))


@contextmanager
def _as_held_here(holdings: Sequence[Holding]) -> Iterator[None]:
    """A block in which parameters that other stages hold are like any: their modules fill them."""
    away = [(holding.param, type(holding.param)) for holding in holdings if is_elsewhere(holding.param)]
    for param, _ in away:
        param.__class__ = nn.Parameter
    try:
        yield
    finally:
        for param, kind in away:
            param.__class__ = kind
