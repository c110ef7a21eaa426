"""The squared norm of gradients, which does not depend on how they are sharded."""

import pytest
import torch

from partita.kernels.chunks import chunks
from partita.sharding.squared_norm import square, total_squared_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0,), (1,), (256,), (1000,), (7, 300), (3, 5, 8, 9)])
def test_the_sum_of_squares(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    grad = torch.randn(shape).to(dtype)
    found = square(grad)
    assert found.dtype == torch.float64
    assert found.item() == pytest.approx(grad.double().square().sum().item(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("over", [-256, 0, 77, 256])
def test_16_bits_have_the_bits_of_a_conversion(dtype: torch.dtype, over: int) -> None:
    """A 16-bit gradient has bitwise the squared norm of its fp32 copy, whatever the size of its last chunk."""
    grad = torch.randn(2 * next(chunks(torch.empty(1 << 24))).stop + over).to(dtype)
    assert square(grad) == square(grad.float())


def test_cuts_between_blocks_change_nothing() -> None:
    flat = torch.randn(256 * 40 + 77)
    whole = square(flat).item()
    for cut in (1, 3, 17):
        parts = square(flat[: 256 * cut]) + square(flat[256 * cut :])
        assert parts.item() == pytest.approx(whole, rel=1e-14)


def test_the_order_is_that_of_memory() -> None:
    grad = torch.randn(4, 6, 10, 10)
    last = grad.to(memory_format=torch.channels_last)
    assert square(last) == square(last.permute(0, 2, 3, 1).contiguous())


def test_several_tensors_at_once() -> None:
    grads = [torch.randn(shape) for shape in [(1000,), (0,), (256,), (7, 300), (3,)]]
    assert total_squared_norm(grads).item() == pytest.approx(sum(square(grad).item() for grad in grads), rel=1e-14)
