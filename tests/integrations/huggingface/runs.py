"""Runs of a tiny Llama under a Trainer, plain or on partita, which tests compare."""

import contextlib
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from transformers import TrainingArguments

from partita.integrations.huggingface import on_partita
from tests.kit.models import FAMILIES

VOCABULARY, LENGTH = 96, 12
KEPT = ("step", "loss", "grad_norm", "learning_rate", "eval_loss")


@dataclass(frozen=True)
class Run:
    """A training run: 9 samples per rank (or `num_samples` in all), in batches of 2 micro-batches of 2 samples.

    The last batch of an epoch is short.

    Attributes: `config`: partita's, None for a plain run; `arguments`: further TrainingArguments.
    """

    config: dict[str, Any] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    tied: bool = False
    lora: bool = False
    dtype: torch.dtype = torch.float32
    num_samples: int | None = None

    @property
    def is_plain(self) -> bool:
        return self.config is None


def llama(tied: bool = False) -> Any:
    """Return a tiny Llama, with the same weights on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return FAMILIES["llama"](
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            max_position_embeddings=64,
            tie_word_embeddings=tied,
            use_cache=True,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )


def samples(number: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Return samples of LENGTH tokens. The last 0 to 3 are padding, which is not predicted."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index in range(number):
        tokens = torch.randint(3, VOCABULARY, (LENGTH,), generator=generator)
        mask = (torch.arange(LENGTH) < LENGTH - index % 4).long()
        labels = torch.where(mask.bool(), tokens, -100)
        made.append({"input_ids": tokens * mask, "labels": labels, "attention_mask": mask})
    return made


def model_of(run: Run) -> nn.Module:
    model: nn.Module = llama(run.tied).to(run.dtype)
    if run.lora:
        from peft import LoraConfig, get_peft_model

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    return model


def arguments(folder: Path, **given: Any) -> TrainingArguments:
    """Return arguments for two epochs of three batches, with every setting that affects an update."""
    settings = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "warmup_steps": 1,
        "lr_scheduler_type": "cosine",
        "seed": 3,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "log_level": "error",
        "use_cpu": True,
    }
    return TrainingArguments(str(folder), **(settings | given))


def trainer_of(run: Run, folder: Path, **given: Any) -> transformers.Trainer:
    kind = transformers.Trainer if run.is_plain else on_partita(transformers.Trainer, run.config)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return kind(
        model=given.pop("model", None) or model_of(run),
        args=arguments(folder, **run.arguments),
        train_dataset=samples(run.num_samples or 9 * ranks, 1),
        eval_dataset=samples(5, 2),
        **given,
    )


def rows_of(trainer: transformers.Trainer) -> list[dict[str, float]]:
    """Return the logged losses, norms and learning rates."""
    rows = [{key: row[key] for key in KEPT if key in row} for row in trainer.state.log_history]
    return [row for row in rows if len(row) > 1]


def losses_of(trainer: transformers.Trainer) -> list[float]:
    return [row["loss"] for row in rows_of(trainer) if "loss" in row]


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Isolate a run: reset accelerate's process-wide state before and after it, and ignore warnings."""
    reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            reset()


def reset() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def end(trainer: transformers.Trainer) -> None:
    """Close the engines of a trainer, if it has any."""
    engines = getattr(trainer.accelerator, "engines", None)
    if engines is not None:
        engines.close()


def history(run: Run) -> list[dict[str, float]]:
    """Train, and return what was logged."""
    with alone(), scratch() as folder:
        trainer = trainer_of(run, folder)
        try:
            trainer.train()
            return rows_of(trainer)
        finally:
            end(trainer)


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Create a folder that all ranks share, and remove it afterwards."""
    made = [tempfile.mkdtemp() if not dist.is_initialized() or dist.get_rank() == 0 else None]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(made)
    folder = Path(str(made[0]))
    try:
        yield folder
    finally:
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.barrier()
        shutil.rmtree(folder, ignore_errors=True)


def histories(runs: list[Run]) -> list[list[dict[str, float]]]:
    """Train one run after the other, in one job of the worker pool; return their logs."""
    return [history(run) for run in runs]
