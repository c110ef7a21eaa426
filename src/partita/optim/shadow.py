"""A second object of an optimizer's class, to step some of its parameters without the first one's noticing."""

from collections import OrderedDict
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from partita.errors import PartitaError


def shadow_of(optimizer: Optimizer, groups: list[dict[str, Any]], state: dict[Tensor, Any]) -> Optimizer:
    """The same optimizer on ``groups`` and ``state``; the hooks on the first one's step are not its own."""
    shadow = object.__new__(type(optimizer))
    shadow.__dict__.update(optimizer.__dict__)
    shadow.__dict__.pop("step", None)  # a scheduler's wrapper around the other object's
    shadow.param_groups, shadow.state = groups, state  # type: ignore[assignment]
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(shadow, hooks, OrderedDict())
    return shadow


def run_step(optimizer: Optimizer) -> None:
    """The optimizer's step.

    Raises:
        PartitaError: it asks for a state that a parameter does not have.
    """
    try:
        optimizer.step()
    except KeyError as error:
        raise PartitaError(
            f"optimizer {type(optimizer).__name__}: its step found no {error}. A setting of a group that adds a state "
            "(amsgrad, momentum, ...) has to be there before the group's first update, and a loaded checkpoint has to "
            "be one of an optimizer with the same states"
        ) from error
