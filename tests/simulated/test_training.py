"""Tests of every plan on the simulated accelerator: the CPU's bits, and no races."""

import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from benchmarks.gpu.check import check_collectives
from partita import PartitaError
from partita.memory import buffer_pool
from partita.parallel.sequence import attention
from partita.sharding.finite import NUM_COMPARED
from tests.kit import seeds
from tests.kit.ranks import close_pool, on_ranks
from tests.simulated.device import register
from tests.simulated.training import (
    AXES,
    NODES,
    PLANS,
    on,
    on_nodes,
    open_engine,
    resume,
    same,
    simulated,
    train_all,
    train_on_axes,
    train_step,
)

SAMPLE = (
    *("stage 0", "stage 2", "all on host", "all on disk", "lean, in backward, on host", "accumulated"),
    *("codes", "inputs on host", "inputs on disk"),
)


def check(num_ranks: int, names: list[str]) -> None:
    plans = {name: PLANS[name] for name in names}
    expected = on_ranks(num_ranks, train_all, plans, with_group=False)
    close_pool()
    results = on_ranks(num_ranks, simulated, train_all, plans, with_group=False, timeout=200)
    for rank, (trained, races) in enumerate(results):
        assert races == [], f"rank {rank}"
        differ = [name for name in names if not same(trained[name], expected[rank][name])]
        assert not differ, f"rank {rank}: other bits than on the CPU"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_sample_of_the_plans(num_ranks: int) -> None:
    check(num_ranks, list(SAMPLE))


@pytest.mark.thorough
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_plan(num_ranks: int) -> None:
    check(num_ranks, list(PLANS))


# Plans with error feedback or averages on the host: the reducing thread copies them to the device and waits for it, and
# the caller waits for the copies of gradients that it scales. In the last two, threads so copy weights.
COPIED_FROM_HOST = (
    *("PowerSGD, on host", "1-bit Adam, stage 3, on host", "hsdp, ternary, on host"),
    *("changes, bf16, optimizer on host", "lean, parameters on host"),
)
WAIT = "synchronize"  # for an event, a stream or the device, without a read or a copy


def waits_in_steps(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, list[Counter[tuple[str, bool]]]]:
    """Count the host's waits for the device in each step, by (kind, True if one of partita's threads waits)."""
    native, found = register(), dict[str, list[Counter[tuple[str, bool]]]]()
    for name, config in configs.items():
        found[name] = []
        with open_engine(config) as engine:
            for step in range(NUM_COMPARED + 2):
                waits = Counter[tuple[str, bool]]()

                def note(what: str, waits: Counter[tuple[str, bool]] = waits) -> None:
                    waits[what, threading.current_thread().name.startswith("partita")] += 1

                native.call_at_waits(note)
                train_step(engine, step, None)
                native.call_at_waits(None)
                found[name].append(waits)
    return found


def check_waits(found: dict[str, list[Counter[tuple[str, bool]]]], configs: Mapping[str, Mapping[str, Any]]) -> None:
    for name, steps in found.items():
        precision = configs[name].get("precision", {})
        in_backward = precision.get("gradients") == "in_backward"  # threads read the flag that allows a unit's update
        for waits in steps[NUM_COMPARED:]:  # the first steps compare the ranks' batches
            copies = name in COPIED_FROM_HOST
            ignored = {WAIT} if copies else set()
            by_caller = sum(num for (what, in_thread), num in waits.items() if not in_thread and what not in ignored)
            assert by_caller <= (0 if in_backward else 1), f"{name}: the norm, and nothing else: {waits}"
            reads = sum(num for (what, in_thread), num in waits.items() if in_thread and what != WAIT)
            assert reads == 0 or in_backward or copies, f"{name}: {waits}"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_host_waits_for_the_device_once_in_a_step(num_ranks: int) -> None:
    configs = {name: PLANS[name] for name in (SAMPLE if num_ranks == 2 else SAMPLE[:3])}
    for found, _ in on_ranks(num_ranks, simulated, waits_in_steps, configs, with_group=False, timeout=200):
        check_waits(found, configs)


@pytest.mark.thorough
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_host_waits_for_the_device_once_in_a_step_of_every_plan(num_ranks: int) -> None:
    for found, _ in on_ranks(num_ranks, simulated, waits_in_steps, PLANS, with_group=False, timeout=300):
        check_waits(found, PLANS)


@pytest.mark.thorough
def test_the_host_waits_for_the_device_once_in_a_step_between_nodes() -> None:
    for found, _ in on_ranks(4, on_nodes, simulated, waits_in_steps, NODES, with_group=False, timeout=300):
        check_waits(found, NODES)


def waits_in_attention(config: Mapping[str, Any]) -> tuple[int, list[str]]:
    """Return the number of calls of attention over slices in a step, and the host's waits for the device in them."""
    native, num_calls, waits, run = register(), 0, list[str](), attention.attention_by_heads

    def observed(*args: Any) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        caller = threading.get_ident()
        native.call_at_waits(lambda what: waits.append(what) if threading.get_ident() == caller else None)
        try:
            return run(*args)
        finally:
            native.call_at_waits(None)

    with mock.patch.object(attention, "attention_by_heads", observed):
        train_on_axes(config, num_steps=1)
    return num_calls, waits


def test_the_host_does_not_wait_for_the_device_in_attention_over_slices() -> None:
    results = on_ranks(4, simulated, waits_in_attention, AXES["sequence"], with_group=False, timeout=200)
    for (num_calls, waits), _ in results:
        assert num_calls >= 4, "of four blocks"
        assert waits == []


def on_the_one_visible_device(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function in a process that sees only one device."""
    with mock.patch.dict(os.environ, {"LOCAL_RANK": "0"}):
        register()
    return simulated(function, *args)


def with_resized_storages(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function without torch's swap of two storages' memory, as before torch 2.12."""
    with mock.patch.object(buffer_pool, "storage_swap_available", return_value=False):
        return simulated(function, *args)


@pytest.mark.parametrize("where", [on_the_one_visible_device, with_resized_storages])
def test_stage_3_elsewhere(where: Callable[..., Any]) -> None:
    plans = {name: PLANS[name] for name in ("stage 3", "all on host")}
    expected = on_ranks(2, train_all, plans, with_group=False)
    close_pool()
    for rank, (trained, races) in enumerate(on_ranks(2, where, train_all, plans, with_group=False, timeout=200)):
        assert races == [], f"rank {rank}"
        assert all(same(trained[name], expected[rank][name]) for name in plans)


def without_sums_of_the_backend(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function with the backend's own reductions replaced by errors."""
    register()
    from tests.simulated.group import Group

    refused = {
        name: mock.Mock(side_effect=AssertionError(name))
        for name in ("reduce_scatter_single", "_reduce_scatter_base", "allreduce")
    }
    with mock.patch.multiple(Group, **refused):
        return simulated(function, *args)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.thorough)])
def test_sums_in_rank_order(num_ranks: int) -> None:
    names = PLANS if num_ranks == 3 else ("stage 0", "stage 1", "stage 3", "in backward", "accumulated", "codes")
    expected = on_ranks(num_ranks, train_all, {name: PLANS[name] for name in names}, with_group=False, timeout=200)
    close_pool()
    plans = {
        name: {**PLANS[name], "communication": {**PLANS[name].get("communication", {}), "reduction": "ordered"}}
        for name in names
    }
    results = on_ranks(num_ranks, without_sums_of_the_backend, train_all, plans, with_group=False, timeout=300)
    for rank, (trained, races) in enumerate(results):
        assert races == [], f"rank {rank}"
        assert all(same(trained[name], expected[rank][name]) for name in names), f"rank {rank}"


def of_two_dtypes(gradients: str) -> dict[str, Any]:
    """Return a config with two segments in each block, updated on the host. ``gradients``: the tier of gradients."""
    return {
        **on(0, optimizer="host", gradients=gradients),
        "precision": {"compute": "bf16", "keep_fp32": ["blocks.*.down"]},
    }


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_units_of_two_dtypes_that_the_host_updates_from_gradients_on_the_device(num_ranks: int) -> None:
    plans = {tier: of_two_dtypes(tier) for tier in ("none", "host")}
    for rank, (trained, races) in enumerate(on_ranks(num_ranks, simulated, train_all, plans, with_group=False)):
        assert races == [], f"rank {rank}"
        assert same(trained["none"], trained["host"]), f"rank {rank}"


def gradients_before_the_step(config: Mapping[str, Any]) -> list[Tensor]:
    """Return the gradient of one parameter, read before each step, as soon as it is reduced."""
    found = []
    with open_engine(config) as engine:
        for step in range(2):
            tokens = torch.randint(0, 32, (3, 8), generator=seeds.generator(step)).to(engine.mesh.device)
            engine.backward(engine(tokens))
            gradient = engine.gradient("embedding.weight")
            assert gradient is not None
            found.append(gradient.cpu())
            engine.step()
    return found


@pytest.mark.parametrize("name", ["all on host", "all on disk"])
def test_a_gradient_that_has_left_the_device_is_read(name: str) -> None:
    expected = on_ranks(2, gradients_before_the_step, PLANS[name], with_group=False)
    close_pool()
    for rank, (found, races) in enumerate(
        on_ranks(2, simulated, gradients_before_the_step, PLANS[name], with_group=False)
    ):
        assert races == []
        assert all(map(torch.equal, found, expected[rank]))


def losses_of_averages(config: Mapping[str, Any]) -> list[float]:
    """Return the losses of forwards that begin right after averages of the weights were applied, or removed again."""
    with open_engine(config) as engine:
        average, losses = engine.ema(0.5), list[Tensor]()
        tokens = torch.randint(0, 32, (3, 8), generator=seeds.generator()).to(engine.mesh.device)
        for step in range(3):
            train_step(engine, step, None)
            with torch.no_grad():
                with average.applied():
                    losses.append(engine(tokens))
                losses.append(engine(tokens))
        return torch.stack(losses).tolist()


def test_forwards_wait_for_weights_that_are_written_outside_of_a_step() -> None:
    expected = on_ranks(2, losses_of_averages, PLANS["stage 3"], with_group=False)
    close_pool()
    results = on_ranks(2, simulated, losses_of_averages, PLANS["stage 3"], with_group=False)
    for rank, (losses, races) in enumerate(results):
        assert races == [], f"rank {rank}"
        assert losses == expected[rank]


def check_collectives_of_the_benchmark() -> None:
    check_collectives(torch.device("sim", 0))


def test_the_collectives_that_the_gpu_benchmarks_check() -> None:
    on_ranks(1, simulated, check_collectives_of_the_benchmark, with_group=False)


@pytest.mark.parametrize(
    "name", [name if name == "tensor, pipeline" else pytest.param(name, marks=pytest.mark.thorough) for name in AXES]
)
def test_every_axis(name: str) -> None:
    expected = on_ranks(4, train_on_axes, AXES[name], with_group=False, timeout=200)
    close_pool()
    results = on_ranks(4, simulated, train_on_axes, AXES[name], with_group=False, timeout=200)
    for (trained, races), on_cpu in zip(results, expected, strict=True):
        assert races == []
        for mine, theirs in ((trained.losses, on_cpu.losses), (trained.norms, on_cpu.norms)):
            assert mine[0] == pytest.approx(theirs[0], rel=1e-5)
            assert mine == pytest.approx(theirs, rel=1e-3), "Adam's first updates make much of what rounds otherwise"


def test_changes_between_nodes() -> None:
    expected = on_ranks(4, on_nodes, train_all, NODES, with_group=False, timeout=200)
    close_pool()
    results = on_ranks(4, on_nodes, simulated, train_all, NODES, with_group=False, timeout=200)
    for rank, (trained, races) in enumerate(results):
        assert races == [], f"rank {rank}"
        differ = [name for name in NODES if not same(trained[name], expected[rank][name])]
        assert not differ, f"rank {rank}: other bits than on the CPU"


@pytest.mark.parametrize("plan", ["all on host", "all on disk"])
def test_a_checkpoint_is_what_was_trained(plan: str, tmp_path: Path) -> None:
    results = on_ranks(2, simulated, resume, PLANS[plan], str(tmp_path), with_group=False)
    for trained, races in results:
        assert races == []
        first, again = trained.losses[1:]
        assert first == again
        assert trained.norms[1] == trained.norms[2]


def devices_of_step_counters(config: Mapping[str, Any], folder: str) -> list[set[str]]:
    """Return the devices of Muon's step counters before a checkpoint, and in the run that resumes from it."""
    found = []
    with open_engine({**config, "optimizer": {"name": "muon", "lr": 1e-2}}) as engine:
        for step in range(2):
            train_step(engine, step, None)
            engine.save(folder)  # waits for the update
            engine.wait_for_checkpoint()
            found.append({str(s["step"].device) for s in engine.optimizer.state.values() if "step" in s})
            engine.load(folder)
    return found


@pytest.mark.parametrize(("name", "device"), [("stage 3", "sim:0"), ("optimizer on host", "cpu")])
def test_step_counters_of_muon_are_with_the_parameters_after_a_checkpoint(
    name: str, device: str, tmp_path: Path
) -> None:
    ((found, races),) = on_ranks(1, simulated, devices_of_step_counters, PLANS[name], str(tmp_path), with_group=False)
    assert races == []
    assert found == [{device}, {device}]


def with_little_memory() -> str:
    native = register()
    with open_engine(on(3)) as engine:
        held, _, limit = native.memory()
        native.set_limit(held + 20_000)
        tokens = torch.zeros(200, 9, dtype=torch.int64).to(engine.mesh.device)
        with pytest.raises(PartitaError) as caught:
            engine(tokens)
        native.set_limit(limit)
        engine.zero_grad()
        engine.backward(engine(tokens))
        assert engine.step().stepped
    return str(caught.value)


def test_out_of_memory_is_explained() -> None:
    ((said, races),) = on_ranks(1, simulated, with_little_memory, with_group=False)
    assert races == []
    assert "out of memory in forward, on rank 0 (sim:0): sim out of memory. Tried to allocate" in said
    assert "device allocator" in said
    assert "What would help most:" in said
