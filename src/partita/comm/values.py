"""Values of all ranks of a group, such as metrics."""

import pickle
from typing import Any

import torch
from torch import Tensor

from partita.comm.collectives import Collectives
from partita.comm.group import Group
from partita.comm.several_axes import SeveralAxes
from partita.errors import PartitaError
from partita.memory import accelerator
from partita.table.mesh_shape import AXES


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


def broadcast_value(value: object, collectives: Collectives, call: str) -> Any:
    """Return rank 0's Python value, which is pickled, on every rank. Other ranks' ``value`` is ignored.

    Raises:
        PartitaError: on all ranks: the value cannot be pickled.
    """
    if collectives.all_ranks.size == 1:
        return value
    is_first, payload, problem = collectives.mesh.rank == 0, b"", ""
    if is_first:
        try:
            payload = pickle.dumps(value)
        except Exception as error:  # of any class: pickle calls the value's own methods
            problem = f": {type(error).__name__}: {error}"
    length = torch.tensor([-1 if problem else len(payload)], device="cpu")
    num_bytes = int(collectives.all_ranks.exchange(length, call).wait()[0, 0])
    if num_bytes < 0:
        raise PartitaError(f"{call}: rank 0's value cannot be pickled{problem}; pass a value that can be")
    local = torch.frombuffer(bytearray(payload or num_bytes), dtype=torch.uint8)
    sent = local.to(accelerator.readable(collectives.mesh.device))
    SeveralAxes.of(collectives, AXES).broadcast([sent], call)
    return value if is_first else pickle.loads(accelerator.read(sent).numpy().data)
