"""TRL's trainers on partita have the losses of the plain ones, also with a reference model and with generation."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from partita import ConfigError
from partita.integrations.huggingface import on_partita
from tests.integrations.huggingface.runs import alone, end, llama, losses_of, scratch
from tests.kit.ranks import on_ranks

WORDS = [f"w{number}" for number in range(60)]
SETTINGS: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 3,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "report_to": [],
    "disable_tqdm": True,
    "save_strategy": "no",
    "log_level": "error",
}


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = {name: number for number, name in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    made = Tokenizer(models.WordLevel(names, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def data(kind: str) -> Any:
    from datasets import Dataset

    source = random.Random(0)

    def text(least: int, most: int) -> str:
        return " ".join(source.choice(WORDS) for _ in range(source.randint(least, most)))

    rows: list[dict[str, str]] = []
    for _ in range(24):
        if kind == "sft":
            rows.append({"text": text(5, 15)})
        elif kind == "dpo":
            rows.append({"prompt": text(4, 4), "chosen": " " + text(3, 8), "rejected": " " + text(3, 8)})
        else:
            rows.append({"prompt": text(3, 5)})
    return Dataset.from_list(rows)


def trl_trainer(kind: str, config: dict[str, Any] | None, folder: Path, lora: bool) -> Any:
    import trl

    given: dict[str, Any] = {"model": llama(), "train_dataset": data(kind), "processing_class": tokenizer()}
    if kind == "sft":
        trainer, args = trl.SFTTrainer, trl.SFTConfig(str(folder), max_length=16, **SETTINGS)
    elif kind == "dpo":
        trainer, args = trl.DPOTrainer, trl.DPOConfig(str(folder), max_length=16, **SETTINGS)
        if not lora:
            given["ref_model"] = llama()
    else:
        trainer = trl.GRPOTrainer
        given["model"] = saved(folder)  # TRL loads the reference model from the model's folder
        sampled = {"num_generations": 4, "max_completion_length": 6, "beta": 0.1, "seed": 5}
        args = trl.GRPOConfig(str(folder), **(SETTINGS | sampled | {"max_steps": 2}))
        given["reward_funcs"] = reward
    if lora:
        from peft import LoraConfig

        given["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=True)
    if config is not None:
        trainer = on_partita(trainer, config)
    return trainer(args=args, **given)


def saved(folder: Path) -> Any:
    """Return a model that was loaded from a folder."""
    model = llama()
    if not dist.is_initialized() or dist.get_rank() == 0:
        model.save_pretrained(folder / "start")
    if dist.is_initialized():
        dist.barrier()
    return type(model).from_pretrained(folder / "start")


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(ord, completion)) % 7) for completion in completions]


def losses(kind: str, config: dict[str, Any] | None, lora: bool = False) -> list[float]:
    from transformers import set_seed

    with alone(), scratch() as folder:
        set_seed(7)
        trainer = trl_trainer(kind, config, folder, lora)
        try:
            trainer.train()
            return losses_of(trainer)
        finally:
            end(trainer)


def plain_and_sharded(kinds: list[str], stages: list[int], lora: bool) -> dict[str, list[list[float]]]:
    configs: list[dict[str, Any] | None] = [None, *({"zero": {"stage": stage}} for stage in stages)]
    return {kind: [losses(kind, config, lora) for config in configs] for kind in kinds}


def assert_alike(found: dict[str, list[list[float]]]) -> None:
    for kind, (plain, *others) in found.items():
        assert len(plain) >= 2
        for rows in others:
            assert rows == pytest.approx(plain, rel=1e-6, abs=1e-7), kind


def test_as_plain_trl() -> None:
    """SFT, DPO with a reference model and GRPO have the losses of plain TRL at stage 3, on two ranks."""
    assert_alike(on_ranks(2, plain_and_sharded, ["sft", "dpo", "grpo"], [3], False, timeout=200)[0])


def generating_on_tensor_ranks() -> str:
    with alone(), scratch() as folder, pytest.raises(ConfigError) as raised:
        trl_trainer("grpo", {"parallel": {"tensor": 2}}, folder, lora=False)
    return str(raised.value)


def test_a_trainer_that_generates_its_samples_has_data_ranks_only() -> None:
    for said in on_ranks(2, generating_on_tensor_ranks, timeout=120):
        assert said.startswith("parallel: 2 ranks share a model, and each of them would generate other samples in GRPO")
        assert "leave parallel out; zero.stage: 3 shards" in said


@pytest.mark.thorough
@pytest.mark.parametrize("world", [1, 2])
def test_every_stage_as_plain_trl(world: int) -> None:
    assert_alike(on_ranks(world, plain_and_sharded, ["sft", "dpo", "grpo"], [0, 1, 2], False, timeout=290)[0])


@pytest.mark.thorough
def test_adapters_as_plain_trl() -> None:
    assert_alike(on_ranks(2, plain_and_sharded, ["sft", "dpo"], [1, 3], True, timeout=290)[0])
