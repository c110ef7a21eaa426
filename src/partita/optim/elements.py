"""What an optimizer keeps for each parameter: found by a step on a small one."""

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from partita.optim.counted import SHAPE, tried
from partita.planner.memory import ADAM_MOMENTS


def states_per_element(optimizer: Optimizer) -> int:
    """Tensors of the parameter's shape that the optimizer keeps beside it; Adam's where a trial does not tell."""
    if (states := _states(optimizer)) is None:
        return ADAM_MOMENTS
    return max(sum(isinstance(value, Tensor) and value.shape == SHAPE for value in state.values()) for state in states)


def state_names(optimizer: Optimizer) -> frozenset[str]:
    """The names of what the optimizer keeps after a first step; none where a trial does not tell."""
    return frozenset(name for state in _states(optimizer) or () for name in state)


def _states(optimizer: Optimizer) -> list[dict[str, Any]] | None:
    try:
        trial, _ = tried(optimizer)
    except Exception:  # the class is the user's: whatever it raises, it has not told
        return None
    return [trial.state.get(param, {}) for group in trial.param_groups for param in group["params"]]
