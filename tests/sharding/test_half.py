"""Under autocast, 16-bit parameters give the same results as fp32 parameters with the same values."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partita.sharding.half import HalfParameter
from tests.kit import seeds

SIZE = 8
FUNCTIONS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "add": lambda p, x: p + x,
    "subtract from": lambda p, x: x - p,
    "number minus": lambda p, x: 1 - p,
    "inverse": lambda p, x: 1 / p,
    "scale": lambda p, x: x * p[0],
    "product": lambda p, x: x @ p,
    "transposed product": lambda p, x: F.linear(x, p.T),
    "einsum": lambda p, x: torch.einsum("ij,kj->ki", p, x),
    "batched product": lambda p, x: torch.bmm(x[None], p.unsqueeze(0)),
    "layer norm": lambda p, x: F.layer_norm(x, (SIZE,), p[0], p[1]),
    "rows": lambda p, x: F.embedding(torch.tensor([1, 1, 3]), p),
    "rows by index": lambda p, x: p[torch.tensor([1, 1, 3])] * 3,
    "norm": lambda p, x: p.norm() + x.norm(),
    "softmax": lambda p, x: torch.softmax(p, dim=-1),
    "exponential": lambda p, x: torch.exp(p * 0.1) * x,
    "matrix exponential": lambda p, x: torch.matrix_exp(p),
    "concatenation": lambda p, x: torch.cat([p, x]),
    "choice": lambda p, x: torch.where(x > 0, p, x),
    "interpolation": lambda p, x: torch.lerp(x, p, 0.3),
    "by keyword": lambda p, x: torch.add(input=x, other=p),
    "cast": lambda p, x: p.float() * 2,
    "view": lambda p, x: p.view(2, 4, SIZE).sum(0),
    "chunks": lambda p, x: p.chunk(2)[1] + 1,
    "sum": lambda p, x: p.sum(),
}


def read(function: Callable[[Any, Tensor], Tensor], param: nn.Parameter, x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        output = function(param, x)
    output.float().square().sum().backward()
    assert param.grad is not None
    return output.detach(), param.grad.float()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_read_what_autocast_reads(name: str) -> None:
    seeds.start()
    values, x = torch.randn(SIZE, SIZE).bfloat16(), torch.randn(SIZE, SIZE)
    half = nn.Parameter(values.clone())
    half.__class__ = HalfParameter
    found, gradient = read(FUNCTIONS[name], half, x)
    expected, expected_gradient = read(FUNCTIONS[name], nn.Parameter(values.float()), x)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)
    assert torch.equal(gradient, expected_gradient.bfloat16().float())


def test_outside_autocast_it_is_a_plain_parameter() -> None:
    half = nn.Parameter(torch.ones(SIZE, dtype=torch.bfloat16))
    half.__class__ = HalfParameter
    assert (half + 1).dtype == torch.bfloat16
    assert type(copy.deepcopy(half)) is nn.Parameter
    assert type(half.detach()) is Tensor


def test_functions_of_the_tensor_itself_are_its_own() -> None:
    half = nn.Parameter(torch.ones(SIZE, SIZE, dtype=torch.bfloat16))
    address = half.data_ptr()
    half.__class__ = HalfParameter
    called = []
    with torch.autocast("cpu", torch.bfloat16):
        half.register_hook(lambda grad: called.append(grad.dtype))
        half.register_post_accumulate_grad_hook(lambda param: called.append(param.grad.dtype))
        assert (half.data_ptr(), half.element_size(), half.dtype) == (address, 2, torch.bfloat16)
        assert half.untyped_storage().data_ptr() == address
        F.linear(torch.ones(1, SIZE), half).sum().backward()
    assert called == [torch.bfloat16] * 2
    assert "bfloat16" in repr(half)


@pytest.mark.parametrize("inference", [False, True])
def test_what_functions_write_lasts(inference: bool) -> None:
    values = torch.full((SIZE, SIZE), 2.0, dtype=torch.bfloat16)
    half = nn.Parameter(values.clone())
    half.__class__ = HalfParameter
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode(inference):
        F.layer_norm(torch.ones(SIZE), [SIZE], half[0])
        F.embedding(torch.tensor([1]), half, max_norm=1.0)
        with torch.no_grad():
            half[2] = 5.0
            half[3].zero_()
            half[4:] *= 2
    assert torch.allclose(half[1].float().norm(), torch.tensor(1.0), rtol=2**-7)
    assert half[[0, 2, 3, 4, 7], 0].tolist() == [2, 5, 0, 4, 4]
