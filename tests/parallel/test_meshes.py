"""Meshes of several axes: training matches one process, and ZeRO stages that accumulate alike match bit for bit."""

import math
from typing import Any

import pytest
import torch

import partita
from partita import ConfigError
from partita.table.place import even
from tests.compression.lossless import lossless
from tests.compression.test_wires import on_nodes_of
from tests.kit.plans import TIERS, matrix
from tests.kit.ranks import on_ranks
from tests.kit.training import Trained, whole_weights
from tests.parallel import training, zoo
from tests.parallel.training import ADAMW, CLIP

MICROS = 2
TIMEOUT_S = 400
PAIRS = ({"tensor": 2, "pipeline": 2}, {"tensor": 2, "sequence": 2}, {"pipeline": 2, "sequence": 2})
HIERARCHICAL = {"stage": 3, "hierarchical": True}
CODED = {"gradients": "ternary", "parameters": "ternary"}
STAGES = [{"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 3}, TIERS["3-host"]]


def course(name: str, parallel: dict[str, Any], zero: dict[str, Any], num_steps: int, **sections: Any) -> Trained:
    """Train with ``train_batch``. The models have no dropout, so the loss of ``eval_batch`` must be the same."""
    config = {
        "parallel": parallel,
        "zero": zero,
        "batch": {"accumulate": MICROS},
        "clip_grad_norm": CLIP,
        "optimizer": {"name": "adamw", **ADAMW},
        **sections,
    }
    found = Trained()
    with partita.initialize(zoo.build(name), config, loss_fn=lambda output, batch: zoo.loss_of(output)) as engine:
        first, num = engine.mesh.coordinate("data") * MICROS, engine.mesh.size("data") * MICROS
        for step in range(num_steps):
            micros = [training.part(name, step, first + micro, num) for micro in range(MICROS)]
            evaluated = engine.eval_batch(micros).item() if step == 0 else None
            found.losses.append(engine.train_batch(micros).item())
            assert evaluated is None or evaluated == pytest.approx(found.losses[0], abs=1e-5)
            assert engine.last_step.grad_norm is not None
            found.norms.append(engine.last_step.grad_norm)
        found.weights = whole_weights(engine)
    return found


def check(
    name: str,
    parallel: dict[str, int],
    rows: list[dict[str, Any]],
    num_steps: int,
    num_data: int = 1,
    tensor_rules: dict[str, str] | None = None,
) -> None:
    """Compare with one process, and bit for bit between stages 0 and 1 (which reduce once per batch), and 2 and 3."""
    world = num_data * math.prod(parallel.values())
    (alone,) = on_ranks(1, training.train_alone, name, num_data * MICROS, num_steps, timeout=TIMEOUT_S)
    axes = {**parallel, "tensor_rules": tensor_rules or {}}
    before = dict[bool, Trained]()
    for zero in rows:
        first, *others = on_ranks(world, course, name, axes, zero, num_steps, timeout=TIMEOUT_S)
        assert first.losses == pytest.approx(alone.losses, abs=1e-5)
        assert first.norms == pytest.approx(alone.norms, rel=1e-5)
        reference = before.setdefault(zero["stage"] < 2, first)
        for other in [*others, reference]:
            assert (other.losses, other.norms) == (first.losses, first.norms)
            assert all(torch.equal(other.weights[key], weight) for key, weight in first.weights.items())


def nested(axis: str, stage: int) -> None:
    model = zoo.build("decoder")
    with partita.initialize(model, {"parallel": {axis: 2}, "zero": {"stage": stage}}) as engine:
        block: Any = model.get_submodule("blocks.1")
        weight = block.ffn.down.weight
        whole = engine.state_dict(names=["blocks.1.ffn.down.weight"])
        with engine.gathered(modify=True), torch.no_grad():
            shape = weight.shape
            weight.mul_(2)
            written = weight.clone()
            with engine.gathered(block):
                assert torch.equal(weight, written)
                inner = None if axis == "pipeline" else model(**zoo.batch("decoder", 0, 2)).item()
            assert torch.equal(weight, written)
            assert inner is None or inner == model(**zoo.batch("decoder", 0, 2)).item()
        with engine.gathered(block):
            assert weight.shape == shape
            assert torch.equal(weight, written)
        assert all(torch.equal(2 * value, written) for value in whole.values())
        engine.train_batch([zoo.batch("decoder", 0, 2)])  # on this rank's part again


@pytest.mark.parametrize(("axis", "stage"), [("tensor", 3), ("tensor", 1), ("pipeline", 1), ("sequence", 3)])
def test_blocks_of_gathered_in_one_another(axis: str, stage: int) -> None:
    on_ranks(2, nested, axis, stage, timeout=TIMEOUT_S)


@matrix(parallel=PAIRS, name=("llama", "decoder", "gpt2", "balanced"))
def test_two_axes(parallel: dict[str, int], name: str) -> None:
    check(name, parallel, [{"stage": 0}, {"stage": 3}], num_steps=3)


@pytest.mark.parametrize(("name", "rules"), [("t5", {}), ("t5-decoder", {"T5Attention": "whole"})])
def test_position_biases_that_no_stage_receives_by_heads(name: str, rules: dict[str, str]) -> None:
    check(name, {"pipeline": 2, "tensor": 2}, [{"stage": 1}], num_steps=2, tensor_rules=rules)


def split_biases() -> None:
    with pytest.raises(ConfigError, match=r"'decoder\.block\.0\.layer\.0\.SelfAttention'.*\{T5Attention: whole\}"):
        partita.initialize(zoo.build("t5-decoder"), {"parallel": {"pipeline": 2, "tensor": 2}})


def test_position_biases_that_a_stage_would_receive_by_heads_are_refused() -> None:
    on_ranks(4, split_biases)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", "qwen3moe"])
@pytest.mark.parametrize(
    "parallel", [{"tensor": 3, "sequence": 2}, {"tensor": 2, "sequence": 3}, {"pipeline": 2, "sequence": 3}]
)
def test_three_along_an_axis(parallel: dict[str, int], name: str) -> None:
    """Three ranks on an axis match one process; 3 divides neither most lengths nor key heads nor the vocabulary."""
    check(name, parallel, [{"stage": 1}, {"stage": 3}], num_steps=10)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3moe"])
@pytest.mark.parametrize("parallel", PAIRS)
def test_two_axes_beside_data(parallel: dict[str, int], name: str) -> None:
    check(name, parallel, STAGES, num_steps=10, num_data=2)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_three_axes(name: str) -> None:
    check(name, {"pipeline": 2, "sequence": 2, "tensor": 2}, STAGES, num_steps=10)


def on_nodes(name: str, parallel: dict[str, int], communication: dict[str, Any], num_steps: int) -> Trained:
    """Train with stage 3 on nodes of two ranks; each node has a secondary copy of the parameters."""
    with on_nodes_of(2):
        return course(name, parallel, HIERARCHICAL, num_steps, communication=communication)


def with_nothing_lost(name: str, parallel: dict[str, int], num_steps: int) -> Trained:
    with lossless("ternary"):
        return on_nodes(name, parallel, CODED, num_steps)


@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"sequence": 2}], ids=str)
def test_changes_pass_between_nodes(parallel: dict[str, int]) -> None:
    (alone,) = on_ranks(1, training.train_alone, "llama", 2 * MICROS, 3, timeout=TIMEOUT_S)
    for found in on_ranks(4, with_nothing_lost, "llama", parallel, 3, timeout=TIMEOUT_S):
        assert found.losses == pytest.approx(alone.losses, abs=1e-5)
        assert found.norms == pytest.approx(alone.norms, rel=1e-5)
    first, *others = on_ranks(4, on_nodes, "llama", parallel, CODED, 3, timeout=TIMEOUT_S)
    assert first.losses[-1] != pytest.approx(alone.losses[-1], abs=1e-5)
    for other in others:
        assert (other.losses, other.norms) == (first.losses, first.norms)
        assert all(torch.equal(other.weights[key], weight) for key, weight in first.weights.items())


def tiled(name: str, parallel: dict[str, int], num_steps: int) -> Trained:
    """Train with a loss in tiles of seven rows, which leave an incomplete last tile."""
    return course(name, parallel, {"stage": 3}, num_steps, loss={"tiled": 7 * 4 * zoo.VOCAB})


@matrix(parallel=({"tensor": 2}, {"sequence": 2}, {"tensor": 2, "sequence": 2}), name=("llama", "gpt2"))
def test_tiled_losses(parallel: dict[str, int], name: str) -> None:
    (alone,) = on_ranks(1, training.train_alone, name, MICROS, 2)
    for found in on_ranks(math.prod(parallel.values()), tiled, name, parallel, 2, timeout=TIMEOUT_S):
        assert found.losses == pytest.approx(alone.losses, abs=1e-5)
        assert found.norms == pytest.approx(alone.norms, rel=1e-5)


def sent_over_edges(sequence: int) -> tuple[int, int, int]:
    """Return this rank's stage, its number of positions, and the bytes that it sends to other stages for a batch."""
    config = {"parallel": {"pipeline": 2, "sequence": sequence}, "batch": {"accumulate": MICROS}}
    batch = zoo.batch("llama", 0)
    with partita.initialize(zoo.build("llama"), config) as engine:
        engine.train_batch([batch] * MICROS)  # the first batch also sends requests for missing values
        before = engine.traffic_report().sent_bytes("pipeline")
        engine.train_batch([batch] * MICROS)
        sent = engine.traffic_report().sent_bytes("pipeline") - before
        start, stop = even(zoo.LENGTH, sequence)[engine.mesh.coordinate("sequence")]
        return engine.mesh.coordinate("pipeline"), stop - start, sent


def test_slices_pass_the_edges() -> None:
    """Stages exchange one payload per micro-batch and direction: this rank's positions of two samples."""
    found = on_ranks(4, sent_over_edges, 2)
    assert {(stage, positions) for stage, positions, _ in found} == {(0, 6), (0, 5), (1, 6), (1, 5)}
    for _, positions, sent in found:
        assert sent == MICROS * 2 * positions * zoo.WIDTH * 4
