"""What an optimizer counts in attributes of its own (``self.t += 1``), beside ``state`` and groups.

Updates beside the caller step a second object, and a checkpoint holds what it is told of: numbers and tensors that a
step changes are carried over to both. What they are is found by a step on a small parameter.
"""

import copy
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from partita.errors import ConfigError
from partita.optim.shadow import shadow_of

SHAPE = (2, 3)
_NUMBERS = (int, float, complex, Tensor)


def tried(optimizer: Optimizer) -> tuple[Optimizer, dict[str, Any]]:
    """A second object after a step on one small parameter for each group, and its attributes before it."""
    groups = []
    for group in optimizer.param_groups:
        param = nn.Parameter(torch.zeros(SHAPE))
        param.grad = torch.ones(SHAPE)
        settings = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        groups.append({**settings, "params": [param]})
    trial = shadow_of(optimizer, groups, type(optimizer.state)(dict))
    trial.__dict__.update(copies(trial, set(trial.__dict__) - {"param_groups", "state"}))
    before = copies(trial, trial.__dict__)
    with torch.random.fork_rng(devices=[]):  # the user's random numbers do not depend on the trial
        trial.step()
    return trial, before


def counted_attributes(optimizer: Optimizer, *, apart: bool) -> tuple[str, ...]:
    """The names of the numbers and tensors that a step changes; none where a trial does not tell.

    What a step changes of other kinds is not carried over, with a warning.

    Args:
        apart: whether steps are made on a second object, where that is an error.

    Raises:
        ConfigError: names the attribute.
    """
    try:
        trial, before = tried(optimizer)
    except Exception:  # the class is the user's: whatever it raises, it has not told
        return ()
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


def copies(optimizer: Optimizer, names: Iterable[str]) -> dict[str, Any]:
    """What the optimizer holds under these names, so that a step on another object leaves it as it is."""
    return {name: copied(optimizer.__dict__[name]) for name in names if name in optimizer.__dict__}


def copied(value: Any) -> Any:
    """A value that a step may change."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, list | dict | set) else value


def _same(one: Any, other: Any) -> bool:
    """Whether a value is as it was: containers by what they hold, objects by which they are."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if type(one) is type(other) and isinstance(one, list | dict | set):
        return _held(one) == _held(other)
    return one is other or (isinstance(one, int | float | complex) and isinstance(other, type(one)) and one == other)


def _held(box: Any) -> list[int]:
    return [id(item) for item in (box.values() if isinstance(box, dict) else box)]
