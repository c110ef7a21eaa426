"""Settings that are both Lightning arguments and keys of partita's config. Their values must not contradict."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from partita.config.load import load_config
from partita.config.messages import Row, conflict, row
from partita.config.schema import Batch, Config, Schedule
from partita.errors import ConfigError

# Lightning's names of precisions: the compute dtype, and True for mixed precision.
_PRECISIONS = {
    "32-true": ("fp32", False),
    "bf16-mixed": ("bf16", True),
    "16-mixed": ("fp16", True),
    "bf16-true": ("bf16", False),
    "16-true": ("fp16", False),
}
_DEFAULT_PRECISION = "32-true"


def read(source: str | Path | Mapping[str, Any] | Config | None) -> Config:
    """Return the config of a strategy, with one checkpoint per folder, because Lightning has a folder per checkpoint.

    Raises:
        ConfigError: the config is wrong, or sets that the engine saves checkpoints or rewinds to one: Lightning does.
    """
    config = load_config(source)
    if config.checkpoint.dir is not None or config.checkpoint.every_steps is not None:
        raise ConfigError(
            "checkpoint.dir and checkpoint.every_steps: Lightning saves the checkpoints, with the progress of its "
            "loops (ModelCheckpoint, or fabric.save): leave both out of partita's config"
        )
    if config.precision.nonfinite == "rewind":
        raise ConfigError(
            "precision.nonfinite: rewind loads a checkpoint, but Lightning's loops would not be rewound: set 'skip' or "
            "'raise'"
        )
    return _changed(config, checkpoint=config.checkpoint.model_copy(update={"keep": 1}))


def with_precision(config: Config, precision: str) -> tuple[Config, bool]:
    """Return the config with the dtype of Lightning's ``precision``, and True if the forward runs under autocast.

    It does for ``precision.compute: fp32`` with ``bf16-mixed``.

    Raises:
        ConfigError: the config sets another dtype, or there is no such precision.
    """
    if precision not in _PRECISIONS:
        raise ConfigError(f"precision={precision!r}: expected one of {', '.join(map(repr, _PRECISIONS))}")
    compute, is_mixed = _PRECISIONS[precision]
    given = config.precision.compute
    if given == "auto":
        found: dict[str, object] = {"compute": compute}
        if compute != "fp32" and not is_mixed and "mode" not in config.precision.model_fields_set:
            found |= {"mode": "cast", "outputs": "compute"}  # the model is cast, and returns what it computes
        return _changed(config, precision=config.precision.model_copy(update=found)), False
    autocasts = is_mixed and compute == "bf16" and given == "fp32"
    if given != compute and precision != _DEFAULT_PRECISION and not autocasts:
        raise conflict(
            f"precision.compute is {given}, but Lightning's precision is {precision!r}",
            [row(config, "precision.compute"), Row("precision", precision, "Lightning")],
            "leave precision.compute out; it follows from Lightning's precision",
        )
    return config, autocasts


def check_clipping(config: Config, clip: float | None, algorithm: str | None) -> None:
    """Check that ``clip_grad_norm`` agrees with the Trainer's ``gradient_clip_val``.

    Raises:
        ConfigError: they differ, or gradients are to be clipped by value.
    """
    if algorithm == "value":
        raise ConfigError(
            "gradient_clip_algorithm='value': partita clips gradients only by their global norm; pass 'norm'"
        )
    if clip is not None and config.clip_grad_norm is not None and clip != config.clip_grad_norm:
        raise conflict(
            f"clip_grad_norm is {config.clip_grad_norm:g}, but the Trainer's gradient_clip_val is {clip:g}",
            [row(config, "clip_grad_norm"), Row("gradient_clip_val", clip, "Trainer")],
            "leave clip_grad_norm out of partita's config",
        )


def with_accumulation(config: Config, accumulate: int, argument: str) -> Config:
    """Return the config with a ``batch`` of one micro-batch: Lightning's loop accumulates, and divides the loss itself.

    Args:
        accumulate: batches per optimizer step.
        argument: the setting that determines it, as the user calls it.

    Raises:
        ConfigError: the config sets another number.
    """
    given = config.batch.accumulate
    if given not in ("auto", accumulate):
        raise conflict(
            f"batch.accumulate is {given}, but {argument} is {accumulate}",
            [row(config, "batch.accumulate"), Row(argument, accumulate, "Lightning")],
            "leave batch.accumulate out of partita's config",
        )
    return _changed(config, batch=Batch())


def check_schedule(config: Config, is_given: bool) -> None:
    """Refuse two schedules: one in the config, and one that Lightning steps.

    Raises:
        ConfigError: there are two.
    """
    if is_given and config.schedule != Schedule():
        raise ConfigError(
            f"schedule: the config has one ({config.schedule.name}), and Lightning steps the optimizer's own "
            "scheduler: leave one of the two out"
        )


def _changed(config: Config, **sections: Any) -> Config:
    return config.model_copy(update=sections)
