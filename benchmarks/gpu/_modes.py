"""Training modes for a decoder larger than the device: each builds the decoder and returns a function for one step.

Weights are created where they will be stored, from a seed, without passing through the disk. Every block is recomputed
in backward.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from partita.memory import accelerator
from partita.train.decoder import Decoder, DecoderShape

OPTIMIZER: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
BF16 = {"compute": "bf16", "gradients": "bf16"}
LEAN = {"compute": "bf16", "master": "split", "moments": "int8", "gradients": "in_backward"}
ALL_ON_HOST = {"parameters": "host", "optimizer": "host"}
ON_DISK = {"parameters": "host", "optimizer": "disk"}
AUTO = {"parameters": "auto", "optimizer": "auto"}

TakeStep = Callable[[Tensor, Tensor], float]


@dataclass(frozen=True)
class Setting:
    """The decoder and the device of an attempt, and the folder of the disk tier (``path``)."""

    shape: DecoderShape
    device: torch.device
    path: str | None


@dataclass(frozen=True)
class Mode:
    """A training mode.

    Attributes:
        device, host, disk: bytes per parameter that its states take there, for the first guess of a search.
        needs: a package that must be installed.
        simulates: True if it also runs on the simulated accelerator.
        config: settings of partita's modes.
    """

    start: Callable[[Setting], TakeStep]
    device: float
    host: float
    disk: float = 0.0
    needs: str | None = None
    simulates: bool = True
    config: dict[str, Any] = field(default_factory=dict)


def build(
    shape: DecoderShape, device: torch.device | str, dtype: torch.dtype = torch.float32, *, recomputed: bool = True
) -> Decoder:
    """Return the decoder with seeded weights; if ``recomputed``, torch's checkpoint recomputes its blocks."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = Decoder(shape)
    finally:
        torch.set_default_dtype(before)
    for block in model.blocks if recomputed else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    return model


def plain(setting: Setting) -> TakeStep:
    """Return a step of plain PyTorch: fp32 weights, bf16 autocast, torch's fused AdamW."""
    model = build(setting.shape, setting.device)
    step = _with_optimizer(model)

    def take_step(tokens: Tensor, targets: Tensor) -> float:
        with torch.autocast(setting.device.type, torch.bfloat16):
            return step(tokens, targets)

    return take_step


def fsdp2(setting: Setting, *, offload: bool) -> TakeStep:
    """Return a step of FSDP2 (``fully_shard``): bf16 compute, fp32 weights.

    With ``offload``, weights are on the host (``CPUOffloadPolicy``).
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    _one_rank(setting.device)
    mesh = init_device_mesh(setting.device.type, (1,))
    model = build(setting.shape, "meta")
    policies: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}
    if offload and accelerator.has_streams(setting.device):  # the policy pins memory
        policies["offload_policy"] = CPUOffloadPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **policies)
    fully_shard(model, mesh=mesh, **policies)
    model.to_empty(device="cpu" if offload else setting.device)
    for param in model.parameters():
        _fill(param.to_local() if hasattr(param, "to_local") else param, setting.device)
    return _with_optimizer(model)


def _fill(values: Tensor, device: torch.device) -> None:
    """Fill a tensor with random values drawn on the device, because the host takes minutes for a few billion."""
    with torch.no_grad():
        fresh = torch.empty(values.shape, device=device)
        values.copy_(fresh.normal_(std=0.02) if values.dim() > 1 else fresh.fill_(1.0))


def deepspeed(setting: Setting, stage: int) -> TakeStep:
    """Return a step of ZeRO-Offload: optimizer states are on the host, at stage 3 also parameters."""
    import deepspeed

    _one_rank(setting.device)
    offload = {"device": "cpu", "pin_memory": accelerator.has_streams(setting.device)}
    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": offload, "overlap_comm": True}
    if stage == 3:
        zero["offload_param"] = offload
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "zero_optimization": zero,
    }
    if stage == 3:
        with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16):
            model = build(setting.shape, setting.device)
    else:
        model = build(setting.shape, setting.device, torch.bfloat16)
    optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters(), **OPTIMIZER)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def take_step(tokens: Tensor, targets: Tensor) -> float:
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return take_step


def partita_engine(setting: Setting, offload: dict[str, str], precision: dict[str, str]) -> Any:
    import partita

    path = {"path": setting.path} if setting.path and "disk" in offload.values() else {}
    config = {"zero": {"stage": 3, "offload": {**offload, **path}}, "precision": precision, "optimizer": OPTIMIZER}
    return partita.initialize(build(setting.shape, "meta"), config)


def partita_step(setting: Setting, offload: dict[str, str], precision: dict[str, str]) -> TakeStep:
    engine = partita_engine(setting, offload, precision)

    def take_step(tokens: Tensor, targets: Tensor) -> float:
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return take_step


def long_step(setting: Setting, kept: dict[str, Any]) -> TakeStep:
    """Return a step with lean states on the host; ``kept`` has the settings of activations, loss and attention."""
    import partita

    path = {"path": setting.path} if setting.path else {}
    zero = {"stage": 3, "offload": {**ALL_ON_HOST, **path}}
    config = {"zero": zero, "precision": LEAN, "optimizer": OPTIMIZER, **kept}
    engine = partita.initialize(build(setting.shape, "meta", recomputed=not kept), config)

    def take_step(tokens: Tensor, targets: Tensor) -> float:
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return take_step


def _with_optimizer(model: nn.Module) -> TakeStep:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **OPTIMIZER)

    def take_step(tokens: Tensor, targets: Tensor) -> float:
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return take_step


def _one_rank(device: torch.device) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29571", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    backend = accelerator.backend(device)
    dist.init_process_group(f"cpu:gloo,{device.type}:{backend}" if accelerator.has_streams(device) else backend)


def _partita(offload: dict[str, str], precision: dict[str, str], device: float, host: float, disk: float = 0) -> Mode:
    config = {"offload": offload, "precision": precision}
    return Mode(partial(partita_step, **config), device, host, disk, config=config)


MODES = {
    "plain PyTorch": Mode(plain, 18, 0),
    "FSDP2": Mode(partial(fsdp2, offload=False), 18, 0, simulates=False),
    "FSDP2, CPUOffloadPolicy": Mode(partial(fsdp2, offload=True), 0.2, 16, simulates=False),
    "DeepSpeed 2 + offload": Mode(partial(deepspeed, stage=2), 2.5, 16, needs="deepspeed"),
    "DeepSpeed 3 + offload": Mode(partial(deepspeed, stage=3), 0.2, 18, needs="deepspeed"),
    "default": _partita({}, {"compute": "bf16"}, 18, 0),
    "none": _partita({}, BF16, 16, 0),
    "optimizer on host": _partita({"optimizer": "host"}, BF16, 2.1, 14),
    "everything on host": _partita(ALL_ON_HOST, BF16, 0.1, 16),
    "lean, none": _partita({}, LEAN, 6.2, 0),
    "lean, optimizer on host": _partita({"optimizer": "host"}, LEAN, 2.1, 4.1),
    "lean, everything on host": _partita(ALL_ON_HOST, LEAN, 0.1, 6.2),
    "lean, optimizer on disk": _partita(ON_DISK, LEAN, 0.1, 2.3, 4.1),
    "lean, auto": _partita(AUTO, LEAN, 1, 4, 1),
}


def _long(kept: dict[str, Any]) -> Mode:
    return Mode(partial(long_step, kept=kept), 0.1, 6.2, config=kept)


_INPUTS_ON_HOST = {"activations": {"checkpoint": "units", "offload": "host"}}
_TILED = {**_INPUTS_ON_HOST, "loss": {"tiled": "auto"}, "tiled": {"mlp": ["FeedForward"]}}
# Modes for long sequences, with the leanest states; each one adds to the previous one.
LONG_MODES = {
    "torch's checkpoint": _long({}),
    "recomputed": _long({"activations": {"checkpoint": "units"}}),
    "inputs on host": _long(_INPUTS_ON_HOST),
    "tiled loss and feed-forward": _long(_TILED),
    "sparse attention": _long(
        {**_TILED, "attention": {"pattern": "longformer", "window": 4096, "block": 128, "global": 1}}
    ),
}
PARTITA = [name for name, mode in MODES.items() if mode.config]
