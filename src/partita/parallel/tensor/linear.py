"""Split linear layers: each rank has some of the outputs (column parallel) or some of the inputs (row parallel).

Shoeybi et al., section 3. Transposed weights (``Conv1D`` of transformers, ``[in, out]``) are split along the other dim.
"""

from collections.abc import Callable
from typing import TypeGuard

import torch.nn.functional as F
from torch import Tensor, nn

from partita.parallel.tensor.functions import CopyToTensorRanks, gather_from_ranks, scatter_to_ranks, sum_over_ranks
from partita.parallel.tensor.parameter import UseLocalShards

Forward = Callable[..., Tensor]
# Ranges [start, stop) of a dim.
Ranges = tuple[tuple[int, int], ...]

# Classes with their own forward, which is x W^T + b (W: [out, in]), or x W + b (W: [in, out]).
_LINEAR, _TRANSPOSED = ("FalconLinear",), ("Conv1D",)


def is_linear(module: object) -> TypeGuard[nn.Module]:
    """Return whether this is a module that computes exactly what ``nn.Linear`` does."""
    if not isinstance(module, nn.Module):
        return False
    plain = type(module).forward is nn.Linear.forward or type(module).__name__ in (*_LINEAR, *_TRANSPOSED)
    return plain and module._parameters.get("weight") is not None and "forward" not in vars(module)


def is_transposed(module: nn.Module) -> bool:
    return type(module).__name__ in _TRANSPOSED


def num_outputs(module: nn.Module) -> int:
    """Return the number of outputs of a linear layer, by its weight."""
    return int(module.get_parameter("weight").shape[output_dim(module)])


def num_inputs(module: nn.Module) -> int:
    return int(module.get_parameter("weight").shape[1 - output_dim(module)])


def output_dim(module: nn.Module) -> int:
    """Return the dim of the weight that contains the outputs."""
    return 1 if is_transposed(module) else 0


def bias_of(module: nn.Module) -> Tensor | None:
    bias: Tensor | None = module.bias  # type: ignore[assignment]
    return bias


class Product:
    """Computes the product of ``x`` ``[..., in]`` and a layer's current weight.

    Args:
        chosen: the outputs to compute; None: all.
        biased: add the layer's bias.
    """

    def __init__(
        self, module: nn.Module, own: UseLocalShards, chosen: Tensor | None = None, *, biased: bool = True
    ) -> None:
        self._module = module
        self._own = own
        self._chosen = chosen
        self._biased = biased

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self._own(self._times_weight, x)
        return y

    def _times_weight(self, x: Tensor) -> Tensor:
        weight: Tensor = self._module.weight  # type: ignore[assignment]
        weight = weight.t() if is_transposed(self._module) else weight
        bias = bias_of(self._module) if self._biased else None
        if self._chosen is not None:
            weight, bias = weight[self._chosen], None if bias is None else bias[self._chosen]
        return F.linear(x, weight, bias)


class LinearForward:
    """Replacement for the forward of a linear layer. Its ``product`` reads the weight, inside the context ``own``."""

    def __init__(self, module: nn.Module, own: UseLocalShards, product: Product) -> None:
        self.module = module
        self.own = own
        self.product: Callable[[Tensor], Tensor] = product


class ColumnSplit(LinearForward):
    """Column-parallel forward: each rank computes its own outputs.

    Args:
        sizes: the number of outputs of each rank, which are then all-gathered; None: outputs stay split.
        chosen: the outputs that this rank computes with a copy of the full weight; None: the weight is sharded.
    """

    def __init__(
        self,
        module: nn.Module,
        copy_input: CopyToTensorRanks,
        own: UseLocalShards,
        sizes: tuple[int, ...] | None = None,
        chosen: Tensor | None = None,
    ) -> None:
        super().__init__(module, own, Product(module, own, chosen))
        self._copy_input = copy_input
        self._sizes = sizes

    def __call__(self, forward: Forward, x: Tensor) -> Tensor:
        y = self.product(self._copy_input(x))
        self._copy_input.inside_split = self._sizes is None
        return y if self._sizes is None else gather_from_ranks(y, self._copy_input.group, self._sizes)


class RowSplit(LinearForward):
    """Row-parallel forward: each rank has its own inputs, and the products are summed.

    Args:
        sizes: the number of inputs of each rank.
        splits: the forward gets all inputs, and takes this rank's slice.
    """

    def __init__(
        self,
        module: nn.Module,
        copy_input: CopyToTensorRanks,
        own: UseLocalShards,
        sizes: tuple[int, ...],
        *,
        splits: bool,
    ) -> None:
        super().__init__(module, own, Product(module, own, biased=False))
        self._copy_input = copy_input
        self._sizes = sizes
        self._splits = splits

    def __call__(self, forward: Forward, x: Tensor) -> Tensor:
        group, self._copy_input.inside_split = self._copy_input.group, False
        if self._splits:
            x = scatter_to_ranks(x, group, self._sizes)
        y = sum_over_ranks(self.product(x), group)
        bias = bias_of(self.module)
        return y if bias is None else y + bias
