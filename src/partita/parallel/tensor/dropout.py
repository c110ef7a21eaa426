"""Dropout inside a split module: each rank applies its slice of the unsplit module's mask.

All tensor ranks have the same generator states (:mod:`partita.parallel.random`). Where a tensor is split, each rank
draws the mask of the full tensor and takes its slice. An attention kernel draws its own mask, for this rank's heads
only. It draws from a seed of this rank, so that heads of different ranks have different masks.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from partita.parallel.random import rank_specific_rng
from partita.parallel.tensor.functions import CopyToTensorRanks
from partita.parallel.tensor.linear import Ranges


class SplitDropout:
    """Wrapper that runs a split module's forward with this rank's slice of the dropout masks.

    Args:
        own: this rank's range of the ``num`` heads or features.
        heads: heads are split (dim 1 of four), not features (the last dim).
    """

    def __init__(self, module: nn.Module, copy_input: CopyToTensorRanks, own: Ranges, num: int, *, heads: bool) -> None:
        self._module = module
        self._copy_input = copy_input
        self._num = num
        self._heads = heads
        ((self._start, self._stop),) = own
        self._probabilities = [(inner, name) for inner in module.modules() for name in _probability_names(inner)]

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        drops = self._module.training and any(getattr(inner, name) for inner, name in self._probabilities)
        with _SplitDropoutMode(self) if drops else nullcontext():
            return forward(*args, **kwargs)

    def dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Apply ``F.dropout`` to a full tensor, or to this rank's slice of one."""
        if not (training and p > 0 and self._copy_input.inside_split):
            return F.dropout(x, p, training, inplace)
        dim = 1 if self._heads else x.dim() - 1
        is_split = x.dim() == 4 or not self._heads
        if not is_split or x.shape[dim] != self._stop - self._start:  # only some of this rank's heads
            with self.rank_rng(x.device):
                return F.dropout(x, p, training, inplace)
        shape = [*x.shape[:dim], self._num, *x.shape[dim + 1 :]]
        full_mask = F.dropout(torch.ones(shape, dtype=x.dtype, device=x.device), p)
        mask = full_mask.narrow(dim, self._start, self._stop - self._start).contiguous()  # frees the full mask
        return x.mul_(mask) if inplace else x * mask

    def rank_rng(self, device: torch.device) -> AbstractContextManager[None]:
        """Return a context in which each tensor rank draws different random numbers."""
        return rank_specific_rng(f"tensor {self._copy_input.group.index}", device)


def _probability_names(module: nn.Module) -> list[str]:
    """Return the names of a module's attributes that are dropout probabilities."""
    names = ["p"] if isinstance(module, _DropoutNd) else [name for name in vars(module) if "drop" in name]
    return [name for name in names if isinstance(getattr(module, name), float)]


class _SplitDropoutMode(TorchFunctionMode):
    """Mode in which ``F.dropout`` and the dropout of attention kernels are those of a split module."""

    def __init__(self, split: SplitDropout) -> None:
        super().__init__()
        self.split = split

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            with torch._C.DisableTorchFunction():
                return self.split.dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention and (kwargs.get("dropout_p") or args[4:5] > (0.0,)):
            with self.split.rank_rng(args[0].device):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def kernel_rng(device: torch.device) -> AbstractContextManager[None]:
    """Return the context in which an attention kernel that is no function of torch draws its dropout mask: inside a
    split module, each tensor rank draws different random numbers.
    """
    for mode in _get_current_function_mode_stack():
        if isinstance(mode, _SplitDropoutMode):
            return mode.split.rank_rng(device)
    return nullcontext()
