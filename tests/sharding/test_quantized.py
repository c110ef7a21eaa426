"""Adapters on frozen quantized weights, which stay unsharded and outside of units; everything else trains as usual."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partita
from partita import ConfigError, PartitaError
from partita.layout.parameters import check_quantized, find_quantized_params
from tests.kit.ranks import on_ranks
from tests.kit.training import rank
from tests.kit.training import world as num_ranks

VOCAB, WIDTH, LENGTH, SAMPLES = 64, 32, 8, 4
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["up", "down"], "lora_dropout": 0.0}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def in_four_bits(model: Model) -> None:
    """Replace the linear layers of the blocks by quantized ones, as ``from_pretrained`` with bitsandbytes does."""
    import bitsandbytes

    for block in model.blocks:
        for name in ("up", "down"):
            plain = getattr(block, name)
            linear = bitsandbytes.nn.Linear4bit(
                plain.in_features, plain.out_features, compute_dtype=torch.float32, quant_type="nf4"
            )
            linear.weight = bitsandbytes.nn.Params4bit(plain.weight.detach(), requires_grad=False, quant_type="nf4")
            linear.bias = plain.bias
            setattr(block, name, linear.to("cpu"))


def by_torchao(model: Model) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model.requires_grad_(False)
    for block in model.blocks:
        quantize_(block, Int8WeightOnlyConfig())


KINDS: dict[str, Callable[[Model], None]] = {"bitsandbytes": in_four_bits, "torchao": by_torchao}


def build(kind: str, seed: int = 0) -> nn.Module:
    """Return the model with quantized linear layers and adapters on them."""
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Model()
        KINDS[kind](model)
        adapted: nn.Module = get_peft_model(model, LoraConfig(**LORA))  # type: ignore[arg-type]
        for name, param in adapted.named_parameters():
            if "lora_B" in name:  # initially 0
                nn.init.normal_(param, std=0.1)
    return adapted


def batch(step: int) -> Tensor:
    return torch.randint(VOCAB, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(step))


def plainly(kind: str) -> tuple[list[float], dict[str, Tensor]]:
    """Train with plain PyTorch. Returns the losses and the adapters."""
    model = build(kind)
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2, eps=1e-3)
    losses = []
    for step in range(4):
        loss = model(batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: param.detach() for name, param in trained.items()}


def with_engine(kind: str, stage: int) -> tuple[list[float], dict[str, Tensor]]:
    """Train with an engine, from different initial values on each rank. Returns the losses and the adapters."""
    model = build(kind, seed=rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    quantized = [info.fqns[0] for info in find_quantized_params(model)]
    assert len(quantized) == 4
    with partita.initialize(model, {"zero": {"stage": stage}}, optimizer=optimizer) as engine:
        held = [span.fqn for unit in engine.units for s in unit.segments for span in s.layout.spans]
        assert not {*held} & {*quantized}
        losses = []
        for step in range(4):
            mine = batch(step).chunk(num_ranks())[rank()]
            losses.append(float(engine.train_batch([mine])))
        with engine.gathered(model):
            assert engine.module.get_parameter(held[0]).numel()
            with torch.no_grad():
                expected = model(batch(9)).item()
        adapters = engine.state_dict(trainable=True)
        said = r"export: '.*base_layer.weight' is quantized.*state_dict\(trainable=True\)"
        with pytest.raises(PartitaError, match=said):
            engine.export("nowhere")
        engine.close(whole=True)
    with torch.no_grad():
        assert model(batch(9)).item() == expected
    return losses, adapters


def refused() -> None:
    model = build("bitsandbytes")
    with pytest.raises(
        ConfigError, match=r"weight' is quantized \(Params4bit\) and on 'cpu'.*load the model onto 'meta'"
    ):
        check_quantized(find_quantized_params(model), torch.device("meta"))
    with pytest.raises(ConfigError, match="all parameters of Linear are quantized and frozen: none can train"):
        partita.initialize(quantized_alone())
    trained = quantized_alone()
    trained.weight.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"'weight' is a .*freeze quantized parameters"):
        partita.initialize(trained)
    if rank():
        model.get_submodule("base_model.model.blocks.0.up").base_layer = nn.Linear(WIDTH, 2 * WIDTH)
    with pytest.raises(ConfigError, match="the ranks' models differ"):
        partita.initialize(model)


def quantized_alone() -> nn.Linear:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    linear = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
    quantize_(linear, Int8WeightOnlyConfig())
    return linear


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [2, pytest.param(1, marks=pytest.mark.thorough)])
def test_adapters_train_as_without_an_engine(world: int, kind: str) -> None:
    losses, adapters = plainly(kind)
    for stage in (1, 3):
        found = on_ranks(world, with_engine, kind, stage)
        torch.testing.assert_close(found[0][0], losses, rtol=1e-5, atol=1e-6)
        for _, others in found[1:]:
            assert others == {}
        assert found[0][1].keys() == adapters.keys()
        for name, value in found[0][1].items():
            torch.testing.assert_close(value, adapters[name], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_what_is_refused() -> None:
    on_ranks(2, refused)
