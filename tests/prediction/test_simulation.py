"""Simulated ranks have the memory and the traffic of real ranks, and of the closed forms."""

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import partita
from partita.errors import ConfigError, PartitaError
from partita.memory.ledger import STATES
from partita.prediction.simulate.cluster import Cluster, simulate
from partita.prediction.simulate.rank import SimulatedModel
from partita.prediction.simulate.roles import distinct_roles
from partita.prediction.tune.trial_rank import autograd_peak_bytes
from partita.table.mesh_shape import MeshShape
from partita.table.traffic import TrafficCount, TrafficKey, TrafficReport
from tests.kit.ranks import on_ranks
from tests.prediction.subjects import batch, llama, simulated_model

HOST, DISK = ({"parameters": tier, "optimizer": tier} for tier in ("host", "disk"))
ROWS: dict[str, dict[str, Any]] = {
    **{str(stage): {"zero": {"stage": stage}} for stage in range(4)},
    "kept": {"zero": {"stage": 3, "keep_gathered": True}, "batch": {"accumulate": 3}},
    "host": {"zero": {"stage": 3, "offload": HOST}},
    "disk": {"zero": {"stage": 3, "offload": DISK}, "precision": {"compute": "bf16"}},
    "lean": {"zero": {"stage": 2}, "precision": {"compute": "bf16", "master": "split", "moments": "int8"}},
    "in backward": {"zero": {"stage": 3}, "precision": {"compute": "bf16", "gradients": "in_backward"}},
    "codes": {"zero": {"stage": 3}, "communication": {"gradients": "int8", "parameters": "int8"}},
    "recomputed": {"zero": {"stage": 3}, "activations": {"checkpoint": "units"}},
    "tensor": {"zero": {"stage": 2}, "parallel": {"tensor": 2}},
    "sequence": {"zero": {"stage": 3}, "parallel": {"sequence": 2}},
    "pipeline": {"zero": {"stage": 1}, "parallel": {"pipeline": 2}, "batch": {"accumulate": 4}},
    "pipeline in 16 bits": {
        "zero": {"stage": 1},
        "parallel": {"pipeline": 2},
        "precision": {"compute": "bf16"},
        "batch": {"accumulate": 2},
    },
    "interleaved": {
        "zero": {"stage": 3},
        "parallel": {"pipeline": 2, "schedule": "interleaved", "chunks": 2},
        "batch": {"accumulate": 3},
    },
    "sparse attention": {"zero": {"stage": 1}, "attention": {"pattern": "sliding", "window": 4, "block": 4}},
    "three axes": {"parallel": {"pipeline": 2, "tensor": 2}, "batch": {"accumulate": 2}},
}
# On several nodes.
WIDE: dict[str, dict[str, Any]] = {
    "hierarchical": {"zero": {"stage": 3, "hierarchical": True}},
    "changes": {"zero": {"stage": 3, "hierarchical": True}, "communication": {"parameters": "ternary"}},
    "replicated": {"zero": {"stage": 3, "replicate": "nodes"}},
}
SAMPLE = ("disk", "sequence", "sparse attention", "three axes")
OF_STATES = ("parameters", "gradients", "control")
WORLD = 4
LAYERS = 4  # one for each chunk of two stages with two chunks

Report = tuple[dict[tuple[str, str], int], dict[TrafficKey, TrafficCount]]


# -- against real ranks ------------------------------------------------------------------------------------------------


def train(configs: Mapping[str, dict[str, Any]]) -> dict[str, Report]:
    """Return, for each config, the bytes that this rank holds, and its traffic in the second step."""
    found = {}
    for name, config in configs.items():
        with partita.initialize(llama(LAYERS), config) as engine:
            sizes = engine.blueprint.resolved.batch
            for _ in range(2):
                before = engine.traffic_report()
                engine.train_batch([batch(sizes.micro) for _ in range(sizes.accumulate)])
            found[name] = beside_staging(engine.memory_report().held), engine.traffic_report().since(before).rows
    return found


def beside_staging(held: Mapping[tuple[str, str], int]) -> dict[tuple[str, str], int]:
    """Return ``held`` without staging memory, which depends on the speed of the disk on real ranks."""
    return {key: num for key, num in held.items() if key[0] != "staging"}


def compare(rows: Mapping[str, dict[str, Any]]) -> None:
    measured = on_ranks(WORLD, train, rows, timeout=120)
    for name, config in rows.items():
        simulation = simulate(simulated_model(LAYERS), config, Cluster(WORLD, "cpu", WORLD), ranks=range(WORLD))
        for rank, report in enumerate(simulation.ranks):
            held, sent = measured[rank][name]
            assert beside_staging(report.memory.held) == held, (name, rank)
            assert report.traffic.rows == sent, (name, rank, str(report.traffic), str(TrafficReport(sent)))


def take(config: dict[str, Any], vocabulary: int) -> int:
    """Return the peak bytes of autograd and of this rank's operators in a step."""
    with partita.initialize(llama(vocab_size=vocabulary), config) as engine:
        step = partial(engine.train_batch, [batch(4)])
        step()
        return autograd_peak_bytes(engine, step)


@pytest.mark.parametrize("config", [{"parallel": {"tensor": 2}}, {"loss": {"tiled": 40_000}}], ids=str)
def test_a_simulated_rank_takes_what_a_real_one_does_where_logits_are_most(config: dict[str, Any]) -> None:
    given = {**config, "batch": {"micro": 4}}
    found = on_ranks(2, take, given, 2000)
    simulation = simulate(simulated_model(vocab_size=2000), given, Cluster(2, "cpu", 2), ranks=range(2))
    for rank, report in enumerate(simulation.ranks):
        assert report.activation_bytes == pytest.approx(found[rank], rel=0.02), rank


def test_a_simulated_rank_holds_and_sends_what_a_real_one_does() -> None:
    compare({name: ROWS[name] for name in SAMPLE})


@pytest.mark.thorough
def test_simulated_ranks_hold_and_send_what_real_ones_do() -> None:
    compare({name: config for name, config in ROWS.items() if name not in SAMPLE})


# -- against the closed forms ------------------------------------------------------------------------------------------


def of_states(traffic: TrafficReport) -> dict[TrafficKey, TrafficCount]:
    return {key: count for key, count in traffic.rows.items() if key.purpose in OF_STATES}


def check_closed_forms(rows: Mapping[str, dict[str, Any]], num_ranks: int, ranks: Sequence[int] | None) -> None:
    for name, config in rows.items():
        for report in simulate(simulated_model(LAYERS), config, Cluster(num_ranks), ranks).ranks:
            held = {key: num for key, num in report.memory.held.items() if key[0] in STATES}
            assert held == report.planned_bytes, (name, report.role)
            assert of_states(report.traffic) == report.planned_traffic.rows, (name, report.role)
            counted = dict[TrafficKey, TrafficCount]()
            for call in report.collectives:
                counted[call.key] = counted.get(call.key, TrafficCount()) + TrafficCount(1, call.sent_bytes)
            assert counted == report.traffic.rows


def test_the_closed_forms_are_a_simulated_run() -> None:
    check_closed_forms({**WIDE, "lean": ROWS["lean"], "host": ROWS["host"]}, 16, [9])
    check_closed_forms({"3": ROWS["3"]}, 512, [0, 511])


@pytest.mark.thorough
@pytest.mark.parametrize("num_ranks", [16, 512])
def test_the_closed_forms_are_the_simulated_runs(num_ranks: int) -> None:
    check_closed_forms({**ROWS, **WIDE}, num_ranks, None)


# -- roles and errors --------------------------------------------------------------------------------------------------


def test_roles_are_the_ends_of_every_axis() -> None:
    mesh = MeshShape(pipeline=2, data=3, sequence=2, tensor=4)
    every = itertools.product((0, 1), ((0, 0), (2, 1)), (0, 3))
    found = {
        tuple(mesh.coordinate(role.rank, axis) for axis in ("pipeline", "data", "sequence", "tensor"))
        for role in distinct_roles(mesh)
    }
    assert found == {(stage, *share, part) for stage, share, part in every}
    assert [role.coordinates for role in distinct_roles(MeshShape())] == ["the only rank"]


def test_activations_grow_with_the_batch_and_shrink_when_they_are_recomputed() -> None:
    def activations(**sections: Any) -> int:
        report = simulate(simulated_model(6), {"zero": {"stage": 3}, **sections}, Cluster(4)).ranks[0]
        return report.activation_bytes

    once = activations(batch={"micro": 4})
    assert 1.8 * once < activations(batch={"micro": 8}) < 2.2 * once
    assert activations(batch={"micro": 4}, activations={"checkpoint": "units"}) < 0.6 * once


class Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        y = self.layer(x)
        return y.sum() if y.sum() > 0 else -y.sum()


def test_what_cannot_be_simulated_is_refused() -> None:
    asking = SimulatedModel(Asking, lambda samples: {"x": torch.ones(samples, 4)})
    with pytest.raises(PartitaError, match="reads the values of a tensor"):
        simulate(asking, {}, Cluster(4))
    with pytest.raises(ConfigError, match=r"zero.offload: auto .* name a tier"):
        simulate(simulated_model(), {"zero": {"offload": {"optimizer": "auto"}}}, Cluster(4))
    with pytest.raises(ConfigError, match="rank 9 is outside the mesh of 4 ranks"):
        simulate(simulated_model(), {}, Cluster(4), ranks=[9])
    with pytest.raises(ConfigError, match="cannot be divided by"):
        simulate(simulated_model(), {"parallel": {"tensor": 3}}, Cluster(4))
