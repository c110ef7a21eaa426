"""Partita's optimizers keep torch's contracts: closures may run forward and backward; steps are counted exactly."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from partita.compression.onebit_adam import OnebitAdam
from partita.optim.fused import FusedAdam, FusedLion, FusedSGD

ADAM = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
MAKES: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "adam": lambda params: FusedAdam(params, **ADAM),
    "sgd": lambda params: FusedSGD(params, lr=0.1, momentum=0.9, weight_decay=0.0),
    "lion": lambda params: FusedLion(params, lr=0.1, betas=(0.9, 0.99), weight_decay=0.0),
    "onebit_adam": lambda params: OnebitAdam(params, lr=0.1),
}


@pytest.mark.parametrize("name", MAKES)
def test_closure(name: str) -> None:
    one, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer, reference = MAKES[name]([one]), MAKES[name]([other])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = one.square().sum()
        loss.backward()
        return loss

    other.square().sum().backward()
    reference.step()
    assert optimizer.step(closure).item() == 3.0
    assert not one.equal(torch.ones(3))
    assert one.equal(other)


@pytest.mark.parametrize("name", MAKES)
def test_steps_are_counted_in_any_default_dtype(name: str) -> None:
    """The step count is exact in any default dtype; a count in bf16 would stop at 256."""
    param = nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    optimizer = MAKES[name]([param])
    torch.set_default_dtype(torch.bfloat16)
    try:
        for _ in range(300):
            optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert float(optimizer.state[param]["step"]) == 300.0
