"""Values of all ranks of a group, such as metrics."""

import torch
from torch import Tensor

from partita.comm.group import Group
from partita.errors import PartitaError


def gather_values(values: Tensor, group: Group, call: str) -> Tensor:
    """Concatenate the ranks' tensors ``[n, ...]`` along dim 0, in rank order. ``n`` may differ between the ranks.

    Raises:
        PartitaError: on all ranks: a tensor is a scalar, or the ranks have tensors of other shapes or dtypes.
    """
    every: list[Tensor] = group.exchange_objects(values.detach().cpu(), call)
    first = every[0]
    for index, found in enumerate(every):
        if not found.dim() or (found.shape[1:], found.dtype) != (first.shape[1:], first.dtype):
            expected = ", ".join(["n", *map(str, first.shape[1:])])
            raise PartitaError(
                f"{call}: expected a tensor [{expected}] of {first.dtype} on every rank; rank {index} over "
                f"{', '.join(group.axes)} has one of shape {list(found.shape)} and {found.dtype}"
                + ("" if found.dim() else ": pass value[None]")
            )
    return torch.cat(every).to(values.device)
