"""On a slow network, the predicted time of a step is proportional to the bytes that are sent."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partita.layout.traffic import step_traffic
from partita.prediction.given_config import estimate_config
from partita.prediction.machine import machine_named
from partita.prediction.model_source import read_source
from partita.prediction.step_timeline import DISK, Job
from partita.table.planned import reduction_order
from partita.table.planned_bucket import share_buckets

MODEL = "layers=2,hidden=256,heads=4,vocab=512,context=64"
FULL: dict[str, Any] = {"zero": {"stage": 2}}
NODES, ON_NODE = 4, 2
# The network is so slow that all other times are negligible.
SLOW = replace(machine_named("h100"), gpus=ON_NODE, network=1e5, node_link=1e12)


def predicted(config: dict[str, Any], nodes: int = NODES) -> tuple[float, int]:
    """Return the seconds of a step, and the bytes that a rank sends in it."""
    given = {**config, "batch": {"micro": 1}, "precision": {"compute": "fp32"}}
    plan = estimate_config(read_source(MODEL), given, nodes * ON_NODE, "cuda", ON_NODE)
    return plan.time(SLOW).total_s, sum(plan.sent(plan.stages[0]).values())


@pytest.mark.parametrize("codec", ["int8", "int4", "ternary", "onebit"])
def test_codes_take_the_time_of_their_bytes(codec: str) -> None:
    full_s, full = predicted(FULL)
    coded_s, coded = predicted({**FULL, "communication": {"gradients": codec, "parameters": codec}})
    assert full_s / coded_s == pytest.approx(full / coded, rel=0.1)


def test_low_rank_factors_take_the_time_of_their_bytes() -> None:
    full_s, full = predicted({"zero": {"stage": 0}})
    coded_s, coded = predicted({"zero": {"stage": 0}, "communication": {"gradients": "low_rank", "low_rank": 2}})
    assert full_s / coded_s == pytest.approx(full / coded, rel=0.1)


def test_backward_gathers_inside_the_node_where_it_has_a_second_part() -> None:
    """The all-gather before backward, a third of the traffic between nodes, stays inside the node."""
    full_s, _ = predicted({"zero": {"stage": 3}})
    near_s, _ = predicted({"zero": {"stage": 3, "hierarchical": True}})
    assert near_s / full_s == pytest.approx(2 / 3, rel=0.1)


def test_a_local_step_has_its_part_of_the_round_s_end() -> None:
    """Only the end of a round of local steps sends between nodes, so a step takes 1 / ``every`` of its time.

    Uncompressed, it takes as long as a step of hybrid sharding; quantization makes it faster.
    """

    def apart(every: int, **communication: Any) -> float:
        return predicted({"zero": {"stage": 1}, "communication": {"every": every, **communication}})[0]

    each_s, _ = predicted({"zero": {"stage": 3, "replicate": "nodes"}})
    assert apart(1) == pytest.approx(each_s, rel=0.1)
    assert apart(1) / apart(10) == pytest.approx(10, rel=0.1)
    codes = 256 * 4 / 56  # bytes of a block of 256 values, and of its ternary codes
    assert apart(10) / apart(10, gradients="ternary") == pytest.approx(codes, rel=0.1)


def test_a_pipeline_waits_as_its_schedule_does() -> None:
    """With four ranks, eight micro-batches and almost no communication, waits are 3/8, 3/16 and 3/24 of the work."""
    source = read_source("layers=8,hidden=256,heads=4,vocab=32,context=64")

    def waiting(schedule: str, **parallel: int) -> float:
        config: dict[str, Any] = {"parallel": {"pipeline": 4, "schedule": schedule, **parallel}}
        given = estimate_config(source, {**config, "batch": {"micro": 1, "accumulate": 8}}, 4, "cuda", 4)
        time = given.time(replace(SLOW, node_link=1e18))
        return time.waits_s["pipeline"] / (time.total_s - time.waits_s["pipeline"])

    assert waiting("1f1b") == pytest.approx(3 / 8)
    assert waiting("interleaved", chunks=2) == pytest.approx(3 / 16)
    assert waiting("zero_bubble") == pytest.approx(3 / 24, rel=0.3)  # more if a backward takes longer than two forwards


@pytest.mark.parametrize("zero", [{"stage": 0}, {"stage": 2}, {"stage": 3, "replicate": "nodes"}])
@pytest.mark.parametrize("tied", [False, True])
def test_seconds_are_of_the_bytes_that_traffic_counts(zero: dict[str, Any], tied: bool) -> None:
    """If all links send one byte per second, reductions take as many seconds as a step has gradient bytes to send."""
    model = "layers=4,hidden=128,heads=2,vocab=512,context=64,family=llama" + ",tied=1" * tied
    config: dict[str, Any] = {"zero": zero, "parallel": {"pipeline": 2}, "batch": {"micro": 1}}
    machine = replace(machine_named("h100"), gpus=8, network=1.0, node_link=1.0, reached=1.0)
    plan = estimate_config(read_source(model), config, 8, "cuda", 8)
    for stage in plan.stages:
        units = plan.units[stage]
        reduce_s = sum(sum(pair) for pair in plan._step_cost(machine)._reductions(units))
        assert reduce_s == pytest.approx(step_traffic(units).sent_bytes("gradients"), rel=1e-3)


def test_one_node_has_no_rounds() -> None:
    alone = {"zero": {"stage": 1}}
    assert predicted({**alone, "communication": {"every": 10}}, nodes=1) == predicted(alone, nodes=1)


@pytest.mark.parametrize(("stage", "num_shards"), [(0, 1), (1, 8), (3, 8)])
def test_each_rank_copies_the_parameters_that_its_host_updated(stage: int, num_shards: int) -> None:
    config = {"zero": {"stage": stage, "offload": {"optimizer": "host"}}, "precision": {"compute": "bf16"}}
    plan = estimate_config(read_source(MODEL), config, 8, "cuda", 8)
    (stage_units,) = plan.units.values()
    machine = replace(machine_named("h100"), reached=1.0, host_link=1.0)
    upload_s = sum(plan._step_cost(machine).unit_cost(unit).upload for unit in stage_units)
    assert upload_s == sum(unit.num_bytes for unit in stage_units) / num_shards


@pytest.mark.parametrize("units", ["auto", ["Attention", "FeedForward"], ["Attention"], ["Embedding"]])
@pytest.mark.parametrize("parallel", [{}, {"pipeline": 2, "schedule": "interleaved", "chunks": 2}])
def test_the_timeline_has_all_the_work_of_a_stage(units: Any, parallel: dict[str, Any]) -> None:
    config = {"zero": {"stage": 3, "units": units}, "batch": {"micro": 1}, "parallel": parallel}
    plan = estimate_config(read_source(MODEL.replace("layers=2", "layers=6")), config, 4, "cuda", 4)
    step_cost, mesh = plan._step_cost(machine_named("h100")), plan.resolved.mesh
    for stage in plan.stages:
        jobs = list[Job]()
        step_cost.step(plan.rank_model, stage, plan.units[stage], plan.trace, 1, jobs)
        computed_s = sum(job.stop_s - job.start_s for job in jobs if job.what in ("forward", "backward"))
        assert computed_s == pytest.approx(sum(step_cost._pass_s(plan.trace, stage, mesh)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)


class Blocks(nn.Module):
    """A model without parameters outside its blocks, and with work before them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.sin().cos()
        for block in self.blocks:
            x = block(x)
        return x.sum()


def blocks_only() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Blocks(), (torch.zeros(1, 64),)


def test_the_work_before_the_blocks_is_added_to_the_first_block() -> None:
    plan = estimate_config(read_source(f"{__name__}:blocks_only"), {"zero": {"stage": 0}}, 1, "cuda", 1)
    (stage,) = plan.stages
    assert stage.block_numbers == (0, 1, 2, 3)
    step_cost, mesh = plan._step_cost(machine_named("h100")), plan.resolved.mesh
    assert plan.trace.prologue.forward.num_ops
    assert plan.time(machine_named("h100")).compute_s == pytest.approx(step_cost.compute_s(plan.trace, stage, mesh, 1))


@pytest.mark.parametrize(("stage", "accumulate", "per_param"), [(2, 1, 32), (2, 3, 48), (1, 3, 48)])
def test_the_disk_is_busy_for_the_bytes_of_a_step(stage: int, accumulate: int, per_param: int) -> None:
    """A step reads and writes 4 bytes per parameter and access.

    The update reads and writes three states, and reads the gradient, which was written by the first reduction, and
    read and written by each later one. On one rank, gradients of stage 1 leave the device after each micro-batch, too.
    """
    config: dict[str, Any] = {"zero": {"stage": stage, "offload": {"optimizer": "disk"}}, "batch": {"micro": 1}}
    config["batch"]["accumulate"] = accumulate
    plan = estimate_config(read_source(MODEL), {**config, "precision": {"compute": "fp32"}}, 1, "cuda", 1)
    (pipeline_stage,), jobs = plan.stages, list[Job]()
    machine = replace(machine_named("h100"), gpus=1, reached=1.0, disk_rate=1.0)
    units = plan.units[pipeline_stage]
    plan._step_cost(machine).step(plan.rank_model, pipeline_stage, units, plan.trace, accumulate, jobs)
    on_disk_s = sum(job.stop_s - job.start_s for job in jobs if job.resource == DISK)
    assert on_disk_s == pytest.approx(per_param / 4 * sum(unit.num_bytes for unit in units))


def test_gradients_that_share_a_bucket_travel_at_once() -> None:
    small = read_source("layers=6,hidden=128,heads=2,vocab=128,context=32")
    plan = estimate_config(small, {"zero": {"stage": 2}}, NODES * ON_NODE, "cuda", ON_NODE)
    (stage,), jobs = plan.stages, list[Job]()
    units = plan.units[stage]
    plan._step_cost(SLOW).step(plan.rank_model, stage, units, plan.trace, 1, jobs)
    buckets = share_buckets(reduction_order(units))
    assert [job.what for job in jobs].count("reduce") == len(buckets)
    assert 1 < len(buckets) < len(units)
