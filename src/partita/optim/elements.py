"""How many values an optimizer keeps for each element of a parameter: found by a step on a small one."""

import copy

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from partita.estimate.memory import ADAM_MOMENTS
from partita.optim.shadow import shadow_of

SHAPE = (2, 3)


def states_per_element(optimizer: Optimizer) -> int:
    """Tensors of the parameter's shape that the optimizer keeps beside it; Adam's where a trial does not tell."""
    try:
        with torch.random.fork_rng(devices=[]):  # the user's random numbers do not depend on the trial
            return max(_tried(optimizer, group) for group in optimizer.param_groups)
    except Exception:  # the class is the user's: whatever it raises, it has not told
        return ADAM_MOMENTS


def _tried(optimizer: Optimizer, group: dict[str, object]) -> int:
    param = nn.Parameter(torch.zeros(SHAPE))
    param.grad = torch.ones(SHAPE)
    settings = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
    trial = shadow_of(optimizer, [{**settings, "params": [param]}], type(optimizer.state)(dict))
    trial.step()
    return sum(isinstance(value, Tensor) and value.shape == SHAPE for value in trial.state[param].values())
