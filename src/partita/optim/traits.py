"""What is known of an optimizer: whether it may run on slices of parameters, what it keeps for each, what it counts.

Some classes are known by name, and a user may declare one (:func:`elementwise`); the rest is found by steps on small
parameters, which leave the optimizer, and the random numbers, as they are.
"""

import copy
import inspect
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from partita.errors import ConfigError
from partita.optim.snapshot import clone_of, copies
from partita.planner.memory import ADAM_MOMENTS

OptimizerClass = TypeVar("OptimizerClass", bound=type[Optimizer])

_ELEMENTWISE: set[type] = {
    getattr(torch.optim, name)
    for name in "Adadelta Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop SGD".split()
}
_REASONS = {
    "LBFGS": "it searches along a line through all parameters together",
    "Adafactor": "it keeps row and column means of each matrix",
    "Muon": "it orthogonalizes each matrix",
    "SparseAdam": "it works on sparse gradients",
}
_TRIAL_STEPS = 3
_SMALL = (2, 3)
_NUMBERS = (int, float, complex, Tensor)


def elementwise(cls: OptimizerClass) -> OptimizerClass:
    """Declare that an optimizer class updates every element of a parameter independently of the others.

    Use it as a decorator or a call. Sharded stages then run it on slices of parameters.
    """
    _ELEMENTWISE.add(cls)
    return cls


def check_elementwise(optimizer: Optimizer) -> None:
    """Refuse an optimizer that cannot run on slices.

    A class that is not known runs on a small matrix, whole and in two flat halves.

    Raises:
        ConfigError: names the class, the reason, and the remedies.
    """
    kind = type(optimizer)
    base = next((b for b in kind.__mro__ if b in _ELEMENTWISE), None)
    if base is not None and _step(kind) is _step(base):
        return
    reason = next((_REASONS[b.__name__] for b in kind.__mro__ if b.__name__ in _REASONS), None) or _trial(optimizer)
    if reason:
        raise ConfigError(
            f"optimizer {kind.__name__} cannot run on slices of parameters: {reason}. Use zero.stage 0 (it keeps "
            "parameters whole), an elementwise optimizer such as AdamW, or declare the class with partita.elementwise"
        )


def _step(kind: Any) -> object:
    """The class's own function: torch wraps ``step`` anew in each class when its first object is made."""
    return inspect.unwrap(kind.step)


def _trial(optimizer: Optimizer) -> str | None:
    """Why the class failed on a small example with any group's settings; None if halves and whole agree bit for bit."""
    kind = type(optimizer)
    accepted = inspect.signature(kind.__init__).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    arguments = {name: value for name, value in optimizer.defaults.items() if takes_any or name in accepted}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    for settings in {repr(group): group for group in groups}.values():
        if reason := _trial_with(partial(kind, **arguments), settings):
            return reason
    return None


def _trial_with(make: Callable[[Any], Optimizer], settings: dict[str, Any]) -> str | None:
    """The same with the settings of one group."""
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, 4, 8, generator=generator, dtype=torch.float32, device="cpu")
    start, *gradients = (draw() for _ in range(1 + _TRIAL_STEPS))
    try:
        with torch.random.fork_rng(devices=[]):
            whole = _run(make, settings, [start.clone()], [[g] for g in gradients])
            halves = _run(make, settings, list(start.clone().view(2, -1)), [list(g.view(2, -1)) for g in gradients])
    except Exception as error:  # the class is the user's: whatever it raises is the reason
        return f"a trial on slices of a small matrix raised {type(error).__name__}: {error}"
    if torch.equal(whole[0].view(-1), torch.cat([half.view(-1) for half in halves])):
        return None
    return "on a small matrix its result differs when the matrix is cut in two"


def _run(
    make: Callable[[Any], Optimizer], settings: dict[str, Any], values: list[Tensor], gradients: list[list[Tensor]]
) -> list[Tensor]:
    params = [nn.Parameter(value) for value in values]
    trial = make([{**copy.deepcopy(settings), "params": params}])
    for grads in gradients:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        trial.step()
    return [param.detach() for param in params]


def states_per_element(optimizer: Optimizer) -> int:
    """Tensors of the parameter's shape that the optimizer keeps beside it; Adam's where a trial does not tell."""
    if (states := _states(optimizer)) is None:
        return ADAM_MOMENTS
    return max(sum(isinstance(value, Tensor) and value.shape == _SMALL for value in state.values()) for state in states)


def state_names(optimizer: Optimizer) -> frozenset[str]:
    """The names of what the optimizer keeps after a first step; none where a trial does not tell."""
    return frozenset(name for state in _states(optimizer) or () for name in state)


def counted_attributes(optimizer: Optimizer, *, apart: bool) -> tuple[str, ...]:
    """The names of the numbers and tensors beside ``state`` and groups that a step changes (``self.t += 1``); none
    where a trial does not tell.

    Steps beside the caller are made on a second object, and a checkpoint holds what it is told of: these are carried
    over to both. What a step changes of other kinds is not, with a warning.

    Args:
        apart: whether steps are made on a second object, where that is an error.

    Raises:
        ConfigError: names the attribute.
    """
    if (stepped := _stepped(optimizer)) is None:
        return ()
    trial, before = stepped
    after = trial.__dict__
    changed = [key for key in after if key not in ("param_groups", "state") and not _same(before.get(key), after[key])]
    others = [key for key in changed if not isinstance(after[key], _NUMBERS)]
    if others:
        said = (
            f"optimizer {type(optimizer).__name__} changes '{others[0]}' (a {type(after[others[0]]).__name__}) in its "
            "step, beside its state and groups"
        )
        remedy = f"keep it in self.state[param] or in the groups, or as numbers and tensors (self.{others[0]} = 0)"
        if apart:
            raise ConfigError(
                f"{said}; updates beside the caller (offload, gradients in_backward) would lose it: {remedy}"
            )
        warnings.warn(f"{said}: checkpoints do not hold it; {remedy}", stacklevel=4)
    return tuple(key for key in changed if key not in others)


def _states(optimizer: Optimizer) -> list[dict[str, Any]] | None:
    """What the optimizer keeps of a small parameter in each group; None where a trial does not tell."""
    if (stepped := _stepped(optimizer)) is None:
        return None
    trial, _ = stepped
    return [trial.state.get(param, {}) for group in trial.param_groups for param in group["params"]]


def _stepped(optimizer: Optimizer) -> tuple[Optimizer, dict[str, Any]] | None:
    """A second object after a step on one small parameter in each group, and its attributes before; None where the
    step fails.
    """
    try:
        groups = []
        for group in optimizer.param_groups:
            param = nn.Parameter(torch.zeros(_SMALL, dtype=torch.float32, device="cpu"))
            param.grad = torch.ones_like(param)
            settings = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            groups.append({**settings, "params": [param]})
        trial = clone_of(optimizer, groups, type(optimizer.state)(dict))
        trial.__dict__.update(copies(trial.__dict__, set(trial.__dict__) - {"param_groups", "state"}))
        before = copies(trial.__dict__, trial.__dict__)
        with torch.random.fork_rng(devices=[]):
            trial.step()
    except Exception:  # the class is the user's: whatever it raises, it has not told
        return None
    return trial, before


def _same(one: Any, other: Any) -> bool:
    """Whether a value is as it was: containers by what they hold, objects by which they are."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if type(one) is type(other) and isinstance(one, list | dict | set):
        return _held(one) == _held(other)
    return one is other or (isinstance(one, int | float | complex) and isinstance(other, type(one)) and one == other)


def _held(box: Any) -> list[int]:
    return [id(item) for item in (box.values() if isinstance(box, dict) else box)]
