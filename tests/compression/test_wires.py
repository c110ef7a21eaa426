"""Quantized collectives: a lossless codec changes no bit, and all ranks decode the same values."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import partita
from partita.kernels import codec as kernels
from partita.kernels.codecs import CODECS, Codec
from partita.table.residence import BLOCK
from tests.kit.models import CASES, Stack, inputs, parts, square_loss
from tests.kit.plans import ZERO, matrix, sampled
from tests.kit.ranks import on_ranks
from tests.kit.training import Recipe, Trained, assert_same_bits, rank, train_recipe, whole_weights, world
from tests.sharding.test_visits import OtherMethod

IDENTITY = Codec("int8", BLOCK * 4)
GRADIENTS = {"communication": {"gradients": "int8"}}
BOTH = {"communication": {"gradients": "int8", "parameters": "int8"}}
HALF = {"precision": {"compute": "bf16"}}
CLIPPED = {"clip_grad_norm": 0.1}


@contextmanager
def lossless() -> Iterator[None]:
    """Make the int8 codec lossless: its codes are the values in fp32."""

    def encode(codec: Codec, values: Tensor, codes: Tensor, **how: Any) -> None:
        codes.copy_(values.float().contiguous().view(torch.uint8))

    def decode(codec: Codec, codes: Tensor, out: Tensor, *, add: bool = False, **how: Any) -> None:
        values = codes.view(torch.float32)
        out.add_(values) if add else out.copy_(values)

    with (
        mock.patch.dict(CODECS, int8=IDENTITY),
        mock.patch.object(kernels, "encode", encode),
        mock.patch.object(kernels, "decode", decode),
    ):
        yield


@contextmanager
def on_nodes_of(num_ranks: int) -> Iterator[None]:
    local = {"LOCAL_WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(rank() % num_ranks)}
    with mock.patch.dict(os.environ, local):
        yield


def wires_of(plan: str) -> dict[str, Any]:
    return BOTH if plan.startswith("3") else GRADIENTS


def bitwise_with_an_identity(plans: tuple[str, ...], sections: dict[str, Any]) -> None:
    for plan in plans:
        full, coded = (CLIPPED | sections | wires for wires in ({}, wires_of(plan)))
        expected = train_recipe(Recipe(lambda: Stack(2), config=full), ZERO[plan])
        with lossless():
            got = train_recipe(Recipe(lambda: Stack(2), config=coded), ZERO[plan])
        assert_same_bits(got, expected, f"an identity at plan {plan} with {sections}")


def near_with_an_identity_on_nodes() -> None:
    """Compare a lossless codec with uncompressed runs, up to rounding: summing inside nodes first changes the order."""
    for name, zero in {"1": ZERO["1"], "2": ZERO["2"], "3": {"stage": 3, "hierarchical": True}}.items():
        with on_nodes_of(2):
            full = train_recipe(Recipe(lambda: Stack(2)), zero)
            with lossless():
                coded = train_recipe(Recipe(lambda: Stack(2), config=wires_of(name)), zero)
        torch.testing.assert_close(coded.losses, full.losses, rtol=1e-5, atol=1e-6)
        for weight, value in full.weights.items():
            torch.testing.assert_close(coded.weights[weight], value, rtol=1e-3, atol=1e-4)


def trained_twice(plan: str, codec: str) -> tuple[Trained, Trained, Trained]:
    """Train once uncompressed, and twice with a codec."""
    coded = wires_of(plan) | {"communication": wires_of(plan)["communication"] | {"gradients": codec}} | CLIPPED
    recipes = [Recipe(lambda: Stack(2), config=config, num_steps=6) for config in (CLIPPED, coded, coded)]
    full, one, other = (train_recipe(recipe, ZERO[plan]) for recipe in recipes)
    return full, one, other


def equal_on_all_ranks(config: dict[str, Any], ranks_per_node: int) -> list[float]:
    """Train a few steps; check that norms, weights and losses are bitwise equal on all ranks, and return the losses."""
    case = CASES["gpt2"]
    batch = next(case.batches(2 * dist.get_world_size()))
    losses = []
    with on_nodes_of(ranks_per_node), partita.initialize(case.build(), config) as engine:
        for _ in range(5):
            loss = case.loss(engine(**parts(batch, engine.mesh.num_ranks)[rank()]))
            engine.backward(loss)
            result = engine.step()
            norm = torch.tensor([float(result.grad_norm or 0.0)], dtype=torch.float64)
            whole = torch.cat([norm, *(w.double().view(-1) for w in whole_weights(engine).values())])
            every = [torch.empty_like(whole) for _ in range(engine.mesh.num_ranks)]
            dist.all_gather(every, whole)
            assert all(torch.equal(whole, other) for other in every)
            with torch.no_grad():  # forward computes with decoded values, equal on all ranks
                mine = case.loss(engine(**batch)).double()
            same_loss = [torch.empty_like(mine) for _ in every]
            dist.all_gather(same_loss, mine)
            assert all(torch.equal(mine, other) for other in same_loss)
            losses.append(mine.item())
    return losses


def first_steps_in_codes(plan: str, ranks_per_node: int) -> None:
    """Check that a quantized warm-up is lossy, and that with a lossless codec it equals an uncompressed warm-up."""
    parameters = {"parameters": "int4"} if plan in ("1", "2") else {}
    runs = {}
    with on_nodes_of(ranks_per_node):
        for warmup in ("full", "int8"):
            communication = {"gradients": "int4", **parameters, "warmup_steps": 8, "warmup": warmup}
            recipe = Recipe(lambda: Stack(2), config=CLIPPED | {"communication": communication}, num_steps=4)
            runs[warmup] = train_recipe(recipe, ZERO[plan])
            with lossless():
                runs[warmup, "lossless"] = train_recipe(recipe, ZERO[plan])
    assert_same_bits(runs["full", "lossless"], runs["full"], f"first steps in full at plan {plan}")
    assert runs["int8"].losses != runs["full"].losses, "nothing was lost: no codes travelled"
    torch.testing.assert_close(runs["int8"].losses, runs["full"].losses, rtol=0.1, atol=1e-3)
    if parameters:  # w + (m - w) is m up to rounding
        torch.testing.assert_close(runs["int8", "lossless"].losses, runs["full"].losses, rtol=1e-5, atol=1e-6)
    elif ranks_per_node == world():  # summing inside nodes first changes the order
        assert_same_bits(runs["int8", "lossless"], runs["full"], f"an identity in the first steps at plan {plan}")


def resumed_in_codes(folder: Path, asked: dict[str, Any], at: int) -> None:
    """Check that a run resumed during or after the warm-up equals the continued run."""

    def go(engine: partita.Engine, first: int) -> None:
        for step in range(first, 8):
            engine.backward(square_loss(engine, rank(), step))
            engine.step()
            if step + 1 == at and not first:
                engine.save(folder)

    with partita.initialize(Stack(2), asked) as engine:
        go(engine, 0)
        continued = whole_weights(engine)
    with partita.initialize(Stack(2), asked) as engine:
        engine.load(folder)
        go(engine, at)
        for name, weight in whole_weights(engine).items():
            assert torch.equal(weight, continued[name]), name


def exact_where_looked_at() -> None:
    """Check that parameters read outside of forward have the stored values, even after a quantized prefetch."""
    with partita.initialize(Stack(2), {"zero": {"stage": 3}, **BOTH}) as engine:
        expected = {name: value.clone() for name, value in whole_weights(engine).items()}
        engine(torch.randn(4, 16))
        for name, weight in whole_weights(engine).items():
            assert torch.equal(weight, expected[name]), name
        with engine.gathered(engine.module.first, modify=True):
            pass  # writes the same values back
        for name, weight in whole_weights(engine).items():
            assert torch.equal(weight, expected[name]), name
        state = engine.state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in state.items())

        def look(*args: Any) -> None:
            with engine.gathered(engine.module.first):
                pass

        hook = engine.module.first.register_forward_hook(look)
        with pytest.raises(partita.PartitaError, match=r"is in use with quantized parameters"):
            engine(torch.randn(4, 16))
        hook.remove()


def exact_after_evaluation() -> None:
    """Check that exact values can be read after a forward without a graph, which has read a unit outside of its own
    forward; and not after one with a graph, which needs the quantized values in backward.
    """
    config = {"zero": {"stage": 3}, "optimizer": {"lr": 1e-2}, **BOTH}
    with warnings.catch_warnings(action="ignore"), partita.initialize(OtherMethod(), config) as engine:
        for step in range(2):
            expected, state = whole_weights(engine), engine.state_dict()
            for without_graph in (torch.no_grad(), torch.inference_mode()):
                with without_graph:
                    engine(inputs(rank(), step))
                again = whole_weights(engine)
                assert all(torch.equal(again[name], weight) for name, weight in expected.items())
            with torch.no_grad():
                engine(inputs(rank(), step))
            again = engine.state_dict()
            assert all(torch.equal(again[name], weight) for name, weight in state.items())
            loss = square_loss(engine, rank(), step)
            with pytest.raises(partita.PartitaError, match=r"is in use with quantized parameters.*after engine\.step"):
                whole_weights(engine)
            engine.backward(loss)
            assert engine.step().stepped
            assert not torch.equal(whole_weights(engine)["first.weight"], expected["first.weight"])


def resumed(folder: Path, plan: str) -> None:
    """Check that continued and resumed runs use the same random numbers for rounding."""
    config = {"zero": ZERO[plan], "optimizer": {"lr": 1e-2}, **wires_of(plan)}

    def go(engine: partita.Engine, first: int) -> None:
        for step in range(first, first + 3):
            engine.backward(square_loss(engine, rank(), step))
            engine.step()

    with partita.initialize(Stack(2), config) as engine:
        go(engine, 0)
        engine.save(folder)
        go(engine, 3)
        continued = whole_weights(engine)
    with partita.initialize(Stack(2), config) as engine:
        engine.load(folder)
        go(engine, 3)
        for name, weight in whole_weights(engine).items():
            assert torch.equal(weight, continued[name]), name


def not_finite(plan: str) -> None:
    """Check that a non-finite gradient on one rank skips the update on all ranks."""
    with partita.initialize(Stack(2), {"zero": ZERO[plan], **wires_of(plan)}) as engine:
        before = whole_weights(engine)
        loss = square_loss(engine, rank(), 0)
        engine.backward(loss * float("inf") if rank() == 1 else loss)
        with pytest.warns(UserWarning, match="the update is skipped"):
            assert engine.step().skipped
        for name, weight in whole_weights(engine).items():
            assert torch.equal(weight, before[name]), name
        engine.backward(square_loss(engine, rank(), 1))
        assert engine.step().stepped


# -- tests -------------------------------------------------------------------------------------------------------------


def test_an_identity_codec_is_bitwise_the_uncompressed_run() -> None:
    on_ranks(2, bitwise_with_an_identity, tuple(ZERO), {})


@pytest.mark.parametrize(
    "sections", [HALF, {"batch": {"accumulate": 2}}, {"precision": {"gradients": "in_backward"}}], ids=str
)
def test_an_identity_codec_is_bitwise_in_other_ways(sections: dict[str, Any]) -> None:
    on_ranks(2, bitwise_with_an_identity, ("1", "2", "3") if sections is HALF else ("1", "3"), sections)


def test_an_identity_codec_inside_nodes_and_across() -> None:
    on_ranks(4, near_with_an_identity_on_nodes)


@matrix(plan=ZERO, codec=["int8", "int4"])
def test_codes_train_nearly_as_values_and_always_alike(plan: str, codec: str) -> None:
    for full, one, other in on_ranks(2, trained_twice, plan, codec):
        assert_same_bits(one, other, f"two runs of {codec} at plan {plan}")
        assert one.losses != full.losses, "nothing was lost: no codes travelled"
        torch.testing.assert_close(one.losses, full.losses, rtol=0.1 if codec == "int8" else 0.5, atol=1e-3)


@pytest.mark.parametrize(
    "zero",
    [{"stage": 0}, {"stage": 1}, {"stage": 3, "hierarchical": True}, {"stage": 3, "replicate": "nodes"}],
    ids=str,
)
def test_ranks_decode_the_same_bits(zero: dict[str, Any]) -> None:
    parameters = {"parameters": "int8"} if zero["stage"] == 3 else {}
    config = {
        "zero": zero,
        "clip_grad_norm": 0.1,
        "optimizer": {"lr": 2e-3},
        "communication": {"gradients": "int4", **parameters},
    }
    first, *others = on_ranks(4, equal_on_all_ranks, config, 2)
    assert all(losses == first for losses in others)
    assert first[-1] < first[0]


def test_looking_shows_what_rests() -> None:
    on_ranks(2, exact_where_looked_at)


def test_exact_values_after_an_evaluation() -> None:
    on_ranks(2, exact_after_evaluation)


@pytest.mark.parametrize("plan", ["1", "3"])
def test_a_resumed_run_is_the_continued_one(tmp_path: Path, plan: str) -> None:
    on_ranks(2, resumed, tmp_path, plan)


@pytest.mark.parametrize("plan", ["0", "2", "3"])
def test_what_is_not_finite_is_told_by_codes_too(plan: str) -> None:
    on_ranks(2, not_finite, plan)


@pytest.mark.parametrize(("plan", "ranks_per_node"), sampled(product(ZERO, (4, 2)), ("1", 2), ("3-kept", 4)))
def test_the_first_steps_travel_as_asked(plan: str, ranks_per_node: int) -> None:
    on_ranks(4, first_steps_in_codes, plan, ranks_per_node)


FIRST = {"warmup_steps": 5, "warmup": "int8"}


@pytest.mark.parametrize(
    ("asked", "at"),
    sampled(
        [
            ({"communication": FIRST | {"gradients": "ternary", "parameters": "ternary"}}, 3),
            ({"zero": {"stage": 0}, "communication": FIRST, "optimizer": {"name": "onebit_adam"}}, 6),
            ({"communication": FIRST | {"gradients": "low_rank"}}, 3),
            ({"communication": FIRST | {"gradients": "ternary", "every": 2, "replicas": 2}}, 3),
        ],
        ({"communication": FIRST | {"gradients": "ternary", "parameters": "ternary"}}, 3),
    ),
    ids=str,
)
def test_a_run_resumed_in_its_first_steps_is_the_continued_one(tmp_path: Path, asked: dict[str, Any], at: int) -> None:
    on_ranks(2, resumed_in_codes, tmp_path, asked | {"zero": {"stage": 1} | asked.get("zero", {})}, at)
