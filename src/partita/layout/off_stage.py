"""Off-stage parameters: those of other pipeline stages, which this rank does not store."""

import torch
from torch import nn


class OffStageParameter(nn.Parameter):
    """The class of a parameter that only other stages store. It is in no unit and no optimizer of this rank.

    A parameter keeps its values when it gets this class: while the engine is built, rank 0 sends the values to the
    ranks that store it. Afterwards it is on the ``meta`` device. Subclasses define its behavior in computations.
    """


def is_off_stage(param: torch.Tensor) -> bool:
    """Return True if a parameter is stored only on other stages."""
    return isinstance(param, OffStageParameter)


def modules_on_stage(model: nn.Module) -> set[str]:
    """Return the names of the modules that run on this rank.

    A module runs on this rank if the rank stores some of its parameters. A module without parameters runs if its parent
    module does.
    """
    here = set[str]()
    for path, module in model.named_modules(remove_duplicate=False):
        params = list(module.parameters())
        around = not path or path.rpartition(".")[0] in here
        if any(not is_off_stage(param) for param in params) or (not params and around):
            here.add(path)
    return here
