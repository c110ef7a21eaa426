"""A second object of an optimizer's class, to step some of its parameters without the first one's noticing."""

from collections import OrderedDict
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def shadow_of(optimizer: Optimizer, groups: list[dict[str, Any]], state: dict[Tensor, Any]) -> Optimizer:
    """The same optimizer on ``groups`` and ``state``; the hooks on the first one's step are not its own."""
    shadow = object.__new__(type(optimizer))
    shadow.__dict__.update(optimizer.__dict__)
    shadow.__dict__.pop("step", None)  # a scheduler's wrapper around the other object's
    shadow.param_groups, shadow.state = groups, state  # type: ignore[assignment]
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(shadow, hooks, OrderedDict())
    return shadow
