"""Compressed communication formats: exact byte counts, and the groups of ranks that exchange codes."""

import pytest

from partita.compression.quantized import Quantized, hops
from partita.kernels.codecs import CODECS
from partita.table.formats import FULL
from partita.table.mesh_shape import MeshShape
from partita.table.residence import BF16, BLOCK, FP32


def test_records_hold_codes_and_scale() -> None:
    sizes = {name: codec.record_bytes for name, codec in CODECS.items()}
    assert sizes == {"int8": 260, "int4": 132, "two_bits": 68, "ternary": 56, "sign": 36, "top8": 40}


def test_bytes_of_a_format() -> None:
    num = 8 * BLOCK
    assert FULL.num_bytes(num, FP32) == 4 * num
    assert FULL.sent_bytes(num, BF16, 4) == 3 * 2 * num // 4
    assert Quantized(CODECS["int8"]).sent_bytes(num, FP32, 4) == 3 * 2 * 260
    assert Quantized(CODECS["int4"], stochastic_rounding=True).sent_bytes(num, BF16, 8) == 7 * 132
    assert Quantized(CODECS["sign"], has_error_feedback=True).sent_bytes(num, FP32, 1) == 0


def test_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="int8 encodes full blocks of 256 values; got 257"):
        Quantized(CODECS["int8"]).num_bytes(257)
    with pytest.raises(ValueError, match="top8 does not round at random"):
        Quantized(CODECS["top8"], stochastic_rounding=True)


def test_sums_are_made_inside_nodes_first() -> None:
    flat, nodes = MeshShape(data=8), MeshShape(data=8, node=2)
    assert hops(("data",), flat) == (("data",),)
    assert hops(("data",), nodes) == (("local",), ("node",))
    assert hops(("local",), nodes) == (("local",),)
    assert hops(("node",), nodes) == (("node",),)
    assert hops(("data",), MeshShape(data=4, node=4)) == (("data",),)
    assert hops(("data",), MeshShape()) == ()
