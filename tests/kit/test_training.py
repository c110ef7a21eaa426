"""Tests of the kit's training: plans train like plain PyTorch, comparisons find differences, the documented example
is the tested one.
"""

import copy
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import partita
from tests import kit
from tests.kit import seeds
from tests.kit.models import CASES, FAMILIES, Stack, square_loss, tiny
from tests.kit.plans import LEAN, PLANS, matrix
from tests.kit.ranks import on_ranks
from tests.kit.state import assert_idle, attached_to
from tests.kit.training import Trained, assert_close, assert_exact, assert_same_bits, train, train_reference

EXAMPLE = Path(__file__).with_name("test_example.py").read_text()
CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"


def test_the_example_of_the_documents_is_the_one_that_runs() -> None:
    assert EXAMPLE in CONTRIBUTING.read_text()
    assert textwrap.indent(EXAMPLE.replace("\n\n\n", "\n\n"), "    ", lambda line: line != "\n") in str(kit.__doc__)
    assert sum(bool(line) for line in EXAMPLE.splitlines()) == 5


def test_every_documented_name_is_there() -> None:
    for name in kit._MODULE_OF:
        assert getattr(kit, name) is not None
    with pytest.raises(AttributeError, match="'tests.kit' has no attribute 'nothing'"):
        kit.nothing  # noqa: B018


SIZES: dict[str, dict[str, Any]] = {"mlp": {"num_blocks": 2}, "llama": {"hidden_size": 32, "vocab_size": 64}}


def trains_as_plain_pytorch(name: str, plan: str) -> None:
    case = tiny(name, **SIZES[name])
    found = train(case, PLANS[plan], look=lambda engine, step: (step, assert_idle(engine)))
    assert found.looks == [(step, None) for step in range(3)]
    assert all(found.stepped)
    if PLANS[plan].get("precision") != LEAN:
        assert_close(found, train_reference(case))
        assert_same_bits(found, train(case, PLANS["0"]))


@matrix(name=SIZES, plan=PLANS)
def test_every_plan_trains_as_plain_pytorch(name: str, plan: str) -> None:
    on_ranks(2, trains_as_plain_pytorch, name, plan)


def in_stages(accumulate: int) -> tuple[Trained, Trained]:
    case, batch = tiny("llama", num_hidden_layers=4), {"batch": {"accumulate": accumulate}}
    return train(case, {**batch, "parallel": {"pipeline": 2}}), train(case, {**batch, "parallel": {"tensor": 2}})


def test_a_pipeline_trains_on_the_same_samples() -> None:
    for pipeline, tensor in on_ranks(2, in_stages, 2, timeout=120):
        assert len(pipeline.losses) == 3
        assert pipeline.losses == pytest.approx(tensor.losses, abs=1e-5)
        for name, weight in tensor.weights.items():
            torch.testing.assert_close(pipeline.weights[name], weight, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("name", FAMILIES)
def test_families_have_the_sizes_that_are_asked_for(name: str) -> None:
    case = tiny(name, vocab_size=80)
    model = case.build()
    assert next(size for size in (p.shape[0] for p in model.parameters()) if size == 80)
    batch = case.batch(3)
    assert max(int(values.max()) for values in batch.values()) < 80
    case.loss(model(**batch)).backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_tiny_is_the_case_where_no_size_is_given() -> None:
    assert tiny("lstm") is CASES["lstm"]
    assert sum(p.numel() for p in tiny("decoder", width=32).build().parameters()) < 50_000


def trained() -> Trained:
    model = {"weight": torch.ones(2), "bias": torch.zeros(2)}
    return Trained([1.0, 0.5], [2.0, 1.0], [True, True], [copy.deepcopy(model), {}], [], model)


def changed(what: str) -> Trained:
    """Return `trained()` with one value changed."""
    run = trained()
    match what:
        case "loss":
            run.losses[1] += 1e-3
        case "norm":
            run.norms[0] = None
        case "step":
            run.stepped[0] = False
        case "gradient":
            run.gradients[0]["weight"] = torch.ones(2) * 1.01
        case "no gradient":
            run.gradients[0]["bias"] = None
        case "weight":
            run.weights["weight"] = torch.tensor([1.0, 1.01])
    return run


CHANGES = ("loss", "norm", "step", "gradient", "no gradient", "weight")


@pytest.mark.parametrize("what", CHANGES)
def test_runs_of_other_bits_are_found(what: str) -> None:
    assert_same_bits(trained(), trained())
    with pytest.raises(AssertionError):
        assert_same_bits(changed(what), trained())


@pytest.mark.parametrize("what", ["loss", "gradient", "no gradient", "weight"])
def test_runs_that_are_not_close_are_found(what: str) -> None:
    assert_close(trained(), trained())
    with pytest.raises(AssertionError):
        assert_close(changed(what), trained())


@pytest.mark.parametrize("what", ["loss", "norm", "gradient", "no gradient"])
def test_runs_that_are_not_exact_are_found(what: str) -> None:
    assert_exact(trained(), trained())
    with pytest.raises(AssertionError):
        assert_exact(changed(what), trained())


def in_a_step() -> None:
    seeds.start()
    model, said = Stack(2), list[str]()
    with partita.initialize(model, {"zero": {"stage": 3}}) as engine:

        def inside(*_: Any) -> None:
            with pytest.raises(AssertionError, match="open: ") as caught:
                assert_idle(engine)
            said.append(str(caught.value))

        handle = model.blocks[1].up.register_forward_hook(inside)
        assert_idle(engine)
        engine.backward(square_loss(engine, 0, 0))
        handle.remove()
        engine.step()
        assert_idle(engine)
    assert len(said) == 1
    assert "blocks.1" in said[0]


def test_an_engine_in_a_step_is_not_idle() -> None:
    on_ranks(2, in_a_step)


def test_what_is_attached_to_a_model_is_found() -> None:
    model = Stack(1)
    before = attached_to(model)
    handle = model.first.register_forward_hook(print)
    assert any("first._forward_hooks" in each for each in attached_to(model) - before)
    handle.remove()
    assert attached_to(model) == before
