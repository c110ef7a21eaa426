"""Tests of residences: elements and bytes of a state that a rank holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.table.mesh_shape import MeshShape
from partita.table.residence import BF16, ENCODINGS, FP16, FP32, Encoding, Residence, Tier
from tests.table.meshes import mesh_shapes


def test_defaults_are_a_whole_value_on_the_device() -> None:
    assert Residence() == Residence((), (), FP32, Tier.DEVICE)


def test_encodings_by_name() -> None:
    assert ENCODINGS == {"fp32": FP32, "bf16": BF16, "fp16": FP16}
    assert {name: encoding.itemsize for name, encoding in ENCODINGS.items()} == {"fp32": 4, "bf16": 2, "fp16": 2}


@pytest.mark.parametrize(
    ("shard", "partial"),
    [
        (("data",), ("data",)),
        (("tensor", "data"), ("sequence", "data")),
        (("data", "data"), ()),
        ((), ("tensor", "tensor")),
        (("data",), ("local",)),
        (("node",), ("data",)),
        (("data", "local"), ()),
        ((), ("node", "data")),
    ],
)
def test_an_axis_is_used_once(shard: tuple[str, ...], partial: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="sharded or partial over an axis once at most"):
        Residence(shard, partial)


@pytest.mark.parametrize(
    ("shard", "partial"),
    [(("data",), ("tensor",)), (("local",), ("node",)), (("node", "local"), ()), ((), ("node", "local"))],
)
def test_different_axes_go_together(shard: tuple[str, ...], partial: tuple[str, ...]) -> None:
    assert Residence(shard, partial).shard_axes == shard


@given(mesh_shapes(), st.integers(0, 100), st.sampled_from([FP32, BF16, Encoding("int8", 1)]))
def test_what_a_rank_holds(mesh: MeshShape, multiple: int, encoding: Encoding) -> None:
    padded = multiple * mesh.num_ranks
    for shard in ((), ("data",), ("local",), ("data", "tensor")):
        for tier in Tier:
            residence = Residence(shard, ("pipeline",), encoding, tier)
            size = mesh.group_size(shard)
            assert residence.num_elements(padded, mesh) * size == padded
            assert residence.num_bytes(padded, mesh) * size == padded * encoding.itemsize
