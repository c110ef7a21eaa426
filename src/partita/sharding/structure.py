"""The model as it was when its units were made, to notice what the user changes afterwards."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from partita.errors import PartitaError
from partita.planner.parameters import find_everywhere, find_quantized
from partita.sharding.unit import Member, Unit, UnitState


class Structure:
    """Checks, before a forward, that the model still consists of the parameters that are trained.

    Wrapping a module (``torch.compile``) is no change; a parameter that is replaced, added or moved is an error.
    ``elsewhere`` are the ids of those that are in memory of their own for a while: of which a rank has a share, when
    they are looked at whole.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        self.model = model
        self.elsewhere = set[int]()
        self.modules = list[nn.Module]()  # all of the model's, as of the last check, in its order
        self._held = [(unit, [_held(member) for member in unit.members]) for unit in units]
        self._names = {id(member.param): member.fqn for unit in units for member in unit.members}
        others = [*find_quantized(model), *find_everywhere(model)]
        self._others = {id(holding.param) for holding in others}
        self._remember()

    def _remember(self) -> None:
        self.modules = list(self.model.modules())
        self._children = [(m._modules, dict(m._modules), m._parameters, len(m._parameters)) for m in self.modules]

    def check(self) -> None:
        """Compare.

        Raises:
            PartitaError: a parameter is no longer the one, or no longer lies where, it was at ``initialize``.
        """
        with torch._C.DisableTorchFunctionSubclass():
            for unit, held in self._held:
                home = unit.storage._cdata
                for param, fqn, owners in held:
                    if param.untyped_storage()._cdata != home and id(param) not in self.elsewhere:
                        raise PartitaError(_MOVED.format(fqn))
                    for kind, params, name in owners:
                        if params.get(name) is not param:
                            raise PartitaError(_REPLACED.format(fqn, f"{kind}.{name}"))
            if any(now != then or len(params) != num for now, then, params, num in self._children):
                self._check_parameters()
                self._remember()

    def check_values(self) -> None:
        """Compare the values of parameters that lie elsewhere now with those that are trained and saved.

        Raises:
            PartitaError: a parameter has other values than at the end of the last step.
        """
        with torch._C.DisableTorchFunctionSubclass():
            for unit, _ in self._held:
                for member in unit.members:
                    param = member.param
                    if param.untyped_storage()._cdata == unit.storage._cdata or id(param) in self.elsewhere:
                        continue
                    if unit.state is not UnitState.WHOLE or not _same(param, member.within(member.segment.full)):
                        raise PartitaError(_MOVED.format(member.fqn))

    def _check_parameters(self) -> None:
        """Modules were replaced or added; their parameters must still be the same."""
        found = {id(param): name for name, param in self.model.named_parameters()}
        for key, name in self._names.items():
            if key not in found:
                raise PartitaError(_REPLACED.format(name, "a module that holds it"))
        for key, name in found.items():
            if key not in self._names and key not in self._others:
                raise PartitaError(_ADDED.format(name))


def _same(param: nn.Parameter, values: Tensor) -> bool:
    """True if the parameter has these values, on any device and in any dtype that holds them."""
    return param.shape == values.shape and torch.equal(param.detach().to(values), values)


# A parameter, its name, and of each module that holds it: its class, its parameters, and the name there.
_Held = tuple[nn.Parameter, str, list[tuple[str, dict[str, nn.Parameter | None], str]]]


def _held(member: Member) -> _Held:
    owners = [(type(owner).__name__, owner._parameters, name) for owner, name in member.holding.owners]
    return member.param, member.fqn, owners


_MOVED = (
    "parameter '{}' no longer lies in its unit's buffer: its .data, dtype or device was changed after initialize "
    "(model.double(), model.to(), param.data = ..., flatten_parameters()). Do that before initialize; to "
    "change values, write them in place inside `with engine.gathered(..., modify=True)`"
)
_REPLACED = (
    "parameter '{}' was replaced ({} is another object now): its new values would never be trained. "
    "Replace, resize and tie parameters before initialize"
)
_ADDED = (
    "parameter '{}' was added to the model after initialize: it would never be trained. "
    "Add parameters before initialize"
)
