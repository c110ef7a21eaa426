"""The model as it was when its units were made, to notice what the user changes afterwards."""

from collections.abc import Sequence

import torch
from torch import nn

from partita.errors import PartitaError
from partita.planner.parameters import find_everywhere, find_quantized
from partita.sharding.unit import Unit


class Structure:
    """Checks, before a forward, that the model still consists of the parameters that are trained.

    Wrapping a module (``torch.compile``) is no change; a parameter that is replaced, added or moved is an error.
    ``elsewhere`` are the ids of those that are in memory of their own for a while: of which a rank has a share, when
    they are looked at whole.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        self._model, self._units, self.elsewhere = model, units, set[int]()
        self._names = {id(member.param): member.fqn for unit in units for member in unit.members}
        others = [*find_quantized(model), *find_everywhere(model)]
        self._others = {id(holding.param) for holding in others}
        self._remember()

    def _remember(self) -> None:
        self._modules = [(module, dict(module._modules), len(module._parameters)) for module in self._model.modules()]

    def check(self) -> None:
        """Compare.

        Raises:
            PartitaError: a parameter is no longer the one, or no longer lies where, it was at ``initialize``.
        """
        with torch._C.DisableTorchFunctionSubclass():
            for unit in self._units:
                home = unit.storage._cdata
                for member in unit.members:
                    if member.param.untyped_storage()._cdata != home and id(member.param) not in self.elsewhere:
                        raise PartitaError(_MOVED.format(member.fqn))
                    for owner, name in member.holding.owners:
                        if owner._parameters.get(name) is not member.param:
                            raise PartitaError(_REPLACED.format(member.fqn, f"{type(owner).__name__}.{name}"))
            if any(m._modules != children or len(m._parameters) != num for m, children, num in self._modules):
                self._check_parameters()
                self._remember()

    def _check_parameters(self) -> None:
        """Modules were replaced or added; their parameters must still be the same."""
        found = {id(param): name for name, param in self._model.named_parameters()}
        for key, name in self._names.items():
            if key not in found:
                raise PartitaError(_REPLACED.format(name, "a module that holds it"))
        for key, name in found.items():
            if key not in self._names and key not in self._others:
                raise PartitaError(_ADDED.format(name))


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
