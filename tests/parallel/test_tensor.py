"""Tensor parallelism on unmodified models: losses and gradients compared with the full model, traffic, and the rules
that split the modules.
"""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partita
from partita import ConfigError
from tests.kit import seeds
from tests.kit.models import FAMILIES
from tests.kit.plans import matrix
from tests.kit.ranks import on_ranks
from tests.parallel import tensor, zoo

TIMEOUT_S = 240


@matrix(
    size=(2, 3), name=tuple(name for name in zoo.BUILD if name not in ("llama-4", "t5-decoder", *zoo.READING_WEIGHTS))
)
def test_slices_compute_what_the_whole_does(size: int, name: str) -> None:
    for found in on_ranks(size, tensor.beside_whole, (name,), timeout=TIMEOUT_S):
        beside = found[name]
        assert beside.loss < 1e-5
        assert not {key: error for key, error in beside.gradients.items() if error > 1e-5}
        assert beside.share < (0.6 if size == 2 else 0.5)


def test_llama_sums_four_times_a_layer() -> None:
    """A layer has two all-reduces in forward and two in backward; embedding, head and loss have one each."""
    for found in on_ranks(2, tensor.beside_whole, ("llama",), timeout=TIMEOUT_S):
        assert found["llama"].calls == {"all_reduce": 2 * 4 + 3, "all_gather": 1}  # of each row's largest logit


@pytest.mark.parametrize("name", ["gpt2", "decoder", "phi3", "t5"])
def test_layers_that_no_metadata_names_gather_nothing(name: str) -> None:
    found = on_ranks(2, tensor.beside_whole, (name,), timeout=TIMEOUT_S)[0][name]
    assert found.calls["all_gather"] == 1
    how = "class GPT2MLP" if name == "gpt2" else "class FeedForward" if name == "decoder" else "proven on its slices"
    assert any(how in line for line in found.lines)


def test_every_module_with_parameters_has_a_line() -> None:
    found = on_ranks(2, tensor.beside_whole, ("qwen3",), timeout=TIMEOUT_S)[0]["qwen3"]
    names = {line.split()[0] for line in found.lines}
    model = zoo.build("qwen3")
    assert {name for name, m in model.named_modules() if any(True for _ in m.parameters(recurse=False))} <= names
    told = {line.split()[0]: line.partition("  ")[2].strip() for line in found.lines}
    layer = "model.layers.0"
    assert told["model.embed_tokens"].startswith("vocabulary 64+64 of 128")
    assert told[f"{layer}.self_attn"] == "3+3 of 6 query heads over 2 key heads (class Qwen3Attention)"
    assert told[f"{layer}.self_attn.q_norm"] == "copies, on own heads; gradients summed (class Qwen3Attention)"
    assert told[f"{layer}.mlp.down_proj"].endswith("(tp_plan of Qwen3ForCausalLM)")
    assert told[f"{layer}.input_layernorm"] == "copies (no rule splits it)"


@pytest.mark.parametrize(
    ("rules", "line"),
    [
        ({"*.mlp": "whole"}, "mlp.gate_proj copies (parallel.tensor_rules: '*.mlp')"),
        ({"*.gate_proj": "column_gathered", "*.up_proj": "column_gathered", "*.down_proj": "row_split"}, "gathered"),
        ({"lm_head": "column_gathered", "model.embed_tokens": "whole"}, "outputs 64+64 of 128, gathered"),
        ({"LlamaAttention": "whole"}, "copies (parallel.tensor_rules: 'LlamaAttention')"),
    ],
)
def test_the_config_comes_before_all_other_rules(rules: dict[str, str], line: str) -> None:
    found = on_ranks(2, tensor.beside_whole, ("llama",), rules, timeout=TIMEOUT_S)[0]["llama"]
    assert any(line in " ".join(each.split()) for each in found.lines), found.lines
    assert found.loss < 1e-5
    assert max(found.gradients.values()) < 1e-5


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"*.gate": "column"}, r"parallel.tensor_rules: '\*.gate' matches no module of LlamaForCausalLM"),
        ({"*.input_layernorm": "column"}, "'column' cannot split 'model.layers.0.input_layernorm' .* no linear layer"),
        ({"model.norm": "vocabulary"}, "neither an embedding nor a linear layer"),
    ],
)
def test_rules_that_fit_nothing_are_errors(rules: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        on_ranks(2, tensor.beside_whole, ("llama",), rules)


class Plain(nn.Module):
    """Module of ten features that resembles a gated feed-forward layer, and is one only for the kind ``halves``."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up, self.down = nn.Linear(10, 24), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        both = self.up(x)
        if self.kind == "halves":
            gate, value = both.chunk(2, -1)
        elif self.kind == "pairs":
            gate, value = both[..., ::2], both[..., 1::2]
        else:
            gate, value = both.chunk(2, -1)
            value = value.softmax(-1)
        return self.down(F.silu(gate) * value)


class Attend(nn.Module):
    """Attention of an unknown class with five heads; ``mixed`` also adds the mean of all heads to each head."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.head_dim = kind, 2
        self.q, self.k, self.v, self.o = (nn.Linear(10, 10) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = (
            layer(x).unflatten(-1, (-1, 2)).transpose(-2, -3) for layer in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(queries, keys, values)
        if self.kind == "mixed":
            mixed = mixed + mixed.mean(-3, keepdim=True)
        return self.o(mixed.transpose(-2, -3).flatten(-2))


class Stack(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        made = Attend if kind in ("attention", "mixed") else Plain
        self.blocks = nn.ModuleList(made(kind) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def stacks(kinds: tuple[str, ...]) -> dict[str, tuple[float, list[str]]]:
    """Return the largest relative error of the gradient of the inputs, and the description of the split, by kind."""
    collectives, found = tensor.connected(2), {}
    for kind in kinds:
        seeds.start()
        whole = Stack(kind)
        model = copy.deepcopy(whole)
        applied = tensor.on_slices(model, collectives)
        x = torch.randn(3, 10, generator=seeds.generator(1), requires_grad=True)
        y = x.detach().clone().requires_grad_()
        whole(x).square().sum().backward()
        model(y).square().sum().backward()
        assert x.grad is not None
        assert y.grad is not None
        found[kind] = ((x.grad - y.grad).abs().max().item() / x.grad.abs().max().item(), applied.lines)
        for own in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert all(module.forward.__self__ is module for module in own.modules())
        applied.transforms.undo()
        assert all("forward" not in vars(module) for module in model.modules())
    collectives.mesh.close()
    return found


def test_only_what_stands_the_proof_is_believed() -> None:
    """Modules are split only if a check on slices succeeds. A softmax over features, interleaved features and a mean
    over heads fit by shape, and would be wrong on slices.
    """
    for found in on_ranks(2, stacks, ("halves", "pairs", "softmax", "attention", "mixed")):
        assert {kind: error < 1e-5 for kind, (error, _) in found.items()} == dict.fromkeys(found, True)
        proven = {kind: any("proven" in line for line in lines) for kind, (_, lines) in found.items()}
        assert proven == {"halves": True, "pairs": False, "softmax": False, "attention": True, "mixed": False}


class Gated(nn.Module):
    """Two layers between which gates, computed by the first one, multiply values from outside the module."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(10, 12), nn.Linear(12, 10)

    def forward(self, x: Tensor, values: Tensor) -> Tensor:
        return self.down(values * self.up(x).sigmoid())


class Learned(nn.Module):
    """Feed-forward layer with learned parameters between its two layers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up, self.down = nn.Linear(10, 12), nn.Linear(12, 10)
        if kind == "scale":
            self.scale = nn.Parameter(torch.tensor(0.7))
        else:
            between = {"activation": nn.PReLU(), "channels": nn.PReLU(12), "norm": nn.LayerNorm(12)}
            self.between = between[kind]

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return self.down((hidden * self.scale).sin() if self.kind == "scale" else self.between(hidden))


class Planned(nn.Module):
    """Model with a plan for its layers, as those of transformers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
        self.blocks = nn.ModuleList(Gated() if kind == "gated" else Learned(kind) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + (block(x, torch.cat((x, x[..., :2]), -1)) if isinstance(block, Gated) else block(x))
        return x


def planned(kinds: tuple[str, ...], rules: dict[str, str]) -> dict[str, tuple[float, list[str], list[str]]]:
    """Return the largest relative error of a gradient, the description of the split, and the notices, by kind."""
    collectives, found = tensor.connected(2), {}
    for kind in kinds:
        seeds.start()
        whole = Planned(kind)
        model = copy.deepcopy(whole)
        applied = tensor.on_slices(model, collectives, rules)
        x, errors = torch.randn(3, 10, generator=seeds.generator(1)), []
        for each in (whole, model):
            each(x).square().sum().backward()
        for param, reference in zip(model.parameters(), whole.parameters(), strict=True):
            assert reference.grad is not None
            difference = tensor.whole_gradient(param, applied, collectives) - reference.grad
            errors.append(float(difference.abs().max() / reference.grad.abs().max()))
        found[kind] = max(errors), applied.lines, applied.notices
        applied.transforms.undo()
    collectives.mesh.close()
    return found


def test_a_plan_splits_layers_only_if_nothing_unknown_is_between_them() -> None:
    """Activations with one learned number may be between layers that stay split; other parameters, or values from
    outside the module, may not.
    """
    for found in on_ranks(2, planned, ("activation", "scale", "channels", "norm", "gated"), {}):
        assert max(error for error, _, _ in found.values()) < 1e-5, found
        stay_split = {kind for kind, (_, lines, _) in found.items() if not any("gathered" in line for line in lines)}
        assert stay_split == {"activation"}


def test_parameters_between_layers_that_the_config_splits_are_named() -> None:
    rules = {"blocks.*.up": "column", "blocks.*.down": "row"}
    for found in on_ranks(2, planned, ("scale",), rules):
        assert found["scale"][2] == [
            "parallel.tensor_rules: 'blocks.*.up': 'column' leaves outputs split over the ranks. If Learned applies "
            "'scale' to them, the gradient of that parameter is wrong: set 'column_gathered', and 'row_split' for the "
            "next layer"
        ]
    rules = {"blocks.*.up": "column_gathered", "blocks.*.down": "row_split"}
    for found in on_ranks(2, planned, ("scale",), rules):
        assert found["scale"][0] < 1e-5
        assert not found["scale"][2]


def few_heads() -> list[str]:
    collectives = tensor.connected(3)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 3}
    seeds.start()
    whole = FAMILIES["llama"](vocab_size=64, **sizes)
    model = copy.deepcopy(whole)
    applied = tensor.on_slices(model, collectives)
    tokens = torch.randint(64, (2, 7), generator=seeds.generator())
    losses = [each(input_ids=tokens, labels=tokens, use_cache=False).loss.item() for each in (whole, model)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    collectives.mesh.close()
    return applied.notices


def test_fewer_heads_than_ranks_fall_to_the_floor() -> None:
    for said in on_ranks(3, few_heads):
        assert said == [
            "LlamaAttention is not split by heads: 2 query heads are fewer than 3 tensor ranks; its linear layers are "
            "split, and their outputs gathered"
        ]


# -- logits ------------------------------------------------------------------------------------------------------------


def logits_of() -> tuple[Any, ...]:
    """Compare losses and the argmax of split logits with those of full logits; check the number of all-gathers."""
    collectives = tensor.connected(2)
    whole = zoo.build("llama")
    model = copy.deepcopy(whole)
    tensor.on_slices(model, collectives)
    batch = {"input_ids": zoo.batch("llama", 0)["input_ids"]}
    found = []
    for each in (whole, model):
        logits = each(**batch).logits
        gathers = gathered(collectives)
        rows = logits[:, :-1].float().flatten(0, 1)
        view = logits[..., 1:, :].contiguous().view(-1, zoo.VOCAB)
        targets = batch["input_ids"][:, 1:].flatten()
        losses = [
            F.cross_entropy(rows, targets),
            F.cross_entropy(view, targets, reduction="sum"),
            F.cross_entropy(rows * 0.5, targets, ignore_index=int(targets[0]), reduction="none"),
        ]
        assert logits.shape == (*batch["input_ids"].shape, zoo.VOCAB)
        assert (logits.size(-1), logits.dim(), logits.numel()) == (zoo.VOCAB, 3, logits.shape.numel())
        assert (gathered(collectives) - gathers) == (3 if each is model else 0)  # the largest logits, for each loss
        chosen = logits.argmax(-1)
        smoothed = F.cross_entropy(rows, targets, label_smoothing=0.1)
        found.append([loss.detach() for loss in (*losses, smoothed)] + [chosen])
    smoothed.backward()  # through an all-gather
    assert all(param.grad is not None for param in model.parameters())
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(torch.as_tensor(ours), theirs, rtol=1e-5, atol=1e-5)
    collectives.mesh.close()
    return tuple(found)


def outside_the_vocabulary() -> None:
    """Check that tokens and targets outside the vocabulary are errors on all ranks, as in an unsplit model."""
    collectives = tensor.connected(2)
    model = zoo.build("llama")
    tensor.on_slices(model, collectives)
    tokens = zoo.batch("llama", 0)["input_ids"]
    targets = tokens[:, 1:].flatten()
    for wrong in (-1, zoo.VOCAB):
        with pytest.raises((IndexError, RuntimeError), match="index out of range"):
            model(input_ids=tokens.index_fill(1, torch.tensor([2]), wrong))
        rows = model(input_ids=tokens).logits[:, :-1].flatten(0, 1)
        spoilt = targets.index_fill(0, torch.tensor([2]), wrong)
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            F.cross_entropy(rows, spoilt)
        assert F.cross_entropy(rows, spoilt, ignore_index=wrong).isfinite()
    collectives.mesh.close()


def test_what_is_outside_the_vocabulary_is_an_error() -> None:
    on_ranks(2, outside_the_vocabulary, timeout=TIMEOUT_S)


def gathered(collectives: Any) -> int:
    return tensor.counts(collectives).get("all_gather", 0)


def test_logits_stay_slices_until_they_are_read() -> None:
    on_ranks(2, logits_of, timeout=TIMEOUT_S)


class Counted(nn.Module):
    """Model that divides its embedding's gradient by the frequency of each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8, scale_grad_by_freq=True), nn.Linear(8, 12, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.embed(tokens)).flatten(0, 1), tokens.roll(-1, 1).flatten())


def gradient_by_frequency() -> float:
    torch.manual_seed(0)
    model, tokens = Counted(), torch.tensor([[0, 1, 1, 7, 7, 7, 11, 6], [6, 6, 5, 5, 2, 9, 0, 3]])
    alone = copy.deepcopy(model)
    alone(tokens).backward()
    expected = alone.embed.weight.grad
    with partita.initialize(model, {"parallel": {"tensor": 2}}) as engine:
        engine.backward(engine(tokens))
        found = engine.gradient("embed.weight")
        assert found is not None
        assert expected is not None
        return (found - expected).abs().max().item()


def test_an_embedding_that_counts_tokens_counts_all_of_them() -> None:
    assert max(on_ranks(2, gradient_by_frequency)) < 1e-6
