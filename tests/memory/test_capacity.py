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


NODE = {"MemTotal": 64_000, "MemAvailable": 50_000}
# The files of a cgroup in each version, and the line of memory.stat with the page cache that can be freed.
FILES = {
    "1": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    "2": ("memory.max", "memory.current", "inactive_file"),
}
# A cgroup without a limit of its own: the text of the file.
UNLIMITED = {"1": 2**63 - 4096, "2": "max"}


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of cgroups of a node in which this process is in none; ``process`` lists those it is in."""
    monkeypatch.setattr(capacity, "_meminfo", lambda: NODE)
    monkeypatch.setattr(capacity, "_CGROUPS", tmp_path)
    monkeypatch.setattr(capacity, "_CGROUPS_OF_PROCESS", tmp_path / "process")
    return tmp_path


def make_group(folder: Path, version: str, limit: int | str, used: int, reclaimable: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    limit_file, used_file, key = FILES[version]
    (folder / limit_file).write_text(f"{limit}\n")
    (folder / used_file).write_text(f"{used}\n")
    other = "inactive_file 7\n" if version == "1" else ""  # that of the cgroup without those in it
    (folder / "memory.stat").write_text(f"anon 5\n{other}{key} {reclaimable}\n")


def test_without_cgroups_memory_is_the_nodes(cgroups: Path) -> None:
    assert host_memory() == (64_000, 50_000)
    (cgroups / "process").write_text("3:cpuset:/\n0::/elsewhere\n")
    assert host_memory() == (64_000, 50_000)


def test_memory_is_at_most_what_a_container_may_use(cgroups: Path) -> None:
    """In a namespace of cgroups, the container's is the root, and has files of its own."""
    (cgroups / "process").write_text("0::/\n")
    make_group(cgroups, "2", 8_000, 3_000, 1_000)
    assert host_memory() == (8_000, 6_000)
    make_group(cgroups, "2", "max", 3_000, 1_000)
    assert host_memory() == (64_000, 50_000)


@pytest.mark.parametrize("version", ["1", "2"])
def test_memory_is_at_most_what_each_cgroup_of_the_process_may_use(cgroups: Path, version: str) -> None:
    """Without a namespace, limits are those of the process's cgroup, such as a step of Slurm, and of those it is in."""
    path, root = "/slurm/job/step", cgroups / ("memory" if version == "1" else "")
    line = f"4:cpu,memory:{path}" if version == "1" else f"0::{path}"
    (cgroups / "process").write_text(f"9:name=systemd:/other\n{line}\n")
    make_group(root / "other", version, 1_000, 0, 0)
    for group in ("slurm", "slurm/job/step"):
        make_group(root / group, version, UNLIMITED[version], 40_000, 0)
    make_group(root / "slurm" / "job", version, 30_000, 3_000, 1_000)
    assert host_memory() == (30_000, 28_000)
    make_group(root / "slurm", version, 40_000, 25_000, 500)
    assert host_memory() == (30_000, 15_500)
    make_group(root / "slurm" / "job" / "step", version, 20_000, 3_000, 0)
    assert host_memory() == (20_000, 15_500)


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
