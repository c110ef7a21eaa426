"""Training modes that are compared: each builds the model and returns a function that takes a step.

A mode imports its libraries before it calls ``build``, so that the memory of imports is not counted as that of
training.
"""

import importlib.util
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks._work import OPTIMIZER

Build = Callable[[str], nn.Module]
TakeStep = Callable[[Tensor, Tensor], float]


@dataclass(frozen=True)
class Trainer:
    """A mode that is ready to train.

    ``take_step(tokens, targets)`` returns this rank's loss. ``engine``: partita's engine, or None in other modes.
    ``data``: the rank's data coordinate and the number of data ranks (None: all ranks are data ranks). ``seconds``:
    the times of parts of the steps so far, by name.
    """

    take_step: TakeStep
    engine: Any = None
    data: tuple[int, int] | None = None
    seconds: dict[str, float] = field(default_factory=dict)


def plain(build: Build) -> Trainer:
    """Plain PyTorch in one process."""
    model = build("cpu")
    return _with_optimizer(model, _adamw(model))


def ddp(build: Build) -> Trainer:
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(build("cpu"), gradient_as_bucket_view=True)
    return _with_optimizer(model, _adamw(model))


def ddp_with_hook(build: Build, hook: str) -> Trainer:
    """DistributedDataParallel with a communication hook: low-rank factors (PowerSGD) or bf16 gradients."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    # PowerSGD over gloo supports only one bucket.
    model = DistributedDataParallel(build("cpu"), gradient_as_bucket_view=True, bucket_cap_mb=1000)
    if hook == "PowerSGD":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        model.register_comm_hook(None, _as_bf16)
    return _with_optimizer(model, _adamw(model))


def _as_bf16(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Compress as torch's bf16_compress_hook does, which does not support the CPU."""
    sent = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    under_way = dist.all_reduce(sent, async_op=True).get_future()
    return under_way.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def ddp_with_sharded_optimizer(build: Build) -> Trainer:
    """DistributedDataParallel and ZeroRedundancyOptimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(build("cpu"), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, fused=True, **OPTIMIZER)
    return _with_optimizer(model, optimizer)


def fsdp2(build: Build, *, kept: bool = False, device: str = "cpu") -> Trainer:
    """FSDP2: ``fully_shard`` on every block and on the remaining parameters; a ``meta`` model is filled by shard."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = build(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=not kept)
    fully_shard(model, mesh=mesh, reshard_after_forward=not kept)
    if device == "meta":
        model.to_empty(device="cpu")
        for module in model.modules():
            if any(True for _ in module.parameters(recurse=False)):
                module.reset_parameters()
    return _with_optimizer(model, _adamw(model))


def partita(
    build: Build,
    zero: dict[str, Any],
    *,
    device: str = "cpu",
    from_files: bool = False,
    optimizer: Mapping[str, Any] = MappingProxyType({"name": "adamw"}),
    **communication: Any,
) -> Trainer:
    """Partita. ``from_files``: load the weights from the safetensors files in the folder for temporary files."""
    import partita

    weights = tempfile.gettempdir() if from_files else None
    config = {"zero": zero, "optimizer": {**OPTIMIZER, **optimizer}, "communication": communication}
    return _stepped(partita.initialize(build(device), config, weights=weights))


def partita_with(build: Build, zero: dict[str, Any], make: str) -> Trainer:
    """Partita over the network, with an optimizer object of another library, or of torch."""
    import pytorch_optimizer

    import partita

    made: Any = getattr(torch.optim, make, None) or getattr(pytorch_optimizer, make)
    config = {"zero": zero, "communication": {"within_node": "network"}}
    return _stepped(partita.initialize(build("cpu"), config, optimizer=lambda params: made(params, lr=OPTIMIZER["lr"])))


def partita_with_muon(build: Build, zero: dict[str, Any]) -> Trainer:
    """Partita over the network, with Muon; the time of the Newton-Schulz iterations is measured."""
    from partita.optim import muon

    trainer = partita(build, zero, optimizer=MUON, within_node="network")
    trainer.seconds["newton_schulz_s"] = 0.0
    iterate = muon.orthogonalize

    def timed(*args: Any) -> Tensor:
        begin = time.perf_counter()
        try:
            return iterate(*args)
        finally:
            trainer.seconds["newton_schulz_s"] += time.perf_counter() - begin

    muon.orthogonalize = timed
    return trainer


def deepspeed_with_muon(build: Build, stage: int) -> Trainer:
    import deepspeed

    torch._dynamo.config.disable = True  # it compiles its Newton-Schulz iteration for each shape, on every rank
    deepspeed.init_distributed("gloo")
    params = {"lr": OPTIMIZER["lr"], "weight_decay": OPTIMIZER["weight_decay"], "momentum": 0.95}
    config = {
        "train_micro_batch_size_per_gpu": 1,  # only divides the reported samples
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # 1.0 by default, and clips the orthogonalized updates
        "steps_per_print": 10**9,
        "optimizer": {"type": "Muon", "params": params},
        "zero_optimization": {"stage": stage, "reduce_scatter": stage != 3},
    }
    engine, *_ = deepspeed.initialize(model=build("cpu"), config=config)
    return _stepped(engine)


def deepspeed(build: Build, stage: int) -> Trainer:
    import deepspeed

    deepspeed.init_distributed("gloo")
    config = {
        "train_micro_batch_size_per_gpu": 1,  # only divides the reported samples
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # 1.0 by default
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage},
    }
    model = build("cpu")
    engine, *_ = deepspeed.initialize(model=model, optimizer=_adamw(model), config=config)
    return _stepped(engine)


def _stepped(engine: Any) -> Trainer:
    """Return a trainer for an engine with ``backward`` and ``step``: partita's or DeepSpeed's."""

    def take_step(tokens: Tensor, targets: Tensor) -> float:
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return Trainer(take_step, engine if hasattr(engine, "traffic_report") else None)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), fused=True, **OPTIMIZER)


def _with_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> Trainer:
    def take_step(tokens: Tensor, targets: Tensor) -> float:
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return Trainer(take_step)


KEPT = {"stage": 3, "keep_gathered": True}
PARTITA = {f"partita {stage}": partial(partita, zero={"stage": stage}) for stage in range(4)}
ON_HOST = {"stage": 3, "offload": {"parameters": "host", "optimizer": "host"}}
ON_DISK = {"stage": 3, "offload": {"parameters": "disk", "optimizer": "disk"}}
PARTITA["partita 3, kept"] = partial(partita, zero=KEPT)
OVER_NETWORK = {f"{name}, over the network": partial(mode, within_node="network") for name, mode in PARTITA.items()}
# Modes that send compressed values: their losses differ.
LOSSY: dict[str, Callable[[Build], Trainer]] = {
    "DDP + PowerSGD": partial(ddp_with_hook, hook="PowerSGD"),
    "DDP, bf16 hook": partial(ddp_with_hook, hook="bf16"),
    "partita 1, int4": partial(partita, zero={"stage": 1}, gradients="int4", parameters="int4"),
    "partita 1, ternary": partial(partita, zero={"stage": 1}, gradients="ternary", parameters="ternary"),
    "partita 1, ternary, onebit_adam": partial(
        partita,
        zero={"stage": 1},
        optimizer={"name": "onebit_adam", "sends": "gradients"},
        gradients="ternary",
        parameters="ternary",
        warmup_steps=1,
    ),
    "partita 1, low rank": partial(partita, zero={"stage": 1}, gradients="low_rank", parameters="int4", warmup_steps=1),
    "partita 0, low rank": partial(partita, zero={"stage": 0}, gradients="low_rank", warmup_steps=1),
    "partita 0, 1-bit Adam": partial(partita, zero={"stage": 0}, optimizer={"name": "onebit_adam"}, warmup_steps=1),
}
MUON = {"name": "muon"}
MATRIX_OPTIMIZERS: dict[str, Callable[[Build], Trainer]] = {
    **{f"partita {stage}, Muon": partial(partita_with_muon, zero={"stage": stage}) for stage in (1, 3)},
    **{
        f"partita {stage}, {make}": partial(partita_with, zero={"stage": stage}, make=make)
        for stage in (1, 3)
        for make in ("Adafactor", "SOAP")
    },
    **{f"DeepSpeed {stage}, Muon": partial(deepspeed_with_muon, stage=stage) for stage in (1, 3)},
}
DEEPSPEED = {f"DeepSpeed {stage}": partial(deepspeed, stage=stage) for stage in (1, 2, 3)}

MODES: dict[str, Callable[[Build], Trainer]] = {
    "plain": plain,
    "DDP": ddp,
    "DDP + ZeRO-1": ddp_with_sharded_optimizer,
    "FSDP2": fsdp2,
    "FSDP2, kept": partial(fsdp2, kept=True),
    "FSDP2, from meta": partial(fsdp2, device="meta"),
    **DEEPSPEED,
    **PARTITA,
    **OVER_NETWORK,
    **LOSSY,
    **MATRIX_OPTIMIZERS,
    "partita 3, from meta": partial(partita, zero={"stage": 3}, device="meta"),
    "partita 3, on host, from meta": partial(partita, zero=ON_HOST, device="meta"),
    "partita 3, on host, from files": partial(partita, zero=ON_HOST, device="meta", from_files=True),
    "partita 3, on disk, from meta": partial(partita, zero=ON_DISK, device="meta"),
}


def deepspeed_is_here() -> bool:
    return importlib.util.find_spec("deepspeed") is not None
