"""Check of a rule that splits a module: the split module must have the output of the unsplit one.

Shapes alone do not show an error: a fused matrix can be split at the wrong rows, and a module can mix features that
the split separates.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from partita.memory.accelerator import HOST
from partita.parallel.applied import AppliedParallelism
from partita.parallel.tensor.functions import CopyToTensorRanks
from partita.parallel.tensor.splitter import Splitter

_TOLERANCE = 1e-4  # of the largest output, in fp32
_SAMPLES, _LENGTH = 2, 3  # of the inputs
# Errors of a forward that does not accept the random inputs.
_NOT_CALLABLE = (RuntimeError, TypeError, ValueError, LookupError, AttributeError)


# Splits a module; the last argument is the rule's name. Returns None if it has split the module.
SplitRule = Callable[[Splitter, nn.Module, str], object]


class _Ranks:
    """A simulated group whose ranks compute one after the other. ``sum`` is complete when the last rank calls it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.index = 0
        self._total: Tensor | None = None

    def sum(self, part: Tensor, purpose: str) -> Tensor:
        self._total = part if self._total is None else self._total + part
        return self._total


def is_equivalent(module: nn.Module, split: SplitRule, size: int, hidden: int, width: int = 1) -> bool:
    """Return whether a split over ``size`` ranks preserves a module's output for random weights and inputs of
    ``hidden`` features. The module and its parameters are left unchanged.

    Args:
        split: returns None if it has split the module.
        width: the number of features of one head, and of rotary position embeddings.
    """
    inputs = _inputs(module, hidden, width)
    if inputs is None:
        return False
    values = {name: _random(tensor.shape, at) for at, (name, tensor) in enumerate(module.state_dict().items(), 9)}
    was_training = [(each, each.training) for each in module.modules()]
    ranks: Any = _Ranks(size)
    try:
        module.eval()
        with torch.no_grad():
            whole = _outputs(functional_call(module, values, (), inputs))
            for ranks.index in range(size):
                found = _on_slices(module, split, ranks, values, inputs)
    except _NOT_CALLABLE:
        return False
    finally:
        for each, training in was_training:
            each.training = training
    return len(found) == len(whole) > 0 and _near(found[0], whole[0])


def _on_slices(
    module: nn.Module,
    split: SplitRule,
    ranks: Any,
    values: Mapping[str, Tensor],
    inputs: dict[str, Any],
) -> list[Tensor]:
    """Return the outputs of rank ``ranks.index``; an empty list if ``split`` does not split the module."""
    parallel = AppliedParallelism()
    with parallel.transforms.temporary():
        if split(Splitter(module, CopyToTensorRanks(ranks), parallel, HOST), module, "a proof") is not None:
            return []
        shares = {name: parallel.shares.get(id(param)) for name, param in module.named_parameters()}
        own = {name: share.place.take(values[name]) for name, share in shares.items() if share is not None}
        return _outputs(functional_call(module, {**values, **own}, (), inputs))


def _inputs(module: nn.Module, hidden: int, width: int) -> dict[str, Any] | None:
    """Return random inputs for the required arguments of a forward: hidden states, and the other arguments of
    transformers' attention. None if an argument is positional only.
    """
    found = dict[str, Any]()
    for at, (name, parameter) in enumerate(inspect.signature(module.forward).parameters.items()):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            return None
        if name == "position_embeddings":
            found[name] = tuple(_random((_SAMPLES, _LENGTH, width), at + number) for number in (50, 60))
        elif parameter.default is parameter.empty:
            found[name] = None if "mask" in name else _random((_SAMPLES, _LENGTH, hidden), at)
    return found


def _random(shape: Sequence[int], seed: int) -> Tensor:
    drawn = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float32, device="cpu")
    return drawn / drawn.shape[-1] ** 0.5 if drawn.dim() > 1 else drawn


def _outputs(value: Any) -> list[Tensor]:
    values = value if isinstance(value, tuple) else (value,)
    return [each for each in values if isinstance(each, Tensor)]


def _near(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool((one - other).abs().max() <= _TOLERANCE * other.abs().max())
