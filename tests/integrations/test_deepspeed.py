"""Loops written for DeepSpeed, with only the import changed, compared with the same loops in plain PyTorch."""

import argparse
import json
import logging
import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import partita.integrations.deepspeed as deepspeed
from partita import ConfigError, PartitaError
from tests.kit.models import WIDTH, Stack
from tests.kit.ranks import on_ranks
from tests.kit.training import rank, world

NUM_STEPS, MICRO = 5, 4
ADAM = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}  # the large eps keeps updates by rounding errors small
# Powers of two: products with them are exact, so that weights rounded to 16 bits are reproducible.
SGD = {"lr": 2.0**-4, "momentum": 0.5}
WARMUP_STEPS, LOWEST = 3, 1e-3


@dataclass(frozen=True)
class Loop:
    """Settings of one training loop."""

    accumulate: int = 1
    clip: float = 0.0
    warmup: bool = False
    scale_power: int = 0  # log2 of fp16's initial loss scale, with SGD; 0: fp32, with AdamW

    def config(self, stage: int) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": MICRO,
            "gradient_accumulation_steps": self.accumulate,
            "zero_optimization": {"stage": stage},
            "gradient_clipping": self.clip,
            "optimizer": {"type": "SGD", "params": SGD} if self.scale_power else {"type": "AdamW", "params": ADAM},
            "fp16": {"enabled": bool(self.scale_power), "initial_scale_power": self.scale_power or 16},
            **({"scheduler": {"type": "WarmupLR", "params": self.schedule()}} if self.warmup else {}),
        }

    def schedule(self) -> dict[str, Any]:
        return {"warmup_min_lr": LOWEST, "warmup_max_lr": ADAM["lr"], "warmup_num_steps": WARMUP_STEPS}

    def rate(self, update: int) -> float:
        """Return the learning rate of an update by DeepSpeed's WarmupLR, which repeats the lowest rate once."""
        if not self.warmup:
            return SGD["lr"] if self.scale_power else ADAM["lr"]
        risen = min(1.0, math.log(update) / math.log(WARMUP_STEPS)) if update else 0.0
        return LOWEST + (ADAM["lr"] - LOWEST) * risen


LOOPS = {
    "bare": Loop(),
    "accumulated": Loop(accumulate=2, clip=0.05, warmup=True),
    "fp16": Loop(scale_power=26),
}


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Stack(2)


def loss_of(model: Any, number: int) -> Tensor:
    """Return the loss of one micro-batch of this rank."""
    x = torch.randn(MICRO, WIDTH, generator=torch.Generator().manual_seed(100 * number + rank()))
    dtype = next(model.parameters()).dtype if isinstance(model, nn.Module) else x.dtype
    return model(x.to(dtype)).float().square().mean()


Record = dict[str, list[Any]]


def native(loop: Loop, stage: int) -> Record:
    """Run a loop written for DeepSpeed; return its losses, norms and learning rates."""
    model = model_of(rank())
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=loop.config(stage)
    )
    assert engine.module is model
    assert (loader, scheduler is None) == (None, not loop.warmup)
    assert optimizer.param_groups[0]["lr"] == engine.get_lr()[0]
    found: Record = {"loss": [], "norm": [], "rate": []}
    for number in range(NUM_STEPS * loop.accumulate):
        done, update = number + 1, (number + 1) % loop.accumulate == 0
        loss = loss_of(engine, number)
        assert engine.is_gradient_accumulation_boundary() is update
        rate = engine.get_lr()[0]
        divided = engine.backward(loss)
        assert divided.item() == pytest.approx(loss.item() / loop.accumulate)
        engine.step()
        found["loss"].append(loss.item())
        assert (engine.micro_steps, engine.global_steps) == (done, done // loop.accumulate)
        assert engine.global_samples == engine.global_steps * engine.train_batch_size()
        if update:
            found["norm"].append(engine.get_global_grad_norm())
            found["rate"].append(rate if engine.was_step_applied() else None)
        else:
            assert not engine.was_step_applied()
    assert engine.skipped_steps == found["rate"].count(None)
    assert engine.train_batch_size() == MICRO * loop.accumulate * world()
    engine.destroy()
    return found


def plain(loop: Loop) -> Record:
    """Run the same loop under DDP. The fp16 weights are copies of fp32 master weights."""
    scale = 2.0**loop.scale_power
    master = model_of(0)
    params = list(master.parameters())
    model = model_of(0).half() if loop.scale_power else master
    ddp = DistributedDataParallel(model)
    kind: Any = torch.optim.SGD if loop.scale_power else torch.optim.AdamW
    optimizer = kind(params, **SGD if loop.scale_power else ADAM)
    found: Record = {"loss": [], "norm": [], "rate": []}
    updates = 0
    for number in range(NUM_STEPS * loop.accumulate):
        update = (number + 1) % loop.accumulate == 0
        ddp.require_backward_grad_sync = update and not loop.scale_power
        loss = loss_of(ddp, number)
        found["loss"].append(loss.item())
        (loss / loop.accumulate * scale).backward()
        if not update:
            continue
        if loop.scale_power:
            for param, half in zip(params, model.parameters(), strict=True):
                assert half.grad is not None
                param.grad = half.grad.float()
                dist.all_reduce(param.grad)
                param.grad /= world() * scale
                half.grad = None
        norm = torch.nn.utils.clip_grad_norm_(params, loop.clip or math.inf)
        found["norm"].append(norm.item())
        if math.isfinite(norm):
            optimizer.param_groups[0]["lr"] = loop.rate(updates)
            found["rate"].append(loop.rate(updates))
            optimizer.step()
            updates += 1
        else:
            found["rate"].append(None)
            scale /= 2
        optimizer.zero_grad()
        if loop.scale_power:
            with torch.no_grad():
                for param, half in zip(params, model.parameters(), strict=True):
                    half.copy_(param)
    return found


def all_loops() -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    for name, loop in LOOPS.items():
        expected = plain(loop)
        assert (None in expected["rate"]) is (name == "fp16")  # fp16's first loss scale overflows
        for stage in range(4):
            got = native(loop, stage)
            for key, values in expected.items():
                assert [value is None for value in got[key]] == [value is None for value in values], (name, stage, key)
                for one, other in zip(got[key], values, strict=True):
                    if other is None or not math.isfinite(other):
                        continue
                    assert one == pytest.approx(other, rel=1e-6), (name, stage, key, got[key], values)
    assert deepspeed.comm.get_rank() == rank()
    deepspeed.comm.barrier()
    deepspeed.comm.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*gradient.* not finite", "ignore:.*loss scale")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_numbers_of_plain_loops(num_ranks: int) -> None:
    on_ranks(num_ranks, all_loops, with_group=False)


# ----------------------------------------------------------------------------------- checkpoints, batches and errors


def steps(engine: Any, first: int, num: int) -> list[float]:
    losses = []
    for number in range(first, first + num):
        loss = loss_of(engine, number)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def engine_of(loop: Loop, stage: int = 3, seed: int = 0) -> Any:
    return deepspeed.initialize(model=model_of(seed), config=loop.config(stage))[0]


def resumes(folder: str) -> None:
    loop = Loop(warmup=True)
    engine = engine_of(loop)
    steps(engine, 0, 2)
    engine.save_checkpoint(folder, client_state={"epoch": 1})
    expected = steps(engine, 2, 2)
    engine.save_checkpoint(folder, tag="best", client_state={"epoch": 2}, save_latest=False)
    engine.save_16bit_model(folder)
    weights = engine.state_dict()
    engine.destroy()

    engine = engine_of(loop, stage=1, seed=1)
    path, client_state = engine.load_checkpoint(folder)
    assert (path, client_state) == (f"{folder}/global_step2/step-2", {"epoch": 1})
    assert (engine.global_steps, engine.global_samples) == (2, 2 * engine.train_batch_size())
    assert steps(engine, 2, 2) == pytest.approx(expected, rel=1e-6)
    assert engine.load_checkpoint(folder, tag="best")[1] == {"epoch": 2}
    assert engine.global_steps == 4
    engine.destroy()

    engine = engine_of(loop, seed=1)
    rate = engine.get_lr()
    assert engine.load_checkpoint(folder, load_module_only=True)[1] == {"epoch": 1}
    assert (engine.global_steps, engine.get_lr()) == (0, rate)
    assert engine.load_checkpoint(folder, load_lr_scheduler_states=False)[0]
    assert engine.lr_scheduler.last_epoch == 0
    with pytest.warns(UserWarning, match="load_checkpoint loads nothing: .* has no file 'latest'"):
        assert engine.load_checkpoint(f"{folder}/empty") == (None, None)
    with pytest.raises(PartitaError, match="there is no checkpoint 'worst' in"):
        engine.load_checkpoint(folder, tag="worst")
    with pytest.raises(PartitaError, match="the ranks' tags differ"):
        engine.save_checkpoint(folder, tag=f"of-{rank()}")
    with pytest.raises(PartitaError, match=r"rank 0 cannot write"):
        engine.save_16bit_model("/proc/nowhere")
    engine.destroy()
    if rank() == 0:
        found = torch.load(Path(folder) / "pytorch_model.bin", weights_only=True)
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], weights[name]) for name in found)
    deepspeed.comm.destroy_process_group()


def meets_by_arguments(folder: str) -> None:
    own = int(os.environ["RANK"])
    with mock.patch.dict(os.environ, clear=True):  # no launcher variables, as under torch.multiprocessing.spawn
        deepspeed.init_distributed("gloo", init_method=f"file://{folder}/store", rank=own, world_size=2)
        engine = engine_of(Loop())
        assert (engine.global_rank, engine.world_size) == (own, 2)
        steps(engine, 0, 1)
        engine.save_checkpoint(f"{folder}/run", tag="a")
        said = "there is no checkpoint 'b' in" if own else r"ranks \[1\] do not find the checkpoint in"
        with pytest.raises(PartitaError, match=said):
            engine.load_checkpoint(f"{folder}/run", tag="ab"[own])
        engine.destroy()
        deepspeed.comm.destroy_process_group()


def test_ranks_that_are_told_by_arguments(tmp_path: Path) -> None:
    on_ranks(2, meets_by_arguments, str(tmp_path), with_group=False)


def test_checkpoints(tmp_path: Path) -> None:
    on_ranks(2, resumes, str(tmp_path), with_group=False)
    assert (tmp_path / "latest").read_text() == "global_step2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "global_step2", "latest", "pytorch_model.bin"]


class Losses(nn.Module):
    """Module that returns its loss, as ``train_batch`` requires."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = model_of(0)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = (self.stack(x) - y).square().mean()
        return loss


def whole_batches() -> None:
    data = [*TensorDataset(torch.randn(18, WIDTH), torch.zeros(18, WIDTH))]  # DeepSpeed accepts a list as dataset, too
    loop = Loop(accumulate=2)
    args = deepspeed.add_config_arguments(argparse.ArgumentParser()).parse_args(["--deepspeed"])
    args.local_rank = -1
    config = loop.config(2) | {"dataloader_drop_last": True}
    engine, _, loader, _ = deepspeed.initialize(args, Losses(), config_params=config, training_data=data)
    assert args.local_rank == rank() == engine.local_rank == deepspeed.comm.get_local_rank()
    assert len(loader) == 18 // world() // MICRO
    losses = [engine.train_batch().item() for _ in range(3)]  # the loader restarts at its end
    assert (engine.global_steps, engine.micro_steps) == (3, 6)
    assert losses[-1] < losses[0]
    assert engine.module.training
    generator = torch.Generator().manual_seed(3)
    batches = [(x, torch.zeros_like(x)) for x in torch.randn(2, MICRO, WIDTH, generator=generator)]
    with deepspeed.zero.GatheredParameters(engine.parameters()), torch.no_grad():
        expected = sum(engine.module(*batch).item() for batch in batches) / 2
    assert engine.eval_batch(iter(batches)).item() == pytest.approx(expected, rel=1e-6)
    assert engine.module.training
    every = [None] * world()
    deepspeed.comm.all_gather_object(every, losses)
    assert every == [losses] * world()
    assert engine.stack is engine.module.stack  # attributes of the model
    engine.destroy()
    deepspeed.comm.destroy_process_group()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_whole_batches(num_ranks: int) -> None:
    on_ranks(num_ranks, whole_batches, with_group=False)


class Own(nn.Module):
    """Module with a tied weight, and a parameter at the root that is initialized by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.empty(WIDTH))
        nn.init.uniform_(self.scale, 1.0, 2.0)
        self.register_buffer("shift", torch.arange(float(WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x) * self.scale + self.shift)
        return out


def built_in_init() -> None:
    torch.manual_seed(0)
    expected = Own()
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=Loop().config(3)):
        model = Own()
    assert model.last.weight is model.first.weight
    assert isinstance(model.scale, nn.Parameter)
    assert not model.scale.is_meta
    with deepspeed.zero.GatheredParameters(model.first.bias, modifier_rank=0):
        if rank() == 0:
            nn.init.constant_(model.first.bias, 0.25)
    nn.init.constant_(expected.first.bias, 0.25)
    with deepspeed.zero.Init(enabled=False):
        assert torch.equal(nn.Parameter(torch.ones(2)), torch.ones(2))
    engine, *_ = deepspeed.initialize(model=model, config=Loop().config(3))
    with deepspeed.zero.GatheredParameters(model.parameters()):
        for name, param in expected.named_parameters():
            assert torch.equal(model.get_parameter(name), param), name
        assert torch.equal(model.shift, expected.shift)
    with deepspeed.zero.GatheredParameters([model.scale], modifier_rank=0):
        if rank() == 0:
            model.scale.data.fill_(3.0)
    with deepspeed.zero.GatheredParameters(model.scale):
        assert (model.scale == 3.0).all()
    with deepspeed.zero.GatheredParameters(model.scale, enabled=False):
        assert model.scale.eq(3.0).all()  # a read on all ranks needs no context
    with pytest.raises(PartitaError, match="write there, with modifier_rank=0"):
        with deepspeed.zero.GatheredParameters(model.scale, modifier_rank=1):
            pass
    deepspeed.zero.register_external_parameter(model, model.scale)
    engine.destroy()
    deepspeed.comm.destroy_process_group()


def test_models_built_on_rank_0_alone() -> None:
    on_ranks(2, built_in_init, with_group=False)


def groups_and_errors(path: str) -> None:
    model = model_of(0)
    model.last.requires_grad_(False)
    decayed = [param for param in model.parameters() if param.dim() > 1 and param.requires_grad]
    others = [param for param in model.parameters() if param.dim() == 1 and param.requires_grad]
    groups = [{"params": decayed, "lr": 0.5}, {"params": others, "weight_decay": 0.0}]
    args = argparse.Namespace(deepspeed_config=path)
    engine, optimizer, *_ = deepspeed.initialize(args=args, model=model, model_parameters=groups)
    assert [group["lr"] for group in optimizer.param_groups] == engine.get_lr() == [0.5, ADAM["lr"]]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [ADAM["weight_decay"], 0.0]
    assert engine.get_mom() == [(0.9, 0.999)] * 2
    assert (engine.zero_optimization_stage(), engine.gradient_clipping()) == (2, 0.0)
    assert (engine.fp16_enabled(), engine.bfloat16_enabled()) == (False, False)
    assert engine.get_global_grad_norm() is None
    loss = loss_of(engine, 0)
    assert engine.scale(loss) is loss
    for wrong, said in (
        (lambda: engine.backward(loss, retain_graph=True), "call backward once on their sum"),
        (lambda: engine.step(lr_kwargs={"epoch": 1}), "torch's schedulers take no arguments"),
        (lambda: engine.load_checkpoint("x", custom_load_fn=print), r"zero.GatheredParameters\(modifier_rank=0\)"),
        (lambda: engine.train_batch(), "pass an iterator, or pass training_data to initialize"),
        (lambda: engine.set_gradient_accumulation_boundary(True), "call step\\(\\) after every micro-batch"),
        (lambda: engine.no_such_name, "use partita.initialize and its engine"),
        (lambda: deepspeed.init_inference, "generate inside"),
        (lambda: deepspeed.no_such_name, "use partita.initialize and its engine"),
        (lambda: deepspeed.zero.TiledLinear, "use torch.nn.Linear"),
        (lambda: deepspeed.comm.log_summary, "traffic_report"),
        (lambda: deepspeed.zero.Init(mpu=3), "leave them out"),
    ):
        with pytest.raises(PartitaError, match=said):
            wrong()
    assert not hasattr(engine, "timers")
    with pytest.raises(ImportError, match="set the optimizer in the configuration"):
        from partita.integrations.deepspeed import ops  # noqa: F401
    engine.backward(loss, scale_wrt_gas=False)
    engine.step()
    engine.backward(loss_of(engine, 1))
    with pytest.raises(PartitaError, match="after micro-batch 1 of 2"):
        engine.zero_grad() if engine.micro_steps % 2 else pytest.fail("not inside a batch")
    engine.destroy()
    for arguments, said in (
        ({}, "the configuration is missing"),
        ({"config": {}, "config_params": {}}, "passed as config and config_params"),
        ({"config": {}, "mpu": 1}, "sequence_parallel_size in the configuration"),
        ({"config": {"train_micro_batch_size_per_gpu": 1}, "training_data": iter([1])}, "expected a map-style dataset"),
    ):
        with pytest.raises(ConfigError, match=said):
            deepspeed.initialize(model=model_of(0), **arguments)
    engine, optimizer, _, scheduler = deepspeed.initialize(model=model_of(0), config={"train_batch_size": world()})
    assert (optimizer, scheduler) == (None, None)
    with pytest.raises(PartitaError, match="there is no optimizer"):
        engine.backward(loss_of(engine, 0))
    engine.destroy()
    deepspeed.comm.destroy_process_group()


def test_groups_and_errors(tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text(json.dumps(Loop(accumulate=2).config(2)))
    on_ranks(1, groups_and_errors, str(tmp_path / "ds_config.json"), with_group=False)


def configured_on_groups(kind: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the settings of the configured optimizer's groups, and the lines that are logged at the start."""
    model, config = model_of(0), Loop().config(2)
    config["optimizer"] = {"type": kind, "params": {"lr": 1e-2, "weight_decay": 0.1}}
    decayed, others = ([p for p in model.parameters() if (p.dim() > 1) == is_matrix] for is_matrix in (True, False))
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    with mock.patch.object(logging.getLogger("partita"), "info") as info:
        engine, optimizer, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    engine.backward(loss_of(engine, 0))
    engine.step()
    assert engine.was_step_applied()
    engine.destroy()
    deepspeed.comm.destroy_process_group()
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return settings, [str(call.args[-1]) for call in info.call_args_list]


@pytest.mark.parametrize("kind", ["AdamW", "Muon"])
def test_groups_of_the_configured_optimizer(kind: str) -> None:
    for settings, said in on_ranks(2, configured_on_groups, kind, with_group=False):
        found = {(group.get("matrices"), group["weight_decay"]) for group in settings}
        assert found >= ({(True, 0.1), (False, 0.0)} if kind == "Muon" else {(None, 0.1), (None, 0.0)})
        assert not any("ignored: optimizer" in line or "optimizer: as passed" in line for line in said)


SCRIPT = """
import argparse

import torch
import partita.integrations.deepspeed as deepspeed
from torch import nn
from torch.utils.data import TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
args = deepspeed.add_config_arguments(parser).parse_args()
deepspeed.init_distributed()
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
parameters = filter(lambda p: p.requires_grad, net.parameters())
model_engine, optimizer, trainloader, __ = deepspeed.initialize(
    args=args, model=net, model_parameters=parameters, training_data=data
)
criterion = nn.CrossEntropyLoss()
for epoch in range(2):
    for i, (inputs, labels) in enumerate(trainloader):
        inputs, labels = inputs.to(model_engine.device), labels.to(model_engine.device)
        loss = criterion(model_engine(inputs), labels)
        model_engine.backward(loss)
        model_engine.step()
    loss = loss.detach()
    deepspeed.comm.all_reduce(loss)
    if deepspeed.comm.get_rank() == 0:
        print(f"epoch {epoch} loss {loss.item():.4f} steps {model_engine.global_steps}", flush=True)
model_engine.destroy()
deepspeed.comm.destroy_process_group()
"""


def test_a_script_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    config = {"train_batch_size": 16, "zero_optimization": True, "optimizer": {"type": "Adam", "params": {"lr": 0.05}}}
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    script = [str(tmp_path / "train.py"), "--deepspeed", "--deepspeed_config", str(tmp_path / "ds_config.json")]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, *script], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    epochs = re.findall(r"epoch \d loss ([\d.]+) steps (\d+)", done.stdout)
    assert [int(steps) for _, steps in epochs] == [4, 8]
    assert float(epochs[1][0]) < float(epochs[0][0])


# Imports and setup as in DeepSpeed's examples.
UNCHANGED = """
import argparse
import logging

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.dataloader import RepeatingLoader
from torch import nn
from torch.utils.data import TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
args = deepspeed.add_config_arguments(parser).parse_args()
deepspeed.init_distributed()
device = get_accelerator().device_name(max(0, args.local_rank))
get_accelerator().set_device(max(0, args.local_rank))
torch.manual_seed(0)
data = TensorDataset(torch.randn(16, 8), torch.randint(0, 3, (16,)))
net = nn.Linear(8, 3)
engine, optimizer, loader, _ = deepspeed.initialize(
    args=args, model=net, model_parameters=net.parameters(), training_data=data
)
assert deepspeed.utils.RepeatingLoader is RepeatingLoader
batches = iter(RepeatingLoader(loader))
for _ in range(5):  # of 2 in the loader
    inputs, labels = (value.to(device) for value in next(batches))
    loss = nn.functional.cross_entropy(engine(inputs), labels)
    engine.backward(loss)
    engine.step()
engine.empty_partition_cache()
print(f"steps {engine.global_steps}, {deepspeed.__name__}, {get_accelerator().current_device_name()}")
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
"""


def test_an_unchanged_script_under_partita_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(UNCHANGED)
    config = {"train_batch_size": 8, "checkpoint": {"tag_validation": "Warn"}, "zero_optimization": {"stage": 3}}
    config["optimizer"] = {"type": "Adam", "params": {"lr": 0.05}}
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "partita.cli.main", "run", "--processes", "1", str(tmp_path / "train.py")]
    command += ["--deepspeed", "--deepspeed_config", str(tmp_path / "ds_config.json")]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert "steps 5, partita.integrations.deepspeed, cpu" in done.stdout, done.stderr
    assert done.returncode == 1
    assert "deepspeed.moe of DeepSpeed is not in partita.integrations.deepspeed: use the model's own experts" in (
        done.stderr
    )


def test_a_loader_that_repeats() -> None:
    loader = deepspeed.utils.RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]
    with pytest.raises(StopIteration):
        next(deepspeed.utils.RepeatingLoader([]))


def test_the_accelerator_is_the_one_that_partita_uses() -> None:
    found = deepspeed.get_accelerator()
    assert found.is_available()
    assert found.on_accelerator(torch.empty(1, device=found.current_device_name()))
    assert found.communication_backend_name() in ("gloo", "nccl")
    assert not hasattr(found, "FloatTensor")
    with pytest.raises(AttributeError, match="use torch.accelerator"):
        found.Stream()
