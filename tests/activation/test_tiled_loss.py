"""Output layer and loss in tiles: results of unmodified loss functions, memory, and errors."""

import copy
import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partita
from partita import ConfigError, PartitaError
from partita.activation.deferred_logits import DeferredLogits
from tests.activation.readers import UNSEEN, own_loss
from tests.activation.speaker import VOCAB, Speaker, speaker, tokens
from tests.kit import seeds
from tests.kit.live_bytes import LiveBytes
from tests.kit.models import WIDTH

TILED = {"loss": {"tiled": 5 * 4 * VOCAB}}  # five rows, which leave an incomplete last tile of 33 rows
Loss = Callable[[Tensor, Tensor], Tensor]

IN_TILES: dict[str, Loss] = {
    "flattened": lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten()),
    "viewed": lambda z, y: F.cross_entropy(z.view(-1, VOCAB), y.view(-1)),
    "shifted": lambda z, y: F.cross_entropy(z[:, :-1].reshape(-1, VOCAB), y[:, 1:].reshape(-1)),
    "shifted, all dims": lambda z, y: F.cross_entropy(
        z[..., :-1, :].contiguous().view(-1, z.size(-1)).float(), y[:, 1:].flatten()
    ),
    "masked": lambda z, y: F.cross_entropy(z[y >= 0], y[y >= 0]),
    "last": lambda z, y: F.cross_entropy(z[:, -2], y[:, -2].clamp(min=0)),
    "transposed": lambda z, y: F.cross_entropy(z.transpose(1, 2), y),
    "permuted": lambda z, y: F.cross_entropy(z.permute(0, 2, 1), y),
    "length first": lambda z, y: F.cross_entropy(z.transpose(0, 1).flatten(0, 1), y.t().flatten()),
    "capped": lambda z, y: F.cross_entropy(torch.tanh(z / 3.0).flatten(0, 1) * 3.0, y.flatten()),
    "scaled": lambda z, y: F.cross_entropy(2.0 * z.transpose(1, 2), y),
    "in fp64": lambda z, y: F.cross_entropy(z.double().transpose(1, 2), y),
    "summed": lambda z, y: F.cross_entropy(z.transpose(1, 2), y, reduction="sum") / 7,
    "smoothed": lambda z, y: F.cross_entropy(z.transpose(1, 2), y, label_smoothing=0.1),
    "another ignored": lambda z, y: F.cross_entropy(z.transpose(1, 2), y.clamp(min=0), ignore_index=0),
    "a module": lambda z, y: nn.CrossEntropyLoss(label_smoothing=0.2)(z.flatten(0, 1), y.flatten()),
    "two losses": lambda z, y: (
        F.cross_entropy(z.transpose(1, 2), y) + F.cross_entropy(z[:1].transpose(1, 2), y[:1], reduction="sum")
    ),
}
WHOLE: dict[str, Loss] = {
    "class weights": lambda z, y: F.cross_entropy(z.transpose(1, 2), y, torch.linspace(0.5, 1.5, VOCAB)),
    "of each": lambda z, y: F.cross_entropy(z.transpose(1, 2), y, reduction="none").square().mean(),
    "probabilities": lambda z, y: F.cross_entropy(z, torch.full_like(z, 1 / VOCAB)),
    "other loss": lambda z, y: -z.log_softmax(-1)[..., 0].mean(),
    "added": lambda z, y: F.cross_entropy((z + torch.linspace(0, 1, VOCAB)).transpose(1, 2), y),
    "some classes": lambda z, y: F.cross_entropy(z[..., :30].transpose(1, 2), y.clamp(max=29)),
    "changed in place": lambda z, y: F.cross_entropy(z.mul_(2).transpose(1, 2), y),
    "computed twice": lambda z, y: z.logsumexp(-1).mean() + F.cross_entropy(z.transpose(1, 2), y),
}


def gradients(model: Speaker, config: dict[str, Any], loss: Loss) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return the loss of the first batch, and every gradient."""
    inputs, targets = tokens()
    with partita.initialize(model, config) as engine:
        value = loss(engine(inputs), targets)
        engine.backward(value)
        return value.detach(), {name: engine.gradient(name) for name, _ in model.named_parameters()}


def alike(one: tuple[Tensor, dict[str, Any]], other: tuple[Tensor, dict[str, Any]], tolerance: float = 1e-6) -> None:
    """Check that losses and gradients are equal, up to ``tolerance`` relative to the largest element."""
    torch.testing.assert_close(one[0], other[0], rtol=tolerance, atol=0)
    for name, gradient in one[1].items():
        expected = other[1][name]
        assert (gradient is None) == (expected is None), name
        if gradient is not None:
            largest = max(expected.abs().max().item(), 1e-3)
            torch.testing.assert_close(gradient, expected, rtol=0, atol=2 * tolerance * largest, msg=name)


@contextmanager
def whole_logits(asked_by: str = "") -> Iterator[None]:
    """Check that all logits are computed inside the block, with exactly one warning."""
    with pytest.warns(UserWarning, match=f"all logits of 'head' are computed, because .*{asked_by}") as caught:
        yield
    assert len(caught) == 1


@contextmanager
def counted_tiles(model: Speaker) -> Iterator[list[int]]:
    """Yield a list of the number of rows of each product that computes logits."""
    rows, linear = list[int](), F.linear

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.shape[0] == VOCAB:
            rows.append(x.shape[:-1].numel())
        return linear(x, weight, bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "linear", counted)
        yield rows


@pytest.mark.parametrize("name", IN_TILES)
def test_losses_are_computed_in_tiles(name: str) -> None:
    plain = gradients(speaker(), {}, IN_TILES[name])
    model = speaker()
    with counted_tiles(model) as rows:
        alike(gradients(model, TILED, IN_TILES[name]), plain)
    assert rows
    assert max(rows) <= 5


@pytest.mark.parametrize("name", WHOLE)
def test_whoever_needs_logits_gets_them(name: str) -> None:
    plain = gradients(speaker(), {}, WHOLE[name])
    with whole_logits():
        alike(gradients(speaker(), TILED, WHOLE[name]), plain)


@pytest.mark.filterwarnings("ignore:all logits of 'head' are computed")
@pytest.mark.parametrize(("stage", "tied"), [(0, False), (3, True)])
@pytest.mark.parametrize("name", UNSEEN)
def test_readers_that_torch_tells_nothing_of(name: str, stage: int, tied: bool) -> None:
    config = {"zero": {"stage": stage}}
    plain = gradients(speaker(tied=tied), config, UNSEEN[name])
    alike(gradients(speaker(tied=tied), {**config, **TILED}, UNSEEN[name]), plain)


@pytest.mark.filterwarnings("ignore:all logits of 'head' are computed")
@pytest.mark.parametrize("frozen", ["head", "all but the head"])
def test_unseen_readers_and_frozen_parameters(frozen: str) -> None:
    def built() -> Speaker:
        model = speaker()
        for name, param in model.named_parameters():
            param.requires_grad_(name.startswith("head") != (frozen == "head"))
        return model

    alike(gradients(built(), TILED, own_loss), gradients(built(), {}, own_loss))


@pytest.mark.filterwarnings("ignore:all logits of 'head' are computed")
def test_unseen_readers_under_autocast() -> None:
    results = []
    for config in ({}, TILED):
        with torch.autocast("cpu", torch.bfloat16):
            results.append(gradients(speaker(), config, own_loss))
    alike(*results, 2e-2)


ASKS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "register_hook": lambda z, loss: z.register_hook(print),
    "retain_grad": lambda z, loss: z.retain_grad(),  # type: ignore[func-returns-value]
    "torch.autograd.grad": lambda z, loss: torch.autograd.grad(loss, z, allow_unused=True),
}


@pytest.mark.parametrize("call", ASKS)
def test_the_gradient_of_logits_whose_loss_was_in_tiles(call: str) -> None:
    inputs, targets = tokens()
    with partita.initialize(speaker(), TILED) as engine:
        logits = engine(inputs)
        loss = F.cross_entropy(logits.transpose(1, 2), targets)
        with pytest.raises(
            PartitaError, match=rf"'{call}' needs the gradient of .* call logits.retain_grad\(\) as soon as"
        ):
            ASKS[call](logits, loss)


def test_a_backward_that_ends_at_logits_is_refused() -> None:
    inputs, targets = tokens()
    with partita.initialize(speaker(), TILED) as engine, whole_logits():
        logits = engine(inputs)
        logits.retain_grad()
        loss = F.cross_entropy(logits.transpose(1, 2), targets)
        with pytest.raises(PartitaError, match=r"backward\(inputs=\[logits\]\).*torch.autograd.grad\(loss, logits\)"):
            loss.backward(inputs=[logits])
        assert torch.autograd.grad(loss, logits)[0].shape == logits.shape


@pytest.mark.filterwarnings("ignore:all logits of 'head' are computed")
@pytest.mark.parametrize("loss", [IN_TILES["flattened"], own_loss])
def test_gradients_of_gradients_are_refused(loss: Loss) -> None:
    class Penalized(Speaker):
        def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
            embedded = self.embedding(tokens)
            value = loss(self.head(self.body(embedded)), targets)
            (gradient,) = torch.autograd.grad(value, embedded, create_graph=True)
            return value + gradient.square().sum()

    with partita.initialize(Penalized(), TILED) as engine:
        with pytest.raises(PartitaError, match=r"create_graph=True: .*set loss.tiled to none"):
            engine(*tokens())


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_tied_heads_and_biases(tied: bool, bias: bool, stage: int) -> None:
    plain = gradients(speaker(tied=tied, bias=bias), {"zero": {"stage": stage}}, IN_TILES["flattened"])
    config = {"zero": {"stage": stage}, **TILED}
    alike(gradients(speaker(tied=tied, bias=bias), config, IN_TILES["flattened"]), plain)


@pytest.mark.parametrize("frozen", ["head", "all but the head"])
def test_frozen_parameters(frozen: str) -> None:
    def built() -> Speaker:
        model = speaker()
        for name, param in model.named_parameters():
            param.requires_grad_(name.startswith("head") != (frozen == "head"))
        return model

    alike(gradients(built(), TILED, IN_TILES["shifted"]), gradients(built(), {}, IN_TILES["shifted"]))


def test_bf16_differs_by_its_rounding_alone() -> None:
    """A tiled loss in bf16 differs from fp32 only by the rounding of bf16."""
    exact = gradients(speaker(), {}, IN_TILES["shifted, all dims"])
    tiled = gradients(speaker(), {**TILED, "precision": {"compute": "bf16"}}, IN_TILES["shifted, all dims"])
    alike(tiled, exact, 2e-2)


def test_autocast() -> None:
    results = []
    for config in ({}, TILED):
        with torch.autocast("cpu", torch.bfloat16):
            results.append(gradients(speaker(), config, IN_TILES["shifted, all dims"]))
    alike(*results, 2e-2)


def test_the_graph_may_be_used_twice() -> None:
    model = speaker()
    inputs, targets = tokens()
    with partita.initialize(model, TILED) as engine:
        loss = IN_TILES["flattened"](engine(inputs), targets)
        once = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        again = torch.autograd.grad(loss * 2, list(model.parameters()), retain_graph=True)
        last = torch.autograd.grad(loss, list(model.parameters()))
        for first, second, third in zip(once, again, last, strict=True):
            torch.testing.assert_close(first * 2, second)
            assert torch.equal(first, third)


def test_nothing_has_the_size_of_the_logits() -> None:
    """A tiled loss keeps only the gradients of the hidden states and of the weight for backward; the logits of a tile,
    what its loss saves of them, and their gradient are temporary.
    """
    num_rows, tile = 4000, 100
    inputs, targets = tokens(0, 1, num_rows)
    logits_bytes, tile_bytes = 4 * num_rows * VOCAB, 4 * tile * VOCAB
    peaks, kept = {}, {}
    for tiled in ("none", tile_bytes):
        with partita.initialize(speaker(bias=False), {"loss": {"tiled": tiled}}) as engine:
            hidden = engine.module.body(engine.module.embedding(inputs))
            with LiveBytes() as live:
                loss = F.cross_entropy(engine.module.head(hidden).flatten(0, 1), targets.flatten())
                peaks[tiled], kept[tiled] = live.peak, live.total
                assert loss.requires_grad
    assert kept["none"] >= logits_bytes
    of_hidden, of_weight, scalars = 4 * num_rows * WIDTH, 4 * VOCAB * WIDTH, 1000
    mask = num_rows  # bytes of the mask that counts the targets that are not ignored
    assert of_hidden + of_weight <= kept[tile_bytes] <= of_hidden + of_weight + scalars
    assert peaks[tile_bytes] <= of_hidden + of_weight + 4 * tile_bytes + mask + scalars
    assert peaks["none"] >= 2 * logits_bytes


def test_logits_say_what_they_are() -> None:
    with partita.initialize(speaker(), TILED) as engine:
        logits = engine(tokens()[0])
        assert isinstance(logits, DeferredLogits)
        assert repr(logits) == f"{type(logits).__name__}(shape=(3, 11, {VOCAB}), dtype=torch.float32, not computed)"
        assert (logits.shape, logits.dim(), len(logits), logits.dtype) == ((3, 11, VOCAB), 3, 3, torch.float32)
        assert logits.half().dtype == torch.float16
        assert logits[0, ..., :].shape == (11, VOCAB)
        assert logits.transpose(0, 2).shape == (VOCAB, 11, 3)


def test_values_are_those_of_the_head() -> None:
    inputs, _ = tokens()
    expected = speaker()(inputs)
    with partita.initialize(speaker(), TILED) as engine, whole_logits("argmax"):
        logits = engine(inputs)
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))
        assert torch.equal(logits.detach(), expected)
        assert torch.equal((logits.transpose(1, 2)[:, 3] / 2).detach(), expected[..., 3] / 2)
        assert torch.equal(copy.deepcopy(logits.detach()), expected)
        torch.save(logits.detach(), io.BytesIO())


def test_without_gradients_logits_are_logits() -> None:
    with partita.initialize(speaker(), TILED) as engine, torch.no_grad():
        assert type(engine(tokens()[0])) is Tensor


def test_after_the_engine_the_head_is_as_before() -> None:
    model = speaker()
    with partita.initialize(model, TILED):
        copied = copy.deepcopy(model.head)
    for head in (copied, model.head):
        assert type(head(torch.randn(2, WIDTH))) is Tensor
        assert "_compiled_call_impl" not in vars(head) or vars(head)["_compiled_call_impl"] is None


def test_a_layer_named_in_the_config() -> None:
    class Narrow(Speaker):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(WIDTH, 4)

    with pytest.raises(ConfigError, match=r"found no output layer of Narrow .*name it in loss.head"):
        partita.initialize(Narrow(), TILED)
    with partita.initialize(Narrow(), {"loss": {"tiled": "auto", "head": ["head"]}}) as engine:
        assert isinstance(engine(tokens()[0]), DeferredLogits)


def test_a_head_that_is_no_linear_layer_is_refused() -> None:
    class Squashing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).tanh()

    model = speaker()
    model.head = Squashing(WIDTH, VOCAB)
    with pytest.raises(ConfigError, match="loss.tiled: 'head': expected a plain linear layer .* got Squashing"):
        partita.initialize(model, {"loss": {"tiled": "auto", "head": ["head"]}})


def test_a_pattern_that_fits_nothing_is_named() -> None:
    with pytest.raises(ConfigError, match=r"loss.head: 'lm_\*' matches no module of Speaker"):
        partita.initialize(speaker(), {"loss": {"tiled": "auto", "head": ["lm_*"]}})


@pytest.mark.parametrize("stage", [1, 3])
def test_logits_asked_for_too_late(stage: int) -> None:
    inputs, targets = tokens()
    with partita.initialize(speaker(), {"zero": {"stage": stage}, **TILED}) as engine:
        logits = engine(inputs)
        engine.backward(F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
        engine.step()
        with pytest.raises(PartitaError, match=r"read after the parameters.*were changed"):
            logits.argmax()


def test_changed_input() -> None:
    class Reusing(Speaker):
        def forward(self, tokens: Tensor) -> Tensor:
            hidden = self.body(self.embedding(tokens))
            logits: Tensor = self.head(hidden)
            hidden.zero_()
            return logits

    inputs, targets = tokens()
    with partita.initialize(Reusing(), TILED) as engine:
        with pytest.raises(PartitaError, match="or the layer's input, were changed"):
            F.cross_entropy(engine(inputs).flatten(0, 1), targets.flatten())


def test_change_in_place_that_another_would_not_see() -> None:
    with partita.initialize(speaker(), TILED) as engine:
        logits = engine(tokens()[0])
        rows = logits.flatten(0, 1)
        assert rows.shape == (33, VOCAB)
        with pytest.raises(PartitaError, match="changed in place by 'div_'"):
            logits.div_(2)


def test_a_hook_on_the_head_sees_logits() -> None:
    seen = []
    model = speaker()
    model.head.register_forward_hook(lambda _, __, output: seen.append(output.shape))
    with whole_logits("a forward hook on the layer"):
        gradients(model, TILED, IN_TILES["flattened"])
    assert seen == [(3, 11, VOCAB)]


def test_a_head_kept_in_fp32_among_bf16() -> None:
    config = {"precision": {"compute": "bf16", "keep_fp32": ["head"]}}
    plain = gradients(speaker(), config, IN_TILES["shifted, all dims"])
    alike(gradients(speaker(), {**config, **TILED}, IN_TILES["shifted, all dims"]), plain)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_compiled_whole_has_logits(stage: int) -> None:
    class Losing(Speaker):
        def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(super().forward(tokens).float().flatten(0, 1) / 2, targets.flatten())

    seeds.start()
    model, batch = Losing(), tokens()
    plain = model(*batch)
    config = {"zero": {"stage": stage}, **TILED}
    with partita.initialize(model, config) as engine, whole_logits("a compiled forward"):
        compiled = torch.compile(engine.module, backend="eager")
        torch.testing.assert_close(compiled(*batch), plain)


def test_no_warning_where_nothing_is_whole() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients(speaker(), {"loss": {"tiled": "auto"}}, IN_TILES["flattened"])
