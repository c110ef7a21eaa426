"""Tests of places of local tensors in global tensors."""

import pytest
import torch

from partita.table.place import Place, even


@pytest.mark.parametrize(("dim", "ranges"), [(0, ((2, 4),)), (0, ((4, 6), (0, 1))), (1, ((1, 2), (3, 5))), (2, None)])
def test_taking_and_putting(dim: int, ranges: tuple[tuple[int, int], ...] | None) -> None:
    whole = torch.randn(6, 5, 4)
    place = Place((6, 5, 4), dim, ranges)
    local = place.take(whole)
    assert local.shape == place.sizes
    assert local.numel() == place.num_elements
    assert place.is_part is (ranges is not None)
    expected = whole if ranges is None else torch.cat([whole.narrow(dim, a, b - a) for a, b in ranges], dim)
    assert torch.equal(local, expected)
    again = torch.zeros_like(whole)
    place.put(local, again)
    assert torch.equal(place.take(again), local)
    assert again.count_nonzero() == local.count_nonzero()


def test_ranges_of_several_lie_apart_in_memory() -> None:
    local = Place((6, 5), 1, ((0, 2), (3, 4))).take(torch.randn(6, 5))
    assert local.stride() == (1, 6)


@pytest.mark.parametrize("ranges", [((3, 3),), ((-1, 2),), ((4, 7),)])
def test_wrong_ranges(ranges: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="no range of dim 0"):
        Place((6, 5), 0, ranges)


def test_even_parts() -> None:
    assert even(7, 3) == [(0, 3), (3, 5), (5, 7)]
    assert even(12, 3, unit=4) == [(0, 4), (4, 8), (8, 12)]
    assert even(2, 3) == [(0, 1), (1, 2), (2, 2)]
