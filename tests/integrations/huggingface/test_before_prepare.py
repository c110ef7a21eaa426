"""Scripts that use a loaded model before an engine exists, while only rank 0 has read its weights."""

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from transformers import (
    AutoModel,
    BertConfig,
    BertForMaskedLM,
    MixtralConfig,
    MixtralForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
)

from partita.integrations.huggingface import Accelerator, on_partita, rank_0_reads
from partita.sharding.unread import is_unread
from tests.integrations.huggingface.runs import alone, arguments, end, llama, losses_of, samples, scratch
from tests.kit.ranks import on_ranks

TOKENS = torch.arange(3, 15).reshape(2, 6)
CPU = torch.device("cpu")


def adapters(initial: Any = True, **given: Any) -> Callable[[Any], Any]:
    return lambda model: get_peft_model(
        model, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=initial, **given)
    )


def new_head(model: Any) -> Any:
    with torch.no_grad():
        model.lm_head.weight.normal_()
    return model


def shared_head(model: Any) -> Any:
    model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight)
    return model


def zeroed(model: Any) -> Any:
    model.load_state_dict({name: torch.zeros(value.shape) for name, value in model.state_dict().items()})
    return model


def resized(model: Any) -> Any:
    model.resize_token_embeddings(128)
    return model


def all_values(model: Any) -> Any:
    return torch.cat([value.flatten().double() for value in model.state_dict().values()])


# Uses that leave values unread, and uses that need them. Each returns a model or a tensor.
CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "to": lambda model: model.to(CPU),
    "cpu": lambda model: model.cpu(),
    "to and dtypes": lambda model: model.to(model.device, torch.float64).bfloat16().float(),
    "deepcopy": copy.deepcopy,
    "lora": adapters(),
    "average": AveragedModel,
    "shared head": shared_head,
}
READS: dict[str, Callable[[Any], Any]] = {
    "forward": lambda model: model(input_ids=TOKENS.to(model.device)).logits,
    "generate": lambda model: model.eval().generate(input_ids=TOKENS, max_new_tokens=2, do_sample=False),
    "values": all_values,
    "norm": lambda model: torch.stack([value.norm() for value in model.parameters()]),
    "numpy": lambda model: torch.from_numpy(next(iter(model.state_dict().values())).float().numpy()),
    "forward of a copy": lambda model: copy.deepcopy(model).to(CPU)(input_ids=TOKENS).logits,
    "resize": resized,
    "head": new_head,
    "pissa": adapters("pissa"),
    "olora": adapters("olora"),
    "dora": adapters(use_dora=True),
    "load": zeroed,
}


def values_of(made: Any) -> dict[str, Tensor]:
    return {"": made} if isinstance(made, Tensor) else dict(made.state_dict())


def used(kind: Any, folder: Path, names: list[str], dtype: torch.dtype) -> list[str]:
    """Return the uses whose results or random numbers differ from plain transformers'."""
    differ = []
    for name in names:
        results = []
        for manager in (nullcontext(), rank_0_reads()):
            torch.manual_seed(5)
            with manager, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made = (CONVERSIONS | READS)[name](kind.from_pretrained(folder, dtype=dtype))
            left = isinstance(made, nn.Module) and any(is_unread(value) for value in made.parameters())
            results.append((values_of(made), torch.get_rng_state()))
        assert left == (name in CONVERSIONS and dist.get_rank() > 0), name
        (plain, plain_state), (found, state) = results
        same = plain.keys() == found.keys() and torch.equal(plain_state, state)
        if not same or not all(torch.equal(value, found[key]) for key, value in plain.items()):
            differ.append(name)
    return differ


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_model_is_used(dtype: torch.dtype, tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path)
    assert on_ranks(2, used, type(model), tmp_path, [*CONVERSIONS, *READS], dtype, timeout=120) == [[], []]


SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
OTHERS = {
    "tied, with a bias": lambda: BertForMaskedLM(BertConfig(**SIZES)),
    "experts, merged": lambda: MixtralForCausalLM(MixtralConfig(num_key_value_heads=2, num_local_experts=4, **SIZES)),
    "buffers": lambda: ResNetForImageClassification(
        ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_are_read(name: str, tmp_path: Path) -> None:
    model: Any = OTHERS[name]()
    model.save_pretrained(tmp_path)
    assert on_ranks(2, used, type(model), tmp_path, ["cpu", "values"], torch.float32, timeout=120) == [[], []]


class Embedder(nn.Module):
    """Wrapper like sentence-transformers': it moves the loaded model to a device, and saves through the inner model."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.auto_model = AutoModel.from_pretrained(folder)
        self.pooling = nn.Linear(32, 8)
        self.to(CPU)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        states = self.auto_model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return {"loss": self.pooling(states.mean(1)).square().mean()}

    def save_pretrained(self, folder: str) -> None:
        self.save(folder)
        torch.save(self.pooling.state_dict(), Path(folder) / "pooling.pt")

    def save(self, folder: str) -> None:
        self.auto_model.save_pretrained(folder)


class EmbedderTrainer(transformers.Trainer):
    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        self.model.save_pretrained(output_dir)


def embedded(folder: Path, output: Path, config: dict[str, Any] | None) -> list[float]:
    """Train a wrapped model and save it; return the losses."""
    with alone(), scratch() as place, nullcontext() if config is None else rank_0_reads():
        torch.manual_seed(3)
        kind = EmbedderTrainer if config is None else on_partita(EmbedderTrainer, config)
        model = Embedder(folder)
        trainer = kind(model=model, args=arguments(place, max_steps=3), train_dataset=samples(18, 1))
        try:
            trainer.train()
            trainer.save_model(str(output / "trainer"))
            if config is not None:
                model.save_pretrained(str(output / "model"))
                model.save(str(output / "save"))
            return losses_of(trainer)
        finally:
            end(trainer)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_wrapper_moves_and_saves_the_loaded_model(stage: int, tmp_path: Path) -> None:
    llama().model.save_pretrained(tmp_path / "start")
    plain = on_ranks(2, embedded, tmp_path / "start", tmp_path / "plain", None, timeout=120)
    config = {"zero": {"stage": stage}}
    found = on_ranks(2, embedded, tmp_path / "start", tmp_path / "found", config, timeout=120)
    assert found[0] == pytest.approx(plain[0], rel=1e-6)
    expected = load_file(tmp_path / "plain" / "trainer" / "model.safetensors")
    for name in ("trainer", "model", "save"):
        saved = load_file(tmp_path / "found" / name / "model.safetensors")
        assert saved.keys() == expected.keys()
        assert all(torch.allclose(value, expected[key], atol=1e-5) for key, value in saved.items())
    pooling = [torch.load(tmp_path / path / "pooling.pt") for path in ("plain/trainer", "found/trainer", "found/model")]
    assert all(torch.allclose(one["weight"], pooling[0]["weight"], atol=1e-5) for one in pooling)


def prepared_after(use: str, folder: Path, partita: bool) -> list[float]:
    """Return the losses of accelerate's loop with a loaded model that was used before ``prepare``."""
    config = {"partita_config": {"zero": {"stage": 3}}} if partita else {}
    with alone(), rank_0_reads() if partita else nullcontext():
        accelerator = (Accelerator if partita else accelerate.Accelerator)(cpu=True, **config)
        torch.manual_seed(3)
        model = (CONVERSIONS | READS)[use](type(llama()).from_pretrained(folder))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        losses = []
        for step in range(3):
            rows = samples(2, 2 * step + dist.get_rank())
            loss = model(**{key: torch.stack([row[key] for row in rows]) for key in rows[0]}).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if partita:
            accelerator.engines.close()
        return losses


@pytest.mark.parametrize("use", ["to and dtypes", "deepcopy", "resize", "head"])
def test_a_used_model_trains(use: str, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    plain = on_ranks(2, prepared_after, use, tmp_path, False, timeout=120)
    found = on_ranks(2, prepared_after, use, tmp_path, True, timeout=120)
    assert [pytest.approx(losses, rel=1e-5) for losses in plain] == found
