"""Tests of blueprints: bytes that hundreds of ranks store and send, from a model on ``meta`` and no process groups."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from partita.config.resolve import Resolved, resolve
from partita.config.schema import Config
from partita.errors import ConfigError
from partita.layout.blueprint import Blueprint, describe_large_unit, make_blueprint
from partita.layout.budget import MemoryBudget
from partita.layout.state_bytes import bytes_by_tier, model_state_bytes
from partita.layout.traffic import step_traffic
from partita.table.residence import BF16, FP32, INT8, SPLIT, Tier
from partita.train.decoder import Decoder, DecoderShape

NUM_RANKS = 512
MIXED = {"compute": "bf16", "gradients": "bf16"}


def llama() -> nn.Module:
    shape = LlamaConfig(hidden_size=2048, intermediate_size=5632, num_hidden_layers=4, num_attention_heads=16)
    with torch.device("meta"):
        return LlamaForCausalLM(shape)


def decoder() -> nn.Module:
    with torch.device("meta"):
        return Decoder(DecoderShape(layers=4, width=2048, heads=16, kv_heads=8, ffn_width=5632, vocab=32_000))


def resolved(zero: dict[str, Any], precision: dict[str, Any] | None = None, num_ranks: int = NUM_RANKS) -> Resolved:
    return resolve(Config(zero=zero, precision=precision or {}), num_ranks, "cuda", ranks_per_node=8)


@pytest.mark.parametrize("build", [llama, decoder])
@pytest.mark.parametrize(
    ("zero", "whole", "split", "sent"),
    [
        ({"stage": 0}, 16, 0, 2),
        ({"stage": 1}, 4, 12, 2),
        ({"stage": 2}, 2, 14, 2),
        ({"stage": 3}, 0, 16, 3),
        ({"stage": 3, "keep_gathered": True}, 0, 16, 2),
        ({"stage": 3, "keep_gathered": True, "keep_gradients": True}, 2, 14, 2),
    ],
)
def test_of_512_ranks(build: Any, zero: dict[str, Any], whole: int, split: int, sent: int) -> None:
    """The bytes that a rank stores and sends are the papers' multiples of the parameters, up to padding."""
    model = build()
    num = sum(param.numel() for param in model.parameters())
    blueprint = make_blueprint(model, resolved(zero, MIXED))
    assert not dist.is_initialized()
    assert all(param.is_meta for param in model.parameters())
    assert len(blueprint.units) > 4
    states = sum(model_state_bytes(blueprint.units, 0).values())
    assert states == pytest.approx((whole + split / NUM_RANKS) * num, rel=0.05)
    last = sum(model_state_bytes(blueprint.units, NUM_RANKS - 1).values())
    assert last <= states <= sum(model_state_bytes(blueprint.units, None).values())
    traffic = step_traffic(blueprint.units)
    model_bytes = traffic.sent_bytes("parameters") + traffic.sent_bytes("gradients")
    assert model_bytes == pytest.approx(2 * sent * num, rel=0.05)
    reduced = [segment for bucket in blueprint.buckets for segment in bucket.segments]
    assert reduced == [segment for unit in reversed(blueprint.units) for segment in unit.segments]


def test_the_same_model_gives_the_same_blueprint() -> None:
    settings = resolved({"stage": 3, "hierarchical": True}, MIXED)
    one, other = make_blueprint(llama(), settings), make_blueprint(llama(), settings)
    assert (one, one.buckets) == (other, other.buckets)
    assert one != make_blueprint(llama(), resolved({"stage": 3}, MIXED))
    assert one.resolved.mesh.size("local") == 8
    assert all(segment.has_secondary for unit in one.units for segment in unit.segments)


class Mixed(nn.Module):
    """A model with nested units, batch norms, a shared module, a frozen and an integer parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)])
        self.again = self.blocks[0][0]
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.index = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)


def test_units_and_encodings() -> None:
    config = {"stage": 3, "units": ["Sequential", "Linear"]}
    blueprint = make_blueprint(Mixed(), resolved(config, {"compute": "bf16", "master": "split", "moments": "int8"}, 2))
    inside = {unit.name: unit.inside for unit in blueprint.units}
    assert inside == {
        "": (),
        "blocks.0": ("",),
        "blocks.0.0": ("", "blocks.0"),
        "blocks.1": ("",),
        "blocks.1.0": ("", "blocks.1"),
        "frozen": ("",),
    }
    found = {
        span.fqn: (segment.layout.encoding.name, segment.trains)
        for unit in blueprint.units
        for segment in unit.segments
        for span in segment.layout.spans
    }
    assert found["blocks.0.0.weight"] == ("bf16", True)
    assert found["blocks.0.1.weight"] == ("fp32", True)
    assert found["frozen.bias"] == ("bf16", False)
    assert found["index"] == ("int64", False)
    row = next(unit.row for unit in blueprint.units if unit.name == "blocks.0.0")
    assert (row.param_stored.encoding, row.grad_step.encoding) == (BF16, FP32)
    assert (row.master.encoding, row.moments.encoding) == (SPLIT, INT8)


def test_a_module_that_two_units_share_lies_inside_both() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.PReLU()) for _ in range(11)])})
    for number in (1, 10):
        model["layers"][number].add_module("shared", model["layers"][0][0])
    blueprint = make_blueprint(model, resolved({"stage": 3, "units": ["Sequential", "layers.0.0"]}))
    inside = {unit.name: unit.inside for unit in blueprint.units}
    assert inside.pop("layers.0.0") == ("layers.0", "layers.1", "layers.10")
    assert set(inside.values()) == {()}, "the root has no parameters, and is no unit"


def test_states_go_where_there_is_memory() -> None:
    """The blueprint fits into the memory budget it was made for, or an error names the memory that is too small."""
    settings = resolved({"stage": 3, "offload": {"parameters": "auto", "optimizer": "auto"}}, MIXED, 8)
    plenty = MemoryBudget(10**15, 10**15, 10**15)
    near = make_blueprint(llama(), settings, budget=plenty)
    assert near == make_blueprint(llama(), settings)
    needed = needed_bytes(near)
    assert needed[Tier.HOST] == needed[Tier.DISK] == 0
    small = replace(plenty, device=needed[Tier.DEVICE] * 2 // 3)
    mixed = make_blueprint(llama(), settings, budget=small)
    assert {unit.row.master.tier for unit in mixed.units} == {Tier.DEVICE, Tier.HOST}
    assert not small.shortfall(needed_bytes(mixed))
    with pytest.raises(ConfigError, match="the states of a rank do not fit .device"):
        make_blueprint(llama(), settings, budget=replace(plenty, device=1000))


def needed_bytes(blueprint: Blueprint) -> dict[Tier, int]:
    states = bytes_by_tier(model_state_bytes(blueprint.units, None, blueprint.moments))
    working = blueprint.working_bytes(blueprint.units)
    return {tier: states[tier] + working[tier] for tier in Tier}


def test_a_unit_with_most_of_the_model_is_announced_where_it_is_unsharded() -> None:
    with torch.device("meta"):
        large = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(512, 512)))
    said = describe_large_unit(make_blueprint(large, resolved({"stage": 3})).units)
    assert said is not None
    assert "units: 1; the largest, the root, has 100% of the parameters" in said
    assert "zero.units" in said
    assert describe_large_unit(make_blueprint(large, resolved({"stage": 1})).units) is None
    assert describe_large_unit(make_blueprint(llama(), resolved({"stage": 3})).units) is None
