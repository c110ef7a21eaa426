"""Conversion of accelerate's configuration, and of TrainingArguments(fsdp=)."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig

from partita.config.accelerate import RULES, read, read_fsdp
from partita.config.converted import KeyClass
from partita.config.load import load_config
from partita.config.schema import Config
from partita.errors import ConfigError

# Keys of fsdp_config, deepspeed_config and parallelism_config that `accelerate config` asks for
# (accelerate 1.15, commands/config/cluster.py), or that `accelerate launch` has options for (commands/launch.py).
ASKED = {
    "fsdp_config.fsdp_": "version reshard_after_forward sharding_strategy offload_params auto_wrap_policy "
    "transformer_layer_cls_to_wrap min_num_params backward_prefetch state_dict_type forward_prefetch use_orig_params "
    "cpu_ram_efficient_loading sync_module_states activation_checkpointing activation_checkpointing_offload "
    "ignored_modules",
    "deepspeed_config.": "deepspeed_config_file zero_stage offload_optimizer_device offload_param_device "
    "offload_param_nvme_path offload_optimizer_nvme_path gradient_accumulation_steps gradient_clipping "
    "zero3_save_16bit_model zero3_init_flag deepspeed_moe_layer_cls_names deepspeed_multinode_launcher "
    "deepspeed_hostfile deepspeed_exclusion_filter deepspeed_inclusion_filter",
    "parallelism_config.parallelism_config_": "dp_replicate_size dp_shard_size tp_size cp_size cp_backend "
    "cp_comm_strategy sp_size sp_backend sp_seq_length sp_seq_length_is_variable sp_attn_implementation",
}
SECTIONS = {prefix.partition(".")[0] for prefix in ASKED}
TOP = [field.name for field in fields(ClusterConfig) if field.name not in SECTIONS]
KEYS = TOP + [prefix + name for prefix, names in ASKED.items() for name in names.split()]

QUESTIONNAIRE = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: {offload}
  fsdp_reshard_after_forward: {reshard}
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer,Embedding
  fsdp_version: {version}
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 8
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""


def questionnaire(tmp_path: Path, **answers: object) -> Path:
    path = tmp_path / "default_config.yaml"
    path.write_text(QUESTIONNAIRE.format(**{"offload": False, "reshard": True, "version": 2} | answers))
    return path


def test_fsdp(tmp_path: Path) -> None:
    converted = read(questionnaire(tmp_path), 8)
    assert converted.settings == {
        "zero": {"stage": 3, "units": ["LlamaDecoderLayer", "Embedding"]},
        "precision": {"compute": "bf16"},
        "activations": {"checkpoint": "units"},
    }
    assert converted.processes == 8
    assert converted.of(KeyClass.WARNING) == []
    assert load_config(yaml.safe_load(converted.as_yaml())) == Config(**converted.settings)


@pytest.mark.parametrize(
    ("reshard", "version", "expected"),
    [
        (False, 2, {"stage": 3, "keep_gathered": True}),
        ("FULL_SHARD", 1, {"stage": 3}),
        ("SHARD_GRAD_OP", 1, {"stage": 3, "keep_gathered": True}),
        ("NO_SHARD", 1, {"stage": 0}),
        ("HYBRID_SHARD", 1, {"stage": 3, "replicate": "nodes"}),
    ],
)
def test_what_is_sharded(tmp_path: Path, reshard: object, version: int, expected: dict[str, object]) -> None:
    zero: Any = read(questionnaire(tmp_path, reshard=reshard, version=version), 8).settings["zero"]
    assert {key: zero[key] for key in zero if key != "units"} == expected


def test_states_on_the_host(tmp_path: Path) -> None:
    zero: Any = read(questionnaire(tmp_path, offload=True), 8).settings["zero"]
    assert zero["offload"] == {"parameters": "host", "optimizer": "host"}


def test_deepspeed_by_its_answers() -> None:
    converted = read(
        {
            "distributed_type": "DEEPSPEED",
            "mixed_precision": "no",
            "deepspeed_config": {
                "zero_stage": 3,
                "gradient_accumulation_steps": 4,
                "gradient_clipping": 0.5,
                "offload_optimizer_device": "nvme",
                "offload_optimizer_nvme_path": "/scratch",
                "offload_param_device": "cpu",
                "zero3_init_flag": True,
            },
        },
        4,
    )
    assert converted.settings == {
        "zero": {"stage": 3, "offload": {"parameters": "host", "optimizer": "disk", "path": "/scratch"}},
        "batch": {"accumulate": 4},
        "clip_grad_norm": 0.5,
    }


def test_deepspeed_by_its_file(tmp_path: Path) -> None:
    file = tmp_path / "zero.json"
    file.write_text('{"zero_optimization": {"stage": 2, "overlap_com": true}, "gradient_clipping": "auto"}')
    data = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": str(file)}}
    converted = read(data | {"mixed_precision": "bf16"}, 4)
    assert converted.settings == {"zero": {"stage": 2}, "precision": {"compute": "bf16"}}
    assert [notice.key for notice in converted.of(KeyClass.WARNING)] == ["zero_optimization.overlap_com"]


def test_a_named_deepspeed_file_takes_precedence_key_by_key(tmp_path: Path) -> None:
    """Keys of the DeepSpeed file replace those of accelerate's file, which keeps its others."""
    file = tmp_path / "zero.json"
    file.write_text('{"data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {"stage": 1}}')
    data = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": str(file)}}
    converted = read(data | {"mixed_precision": "bf16"}, 4)
    assert converted.settings == {"zero": {"stage": 1}, "precision": {"compute": "bf16", "gradients": "fp32"}}
    file.write_text('{"fp16": {"enabled": true}}')
    precision: Any = read(data | {"mixed_precision": "bf16"}, 4).settings["precision"]
    assert precision["compute"] == "fp16"
    assert precision["mode"] == "cast"


def test_copies_of_the_states_on_each_node() -> None:
    data = {"distributed_type": "FSDP", "parallelism_config": {"dp_replicate_size": 2, "dp_shard_size": 4}}
    assert read(data, 8, 4).settings == {"zero": {"stage": 3, "replicate": "nodes"}}
    (notice,) = (notice for notice in read(data, 16, 4).notices if "replicate" in notice.key)
    assert notice.text == "becomes zero.replicate: 'nodes' (4 nodes, not 2)"


@pytest.mark.parametrize("kind", ["NO", "MULTI_GPU", "MULTI_CPU"])
def test_plain_data_parallelism(kind: str) -> None:
    settings = read({"distributed_type": kind, "num_processes": 2}, 2).settings
    assert settings == {"zero": {"stage": 0}, "precision": {"compute": "fp32"}}


@pytest.mark.parametrize("key", KEYS)
def test_every_key_of_accelerates_is_in_one_class(key: str) -> None:
    assert key in RULES
    assert key.partition(".")[0] == key or key.partition(".")[0] not in RULES


@pytest.mark.parametrize("key", [key for key, rule in RULES.items() if rule.kind is not KeyClass.MAPPED])
def test_keys_that_become_no_setting(key: str) -> None:
    section, _, name = key.rpartition(".")
    data: dict[str, Any] = {"distributed_type": "MULTI_GPU"} | ({section: {name: 7}} if section else {name: 7})
    rule = RULES[key]
    if rule.kind is KeyClass.ERROR:
        with pytest.raises(ConfigError) as raised:
            read(data, 2)
        assert f"{key}: 7 is not available" in str(raised.value)
        assert rule.text in str(raised.value)
    else:
        notices = [notice for notice in read(data, 2).notices if notice.key == key]
        assert [(notice.kind, notice.text) for notice in notices] == [(rule.kind, rule.text)]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"mixed_precision": "fp8"}, "mixed_precision: 'fp8' is not available"),
        ({"distributed_type": "MEGATRON_LM"}, "distributed_type: MEGATRON_LM is not available"),
        ({"distributed_type": "FSDP", "fsdp_config": {"sharding_strategy": "SOME"}}, "'some' is not available"),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"offload_optimizer_device": "gpu"}},
            "deepspeed_config.offload_optimizer_device: expected none, cpu or nvme; got 'gpu'",
        ),
        ({"num_processes": "many"}, "num_processes: expected a number; got 'many'"),
    ],
)
def test_what_cannot_be_had(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read(data, 2)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("fsdp", "config", "expected"),
    [
        (True, None, {"zero": {"stage": 3}}),
        (True, {"reshard_after_forward": False}, {"zero": {"stage": 3, "keep_gathered": True}}),
        (
            "full_shard auto_wrap",
            {"fsdp_transformer_layer_cls_to_wrap": ["Block"]},
            {"zero": {"stage": 3, "units": ["Block"]}},
        ),
        (["shard_grad_op"], {}, {"zero": {"stage": 3, "keep_gathered": True}}),
        (
            "full_shard offload",
            {"version": 1},
            {"zero": {"stage": 3, "offload": {"parameters": "host", "optimizer": "host"}}},
        ),
        ("no_shard offload", {}, {"zero": {"stage": 0, "offload": {"optimizer": "host"}}}),
    ],
)
def test_training_arguments(fsdp: object, config: object, expected: dict[str, object]) -> None:
    assert read_fsdp(fsdp, config, 4).settings == expected


def test_training_arguments_with_a_file_and_words_that_are_none(tmp_path: Path) -> None:
    file = tmp_path / "fsdp_config.json"
    file.write_text('{"cpu_offload": true, "xla": false, "min_num_params": 0}')
    zero: Any = read_fsdp(True, str(file), 4).settings["zero"]
    assert zero == {"stage": 3, "offload": {"parameters": "host", "optimizer": "host"}}
    with pytest.raises(ConfigError, match=r"'fully' is not available[^}]*write one of full_shard"):
        read_fsdp("fully", None, 4)
