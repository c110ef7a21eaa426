"""What travels on an edge: bytes to the last one, and which ranks exchange codes with which."""

import pytest

from partita.plan.mesh_shape import MeshShape
from partita.plan.residence import BF16, BLOCK, FP32
from partita.plan.wire import CODECS, Wire, hops


def test_records_hold_codes_and_scale() -> None:
    sizes = {name: codec.record_bytes for name, codec in CODECS.items()}
    assert sizes == {"int8": 260, "int4": 132, "two_bits": 68, "ternary": 56, "sign": 36, "top8": 40}


def test_bytes_of_an_edge() -> None:
    num = 8 * BLOCK
    assert Wire(FP32).num_bytes(num) == 4 * num
    assert Wire(BF16).sent_bytes(num, 4) == 3 * 2 * num // 4
    assert Wire(FP32, CODECS["int8"]).sent_bytes(num, 4) == 3 * 2 * 260
    assert Wire(FP32, CODECS["int4"], unbiased=True).sent_bytes(num, 8) == 7 * 132
    assert Wire(FP32, CODECS["sign"], feedback=True).sent_bytes(num, 1) == 0


def test_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="int8 encodes whole blocks of 256 values; got 257"):
        Wire(FP32, CODECS["int8"]).num_bytes(257)
    with pytest.raises(ValueError, match="leave nothing to be held back"):
        Wire(FP32, feedback=True)
    with pytest.raises(ValueError, match="top8 does not round at random"):
        Wire(FP32, CODECS["top8"], unbiased=True)


def test_sums_are_made_inside_nodes_first() -> None:
    flat, nodes = MeshShape(data=8), MeshShape(data=8, node=2)
    assert hops(("data",), flat) == (("data",),)
    assert hops(("data",), nodes) == (("local",), ("node",))
    assert hops(("local",), nodes) == (("local",),)
    assert hops(("node",), nodes) == (("node",),)
    assert hops(("data",), MeshShape(data=4, node=4)) == (("data",),)
    assert hops(("data",), MeshShape()) == ()
