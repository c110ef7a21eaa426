"""Unmodified models with sparse attention by config: losses and gradients equal dense attention with the same mask."""

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertModel, Gemma2Config, Gemma2ForCausalLM, T5Config, T5ForConditionalGeneration

import partita
from partita import ConfigError, PartitaError
from partita.attention import Layout, batch_blocks, block_sparse
from partita.config.load import load_config
from partita.config.resolve import resolve
from partita.train.decoder import Decoder, DecoderShape
from tests.attention.reference import BLOCK, LAYOUTS, assert_alike, layout, mask_of
from tests.kit import seeds
from tests.kit.models import FAMILIES
from tests.kit.plans import matrix

VOCAB, LENGTH = 64, 61
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "use_cache": True,
}
LONGFORMER = {"pattern": "longformer", "block": BLOCK, "window": 10, "global": 2}


def llama() -> nn.Module:
    return FAMILIES["llama"](**SIZES)


def gpt2() -> nn.Module:
    return FAMILIES["gpt2"](vocab_size=VOCAB, n_positions=128, n_embd=32, use_cache=True)


def bert() -> BertModel:
    sizes = {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertModel(BertConfig(**sizes), add_pooling_layer=False)


def decoder() -> Decoder:
    return Decoder(DecoderShape(layers=2, width=32, heads=4, kv_heads=2, ffn_width=48, vocab=VOCAB))


def settings(pattern: str) -> dict[str, Any]:
    chosen = dict(LAYOUTS[pattern]) if pattern != "user" else {"rows": layout("user", True).rows}
    keys = {"num_global": "global", "num_random": "random", "rows": "layout"}
    packed = {"packed": True} if pattern == "dense" else {}
    return {"pattern": pattern, "block": BLOCK, **packed} | {keys.get(key, key): value for key, value in chosen.items()}


def tokens(num_samples: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(1, VOCAB, (num_samples, length), generator=seeds.generator())


def built(build: Callable[[], nn.Module]) -> nn.Module:
    seeds.start()
    return build()


def results(model: nn.Module, loss: Callable[[Any], Tensor], attention: dict[str, Any], **other: Any) -> list[Tensor]:
    """Return the loss and all gradients."""
    with partita.initialize(model, {"attention": attention, **other}) as engine:
        value = loss(engine)
        engine.backward(value)
        gradients = [engine.gradient(name) for name, _ in model.named_parameters()]
        return [value.detach(), *(torch.zeros(()) if each is None else each for each in gradients)]


def compare(build: Callable[[], nn.Module], attention: dict[str, Any], mine: Any, theirs: Any) -> list[Tensor]:
    found = results(built(build), mine, attention)
    assert_alike(found, results(built(build), theirs, {}), attention["pattern"])
    return found


@matrix(pattern=LAYOUTS, build=(llama, gpt2))
def test_causal_models_of_transformers(pattern: str, build: Callable[[], nn.Module]) -> None:
    given = {"input_ids": tokens(), "labels": tokens(), "use_cache": False}
    mask = mask_of(layout(pattern, True), LENGTH, LENGTH).expand(2, 1, -1, -1)
    compare(
        build,
        settings(pattern),
        lambda model: model(**given).loss,
        lambda model: model(**given, attention_mask=mask).loss,
    )


@pytest.mark.parametrize("pattern", ["sliding", "longformer", "bigbird"])
def test_an_encoder_with_padding(pattern: str) -> None:
    seen = torch.ones(2, LENGTH, dtype=torch.long)
    seen[0, 40:] = 0
    mask = mask_of(layout(pattern, False), LENGTH, LENGTH).expand(2, 1, -1, -1).clone()
    mask[0] = F.pad(mask_of(layout(pattern, False), LENGTH, 40, first=0), (0, LENGTH - 40))
    direction = torch.randn(32, generator=seeds.generator(1))

    def loss(model: Any, mask: Tensor) -> Tensor:
        states = model(input_ids=tokens(), attention_mask=mask).last_hidden_state
        return (states * direction)[seen.bool()].mean()

    compare(bert, settings(pattern), lambda model: loss(model, seen), lambda model: loss(model, mask))


class Plain(nn.Module):
    """Model with ``nn.MultiheadAttention``, a padding mask, and optionally an attention mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.head = nn.Linear(32, VOCAB)

    def forward(self, ids: Tensor, padding: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embedding(ids)
        x, _ = self.attention(x, x, x, key_padding_mask=padding, attn_mask=mask, need_weights=False)
        return self.head(x)


def test_plain_models() -> None:
    """A pattern applies to causal ``F.scaled_dot_product_attention`` and to padded ``nn.MultiheadAttention``."""
    ids, targets = tokens(), tokens().roll(1, 1)
    pattern = Layout("longformer", BLOCK, 10, num_global=2)
    found = results(built(decoder), lambda model: model(ids, targets), LONGFORMER)
    model = built(decoder)
    mask = mask_of(pattern, LENGTH, LENGTH)
    real = F.scaled_dot_product_attention

    def masked(*args: Any, is_causal: bool, **kwargs: Any) -> Tensor:
        return real(*args, attn_mask=mask, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", masked)
        assert_alike(found, results(model, lambda model: model(ids, targets), {}), "decoder")

    padding = torch.zeros(2, LENGTH, dtype=torch.bool)
    padding[1, 50:] = True
    both = mask_of(layout("longformer", False), LENGTH, LENGTH)
    assert torch.equal(both[:, :50], mask_of(layout("longformer", False), LENGTH, 50, first=0))
    compare(
        Plain,
        LONGFORMER,
        lambda model: F.cross_entropy(model(ids, padding)[~padding], targets[~padding]),
        lambda model: F.cross_entropy(model(ids, padding, ~both)[~padding], targets[~padding]),
    )


@pytest.mark.parametrize("pattern", ["dense", "sliding", "bigbird"])
def test_packed_documents_are_as_if_each_came_alone(pattern: str) -> None:
    sizes = (13, 30, 18)
    ids = tokens(1)
    positions = torch.cat([torch.arange(size) for size in sizes])[None]

    def packed(model: Any) -> Tensor:
        return model(input_ids=ids, position_ids=positions, use_cache=False).logits.square().sum()

    def alone(model: Any) -> Tensor:
        parts = [model(input_ids=part, use_cache=False).logits.square().sum() for part in ids.split(sizes, 1)]
        return torch.stack(parts).sum()

    found = results(built(llama), packed, settings(pattern))
    assert_alike(found, results(built(llama), alone, settings(pattern)), pattern)
    if pattern == "dense":
        assert_alike(found, results(built(llama), packed, {}), "transformers' own packing")


def test_documents_by_position_cost_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """With packed dense attention, block pairs are those of each document alone, and computed once for all layers."""
    found, made = [], batch_blocks.block_pairs

    def counted(*args: Any) -> Any:
        found.append(made(*args))
        return found[-1]

    monkeypatch.setattr(batch_blocks, "block_pairs", counted)
    positions = torch.cat([torch.arange(blocks * BLOCK) for blocks in (2, 3, 3)])[None]
    with partita.initialize(built(llama), {"attention": {"packed": True, "block": BLOCK}}) as engine:
        engine(input_ids=tokens(1, 8 * BLOCK), position_ids=positions)
    assert [len(each.row) for each in found] == [(2 * 3 + 3 * 4 + 3 * 4) // 2]


def test_packed_documents_in_inference_mode() -> None:
    positions = torch.cat([torch.arange(blocks * BLOCK) for blocks in (2, 3, 3)])[None]
    with partita.initialize(built(llama), {"attention": {"packed": True, "block": BLOCK}}) as engine:
        ids, outputs = tokens(1, 8 * BLOCK), list[Tensor]()
        for without_graph in (torch.no_grad(), torch.inference_mode()):
            with without_graph:
                outputs.append(engine(input_ids=ids, position_ids=positions.clone()).logits)
    assert torch.equal(*outputs)


def test_layers_that_are_not_named_stay_dense() -> None:
    given = {"input_ids": tokens(), "use_cache": False}
    narrow = {"pattern": "sliding", "block": BLOCK, "window": 4}
    outputs = {}
    for layers in (["model.layers.1.*"], ["LlamaAttention"], "auto", ["model.layers.0"]):
        model = built(llama)
        with partita.initialize(model, {"attention": narrow | {"layers": layers}}) as engine, torch.no_grad():
            hidden = engine(**given, output_hidden_states=True).hidden_states
        outputs[str(layers)] = hidden
    with torch.no_grad():
        dense = built(llama)(**given, output_hidden_states=True).hidden_states
    second, first = outputs["['model.layers.1.*']"], outputs["['model.layers.0']"]
    assert torch.equal(second[1], dense[1])
    assert not torch.allclose(second[2], dense[2], atol=1e-3)
    assert not torch.allclose(first[1], dense[1], atol=1e-3)
    assert torch.equal(outputs["auto"][2], outputs["['LlamaAttention']"][2])


@pytest.mark.parametrize("checkpoint", ["units", "selective"])
def test_recomputed_is_bitwise_the_same(checkpoint: str) -> None:
    given = {"input_ids": tokens(), "labels": tokens(), "use_cache": False}
    found = []
    for choice in ("none", checkpoint):
        model = built(partial(FAMILIES["llama"], **SIZES, attention_dropout=0.3))
        found.append(
            results(model, lambda m: m(**given).loss, LONGFORMER, activations={"checkpoint": choice}, zero={"stage": 3})
        )
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_model_that_checkpoints_itself_and_a_compiled_block() -> None:
    given = {"input_ids": tokens(), "labels": tokens(), "use_cache": False}
    plain, itself, compiled = (built(llama) for _ in range(3))
    itself.activation_checkpointing_enable()
    for layer in compiled.model.layers:
        layer.compile(backend="eager")
    found = [results(model, lambda m: m(**given).loss, LONGFORMER) for model in (plain, itself, compiled)]
    for mine, theirs in zip(found[1], found[0], strict=True):
        assert torch.equal(mine, theirs)
    assert_alike(found[2], found[0], "compiled", 1e-6)


def test_generation_sees_what_training_sees() -> None:
    """Generation with a cache and left-padded samples sees the same keys as training."""
    model = built(llama).eval()
    model.generation_config.eos_token_id = None
    ids = tokens(2, 20)
    ids[0, :7] = 0
    seen = (torch.arange(20) >= torch.tensor([[7], [0]])).long()
    with partita.initialize(model, {"attention": settings("sliding") | {"window": 6}}) as engine:
        with engine.gathered(model), torch.no_grad():
            said = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
            made = model.generate(input_ids=ids, attention_mask=seen, **said)
            for sample, start in ((0, 7), (1, 0)):
                known = made[sample, start:][None]
                logits = engine(input_ids=known, use_cache=False).logits[0]
                assert logits[20 - start - 1 : -1].argmax(-1).tolist() == made[sample, 20:].tolist()


def test_autocast() -> None:
    with partita.initialize(built(decoder), {"attention": LONGFORMER}) as engine:
        with torch.autocast("cpu", torch.bfloat16):
            rough = engine(tokens())
        exact = engine(tokens())
    assert 0 < (rough - exact).abs().max() < 0.05


def test_a_closed_engine_leaves_the_models_own_attention(tmp_path: Path) -> None:
    model, reference = built(llama), built(llama)
    given = {"input_ids": tokens(), "use_cache": False}
    with torch.no_grad():
        dense = reference(**given).logits
    engine = partita.initialize(model, {"attention": LONGFORMER})
    with torch.no_grad():
        assert not torch.allclose(engine(**given).logits, dense, atol=1e-3)
        assert torch.equal(copy.deepcopy(model)(**given).logits, dense)
    engine.export(tmp_path)
    assert "partita" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    engine.close(whole=True)
    assert not any("forward" in vars(module) for module in model.modules())
    assert model.config._attn_implementation == reference.config._attn_implementation
    with torch.no_grad():
        assert torch.equal(model(**given).logits, dense)


def test_evaluation_of_torchs_encoder_is_sparse_too() -> None:
    """``nn.TransformerEncoder`` uses the pattern in evaluation too, where its layers would call a fused kernel."""
    layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
    seeds.start()
    model, x = nn.TransformerEncoder(layer, 2), torch.randn(2, 40, 32)
    with partita.initialize(model, {"attention": LONGFORMER}) as engine:
        trained = engine(x)
        model.eval()
        with torch.no_grad():
            assert_alike([engine(x)], [trained], "evaluation")
    with torch.no_grad():
        assert not torch.allclose(model(x), trained, atol=1e-3)


class ByFunction(nn.Module):
    """Module that calls torch's attention inside another function."""

    def __init__(self, attend: Any) -> None:
        super().__init__()
        self.first, self.attend = nn.Linear(8, 8), attend

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(self.first(x))


def test_attention_that_cannot_be_intercepted_is_named() -> None:
    class HandmadeAttention(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return (x @ x.mT).softmax(-1) @ super().forward(x)

    with pytest.raises(ConfigError, match=r"attention.pattern: '0' \(HandmadeAttention\) calls neither torch's scaled"):
        partita.initialize(nn.Sequential(HandmadeAttention(8, 8)), {"attention": LONGFORMER})
    with pytest.raises(ConfigError, match="attention.pattern: no module of Linear calls torch's scaled_dot_product_at"):
        partita.initialize(nn.Linear(8, 8), {"attention": LONGFORMER})
    with pytest.raises(ConfigError, match="attention.layers: 'Nothing' matches no module"):
        partita.initialize(nn.Linear(8, 8), {"attention": LONGFORMER | {"layers": ["Nothing"]}})
    model = nn.Sequential(HandmadeAttention(8, 8))
    with partita.initialize(model, {"attention": LONGFORMER | {"layers": ["HandmadeAttention"]}}) as engine:
        with pytest.raises(PartitaError, match=r"attention: '0' \(HandmadeAttention\) computes its attention neither"):
            engine(torch.randn(2, 16, 8))


def test_attention_through_a_function_is_met_where_it_is_named() -> None:
    x = torch.randn(2, 1, 24, 8)
    model = ByFunction(lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True))
    with partita.initialize(model, {"attention": LONGFORMER | {"layers": ["ByFunction"]}}) as engine:
        h = engine.module.first(x)
        expected = block_sparse(h, h, h, Layout("longformer", BLOCK, 10, num_global=2))
        assert torch.equal(engine(x), expected)


@pytest.mark.parametrize(
    ("attend", "said"),
    [
        (
            lambda x: F.scaled_dot_product_attention(x, x[:, :, :5], x[:, :, :5]),
            "from 24 positions to 5 others",
        ),
        (
            lambda x: F.scaled_dot_product_attention(x, x, x, torch.ones(24, 24, dtype=torch.bool).tril()),
            r"passes a mask of its own, \[24, 24\]",
        ),
        (lambda x: F.scaled_dot_product_attention(x, x, x, torch.rand(1, 1, 1, 24)), "adds numbers to its scores"),
    ],
)
def test_attention_that_a_pattern_cannot_do_is_named(attend: Any, said: str) -> None:
    with partita.initialize(ByFunction(attend), {"attention": LONGFORMER | {"layers": ["ByFunction"]}}) as engine:
        with pytest.raises(PartitaError, match=f"attention: '' .*{said}.*leave the module out of attention.layers"):
            engine(torch.randn(2, 1, 24, 8))


def test_what_models_of_transformers_add_to_attention_is_named() -> None:
    given = {"input_ids": tokens(), "use_cache": False}
    capped = built(lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8, attn_logit_softcapping=20.0)))
    windowed = built(partial(FAMILIES["mistral"], **SIZES, sliding_window=16))
    with partita.initialize(capped, {"attention": LONGFORMER}) as engine:
        with pytest.raises(PartitaError, match=r"'model.layers.0.self_attn' has 'softcap', which the patterns"):
            engine(**given)
    with partita.initialize(windowed, {"attention": LONGFORMER}) as engine:
        with pytest.raises(PartitaError, match="'model.layers.0.self_attn' has a window of its own, of 16 positions"):
            engine(**given)
        with pytest.raises(PartitaError, match="is given a mask of the caller's own"):
            engine(**given, attention_mask=torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool))
    config = T5Config(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    with pytest.raises((ConfigError, PartitaError), match=r"attention"):
        with partita.initialize(T5ForConditionalGeneration(config), {"attention": LONGFORMER}) as engine:
            engine(input_ids=tokens(), labels=tokens())


def test_a_window_of_the_size_of_the_model_s_own() -> None:
    """A window of the model's own size changes nothing: it counts positions as transformers does."""
    given = {"input_ids": tokens(), "labels": tokens(), "use_cache": False}
    loss = lambda model: model(**given).loss  # noqa: E731
    build = partial(FAMILIES["mistral"], **SIZES, sliding_window=16)
    found = results(built(build), loss, {"pattern": "sliding", "block": BLOCK, "window": 16})
    assert_alike(found, results(built(build), loss, {}), "the model's own window")


def test_what_the_config_says_wrong() -> None:
    model = built(decoder)
    for attention, said in (
        ({"pattern": "sliding"}, "attention.window: the pattern 'sliding' needs it"),
        ({"pattern": "sliding", "window": 8, "global": 1}, "attention.global: the pattern 'sliding' does not use it"),
        ({"pattern": "user", "layout": [[1, 0], [0, 0]]}, "attention.layout: row 1 leaves its queries without keys"),
        ({"window": 8}, "attention.window: the pattern 'dense' does not use it"),
        ({"pattern": "slidin"}, "attention.pattern: expected one of dense, sliding"),
        ({"pattern": "sliding", "window": "wide"}, "attention.window: expected"),
    ):
        with pytest.raises(ConfigError, match=said):
            partita.initialize(model, {"attention": attention})
    assert "forward" not in vars(model.blocks[0].attention)


def test_packing_without_use_is_refused() -> None:
    with pytest.raises(ConfigError, match="attention.packed requires the pattern dense"):
        resolve(load_config({"attention": LONGFORMER | {"packed": True}}), 1, "cpu", 1)
