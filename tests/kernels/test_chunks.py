"""Chunks of buffers: views that contain every element once, for any shape, number of threads and memory layout."""

from unittest import mock

import pytest
import torch

from partita.kernels import chunks
from partita.kernels.chunks import in_chunks


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7, 13), (64,), (65,)])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_every_element_once(shape: tuple[int, ...], num_threads: int) -> None:
    first, second = torch.zeros(shape), torch.zeros(shape, dtype=torch.bfloat16)
    with (
        mock.patch.object(chunks, "_ON_HOST", 16),
        mock.patch.object(torch, "get_num_threads", return_value=num_threads),
    ):
        sizes = [len(one.add_(1)) for one, other in in_chunks(first, second) if other.sub_(2).shape == one.shape]
    assert torch.equal(first, torch.ones(shape))
    assert torch.equal(second, torch.full(shape, -2, dtype=torch.bfloat16))
    assert sum(sizes) == first.numel()
    assert all(size == 16 * num_threads for size in sizes[:-1])


def test_what_does_not_lie_in_order_comes_as_it_is() -> None:
    straight, turned = torch.zeros(40, 6), torch.zeros(6, 40).T
    with mock.patch.object(chunks, "_ON_HOST", 16):
        pairs = list(in_chunks(straight, turned))
    assert len(pairs) == 1
    assert pairs[0][0] is straight
    assert pairs[0][1] is turned
