"""Quantized parameter deltas."""

import torch
from torch import Tensor

from partita.comm.collectives import Collectives
from partita.compression.deltas import add_deltas
from partita.kernels.codecs import CODECS
from partita.kernels.quantize import nearest_bf16
from partita.table.mesh_shape import MeshShape
from partita.table.residence import BLOCK
from tests.kit.threads import on_threads

DATA = ("data",)


def test_parameters_between_two_bf16_numbers_are_rounded_as_masters_are() -> None:
    """Ties are rounded away from zero, as the optimizer's kernels do; torch would round them to even."""
    updated = torch.full((BLOCK,), -0.2509765625)  # half-way between -0.25 and -0.251953125
    updated[::2] = 0.0
    codec = CODECS["ternary"]  # lossless for values that are equal or zero

    def work(collectives: Collectives) -> Tensor:
        whole = torch.zeros(2 * BLOCK, dtype=torch.bfloat16)
        add_deltas(collectives.group(DATA), codec, updated, whole, torch.zeros(4 * BLOCK))
        return whole

    for whole in on_threads(MeshShape(data=2), work, DATA):
        assert torch.equal(whole, nearest_bf16(updated).repeat(2))
        assert not torch.equal(whole, updated.bfloat16().repeat(2))
