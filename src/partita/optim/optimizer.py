"""The user's optimizer as the engine runs it.

- :class:`UpdateRule`: how it is given one parameter's weights and gradient, and what it writes.
- :class:`Snapshot`: its step, later and on some of its parameters, with the settings of one moment. It runs on a second
  object of the optimizer's class with the same state, so that changes to the first one do not interfere.
- :class:`Guard`: its methods as the user calls them. None does something else than the user expects, silently.
- :func:`carry_overrides`: the settings of single parameters that bitsandbytes keeps by the identity of the parameter.
"""

import copy
import sys
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from partita.errors import PartitaError
from partita.kernels.state import Weights
from partita.optim.states import View, flat
from partita.sharding.segment import Segment

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)


@dataclass(frozen=True)
class InMemory:
    """The weights of this rank's part of a segment, in memory for one update.

    Attributes:
        master: the master weights; of split ones the low bits.
        param: the 16-bit parameters, where the rule writes them; of split masters their high bits.
        is_split: the master weights are split.
    """

    master: Tensor
    param: Tensor | None
    is_split: bool

    def of(self, view: View) -> Weights:
        """Return one parameter's weights, flat."""
        master = flat(view.over(self.master))
        param = None if self.param is None else flat(view.over(self.param))
        return Weights(param=param, low=master) if self.is_split else Weights(param=param, master=master)


class UpdateRule(ABC, Generic[OptimizerT]):
    """A way in which an optimizer updates the parameters of a segment.

    Attributes:
        runs_beside: updates run beside the caller on every device, not only where states are off the device.
    """

    runs_beside = False

    def __init__(self, optimizer: OptimizerT) -> None:
        self.optimizer = optimizer

    @abstractmethod
    def writes_param(self, segment: Segment) -> bool:
        """Return whether the update writes the parameters in compute, beside the master weights."""

    @abstractmethod
    def connect(self, view: View, grad: Tensor, factor: float, weights: InMemory) -> None:
        """Give the optimizer one parameter's gradient, to be multiplied by ``factor``, and its weights."""

    @abstractmethod
    def disconnect(self) -> None:
        """The optimizer has stepped: forget what it was given."""


class TorchRule(UpdateRule[Optimizer]):
    """An optimizer of torch, or the user's."""

    def writes_param(self, segment: Segment) -> bool:
        return False

    def connect(self, view: View, grad: Tensor, factor: float, weights: InMemory) -> None:
        if factor != 1.0:
            grad.mul_(factor)
        view.tensor.grad = grad.to(view.tensor.device, view.tensor.dtype)

    def disconnect(self) -> None:
        pass  # gradients are taken out of the views


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
        """Take over what the step has changed; other settings stay as they are now."""
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


class Guard:
    """Watches an optimizer's methods.

    ``step`` and ``zero_grad`` are refused while they would do nothing. What ``train`` and ``eval`` write into
    parameters (Schedule-Free's averages) is published.

    Args:
        waiting: returns True while a batch's gradients wait for the engine's step.
        writes: a context in which the optimizer may write parameters; after it all ranks have them. A collective.
    """

    def __init__(
        self, optimizer: Optimizer, waiting: Callable[[], bool], writes: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._optimizer = optimizer
        self._waiting = waiting
        self._hook = optimizer.register_step_pre_hook(self._before_step)
        self._zero_grad = optimizer.zero_grad
        optimizer.zero_grad = self._before_zero_grad  # type: ignore[method-assign]
        self._modes = [name for name in ("train", "eval") if callable(getattr(optimizer, name, None))]
        for name in self._modes:
            setattr(optimizer, name, self._published(getattr(optimizer, name), writes))
        self._steps = False  # the engine makes the step under way

    def remove(self) -> None:
        """Leave the optimizer to the user."""
        self._hook.remove()
        for name in ("zero_grad", *self._modes):
            self._optimizer.__dict__.pop(name, None)

    @staticmethod
    def _published(
        method: Callable[..., Any], writes: Callable[[], AbstractContextManager[None]]
    ) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            with writes():
                return method(*args, **kwargs)

        return call

    @property
    def watched(self) -> bool:
        """True if others have hooks on the optimizer's step."""
        optimizer = self._optimizer
        return len(optimizer._optimizer_step_pre_hooks) > 1 or bool(optimizer._optimizer_step_post_hooks)

    def step(self, needed: bool) -> None:
        """The engine's step, on what has a gradient; where it is not ``needed`` it is made for others' hooks only."""
        if needed or self.watched:
            self._steps = True
            try:
                run_step(self._optimizer)
            finally:
                self._steps = False
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers look for it

    def _before_step(self, *_: Any) -> None:
        if not self._steps and self._waiting():
            raise PartitaError(
                "optimizer.step() between backward and engine.step(): it finds no gradients and would change nothing; "
                "call engine.step() alone, which clips, steps the optimizer and the schedule, and zeroes gradients"
            )

    def _before_zero_grad(self, set_to_none: bool = True) -> None:
        if self._waiting():
            raise PartitaError(
                "optimizer.zero_grad() between backward and engine.step(): gradients are not where it looks for them, "
                "and would stay; to drop them call engine.zero_grad() (engine.step() zeroes them by itself)"
            )
        self._zero_grad(set_to_none)


def carry_overrides(optimizer: Optimizer, views: Iterable[View]) -> Callable[[], None]:
    """Register the overrides of the user's parameters for their views, too.

    Returns: what takes them back.
    """
    manager: Any = getattr(optimizer, "mng", None)
    library: Any = sys.modules.get("bitsandbytes.optim")
    if library is None or not isinstance(manager, library.GlobalOptimManager):
        return lambda: None
    configs = dict(manager.pid2config)
    configs |= {id(getattr(module, name)): config for module, name, config in manager.module_weight_config_triple}
    own = {id(view.tensor): configs[id(view.member.param)] for view in views if id(view.member.param) in configs}
    manager.pid2config.update(own)

    def take_back() -> None:
        for key in own:
            manager.pid2config.pop(key, None)

    return take_back
