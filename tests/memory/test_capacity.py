"""Free memory: the minimum of the system's and a container's. Filesystems in memory do not count as disk."""

from pathlib import Path

import pytest
import torch
from torch import nn

from partita.config.schema import Offload
from partita.errors import PartitaError
from partita.memory import accelerator, capacity, capacity_check
from partita.memory.capacity import DEVICE_SHARE, DISK_SHARE, free_budget, free_now, host_memory
from partita.memory.disk import filesystem_in_memory

CPU = torch.device("cpu")


def test_memory_is_at_most_what_a_container_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "_meminfo", lambda: {"MemTotal": 64_000, "MemAvailable": 50_000})
    monkeypatch.setattr(capacity, "_reclaimable", lambda: 1_000)
    limits: dict[str, int | None] = {"/sys/fs/cgroup/memory.max": 8_000, "/sys/fs/cgroup/memory.current": 3_000}
    monkeypatch.setattr(capacity, "_number", limits.get)
    assert host_memory() == (8_000, 6_000)
    limits["/sys/fs/cgroup/memory.max"] = None
    assert host_memory() == (64_000, 50_000)


def test_on_a_cpu_the_device_is_the_hosts_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(capacity, "host_memory", lambda: (64_000, 50_000))
    monkeypatch.setattr(capacity, "_free_disk", lambda folder: 1_000_000 if folder == tmp_path else 0)
    budget = free_budget(CPU, Offload(path=str(tmp_path)))
    assert budget.one_memory
    assert (budget.device, budget.host, budget.disk) == (int(DEVICE_SHARE * 50_000), 0, int(DISK_SHARE * 1_000_000))
    share = budget.shared(4)
    assert (share.device, share.disk) == (budget.device // 4, budget.disk // 4)


def test_what_is_free_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """An accelerator's free memory is read after PyTorch has released its cache."""
    monkeypatch.setattr(capacity, "host_memory", lambda: (64_000, 50_000))
    assert free_now(CPU) == 50_000
    calls = list[str]()
    monkeypatch.setattr(accelerator, "reclaim", lambda device: calls.append(device.type))
    monkeypatch.setattr(accelerator, "free_bytes", lambda device: 1_000 * len(calls))
    assert free_now(torch.device("xpu")) == 1_000
    assert calls == ["xpu"]


def test_memory_that_pytorch_only_keeps_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cached memory of an earlier engine counts as free: states are neither offloaded nor refused because of it."""
    kept = [600]
    monkeypatch.setattr(accelerator, "reclaim", lambda device: kept.clear())
    monkeypatch.setattr(accelerator, "free_bytes", lambda device: 1_000 - sum(kept))
    assert free_budget(torch.device("xpu"), Offload()).device == int(DEVICE_SHARE * 1_000)
    kept.append(600)
    assert capacity_check._free(nn.Module(), torch.device("xpu")).device == 1_000


def test_files_in_memory_are_no_disk(tmp_path: Path) -> None:
    memory = Path("/dev/shm")
    assert filesystem_in_memory(memory) == "tmpfs"
    assert free_budget(CPU, Offload(path=str(memory))).disk == 0
    assert filesystem_in_memory(Path("/proc/self")) is None


def test_a_folder_that_is_missing() -> None:
    with pytest.raises(PartitaError, match="offload to disk, in '/nowhere/at/all': No such file.*zero.offload.path"):
        free_budget(CPU, Offload(path="/nowhere/at/all"))
