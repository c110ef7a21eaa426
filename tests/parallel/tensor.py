"""Rank functions of ``test_tensor``: models split over tensor ranks, compared with the full model in one process."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from partita.comm.collectives import Collectives
from partita.comm.connections import Processes
from partita.comm.mesh import Mesh
from partita.comm.world import Rendezvous
from partita.config.load import load_config
from partita.config.resolve import Resolved, ResolvedBatch
from partita.engine.transform import apply_axes
from partita.memory.accelerator import HOST
from partita.parallel.applied import AppliedParallelism
from partita.table.mesh_shape import MeshShape
from partita.table.traffic import TrafficKey
from partita.transforms.modules import ModuleTransforms
from tests.kit.training import rank, world
from tests.parallel import zoo


@dataclass
class Beside:
    """Comparison of a split model with the full model.

    Attributes:
        loss: the difference of the losses.
        gradients: the largest difference of each gradient, relative to the gradient's largest element.
        calls: the number of calls of each collective.
        lines: a description of each module's split.
        share: the number of this rank's parameter elements, relative to the full model's.
    """

    loss: float
    gradients: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    share: float = 1.0


def connected(size: int) -> Collectives:
    shape = MeshShape(tensor=size)
    return Collectives(Mesh(shape, HOST, Processes(HOST, Rendezvous(rank(), world(), 60.0))))


def on_slices(model: nn.Module, collectives: Collectives, rules: dict[str, str] | None = None) -> AppliedParallelism:
    """Split a model as an engine does."""
    mesh = collectives.mesh
    config = load_config({}).model_copy()
    parallel = config.parallel.model_copy(update={"tensor_rules": tuple((rules or {}).items())})
    config = config.model_copy(update={"parallel": parallel})
    resolved = Resolved(config, mesh.shape, ResolvedBatch(1, 1, 1), "fp32", on_host=True)
    applied = apply_axes(model, resolved, collectives, ModuleTransforms())
    for param in model.parameters():
        if id(param) in applied.shares:
            param.data = applied.shares[id(param)].place.take(param.data)
    return applied


def whole_gradient(param: nn.Parameter, applied: AppliedParallelism, collectives: Collectives) -> Tensor:
    """Return the full gradient, combined from the ranks' gradients as the engine does."""
    share, group = applied.shares.get(id(param)), collectives.group(("tensor",))
    assert param.grad is not None
    if share is None:
        return group.sum(param.grad, "test") / group.size
    if share.summed:
        return group.sum(param.grad, "test")
    whole = torch.zeros(share.place.shape)
    share.place.put(param.grad, whole)
    return group.sum(whole, "test")


def beside_whole(names: Sequence[str], rules: dict[str, str] | None = None) -> dict[str, Beside]:
    collectives = connected(world())
    found = {}
    for name in names:
        whole = zoo.build(name)
        model = copy.deepcopy(whole)
        applied = on_slices(model, collectives, rules)
        batch = zoo.batch(name, step=0)
        expected = zoo.loss_of(whole(**batch))
        expected.backward()
        before = counts(collectives)
        loss = zoo.loss_of(model(**batch))
        loss.backward()
        after = counts(collectives)
        result = Beside(abs(loss.item() - expected.item()), lines=applied.lines)
        result.calls = {key: after[key] - before.get(key, 0) for key in after if after[key] != before.get(key, 0)}
        num = sum(param.numel() for param in model.parameters())
        result.share = num / sum(param.numel() for param in whole.parameters())
        for (key, param), reference in zip(model.named_parameters(), whole.parameters(), strict=True):
            assert reference.grad is not None, key
            largest = max(reference.grad.abs().max().item(), 1e-3)
            difference = whole_gradient(param, applied, collectives) - reference.grad
            result.gradients[key] = difference.abs().max().item() / largest
        found[name] = result
        applied.transforms.undo()
    collectives.mesh.close()
    return found


def counts(collectives: Collectives) -> dict[str, int]:
    """Return the number of calls in forward and backward so far, by collective."""
    rows: dict[TrafficKey, object] = collectives.meter.report().rows  # type: ignore[assignment]
    return {key.collective: row.calls for key, row in rows.items() if key.purpose == "tensor"}  # type: ignore[attr-defined]
