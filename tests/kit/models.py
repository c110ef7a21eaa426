"""Small models of each kind that people train, for tests and benchmarks: built from a config, seeded, without dropout.

Each batch holds the same number of targets in every sample, so that the loss of a batch is the mean of the losses of
its equal parts - but for batch normalization in training, whose statistics are those of the batch it sees.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from tests.kit import seeds

VOCAB = 96
WIDTH = 64
LENGTH = 16
NUM_MASKED = 4
NUM_CLASSES = 10
IMAGE = 16

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A kind of model. `model(**batch)` gives what `loss` takes."""

    name: str
    construct: Callable[[], nn.Module]
    make_batch: Callable[[Generator, int], Batch]
    mixes_samples: bool = False  # in training, a sample's loss depends on the others of its batch

    def build(self, seed: int = 0, device: str = "cpu") -> nn.Module:
        """The model in training mode, with the same weights for the same seed."""
        with torch.random.fork_rng(devices=[]), torch.device(device):
            seeds.start(seed)
            return self.construct().train()

    def batches(self, num_samples: int, seed: int = 0) -> Iterator[Batch]:
        """Batches without end: [num_samples, ...] each."""
        generator = seeds.generator(seed)
        while True:
            yield self.make_batch(generator, num_samples)

    @staticmethod
    def loss(output: Any) -> Tensor:
        """The scalar that the model computed from the batch's targets."""
        loss: Tensor = output if isinstance(output, Tensor) else output.loss
        return loss


def parts(batch: Batch, num_parts: int) -> list[Batch]:
    """The batch cut into equal parts by sample, in order."""
    cuts = {name: value.chunk(num_parts) for name, value in batch.items()}
    return [{name: chunks[part] for name, chunks in cuts.items()} for part in range(num_parts)]


# -- batches -----------------------------------------------------------------------------------------------------------


def next_token_batch(generator: Generator, num_samples: int) -> Batch:
    """Hugging Face's causal models shift the labels themselves."""
    tokens = torch.randint(VOCAB, (num_samples, LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def shifted_token_batch(generator: Generator, num_samples: int) -> Batch:
    tokens = torch.randint(VOCAB, (num_samples, LENGTH + 1), generator=generator)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def masked_token_batch(generator: Generator, num_samples: int) -> Batch:
    """NUM_MASKED positions of each sample, chosen at random, are masked (token 0) and are its targets."""
    tokens = torch.randint(1, VOCAB, (num_samples, LENGTH), generator=generator)
    masked = torch.rand(num_samples, LENGTH, generator=generator).argsort(1) < NUM_MASKED
    return {"input_ids": tokens.masked_fill(masked, 0), "labels": tokens.masked_fill(~masked, -100)}


def image_batch(generator: Generator, num_samples: int) -> Batch:
    return {
        "pixels": torch.randn(num_samples, 3, IMAGE, IMAGE, generator=generator),
        "labels": torch.randint(NUM_CLASSES, (num_samples,), generator=generator),
    }


# -- models ------------------------------------------------------------------------------------------------------------


def decoder() -> nn.Module:
    from partita.train.decoder import Decoder, DecoderShape

    return Decoder(DecoderShape(layers=2, width=WIDTH, heads=4, kv_heads=2, ffn_width=128, vocab=VOCAB))


def gpt2() -> nn.Module:
    """Tied embeddings; biases; projections stored transposed."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=LENGTH,
        n_embd=WIDTH,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # what transformers reads from the names of the other classes
    return model


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_decoder_sizes()))


def mixtral() -> nn.Module:
    """Four experts of which two see each token; the router's own loss is off."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {**_decoder_sizes(), "num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(**sizes, output_router_logits=False))


def bert() -> nn.Module:
    """Both directions, masked tokens; the output is tied to the embedding, with a bias of its own."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config)


def _decoder_sizes() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": LENGTH,
        "use_cache": False,
    }


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions with batch normalization (He et al., 2015, figure 2); the first may halve the image.

    Smooth in place of ReLU: at a kink a rounding error of 1e-7 is, now and then, another gradient.
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
    """Images [samples, 3, height, width] and labels [samples] to their mean loss: the output is the scalar itself."""

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
    """A language model on two layers of LSTM: the output is a named tuple, of which the loss is one field."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, targets: Tensor) -> RecurrentOutput:
        hidden, _ = self.lstm(self.embedding(tokens))
        logits = self.head(hidden)
        return RecurrentOutput(F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()), logits)


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("decoder", decoder, shifted_token_batch),
        Case("gpt2", gpt2, next_token_batch),
        Case("llama", llama, next_token_batch),
        Case("bert", bert, masked_token_batch),
        Case("resnet", ResNet, image_batch, mixes_samples=True),
        Case("lstm", RecurrentModel, shifted_token_batch),
        Case("mixtral", mixtral, next_token_batch),
    )
}
