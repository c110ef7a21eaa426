"""Dropout inside a split module: each rank applies its part of the full module's mask.

All tensor ranks draw from one stream (:mod:`partita.parallel.random`). Where they have parts of a tensor, each draws
the full mask and takes its own part. Attention that applies dropout in its kernel draws there, for its own heads only.
It draws from a stream of this rank, so that heads of different ranks have different masks.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from partita.parallel.random import drawn_apart
from partita.parallel.tensor.functions import Entrance
from partita.parallel.tensor.linear import Ranges


class DropsParts:
    """Wrapper that runs a split module's forward with this rank's part of the dropout masks.

    Of ``num`` heads (dim 1 of four) or features (the last dim), this rank has the range ``own``.
    """

    def __init__(self, module: nn.Module, entrance: Entrance, own: Ranges, num: int, *, heads: bool) -> None:
        self._module = module
        self._entrance = entrance
        self._num = num
        self._heads = heads
        ((self._start, self._stop),) = own
        self._shares = [(inner, name) for inner in module.modules() for name in _shares_of(inner)]

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        drops = self._module.training and any(getattr(inner, name) for inner, name in self._shares)
        with _Dropouts(self) if drops else nullcontext():
            return forward(*args, **kwargs)

    def dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Apply ``F.dropout`` to a full tensor, or to this rank's part of one."""
        if not (training and p > 0 and self._entrance.in_part):
            return F.dropout(x, p, training, inplace)
        dim = 1 if self._heads else x.dim() - 1
        is_part = x.dim() == 4 or not self._heads
        if not is_part or x.shape[dim] != self._stop - self._start:  # of some of its heads
            with self.apart(x.device):
                return F.dropout(x, p, training, inplace)
        shape = [*x.shape[:dim], self._num, *x.shape[dim + 1 :]]
        whole = F.dropout(torch.ones(shape, dtype=x.dtype, device=x.device), p)
        mask = whole.narrow(dim, self._start, self._stop - self._start).contiguous()  # alone, not with the whole
        return x.mul_(mask) if inplace else x * mask

    def apart(self, device: torch.device) -> AbstractContextManager[None]:
        """Have this rank draw other random numbers than the other tensor ranks inside the block."""
        return drawn_apart(f"tensor {self._entrance.group.index}", device)


def _shares_of(module: nn.Module) -> list[str]:
    """Return the names of a module's attributes that are dropout probabilities."""
    names = ["p"] if isinstance(module, _DropoutNd) else [name for name in vars(module) if "drop" in name]
    return [name for name in names if isinstance(getattr(module, name), float)]


class _Dropouts(TorchFunctionMode):
    """Mode in which dropout is that of a split module."""

    def __init__(self, split: DropsParts) -> None:
        super().__init__()
        self._split = split

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            with torch._C.DisableTorchFunction():
                return self._split.dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention and (kwargs.get("dropout_p") or args[4:5] > (0.0,)):
            with self._split.apart(args[0].device):
                return func(*args, **kwargs)
        return func(*args, **kwargs)
