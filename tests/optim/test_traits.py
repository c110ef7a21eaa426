"""Optimizers that may run on slices: known by name, declared, or tried on small parameters, full and in two halves."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from partita.errors import ConfigError
from partita.optim import traits as module
from partita.optim.traits import check_closure, elementwise, needs_full_parameters


@pytest.fixture(autouse=True)
def own_declarations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Discard the declarations of each test."""
    monkeypatch.setattr(module, "_DECLARED", set(module._DECLARED))


def params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(4, 4))]


def made(kind: Any) -> Optimizer:
    adam = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    settings = {"FusedAdam": adam, "FusedLion": adam, "FusedSGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}}
    optimizer: Optimizer = kind(params(), **settings.get(kind.__name__, {"lr": 0.1}))
    return optimizer


class Scaled(Optimizer):
    """``p -= lr * f(g)``; subclasses override ``f`` (``change``)."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def change(self, grad: torch.Tensor) -> torch.Tensor:
        return grad.sign()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(group["lr"] * self.change(param.grad))


class OverTheNorm(Scaled):
    def change(self, grad: torch.Tensor) -> torch.Tensor:
        return grad / grad.norm()


class RowMeans(Scaled):
    def change(self, grad: torch.Tensor) -> torch.Tensor:
        return grad - grad.mean(1, keepdim=True)


class Required(Scaled):
    """An optimizer with an argument that is not in its defaults."""

    def __init__(self, params: Any, model: nn.Module) -> None:
        super().__init__(params)


class Noisy(Scaled):
    """An optimizer that draws random numbers, as stochastic rounding does."""

    def change(self, grad: torch.Tensor) -> torch.Tensor:
        return grad + torch.randn_like(grad)


class Clipping(Scaled):
    """An optimizer that clips by the norm of all gradients."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 100.0)
        super().step()

    def change(self, grad: torch.Tensor) -> torch.Tensor:
        return grad


class LearnedStep(Scaled):
    """An optimizer that learns its step size from all parameters together, like Prodigy and D-Adaptation."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        moved = 0.0
        for group in self.param_groups:
            for param in group["params"]:
                start = self.state[param].setdefault("start", param.clone())
                moved += float(((start - param) * param.grad).sum())
        self.defaults["lr"] = max(self.defaults["lr"], 1e-3 * moved)
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(self.defaults["lr"] * param.grad.sign())


class Projecting(Scaled):
    """An optimizer that removes radial changes of matrices whose gradient is orthogonal to the rows (AdamP)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                change = param.grad.sign()
                if (
                    param.dim() > 1
                    and (param * param.grad).sum(1).abs().max() < 1e-3 * param.norm() * param.grad.norm()
                ):
                    change = change - param * (change * param).sum() / param.square().sum()
                param.sub_(group["lr"] * change)


class SmallStatesOfLarge(Scaled):
    """An optimizer that rounds gradients of large parameters to 8 bits, as 8-bit optimizers round their states."""

    def change(self, grad: torch.Tensor) -> torch.Tensor:
        if grad.numel() < 4096:
            return grad
        return (grad / grad.abs().max() * 127).round() / 127 * grad.abs().max()


class WithModes(Scaled):
    """An optimizer that steps only in training mode (Schedule-Free)."""

    training = False

    def train(self) -> None:
        self.training = True

    def eval(self) -> None:
        self.training = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert self.training
        super().step()


class Wrapping(Optimizer):
    """An optimizer that steps another optimizer and shares its groups (Lookahead)."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, inner.defaults)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


class PassingOn(torch.optim.AdamW):
    """A subclass that passes all arguments to its base."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        super().step()


class StatesFromTheStart(Scaled):
    """An optimizer that creates its states in ``__init__``."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["average"] = torch.zeros_like(param)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(group["lr"] * self.state[param]["average"].lerp_(param.grad, 0.1))


class Ascending(Scaled):
    """An optimizer that requires a closure, although the argument has a default (SAM)."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None
        closure()
        super().step()


DIFFERS = "in a trial its result differs if each of two ranks has half of the "
NEEDS_CLOSURE = r"evaluates the loss in its step \(step\(closure\)\), and needs all parameters for it"


def message(kind: type[Optimizer], reason: str) -> str:
    return (
        f"optimizer {kind.__name__} cannot run on some of the parameters: {reason}. Use an optimizer that updates "
        "parameters independently of each other, such as AdamW, or zero.stage 0 without parallel axes and offload "
        "(every rank then updates all parameters)"
    )


@pytest.mark.parametrize(
    "kind", sorted(module._ELEMENTWISE, key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__
)
def test_known_classes(kind: Any) -> None:
    assert not needs_full_parameters(made(kind))


ELEMENTWISE = sorted(
    (kind for kind in module._ELEMENTWISE if "tests" not in kind.__module__), key=lambda kind: kind.__name__
)


@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_known_classes_are_elementwise(kind: Any) -> None:
    assert module._trial(made(kind)) is None


NEED_FULL = [OverTheNorm, RowMeans, Projecting, SmallStatesOfLarge, torch.optim.Adafactor, torch.optim.Muon]


@pytest.mark.parametrize("kind", NEED_FULL)
def test_statistics_of_a_parameter_need_all_of_it(kind: Any) -> None:
    assert needs_full_parameters(kind(params()))
    assert not needs_full_parameters(kind(params()), cuts=False)


@pytest.mark.parametrize("kind", [OverTheNorm, Projecting, torch.optim.Adafactor])
def test_a_declaration_that_the_trial_refutes_is_an_error(kind: Any) -> None:
    elementwise(kind)
    with pytest.raises(ConfigError, match=rf"{kind.__name__} was declared by partita.elementwise\(.*, but .*: remove"):
        needs_full_parameters(kind(params()))


def test_a_step_without_parameters_must_work() -> None:
    class Unguarded(OverTheNorm):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            torch.stack([param.grad for group in self.param_groups for param in group["params"]][:1])  # type: ignore[misc]
            super().step()

    with pytest.raises(ConfigError, match=r"Unguarded .* fails on a rank without parameters \(RuntimeError: stack"):
        needs_full_parameters(Unguarded(params()))
    assert not needs_full_parameters(Unguarded(params()), cuts=False)


def test_a_class_of_the_users_own_is_tried() -> None:
    assert not needs_full_parameters(Scaled(params()))


@pytest.mark.parametrize("kind", [Clipping, LearnedStep])
@pytest.mark.parametrize("cuts", [True, False])
def test_statistics_of_all_parameters_are_refused(kind: Any, cuts: bool) -> None:
    with pytest.raises(ConfigError) as caught:
        needs_full_parameters(kind(params()), cuts=cuts)
    assert str(caught.value) == message(kind, f"{DIFFERS}parameters")


def test_sparse_gradients_are_refused() -> None:
    for cuts in (True, False):
        with pytest.raises(ConfigError, match="SparseAdam cannot run on some of the parameters: it works on sparse"):
            needs_full_parameters(torch.optim.SparseAdam(params()), cuts=cuts)


@pytest.mark.parametrize("kind", [WithModes, PassingOn, StatesFromTheStart])
def test_elementwise_however_it_is_written(kind: Any) -> None:
    optimizer = kind(params())
    assert not needs_full_parameters(optimizer)
    assert not any(optimizer.__dict__.get(name) for name in ("training", "calls"))


def test_a_wrapped_optimizer_is_tried_with_it() -> None:
    inner = Scaled(params())
    assert not needs_full_parameters(Wrapping(inner))
    assert inner.param_groups[0]["params"][0].shape == (4, 4)
    assert needs_full_parameters(Wrapping(OverTheNorm(params())))
    with pytest.raises(ConfigError, match=f"optimizer Wrapping cannot run .*: {DIFFERS}parameters"):
        needs_full_parameters(Wrapping(Clipping(params())))


def test_a_rate_of_zero_in_a_warm_up_hides_nothing() -> None:
    optimizer = OverTheNorm(params(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0
    assert needs_full_parameters(optimizer)


@pytest.mark.filterwarnings("ignore:.*LBFGS")
@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Ascending])
def test_one_that_needs_a_closure_is_refused(kind: Any) -> None:
    for check in (needs_full_parameters, check_closure):
        with pytest.raises(ConfigError, match=NEEDS_CLOSURE):
            check(kind(params()))
    check_closure(Scaled(params()))


def test_arguments_that_the_defaults_do_not_tell() -> None:
    assert not needs_full_parameters(Required(params(), nn.Linear(2, 2)))


def test_one_that_cannot_be_tried_is_refused_until_it_is_declared() -> None:
    with pytest.raises(ConfigError, match=r"Noisy cannot run .*draws random .*declare that with partita.elementwise"):
        needs_full_parameters(Noisy(params()))
    assert elementwise(Noisy) is Noisy
    assert not needs_full_parameters(Noisy(params()))


def test_a_subclass_that_keeps_the_step_is_known_whoever_is_made_first() -> None:
    """The order of creation does not matter, although torch wraps the step of the class that is instantiated first."""

    @elementwise
    class Base(Noisy):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)

    class Derived(Base):
        def __init__(self, params: Any, model: nn.Module) -> None:
            super().__init__(params)

    assert not needs_full_parameters(Derived(params(), nn.Linear(2, 2)))
    assert not needs_full_parameters(Base(params()))
    assert not needs_full_parameters(Derived(params(), nn.Linear(2, 2)))


def test_a_subclass_with_a_step_of_its_own_is_tried() -> None:
    class Normed(SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for param in group["params"]:
                    param.grad = param.grad / param.grad.norm()
            super().step()

    class Halved(SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for param in group["params"]:
                    param.grad = param.grad / 2
            super().step()

    assert not needs_full_parameters(Halved(params(), lr=0.1))
    assert needs_full_parameters(Normed(params(), lr=0.1))


def test_a_subclass_of_one_that_needs_whole_parameters() -> None:
    class Mine(torch.optim.Adafactor):
        pass

    assert needs_full_parameters(Mine(params()))


def test_the_trial_leaves_the_optimizer_and_the_random_numbers_alone() -> None:
    optimizer = Scaled(params(), lr=0.5)
    assert not needs_full_parameters(optimizer)
    assert optimizer.param_groups[0]["params"][0].tolist() == [[1.0] * 4] * 4
    assert not optimizer.state
    before = torch.get_rng_state()
    with pytest.raises(ConfigError, match="Noisy"):
        needs_full_parameters(Noisy(params()))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_trial_uses_the_optimizers_settings() -> None:
    class Sometimes(Scaled):
        """Elementwise unless ``lr`` is large."""

        def change(self, grad: torch.Tensor) -> torch.Tensor:
            return grad / grad.norm() if self.defaults["lr"] > 1 else grad

    assert not needs_full_parameters(Sometimes(params(), lr=0.5))
    assert needs_full_parameters(Sometimes(params(), lr=2.0))


def test_the_trial_uses_the_settings_of_every_group() -> None:
    class OfTheGroup(Scaled):
        """Elementwise if the group has no weight decay."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        ratio = param.norm() if group.get("weight_decay") else 1.0
                        param.sub_(group["lr"] * ratio * param.grad)

    one, other, decay = params(), params(), {"weight_decay": 0.1}
    assert not needs_full_parameters(OfTheGroup([{"params": one}, {"params": other, "lr": 0.5}]))
    assert needs_full_parameters(OfTheGroup([{"params": one}, {"params": other, **decay}]))


def test_adam_with_every_option() -> None:
    for options in ({"amsgrad": True}, {"weight_decay": 0.1}, {"maximize": True}, {"foreach": True}, {"fused": True}):
        assert not needs_full_parameters(Adam(params(), **options))
        assert module._trial(Adam(params(), **options)) is None
