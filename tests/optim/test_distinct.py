"""Parameters that differ between data ranks: expert parallelism as an extension, without changes in the core.

A rank has one part of the experts' weights, and applies it to the samples of all ranks of its node. Its gradient is
already the sum over those ranks: it is summed over the ranks that have the same experts, and divided by the number of
all ranks.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import partita
from partita.compression.extension import CompressionExtension
from partita.config.schema import Config
from partita.optim.extension import RunExtension, UpdateListener
from partita.table.mesh_shape import MeshShape
from partita.table.place import Place
from partita.table.share import Share, Shares
from tests.compression.test_wires import on_nodes_of
from tests.kit.ranks import on_ranks
from tests.kit.training import rank, whole_weights, world

NUM_EXPERTS, WIDTH, NUM_STEPS = 4, 8, 3


class Gather(torch.autograd.Function):
    """An all-gather of the ranks' samples, whose backward is a reduce-scatter of the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return summed(grad, ctx.group), None


class Sum(torch.autograd.Function):
    """A reduce-scatter of the ranks' outputs, whose backward is an all-gather of the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gathered(grad, ctx.group), None


def gathered(x: Tensor, group: Any) -> Tensor:
    every = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, x.contiguous(), group=group)
    return torch.cat(every)


def summed(x: Tensor, group: Any) -> Tensor:
    total = x.clone()
    dist.all_reduce(total, group=group)
    return total.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()


class Experts(nn.Module):
    """Experts; sample i is processed by expert i % NUM_EXPERTS. ``group``: the ranks over which experts are split."""

    group: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.group is None:
            return torch.einsum("sd,sde->se", x, self.weight[torch.arange(len(x)) % NUM_EXPERTS])
        every = Gather.apply(x, self.group)
        num = len(self.weight)
        local = torch.arange(len(every)) % len(x) % NUM_EXPERTS - num * dist.get_rank(self.group)
        is_own = (local >= 0) & (local < num)
        own = torch.einsum("sd,sde->se", every, self.weight[local.clamp(0, num - 1)])
        return Sum.apply(own * is_own[:, None], self.group)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.experts = Experts()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.experts(torch.relu(self.first(x))))


class ExpertParallel(RunExtension):
    """An extension that splits experts over the data ranks of a node."""

    def shares(self, model: nn.Module, mesh: MeshShape, rank: int) -> Shares:
        num, index = mesh.size("local"), mesh.coordinate(rank, "local")
        found = dict[int, Share]()
        for module in model.modules():
            if isinstance(module, Experts) and num > 1:
                each = NUM_EXPERTS // num
                place = Place(tuple(module.weight.shape), 0, ((index * each, (index + 1) * each),))
                found[id(module.weight)] = Share(place, averaged=("tensor",), distinct=("local",))
        return found

    def optimizer(self, params: list[nn.Parameter], config: Config) -> Optimizer | None:
        return None

    def listeners(self, *_: Any) -> tuple[UpdateListener, ...]:
        return ()


def batch(of_rank: int, step: int) -> Tensor:
    return torch.randn(2 * NUM_EXPERTS, WIDTH, generator=torch.Generator().manual_seed(100 * step + of_rank))


def loss_of(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return model(x).square().mean()


def reference(accumulate: int = 1, clip: float | None = None) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Train in one process; return the weights, and the experts' mean gradient in each step."""
    torch.manual_seed(0)
    model, gradients = Model(), list[Tensor]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(NUM_STEPS):
        for micro in range(accumulate):
            for each in range(world()):
                (loss_of(model, batch(each, accumulate * step + micro)) / (world() * accumulate)).backward()
        assert model.experts.weight.grad is not None
        gradients.append(model.experts.weight.grad.clone())
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}, gradients


def groups_of(size: int) -> Any:
    """Create groups of ``size`` consecutive ranks; return this rank's group."""
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world(), size)]
    return groups[rank() // size]


def config_of(zero: dict[str, Any], accumulate: int, clip: float | None) -> dict[str, Any]:
    optimizer = {"name": "adamw", "lr": 0.01, "weight_decay": 0.01}
    units = ["Experts"] if zero.get("stage") == 3 else "auto"
    batches = {"accumulate": accumulate}
    return {"zero": {"units": units, **zero}, "optimizer": optimizer, "clip_grad_norm": clip, "batch": batches}


def starts(config: dict[str, Any], per_node: int, *, splits: bool = True) -> partita.Engine:
    torch.manual_seed(rank())  # all ranks receive rank 0's values
    if rank() == 0:
        torch.manual_seed(0)
    model = Model()
    if not splits:
        return partita.initialize(model, config)
    with mock.patch("partita.config.resolve.installed", ExpertParallel):
        engine = partita.initialize(model, config)
    model.experts.group = groups_of(per_node)
    return engine


def trains(zero: dict[str, Any], per_node: int, accumulate: int = 1, clip: float | None = None, at: str = "") -> None:
    expected, gradients = reference(accumulate, clip)
    with on_nodes_of(per_node), starts(config_of(zero, accumulate, clip), per_node) as engine:
        assert engine.module.experts.weight.shape[0] == NUM_EXPERTS // per_node
        for step in range(NUM_STEPS):
            for micro in range(accumulate):
                engine.backward(loss_of(engine, batch(rank(), accumulate * step + micro)))
                if micro == accumulate - 1:
                    found = engine.gradient("experts.weight")
                    torch.testing.assert_close(found, gradients[step], rtol=1e-4, atol=1e-6)
                engine.step()
        weights = whole_weights(engine)
        moment = engine.optimizer_state("experts.weight")["exp_avg"]
        assert moment.shape == expected["experts.weight"].shape
        if at:
            engine.save(at)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5, msg=lambda text: f"{name}: {text}")
    if at:  # the checkpoint loads where every rank has all experts
        with starts(config_of({"stage": 2}, accumulate, clip), per_node, splits=False) as engine:
            engine.load(at)
            found = whole_weights(engine)
            assert all(torch.equal(found[name], value) for name, value in weights.items())
            assert torch.equal(engine.optimizer_state("experts.weight")["exp_avg"], moment)


class ExpertsInCodes(CompressionExtension):
    """An extension for compression and for experts split over the data ranks."""

    def shares(self, model: nn.Module, mesh: MeshShape, rank: int) -> Shares:
        return ExpertParallel().shares(model, mesh, rank)


def refused(extension: type[RunExtension], config: dict[str, Any]) -> str:
    with mock.patch("partita.config.resolve.installed", extension), pytest.raises(partita.ConfigError) as raised:
        partita.initialize(Model(), config)
    return str(raised.value)


@pytest.mark.parametrize(
    ("extension", "config", "said"),
    [
        (ExpertParallel, {"zero": {"stage": 3}}, "name a module that contains only one of them in zero.units"),
        (ExpertsInCodes, {"communication": {"gradients": "int8"}}, "leave out communication.gradients"),
    ],
    ids=["unit", "codes"],
)
def test_settings_that_do_not_fit_experts(extension: type[RunExtension], config: dict[str, Any], said: str) -> None:
    for each in on_ranks(2, refused, extension, config, with_group=False):
        assert said in each


@pytest.mark.parametrize("stage", range(4))
def test_each_rank_has_experts_of_its_own(stage: int) -> None:
    on_ranks(2, trains, {"stage": stage}, 2)


@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 3, "replicate": "nodes"},
        {"stage": 3, "hierarchical": True},
    ],
    ids=lambda zero: " ".join(zero),
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_experts_are_summed_over_nodes(zero: dict[str, Any], accumulate: int) -> None:
    on_ranks(4, trains, zero, 2, accumulate)


def test_the_norm_counts_every_expert_once() -> None:
    on_ranks(4, trains, {"stage": 3, "replicate": "nodes"}, 2, 1, 0.05)


def test_a_checkpoint_has_all_experts(tmp_path: Path) -> None:
    on_ranks(4, trains, {"stage": 3, "replicate": "nodes"}, 2, 1, None, str(tmp_path))
