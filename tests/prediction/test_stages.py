"""Estimates of pipeline stages against the simulated engine, which runs each stage on tensors without values.

Working memory and sent bytes are equal, activations are within a tolerance. Estimated states are those of the rank with
the most, including padding.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partita import ConfigError
from partita.config.resolve import resolve
from partita.config.schema import Config
from partita.memory.ledger import STATES
from partita.parallel.pipeline.schedule import Shape, Work, make_schedule
from partita.parallel.pipeline.schedule_cost import simulate as run_on_paper
from partita.prediction.chunk_activations import representative, schedule_states
from partita.prediction.given_config import Estimate, estimate_config
from partita.prediction.machine import machine_named
from partita.prediction.model_source import ModelSource, read_source
from partita.prediction.plan_settings import PlanSettings, StateSettings
from partita.prediction.search import Search
from partita.prediction.simulate.cluster import Cluster, simulate
from partita.prediction.simulate.rank import RankReport, SimulatedModel
from partita.table.mesh_shape import MeshShape
from partita.table.residence import Tier
from tests.kit.plans import sampled

MODELS = {
    "gpt": "layers=8,hidden=64,heads=4,vocab=256,context=64",  # the head shares the weight of the embedding
    "llama": "family=llama,layers=9,hidden=64,heads=4,kv_heads=2,ffn=160,vocab=320,context=64",
    "wide": "layers=4,hidden=256,heads=4,vocab=1024,context=128",  # units are too large to share buckets
}
ORDERS = ("gpipe", "1f1b", "zero_bubble", "interleaved")
PATTERNS: tuple[dict[str, Any], ...] = (
    {"pattern": "sliding", "window": 16, "block": 8},
    {"pattern": "bigbird", "window": 16, "block": 8, "global": 1, "random": 1},
)
TOLERANCE, PADDING = 0.02, 0.05
NUM_CASES, NUM_QUICK = 48, 3
Case = tuple[str, int, dict[str, Any]]


def cases(num: int) -> Iterator[Case]:
    """Yield (model, ranks, config). The schedules take turns; all other settings are drawn."""
    drawn = random.Random(21)
    for number in range(num):
        order, model = ORDERS[number % len(ORDERS)], drawn.choice(list(MODELS))
        pipeline = 2 if model == "wide" and order == "interleaved" else drawn.choice((2, 4))
        parallel = {"pipeline": pipeline, "schedule": order, **({"chunks": 2} if order == "interleaved" else {})}
        inside = drawn.choice(({}, {}, {"tensor": 2}, {"sequence": 2}))
        attention = {} if inside else drawn.choice(({}, {}, *PATTERNS))
        config = {
            "parallel": {**parallel, **inside},
            "batch": {"micro": 2, "accumulate": drawn.choice((1, 2, 3, 4, 7))},
            "zero": {"stage": drawn.choice((1, 2, 3))},
            "activations": {"checkpoint": drawn.choice(("none", "units"))},
            **({"attention": attention} if attention else {}),
        }
        yield model, pipeline * drawn.choice((1, 2)) * (2 if inside else 1), config


def name_of(case: Case) -> str:
    model, ranks, config = case
    words = [word for section in config.values() for word in section.values()]
    return "-".join(map(str, (model, ranks, *words)))


def subject_of(source: ModelSource, model: str) -> SimulatedModel:
    return SimulatedModel(lambda: read_source(model).model, lambda samples: source.batch(samples, "meta"))


def of_device(held: dict[tuple[str, str], int]) -> Counter[str]:
    return Counter({what: num for (what, tier), num in held.items() if tier == "device"})


def check(planned: Estimate, reports: Sequence[RankReport]) -> None:
    """Compare the estimate of each stage with the report of the stage's first rank."""
    mesh = planned.resolved.mesh
    assert len(planned.stages) == mesh.pipeline
    for stage in planned.stages:
        rank = next(each for each in reports if mesh.coordinate(each.role.rank, "pipeline") == stage.index)
        held, peak = of_device(planned.held(stage)), of_device(rank.memory.peak)
        whole = sum(peak.values()) + rank.activation_bytes
        assert held["activations"] == pytest.approx(rank.activation_bytes, abs=TOLERANCE * whole), stage.index
        states, counted = (sum(each[state] for state in STATES) for each in (held, of_device(rank.planned_bytes)))
        assert counted <= states <= (1 + PADDING) * counted
        working = sum(peak.values()) - sum(peak[state] for state in STATES)
        assert working == held["working"]
        assert sum(held.values()) == pytest.approx(whole, rel=TOLERANCE)
        sent = Counter[str]()
        for key, count in rank.traffic.rows.items():
            sent[",".join(key.axes)] += count.sent_bytes
        assert planned.sent(stage) == {axes: num for axes, num in sent.items() if num}


# When deferred weight gradients are computed, an embedding's gradient, which the backward has computed already, is
# first. A copy of it waits for its bucket in addition to all others. A plan does not count the copy, which is here a
# sixth of the activations.
WAITS = "wide-4-2-zero_bubble-2-2-7-3-units"


def marks(number: int, case: Case) -> tuple[pytest.MarkDecorator, ...]:
    waits = (pytest.mark.xfail(reason="an embedding's gradient that waits", strict=True),)
    return (() if number < NUM_QUICK else (pytest.mark.thorough,)) + (waits if name_of(case) == WAITS else ())


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=marks(number, case), id=name_of(case)) for number, case in enumerate(cases(NUM_CASES))],
)
def test_a_stage_on_paper_is_the_engine_s(case: Case) -> None:
    model, ranks, config = case
    source = read_source(MODELS[model])
    reports = simulate(subject_of(source, MODELS[model]), config, Cluster(ranks, "cpu", ranks)).ranks
    check(estimate_config(source, config, ranks), reports)


@pytest.mark.parametrize("pipeline", [1, 2])
def test_gradients_that_wait_for_their_bucket_are_counted(pipeline: int) -> None:
    """A gradient counts until its bucket is reduced.

    The head's gradient is reduced last: it is pending during the backward of all blocks, which have their own buckets.
    """
    name = "family=llama,layers=4,hidden=384,heads=4,kv_heads=4,ffn=1024,vocab=1024,context=64"
    source, ranks = read_source(name), 2 * pipeline
    config = {"zero": {"stage": 3}, "parallel": {"pipeline": pipeline}, "activations": {"checkpoint": "units"}}
    *_, report = simulate(subject_of(source, name), config, Cluster(ranks, "cpu", ranks), [0, ranks - 1]).ranks
    planned = estimate_config(source, config, ranks)
    held = planned.held(planned.stages[-1])
    assert held["activations", "device"] == pytest.approx(report.activation_bytes, rel=0.002)


@pytest.mark.parametrize(
    "pattern",
    [
        pytest.param(each, id=each["pattern"], marks=[pytest.mark.thorough] * number)
        for number, each in enumerate(PATTERNS)
    ],
)
def test_patterns_of_attention_are_traced(pattern: dict[str, Any]) -> None:
    source, config = read_source(MODELS["gpt"]), {"zero": {"stage": 1}, "batch": {"micro": 2}}
    (report,) = simulate(
        subject_of(source, MODELS["gpt"]), {**config, "attention": pattern}, Cluster(1, "cpu"), [0]
    ).ranks
    planned, dense = (estimate_config(source, {**config, **more}, 1) for more in ({"attention": pattern}, {}))
    held, whole = (each.held(each.stages[0])["activations", "device"] for each in (planned, dense))
    assert held == pytest.approx(report.activation_bytes, rel=0.002)
    assert held != pytest.approx(whole, rel=0.002)


@pytest.mark.parametrize("tier", ["host", pytest.param("disk", marks=pytest.mark.thorough)])
def test_received_inputs_leave_the_device_too(tier: str) -> None:
    source = read_source(MODELS["gpt"])
    config = {
        "parallel": {"pipeline": 2},
        "batch": {"micro": 2, "accumulate": 4},
        "activations": {"checkpoint": "units", "offload": tier},
    }
    reports = simulate(subject_of(source, MODELS["gpt"]), config, Cluster(2, "cuda", 2), [0, 1]).ranks
    planned = estimate_config(source, config, 2, "cuda")
    for stage, rank in zip(planned.stages, reports, strict=True):
        held = planned.held(stage)
        assert held["activations", tier] == rank.memory.peak["activations", tier] > 0
        assert held["activations", "device"] == pytest.approx(rank.activation_bytes, rel=TOLERANCE)


# -- schedules ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ORDERS)
def test_forwards_kept_are_those_of_the_schedule(name: str) -> None:
    for ranks, micros in ((2, 1), (2, 5), (4, 3), (4, 9)):
        schedule = make_schedule(name, Shape(ranks, micros, 2 if name == "interleaved" else 1))
        most = run_on_paper(schedule).max_kept_forwards
        for rank in range(ranks):
            found = schedule_states(schedule, rank)
            # The forward or backward at work, those between the two, and those with deferred weight gradients.
            kept = max(sum(each.kept) + sum(each.deferred) + (each.work is not Work.WEIGHTS) for each in found)
            assert kept == most[rank]


def test_middle_stages_of_a_pipeline_are_planned() -> None:
    """Each stage has its own activation bytes: of four stages, the second keeps three forwards, the third two."""
    config = {"parallel": {"pipeline": 4}, "batch": {"micro": 2, "accumulate": 8}}
    planned = estimate_config(read_source(MODELS["gpt"]), config, 4)
    held = [planned.held(stage)["activations", "device"] for stage in planned.stages]
    assert held[0] > held[1] > held[2]


# -- cuts of models ----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x))


class DearHead(nn.Module):
    """A model with an expensive head, so that its last stage has fewer blocks. Code runs between the blocks, too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(128, 128) for _ in range(6))
        self.head = nn.Linear(128, 384)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(x).square().mean()


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


def with_dear_head() -> tuple[nn.Module, dict[str, Tensor]]:
    return DearHead(), {"x": torch.zeros(1, 128)}


def of_layers() -> tuple[nn.Module, tuple[Tensor]]:
    """Return a model with other layers before and after its blocks. A stage may also begin at such a layer."""
    layers = nn.Linear(128, 128), *(Block() for _ in range(4)), nn.Linear(128, 256), Mean()
    return nn.Sequential(*layers), (torch.zeros(1, 128),)


@pytest.mark.parametrize(
    ("name", "cut", "first"),
    [
        ("with_dear_head", "auto", (0, 4)),
        ("with_dear_head", ["blocks.5"], (0, 5)),
        ("of_layers", "auto", (0, 3)),
        ("of_layers", ["5"], (0, 5)),
    ],
    ids=str,
)
def test_stages_are_cut_as_the_engine_cuts_them(name: str, cut: str | list[str], first: tuple[int, int]) -> None:
    source = read_source(f"{__name__}:{name}")
    config = {"parallel": {"pipeline": 2, "cut": cut}, "batch": {"micro": 64, "accumulate": 3}}
    planned = estimate_config(source, config, 2)
    assert planned.stages[0].chunks == (first,)
    check(planned, simulate(subject_of(source, source.name), config, Cluster(2, "cpu", 2), [0, 1]).ranks)


# -- plans -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "pipeline"), sampled(product(MODELS, (2, 4)), ("wide", 2)))
def test_a_pipeline_that_is_called_fitting_fits(name: str, pipeline: int) -> None:
    """The forecast is at least the memory of the fullest rank, and without working memory at most 2% more."""
    source = read_source(MODELS[name])
    machine = replace(machine_named("h100"), host_memory=1e12)
    for checkpoint, accumulate in (("none", 8), ("units", 2)):
        search = Search(source, machine, 2 * pipeline, 4 * accumulate, Config(), dtype="fp32")
        choice = PlanSettings(MeshShape(pipeline, 2), StateSettings(2), 2, accumulate, checkpoint)
        config = {**choice.sections(), "precision": {"compute": "fp32"}}
        resolve(Config(**config), 2 * pipeline, "cpu", 2 * pipeline)
        reports = simulate(subject_of(source, MODELS[name]), config, Cluster(2 * pipeline, "cpu", 8)).ranks
        most = max(each.bytes_by_tier[Tier.DEVICE] for each in reports)
        forecast = search.forecast(choice)
        assert most <= (1 + 1e-3) * forecast.by_tier[Tier.DEVICE]
        assert forecast.by_tier[Tier.DEVICE] - forecast.held["working", "device"] <= (1 + TOLERANCE) * most


def test_more_stages_than_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"parallel.pipeline x parallel.chunks: 16 stages"):
        estimate_config(read_source(MODELS["gpt"]), {"parallel": {"pipeline": 16}}, 16)


@pytest.mark.parametrize("name", ORDERS)
def test_few_micro_batches_have_all_moments_of_many(name: str) -> None:
    """The search uses fewer micro-batches for schedules that repeat; each rank has the same states as with all.

    For a schedule that is not known to repeat, it uses all micro-batches.
    """
    chunks = 2 if name == "interleaved" else 1
    for num_ranks in (2, 3, 4):
        many = Shape(num_ranks, 7 * num_ranks, chunks)
        few, uneven = representative(name, many), replace(many, micros=many.micros + 1)
        assert (few.micros < many.micros) == (name in ("1f1b", "interleaved"))
        assert representative(name, uneven) == uneven
        for rank in range(num_ranks):
            every, some = (schedule_states(make_schedule(name, shape), rank) for shape in (many, few))
            assert every == some
