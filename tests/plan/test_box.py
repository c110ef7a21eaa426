"""Flat ranges as boxes, on random shapes and memory orders."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from partita.plan.box import Box, FlatRange, memory_order

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def ranges(draw: st.DrawFn) -> FlatRange:
    """Of a local tensor that is any box of a global one."""
    shape = draw(SHAPES)
    ends = [sorted((draw(st.integers(0, size - 1)), draw(st.integers(1, size)))) for size in shape]
    box = Box(tuple(low for low, _ in ends), tuple(max(1, high - low) for low, high in ends))
    order = tuple(draw(st.permutations(range(len(shape)))))
    start, stop = sorted(draw(st.integers(0, box.num_elements)) for _ in range(2))
    return FlatRange(shape, box, order, start, stop)


def numbered(of: FlatRange) -> torch.Tensor:
    """A global tensor in which each element of the local one is its place in memory there, all others are -1."""
    places = torch.full(of.shape, -1)
    places[of.box.slices] = of.shaped(torch.arange(of.box.num_elements), of.box)
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
    assert len(list(made.boxes())) <= max(1, 2 * len(made.shape) - 1)


def test_a_tensor_without_elements_is_one_box() -> None:
    assert list(FlatRange.row_major((3, 0)).boxes()) == [(Box((0, 0), (3, 0)), slice(0, 0))]


@given(SHAPES, st.randoms())
def test_what_two_have_in_common(shape: tuple[int, ...], random: object) -> None:
    def some_box() -> Box:
        ends = [sorted(random.choices(range(size + 1), k=2)) for size in shape]  # type: ignore[attr-defined]
        return Box(tuple(low for low, _ in ends), tuple(high - low for low, high in ends))

    one, other = some_box(), some_box()
    places = torch.arange(math.prod(shape)).view(shape)
    common = set(places[one.slices].flatten().tolist()) & set(places[other.slices].flatten().tolist())
    met = one.meet(other)
    if met is None:
        assert not common
    else:
        assert set(places[met.slices].flatten().tolist()) == common
        assert torch.equal(places[one.slices][met.within(one).slices], places[met.slices])
        assert met.within(one).placed_in(one) == met


def test_the_order_of_dimensions_in_memory() -> None:
    images = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert memory_order(images.stride()) == (0, 2, 3, 1)
    assert memory_order(torch.empty(3, 2).t().stride()) == (1, 0)
