"""Training runs whose results all plans must agree on, and their comparison, for tests and benchmarks.

A *course* is a run of one model for a few steps, with its results. On the same ranks every plan must compute the same
bits. Plain PyTorch on the full batch, DistributedDataParallel on the same ranks, and other ways to cut a batch into
micro-batches sum in another order and must agree in most digits.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle, islice, product
from statistics import fmean
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import partita
from tests.kit.models import CASES, Batch, Case, parts
from tests.kit.plans import TIERS, ZERO
from tests.kit.ranks import on_ranks

STEPS = 10
BATCHES = 2  # number of batches that the steps repeat, so that there is something to learn
SAMPLES = 8  # per batch, over all ranks
CLIP = 0.1  # below the gradient norm of every case, so that clipping changes nearly every update
ADAMW: dict[str, Any] = {"lr": 2e-3}
SGD: dict[str, Any] = {"lr": 0.5, "momentum": 0.9}

# A vector added to all keys does not change the softmax: these gradients consist of rounding errors only.
ZERO_GRADIENTS = "key.bias"
ROUNDING = 1e-6  # as a fraction of the model's largest gradient


@dataclass(frozen=True)
class Plan:
    """A row of the state table, as a `zero` section. `nodes` is the number of nodes that the ranks simulate."""

    name: str
    zero: dict[str, Any]
    nodes: int = 1


PLANS = {
    plan.name: plan
    for plan in (
        *(Plan(name, zero) for name, zero in ZERO.items()),
        Plan("hierarchical", {"stage": 3, "hierarchical": True}, nodes=2),
        *(Plan(name, zero) for name, zero in TIERS.items()),
    )
}
STAGES = tuple(ZERO)
COMPUTES = ("fp32", "bf16")
TIMEOUT_S = 240  # per call on the ranks, which runs many courses


@dataclass
class TrainingRun:
    """Results on one rank: its own loss and the gradient norm of each step, and full tensors by name.

    `gradients` are those of the first batch, in evaluation mode; `weights` are the final ones, on rank 0 only;
    `buffers` are this rank's own at the end.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


# -- on the ranks ------------------------------------------------------------------------------------------------------


@contextmanager
def shared_mesh() -> Iterator[Any]:
    """A mesh that several engines use in turn."""
    with partita.initialize(nn.Linear(1, 1)) as engine:
        yield engine.mesh


@contextmanager
def engine_of(case: Case, plan: Plan, mesh: Any, **sections: Any) -> Iterator[partita.Engine]:
    """An engine on the case's model. A plan for several nodes has its own mesh, with a launcher's variables."""
    config = {"zero": plan.zero, "clip_grad_norm": CLIP, **sections}
    ranks_per_node = dist.get_world_size() // plan.nodes
    node = {"LOCAL_WORLD_SIZE": str(ranks_per_node), "LOCAL_RANK": str(dist.get_rank() % ranks_per_node)}
    with mock.patch.dict(os.environ, node):
        engine = partita.initialize(case.build(), config, mesh=mesh if plan.nodes == 1 else None)
    with engine:
        assert engine.mesh.size("node") == plan.nodes
        yield engine


def own_parts(case: Case) -> Iterator[Batch]:
    """Yield this rank's part of each batch, endlessly."""
    for batch in cycle(islice(case.batches(SAMPLES), BATCHES)):
        yield parts(batch, dist.get_world_size())[dist.get_rank()]


def courses(name: str, plans: Sequence[str], computes: Sequence[str]) -> dict[tuple[str, str], TrainingRun]:
    """Run a course for each plan and compute dtype."""
    with shared_mesh() as mesh:
        return {
            (plan, compute): _course(CASES[name], PLANS[plan], mesh, precision={"compute": compute}, optimizer=ADAMW)
            for plan, compute in product(plans, computes)
        }


def courses_with(
    name: str, plans: Sequence[str], settings: Mapping[str, Mapping[str, Any]]
) -> dict[tuple[str, str], TrainingRun]:
    """Run a course for each plan and each named set of config sections."""
    with shared_mesh() as mesh:
        return {
            (plan, setting): _course(CASES[name], PLANS[plan], mesh, optimizer=ADAMW, **sections)
            for plan, (setting, sections) in product(plans, settings.items())
        }


def _course(case: Case, plan: Plan, mesh: Any, **sections: Any) -> TrainingRun:
    course = TrainingRun()
    with engine_of(case, plan, mesh, **sections) as engine:
        engine.eval()
        engine.backward(case.loss(engine(**next(own_parts(case)))))
        for name, _ in engine.module.named_parameters():
            gradient = engine.gradient(name)
            assert gradient is not None, name
            course.gradients[name] = gradient
        engine.zero_grad()
        engine.train()
        for batch in islice(own_parts(case), STEPS):
            loss = case.loss(engine(**batch))
            engine.backward(loss)
            result = engine.step()
            assert result.stepped
            assert result.grad_norm is not None
            course.losses.append(loss.item())
            course.norms.append(result.grad_norm)
        course.weights, course.buffers = engine.state_dict(), _buffers(engine.module)
    return course


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def plain_gradients(name: str) -> dict[str, Tensor]:
    """Return the gradients of the full first batch in plain PyTorch."""
    case = CASES[name]
    model = case.build().eval()
    case.loss(model(**next(case.batches(SAMPLES)))).backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def beside_ddp(name: str) -> tuple[TrainingRun, TrainingRun]:
    """Run a course at stage 3, and the same steps with DistributedDataParallel.

    The optimizer is SGD: Adam would turn rounding errors of gradients near zero into steps of full size.
    """
    case = CASES[name]
    with shared_mesh() as mesh:
        ours = _course(case, PLANS["3"], mesh, optimizer={"name": "sgd", "weight_decay": 0.0, **SGD})
    theirs, model = TrainingRun(), case.build()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    for batch in islice(own_parts(case), STEPS):
        loss = case.loss(wrapped(**batch))
        loss.backward()
        theirs.norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        theirs.losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    theirs.weights = {key: value.clone() for key, value in model.state_dict().items()}
    theirs.buffers = _buffers(model)
    return ours, theirs


# -- one batch, cut in other ways --------------------------------------------------------------------------------------

CUT_STEPS = 6
CUT_SCHEDULE = {"name": "cosine", "warmup_steps": 2, "total_steps": CUT_STEPS, "min_lr": 1e-4}
CUT_LR = 1e-3
WAYS = ("step", "train_batch")


@dataclass(frozen=True)
class Curve:
    """The mean loss over all ranks, the gradient norm and the learning rate of each step."""

    losses: list[float]
    norms: list[float]
    lrs: list[float]


@dataclass(frozen=True)
class Cut:
    """One batch of SAMPLES as world x accumulate micro-batches, trained by a manual loop or by train_batch."""

    world: int
    accumulate: int
    way: str


def cuts(world: int) -> list[Cut]:
    accumulates = [1 << power for power in range(SAMPLES.bit_length()) if SAMPLES % (world << power) == 0]
    return [Cut(world, accumulate, way) for accumulate, way in product(accumulates, WAYS)]


def curves(name: str, plans: Sequence[str], world: int) -> dict[tuple[str, Cut], Curve]:
    """Run a short course for each plan and each way to cut the batch on these ranks."""
    with shared_mesh() as mesh:
        return {(plan, cut): _curve(CASES[name], PLANS[plan], mesh, cut) for plan in plans for cut in cuts(world)}


def _curve(case: Case, plan: Plan, mesh: Any, cut: Cut) -> Curve:
    curve = Curve([], [], [])
    batch = {"micro": SAMPLES // (cut.world * cut.accumulate), "total": SAMPLES}
    with engine_of(case, plan, mesh, batch=batch, schedule=CUT_SCHEDULE, optimizer={"lr": CUT_LR}) as engine:
        engine.train(not case.mixes_samples)
        micro_batches = (micro for part in own_parts(case) for micro in parts(part, cut.accumulate))
        for _ in range(CUT_STEPS):
            if cut.way == "train_batch":
                loss, result = engine.train_batch(micro_batches), engine.last_step
            else:
                loss, result = _step_by_hand(case, engine, list(islice(micro_batches, cut.accumulate)))
            assert result.stepped
            assert result.grad_norm is not None
            curve.losses.append(loss.item())
            curve.norms.append(result.grad_norm)
            curve.lrs.append(result.lr[0])
    return curve


def _step_by_hand(
    case: Case, engine: partita.Engine, micro_batches: Sequence[Batch]
) -> tuple[Tensor, partita.StepResult]:
    losses, results = [], []
    for micro in micro_batches:
        loss = case.loss(engine(**micro))
        engine.backward(loss)
        results.append(engine.step())
        losses.append(loss.detach())
    assert [result.stepped for result in results] == [False] * (len(losses) - 1) + [True]
    return engine.mean(torch.stack(losses).mean()), results[-1]


# -- the verdict -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """Agreement of the courses of one model on the same ranks.

    Attributes:
        from_stage_0: by plan and compute dtype, the values that differ from stage 0's in any bit, with their errors.
        from_plain: by plan, the error of each gradient relative to plain PyTorch's.
        from_fp32: by plan, the largest relative difference of mean losses between bf16 and fp32.
        clipped: the number of updates that were clipped.
        fall: the relative decrease of the first batch's mean loss, from its first to its last step.
    """

    from_stage_0: dict[tuple[str, str], dict[str, float]]
    from_plain: dict[str, dict[str, float]]
    from_fp32: dict[str, float]
    clipped: int
    fall: float


def judge(name: str, world: int, plans: Sequence[str] = STAGES, computes: Sequence[str] = COMPUTES) -> Verdict:
    """Train the model under each plan and compute dtype on `world` ranks, and compare. The first plan is stage 0."""
    by_rank = on_ranks(world, courses, name, plans, computes, timeout=TIMEOUT_S)
    (plain,) = on_ranks(1, plain_gradients, name, timeout=TIMEOUT_S)
    references = {compute: [of_rank["0", compute] for of_rank in by_rank] for compute in computes}
    unequal, from_plain, from_fp32 = {}, {}, {}
    for plan, compute in product(plans, computes):
        same_plan = [of_rank[plan, compute] for of_rank in by_rank]
        unequal[plan, compute] = {
            f"rank {rank}: {what}": amount
            for rank, (course, reference) in enumerate(zip(same_plan, references[compute], strict=True))
            for what, amount in differences(course, reference).items()
        }
        if compute == "fp32":
            from_plain[plan] = gradient_errors(same_plan[0].gradients, plain)
        else:
            exact = mean_losses([of_rank[plan, "fp32"] for of_rank in by_rank])
            from_fp32[plan] = largest_ratio(mean_losses(same_plan), exact)
    clipped = sum(norm > CLIP for norm in references["fp32"][0].norms)
    losses = mean_losses(references["fp32"])[::BATCHES]
    return Verdict(unequal, from_plain, from_fp32, clipped, 1 - losses[-1] / losses[0])


def ddp_errors(name: str, world: int) -> dict[str, float]:
    """Return the errors of a course at stage 3 relative to DistributedDataParallel: of losses, norms, and each tensor.

    The buffers of every rank are compared with those of DDP's rank 0: the engine broadcasts them at the end of a
    micro-batch, DDP before the next forward.
    """
    by_rank = on_ranks(world, beside_ddp, name, timeout=TIMEOUT_S)
    found = {
        "losses": max(largest_ratio(ours.losses, theirs.losses) for ours, theirs in by_rank),
        "norms": max(largest_ratio(ours.norms, theirs.norms) for ours, theirs in by_rank),
    }
    ours, theirs = by_rank[0]
    assert ours.weights.keys() == theirs.weights.keys()
    found |= {
        f"weight {key}": error(value, theirs.weights[key])
        for key, value in ours.weights.items()
        if not key.endswith(ZERO_GRADIENTS)
    }
    return found | {
        f"rank {rank}: buffer {key}": error(value, theirs.buffers[key])
        for rank, (ours, _) in enumerate(by_rank)
        for key, value in ours.buffers.items()
    }


def all_curves(name: str, plans: Sequence[str], worlds: Sequence[int]) -> dict[tuple[str, Cut], Curve]:
    """Return the curves of every plan, number of ranks and way to cut the batch; check that all ranks have the same."""
    found: dict[tuple[str, Cut], Curve] = {}
    for world in worlds:
        first, *others = on_ranks(world, curves, name, plans, world, timeout=TIMEOUT_S)
        assert all(other == first for other in others)
        found |= first
    return found


def curve_error(curve: Curve, reference: Curve) -> float:
    """Return the largest relative difference of losses, norms and learning rates."""
    return max(
        largest_ratio(curve.losses, reference.losses),
        largest_ratio(curve.norms, reference.norms),
        largest_ratio(curve.lrs, reference.lrs),
    )


def differences(course: TrainingRun, reference: TrainingRun) -> dict[str, float]:
    """Return the error of each value that differs in any bit, by its name: `loss of step 3`, `weight head.bias`, ..."""
    return {
        what: error(value, expected)
        for (what, value), (_, expected) in zip(_named(course), _named(reference), strict=True)
        if not same_bits(value, expected)
    }


def _named(course: TrainingRun) -> Iterator[tuple[str, Tensor]]:
    for step, (loss, norm) in enumerate(zip(course.losses, course.norms, strict=True)):
        yield f"loss of step {step}", torch.tensor([loss], dtype=torch.float64)
        yield f"norm of step {step}", torch.tensor([norm], dtype=torch.float64)
    for name, gradient in course.gradients.items():
        yield f"gradient {name}", gradient
    for name, weight in course.weights.items():
        yield f"weight {name}", weight
    for name, buffer in course.buffers.items():
        yield f"buffer {name}", buffer


def gradient_errors(gradients: dict[str, Tensor], plain: dict[str, Tensor]) -> dict[str, float]:
    """Return the error of each gradient; for ZERO_GRADIENTS it is 0 up to rounding, and infinite above."""
    assert gradients.keys() == plain.keys()
    nothing = ROUNDING * max(gradient.abs().max().item() for gradient in plain.values())
    found = {}
    for name, gradient in gradients.items():
        if name.endswith(ZERO_GRADIENTS):
            found[name] = 0.0 if max(gradient.abs().max(), plain[name].abs().max()) <= nothing else math.inf
        else:
            found[name] = error(gradient, plain[name])
    return found


def mean_losses(by_rank: Sequence[TrainingRun]) -> list[float]:
    """Return the loss of the full batch at each step."""
    return [fmean(losses) for losses in zip(*(course.losses for course in by_rank), strict=True)]


def largest_ratio(values: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest relative difference of two curves, point by point; infinite if a point is not finite."""
    pairs = zip(values, reference, strict=True)
    return max(abs(a - b) / abs(b) if math.isfinite(a - b) and b else math.inf for a, b in pairs)


def error(value: Tensor, reference: Tensor) -> float:
    """Return the largest difference relative to the reference's largest value; infinite if a value is not finite."""
    difference = (value.double() - reference.double()).abs().max().item()
    if not math.isfinite(difference):
        return math.inf
    return difference / max(reference.double().abs().max().item(), 1e-30)


def same_bits(value: Tensor, other: Tensor) -> bool:
    """Return True if the tensors are equal bit by bit: 0 and -0 are not, a NaN and itself are."""
    return value.dtype == other.dtype and value.shape == other.shape and _bytes(value) == _bytes(other)


def _bytes(value: Tensor) -> bytes:
    return value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
