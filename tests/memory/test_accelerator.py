"""The choice of a device, and messages about missing features. (tests/simulated has an accelerator.)"""

import types

import pytest
import torch

from partita.errors import ConfigError, PartitaError
from partita.memory import accelerator
from partita.memory.accelerator import HOST

OTHER = torch.device("xpu", 1)


def test_without_an_accelerator_the_host_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert (accelerator.device_type(), accelerator.count(), accelerator.installed()) == ("cpu", 0, [])
    assert accelerator.own_device(3) == HOST
    assert accelerator.is_host(HOST)
    assert accelerator.new_stream(HOST) is None
    assert accelerator.allocated_bytes(HOST) == (0, 0)
    assert accelerator.backend(HOST) == "gloo"
    accelerator.wait_for_stream(HOST)
    accelerator.wait_for_all(HOST)


def test_a_rank_has_the_device_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert accelerator.own_device(0) == torch.device("xpu", 0)
    assert accelerator.own_device(None) == OTHER, "the one that is set"
    assert accelerator.count() == 2
    assert not accelerator.is_host(OTHER)
    assert accelerator.backend(OTHER) == "xccl"


def test_a_rank_that_sees_one_device_has_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert accelerator.own_device(3) == torch.device("xpu", 0)
    assert accelerator.chosen_device("xpu", 3) == torch.device("xpu", 0)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="local rank 2 has no xpu device: .* at least 3; got 2"):
        accelerator.own_device(2)
    shared = [accelerator.own_device(rank, shared=True) for rank in range(4)]
    assert shared == [torch.device("xpu", 0), OTHER] * 2, "ranks take turns"
    assert accelerator.chosen_device("xpu", 3, shared=True) == OTHER


@pytest.mark.parametrize(
    ("wanted", "found"),
    [("cpu", HOST), ("cpu:0", HOST), ("xpu:1", OTHER), (OTHER, OTHER), ("xpu", torch.device("xpu", 0))],
)
def test_a_device_that_is_named(wanted: str, found: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert accelerator.chosen_device(wanted, 0) == found


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("xpu:2", r"this machine trains on \(cpu, xpu, or xpu:0 to xpu:1\); got 'xpu:2'"),
        ("meta", "this machine trains on .*; got 'meta'"),
        ("gpu", r"expected a torch.device, or the name of one \(cpu, xpu, .*; got 'gpu'"),
        (1, "expected a torch.device, or the name of one .*; got a int"),
    ],
)
def test_a_device_that_is_none(wanted: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=f"device: .*{said}"):
        accelerator.chosen_device(wanted, 0)


def test_mps_is_not_used_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("mps"))
    with pytest.warns(UserWarning, match="mps device is not used, training runs on the CPU: mps has no process groups"):
        assert accelerator.own_device(0) == HOST


def test_memory_that_pytorch_cannot_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: types.SimpleNamespace())
    with pytest.warns(UserWarning, match="cannot pin existing host memory for xpu: .*zero.offload"):
        undo = accelerator.pin(4096, 4096, OTHER)
    undo()


def test_an_error_of_pinning_is_not_left_for_the_next_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pinning error is cleared. Like CUDA's runtime, this device stores its last error until the next launch."""
    pending = list[str]()

    def register(address: int, num_bytes: int, flags: int) -> int:
        pending.append("out of memory")
        return 2

    class Launched:
        def fill_(self, value: float) -> None:
            if pending:
                raise RuntimeError(pending.pop())

    calls = types.SimpleNamespace(cudaHostRegister=register, cudaGetErrorString=lambda status: "out of memory")
    monkeypatch.setattr(torch, "get_device_module", lambda device: types.SimpleNamespace(cudart=lambda: calls))
    monkeypatch.setattr(torch, "empty", lambda *shape, dtype, device: Launched())
    with pytest.raises(PartitaError, match=r"xpu cannot pin 4096 bytes of host memory \(out of memory\)"):
        accelerator.pin(4096, 4096, OTHER)
    assert not pending


def test_a_device_without_process_groups() -> None:
    with pytest.raises(PartitaError, match="no backend for vulkan: import the package that registers one"):
        accelerator.backend(torch.device("vulkan"))
