"""Prepared models are saved by their own ``save_pretrained``, at the end of a script and in accelerate's hooks."""

import copy
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaForCausalLM, LlamaModel

from partita import PartitaError
from partita.integrations.huggingface import Accelerator
from tests.integrations.huggingface.runs import Run, alone, end, llama, model_of, samples, trainer_of
from tests.kit.ranks import on_ranks


def trained(accelerator: Accelerator, model: nn.Module) -> Any:
    """Return the model after one step."""
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    rows = samples(2, dist.get_rank())
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    return model


def accelerator_of(compute: str = "fp32", stage: int = 3) -> Accelerator:
    return Accelerator(cpu=True, partita_config={"zero": {"stage": stage}, "precision": {"compute": compute}})


def saved_at_the_end(folder: Path, compute: str, stage: int) -> dict[str, torch.Tensor]:
    """Train and save as transformers' own scripts do; return the full state dict, which is empty except on rank 0."""
    with alone():
        accelerator = accelerator_of(compute, stage)
        model = trained(accelerator, llama())
        whole = accelerator.get_state_dict(model)
        unwrapped = accelerator.unwrap_model(model)
        save = accelerator.save
        unwrapped.save_pretrained(folder / "end", is_main_process=accelerator.is_main_process, save_function=save)
        unwrapped.save_pretrained(folder / "bare")
        unwrapped.model.save_pretrained(folder / "part")
        unwrapped.save_pretrained(folder / "given", accelerator.is_main_process, accelerator.get_state_dict(model))
        accelerator.engines.close()
        assert "save_pretrained" not in unwrapped.__dict__
        return whole


@pytest.mark.parametrize(("compute", "stage"), [("fp32", 3), ("bf16", 0), ("bf16", 2), ("bf16", 3)])
def test_every_rank_saves_and_rank_0_writes(compute: str, stage: int, tmp_path: Path) -> None:
    whole, nothing = on_ranks(2, saved_at_the_end, tmp_path, compute, stage, timeout=120)
    assert not nothing
    for name in ("end", "bare", "given"):
        found = LlamaForCausalLM.from_pretrained(tmp_path / name)
        assert found.state_dict().keys() == whole.keys()
        assert all(torch.equal(value, whole[key]) for key, value in found.state_dict().items())
        assert found.dtype == torch.float32
    for key, value in LlamaModel.from_pretrained(tmp_path / "part").state_dict().items():
        assert torch.equal(value, whole[f"model.{key}"])


def adapters_saved(folder: Path) -> dict[str, torch.Tensor]:
    with alone():
        accelerator = accelerator_of()
        model = trained(accelerator, model_of(Run(lora=True)))
        whole = accelerator.get_state_dict(model)
        accelerator.unwrap_model(model).save_pretrained(folder, is_main_process=accelerator.is_main_process)
        accelerator.engines.close()
        return whole


def test_adapters_are_saved(tmp_path: Path) -> None:
    whole = on_ranks(2, adapters_saved, tmp_path, timeout=120)[0]
    found = load_file(tmp_path / "adapter_model.safetensors")
    assert found
    for name, value in found.items():
        assert torch.equal(value, whole[name.replace("weight", "default.weight")])


def rank_0_saves(folder: Path, compute: str, stage: int) -> tuple[str, float]:
    with alone():
        accelerator = accelerator_of(compute, stage)
        model = trained(accelerator, llama())
        began, said = time.monotonic(), ""
        if accelerator.is_main_process:
            try:
                model.save_pretrained(folder)
            except PartitaError as error:
                said = str(error)
        waited = time.monotonic() - began
        accelerator.wait_for_everyone()
        accelerator.engines.close()
        return said, waited


@pytest.mark.parametrize(("compute", "stage"), [("fp32", 3), ("bf16", 1)])
def test_one_rank_that_saves_alone_is_told_what_to_call(compute: str, stage: int, tmp_path: Path) -> None:
    (said, waited), _ = on_ranks(2, rank_0_saves, tmp_path, compute, stage, timeout=120)
    assert waited < 15
    assert "call it outside 'if accelerator.is_main_process:'" in said
    assert "state_dict=accelerator.get_state_dict(model)" in said
    assert not (tmp_path / "model.safetensors").exists()


def fails_on_rank_0(folder: Path) -> str:
    with alone():
        accelerator = accelerator_of()
        model = trained(accelerator, llama())
        try:
            model.save_pretrained(folder / "file" / "below")
            return ""
        except (OSError, PartitaError) as error:
            return str(error)
        finally:
            accelerator.engines.close()


def test_an_error_of_rank_0_is_one_of_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    first, second = on_ranks(2, fails_on_rank_0, tmp_path, timeout=120)
    assert "Not a directory" in first
    assert second == "save_pretrained: rank 0 failed to write; see its own error"


class Denoiser(nn.Module):
    """Model that saves like diffusers' models: from its own state dict, not from an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        return out

    def save_pretrained(self, folder: Path, is_main_process: bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if is_main_process:
            save_file(self.state_dict(), folder / "model.safetensors")


def denoiser(seed: int) -> Denoiser:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Denoiser()


def hooked(folder: Path, stage: int) -> tuple[list[Any], bool, bool]:
    """Run a loop like those of diffusers' scripts. Return what the hooks saw, True if loading restores the saved model,
    and True if a copy made while parameters are gathered has the class's own ``save_pretrained``.
    """
    seen: list[Any] = []
    with alone():
        accelerator = Accelerator(cpu=True, partita_config={"zero": {"stage": stage}})

        def save_hook(models: list[Any], weights: list[Any], output: str) -> None:
            seen.append([type(model).__name__ for model in models])
            if accelerator.is_main_process:
                for model in models:
                    accelerator.unwrap_model(model).save_pretrained(Path(output) / "unet")
                    weights.pop()

        def load_hook(models: list[Any], source: str) -> None:
            for _ in range(len(models)):
                model = models.pop()
                seen.append(type(model).__name__)
                model.load_state_dict(load_file(Path(source) / "unet/model.safetensors"))

        accelerator.register_save_state_pre_hook(save_hook)
        accelerator.register_load_state_pre_hook(load_hook)
        model = denoiser(dist.get_rank())
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

        def step() -> None:
            accelerator.backward(model(torch.ones(2, 8)).square().mean())
            optimizer.step()
            optimizer.zero_grad()

        step()
        accelerator.save_state(str(folder))
        before = accelerator.get_state_dict(model)
        step()
        accelerator.load_state(str(folder))
        after = accelerator.get_state_dict(model)
        with accelerator.engines.of(model).engine.gathered():  # type: ignore[union-attr]
            copied = copy.deepcopy(model)
        own = copied.save_pretrained.__self__ is copied  # type: ignore[attr-defined]
        accelerator.engines.close()
        return seen, all(torch.equal(value, after[name]) for name, value in before.items()), own


@pytest.mark.parametrize("stage", [1, 3])
def test_hooks_of_accelerate_get_models_that_can_be_saved(stage: int, tmp_path: Path) -> None:
    for seen, same, own in on_ranks(2, hooked, tmp_path, stage, timeout=120):
        assert seen == [["Denoiser"], "Denoiser"]
        assert same
        assert own
    found = denoiser(0)
    start = {name: value.clone() for name, value in found.state_dict().items()}
    found.load_state_dict(load_file(tmp_path / "unet/model.safetensors"))
    assert not any(torch.equal(value, start[name]) for name, value in found.state_dict().items())


class Sentences(nn.Module):
    """Wrapper around a transformers model, with its own ``save`` like sentence-transformers' models."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama()
        self.head = nn.Linear(4, 4)

    def forward(self, **batch: Any) -> Any:
        return self.inner(**batch)

    def save(self, folder: Path) -> None:
        self.inner.save_pretrained(folder / "inner")
        save_file(self.head.state_dict(), folder / "head.safetensors")


def saved_by_a_trainer(folder: Path) -> dict[str, torch.Tensor]:
    with alone():
        model = Sentences()
        trainer: Any = trainer_of(Run({"zero": {"stage": 3}}, {"remove_unused_columns": False}), folder, model=model)
        kind = type(trainer)

        class Own(kind.__mro__[2]):  # type: ignore[misc, name-defined]  # transformers' Trainer
            def _save(self, output_dir: str, state_dict: Any = None) -> None:
                if self.args.should_save:
                    self.model.save(Path(output_dir))

        trainer.__class__ = type("Trainer", (kind.__mro__[1], Own), {})
        try:
            trainer.train()
            (folder / "final").mkdir(exist_ok=True)
            trainer.save_model(str(folder / "final"))
            return trainer.accelerator.get_state_dict(model)  # type: ignore[no-any-return]
        finally:
            end(trainer)


def test_a_trainer_that_saves_its_model_in_its_own_way(tmp_path: Path) -> None:
    whole = on_ranks(2, saved_by_a_trainer, tmp_path, timeout=120)[0]
    for name, value in LlamaForCausalLM.from_pretrained(tmp_path / "final/inner").state_dict().items():
        assert torch.equal(value, whole[f"inner.{name}"])
    assert torch.equal(load_file(tmp_path / "final/head.safetensors")["weight"], whole["head.weight"])
