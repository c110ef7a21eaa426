"""Conversion of DeepSpeed's configuration: realistic files, one class for every key, and learning rates of schedules.

``deepspeed/files.yaml`` has files with the shapes of published ones (sections, values that are text, comments, keys at
the wrong place), written anew, each with the settings that it becomes on 4 ranks of one node, or with its error.

``deepspeed/learning_rates.json`` has the rates of the classes of DeepSpeed 0.19.8
(``deepspeed/runtime/lr_schedules.py``). Each was created on ``torch.optim.SGD`` with the rate ``lr``. Then, 50 times,
the rate was read, and ``optimizer.step()`` and ``scheduler.step()`` were called, as in DeepSpeed's engine.
"""

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.config import deepspeed, deepspeed_keys
from partita.config.converted import KeyClass, Rule
from partita.config.deepspeed_keys import RULES
from partita.config.load import load_config
from partita.config.resolve import resolve
from partita.config.schema import Config
from partita.errors import ConfigError
from partita.optim.build import build_schedule

FOLDER = Path(__file__).parent / "deepspeed"
FILES: list[dict[str, Any]] = yaml.safe_load((FOLDER / "files.yaml").read_text())
RATES: list[dict[str, Any]] = json.loads((FOLDER / "learning_rates.json").read_text())

# Keys that DeepSpeed 0.19.8 reads, by section: runtime/{config,constants,precision_config}.py, runtime/zero/{config,
# offload_config,leaf_module_config}.py, runtime/zenflow/zenflow_config.py, runtime/activation_checkpointing/config.py,
# runtime/swap_tensor/constants.py, runtime/model_checkpointing/constants.py, runtime/data_pipeline/constants.py,
# runtime/tensor_parallel/config.py, runtime/lr_schedules.py, comm/config.py, monitor/config.py, profiling/constants.py,
# compile/config.py, utils/config.py, datastates/config.py, autotuning/constants.py, module_inject/auto_ep_config.py,
# arguments of FusedAdam, DeepSpeedCPUAdam, FusedLion and torch's; and keys that it refuses by name as removed.
KEYS = {
    "": "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation "
    "steps_per_print dump_state disable_python_gc disable_allgather communication_data_type "
    "seq_parallel_communication_data_type prescale_gradients gradient_predivide_factor gradient_allreduce_op "
    "gradient_clipping zero_allow_untested_optimizer zero_force_ds_cpu_optimizer wall_clock_breakdown memory_breakdown "
    "use_data_before_expert_parallelism dataloader_drop_last log_level vocabulary_size sequence_parallel_size "
    "weight_quantization nebula compression_training amp quantize_training sparse_gradients eigenvalue "
    "sparse_attention elasticity graph_harvesting curriculum_learning progressive_layer_drop allgather_size",
    "fp16": "enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis "
    "min_loss_scale fp16_master_weights_and_grads",
    "bf16": "enabled immediate_grad_update check_grad_overflow check_overflow bf16_master_weights_and_grads "
    "bf16_optimizer_states",
    "bfloat16": "enabled",
    "torch_autocast": "enabled dtype lower_precision_safe_modules",
    "data_types": "grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules",
    "zero_optimization": "stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce "
    "allgather_partitions allgather_bucket_size overlap_comm compute_grad_norm load_from_fp32_weights "
    "elastic_checkpoint sub_group_size cpu_offload_param cpu_offload_use_pin_memory cpu_offload prefetch_bucket_size "
    "param_persistence_threshold model_persistence_threshold max_live_parameters max_reuse_distance "
    "gather_16bit_weights_on_model_save module_granularity_threshold use_all_reduce_for_fetch_params "
    "allgather_sequential stage3_prefetch_bucket_size stage3_param_persistence_threshold "
    "stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance "
    "stage3_gather_16bit_weights_on_model_save stage3_module_granularity_threshold "
    "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential stage3_gather_fp16_weights_on_model_save "
    "ignore_unused_parameters legacy_stage1 round_robin_gradients parameter_alignment zero_hpz_partition_size "
    "zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients memory_efficient_linear "
    "pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings enable_sanity_checks "
    "save_muon_momentum_buffer_in_memory mics_shard_size mics_hierarchical_params_gather zeropp_loco_param",
    "zero_optimization.offload_param": "device nvme_path buffer_count buffer_size max_in_cpu pin_memory",
    "zero_optimization.offload_optimizer": "device nvme_path buffer_count pin_memory pipeline_read pipeline_write "
    "fast_init ratio super_offload cpuadam_cores_perc",
    "zero_optimization.zenflow": "topk_ratio select_strategy select_interval update_interval overlap_step offload "
    "auto_ratio full_warm_up_rounds pt_reserved_cores_perc steps_per_epoch",
    "zero_optimization.leaf_module": "classes names name_suffixes",
    "optimizer": "type legacy_fusion",
    "optimizer.params": "lr betas eps weight_decay momentum adam_w_mode torch_adam bias_correction amsgrad "
    "set_grad_none fp32_optimizer_states max_grad_norm nesterov dampening foreach fused maximize capturable "
    "differentiable",
    "scheduler": "type",
    "scheduler.params": "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type total_num_steps warmup_min_ratio "
    "cos_min_ratio last_batch_iteration",
    "activation_checkpointing": "partition_activations number_checkpoints contiguous_memory_optimization "
    "synchronize_checkpoint_boundary profile cpu_checkpointing",
    "aio": "block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds",
    "checkpoint": "tag_validation load_universal use_node_local_storage parallel_write checkpoint_serialization writer",
    "comms_logger": "enabled prof_all prof_ops verbose debug",
    "tensorboard": "enabled output_path job_name",
    "csv_monitor": "enabled output_path job_name",
    "wandb": "enabled group team project",
    "comet": "enabled samples_log_interval project workspace api_key experiment_name experiment_key online mode",
    "flops_profiler": "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file",
    "timers": "throughput",
    "autotuning": "enabled fast results_dir exps_dir overwrite start_profile_step end_profile_step metric",
    "compile": "deepcompile autoep_non_moe free_activation offload_activation offload_opt_states double_buffer "
    "symmetric_memory debug_log offload_parameters sync_before_reduce sync_after_reduce",
    "datastates": "host_cache_size",
    "data_efficiency": "enabled seed data_sampling data_routing",
    "hybrid_engine": "enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters "
    "tp_gather_partition_size enable_cuda_graph",
    "pipeline": "stages partition seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned",
    "tensor_parallel": "dtype autotp_size tp_overlap_comm vocab_parallel_lm_head vocab_parallel_ce_backend "
    "tensor_parallel tp injection_policy_tuple partition_config preset_model keep_module_on_host "
    "replace_with_kernel_inject kernel_inject",
    "expert_parallel": "enabled autoep_size preset_model moe_layer_pattern num_experts_attr",
}
ALL_KEYS = [f"{section}.{name}".strip(".") for section, names in KEYS.items() for name in names.split()]

# The config to which a test adds a mapped key, unless the key needs another one to have an effect.
BASE: dict[str, Any] = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
FP16: dict[str, Any] = {"fp16": {"enabled": True}}
ADAM: dict[str, Any] = {"optimizer": {"type": "Adam"}}
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 0.01, "momentum": 0.9}}}
DECAY: dict[str, Any] = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 5000}}}
COSINE: dict[str, Any] = ADAM | {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 5000}}}
DISK: dict[str, Any] = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}}
}
# For each mapped key: a value, the config to which it is added, and the resulting setting with its value.
MAPPED: dict[str, tuple[object, dict[str, Any], str, object]] = {
    "train_batch_size": (64, BASE, "batch.total", 64),
    "train_micro_batch_size_per_gpu": ("4", BASE, "batch.micro", 4),
    "gradient_accumulation_steps": (2.0, BASE, "batch.accumulate", 2),
    "gradient_clipping": (0, BASE, "clip_grad_norm", None),
    "communication_data_type": ("fp16", BASE, "precision.gradients", "fp16"),
    "sequence_parallel_size": (1, BASE, "parallel.sequence", 1),
    "pipeline.stages": (1, BASE, "parallel.pipeline", 1),
    "tensor_parallel.autotp_size": (1, BASE, "parallel.tensor", 1),
    "fp16.enabled": (True, {}, "precision.compute", "fp16"),
    "fp16.loss_scale": (0, FP16, "precision.loss_scale", "dynamic"),
    "fp16.initial_scale_power": (12, FP16, "precision.initial_loss_scale", 4096.0),
    "fp16.loss_scale_window": (100, FP16, "precision.loss_scale_window", 100),
    "bf16.enabled": (1, {}, "precision.compute", "bf16"),
    "bfloat16.enabled": ("true", {}, "precision.compute", "bf16"),
    "torch_autocast.enabled": (True, {}, "precision.mode", "autocast"),
    "torch_autocast.dtype": (
        "float16",
        {"torch_autocast": {"enabled": True}},
        "precision.compute",
        "fp16",
    ),
    "data_types.grad_accum_dtype": ("torch.bfloat16", BASE, "precision.gradients", "bf16"),
    "zero_optimization.stage": (2, {}, "zero.stage", 2),
    "zero_optimization.cpu_offload": (True, BASE, "zero.offload.optimizer", "host"),
    "zero_optimization.cpu_offload_param": (True, BASE, "zero.offload.parameters", "host"),
    "zero_optimization.prefetch_bucket_size": (1e6, BASE, "zero.prefetch_bytes", 2_000_000),
    "zero_optimization.stage3_prefetch_bucket_size": ("5e7", BASE, "zero.prefetch_bytes", 100_000_000),
    "zero_optimization.zero_hpz_partition_size": (4, BASE, "zero.hierarchical", True),
    "zero_optimization.zero_quantized_weights": (True, BASE, "communication.parameters", "int8"),
    "zero_optimization.zero_quantized_gradients": (True, BASE, "communication.gradients", "int4"),
    "zero_optimization.mics_shard_size": (4, BASE, "zero.replicate", "nodes"),
    "zero_optimization.offload_param.device": ("nvme", BASE, "zero.offload.parameters", "disk"),
    "zero_optimization.offload_param.nvme_path": ("/scratch", DISK, "zero.offload.path", "/scratch"),
    "zero_optimization.offload_optimizer.device": ("cpu", BASE, "zero.offload.optimizer", "host"),
    "zero_optimization.offload_optimizer.nvme_path": ("/scratch", DISK, "zero.offload.path", "/scratch"),
    "optimizer.type": ("Lion", BASE, "optimizer.name", "lion"),
    "optimizer.params.lr": ("3e-4", ADAM, "optimizer.lr", 3e-4),
    "optimizer.params.betas": ([0.8, 0.9], ADAM, "optimizer.betas", [0.8, 0.9]),
    "optimizer.params.eps": (1e-6, ADAM, "optimizer.eps", 1e-6),
    "optimizer.params.weight_decay": (0.2, ADAM, "optimizer.weight_decay", 0.2),
    "optimizer.params.momentum": (0.9, {"optimizer": {"type": "SGD"}}, "optimizer.momentum", 0.9),
    "optimizer.params.adam_w_mode": (False, ADAM, "optimizer.name", "adam"),
    "optimizer.params.muon_lr": (0.02, MUON, "optimizer.lr", 0.02),
    "optimizer.params.adam_lr": (3e-4, MUON, "optimizer.muon.adamw_lr", 3e-4),
    "scheduler.type": ("WarmupLR", BASE, "schedule.name", "constant"),
    "scheduler.params.warmup_min_lr": (1e-5, DECAY, "schedule.initial_lr", 1e-5),
    "scheduler.params.warmup_max_lr": (1e-2, DECAY, "schedule.max_lr", 1e-2),
    "scheduler.params.warmup_num_steps": (10, DECAY, "schedule.warmup_steps", 10),
    "scheduler.params.warmup_type": ("linear", DECAY, "schedule.warmup", "linear"),
    "scheduler.params.total_num_steps": (3000, DECAY, "schedule.total_steps", 3001),
    "scheduler.params.warmup_min_ratio": (0.0, COSINE, "schedule.initial_lr", 0.0),
    "scheduler.params.cos_min_ratio": (0.2, COSINE, "schedule.min_ratio", 0.2),
    "tensorboard.enabled": (True, BASE, "metrics.sinks", ["tensorboard"]),
    "tensorboard.output_path": ("logs/", {"tensorboard": {"enabled": True}}, "metrics.dir", "logs"),
    "tensorboard.job_name": ("first", {"tensorboard": {"enabled": True}}, "metrics.dir", "runs/first"),
    "csv_monitor.enabled": (True, BASE, "metrics.dir", "runs"),
    "csv_monitor.output_path": ("logs", {"csv_monitor": {"enabled": True}}, "metrics.dir", "logs"),
    "csv_monitor.job_name": ("first", {"csv_monitor": {"enabled": True}}, "metrics.dir", "runs/first"),
    "wandb.enabled": (True, BASE, "metrics.sinks", ["wandb"]),
}


def with_key(base: dict[str, Any], key: str, value: object) -> dict[str, Any]:
    """Return a copy of ``base`` in which a dotted key has this value."""
    changed: dict[str, Any] = json.loads(json.dumps(base))
    *sections, name = key.split(".")
    inner = changed
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[name] = value
    return changed


@pytest.mark.parametrize("case", FILES, ids=lambda case: case["what"])
def test_a_file_converts_or_ends_in_its_error(case: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(case["file"])

    def outcome() -> tuple[dict[str, object], list[str]]:
        converted = deepspeed.read(file, 4, 4, {} if case.get("trainer") else None)
        resolve(Config(**converted.settings), 4, "cuda", 4)
        assert load_config(yaml.safe_load(converted.as_yaml())) == Config(**converted.settings)
        return converted.settings, [notice.key for notice in converted.of(KeyClass.WARNING)]

    if "errors" in case:
        with pytest.raises(ConfigError) as raised:
            outcome()
        missing = [part for part in case["errors"] if part not in str(raised.value)]
        assert not missing, f"{missing} not in: {raised.value}"
    else:
        assert outcome() == (case["settings"], case.get("warnings", []))


def test_there_are_forty_files() -> None:
    assert len(FILES) >= 40
    assert len({case["what"] for case in FILES}) == len(FILES)


@pytest.mark.parametrize("key", ALL_KEYS)
def test_every_key_of_deepspeeds_is_in_one_class(key: str) -> None:
    """Each key has exactly one rule: its own, or that of one of its sections."""
    parts = key.split(".")
    assert [path for path in (".".join(parts[:n]) for n in range(1, len(parts) + 1)) if path in RULES] != []
    assert sum(".".join(parts[:n]) in RULES for n in range(1, len(parts) + 1)) == 1


def test_no_key_is_in_two_classes() -> None:
    tables = [getattr(deepspeed_keys, f"_{kind.name}_KEYS") for kind in KeyClass]
    assert sum(len(table) for table in tables) == len(RULES)
    assert {
        kind for table, kind in zip(tables, KeyClass, strict=True) for rule in table.values() if rule.kind != kind
    } == set()


def test_every_mapped_key_has_an_example() -> None:
    assert set(MAPPED) == {key for key, rule in RULES.items() if rule.kind is KeyClass.MAPPED}


@pytest.mark.parametrize("key", MAPPED)
def test_a_mapped_key_becomes_a_setting(key: str) -> None:
    value, beside, target, expected = MAPPED[key]
    converted = deepspeed.read(with_key(beside, key, value), 4, 4)
    section: Any = converted.settings
    for part in target.split("."):
        section = section[part]
    assert section == expected
    assert [notice.kind for notice in converted.notices if notice.key == key] == [KeyClass.MAPPED]
    assert target in next(notice.text for notice in converted.notices if notice.key == key)


@pytest.mark.parametrize(
    ("params", "rates"),
    [
        ({}, {"lr": 0.02, "adamw_lr": 3e-4}),
        ({"lr": 0.01}, {"lr": 0.01}),
        ({"muon_lr": 0.03}, {"lr": 0.03, "adamw_lr": 3e-4}),
        ({"lr": 1e-3, "muon_lr": 0.03}, {"lr": 0.03, "adamw_lr": 1e-3}),
        ({"lr": 0.01, "adam_lr": 1e-3}, {"lr": 0.01, "adamw_lr": 1e-3}),
        ({"lr": 0.01, "muon_lr": 0.03, "adam_lr": 1e-3}, {"lr": 0.03, "adamw_lr": 1e-3}),
        ({"adam_lr": 1e-3}, {"lr": 0.02, "adamw_lr": 1e-3}),
    ],
)
def test_muon_has_deepspeeds_rates_and_defaults(params: dict[str, float], rates: dict[str, float]) -> None:
    """As in DeepSpeed, lr is the rate of each of its two groups that has none of its own (MuonWithAuxAdam)."""
    converted = deepspeed.read({"optimizer": {"type": "Muon", "params": params}}, 4)
    muon = {"momentum": 0.95, "scale": "original"} | {key: rates[key] for key in rates if key == "adamw_lr"}
    others = {"betas": [0.9, 0.95], "eps": 1e-10, "weight_decay": 0.0}
    assert converted.settings["optimizer"] == {"name": "muon", "lr": rates["lr"], "muon": muon} | others
    said = {notice.key.rpartition(".")[2]: notice.text for notice in converted.notices}
    if "lr" in params and "muon_lr" in params:
        used = "adam_lr" not in params
        assert said["lr"] == (
            "becomes optimizer.muon.adamw_lr: 0.001" if used else "it has no effect in combination with the other keys"
        )


def test_a_trainer_gives_the_rates_of_muon_that_are_auto() -> None:
    def optimizer(arguments: dict[str, object], **params: object) -> object:
        data = {"optimizer": {"type": "Muon", "params": {"lr": "auto", "betas": "auto"} | params}}
        return deepspeed.read(data, 4, arguments=arguments).settings["optimizer"]

    muon = {"scale": "original"}
    assert optimizer({}) == {"name": "muon", "muon": muon}
    assert optimizer({}, adam_lr=1e-3) == {"name": "muon", "muon": {"adamw_lr": 1e-3} | muon}
    assert optimizer(ARGUMENTS, muon_lr=0.03) == {
        "name": "muon",
        "lr": 0.03,
        "betas": [0.9, 0.95],
        "muon": {"adamw_lr": 3e-4} | muon,
    }
    with pytest.raises(ConfigError, match=r'optimizer.params.lr: "auto" is not known yet.*\n?.*write adam_lr'):
        optimizer({}, muon_lr=0.03)


@pytest.mark.parametrize("partition", [1, 4])
def test_quantized_weights_of_a_second_shard_are_of_changes(partition: int) -> None:
    zero = {"stage": 3, "zero_hpz_partition_size": partition, "zero_quantized_weights": True}
    notices = deepspeed.read({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}, 4).notices
    (text,) = (notice.text for notice in notices if notice.key == "zero_optimization.zero_quantized_weights")
    assert ("parameter deltas, between nodes" in text) == (partition > 1), text


OTHERS = [(key, rule) for key, rule in RULES.items() if rule.kind is not KeyClass.MAPPED]


# A number or a switch whose default requests nothing is also reported when it is 0 or false.
VALUES = [(key, rule, 7) for key, rule in OTHERS] + [
    (key, rule, off) for key, rule in OTHERS for off in (False, 0.0) if any(isinstance(x, int) for x in rule.harmless)
]


@pytest.mark.parametrize(("key", "rule", "value"), VALUES, ids=[f"{key}-{value}" for key, _, value in VALUES])
def test_any_other_key_is_ignored_warned_of_or_refused(key: str, rule: Rule, value: object) -> None:
    base = {"fp16": {"enabled": True}} if key.startswith("fp16.") else BASE
    base = base | ADAM if key.startswith("optimizer.") else base | DECAY if key.startswith("scheduler.") else base
    data = with_key(base, key, "fp32" if key == "data_types.param_dtype" else value)
    if rule.kind is KeyClass.ERROR:
        with pytest.raises(ConfigError) as raised:
            deepspeed.read(data, 4)
        assert f"{key}: " in str(raised.value)
        assert rule.text in str(raised.value)
        assert len(rule.text) > 10
    else:
        notices = [notice for notice in deepspeed.read(data, 4).notices if notice.key == key]
        assert [(notice.kind, notice.text) for notice in notices] == [(rule.kind, rule.text)]
    for harmless in rule.harmless if rule.kind is not KeyClass.IGNORED else ():
        assert key not in {notice.key for notice in deepspeed.read(with_key(base, key, harmless), 4).notices}


@pytest.mark.parametrize("case", RATES, ids=lambda case: f"{case['scheduler']['type']}-{case['scheduler']['params']}")
def test_learning_rates_are_those_of_deepspeeds_classes(case: dict[str, Any]) -> None:
    """The schedule sets DeepSpeed's rates on a torch optimizer, also if its highest rate is not the optimizer's."""
    data = {"optimizer": {"type": "SGD", "params": {"lr": case["lr"]}}, "scheduler": case["scheduler"]}
    config = Config(**deepspeed.read(data, 1).settings)
    resolve(config, 1, "cpu")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=config.optimizer.lr)
    scheduler, rates = build_schedule(optimizer, config.schedule), []
    for _ in range(50):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx(case["rates"], rel=1e-12, abs=1e-12)


def test_groups_keep_their_own_rates_and_tensors_stay_the_same() -> None:
    rates = [torch.tensor(0.1, dtype=torch.float64), torch.tensor(0.2, dtype=torch.float64)]
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates]
    optimizer = torch.optim.SGD(groups)
    data = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}}
    scheduler = build_schedule(optimizer, Config(**deepspeed.read(data, 1).settings).schedule)
    for step in range(12):
        risen = min(1.0, math.log(max(1, step)) / math.log(10))
        assert [float(rate) for rate in rates] == pytest.approx([0.1 * risen, 0.2 * risen], rel=1e-12)
        optimizer.step()
        scheduler.step()
    assert all(group["lr"] is rate for group, rate in zip(optimizer.param_groups, rates, strict=True))


def test_a_warm_up_of_fewer_than_no_steps_is_refused() -> None:
    with pytest.raises(ConfigError, match="scheduler.params.warmup_num_steps: expected at least 0; got -5"):
        deepspeed.read(with_key(BASE | DECAY, "scheduler.params.warmup_num_steps", -5), 1)


def test_there_are_rates_of_every_schedule() -> None:
    found = {(case["scheduler"]["type"], case["scheduler"]["params"].get("warmup_type")) for case in RATES}
    kinds = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
    assert found >= {(name, kind) for name in kinds for kind in ("log", "linear")}
    assert all(len(case["rates"]) == 50 for case in RATES)


ARGUMENTS = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.5,
    "fp16": False,
    "bf16": True,
    "learning_rate": 3e-4,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-7,
    "weight_decay": 0.1,
}
AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "fp16": {"enabled": "auto"},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"),
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
    },
}


def test_auto_is_filled_in_from_the_trainers_arguments() -> None:
    """Values "auto" come from the trainer's arguments, except in the schedule, which the trainer creates itself."""
    converted = deepspeed.read(AUTO, 4, arguments=ARGUMENTS)
    assert converted.settings == {
        "zero": {"stage": 3},
        "precision": {"compute": "bf16", "mode": "cast", "outputs": "compute"},
        "batch": {"micro": 4, "accumulate": 2, "total": 32},
        "optimizer": {"name": "adamw", "lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-7, "weight_decay": 0.1},
        "clip_grad_norm": 0.5,
    }
    assert [notice.key for notice in converted.of(KeyClass.WARNING)] == ["scheduler.type"]


def test_auto_is_refused_where_there_is_no_trainer() -> None:
    with pytest.raises(ConfigError, match="which is not known") as raised:
        deepspeed.read(AUTO, 4)
    for key in ("gradient_clipping", "bf16.enabled", "optimizer.params.lr", "scheduler.params.total_num_steps"):
        assert f"{key}: " in str(raised.value)
    assert "zero_optimization.reduce_bucket_size" not in str(raised.value), "partita sizes this itself"


def test_auto_that_the_arguments_do_not_say_is_left_to_the_trainer() -> None:
    known = {name: value for name, value in ARGUMENTS.items() if name not in ("bf16", "weight_decay")}
    left = deepspeed.read(AUTO, 4, arguments=known)
    assert left.settings == {
        "zero": {"stage": 3},
        "batch": {"micro": 4, "accumulate": 2, "total": 32},
        "optimizer": {"name": "adamw", "lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-7},
        "clip_grad_norm": 0.5,
    }
    assert ("bf16.enabled", KeyClass.MAPPED) in {(notice.key, notice.kind) for notice in left.notices}


def test_a_trainers_arguments_hold_where_the_file_does_not_say() -> None:
    assert deepspeed.read(ADAM, 1).settings["optimizer"] == {"name": "adamw", "weight_decay": 0.0}
    assert deepspeed.read(ADAM, 1, arguments=ARGUMENTS).settings["optimizer"] == {"name": "adamw"}
    assert deepspeed.read({}, 1).settings["clip_grad_norm"] == 1.0
    assert "clip_grad_norm" not in deepspeed.read({}, 1, arguments=ARGUMENTS).settings
    assert deepspeed.read({"gradient_clipping": 2}, 1, arguments={}).settings["clip_grad_norm"] == 2.0


def test_what_is_shown_at_the_start() -> None:
    converted = deepspeed.read({"steps_per_print": 1, "aio": {}, "max_grad_norm": 1, "log_level": "info"}, 1)
    assert list(converted.summary()) == [
        "the given mapping: max_grad_norm: unknown key, without effect; did you mean gradient_clipping?",
        "the given mapping: ignored, because partita does not need: steps_per_print, aio, log_level",
    ]


def test_a_misspelt_section_names_the_section_that_was_meant() -> None:
    data = {"zero_optimisation": {"stage": 3}, "zero_optimization": {"ofload_param": {"device": "cpu"}}}
    said = "\n".join(deepspeed.read(data, 1).summary())
    assert "zero_optimisation: unknown key, without effect; did you mean zero_optimization?" in said
    assert "did you mean zero_optimization.offload_param?" in said


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'nowhere\.json' does not exist"):
        deepspeed.read("nowhere.json", 1)
    for text, message in (
        ("[1]", r"expected sections \(key: value\) at the top level; got \[1\]"),
        ('{"a": 1, "a": 2}', "the key 'a' is given twice in one section"),
        ("[" * 100_000, "nested deeper than 16 levels"),
        (f'{{"train_batch_size": {"9" * 5000}}}', "not valid JSON: Exceeds the limit"),
        ('{"fp16": {},\n "bf16": {"enabled": true "auto_cast": 0}\n}\n', "not closed at the end.* from line 2 on"),
        ("{'train_batch_size': True}", "not closed at the end.* from line 1 on"),
        ('{"train_batch_size": 8 /* of', "not closed at the end.* from line 1 on"),
    ):
        file = tmp_path / "ds_config.json"
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            deepspeed.read(file, 1)


def test_the_folder_of_the_disk_is_one_that_is_used() -> None:
    """The path of a state on the host is ignored: files made from templates give a path with ``cpu``, too."""
    param, optimizer = {"device": "nvme", "nvme_path": "/b"}, {"device": "cpu", "nvme_path": "/a"}
    data = {"zero_optimization": {"stage": 3, "offload_param": param, "offload_optimizer": optimizer}}
    converted = deepspeed.read(data, 1)
    assert converted.settings["zero"]["offload"] == {"parameters": "disk", "optimizer": "host", "path": "/b"}
    assert converted.of(KeyClass.WARNING) == []
    optimizer["device"] = "nvme"
    converted = deepspeed.read(data, 1)
    assert converted.settings["zero"]["offload"] == {"parameters": "disk", "optimizer": "disk", "path": "/a"}
    assert [notice.key for notice in converted.of(KeyClass.WARNING)] == ["zero_optimization.offload_param.nvme_path"]


def test_numbers_that_are_none() -> None:
    with pytest.raises(ConfigError, match=r"gradient_clipping: expected a number; got true"):
        deepspeed.read({"gradient_clipping": True}, 1)
    with pytest.raises(ConfigError, match=r"zero\.stage: expected one of 0, 1, 2, 3; got 5 .*zero_optimization\.stage"):
        deepspeed.read({"zero_optimization": {"stage": 5}}, 1)


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.sampled_from(["auto", "cpu", "nvme", "Adam", "fp16", "1e5", ""]),
)
VALUES = SCALARS | st.lists(SCALARS, max_size=2) | st.dictionaries(st.sampled_from(["enabled", "device"]), SCALARS)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from([*ALL_KEYS, *KEYS]), VALUES, max_size=12), st.booleans())
def test_any_values_convert_or_are_an_error_of_the_configs(values: dict[str, object], trained: bool) -> None:
    data: dict[str, Any] = {"fp16": {"enabled": True}, "zero_optimization": {"stage": 3}} | DECAY
    for key, value in values.items():
        with contextlib.suppress(TypeError, AttributeError):  # an earlier key has replaced the section by a value
            data = with_key(data, key, value) if key else data
    try:
        converted = deepspeed.read(data, 4, 2, {} if trained else None)
    except ConfigError:
        return
    assert load_config(yaml.safe_load(converted.as_yaml())) == Config(**converted.settings)
    assert len({notice.key for notice in converted.notices}) == len(converted.notices)
