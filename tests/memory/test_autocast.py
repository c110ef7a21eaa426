"""Autocast on a simulated device yields the dtypes that torch yields on the device that it represents."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from partita.memory.accelerator import HOST, SIMULATED, simulating
from partita.memory.autocast import autocast, autocast_dtype, no_autocast, simulated_autocast

DTYPES = (torch.bfloat16, torch.float16)
Operator = Callable[[Tensor, Tensor], Tensor]
OPERATORS: dict[str, Operator] = {
    "linear": F.linear,
    "matmul": torch.matmul,
    "einsum": lambda x, y: torch.einsum("ij,kj->ik", x, y),
    "add": torch.add,
    "cat": lambda x, y: torch.cat([x, y.bfloat16()]),
    "layer_norm": lambda x, y: F.layer_norm(x.bfloat16(), (4,)),
    "softmax": lambda x, y: F.softmax(x.bfloat16(), -1),
    "exp": lambda x, y: x.bfloat16().exp(),
    "mse_loss": lambda x, y: F.mse_loss(x.bfloat16(), y.bfloat16()),
    "cross_entropy": lambda x, y: F.cross_entropy(x.bfloat16(), torch.zeros(4, dtype=torch.long, device=x.device)),
    "prod": lambda x, y: x.bfloat16().prod(),
    "attention": lambda x, y: F.scaled_dot_product_attention(x[None, None], y[None, None], y[None, None]),
    "conv1d": lambda x, y: F.conv1d(x[None], y[:, :, None]),
    "float64": lambda x, y: x.double() @ y.double(),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_a_simulated_host_is_the_host(name: str) -> None:
    drawn = torch.randn(4, 4), torch.randn(4, 4)
    with autocast(HOST, torch.bfloat16):
        expected = OPERATORS[name](*drawn).dtype
    with simulated_autocast(), autocast(SIMULATED, torch.bfloat16):
        assert OPERATORS[name](*(x.to(SIMULATED) for x in drawn)).dtype == expected


# True: runs in 16 bits on CUDA, False: in fp32. Source: https://docs.pytorch.org/docs/stable/amp.html.
ON_CUDA = {"linear": True, "matmul": True, "layer_norm": False, "softmax": False, "exp": False, "attention": True}


@pytest.mark.parametrize("name", ON_CUDA)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_simulated_accelerator_has_its_own_list(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(4, 4, device=SIMULATED)
    with simulating("cuda"), simulated_autocast(), autocast(SIMULATED, dtype):
        assert torch.is_autocast_enabled("cuda")
        assert OPERATORS[name](x, x).dtype == (dtype if ON_CUDA[name] else torch.float32)
    assert not torch.is_autocast_enabled("cuda")


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_repeated_forward_is_under_autocast_again(kind: str) -> None:
    layers = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)).to(SIMULATED)
    with simulating(kind), simulated_autocast():
        with autocast(SIMULATED, torch.bfloat16):
            out = checkpoint(layers, torch.randn(3, 4, device=SIMULATED), use_reentrant=False)
        assert out.dtype == torch.bfloat16
        out.sum().backward()  # torch compares the dtypes of the tensors that both forwards save
    assert all(param.grad is not None and param.grad.dtype == torch.float32 for param in layers.parameters())


@pytest.mark.parametrize("device", [HOST, SIMULATED], ids=str)
def test_it_is_off_where_it_is_turned_off(device: torch.device) -> None:
    x = torch.randn(4, 4, device=device)
    with simulated_autocast():
        assert autocast_dtype(device) is None
        with autocast(device, torch.bfloat16):
            assert autocast_dtype(device) == torch.bfloat16
            with no_autocast(device):
                assert autocast_dtype(device) is None
                assert (x @ x).dtype == torch.float32
            assert (x @ x).dtype == torch.bfloat16
        assert (x @ x).dtype == torch.float32
