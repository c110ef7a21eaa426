"""1-bit Adam, sending averages or gradients: the same bits at all stages, and Adam if the codec is lossless."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import partita
from partita.layout.off_stage import is_off_stage
from partita.layout.state_bytes import model_state_bytes
from tests.compression.lossless import lossless
from tests.kit.models import Stack, inputs, square_loss
from tests.kit.plans import ZERO, sampled
from tests.kit.ranks import on_ranks
from tests.kit.training import Recipe, Trained, assert_same_bits, rank, train_recipe, whole_weights
from tests.parallel import stages

WARM_UP, STEPS = 4, 9
ADAM = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3, "betas": [0.8, 0.95]}
ONEBIT: dict[str, Any] = {"optimizer": {"name": "onebit_adam", **ADAM}, "communication": {"warmup_steps": WARM_UP}}
GRADIENTS: dict[str, Any] = ONEBIT | {"optimizer": {"name": "onebit_adam", "sends": "gradients", **ADAM}}
TERNARY = {"gradients": "ternary", "parameters": "ternary", "warmup_steps": WARM_UP}
TIED = "gpt2"


def reference(num_ranks: int) -> dict[str, Tensor]:
    """Train plain PyTorch on all ranks' samples with Adam, whose second moment is frozen after the warm-up."""
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


def with_an_identity(plans: tuple[str, ...], asked: dict[str, Any]) -> None:
    with lossless("sign"):
        runs = [train_recipe(Recipe(lambda: Stack(2), config=asked, num_steps=STEPS), ZERO[plan]) for plan in plans]
    expected = reference(torch.distributed.get_world_size())
    for run in runs:
        for name, weight in run.weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-5)


def alike(plans: tuple[str, ...], codec: str, asked: dict[str, Any]) -> list[float]:
    """Return the losses of a lossy codec, which are bitwise equal for all ``plans``."""
    config = asked | {"communication": {**asked["communication"], "gradients": codec}, "clip_grad_norm": 0.5}
    first: Trained | None = None
    for plan in plans:
        run = train_recipe(Recipe(lambda: Stack(2), config=config, num_steps=STEPS), ZERO[plan])
        first = first or run
        assert_same_bits(run, first, f"{codec} at plan {plan}")
    assert first is not None
    return first.losses


def resumed(folder: Path, plan: str, at: int, asked: dict[str, Any]) -> None:
    """Check that a resumed run equals the continued one, also if compression starts after the checkpoint."""
    config = {"zero": ZERO[plan], **asked}

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
        assert len(held) == (1 if asked["optimizer"].get("sends") == "gradients" else 2)
        continued = whole_weights(engine)
    with partita.initialize(Stack(2), config) as engine:
        engine.load(folder)
        go(engine, at)
        for name, weight in whole_weights(engine).items():
            assert torch.equal(weight, continued[name]), name


@pytest.mark.parametrize("asked", [ONEBIT, GRADIENTS], ids=["averages", "gradients"])
def test_with_codes_that_lose_nothing_it_is_adam(asked: dict[str, Any]) -> None:
    on_ranks(2, with_an_identity, ("0", "2"), asked)


@pytest.mark.parametrize(
    ("plans", "codec", "asked"),
    sampled(
        [
            (("0", "1", "2", "3"), "full", ONEBIT),
            (("0", "1", "2", "3"), "ternary", ONEBIT),
            (("0", "1", "2", "3"), "full", GRADIENTS),
            (("1", "2", "3"), "ternary", GRADIENTS),  # stage 0 also encodes the sums that it gathers
            (("1", "2", "3"), "int8", GRADIENTS),
        ],
        (("0", "1", "2", "3"), "ternary", ONEBIT),
        (("0", "1", "2", "3"), "full", GRADIENTS),
        (("1", "2", "3"), "ternary", GRADIENTS),
    ),
    ids=str,
)
def test_stages_that_encode_the_same_messages_have_the_same_bits(
    plans: tuple[str, ...], codec: str, asked: dict[str, Any]
) -> None:
    losses, *_ = on_ranks(2, alike, plans, codec, asked)
    half = len(losses) // 2
    assert sum(losses[-half:]) < sum(losses[:half])


@pytest.mark.parametrize(
    ("plan", "at", "asked"),
    [("1", 6, ONEBIT), ("3", 2, ONEBIT), ("2", 5, GRADIENTS | {"communication": TERNARY})],
    ids=str,
)
def test_a_resumed_run_is_the_continued_one(tmp_path: Path, plan: str, at: int, asked: dict[str, Any]) -> None:
    on_ranks(2, resumed, tmp_path, plan, at, asked)


def tied(parallel: dict[str, int], asked: dict[str, Any], folder: Path | None = None) -> dict[str, Tensor]:
    """Train a model whose first and last layer share a weight, and save it to ``folder``, if given, on the way.

    Returns: the losses, and the weights that this rank has.
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
            held = {name: p.detach().clone() for name, p in engine.module.named_parameters() if not is_off_stage(p)}
        return held | {"losses": torch.stack(losses)}


def tied_with_an_identity(parallel: dict[str, int]) -> dict[str, Tensor]:
    with lossless("sign"):
        return tied(parallel, ONEBIT)


def test_on_all_stages_of_a_pipeline_that_share_a_weight_the_average_counts_once() -> None:
    (expected, *_), found = on_ranks(2, tied_with_an_identity, {}), on_ranks(4, tied_with_an_identity, {"pipeline": 2})
    for one in found:
        torch.testing.assert_close(one["losses"], expected["losses"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("asked", [ONEBIT, GRADIENTS | {"communication": TERNARY}], ids=["averages", "gradients"])
def test_a_weight_that_stages_share_stays_one(tmp_path: Path, asked: dict[str, Any]) -> None:
    found = on_ranks(4, tied, {"pipeline": 2}, asked, tmp_path)
    for one in found[1:]:
        for name, value in one.items():
            alike = next(other[name] for other in found if name in other)
            assert torch.equal(value, alike), name


@pytest.mark.parametrize("asked", [ONEBIT, GRADIENTS], ids=["averages", "gradients"])
def test_alone_it_is_adam_too(asked: dict[str, Any]) -> None:
    """A single process, which sends nothing, has the same results."""
    model = Recipe(lambda: Stack(2)).built()
    with partita.initialize(model, asked) as engine:
        for step in range(STEPS):
            engine.backward(square_loss(engine, 0, step))
            engine.step()
        weights = whole_weights(engine)
    for name, expected in reference(1).items():
        torch.testing.assert_close(weights[name], expected, rtol=1e-4, atol=1e-5)


def test_another_optimizer_has_no_average_to_send() -> None:
    with pytest.raises(partita.ConfigError, match="an optimizer was passed"):
        partita.initialize(Stack(1), ONEBIT, optimizer=lambda params: torch.optim.AdamW(params))
