"""Gradients of gradients under tensor parallelism, compared with plain PyTorch in one process."""

import copy
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partita
from partita import PartitaError
from tests.kit.ranks import on_ranks


class Adapted(nn.Module):
    """Model that returns the loss after two steps of gradient descent on half of the samples (MAML)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weights: dict[str, Any] = dict(self.net.named_parameters())
        for _ in range(2):
            loss = F.mse_loss(torch.func.functional_call(self.net, weights, (x[:3],))[:, 0], y[:3])
            gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            weights = {
                key: weight - 0.1 * gradient for (key, weight), gradient in zip(weights.items(), gradients, strict=True)
            }
        return F.mse_loss(torch.func.functional_call(self.net, weights, (x[3:],))[:, 0], y[3:])


class Smooth(Adapted):
    """Model whose loss has a penalty on the gradient of the input."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        out = self.net(x)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.mse_loss(out[:, 0], y) + gradient.pow(2).sum(-1).mean()


RULES: dict[str, dict[str, str]] = {
    "split together": {},
    "outputs gathered": {"net.0": "column_gathered", "net.2": "whole"},
    "inputs split": {"net.0": "column_gathered", "net.2": "row_split"},
}


def gradients_of(kind: type[Adapted], rules: dict[str, str], stage: int) -> float:
    """Return the largest difference from PyTorch's gradients, relative to each gradient's largest element."""
    torch.manual_seed(0)
    x, y, model = torch.randn(6, 8), torch.randn(6), kind()
    alone = copy.deepcopy(model)
    alone(x, y).backward()
    config = {"parallel": {"tensor": 2, "tensor_rules": rules}, "zero": {"stage": stage}}
    with partita.initialize(model, config) as engine:
        loss = engine(x, y)
        assert loss.item() == pytest.approx(alone(x, y).item(), abs=1e-6)
        engine.backward(loss)
        worst = 0.0
        for name, param in alone.named_parameters():
            found = engine.gradient(name)
            if param.grad is None:
                assert found is None or not found.any()
            else:
                assert found is not None
                worst = max(worst, ((found - param.grad).abs().max() / param.grad.abs().max()).item())
        return worst


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("kind", [Adapted, Smooth])
def test_gradients_of_gradients_are_those_of_one_process(
    kind: type[Adapted], rules: dict[str, str], stage: int
) -> None:
    assert max(on_ranks(2, gradients_of, kind, rules, stage)) < 1e-5


class Tagger(nn.Module):
    """Model with split logits whose loss is differentiated twice."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 12)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.body(x)
        loss = F.cross_entropy(self.head(hidden), y)
        (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
        return loss + gradient.pow(2).sum()


def loss_of_split_logits(rule: str) -> float:
    torch.manual_seed(0)
    x, y, model = torch.randn(6, 8), torch.arange(6), Tagger()
    alone = copy.deepcopy(model)
    alone(x, y).backward()
    expected = alone.body.weight.grad
    assert expected is not None
    with partita.initialize(model, {"parallel": {"tensor": 2, "tensor_rules": {"head": rule}}}) as engine:
        engine.backward(engine(x, y))
        found = engine.gradient("body.weight")
        assert found is not None
        return ((found - expected).abs().max() / expected.abs().max()).item()


def test_the_loss_of_split_logits_says_that_it_has_no_second_derivative() -> None:
    with pytest.raises(PartitaError, match=re.escape("set parallel.tensor_rules of the output layer")):
        on_ranks(2, loss_of_split_logits, "vocabulary")
    assert max(on_ranks(2, loss_of_split_logits, "whole")) < 1e-5
