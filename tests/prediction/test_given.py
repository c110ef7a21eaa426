"""The estimate of a given config against the real and the simulated engine: memory and traffic of a step."""

import math
from dataclasses import replace
from typing import Any

import pytest

import partita
from partita import ConfigError
from partita.config.load import load_config
from partita.config.resolve import resolve
from partita.layout.blueprint import make_blueprint
from partita.layout.owners import Exchanges
from partita.layout.state_bytes import model_state_bytes
from partita.prediction.given_config import Estimate, estimate_config
from partita.prediction.machine import machine_named
from partita.prediction.model_source import read_source
from partita.prediction.optimizer_plan import plan_optimizer
from partita.prediction.simulate.cluster import Cluster, simulate
from partita.prediction.simulate.rank import SimulatedModel
from partita.prediction.tune.trial_rank import autograd_peak_bytes
from partita.table.residence import Tier
from tests.kit.ranks import on_ranks

MODEL = "layers=3,hidden=128,heads=2,vocab=512,context=64"
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {"zero": {"stage": 0}}),
    "one rank, several micro-batches": (1, {"batch": {"accumulate": 3}}),
    "recomputed": (1, {"activations": {"checkpoint": "units"}}),
    "named modules recomputed": (1, {"activations": {"checkpoint": ["blocks.1"]}, "batch": {"accumulate": 2}}),
    "loss in tiles": (1, {"loss": {"tiled": "auto"}, "batch": {"accumulate": 2}}),
    "slices of samples": (2, {"parallel": {"sequence": 2}, "zero": {"stage": 1}}),
    "slices of samples, recomputed": (
        2,
        {"parallel": {"sequence": 2}, "activations": {"checkpoint": "units"}, "batch": {"accumulate": 2}},
    ),
    "16-bit, split": (2, {"zero": {"stage": 3}, "precision": {"compute": "bf16"}}),
    "without moments": (1, {"optimizer": {"name": "sgd", "momentum": 0.0}}),
    "muon": (2, {"parallel": {"tensor": 2}, "optimizer": {"name": "muon"}, "batch": {"micro": 16}}),
}


def settings(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "batch": {"micro": 4, **config.get("batch", {})}}


def measured(config: dict[str, Any]) -> tuple[dict[tuple[str, str], int], int]:
    """Return the engine's planned bytes of states, and the peak of torch's CPU allocator in a step, without them."""
    source = read_source(MODEL)
    with partita.initialize(source.model, config, device="cpu") as engine:
        sizes = engine.blueprint.resolved.batch
        drawn = [source.batch(sizes.micro, "cpu") for _ in range(sizes.accumulate)]
        engine.train_batch(drawn)
        engine.train_batch(drawn)
        return engine.planned_bytes, autograd_peak_bytes(engine, lambda: engine.train_batch(drawn))


@pytest.mark.parametrize("name", CASES)
def test_a_peak_is_the_allocator_s(name: str) -> None:
    ranks, config = CASES[name][0], settings(CASES[name][1])
    source = read_source(MODEL)
    simulated_model = SimulatedModel(lambda: read_source(MODEL).model, lambda samples: source.batch(samples, "meta"))
    simulated = simulate(simulated_model, config, Cluster(ranks, "cpu", ranks), range(ranks)).ranks
    for report, (planned_bytes, lent) in zip(simulated, on_ranks(ranks, measured, config, timeout=120), strict=True):
        assert report.planned_bytes == planned_bytes
        assert report.activation_bytes == pytest.approx(lent, rel=0.02)
    if ranks == 1 or "parallel" in config:
        given = estimate_config(source, config, ranks)
        held = given.held(given.stages[0])
        assert held["activations", "device"] == pytest.approx(lent, rel=0.02)
        assert held.keys() - {("working", "device"), ("activations", "device")} == planned_bytes.keys()
        for key, num_bytes in planned_bytes.items():  # estimates are for the rank with the most, including padding
            assert num_bytes <= held[key] < 1.02 * num_bytes


@pytest.mark.parametrize("axes", [{}, {"tensor": 2}, {"pipeline": 2}], ids=str)
def test_muon_takes_longer_and_sends_more(axes: dict[str, int]) -> None:
    machine = machine_named("h100")

    def planned(name: str) -> Estimate:
        config = settings({"zero": {"stage": 3}, "parallel": axes, "optimizer": {"name": name}})
        return estimate_config(source, config, 4, "cuda")

    source = read_source(MODEL)
    muon, adamw = planned("muon"), planned("adamw")
    work = plan_optimizer(source.model, muon.resolved.config).work
    for of_muon, of_adamw in zip(muon.stages, adamw.stages, strict=True):
        exchanges = Exchanges(muon.units[of_muon], work)
        sent = sum(each.num_bytes for each in exchanges.most_operations)
        assert sum(muon.sent(of_muon).values()) - sum(adamw.sent(of_adamw).values()) == sent > 0
        # Matrices have one moment (Muon), vectors and embeddings two (AdamW).
        assert muon.held(of_muon)["moments", "device"] < adamw.held(of_adamw)["moments", "device"]
    times = muon.time(machine), adamw.time(machine)
    assert times[0].waits_s["owners"] > 0
    assert times[0].compute_s > times[1].compute_s


def test_rules_for_some_of_equal_blocks() -> None:
    """Blocks that are equal except for the optimizer of their matrices are planned separately."""
    source = read_source(MODEL)
    config = load_config(
        {"zero": {"stage": 3}, "optimizer": {"name": "muon", "muon": {"rules": {"blocks.1.*": "adamw"}}}}
    )
    given, optimizer = estimate_config(source, config, 2), plan_optimizer(source.model, config)
    units = make_blueprint(source.model, resolve(config, 2, "cpu", 2), optimizer.moments).units
    held = model_state_bytes(units, None, optimizer.moments)["moments", "device"]
    assert given.held(given.stages[0])["moments", "device"] == held
    assert len(optimizer.work.costs) == 8
    sent = sum(each.num_bytes for each in Exchanges(units, optimizer.work).most_operations)
    assert sent == sum(
        each.num_bytes for each in Exchanges(given.units[given.stages[0]], optimizer.work).most_operations
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"zero": {"offload": {"optimizer": "auto"}}}, "zero.offload: auto"),
        (
            {"activations": {"checkpoint": "units", "keep_bytes": 1}},
            "activations.keep_bytes: partita plan cannot predict",
        ),
        (
            {"activations": {"checkpoint": ["blocks.0"], "offload": "host"}},
            "activations.offload: partita plan cannot predict",
        ),
    ],
)
def test_what_no_plan_knows_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        estimate_config(read_source(MODEL), config, 2)


@pytest.mark.parametrize("axes", [{}, {"sequence": 2}, {"tensor": 2}], ids=str)
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_inputs_that_leave_the_device_are_the_engine_s(axes: dict[str, int], tier: str) -> None:
    """Offloaded inputs match a simulated accelerator: exactly on their tier, within 2% at the device's peak.

    A slower link to their tier increases the time of a step.
    """
    sizes, num_ranks = "layers=8,hidden=128,heads=4,vocab=512,context=256", math.prod(axes.values())
    config = settings({"parallel": axes, "activations": {"checkpoint": "units", "offload": tier}, "zero": {"stage": 1}})
    source = read_source(sizes)
    simulated_model = SimulatedModel(lambda: read_source(sizes).model, lambda samples: source.batch(samples, "meta"))
    (rank,) = simulate(simulated_model, config, Cluster(num_ranks, "cuda", num_ranks), [0]).ranks
    given = estimate_config(source, config, num_ranks, "cuda")
    held = given.held(given.stages[0])
    assert rank.memory.peak["activations", tier] == held["activations", tier] > 0
    assert rank.activation_bytes == pytest.approx(held["activations", "device"], rel=0.02)
    assert given.trace.peak < replace(given.trace, offload_tier=Tier.DEVICE).peak
    figure = {"host": "host_link", "disk": "disk_rate"}[tier]
    slow, fast = (replace(machine_named("h100"), **{figure: rate}) for rate in (1e8, 1e13))
    assert given.time(slow).total_s > given.time(fast).total_s


LEAN = {"master": "split", "moments": "int8", "gradients": "bf16"}


@pytest.mark.parametrize(
    ("ranks", "config"),
    [
        (8, {"zero": {"stage": 2}}),
        (8, {"zero": {"stage": 3, "offload": {"parameters": "host", "optimizer": "host"}}}),
        (512, {"zero": {"stage": 3}}),
        (512, {"zero": {"stage": 3, "hierarchical": True}, "precision": LEAN}),
    ],
    ids=["stage 2", "on the host", "512 ranks", "512 ranks, hierarchical, lean"],
)
def test_what_a_device_holds_is_the_engine_s(ranks: int, config: dict[str, Any]) -> None:
    """The predicted device memory is that of a simulated accelerator: states, buffer pools and activations.

    Reductions on accelerators receive only this rank's part.
    """
    sizes, given_config = "family=llama,layers=4,hidden=128,heads=4,ffn=256,vocab=512,context=64", settings(config)
    source = read_source(sizes)
    simulated_model = SimulatedModel(lambda: read_source(sizes).model, lambda samples: source.batch(samples, "meta"))
    (rank,) = simulate(simulated_model, given_config, Cluster(ranks, "cuda", 8), [0]).ranks
    given = estimate_config(source, given_config, ranks, "cuda", 8)
    held = sum(num for (_, tier), num in given.held(given.stages[0]).items() if tier == "device")
    assert held == pytest.approx(rank.bytes_by_tier[Tier.DEVICE], rel=1e-3)


@pytest.mark.parametrize(
    "config",
    [
        {"zero": {"stage": 3, "units": ["blocks.2"]}},
        {"precision": {"compute": "bf16", "keep_fp32": ["blocks.2.*"]}},
        {"parallel": {"tensor": 2, "tensor_rules": {"blocks.2.ffn.up": "whole"}}},
    ],
)
def test_one_of_equal_blocks_may_be_named(config: dict[str, Any]) -> None:
    """A trace runs only a few of equal blocks, but also every block that the config names."""
    named = estimate_config(read_source(MODEL), settings(config), 2)
    (stage,) = named.stages
    states = sum(num for (what, _), num in named.held(stage).items() if what == "parameters")
    if "parallel" in config:  # tensor ranks split all layers except the named one
        split = estimate_config(read_source(MODEL), settings({"parallel": {"tensor": 2}}), 2)
        assert states > sum(num for (what, _), num in split.held(split.stages[0]).items() if what == "parameters")
        return
    units = make_blueprint(read_source(MODEL).model, named.resolved).units
    assert states == sum(num for (what, _), num in model_state_bytes(units, None).items() if what == "parameters")
