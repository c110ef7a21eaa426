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
