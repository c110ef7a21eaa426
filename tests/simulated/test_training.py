"""Every plan on the simulated accelerator: the bits of the CPU, and no race."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.gpu.check import check_collectives
from partita import PartitaError
from partita.memory import buffer_pool
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


def on_the_one_visible_device(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function where each process sees only one device."""
    with mock.patch.dict(os.environ, {"LOCAL_RANK": "0"}):
        register()
    return simulated(function, *args)


def with_resized_storages(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function where torch cannot swap the memory of two storages, as before 2.12."""
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
    """Run a function where the backend's own reductions are errors."""
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
