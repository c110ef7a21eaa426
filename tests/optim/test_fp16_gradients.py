"""Gradients in fp16 stay multiplied by the loss scale: the update divides them in fp32, in which small ones remain."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partita
from tests.kit import seeds
from tests.kit.ranks import on_ranks
from tests.kit.training import rank, world

SIZE = 1e-8  # of the first gradients: zero in fp16 without the loss scale
OWN = partial(torch.optim.SGD, lr=1.0 / SIZE)
SGD = {"name": "sgd", "lr": 1.0 / SIZE, "weight_decay": 0.0}
ADAM = {"name": "onebit_adam", "lr": 0.1, "eps": 1e-12, "weight_decay": 0.0}
TERNARY = {"communication": {"gradients": "ternary"}}
WARM_UP = {"communication": {"warmup_steps": 2}}
CLIPPED = {"clip_grad_norm": SIZE / 100}  # by another factor in each step
IN_PLACE = {"precision": {"mode": "cast"}}
ON_HOST = {"zero": {"stage": 2, "offload": {"optimizer": "host"}}}


def change(config: Mapping[str, Any], own: bool, gradients: str) -> Tensor:
    """Return the change of a layer's master weights in four steps, on rank 0.

    Args:
        own: train with ``OWN``, not with the optimizer of the config.
        gradients: their dtype.
    """
    seeds.start()
    layer = nn.Linear(64, 32, bias=False)
    before = layer.weight.detach().clone()
    precision = {"compute": "fp16", "loss_scale": 2.0**16, "gradients": gradients, **config.get("precision", {})}
    with partita.initialize(layer, {**config, "precision": precision}, optimizer=OWN if own else None) as engine:
        for step in range(4):
            generator = seeds.generator(step * world() + rank())
            x, target = (torch.randn(16, size, generator=generator) for size in (64, 32))
            engine.backward((engine(1e-3 * x).float() * target).sum() * 4.0**-step * SIZE * 1e3 / 4)
            assert engine.step().stepped
        weights = engine.state_dict()
    return weights["weight"].float() - before if weights else before


def errors(config: Mapping[str, Any], own: bool) -> float:
    """Return the difference between changes by gradients in fp16 and in fp32, relative to the latter."""
    expected, found = (change(config, own, gradients) for gradients in ("fp32", "fp16"))
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("config", "own", "num_ranks", "tolerance"),
    [
        ({"zero": {"stage": 0}}, True, 2, 0.01),
        ({"zero": {"stage": 3}, **CLIPPED}, True, 2, 0.01),
        ({"zero": {"stage": 3}, "optimizer": SGD}, False, 2, 0.01),
        (ON_HOST, True, 2, 0.01),
        (IN_PLACE, True, 1, 0.01),
        ({"zero": {"stage": 1}, "optimizer": {"name": "muon"}}, False, 2, 0.05),
        # errors of roundings decide which values near a codec's thresholds are sent
        ({"zero": {"stage": 0}, **TERNARY, **CLIPPED}, True, 2, 0.05),
        ({"zero": {"stage": 2}, "optimizer": SGD, **TERNARY}, False, 2, 0.05),
        ({"zero": {"stage": 0}, "optimizer": ADAM, **WARM_UP}, False, 2, 0.05),
        ({"zero": {"stage": 2}, "optimizer": ADAM, **WARM_UP}, False, 2, 0.05),
    ],
    ids=str,
)
def test_small_gradients_train(config: Mapping[str, Any], own: bool, num_ranks: int, tolerance: float) -> None:
    assert on_ranks(num_ranks, errors, config, own)[0] < tolerance


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1024))

    def forward(self, factors: Tensor) -> Tensor:
        return (self.weight.float() * factors).sum()


def residuals_out_of_range() -> Tensor:
    """Return the change of weights 24 to 32 by sums whose residuals add up to more than fp16 can hold.

    The codec sends the eight largest values of a block: all that a rank sends here, but half of each sum.
    """
    sums = [(16, 1.0), (24, 0.9)], [(0, 1.0), (8, 0.9)], [(8, 1.0), (24, 0.9)], [(24, 1.0), (24, 0.0)]
    config = {
        "zero": {"stage": 0},
        "precision": {"compute": "fp16", "gradients": "fp16", "loss_scale": 2.0**16},
        "communication": {"gradients": "topk"},
    }
    with partita.initialize(Weights(), config, optimizer=partial(torch.optim.SGD, lr=1.0)) as engine:
        for of_ranks in sums:
            first, factor = of_ranks[rank()]
            factors = torch.zeros(1024)
            factors[first : first + 8] = factor * 60000 / 2**16
            engine.backward(engine(factors))
            assert engine.step().stepped
        return engine.state_dict().get("weight", torch.zeros(1024))[24:32].float()


def test_decoded_values_stay_in_range() -> None:
    torch.testing.assert_close(on_ranks(2, residuals_out_of_range)[0], torch.full((8,), -65504 / 2**16))
