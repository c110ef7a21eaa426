"""Optimizers that evaluate the loss in their step: every evaluation sees the ranks' mean loss and mean gradients."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import partita
from partita import ConfigError, PartitaError
from tests.kit import seeds
from tests.kit.models import Stack, square_loss
from tests.kit.ranks import on_ranks
from tests.kit.training import rank, whole_weights, world

STEPS = 3
STAGE_0: dict[str, Any] = {"zero": {"stage": 0}}


class Ascending(Optimizer):
    """Sharpness-aware minimization (Foret et al., 2020, algorithm 1): the gradient at the worst point nearby."""

    def __init__(self, params: Any, base: type[Optimizer] = torch.optim.SGD, rho: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is not None
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        norm = torch.stack([param.grad.norm() for param in params]).norm() + 1e-12
        for param in params:
            self.state[param]["before"] = param.clone()
            param.add_(param.grad, alpha=float(self.param_groups[0]["rho"] / norm))
        self.zero_grad()
        torch.enable_grad()(closure)()
        for param in params:
            param.copy_(self.state[param]["before"])
        self.base.step()


def lbfgs(params: Any, lr: float = 0.2, **options: Any) -> Optimizer:
    return torch.optim.LBFGS(params, lr=lr, max_iter=4, history_size=3, **options)


MAKE: dict[str, Callable[[Any], Optimizer]] = {
    "lbfgs": lbfgs,
    "lbfgs with a line search": lambda params: lbfgs(params, 1.0, line_search_fn="strong_wolfe"),
    "sam": lambda params: Ascending(params, lr=0.1, momentum=0.9),
}


def losses_of(model: nn.Module, number: int, ranks: range) -> Tensor:
    return torch.stack([square_loss(model, each, number) for each in ranks]).mean()


def plain(name: str, num_ranks: int, start: int, nudge: float = 0.0) -> dict[str, Tensor]:
    """Train one process on all ranks' samples; return the weights. ``nudge``: relative change of initial weights."""
    seeds.start(start)
    model = Stack(2)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1 + nudge)
    optimizer = MAKE[name](model.parameters())
    for number in range(STEPS):

        def closure(number: int = number) -> Tensor:
            optimizer.zero_grad()
            loss = losses_of(model, number, range(num_ranks))
            loss.backward()
            return loss

        if name == "sam":
            closure()
        optimizer.step(closure)
    return {key: param.detach() for key, param in model.named_parameters()}


def stable_start(name: str, num_ranks: int) -> int:
    """Return the first seed for which rounding changes no decision of a line search."""
    for start in range(10):
        expected = plain(name, num_ranks, start)
        others = (plain(name, num_ranks, start, nudge) for nudge in (1e-6, -1e-6))
        if all(float((other[key] - value).abs().max()) < 1e-4 for other in others for key, value in expected.items()):
            return start
    raise AssertionError("the weights depend on rounding with all of these numbers")


def steps(engine: partita.Engine, name: str, numbers: range = range(STEPS)) -> None:
    for number in numbers:

        def closure(number: int = number) -> Tensor:
            engine.optimizer.zero_grad()
            loss = square_loss(engine.module, rank(), number)
            engine.backward(loss)
            return loss

        if name == "sam":
            closure()
        result = engine.step(closure)
        assert result.stepped
        assert result.grad_norm is not None
        assert result.grad_norm > 0


def trained(name: str, config: Mapping[str, Any]) -> float:
    """Train with an engine; return the largest difference from the weights of one process."""
    start = stable_start(name, world())
    expected = plain(name, world(), start)
    seeds.start(start)
    model = Stack(2)
    with partita.initialize(model, dict(config), optimizer=MAKE[name]) as engine:
        steps(engine, name)
        found = whole_weights(engine)
        return max(float((found[key] - value).abs().max()) for key, value in expected.items())


@pytest.mark.filterwarnings("ignore:.*LBFGS")
@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_weights_are_those_of_one_process_on_all_samples(name: str, num_ranks: int) -> None:
    assert max(on_ranks(num_ranks, trained, name, STAGE_0)) < 1e-5


@pytest.mark.filterwarnings("ignore:.*LBFGS")
def test_bf16_parameters_follow_fp32_weights() -> None:
    assert max(on_ranks(2, trained, "lbfgs", STAGE_0 | {"precision": {"compute": "bf16"}})) < 0.05


def once() -> None:
    """Check that an optimizer that needs no closure uses the gradients of one evaluation, at stages 0 and 3."""
    for stage in (0, 3):
        weights = []
        for by_closure in (False, True):
            seeds.start()
            model = Stack(2)
            with partita.initialize(model, {"zero": {"stage": stage}, "optimizer": {"lr": 0.01}}) as engine:

                def closure(engine: partita.Engine = engine) -> Tensor:
                    loss = square_loss(engine.module, rank(), 0)
                    engine.backward(loss)
                    return loss

                if by_closure:
                    engine.step(closure)
                else:
                    closure()
                    engine.step()
                weights.append(whole_weights(engine))
        assert all(torch.equal(weights[1][key], value) for key, value in weights[0].items())


def test_other_optimizers_evaluate_once() -> None:
    on_ranks(2, once)


def refused() -> None:
    for config in ({"zero": {"stage": 1}}, {"parallel": {"pipeline": 2}}):
        with pytest.raises(ConfigError, match="optimizer LBFGS evaluates the loss in its step .* zero.stage to 0"):
            partita.initialize(Stack(2), config, optimizer=lbfgs)
    with partita.initialize(Stack(2), STAGE_0 | {"batch": {"accumulate": 2}}, optimizer=lbfgs) as engine:
        with pytest.raises(PartitaError, match=r"evaluates the loss of a full batch; set batch.accumulate: 1"):
            engine.step(lambda: 0.0)
    with partita.initialize(Stack(2), STAGE_0, optimizer=lbfgs) as engine:
        with pytest.raises(PartitaError, match=r"engine.step\(closure\): no parameter has a gradient on any rank"):
            engine.step(lambda: 0.0)
        before = whole_weights(engine)
        engine.backward(square_loss(engine.module, rank(), 0))
        with pytest.raises(PartitaError, match=r"LBFGS evaluates the loss in its step: call engine.step\(closure\)"):
            engine.step()
        engine.zero_grad()

        def broken() -> Tensor:
            loss = square_loss(engine.module, rank(), 0) * float("nan")
            engine.backward(loss)
            return loss

        with pytest.raises(PartitaError, match=r"the gradient of '.*' is not finite .* cannot be skipped"):
            engine.step(broken)
        assert all(torch.equal(value, before[key]) for key, value in whole_weights(engine).items())
        steps(engine, "lbfgs")


@pytest.mark.filterwarnings("ignore:.*LBFGS")
def test_what_is_refused() -> None:
    on_ranks(2, refused)


def saved(name: str, folder: Path) -> None:
    with partita.initialize(Stack(2), STAGE_0, optimizer=MAKE[name]) as engine:
        with pytest.raises(PartitaError, match=r"evaluates the loss in its step, so .* which states it keeps"):
            engine.save(folder)
        state = engine.state_dict()
        assert rank() or state.keys() == dict(engine.module.named_parameters()).keys()


@pytest.mark.filterwarnings("ignore:.*LBFGS")
@pytest.mark.parametrize("name", ["lbfgs", "sam"])
def test_checkpoints_that_would_lack_states_are_refused(name: str, tmp_path: Path) -> None:
    on_ranks(2, saved, name, tmp_path)
