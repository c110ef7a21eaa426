"""Each kind of error has its own message: what, where, expected, got, and the remedy."""

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from partita.config.load import load_config
from partita.config.resolve import Resolved, resolve
from partita.config.schema import Config
from partita.errors import ConfigError, PartitaError


class Wrong(NamedTuple):
    config: object
    fragments: tuple[str, ...]
    num_ranks: int = 4
    device: str = "cpu"


VALUES = [
    Wrong(
        {"parallel": {"tensor_rules": {"*.up": "rows"}}},
        (
            "tensor_rules: expected a section of names, each with one of column, row",
            "got {'*.up': 'rows'}",
            "default {}",
        ),
    ),
    Wrong({"attention": {"layout": [[1, None]]}}, ("attention.layout: expected a list of", "got [[1, None]]")),
    Wrong({"attention": {"layout": [[1, 2]]}}, ("attention.layout: expected a list of", "got [[1, 2]]")),
    Wrong(
        {"communication": {"gradients": "fp8"}},
        (
            "communication.gradients: expected one of full, int8, int4, ",
            "topk, low_rank or text such as module:class; got 'fp8'",
        ),
    ),
    Wrong(
        {"communication": {"parameters": "low_rank"}},
        ("communication.parameters: expected one of full, int8, int4, 2bit, ternary, onebit, topk; got 'low_rank'",),
    ),
    Wrong({"zero": {"stage": 5}}, ("zero.stage: expected one of 0, 1, 2, 3; got 5", "default 1")),
    Wrong({"zero": {"stage": True}}, ("zero.stage: expected one of 0, 1, 2, 3; got true",)),
    Wrong({"zero": {"stage": 1.5}}, ("zero.stage: expected one of 0, 1, 2, 3; got 1.5",)),
    Wrong({"zero": {"stage": "three"}}, ("zero.stage: expected one of 0, 1, 2, 3; got 'three'",)),
    Wrong({"zero": {"stage": None}}, ("zero.stage: expected one of 0, 1, 2, 3; got null",)),
    Wrong({"zero": 3}, ("zero: expected a section with the keys stage, offload", "got 3", "write its keys below it")),
    Wrong({"zero": {"offload": "host"}}, ("zero.offload: expected a section with the keys parameters", "got 'host'")),
    Wrong(
        {"zero": {"offload": {"optimizer": "cpu"}}}, ("zero.offload.optimizer: expected one of none, host, disk, auto",)
    ),
    Wrong({"zero": {"units": []}}, ("zero.units: expected auto or a list of one or more non-empty texts; got []",)),
    Wrong({"zero": {"units": "Block"}}, ("zero.units: expected auto or a list", "got 'Block'")),
    Wrong({"zero": {"units": ["Block", 3]}}, ("zero.units: expected auto or a list", "got ['Block', 3]")),
    Wrong(
        {"zero": {"prefetch_bytes": -1}},
        ("zero.prefetch_bytes: expected auto or a whole number of at least 0", "64MiB"),
    ),
    Wrong({"zero": {"prefetch_bytes": 1.5}}, ("zero.prefetch_bytes: expected", "got 1.5")),
    Wrong({"zero": {"prefetch_bytes": "64 lightyears"}}, ("zero.prefetch_bytes: expected", "got '64 lightyears'")),
    Wrong({"zero": {"prefetch_bytes": "0.3b"}}, ("zero.prefetch_bytes: expected", "got '0.3b'")),
    Wrong({"zero": {"keep_gathered": "yes"}}, ("zero.keep_gathered: expected true or false; got 'yes'",)),
    Wrong({"zero": {"keep_gathered": 1}}, ("zero.keep_gathered: expected true or false; got 1",)),
    Wrong({"parallel": {"data": 0}}, ("parallel.data: expected auto or a whole number of at least 1", "got 0")),
    Wrong({"parallel": {"data": True}}, ("parallel.data: expected", "got true")),
    Wrong({"parallel": {"data": 10**5000}}, ("parallel.data: expected", "at most 2147483647", "got <int>")),
    Wrong({"parallel": {"tensor": "two"}}, ("parallel.tensor: expected a whole number of at least 1", "got 'two'")),
    Wrong(
        {"precision": {"compute": "bfloat16"}}, ("precision.compute: expected one of auto, fp32, bf16, fp16", "got 'bf")
    ),
    Wrong(
        {"precision": {"gradients": "fp8"}},
        ("precision.gradients: expected one of fp32, bf16, fp16, in_backward; got 'fp8'",),
    ),
    Wrong({"precision": {"master": "bf16"}}, ("precision.master: expected one of fp32, split; got 'bf16'",)),
    Wrong({"precision": {"loss_scale": 0}}, ("precision.loss_scale: expected dynamic or a number above 0; got 0",)),
    Wrong({"precision": {"loss_scale": math.nan}}, ("precision.loss_scale: expected", "got nan")),
    Wrong(
        {"precision": {"keep_fp32": "norm"}}, ("precision.keep_fp32: expected a list of non-empty texts; got 'norm'",)
    ),
    Wrong({"batch": {"micro": "4.5"}}, ("batch.micro: expected auto or a whole number of at least 1", "got '4.5'")),
    Wrong({"batch": {"total": -8}}, ("batch.total: expected auto or a whole number of at least 1", "got -8")),
    Wrong(
        {"optimizer": {"name": "AdamW"}},
        ("optimizer.name: expected one of adamw, adam, sgd, lion, muon, onebit_adam; got",),
    ),
    Wrong({"optimizer": {"lr": -0.1}}, ("optimizer.lr: expected a number of at least 0; got -0.1", "default 0.001")),
    Wrong({"optimizer": {"lr": math.inf}}, ("optimizer.lr: expected a number of at least 0; got inf",)),
    Wrong({"optimizer": {"lr": "1e999"}}, ("optimizer.lr: expected a number of at least 0; got '1e999'",)),
    Wrong({"optimizer": {"betas": [0.9, 1.0]}}, ("optimizer.betas: expected a list of 2 values", "got [0.9, 1.0]")),
    Wrong({"optimizer": {"betas": [0.9]}}, ("optimizer.betas: expected a list of 2 values", "below 1; got [0.9]")),
    Wrong({"optimizer": {"betas": 0.9}}, ("optimizer.betas: expected a list of 2 values", "got 0.9")),
    Wrong({"optimizer": {"eps": 0}}, ("optimizer.eps: expected a number above 0; got 0",)),
    Wrong({"communication": {"warmup": "int4"}}, ("communication.warmup: expected one of full, int8; got 'int4'",)),
    Wrong({"optimizer": {"momentum": 1}}, ("optimizer.momentum: expected a number of at least 0 and below 1; got 1",)),
    Wrong({"schedule": {"name": "wsd"}}, ("schedule.name: expected one of constant, linear, cosine; got 'wsd'",)),
    Wrong(
        {"schedule": {"warmup_steps": -1}}, ("schedule.warmup_steps: expected a whole number of at least 0", "got -1")
    ),
    Wrong({"schedule": {"total_steps": 0}}, ("schedule.total_steps: expected a whole number of at least 1", "or null")),
    Wrong({"clip_grad_norm": 0}, ("clip_grad_norm: expected a number above 0 or null; got 0",)),
    Wrong({"clip_grad_norm": {"max": 1}}, ("clip_grad_norm: expected a number above 0 or null; got {'max': 1}",)),
    Wrong({"communication": {"timeout_s": 0}}, ("communication.timeout_s: expected a number above 0; got 0",)),
    Wrong(
        {"communication": {"buffers": "sync"}}, ("communication.buffers: expected one of broadcast, local; got 'sync'",)
    ),
    Wrong({"checkpoint": {"keep": 0}}, ("checkpoint.keep: expected a whole number of at least 1", "got 0")),
]

KEYS = [
    Wrong({"optimiser": {}}, ("optimiser: unknown key; did you mean optimizer?",)),
    Wrong({"zero": {"stag": 3}}, ("zero.stag: unknown key; did you mean zero.stage?",)),
    Wrong({"zero": {"keep-gathered": True}}, ("zero.keep-gathered: unknown key; did you mean zero.keep_gathered?",)),
    Wrong({"stage": 3}, ("stage: unknown key; did you mean zero.stage?",)),
    Wrong({"zero": {"lr": 3}}, ("zero.lr: unknown key; did you mean optimizer.lr?",)),
    Wrong({"batch": {"Micro": 3}}, ("batch.Micro: unknown key; did you mean batch.micro?",)),
    Wrong(
        {"zero": {"offload": {"param": "none"}}},
        ("zero.offload.param: unknown key; did you mean zero.offload.parameters?",),
    ),
    Wrong({"xyzzy": 1}, ("xyzzy: unknown key; the keys at the top level are parallel, zero", "fix: remove it")),
    Wrong({"batch": {"xyzzy": 1}}, ("batch.xyzzy: unknown key; the keys of batch are micro, accumulate, total",)),
    Wrong({"two words": 1}, ("'two words': unknown key",)),
    Wrong({1: 2}, ("keys must be printable text; got the key 1 at the top level; put quotes around it",)),
    Wrong({"zero": {None: 2}}, ("keys must be printable text; got the key null in 'zero'",)),
    Wrong({"zero": {b"stage": 2}}, ("keys must be printable text; got the key b'stage' in 'zero'",)),
    Wrong(
        {"zero": {"stage": 9}, "optimiser": {}, "clip_grad_norm": -1},
        ("3 problems in the configuration", "zero.stage: expected", "clip_grad_norm: expected", "optimiser: unknown"),
    ),
]

ONEBIT = {"name": "onebit_adam"}
CROSS_FIELD = [
    Wrong(
        {"optimizer": ONEBIT},
        ("measures its second moment in a warm-up", "Fix: set communication.warmup_steps, or schedule.total_steps"),
    ),
    Wrong(
        {"communication": {"gradients": "ternary", "warmup_steps": 50}, "schedule": {"total_steps": 50}},
        ("training would end before compression starts", "Fix: set communication.warmup_steps to less"),
    ),
    Wrong(
        {"optimizer": ONEBIT, "communication": {"gradients": "int8", "warmup_steps": 5}},
        (
            "its running average, which needs a codec with error feedback",
            "Fix: set communication.gradients to onebit, ternary, 2bit or topk",
        ),
    ),
    Wrong(
        {"optimizer": {"sends": "gradients"}},
        (
            "optimizer.sends requires onebit_adam; with adamw ranks send gradients",
            "Fix: leave optimizer.sends out",
        ),
    ),
    Wrong(
        {"optimizer": ONEBIT, "communication": {"warmup_steps": 5}, "precision": {"gradients": "in_backward"}},
        ("in_backward sends compressed values from the first step", "Fix: leave communication.warmup_steps out"),
    ),
    Wrong(
        {"communication": {"gradients": "ternary", "warmup": "int8"}},
        ("communication.warmup: int8 applies to the steps before compression", "Fix: set communication.warmup_steps"),
    ),
    Wrong(
        {"optimizer": ONEBIT, "communication": {"warmup_steps": 5}, "zero": {"stage": 3, "replicate": "nodes"}},
        ("zero.replicate has one per node", "Fix: leave zero.replicate out"),
    ),
    Wrong(
        {
            "optimizer": ONEBIT,
            "communication": {"warmup_steps": 5},
            "precision": {"compute": "bf16", "master": "split"},
        },
        ("split belongs to adamw, adam, sgd and lion", "Fix: set precision.master to fp32"),
    ),
    Wrong(
        {"activations": {"partition": True, "checkpoint": "units"}},
        (
            "activations.partition shards saved inputs over the tensor ranks, which have equal ones, but there is one",
            "Fix: leave activations.partition out, or set parallel.tensor above 1",
        ),
    ),
    Wrong(
        {"activations": {"partition": True}, "parallel": {"tensor": 2}},
        (
            "activations.partition shards the inputs of recomputed modules, but no modules are recomputed",
            "Fix: set activations.checkpoint to units",
        ),
    ),
    Wrong(
        {"communication": {"gradients": "ternary"}, "precision": {"gradients": "in_backward"}},
        ("residuals after a step is known to be finite", "Fix: set communication.gradients to int8"),
    ),
    Wrong(
        {"communication": {"gradients": "topk"}, "zero": {"offload": {"optimizer": "disk"}}},
        ("stored on the device or on the host", "Fix: set zero.offload.optimizer to host"),
    ),
    Wrong(
        {"communication": {"gradients": "2bit"}, "zero": {"offload": {"optimizer": "host", "gradients": "disk"}}},
        ("stored on the device or on the host", "Fix: set zero.offload.gradients to host"),
    ),
    Wrong(
        {"communication": {"gradients": "onebit"}, "optimizer": {"name": "sgd"}},
        (
            "needs a running average of gradients, and sgd without momentum keeps none",
            "Fix: set optimizer.momentum to 0.9",
        ),
    ),
    Wrong(
        {"communication": {"parameters": "int8"}, "zero": {"stage": 0}},
        (
            "communication.parameters requires stages 1 to 3; at stage 0 every rank updates all of them",
            "Fix: leave communication.parameters out",
        ),
    ),
    Wrong(
        {"communication": {"parameters": "ternary"}, "zero": {"stage": 3}},
        (
            "is too coarse to compute with",
            "Fix: set zero.hierarchical to true, communication.parameters to int8, or zero.stage to 2",
        ),
    ),
    Wrong(
        {"communication": {"parameters": "onebit"}, "zero": {"stage": 3, "replicate": "nodes"}},
        ("onebit is too coarse to compute with", "zero.replicate", "Fix: set communication.parameters to int8."),
    ),
    *(
        Wrong(
            {"communication": {"parameters": "ternary"}, "zero": {"stage": 3, "hierarchical": True}} | sections,
            fragments,
        )
        for sections, fragments in (
            (
                {"optimizer": {"name": "onebit_adam"}, "schedule": {"total_steps": 100}},
                ("sends its running average to all ranks at once", "or optimizer.sends to gradients."),
            ),
            (
                {"precision": {"gradients": "in_backward"}},
                ("would launch these and the all-gathers in different orders", "set precision.gradients to fp32"),
            ),
            (
                {"precision": {"compute": "bf16", "master": "split"}},
                ("and quantized deltas would change them", "Fix: set precision.master to fp32"),
            ),
        )
    ),
    Wrong(
        {
            "communication": {"parameters": "int8"},
            "zero": {"stage": 3, "hierarchical": True, "offload": {"parameters": "host"}},
        },
        ("quantized deltas are added to parameters on the device", "leave zero.offload.parameters out"),
    ),
    Wrong(
        {"communication": {"parameters": "int4"}, "precision": {"compute": "bf16", "master": "split"}},
        ("and quantized deltas would change them", "Fix: set precision.master to fp32"),
    ),
    Wrong(
        {"communication": {"parameters": "int4"}, "zero": {"offload": {"parameters": "host"}}},
        ("added to parameters on the device", "Fix: leave zero.offload.parameters out"),
    ),
    Wrong(
        {"precision": {"nonfinite": "rewind"}},
        ("loads the newest checkpoint, but none are saved", "Fix: set checkpoint.dir and checkpoint.every_steps"),
    ),
    Wrong({"checkpoint": {"every_steps": 5}}, ("needs a folder to save into", "Fix: set checkpoint.dir")),
    Wrong(
        {"precision": {"gradients": "in_backward", "compute": "fp16"}},
        ("before it is known if", "fp16's loss scale", "Fix: set precision.compute to bf16"),
    ),
    Wrong(
        {"precision": {"gradients": "in_backward"}, "zero": {"stage": 0}},
        ("at stage 0 every rank owns all", "Fix: set zero.stage to 1"),
    ),
    Wrong(
        {"precision": {"gradients": "in_backward"}, "zero": {"offload": {"gradients": "host"}}},
        ("no gradients are stored", "Fix: leave zero.offload.gradients out"),
    ),
    Wrong(
        {"precision": {"gradients": "in_backward"}, "batch": {"micro": 2, "total": 16}},
        (
            "updates the parameters in every backward",
            "batch.accumulate",
            "derived: total 16",
            "Fix: set precision.gradients to fp32, or batch.accumulate to 1",
        ),
    ),
    Wrong(
        {"precision": {"master": "split", "compute": "fp16"}},
        ("fp16 is not supported", "precision.compute", "Fix: set precision.compute to bf16"),
    ),
    Wrong(
        {"precision": {"moments": "int8"}, "optimizer": {"name": "sgd"}},
        ("precision.moments: int8 requires adam or adamw", "Fix: leave precision.moments out"),
    ),
    Wrong(
        {"optimizer": {"name": "lion", "eps": 0.1}},
        (
            "optimizer.eps requires adam, adamw, onebit_adam or muon; lion does not use it",
            "Fix: leave optimizer.eps out",
        ),
    ),
    Wrong(
        {"batch": {"micro": 4, "accumulate": 2, "total": 48}},
        (
            "batch.total is 48, but micro 4 x accumulate 2 x data 4 = 32",
            "number of ranks",
            "Fix: leave batch.total out",
        ),
    ),
    Wrong(
        {"batch": {"micro": 3, "total": 32}},
        ("batch.total 32 cannot be divided by micro 3 x data 4 = 12", "auto  default", "Fix: set batch.total: 36."),
    ),
    Wrong(
        {"batch": {"accumulate": 3, "total": 2}},
        ("batch.total 2 cannot be divided by accumulate 3 x data 4 = 12", "Fix: set batch.total: 12."),
    ),
    Wrong(
        {"batch": {"total": 6}}, ("batch.total 6 cannot be divided by accumulate 1 x data 4 = 4", "set batch.total: 8.")
    ),
    Wrong(
        {"parallel": {"data": 3}},
        ("data 3 x pipeline 1 x sequence 1 x tensor 1 = 3 ranks, but there are 4", "Fix: leave parallel.data out"),
    ),
    Wrong(
        {"zero": {"keep_gathered": True}},
        ("zero.keep_gathered requires stage 3", "zero.stage", "default", "Fix: leave"),
    ),
    Wrong(
        {"zero": {"stage": 2, "hierarchical": True}},
        ("zero.hierarchical requires stage 3", "2  config", "Fix: leave"),
    ),
    Wrong(
        {"zero": {"stage": 3, "keep_gradients": True}},
        ("zero.keep_gradients requires zero.keep_gathered", "Fix: leave"),
    ),
    Wrong(
        {"zero": {"stage": 3, "hierarchical": True, "keep_gathered": True}},
        ("zero.hierarchical gathers parameters inside the node", "Fix: leave zero.keep_gathered out."),
    ),
    Wrong(
        {"zero": {"stage": 2, "replicate": "nodes"}},
        ("zero.replicate requires stage 3", "2  config", "Fix: leave"),
    ),
    Wrong(
        {"zero": {"stage": 3, "hierarchical": True, "replicate": "nodes"}},
        ("zero.replicate: nodes and zero.hierarchical are alternatives", "Fix: leave zero.hierarchical out."),
    ),
    Wrong(
        {"zero": {"stage": 3, "keep_gathered": True, "replicate": "nodes"}},
        ("zero.replicate: nodes and zero.keep_gathered are alternatives", "Fix: leave zero.keep_gathered out."),
    ),
    Wrong(
        {"zero": {"prefetch_bytes": "1MiB"}},
        ("zero.prefetch_bytes requires stage 3", "1048576  config", "Fix: leave"),
    ),
    Wrong(
        {"precision": {"loss_scale": 128}},
        (
            "precision.loss_scale requires fp16 compute; under fp32 the loss is not scaled",
            "auto on cpu",
            "Fix: leave",
        ),
    ),
    Wrong({"precision": {"loss_scale": 128}}, ("under bf16 the loss is not scaled", "auto on cuda"), device="cuda"),
    Wrong(
        {"optimizer": {"name": "sgd", "betas": [0.8, 0.9]}},
        (
            "optimizer.betas has no effect with sgd",
            "Fix: write optimizer.momentum: 0.8 in place of optimizer.betas.",
        ),
    ),
    Wrong(
        {"optimizer": {"name": "sgd", "eps": 1e-6}},
        ("optimizer.eps requires adam, adamw, onebit_adam or muon", "Fix: leave"),
    ),
    Wrong(
        {"optimizer": {"momentum": 0.9}},
        ("optimizer.momentum requires sgd; adamw has betas", "adamw  default", "Fix: leave"),
    ),
    Wrong(
        {"schedule": {"name": "cosine"}},
        ("a cosine schedule needs its number of steps", "Fix: set schedule.total_steps"),
    ),
    Wrong(
        {"schedule": {"name": "linear", "warmup_steps": 20, "total_steps": 10}},
        (
            "the warm-up is longer than the schedule",
            "20  config",
            "Fix: set schedule.warmup_steps to at most 10.",
        ),
    ),
    Wrong(
        {"schedule": {"min_lr": 0.1}},
        (
            "the schedule's lowest learning rate is above its highest",
            "0.001  default",
            "Fix: set schedule.min_lr to at most",
        ),
    ),
    Wrong(
        {"schedule": {"initial_lr": 0.1, "max_lr": 0.05}},
        (
            "the schedule's first learning rate is above its highest",
            "0.05  config",
            "Fix: set schedule.initial_lr to at",
        ),
    ),
    Wrong(
        {"schedule": {"name": "linear", "decay_steps": 20, "total_steps": 10}},
        ("the decay is longer than the schedule", "Fix: set schedule.decay_steps to at most 10."),
    ),
    Wrong(
        {"schedule": {"initial_steps": 2}},
        ("schedule.initial_steps are steps at schedule.initial_lr, which is not given", "Fix: set schedule.initial_lr"),
    ),
    Wrong(
        {"precision": {"initial_loss_scale": 128}},
        ("precision.initial_loss_scale requires fp16 compute", "under fp32 the loss is not scaled"),
    ),
    Wrong(
        {"precision": {"compute": "fp16", "loss_scale": 128, "loss_scale_window": 5}},
        ("precision.loss_scale_window requires a dynamic loss scale; 128.0 is constant", "Fix: leave"),
    ),
    Wrong({}, ("the number of ranks: expected a whole number of at least 1; got 0",), num_ranks=0),
    Wrong({}, ("the number of ranks: expected", "got true"), num_ranks=True),
    Wrong({}, ("device_type: expected a name such as 'cpu' or 'cuda'; got null",), device=None),  # type: ignore[arg-type]
]

SOURCES = [
    Wrong(3, ("config: expected a path, a mapping, a partita.Config or None; got 3 (int)",)),
    Wrong(b"x.yaml", ("config: expected a path, a mapping, a partita.Config or None; got b'x.yaml' (bytes)",)),
    Wrong([], ("config: expected a path", "got [] (list)")),
    Wrong("missing.yaml", ("config file 'missing.yaml' does not exist; correct the path",)),
    Wrong("config.toml", ("config file 'config.toml': expected a path that ends in .yaml, .yml or .json",)),
    Wrong("zero: {stage: 3}", ("expected a path that ends in .yaml, .yml or .json", "pass its content as a dict")),
    Wrong("nul\0byte.yaml", ("cannot be read: embedded null byte",)),
    Wrong(f"{'x' * 4000}.yaml", ("cannot be read: File name too long",)),
    Wrong(Path("/"), ("expected a path that ends in .yaml, .yml or .json",)),
]


@pytest.mark.parametrize("wrong", [*VALUES, *KEYS, *CROSS_FIELD, *SOURCES], ids=lambda w: w.fragments[0][:60])
def test_message(wrong: Wrong) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(load_config(wrong.config), wrong.num_ranks, wrong.device)  # type: ignore[arg-type]
    missing = [fragment for fragment in wrong.fragments if fragment not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"
    assert isinstance(caught.value, PartitaError)
    assert isinstance(caught.value, ValueError)


def test_there_are_many() -> None:
    assert len([*VALUES, *KEYS, *CROSS_FIELD, *SOURCES]) >= 100


@pytest.mark.parametrize("wrong", VALUES, ids=lambda w: w.fragments[0][:60])
def test_constructing_a_config_says_the_same(wrong: Wrong) -> None:
    assert isinstance(wrong.config, dict)
    with pytest.raises(ConfigError) as caught:
        Config(**wrong.config)
    assert wrong.fragments[0] in str(caught.value)


def test_a_problem_is_listed_once_a_key_and_long_lists_are_cut() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({f"unknown_{i}": i for i in range(100)})
    assert "100 problems" in str(caught.value)
    assert "... and 80 more" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        load_config({"batch": {"micro": []}})
    assert str(caught.value).count("batch.micro") == 1


def test_cyclic_and_exponential_data() -> None:
    cyclic: dict[str, object] = {}
    cyclic["zero"] = cyclic
    with pytest.raises(ConfigError, match="nested deeper than 16 levels, or containing itself"):
        load_config(cyclic)
    shared: object = "x"
    for _ in range(15):
        shared = [shared] * 10
    with pytest.raises(ConfigError, match="more than 10000 values"):
        load_config({"zero": shared})


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize("value", [Unprintable(), object(), np.ones(3), {1, 2}, lambda: 1, "\ud800", "\0"])
@pytest.mark.parametrize("key", ["zero", "clip_grad_norm", "stage"])
def test_foreign_objects(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{key}: "):
        load_config({key: value})
    with pytest.raises(ConfigError, match=r"zero\.stage: expected"):
        load_config({"zero": {"stage": value}})


def test_surrogate_keys() -> None:
    with pytest.raises(ConfigError, match=r"got the key '\\udfff' in 'zero'; remove these characters"):
        load_config({"zero": {"\udfff": 2}})


def test_changing_a_config_says_how() -> None:
    config = Config()
    with pytest.raises(ConfigError, match=r"'stage' cannot be set to 3.*overrides="):
        config.zero.stage = 3  # type: ignore[misc]
    assert config == Config()


def test_resolving_what_is_no_config() -> None:
    with pytest.raises(ConfigError, match=r"config: expected a partita\.Config .*; got \{'zero': \{\}\}"):
        resolve({"zero": {}}, 1, "cpu")  # type: ignore[arg-type]


def test_nothing_wrong_is_no_error() -> None:
    assert isinstance(resolve(load_config(None), 1, "cpu"), Resolved)
