"""Parameters that this rank does not hold because they belong to another pipeline stage."""

import torch
from torch import nn


class Elsewhere(nn.Parameter):
    """The class of a parameter that only other stages hold. It is in no unit and no optimizer of this rank.

    A parameter keeps its values when it is marked: when the engine is built, rank 0's values are sent to the ranks that
    hold it. From then on it is on the ``meta`` device. Subclasses define what happens when it is computed with.
    """


def is_elsewhere(param: torch.Tensor) -> bool:
    return isinstance(param, Elsewhere)


def modules_here(model: nn.Module) -> set[str]:
    """Return the names of the modules that this rank runs.

    This rank runs a module if it holds some of the module's parameters. A module without parameters runs where the
    module around it runs.
    """
    here = set[str]()
    for path, module in model.named_modules(remove_duplicate=False):
        params = list(module.parameters())
        around = not path or path.rpartition(".")[0] in here
        if any(not is_elsewhere(param) for param in params) or (not params and around):
            here.add(path)
    return here
