"""Which optimizers may run on slices: known by name, declared, or tried on a small matrix whole and in two halves."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from partita.errors import ConfigError
from partita.optim import traits as module
from partita.optim.onebit_lamb import OnebitLamb
from partita.optim.traits import check_elementwise, elementwise


@pytest.fixture(autouse=True)
def own_declarations(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test declares is forgotten after it."""
    monkeypatch.setattr(module, "_ELEMENTWISE", set(module._ELEMENTWISE))


def params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(4, 4))]


def made(kind: Any) -> Optimizer:
    adam = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    settings = {"FusedAdam": adam, "FusedLion": adam, "FusedSGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}}
    optimizer: Optimizer = kind(params(), **settings.get(kind.__name__, {"lr": 0.1}))
    return optimizer


class Scaled(Optimizer):
    """``p -= lr * f(g)``; ``f`` is for the classes below."""

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
    """Its arguments cannot be read from its defaults."""

    def __init__(self, params: Any, model: nn.Module) -> None:
        super().__init__(params)


def message(kind: type[Optimizer], reason: str) -> str:
    return (
        f"optimizer {kind.__name__} cannot run on slices of parameters: {reason}. Use zero.stage 0 (it keeps "
        "parameters whole), an elementwise optimizer such as AdamW, or declare the class with partita.elementwise"
    )


@pytest.mark.parametrize(
    "kind", sorted(module._ELEMENTWISE, key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__
)
def test_known_classes(kind: Any) -> None:
    check_elementwise(made(kind))


@pytest.mark.parametrize(
    "kind", sorted(module._ELEMENTWISE - {OnebitLamb}, key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__
)
def test_known_classes_are_elementwise(kind: Any) -> None:
    assert module._trial(made(kind)) is None


def test_a_trust_ratio_is_elementwise_only_once_it_is_told() -> None:
    """By itself it measures what it has; on slices the ranks add up what they have (optim/trust)."""
    assert module._trial(made(OnebitLamb)) == "on a small matrix its result differs when the matrix is cut in two"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("LBFGS", "it searches along a line through all parameters together"),
        ("Adafactor", "it keeps row and column means of each matrix"),
        ("Muon", "it orthogonalizes each matrix"),
        ("SparseAdam", "it works on sparse gradients"),
    ],
)
def test_known_to_need_whole_parameters(name: str, reason: str) -> None:
    kind = getattr(torch.optim, name)
    with pytest.raises(ConfigError) as caught:
        check_elementwise(kind(params()))
    assert str(caught.value) == message(kind, reason)


def test_a_class_of_the_users_own_is_tried() -> None:
    check_elementwise(Scaled(params()))


def test_one_that_looks_at_whole_parameters_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        check_elementwise(OverTheNorm(params()))
    assert str(caught.value) == message(
        OverTheNorm, "on a small matrix its result differs when the matrix is cut in two"
    )


def test_one_that_needs_a_shape_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"a trial on slices of a small matrix raised IndexError: Dimension out of range"
    ):
        check_elementwise(RowMeans(params()))


def test_one_that_cannot_be_tried_is_refused_until_it_is_declared() -> None:
    optimizer = Required(params(), nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"Required cannot run on slices of parameters: a trial .* raised TypeError"):
        check_elementwise(optimizer)
    assert elementwise(Required) is Required
    check_elementwise(optimizer)


def test_declared_as_a_decorator() -> None:
    @elementwise
    class Declared(OverTheNorm):
        pass

    check_elementwise(Declared(params()))


def test_a_subclass_that_keeps_the_step_is_known_whoever_is_made_first() -> None:
    """torch wraps the step of the class whose object is made first."""

    @elementwise
    class Base(Scaled):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)

    class Derived(Base):
        def __init__(self, params: Any, model: nn.Module) -> None:
            super().__init__(params)

    check_elementwise(Derived(params(), nn.Linear(2, 2)))
    check_elementwise(Base(params()))
    check_elementwise(Derived(params(), nn.Linear(2, 2)))


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

    check_elementwise(Halved(params(), lr=0.1))
    with pytest.raises(ConfigError, match="optimizer Normed cannot run on slices"):
        check_elementwise(Normed(params(), lr=0.1))


def test_a_subclass_of_one_that_needs_whole_parameters() -> None:
    class Mine(torch.optim.Adafactor):
        pass

    with pytest.raises(ConfigError, match=r"optimizer Mine .*: it keeps row and column means of each matrix"):
        check_elementwise(Mine(params()))


def test_the_trial_leaves_the_optimizer_and_the_random_numbers_alone() -> None:
    class Noisy(Scaled):
        def change(self, grad: torch.Tensor) -> torch.Tensor:
            return grad + torch.randn_like(grad)

    optimizer = Scaled(params(), lr=0.5)
    check_elementwise(optimizer)
    assert optimizer.param_groups[0]["params"][0].tolist() == [[1.0] * 4] * 4
    assert not optimizer.state
    before = torch.get_rng_state()
    with pytest.raises(ConfigError, match="Noisy"):
        check_elementwise(Noisy(params()))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_trial_uses_the_optimizers_settings() -> None:
    class Sometimes(Scaled):
        """Elementwise unless ``lr`` is large."""

        def change(self, grad: torch.Tensor) -> torch.Tensor:
            return grad / grad.norm() if self.defaults["lr"] > 1 else grad

    check_elementwise(Sometimes(params(), lr=0.5))
    with pytest.raises(ConfigError, match="Sometimes"):
        check_elementwise(Sometimes(params(), lr=2.0))


def test_the_trial_uses_the_settings_of_every_group() -> None:
    class OfTheGroup(Scaled):
        """Elementwise where the group has no decay."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        ratio = param.norm() if group.get("weight_decay") else 1.0
                        param.sub_(group["lr"] * ratio * param.grad)

    one, other, decay = params(), params(), {"weight_decay": 0.1}
    check_elementwise(OfTheGroup([{"params": one}, {"params": other, "lr": 0.5}]))
    with pytest.raises(ConfigError, match="OfTheGroup"):
        check_elementwise(OfTheGroup([{"params": one}, {"params": other, **decay}]))


def test_adam_with_every_option() -> None:
    for options in ({"amsgrad": True}, {"weight_decay": 0.1}, {"maximize": True}, {"foreach": True}, {"fused": True}):
        check_elementwise(Adam(params(), **options))
        assert module._trial(Adam(params(), **options)) is None
