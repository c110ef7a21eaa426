"""Models on the meta device are materialized unit by unit, with the same values at every stage and world size."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partita
from partita import ConfigError
from tests.kit import seeds
from tests.kit.models import CASES, FAMILIES, WIDTH, Block, Stack, parts, square_loss
from tests.kit.plans import ZERO
from tests.kit.ranks import on_ranks
from tests.kit.state import assert_idle
from tests.kit.training import rank, whole_weights, world


def on_meta(build: Any) -> Any:
    with torch.device("meta"):
        return build()


def whole(build: Any, zero: dict[str, Any]) -> dict[str, Tensor]:
    seeds.start(7 + rank())  # differs by rank: the values must be those of rank 0
    model = on_meta(build)
    with partita.initialize(model, {"zero": zero}) as engine:
        assert all(not p.is_meta for p in model.parameters())
        weights = whole_weights(engine)
        engine.backward(square_loss(engine, rank(), 0))
        assert engine.step().stepped
        assert_idle(engine)
    return weights


def same_at_every_stage() -> dict[str, Tensor]:
    results = [whole(Stack, zero) for zero in ZERO.values()]
    for weights in results[1:]:
        assert all(torch.equal(value, results[0][name]) for name, value in weights.items())
    return results[0]


def parameters_stay_the_same_objects() -> None:
    for zero in ZERO.values():
        model = on_meta(Stack)
        before = {name: id(p) for name, p in model.named_parameters()}
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with partita.initialize(model, {"zero": zero}, optimizer=optimizer) as engine:
            assert {name: id(p) for name, p in model.named_parameters()} == before
            first = whole_weights(engine)
            engine.backward(square_loss(engine, rank(), 0))
            assert engine.step().stepped
            assert all(not torch.equal(value, first[name]) for name, value in whole_weights(engine).items())


def distributions() -> None:
    """Check that each module initializes itself: norms with ones and zeros, linear layers within a bound."""
    with partita.initialize(on_meta(Stack), {"zero": {"stage": 3}}) as engine, engine.gathered():
        module: Any = engine.module
        for block in module.blocks:
            assert torch.equal(block.norm.weight, torch.ones(WIDTH))
            assert torch.equal(block.norm.bias, torch.zeros(WIDTH))
            assert 0.15 < block.up.weight.abs().max() <= 0.25
        assert not torch.equal(module.blocks[0].up.weight, module.blocks[1].up.weight)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.output = nn.Linear(WIDTH, 8, bias=False)
        self.output.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(2))

    def reset_parameters(self) -> None:
        self.scale.fill_(3.0)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(x, x, x)[0]
        return self.output(self.norm(x)) * self.scale[0]


def buffers_and_ties() -> None:
    for zero in ZERO.values():
        model = on_meta(Tied)
        with partita.initialize(model, {"zero": zero}) as engine:
            assert torch.equal(model.scale, torch.full((2,), 3.0))
            assert torch.equal(model.norm.running_var, torch.ones(WIDTH))
            assert model.norm.num_batches_tracked == 0
            assert model.output.weight is model.embedding.weight
            with engine.gathered():
                assert torch.equal(model.attention.in_proj_bias, torch.zeros(3 * WIDTH))
                assert torch.equal(model.attention.out_proj.bias, torch.zeros(WIDTH))
            engine.backward(engine(torch.arange(6)).square().mean())
            assert engine.step().stepped


class Silent(nn.Module):
    """Creates a parameter in its constructor, and has no ``reset_parameters``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.gain = nn.Parameter(torch.ones(3))


class Forgetful(Silent):
    def reset_parameters(self) -> None:
        """Do nothing, so that ``gain`` stays uninitialized."""


class SilentBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("table", torch.arange(4))


def without_reset() -> list[str]:
    said = []
    for build in (Silent, Forgetful, SilentBuffer):
        model = nn.Sequential(nn.Linear(2, 2), on_meta(build))
        with pytest.raises(ConfigError) as raised:
            partita.initialize(model, {"zero": {"stage": 3}})
        said.append(str(raised.value))
    return said


def half_meta() -> None:
    """Check a model of which only one block is on the meta device."""
    seeds.start()
    model = Stack()
    kept = model.blocks[0].up.weight.detach().clone()
    model.blocks[1] = on_meta(Block)
    with partita.initialize(model, {"zero": {"stage": 3}}) as engine, engine.gathered():
        assert torch.equal(model.blocks[0].up.weight, kept) or rank()
        assert torch.equal(model.blocks[1].norm.weight, torch.ones(WIDTH))


class Masked(nn.Module):
    """Has a parameter, and buffers that are not in the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
        self.register_buffer("mask", torch.ones(WIDTH), persistent=False)

        self.register_buffer("table", torch.arange(4), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        self.mask.fill_(1.0)
        self.table = torch.arange(4)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight * self.mask


def part_of_a_module(config: dict[str, Any]) -> None:
    """Check that values loaded with ``assign=True`` are kept while the remaining ones, on meta, are initialized."""
    model = on_meta(lambda: nn.Sequential(Masked(), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))
    loaded = {"0.weight": (WIDTH, WIDTH), "1.weight": (WIDTH, WIDTH), "2.bias": (WIDTH,), "2.running_mean": (WIDTH,)}
    values = {name: torch.full(shape, 7.0) for name, shape in loaded.items()}
    assert "1.bias" in model.load_state_dict(values, strict=False, assign=True).missing_keys
    with partita.initialize(model, config) as engine:
        assert torch.equal(model[0].mask, torch.ones(WIDTH))
        assert torch.equal(model[0].table, torch.arange(4))
        assert torch.equal(model[2].running_var, torch.ones(WIDTH))
        found = engine.state_dict()
    if rank() == 0:
        assert all(torch.equal(found[name], value) for name, value in values.items())
        assert 0 < found["1.bias"].abs().max() <= WIDTH**-0.5
        assert torch.equal(found["2.weight"], torch.ones(WIDTH))


def same_buffers(module: nn.Module, expected: nn.Module) -> None:
    buffers = dict(module.named_buffers())
    assert list(buffers) == [name for name, _ in expected.named_buffers()]
    for name, value in expected.named_buffers():
        assert torch.equal(buffers[name], value), name


def rotary_frequencies(kind: dict[str, Any]) -> None:
    """Check that rotary frequencies, which no checkpoint has, are computed by the model's own code from its config."""
    build = partial(
        FAMILIES["llama"],
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=256,
        use_cache=True,
        rope_parameters={"rope_theta": 5000.0, **kind},
    )
    model = on_meta(build)
    with partita.initialize(model, {"zero": {"stage": 3}}) as engine:
        same_buffers(engine.module, build())
        tokens = torch.randint(0, 32, (2, 100))
        engine.backward(engine(tokens, labels=tokens).loss)
        assert engine.step().stepped


def hugging_face(name: str) -> None:
    case = CASES[name]
    losses = []
    for zero in ZERO.values():
        seeds.start(7)
        with partita.initialize(case.build(device="meta"), {"zero": zero}) as engine:
            same_buffers(engine.module, case.build())
            loss = case.loss(engine(**parts(next(case.batches(4)), world())[rank()]))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    assert all(loss == losses[0] for loss in losses)
    assert 3.5 < losses[0] < 6.0


def streamed(name: str, folder: Path) -> None:
    """Check that a meta model with weights read from a folder has the loss of the model that saved them."""
    case = CASES[name]
    model = case.build()
    batch = next(case.batches(2))
    if rank() == 0:
        model.save_pretrained(folder)
    expected = case.loss(model.eval()(**batch)).item()
    if world() > 1:
        torch.distributed.barrier()
    for zero in ZERO.values():
        with partita.initialize(case.build(device="meta"), {"zero": zero}, weights=folder) as engine, torch.no_grad():
            engine.eval()
            assert case.loss(engine(**batch)).item() == expected


def test_same_weights_at_every_stage_and_number_of_ranks() -> None:
    results = [weights for world in (1, 2, 4) for weights in on_ranks(world, same_at_every_stage)]
    for weights in results[1:]:
        assert all(torch.equal(value, results[0][name]) for name, value in weights.items())


def test_parameters_stay_the_same_objects() -> None:
    on_ranks(2, parameters_stay_the_same_objects)


def test_values_are_each_modules_own() -> None:
    on_ranks(2, distributions)


def test_buffers_and_ties() -> None:
    on_ranks(2, buffers_and_ties)


def test_modules_that_cannot_fill_themselves_are_named() -> None:
    for said in on_ranks(2, without_reset):
        for text, name in zip(said, ("'1.gain'", "'1.gain'", "'1.table'"), strict=True):
            assert name in text, text
            assert "reset_parameters" in text


def test_partly_on_meta() -> None:
    on_ranks(2, half_meta)


@pytest.mark.parametrize("config", [{}, {"zero": {"stage": 3}}, {"parallel": {"tensor": 2}}], ids=repr)
def test_part_of_a_module_on_meta(config: dict[str, Any]) -> None:
    on_ranks(2, part_of_a_module, config)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "mixtral"])
def test_hugging_face_models(name: str) -> None:
    on_ranks(2, hugging_face, name)


@pytest.mark.parametrize(
    "kind",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda kind: kind["rope_type"],
)
def test_rotary_frequencies(kind: dict[str, Any]) -> None:
    on_ranks(2, rotary_frequencies, kind)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_weights_are_streamed(name: str, tmp_path: Path) -> None:
    on_ranks(2, streamed, name, tmp_path)
