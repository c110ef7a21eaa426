"""Conversion of accelerate's configuration (a YAML of ``accelerate config``) and ``TrainingArguments(fsdp=)``."""

from collections.abc import Mapping
from pathlib import Path

from partita.config import deepspeed
from partita.config.converted import Conversion, Converted, KeyClass, Rule, rules
from partita.config.load import read_sections
from partita.config.messages import shown

_MAPPED, _IGNORED, _WARNING, _ERROR = KeyClass.MAPPED, KeyClass.IGNORED, KeyClass.WARNING, KeyClass.ERROR
_SIZED = "partita chooses and sizes this itself"
_LAUNCHED = "the launcher sets this: partita run, torchrun or srun"
_SAVED = "partita's checkpoints need no settings here"
_COMPUTE = {"no": "fp32", "fp16": "fp16", "bf16": "bf16"}
# Spellings of FSDP's strategies: names, the numbers of FSDP1, and the truth values of FSDP2.
_STRATEGIES: dict[str, tuple[str, ...]] = {
    "full_shard": ("full_shard", "1", "true"),
    "shard_grad_op": ("shard_grad_op", "2", "false"),
    "no_shard": ("no_shard", "3", "no_reshard"),
    "hybrid_shard": ("hybrid_shard", "4", "hybrid_shard_zero2", "5"),
}
_ZERO: dict[str, dict[str, object]] = {
    "full_shard": {"stage": 3},
    "shard_grad_op": {"stage": 3, "keep_gathered": True},
    "no_shard": {"stage": 0},
    "hybrid_shard": {"stage": 3, "replicate": "nodes"},
}
FSDP, DEEPSPEED, PARALLEL = "fsdp_config.fsdp_", "deepspeed_config.", "parallelism_config.parallelism_config_"

_FSDP_RULES = {
    **rules(_MAPPED, "", "sharding_strategy reshard_after_forward offload_params cpu_offload", FSDP),
    **rules(_MAPPED, "", "transformer_layer_cls_to_wrap activation_checkpointing", FSDP),
    **rules(_IGNORED, _SIZED, "version auto_wrap_policy min_num_params backward_prefetch forward_prefetch", FSDP),
    **rules(_IGNORED, _SIZED, "backward_prefetch_policy limit_all_gathers use_orig_params", FSDP),
    **rules(_IGNORED, _SIZED, "sync_module_states cpu_ram_efficient_loading", FSDP),
    **rules(_IGNORED, _SAVED, "state_dict_type", FSDP),
    f"{FSDP}activation_checkpointing_offload": Rule(_WARNING, "set activations.offload: host in partita's config"),
    f"{FSDP}ignored_modules": Rule(_ERROR, "leave it out, and freeze the parameters that must not change"),
    f"{FSDP}mixed_precision_policy": Rule(_ERROR, "leave it out, and set mixed_precision"),
    **rules(_ERROR, "leave it out: partita runs on CPUs and GPUs", "xla xla_fsdp_v2 xla_fsdp_grad_ckpt", FSDP),
    f"{FSDP}xla_fsdp_settings": Rule(_ERROR, "leave it out: partita runs on CPUs and GPUs"),
}
RULES: dict[str, Rule] = {
    **rules(_MAPPED, "", "mixed_precision distributed_type num_processes"),
    **rules(_MAPPED, "", "deepspeed_config_file zero_stage gradient_accumulation_steps gradient_clipping", DEEPSPEED),
    **rules(_MAPPED, "", "offload_optimizer_device offload_optimizer_nvme_path", DEEPSPEED),
    **rules(_MAPPED, "", "offload_param_device offload_param_nvme_path", DEEPSPEED),
    **rules(_MAPPED, "", "dp_replicate_size tp_size cp_size sp_size", PARALLEL),
    **_FSDP_RULES,
    **rules(_IGNORED, _LAUNCHED, "machine_rank num_machines gpu_ids main_process_ip main_process_port rdzv_backend"),
    **rules(_IGNORED, _LAUNCHED, "same_network main_training_function enable_cpu_affinity mpirun_config debug use_cpu"),
    **rules(_IGNORED, _LAUNCHED, "num_cpu_threads_per_process ipex_config mpi_config"),
    **rules(_IGNORED, _LAUNCHED, "deepspeed_hostfile deepspeed_multinode_launcher", DEEPSPEED),
    **rules(_IGNORED, _LAUNCHED, "deepspeed_exclusion_filter deepspeed_inclusion_filter", DEEPSPEED),
    **rules(_IGNORED, _SIZED, "zero3_init_flag deepspeed_moe_layer_cls_names", DEEPSPEED),
    **rules(_IGNORED, "exports always gather full weights", "zero3_save_16bit_model", DEEPSPEED),
    **rules(_IGNORED, _SIZED, "dp_shard_size cp_comm_strategy cp_backend sp_backend sp_seq_length", PARALLEL),
    **rules(_IGNORED, _SIZED, "sp_seq_length_is_variable sp_attn_implementation", PARALLEL),
    "dynamo_config": Rule(_WARNING, "compile blocks with torch.compile before they are prepared"),
    "compute_environment": Rule(
        _ERROR, "write LOCAL_MACHINE, and start the script with partita run or torchrun", ("LOCAL_MACHINE",)
    ),
    "downcast_bf16": Rule(_ERROR, "leave it out: partita runs on CPUs and GPUs", ("no", "false")),
    "fp8_config": Rule(_ERROR, "set mixed_precision: bf16"),
    "megatron_lm_config": Rule(_ERROR, "leave it out: only accelerate's FSDP and DeepSpeed settings are converted"),
    **rules(_ERROR, "leave it out: partita runs on CPUs and GPUs", "tpu_use_cluster tpu_use_sudo tpu_env"),
    **rules(_ERROR, "leave it out: partita runs on CPUs and GPUs", "tpu_name tpu_zone tpu_vm command_file commands"),
}


def read(source: str | Path | Mapping[str, object], ranks: int, ranks_per_node: int | None = None) -> Converted:
    """Convert a configuration of accelerate into partita's.

    Values that the trainer sets (``"auto"`` in the DeepSpeed file that it names) are omitted.

    Args:
        source: the path of a YAML or JSON file, or a mapping.
        ranks: the number of data-parallel ranks.
        ranks_per_node: the number of these on each node (None: all are on one).

    Raises:
        ConfigError: the source cannot be read, or keys are not available; the message lists each key with its remedy.
    """
    sections, _ = read_sections(source)
    name = str(source) if isinstance(source, str | Path) else "the given mapping"
    if isinstance(fsdp := sections.get("fsdp_config"), dict):
        sections["fsdp_config"] = _prefixed(fsdp, "fsdp_")
    if isinstance(parallel := sections.get("parallelism_config"), dict):
        sections["parallelism_config"] = _prefixed(parallel, "parallelism_config_")
    conversion = Conversion(name, sections, RULES)
    _precision(conversion)
    _parallelism(conversion, ranks, ranks_per_node)
    named = _distributed(conversion, ranks, ranks_per_node)
    key = "num_processes"
    processes = int(conversion.number(key, 0)) or None
    if key in conversion:
        conversion.add_notice(
            KeyClass.MAPPED, key, f"partita run starts {processes} processes, unless --processes is given"
        )
    converted = conversion.finish(processes)
    return _merge_deepspeed(converted, named) if named else converted


def read_fsdp(fsdp: object, fsdp_config: object, ranks: int, ranks_per_node: int | None = None) -> Converted:
    """Convert ``TrainingArguments(fsdp=, fsdp_config=)`` into a configuration of partita.

    Args:
        fsdp: true, or the words of older versions (``"full_shard auto_wrap offload"``), as text or as a list.
        fsdp_config: a mapping, the path of a JSON file, or None; its keys with or without ``fsdp_``.
        ranks: the number of data-parallel ranks.
        ranks_per_node: the number of these on each node (None: all are on one).

    Raises:
        ConfigError: the file cannot be read, or keys or words are not available; the message lists each.
    """
    sections, _ = read_sections(fsdp_config)
    words = fsdp.split() if isinstance(fsdp, str) else list(fsdp) if isinstance(fsdp, list | tuple) else []
    asked: dict[str, object] = {}
    for word in (str(getattr(word, "value", word)).lower() for word in words):
        if word == "offload":
            asked["fsdp_offload_params"] = True
        elif word not in ("auto_wrap", "true"):
            asked["fsdp_sharding_strategy"] = word
    data = {"fsdp_config": asked | _prefixed(sections, "fsdp_")}
    conversion = Conversion("TrainingArguments(fsdp=, fsdp_config=)", data, RULES)
    _fsdp(conversion)
    return conversion.finish()


def read_parallelism(sizes: Mapping[str, object], ranks: int, ranks_per_node: int | None = None) -> Converted:
    """Convert the sizes of an ``accelerate.ParallelismConfig`` into a configuration of partita.

    Args:
        sizes: the sizes by the names of its fields (``tp_size``).
        ranks: the number of ranks.
        ranks_per_node: the number of these on each node (None: all are on one).
    """
    data = {"parallelism_config": _prefixed(sizes, "parallelism_config_")}
    conversion = Conversion("ParallelismConfig", data, RULES)
    _parallelism(conversion, ranks, ranks_per_node)
    return conversion.finish()


def _parallelism(conversion: Conversion, ranks: int, ranks_per_node: int | None) -> None:
    """Set the degrees of tensor and sequence parallelism, and the replicas of sharded states."""
    for axis, target in (("tp", "parallel.tensor"), ("cp", "parallel.sequence"), ("sp", "parallel.sequence")):
        if conversion.number(key := f"{PARALLEL}{axis}_size", 1) > 1:
            conversion.set(target, conversion.value(key), key)
    if (nodes := conversion.number(key := f"{PARALLEL}dp_replicate_size", 1)) > 1:
        copies = ranks // (ranks_per_node or ranks)
        conversion.set("zero.replicate", "nodes", key, "" if nodes == copies else f"{copies} nodes, not {nodes:g}")


def _prefixed(section: Mapping[str, object], prefix: str) -> dict[str, object]:
    """Return the section with the prefix on every name: accelerate and transformers read names with and without it."""
    return {name if name.startswith(prefix) else prefix + name: value for name, value in section.items()}


def _precision(conversion: Conversion) -> None:
    """Set the compute dtype.

    Without ``mixed_precision``, plain data parallelism computes in fp32, or under autocast in the script's dtype; a
    sharded model computes in the dtype that the script sets.
    """
    key = "mixed_precision"
    mixed = str(conversion.value(key, "no")).lower().replace("false", "no")  # YAML's word no is a truth value
    if mixed not in _COMPUTE:
        conversion.refuse(key, f"{shown(mixed)} is not available", f"write one of {', '.join(_COMPUTE)}")
    elif mixed == "no" and conversion.text("distributed_type").upper() in ("FSDP", "DEEPSPEED"):
        conversion.add_notice(KeyClass.MAPPED, key, "the dtype that the script sets; by default the model's own dtype")
    else:
        conversion.set("precision.compute", _COMPUTE[mixed], key)


def _distributed(conversion: Conversion, ranks: int, ranks_per_node: int | None) -> Converted | None:
    """Set how training states are sharded; return the conversion of a DeepSpeed file, if one is named."""
    key = "distributed_type"
    kind = conversion.text(key).upper()
    named = None
    if kind == "FSDP":
        conversion.add_notice(KeyClass.MAPPED, key, "see fsdp_config")
        _fsdp(conversion)
    elif kind == "DEEPSPEED":
        conversion.add_notice(KeyClass.MAPPED, key, "see deepspeed_config")
        named = _deepspeed(conversion, ranks, ranks_per_node)
    elif kind in ("MEGATRON_LM", "XLA", "TPU"):
        conversion.refuse(key, f"{kind} is not available", "use FSDP, DEEPSPEED or MULTI_GPU")
    elif kind:
        conversion.set("zero.stage", 0, key, "plain data parallelism; stages 1 to 3 give the same numbers")
    return named


def _fsdp(conversion: Conversion) -> None:
    keys = (f"{FSDP}reshard_after_forward", f"{FSDP}sharding_strategy")
    key = next((key for key in keys if key in conversion), keys[0])
    asked = str(conversion.value(key, "full_shard")).lower()
    strategy = next((name for name, words in _STRATEGIES.items() if asked in words), "")
    if not strategy:
        conversion.refuse(key, f"{shown(asked)} is not available", f"write one of {', '.join(_STRATEGIES)}")
    for name, value in _ZERO.get(strategy, {}).items():
        conversion.set(f"zero.{name}", value, key)
    for name in ("offload_params", "cpu_offload"):
        if conversion.flag(f"{FSDP}{name}"):
            conversion.set("zero.offload.optimizer", "host", f"{FSDP}{name}")
            if strategy != "no_shard":
                conversion.set("zero.offload.parameters", "host", f"{FSDP}{name}")
    key = f"{FSDP}transformer_layer_cls_to_wrap"
    classes = conversion.value(key)
    if isinstance(classes, str):
        classes = [part.strip() for part in classes.split(",")]
    if classes:
        conversion.set("zero.units", classes, key)
    if conversion.flag(key := f"{FSDP}activation_checkpointing"):
        conversion.set("activations.checkpoint", "units", key)


def _deepspeed(conversion: Conversion, ranks: int, ranks_per_node: int | None) -> Converted | None:
    key = f"{DEEPSPEED}deepspeed_config_file"
    if file := conversion.text(key):
        conversion.add_notice(KeyClass.MAPPED, key, "this file is read, too")
        return deepspeed.read(file, ranks, ranks_per_node, arguments={})
    key = f"{DEEPSPEED}zero_stage"
    stage = conversion.number(key, 2)
    conversion.set("zero.stage", stage, key)
    for name, target in (("gradient_accumulation_steps", "batch.accumulate"), ("gradient_clipping", "clip_grad_norm")):
        if (key := DEEPSPEED + name) in conversion and conversion.value(key) not in ("auto", "none"):
            conversion.set(target, conversion.number(key, 0) or None, key)
    deepspeed.offload(conversion, stage, f"{DEEPSPEED}offload_optimizer_", f"{DEEPSPEED}offload_param_")
    return None


def _merge_deepspeed(converted: Converted, named: Converted) -> Converted:
    """Merge the DeepSpeed file that is named in ``converted``. It takes precedence key by key, as in accelerate: a
    compute dtype that is missing in it comes from accelerate's file.
    """
    settings = _merged(converted.settings, named.settings)
    return Converted(converted.name, settings, (*converted.notices, *named.notices), converted.processes)


def _merged(sections: Mapping[str, object], over: Mapping[str, object]) -> dict[str, object]:
    """Return ``sections`` with the keys of ``over``, whose values replace those of the same keys in nested sections."""
    merged = dict(sections)
    for key, value in over.items():
        inner = merged.get(key)
        merged[key] = _merged(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
    return merged
