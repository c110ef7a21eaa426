"""Values that both the configuration and a trainer's arguments give: equal, or an error that shows both."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from partita import Config, ConfigError
from partita.config import deepspeed
from partita.integrations.huggingface.arguments import (
    Argument,
    Precision,
    check_equal,
    check_training_arguments,
    given,
    has_schedule,
    merged,
    precision_of,
)
from tests.integrations.huggingface.runs import arguments, reset


def test_what_was_written_is_given() -> None:
    config = Config(zero={"stage": 3}, batch={"micro": "auto", "accumulate": 2}, clip_grad_norm=None)
    assert given(config, "zero.stage") == 3
    assert given(config, "batch.accumulate") == 2
    assert given(config, "batch.micro") is None
    assert given(config, "clip_grad_norm") is None
    assert given(config, "optimizer.lr") is None


def test_unequal_values_are_shown() -> None:
    config = Config(clip_grad_norm=0.5)
    check_equal(config, [Argument("clip_grad_norm", "max_grad_norm", 0.5), Argument("batch.micro", "micro", 7)])
    with pytest.raises(ConfigError) as error:
        check_equal(config, [Argument("clip_grad_norm", "max_grad_norm", 1.0)])
    assert str(error.value).splitlines() == [
        "clip_grad_norm and max_grad_norm differ",
        "  clip_grad_norm  0.5  config",
        "  max_grad_norm   1.0  trainer",
        "Fix: leave clip_grad_norm out: the trainer's value is used.",
    ]


def test_the_trainers_values_are_merged() -> None:
    found = merged(Config(zero={"stage": 2}), {"clip_grad_norm": 1.0, "batch.micro": 4, "batch.accumulate": None})
    assert (found.zero.stage, found.clip_grad_norm, found.batch.micro, found.batch.accumulate) == (2, 1.0, 4, "auto")


@pytest.mark.parametrize(
    ("mixed", "compute", "expected"),
    [
        ("no", "auto", Precision(None, False)),
        ("no", "bf16", Precision("bf16", False)),
        ("bf16", "auto", Precision("bf16", False)),
        ("bf16", "bf16", Precision("bf16", False)),
        ("bf16", "fp32", Precision("fp32", True)),
        ("fp16", "auto", Precision("fp16", False)),
    ],
)
def test_mixed_precision(mixed: str, compute: str, expected: Precision) -> None:
    assert precision_of(Config(precision={"compute": compute}), mixed) == expected


@pytest.mark.parametrize(("mixed", "compute"), [("bf16", "fp16"), ("fp16", "bf16"), ("fp16", "fp32")])
def test_mixed_precision_that_contradicts_the_config(mixed: str, compute: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)precision.compute .* {compute} .*mixed_precision .* {mixed} "):
        precision_of(Config(precision={"compute": compute}), mixed)


def test_fp8_is_not_available() -> None:
    with pytest.raises(ConfigError, match="mixed_precision: fp8 is not available"):
        precision_of(Config(), "fp8")


def check(config: dict[str, Any], folder: Path, **settings: Any) -> None:
    try:
        check_training_arguments(Config(**config), arguments(folder, **settings), own_optimizer=True)
    finally:
        reset()


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        ({"batch": {"micro": 4}}, ("batch.micro", "per_device_train_batch_size", "4", "2")),
        ({"batch": {"accumulate": 4}}, ("batch.accumulate", "gradient_accumulation_steps", "4", "2")),
        ({"batch": {"total": 16}}, ("batch.total", "global batch", "16", "4")),
        ({"clip_grad_norm": 0.5}, ("clip_grad_norm", "max_grad_norm", "0.5", "1.0")),
        ({"optimizer": {"name": "lion"}}, ("optimizer.name", "optim", "lion", "adamw")),
        ({"optimizer": {"lr": 1e-3}}, ("optimizer.lr", "learning_rate", "0.001", "0.01")),
        ({"optimizer": {"betas": [0.9, 0.95]}}, ("optimizer.betas", "adam_beta2", "[0.9, 0.95]", "[0.9, 0.999]")),
        ({"optimizer": {"eps": 1e-6}}, ("optimizer.eps", "adam_epsilon", "1e-06", "1e-08")),
        ({"optimizer": {"weight_decay": 0.0}}, ("optimizer.weight_decay", "weight_decay", "0.0", "0.1")),
    ],
)
def test_training_arguments_that_differ(config: dict[str, Any], shown: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        check(config, tmp_path)
    assert all(part in str(error.value) for part in shown)


def test_training_arguments_that_are_alike(tmp_path: Path) -> None:
    optimizer = {"name": "adamw", "lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1}
    batch = {"micro": 2, "accumulate": 2, "total": 4}
    config = {"batch": batch, "clip_grad_norm": 1.0, "optimizer": optimizer}
    check(config, tmp_path)


DEFAULTS = {"lr_scheduler_type": "linear", "warmup_steps": 0, "learning_rate": 5e-5}


def scheduled(schedule: dict[str, Any], folder: Path, **settings: Any) -> bool:
    try:
        return has_schedule(Config(schedule=schedule), arguments(folder, **(DEFAULTS | settings)), 60)
    finally:
        reset()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lr_scheduler_type": "cosine", "warmup_steps": 6, "max_steps": 60},
        {"warmup_steps": 0.1, "learning_rate": 1e-3},
    ],
)
def test_a_schedule_that_the_arguments_say_too_or_not_at_all(settings: dict[str, Any], tmp_path: Path) -> None:
    own = {"name": "cosine", "warmup_steps": 6, "total_steps": 60, "max_lr": 1e-3}
    assert scheduled(own, tmp_path, **settings)
    assert not scheduled({}, tmp_path, **settings)


@pytest.mark.parametrize("warmup", [1, 10])
@pytest.mark.parametrize(
    ("kind", "name"),
    [("WarmupLR", "constant_with_warmup"), ("WarmupDecayLR", "linear"), ("WarmupCosineLR", "cosine")],
)
def test_a_schedule_of_deepspeeds_that_the_arguments_say_too(kind: str, name: str, warmup: int, tmp_path: Path) -> None:
    params: dict[str, Any] = {"warmup_num_steps": warmup}
    params |= {} if kind == "WarmupLR" else {"total_num_steps": 60}
    params |= {} if kind == "WarmupCosineLR" else {"warmup_max_lr": 1e-3}
    found: Any = deepspeed.read({"scheduler": {"type": kind, "params": params}}, 1, arguments={}).settings["schedule"]
    same = {"lr_scheduler_type": name, "warmup_steps": warmup, "max_steps": 60, "learning_rate": 1e-3}
    assert scheduled(found, tmp_path, **same)


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({"lr_scheduler_type": "cosine"}, ("schedule.name and lr_scheduler_type differ", "linear", "cosine")),
        ({"lr_scheduler_kwargs": {"num_cycles": 2}}, ("schedule.name and lr_scheduler_kwargs differ", "num_cycles")),
        ({"warmup_steps": 5}, ("schedule.warmup_steps and warmup_steps differ", "6", "5")),
        ({"max_steps": 50}, ("schedule.total_steps and max_steps differ", "60", "50")),
        ({"learning_rate": 1e-2}, ("schedule.max_lr and learning_rate differ", "0.001", "0.01")),
    ],
)
def test_a_schedule_that_differs(settings: dict[str, Any], shown: tuple[str, ...], tmp_path: Path) -> None:
    own = {"name": "linear", "warmup_steps": 6, "total_steps": 60, "max_lr": 1e-3}
    with pytest.raises(ConfigError, match="leave schedule out: the trainer's value is used") as error:
        scheduled(own, tmp_path, **settings)
    assert all(part in str(error.value) for part in shown)


@pytest.mark.parametrize("checkpoint", [{"dir": "here"}, {"dir": "here", "every_steps": 5}])
def test_checkpoints_are_the_trainers(checkpoint: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="checkpoint.dir: the Trainer saves the checkpoints"):
        check({"checkpoint": checkpoint}, tmp_path)


@pytest.mark.parametrize("name", ["deepspeed", "fsdp"])
def test_another_library_in_the_arguments(name: str) -> None:
    args = SimpleNamespace(**{"deepspeed": None, "fsdp": None, name: {"zero_optimization": {"stage": 3}}})
    with pytest.raises(ConfigError, match=rf"TrainingArguments\({name}=...\): .*'partita run'.*activate\(\)"):
        check_training_arguments(Config(), args, own_optimizer=True)
