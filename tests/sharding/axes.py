"""Training over a mesh with tensor and pipeline axes that this module applies by hand: it splits the linear layers of a
model over tensor, and its blocks over two pipeline stages. So states, norms and checkpoints are tested with shares that
``partita.parallel`` did not make.

Ranks are threads of this process (:mod:`tests.kit.threads`).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partita.comm.collectives import Collectives
from partita.comm.group import Group
from partita.config.load import load_config
from partita.config.resolve import resolve
from partita.engine import build
from partita.engine.build import UserArguments
from partita.engine.engine import Engine
from partita.layout.off_stage import OffStageParameter
from partita.parallel.applied import AppliedParallelism
from partita.table.mesh_shape import MeshShape
from partita.table.place import Place, even
from partita.table.share import Share
from partita.table.traffic import TrafficReport
from tests.kit import seeds
from tests.kit.threads import on_threads
from tests.kit.training import Trained, assert_exact, assert_same_bits, whole_weights

WIDTH, HIDDEN, HEAD = 16, 24, 4


class _Copied(torch.autograd.Function):
    """The input of a split layer. Backward sums its gradients over tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.group.sum(grads[0], "tensor"), None


class _Summed(torch.autograd.Function):
    """The output of a split layer. Forward sums it over tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return group.sum(x, "tensor")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class GatedBlock(nn.Module):
    """A residual block with a fused projection of two ranges, a gain that all heads use, and a column-split layer."""

    group: Group | None = None

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fused = nn.Linear(WIDTH, 2 * HIDDEN)
        self.gain = nn.Parameter(1 + 0.1 * torch.randn(HEAD))
        self.down = nn.Linear(HIDDEN, WIDTH)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)

    def forward(self, x: Tensor) -> Tensor:
        entered = self.norm(x)
        if self.group is not None:
            entered = _Copied.apply(entered, self.group)
        one, other = self.fused(entered).chunk(2, dim=-1)
        inner = one * torch.tanh(other)
        inner = (inner.unflatten(-1, (-1, HEAD)) * self.gain).flatten(-2)
        out = F.linear(inner, self.down.weight)
        if self.group is not None:
            out = _Summed.apply(out, self.group)
        return x + out + self.down.bias


class Model(nn.Module):
    """A model whose blocks can be split over two pipeline stages.

    Attributes:
        stage: the part that this rank runs: all of it (None), its first half (0) or its second half (1).
        given: returns the input of the second half.
    """

    stage: int | None = None
    given: Callable[[], Tensor]

    def __init__(self, num_blocks: int = 4, *, tied: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList([GatedBlock() for _ in range(num_blocks)])
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("seen", torch.zeros(1))
        if tied:
            self.last.weight = self.first.weight
        self.shares: dict[int, Share] = {}

    @property
    def own_blocks(self) -> list[GatedBlock]:
        middle = len(self.blocks) // 2
        return list(self.blocks[:middle] if self.stage == 0 else self.blocks[middle:] if self.stage else self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.given() if self.stage == 1 else self.first(x)
        for block in self.own_blocks:
            x = block(x)
        return x if self.stage == 0 else self.last(x)


class Resettable(Model):
    """A model that initializes its own buffer."""

    def reset_parameters(self) -> None:
        self.seen.zero_()


def share_out(model: Model, collectives: Collectives) -> None:
    """Split a model over tensor and pipeline: mark its off-stage parameters and set the shares of the others."""
    mesh = collectives.mesh
    shape, rank = mesh.shape, mesh.rank
    if shape.pipeline > 1:
        model.stage = shape.coordinate(rank, "pipeline")
        here = {id(param) for block in model.own_blocks for param in block.parameters()}
        here.add(id(model.last.weight if model.stage else model.first.weight))
        for param in model.parameters():
            if id(param) not in here:
                param.__class__ = OffStageParameter
        if model.last.weight is model.first.weight:
            whole = Place(tuple(model.first.weight.shape))
            model.shares[id(model.first.weight)] = Share(whole, averaged=("tensor",), stages=(0, 1))
    if shape.tensor > 1:
        low, high = even(HIDDEN // HEAD, shape.tensor)[shape.coordinate(rank, "tensor")]
        own = (low * HEAD, high * HEAD)
        both = (own, (HIDDEN + own[0], HIDDEN + own[1]))
        for block in model.own_blocks:
            block.group = collectives.group(("tensor",))
            model.shares |= {
                id(block.fused.weight): Share(Place((2 * HIDDEN, WIDTH), 0, both)),
                id(block.fused.bias): Share(Place((2 * HIDDEN,), 0, both)),
                id(block.down.weight): Share(Place((WIDTH, HIDDEN), 1, (own,))),
                id(block.gain): Share(Place((HEAD,)), summed=("tensor",)),
            }


@contextmanager
def applied_by_hand() -> Iterator[None]:
    """Context in which engines are built with the shares of :func:`share_out`. Stages run one micro-batch after the
    other.
    """

    def apply(model: Any, resolved: Any, collectives: Collectives, transforms: Any, *_: Any) -> AppliedParallelism:
        share_out(model, collectives)
        return AppliedParallelism(model.shares, transforms=transforms)

    stages = SimpleNamespace(max_kept_forwards=(1, 1))
    with mock.patch.object(build, "apply_axes", apply), mock.patch.object(build, "simulate", return_value=stages):
        yield


def inputs(data: int, step: int) -> Tensor:
    """Return inputs ``[4, WIDTH]``, different for each data coordinate and step."""
    return torch.randn(4, WIDTH, generator=seeds.generator(1000 * step + data))


def run_backward(engine: Engine, collectives: Collectives, data: int, step: int) -> float:
    """Run forward and backward of one micro-batch over the stages. Returns the loss on the last stage, else 0."""
    model, x = engine.module, inputs(data, step)
    if model.stage is None:
        loss = engine(x).square().mean()
        engine.backward(loss)
        return float(loss.detach())
    group = collectives.group(("pipeline",))
    if model.stage == 0:
        sent = engine(x)
        group.all_reduce(sent.detach().clone())
        engine.backward((sent * group.all_reduce(torch.zeros_like(sent))).sum())
        return 0.0
    received = torch.zeros(4, WIDTH)
    model.given = lambda: group.all_reduce(received).requires_grad_()
    loss = engine(x).square().mean()
    engine.backward(loss)
    assert received.grad is not None
    group.all_reduce(received.grad.clone())
    return float(loss.detach())


@dataclass
class TrainingRun(Trained):
    """The results of a run on one rank; ``gradients`` has those of the first step only.

    Attributes:
        traffic: the traffic of each step.
        states: the optimizer states at the end.
        seen: the result of ``look`` at the end.
    """

    traffic: list[TrafficReport] = field(default_factory=list)
    states: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    seen: Any = None


@dataclass(frozen=True)
class Recipe:
    """A model, and the settings that it is trained with on every rank of a mesh."""

    zero: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    tied: bool = False
    num_steps: int = 3
    accumulate: int = 1
    build: Callable[[], Model] | None = None
    weights: Path | None = None

    def model(self, rank: int = 0) -> Model:
        """Build a rank's model. By default each rank has different initial values; only rank 0's count."""
        if self.build is not None:
            return self.build()
        seeds.start(rank)
        return Model(tied=self.tied)


def train(
    shape: MeshShape,
    recipe: Recipe = Recipe(),
    *,
    load: Path | None = None,
    save: Path | None = None,
    look: Callable[[Engine, Collectives], Any] = lambda engine, collectives: None,
) -> list[TrainingRun]:
    """Train on every rank of a mesh. Ranks with the same data coordinate have the same samples.

    Args:
        load: the checkpoint to start from.
        save: the folder of a checkpoint at the end.
        look: called on every rank at the end.
    """
    settings: dict[str, Any] = {"zero": dict(recipe.zero), "clip_grad_norm": 0.1, **recipe.config}
    settings |= {"checkpoint": {"background": False}, "batch": {"accumulate": recipe.accumulate}}
    resolved = resolve(load_config(settings), shape.data, "cpu", shape.data // shape.node)
    resolved = replace(resolved, mesh=shape)
    models = [recipe.model(rank) for rank in range(shape.num_ranks)]

    def on_rank(collectives: Collectives) -> TrainingRun:
        mesh: Any = collectives.mesh
        model, course = models[mesh.rank], TrainingRun()
        given = UserArguments(None, None, None, recipe.weights)
        engine = Engine(model, resolved, mesh, given)
        if load is not None:
            engine.load(load)
        data = shape.coordinate(mesh.rank, "data")
        for step in range(recipe.num_steps):
            before = engine.traffic_report()
            losses = []
            for micro in range(recipe.accumulate):
                losses.append(run_backward(engine, collectives, data, recipe.accumulate * step + micro))
                if micro + 1 < recipe.accumulate:
                    engine.step()
            if step == 0 and engine.config.precision.gradients != "in_backward":
                course.gradients.append({name: engine.gradient(name) for name in names_of(model)})
            course.losses.append(sum(losses) / len(losses))
            course.norms.append(engine.step().grad_norm)
            course.traffic.append(engine.traffic_report().since(before))
        if save is not None:
            engine.save(save)
        course.weights = whole_weights(engine)
        course.states = {name: engine.optimizer_state(name) for name in names_of(model)}
        course.seen = look(engine, collectives)
        engine.close()
        return course

    with applied_by_hand():
        return on_threads(shape, on_rank)


def names_of(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def same(one: TrainingRun, other: TrainingRun) -> None:
    """Assert that norms, weights and optimizer states are equal bit for bit."""
    assert_same_bits(one, replace(other, gradients=one.gradients), losses=False)
    for name in one.weights:
        states = other.states[name]
        assert one.states[name].keys() == states.keys()
        assert all(torch.equal(value, states[key]) for key, value in one.states[name].items()), name


def close(one: TrainingRun, other: TrainingRun, tolerance: float = 1e-5) -> None:
    """Assert that the gradients of the first step, if ``one`` has any, norms and weights are equal up to rounding."""
    assert_exact(
        one, replace(other, gradients=other.gradients[: len(one.gradients)]), tolerance=tolerance, losses=False
    )
    for name, weight in one.weights.items():
        torch.testing.assert_close(weight, other.weights[name], rtol=0, atol=1e-4, msg=name)
