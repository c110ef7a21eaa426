"""Mixtures of experts with one weight tensor for all experts: each rank has a slice of every expert's features.

All ranks route a token to the same experts with the same weights. Each computes a partial output of the experts.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from partita.parallel.tensor.functions import CopyToTensorRanks, copy_to_ranks, sum_over_ranks
from partita.parallel.tensor.parameter import UseLocalShards
from partita.parallel.tensor.splitter import Splitter
from partita.table.place import even

_NAMES = ("gate_up_proj", "down_proj")
_WIDTH = ("intermediate_dim", "intermediate_size", "moe_intermediate_size")


def are_experts(module: nn.Module) -> bool:
    """Return whether a module's parameters are those of experts, as in Mixtral and Qwen of transformers.

    They are ``gate_up_proj`` ``[experts, 2 * width, hidden]``, whose gate half and value half are multiplied, and
    ``down_proj`` ``[experts, hidden, width]``.
    """
    params = dict(module.named_parameters())
    if tuple(params) != _NAMES or any(param.dim() != 3 for param in params.values()):
        return False
    gate_up, down = params.values()
    num, hidden, width = down.shape
    return gate_up.shape == (num, 2 * width, hidden) and not getattr(module, "is_transposed", False)


def split_experts(splitter: Splitter, module: nn.Module, rule_name: str) -> bool:
    """Split the features of every expert over the ranks. Return False if there are fewer features than ranks."""
    gate_up, down = (module.get_parameter(name) for name in _NAMES)
    width = down.shape[2]
    if width < splitter.size:
        return False
    cuts = even(width, splitter.size)
    low, high = cuts[splitter.rank]
    splitter.shard(gate_up, 1, [((low, high), (width + low, width + high)) for low, high in cuts])
    splitter.shard(down, 2, [(cut,) for cut in cuts])
    for name in _WIDTH:
        if getattr(module, name, None) == width:
            splitter.changes.set_attribute(module, name, high - low)
    splitter.changes.wrap_forward(module, ExpertsSplit(splitter.copy_input, splitter.use_local_shards(module)))
    sizes = "+".join(str(stop - start) for start, stop in cuts)
    splitter.record(module, f"features {sizes} of {width} of each of {len(down)} experts, outputs summed", rule_name)
    return True


class ExpertsSplit:
    """Wrapper of ``forward(hidden, chosen experts, their weights)`` that sums the partial outputs of the ranks."""

    def __init__(self, copy_input: CopyToTensorRanks, own: UseLocalShards) -> None:
        self._group = copy_input.group
        self._own = own

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
        args = tuple(self._entered(value) for value in args)
        kwargs = {name: self._entered(value) for name, value in kwargs.items()}
        return sum_over_ranks(self._own(forward, *args, **kwargs), self._group)

    def _entered(self, value: Any) -> Any:
        return copy_to_ranks(value, self._group) if isinstance(value, Tensor) else value
