"""Small models of the kinds that users train, for tests and benchmarks: seeded, without dropout.

`CASES` are the models that every stage must train. `tiny(name, **sizes)` is a case or a family of `FAMILIES` in another
size. `Stack` is an MLP of residual blocks; `inputs` and `square_loss` are its inputs and its loss.

All samples of a batch have the same number of targets. A batch's loss is therefore the mean of the losses of its equal
parts, except with batch normalization in training, whose statistics depend on the batch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from tests.kit import seeds

VOCAB = 96
HIDDEN = 64  # of the language models
WIDTH = 16  # of the MLP
LENGTH = 16
NUM_MASKED = 4
NUM_CLASSES = 10
IMAGE = 16

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A model with its batches. `loss` takes the output of `model(**batch)`; `construct` takes sizes by name."""

    name: str
    construct: Callable[..., nn.Module]
    make_batch: Callable[[Generator, int], Batch]
    mixes_samples: bool = False  # in training, a sample's loss depends on the others of its batch

    def build(self, seed: int = 0, device: str = "cpu") -> nn.Module:
        """Build the model in training mode, with the same weights for the same seed."""
        with torch.random.fork_rng(devices=[]), torch.device(device):
            seeds.start(seed)
            return self.construct().train()

    def batches(self, num_samples: int, seed: int = 0) -> Iterator[Batch]:
        """Yield batches forever; each tensor is [num_samples, ...]."""
        generator = seeds.generator(seed)
        while True:
            yield self.make_batch(generator, num_samples)

    def batch(self, num_samples: int, seed: int = 0) -> Batch:
        """Return the first of these batches."""
        return next(self.batches(num_samples, seed))

    @staticmethod
    def loss(output: Any) -> Tensor:
        """Return the scalar loss that the model computed, or the mean square of an output that is not a scalar."""
        loss: Tensor = output if isinstance(output, Tensor) else output.loss
        return loss if loss.ndim == 0 else loss.square().mean()

    @staticmethod
    def loss_of_batch(output: Any, batch: Any) -> Tensor:
        """Return the same loss; the signature is that of partita's `loss_fn`."""
        return Case.loss(output)


def parts(batch: Batch, num_parts: int) -> list[Batch]:
    """Split a batch into equal parts by sample, in order."""
    cuts = {name: value.chunk(num_parts) for name, value in batch.items()}
    return [{name: chunks[part] for name, chunks in cuts.items()} for part in range(num_parts)]


# -- batches -----------------------------------------------------------------------------------------------------------


def next_token_batch(generator: Generator, num_samples: int, vocab: int = VOCAB) -> Batch:
    """Return a batch for Hugging Face's causal models, which shift the labels themselves."""
    tokens = torch.randint(vocab, (num_samples, LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def shifted_token_batch(generator: Generator, num_samples: int, vocab: int = VOCAB) -> Batch:
    tokens = torch.randint(vocab, (num_samples, LENGTH + 1), generator=generator)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def masked_token_batch(generator: Generator, num_samples: int, vocab: int = VOCAB) -> Batch:
    """Return a batch with NUM_MASKED random positions per sample masked (token 0); these positions are the targets."""
    tokens = torch.randint(1, vocab, (num_samples, LENGTH), generator=generator)
    masked = torch.rand(num_samples, LENGTH, generator=generator).argsort(1) < NUM_MASKED
    return {"input_ids": tokens.masked_fill(masked, 0), "labels": tokens.masked_fill(~masked, -100)}


def image_batch(generator: Generator, num_samples: int) -> Batch:
    return {
        "pixels": torch.randn(num_samples, 3, IMAGE, IMAGE, generator=generator),
        "labels": torch.randint(NUM_CLASSES, (num_samples,), generator=generator),
    }


# -- models ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Family:
    """A transformers model class, by name, with config settings: sizes, and no dropout."""

    config: str
    model: str
    settings: dict[str, Any]

    def __call__(self, **sizes: Any) -> nn.Module:
        """Build a model; `sizes` override the family's config settings."""
        import transformers

        config = getattr(transformers, f"{self.config}Config")(**self.settings | sizes)
        model: nn.Module = getattr(transformers, self.model)(config)
        if loss := LOSSES.get(self.model):
            model.loss_type = loss
        return model


# transformers infers the loss from a class's name and source file if the model does not set it.
LOSSES = {"GPT2LMHeadModel": "ForCausalLM", "BertForMaskedLM": "ForMaskedLM"}
_SIZES: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4}
_DECODER: dict[str, Any] = {
    **_SIZES,
    "intermediate_size": 128,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "use_cache": False,
}
_GPT2: dict[str, Any] = {"n_embd": HIDDEN, "n_layer": 2, "n_head": 4, "n_positions": LENGTH, "vocab_size": VOCAB}
_T5: dict[str, Any] = {"d_model": HIDDEN, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": VOCAB}
_MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
_NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_NO_GPT2_DROPOUT: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

FAMILIES: dict[str, Family] = {
    # Tied embeddings; biases; projections stored transposed.
    "gpt2": Family(
        "GPT2", "GPT2LMHeadModel", _GPT2 | _NO_GPT2_DROPOUT | {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    ),
    "llama": Family("Llama", "LlamaForCausalLM", _DECODER),
    "mistral": Family("Mistral", "MistralForCausalLM", _DECODER),
    "qwen3": Family("Qwen3", "Qwen3ForCausalLM", _DECODER | {"head_dim": 16}),
    "qwen3moe": Family("Qwen3Moe", "Qwen3MoeForCausalLM", _DECODER | _MOE),
    "olmo2": Family("Olmo2", "Olmo2ForCausalLM", _DECODER),
    "gemma2": Family("Gemma2", "Gemma2ForCausalLM", _DECODER | {"head_dim": 16, "sliding_window": 8}),
    "phi3": Family(
        "Phi3",
        "Phi3ForCausalLM",
        _DECODER | {"resid_pdrop": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    ),
    # Four experts, of which two process each token; the router's auxiliary loss is off.
    "mixtral": Family(
        "Mixtral",
        "MixtralForCausalLM",
        _DECODER | {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": False},
    ),
    # Bidirectional attention, masked tokens; the output is tied to the embedding, with its own bias.
    "bert": Family(
        "Bert", "BertForMaskedLM", _SIZES | _NO_DROPOUT | {"intermediate_size": 128, "max_position_embeddings": LENGTH}
    ),
    # An encoder and a decoder.
    "t5": Family(
        "T5", "T5ForConditionalGeneration", _T5 | {"dropout_rate": 0.0, "decoder_start_token_id": 0, "use_cache": False}
    ),
}


def decoder(**sizes: Any) -> nn.Module:
    from partita.train.decoder import Decoder, DecoderShape

    shape = DecoderShape(layers=2, width=HIDDEN, heads=4, kv_heads=2, ffn_width=128, vocab=VOCAB)
    return Decoder(replace(shape, **sizes))


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions with batch normalization (He et al., 2015, figure 2); the first may halve the image.

    SiLU replaces ReLU: at ReLU's kink, a rounding error of 1e-7 sometimes changes the gradient.
    """

    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_in, num_out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(num_out)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(num_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or num_in != num_out:
            self.shortcut = nn.Sequential(nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out))

    def forward(self, x: Tensor) -> Tensor:
        inner = F.silu(self.norm1(self.conv1(x)))
        return F.silu(self.norm2(self.conv2(inner)) + self.shortcut(x))


class ResNet(nn.Module):
    """A ResNet that returns the mean loss, a scalar, of images [samples, 3, height, width] and labels [samples]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.SiLU())
        self.layers = nn.Sequential(ResidualBlock(16, 16, 1), ResidualBlock(16, 32, 2), ResidualBlock(32, 64, 2))
        self.head = nn.Linear(64, NUM_CLASSES)

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        features = self.layers(self.stem(pixels)).mean((2, 3))
        return F.cross_entropy(self.head(features).float(), labels)


class RecurrentOutput(NamedTuple):
    loss: Tensor
    logits: Tensor


class RecurrentModel(nn.Module):
    """A language model with two LSTM layers; its output is a named tuple with the loss as a field."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.lstm = nn.LSTM(HIDDEN, HIDDEN, num_layers=2, batch_first=True)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens: Tensor, targets: Tensor) -> RecurrentOutput:
        hidden, _ = self.lstm(self.embedding(tokens))
        logits = self.head(hidden)
        return RecurrentOutput(F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()), logits)


class Block(nn.Module):
    """A residual MLP block from [..., WIDTH] to [..., WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """An MLP: blocks between two linear layers, which belong to the root unit."""

    def __init__(self, num_blocks: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(num_blocks)])
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def inputs(rank: int, step: int, *shape: int) -> Tensor:
    """Return random inputs of [4, WIDTH] (or the given shape) that differ by rank and step."""
    generator = seeds.generator(1000 * step + rank)
    return torch.randn(shape or (4, WIDTH), generator=generator)


def square_loss(model: Any, rank: int, step: int) -> Tensor:
    """Return the mean square of the outputs for `inputs(rank, step)`."""
    loss: Tensor = model(inputs(rank, step)).square().mean()
    return loss


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("decoder", decoder, shifted_token_batch),
        Case("gpt2", FAMILIES["gpt2"], next_token_batch),
        Case("llama", FAMILIES["llama"], next_token_batch),
        Case("bert", FAMILIES["bert"], masked_token_batch),
        Case("resnet", ResNet, image_batch, mixes_samples=True),
        Case("lstm", RecurrentModel, shifted_token_batch),
        Case("mixtral", FAMILIES["mixtral"], next_token_batch),
    )
}


def vector_batch(generator: Generator, num_samples: int) -> Batch:
    return {"x": torch.randn(num_samples, WIDTH, generator=generator)}


def tiny(name: str, **sizes: Any) -> Case:
    """Return a case with other sizes, e.g. `tiny("llama", hidden_size=32)` or `tiny("mlp", num_blocks=2)`.

    `name` is a key of `CASES` or `FAMILIES`, or "mlp" for a `Stack`; sizes have the names of the model's config.
    """
    if name == "mlp":
        case = Case(name, Stack, vector_batch)
    else:
        case = CASES.get(name) or Case(name, FAMILIES[name], next_token_batch)
    if not sizes:
        return case
    vocab = sizes.get("vocab_size", sizes.get("vocab", VOCAB))
    make_batch = case.make_batch if vocab == VOCAB else partial(case.make_batch, vocab=vocab)  # type: ignore[call-arg]
    return replace(case, construct=partial(case.construct, **sizes), make_batch=make_batch)
