"""Which optimizers may run on slices of parameters: those that treat every element by itself.

Known classes are known by name; a user declares one with :func:`elementwise`; any other is tried on a small matrix,
whole and in two flat halves.
"""

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from partita.errors import ConfigError

OptimizerClass = TypeVar("OptimizerClass", bound=type[torch.optim.Optimizer])

_KNOWN: set[type] = {
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
}
_REASONS = {
    "LBFGS": "it searches along a line through all parameters together",
    "Adafactor": "it keeps row and column means of each matrix",
    "Muon": "it orthogonalizes each matrix",
    "SparseAdam": "it works on sparse gradients",
}
_TRIAL_STEPS = 3


def elementwise(cls: OptimizerClass) -> OptimizerClass:
    """Declare that an optimizer class updates every element of a parameter independently of the others.

    Use it as a decorator or a call. Sharded stages then run it on slices of parameters.
    """
    _KNOWN.add(cls)
    return cls


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that cannot run on slices.

    Raises:
        ConfigError: names the class, the reason, and the remedies.
    """
    kind = type(optimizer)
    base = next((b for b in kind.__mro__ if b in _KNOWN), None)
    if base is not None and _step(kind) is _step(base):
        return
    reason = next((_REASONS[b.__name__] for b in kind.__mro__ if b.__name__ in _REASONS), None) or _trial(optimizer)
    if reason:
        raise ConfigError(
            f"optimizer {kind.__name__} cannot run on slices of parameters: {reason}. Use zero.stage 0 (it keeps "
            "parameters whole), an elementwise optimizer such as AdamW, or declare the class with partita.elementwise"
        )


def _step(kind: Any) -> object:
    """The class's own function: torch wraps ``step`` anew in each class when its first object is made."""
    return inspect.unwrap(kind.step)


def _trial(optimizer: torch.optim.Optimizer) -> str | None:
    """Why the class failed on a small example with any group's settings; None if halves and whole agree bit for bit."""
    kind = type(optimizer)
    accepted = inspect.signature(kind.__init__).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    arguments = {name: value for name, value in optimizer.defaults.items() if takes_any or name in accepted}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    for settings in {repr(group): group for group in groups}.values():
        if reason := _trial_with(partial(kind, **arguments), settings):
            return reason
    return None


def _trial_with(make: Callable[[Any], torch.optim.Optimizer], settings: dict[str, Any]) -> str | None:
    """The same with the settings of one group."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(4, 8, generator=generator)
    gradients = [torch.randn(4, 8, generator=generator) for _ in range(_TRIAL_STEPS)]
    try:
        with torch.random.fork_rng(devices=[]):  # the user's random numbers do not depend on whether a trial was needed
            whole = _run(make, settings, [start.clone()], [[g] for g in gradients])
            halves = _run(make, settings, list(start.clone().view(2, -1)), [list(g.view(2, -1)) for g in gradients])
    except Exception as error:  # the class is the user's: whatever it raises is the reason
        return f"a trial on slices of a small matrix raised {type(error).__name__}: {error}"
    if torch.equal(whole[0].view(-1), torch.cat([half.view(-1) for half in halves])):
        return None
    return "on a small matrix its result differs when the matrix is cut in two"


def _run(
    make: Callable[[Any], torch.optim.Optimizer],
    settings: dict[str, Any],
    values: list[Tensor],
    gradients: list[list[Tensor]],
) -> list[Tensor]:
    params = [nn.Parameter(value) for value in values]
    trial = make([{**copy.deepcopy(settings), "params": params}])
    for grads in gradients:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        trial.step()
    return [param.detach() for param in params]
