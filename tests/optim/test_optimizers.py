"""Elementwise optimizers, passed in any form, train as on full parameters; ones that combine parameters are refused."""

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

import partita
from partita import ConfigError, PartitaError
from partita.optim import traits
from tests.kit import seeds
from tests.kit.models import WIDTH, Stack, square_loss
from tests.kit.plans import ZERO, matrix
from tests.kit.ranks import on_ranks
from tests.kit.training import rank, train_engine, train_module, whole_weights, world

SHARDED = {name: zero for name, zero in ZERO.items() if zero["stage"]}
Make = Callable[[Iterable[Any]], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam amsgrad": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True, eps=1e-3),
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True, eps=1e-3),
    "adamw for": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=False, eps=1e-3),
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True, eps=1e-3),
    "adamw maximize": lambda params: torch.optim.AdamW(params, lr=0.01, maximize=True, eps=1e-3),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5, centered=True, eps=1e-3),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05, eps=1e-3),
    "adadelta": lambda params: torch.optim.Adadelta(params, lr=0.5, eps=1e-3),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01, eps=1e-3),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.001),
    "own": lambda params: Signed(params, lr=0.01, momentum=0.9),
}


class Signed(Optimizer):
    """A user-defined elementwise optimizer: Lion (Chen et al., 2023) without its second average."""

    def __init__(self, params: Any, lr: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    average = self.state[param].setdefault("average", torch.zeros_like(param))
                    average.mul_(group["momentum"]).add_(param.grad)
                    param.add_(average.sign(), alpha=-group["lr"])


class NormalizedStep(Optimizer):
    """A user-defined optimizer that divides by the norm of each parameter's gradient."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad / (param.grad.norm() + 1e-6), alpha=-group["lr"])


class Rounding(Signed):
    """A variant that draws random numbers."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        torch.rand(1)
        super().step(closure)


class ClippingAll(NormalizedStep):
    """A user-defined optimizer that divides by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for param in params:
            param.add_(param.grad / norm, alpha=-0.1)


class Counting(Optimizer):
    """A user-defined Adam that counts its steps in attributes, as a number and as a tensor, and in its groups."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "k": 0})
        self.t, self.power = 0, torch.ones(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.t += 1
        self.power *= 0.999
        for group in self.param_groups:
            group["k"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if not state:
                        state["m"], state["v"] = torch.zeros_like(param), torch.zeros_like(param)
                    state["m"].lerp_(param.grad, 0.1)
                    state["v"].mul_(0.999).addcmul_(param.grad, param.grad, value=0.001)
                    root = (state["v"] / (1 - self.power)).sqrt() + 1e-3
                    param.sub_(group["lr"] * (state["m"] / (1 - 0.9**self.t)) / root)


class Listing(Counting):
    """A variant that keeps a list of its steps in an attribute."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.steps: list[int] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.steps.append(self.t)


COUNTED: dict[str, dict[str, Any]] = {
    "device": {"zero": {"stage": 1}},
    "host": {"zero": {"stage": 1, "offload": {"optimizer": "host"}}},
    "disk": {"zero": {"stage": 3, "offload": {"optimizer": "disk"}}},
    "in backward": {"zero": {"stage": 2}, "precision": {"gradients": "in_backward"}},
}


def counts_right(plan: str, hooks: bool, folder: Path) -> None:
    """Check that counters advance once per step wherever the update runs, and are restored from a checkpoint."""

    def trained(plan: str, stops: bool) -> dict[str, Tensor]:
        for first, last in ((0, 3), (3, 5)) if stops else ((0, 5),):
            seeds.start()
            model = Stack(2)
            optimizer = Counting(model.parameters())
            if hooks:
                optimizer.register_step_post_hook(lambda *_: None)
            with partita.initialize(model, COUNTED[plan], optimizer=optimizer) as engine:
                assert optimizer.t == 0
                assert optimizer.power == 1
                if first:
                    engine.load(folder)
                for step in range(first, last):
                    engine.backward(square_loss(engine, rank(), step))
                    assert engine.step().stepped
                    if stops:
                        engine.zero_grad()  # an additional zero_grad() loses no count
                weights = whole_weights(engine)
                assert (optimizer.t, optimizer.param_groups[0]["k"]) == (last, last)
                if stops:
                    engine.save(folder)
        return weights

    expected = trained("device", False)
    for found in (trained(plan, False), trained(plan, True)):
        assert all(torch.equal(value, expected[name]) for name, value in found.items())


def keeps_a_list() -> str:
    for name, config in COUNTED.items():
        model = Stack(1)
        if name == "device":
            with (
                pytest.warns(UserWarning, match="changes 'steps' .a list.* checkpoints do not save it"),
                partita.initialize(model, config, optimizer=Listing(model.parameters())) as engine,
            ):
                assert engine.optimizer.steps == []  # type: ignore[attr-defined]
        else:
            with pytest.raises(ConfigError) as raised:
                partita.initialize(model, config, optimizer=Listing(model.parameters()))
    return str(raised.value)


def adafactor(folder: Path, stage: int) -> None:
    """Check that states with shapes other than the parameter's are saved in full and restored."""
    config = {"zero": {"stage": stage}}

    def engine_of() -> partita.Engine:
        seeds.start()
        return partita.initialize(Stack(2), config, optimizer=torch.optim.Adafactor)

    def steps(engine: partita.Engine, *numbers: int) -> None:
        for step in numbers:
            engine.backward(square_loss(engine, rank(), step))
            assert engine.step().stepped

    with engine_of() as engine:
        steps(engine, 0, 1)
        engine.save(folder)
        steps(engine, 2, 3)
        expected, states = whole_weights(engine), engine.optimizer_state("first.weight")
    assert states["row_var"].shape == (16, 1)
    with engine_of() as engine:
        engine.load(folder)
        steps(engine, 2, 3)
        assert all(torch.equal(value, expected[name]) for name, value in whole_weights(engine).items())
        assert torch.equal(engine.optimizer_state("first.weight")["row_var"], states["row_var"])


def state_added_later(config: Mapping[str, Any], make: Make | None, setting: Mapping[str, Any]) -> dict[str, Tensor]:
    seeds.start()
    with partita.initialize(Stack(1), config, optimizer=make) as engine:
        for step in range(4):
            if step == 1:
                engine.optimizer.param_groups[0].update(setting)
            engine.backward(square_loss(engine, rank(), step))
            engine.step()
        return whole_weights(engine)


def momentum_added_later() -> None:
    """Check that SGD from the config, with momentum added after the first step, trains like torch's SGD."""
    sgd, bf16 = {"name": "sgd", "lr": 0.1, "weight_decay": 0.0}, {"compute": "bf16"}
    expected = state_added_later({"precision": bf16}, lambda params: torch.optim.SGD(params, 0.1), {"momentum": 0.9})
    for offload in ("none", "disk"):
        config = {"precision": bf16, "optimizer": sgd, "zero": {"offload": {"optimizer": offload}}}
        found = state_added_later(config, None, {"momentum": 0.9})
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-2, atol=1e-3, msg=name)


class Alternates(nn.Module):
    """A model that uses a different layer in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: Tensor, used: int) -> Tensor:
        return self.layers[used](x)


def first_gradient_later() -> None:
    """Check the config's SGD with momentum if each layer gets its first gradient in a different step."""
    batches = [torch.randn(4, WIDTH, generator=seeds.generator(step)) for step in range(6)]
    seeds.start()
    plain = Alternates()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step, x in enumerate(batches):
        optimizer.zero_grad()
        plain(x, step % 3).square().mean().backward()
        optimizer.step()
    config = {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.0}}
    for name, zero in ZERO.items():
        seeds.start()
        with partita.initialize(Alternates(), {**config, "zero": zero}) as engine:
            for step, x in enumerate(batches):
                engine.backward(engine(x, step % 3).square().mean())
                engine.step()
            found = whole_weights(engine)
        for key, value in plain.state_dict().items():
            torch.testing.assert_close(found[key], value, msg=f"plan {name}: {key}")


def amsgrad_added_later(offload: str) -> None:
    config = {"zero": {"offload": {"optimizer": offload}}}
    with pytest.raises(PartitaError, match="optimizer Adam: its step found no state 'max_exp_avg_sq'"):
        state_added_later(config, lambda params: torch.optim.Adam(params), {"amsgrad": True})


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return parameter groups with learning rates and weight decay by kind of parameter."""
    named = dict(model.named_parameters())
    return [
        {"params": [p for name, p in named.items() if "norm" in name], "lr": 0.003, "weight_decay": 0.0},
        {"params": [p for name, p in named.items() if name.endswith("bias") and "norm" not in name], "lr": 0.02},
        {"params": [p for name, p in named.items() if name.endswith("weight") and "norm" not in name]},
    ]


def train_plain(make: Callable[[nn.Module], Optimizer], num_steps: int = 3) -> dict[str, Tensor]:
    seeds.start()
    model = Stack(3)
    found = train_module(model, square_loss, num_steps, num_data=world(), own=None, optimizer=lambda _: make(model))
    return found.weights


def train(
    zero: Mapping[str, Any], make: Callable[[nn.Module], Any], num_steps: int = 3, **more: Any
) -> dict[str, Tensor]:
    seeds.start()
    model = Stack(3)
    with partita.initialize(model, {"zero": zero}, optimizer=make(model), **more) as engine:
        assert isinstance(engine.optimizer, Optimizer)
        found = train_engine(engine, square_loss, num_steps, keep=())
        assert all(found.stepped)
        return found.weights


def compare(
    make: Callable[[nn.Module], Any], plain: Callable[[nn.Module], Optimizer], plans: Iterable[str] = tuple(ZERO)
) -> None:
    expected, results = train_plain(plain), [train(ZERO[plan], make) for plan in plans]
    for weights in results:
        for name, value in weights.items():
            assert torch.equal(value, results[0][name]), name
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5, msg=name)


def given(name: str, how: str, plan: str) -> None:
    make, plans = OPTIMIZERS[name], ("0", plan)
    if how == "instance":
        compare(lambda model: make(model.parameters()), lambda model: make(model.parameters()), plans)
    elif how == "callable":
        compare(lambda model: make, lambda model: make(model.parameters()), plans)
    else:
        compare(lambda model: make(groups_of(model)), lambda model: make(groups_of(model)), plans)


def from_config(section: Mapping[str, Any], plan: str) -> None:
    results = []
    for name in ("0", plan):
        seeds.start()
        with partita.initialize(Stack(3), {"zero": ZERO[name], "optimizer": section}) as engine:
            for step in range(3):
                engine.backward(square_loss(engine, rank(), step))
                engine.step()
            results.append(whole_weights(engine))
    kinds = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
    options = {key: value for key, value in section.items() if key != "name"}
    expected = train_plain(lambda model: kinds[section["name"]](model.parameters(), **options))
    for weights in results:
        for name, value in weights.items():
            assert torch.equal(value, results[0][name]), name
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5, msg=name)


def with_state() -> None:
    """Check that an optimizer that has already taken steps keeps its state."""

    def used(model: nn.Module) -> Optimizer:
        optimizer = torch.optim.AdamW(groups_of(model), lr=0.01, eps=1e-3)
        for step in range(2):
            optimizer.zero_grad()
            square_loss(model, 0, 100 + step).backward()
            optimizer.step()
        optimizer.zero_grad()
        return optimizer

    compare(used, used)
    for zero in SHARDED.values():
        seeds.start()
        model = Stack(3)
        with partita.initialize(model, {"zero": zero}, optimizer=used(model)) as engine:
            held = sum(value.numel() for state in engine.optimizer.state.values() for value in state.values())
        elements = sum(param.numel() for param in model.parameters())
        assert held < 1.5 * elements, "of two moments for each element, this rank holds half"


def with_state_under_tensor() -> None:
    """Check that each rank keeps its part of the state, and trains like plain PyTorch with the full state."""

    def used() -> tuple[nn.Module, Optimizer]:
        seeds.start()
        model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
        square_loss(model, 0, 100).backward()
        optimizer.step()
        optimizer.zero_grad()
        return model, optimizer

    plain, optimizer = used()
    for step in range(3):
        square_loss(plain, 0, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    model, optimizer = used()
    with partita.initialize(model, {"parallel": {"tensor": 2}}, optimizer=optimizer) as engine:
        with torch._C.DisableTorchFunctionSubclass():  # otherwise split parameters report their full shape
            own = sum(param.numel() for param in model.parameters())
        assert own < sum(param.numel() for param in plain.parameters())
        for step in range(3):
            engine.backward(square_loss(engine, 0, step))
            engine.step()
        weights = whole_weights(engine)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(weights[name], param.detach(), rtol=1e-4, atol=1e-6, msg=name)


def with_state_under_pipeline() -> None:
    """Check that the optimizer keeps no parameters or states of other stages, which would take memory."""
    model = Stack(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    square_loss(model, 0, 100).backward()
    optimizer.step()
    optimizer.zero_grad()
    with partita.initialize(model, {"parallel": {"pipeline": 2}}, optimizer=optimizer):
        own = {param for group in optimizer.param_groups for param in group["params"]}
        assert 0 < len(own) < len(list(model.parameters()))
        assert set(optimizer.state) == own


def part_of_the_model() -> None:
    """Check that parameters in no group are not updated."""

    def some(model: nn.Module) -> Optimizer:
        return torch.optim.AdamW([p for name, p in model.named_parameters() if "blocks" in name], lr=0.01, eps=1e-3)

    compare(some, some)


def group_added_later() -> None:
    results = []
    for zero in ZERO.values():
        seeds.start()
        model = Stack(3)
        optimizer = torch.optim.AdamW(model.blocks.parameters(), lr=0.01, eps=1e-3)
        with partita.initialize(model, {"zero": zero}, optimizer=optimizer) as engine:
            for step in range(3):
                if step == 1:
                    engine.optimizer.add_param_group({"params": list(model.last.parameters()), "lr": 0.1})
                before = whole_weights(engine)["last.weight"]
                engine.backward(square_loss(engine, rank(), step))
                result = engine.step()
                assert torch.equal(before, whole_weights(engine)["last.weight"]) == (step == 0)
                assert result.lr == ((0.01,) if step == 0 else (0.01, 0.1))
            results.append(whole_weights(engine))
    assert all(torch.equal(value, results[0][name]) for weights in results for name, value in weights.items())


def group_added_twice() -> None:
    for zero in ZERO.values():
        with partita.initialize(Stack(1), {"zero": zero}) as engine:
            engine.optimizer.add_param_group({"params": [engine.module.first.weight]})
            engine.backward(square_loss(engine, rank(), 0))
            with pytest.raises(
                ConfigError, match=r"group 1 contains 'first.weight', which is also in an earlier group"
            ):
                engine.step()


def hooks_of_the_optimizer() -> None:
    """Check that the user's hooks on the optimizer run once per step."""
    calls = []
    model = Stack(2)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    with partita.initialize(model, {"zero": {"stage": 3}}, optimizer=optimizer) as engine:
        for step in range(2):
            engine.backward(square_loss(engine, rank(), step))
            engine.step()
    assert calls == ["before", "after"] * 2


def combines_parameters() -> list[str]:
    said = []
    for zero in SHARDED.values():
        model = Stack(2)
        kept = {key: p.detach().clone() for key, p in model.named_parameters()}
        with pytest.raises(ConfigError) as raised:
            partita.initialize(model, {"zero": zero}, optimizer=ClippingAll)
        said.append(str(raised.value))
        assert all(torch.equal(p, kept[key]) for key, p in model.named_parameters()), "the model is as it was"
        with partita.initialize(model, {"zero": zero}) as engine:
            engine.backward(square_loss(engine, rank(), 0))
            assert engine.step().stepped
    seeds.start()
    model = Stack(2)
    with partita.initialize(model, {"zero": {"stage": 0}}, optimizer=ClippingAll) as engine:
        before = whole_weights(engine)
        engine.backward(square_loss(engine, rank(), 0))
        assert engine.step().stepped
        after = whole_weights(engine)
        assert not torch.equal(after["blocks.0.up.weight"], before["blocks.0.up.weight"])
    return said


def whole_at_stage_0() -> None:
    """Check that an optimizer that couples a parameter's elements is correct at stage 0, where parameters are full."""
    results = train({"stage": 0}, lambda model: NormalizedStep(model.parameters()))
    expected = train_plain(lambda model: NormalizedStep(model.parameters()))
    for name, value in results.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)


def declared() -> None:
    """Check that a declaration is accepted for a class that cannot be tried, and refused if a trial refutes it."""
    known = set(traits._DECLARED)
    try:
        for kind in (Rounding, NormalizedStep):
            assert partita.elementwise(kind) is kind
        train({"stage": 3}, lambda model: Rounding(model.parameters(), lr=0.01, momentum=0.9))
        with pytest.raises(ConfigError, match="NormalizedStep was declared by partita.elementwise.* but in a trial"):
            train({"stage": 3}, lambda model: NormalizedStep(model.parameters()))
    finally:
        traits._DECLARED.clear()
        traits._DECLARED.update(known)


def on_parts_of_the_model(config: Mapping[str, Any]) -> None:
    with pytest.raises(ConfigError, match="optimizer ClippingAll cannot run on some of the parameters"):
        partita.initialize(Stack(2), config, optimizer=ClippingAll)


def wrong() -> None:
    model, other = Stack(2), Stack(1)
    for zero in ZERO.values():
        with pytest.raises(ConfigError, match=r"group 1 contains a tensor of shape \(16, 16\) that is not a parameter"):
            groups = [{"params": model.parameters()}, {"params": [other.first.weight]}]
            partita.initialize(model, {"zero": zero}, optimizer=torch.optim.SGD(groups, 0.1))
        model = Stack(2)
        with pytest.raises(ConfigError, match=r"the callable returned a list, expected a torch.optim.Optimizer"):
            partita.initialize(model, {"zero": zero}, optimizer=lambda params: list(params))  # type: ignore[arg-type, return-value]
        with pytest.raises(ConfigError, match=r"optimizer: expected .*; got a str"):
            partita.initialize(model, {"zero": zero}, optimizer="adamw")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"scheduler: .* another optimizer"):
            apart = torch.optim.SGD(other.parameters(), 0.1)
            partita.initialize(model, {"zero": zero}, scheduler=StepLR(apart, 1))
        with pytest.raises(ConfigError, match=r"scheduler: .*; got a str"):
            partita.initialize(model, {"zero": zero}, scheduler="cosine")  # type: ignore[arg-type]
        model = Stack(2)


# ---------------------------------------------------------------------------------------------------------- schedules


def rates(schedule: Mapping[str, Any], num_steps: int) -> list[float]:
    with partita.initialize(Stack(1), {"schedule": schedule, "optimizer": {"lr": 0.8}}) as engine:
        found = []
        for step in range(num_steps):
            engine.backward(square_loss(engine, rank(), step))
            (rate,) = engine.step().lr
            found.append(rate)
        return found


def rates_count_optimizer_steps() -> None:
    """Check that micro-batches, ranks and skipped steps do not advance the schedule."""
    config = {
        "batch": {"accumulate": 2},
        "optimizer": {"lr": 1.0},
        "schedule": {"name": "linear", "total_steps": 4},
    }
    for zero in ZERO.values():
        with partita.initialize(Stack(1), {"zero": zero, **config}) as engine:
            found = []
            for step in range(6):
                loss = square_loss(engine, rank(), step)
                if step == 3:
                    loss = loss * float("nan")
                engine.backward(loss)
                if step == 3:
                    with pytest.warns(UserWarning, match="the update is skipped"):
                        assert engine.step().skipped
                else:
                    found += engine.step().lr
            assert found == [1.0, 1.0, 0.75, 0.75, 0.75]


def torch_schedulers() -> None:
    for zero in ZERO.values():
        made: list[Any] = []

        def instance(model: nn.Module, made: list[Any] = made) -> dict[str, Any]:
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            made.append(StepLR(optimizer, 2, 0.5))
            return {"optimizer": optimizer, "scheduler": made[-1]}

        for arguments in (instance, lambda model: {"scheduler": lambda optimizer: StepLR(optimizer, 2, 0.5)}):
            model = Stack(1)
            config = {"zero": zero, "optimizer": {"name": "sgd", "lr": 0.1}}
            with partita.initialize(model, config, **arguments(model)) as engine:
                found = []
                for step in range(5):
                    engine.backward(square_loss(engine, rank(), step))
                    found += engine.step().lr
                assert found == [0.1, 0.1, 0.05, 0.05, 0.025]
                assert isinstance(engine.scheduler, StepLR)


def attached_by_the_user() -> None:
    """Check a scheduler that the user creates on engine.optimizer and steps."""
    config = {"optimizer": {"lr": 0.4}}
    with partita.initialize(Stack(1), config) as engine:
        scheduler = CosineAnnealingLR(engine.optimizer, 4)
        found = []
        for step in range(4):
            engine.backward(square_loss(engine, rank(), step))
            found += engine.step().lr
            scheduler.step()
    expected = [0.4 * 0.5 * (1 + math.cos(math.pi * step / 4)) for step in range(4)]
    assert found == pytest.approx(expected)


def rate_at_the_step() -> None:
    """Check that step() uses the learning rate at its call, also one that was set by hand."""
    for zero in ZERO.values():
        seeds.start()
        config = {"zero": zero, "optimizer": {"name": "sgd", "lr": 0.1, "weight_decay": 0.0}}
        with partita.initialize(Stack(1), config) as engine:
            engine.backward(square_loss(engine, rank(), 0))
            gradient, before = engine.gradient("first.bias"), whole_weights(engine)["first.bias"]
            for group in engine.optimizer.param_groups:
                group["lr"] = 0.25
            assert engine.step().lr == (0.25,)
            assert gradient is not None
            torch.testing.assert_close(whole_weights(engine)["first.bias"], before - 0.25 * gradient)


@matrix(name=OPTIMIZERS, plan=SHARDED)
def test_optimizer_as_on_whole_parameters(name: str, plan: str) -> None:
    on_ranks(2, given, name, "instance", plan)


@matrix(name=["momentum", "adamw fused"], how=["callable", "groups"], plan=SHARDED)
def test_however_it_is_given(name: str, how: str, plan: str) -> None:
    on_ranks(2, given, name, how, plan)


SECTIONS = [
    {"name": "adamw", "lr": 0.01, "weight_decay": 0.3, "eps": 1e-3, "betas": (0.8, 0.9)},
    {"name": "adam", "lr": 0.01, "weight_decay": 0.3, "eps": 1e-3, "betas": (0.8, 0.9)},
    {"name": "sgd", "lr": 0.1, "weight_decay": 0.3, "momentum": 0.9},
]


@matrix(section=SECTIONS, plan=SHARDED)
def test_optimizer_of_the_config(section: dict[str, Any], plan: str) -> None:
    on_ranks(2, from_config, section, plan)


def test_optimizer_that_has_state() -> None:
    on_ranks(2, with_state)


def test_optimizer_that_has_state_under_tensor() -> None:
    on_ranks(2, with_state_under_tensor)


def test_optimizer_that_has_state_under_pipeline() -> None:
    on_ranks(2, with_state_under_pipeline)


def test_optimizer_of_a_part_of_the_model() -> None:
    on_ranks(2, part_of_the_model)


def test_group_added_later() -> None:
    on_ranks(2, group_added_later)
    on_ranks(2, group_added_twice)


def test_hooks_of_the_optimizer() -> None:
    on_ranks(2, hooks_of_the_optimizer)


@pytest.mark.parametrize(
    "config",
    [
        {"zero": {"stage": 0}, "parallel": {"tensor": 2}},
        {"zero": {"stage": 0}, "parallel": {"pipeline": 2}},
        {"zero": {"stage": 2}, "precision": {"gradients": "in_backward"}, "parallel": {"data": 2}},
    ],
)
def test_statistics_of_all_parameters_on_parts_of_the_model(config: dict[str, Any]) -> None:
    on_ranks(2, on_parts_of_the_model, config)


def test_an_optimizer_that_combines_parameters_is_refused_by_name() -> None:
    for said in on_ranks(2, combines_parameters):
        for text in said:
            assert "optimizer ClippingAll cannot run on some of the parameters: " in text
            assert "zero.stage 0" in text
            assert "partita.elementwise" not in text


def test_not_elementwise_at_stage_0() -> None:
    on_ranks(2, whole_at_stage_0)


def test_declared_elementwise() -> None:
    on_ranks(2, declared)


def test_wrong_optimizers_and_schedulers() -> None:
    on_ranks(2, wrong)


def test_schedules() -> None:
    def run(num_steps: int = 8, **schedule: Any) -> list[float]:
        return on_ranks(1, rates, schedule, num_steps)[0]

    assert run() == [0.8] * 8
    assert run(warmup_steps=3) == pytest.approx([0.2, 0.4, 0.6] + [0.8] * 5)
    linear = [0.8 * (1 - step / 4) for step in range(4)]
    assert run(name="linear", total_steps=4) == pytest.approx([*linear, 0, 0, 0, 0])
    assert run(name="linear", total_steps=6, warmup_steps=1, min_lr=0.1) == pytest.approx(
        [0.4, 0.8, 0.66, 0.52, 0.38, 0.24, 0.1, 0.1]
    )
    cosine = [0.2 + 0.6 * 0.5 * (1 + math.cos(math.pi * step / 5)) for step in range(6)]
    assert run(name="cosine", total_steps=5, min_lr=0.2) == pytest.approx([*cosine, 0.2, 0.2])


def test_schedule_counts_optimizer_steps() -> None:
    on_ranks(2, rates_count_optimizer_steps)


def test_schedulers_of_torch() -> None:
    on_ranks(2, torch_schedulers)
    on_ranks(2, attached_by_the_user)


def test_rate_at_the_step_counts() -> None:
    on_ranks(2, rate_at_the_step)


@matrix(plan=COUNTED, hooks=[False, True], world=[1, 2])
def test_attributes_that_an_optimizer_counts_in(plan: str, hooks: bool, world: int, tmp_path: Path) -> None:
    on_ranks(world, counts_right, plan, hooks, tmp_path)


def test_attributes_that_cannot_be_carried_over() -> None:
    (said,) = on_ranks(1, keeps_a_list)
    assert "optimizer Listing changes 'steps' (a list) in its step" in said
    assert "self.state[param]" in said


@pytest.mark.parametrize(("world", "stage"), [(1, 0), (1, 3), (2, 0)])
def test_states_with_shapes_of_their_own(world: int, stage: int, tmp_path: Path) -> None:
    on_ranks(world, adafactor, tmp_path, stage)


def test_momentum_of_parameters_with_a_later_first_gradient() -> None:
    on_ranks(2, first_gradient_later)


def test_momentum_that_is_set_later() -> None:
    on_ranks(2, momentum_added_later)


@pytest.mark.parametrize("offload", ["none", "host"])
def test_a_setting_that_needs_a_state_that_is_not_there(offload: str) -> None:
    on_ranks(1, amsgrad_added_later, offload)
