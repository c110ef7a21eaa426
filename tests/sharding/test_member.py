"""Conversions of a parameter's values to a flat range and back, which keep strides and copy only if they must."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from partita.errors import ConfigError
from partita.layout.parameters import ParameterInfo, check_supported
from partita.sharding.parameter import Member, dense_stride
from partita.sharding.segment import Segment
from partita.table.mesh_shape import MeshShape
from partita.table.planned import PlannedSegment
from partita.table.residence import FP32
from partita.table.span import Entry, build_layout
from partita.table.state_plan import PRESETS, preset


def member(values: Tensor) -> Member:
    """Return the only parameter of a segment, with these values and strides."""
    info = ParameterInfo(nn.Parameter(values), ["weight"])
    layout = build_layout([Entry("weight", tuple(values.shape), FP32, True)], 1)[0]
    segment = Segment(PlannedSegment(layout, preset("ddp"), MeshShape()), 0)
    return Member(info, layout.spans[0], segment)


def numbers(*shape: int) -> Tensor:
    return torch.arange(1.0, 1 + math.prod(shape)).view(shape)


# -------------------------------------------------------------------------------------------------------- strides

DENSE = {
    "contiguous": numbers(3, 4, 5),
    "channels last": numbers(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "channels last 3d": numbers(2, 3, 2, 2, 2).contiguous(memory_format=torch.channels_last_3d),
    "channels last, one channel": numbers(4, 1, 3, 3).contiguous(memory_format=torch.channels_last),
    "transposed": numbers(3, 4).t(),
    "permuted": numbers(2, 3, 4).permute(1, 2, 0),
    "scalar": torch.tensor(2.0),
    "one element": numbers(1, 1, 1),
    "empty": torch.empty(0, 4),
    "empty inside": torch.empty(4, 0, 3),
    "any stride along one element": torch.as_strided(numbers(12), (3, 1, 2), (2, 99, 1)),
}
GAPS = {
    "every other": numbers(10)[::2],
    "columns of a wider matrix": numbers(4, 6)[:, :3],
    "expanded": torch.ones(1).expand(5),
    "expanded rows": torch.ones(4).expand(3, 4),
    "rows apart": numbers(6, 4)[::2],
    "overlapping": torch.as_strided(numbers(5), (3, 3), (1, 1)),
}


@pytest.mark.parametrize("name", DENSE)
def test_dense_strides_are_kept(name: str) -> None:
    assert dense_stride(DENSE[name]) == DENSE[name].stride()


@pytest.mark.parametrize("name", GAPS)
def test_strides_with_gaps_become_contiguous(name: str) -> None:
    assert dense_stride(GAPS[name]) == GAPS[name].clone(memory_format=torch.contiguous_format).stride()


@st.composite
def strided(draw: st.DrawFn) -> Tensor:
    """Draw a tensor of any shape and memory order, with or without gaps."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    values = numbers(*(size * draw(st.sampled_from([1, 1, 1, 2])) for size in shape))
    cut = values[tuple(slice(None, None, 1 if v == s else 2) for v, s in zip(values.shape, shape, strict=True))]
    return cut.permute(draw(st.permutations(range(len(shape)))))


@given(strided())
def test_flat_and_shaped_undo_each_other(values: Tensor) -> None:
    held = member(values)
    flat = held.flat(values)
    assert flat.shape == (values.numel(),)
    assert flat.is_contiguous()
    assert sorted(flat.tolist()) == sorted(values.flatten().tolist())
    shaped = held.shaped(flat)
    assert (shaped.shape, shaped.stride()) == (values.shape, held.stride)
    assert torch.equal(shaped, values)
    assert shaped.data_ptr() == flat.data_ptr()


@given(strided(), strided())
def test_a_gradient_of_other_strides_is_laid_as_the_parameter(values: Tensor, other: Tensor) -> None:
    """Element i is the same in the flat gradient and the flat parameter, whatever the gradient's memory order."""
    held = member(values)
    for order in itertools.permutations(range(values.dim())):
        back = sorted(range(values.dim()), key=lambda dim: order[dim])
        grad = (values * 2).permute(order).contiguous().permute(back)
        assert torch.equal(grad, values * 2)
        assert torch.equal(held.flat(grad), 2 * held.flat(values))


@pytest.mark.parametrize("name", DENSE)
def test_flat_is_a_view_where_strides_agree(name: str) -> None:
    values = DENSE[name]
    flat = member(values).flat(values)
    assert flat.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()


def test_flat_of_a_tensor_inside_a_larger_one() -> None:
    inside = numbers(10, 4)[3:5]
    assert member(inside).flat(inside).tolist() == inside.flatten().tolist()


def test_shaped_is_a_view_at_its_place() -> None:
    buffer, held = torch.zeros(100), member(DENSE["channels last"][:1, :, :2, :2])
    held.shaped(buffer[20:32]).copy_(numbers(1, 3, 2, 2))
    assert buffer[:20].count_nonzero() == buffer[32:].count_nonzero() == 0
    assert sorted(buffer[20:32].tolist()) == list(range(1, 13))


def test_names_and_kind() -> None:
    class Special(nn.Parameter):
        pass

    held = member(numbers(3))
    assert (held.fqn, held.kind, held.shape) == ("weight", nn.Parameter, (3,))
    held = Member(ParameterInfo(Special(numbers(3)), ["first", "second"]), held.span, held.segment)
    assert (held.fqn, held.kind) == ("first", Special)


# ----------------------------------------------------------------------------------------------- slices of a segment


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("mesh", [MeshShape(), MeshShape(data=2), MeshShape(data=4, node=2), MeshShape(data=3, node=3)])
def test_a_ranks_part_holds_its_spans(name: str, mesh: MeshShape) -> None:
    entries = [Entry("a", (700,), FP32, True), Entry("b", (5, 100), FP32, True), Entry("c", (), FP32, True)]
    row = preset(name)
    num_shards, num_replicas = mesh.group_size(row.gradient_shard_axes), mesh.group_size(row.gradient_replica_axes)
    layout = build_layout(entries, num_shards, lambda _: num_replicas)[0]
    assert layout.padded == build_layout(entries, mesh.data)[0].padded
    whole = torch.arange(layout.padded)
    planned = PlannedSegment(layout, row, mesh)
    for rank in range(mesh.num_ranks):
        segment = Segment(planned, rank)
        for residence in (row.param_stored, row.param_compute, row.param_between, row.master):
            size = layout.padded // mesh.group_size(residence.shard_axes)
            index = mesh.group_index(rank, residence.shard_axes)
            assert segment.part(whole, residence).tolist() == list(range(index * size, (index + 1) * size))
        mine = segment.part(whole, row.master)
        for span in segment.master_spans:
            original = next(other for other in layout.spans if other.fqn == span.fqn)
            values = mine[span.offset : span.offset + span.num_elements]
            assert values[0] == original.offset + span.start
        assert segment.has_full_master == (len(mine) == layout.padded)
    covered = [span for rank in range(mesh.data) for span in Segment(planned, rank).master_spans]
    times = mesh.data // mesh.group_size(row.master.shard_axes)
    assert sum(span.num_elements for span in covered) == times * (700 + 500 + 1)


# --------------------------------------------------------------------------------------------- unsupported parameters


def test_parameters_that_cannot_be_split_are_refused_by_name() -> None:
    class Wrapped(Tensor):
        pass

    refused = {
        "its memory cannot be split": nn.Parameter(Wrapped(torch.ones(2))),
        r"is sparse \(torch.sparse_coo\); use a dense parameter": nn.Parameter(torch.eye(2).to_sparse()),
        "is complex; use a real parameter": nn.Parameter(torch.ones(2, dtype=torch.complex64)),
    }
    for message, param in refused.items():
        with pytest.raises(ConfigError, match=rf"parameter 'layer.weight' .*{message}"):
            check_supported(ParameterInfo(param, ["layer.weight"]))


def test_parameters_that_can_be_split() -> None:
    class Special(nn.Parameter):
        pass

    for param in (
        nn.Parameter(torch.ones(2)),
        Special(torch.ones(2)),
        nn.Parameter(torch.ones(2, device="meta")),
        nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False),
        nn.Parameter(torch.ones(2, dtype=torch.complex64), requires_grad=False),
    ):
        check_supported(ParameterInfo(param, ["weight"]))
