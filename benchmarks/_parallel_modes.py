"""Training modes on axes other than data: torch's, DeepSpeed's and partita's.

torch's need a rewritten model: pipelines are cut by hand, and tensor parallelism needs a separate matrix for each
projection, because it cannot split fused ones by heads. The rewritten models are here.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._modes import Build, Trainer
from benchmarks._work import OPTIMIZER
from partita.train.decoder import Block, Decoder, rotary_table, rotate

MICRO_BATCHES = 4


def partita(build: Build, **config: Any) -> Trainer:
    import partita

    pipelined = config["parallel"].get("pipeline", 1) > 1
    batch = {"accumulate": MICRO_BATCHES if pipelined else 1}
    engine = partita.initialize(build("cpu"), {"optimizer": OPTIMIZER, "batch": batch, **config})

    def take_step(tokens: Tensor, targets: Tensor) -> float:
        pairs = zip(tokens.chunk(batch["accumulate"]), targets.chunk(batch["accumulate"]), strict=True)
        return float(engine.train_batch(iter(pairs)))

    return Trainer(take_step, engine, (engine.mesh.coordinate("data"), engine.mesh.size("data")))


class Part(nn.Module):
    """Consecutive blocks of a decoder; the first part also has the embedding, the last one norm and head."""

    def __init__(self, model: Decoder, start: int, stop: int) -> None:
        super().__init__()
        self.head_dim = model.shape.head_dim
        self.embedding = model.embedding if start == 0 else None
        self.blocks = nn.ModuleList(model.blocks[start:stop])
        self.rest = nn.Sequential(model.norm, model.head) if stop == len(model.blocks) else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        table = rotary_table(x.shape[1], self.head_dim, x.device)
        for block in self.blocks:
            x = block(x, table)
        return x if self.rest is None else self.rest(x)


def torch_pipeline(build: Build, stages: int, degree: int = 1) -> Trainer:
    """1F1B of ``torch.distributed.pipelining``, with FSDP2 along data and ``degree`` tensor ranks in each stage."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    dist.init_process_group("gloo")
    num_data = dist.get_world_size() // stages // degree
    mesh = init_device_mesh("cpu", (stages, num_data, degree), mesh_dim_names=("pipeline", "data", "tensor"))
    stage = mesh.get_local_rank("pipeline")
    part = parts(build, stages)[stage]
    optimizers = _split(part, part.blocks, mesh)
    group = mesh.get_group("pipeline")
    ready = PipelineStage(part, stage, stages, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(ready, MICRO_BATCHES, loss_fn=_loss)

    def take_step(tokens: Tensor, targets: Tensor) -> float:
        losses = list[Tensor]()
        if stage == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=targets, losses=losses)
        _update(optimizers)
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.all_reduce(loss, group=group)
        return float(loss)

    return Trainer(take_step, None, (mesh.get_local_rank("data"), num_data))


def parts(build: Build, num: int) -> list[Part]:
    """Cut a decoder into ``num`` parts with equal numbers of blocks."""
    model = build("cpu")
    assert isinstance(model, Decoder)
    size = len(model.blocks) // num
    return [Part(model, number * size, (number + 1) * size) for number in range(num)]


def deepspeed_pipeline(build: Build, stages: int, stage: int = 0) -> Trainer:
    """DeepSpeed's ``PipelineModule`` of a list of layers, with a ZeRO stage along data."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    layers = parts(build, build("meta").shape.layers)
    net = deepspeed.pipe.PipelineModule(layers, num_stages=stages, loss_fn=_loss, partition_method="uniform")
    num_data = dist.get_world_size() // stages
    config = {
        "train_batch_size": MICRO_BATCHES * num_data,  # only divides the reported samples
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.0,  # 1.0 by default
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage},
    }
    optimizer = torch.optim.AdamW(net.parameters(), fused=True, **OPTIMIZER)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)

    def take_step(tokens: Tensor, targets: Tensor) -> float:
        return float(engine.train_batch(zip(tokens.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES), strict=True)))

    return Trainer(take_step, None, (engine.mpu.get_data_parallel_rank(), num_data))


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class ByHeads(nn.Module):
    """A block's attention with a matrix for each projection; its heads are divided among ``degree`` ranks."""

    def __init__(self, block: Block, degree: int) -> None:
        super().__init__()
        own = block.attention
        self.heads, self.head_dim = own.heads // degree, own.head_dim
        for name, weight in zip(("q", "k", "v"), own.qkv.weight.detach().chunk(3), strict=True):
            self.add_module(name, linear(weight))
        self.out = own.out

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        batch, length, _ = x.shape
        shape = (batch, length, self.heads, self.head_dim)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(rotate(q, table), rotate(k, table), v, is_causal=True)
        merged: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return merged


class ByColumns(nn.Module):
    """A block's feed-forward with a matrix for the gate and one for the value."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        gate, value = block.ffn.up.weight.detach().chunk(2)
        self.gate, self.value, self.down = linear(gate), linear(value), block.ffn.down

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.value(x))
        return out


def linear(weight: Tensor) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    made.weight = nn.Parameter(weight.clone())
    return made


def torch_tensor(build: Build, degree: int) -> Trainer:
    """``parallelize_module`` on DTensor, with FSDP2 along data if there are several data ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo")
    num_data = dist.get_world_size() // degree
    mesh = init_device_mesh("cpu", (num_data, degree), mesh_dim_names=("data", "tensor"))
    model = build("cpu")
    assert isinstance(model, Decoder)
    optimizers = _split(model, model.blocks, mesh)

    def take_step(tokens: Tensor, targets: Tensor) -> float:
        loss = model(tokens, targets)
        loss.backward()
        _update(optimizers)
        return float(loss.detach())

    return Trainer(take_step, None, (mesh.get_local_rank("data"), num_data))


def _split(model: nn.Module, blocks: nn.ModuleList, mesh: Any) -> list[torch.optim.Optimizer]:
    """Split the blocks over tensor ranks and shard everything over data ranks; return the optimizers."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    degree, has_data = mesh["tensor"].size(), mesh["data"].size() > 1
    for block in blocks if degree > 1 else ():
        assert isinstance(block, Block)
        block.attention, block.ffn = ByHeads(block, degree), ByColumns(block)
        inner = ("attention.q", "attention.k", "attention.v", "ffn.gate", "ffn.value")
        outer = ("attention.out", "ffn.down")
        plan = {name: ColwiseParallel() for name in inner} | {name: RowwiseParallel() for name in outer}
        parallelize_module(block, mesh["tensor"], plan)
    for module in (*blocks, model) if has_data else ():
        fully_shard(module, mesh=mesh["data"], reshard_after_forward=False)
    by_mesh = defaultdict[str, list[nn.Parameter]](list)  # torch's optimizers accept parameters of only one mesh
    for param in model.parameters():
        by_mesh[str(getattr(param, "device_mesh", None))].append(param)
    how = {"foreach": True} if degree > 1 else {"fused": True}
    return [torch.optim.AdamW(params, **how, **OPTIMIZER) for params in by_mesh.values()]


def _update(optimizers: list[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def torch_context(build: Build) -> Trainer:
    """torch's ``context_parallel``: ring attention. Gradients are averaged by hand, as in torch's own recipes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = build("cpu")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **OPTIMIZER)

    def take_step(tokens: Tensor, targets: Tensor) -> float:
        with context_parallel(mesh, buffers=[tokens, targets], buffer_seq_dims=[1, 1]):
            loss = model(tokens, targets)
            loss.backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)
            param.grad.div_(dist.get_world_size())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return Trainer(take_step, None, (0, 1))


def _axes(stage: int, *, once: bool = False, **parallel: int) -> Callable[[Build], Trainer]:
    """Return a mode of partita.

    ``once``: gather parameters and reduce gradients once per batch, as FSDP2 does in torch's pipelines.
    """
    kept = {"keep_gathered": True, "keep_gradients": True} if once else {}
    return partial(partita, parallel=parallel, zero={"stage": stage, **kept})


PEERS: dict[str, Callable[[Build], Trainer]] = {
    "torch tensor 2": partial(torch_tensor, degree=2),
    "torch pipeline 2": partial(torch_pipeline, stages=2),
    "torch context 2": torch_context,
    "torch tensor 2 x FSDP2": partial(torch_tensor, degree=2),
    "torch pipeline 2 x FSDP2": partial(torch_pipeline, stages=2),
    "torch tensor 2 x pipeline 2": partial(torch_pipeline, stages=2, degree=2),
    "DeepSpeed pipeline 2": partial(deepspeed_pipeline, stages=2),
    "DeepSpeed pipeline 2 x ZeRO-1": partial(deepspeed_pipeline, stages=2, stage=1),
    "DeepSpeed pipeline 2 x ZeRO-3": partial(deepspeed_pipeline, stages=2, stage=3),
}
OURS: dict[str, Callable[[Build], Trainer]] = {
    "partita tensor 2": _axes(1, tensor=2),
    "partita pipeline 2": _axes(1, pipeline=2),
    "partita sequence 2": _axes(1, sequence=2),
    "partita tensor 2 x data, stage 1": _axes(1, tensor=2),
    "partita tensor 2 x data, stage 3": _axes(3, tensor=2),
    "partita pipeline 2 x data, stage 1": _axes(1, pipeline=2),
    "partita pipeline 2 x data, stage 3": _axes(3, pipeline=2),
    "partita pipeline 2 x data, stage 3, once": _axes(3, once=True, pipeline=2),
    "partita tensor 2 x pipeline 2": _axes(1, tensor=2, pipeline=2),
    "partita sequence 2 x data, stage 3": _axes(3, sequence=2),
}
PARALLEL_MODES = {**PEERS, **OURS}
