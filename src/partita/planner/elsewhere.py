"""Parameters of the model that this rank does not hold: another stage of the pipeline does."""

import torch
from torch import nn


class Elsewhere(nn.Parameter):
    """The class of a parameter that only other stages hold. It is in no unit and no optimizer of this rank.

    Whoever marks it leaves its values in place: rank 0's are given to whoever holds it when the engine is built. From
    then on it is on the ``meta`` device. What computing with it means is for a subclass to say.
    """


def is_elsewhere(param: torch.Tensor) -> bool:
    return isinstance(param, Elsewhere)


def modules_here(model: nn.Module) -> set[str]:
    """The names of the modules that this rank runs: of whose parameters it holds some. One without any runs where the
    module around it does.
    """
    here = set[str]()
    for path, module in model.named_modules(remove_duplicate=False):
        params = list(module.parameters())
        around = not path or path.rpartition(".")[0] in here
        if any(not is_elsewhere(param) for param in params) or (not params and around):
            here.add(path)
    return here
