"""Tests of flat ranges as boxes, on random shapes, places and memory orders."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from partita.table.box import Box
from partita.table.flat_range import FlatRange, memory_order
from partita.table.place import Place

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def ranges(draw: st.DrawFn) -> FlatRange:
    """Draw a flat range of a local tensor that consists of ranges of one dim of a global tensor, in any order."""
    shape = draw(SHAPES)
    order, place = tuple(draw(st.permutations(range(len(shape))))), Place(shape)
    if shape and draw(st.booleans()):
        dim = draw(st.integers(0, len(shape) - 1))
        cuts = sorted(draw(st.sets(st.integers(0, shape[dim]), min_size=2)) | {0, shape[dim]})
        parts = draw(st.permutations(list(pairwise(cuts))))
        place = Place(shape, dim, tuple(parts[: draw(st.integers(1, len(parts)))]))
        if place.has_several_ranges:
            order = (dim, *(other for other in order if other != dim))
    start, stop = sorted(draw(st.integers(0, place.num_elements)) for _ in range(2))
    return FlatRange(place, order, start, stop)


def numbered(of: FlatRange) -> torch.Tensor:
    """Return a global tensor with each element's index in the local tensor's memory, or -1 outside the local tensor."""
    places = torch.full(of.shape, -1)
    local = of.shaped(torch.arange(of.place.num_elements), Box.whole(of.place.sizes))
    of.place.put(local, places)
    return places


@given(ranges(), st.integers(1, 200))
def test_boxes_are_the_range_each_in_one_piece(made: FlatRange, most: int) -> None:
    whole, at = numbered(made), made.start
    for box, place in made.boxes(most):
        assert place == slice(at - made.start, at - made.start + box.num_elements)
        assert box.num_elements <= most
        values = torch.arange(at, at + box.num_elements)
        assert torch.equal(whole[box.slices], made.shaped(values, box))
        assert torch.equal(whole[box.slices].permute(made.order).flatten(), values)
        at += box.num_elements
    assert at == made.stop


@given(ranges())
def test_they_are_few(made: FlatRange) -> None:
    """Each range of the place is covered by at most ``2 * ndim - 1`` boxes."""
    num_ranges = len(made.place.ranges or (None,))
    assert len(list(made.boxes())) <= num_ranges * max(1, 2 * len(made.shape) - 1)


def test_a_tensor_without_elements_is_one_box() -> None:
    assert list(FlatRange.row_major((3, 0)).boxes()) == [(Box((0, 0), (3, 0)), slice(0, 0))]


def test_the_order_of_dimensions_in_memory() -> None:
    images = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert memory_order(images.stride()) == (0, 2, 3, 1)
    assert memory_order(torch.empty(3, 2).t().stride()) == (1, 0)
