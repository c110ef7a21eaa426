"""Model states and traffic of the engine equal the predictions, to the byte and the call."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import partita
from partita.config.load import load_config
from partita.layout.owners import Exchanges
from partita.layout.state_bytes import Moments, model_state_bytes
from partita.layout.traffic import StepShape, step_traffic
from partita.memory.ledger import STATES
from partita.prediction.optimizer_plan import plan_optimizer
from partita.table.traffic import TrafficReport
from tests.kit.models import CASES, parts
from tests.kit.plans import matrix, sampled
from tests.kit.ranks import on_ranks

ROWS: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "1": {"stage": 1},
    "2": {"stage": 2},
    "3": {"stage": 3},
    "3-kept": {"stage": 3, "keep_gathered": True},
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"compute": "bf16"},
    "bf16-gradients": {"compute": "bf16", "gradients": "bf16"},
    "bf16-mixed": {"compute": "bf16", "keep_fp32": ["RMSNorm"]},  # two segments in a unit
}
IN_BACKWARD: tuple[dict[str, Any], ...] = (
    {"gradients": "in_backward"},
    {"compute": "bf16", "gradients": "in_backward", "keep_fp32": ["RMSNorm"]},
    {"compute": "bf16", "gradients": "in_backward", "master": "split", "moments": "int8"},
)
SAMPLES_A_RANK = 2


@dataclass(frozen=True)
class Run:
    """The configuration of a run, and the shape of its steps."""

    zero: dict[str, Any]
    precision: dict[str, Any] = field(default_factory=dict)
    accumulate: int = 1
    frozen: tuple[str, ...] = ()  # prefixes of parameters' names
    optimizer: dict[str, Any] = field(default_factory=dict)
    communication: dict[str, Any] = field(default_factory=dict)
    ranks_per_node: int | None = None
    is_warming_up: bool = False  # measured in the warm-up, before compression starts
    reduced: int | None = None  # number of micro-batches outside no_sync, the last ones; None: all
    by_train_batch: bool = False
    device: str = "cpu"


@dataclass(frozen=True)
class Bytes:
    """Counted and expected bytes on one rank."""

    held: dict[tuple[str, str], int]
    expected_held: dict[tuple[str, str], int]
    traffic: TrafficReport
    expected_traffic: TrafficReport


def train(run: Run) -> Bytes:
    """Train three steps. Return the bytes held in the second and the traffic of the third, with those expected."""
    rank = int(os.environ["RANK"])
    launched = {}
    if run.ranks_per_node is not None:
        local = {"LOCAL_RANK": rank % run.ranks_per_node, "LOCAL_WORLD_SIZE": run.ranks_per_node}
        launched = {name: str(value) for name, value in local.items()}
    model = CASES["decoder"].build(device=run.device)
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(run.frozen or ("nothing",)))
    config = {
        "zero": run.zero,
        "precision": run.precision,
        "batch": {"micro": SAMPLES_A_RANK, "accumulate": run.accumulate},
        "optimizer": run.optimizer,
        "communication": run.communication,
    }
    optimizer = plan_optimizer(model, load_config(config))
    with mock.patch.dict(os.environ, launched), partita.initialize(model, config) as engine:
        take_step(engine, run)
        held = take_step(engine, run)
        before = engine.traffic_report()
        take_step(engine, run)
        traffic = engine.traffic_report().since(before)
        shape = StepShape(run.accumulate, run.reduced, run.by_train_batch, is_warming_up=run.is_warming_up)
        expected = step_traffic(engine.units, shape, Exchanges(engine.units, optimizer.work).operations(rank))
        return Bytes(held, model_state_bytes(engine.units, rank, optimizer.moments), traffic, expected)


def take_step(engine: partita.Engine, run: Run) -> dict[tuple[str, str], int]:
    """Train a step. Return the bytes of model states before the update; with ``by_train_batch``, after it."""
    case, world, rank = CASES["decoder"], engine.mesh.num_ranks, engine.mesh.rank
    stream = case.batches(SAMPLES_A_RANK * world)
    micro_batches = [parts(next(stream), world)[rank] for _ in range(run.accumulate)]
    if run.by_train_batch:
        engine.train_batch(iter(micro_batches))
        return states_held(engine)
    num_unreduced = 0 if run.reduced is None else run.accumulate - run.reduced
    for number, batch in enumerate(micro_batches):
        if number < num_unreduced:
            with engine.no_sync():
                engine.backward(case.loss(engine(**batch)))
        else:
            engine.backward(case.loss(engine(**batch)))
        held = states_held(engine)
        result = engine.step()
    assert result.stepped
    return held


def states_held(engine: partita.Engine) -> dict[tuple[str, str], int]:
    return {key: num for key, num in engine.memory_report().held.items() if key[0] in STATES}


def train_each(runs: tuple[Run, ...]) -> list[Bytes]:
    return [train(run) for run in runs]


def check(world: int, *runs: Run) -> None:
    for counts in on_ranks(world, train_each, runs):
        for run, counted in zip(runs, counts, strict=True):
            assert counted.held == counted.expected_held, run
            assert counted.traffic == counted.expected_traffic, f"{run}\n{counted.traffic}\n{counted.expected_traffic}"


@matrix(row=ROWS, precision=PRECISIONS, world=[1, 2, 4])
def test_every_row_holds_and_sends_what_the_table_says(row: str, precision: str, world: int) -> None:
    check(world, Run(ROWS[row], PRECISIONS[precision]))


@matrix(row=("1", "2", "3", "3-kept"), world=[1, 2, 4], precision=IN_BACKWARD)
def test_gradients_that_rest_nowhere(row: str, world: int, precision: dict[str, Any]) -> None:
    check(world, Run(ROWS[row], precision))


@matrix(row=ROWS, world=[1, 2, 4])
def test_accumulation(row: str, world: int) -> None:
    check(world, Run(ROWS[row], accumulate=3))


@matrix(row=ROWS, reduced=range(3))
def test_micro_batches_inside_no_sync_reduce_nothing(row: str, reduced: int) -> None:
    check(2, Run(ROWS[row], accumulate=3, reduced=reduced))


@matrix(ranks_per_node=[1, 2, 4], accumulate=[1, 3])
def test_hierarchical(ranks_per_node: int, accumulate: int) -> None:
    check(4, Run({"stage": 3, "hierarchical": True}, accumulate=accumulate, ranks_per_node=ranks_per_node))


@matrix(precision=[*PRECISIONS.values(), *IN_BACKWARD], ranks_per_node=[2, 4])
def test_replicated(ranks_per_node: int, precision: dict[str, Any]) -> None:
    check(4, Run({"stage": 3, "replicate": "nodes"}, precision, ranks_per_node=ranks_per_node))


@pytest.mark.parametrize("ranks_per_node", [2, 4])
def test_replicated_accumulation(ranks_per_node: int) -> None:
    check(4, Run({"stage": 3, "replicate": "nodes"}, accumulate=3, ranks_per_node=ranks_per_node))


@matrix(row=ROWS, precision=PRECISIONS, gradients=["int4", "int8"])
def test_codes(row: str, precision: str, gradients: str) -> None:
    both = {"parameters": "int8"} if gradients == "int8" and row.startswith("3") else {}
    check(2, Run(ROWS[row], PRECISIONS[precision], communication={"gradients": gradients, **both}))


@pytest.mark.parametrize("row", ROWS)
def test_codes_that_hold_back(row: str) -> None:
    held_back = {"gradients": {"0": "onebit", "1": "ternary", "2": "2bit"}.get(row, "topk")}
    check(2, Run(ROWS[row], accumulate=2, communication=held_back))


@pytest.mark.parametrize("row", ROWS)
def test_factors(row: str) -> None:
    check(2, Run(ROWS[row], accumulate=2, communication={"gradients": "low_rank", "low_rank": 2}))


@matrix(row=ROWS, precision=["fp32", "bf16-gradients"])
def test_codes_of_a_momentum(row: str, precision: str) -> None:
    onebit: dict[str, Any] = {"optimizer": {"name": "onebit_adam"}, "communication": {"warmup_steps": 1}}
    check(2, Run(ROWS[row], PRECISIONS[precision], **onebit))


@matrix(row=["1", "2"], precision=PRECISIONS)
def test_codes_of_changes(row: str, precision: str) -> None:
    check(2, Run(ROWS[row], PRECISIONS[precision], communication={"parameters": "ternary"}))


@matrix(
    precision=["fp32", "bf16", "bf16-gradients", "bf16-mixed"],
    ranks_per_node=[1, 2, 4],
    communication=[
        {"parameters": "ternary"},
        {"parameters": "int8", "gradients": "int4"},
        {"parameters": "topk", "gradients": "ternary"},
        {"parameters": "onebit", "gradients": "low_rank", "low_rank": 2},
    ],
)
def test_codes_of_changes_between_nodes(precision: str, ranks_per_node: int, communication: dict[str, Any]) -> None:
    run = Run({"stage": 3, "hierarchical": True}, PRECISIONS[precision], ranks_per_node=ranks_per_node)
    check(4, replace(run, accumulate=2, frozen=("blocks.1.",), communication=communication))


@matrix(gradients=["full", "ternary"], warmup=["full", "int8"])
def test_first_steps_of_changes_between_nodes(gradients: str, warmup: str) -> None:
    communication = {"gradients": gradients, "parameters": "ternary", "warmup_steps": 4, "warmup": warmup}
    hierarchical = {"stage": 3, "hierarchical": True}
    check(4, Run(hierarchical, communication=communication, ranks_per_node=2, is_warming_up=True))


@matrix(row=ROWS, gradients=["int4", "ternary", "low_rank", "onebit_adam"], warmup=["full", "int8"], world=[2, 4])
def test_first_steps(row: str, gradients: str, warmup: str, world: int) -> None:
    """The warm-up sends values that are compressed later uncompressed or quantized to 8 bits, as ``warmup`` sets."""
    parameters = {"parameters": "ternary"} if row in ("1", "2") else {}
    optimizer = {"name": gradients} if gradients == "onebit_adam" else {}
    codec = "ternary" if gradients == "onebit_adam" else gradients
    communication = {"gradients": codec, **parameters, "warmup_steps": 4, "warmup": warmup}
    check(world, Run(ROWS[row], communication=communication, optimizer=optimizer, is_warming_up=True))


@pytest.mark.parametrize("row", sampled(ROWS, "1", "3-kept"))
def test_codes_of_some_parameters(row: str) -> None:
    both = {"gradients": "int8", "parameters": "int8"} if row.startswith("3") else {"gradients": "int8"}
    check(2, Run(ROWS[row], accumulate=3, frozen=("blocks.1.",), communication=both))


def test_codes_cross_between_nodes_once() -> None:
    rows: list[dict[str, Any]] = [ROWS["1"], ROWS["2"], {"stage": 3, "hierarchical": True}]
    check(4, *(Run(zero, communication={"gradients": "int4"}, ranks_per_node=2) for zero in rows))
    check(4, Run({"stage": 3, "replicate": "nodes"}, communication={"gradients": "int8"}, ranks_per_node=2))
    check(4, *(Run(zero, communication={"gradients": "ternary"}, ranks_per_node=2) for zero in rows[1:]))


@pytest.mark.parametrize("row", ROWS)
def test_frozen_parameters(row: str) -> None:
    check(2, Run(ROWS[row], PRECISIONS["bf16"], frozen=("blocks.1.", "head")))


@pytest.mark.parametrize("row", ["0", "1", "3"])
def test_train_batch_sends_two_messages_more(row: str) -> None:
    check(2, Run(ROWS[row], accumulate=2, by_train_batch=True))


@pytest.mark.parametrize(("momentum", "num_moments"), [(0.0, 0), (0.9, 1)])
def test_other_optimizers_keep_other_moments(momentum: float, num_moments: int) -> None:
    optimizer = {"name": "sgd", "momentum": momentum}
    check(2, Run(ROWS["1"], optimizer=optimizer))
    assert plan_optimizer(CASES["decoder"].build(), load_config({"optimizer": optimizer})).moments == Moments(
        num_moments
    )


def momentum_of_one_group(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    weight, bias = params
    return torch.optim.SGD([{"params": [weight], "momentum": 0.0}, {"params": [bias], "momentum": 0.9}], lr=0.1)


def train_groups(tier: str) -> tuple[int, int, int]:
    """Return the bytes of this rank's moments on the tier: held, planned, and of one state for the full shard."""
    config = {"zero": {"stage": 1, "offload": {"optimizer": tier}}}
    with partita.initialize(nn.Linear(64, 256), config, optimizer=momentum_of_one_group) as engine:
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 64)).square().mean())
            engine.step()
        segment = engine.units[0].segments[0]
        key = "moments", {"none": "device"}.get(tier, tier)
        held = engine.memory_report().held.get(key, 0)
        return held, engine.planned_bytes.get(key, 0), segment.held_bytes(segment.row.moments)


def test_groups_with_other_states() -> None:
    for tier in ("none", "disk"):
        held, planned, shard = zip(*on_ranks(2, train_groups, tier), strict=True)
        assert held == planned
        assert sum(held) == (4 * 256 if tier == "none" else shard[0])


@matrix(row=(*ROWS, "1-host", "3-disk", "3-in-backward"), world=[2, 4])
def test_owners_of_matrices(row: str, world: int) -> None:
    zero: dict[str, Any] = ROWS.get(row, {"stage": int(row[0])})
    if (tier := row.partition("-")[2]) in ("host", "disk"):
        zero = {**zero, "offload": {"optimizer": tier}}
    precision = {"gradients": "in_backward"} if row.endswith("backward") else {}
    check(world, Run(zero, precision, accumulate=1, optimizer={"name": "muon"}, frozen=("blocks.1.attention",)))


@matrix(row=ROWS, precision=["fp32", "bf16"])
def test_a_model_built_on_meta_is_the_same_to_the_plan(row: str, precision: str) -> None:
    check(2, Run(ROWS[row], PRECISIONS[precision], device="meta"))


class Scaled(nn.Module):
    """Model with a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 1), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * self.scale).mean()


def train_scaled() -> tuple[int, int]:
    with partita.initialize(Scaled()) as engine:
        engine.backward(engine(torch.ones(2, 8)))
        engine.step()
        expected = model_state_bytes(engine.units, engine.mesh.rank)
        return engine.memory_report().held["moments", "device"], expected["moments", "device"]


def test_moments_of_a_parameter_without_dimensions() -> None:
    assert on_ranks(1, train_scaled) == [(2 * 4 * 10, 2 * 4 * 10)]
