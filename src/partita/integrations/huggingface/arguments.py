"""Settings that are both trainer arguments and configuration keys. If they differ, an error shows both values."""

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from partita.config.load import load_config
from partita.config.messages import Row, conflict, setting
from partita.config.schema import Config
from partita.errors import ConfigError
from partita.integrations.data_rank import DataRank

# precision.compute for accelerate's mixed_precision.
_COMPUTE = {"bf16": "bf16", "fp16": "fp16"}
# Values in TrainingArguments, and the configuration's values with the same meaning.
_OPTIMIZERS = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw": "adamw"}
_SCHEDULES = {"constant_with_warmup": "constant"}
_OWN_CHECKPOINTS = ("checkpoint.dir", "checkpoint.every_steps")


@dataclass(frozen=True)
class Argument:
    """A trainer's value for a configuration key; ``name`` is the trainer's name for it."""

    key: str
    name: str
    value: Any


def given(config: Config, key: str) -> Any:
    """Return the value that the user set for a key; None if it is missing, ``auto`` or null."""
    section, _, name = key.rpartition(".")
    owner = setting(config, section) if section else config
    value = getattr(owner, name) if name in owner.model_fields_set else None
    return None if value == "auto" else value


def check_equal(config: Config, arguments: Iterable[Argument], section: str | None = None) -> None:
    """Check that values given in both places are equal.

    Args:
        section: the section to leave out, if its keys cannot be left out separately.

    Raises:
        ConfigError: a value differs; the message shows both.
    """
    for argument in arguments:
        value = given(config, argument.key)
        if value is not None and value != argument.value:
            raise conflict(
                f"{argument.key} and {argument.name} differ",
                [Row(argument.key, value, "config"), Row(argument.name, argument.value, "trainer")],
                f"leave {section or argument.key} out: the trainer's value is used",
            )


def merged(config: Config, values: Mapping[str, object]) -> Config:
    """Return the configuration with the trainer's ``values``, by key; None keeps the configuration's value."""
    sections: dict[str, Any] = config.model_dump(exclude_unset=True)
    for key, value in values.items():
        *path, name = key.split(".")
        inner = sections
        for part in path:
            inner = inner.setdefault(part, {})
        if value is not None:
            inner[name] = value
    return load_config(sections)


@dataclass(frozen=True)
class Precision:
    """The precision that follows from accelerate's arguments and the configuration.

    ``compute`` is ``precision.compute`` (None: the dtype of the model's parameters). With ``autocast``, parameters stay
    in fp32, and torch's autocast casts operations.
    """

    compute: str | None
    autocast: bool


def precision_of(config: Config, mixed: str) -> Precision:
    """Combine accelerate's ``mixed_precision`` with ``precision.compute``.

    Raises:
        ConfigError: they contradict each other.
    """
    compute = given(config, "precision.compute")
    if mixed == "no":
        return Precision(compute, autocast=False)
    if mixed not in _COMPUTE:
        raise ConfigError(f"mixed_precision: {mixed} is not available in this version; use bf16")
    if mixed == "bf16" and compute == "fp32":
        return Precision("fp32", autocast=True)
    if compute is not None and compute != _COMPUTE[mixed]:
        raise conflict(
            "precision.compute and the trainer's mixed precision differ (fp32 parameters under autocast "
            "are precision.mode: autocast)",
            [Row("precision.compute", compute, "config"), Row("mixed_precision", mixed, "trainer")],
            "leave precision.compute out: the trainer's value is used",
        )
    return Precision(_COMPUTE[mixed], autocast=False)


def check_training_arguments(config: Config, args: Any, *, own_optimizer: bool) -> None:
    """Check that the configuration agrees with ``transformers.TrainingArguments``.

    Args:
        own_optimizer: True if the trainer creates the optimizer from the arguments.

    Raises:
        ConfigError: a value differs, or a key belongs to partita's own training loop.
    """
    for key in _OWN_CHECKPOINTS:
        if given(config, key) is not None:
            raise ConfigError(
                f"{key}: the Trainer saves the checkpoints (output_dir/checkpoint-N/partita); leave it out, and set "
                "save_strategy and save_steps in TrainingArguments"
            )
    if getattr(args, "deepspeed", None) or getattr(args, "fsdp", None):
        name = "deepspeed" if args.deepspeed else "fsdp"
        raise ConfigError(
            f"TrainingArguments({name}=...): this Trainer runs on partita. Start the script with 'partita run' or call "
            "partita.integrations.huggingface.activate() in its first line, which convert the argument; or leave it "
            "out and pass partita_config"
        )
    arguments = [
        Argument("batch.micro", "per_device_train_batch_size", args.train_batch_size),
        Argument("batch.accumulate", "gradient_accumulation_steps", args.gradient_accumulation_steps),
        Argument("batch.total", "global batch", _total(args, config)),
        Argument("clip_grad_norm", "max_grad_norm", float(args.max_grad_norm)),
    ]
    if own_optimizer:
        optimizer = str(getattr(args.optim, "value", args.optim))
        arguments += [
            Argument("optimizer.name", "optim", _OPTIMIZERS.get(optimizer, optimizer)),
            Argument("optimizer.lr", "learning_rate", args.learning_rate),
            Argument("optimizer.betas", "(adam_beta1, adam_beta2)", (args.adam_beta1, args.adam_beta2)),
            Argument("optimizer.eps", "adam_epsilon", args.adam_epsilon),
            Argument("optimizer.weight_decay", "weight_decay", args.weight_decay),
        ]
    check_equal(config, arguments)


def has_schedule(config: Config, args: Any, num_steps: int) -> bool:
    """Return True if the configuration sets the schedule. The arguments must not set a different one.

    Args:
        args: ``transformers.TrainingArguments``; arguments with their default values are not compared.
        num_steps: optimizer steps of the run.

    Raises:
        ConfigError: a value differs.
    """
    if not config.schedule.model_fields_set:
        return False
    check_equal(config, _of_schedule(config, args, num_steps), section="schedule")
    return True


def _of_schedule(config: Config, args: Any, num_steps: int) -> Iterator[Argument]:
    schedule = config.schedule
    written = {field.name for field in fields(args) if getattr(args, field.name) != field.default}
    if "lr_scheduler_type" in written:
        name = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
        yield Argument("schedule.name", "lr_scheduler_type", _SCHEDULES.get(name, name))
    if args.lr_scheduler_kwargs:
        yield Argument("schedule.name", "lr_scheduler_kwargs", args.lr_scheduler_kwargs)
    if "learning_rate" in written:
        yield Argument("schedule.max_lr", "learning_rate", args.learning_rate)
    # DeepSpeed's schedules have a step before the warm-up, which has at least two steps.
    if "warmup_steps" in written:
        steps = args.get_warmup_steps(num_steps)
        yield Argument("schedule.warmup_steps", "warmup_steps", max(2, steps) if schedule.initial_steps else steps)
    if "max_steps" in written:
        later = args.max_steps + schedule.initial_steps
        is_equal = schedule.total_steps == later
        yield Argument("schedule.total_steps", "max_steps", later if is_equal else args.max_steps)


def of_data_rank(args: Any, data_rank: DataRank) -> Any:
    """Return ``TrainingArguments`` whose process index and number of processes are those of the data ranks."""
    if data_rank.copies == 1:
        return args
    found = copy.copy(args)
    own = {"process_index": data_rank.index, "world_size": data_rank.num}
    found.__class__ = type(type(args).__name__, (type(args),), own)
    return found


def _total(args: Any, config: Config) -> int:
    num_data = args.world_size // (config.parallel.tensor * config.parallel.sequence)
    return int(args.train_batch_size * args.gradient_accumulation_steps * num_data)
