"""Conversion of DeepSpeed's configuration (``ds_config.json``, version 0.19 and older) into partita's."""

from collections.abc import Mapping
from math import ldexp
from pathlib import Path, PurePath
from typing import Any, cast, get_args

from partita.config.converted import Conversion, Converted, KeyClass
from partita.config.deepspeed_keys import AUTOCAST, BF16, FP16, MEANT, OFFLOAD_OPTIMIZER, OFFLOAD_PARAM, RULES, ZERO
from partita.config.deepspeed_keys import OPTIMIZER as OPTIMIZER_PARAMS
from partita.config.deepspeed_keys import SCHEDULER as SCHEDULER_PARAMS
from partita.config.load import read_text
from partita.config.messages import shown
from partita.config.plain_values import parse_hjson, parse_yaml
from partita.config.schema import SinkName
from partita.config.write import YAML
from partita.errors import ConfigError

# DeepSpeed's defaults of missing keys.
_CLIP, _LOSS_SCALE_WINDOW, _WARMUP_STEPS, _DECAYED_FROM, _COSINE_LEAST = 1.0, 1000, 1000, 1e-3, 1e-4
_SCHEDULED = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
_TIERS = {"none": "none", "cpu": "host", "nvme": "disk"}
_OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "sgd": "sgd", "lion": "lion", "muon": "muon"}
# Settings of DeepSpeed's Muon: where they are in partita's section `optimizer`, and DeepSpeed's defaults.
_MUON = {"betas": ("betas", (0.9, 0.95)), "eps": ("eps", 1e-10), "momentum": ("muon.momentum", 0.95)}
_MUON_LR, _ADAM_LR = 0.02, 3e-4
# Optimizers with compressed communication, whose settings have other names in partita's config.
_COMPRESSED = ("onebitadam", "zerooneadam", "onebitlamb")
_CURVES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_DTYPES = {
    name: short
    for short, names in (
        ("fp32", ("fp32", "float32", "float")),
        ("bf16", ("bf16", "bfloat16")),
        ("fp16", ("fp16", "float16", "half")),
    )
    for name in (*names, *(f"torch.{name}" for name in names))
}


def read(
    source: str | Path | Mapping[str, object],
    ranks: int,
    ranks_per_node: int | None = None,
    arguments: Mapping[str, object] | None = None,
) -> Converted:
    """Convert a configuration of DeepSpeed into partita's.

    Args:
        source: the path of a file (JSON, in which comments and trailing commas are allowed), or a mapping.
        ranks: the number of data-parallel ranks.
        ranks_per_node: the number of these on each node (None: all are on one).
        arguments: the known ``TrainingArguments`` of the trainer, by name. They replace ``"auto"``; values that are not
            known yet are omitted, because the trainer sets them later. None: there is no trainer, and ``"auto"`` is an
            error.

    Raises:
        ConfigError: the source cannot be read, or keys are not available; the message lists each key with its remedy.
    """
    name, data = load(source)
    conversion = Conversion(name, _in_sections(data), RULES, MEANT)
    by_trainer = arguments is not None
    conversion.fill(_trained_with(arguments or {}, ranks), refuse=not by_trainer)
    compute = _precision(conversion, by_trainer=by_trainer)
    _gradients(conversion, compute)
    _batch(conversion, by_trainer=by_trainer)
    stage = _zero(conversion, compute, ranks_per_node or ranks)
    offload(conversion, stage, OFFLOAD_OPTIMIZER, OFFLOAD_PARAM)
    _optimizer(conversion, by_trainer=by_trainer)
    _schedule(conversion)
    _monitors(conversion, by_trainer=by_trainer)
    return conversion.finish()


def load(source: str | Path | Mapping[str, object]) -> tuple[str, Mapping[str, object]]:
    """Return a source's name for messages, and its content.

    Raises:
        ConfigError: the source cannot be read, or has no sections.
    """
    name, data = "the given mapping", cast("object", source)
    if isinstance(source, str | Path):
        name, text = read_text(Path(source))
        parser = parse_yaml if Path(source).suffix.lower() in YAML else parse_hjson
        data, _ = parser(text, name)
    if not isinstance(data, Mapping):
        raise ConfigError(f"{name}: expected sections (key: value) at the top level; got {shown(data)}")
    return name, data


def _in_sections(data: Mapping[str, object]) -> dict[str, object]:
    """Return the data with a section in place of each boolean that abbreviates one."""
    sections = dict(data)
    for key in ("fp16", "bf16", "bfloat16"):
        if isinstance(data.get(key), bool) or data.get(key) == "auto":
            sections[key] = {"enabled": data[key]}
    if isinstance(zero := data.get("zero_optimization"), bool):
        sections["zero_optimization"] = {"stage": int(zero)}
    return sections


def _trained_with(arguments: Mapping[str, object], ranks: int) -> dict[str, object]:
    """Return the keys that may be ``"auto"``, with values from a trainer's arguments (None: not known)."""
    get = arguments.get
    micro, accumulate = get("per_device_train_batch_size"), get("gradient_accumulation_steps")
    known = isinstance(micro, int) and isinstance(accumulate, int)
    betas = [get("adam_beta1"), get("adam_beta2")]
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulate,
        "train_batch_size": micro * accumulate * ranks if known else None,  # type: ignore[operator]
        "gradient_clipping": get("max_grad_norm"),
        f"{FP16}enabled": get("fp16"),
        f"{BF16}enabled": get("bf16"),
        "bfloat16.enabled": get("bf16"),
        f"{OPTIMIZER_PARAMS}lr": get("learning_rate"),
        f"{OPTIMIZER_PARAMS}betas": None if None in betas else betas,
        f"{OPTIMIZER_PARAMS}eps": get("adam_epsilon"),
        f"{OPTIMIZER_PARAMS}weight_decay": get("weight_decay"),
        # The trainer has its own schedule.
        **dict.fromkeys((f"{SCHEDULER_PARAMS}{name}" for name in _SCHEDULED), None),
    }


# ------------------------------------------------------------------------------------------------- batch and precision


def _batch(conversion: Conversion, *, by_trainer: bool) -> None:
    for key, target in (
        ("train_micro_batch_size_per_gpu", "batch.micro"),
        ("gradient_accumulation_steps", "batch.accumulate"),
        ("train_batch_size", "batch.total"),
        ("sequence_parallel_size", "parallel.sequence"),
        ("pipeline.stages", "parallel.pipeline"),
    ):
        if key in conversion:
            conversion.set(target, conversion.value(key), key)
    _check_batch(conversion)
    if conversion.number("tensor_parallel.autotp_size", 0) > 0:
        conversion.set(
            "parallel.tensor", conversion.value("tensor_parallel.autotp_size"), "tensor_parallel.autotp_size"
        )
    key = "gradient_clipping"
    norm = conversion.number(key, _CLIP)
    if key in conversion:
        conversion.set("clip_grad_norm", norm or None, key)
    elif not by_trainer:
        conversion.set("clip_grad_norm", _CLIP, key)


def _check_batch(conversion: Conversion) -> None:
    """Refuse a batch that no number of data-parallel ranks has. The engine compares it with the number that it has."""
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    sizes: list[Any] = [conversion.value(key) for key in keys]
    total, micro, accumulate = sizes
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return
    samples = micro * accumulate
    if total % samples:
        conversion.refuse(
            keys[0],
            f"{total} is not a multiple of {keys[1]} {micro} x {keys[2]} {accumulate} = {samples}",
            f"leave it out, or write {samples} x the number of data-parallel ranks",
        )


def _precision(conversion: Conversion, *, by_trainer: bool) -> str | None:
    """Set the compute dtype, and return it; None if a trainer sets it."""
    switches = (f"{FP16}enabled", f"{BF16}enabled", "bfloat16.enabled")
    enabled = [key for key in switches if conversion.flag(key)]
    compute: str | None = "fp32" if not enabled else "fp16" if enabled[0] == switches[0] else "bf16"
    if compute == "fp16" and len(enabled) > 1:
        conversion.refuse(enabled[1], "fp16 is enabled, too", "enable one of them")
    if conversion.flag(f"{AUTOCAST}enabled"):
        return _autocast(conversion, enabled)
    if enabled:
        conversion.set("precision.compute", compute, enabled[0])
        conversion.set("precision.mode", "cast", enabled[0])
        conversion.set("precision.outputs", "compute", enabled[0])
    elif by_trainer and (set(switches) & set(conversion.unresolved) or not any(key in conversion for key in switches)):
        compute = None
    else:
        conversion.set("precision.compute", compute, switches[1], "neither fp16 nor bf16 is enabled")
    if compute == "fp16":
        _loss_scale(conversion)
    elif f"{FP16}enabled" in conversion.unresolved:
        conversion.ignore_section(FP16, "the trainer's fp16 settings apply")
    return compute


def _autocast(conversion: Conversion, enabled: list[str]) -> str:
    """Set the compute dtype of fp32 parameters under autocast, and return it."""
    if enabled:
        conversion.refuse(enabled[0], "torch_autocast is enabled, too", "enable one of them")
    key = f"{AUTOCAST}dtype"
    dtype = _DTYPES.get((conversion.text(key) or "bfloat16").lower())
    if dtype not in ("bf16", "fp16"):
        conversion.refuse(key, "expected bfloat16 or float16", "write one of them")
    compute = dtype or "bf16"
    conversion.set("precision.compute", compute, key)
    conversion.set("precision.mode", "autocast", f"{AUTOCAST}enabled")
    return compute


def _gradients(conversion: Conversion, compute: str | None) -> None:
    """Set the dtype in which gradients are stored and communicated."""
    dtypes = {}
    for key in ("data_types.grad_accum_dtype", "communication_data_type", "data_types.param_dtype"):
        if (text := conversion.text(key)) and (dtype := _DTYPES.get(text.lower())) is None:
            conversion.refuse(key, f"expected fp32, bf16 or fp16; got {shown(text)}", "write one of them")
        elif text:
            dtypes[key] = dtype
    if dtypes.pop("data_types.param_dtype", "") == compute:
        conversion.add_notice(KeyClass.IGNORED, "data_types.param_dtype", "it is the compute dtype")
    for key, dtype in dtypes.items():
        widest = "fp32" if "fp32" in dtypes.values() else dtype
        text = "" if dtype == widest else "gradients are stored and communicated in one dtype, the wider"
        conversion.set("precision.gradients", widest, key, text)


def _loss_scale(conversion: Conversion) -> None:
    key = f"{FP16}loss_scale"
    if fixed := conversion.number(key, 0):
        conversion.set("precision.loss_scale", fixed, key)
        return
    if key in conversion:
        conversion.set("precision.loss_scale", "dynamic", key)
    key = f"{FP16}initial_scale_power"
    if key in conversion:
        conversion.set("precision.initial_loss_scale", ldexp(1.0, min(1000, int(conversion.number(key, 16)))), key)
    key = f"{FP16}loss_scale_window"
    conversion.set("precision.loss_scale_window", conversion.value(key, _LOSS_SCALE_WINDOW), key)


# ------------------------------------------------------------------------------------------------ sharding and offload


def _zero(conversion: Conversion, compute: str | None, ranks_per_node: int) -> int:
    key = f"{ZERO}stage"
    stage = conversion.number(key, 0)
    conversion.set("zero.stage", stage, key)
    if stage != 3:
        return int(stage)
    for key in (f"{ZERO}prefetch_bucket_size", f"{ZERO}stage3_prefetch_bucket_size"):
        if key in conversion:
            elements = int(conversion.number(key, 0))
            size = 4 if compute == "fp32" else 2
            conversion.set("zero.prefetch_bytes", elements * size, key, f"{elements} elements of {size} bytes")
    for name, target, value in (
        ("zero_hpz_partition_size", "zero.hierarchical", True),
        ("mics_shard_size", "zero.replicate", "nodes"),
    ):
        if (ranks := conversion.number(ZERO + name, 1)) > 1:
            text = "" if ranks == ranks_per_node else f"over the {ranks_per_node} ranks of a node, not over {ranks:g}"
            conversion.set(target, value, ZERO + name, text)
    between = "parameter deltas, between nodes" if conversion.number(f"{ZERO}zero_hpz_partition_size", 1) > 1 else ""
    for name, target, codec, text in (  # as in ZeRO++: blocks of 8 and of 4 bits
        ("zero_quantized_weights", "communication.parameters", "int8", between),
        ("zero_quantized_gradients", "communication.gradients", "int4", ""),
    ):
        if conversion.flag(ZERO + name):
            conversion.set(target, codec, ZERO + name, text)
    return int(stage)


def offload(conversion: Conversion, stage: float, optimizer: str, param: str) -> None:
    """Set the offload tiers. DeepSpeed offloads parameters only at stage 3, optimizer states from stage 1.

    Args:
        optimizer: prefix of the keys of optimizer states.
        param: prefix of the keys of parameters.
    """
    folder = None
    for prefix, old, target, least in (
        (optimizer, f"{ZERO}cpu_offload", "zero.offload.optimizer", 1),
        (param, f"{ZERO}cpu_offload_param", "zero.offload.parameters", 3),
    ):
        if stage < least:
            continue
        if conversion.flag(old):
            conversion.set(target, "host", old)
        key = f"{prefix}device"
        device = conversion.text(key)
        if not device:
            continue
        tier = _TIERS.get(device.lower())
        if tier is None:
            conversion.refuse(key, f"expected none, cpu or nvme; got {shown(device)}", "write one of them")
            continue
        conversion.set(target, tier, key)
        key = f"{prefix}nvme_path"
        path = conversion.value(key)
        if tier != "disk" or path is None:
            continue
        if folder in (None, path):
            conversion.set("zero.offload.path", path, key)
            folder = path
        else:
            conversion.add_notice(KeyClass.WARNING, key, f"there is one folder for all states: {shown(folder)}")


# --------------------------------------------------------------------------------------------- optimizer and schedule


def _optimizer(conversion: Conversion, *, by_trainer: bool) -> None:
    key = "optimizer.type"
    kind = conversion.text(key)
    name = _OPTIMIZERS.get(kind.lower())
    if not kind:
        return conversion.ignore_section("optimizer.", "no type is given: the optimizer that you pass is used")
    if name is None:
        fix = "use AdamW, SGD or Lion, or build it and pass it: partita.initialize(model, config, optimizer=...)"
        if kind.lower() in _COMPRESSED:
            fix = "set optimizer.name: onebit_adam in a config of partita (docs/wires.md)"
        conversion.ignore_section("optimizer.", "it belongs to the optimizer")
        return conversion.refuse(key, f"{shown(kind)} is not available", fix)
    mode = f"{OPTIMIZER_PARAMS}adam_w_mode"
    if kind.lower() == "adam" and not conversion.flag(mode, True):
        name = "adam"
        conversion.set("optimizer.name", name, mode)
    conversion.set("optimizer.name", name, key)
    if name == "muon":
        _muon(conversion, by_trainer=by_trainer)
    else:
        for param in ("lr", "betas", "eps", "momentum"):
            if (own := f"{OPTIMIZER_PARAMS}{param}") in conversion:
                conversion.set(f"optimizer.{param}", conversion.value(own), own)
    key = f"{OPTIMIZER_PARAMS}weight_decay"
    if key in conversion or not by_trainer:
        conversion.set("optimizer.weight_decay", conversion.value(key, 0.0), key)
    return None


def _muon(conversion: Conversion, *, by_trainer: bool) -> None:
    """Set the settings of Muon, and of the AdamW for parameters that are no matrices."""
    _muon_rates(conversion, by_trainer=by_trainer)
    for param, (target, default) in _MUON.items():
        key = f"{OPTIMIZER_PARAMS}{param}"
        if key in conversion or not by_trainer:
            conversion.set(f"optimizer.{target}", conversion.value(key, default), key)
    conversion.set("optimizer.muon.scale", "original", "optimizer.type")


def _muon_rates(conversion: Conversion, *, by_trainer: bool) -> None:
    """Set the learning rates of matrices (``muon_lr``) and of other parameters (``adam_lr``).

    ``lr`` is the rate of those that have none of their own.
    """
    shared, matrices, others = (f"{OPTIMIZER_PARAMS}{name}" for name in ("lr", "muon_lr", "adam_lr"))
    matrices = matrices if matrices in conversion else shared
    others = others if others in conversion else shared
    if matrices in conversion or not by_trainer:
        conversion.set("optimizer.lr", conversion.value(matrices, _MUON_LR), matrices)
    is_shared = others == matrices
    if by_trainer and not is_shared and others in conversion.unresolved:
        problem = '"auto" is not known yet, and muon_lr replaces it for matrices only'
        conversion.refuse(others, problem, "write adam_lr, the rate of the other parameters")
    elif not is_shared or (others not in conversion and not by_trainer):
        conversion.set("optimizer.muon.adamw_lr", conversion.value(others, _ADAM_LR), others)


def _schedule(conversion: Conversion) -> None:
    """Convert the scheduler.

    DeepSpeed's schedulers count from the second optimizer step; the rate of the first is the lowest of the warm-up.
    Only the decay of ``WarmupCosineLR`` counts from the first, so that it begins a step before the warm-up ends.
    """
    key = "scheduler.type"
    kind = conversion.text(key)
    if not kind:
        return conversion.ignore_section("scheduler.", "no type is given: the scheduler that you pass is used")
    if kind not in _CURVES:
        fix = f"use one of {', '.join(_CURVES)}, or build it and pass it: partita.initialize(..., scheduler=...)"
        conversion.ignore_section("scheduler.", "it belongs to the schedule")
        return conversion.refuse(key, f"{shown(kind)} is not available", fix)
    unresolved = [known for known in conversion.unresolved if known.startswith(SCHEDULER_PARAMS)]
    if unresolved:
        conversion.add_notice(KeyClass.WARNING, key, "the trainer's own schedule is used instead (lr_scheduler_type)")
        return conversion.ignore_section(
            "scheduler.", f"the trainer's schedule is used, because {', '.join(unresolved)} are auto"
        )
    warmup = _warmup(conversion)
    if kind == "WarmupCosineLR":
        _cosine_rates(conversion)
    else:
        _absolute_rates(conversion, kind)
    if kind != "WarmupLR":
        key = f"{SCHEDULER_PARAMS}total_num_steps"
        if key not in conversion:
            fix = "set it to the number of optimizer steps of the run"
            return conversion.refuse(key, f"{kind} needs its number of steps", fix)
        total = int(conversion.number(key, 1))
        cosine = kind == "WarmupCosineLR"
        conversion.set("schedule.total_steps", total if cosine else total + 1, key)
        if cosine or total == warmup:
            conversion.set("schedule.decay_steps", max(1, total - warmup), key)
    return conversion.set("schedule.name", _CURVES[kind], "scheduler.type")


def _warmup(conversion: Conversion) -> int:
    """Set the warm-up, and return its length in steps: at least 2, as in DeepSpeed."""
    key = f"{SCHEDULER_PARAMS}warmup_num_steps"
    asked = int(conversion.number(key, _WARMUP_STEPS))
    if asked < 0:
        conversion.refuse(key, f"expected at least 0; got {asked}", "set it to the optimizer steps of the warm-up")
    steps = max(2, asked)
    conversion.set("schedule.initial_steps", 1, key)
    conversion.set("schedule.warmup_steps", steps, key, "" if steps == asked else "DeepSpeed's minimum")
    key = f"{SCHEDULER_PARAMS}warmup_type"
    kind = conversion.text(key) or "log"
    if kind not in ("log", "linear"):
        conversion.refuse(key, f"expected log or linear; got {shown(kind)}", "write one of them")
    conversion.set("schedule.warmup", kind, key)
    return steps


def _monitors(conversion: Conversion, *, by_trainer: bool) -> None:
    """Convert monitors to sinks of metrics. The CSV monitor's files become ``metrics.jsonl``."""
    enabled = [name for name in ("tensorboard", "csv_monitor", "wandb") if conversion.flag(f"{name}.enabled")]
    if by_trainer:
        for name in enabled:
            conversion.ignore_section(f"{name}.", "the trainer reports metrics (report_to)")
        return
    sinks = [name for name in enabled if name in get_args(SinkName)]
    folder = ""
    for name in enabled:
        path, job = f"{name}.output_path", f"{name}.job_name"
        own = str(PurePath(conversion.text(path) or "runs", conversion.text(job)))
        folder = folder or own
        for key in (key for key in (f"{name}.enabled", path, job) if key in conversion):
            if own != folder and key in (path, job):
                conversion.add_notice(KeyClass.WARNING, key, f"there is one folder for all metrics: {shown(folder)}")
            else:
                conversion.set("metrics.dir", folder, key)
        if name in sinks:
            conversion.set("metrics.sinks", sinks, f"{name}.enabled", "values come from engine.log")


def _absolute_rates(conversion: Conversion, kind: str) -> None:
    key = f"{SCHEDULER_PARAMS}warmup_min_lr"
    conversion.set("schedule.initial_lr", conversion.number(key, 0.0), key)
    key = f"{SCHEDULER_PARAMS}warmup_max_lr"
    if key in conversion:
        conversion.set("schedule.max_lr", conversion.value(key), key, "it takes precedence over optimizer.lr")
    elif kind == "WarmupDecayLR":
        conversion.set("schedule.max_lr", _DECAYED_FROM, key, "its default, regardless of the optimizer's lr")


def _cosine_rates(conversion: Conversion) -> None:
    """Set the learning rates of a cosine schedule, which are relative to the optimizer's rate."""
    key = f"{SCHEDULER_PARAMS}cos_min_ratio"
    conversion.set("schedule.min_ratio", conversion.value(key, _COSINE_LEAST), key)
    key = f"{SCHEDULER_PARAMS}warmup_min_ratio"
    share = conversion.number(key, 0.0)
    if share and f"{OPTIMIZER_PARAMS}lr" not in conversion:
        fix = "set the optimizer's lr, or set warmup_min_ratio to 0"
        return conversion.refuse(key, "it is relative to the optimizer's lr, which is not given", fix)
    conversion.set("schedule.initial_lr", share * conversion.number(f"{OPTIMIZER_PARAMS}lr", 0.0), key)
    if share:
        conversion.add_notice(KeyClass.WARNING, key, "the first step has this rate, too; in DeepSpeed its rate is 0")
    return None
