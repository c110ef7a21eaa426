"""Rules between settings: contradictions, and settings that have no effect in combination with others.

A contradiction is an error; a harmless setting without effect is reported in a notice.
"""

from collections.abc import Iterator, Mapping

from partita.config.extension import Extension
from partita.config.messages import Contradiction, Row, conflict, row, setting
from partita.config.schema import Config, Muon

_ADAMS = ("adam", "adamw", "onebit_adam", "muon")
# Keys that require certain values of another key: the key, the other key, these values, and a text.
_REQUIRES: tuple[tuple[str, str, tuple[object, ...], str], ...] = (
    ("zero.keep_gathered", "zero.stage", (3,), "stage 3; at stages 0 to 2 parameters are never sharded"),
    (
        "zero.keep_gradients",
        "zero.keep_gathered",
        (True,),
        "zero.keep_gathered: unsharded gradients are kept only together with unsharded parameters",
    ),
    ("zero.hierarchical", "zero.stage", (3,), "stage 3; at stages 0 to 2 backward gathers no parameters"),
    ("zero.replicate", "zero.stage", (3,), "stage 3; at stages 0 to 2 every rank has all parameters"),
    ("zero.prefetch_bytes", "zero.stage", (3,), "stage 3; at stages 0 to 2 forward gathers no parameters"),
    ("communication.parameters", "zero.stage", (1, 2, 3), "stages 1 to 3; at stage 0 every rank updates all of them"),
    ("precision.loss_scale", "precision.compute", ("fp16",), "fp16 compute; under {0} the loss is not scaled"),
    ("precision.initial_loss_scale", "precision.compute", ("fp16",), "fp16 compute; under {0} the loss is not scaled"),
    ("precision.loss_scale_window", "precision.compute", ("fp16",), "fp16 compute; under {0} the loss is not scaled"),
    ("precision.initial_loss_scale", "precision.loss_scale", ("dynamic",), "a dynamic loss scale; {0} is constant"),
    ("precision.loss_scale_window", "precision.loss_scale", ("dynamic",), "a dynamic loss scale; {0} is constant"),
    (
        "communication.low_rank",
        "communication.gradients",
        ("low_rank",),
        "communication.gradients: low_rank; it is {0}",
    ),
    ("optimizer.eps", "optimizer.name", _ADAMS, "adam, adamw, onebit_adam or muon; {0} does not use it"),
    ("optimizer.sends", "optimizer.name", ("onebit_adam",), "onebit_adam; with {0} ranks send gradients"),
    ("optimizer.momentum", "optimizer.name", ("sgd",), "sgd; {0} has betas, and muon has optimizer.muon.momentum"),
    *(
        (f"optimizer.muon.{key}", "optimizer.name", ("muon",), "optimizer.name: muon; it is {0}")
        for key in Muon.model_fields
    ),
)


def check_settings(config: Config, derived: Mapping[str, Row], extension: Extension) -> None:
    """Check every rule. ``derived``: rows of derived settings (mesh, batch, compute dtype), by key.

    Raises:
        ConfigError: a rule is broken; the message has the resolved values of the first one, their sources and one fix.
    """
    default = Config()

    def resolved(key: str) -> Row:
        return derived.get(key) or row(config, key)

    for key, other, values, words in _REQUIRES:
        value = resolved(other).value
        if setting(config, key) != setting(default, key) and value not in values:
            problem = f"{key} requires {words.format(value)}"
            raise conflict(problem, [resolved(key), resolved(other)], f"leave {key} out")
    compute = str(resolved("precision.compute").value)
    accumulates = resolved("batch.accumulate").value != 1
    rules = (
        *_states(config, compute),
        *extension.contradictions(config, compute),
        *_in_backward(config, compute, accumulates),
        *_axes(config),
        *_activations(config),
        *_compile(config),
        *_training(config),
        *_attention(config),
    )
    for keys, problem, fix in rules:
        raise conflict(problem, [resolved(key) for key in keys], fix)


def _states(config: Config, compute: str) -> Iterator[Contradiction]:
    zero, precision = config.zero, config.precision
    if zero.hierarchical and zero.keep_gathered:
        yield (
            ("zero.hierarchical", "zero.keep_gathered"),
            "zero.hierarchical gathers parameters inside the node for backward, but with zero.keep_gathered they stay "
            "gathered",
            "leave zero.keep_gathered out",
        )
    for key in ("keep_gathered", "hierarchical"):
        if zero.replicate != "none" and getattr(zero, key):
            yield (
                ("zero.replicate", f"zero.{key}"),
                f"zero.replicate: {zero.replicate} and zero.{key} are alternatives that both send less between nodes",
                f"leave zero.{key} out",
            )
    if precision.master == "split" and compute == "fp16":
        yield (
            ("precision.master", "precision.compute"),
            "precision.master: split stores the low bits of fp32 masters of bf16 parameters; fp16 is not supported",
            "set precision.compute to bf16",
        )
    if precision.master == "split" and config.optimizer.name == "muon":
        yield (
            ("precision.master", "optimizer.name"),
            "precision.master: split requires adamw, adam, sgd or lion, whose updates are kernels",
            "set precision.master to fp32",
        )
    if precision.moments == "int8" and config.optimizer.name not in ("adam", "adamw"):
        yield (
            ("precision.moments", "optimizer.name"),
            "precision.moments: int8 requires adam or adamw",
            "leave precision.moments out",
        )


def _in_backward(config: Config, compute: str, accumulates: bool) -> Iterator[Contradiction]:
    """Yield contradictions of updates in backward (``precision.gradients: in_backward``)."""
    zero, precision = config.zero, config.precision
    if precision.gradients != "in_backward":
        return
    if compute == "fp16":
        yield (
            ("precision.gradients", "precision.compute"),
            "precision.gradients: in_backward updates a unit before it is known if all other gradients are finite, "
            "which fp16's loss scale needs",
            "set precision.compute to bf16",
        )
    if zero.stage == 0:
        yield (
            ("precision.gradients", "zero.stage"),
            "precision.gradients: in_backward updates a unit on the rank that owns its reduced gradient; at stage 0 "
            "every rank owns all gradients",
            "set zero.stage to 1",
        )
    if zero.offload.gradients != "auto":
        yield (
            ("precision.gradients", "zero.offload.gradients"),
            "under precision.gradients: in_backward no gradients are stored",
            "leave zero.offload.gradients out",
        )
    if accumulates:
        yield (
            ("precision.gradients", "batch.accumulate"),
            "precision.gradients: in_backward updates the parameters in every backward, so gradients of several "
            "micro-batches cannot accumulate",
            "set precision.gradients to fp32, or batch.accumulate to 1",
        )


def _axes(config: Config) -> Iterator[Contradiction]:
    parallel = config.parallel
    if parallel.pipeline == 1:
        return
    if config.precision.gradients == "in_backward":
        yield (
            ("precision.gradients", "parallel.pipeline"),
            "precision.gradients: in_backward updates a stage's parameters in the backward of a micro-batch, while "
            "other micro-batches of the step still use them",
            "set precision.gradients to fp32",
        )
    is_interleaved = parallel.schedule == "interleaved"
    if is_interleaved != (parallel.chunks > 1):
        problem = "parallel.schedule: interleaved has several groups of layers on each pipeline rank, other schedules "
        problem += "have one"
        fix = "set parallel.chunks: 2" if is_interleaved else "set parallel.schedule: interleaved"
        yield ("parallel.schedule", "parallel.chunks"), problem, fix


def _activations(config: Config) -> Iterator[Contradiction]:
    settings, parallel = config.activations, config.parallel
    for key, what in (
        ("offload", "offloads the inputs of recomputed modules"),
        ("partition", "shards the inputs of recomputed modules"),
        ("keep_bytes", "exempts modules from recomputation"),
    ):
        if settings.checkpoint == "none" and getattr(settings, key) != getattr(Config().activations, key):
            yield (
                (f"activations.{key}", "activations.checkpoint"),
                f"activations.{key} {what}, but no modules are recomputed",
                "set activations.checkpoint to units",
            )
    if settings.partition and parallel.tensor == parallel.sequence == 1:
        yield (
            ("activations.partition", "parallel.tensor"),
            "activations.partition shards saved inputs over the tensor ranks, which have equal ones, but there is one "
            "tensor rank",
            "leave activations.partition out, or set parallel.tensor above 1",
        )


def _compile(config: Config) -> Iterator[Contradiction]:
    activations = config.activations
    for key in ("offload", "partition", "keep_bytes"):
        if config.compile.modules in ("units", "model") and getattr(activations, key) != getattr(
            Config().activations, key
        ):
            yield (
                (f"activations.{key}", "compile.modules"),
                f"activations.{key} does not apply to compiled modules, whose recomputation is part of their graph",
                f"leave activations.{key} or compile.modules out",
            )
    if config.compile.modules != "model":
        return
    per_unit = "set compile.modules to units"
    if config.zero.stage == 3:
        yield (
            ("compile.modules", "zero.stage"),
            "compile.modules: model compiles one region, but stage 3 gathers the parameters unit by unit",
            per_unit,
        )
    if config.parallel.pipeline > 1:
        yield (
            ("compile.modules", "parallel.pipeline"),
            "compile.modules: model compiles one region, but a pipeline's rank runs groups of layers one at a time",
            per_unit,
        )
    if config.loss.tiled != "none":
        yield (
            ("compile.modules", "loss.tiled"),
            "compile.modules: model compiles the loss together with full logits, which loss.tiled avoids",
            per_unit,
        )


def _training(config: Config) -> Iterator[Contradiction]:
    optimizer = config.optimizer
    if config.precision.nonfinite == "rewind" and config.checkpoint.dir is None:
        yield (
            ("precision.nonfinite", "checkpoint.dir"),
            "precision.nonfinite: rewind loads the newest checkpoint, but none are saved",
            "set checkpoint.dir and checkpoint.every_steps",
        )
    if config.checkpoint.every_steps is not None and config.checkpoint.dir is None:
        yield (
            ("checkpoint.every_steps", "checkpoint.dir"),
            "checkpoint.every_steps needs a folder to save into",
            "set checkpoint.dir",
        )
    if optimizer.name == "sgd" and optimizer.betas != Config().optimizer.betas:
        yield (
            ("optimizer.betas", "optimizer.name"),
            "optimizer.betas has no effect with sgd, which has a momentum",
            f"write optimizer.momentum: {optimizer.betas[0]} in place of optimizer.betas",
        )
    yield from _schedule(config)


def _attention(config: Config) -> Iterator[Contradiction]:
    attention = config.attention
    if attention.packed and attention.pattern != "dense":
        yield (
            ("attention.packed", "attention.pattern"),
            "attention.packed requires the pattern dense; all other patterns always separate documents by position_ids",
            "leave attention.packed out",
        )


def _schedule(config: Config) -> Iterator[Contradiction]:
    schedule = config.schedule
    if schedule.name != "constant" and schedule.total_steps is None:
        yield (
            ("schedule.name", "schedule.total_steps"),
            f"a {schedule.name} schedule needs its number of steps",
            "set schedule.total_steps to the number of optimizer steps of the run",
        )
    for key, steps, what in (
        ("schedule.warmup_steps", schedule.warmup_steps, "the warm-up"),
        ("schedule.decay_steps", schedule.decay_steps or 0, "the decay"),
    ):
        if schedule.total_steps is not None and steps > schedule.total_steps:
            yield (
                (key, "schedule.total_steps"),
                f"{what} is longer than the schedule",
                f"set {key} to at most {schedule.total_steps}",
            )
    if schedule.initial_steps and schedule.initial_lr is None:
        yield (
            ("schedule.initial_steps", "schedule.initial_lr"),
            "schedule.initial_steps are steps at schedule.initial_lr, which is not given",
            "set schedule.initial_lr, or leave schedule.initial_steps out",
        )
    highest = "optimizer.lr" if schedule.max_lr is None else "schedule.max_lr"
    for key, rate, which in (
        ("schedule.min_lr", schedule.min_lr, "lowest"),
        ("schedule.initial_lr", schedule.initial_lr or 0.0, "first"),
    ):
        if rate > setting(config, highest):
            yield (
                (key, highest),
                f"the schedule's {which} learning rate is above its highest",
                f"set {key} to at most {setting(config, highest)}",
            )


def idle_settings(config: Config, compute: str) -> Iterator[str]:
    """Yield ``ignored: key (reason)`` for each setting without effect."""
    offload, precision, schedule = config.zero.offload, config.precision, config.schedule
    may_use_disk = {"disk", "auto"} & {offload.parameters, offload.optimizer} or "disk" in (
        offload.gradients,
        config.activations.offload,
    )
    finds_its_scale = compute == "fp16" and precision.loss_scale == "dynamic"
    if config.parallel.tensor_rules and config.parallel.tensor == 1:
        yield "ignored: parallel.tensor_rules (parallel.tensor is 1)"
    for key in ("schedule", "chunks", "cut"):
        if config.parallel.pipeline == 1 and getattr(config.parallel, key) != getattr(Config().parallel, key):
            yield f"ignored: parallel.{key} (parallel.pipeline is 1)"
    if config.activations.partition and config.parallel.tensor == 1:
        yield "ignored: activations.partition (with parallel.sequence each rank has only its own positions)"
    if precision.master == "split" and (compute == "fp32" or precision.mode == "autocast"):
        yield "ignored: precision.master (fp32 parameters are their own master weights)"
    if precision.nonfinite != "skip" and finds_its_scale:
        yield "ignored: precision.nonfinite (the dynamic loss scale of fp16 skips these updates)"
    if offload.path is not None and not may_use_disk:
        yield "ignored: zero.offload.path (nothing is offloaded to disk)"
    for key in ("keep_fp32", "mode", "outputs"):
        if compute == "fp32" and getattr(precision, key) != getattr(Config().precision, key):
            yield f"ignored: precision.{key} (all modules compute in fp32)"
    is_share = config.optimizer.name == "onebit_adam" and config.communication.warmup_steps == "auto"
    ends = schedule.name != "constant" or is_share or config.communication.every is not None
    if schedule.total_steps is not None and not ends:
        yield "ignored: schedule.total_steps (a constant schedule has no end)"
    if schedule.name == "constant" and schedule.decay_steps is not None:
        yield "ignored: schedule.decay_steps (a constant schedule does not decay)"
    for key in ("min_lr", "min_ratio"):
        if schedule.name == "constant" and getattr(schedule, key) > 0:
            yield f"ignored: schedule.{key} (a constant schedule stays at optimizer.lr)"
    if schedule.warmup_steps == 0 and schedule.warmup != "linear":
        yield "ignored: schedule.warmup (there are no warmup_steps)"
    if schedule.warmup_steps == schedule.initial_steps == 0 and schedule.initial_lr is not None:
        yield "ignored: schedule.initial_lr (there are no warmup_steps)"
