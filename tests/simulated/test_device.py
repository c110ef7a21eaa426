"""Tests of the simulated accelerator: it computes like the CPU, has its own memory, and finds unordered accesses."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.kit import seeds
from tests.kit.ranks import close_pool, on_ranks


def on_device(function: Callable[..., Any], *args: Any) -> tuple[Any, list[str]]:
    """Call a function in a new process with the device; return its result and the races."""
    close_pool()
    return on_ranks(1, _registered, function, *args, with_group=False)[0]


def _registered(function: Callable[..., Any], *args: Any) -> tuple[Any, list[str]]:
    from tests.simulated.device import register

    native = register()
    return function(*args), native.races()


def side() -> torch.Stream:
    return torch.Stream(device="sim")


def recorded(stream: torch.Stream | None = None) -> torch.Event:
    event = torch.Event("sim")
    event.record(stream or torch.accelerator.current_stream())
    return event


def pinned(num: int) -> Tensor:
    from partita.memory.allocate import allocate_host

    return allocate_host(num, torch.float32, torch.device("sim", 0))


# ------------------------------------------------------------------------------------------------------------ computing


def trained(device: str) -> list[float]:
    seeds.start(1)
    layers = nn.Embedding(20, 8), nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 20)
    model, losses = nn.Sequential(*layers).to(device), list[float]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        tokens = torch.randint(0, 20, (4, 5), generator=seeds.generator(step)).to(device)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_trains_with_the_bits_of_the_cpu() -> None:
    (expected,) = on_ranks(1, trained, "cpu", with_group=False)
    assert on_device(trained, "sim") == (expected, [])


def is_the_accelerator() -> tuple[str, str, bool, bool]:
    here = torch.accelerator.current_accelerator()
    assert here is not None
    return here.type, str(torch.ones(3, device="sim").device), pinned(4).is_pinned(), torch.ones(4).is_pinned()


def test_is_the_accelerator_of_its_process() -> None:
    assert on_device(is_the_accelerator) == (("sim", "sim:0", True, False), [])
    assert not hasattr(torch, "sim"), "and of no other"


def mixed() -> None:
    torch.ones(3) + torch.ones(3, device="sim")


def test_devices_do_not_mix() -> None:
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device, .* sim:0 and cpu!"):
        on_device(mixed)


def too_much() -> tuple[int, int]:
    from tests.simulated.device import register

    native, module = register(), torch.get_device_module("sim")
    kept = torch.empty(1000, dtype=torch.uint8, device="sim")
    native.set_limit(3000)
    assert module.mem_get_info()[0] == 2000
    with pytest.raises(torch.OutOfMemoryError, match="sim out of memory. Tried to allocate 2001 bytes; 1000 of 3000"):
        torch.empty(2001, dtype=torch.uint8, device="sim")
    del kept
    torch.empty(2001, dtype=torch.uint8, device="sim")
    return module.memory_allocated(), module.max_memory_allocated()


def test_memory_has_a_limit() -> None:
    assert on_device(too_much) == ((0, 2001), [])


# ------------------------------------------------------------------------------------------------------------ the order


def two_streams(waits: bool, writes: bool) -> None:
    values, beside = torch.zeros(100, device="sim"), side()
    before = recorded()
    with beside:
        before.wait()
        seen = values[:50] * 2
    done = recorded(beside)
    if waits:
        done.wait()
    (values[40:].add_(1) if writes else values[40:] + 1)
    torch.accelerator.synchronize()
    del seen


@pytest.mark.parametrize(("waits", "writes"), [(False, True), (True, True), (False, False)])
def test_two_accesses_in_no_order(waits: bool, writes: bool) -> None:
    _, races = on_device(two_streams, waits, writes)
    assert len(races) == (not waits and writes), races
    assert all("writes on stream 0 memory that aten::mul" in race for race in races)


def freed(how: str) -> None:
    values, beside = torch.zeros(100, device="sim"), side()
    recorded().wait(beside)
    with beside:
        other = values * 2
    if how == "recorded":
        values.record_stream(beside)
    elif how == "waited":
        recorded(beside).wait()
    del values
    torch.accelerator.synchronize()
    del other


@pytest.mark.parametrize("how", ["at once", "waited", "recorded"])
def test_memory_that_is_freed_while_it_is_used(how: str) -> None:
    _, races = on_device(freed, how)
    assert len(races) == (how == "at once"), races
    assert all("memory of stream 0 is freed while it may be in use: aten::mul" in race for race in races)


# ------------------------------------------------------------------------------------------------- asynchronous copies


def copied_to_host(waits: bool) -> list[float]:
    target = pinned(4)
    target.copy_(torch.ones(4, device="sim"), non_blocking=True)
    if waits:
        torch.accelerator.current_stream().synchronize()
    seen = target.tolist()
    torch.accelerator.synchronize()
    assert target.tolist() == [1.0] * 4
    return seen


def test_a_copy_to_the_host_is_poison_until_it_is_waited_for() -> None:
    assert on_device(copied_to_host, True) == ([1.0] * 4, [])
    seen, races = on_device(copied_to_host, False)
    assert str(seen) == "[nan, nan, nan, nan]"
    assert races == []


def copied_from_host(waits: bool) -> None:
    source, target = pinned(4), torch.empty(4, device="sim")
    target.copy_(source, non_blocking=True)
    if waits:
        recorded().synchronize()
    source.fill_(1.0)
    torch.accelerator.synchronize()


def test_the_source_of_a_copy_stays_as_it_is() -> None:
    assert on_device(copied_from_host, True) == (None, [])
    _, races = on_device(copied_from_host, False)
    assert len(races) == 1
    assert "host memory was changed while a copy from the host on stream 0" in races[0]


def there_and_back(waits: bool) -> list[float]:
    """Copy to the host on one stream and back to the device on another, without synchronizing the host."""
    host, beside, back = pinned(4), side(), torch.zeros(4, device="sim")
    host.copy_(torch.ones(4, device="sim"), non_blocking=True)
    ready = recorded()
    with beside:
        if waits:
            ready.wait()
        back.copy_(host, non_blocking=True)
    torch.accelerator.synchronize()
    return back.tolist()


def test_copies_that_meet_on_the_host() -> None:
    assert on_device(there_and_back, True) == ([1.0] * 4, [])
    _, races = on_device(there_and_back, False)
    assert any("a copy from the host on stream 1 uses memory that a copy to the host on stream 0" in r for r in races)


def given_up() -> None:
    host = pinned(4)
    host.copy_(torch.ones(4, device="sim"), non_blocking=True)
    del host
    torch.accelerator.synchronize()


def test_pinned_memory_is_kept_until_its_copies_are_done() -> None:
    _, races = on_device(given_up)
    assert races == ["a copy to the host on stream 0 uses pinned memory that is given up"]


# ------------------------------------------------------------------------------------------------------------- threads


def two_threads(waits: bool) -> None:
    """Let a thread wait for the device, then write to the same memory, with or without waiting for the thread."""
    from partita.memory.streams import Stream

    values, beside = torch.zeros(100, device="sim"), side()
    before = recorded()
    with beside:
        before.wait()
        values.add_(1)
    done = recorded(beside)
    in_thread = Stream(torch.device("cpu"), "test")
    finished = in_thread.run(done.synchronize)
    if waits:
        finished.wait()
    else:
        in_thread._thread._last[None]._running.acquire()  # waits for the job's end without updating this thread's clock
    values.add_(1)
    in_thread.close()


@pytest.mark.parametrize("waits", [True, False])
def test_what_a_thread_has_waited_for_another_does_not_know(waits: bool) -> None:
    _, races = on_device(two_threads, waits)
    assert bool(races) != waits, races


# -------------------------------------------------------------------------------------------------------------- errors


def pinned_too_much(clears: bool) -> str:
    from partita import PartitaError
    from partita.memory import accelerator
    from tests.simulated.device import register

    register().set_pin_limit(2**16)
    kept = pinned(100)
    values = torch.zeros(3, device="sim")
    if clears:
        with pytest.raises(PartitaError, match="sim cannot pin 80000 bytes of host memory .error 2."):
            pinned(20_000)
    else:
        address = kept.data_ptr()
        assert torch.get_device_module("sim").cudart().cudaHostRegister(address, 80_000, 0) == 2
    assert accelerator.has_streams(values.device)
    try:
        values.add_(1)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("clears", [True, False])
def test_a_failed_pin_leaves_an_error_for_the_next_launch(clears: bool) -> None:
    said, _ = on_device(pinned_too_much, clears)
    assert said == "" if clears else said.startswith("sim error: pinning of host memory failed earlier; reported by")


# --------------------------------------------------------------------------------------------------------- collectives


def other_collectives(differ: bool) -> str:
    """Launch two collectives on a communicator, in a different order on rank 1 if ``differ``; return the error."""
    import torch.distributed as dist

    from tests.simulated.device import register
    from tests.simulated.group import Group

    native = register()
    store = dist.PrefixStore("group", dist.distributed_c10d._get_default_store())
    rank, size = dist.get_rank(), dist.get_world_size()
    group = Group(native, store, rank, size, timedelta(seconds=20))
    assert "_connected" not in vars(group), "connected by the first collective"
    whole, part = torch.zeros(8, device="sim"), torch.ones(4, device="sim")
    calls = [
        lambda: group.all_gather_single(whole, part),
        lambda: group.allreduce([part]),
    ]
    try:
        for work in [call() for call in (calls[::-1] if differ and rank else calls)]:
            work.wait()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("differ", [True, False])
def test_the_order_of_collectives_is_that_of_all_ranks(differ: bool) -> None:
    close_pool()
    expected = "the ranks are at different collectives of a communicator: ['all_gather of 16 bytes', 'all_reduce of"
    assert all(
        said.startswith(expected if differ else "") and bool(said) == differ
        for said in on_ranks(2, other_collectives, differ)
    )
