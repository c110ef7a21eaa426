"""Flat ranges as boxes, on random shapes and memory orders."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from partita.plan.box import Box, boxes_of, memory_order

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
    shape = draw(SHAPES)
    order = tuple(draw(st.permutations(range(len(shape)))))
    ends = sorted((draw(st.integers(0, math.prod(shape))), draw(st.integers(0, math.prod(shape)))))
    return shape, order, *ends


def numbered(shape: tuple[int, ...], order: tuple[int, ...]) -> torch.Tensor:
    """Each element its place in memory, in the tensor's own coordinates."""
    inner = torch.arange(math.prod(shape)).view([shape[dim] for dim in order])
    return inner.permute([order.index(dim) for dim in range(len(order))]) if order else inner.view(())


def piece(whole: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole


@given(ranges(), st.integers(1, 200))
def test_boxes_are_the_range_each_in_one_piece(
    made: tuple[tuple[int, ...], tuple[int, ...], int, int], most: int
) -> None:
    shape, order, start, stop = made
    whole, at = numbered(shape, order), start
    found = list(boxes_of(shape, order, start, stop, most))
    for box, place in found:
        assert place == at
        assert box.num_elements <= most
        values = piece(whole, box).permute(order).flatten() if order else piece(whole, box).flatten()
        assert torch.equal(values, torch.arange(place, place + box.num_elements))
        at += box.num_elements
    assert at == stop


@given(ranges())
def test_they_are_few(made: tuple[tuple[int, ...], tuple[int, ...], int, int]) -> None:
    shape, order, start, stop = made
    assert len(list(boxes_of(shape, order, start, stop))) <= max(1, 2 * len(shape) - 1)


@given(SHAPES, st.randoms())
def test_what_two_have_in_common(shape: tuple[int, ...], random: object) -> None:
    def some_box() -> Box:
        ends = [sorted(random.choices(range(size + 1), k=2)) for size in shape]  # type: ignore[attr-defined]
        return Box(tuple(low for low, _ in ends), tuple(high - low for low, high in ends))

    one, other = some_box(), some_box()
    places = numbered(shape, tuple(range(len(shape))))
    common = set(piece(places, one).flatten().tolist()) & set(piece(places, other).flatten().tolist())
    met = one.meet(other)
    if met is None:
        assert not common
    else:
        assert set(piece(places, met).flatten().tolist()) == common
        assert torch.equal(piece(piece(places, one), met.within(one)), piece(places, met))


def test_the_order_of_dimensions_in_memory() -> None:
    images = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert memory_order(images.stride()) == (0, 2, 3, 1)
    assert memory_order(torch.empty(3, 2).t().stride()) == (1, 0)
