"""An interpreter of steps between residences, which simulates all ranks of a mesh on numpy arrays.

Values are multiples of a power of two in float64, encoded by rounding, so sums of them are exact. Results can therefore
be compared bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from partita.table.mesh_shape import MeshShape
from partita.table.residence import Encoding, Residence, Tier
from partita.table.steps import AllGather, AllReduce, Copy, Encode, Read, ReduceScatter, Slice, Step, Write

Array = NDArray[np.float64]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def encoded(values: Array, encoding: Encoding) -> Array:
    """Return the values rounded to an encoding."""
    return torch.from_numpy(values).to(DTYPES[encoding.name]).double().numpy()


@dataclass(frozen=True)
class Held:
    """The values that one rank holds, with their encoding and tier."""

    values: Array
    encoding: Encoding
    tier: Tier


@dataclass(frozen=True)
class State:
    """A full, unstored state as terms of a sum: ``[num_terms, num_elements]``.

    In a partial state, the rank of index i in the group to be summed holds term i. Other states have one term.
    """

    terms: Array

    @classmethod
    def random(cls, residence: Residence, num_elements: int, mesh: MeshShape, seed: int = 0) -> "State":
        num_terms = mesh.group_size(residence.partial_axes)
        numbers = np.random.default_rng(seed).integers(-1000, 1000, (num_terms, num_elements))
        return cls(encoded(numbers / 1024, residence.encoding))

    def held(self, residence: Residence, mesh: MeshShape) -> list[Held]:
        """Return the values that each rank holds in the state's own residence."""
        return self.after(residence, residence, mesh)

    def after(self, src: Residence, dst: Residence, mesh: MeshShape) -> list[Held]:
        """Return the values that each rank must hold in ``dst``: its shard of the sum of the terms ``dst`` adds up."""
        ranks = range(mesh.num_ranks)
        terms = encoded(self.terms, dst.encoding)
        found = []
        for rank in ranks:
            index = mesh.group_index(rank, dst.partial_axes)
            added = {
                mesh.group_index(other, src.partial_axes)
                for other in ranks
                if mesh.group_index(other, dst.partial_axes) == index
            }
            whole = terms[sorted(added)].sum(0)
            part = whole.reshape(mesh.group_size(dst.shard_axes), -1)[mesh.group_index(rank, dst.shard_axes)]
            found.append(Held(part, dst.encoding, dst.tier))
        return found


def run(ops: Sequence[Step], held: list[Held], mesh: MeshShape) -> list[Held]:
    """Run the operations on all ranks; assert that each operation is possible and needed."""
    for op in ops:
        held = _run(op, held, mesh)
    return held


def _run(op: Step, held: list[Held], mesh: MeshShape) -> list[Held]:
    before = held[0]
    if isinstance(op, Encode):
        assert before.tier is not Tier.DISK
        assert before.encoding != op.encoding
        return [Held(encoded(h.values, op.encoding), op.encoding, h.tier) for h in held]
    if isinstance(op, Read):
        assert before.tier is Tier.DISK
        return [Held(h.values, h.encoding, Tier.HOST) for h in held]
    if isinstance(op, Write):
        assert before.tier is Tier.HOST
        return [Held(h.values, h.encoding, Tier.DISK) for h in held]
    if isinstance(op, Copy):
        assert {before.tier, op.tier} == {Tier.DEVICE, Tier.HOST}
        return [Held(h.values, h.encoding, op.tier) for h in held]
    assert mesh.group_size(op.axes) > 1
    assert all(mesh.size(axis) > 1 for axis in op.axes)
    assert before.tier is Tier.DEVICE or (isinstance(op, Slice) and before.tier is Tier.HOST)
    result = list(held)
    for group in mesh.groups(op.axes):
        for rank, values in zip(group, _in_group(op, [held[rank].values for rank in group]), strict=True):
            result[rank] = Held(values, before.encoding, before.tier)
    return result


def _in_group(op: AllGather | ReduceScatter | AllReduce | Slice, values: list[Array]) -> list[Array]:
    """Return the values of a group's ranks, in group order, after an operation among them."""
    num = len(values)
    if isinstance(op, AllGather):
        return [np.concatenate(values)] * num
    if isinstance(op, Slice):
        return [value.reshape(num, -1)[index] for index, value in enumerate(values)]
    total = np.sum(values, axis=0)
    return [total] * num if isinstance(op, AllReduce) else list(total.reshape(num, -1))
