"""Random streams: they depend on the seed, step, micro-batch, forward, block, data coordinate and slice only."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partita
from partita import PartitaError
from partita.activation.recompute import Recomputation, Recomputed
from partita.parallel.random import RandomStreams
from partita.transforms.modules import ModuleTransforms, Order
from tests.kit import seeds

WIDTH, HOST = 24, torch.device("cpu")


class Block(nn.Module):
    """Block that calls one dropout module twice, and ``F.dropout`` once on ``drawn`` numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout, self.drawn = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), 3

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.layer(x))
        unused = F.dropout(torch.ones(self.drawn), 0.5, self.training)
        assert len(unused) == self.drawn
        return x + self.dropout(self.layer(x))


class Stack(nn.Module):
    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.first, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)
        self.blocks = nn.ModuleList([Block() for _ in range(num_blocks)])
        self.last = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def stack() -> Stack:
    seeds.start()
    return Stack()


def output(
    model: nn.Module,
    seed: int = 7,
    *,
    step: int = 0,
    micro_batch: int = 0,
    data: int = 0,
    part: str = "",
    calls: int = 1,
) -> Tensor:
    """Return the output of the last of ``calls`` forwards. Torch's generator has a random state, which is restored."""
    streams = RandomStreams(model, seed, data, HOST, part)
    streams.begin_micro_batch(step, micro_batch)
    torch.manual_seed(torch.seed() % 1000)
    before = torch.get_rng_state()
    for _ in range(calls):
        found = model(torch.ones(4, WIDTH))
    assert torch.equal(torch.get_rng_state(), before)
    streams.remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return found.detach()


def test_masks_follow_from_the_key() -> None:
    model = stack()
    first = output(model)
    assert torch.equal(output(model), first)
    others = [
        output(model, seed=8),
        output(model, step=1),
        output(model, micro_batch=1),
        output(model, data=1),
        output(model, part="sequence 1"),
        output(model, calls=2),
    ]
    for at, other in enumerate(others):
        assert not any(torch.equal(other, earlier) for earlier in (first, *others[:at]))


def test_a_mask_does_not_depend_on_what_ran_before() -> None:
    """The last block's masks stay the same if another block is replaced, or if more numbers are drawn in between."""
    seen = []
    for num_blocks, drawn in ((3, 3), (2, 3), (3, 50)):
        model = stack()
        model.blocks[2].drawn = drawn
        if num_blocks == 2:
            model.blocks[0] = nn.Identity()
        model.blocks[2].register_forward_pre_hook(lambda module, args: torch.ones(4, WIDTH))
        model.last.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
        streams = RandomStreams(model, 7, 0, HOST)
        model(torch.ones(4, WIDTH))
        streams.remove()
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])


def gradients(model: nn.Module, recomputed: str) -> list[Tensor]:
    """Return the gradients of two forwards whose backwards run in the same order."""
    streams = RandomStreams(model, 7, 0, HOST)
    transforms = ModuleTransforms()
    if recomputed == "by the config":
        blocks = {f"blocks.{at}": block for at, block in enumerate(model.blocks)}
        Recomputation(blocks, transforms.at(Order.RECOMPUTE), selective=False, tiled={})
    losses = [model(torch.full((4, WIDTH), value)).square().mean() for value in (1.0, 2.0)]
    for loss in losses:
        loss.backward()
    transforms.undo()
    streams.remove()
    return [param.grad for param in model.parameters()]


class Checkpointing(Block):
    """Block that checkpoints its own call, including the module's hooks."""

    def __call__(self, x: Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(super().__call__, x, use_reentrant=False)


@pytest.mark.parametrize("recomputed", ["by the config", "by the model"])
def test_repeated_forwards_draw_the_same(recomputed: str) -> None:
    expected = gradients(stack(), "not at all")
    model = stack()
    if recomputed == "by the model":
        for block in model.blocks:
            block.__class__ = Checkpointing
    for found, wanted in zip(gradients(model, recomputed), expected, strict=True):
        assert torch.equal(found, wanted)


def test_a_shared_block_that_the_model_itself_repeats_is_refused() -> None:
    model = stack()
    for block in model.blocks:
        block.__class__ = Checkpointing
    model.blocks[2] = model.blocks[0]
    with pytest.raises(PartitaError, match="'blocks.0' is called several times in one forward, and the model's own"):
        gradients(model, "by the model")


def test_evaluation_and_parts_of_a_model_are_left_alone() -> None:
    model = stack()
    streams = RandomStreams(model, 7, 0, HOST)
    x = torch.ones(4, WIDTH)
    assert torch.equal(model.eval()(x), copy.deepcopy(model)(x))
    model.train()
    assert not torch.equal(model.blocks[0](x), model.blocks[0](x))  # outside the model's forward: torch's own numbers
    streams.remove()


def square(output: Tensor, batch: Tensor) -> Tensor:
    return output.square().mean()


def losses(seed: int | None, checkpoint: str = "none") -> list[float]:
    """Return the losses of four steps of two micro-batches. Torch's generator starts from a random state."""
    config = {"seed": seed, "batch": {"accumulate": 2}, "activations": {"checkpoint": checkpoint}}
    with partita.initialize(stack(), config, loss_fn=square) as engine:
        torch.manual_seed(torch.seed() % 1000)
        batches = iter([torch.full((4, WIDTH), float(number)) for number in range(8)])
        return [engine.train_batch(batches).item() for _ in range(4)]


def test_an_engine_draws_by_seed_and_step() -> None:
    first = losses(7)
    assert losses(7) == first
    assert losses(7, "units") == first
    assert losses(8) != first
    assert losses(None) != losses(None)


def test_a_resumed_run_goes_on_with_the_masks_of_its_steps(tmp_path: Path) -> None:
    config: dict[str, Any] = {"seed": 7, "optimizer": {"lr": 0.0}}
    x, found = torch.ones(4, WIDTH), []
    for _ in range(2):  # the second engine resumes the first one's run
        with partita.initialize(stack(), config, loss_fn=square) as engine:
            if any(tmp_path.iterdir()):
                engine.load(tmp_path)
            found += [engine.train_batch([x]).item() for _ in range(2)]
            engine.save(tmp_path)
    with partita.initialize(stack(), config, loss_fn=square) as engine:
        assert found == [engine.train_batch([x]).item() for _ in range(4)]
    assert len(set(found)) == 4


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.dropout, self.down = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(torch.tanh(self.up(x))))


class MlpBlock(nn.Module):
    """Block that calls its MLP ``calls`` times."""

    calls = 2

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.calls):
            x = x + self.mlp(x)
        return x


class MlpStack(nn.Module):
    def __init__(self, block: type[nn.Module] = MlpBlock) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


COMPILED = {"modules": ["MlpBlock"], "backend": "aot_eager"}


def trained_gradients(config: dict[str, Any], block: type[nn.Module] = MlpBlock) -> list[Tensor]:
    """Return the gradients of inputs [2, 50, WIDTH], which have several tiles."""
    seeds.start()
    model = MlpStack(block)
    x = torch.randn(2, 50, WIDTH, requires_grad=True)
    with partita.initialize(model, {"seed": 7, **config}, loss_fn=square) as engine:
        if not getattr(block, "reentrant", False):  # torch warns of a reentrant checkpoint without gradients
            with torch.no_grad():
                engine(x)
        engine.backward(engine(x).square().mean())
        return [engine.gradient(name) for name, _ in model.named_parameters()]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler reads it
@pytest.mark.parametrize(
    "config",
    [
        {"tiled": {"mlp": ["Mlp"]}},
        {"activations": {"checkpoint": ["Mlp"]}},
        {"activations": {"checkpoint": ["MlpBlock", "Mlp"]}},
        {"activations": {"checkpoint": ["MlpStack", "MlpBlock", "Mlp"]}},
        {"activations": {"checkpoint": ["MlpBlock"]}, "tiled": {"mlp": ["Mlp"]}},
        {"activations": {"checkpoint": ["MlpBlock", "Mlp"]}, "compile": COMPILED},
        {"tiled": {"mlp": ["Mlp"]}, "compile": COMPILED},
    ],
)
def test_recomputed_parts_of_a_block_draw_the_same(config: dict[str, Any]) -> None:
    """Expected: the gradients of the same model, whose recomputed modules keep their results."""
    reference = {"tiled": config["tiled"]} if "tiled" in config else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recomputed, "__call__", lambda self, own, *args, **kwargs: own(*args, **kwargs))
        expected = trained_gradients(reference)
    for gradient, wanted in zip(trained_gradients(config), expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-6)


class OwnCheckpoint(MlpBlock):
    """Block that checkpoints the calls of its MLP, one by one or together."""

    together = reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        run = super().forward if self.together else self.mlp
        for _ in range(1 if self.together else self.calls):
            x = x + torch.utils.checkpoint.checkpoint(run, x, use_reentrant=self.reentrant)
        return x


class OneCall(OwnCheckpoint):
    calls = 1


class CallsTogether(OwnCheckpoint):
    together = True


class Reentrant(OwnCheckpoint):
    reentrant = True


class OneReentrantCall(OneCall):
    reentrant = True


@pytest.mark.parametrize("block", [OwnCheckpoint, Reentrant])
def test_a_module_that_a_block_itself_repeats_is_refused(block: type[nn.Module]) -> None:
    with pytest.raises(PartitaError, match="'blocks.1.mlp.dropout' is called several times in one forward, and the"):
        trained_gradients({}, block)


@pytest.mark.parametrize("block", [OneCall, CallsTogether, OneReentrantCall])
def test_a_block_may_checkpoint_all_calls_of_a_module(block: type[nn.Module]) -> None:
    found = trained_gradients({}, block)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.utils.checkpoint, "checkpoint", lambda run, x, use_reentrant: run(x))
        expected = trained_gradients({}, block)
    for gradient, wanted in zip(found, expected, strict=True):
        assert torch.equal(gradient, wanted)
