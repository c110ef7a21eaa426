"""The schema: documented defaults, accepted values, and round trips of a configuration."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import yaml
from pydantic import BaseModel

from partita.config.load import load_config
from partita.config.messages import key_paths, section_of
from partita.config.schema import Config

DOCUMENTED = """
parallel:
  {data: auto, tensor: 1, pipeline: 1, sequence: 1, schedule: 1f1b, chunks: 1, cut: auto, tensor_rules: {}}
zero:
  stage: 1
  offload: {parameters: none, optimizer: none, gradients: auto, path: null}
  units: auto
  prefetch_bytes: auto
  keep_gathered: false
  keep_gradients: false
  hierarchical: false
  replicate: none
precision:
  {compute: auto, master: fp32, gradients: fp32, moments: fp32, loss_scale: dynamic,
   initial_loss_scale: 65536.0, loss_scale_window: 2000, nonfinite: skip, keep_fp32: [], mode: mixed, outputs: fp32,
   frozen: fp32}
batch:     {micro: auto, accumulate: auto, total: auto}
optimizer: {name: adamw, lr: 1.0e-3, betas: [0.9, 0.999], eps: 1.0e-8, weight_decay: 0.01, momentum: 0.0,
   sends: averages, muon: {momentum: 0.95, nesterov: true, steps: 5, coefficients: [3.4445, -4.775, 2.0315],
   scale: rms, dtype: auto, adamw_lr: null, rules: {}}}
schedule:
  {name: constant, warmup_steps: 0, warmup: linear, max_lr: null, initial_lr: null, initial_steps: 0,
   total_steps: null, decay_steps: null, min_lr: 0.0, min_ratio: 0.0}
clip_grad_norm: null
activations: {checkpoint: none, partition: false, offload: none, keep_bytes: none}
attention:
  {pattern: dense, block: 64, window: null, global: 0, random: 0, causal: auto, layers: auto, layout: [],
   packed: false}
loss: {tiled: none, head: auto}
tiled: {mlp: []}
communication:
  {gradients: full, parameters: full, warmup_steps: auto, every: null, replicas: auto,
   outer_lr: 0.7, low_rank: 4, warmup: full, outer_momentum: 0.9, outer_nesterov: true,
   check_every: auto, buffers: broadcast, within_node: auto, reduction: auto, through_host: false, timeout_s: 600}
checkpoint: {dir: null, every_steps: null, keep: 3, background: true}
metrics: {dir: null, sinks: []}
compile: {modules: none, backend: inductor, mode: default, dynamic: null}
seed: null
"""

ELABORATE = {
    "parallel": {"data": 4},
    "zero": {"stage": 3, "units": ["Block", "head"], "prefetch_bytes": 2**26, "keep_gathered": True},
    "precision": {"compute": "fp16", "gradients": "bf16", "loss_scale": 512.0, "keep_fp32": ["RMSNorm"]},
    "batch": {"micro": 2, "accumulate": 3, "total": 24},
    "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.0},
    "schedule": {"name": "linear", "warmup_steps": 5, "total_steps": 50, "min_lr": 0.01},
    "clip_grad_norm": 0.5,
    "communication": {"buffers": "local", "within_node": "network", "timeout_s": 30.0},
}


def test_every_default_is_the_documented_one() -> None:
    assert Config().model_dump(mode="json") == yaml.safe_load(DOCUMENTED)


def test_the_documented_text_is_itself_a_configuration() -> None:
    assert load_config(yaml.safe_load(DOCUMENTED)) == Config()


def test_every_key_says_what_it_is() -> None:
    for path in key_paths(Config):
        owner: type[BaseModel] = Config
        for part in path[:-1]:
            section = section_of(owner, part)
            assert section is not None
            owner = section
        assert owner.model_fields[path[-1]].description, path


@pytest.mark.parametrize(
    ("section", "key", "value", "read"),
    [
        ("optimizer", "lr", "1e-3", 0.001),
        ("optimizer", "lr", " 0.5 ", 0.5),
        ("optimizer", "lr", 1, 1.0),
        ("optimizer", "lr", 0, 0.0),
        ("optimizer", "lr", np.float64(0.25), 0.25),
        ("optimizer", "lr", np.float32(0.25), 0.25),
        ("optimizer", "betas", ["0.8", 0], (0.8, 0.0)),
        ("optimizer", "betas", (0.8, 0.9), (0.8, 0.9)),
        ("zero", "stage", "3", 3),
        ("zero", "stage", 2.0, 2),
        ("zero", "stage", np.int64(2), 2),
        ("zero", "prefetch_bytes", "64MiB", 64 * 2**20),
        ("zero", "prefetch_bytes", "0.5 GiB", 2**29),
        ("zero", "prefetch_bytes", "10kb", 10_000),
        ("zero", "prefetch_bytes", "1.1GiB", 1_181_116_006),
        ("zero", "prefetch_bytes", "1e3B", 1000),
        ("zero", "prefetch_bytes", 1e8, 10**8),
        ("zero", "prefetch_bytes", "1e8", 10**8),
        ("zero", "prefetch_bytes", 0, 0),
        ("batch", "micro", "16", 16),
        ("batch", "micro", 1e1, 10),
        ("precision", "loss_scale", 65536, 65536.0),
        ("precision", "loss_scale", "dynamic", "dynamic"),
    ],
)
def test_accepted_values(section: str, key: str, value: object, read: object) -> None:
    found = getattr(getattr(load_config({section: {key: value}}), section), key)
    assert found == read
    assert type(found) is type(read)


def test_an_empty_section_is_one_of_defaults() -> None:
    assert load_config({"zero": None, "batch": {}}) == Config()


def test_paths_may_be_path_objects() -> None:
    assert load_config({"checkpoint": {"dir": Path("out/here")}}).checkpoint.dir == "out/here"


@pytest.mark.parametrize("data", [{}, {"zero": {"stage": 2}}, ELABORATE])
def test_round_trips(data: dict[str, object], tmp_path: Path) -> None:
    config = load_config(data)
    dumped = config.model_dump(mode="json")
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(dumped))
    (tmp_path / "a.json").write_text(json.dumps(dumped))
    assert load_config(tmp_path / "a.yaml") == config
    assert load_config(str(tmp_path / "a.json")) == config
    assert load_config(config.model_dump()) == config
    assert load_config(config) is config
    assert Config(**dumped) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(load_config(dumped)) == hash(config)


def test_a_round_trip_of_what_was_given_keeps_that_it_was_given() -> None:
    config = load_config({"zero": {"stage": 1}})
    again = load_config(config, ["batch.micro=2"])
    assert again.zero.model_fields_set == {"stage"}
    assert again.model_fields_set == {"zero", "batch"}
    assert config == Config()


def test_sections_may_be_given_as_they_are() -> None:
    config = load_config(ELABORATE)
    assert Config(zero=config.zero).zero == config.zero
    assert load_config({"zero": config.zero}, ["zero.stage=2", "zero.keep_gathered=false"]).zero.units == (
        "Block",
        "head",
    )
