"""Error feedback: residuals are sent later, unchanged by skipped steps, and saved as one sum."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import partita
from partita.compression.error_feedback import ErrorFeedbackSync
from partita.layout.state_bytes import model_state_bytes
from tests.compression.test_wires import on_nodes_of
from tests.kit import seeds
from tests.kit.models import Stack, square_loss
from tests.kit.plans import ZERO
from tests.kit.ranks import on_ranks
from tests.kit.training import rank, whole_weights, world

LR, STEPS = 0.05, 5
LEAST_HELD = 0.1
SHAPES = {"matrix": (40, 33), "bias": (3,), "table": (600,)}
TERNARY = {"communication": {"gradients": "ternary"}}
BOTH = {"communication": {"gradients": "ternary", "parameters": "ternary"}}


class Bag(nn.Module):
    """Parameters with a linear loss: the factors are the gradients, whatever the values of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, factors: dict[str, Tensor]) -> Tensor:
        terms = [(getattr(self, name) * factor).sum() for name, factor in factors.items()]
        return torch.stack(terms).sum()


def factors(number: int, rank: int) -> dict[str, Tensor]:
    generator = seeds.generator(100 * number + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def syncs(engine: partita.Engine) -> list[ErrorFeedbackSync]:
    found = [bucket.syncs[-1] for bucket in engine._parts.runtime.reducer.buckets]
    return [sync for sync in found if isinstance(sync, ErrorFeedbackSync)]


def held(engine: partita.Engine) -> Tensor:
    """Return all residuals of this rank, concatenated."""
    return torch.cat([sync.residuals for sync in syncs(engine)])


def held_sums(engine: partita.Engine) -> dict[str, Tensor]:
    """Settle the residuals; return their sum over all ranks for each parameter, flattened."""
    runtime = engine._parts.runtime
    runtime.reducer.sync_states.prepare_for_checkpoint()
    sums = {m.fqn: torch.zeros(m.span.num_elements) for _, m in runtime.members()}
    for segment in (segment for unit in runtime.units for segment in unit.trained if segment.is_first_copy):
        own = runtime.reducer.sync_states.saved(segment)
        assert own is not None
        for span in segment.layout.part(segment.shard_index):
            sums[span.fqn][span.start : span.stop] += own[span.offset : span.offset + span.num_elements]
    for total in sums.values():
        dist.all_reduce(total)
    return sums


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=LR)


def telescopes(zero: dict[str, Any], codec: str, per_node: int, accumulate: int, compute: str) -> None:
    """Check twice that updates and residuals add up to all gradients; the first check settles the residuals."""
    precision = {"compute": compute, **({"initial_loss_scale": 2.0**10} if compute == "fp16" else {})}
    config = {"zero": zero, "communication": {"gradients": codec}, "batch": {"accumulate": accumulate}}
    config["precision"] = precision
    given = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    with on_nodes_of(per_node), partita.initialize(Bag(), config, optimizer=sgd) as engine:
        for half in range(2):
            for number in range(half * STEPS * accumulate, (half + 1) * STEPS * accumulate):
                engine.backward(engine(factors(number, rank())))
                engine.step()
                for other in range(world()):
                    for name, factor in factors(number, other).items():
                        told = factor.half().float() if compute == "fp16" else factor
                        given[name] += told / (world() * accumulate)
            assert float(held(engine).abs().max()) > LEAST_HELD, "nothing was held back"
            sums, weights = held_sums(engine), whole_weights(engine)
            for name, expected in given.items():
                told = -weights[name].float() / LR + sums[name].view(SHAPES[name])
                rounding = 1e-2 if compute == "fp16" else 1e-4 * STEPS  # of the gathered weights
                torch.testing.assert_close(told, expected, rtol=1e-4, atol=rounding)


def left_out(plan: str) -> None:
    """Check that a step that is non-finite on one rank, and a dropped batch, leave residuals and weights unchanged."""
    with partita.initialize(Stack(2), {"zero": ZERO[plan], **TERNARY}) as engine:

        def step(number: int, factor: float = 1.0) -> partita.StepResult:
            engine.backward(square_loss(engine, rank(), number) * (factor if rank() == 1 else 1.0))
            return engine.step()

        step(0)
        before = held(engine).clone()
        weights = whole_weights(engine)
        with pytest.warns(UserWarning, match="the update is skipped"):
            assert step(1, float("inf")).skipped
        assert torch.equal(held(engine), before)
        engine.backward(square_loss(engine, rank(), 2))
        engine.zero_grad()
        assert torch.equal(held(engine), before)
        assert all(torch.equal(weight, weights[name]) for name, weight in whole_weights(engine).items())
        assert step(3).stepped
        assert not torch.equal(held(engine), before)


def unused(plan: str) -> None:
    """Check that a parameter that no rank used keeps its values and its residual."""
    with partita.initialize(Bag(), {"zero": ZERO[plan], **TERNARY}, optimizer=sgd) as engine:
        given = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        for number in range(4):
            used = {0: "matrix", 1: "table"}.get(number)  # used by all ranks; in step 1 rank 0 also uses "bias"
            chosen = {n: f for n, f in factors(number, rank()).items() if used is None or n == used}
            if number == 1 and rank() == 0:
                chosen["bias"] = factors(number, 0)["bias"]
            residuals, weights = held_sums(engine), whole_weights(engine)
            engine.backward(engine(chosen))
            norm = engine.step().grad_norm
            for name in SHAPES:
                same = torch.equal(whole_weights(engine)[name], weights[name])
                assert same == (name not in chosen and not (number == 1 and name == "bias")), (number, name)
                assert torch.equal(held_sums(engine)[name], residuals[name]) == same, (number, name)
            assert norm is not None
            for other in range(world()):
                for name, factor in factors(number, other).items():
                    if used in (None, name) or (number == 1 and other == 0 and name == "bias"):
                        given[name] += factor / world()
        sums, weights = held_sums(engine), whole_weights(engine)
        for name, expected in given.items():
            told = -weights[name] / LR + sums[name].view(SHAPES[name])
            torch.testing.assert_close(told, expected, rtol=1e-4, atol=1e-4)


def run_on(engine: partita.Engine, first: int, num: int = 3) -> None:
    for step in range(first, first + num):
        engine.backward(square_loss(engine, rank(), step))
        engine.step()


def near(plan: str, wires: dict[str, str], precision: dict[str, Any]) -> list[float]:
    """Check that parameters updated by deltas are equal on all ranks and near the master weights; return the losses."""
    config = {"zero": ZERO[plan], "optimizer": {"lr": 1e-2}, "precision": precision, "communication": wires}
    losses = []
    with partita.initialize(Stack(2), config) as engine:
        for _ in range(12):
            loss = square_loss(engine, 0, 0)
            losses.append(loss.item())
            engine.backward(loss)
            assert engine.step().stepped
        engine._parts.updater.wait_for_updates()
        change = 0.0
        for unit in engine._parts.runtime.units:
            for segment in unit.trained:
                whole = segment.full.float()
                every = [torch.empty_like(whole) for _ in range(world())]
                dist.all_gather(every, whole)
                assert all(torch.equal(whole, other) for other in every), "replicas drift"
                assert segment.master is not None
                own = segment.part(whole, segment.plan.master)
                change = max(change, float((own - segment.master.lease().tensor).abs().max()))
        assert 0 < change < 0.05, change  # a step changes a parameter by about 0.01
    return losses


def saved(folder: Path, zero: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Save a checkpoint; return the summed residuals at that point, and the weights three steps later."""
    with partita.initialize(Stack(2), {"zero": zero, "optimizer": {"lr": 1e-2}, **BOTH}) as engine:
        run_on(engine, 0)
        engine.save(folder)
        sums = held_sums(engine)
        run_on(engine, 3)
        return sums, whole_weights(engine)


def loaded(folder: Path, zero: dict[str, Any], wires: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    with partita.initialize(Stack(2), {"zero": zero, "optimizer": {"lr": 1e-2}, **wires}) as engine:
        lacks = rank() == 0 and not wires
        with pytest.warns(UserWarning, match="which this run does not use") if lacks else contextlib.nullcontext():
            engine.load(folder)
        sums = held_sums(engine) if wires else {}
        run_on(engine, 3)
        return sums, whole_weights(engine)


def without(folder: Path) -> None:
    """Check that residuals start at zero, with a warning, if the checkpoint has none."""
    with partita.initialize(Stack(2), {}) as engine:
        run_on(engine, 0)
        engine.save(folder)
    with partita.initialize(Stack(2), TERNARY) as engine:
        run_on(engine, 0)
        said = pytest.warns(UserWarning, match="they start at zero") if rank() == 0 else contextlib.nullcontext()
        with said:
            engine.load(folder)
        assert not held(engine).any()


def placed(zero: dict[str, Any]) -> dict[str, Tensor]:
    """Check the tier and bytes of residuals in the ledger against the plan; return the trained weights."""
    with partita.initialize(Stack(2), {"zero": zero, "optimizer": {"lr": 1e-2}, **TERNARY}) as engine:
        run_on(engine, 0)
        planned = {
            tier: size for (state, tier), size in model_state_bytes(engine.units, rank()).items() if state == "feedback"
        }
        report = engine.memory_report()
        found = {tier: size for (state, tier), size in report.held.items() if state == "feedback"}
        assert found == planned, (found, planned)
        assert list(found) == [zero.get("offload", {}).get("optimizer", "device")]
        return whole_weights(engine)


# -- tests -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("zero", "codec", "per_node", "accumulate", "compute"),
    [
        ({"stage": 0}, "onebit", 4, 1, "fp32"),
        ({"stage": 1}, "ternary", 4, 2, "fp32"),
        ({"stage": 2}, "2bit", 2, 2, "fp32"),
        ({"stage": 2}, "ternary", 4, 1, "fp16"),
        ({"stage": 3}, "topk", 2, 1, "fp32"),
        ({"stage": 0}, "low_rank", 4, 2, "fp32"),
        ({"stage": 2}, "low_rank", 2, 2, "fp16"),
    ],
    ids=str,
)
def test_what_was_sent_and_what_is_held_is_what_was_given(
    zero: dict[str, Any], codec: str, per_node: int, accumulate: int, compute: str
) -> None:
    on_ranks(4, telescopes, zero, codec, per_node, accumulate, compute)


@pytest.mark.parametrize("plan", ["1", "3"])
def test_a_step_that_is_left_out_changes_nothing(plan: str) -> None:
    on_ranks(2, left_out, plan)


@pytest.mark.parametrize("plan", ["0", "2"])
def test_what_nobody_used_stays_held(plan: str) -> None:
    on_ranks(2, unused, plan)


def test_a_checkpoint_holds_one_sum_for_every_layout(tmp_path: Path) -> None:
    (sums, weights), *_ = on_ranks(2, saved, tmp_path, ZERO["2"])
    assert max(float(total.abs().max()) for total in sums.values()) > 0
    (same_sums, same_weights), *_ = on_ranks(2, loaded, tmp_path, ZERO["2"], BOTH)
    for name, weight in weights.items():
        assert torch.equal(weight, same_weights[name]), name
    (other_sums, _), *_ = on_ranks(4, loaded, tmp_path, {"stage": 1, "offload": {"optimizer": "host"}}, TERNARY)
    for name, total in sums.items():
        assert torch.equal(total, same_sums[name]), name
        assert torch.equal(total, other_sums[name]), name
    on_ranks(2, loaded, tmp_path, ZERO["1"], {})


def test_a_checkpoint_without_it_is_told(tmp_path: Path) -> None:
    on_ranks(2, without, tmp_path)


@pytest.mark.parametrize(
    ("plan", "wires", "precision"),
    [
        ("1", {"parameters": "ternary", "gradients": "ternary"}, {}),
        ("2", {"parameters": "int4"}, {"compute": "bf16"}),
        ("2", {"parameters": "int8", "gradients": "2bit"}, {}),
    ],
    ids=str,
)
def test_parameters_follow_by_their_changes(plan: str, wires: dict[str, str], precision: dict[str, Any]) -> None:
    first, *others = on_ranks(2, near, plan, wires, precision)
    assert all(losses == first for losses in others)
    assert first[-1] < 0.3 * first[0]


def test_it_rests_where_the_optimizer_does() -> None:
    on_device, *_ = on_ranks(2, placed, {"stage": 2})
    on_host, *_ = on_ranks(2, placed, {"stage": 2, "offload": {"optimizer": "host"}})
    for name, weight in on_device.items():
        assert torch.equal(weight, on_host[name]), name
