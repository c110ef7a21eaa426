"""Sums of squares: right against float64, finite exactly if all is, and the same from every way of running them."""

import math

import pytest
import torch

from partita.kernels import native
from partita.kernels.sums import square_sum, sum_and_square_
from tests.kernels.states import GRADS, SIZES, same_bits


@pytest.fixture(params=["compiled", "uncompiled"])
def either(request: pytest.FixtureRequest) -> None:
    """With the compiled kernels, and without."""
    request.getfixturevalue(request.param)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("dtype", GRADS)
@pytest.mark.parametrize("num", SIZES)
def test_square_sum(dtype: torch.dtype, num: int) -> None:
    values = torch.randn(num).to(dtype)
    assert square_sum(values) == pytest.approx(values.double().square().sum().item(), rel=1e-13)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("dtype", GRADS)
def test_large_and_small_values_count(dtype: torch.dtype) -> None:
    values = torch.cat([torch.full((5000,), x) for x in (torch.finfo(dtype).max, torch.finfo(dtype).tiny / 4, -0.0)])
    values = values.to(dtype)
    assert square_sum(values) == pytest.approx(values.double().square().sum().item(), rel=1e-13)
    small = values[5000:]
    assert square_sum(small) == pytest.approx(small.double().square().sum().item(), rel=1e-13)
    assert square_sum(small) > 0


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("dtype", GRADS)
@pytest.mark.parametrize("at", [0, 17, 4096, 9999])
def test_what_is_not_finite_shows(dtype: torch.dtype, at: int) -> None:
    for bad in (math.inf, -math.inf, math.nan):
        values = torch.randn(10000).to(dtype)
        values[at] = bad
        total = square_sum(values, threads=2)
        assert math.isnan(total) if math.isnan(bad) else total == math.inf
        assert not math.isfinite(sum_and_square_(torch.empty_like(values), [values, values]))


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", GRADS)
@pytest.mark.parametrize("num", [*SIZES, 100_000])
def test_every_way_gives_the_same_bits(dtype: torch.dtype, num: int) -> None:
    values, more = torch.randn(num).to(dtype), torch.randn(num)
    expected = square_sum(values)
    out = torch.empty(num)
    sum_expected = sum_and_square_(out, [values, more])
    assert same_bits(out, values.float() + more)
    for level in native.levels():
        for threads in (1, 2, 3):
            assert square_sum(values, threads, level) == expected
            again = torch.empty(num)
            assert sum_and_square_(again, [values, more], threads, level) == sum_expected
            assert same_bits(again, out)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("out_dtype", GRADS)
@pytest.mark.parametrize("dtype", GRADS)
@pytest.mark.parametrize("num", [1, 300, 5000])
@pytest.mark.parametrize("num_inputs", [1, 2, 5])
def test_sums_are_in_order_and_rounded_once(
    out_dtype: torch.dtype, dtype: torch.dtype, num: int, num_inputs: int
) -> None:
    inputs = [torch.randn(num).mul(10.0**-number).to(dtype) for number in range(num_inputs)]
    total = inputs[0].float()
    for part in inputs[1:]:
        total = total + part.float()
    expected = total.to(out_dtype)
    out = torch.empty(num, dtype=out_dtype)
    square = sum_and_square_(out, inputs)
    assert same_bits(out, expected)
    assert square == pytest.approx(expected.double().square().sum().item(), rel=1e-13)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("dtype", GRADS)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_sum_may_go_into_one_of_its_inputs(dtype: torch.dtype, place: int) -> None:
    inputs = [torch.randn(1000).to(dtype) for _ in range(3)]
    expected = (inputs[0].float() + inputs[1].float() + inputs[2].float()).to(dtype)
    sum_and_square_(inputs[place], inputs)
    assert same_bits(inputs[place], expected)


@pytest.mark.usefixtures("either")
def test_nothing_sums_to_nothing() -> None:
    assert square_sum(torch.empty(0)) == 0.0


@pytest.mark.parametrize(
    ("out", "inputs", "message"),
    [
        (torch.empty(3), [], "a sum needs at least one input"),
        (torch.empty(3), [torch.empty(3), torch.empty(4)], r"inputs\[1\] must have 3 elements, got 4"),
        (torch.empty(3), [torch.empty(3).double()], r"inputs\[0\] must be float32 or bfloat16 or float16, got float64"),
        (torch.empty(3, dtype=torch.int32), [torch.empty(3)], "out must be float32 or .*, got int32"),
        (torch.empty(6)[::2], [torch.empty(3)], "out must be contiguous, got strides"),
    ],
)
def test_errors(out: torch.Tensor, inputs: list[torch.Tensor], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        sum_and_square_(out, inputs)
