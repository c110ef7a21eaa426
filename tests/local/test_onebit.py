"""1-bit and 0/1 Adam: the running average travels, alike at every stage; with codes that lose nothing it is Adam."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import partita
from partita.config.wires import is_refresh
from partita.optim.onebit_lamb import OnebitLamb
from partita.planner.elsewhere import is_elsewhere
from partita.planner.memory import model_state_bytes
from tests.local import pool
from tests.local.lossless import lossless
from tests.local.training import PLANS, Recipe, Stack, Trained, inputs, rank, same, square_loss, train, whole_weights
from tests.matrix import sampled
from tests.parallel import stages

WARM_UP, STEPS = 4, 9
ADAM = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3, "betas": [0.8, 0.95]}
ONEBIT: dict[str, Any] = {"optimizer": {"name": "onebit_adam", **ADAM}, "communication": {"warmup_steps": WARM_UP}}
ZEROONE: dict[str, Any] = {"optimizer": {"name": "zeroone_adam", "refresh": 2, **ADAM}, "communication": {}}
LAMB: dict[str, Any] = ONEBIT | {"optimizer": {"name": "onebit_lamb", **ADAM}}
TERNARY = {"gradients": "ternary", "parameters": "ternary", "carrier": 0.8, "warmup_steps": WARM_UP}
CARRIED: dict[str, Any] = ONEBIT | {"communication": TERNARY}
TIED = "gpt2"
REFRESHES = (0, 1, 2, 4, 6)


def reference(num_ranks: int) -> dict[str, Tensor]:
    """Plain PyTorch on all ranks' samples: Adam, whose second moment stands still after the warm-up."""
    model = Recipe(lambda: Stack(2)).built()
    states = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in model.named_parameters()}
    beta1, beta2 = ADAM["betas"]
    for step in range(STEPS):
        loss = torch.stack([model(inputs(other, step)).square().mean() for other in range(num_ranks)]).mean()
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for name, param in model.named_parameters():
                (first, second), num = states[name], min(step + 1, WARM_UP)
                first.lerp_(param.grad, 1 - beta1)
                average = first / (1 - beta1 ** (step + 1)) if step < WARM_UP else first
                if step < WARM_UP:
                    second.mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
                change = average / ((second / (1 - beta2**num)).sqrt() + ADAM["eps"])
                if step >= WARM_UP:
                    change = change.clamp(-1, 1)
                param.mul_(1 - ADAM["lr"] * ADAM["weight_decay"]).sub_(change, alpha=ADAM["lr"])
    return {name: param.detach() for name, param in model.named_parameters()}


def refreshed_reference(num_ranks: int) -> dict[str, Tensor]:
    """Plain PyTorch on all ranks' samples: Adam, whose second moment changes in every step of REFRESHES alone."""
    model = Recipe(lambda: Stack(2)).built()
    states = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in model.named_parameters()}
    beta1, beta2 = ADAM["betas"]
    for step in range(STEPS):
        loss = torch.stack([model(inputs(other, step)).square().mean() for other in range(num_ranks)]).mean()
        model.zero_grad()
        loss.backward()
        num = sum(refresh <= step for refresh in REFRESHES)
        with torch.no_grad():
            for name, param in model.named_parameters():
                first, second = states[name]
                first.lerp_(param.grad, 1 - beta1)
                if step in REFRESHES:
                    second.mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
                change = first / (1 - beta1 ** (step + 1)) / ((second / (1 - beta2**num)).sqrt() + ADAM["eps"])
                if step not in REFRESHES:
                    change = change.clamp(-1, 1)
                param.mul_(1 - ADAM["lr"] * ADAM["weight_decay"]).sub_(change, alpha=ADAM["lr"])
    return {name: param.detach() for name, param in model.named_parameters()}


def lamb_reference(num_ranks: int) -> dict[str, Tensor]:
    """Plain PyTorch on all ranks' samples and whole parameters: LAMB, whose second moment stands still after the
    warm-up, and whose trust ratios are their running average then, times how the second moment has changed.
    """
    model = Recipe(lambda: Stack(2)).built()
    states = {name: [torch.zeros_like(p) for _ in range(3)] for name, p in model.named_parameters()}
    trust, factors = dict[str, float](), dict.fromkeys(states, 1.0)
    beta1, beta2 = ADAM["betas"]
    for step in range(STEPS):
        loss = torch.stack([model(inputs(other, step)).square().mean() for other in range(num_ranks)]).mean()
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for name, param in model.named_parameters():
                first, second, fresh = states[name]
                first.lerp_(param.grad, 1 - beta1)
                fresh.mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
                divisor_now = (fresh / (1 - beta2 ** (step + 1))).sqrt() + ADAM["eps"]
                if step < WARM_UP:
                    second.copy_(fresh)
                    update = first / (1 - beta1 ** (step + 1)) / divisor_now + ADAM["weight_decay"] * param
                    ratio = float(param.norm() / update.norm()) if param.norm() and update.norm() else 1.0
                    ratio = min(max(ratio, 0.01), 10.0)
                    trust[name] = 0.9 * trust[name] + 0.1 * ratio if name in trust else ratio
                else:
                    divisor = (second / (1 - beta2**WARM_UP)).sqrt() + ADAM["eps"]
                    factor, last = float((divisor / divisor_now).max()), factors[name]
                    factors[name] = min(max(factor, 0.9 * last, 0.5), 1.1 * last, 4.0)
                    update = (first / divisor).clamp(-1, 1) + ADAM["weight_decay"] * param
                    ratio = trust[name] * factors[name]
                param.sub_(update, alpha=ADAM["lr"] * ratio)
    return {name: param.detach() for name, param in model.named_parameters()}


def lamb_with_an_identity(plans: tuple[str, ...], more: dict[str, Any]) -> None:
    expected = lamb_reference(torch.distributed.get_world_size())
    for plan in plans:
        with lossless("sign"):
            run = train(Recipe(lambda: Stack(2), config=LAMB | more, num_steps=STEPS), PLANS[plan])
        for name, weight in run.weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-3, atol=1e-4)


def refreshed_with_an_identity(plans: tuple[str, ...]) -> None:
    expected = refreshed_reference(torch.distributed.get_world_size())
    with lossless("sign"):
        runs = [train(Recipe(lambda: Stack(2), config=ZEROONE, num_steps=STEPS), PLANS[plan]) for plan in plans]
    for run in runs:
        for name, weight in run.weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-5)


def with_an_identity(plans: tuple[str, ...]) -> None:
    with lossless("sign"):
        runs = [train(Recipe(lambda: Stack(2), config=ONEBIT, num_steps=STEPS), PLANS[plan]) for plan in plans]
    expected = reference(torch.distributed.get_world_size())
    for run in runs:
        for name, weight in run.weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-5)


def alike(plans: tuple[str, ...], codec: str, asked: dict[str, Any]) -> list[float]:
    """Every stage has the same bits; codes lose something and train all the same."""
    config = asked | {"communication": {**asked["communication"], "gradients": codec}, "clip_grad_norm": 0.5}
    first: Trained | None = None
    for plan in plans:
        run = train(Recipe(lambda: Stack(2), config=config, num_steps=STEPS), PLANS[plan])
        first = first or run
        same(run, first, f"{codec} at plan {plan}")
    assert first is not None
    return first.losses


def resumed(folder: Path, plan: str, at: int, asked: dict[str, Any]) -> None:
    """A run that goes on from a checkpoint is the one that was saved, also where codes begin in between."""
    config = {"zero": PLANS[plan], **asked}

    def go(engine: partita.Engine, first: int) -> None:
        for step in range(first, STEPS):
            engine.backward(square_loss(engine, rank(), step))
            engine.step()
            if step + 1 == at and not first:
                engine.save(folder)

    with partita.initialize(Stack(2), config) as engine:
        go(engine, 0)
        held = {key: size for key, size in engine.memory_report().held.items() if key[0] in ("feedback", "momentum")}
        planned = model_state_bytes(engine.units, rank())
        assert held == {key: size for key, size in planned.items() if key[0] in ("feedback", "momentum")}
        assert len(held) == 2
        continued = whole_weights(engine)
    with partita.initialize(Stack(2), config) as engine:
        engine.load(folder)
        go(engine, at)
        for name, weight in whole_weights(engine).items():
            assert torch.equal(weight, continued[name]), name


def test_with_codes_that_lose_nothing_it_is_adam() -> None:
    pool.run(2, with_an_identity, ("0", "2"))


def test_with_codes_that_lose_nothing_the_refreshed_one_is_adam() -> None:
    assert [step for step in range(24) if is_refresh(step, 2)] == [*REFRESHES, 10, 14, 22]
    pool.run(2, refreshed_with_an_identity, ("0", "2"))


@pytest.mark.parametrize("ranks", sampled([2, 4], 2))
def test_with_codes_that_lose_nothing_it_is_lamb(ranks: int) -> None:
    pool.run(ranks, lamb_with_an_identity, ("0", "1", "2", "3"), {})


def offloaded(codec: str) -> None:
    """The same bits with the optimizer's states on the host, where the update runs beside the caller."""
    config = LAMB | {"communication": {**LAMB["communication"], "gradients": codec}, "clip_grad_norm": 0.5}
    one, other = (
        train(Recipe(lambda: Stack(2), config=config, num_steps=STEPS), {"stage": stage, "offload": offload})
        for stage, offload in ((0, {}), (2, {"optimizer": "host"}))
    )
    same(one, other, "offload")


def test_offloaded_lamb_has_the_same_bits() -> None:
    pool.run(2, offloaded, "ternary")


@pytest.mark.parametrize(
    ("codec", "asked"),
    sampled(
        [("full", ONEBIT), ("ternary", ONEBIT), ("full", ZEROONE), ("ternary", LAMB)],
        ("full", ZEROONE),
        ("ternary", LAMB),
    ),
    ids=str,
)
def test_every_stage_has_the_same_bits(codec: str, asked: dict[str, Any]) -> None:
    losses, *_ = pool.run(2, alike, ("0", "1", "2", "3"), codec, asked)
    half = len(losses) // 2
    assert sum(losses[-half:]) < sum(losses[:half])


@pytest.mark.parametrize(
    ("plan", "at", "asked"),
    [("1", 6, ONEBIT), ("3", 2, ONEBIT), ("2", 5, ZEROONE), ("2", 6, LAMB), ("0", 2, LAMB)],
    ids=str,
)
def test_a_resumed_run_is_the_continued_one(tmp_path: Path, plan: str, at: int, asked: dict[str, Any]) -> None:
    pool.run(2, resumed, tmp_path, plan, at, asked)


def tied(parallel: dict[str, int], asked: dict[str, Any], folder: Path | None = None) -> dict[str, Tensor]:
    """Losses of a model whose first and last layer share a weight, and what this rank has of its weights; where a
    ``folder`` is given, saved there on the way.
    """
    config = asked | {"parallel": parallel, "zero": {"stage": 1}, "batch": {"micro": 2, "accumulate": 2}}
    losses = list[Tensor]()
    with partita.initialize(stages.build(TIED), config, loss_fn=stages.loss_of) as engine:
        data = engine.mesh.coordinate("data")
        for step in range(STEPS):
            batches = (stages.batch(TIED, 100 * step + 10 * micro + data) for micro in range(2))
            losses.append(engine.train_batch(batches))
            if step == STEPS - 3 and folder is not None:
                engine.save(folder)
        with engine.gathered():
            held = {name: p.detach().clone() for name, p in engine.module.named_parameters() if not is_elsewhere(p)}
        return held | {"losses": torch.stack(losses)}


def tied_with_an_identity(parallel: dict[str, int]) -> dict[str, Tensor]:
    with lossless("sign"):
        return tied(parallel, ONEBIT)


def test_on_all_stages_of_a_pipeline_that_share_a_weight_the_average_counts_once() -> None:
    (expected, *_), found = pool.run(2, tied_with_an_identity, {}), pool.run(4, tied_with_an_identity, {"pipeline": 2})
    for one in found:
        torch.testing.assert_close(one["losses"], expected["losses"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("asked", [ONEBIT, CARRIED], ids=["average", "carrier"])
def test_a_weight_that_stages_share_stays_one(tmp_path: Path, asked: dict[str, Any]) -> None:
    found = pool.run(4, tied, {"pipeline": 2}, asked, tmp_path)
    for one in found[1:]:
        for name, value in one.items():
            alike = next(other[name] for other in found if name in other)
            assert torch.equal(value, alike), name


def test_alone_it_is_adam_too() -> None:
    """One process, in which nothing travels."""
    model = Recipe(lambda: Stack(2)).built()
    with partita.initialize(model, ONEBIT) as engine:
        for step in range(STEPS):
            engine.backward(square_loss(engine, 0, step))
            engine.step()
        weights = whole_weights(engine)
    for name, expected in reference(1).items():
        torch.testing.assert_close(weights[name], expected, rtol=1e-4, atol=1e-5)


def test_alone_it_is_lamb_too() -> None:
    """One process, and the optimizer by itself, which measures whole parameters."""
    model = Recipe(lambda: Stack(2)).built()
    with partita.initialize(model, LAMB) as engine:
        for step in range(STEPS):
            engine.backward(square_loss(engine, 0, step))
            engine.step()
        weights = whole_weights(engine)
    plain = Recipe(lambda: Stack(2)).built()
    optimizer = OnebitLamb(plain.parameters(), **ADAM)
    for step in range(STEPS):
        optimizer.param_groups[0]["frozen"] = step >= WARM_UP
        optimizer.zero_grad()
        plain(inputs(0, step)).square().mean().backward()
        optimizer.step()
    alone = {name: param.detach() for name, param in plain.named_parameters()}
    for name, expected in lamb_reference(1).items():
        torch.testing.assert_close(weights[name], expected, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(alone[name], expected, rtol=1e-3, atol=1e-4)


def test_another_optimizer_has_no_average_to_send() -> None:
    with pytest.raises(partita.ConfigError, match="an optimizer was passed"):
        partita.initialize(Stack(1), ONEBIT, optimizer=lambda params: torch.optim.AdamW(params))


def goes_on(folder: Path, plan: str, saves: bool) -> dict[str, Tensor]:
    with lossless("sign"), partita.initialize(Stack(2), {"zero": PLANS[plan], **LAMB}) as engine:
        for step in range(STEPS) if saves else range(STEPS, STEPS + 3):
            if not saves and step == STEPS:
                engine.load(folder)
            batch = torch.cat([inputs(other, step) for other in range(4)])
            engine.backward(engine(batch).square().mean())
            engine.step()
        if saves:
            engine.save(folder)
            for step in range(STEPS, STEPS + 3):
                batch = torch.cat([inputs(other, step) for other in range(4)])
                engine.backward(engine(batch).square().mean())
                engine.step()
        return whole_weights(engine)


def test_another_layout_goes_on_with_the_same_trust_ratios(tmp_path: Path) -> None:
    continued, *_ = pool.run(2, goes_on, tmp_path, "2", True)
    loaded, *_ = pool.run(4, goes_on, tmp_path, "0", False)
    for name, weight in continued.items():
        torch.testing.assert_close(loaded[name], weight, rtol=1e-3, atol=1e-4)
