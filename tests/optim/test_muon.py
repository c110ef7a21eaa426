"""Muon: the same bits at every stage and tier, and the results of torch.optim.Muon under every parallel axis."""

import logging
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import partita
from partita import ConfigError
from partita.config.load import load_config
from partita.config.resolve import resolve
from partita.config.schema import Muon as MuonSection
from partita.layout import owners
from partita.layout.blueprint import make_blueprint
from partita.layout.owners import Exchanges
from partita.layout.traffic import UPDATES
from partita.optim.matrices import MatrixForm, describe, equal_parts, find_matrices
from partita.optim.muon import Muon
from partita.optim.newton_schulz import EPS, orthogonalize, scale_of
from partita.prediction.model_source import read_source
from partita.prediction.optimizer_plan import plan_optimizer
from partita.table.traffic import TrafficCount, TrafficKey, TrafficMeter
from tests.kit import seeds
from tests.kit.models import Case, tiny
from tests.kit.plans import TIERS, ZERO, sampled
from tests.kit.ranks import on_ranks
from tests.kit.training import (
    Trained,
    assert_same_bits,
    loss_of,
    quiet,
    rank,
    train_engine,
    train_module,
    whole_weights,
    world,
)

STEPS = 10
OPTIMIZER = {"name": "muon", "lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}
CONFIG: dict[str, Any] = {"optimizer": OPTIMIZER, "clip_grad_norm": 0.5}

Rows = dict[TrafficKey, TrafficCount]


def muon(**settings: Any) -> dict[str, Any]:
    return {**OPTIMIZER, "muon": settings}


def trained(case: Case, config: Mapping[str, Any], *, steps: int = 3, data: int | None = None) -> Trained:
    with partita.initialize(case.build(), {**CONFIG, **config}, loss_fn=case.loss_of_batch) as engine:
        return train_engine(engine, loss_of(case), steps, data=data, keep=())


# -- stages and tiers --------------------------------------------------------------------------------------------------


def stages_have_the_same_bits(name: str, steps: int) -> None:
    case = tiny(name)
    plans = ZERO | TIERS if dist.get_world_size() == 2 else {key: ZERO[key] for key in ("0", "1", "3")}
    results = {key: trained(case, {"zero": zero}, steps=steps) for key, zero in plans.items()}
    assert all(norm is not None and norm > 0.5 for norm in results["0"].norms), "nothing is clipped"
    for key, result in results.items():
        assert_same_bits(result, results["0"], f"stage {key}")


@pytest.mark.parametrize("name", sampled(["llama", "gpt2", "qwen3moe", "phi3", "t5"], "llama", "qwen3moe"))
def test_stages_and_tiers_have_the_same_bits(name: str) -> None:
    on_ranks(2, stages_have_the_same_bits, name, STEPS if name == "llama" else 3)


def test_four_ranks_have_the_same_bits() -> None:
    on_ranks(4, stages_have_the_same_bits, "llama", 3)


def composes_with(communication: dict[str, Any]) -> None:
    nodes = {"LOCAL_RANK": str(rank() % 2), "LOCAL_WORLD_SIZE": "2"}
    with mock.patch.dict(os.environ, nodes):
        first, second = (
            trained(tiny("llama"), {"zero": {"stage": stage}, "communication": communication}, steps=4)
            for stage in (1, 2)
        )
    assert_same_bits(first, second)
    found: list[Any] = [None] * world()
    dist.all_gather_object(found, first.weights)
    assert all(torch.equal(other[name], first.weights[name]) for other in found for name in first.weights)
    assert not torch.equal(
        first.weights["lm_head.weight"], trained(tiny("llama"), {}, steps=4).weights["lm_head.weight"]
    )


@pytest.mark.parametrize("communication", [{"every": 2}, {"gradients": "int8"}], ids=str)
def test_composes_with_slow_networks(communication: dict[str, Any]) -> None:
    on_ranks(4, composes_with, communication)


# -- against torch.optim.Muon ------------------------------------------------------------------------------------------


class Plain(torch.optim.Optimizer):
    """torch.optim.Muon on the matrices of an unfused model, in fp32, and AdamW on the remaining parameters."""

    def __init__(self, model: nn.Module) -> None:
        matrices = find_matrices(model)
        chosen, rest = [], []
        for param in model.parameters():
            (chosen if id(param) in matrices else rest).append(param)
        assert chosen
        assert rest
        settings = {"lr": OPTIMIZER["lr"], "weight_decay": OPTIMIZER["weight_decay"]}
        self._muon = torch.optim.Muon(chosen, adjust_lr_fn="match_rms_adamw", **settings)
        self._adamw = torch.optim.AdamW(rest, eps=OPTIMIZER["eps"], **settings)
        super().__init__(model.parameters(), {})

    def step(self, closure: Any = None) -> None:
        with mock.patch.object(Tensor, "bfloat16", Tensor.clone):
            self._muon.step()
        self._adamw.step()


def plain(case: Case, *, steps: int, num_data: int, own: int | None = None, **settings: Any) -> Trained:
    model = case.build()
    loss, clip = loss_of(case), CONFIG["clip_grad_norm"]

    def made(params: Any) -> Plain:
        return Plain(model)

    return train_module(model, loss, steps, num_data=num_data, own=own, optimizer=made, clip=clip, keep=(), **settings)


def equals_torch(stage: int, parallel: Mapping[str, Any], tolerance: float) -> None:
    case = tiny("llama")
    config = {**CONFIG, "zero": {"stage": stage}, "parallel": parallel}
    with quiet("rank"), partita.initialize(case.build(), config, loss_fn=case.loss_of_batch) as engine:
        data = engine.mesh.coordinate("data")
        expected = plain(case, steps=STEPS, num_data=engine.mesh.size("data"), own=data)
        if engine.mesh.size("pipeline") > 1:
            found = Trained()
            for step in range(STEPS):
                engine.train_batch(iter([case.batch(4, 1000 * step + data)]))
                found.norms.append(engine.last_step.grad_norm)
            found.weights = whole_weights(engine)
        else:
            found = train_engine(engine, loss_of(case), STEPS, data=data, keep=())
    assert found.norms == pytest.approx(expected.norms, rel=10 * tolerance)
    for name, weights in expected.weights.items():
        torch.testing.assert_close(found.weights[name], weights, rtol=0, atol=tolerance)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_equals_torch_on_one_process(num_ranks: int) -> None:
    on_ranks(num_ranks, equals_torch, 3 if num_ranks > 1 else 0, {}, 1e-6)


AXES = {
    "tensor": (2, {"tensor": 2}),
    "pipeline": (2, {"pipeline": 2}),
    "sequence": (2, {"sequence": 2}),
    "tensor x data": (4, {"tensor": 2}),
    "pipeline x data": (4, {"pipeline": 2}),
    "sequence x data": (4, {"sequence": 2}),
    "tensor x pipeline": (4, {"tensor": 2, "pipeline": 2}),
}


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("axes", sampled(AXES, "tensor", "pipeline", "sequence", "tensor x data"))
def test_equals_torch_under_every_axis(axes: str, stage: int) -> None:
    num_ranks, parallel = AXES[axes]
    on_ranks(num_ranks, equals_torch, stage, parallel, 1e-5)


def accumulated_equals_one_batch() -> None:
    case = tiny("llama")
    results = []
    for accumulate in (1, 4):
        batch = {"micro": 4 // accumulate, "accumulate": accumulate}
        with partita.initialize(case.build(), {**CONFIG, "zero": {"stage": 2}, "batch": batch}) as engine:
            for step in range(5):
                whole = case.batch(4, 10 * step + rank())
                for micro in range(accumulate):
                    part = {key: values.chunk(accumulate)[micro] for key, values in whole.items()}
                    engine.backward(case.loss(engine(**part)))
                    engine.step()
            results.append(whole_weights(engine))
    for name, weights in results[0].items():
        torch.testing.assert_close(results[1][name], weights, rtol=0, atol=1e-5 * weights.abs().max().item())


def test_accumulated_micro_batches_equal_one_batch() -> None:
    on_ranks(2, accumulated_equals_one_batch)


# -- order of operations -----------------------------------------------------------------------------------------------


def clips_gradients() -> None:
    """Check that the first update has about the learning rate as its spectral norm, however gradients are clipped."""
    seeds.start()
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = {**muon(scale="spectral"), "weight_decay": 0.0}
    config = {"optimizer": optimizer, "clip_grad_norm": 1e-3, "zero": {"stage": 3}}
    with partita.initialize(model, config) as engine:
        engine.backward(engine(torch.randn(8, 64, generator=torch.Generator().manual_seed(rank()))).square().mean())
        engine.step()
        for name, weights in whole_weights(engine).items():
            change = torch.linalg.matrix_norm(weights - before[name], 2).item()
            assert 0.6 * OPTIMIZER["lr"] < change < 1.3 * OPTIMIZER["lr"], change


def test_gradients_are_clipped_and_not_updates() -> None:
    on_ranks(2, clips_gradients)


def skips_change_nothing() -> None:
    case = tiny("llama")
    with partita.initialize(case.build(), {**CONFIG, "zero": {"stage": 3}}) as engine:
        train_engine(engine, loss_of(case), 1, keep=())
        before = whole_weights(engine), states(engine)
        with quiet("step"):
            engine.backward(case.loss(engine(**case.batch(4))) * (math.nan if rank() == 1 else 1.0))
            assert engine.step().skipped
        after = whole_weights(engine), states(engine)
        for one, other in zip(before, after, strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[key], other[key]) for key in one)


def states(engine: partita.Engine) -> dict[str, Tensor]:
    """Return this rank's slices of all states, by group, position and key."""
    found = dict[str, Tensor]()
    for number, group in enumerate(engine.optimizer.param_groups):
        for place, param in enumerate(group["params"]):
            found |= {f"{number} {place} {key}": v.clone() for key, v in engine.optimizer.state[param].items()}
    return found


def test_skipped_steps_change_nothing() -> None:
    on_ranks(2, skips_change_nothing)


def frozen_later() -> None:
    """Check that a parameter keeps its momentum while it is frozen."""
    case, results = tiny("llama"), []

    def freeze(module: nn.Module, step: int) -> None:
        for name, param in module.named_parameters():
            if "layers.1.mlp" in name:
                param.requires_grad_(step != 1)

    for stage in (0, 3):
        with partita.initialize(case.build(), {**CONFIG, "zero": {"stage": stage}}) as engine:
            results.append(train_engine(engine, loss_of(case), 3, keep=(), before_step=freeze))
    assert_same_bits(*results)
    expected = plain(case, steps=3, num_data=world(), before_step=freeze)
    for name, weights in expected.weights.items():
        torch.testing.assert_close(results[0].weights[name], weights, rtol=0, atol=1e-5, msg=name)


def test_parameters_frozen_later() -> None:
    on_ranks(2, frozen_later)


def updates_in_backward() -> None:
    case, results = tiny("llama"), []
    for stage in (1, 3):
        config = {**CONFIG, "zero": {"stage": stage}, "precision": {"gradients": "in_backward"}}
        with partita.initialize(case.build(), config) as engine:
            results.append(train_engine(engine, loss_of(case), 3))
    assert_same_bits(*results)
    no_clip = {key: value for key, value in CONFIG.items() if key != "clip_grad_norm"}
    found = []
    for gradients in ("fp32", "in_backward"):
        config = {**no_clip, "zero": {"stage": 3}, "precision": {"gradients": gradients}}
        with partita.initialize(case.build(), config) as engine:
            found.append(train_engine(engine, loss_of(case), 3, keep=()).weights)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_updates_in_backward_have_the_same_bits() -> None:
    on_ranks(2, updates_in_backward)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def save_after(folder: Path, steps: int, config: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Save after two steps, or resume; return the states at that point, and the weights ``steps`` steps later."""
    case = tiny("qwen3moe")
    with partita.initialize(case.build(), {**CONFIG, **config}, loss_fn=case.loss_of_batch) as engine:
        if engine.resume(folder) is None:
            for step in range(2):
                train_step(engine, case, step)
            engine.save(folder)
        names = [name for name, _ in case.build().named_parameters()]
        states = {f"{name}.{key}": value for name in names for key, value in engine.optimizer_state(name).items()}
        for step in range(2, 2 + steps):
            train_step(engine, case, step)
        return states, whole_weights(engine)


def train_step(engine: partita.Engine, case: Case, step: int) -> None:
    """Train one step on the same batch for any number of data ranks, which each take a part of it."""
    num_data, own = engine.mesh.size("data"), engine.mesh.coordinate("data")
    batch = case.batch(4, step)
    part = {key: values.chunk(num_data)[own] for key, values in batch.items()}
    engine.train_batch(iter([part]))


@pytest.mark.parametrize(
    ("num_ranks", "config"),
    [
        (1, {"zero": {"stage": 0}}),
        (4, {"zero": {"stage": 3}}),
        (2, {"zero": {"stage": 1}, "parallel": {"tensor": 2}}),
        (2, {"zero": {"stage": 3, "offload": {"optimizer": "disk"}}}),
    ],
)
def test_resumes_on_other_layouts(tmp_path: Path, num_ranks: int, config: dict[str, Any]) -> None:
    states, expected = on_ranks(2, save_after, tmp_path, 1, {"zero": {"stage": 3}})[0]
    loaded, found = on_ranks(num_ranks, save_after, tmp_path, 1, config)[0]
    assert loaded.keys() == states.keys()
    assert any(key.endswith("momentum_buffer") for key in states)
    for key, values in states.items():
        assert torch.equal(torch.as_tensor(loaded[key]), torch.as_tensor(values)), key
    for name, weights in expected.items():
        torch.testing.assert_close(found[name], weights, rtol=0, atol=1e-4 * weights.abs().max().item(), msg=name)


def disk_has_each_state_once() -> None:
    """Check that moments on disk fit into the reserved space: two per element of a segment."""
    case = tiny("llama")
    with partita.initialize(case.build(), {**CONFIG, "zero": TIERS["3-disk"]}) as engine:
        train_engine(engine, loss_of(case), 1, keep=())
        updater = engine._parts.updater
        for segment in {id(view.member.segment): view.member.segment for view in updater.views}.values():
            stored = updater.states.on_disk(segment)
            assert stored is not None
            sizes = {key: kept.num_elements for key, kept in stored._kept.items()}
            shard = segment.layout.shard_elements
            assert sum(sizes.values()) <= 2 * shard, sizes
            if "exp_avg" in sizes and "momentum_buffer" in sizes:
                assert sizes["exp_avg"] < shard / 4, sizes


def test_disk_has_each_state_once() -> None:
    on_ranks(2, disk_has_each_state_once)


# -- traffic -----------------------------------------------------------------------------------------------------------


def sent_bytes(stage: int) -> tuple[int, int]:
    """Return the number of fp32 elements that this rank sends in a step: for updates, and in total."""
    case = tiny("llama")
    with partita.initialize(case.build(), {**CONFIG, "zero": {"stage": stage}}) as engine:
        train_engine(engine, loss_of(case), 1, keep=())
        before = engine.traffic_report()
        engine.backward(loss_of(case)(engine, rank(), 1))
        engine.step()
        sent = engine.traffic_report().since(before)
        return sent.sent_bytes(UPDATES) // 4, sent.sent_bytes() // 4


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_traffic_is_that_of_the_formula(num_ranks: int) -> None:
    case = tiny("llama")
    model = case.build()
    matrices = find_matrices(model)
    num = sum(param.numel() for param in model.parameters() if id(param) in matrices)
    everything = sum(param.numel() for param in model.parameters())
    found = on_ranks(num_ranks, sent_bytes, 3)
    updates = [own for own, _ in found]
    assert num * (num_ranks - 1) / num_ranks < sum(updates) <= 2 * num * (num_ranks - 1) / num_ranks
    assert max(updates) <= 1.3 * 2 * num * (num_ranks - 1) / num_ranks**2
    assert max(total for _, total in found) <= 2.7 * everything


def updates_sent(
    parallel: dict[str, Any], name: str = "llama"
) -> tuple[dict[TrafficKey, TrafficCount], dict[TrafficKey, TrafficCount]]:
    """Return this rank's measured and planned exchanges with the owners of matrices in a step."""
    case, config = tiny(name), {**CONFIG, "zero": {"stage": 3}, "parallel": parallel}
    work = plan_optimizer(case.build(), load_config(config)).work
    with partita.initialize(case.build(), config, loss_fn=case.loss_of_batch) as engine:
        engine.train_batch(iter([case.batch(4, engine.mesh.coordinate("data"))]))
        sent = {key: count for key, count in engine.traffic_report().rows.items() if key.purpose == UPDATES}
        meter = TrafficMeter()
        for each in Exchanges(engine.units, work).operations(engine.mesh.rank):
            meter.add(TrafficKey(each.collective, each.axes, UPDATES), each.num_bytes)
        return sent, meter.report().rows


@pytest.mark.parametrize("axes", sampled(AXES, "tensor x data", "pipeline x data"))
def test_traffic_is_planned_under_every_axis(axes: str) -> None:
    num_ranks, parallel = AXES[axes]
    for sent, planned in on_ranks(num_ranks, updates_sent, parallel):
        assert sent == planned
        assert bool(sent) == (axes != "pipeline")


def stacks_are_divided() -> None:
    undivided = trained(tiny("qwen3moe"), {"zero": {"stage": 3}}).weights
    with mock.patch("partita.optim.muon.STACK", 2), mock.patch("partita.optim.newton_schulz.STACK", 2):
        stages_have_the_same_bits("qwen3moe", 3)
        for name, weights in trained(tiny("qwen3moe"), {"zero": {"stage": 3}}).weights.items():
            torch.testing.assert_close(weights, undivided[name], rtol=0, atol=1e-5, msg=name)
        sent, planned = updates_sent({}, "qwen3moe")
        assert sent == planned
        with partita.initialize(tiny("qwen3moe").build(), {**CONFIG, "zero": {"stage": 3}}) as engine:
            assert isinstance(engine.optimizer, Muon)
            owners = engine.optimizer.owners
            assert owners is not None
            experts = [name for name in engine.optimizer.work.costs if "experts" in name]
            assert len(experts) == 4
            assert all(len(owners._routes[name]) == 2 for name in experts)


class Stack(nn.Module):
    """Four matrices whose rows alternate in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4, 8).transpose(0, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight.mT)


def stacks_in_another_order() -> None:
    results = []
    with mock.patch("partita.optim.muon.STACK", 2), mock.patch("partita.optim.newton_schulz.STACK", 2):
        for stage in (0, 3):
            seeds.start()
            config = {"optimizer": muon(rules={"weight": "muon"}), "zero": {"stage": stage}}
            with partita.initialize(Stack(), config) as engine:
                assert len(engine.optimizer.owners._routes["weight"]) == 1  # type: ignore[attr-defined]
                generator = torch.Generator().manual_seed(rank())
                engine.backward(engine(torch.randn(4, 8, generator=generator)).mean())
                engine.step()
                results.append(whole_weights(engine)["weight"])
    assert torch.equal(*results)


def test_stacks_in_another_order_have_one_owner() -> None:
    on_ranks(2, stacks_in_another_order)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_stacked_experts_have_several_owners(num_ranks: int) -> None:
    on_ranks(num_ranks, stacks_are_divided)


# -- matrices ----------------------------------------------------------------------------------------------------------


def chosen(name: str) -> dict[str, MatrixForm]:
    model = tiny(name).build()
    matrices = find_matrices(model)
    return {key: matrices[id(param)] for key, param in model.named_parameters() if id(param) in matrices}


def num_of(forms: Mapping[str, MatrixForm], ending: str) -> set[int]:
    return {max(1, len(form.outputs)) for name, form in forms.items() if name.endswith(ending)}


def test_default_matrices() -> None:
    moe = chosen("qwen3moe")
    assert not any(word in name for name in moe for word in ("embed", "lm_head", "norm", "gate.weight"))
    assert num_of(moe, "gate_up_proj") == {2}
    assert num_of(moe, "down_proj") == {1}
    assert num_of(moe, "q_proj.weight") == {1}
    gpt2 = chosen("gpt2")
    assert num_of(gpt2, "c_attn.weight") == {3}
    assert all(form.transposed for form in gpt2.values())
    assert not any("wte" in name or "wpe" in name or "lm_head" in name for name in gpt2)
    phi3 = chosen("phi3")
    assert num_of(phi3, "qkv_proj.weight") == {3}
    assert num_of(phi3, "gate_up_proj.weight") == {2}
    decoder = chosen("decoder")
    assert {name.rpartition("blocks.0.")[2] for name in decoder if "blocks.0" in name} == {
        f"{name}.weight" for name in ("attention.qkv", "attention.out", "ffn.up", "ffn.down")
    }
    assert num_of(decoder, "qkv.weight") == {3}
    assert num_of(decoder, "up.weight") == {2}


@pytest.mark.parametrize(
    "form",
    [
        MatrixForm(),
        MatrixForm(transposed=True),
        MatrixForm(outputs=equal_parts(12, 3)),
        MatrixForm(True, equal_parts(8, 2)),
        MatrixForm(outputs=(((0, 12, 2),), ((1, 12, 2),))),
        MatrixForm(outputs=(((0, 2, 1), (6, 8, 1)), ((2, 6, 1), (8, 12, 1)))),
    ],
)
@pytest.mark.parametrize("leading", [(), (5,)])
def test_matrices_of_a_parameter(form: MatrixForm, leading: tuple[int, ...]) -> None:
    param = torch.randn(*leading, 12, 8, generator=torch.Generator().manual_seed(0))
    matrices = form.split(param)
    assert sum(matrix.numel() for matrix in matrices) == param.numel()
    assert torch.equal(form.join(matrices), param)
    outputs = 8 if form.transposed else 12
    assert sum(matrix.shape[-2] for matrix in matrices) == outputs


def test_heads_of_fused_projections() -> None:
    """The query, key and value matrices each contain all heads, although GPT-NeoX orders the fused outputs by head."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    model = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=96, **sizes))
    layer = model.gpt_neox.layers[0].attention.query_key_value
    query, key, value = find_matrices(model)[id(layer.weight)].split(layer.weight)
    by_head = layer.weight.view(4, 3, 8, 32)
    for place, matrix in enumerate((query, key, value)):
        assert torch.equal(matrix, by_head[:, place].reshape(32, 32))


@pytest.mark.parametrize("shape", [(24, 8), (8, 24), (7, 7), (1, 5)])
@pytest.mark.parametrize("leading", [(), (3,), (2, 3)])
def test_singular_values(shape: tuple[int, int], leading: tuple[int, ...]) -> None:
    matrix = torch.randn(*leading, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    a, b, c = coefficients = (3.4445, -4.775, 2.0315)
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    s = s / torch.linalg.vector_norm(s, dim=-1, keepdim=True)
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    found = orthogonalize(matrix, coefficients, 5, torch.float64)
    torch.testing.assert_close(found, u * s[..., None, :] @ v, rtol=1e-8, atol=1e-8)
    strided = matrix.mT.contiguous().mT
    assert torch.equal(
        orthogonalize(strided, coefficients, 5, torch.float32), orthogonalize(matrix, coefficients, 5, torch.float32)
    )


def test_zero_matrices_have_no_update() -> None:
    assert EPS > 0
    assert not orthogonalize(torch.zeros(4, 3), (3.4445, -4.775, 2.0315), 5, torch.float32).any()


def test_scales() -> None:
    assert scale_of(8, 32, "rms") == pytest.approx(0.2 * math.sqrt(32))
    assert scale_of(8, 32, "spectral") == pytest.approx(0.5)
    assert scale_of(8, 32, "original") == 1.0
    assert scale_of(32, 8, "original") == scale_of(32, 8, "spectral") == 2.0


def test_two_lines_name_the_parameters() -> None:
    model = tiny("llama").build()
    first, second = describe(model, find_matrices(model))
    assert first.startswith("muon: 14 parameters, ")
    assert "model.layers.*.self_attn.q_proj.weight (2)" in first
    assert "model.embed_tokens.weight" in second
    assert "lm_head.weight" in second


# -- assignment --------------------------------------------------------------------------------------------------------


def test_work_is_even() -> None:
    """Llama-3-8B on 8 to 64 ranks: the largest work of an owner, summed over rounds, is at most 1.1 times the mean."""
    model, config = read_source("llama-3-8b").model, load_config({"optimizer": OPTIMIZER})
    work = plan_optimizer(model, config).work
    for num_ranks in (8, 16, 32, 64):
        units = make_blueprint(model, resolve(config, num_ranks, "cuda", 8)).units
        planned = Exchanges(units, work)
        assert planned.cost <= 1.1 * sum(work.costs.values()) / num_ranks
        assert max(each.num_bytes for each in planned.longest_operations) < 1e9


def more_ranks_than_matrices() -> None:
    results = []
    for stage in (0, 3):
        seeds.start()
        model = nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.LayerNorm(48))
        with partita.initialize(model, {**CONFIG, "zero": {"stage": stage}}) as engine:
            for step in range(3):
                generator = torch.Generator().manual_seed(10 * step + rank())
                engine.backward(engine(torch.randn(4, 16, generator=generator)).square().mean())
                engine.step()
            results.append(whole_weights(engine))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_more_ranks_than_matrices() -> None:
    on_ranks(4, more_ranks_than_matrices)


def lines_at_the_start() -> list[str]:
    lines, handler = list[str](), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("partita")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        partita.initialize(nn.Sequential(nn.Linear(16, 48), nn.Linear(48, 8)), CONFIG).close()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return lines


def test_uneven_work_is_logged() -> None:
    for num_ranks in (1, 4):
        lines, *others = on_ranks(num_ranks, lines_at_the_start)
        found = [line for line in lines if "even work" in line]
        assert len(found) == (num_ranks == 4), lines
        assert all(re.search(r"takes [23]\.\d times as long as with even work: only 2 ", line) for line in found)
        assert not any("even work" in line for other in others for line in other)


def exchanges_in_rounds() -> None:
    case, results = tiny("llama"), []
    for limit in (owners.ROUND_ELEMENTS, 3000):
        with mock.patch.object(owners, "ROUND_ELEMENTS", limit):
            results.append(trained(case, {"zero": {"stage": 3}}))
    assert_same_bits(*results)


def test_exchanges_in_rounds_have_the_same_bits() -> None:
    on_ranks(2, exchanges_in_rounds)


# -- settings ----------------------------------------------------------------------------------------------------------


def test_rules() -> None:
    model = tiny("llama").build()
    names = dict(model.named_parameters())
    rules = [("*.q_proj.weight", "adamw"), ("lm_head.weight", "muon"), ("*.gate_proj.weight", 4)]
    matrices = find_matrices(model, rules)
    assert id(names["model.layers.0.self_attn.q_proj.weight"]) not in matrices
    assert id(names["lm_head.weight"]) in matrices
    assert len(matrices[id(names["model.layers.0.mlp.gate_proj.weight"])].outputs) == 4


@pytest.mark.parametrize(
    ("rules", "problem"),
    [
        ({"*.no_such": "muon"}, r"'\*\.no_such' matches no parameter; names are model\.embed_tokens\.weight"),
        ({"*norm.weight": "muon"}, r"matches 'model\..*norm\.weight', which has the shape \(64,\) and is no matrix"),
        ({"*.q_proj.weight": 7}, "7 matrices cannot share the 64 outputs of"),
        ({"*.q_proj.weight": "sgd"}, "optimizer.muon.rules"),
        ({"*.q_proj.weight": 0}, "optimizer.muon.rules"),
    ],
)
def test_wrong_rules(rules: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        partita.initialize(tiny("llama").build(), {"optimizer": muon(rules=rules)})


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"optimizer": {"muon": {"steps": 3}}}, "optimizer.muon.steps requires optimizer.name: muon; it is adamw"),
        ({"optimizer": {"name": "muon", "momentum": 0.9}}, "muon has optimizer.muon.momentum"),
        ({"optimizer": OPTIMIZER, "precision": {"moments": "int8"}}, "int8 requires adam or adamw"),
        (
            {"optimizer": OPTIMIZER, "precision": {"master": "split", "compute": "bf16"}},
            "split requires adamw, adam, sgd or lion",
        ),
    ],
)
def test_contradictions(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        partita.initialize(nn.Linear(4, 4), config)


def test_an_optimizer_of_the_users_contradicts_it() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="optimizer.name: muon was set, and an optimizer was passed"):
        partita.initialize(model, {"optimizer": OPTIMIZER}, optimizer=torch.optim.AdamW(model.parameters()))


def test_every_setting_is_used() -> None:
    """Each setting of the section changes the weights after two steps."""

    def weights(**settings: Any) -> dict[str, Tensor]:
        case = tiny("llama")
        return trained(case, {"optimizer": muon(**settings)}, steps=2).weights

    base = weights()
    changes: dict[str, Any] = {
        "momentum": 0.5,
        "nesterov": False,
        "steps": 3,
        "coefficients": [2.0, -1.5, 0.5],
        "scale": "spectral",
        "dtype": "bf16",
        "adamw_lr": 0.1,
        "rules": {"*.q_proj.weight": "adamw"},
    }
    assert changes.keys() == MuonSection.model_fields.keys()
    for key, value in changes.items():
        changed = weights(**{key: value})
        assert any(not torch.equal(changed[name], base[name]) for name in base), key
