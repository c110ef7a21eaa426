"""Recomputed activations by config: the same bits as without recomputation, from fewer kept bytes."""

import copy
import io
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BloomConfig, BloomForCausalLM, T5Config, T5ForConditionalGeneration

import partita
from partita import ConfigError, PartitaError
from tests.features import parity
from tests.kit import seeds
from tests.kit.live_bytes import LiveBytes
from tests.kit.models import CASES, FAMILIES, WIDTH, Block, Stack, inputs, square_loss
from tests.kit.plans import matrix
from tests.kit.ranks import on_ranks
from tests.kit.training import Recipe, assert_same_bits, rank, train_recipe
from tests.sharding.test_visits import siamese

CHOICES = ("units", "selective")


class Noisy(Block):
    """Block with dropout, and with running statistics that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.batch_norm(super().forward(x)))


class NoisyStack(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Noisy() for _ in range(4)])


def kept_bytes(choice: str) -> int:
    """Return the memory that a forward of four blocks keeps for backward, in units of the input's bytes."""
    with partita.initialize(Stack(4), {"activations": {"checkpoint": choice}}) as engine:
        x = torch.randn(1000, WIDTH)
        with LiveBytes() as live:
            output = engine(x)
            assert output.requires_grad
            return live.total // x.nbytes


def run_recipes(recipes: Sequence[str]) -> None:
    """Check that recomputation changes no bits, with dropout, batch statistics, and two forwards before a backward."""
    for name in recipes:
        results = {
            choice: train_recipe(Recipe(*RECIPES[name], config={"activations": {"checkpoint": choice}}), {"stage": 3})
            for choice in ("none", *CHOICES)
        }
        for choice in CHOICES:
            assert_same_bits(results[choice], results["none"], f"{name}: {choice}")


RECIPES: dict[str, Any] = {
    "dropout and statistics": (NoisyStack, square_loss),
    "two forwards": (NoisyStack, siamese),
}


def forwards_and_gathers() -> None:
    """Check that units run twice, and are gathered once in forward and once in backward; the root unit runs once."""
    model, calls = Stack(3), list[str]()
    for name, module in (("root", model), *model.blocks.named_children()):
        module.register_forward_pre_hook(lambda *_, name=name: calls.append(name))
        inner = module.norm if name != "root" else module.first
        inner.register_forward_pre_hook(lambda *_, name=name: calls.append(f"{name}'s first"))
    config = {"zero": {"stage": 3, "prefetch_bytes": 0}, "activations": {"checkpoint": "units"}}
    with partita.initialize(model, config) as engine:
        engine.backward(square_loss(engine, rank(), 0))
        forward = ["root", "root's first", "0", "0's first", "1", "1's first", "2", "2's first"]
        assert calls == [*forward, "2's first", "1's first", "0's first"]
        (gathers,) = [row.calls for key, row in engine.traffic_report().rows.items() if key.purpose == "parameters"]
        assert gathers == 2 * 4


def differs_when_repeated() -> None:
    class Fickle(Block):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Fickle.calls += 1
            return super().forward(x if Fickle.calls < 3 else x[:1])

    model = Stack(2)
    model.blocks = nn.ModuleList([Fickle(), Fickle()])
    with partita.initialize(model, {"activations": {"checkpoint": "units"}}) as engine:
        engine.backward(square_loss(engine, 0, 0))


def _numbers(course: parity.TrainingRun) -> list[Any]:
    return [
        course.losses,
        course.norms,
        *[{name: value.tolist() for name, value in found.items()} for found in (course.weights, course.buffers)],
    ]


@matrix(
    name=[name for name in CASES if name != "lstm"],  # it has no blocks
    plan=[plan for plan in parity.PLANS if plan != "hierarchical"],
    world=[1, 2],
)
def test_models_train_as_without(name: str, plan: str, world: int) -> None:
    settings = {choice: {"activations": {"checkpoint": choice}} for choice in ("none", *CHOICES)}
    for courses in on_ranks(world, parity.courses_with, name, (plan,), settings):
        for (_, choice), course in courses.items():
            assert _numbers(course) == _numbers(courses[plan, "none"]), choice


def test_dropout_and_statistics_are_those_of_one_forward() -> None:
    on_ranks(2, run_recipes, tuple(RECIPES))


def test_units_run_twice_and_are_gathered_twice() -> None:
    on_ranks(2, forwards_and_gathers)


def test_units_keep_their_inputs_alone() -> None:
    """A forward of first -> 4 blocks -> last keeps the inputs of each block and of the last layer, and the output; with
    ``selective``, also the outputs of each block's two layers, with two and one times the input's width.
    """
    assert kept_bytes("units") == 4 + 1 + 1
    assert kept_bytes("selective") == 4 + 1 + 1 + 4 * (2 + 1)
    assert kept_bytes("none") > kept_bytes("selective")


def test_modules_by_class_and_by_name() -> None:
    for choice, expected in ((["Block"], [0, 1, 2]), (["blocks.1", "*.2"], [1, 2])):
        model = Stack(3)
        with partita.initialize(model, {"activations": {"checkpoint": choice}}):
            assert [number for number, block in enumerate(model.blocks) if "forward" in vars(block)] == expected
        assert not any("forward" in vars(block) for block in model.blocks)


def test_a_model_that_checkpoints_itself_is_left_to_it() -> None:
    """A model with its own checkpoint around the call gets none inside, which would run everything a third time."""
    seeds.start()
    model = FAMILIES["llama"](vocab_size=64, hidden_size=32, intermediate_size=48, num_attention_heads=2)
    model.activation_checkpointing_enable()
    calls = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    with partita.initialize(model, {"activations": {"checkpoint": "units"}}) as engine:
        tokens = torch.randint(64, (2, 8))
        engine.backward(engine(input_ids=tokens, labels=tokens, use_cache=False).loss)
    assert len(calls) == 2


CACHING = {
    "bloom": lambda: BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=32, d_ff=48, d_kv=8, num_layers=2, num_heads=4, decoder_start_token_id=0)
    ),
}


@pytest.mark.parametrize("name", CACHING)
def test_no_cache_is_filled_twice(name: str) -> None:
    """With recomputation, training fills no cache; transformers models fill one by default, also in training."""
    losses = []
    for choice in ("none", "units"):
        seeds.start()
        model = CACHING[name]()
        tokens = torch.randint(64, (2, 8))
        with partita.initialize(model, {"activations": {"checkpoint": choice}}) as engine:
            for _ in range(2):
                output = engine(input_ids=tokens, labels=tokens)
                engine.backward(output.loss)
                engine.step()
                losses.append(output.loss.item())
            assert output.past_key_values is None
            with torch.no_grad():
                assert engine(input_ids=tokens, labels=tokens).past_key_values is not None
    assert losses[:2] == pytest.approx(losses[2:], rel=1e-6)


def test_copies_have_their_own_forward() -> None:
    model = Stack(2)
    with partita.initialize(model, {"activations": {"checkpoint": "units"}}) as engine:
        block = model.blocks[0]
        file = io.BytesIO()
        torch.save(block, file)
        file.seek(0)
        x = inputs(0, 0)
        for other in (copy.deepcopy(block), torch.load(file, weights_only=False)):
            with torch.no_grad():
                other.up.weight.zero_()
                other.down.bias.zero_()
                assert not torch.equal(other(x), block(x))
        assert engine(x).requires_grad


class Outspoken(Stack):
    """Stack that calls its blocks with keywords that torch's checkpoint also has."""

    class Inner(Block):
        def forward(self, x: Tensor, *, debug: Tensor, use_reentrant: bool) -> Tensor:
            return super().forward(x) + debug * use_reentrant

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Outspoken.Inner() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, debug=x * 0.5, use_reentrant=True)
        return self.last(x)


def test_keywords_are_the_modules_own() -> None:
    results = [
        train_recipe(Recipe(Outspoken, config={"activations": {"checkpoint": choice}}), {"stage": 1})
        for choice in ("none", "units")
    ]
    assert_same_bits(*results, "units")


def test_a_graph_that_is_kept_may_be_used_twice() -> None:
    model = NoisyStack()
    with partita.initialize(model, {"activations": {"checkpoint": "units"}}) as engine:
        loss = engine(inputs(0, 0)).square().mean()
        once, again = (torch.autograd.grad(loss, model.first.weight, retain_graph=True)[0] for _ in range(2))
        assert torch.equal(once, again)


def test_evaluation_keeps_nothing() -> None:
    with partita.initialize(Stack(2), {"activations": {"checkpoint": "units"}}) as engine:
        with torch.no_grad():
            assert not engine(inputs(0, 0)).requires_grad


def test_a_pattern_that_fits_nothing_is_named() -> None:
    with pytest.raises(ConfigError, match="activations.checkpoint: 'layers.*' matches no module of Stack"):
        partita.initialize(Stack(1), {"activations": {"checkpoint": ["layers.*"]}})


def test_a_model_without_blocks_is_told() -> None:
    with pytest.raises(ConfigError, match="activations.checkpoint: 'units' recomputes units, and Linear has no unit"):
        partita.initialize(nn.Linear(2, 2), {"activations": {"checkpoint": "units"}})


def test_a_forward_that_differs_when_repeated_is_named() -> None:
    with pytest.raises(PartitaError) as raised:
        on_ranks(1, differs_when_repeated)
    said = str(raised.value)
    assert said.startswith("'blocks.1' computed something else when its forward was recomputed")
    assert "the first that differs is number 1: {'shape': torch.Size([4, 16])" in said
    assert "then {'shape': torch.Size([1, 16])" in said
