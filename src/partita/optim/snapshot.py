"""An optimizer as it is at one moment, and its step later, on some of its parameters, with the settings of that moment.

Such a step runs on a second object of the optimizer's class with the same state: nobody who changes a rate meanwhile is
in its way.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from partita.errors import PartitaError

Groups = list[dict[str, Any]]


class Snapshot:
    """The settings of an optimizer's groups, and the attributes that it counts in, when this is made.

    Args:
        counted: the names of the attributes.
    """

    def __init__(self, optimizer: Optimizer, counted: Sequence[str]) -> None:
        self._optimizer = optimizer
        self._groups = [copies(group, group) for group in optimizer.param_groups]
        self._counted = counted
        self._attributes = copies(optimizer.__dict__, counted)

    def step(self, chosen: AbstractSet[int]) -> Callable[[], None]:
        """The optimizer's own step on the ``chosen`` of its parameters (by id). Returns what has the optimizer take up
        what the step has counted: on all ranks, also on those that own nothing of what changes.
        """
        groups = [copies(group, group) for group in self._groups]
        for group in groups:
            group["params"] = [param for param in group["params"] if id(param) in chosen]
        if not any(group["params"] for group in groups) and not self._counted:
            return lambda: None
        clone = clone_of(self._optimizer, groups, self._optimizer.state)
        clone.__dict__.update(copies(self._attributes, self._attributes))
        run_step(clone)
        return partial(self._take_up, groups, copies(clone.__dict__, self._counted))

    def _take_up(self, groups: Groups, attributes: dict[str, Any]) -> None:
        """What the step has left alone stays as it is by now."""
        for group, before, after in zip(self._optimizer.param_groups, self._groups, groups, strict=False):
            changed = (key for key in before if key != "params" and not _same(before[key], after[key]))
            group.update({key: after[key] for key in changed})
        self._optimizer.__dict__.update(attributes)


def clone_of(optimizer: Optimizer, groups: Groups, state: dict[Tensor, Any]) -> Optimizer:
    """A second object: the same optimizer on ``groups`` and ``state``, without the hooks on the first one's step."""
    clone = object.__new__(type(optimizer))
    clone.__dict__.update(optimizer.__dict__)
    clone.__dict__.pop("step", None)  # a scheduler's wrapper around the other object's
    clone.param_groups = groups
    clone.state = state  # type: ignore[assignment]
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


def copies(values: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Those of the ``values`` that have these names, so that a step that changes them leaves the others as they are."""
    return {name: _copy_of(values[name]) for name in names if name in values}


def _copy_of(value: Any) -> Any:
    """A value that a step may change."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, list | dict | set) else value


def _same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return one is other or bool(one == other)
