"""Tests of ranks that share an accelerator with communication.through_host: the CPU's bits, and no races."""

import os
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import partita
from partita import ConfigError
from partita.comm import staged
from partita.comm.transport import DeviceTransport, OrderedDeviceTransport
from tests.kit.ranks import close_pool, on_ranks
from tests.kit.training import assert_same_bits, rank, world
from tests.simulated.training import AXES, PLANS, on, open_engine, simulated, train_all, train_on_axes

SAMPLE = ("stage 0", "stage 2", "kept", "lean, in backward, on host", "codes", "accumulated")


def through_host(plan: Mapping[str, Any]) -> dict[str, Any]:
    return {**plan, "communication": {**plan.get("communication", {}), "through_host": True}}


def on_shared_device(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function with one simulated device shared by all ranks."""
    with mock.patch.dict(os.environ, {"LOCAL_RANK": "0", "SIM_UUID": "the only one"}):
        return simulated(function, *args)


def check_plans(num_ranks: int, names: tuple[str, ...]) -> None:
    expected = on_ranks(num_ranks, train_all, {name: PLANS[name] for name in names}, with_group=False, timeout=300)
    close_pool()
    plans = {name: through_host(PLANS[name]) for name in names}
    results = on_ranks(num_ranks, on_shared_device, train_all, plans, with_group=False, timeout=300)
    for at, (trained, races) in enumerate(results):
        assert races == [], f"rank {at}"
        for name in names:
            assert_same_bits(trained[name], expected[at][name])


def test_ranks_that_share_a_device_compute_as_cpus_do() -> None:
    check_plans(2, SAMPLE)


@pytest.mark.thorough
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_plan(num_ranks: int) -> None:
    check_plans(num_ranks, tuple(PLANS))


@pytest.mark.parametrize("name", ["tensor, pipeline", *(pytest.param(n, marks=pytest.mark.thorough) for n in AXES)])
def test_axes(name: str) -> None:
    expected = on_ranks(4, train_on_axes, AXES[name], with_group=False, timeout=200)
    close_pool()
    results = on_ranks(4, on_shared_device, train_on_axes, through_host(AXES[name]), with_group=False, timeout=300)
    for (trained, races), on_cpu in zip(results, expected, strict=True):
        assert races == []
        assert trained.losses[0] == pytest.approx(on_cpu.losses[0], rel=1e-5)
        assert trained.losses == pytest.approx(on_cpu.losses, rel=1e-3), "Adam amplifies other roundings at first"


def every_collective(kind: type[DeviceTransport]) -> None:
    """Compare each operation of the transport with its definition, for three dtypes and odd sizes."""
    device = torch.device("sim", 0)
    backend = staged.backend(device, through_host=True)
    dist.init_process_group("gloo")
    size, own = world(), rank()
    groups = {purpose: dist.new_group(backend=backend) for purpose in ("parameters", "gradients", "activations")}
    pairs = {(0, 1, "forward"): [0, 1], (1, 2, "forward"): [1, 2]}
    edges = {edge: dist.new_group(ranks, backend=backend) for edge, ranks in pairs.items()}
    transport = kind(own, size, groups, edges)
    for dtype, num in ((torch.float32, 5), (torch.bfloat16, 1037), (torch.uint8, 3)):
        parts = [torch.arange(num).mul(r + 1).remainder(7).to(dtype) for r in range(size)]
        if dtype == torch.bfloat16:  # 256 + 1 + 1 is 256 in bf16
            parts = [torch.full((num,), 1 if r else 256, dtype=dtype) for r in range(size)]
        mine, total = parts[own].to(device), torch.stack(parts).double().sum(0)

        gathered = torch.full((size * num,), 9, dtype=dtype, device=device)
        transport.all_gather(gathered, mine, "parameters", 0).wait()
        assert torch.equal(gathered.cpu(), torch.cat(parts))

        if dtype.is_floating_point:
            for accumulate in (False, True):
                out = torch.full_like(mine, 2)
                transport.reduce_scatter(out, mine.repeat(size), torch.full_like(mine, 9), accumulate=accumulate)
                assert torch.equal(out.cpu().double(), total + 2 * accumulate)

            assert torch.equal(transport.sum(mine).cpu().double(), total)
            transport.all_reduce(summed := mine.clone())
            assert torch.equal(summed.cpu().double(), total)

        full = {"dtype": dtype, "device": device, "requires_grad": dtype.is_floating_point}
        with torch.no_grad():  # a thread writes into these views; rank r sends r elements to each rank, rank 0 none
            received = [torch.full((size,), 9, **full)[:r] for r in range(size)]
            sent = [torch.full((own,), r, dtype=dtype, device=device) for r in range(size)]
            transport.all_to_all(received, sent)
            assert all(torch.equal(each.cpu(), torch.full((r,), own, dtype=dtype)) for r, each in enumerate(received))

        transport.broadcast(copied := mine.clone()).wait()
        assert torch.equal(copied.cpu(), parts[0])

        if own + 1 < size:
            sending = transport.send(mine, own + 1, "forward")
        if own:
            transport.receive(arrived := torch.full_like(mine, 9), own - 1, "forward").wait()
            assert torch.equal(arrived.cpu(), parts[own - 1])
        if own + 1 < size:
            sending.wait()
    value = torch.tensor([(1e8, 1.0, -1e8)[own]], device=device)
    assert transport.sum(value).item() == 0, "not in rank order"
    with pytest.raises(NotImplementedError, match="expected a sum"):
        dist.all_reduce(torch.zeros(3, device=device), dist.ReduceOp.MAX, group=groups["gradients"])
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", [DeviceTransport, OrderedDeviceTransport])
def test_collectives(kind: type[DeviceTransport]) -> None:
    for _, races in on_ranks(3, on_shared_device, every_collective, kind, with_group=False, timeout=200):
        assert races == []


def two_engines() -> bool:
    """Train a second engine on the first engine's mesh, from which it takes ``through_host``."""
    with (
        open_engine(through_host(on(3))) as first,
        partita.initialize(nn.Linear(2, 2), {"optimizer": {"name": "sgd"}}, mesh=first.mesh) as second,
    ):
        second.backward(second(torch.ones(1, 2, device=second.device)).sum())
        return second.step().grad_norm is not None


def test_an_engine_on_the_mesh_of_another_shares_its_device() -> None:
    assert on_ranks(2, on_shared_device, two_engines, with_group=False, timeout=200) == [(True, [])] * 2


def shared_by_mistake() -> str:
    with pytest.raises(ConfigError) as caught:
        open_engine(on(3))
    return str(caught.value)


def test_a_shared_device_is_refused() -> None:
    for said, _ in on_ranks(2, on_shared_device, shared_by_mistake, with_group=False, timeout=200):
        assert said.startswith("device: ranks 0 and 1 both use sim:0 of "), said
        assert "(the only one): expected a device for each rank" in said
        assert "communication.through_host: true" in said
