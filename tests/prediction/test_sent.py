"""Activation bytes that ranks exchange along each axis are predicted exactly."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

import partita
from partita.config.load import load_config
from partita.config.resolve import resolve
from partita.layout.units import group_units
from partita.parallel.sequence import choose
from partita.prediction.estimate import sent_activations, sent_by_axes
from partita.prediction.given_config import Estimate, estimate_config
from partita.prediction.machine import Machine, machine_named
from partita.prediction.model_source import ModelSource, read_source
from partita.prediction.rank_model import RankModel, trace_rank
from partita.prediction.simulate.cluster import Cluster, simulate
from partita.prediction.simulate.rank import SimulatedModel
from partita.prediction.stages import Stage
from partita.prediction.step_cost import StepCost
from partita.prediction.trace.block_trace import Trace
from tests.kit.plans import matrix
from tests.kit.ranks import on_ranks

MICRO, MICROS = 2, 3
MODELS = {
    "gpt": "layers=4,hidden=64,heads=4,vocab=300,context=48",
    "decoder": "family=llama,layers=4,hidden=64,heads=4,kv_heads=2,vocab=300,ffn=96,context=48",
}
AXES: list[dict[str, int]] = [
    {"tensor": 2},
    {"pipeline": 2},
    {"tensor": 2, "pipeline": 2},
    {"sequence": 2},
    {"sequence": 4},
    {"sequence": 2, "tensor": 2},
    {"sequence": 2, "pipeline": 2},
]


def source(name: str) -> ModelSource:
    return read_source(MODELS[name], 24)


def trained(name: str, config: dict[str, Any], stages: Sequence[Stage], trace: Trace) -> tuple[Any, Any]:
    """Return the bytes that this rank sends in its second step, by axes, and their prediction."""
    given = source(name)
    with partita.initialize(given.model, config, loss_fn=lambda output, _: output) as engine:
        for _ in range(2):
            before = engine.traffic_report()
            engine.train_batch([given.batch(MICRO, "cpu") for _ in range(MICROS)])
        found = Counter[str]()
        for key, count in engine.traffic_report().since(before).rows.items():
            found[",".join(key.axes)] += count.sent_bytes
        stage = stages[engine.mesh.coordinate("pipeline")]
        assert all(sent_activations(stage, trace)[axis] > 0 for axis in config["parallel"])
        return dict(found), dict(sent_by_axes(engine.units, stage, trace, MICROS))


def on_paper(name: str, config: dict[str, Any], world: int) -> tuple[RankModel, Trace]:
    given, resolved = source(name), resolve(load_config(config), world, "cpu", world)
    rank_model = trace_rank(given, group_units(given.model, "auto"), resolved, ("none",), MICRO)
    return rank_model, rank_model.traces["none"]


@matrix(axes=AXES, name=MODELS)
def test_activations_sent_are_those_foretold(name: str, axes: dict[str, int]) -> None:
    config = {"parallel": axes, "batch": {"micro": MICRO, "accumulate": MICROS}, "zero": {"stage": 1}}
    world = math.prod(axes.values())
    rank_model, trace = on_paper(name, config, world)
    stages = rank_model.stages(axes.get("pipeline", 1))
    for found, foretold in on_ranks(world, trained, name, config, stages, trace):
        assert found == foretold


def llama(tokens: int) -> ModelSource:
    sizes = {"hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=96, vocab_size=300))
    return ModelSource("llama", model, partial(ids, tokens), tokens)


def t5(tokens: int) -> ModelSource:
    sizes = {"d_model": 64, "d_kv": 16, "num_layers": 4, "num_heads": 4, "d_ff": 96, "vocab_size": 300}
    with torch.device("meta"):
        model = T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))
    return ModelSource("t5", model, partial(ids, tokens), tokens)


def ids(tokens: int, samples: int, device: torch.device | str) -> dict[str, Tensor]:
    whole = torch.zeros(samples, tokens, dtype=torch.long, device=device)
    return {"input_ids": whole, "labels": whole.clone()}


SLICED: dict[str, tuple[Callable[[], ModelSource], dict[str, int]]] = {
    "positions that ranks have different numbers of": (lambda: read_source(MODELS["gpt"], 25), {"sequence": 3}),
    "fewer heads than ranks": (lambda: read_source("layers=4,hidden=64,heads=2,context=48"), {"sequence": 4}),
    "transformers": (lambda: llama(24), {"sequence": 2, "tensor": 2}),
    "an encoder beside, with learned biases": (lambda: t5(24), {"sequence": 2}),
}


@matrix(name=SLICED, checkpoint=["none", "units", "selective"])
def test_a_plan_on_slices_is_what_the_engine_does_without_values(name: str, checkpoint: str) -> None:
    """An estimate with sliced sequences matches the simulated first rank, which has the most positions.

    Sent bytes by axes are exact, and peak activations are within 2%.
    """
    make, axes = SLICED[name]
    world = math.prod(axes.values())
    config = {"parallel": axes, "batch": {"micro": MICRO, "accumulate": 2}, "activations": {"checkpoint": checkpoint}}
    source = make()
    simulated_model = SimulatedModel(lambda: make().model, lambda samples: source.batch(samples, "meta"))
    (rank,) = simulate(simulated_model, {**config, "zero": {"stage": 1}}, Cluster(world, "cpu", world), [0]).ranks
    planned = estimate_config(source, {**config, "zero": {"stage": 1}}, world)
    sent = Counter[str]()
    for key, count in rank.traffic.rows.items():
        sent[",".join(key.axes)] += count.sent_bytes
    (stage,) = planned.stages
    assert sent["sequence"] > 0
    assert planned.sent(stage) == dict(sent)
    assert planned.held(stage)["activations", "device"] == pytest.approx(rank.activation_bytes, rel=0.02)


def test_a_ring_is_what_it_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose.choose, "__kwdefaults__", choose.choose.__kwdefaults__ | {"max_gathered_bytes": 0})
    source = read_source("layers=4,hidden=64,heads=2,context=48")
    block = estimate_config(source, {"parallel": {"sequence": 4}, "batch": {"micro": MICRO}}, 4).trace.blocks[1]
    keys_and_values = 2 * MICRO * 12 * 64 * 4  # of one rank
    assert block.forward.sent["sequence"] == 3 * keys_and_values  # sent to the next rank in each turn except the last
    assert block.backward.sent["sequence"] == 4 * 2 * keys_and_values  # with their gradients, until they are back


def test_sends_on_slices_take_their_time_on_their_link() -> None:
    slow, fast = (replace(machine_named("h100"), network=rate) for rate in (1e7, 1e12))
    source = read_source("layers=4,hidden=64,heads=16,context=256")
    across, within = (estimate_config(source, {"parallel": {"sequence": num}}, 16) for num in (16, 2))

    def seconds(given: Estimate, machine: Machine) -> float:
        return StepCost(machine, 16, "fp32").seconds(given.trace.blocks[1].forward, given.resolved.mesh)

    assert seconds(across, slow) > 2 * seconds(across, fast)
    assert seconds(within, slow) == seconds(within, fast) > 0


def test_a_layer_of_llama_sums_four_times() -> None:
    config = {"parallel": {"tensor": 2}, "batch": {"micro": MICRO}}
    trace = on_paper("decoder", config, 2)[1]
    block = trace.blocks[1]
    states = MICRO * 24 * 64 * 4
    assert block.forward.sent_bytes == block.backward.sent_bytes == 2 * states
    assert block.received_bytes == states
