"""Tests of boxes on random shapes."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from partita.table.box import Box

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


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
