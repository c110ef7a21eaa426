"""What must hold between settings, and which settings have no effect beside others. Two tables of rules.

A setting that another one contradicts is an error; one that is harmless and idle is named in a notice.
"""

from collections.abc import Callable
from dataclasses import dataclass

from partita.config.schema import Config, Optimizer
from partita.config.table import Row, conflict, row

_OPTIMIZER = Optimizer()


@dataclass(frozen=True)
class Rule:
    """Settings that do not go together: when, the keys to show, what is wrong, and one fix."""

    broken: Callable[[Config, str], bool]
    keys: tuple[str, ...]
    problem: str
    fix: str


@dataclass(frozen=True)
class Idle:
    """A setting away from its default that changes nothing: when, its key, and why."""

    applies: Callable[[Config, str], bool]
    key: str
    reason: str


RULES = (
    Rule(
        lambda c, _: c.zero.keep_gathered and c.zero.stage != 3,
        ("zero.keep_gathered", "zero.stage"),
        "zero.keep_gathered belongs to stage 3; at stages 0 to 2 parameters are always whole",
        "leave zero.keep_gathered out",
    ),
    Rule(
        lambda c, _: c.zero.hierarchical and c.zero.stage != 3,
        ("zero.hierarchical", "zero.stage"),
        "zero.hierarchical belongs to stage 3; at stages 0 to 2 nothing is gathered in backward",
        "leave zero.hierarchical out",
    ),
    Rule(
        lambda c, _: c.zero.hierarchical and c.zero.keep_gathered,
        ("zero.hierarchical", "zero.keep_gathered"),
        "zero.hierarchical gathers parameters inside the node for backward, zero.keep_gathered never lets go of them",
        "leave zero.keep_gathered out",
    ),
    Rule(
        lambda c, _: c.zero.prefetch_bytes != "auto" and c.zero.stage != 3,
        ("zero.prefetch_bytes", "zero.stage"),
        "zero.prefetch_bytes belongs to stage 3; at stages 0 to 2 no parameters are gathered for forward",
        "leave zero.prefetch_bytes out",
    ),
    Rule(
        lambda c, compute: c.precision.loss_scale != "dynamic" and compute != "fp16",
        ("precision.loss_scale", "precision.compute"),
        "precision.loss_scale belongs to fp16 compute; under {compute} the loss is not scaled",
        "leave precision.loss_scale out",
    ),
    Rule(
        lambda c, compute: c.precision.master == "split" and compute == "fp16",
        ("precision.master", "precision.compute"),
        "precision.master: split keeps what bf16 parameters lack of fp32; fp16 parameters are no part of it",
        "set precision.compute to bf16",
    ),
    Rule(
        lambda c, compute: c.precision.gradients == "in_backward" and compute == "fp16",
        ("precision.gradients", "precision.compute"),
        "precision.gradients: in_backward updates a unit before it is known whether the gradients of all others are "
        "finite under fp16's loss scale",
        "set precision.compute to bf16",
    ),
    Rule(
        lambda c, _: c.precision.gradients == "in_backward" and c.zero.stage == 0,
        ("precision.gradients", "zero.stage"),
        "precision.gradients: in_backward updates a unit where its gradient is reduced, on the rank that owns it; at "
        "stage 0 every rank owns all",
        "set zero.stage to 1",
    ),
    Rule(
        lambda c, _: c.precision.gradients == "in_backward" and c.zero.offload.gradients != "auto",
        ("precision.gradients", "zero.offload.gradients"),
        "under precision.gradients: in_backward no gradient rests anywhere",
        "leave zero.offload.gradients out",
    ),
    Rule(
        lambda c, _: c.precision.nonfinite == "rewind" and c.checkpoint.dir is None,
        ("precision.nonfinite", "checkpoint.dir"),
        "precision.nonfinite: rewind goes back to a checkpoint, and none are made",
        "set checkpoint.dir and checkpoint.every_steps",
    ),
    Rule(
        lambda c, _: c.checkpoint.every_steps is not None and c.checkpoint.dir is None,
        ("checkpoint.every_steps", "checkpoint.dir"),
        "checkpoint.every_steps needs a folder to save into",
        "set checkpoint.dir",
    ),
    Rule(
        lambda c, _: c.precision.moments == "int8" and c.optimizer.name not in ("adam", "adamw"),
        ("precision.moments", "optimizer.name"),
        "precision.moments: int8 belongs to adam and adamw",
        "leave precision.moments out",
    ),
    Rule(
        lambda c, _: c.optimizer.name == "sgd" and c.optimizer.betas != _OPTIMIZER.betas,
        ("optimizer.betas", "optimizer.name"),
        "optimizer.betas belongs to adam and adamw; sgd's momentum is not a beta",
        "write optimizer.momentum: {c.optimizer.betas[0]} in place of optimizer.betas",
    ),
    Rule(
        lambda c, _: c.optimizer.name in ("sgd", "lion") and c.optimizer.eps != _OPTIMIZER.eps,
        ("optimizer.eps", "optimizer.name"),
        "optimizer.eps belongs to adam and adamw; {c.optimizer.name} divides by nothing",
        "leave optimizer.eps out",
    ),
    Rule(
        lambda c, _: c.optimizer.name != "sgd" and c.optimizer.momentum != 0.0,
        ("optimizer.momentum", "optimizer.name"),
        "optimizer.momentum belongs to sgd; the momentum of {c.optimizer.name} is betas[0]",
        "leave optimizer.momentum out",
    ),
    Rule(
        lambda c, _: c.schedule.name != "constant" and c.schedule.total_steps is None,
        ("schedule.name", "schedule.total_steps"),
        "a {c.schedule.name} schedule needs to know where it ends",
        "set schedule.total_steps to the number of optimizer steps of the run",
    ),
    Rule(
        lambda c, _: c.schedule.total_steps is not None and c.schedule.warmup_steps > c.schedule.total_steps,
        ("schedule.warmup_steps", "schedule.total_steps"),
        "the warm-up is longer than the whole schedule",
        "set schedule.warmup_steps to at most {c.schedule.total_steps}",
    ),
    Rule(
        lambda c, _: c.schedule.min_lr > c.optimizer.lr,
        ("schedule.min_lr", "optimizer.lr"),
        "the schedule's lowest learning rate is above its highest",
        "set schedule.min_lr to at most {c.optimizer.lr}",
    ),
)

IDLE = (
    Idle(
        lambda c, compute: c.precision.master == "split" and compute == "fp32",
        "precision.master",
        "fp32 parameters are their own master weights",
    ),
    Idle(
        lambda c, compute: (
            c.precision.nonfinite != "skip" and compute == "fp16" and c.precision.loss_scale == "dynamic"
        ),
        "precision.nonfinite",
        "updates that are left out are how fp16's loss scale is found",
    ),
    Idle(
        lambda c, _: c.zero.offload.path is not None and not _may_use_disk(c),
        "zero.offload.path",
        "nothing rests on disk",
    ),
    Idle(
        lambda c, compute: bool(c.precision.keep_fp32) and compute == "fp32",
        "precision.keep_fp32",
        "all modules compute in fp32",
    ),
    Idle(
        lambda c, _: c.schedule.name == "constant" and c.schedule.total_steps is not None,
        "schedule.total_steps",
        "a constant schedule has no end",
    ),
    Idle(
        lambda c, _: c.schedule.name == "constant" and c.schedule.min_lr > 0,
        "schedule.min_lr",
        "a constant schedule stays at optimizer.lr",
    ),
)


def _may_use_disk(config: Config) -> bool:
    offload = config.zero.offload
    return bool({"disk", "auto"} & {offload.parameters, offload.optimizer}) or offload.gradients == "disk"


def check_settings(config: Config, compute: Row) -> None:
    """Checks every rule; ``compute`` is the row of the compute dtype after ``auto`` is decided.

    Raises:
        ConfigError: for the first rule that is broken, with the resolved values, their sources and one fix.
    """
    name = str(compute.value)
    for rule in RULES:
        if rule.broken(config, name):
            rows = [compute if key == compute.key else row(config, key) for key in rule.keys]
            raise conflict(rule.problem.format(c=config, compute=name), rows, rule.fix.format(c=config))


def check_batch(config: Config, accumulate: Row) -> None:
    """Checks the micro-batches of a step, given or derived.

    Raises:
        ConfigError: gradients of several are to add up, but none rests.
    """
    if config.precision.gradients == "in_backward" and accumulate.value != 1:
        raise conflict(
            "precision.gradients: in_backward updates the parameters in every backward: no gradient rests to which "
            "that of another micro-batch could be added",
            [row(config, "precision.gradients"), accumulate],
            "set precision.gradients to fp32, or batch.accumulate to 1",
        )


def idle_settings(config: Config, compute: str) -> tuple[str, ...]:
    """One line ``ignored: key (reason)`` for each setting without effect."""
    return tuple(f"ignored: {idle.key} ({idle.reason})" for idle in IDLE if idle.applies(config, compute))
