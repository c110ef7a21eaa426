"""Optimizers that write parameters in train() and eval(), like Schedule-Free: every rank has the written values."""

from typing import Any

import pytest
import torch
from torch import Tensor

import partita
from partita import PartitaError
from tests.kit import seeds
from tests.kit.models import Stack, square_loss
from tests.kit.plans import matrix
from tests.kit.ranks import on_ranks


class Averaged(torch.optim.Optimizer):
    """SGD that keeps a running average of each parameter; ``eval`` and ``train`` swap the parameter and the average."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "train_mode": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["train_mode"]
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state.setdefault("average", param.clone())
                    param.add_(param.grad, alpha=-group["lr"])
                    state["average"].lerp_(param, 0.25)

    def train(self) -> None:
        self._swap(True)

    def eval(self) -> None:
        self._swap(False)

    @torch.no_grad()
    def _swap(self, mode: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != mode:
                group["train_mode"] = mode
                for param in group["params"]:
                    if "average" in (state := self.state[param]):
                        now = param.clone()
                        param.copy_(state["average"])
                        state["average"].copy_(now)


def trained(stage: int, offload: dict[str, str], compute: str) -> tuple[list[Tensor], list[float]]:
    """Train, and return the weights in evaluation mode and the losses, both of this rank."""
    seeds.start(0)
    config = {"zero": {"stage": stage, "offload": offload}, "precision": {"compute": compute}}
    with partita.initialize(Stack(2), config, optimizer=Averaged) as engine:
        losses = []
        for step in range(4):
            loss = square_loss(engine, engine.mesh.rank, step)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if step == 1:
                engine.optimizer.eval()
                engine.optimizer.train()
        engine.optimizer.eval()
        with engine.gathered():
            found = [param.detach().float().clone() for param in engine.module.parameters()]
        state = engine.state_dict()
    dtype = torch.bfloat16 if compute == "bf16" else torch.float32
    for one, other in zip(found if state else (), state.values(), strict=True):
        assert torch.equal(one.to(dtype), other.to(dtype))
    assert "eval" not in vars(engine.optimizer)
    return found, losses


@matrix(stage=[1, 2, 3], offload=[{}, {"optimizer": "host"}])
def test_every_rank_has_the_average(stage: int, offload: dict[str, str]) -> None:
    expected = on_ranks(2, trained, 0, {}, "fp32")
    for (found, losses), (weights, plain) in zip(on_ranks(2, trained, stage, offload, "fp32"), expected, strict=True):
        assert losses == plain
        assert all(torch.equal(one, other) for one, other in zip(found, weights, strict=True))


def test_every_rank_has_the_average_in_half_precision() -> None:
    (first, _), (second, _) = on_ranks(2, trained, 1, {}, "bf16")
    (other, _), _ = on_ranks(2, trained, 3, {}, "bf16")
    assert all(
        torch.equal(one, two) and torch.equal(one, three) for one, two, three in zip(first, second, other, strict=True)
    )


def on_disk() -> None:
    with partita.initialize(
        Stack(2), {"zero": {"stage": 3, "offload": {"optimizer": "disk"}}}, optimizer=Averaged
    ) as engine:
        with pytest.raises(PartitaError, match=r"writes parameters outside its step \(train\(\), eval\(\)\)"):
            engine.optimizer.eval()


def test_weights_on_disk_are_out_of_reach() -> None:
    on_ranks(2, on_disk)
