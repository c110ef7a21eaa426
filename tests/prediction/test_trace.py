"""A trace without data against a run with data: exact bytes of activations, and FLOPs of matrix products."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, ResNetConfig
from transformers import ResNetForImageClassification as ResNet

import partita
from partita.activation.recompute import Recomputation, chosen_modules
from partita.config.resolve import resolve
from partita.config.schema import Config
from partita.errors import ConfigError
from partita.layout.units import group_units
from partita.prediction.model_source import ModelSource, read_source
from partita.prediction.rank_model import trace_rank
from partita.prediction.trace.fewer_blocks import fewer_blocks
from partita.prediction.trace.run import coprime_batch, loss_of
from partita.transforms.modules import ModuleTransforms, Order
from tests.kit.live_bytes import LiveBytes

SAMPLES = 2


def gpt() -> nn.Module:
    return read_source("layers=5,hidden=64,heads=4,vocab=300,context=48").model.to_empty(device="cpu")


def decoder() -> nn.Module:
    sizes = "family=llama,layers=4,hidden=64,heads=4,kv_heads=2,vocab=300,ffn=96"
    return read_source(sizes).model.to_empty(device="cpu")


def llama() -> nn.Module:
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=96, vocab_size=300, use_cache=False))


def bert() -> nn.Module:
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 96}
    return BertForMaskedLM(BertConfig(**sizes, vocab_size=300, hidden_dropout_prob=0, attention_probs_dropout_prob=0))


def resnet() -> nn.Module:
    return ResNet(ResNetConfig(hidden_sizes=[16, 32], depths=[4, 3], embedding_size=8, layer_type="basic"))


class Masked(nn.Module):
    """An attention block with a mask that it creates and saves for backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        mask = torch.ones(x.shape[1], x.shape[1], device=x.device).tril() == 0
        scores = (query @ key.transpose(1, 2)).masked_fill(mask, -1e9)
        return x + self.out(scores.softmax(-1) @ value)


class PlainGpt(nn.Module):
    """A GPT whose masks have the same size for every number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(300, 32)
        self.blocks = nn.ModuleList(Masked(32) for _ in range(6))
        self.head = nn.Linear(32, 300)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def text(samples: int, device: Any) -> dict[str, Tensor]:
    tokens = torch.zeros(samples, 48, dtype=torch.long, device=device)
    return {"tokens": tokens, "targets": tokens.clone()}


def ids(samples: int, device: Any) -> dict[str, Tensor]:
    tokens = torch.zeros(samples, 48, dtype=torch.long, device=device)
    return {"input_ids": tokens, "labels": tokens.clone()}


def images(samples: int, device: Any) -> dict[str, Tensor]:
    labels = torch.zeros(samples, dtype=torch.long, device=device)
    return {"pixel_values": torch.zeros(samples, 3, 64, 64, device=device), "labels": labels}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., dict[str, Tensor]]]] = {
    "gpt": (gpt, text),
    "decoder": (decoder, text),
    "llama": (llama, ids),
    "bert": (bert, ids),
    "resnet": (resnet, images),
    "masked": (PlainGpt, text),
}


def measured(model: nn.Module, batch: dict[str, Tensor], choice: str) -> tuple[int, int]:
    """Return the peak bytes of activations, and the FLOPs of a forward and backward. Gradients are freed at once."""
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    units = [spec.name for spec in group_units(model)]
    transforms = ModuleTransforms()
    Recomputation(chosen_modules(model, units, choice), transforms.at(Order.RECOMPUTE), selective=False, tiled={})
    with LiveBytes() as live:
        loss = loss_of(model(**batch))
        loss.backward()
        del loss
    with FlopCounterMode(display=False) as flops:  # in another pass, because it keeps tensors alive
        loss_of(model(**batch)).backward()
    transforms.undo()
    return live.peak, flops.get_total_flops()


@pytest.mark.parametrize("name", MODELS)
def test_activations_on_paper_are_those_of_a_run(name: str) -> None:
    make, batch = MODELS[name]
    model = make()
    source = ModelSource(name, model, batch)
    specs, resolved = group_units(model), resolve(Config(), 1, "cpu")
    choices = ("none",) if name == "resnet" else ("none", "units")  # batch norm updates its statistics in place
    rank_model = trace_rank(source, specs, resolved, choices, SAMPLES)
    for choice in choices:
        trace = rank_model.traces[choice]
        peak, flops = measured(make(), batch(SAMPLES, "cpu"), choice)
        assert trace.peak == peak, choice
        products = sum(block_trace.forward.flops + block_trace.backward.flops for block_trace in trace.blocks)
        around = (trace.prologue.forward, trace.prologue.backward, trace.epilogue.forward)
        attention = 1.35 if name != "resnet" else 1.0  # torch does not count the CPU's attention kernel
        assert flops <= products + sum(work.flops for work in around) <= attention * flops


@pytest.mark.parametrize("choice", ["none", "units"])
def test_bytes_a_position_are_those_that_an_engine_takes(choice: str) -> None:
    """The peaks of two lengths differ by the same bytes. The engine's own buffers are the same for both lengths."""
    planned, found = [], []
    for length in (512, 1024):

        def batch(samples: int, device: Any, length: int = length) -> dict[str, Tensor]:
            tokens = torch.zeros(samples, length, dtype=torch.long, device=device)
            return {"tokens": tokens, "targets": tokens.clone()}

        model = decoder()
        for param in model.parameters():
            nn.init.normal_(param, std=0.02)
        rank_model = trace_rank(
            ModelSource("", model, batch), group_units(model), resolve(Config(), 1, "cpu"), (choice,), 1
        )
        planned.append(rank_model.traces[choice].peak)
        with partita.initialize(model, {"activations": {"checkpoint": choice}}) as engine, LiveBytes() as live:
            engine.backward(loss_of(engine(**batch(1, "cpu"))))
            found.append(live.peak)
    assert found[1] - found[0] == pytest.approx(planned[1] - planned[0], rel=0.1)


def test_blocks_that_are_alike_stand_for_each_other_and_come_back() -> None:
    model = gpt()
    names, modules = [name for name, _ in model.named_modules()], list(model.modules())
    with fewer_blocks(model) as block_map:
        shorter = list(model.modules())
        assert len(shorter) < len(modules)
        assert {id(block) for _, block in block_map} <= {id(module) for module in shorter}
        assert [name for name, _ in block_map] == [f"blocks.{at}" for at in range(5)]
    assert [name for name, _ in model.named_modules()] == names
    assert all(one is other for one, other in zip(model.modules(), modules, strict=True))


def test_two_tensor_ranks_have_half_the_products_and_say_what_they_send() -> None:
    source = read_source("layers=3,hidden=64,heads=4,vocab=300,context=48")
    specs = group_units(source.model)
    one, two = (
        trace_rank(source, specs, resolve(Config(parallel={"tensor": num}), num, "cpu"), ("none",), 1) for num in (1, 2)
    )
    whole, half = one.traces["none"].blocks[0], two.traces["none"].blocks[0]
    assert 2 * half.forward.flops == whole.forward.flops
    assert whole.forward.sent_bytes == 0
    # Two all-reduces of [samples, length, hidden] in forward, two in backward; each sends 2 * (N - 1) / N of it.
    assert half.forward.sent_bytes == half.backward.sent_bytes == 2 * 48 * 64 * 4
    params = [sum(entry.place.num_elements for unit in each.entries for entry in unit) for each in (one, two)]
    assert 0.5 < params[1] / params[0] < 0.55


class ReadsValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x[: int(x.sum())].sum()


class Twice(ReadsValues):
    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](self.blocks[0](x)).sum()


@pytest.mark.parametrize(("model", "message"), [(ReadsValues, "cannot be traced without data"), (Twice, "runs twice")])
def test_a_forward_that_cannot_be_traced_is_said_so(model: type[nn.Module], message: str) -> None:
    made = model()
    source = ModelSource("own", made, lambda samples, device: (torch.zeros(samples, 4, device=device),))
    params = list(made.parameters())
    with pytest.raises(ConfigError, match=message):
        trace_rank(source, group_units(made), resolve(Config(), 1, "cpu"), ("none",))
    assert all(one is other for one, other in zip(made.parameters(), params, strict=True))  # the model is restored
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in made.modules())


@pytest.mark.parametrize("num", [1, 8])
@pytest.mark.parametrize("name", MODELS)
def test_one_trace_says_what_any_number_of_samples_takes(name: str, num: int) -> None:
    """A trace that is scaled to a number of samples matches a trace of that number.

    Gradients of parameters and tables of positions do not grow with the samples.
    """
    make, batch = MODELS[name]
    model = make()
    specs, source, resolved = group_units(model), ModelSource(name, model, batch), resolve(Config(), 1, "cpu")
    choices = ("none",) if name == "resnet" else ("none", "units", "selective")
    names = frozenset(name for name, _ in model.named_parameters())
    every, exact = (trace_rank(source, specs, resolved, choices, samples) for samples in (None, num))
    for choice in choices:
        scaled, traced = every.traces[choice].of(num), exact.traces[choice]
        end = len(traced.blocks)
        for in_place in (frozenset(), names):
            found, expected = (each.chunk_bytes(0, end, in_place=in_place) for each in (scaled, traced))
            assert found.gradient_bytes == expected.gradient_bytes
            for peak in ("forward_peak", "backward_peak", "in_place_peak"):
                assert getattr(found, peak) == pytest.approx(getattr(expected, peak), rel=0.02 if num == 1 else 1e-3), (
                    choice,
                    peak,
                )
                assert getattr(found, peak) >= getattr(expected, peak), (choice, peak)


class Odd(nn.Module):
    """A model with an empty parameter, whose forward takes only one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.none = nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(1, 8)
        for block in self.blocks:
            x = block(x)
        return x.sum()


def test_a_model_that_takes_one_sample_alone_is_traced_with_it() -> None:
    model = Odd()
    source = ModelSource("own", model, lambda samples, device: (torch.zeros(samples, 8, device=device),))
    found, expected = (
        trace_rank(source, group_units(model), resolve(Config(), 1, "cpu"), ("none",), samples).traces["none"]
        for samples in (None, 1)
    )
    assert found.of(1).peak == expected.peak
    assert found.of(3).peak == 3 * expected.peak


def test_samples_tell_what_comes_with_them() -> None:
    model = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Linear(5, 7))
    assert coprime_batch(model, torch.empty(1, 3)) == 11
    assert coprime_batch(nn.Linear(4, 8), {"x": torch.empty(1, 9), "lengths": torch.empty(1, 0)}) == 5
