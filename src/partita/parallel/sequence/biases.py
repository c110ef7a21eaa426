"""Attention biases by the distance of positions, as in T5, and cross-attention to an encoder, on a split sequence.

Blocks pass a bias on to the next ones. Like masks it is not split, so that attention can read all of it: the method
that computes it on slices is called with the length of the full sequence. Every rank also has the full output of an
encoder.
"""

import inspect
from functools import partial
from typing import Any

from torch import Tensor, nn

from partita.parallel.sequence.attention import looks_across, running
from partita.sharding.hooks import Hook
from partita.transforms.modules import Level

_COMPUTES, _HAS_OWN, _BIAS, _ACROSS = (
    "compute_bias",
    "has_relative_attention_bias",
    "position_bias",
    "key_value_states",
)


def follow_biases(model: nn.Module, changes: Level) -> None:
    """Have the attention modules of a transformers model compute biases of the full sequence, and record if their keys
    are those of an encoder.
    """
    for module in model.modules():
        names = inspect.signature(type(module).forward).parameters
        if hasattr(type(module), _COMPUTES):
            changes.set_attribute(module, _COMPUTES, WholeBias(module))
        if _BIAS in names and hasattr(module, _HAS_OWN):
            changes.on_undo(module.register_forward_pre_hook(Hook(_without_bias), with_kwargs=True).remove)
        if _ACROSS in names:
            begin, end = Hook(partial(_look, begins=True)), Hook(partial(_look, begins=False))
            changes.on_undo(module.register_forward_pre_hook(begin, with_kwargs=True).remove)
            changes.on_undo(module.register_forward_hook(end, with_kwargs=True, always_call=True).remove)


class WholeBias:
    """Replacement for a module's ``compute_bias(queries, keys)``: on slices it computes the bias of all positions."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._own = getattr(module, _COMPUTES)

    def __call__(self, num_queries: int, num_keys: int, *args: Any, **kwargs: Any) -> Tensor:
        if (slices := running()) is not None:
            num_queries = num_keys = slices.length
        bias: Tensor = self._own(num_queries, num_keys, *args, **kwargs)
        return bias

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, _COMPUTES)


def _without_bias(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Pass a broadcastable zero bias to a module that has no bias of its own. It would create zeros for its own
    positions, and the blocks after it would use them.
    """
    if running() is None or kwargs.get(_BIAS) is not None or getattr(module, _HAS_OWN):
        return None
    across = kwargs.get(_ACROSS)
    hidden = args[0] if args else kwargs["hidden_states"]
    return args, kwargs | {_BIAS: hidden.new_zeros(1, 1, 1, 1 if across is None else across.shape[1])}


def _look(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any = None, *, begins: bool) -> None:
    looks_across.set(begins and kwargs.get(_ACROSS) is not None)
