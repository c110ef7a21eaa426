"""Weight gradients computed separately from backward: they have the same bits as in one backward."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from partita.parallel.pipeline.deferred_gradients import DeferredGradients, WeightGradients, defer_weight_gradients
from partita.transforms.modules import Level, ModuleTransforms, Order
from tests.kit import seeds
from tests.kit.plans import matrix

WIDTH = 24


class InPlace(nn.Module):
    """Model in which an in-place ReLU changes a layer's output, layers run twice, and the input is a leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(F.relu(self.up(x), inplace=True))
        y: Tensor = self.down(F.relu(self.up(x), inplace=True))
        return y


class Tied(nn.Module):
    """Model whose output layer shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(40, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 40)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.abs() * 10).long().clamp(max=39)[..., 0]
        y: Tensor = self.head(self.norm(self.embedding(tokens)))
        return y


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(WIDTH, 40), nn.Tanh(), nn.Linear(40, 7, bias=False)),
    "transposed": lambda: nn.Sequential(Conv1D(40, WIDTH), nn.GELU(), nn.LayerNorm(40), Conv1D(7, 40)),
    "in place": InPlace,
    "tied": Tied,
}
SHAPES = [(5, WIDTH), (2, 5, WIDTH), (2, 3, 2, WIDTH)]


def pair(name: str, dtype: torch.dtype) -> tuple[nn.Module, nn.Module, WeightGradients]:
    """Return a model, a copy that defers its weight gradients, and the object that stores the deferred gradients."""
    seeds.start()
    plain = MODELS[name]().to(dtype)
    deferring = MODELS[name]().to(dtype)
    deferring.load_state_dict(plain.state_dict())
    return plain, deferring, defer_weight_gradients(deferring, at_weights())


def at_weights() -> Level:
    return ModuleTransforms().at(Order.WEIGHT_GRADIENT)


def gradient_sink(model: nn.Module, left: DeferredGradients) -> None:
    """Move gradients that backward has already computed to the deferred ones, as the engine's reducer does."""
    for param in model.parameters():
        if param.grad is not None:
            left.add_gradient(param, param.grad)
            param.grad = None


CALLS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "kept": lambda model, x: model(x),
    "recomputed": lambda model, x: checkpoint(model, x, use_reentrant=False),
}


@matrix(name=MODELS, shape=SHAPES, dtype=[torch.float32, torch.bfloat16], call=CALLS)
def test_the_same_bits_in_two_halves(name: str, shape: tuple[int, ...], dtype: torch.dtype, call: str) -> None:
    plain, deferring, weights = pair(name, dtype)
    products = {id(p) for m in deferring.modules() if "forward" in vars(m) for p in m.parameters(recurse=False)}
    for number in range(2):  # gradients accumulate
        x = torch.randn(shape, generator=seeds.generator(number)).to(dtype)
        one, two = x.clone().requires_grad_(), x.clone().requires_grad_()
        expected = plain(one).square().sum()
        expected.backward()
        found = CALLS[call](deferring, two).square().sum()
        assert torch.equal(found, expected)
        with weights.deferring(number) as left:
            found.backward()
        assert one.grad is None or torch.equal(one.grad, two.grad)
        came = {id(param) for param in deferring.parameters() if param.grad is not None}
        assert number or not came & products
        if not number:
            gradient_sink(deferring, left)
        weights.take(number).run()
        for (key, param), other in zip(plain.named_parameters(), deferring.parameters(), strict=True):
            assert torch.equal(param.grad, other.grad), key


def test_order_of_batches_is_free() -> None:
    """Weight gradients that are computed after two backwards are the same as in those backwards."""
    plain, deferring, weights = pair("linear", torch.float32)
    inputs = [torch.randn(4, WIDTH, generator=seeds.generator(number)) for number in range(2)]
    for x in inputs:
        plain(x).sum().backward()
    losses = [deferring(x).sum() for x in inputs]
    for number, loss in enumerate(losses):
        with weights.deferring(number):
            loss.backward()
    for number in range(2):
        weights.take(number).run()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), deferring.parameters(), strict=True))


def test_who_else_has_a_parameter() -> None:
    """A layer that shares a parameter with a module of another kind does not defer its weight gradients."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.PReLU(WIDTH), nn.Bilinear(WIDTH, WIDTH, 3))
    model[1].weight = model[0].bias
    defer_weight_gradients(model, at_weights())
    assert not any("forward" in vars(module) for module in model.modules())


def test_outside_of_its_block_a_backward_is_whole() -> None:
    plain, deferring, _ = pair("in place", torch.float32)
    x = torch.randn(3, WIDTH, generator=seeds.generator(0))
    plain(x).sum().backward()
    deferring(x).sum().backward()
    for one, other in zip(plain.parameters(), deferring.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    with torch.no_grad():
        assert not deferring(x).requires_grad


def test_frozen_layers_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 8).requires_grad_(False), nn.Linear(8, 3))
    weights = defer_weight_gradients(model, at_weights())
    with weights.deferring(0) as left:
        model(torch.randn(2, WIDTH, generator=seeds.generator(0), requires_grad=True)).sum().backward()
    assert [id(param) for param in left.params.values()] == [id(param) for param in model[1].parameters()]
