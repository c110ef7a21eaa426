"""Parameters split by tensor parallelism: code other than the forward of their own module reads them full and
differentiable, and user hooks see full gradients.
"""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partita
from partita import ConfigError, PartitaError
from tests.kit.ranks import on_ranks

TOKENS, WIDTH = 13, 8  # 7 + 6 rows of the vocabulary


class Attention(nn.Module):
    """Attention with two query heads, a norm of each query head, and one key head, which both ranks need."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = 2, 1, 4
        self.q_proj, self.o_proj = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.k_proj, self.v_proj = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)
        self.q_norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(samples, length, -1, 4)).transpose(1, 2)
        k, v = (layer(x).view(samples, length, 1, 4).transpose(1, 2) for layer in (self.k_proj, self.v_proj))
        heads = (q @ k.transpose(2, 3) / 2).softmax(-1) @ v  # the backward of the fused kernel has no derivative
        return self.o_proj(heads.transpose(1, 2).reshape(samples, length, -1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, reads: Callable[["Model", Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, TOKENS)
        self.reads = reads

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden).flatten(0, 1)
        loss = F.cross_entropy(logits, tokens.roll(-1, 1).flatten())
        return loss if self.reads is None else loss + self.reads(self, hidden)


def orthogonality(model: Model, hidden: Tensor) -> Tensor:
    weight: Tensor = model.blocks[0].up.weight
    return 0.1 * (weight.t() @ weight - torch.eye(weight.shape[1])).pow(2).sum()


def norms(model: Model, hidden: Tensor) -> Tensor:
    """Return a penalty on every parameter: split by rows or columns, or replicated, with partial or full gradients."""
    return 0.1 * torch.stack([param.norm() for param in model.parameters()]).sum()


def tied_head(model: Model, hidden: Tensor) -> Tensor:
    return F.linear(hidden, model.embed.weight).logsumexp(-1).mean()


def shapes(model: Model, hidden: Tensor) -> Tensor:
    weight: Tensor = model.blocks[0].down.weight
    assert weight.shape == (WIDTH, 3 * WIDTH)
    assert (weight.size(1), weight.numel(), weight.dim(), len(weight)) == (3 * WIDTH, 3 * WIDTH**2, 2, WIDTH)
    assert weight.stride() == (3 * WIDTH, 1)
    return weight.T[0].sum() + weight[:, -1].pow(2).sum()


def slope(model: Model, hidden: Tensor) -> Tensor:
    """A penalty on the gradients of parameters (second order)."""
    params = [model.blocks[1].up.weight, model.blocks[1].attention.q_norm.weight, model.blocks[1].down.weight]
    gradients = torch.autograd.grad(hidden.pow(2).mean(), params, create_graph=True)
    assert [gradient.shape for gradient in gradients] == [param.shape for param in params]
    return sum((gradient.norm() for gradient in gradients), hidden.new_zeros(()))


def replaced(model: Model, hidden: Tensor) -> Tensor:
    """Return a value from a call of a module with other tensors in place of its parameters."""
    params: dict[str, Any] = {key: param * 0.5 for key, param in model.blocks[0].named_parameters()}
    out: Tensor = torch.func.functional_call(model.blocks[0], params, (hidden,))
    return out.pow(2).mean()


READS = (orthogonality, norms, tied_head, shapes, slope, replaced)


def tokens() -> Tensor:
    return torch.randint(TOKENS, (3, 6), generator=torch.Generator().manual_seed(2))


def build(reads: Callable[[Model, Tensor], Tensor] | None = None) -> Model:
    torch.manual_seed(0)
    return Model(reads)


def config(stage: int) -> dict[str, Any]:
    return {"parallel": {"tensor": 2}, "zero": {"stage": stage}}


def worst(engine: Any, alone: nn.Module) -> dict[str, float]:
    """Return the differences of gradients that exceed 1e-5, relative to the model's largest gradient element."""
    largest = max(param.grad.abs().max().item() for param in alone.parameters() if param.grad is not None)
    far = dict[str, float]()
    for name, param in alone.named_parameters():
        found = engine.gradient(name)
        assert (found is None) == (param.grad is None), name
        if param.grad is not None:
            far[name] = (found - param.grad).abs().max().item() / largest
    return {name: error for name, error in far.items() if error > 1e-5}


def beside_one_process(stage: int) -> None:
    for reads in READS:
        alone = build(reads)
        expected = alone(tokens())
        expected.backward()
        with partita.initialize(build(reads), config(stage)) as engine:
            loss = engine(tokens())
            assert loss.item() == pytest.approx(expected.item(), abs=1e-5), reads.__name__
            engine.backward(loss)
            assert not worst(engine, alone), reads.__name__


@pytest.mark.filterwarnings("ignore:parameter '.*' is read outside the forward of its unit")
@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_are_whole_for_whoever_reads_them(stage: int) -> None:
    on_ranks(2, beside_one_process, stage, timeout=120)


def written(how: str) -> None:
    with partita.initialize(build(), config(1)) as engine:
        weight = engine.module.blocks[0].up.weight
        with torch.no_grad():
            if how == "clamp_":
                weight.clamp_(-1, 1)
            elif how == "copy_":
                weight.copy_(torch.zeros(3 * WIDTH, WIDTH))
            elif how == "index":
                weight[0] = 0
            elif how == "foreach":
                torch._foreach_mul_([weight], 0.5)
            else:
                weight.data.clamp_(-1, 1)


@pytest.mark.parametrize("how", ["clamp_", "copy_", "index", "foreach", "data"])
def test_writing_to_a_split_parameter_names_it_and_what_to_do(how: str) -> None:
    with pytest.raises(PartitaError, match=r"'blocks.0.up.weight' is split .* `with engine.gathered"):
        on_ranks(2, written, how)


def looked_at() -> None:
    alone = build()
    with partita.initialize(build(), config(1)) as engine:
        model = engine.module
        for copied in (copy.deepcopy(model).state_dict(), model.state_dict()):
            for name, value in alone.state_dict().items():
                assert type(value) is Tensor
                assert torch.equal(copied[name], value), name
        assert "24, 8" in f"{model.blocks[0].up.weight}"
        assert model.blocks[0].up.weight.to("cpu") is model.blocks[0].up.weight
        with engine.gathered(model.blocks[0], modify=True), torch.no_grad():
            model.blocks[0].up.weight.mul_(0.5)
        assert torch.equal(model.blocks[0].up.weight.detach(), alone.blocks[0].up.weight.detach() * 0.5)
    with pytest.raises(PartitaError, match="its engine was closed"):
        model.blocks[0].up.weight.sum()
    assert type(model.blocks[0].attention.q_norm.weight) is nn.Parameter


def test_copies_and_state_dicts_are_whole() -> None:
    on_ranks(2, looked_at)


def divide_by_norm(gradient: Tensor) -> Tensor:
    return gradient / gradient.norm()


def clear_rows(gradient: Tensor) -> None:
    gradient[:5] = 0


HOOKED = {"embed.weight": clear_rows, "blocks.0.up.weight": divide_by_norm, "blocks.1.down.weight": divide_by_norm}
HOOKED |= {"blocks.1.attention.q_norm.weight": divide_by_norm, "blocks.0.attention.k_proj.weight": divide_by_norm}


def with_hooks(stage: int) -> None:
    alone = build()
    for name, hook in HOOKED.items():
        alone.get_parameter(name).register_hook(hook)
    alone(tokens()).backward()
    for before in (True, False):
        model = build()
        if before:
            handles = [model.get_parameter(name).register_hook(hook) for name, hook in HOOKED.items()]
        with partita.initialize(model, config(stage)) as engine:
            if not before:
                handles = [model.get_parameter(name).register_hook(hook) for name, hook in HOOKED.items()]
            engine.backward(engine(tokens()))
            assert not worst(engine, alone)
            engine.zero_grad()
            for handle in handles:
                handle.remove()
            engine.backward(engine(tokens()))
            assert "embed.weight" in worst(engine, alone)


@pytest.mark.parametrize("stage", [1, 3])
def test_hooks_see_whole_gradients(stage: int) -> None:
    on_ranks(2, with_hooks, stage)


def hook_after_accumulation(before: bool) -> None:
    model = build()
    if before:
        model.embed.weight.register_post_accumulate_grad_hook(lambda param: None)
    with partita.initialize(model, config(1)):
        model.embed.weight.register_post_accumulate_grad_hook(lambda param: None)


def test_hooks_after_accumulation_are_refused() -> None:
    message = re.escape("'embed.weight' is split over the tensor ranks, and its .grad is a shard")
    with pytest.raises(ConfigError, match=message):
        on_ranks(2, hook_after_accumulation, True)
    with pytest.raises(PartitaError, match=message):
        on_ranks(2, hook_after_accumulation, False)


class SquareOf(torch.autograd.Function):
    """Function that computes both gradients itself, as fused losses do."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden.detach(), weight.detach().clone())
        return (hidden @ weight.detach().t()).square().sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight = ctx.saved_tensors
        outer = 2 * gradient * (hidden @ weight.t())
        return outer @ weight, outer.flatten(0, 1).t() @ hidden.flatten(0, 1)


class WithFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, tokens: Tensor, *, clones: bool = False) -> Tensor:
        weight = self.head.weight
        loss: Tensor = SquareOf.apply(self.embedding(tokens), weight.clone() if clones else weight)
        return loss


class NormOf(torch.autograd.Function):
    """Squared norm of a weight, with a hand-written gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight.detach().clone())
        return weight.detach().square().sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient * ctx.saved_tensors[0]


def gives_a_function_a_copy() -> None:
    """Pass to a function a parameter whose gradients the tensor ranks sum, directly and as a clone."""
    torch.manual_seed(0)
    config = {"parallel": {"tensor": 2}, "optimizer": {"name": "sgd", "lr": 0.0}}
    with partita.initialize(Model(), config) as engine:
        weight = engine.module.blocks[1].attention.q_norm.weight
        with pytest.raises(PartitaError, match=r"autograd.Function 'NormOf' got parameter.*q_norm.*clone"):
            NormOf.apply(weight)
        with torch.no_grad():
            assert NormOf.apply(weight.clone()) == weight.square().sum()
        engine.backward(NormOf.apply(weight.clone()) + 0 * engine(torch.arange(12).view(2, 6)).sum())
        gradient = engine.gradient("blocks.1.attention.q_norm.weight")
        torch.testing.assert_close(gradient, 2 * weight.detach().float().view_as(gradient))


def test_a_function_that_is_given_a_copy_is_named() -> None:
    on_ranks(2, gives_a_function_a_copy)


def gives_a_function_a_split_weight() -> None:
    tokens = torch.arange(12).view(2, 6)
    for rules, expected in (({"head": "vocabulary"}, PartitaError), ({"head": "whole"}, None)):
        torch.manual_seed(0)
        config = {"parallel": {"tensor": 2, "tensor_rules": rules}, "optimizer": {"name": "sgd", "lr": 0.0}}
        with partita.initialize(WithFunction(), config) as engine:
            loss = engine(tokens)
            if expected is not None:
                with pytest.raises(expected, match=r"autograd.Function 'SquareOf' computed the gradient of a full"):
                    engine.backward(loss)
                engine.zero_grad()
                engine.backward(engine(tokens, clones=True))
                cloned = engine.gradient("head.weight")
                continue
            engine.backward(loss)
            torch.testing.assert_close(engine.gradient("head.weight"), cloned)
            assert cloned.norm() > 0


def test_a_function_that_is_given_a_split_weight_is_named() -> None:
    on_ranks(2, gives_a_function_a_split_weight)


def penalizes_inside_gathered(stage: int, whole: bool) -> None:
    """Compute a penalty on full weights inside ``gathered``, and its backward after the block."""
    config = {"parallel": {"tensor": 2}, "zero": {"stage": stage}, "optimizer": {"name": "sgd", "lr": 0.0}}
    tokens = torch.arange(12).view(2, 6)
    torch.manual_seed(0)
    model = Model()
    expected = {name: 2 * param.detach().clone() for name, param in model.named_parameters()}
    with partita.initialize(model, config) as engine:
        for _ in range(2):
            loss = 0 * engine(tokens)
            chosen = model if whole else model.blocks[0].up
            with engine.gathered(chosen):
                penalty = sum(param.square().sum() for param in chosen.parameters())
                with pytest.raises(PartitaError, match=r"engine.backward inside engine.gathered.*after the block"):
                    engine.backward(loss + penalty)
            engine.backward(loss + penalty)
            for name, _ in model.named_parameters():
                share = 1.0 if whole or name.startswith("blocks.0.up") else 0.0
                torch.testing.assert_close(engine.gradient(name), share * expected[name])
            engine.step()


def looks_inside_gathered(stage: int) -> None:
    """Check gradients (by a hook and by ``torch.autograd.grad``) and copies of a weight inside ``gathered``."""
    torch.manual_seed(0)
    model, seen = Model(), list[Tensor]()
    config = {"parallel": {"tensor": 2}, "zero": {"stage": stage}, "optimizer": {"name": "sgd", "lr": 0.0}}
    weight = model.blocks[0].up.weight
    expected = weight.detach().clone()
    with partita.initialize(model, config) as engine:
        loss = 0 * engine(torch.arange(12).view(2, 6))
        with engine.gathered(model):
            (gradient,) = torch.autograd.grad(weight.square().sum(), [weight])
            copied = copy.deepcopy(model.blocks[0].up)
            handle = weight.register_hook(seen.append)
            penalty = weight.square().sum()
        engine.backward(loss + penalty)
        handle.remove()
    assert type(copied.weight) is nn.Parameter
    copied(torch.ones(1, WIDTH)).sum().backward()
    assert copied.weight.grad.shape == expected.shape
    assert torch.equal(copied.weight, expected)
    torch.testing.assert_close([gradient, *seen], [2 * expected] * 2)


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_and_copies_inside_gathered(stage: int) -> None:
    on_ranks(2, looks_inside_gathered, stage)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("whole", [True, False])
def test_a_penalty_inside_gathered(stage: int, whole: bool) -> None:
    on_ranks(2, penalizes_inside_gathered, stage, whole)
