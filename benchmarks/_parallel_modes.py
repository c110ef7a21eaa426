"""Ways to train on other axes than data: torch's own, beside partita's.

torch's want the model rewritten: cut by hand for its pipelines, and with a matrix for each projection for its tensor
parallelism, which cannot cut fused ones by heads. The rewritten models are here.
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
    """Some of a decoder's blocks, with the embedding before the first and norm and head behind the last."""

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


def torch_pipeline(build: Build, stages: int) -> Trainer:
    """1F1B of ``torch.distributed.pipelining``, with FSDP2 along data where there is more than one such rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    dist.init_process_group("gloo")
    num_data = dist.get_world_size() // stages
    mesh = init_device_mesh("cpu", (stages, num_data), mesh_dim_names=("pipeline", "data"))
    stage, data = mesh.get_local_rank("pipeline"), mesh.get_local_rank("data")
    model = build("cpu")
    assert isinstance(model, Decoder)
    num_blocks = len(model.blocks) // stages
    part = Part(model, stage * num_blocks, (stage + 1) * num_blocks)
    if num_data > 1:
        for block in part.blocks:
            fully_shard(block, mesh=mesh["data"], reshard_after_forward=False)
        fully_shard(part, mesh=mesh["data"], reshard_after_forward=False)
    group = mesh.get_group("pipeline")
    ready = PipelineStage(part, stage, stages, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(ready, MICRO_BATCHES, loss_fn=_loss)
    optimizer = torch.optim.AdamW(part.parameters(), fused=True, **OPTIMIZER)

    def take_step(tokens: Tensor, targets: Tensor) -> float:
        losses = list[Tensor]()
        if stage == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=targets, losses=losses)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.all_reduce(loss, group=group)
        return float(loss)

    return Trainer(take_step, None, (data, num_data))


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class ByHeads(nn.Module):
    """A block's attention with a matrix for each projection; ``heads`` are this rank's."""

    def __init__(self, block: Block, heads: int) -> None:
        super().__init__()
        own = block.attention
        self.heads, self.head_dim = heads, own.head_dim
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
    """``parallelize_module`` on DTensor, with FSDP2 along data where there is more than one such rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    dist.init_process_group("gloo")
    num_data = dist.get_world_size() // degree
    mesh = init_device_mesh("cpu", (num_data, degree), mesh_dim_names=("data", "tensor"))
    model = build("cpu")
    assert isinstance(model, Decoder)
    inner = {name: ColwiseParallel() for name in ("attention.q", "attention.k", "attention.v", "ffn.gate", "ffn.value")}
    for block in model.blocks:
        block.attention = ByHeads(block, model.shape.heads // degree)
        block.ffn = ByColumns(block)
        outer = {"attention.out": RowwiseParallel(), "ffn.down": RowwiseParallel()}
        parallelize_module(block, mesh["tensor"], {**inner, **outer})
        if num_data > 1:
            fully_shard(block, mesh=mesh["data"], reshard_after_forward=False)
    if num_data > 1:
        fully_shard(model, mesh=mesh["data"], reshard_after_forward=False)
    by_mesh = defaultdict[str, list[nn.Parameter]](list)  # torch's optimizers take parameters of one mesh at a time
    for param in model.parameters():
        by_mesh[str(getattr(param, "device_mesh", None))].append(param)
    optimizers = [torch.optim.AdamW(params, foreach=True, **OPTIMIZER) for params in by_mesh.values()]

    def take_step(tokens: Tensor, targets: Tensor) -> float:
        loss = model(tokens, targets)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return Trainer(take_step, None, (mesh.get_local_rank("data"), num_data))


def torch_context(build: Build) -> Trainer:
    """``context_parallel`` of torch: ring attention. The gradients are averaged by hand, as torch's own recipes do."""
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
            dist.all_reduce(param.grad, op=dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.SUM)
            param.grad.div_(dist.get_world_size())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return Trainer(take_step, None, (0, 1))


def _axes(stage: int, **parallel: int) -> Callable[[Build], Trainer]:
    return partial(partita, parallel=parallel, zero={"stage": stage})


PEERS: dict[str, Callable[[Build], Trainer]] = {
    "torch tensor 2": partial(torch_tensor, degree=2),
    "torch pipeline 2": partial(torch_pipeline, stages=2),
    "torch context 2": torch_context,
    "torch tensor 2 x FSDP2": partial(torch_tensor, degree=2),
    "torch pipeline 2 x FSDP2": partial(torch_pipeline, stages=2),
}
OURS: dict[str, Callable[[Build], Trainer]] = {
    "partita tensor 2": _axes(1, tensor=2),
    "partita pipeline 2": _axes(1, pipeline=2),
    "partita sequence 2": _axes(1, sequence=2),
    "partita tensor 2 x data, stage 3": _axes(3, tensor=2),
    "partita pipeline 2 x data, stage 3": _axes(3, pipeline=2),
    "partita tensor 2 x pipeline 2": _axes(1, tensor=2, pipeline=2),
    "partita sequence 2 x data, stage 3": _axes(3, sequence=2),
}
PARALLEL_MODES = {**PEERS, **OURS}
