"""Transforms of ``torch.func`` at every stage: vmap, jvp, per-sample gradients, and functional calls."""

import copy

import pytest
import torch
from torch import Tensor, nn

import partita
from partita import PartitaError
from tests.kit import seeds
from tests.kit.models import Stack, inputs, square_loss
from tests.kit.plans import ZERO
from tests.kit.ranks import on_ranks
from tests.kit.training import Recipe, check, rank

_WARNINGS = "parameter .* is read outside|'buffer_pool' .* grows|.torch.jit.script. is deprecated"  # last: by torch


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Stack()

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(self.net)(x)


class Tangent(Mapped):
    """Returns the outputs and their directional derivatives."""

    def forward(self, x: Tensor) -> Tensor:
        out, tangent = torch.func.jvp(self.net, (x,), (torch.ones_like(x),))
        return torch.cat([out, tangent])


class PerSample(Mapped):
    """Adds the squared norms of all per-sample gradients to the output."""

    def forward(self, x: Tensor) -> Tensor:
        def loss(params: dict[str, Tensor], one: Tensor) -> Tensor:
            out: Tensor = torch.func.functional_call(self.net, params, (one[None],))
            return out.square().mean()

        gradients = torch.vmap(torch.func.grad(loss), (None, 0))(dict(self.net.named_parameters()), x)
        return self.net(x) + torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum()


def trains(kind: type[nn.Module]) -> None:
    check(Recipe(kind, ignored=_WARNINGS))


def called_with_other_values() -> None:
    """Check that functional calls with averaged weights have right outputs and do not change training."""
    seeds.start()
    plain = Stack()
    averages = {name: param.detach() + 0.1 for name, param in plain.named_parameters()}
    teacher = copy.deepcopy(plain)
    teacher.load_state_dict(averages)
    with torch.no_grad():
        expected = teacher(inputs(rank(), 0))
    for name, zero in ZERO.items():
        losses = []
        for calls in (False, True):
            with partita.initialize(copy.deepcopy(plain), {"zero": zero}) as engine:
                for step in range(3):
                    if calls:
                        for values in (averages, dict(teacher.named_parameters())):
                            with torch.no_grad():
                                found = torch.func.functional_call(engine.module, values, (inputs(rank(), 0),))
                            assert torch.equal(found, expected), name
                    loss = square_loss(engine, rank(), step)
                    losses.append(loss.item())
                    engine.backward(loss)
                    engine.step()
        assert losses[:3] == losses[3:], name


def replaced_meanwhile() -> None:
    """Check that a functional call of another module does not hide a replaced parameter."""

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.call = inner.__call__
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return self.call(x) * self.scale

    with partita.initialize(Stack(), {}) as engine:
        engine.module.first.weight = nn.Parameter(torch.zeros(1))
        outer = Outer(engine.module)
        with pytest.raises(PartitaError, match=r"'first.weight' was replaced"):
            torch.func.functional_call(outer, {"scale": torch.ones(1)}, (inputs(0, 0),))


@pytest.mark.parametrize("kind", [Mapped, Tangent, PerSample])
def test_transforms_in_forward(kind: type[nn.Module]) -> None:
    on_ranks(2, trains, kind)


def test_functional_call_with_other_values() -> None:
    on_ranks(2, called_with_other_values)


def test_replaced_parameters_are_noticed_in_a_functional_call() -> None:
    on_ranks(1, replaced_meanwhile)
