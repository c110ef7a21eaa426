"""Pipeline parallelism on several processes: the bits of data parallelism, at every ZeRO stage and schedule."""

import copy
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import partita
from partita import ConfigError, PartitaError
from partita.layout.off_stage import is_off_stage
from partita.parallel.pipeline.deferred_gradients import DeferredGradients
from partita.table.traffic import TrafficCount
from tests.kit import plans
from tests.kit.plans import matrix, sampled
from tests.kit.ranks import on_ranks
from tests.kit.training import Trained, assert_same_bits, whole_weights
from tests.parallel import stages

STEPS, MICROS, CLIP = 3, 4, 0.05
ZERO: dict[str, dict[str, Any]] = {
    **plans.ZERO,
    "3-once": {"stage": 3, "keep_gathered": True, "keep_gradients": True},
    "3-host": plans.TIERS["3-host"],
}
VOCAB = 32
SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "gpipe": {"schedule": "gpipe"},
    "interleaved": {"schedule": "interleaved", "chunks": 2},
    "zero_bubble": {"schedule": "zero_bubble"},
}
UNTIED = tuple(name for name in stages.BUILD if name not in stages.TIED)
TOLERANCE = 1e-5


@dataclass
class TrainingRun(Trained):
    """Training run of one rank, with the evaluation loss, and the names of the parameters of its stage."""

    evaluated: float = 0.0
    held: set[str] = field(default_factory=set)


def course(name: str, parallel: Mapping[str, Any], zero: Mapping[str, Any], compute: str = "fp32") -> TrainingRun:
    config = {
        "precision": {"compute": compute},
        "parallel": parallel,
        "zero": zero,
        "batch": {"micro": 2, "accumulate": MICROS},
        "optimizer": {"lr": 2e-3},
        "clip_grad_norm": CLIP,
    }
    found = TrainingRun()
    with partita.initialize(stages.build(name), config, loss_fn=stages.loss_of) as engine:
        data = engine.mesh.coordinate("data")
        for step in range(STEPS):
            batches = (stages.batch(name, 100 * step + 10 * micro + data) for micro in range(MICROS))
            found.losses.append(engine.train_batch(batches).item())
            found.norms.append(engine.last_step.grad_norm)
        found.evaluated = engine.eval_batch([stages.batch(name, 7 + micro) for micro in range(3)]).item()
        assert engine.module.training
        found.held = {key for key, param in engine.module.named_parameters() if not is_off_stage(param)}
        found.weights = whole_weights(engine)
    return found


@matrix(name=UNTIED, zero=ZERO, mesh=((2, 1), (3, 1), (2, 2)))
def test_bits_are_those_of_data_parallelism(name: str, zero: str, mesh: tuple[int, int]) -> None:
    pipeline, data = mesh
    expected = on_ranks(data, course, name, {}, ZERO[zero], timeout=240)[0]
    assert all(norm is not None and norm > CLIP for norm in expected.norms)
    found = on_ranks(pipeline * data, course, name, {"pipeline": pipeline}, ZERO[zero], timeout=240)
    held = set[str]()
    for one in found:
        assert_same_bits(one, expected)
        assert one.evaluated == expected.evaluated
        assert 0 < len(one.held) < len(expected.weights)
        held |= one.held
    assert held == expected.held


@matrix(schedule=SCHEDULES, zero=ZERO)
def test_every_order_of_work_has_the_same_bits(schedule: str, zero: str) -> None:
    expected = on_ranks(1, course, "llama", {}, ZERO[zero], timeout=240)[0]
    for one in on_ranks(2, course, "llama", {"pipeline": 2, **SCHEDULES[schedule]}, ZERO[zero], timeout=240):
        assert_same_bits(one, expected)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_models_built_in_another_dtype_have_the_same_bits(schedule: str) -> None:
    """A stage receives values in the previous stage's compute dtype, not in the dtype of its parameters as built."""
    (expected,) = on_ranks(1, course, "llama", {}, ZERO["1"], "bf16", timeout=240)
    for one in on_ranks(2, course, "llama", {"pipeline": 2, **SCHEDULES[schedule]}, ZERO["1"], "bf16", timeout=240):
        assert_same_bits(one, expected)
        assert one.evaluated == expected.evaluated


def in_fp16(schedule: str, precision: Mapping[str, Any]) -> list[float]:
    config = {
        "precision": {"compute": "fp16", **precision},
        "parallel": {"pipeline": 2, "schedule": schedule},
        "batch": {"micro": 2, "accumulate": MICROS},
    }
    with partita.initialize(stages.build("skipping"), config) as engine:
        batches = ([stages.batch("skipping", 10 * step + micro) for micro in range(MICROS)] for step in range(STEPS))
        return [engine.train_batch(batch).item() for batch in batches]


@pytest.mark.parametrize("precision", [{"mode": "autocast"}, {"keep_fp32": ["LayerNorm"]}], ids=["autocast", "norms"])
def test_gradients_in_fp16_are_scaled_once_under_every_schedule(precision: dict[str, Any]) -> None:
    """On one data rank gradients in fp32 stay where autograd puts them, also those that a schedule does not defer."""
    expected = on_ranks(2, in_fp16, "1f1b", precision)
    assert on_ranks(2, in_fp16, "zero_bubble", precision) == expected
    assert len(set(expected[0])) == STEPS


@dataclass
class Batch:
    """Record of a run: elements of weight gradients computed with backward and later, traffic, and all weights."""

    with_backward: int = 0
    later: int = 0
    sent: dict[Any, TrafficCount] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


def batch_apart(config: Mapping[str, Any], schedule: str, monkeypatch: pytest.MonkeyPatch) -> Batch:
    config = {**config, "parallel": {**config["parallel"], "schedule": schedule}, "batch": {"accumulate": MICROS}}
    found = Batch()

    def add_gradient(left: DeferredGradients, param: nn.Parameter, gradient: Tensor) -> None:
        found.with_backward += gradient.numel()
        came(left, param, gradient)

    def run(left: DeferredGradients) -> None:
        found.later += sum(param.numel() for param in left.params.values())
        later(left)

    came, later = DeferredGradients.add_gradient, DeferredGradients.run
    monkeypatch.setattr(DeferredGradients, "add_gradient", add_gradient)
    monkeypatch.setattr(DeferredGradients, "run", run)
    model = stages.build("llama")
    model.config.use_cache = False  # a recomputed block would append its keys again
    with partita.initialize(model, config) as engine:
        data = engine.mesh.coordinate("data")
        for step in range(2):
            engine.train_batch(stages.batch("llama", 100 * step + 10 * micro + data) for micro in range(MICROS))
        found.sent = {key: count for key, count in engine.traffic_report().rows.items() if key.purpose != "control"}
        with engine.gathered():
            found.weights = {key: param.detach().clone() for key, param in engine.module.named_parameters()}
    return found


def both_orders(config: Mapping[str, Any]) -> tuple[Batch, Batch]:
    with pytest.MonkeyPatch.context() as patch:
        apart = batch_apart(config, "zero_bubble", patch)
    with pytest.MonkeyPatch.context() as patch:
        return apart, batch_apart(config, "1f1b", patch)


UNDER_ZERO_BUBBLE: dict[str, dict[str, Any]] = {
    "data, stage 2": {"parallel": {"pipeline": 2}, "zero": {"stage": 2}},
    "data, stage 3": {"parallel": {"pipeline": 2}, "zero": {"stage": 3}},
    "data, stage 3, recomputed": {
        "parallel": {"pipeline": 2},
        "zero": {"stage": 3},
        "activations": {"checkpoint": "units"},
    },
    "tensor": {"parallel": {"pipeline": 2, "tensor": 2}, "zero": {"stage": 3}},
    "four stages": {"parallel": {"pipeline": 4}, "zero": {"stage": 1}},
}


@pytest.mark.parametrize("case", sampled(UNDER_ZERO_BUBBLE, "data, stage 3, recomputed", "tensor", "four stages"))
def test_weights_apart_are_nearly_all_and_change_no_bit_and_no_byte(case: str) -> None:
    for apart, whole in on_ranks(4, both_orders, UNDER_ZERO_BUBBLE[case], timeout=240):
        assert apart.sent == whole.sent
        assert [key for key, weight in apart.weights.items() if not torch.equal(weight, whole.weights[key])] == []
        assert whole.later == whole.with_backward == 0
        assert apart.with_backward < 0.02 * apart.later


@matrix(name=stages.TIED, zero=ZERO, num_stages=(2, 3))
def test_tied_parameters_are_alike_on_all_their_stages(name: str, zero: str, num_stages: int) -> None:
    alike_on_all_stages(name, zero, num_stages)


def test_what_one_of_three_stages_does_not_use_is_clipped_there_too() -> None:
    alike_on_all_stages("skipping", "1", 3)


def alike_on_all_stages(name: str, zero: str, num_stages: int) -> None:
    expected = on_ranks(1, course, name, {}, ZERO[zero], timeout=240)[0]
    found = on_ranks(num_stages, course, name, {"pipeline": num_stages}, ZERO[zero], timeout=240)
    copies = dict[str, Tensor]()
    for one in found:
        for loss, other in zip(one.losses, expected.losses, strict=True):
            assert math.isclose(loss, other, rel_tol=TOLERANCE)
        for norm, other_norm in zip(one.norms, expected.norms, strict=True):
            assert norm is not None
            assert other_norm is not None
            assert math.isclose(norm, other_norm, rel_tol=TOLERANCE)
        for key, weight in one.weights.items():
            assert torch.equal(copies.setdefault(key, weight), weight), key


def sent(zero: str) -> tuple[dict[str, TrafficCount], int, int]:
    """Return the traffic of a batch by purpose, the number of elements of a payload, and the number of units."""
    config = {"parallel": {"pipeline": 2}, "zero": ZERO[zero], "batch": {"accumulate": MICROS}}
    with partita.initialize(stages.build("llama"), config) as engine:
        batch = stages.batch("llama", 0)
        engine.train_batch([batch] * MICROS)
        before = engine.traffic_report()
        engine.train_batch([batch] * MICROS)
        rows = engine.traffic_report().since(before).rows
    found = {key.purpose: count for key, count in rows.items() if key.purpose != "control"}
    return found, batch["input_ids"].numel() * stages.WIDTH, len(engine.units)


def sent_by_all() -> dict[str, tuple[dict[str, TrafficCount], int, int]]:
    return {zero: sent(zero) for zero in ("3", "3-kept", "3-once")}


def test_bytes_sent() -> None:
    """A micro-batch sends one payload per direction; with ``keep_gathered``, parameters are all-gathered once per
    batch, and with ``keep_gradients``, gradients are reduced once per batch.
    """
    for by_row in on_ranks(4, sent_by_all):
        once = by_row["3-once"][0]["gradients"]
        for zero, gathers, reductions in (("3", 2 * MICROS, MICROS), ("3-kept", 1, MICROS), ("3-once", 1, 1)):
            found, elements, num_units = by_row[zero]
            assert found["pipeline"] == TrafficCount(MICROS, MICROS * elements * 4)
            assert found["parameters"].calls == num_units * gathers
            assert found["gradients"].sent_bytes == reductions * once.sent_bytes
            assert found["gradients"].calls == reductions * once.calls


def only_by_batches() -> None:
    config = {"parallel": {"pipeline": 2}, "batch": {"accumulate": 2}}
    with partita.initialize(stages.build("llama"), config) as engine:
        batch = stages.batch("llama", 0)
        for call in (lambda: engine(**batch), lambda: engine.backward(torch.ones(())), engine.step):
            with pytest.raises(PartitaError, match=r"split into 2 stages .* call engine.train_batch\(iterator\)"):
                call()
        engine.train_batch([batch] * 2)


def test_stages_are_fed_by_batches_alone() -> None:
    on_ranks(2, only_by_batches)


def evaluated(world: int) -> None:
    with partita.initialize(stages.build("llama"), {"zero": {"stage": 3}, "batch": {"accumulate": 2}}) as engine:
        batches = [stages.batch("llama", number) for number in range(3)]
        expected = torch.stack([stages.loss_of(engine(**batch)).detach() for batch in batches])
        assert engine.eval_batch(batches).item() == pytest.approx(expected.mean().item())
        iterator = iter(batches)
        assert engine.eval_batch(iterator).item() == pytest.approx(expected[:2].mean().item())
        assert engine.eval_batch(iterator).item() == pytest.approx(expected[2].item())
        with pytest.raises(StopIteration):
            engine.eval_batch(iterator)
        if world > 1:
            with pytest.raises(PartitaError, match="rank 0 has 1 micro-batches and rank 1 has 2"):
                engine.eval_batch(batches[: 1 + engine.mesh.rank])
        with pytest.raises(PartitaError, match="got a dict"):
            engine.eval_batch(batches[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("world", [1, 2])
def test_evaluation_without_a_pipeline(world: int) -> None:
    on_ranks(world, evaluated, world)


WRONG = [
    (
        {"parallel": {"pipeline": 2}, "precision": {"gradients": "in_backward"}},
        "in_backward updates a stage's parameters",
    ),
    ({"parallel": {"pipeline": 2, "chunks": 2}}, "Fix: set parallel.schedule: interleaved"),
    ({"parallel": {"pipeline": 2, "schedule": "interleaved"}}, "Fix: set parallel.chunks: 2"),
    (
        {"parallel": {"pipeline": 3}},
        r"(?s)2 ranks cannot be divided by .*; or set pipeline 2 or pipeline 1, which divides 2 ranks",
    ),
    (
        {"parallel": {"pipeline": 2, "chunks": 3, "schedule": "interleaved"}},
        "6 stages, but LlamaForCausalLM has 4 blocks",
    ),
    ({"parallel": {"pipeline": 2, "cut": ["model.layers.7"]}}, "'model.layers.7' is no module of LlamaForCausalLM"),
]


def wrong() -> None:
    for config, message in WRONG:
        model = stages.build("llama")
        with pytest.raises(ConfigError, match=message):
            partita.initialize(model, config)
        assert type(model.lm_head.weight) is nn.Parameter


def test_what_cannot_be_cut() -> None:
    on_ranks(2, wrong)


def generated(stage: int) -> None:
    """Check that inside ``gathered`` each rank runs the model as one process does, and later batches do not change."""
    model, batch = stages.build("llama"), stages.batch("llama", 0)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "use_cache": True}
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    plain = copy.deepcopy(model).eval()
    config = {"parallel": {"pipeline": 2}, "zero": {"stage": stage}, "optimizer": {"lr": 0.0, "weight_decay": 0.0}}
    with partita.initialize(model, config) as engine:
        losses = [engine.train_batch([batch]).item()]
        norm = engine.last_step.grad_norm
        model.eval()
        with engine.gathered(), torch.no_grad():
            assert torch.equal(model.generate(**inputs, **options), plain.generate(**inputs, **options))
            assert engine(**batch).loss.item() == plain(**batch).loss.item()
        model.train()
        losses.append(engine.train_batch([batch]).item())
        assert losses[0] == losses[1]
        with engine.gathered(model.lm_head), pytest.raises(PartitaError, match="call the model inside engine.gathered"):
            model(**batch)
        with pytest.raises(PartitaError, match="this rank stores gradients only of its own stage"), engine.gathered():
            engine(**batch).loss.backward()
        assert engine.train_batch([batch]).item() == losses[0]
        assert engine.last_step.grad_norm == norm


@pytest.mark.parametrize("stage", [1, 3])
def test_text_is_generated_on_a_gathered_model(stage: int) -> None:
    on_ranks(4, generated, stage)


def bypassing() -> str:
    config = {"parallel": {"pipeline": 2}, "batch": {"accumulate": 2}}
    with partita.initialize(stages.Skipping(skips=True), config) as engine:
        try:
            engine.train_batch([stages.batch("skipping", 0)] * 2)
        except PartitaError as error:
            return str(error)
    return ""


def test_a_value_that_bypasses_the_cut_is_named() -> None:
    _, last = on_ranks(2, bypassing)
    assert "the loss needs a value that depends on 'embedding.weight'" in last


class Leaking(nn.Module):
    """Model whose loss, or code between blocks, uses values that the blocks do not return.

    Args:
        way: how such a value leaves a block.
    """

    class Block(nn.Module):
        def __init__(self, way: str) -> None:
            super().__init__()
            self.way, self.router, self.up = way, nn.Linear(16, 2), nn.Linear(16, 16)
            self.auxiliary = torch.zeros(())

        def forward(self, x: Tensor) -> Tensor:
            shares = self.router(x).softmax(-1)
            output = torch.zeros_like(x)
            chosen = (shares[..., 0] > shares[..., 1]).nonzero(as_tuple=True)
            output[chosen] = self.up(x[chosen]) * shares[chosen][:, :1]
            self.auxiliary = shares.square().mean()
            return x + output

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.collected = way, list[Tensor]()
        self.embedding = nn.Embedding(VOCAB, 16)
        self.blocks = nn.ModuleList(self.Block(way) for _ in range(4))
        self.head = nn.Linear(16, VOCAB)
        for block in self.blocks:
            if way == "a hook's list":
                block.register_forward_hook(lambda module, args, output: self.collected.append(output))
            elif way == "a hook's return value":
                block.register_forward_hook(lambda module, args, output: torch.cat([output, output[:, :1]], 1))
            elif way == "a hook that logs":
                block.register_forward_hook(lambda module, args, output: self.logged.append(output.mean().item()))
        self.logged = list[float]()

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        self.collected.clear()
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
            if self.way == "a write in place":
                padded = torch.zeros(len(x), x.shape[1], 16)
                padded[:] = x
                x = padded
        loss = F.cross_entropy(self.head(x[:, : labels.shape[1]]).flatten(0, 1), labels.flatten())
        if self.way == "an attribute":
            loss = loss + sum(block.auxiliary for block in self.blocks)
        return loss + sum(value.square().mean() for value in self.collected)


def leaked(way: str) -> tuple[str, float, int]:
    """Return the error of a batch (empty if there is none), the loss, and the number of values that hooks logged."""
    torch.manual_seed(0)
    batch = {"input_ids": torch.arange(12).view(2, 6), "labels": torch.arange(1, 13).view(2, 6)}
    with partita.initialize(Leaking(way), {"parallel": {"pipeline": dist.get_world_size()}}) as engine:
        try:
            return "", float(engine.train_batch([batch])), len(engine.module.logged)
        except PartitaError as error:
            return str(error), math.nan, 0


LEAKS = {
    "a hook's list": "the loss needs a value that depends on 'blocks.0'",
    "an attribute": "the loss needs a value that depends on 'blocks.0",
    "a write in place": "writes a value that depends on .* into a tensor of this stage",
}


@pytest.mark.parametrize("way", LEAKS)
def test_values_that_leave_a_block_of_another_stage_unreturned_are_named(way: str) -> None:
    _, (last, _, _) = on_ranks(2, partial(leaked, way))
    assert re.search(LEAKS[way], last)


@pytest.mark.parametrize("way", ["a hook's return value", "a hook that logs"])
def test_hooks_of_blocks_of_other_stages(way: str) -> None:
    ((_, expected, logs),) = on_ranks(1, partial(leaked, way))
    of_ranks = on_ranks(2, partial(leaked, way))
    for error, loss, _ in of_ranks:
        assert not error
        assert loss == pytest.approx(expected, abs=1e-6)
    assert sum(logged for _, _, logged in of_ranks) == logs  # each rank logs only for its own blocks


def counts_forwards(config: dict[str, Any]) -> tuple[int, list[bool]]:
    """Return the forwards of a batch of three micro-batches, and whether each step of a loop updated."""
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    num, loss_fn = [0], lambda output, batch: output.square().mean()
    model.register_forward_hook(lambda *_: num.__setitem__(0, num[0] + 1))
    with partita.initialize(model, config, loss_fn=loss_fn) as engine:
        engine.train_batch(iter([torch.randn(2, 4)] * 3))
        stepped = []
        for _ in range(3):
            engine.backward(engine(torch.randn(2, 4)).square().mean())
            stepped.append(engine.step().stepped)
    return num[0] - 3, stepped


def test_without_a_pipeline_chunks_are_ignored() -> None:
    config = {"parallel": {"schedule": "interleaved", "chunks": 2}, "batch": {"accumulate": 3}}
    assert counts_forwards(config) == (3, [False, False, True])
