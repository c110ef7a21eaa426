"""The interface between the engine and an optimizer.

- :class:`UpdateRule`: passes one parameter's weights and gradient to the optimizer.
- :class:`Snapshot`: a later step on some of its parameters, with the settings of an earlier moment. It runs on a clone
  of the optimizer with the same state, so that changes of the settings do not interfere.
- :class:`Guard`: checks of the methods that the user calls, so that none of them silently does nothing.
- :func:`carry_overrides`: settings of single parameters that bitsandbytes stores by the parameter's id.
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
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from partita.errors import PartitaError
from partita.kernels.state import Weights
from partita.optim.extension import CollectiveOptimizer
from partita.optim.states import View, flat
from partita.sharding.parameter import Member
from partita.sharding.runtime import Runtime
from partita.sharding.segment import Segment

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)


@dataclass(frozen=True)
class LeasedWeights:
    """This rank's weights of a segment, in memory for one update.

    Attributes:
        master: the master weights; if split, their low halves.
        param: the 16-bit parameters, if the rule writes them; with split master weights, their high halves.
        is_split: True if the master weights are split.
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
    """The way in which an optimizer updates the parameters of a segment.

    Attributes:
        always_overlaps: True if updates always run on another stream, not only those with states off the device.
    """

    always_overlaps = False

    def __init__(self, optimizer: OptimizerT) -> None:
        self.optimizer = optimizer

    @abstractmethod
    def writes_param(self, segment: Segment) -> bool:
        """Return whether the update also writes the parameters in compute, besides the master weights."""

    def scale(self, grads: Sequence[Tensor], factor: float) -> float:
        """Multiply gradients by ``factor``, unless :meth:`connect` does it. Returns the factor for that call."""
        return factor

    @abstractmethod
    def connect(self, view: View, grad: Tensor, factor: float, weights: LeasedWeights) -> None:
        """Pass one parameter's gradient, to be multiplied by ``factor``, and its weights to the optimizer."""

    def has_updated(self, view: View) -> bool:
        """Return whether the optimizer's step has updated a connected view of a segment whose parameters it writes.

        A view that the user has removed from its group is not updated.
        """
        return True

    @abstractmethod
    def disconnect(self) -> None:
        """Forget gradients and weights after the optimizer's step."""


class TorchRule(UpdateRule[Optimizer]):
    """The rule of torch's and the user's optimizers."""

    def writes_param(self, segment: Segment) -> bool:
        return False

    def scale(self, grads: Sequence[Tensor], factor: float) -> float:
        if any(grad.dtype == torch.float16 for grad in grads):  # too small a range for unscaled gradients
            return factor
        for grad in grads if factor != 1.0 else ():
            grad.mul_(factor)
        return 1.0

    def connect(self, view: View, grad: Tensor, factor: float, weights: LeasedWeights) -> None:
        grad = grad.to(view.tensor.device, view.tensor.dtype)
        view.tensor.grad = grad if factor == 1.0 else grad.mul_(factor)

    def disconnect(self) -> None:
        pass  # SegmentUpdate.close removes the gradients


Groups = list[dict[str, Any]]


class Snapshot:
    """A snapshot of an optimizer's group settings and step counters.

    Args:
        counted: the names of the optimizer's attributes that its step changes.
        always: True if the step runs also without parameters.
    """

    def __init__(self, optimizer: Optimizer, counted: Sequence[str], *, always: bool = False) -> None:
        self._optimizer = optimizer
        self._always = always or bool(counted) or isinstance(optimizer, CollectiveOptimizer)
        self._groups = [copies(group, group) for group in optimizer.param_groups]
        self._counted = counted
        self._attributes = copies(optimizer.__dict__, counted)

    def step(self, chosen: AbstractSet[int], coming: Sequence[Member] = ()) -> Callable[[], None]:
        """Run the optimizer's step on the ``chosen`` of its parameters (by id).

        Args:
            coming: the parameters that are updated on any rank.

        Returns: a function that copies the changed counters to the optimizer; call it on all ranks, also on those
        without chosen parameters.
        """
        groups = [copies(group, group) for group in self._groups]
        for group in groups:
            group["params"] = [param for param in group["params"] if id(param) in chosen]
        if not self._always and not any(group["params"] for group in groups):
            return lambda: None
        clone = clone_of(self._optimizer, groups, self._optimizer.state)
        if isinstance(clone, CollectiveOptimizer):
            clone.coming = coming
        clone.__dict__.update(copies(self._attributes, self._attributes))
        run_step(clone)
        return partial(self._copy_counters, groups, copies(clone.__dict__, self._counted))

    def _copy_counters(self, groups: Groups, attributes: dict[str, Any]) -> None:
        """Copy values that the step has changed to the optimizer; other settings stay as they are now."""
        for group, before, after in zip(self._optimizer.param_groups, self._groups, groups, strict=False):
            for key in after.keys() - {"params"}:  # also counters that the step has created
                if key not in before or not _same(before[key], after[key]):
                    group[key] = after[key]
        self._optimizer.__dict__.update(attributes)


def clone_of(optimizer: Optimizer, groups: Groups, state: dict[Tensor, Any]) -> Optimizer:
    """Return a clone of the optimizer with other ``groups`` and ``state``, without the hooks on its step."""
    clone = object.__new__(type(optimizer))
    clone.__dict__.update(optimizer.__dict__)
    clone.__dict__.pop("step", None)  # a scheduler's wrapper, bound to the original
    clone.param_groups = groups
    clone.state = state  # type: ignore[assignment]
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(clone, hooks, OrderedDict())
    return clone


def run_step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> None:
    """Run the optimizer's step.

    Raises:
        PartitaError: it needs a state that a parameter does not have.
    """
    try:
        optimizer.step() if closure is None else optimizer.step(closure)
    except KeyError as error:
        raise PartitaError(
            f"optimizer {type(optimizer).__name__}: its step found no state {error}. Group settings that add a state "
            "(amsgrad, momentum, ...) must be set before the group's first update, and a loaded checkpoint must be of "
            "an optimizer with the same states"
        ) from error


def copies(values: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return copies of the named values, so that a step that changes them leaves the originals as they are."""
    return {name: _copy_of(values[name]) for name in names if name in values}


def _copy_of(value: Any) -> Any:
    """Return a copy of a value that a step may change in place."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, list | dict | set) else value


def _same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return one is other or bool(one == other)


_SCALING = "_step_supports_amp_scaling"


class _RefusesGradScaler:
    """The value of the attribute that torch's ``GradScaler.step`` reads of an optimizer. Its truth is an error."""

    def __bool__(self) -> bool:
        raise PartitaError(
            "GradScaler.step(engine.optimizer) finds no gradients, which are in buffers, and the engine scales losses "
            "by itself (precision.loss_scale): leave the GradScaler out, and call engine.backward(loss) and "
            "engine.step()"
        )


class Guard:
    """Wraps an optimizer's methods.

    ``step``, ``zero_grad`` and torch's ``GradScaler`` raise an error while they would silently do nothing. Values that
    ``train`` and ``eval`` write into parameters (Schedule-Free's averages) are published. Values that the user's hooks
    on the step write into parameters are kept.

    Args:
        waiting: returns True while a batch's gradients wait for the engine's step.
        writes: a context in which the optimizer may write parameters, which are published at its end. A collective.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        runtime: Runtime,
        waiting: Callable[[], bool],
        writes: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._optimizer = optimizer
        self._runtime = runtime
        self._waiting = waiting
        self._hook = optimizer.register_step_pre_hook(self._before_step)
        self._zero_grad = optimizer.zero_grad
        optimizer.zero_grad = self._before_zero_grad  # type: ignore[method-assign]
        self._modes = [name for name in ("train", "eval") if callable(getattr(optimizer, name, None))]
        for name in self._modes:
            setattr(optimizer, name, self._published(getattr(optimizer, name), writes))
        self._scaling = optimizer.__dict__.get(_SCALING, False)
        setattr(optimizer, _SCALING, _RefusesGradScaler())
        self._steps = False  # True during the engine's own step

    def remove(self) -> None:
        """Restore the optimizer's methods."""
        self._hook.remove()
        for name in ("zero_grad", *self._modes):
            self._optimizer.__dict__.pop(name, None)
        setattr(self._optimizer, _SCALING, self._scaling)

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
        """True if the user has hooks on the optimizer's step."""
        return self._has_hooks_before or bool(self._optimizer._optimizer_step_post_hooks)

    @property
    def _has_hooks_before(self) -> bool:
        return len(self._optimizer._optimizer_step_pre_hooks) > 1

    def step(self, needed: bool, closure: Callable[[], Any] | None = None) -> None:
        """Run the step of the engine; if it is not ``needed``, only to count it and to call the user's hooks before it.

        Hooks after the step are called by :meth:`call_hooks`, when the results are published.

        Args:
            closure: evaluates the loss and its gradients, for optimizers that do it in their step.
        """
        optimizer = self._optimizer
        if needed or self.watched:
            if self._has_hooks_before:
                self._runtime.note_values()
            hooks = optimizer._optimizer_step_post_hooks
            optimizer._optimizer_step_post_hooks = OrderedDict()
            hooks_before = cast("OrderedDict[int, Any]", optimizer._optimizer_step_pre_hooks)
            hooks_before.move_to_end(self._hook.id)  # after the user's, which may write
            self._steps = True
            try:
                run_step(optimizer, closure)
            finally:
                self._steps = False
                optimizer._optimizer_step_post_hooks = hooks
        optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers look for it

    def call_hooks(self, *args: Any) -> None:
        """Call the user's hooks after the optimizer's step. All parameters are updated, or wait for their update.

        Args:
            args: the arguments of the step.
        """
        if hooks := list(self._optimizer._optimizer_step_post_hooks.values()):
            self._runtime.note_values()
            for hook in hooks:
                hook(self._optimizer, (self._optimizer, *args), {})
            self._runtime.store_written()

    def _before_step(self, *_: Any) -> None:
        if self._steps:
            if self._has_hooks_before:  # which have run, and may have written into parameters
                self._runtime.store_written()
        elif self._waiting():
            raise PartitaError(
                "optimizer.step() between backward and engine.step() finds no gradients and would change nothing; "
                "call engine.step() alone, which clips, steps the optimizer and the schedule, and zeroes gradients"
            )

    def _before_zero_grad(self, set_to_none: bool = True) -> None:
        if self._waiting():
            raise PartitaError(
                "optimizer.zero_grad() between backward and engine.step() would not zero the gradients, which are in "
                "buffers; to drop them call engine.zero_grad() (engine.step() zeroes them by itself)"
            )
        self._zero_grad(set_to_none)


def carry_overrides(optimizer: Optimizer, views: Iterable[View]) -> Callable[[], None]:
    """Register bitsandbytes' overrides for the user's parameters for their views, too.

    Returns: a function that removes them again.
    """
    manager: Any = getattr(optimizer, "mng", None)
    library: Any = sys.modules.get("bitsandbytes.optim")
    if library is None or not isinstance(manager, library.GlobalOptimManager):
        return lambda: None
    configs = dict(manager.pid2config)
    configs |= {id(getattr(module, name)): config for module, name, config in manager.module_weight_config_triple}
    chosen = [view for view in views if view.in_groups is not None and id(view.member.param) in configs]
    own = {id(view.in_groups): configs[id(view.member.param)] for view in chosen}
    manager.pid2config.update(own)

    def take_back() -> None:
        for key in own:
            manager.pid2config.pop(key, None)

    return take_back
