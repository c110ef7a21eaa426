"""An optimizer as it is at one moment, and its step later, on some of its parameters, with the settings of that moment.

Such a step runs on a second object of the optimizer's class with the same state: nobody who changes a rate meanwhile is
in its way.
"""

import copy
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from partita.errors import PartitaError

Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class Counted:
    """Groups and attributes after a step: some optimizers count in them."""

    groups: Groups
    attributes: dict[str, Any]


class Snapshot:
    """The settings of an optimizer's groups, and the attributes that it counts in, when this is made.

    Args:
        counted: the names of the attributes.
    """

    def __init__(self, optimizer: Optimizer, counted: Sequence[str]) -> None:
        self._optimizer = optimizer
        self._groups = [_settings(group) for group in optimizer.param_groups]
        self._params = [list(group["params"]) for group in optimizer.param_groups]
        self._counted = counted
        self._attributes = copies(optimizer, counted)

    def step(self, chosen: AbstractSet[int]) -> Counted:
        """The optimizer's own step on the ``chosen`` of its parameters (by id), and what it has counted in it: on all
        ranks, also on those that own nothing of what changes.
        """
        groups = [
            {**_settings(group), "params": [param for param in params if id(param) in chosen]}
            for group, params in zip(self._groups, self._params, strict=True)
        ]
        if not any(group["params"] for group in groups) and not self._counted:
            return Counted(groups, {})
        clone = clone_of(self._optimizer, groups, self._optimizer.state)
        clone.__dict__.update({name: copied(value) for name, value in self._attributes.items()})
        run_step(clone)
        return Counted(groups, copies(clone, self._counted))

    def take_up(self, counted: Counted) -> None:
        """What a step has counted becomes the optimizer's; what it has left alone stays as it is by now."""
        for group, before, after in zip(self._optimizer.param_groups, self._groups, counted.groups, strict=False):
            group.update({key: after[key] for key in before if not _same(before[key], after[key])})
        self._optimizer.__dict__.update(counted.attributes)

    def restore(self) -> None:
        """Undo what was counted since."""
        for group, before in zip(self._optimizer.param_groups, self._groups, strict=False):
            group.update(_settings(before))
        self.restore_attributes()

    def restore_attributes(self) -> None:
        """Undo what was counted in attributes."""
        self._optimizer.__dict__.update(self._attributes)


def clone_of(optimizer: Optimizer, groups: Groups, state: dict[Tensor, Any]) -> Optimizer:
    """A second object: the same optimizer on ``groups`` and ``state``, without the hooks on the first one's step."""
    clone = object.__new__(type(optimizer))
    clone.__dict__.update(optimizer.__dict__)
    clone.__dict__.pop("step", None)  # a scheduler's wrapper around the other object's
    clone.param_groups, clone.state = groups, state  # type: ignore[assignment]
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(clone, hooks, OrderedDict())
    return clone


def run_step(optimizer: Optimizer) -> None:
    """The optimizer's step.

    Raises:
        PartitaError: it asks for a state that a parameter does not have.
    """
    try:
        optimizer.step()
    except KeyError as error:
        raise PartitaError(
            f"optimizer {type(optimizer).__name__}: its step found no {error}. A setting of a group that adds a state "
            "(amsgrad, momentum, ...) has to be there before the group's first update, and a loaded checkpoint has to "
            "be one of an optimizer with the same states"
        ) from error


def copies(optimizer: Optimizer, names: Iterable[str]) -> dict[str, Any]:
    """What the optimizer holds under these names, so that a step on another object leaves it as it is."""
    return {name: copied(optimizer.__dict__[name]) for name in names if name in optimizer.__dict__}


def copied(value: Any) -> Any:
    """A value that a step may change."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, list | dict | set) else value


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """A group's, without its parameters."""
    named = ((key, value) for key, value in group.items() if key != "params")
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in named}


def _same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return one is other or bool(one == other)
