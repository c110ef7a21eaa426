"""How many values an optimizer keeps for each element of a parameter: found by a step on a small one."""

from torch import Tensor
from torch.optim import Optimizer

from partita.estimate.memory import ADAM_MOMENTS
from partita.optim.counted import SHAPE, tried


def states_per_element(optimizer: Optimizer) -> int:
    """Tensors of the parameter's shape that the optimizer keeps beside it; Adam's where a trial does not tell."""
    try:
        trial, _ = tried(optimizer)
    except Exception:  # the class is the user's: whatever it raises, it has not told
        return ADAM_MOMENTS
    states = [trial.state.get(param, {}) for group in trial.param_groups for param in group["params"]]
    return max(sum(isinstance(value, Tensor) and value.shape == SHAPE for value in state.values()) for state in states)
