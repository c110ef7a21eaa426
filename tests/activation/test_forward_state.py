"""Recomputed forwards that read state which they also change: buffers, attributes, numbers."""

import pytest
import torch
from torch import Tensor, nn

import partita
from partita import PartitaError
from tests.kit import seeds
from tests.kit.ranks import on_ranks

WIDTH = 8


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x).relu()


class Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x).relu()


class Observer(nn.Module):
    """Block that divides by a running maximum, which it stores in one of several ways."""

    def __init__(self, how: str = "buffer", size: int = 1) -> None:
        super().__init__()
        self.how, self.layer = how, nn.Linear(WIDTH, WIDTH)
        self.register_buffer("largest", torch.zeros(size))
        self.kept, self.calls = torch.zeros(1), 0

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            largest = x.abs().max()
            if self.how == "buffer":
                self.largest.mul_(0.9).add_(0.1 * largest)
            elif self.how == "data":
                self.largest.data.add_(largest)
            elif self.how == "new buffer":
                self.largest = self.largest * 0.9 + largest
            elif self.how == "attribute":
                self.kept = self.kept * 0.9 + largest
            elif self.how == "new attribute":
                self.seen = getattr(self, "seen", 1.0) + 0.5
            elif self.how == "later" and self.calls:
                self.largest += largest
            self.calls += 1
        scale = 1 + self.largest.sum() + self.kept + 0.1 * self.calls + getattr(self, "seen", 0.0)
        return x + self.layer(x / scale)


class Net(nn.Module):
    def __init__(self, block: "type[nn.Module] | str") -> None:
        super().__init__()
        make = (lambda: Observer(block)) if isinstance(block, str) else block
        self.blocks = nn.ModuleList(make() for _ in range(3))
        self.twice = False

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1 + self.twice):
            for block in self.blocks:
                x = block(x)
        return x.square().mean()


KINDS = {
    "spectral": Spectral,
    "parametrized": Parametrized,
    **{how: how for how in ("buffer", "data", "new buffer", "attribute", "new attribute", "later")},
}


def trained(kind: str, twice: bool, **config: object) -> list[float]:
    """Return the losses and gradient norms of three steps, and the final values of buffers and call counts."""
    seeds.start()
    model, found = Net(KINDS[kind]), list[float]()
    model.twice = twice
    with partita.initialize(model, {"optimizer": {"name": "sgd", "lr": 0.1}, **config}) as engine:
        for _ in range(3):
            loss = engine(torch.randn(4, WIDTH))
            engine.backward(loss)
            found += [loss.item(), engine.step().grad_norm or 0.0]
        found += [value for buffer in model.buffers() for value in buffer.tolist()]
        found += [getattr(block, "calls", 0) for block in model.blocks]
    return found


@pytest.mark.parametrize("choice", ["units", "selective"])
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_repeated_forward_reads_what_the_first_one_did(kind: str, twice: bool, choice: str) -> None:
    assert trained(kind, twice, activations={"checkpoint": choice}) == trained(kind, twice)


def test_modules_in_tiles_inside_recomputed_ones() -> None:
    config = {"activations": {"checkpoint": "units"}, "tiled": {"mlp": ["*.layer"]}}
    assert trained("parametrized", False, **config) == pytest.approx(trained("parametrized", False))


def test_a_large_buffer_that_changes_later_is_named() -> None:
    model = Net("later")
    model.blocks[1] = Observer("later", 1 << 15)
    with (
        partita.initialize(model, {"activations": {"checkpoint": "units"}}) as engine,
        pytest.raises(PartitaError, match=r"'blocks.1' is recomputed and has changed its buffer 'blocks.1.largest'"),
    ):
        for _ in range(2):
            engine.backward(engine(torch.randn(4, WIDTH)))


def test_a_buffer_that_changes_before_backward_is_named() -> None:
    model = Net("none")
    model.blocks[1] = Observer("none", 1 << 15)
    with partita.initialize(model, {"activations": {"checkpoint": "units"}}) as engine:
        loss = engine(torch.randn(4, WIDTH))
        model.blocks[1].largest += 1
        with pytest.raises(PartitaError, match=r"'blocks.1.largest' was changed between its forward and its backward"):
            engine.backward(loss)


class Embedded(nn.Module):
    """Model whose embedding, block layers and head, which an engine looks up by name, are all parametrized."""

    def __init__(self) -> None:
        super().__init__()
        spectral = nn.utils.parametrizations.spectral_norm
        self.embedding = spectral(nn.Embedding(16, WIDTH))
        self.blocks = nn.ModuleList(Parametrized() for _ in range(2))
        self.head = spectral(nn.Linear(WIDTH, 16))


@pytest.mark.parametrize("axis", ["tensor", "sequence", "pipeline", "data"])
def test_the_start_computes_no_parametrized_weight(axis: str) -> None:
    assert on_ranks(2, changed_at_start, axis) == [[], []]


def changed_at_start(axis: str) -> list[str]:
    seeds.start()
    model = Embedded()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with partita.initialize(model, {"parallel": {axis: 2}}):
        return [name for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])]
