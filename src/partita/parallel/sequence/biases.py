"""Relative position biases, as in T5, and cross-attention to an encoder, on a split sequence.

Blocks pass a bias on to the next block. Like a mask, it is not split: the method that computes it gets the length of
the full sequence. The output of an encoder is not split either.
"""

import inspect
from functools import partial
from typing import Any

from torch import Tensor, nn

from partita.parallel.sequence.attention import current_slices, is_cross_attention
from partita.sharding.hooks import Hook
from partita.transforms.modules import Level

_COMPUTE_BIAS, _HAS_OWN, _BIAS, _ENCODER_STATES = (
    "compute_bias",
    "has_relative_attention_bias",
    "position_bias",
    "key_value_states",
)


def use_full_biases(model: nn.Module, changes: Level) -> None:
    """Make the attention modules of a transformers model compute biases of the full sequence, and record whether the
    running module is cross-attention.
    """
    for module in model.modules():
        names = inspect.signature(type(module).forward).parameters
        if hasattr(type(module), _COMPUTE_BIAS):
            changes.set_attribute(module, _COMPUTE_BIAS, FullBias(module))
        if _BIAS in names and hasattr(module, _HAS_OWN):
            changes.on_undo(module.register_forward_pre_hook(Hook(_without_bias), with_kwargs=True).remove)
        if _ENCODER_STATES in names:
            begin, end = (
                Hook(partial(_set_cross_attention, begins=True)),
                Hook(partial(_set_cross_attention, begins=False)),
            )
            changes.on_undo(module.register_forward_pre_hook(begin, with_kwargs=True).remove)
            changes.on_undo(module.register_forward_hook(end, with_kwargs=True, always_call=True).remove)


class FullBias:
    """Replacement for a module's ``compute_bias(queries, keys)``: it computes the bias of all positions, also on
    slices.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._own = getattr(module, _COMPUTE_BIAS)

    def __call__(self, num_queries: int, num_keys: int, *args: Any, **kwargs: Any) -> Tensor:
        if (slices := current_slices()) is not None:
            num_queries = num_keys = slices.length
        bias: Tensor = self._own(num_queries, num_keys, *args, **kwargs)
        return bias

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, _COMPUTE_BIAS)


def _without_bias(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Pass a broadcastable zero bias to a module that has no bias of its own. Otherwise it would create zeros for this
    rank's positions only, and pass them to the next blocks.
    """
    if current_slices() is None or kwargs.get(_BIAS) is not None or getattr(module, _HAS_OWN):
        return None
    encoder_states = kwargs.get(_ENCODER_STATES)
    hidden = args[0] if args else kwargs["hidden_states"]
    return args, kwargs | {_BIAS: hidden.new_zeros(1, 1, 1, 1 if encoder_states is None else encoder_states.shape[1])}


def _set_cross_attention(
    module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any = None, *, begins: bool
) -> None:
    is_cross_attention.set(begins and kwargs.get(_ENCODER_STATES) is not None)
