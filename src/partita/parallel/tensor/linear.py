"""Linear layers of which each rank has a part: rows of outputs (column-parallel) or columns of inputs (row-parallel).

Shoeybi et al., section 3. Transposed weights (``Conv1D`` of transformers, ``[in, out]``) are the same with other dims.
"""

from typing import TypeGuard

import torch.nn.functional as F
from torch import Tensor, nn

from partita.parallel.applied import OwnForward
from partita.parallel.tensor.functions import Entrance, gathered, leave, own_slice

# Ranges [start, stop) of a dim.
Ranges = tuple[tuple[int, int], ...]

# Classes whose forward is x W^T + b (W: [out, in]), or x W + b (W: [in, out]), in other words than nn.Linear's.
_LINEAR, _TRANSPOSED = ("FalconLinear",), ("Conv1D",)


def is_linear(module: object) -> TypeGuard[nn.Module]:
    """Whether this is a module that computes what ``nn.Linear`` does, and nothing else."""
    if not isinstance(module, nn.Module):
        return False
    plain = type(module).forward is nn.Linear.forward or type(module).__name__ in (*_LINEAR, *_TRANSPOSED)
    return plain and isinstance(getattr(module, "weight", None), nn.Parameter) and "forward" not in vars(module)


def is_transposed(module: nn.Module) -> bool:
    return type(module).__name__ in _TRANSPOSED


def num_outputs(module: nn.Module) -> int:
    """Of a linear layer, by its weight."""
    return int(module.get_parameter("weight").shape[output_dim(module)])


def num_inputs(module: nn.Module) -> int:
    return int(module.get_parameter("weight").shape[1 - output_dim(module)])


def output_dim(module: nn.Module) -> int:
    """The dim of the weight that its outputs are."""
    return 1 if is_transposed(module) else 0


def bias_of(module: nn.Module) -> Tensor | None:
    bias: Tensor | None = module.bias  # type: ignore[assignment]
    return bias


def product(module: nn.Module, x: Tensor, bias: Tensor | None, chosen: Tensor | None = None) -> Tensor:
    """``x`` ``[..., in]`` times the weight that the module has now, plus ``bias``; of ``chosen`` outputs only."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    weight = weight.t() if is_transposed(module) else weight
    if chosen is not None:
        weight, bias = weight[chosen], None if bias is None else bias[chosen]
    return F.linear(x, weight, bias)


class Column(OwnForward):
    """Of the outputs each rank computes its own; ``sizes`` (by rank): then all are gathered. ``chosen``: the weight is
    whole on every rank, and these are the outputs it computes.
    """

    def __init__(
        self,
        module: nn.Module,
        entrance: Entrance,
        sizes: tuple[int, ...] | None = None,
        chosen: Tensor | None = None,
    ) -> None:
        super().__init__(module)
        self._entrance, self._sizes, self._chosen = entrance, sizes, chosen

    def __call__(self, x: Tensor) -> Tensor:
        y = product(self.module, self._entrance(x), bias_of(self.module), self._chosen)
        self._entrance.in_part = self._sizes is None
        return y if self._sizes is None else gathered(y, self._entrance.group, self._sizes)


class Row(OwnForward):
    """Of the inputs each rank has its own (``sizes`` by rank), and the products are summed. ``splits``: it is given all
    inputs, and takes its own.
    """

    def __init__(self, module: nn.Module, entrance: Entrance, sizes: tuple[int, ...], *, splits: bool) -> None:
        super().__init__(module)
        self._entrance, self._sizes, self._splits = entrance, sizes, splits

    def __call__(self, x: Tensor) -> Tensor:
        group, self._entrance.in_part = self._entrance.group, False
        if self._splits:
            x = own_slice(x, group, self._sizes)
        y = leave(product(self.module, x, None), group)
        bias = bias_of(self.module)
        return y if bias is None else y + bias
