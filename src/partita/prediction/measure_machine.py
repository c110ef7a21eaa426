"""Measurement of the current machine: all ranks compute, copy and send at the same time."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from partita.config.schema import Offload
from partita.errors import ConfigError, PartitaError
from partita.memory import accelerator
from partita.memory.capacity import free_budget, host_memory, usable_cores
from partita.memory.disk import scratch_folder
from partita.prediction.curve import Curve
from partita.prediction.machine import Machine
from partita.prediction.processes import first_failure, run_ranks
from partita.prediction.rank_measurement import Points, RankSettings

# Ranks normally end long before.
TIMEOUT_S = 240
# Kinds that become rates of the machine instead of curves.
_RATES = ("disk", "copy")


def measure_machine(ranks: int = 1, name: str = "this machine") -> Machine:
    """Measure the current machine with ``ranks`` processes.

    On a CPU, the ranks divide the cores; otherwise each has a device. It takes about half a minute. All ranks run at
    the same time, so the rates are valid for plans with the same number of ranks. The memory of the machine is the
    memory that is free now.

    Raises:
        ConfigError: there are fewer devices, or cores, than ranks.
        PartitaError: a rank failed, or the ranks cannot connect.
    """
    device, cores = accelerator.own_device(None), usable_cores()
    most = cores if accelerator.is_host(device) else accelerator.count()
    if not 1 <= ranks <= most:
        what = "cores" if accelerator.is_host(device) else "devices"
        raise ConfigError(f"--gpus: expected 1 to {most} ranks, as this machine has {most} {what}; got {ranks}")
    dtype = "float32" if accelerator.is_host(device) else "bfloat16"
    disk_folder = str(scratch_folder(Offload()))
    with tempfile.TemporaryDirectory(prefix="partita-") as store_folder:
        url = f"file://{store_folder}/store" if ranks > 1 else ""
        settings = [
            RankSettings(rank, ranks, max(1, cores // ranks), _device(device, rank), dtype, url, disk_folder)
            for rank in range(ranks)
        ]
        found = _slowest(_measure(settings, Path(store_folder)))
    return _machine(name, device, ranks, found)


def _device(device: torch.device, rank: int) -> str:
    return device.type if accelerator.is_host(device) else f"{device.type}:{rank}"


def _measure(settings: Sequence[RankSettings], folder: Path) -> list[Mapping[str, Points]]:
    """Run each rank in its own process, and return the points that each has measured."""
    tasks = [json.dumps(asdict(place)) for place in settings]
    ended = run_ranks("partita.prediction.rank_measurement", tasks, folder, TIMEOUT_S)
    if ended is None:
        raise PartitaError(f"measuring this machine: ranks did not end within {TIMEOUT_S} s")
    if any(each.code for each in ended):
        raise PartitaError(f"measuring this machine: {first_failure(ended).text}")
    return [each.result for each in ended]


def _slowest(ranks: Sequence[Mapping[str, Points]]) -> dict[str, Points]:
    """Return, for every job, the seconds of the rank that took longest."""
    return {
        kind: [(points[0][0], max(seconds for _, seconds in points)) for points in zip(*of_ranks, strict=True)]
        for kind, of_ranks in ((kind, [rank[kind] for rank in ranks]) for kind in ranks[0])
    }


def _machine(name: str, device: torch.device, ranks: int, found: Mapping[str, Points]) -> Machine:
    curves = {kind: Curve(tuple(points)) for kind, points in found.items() if kind not in _RATES}
    tflops = curves["product"].best_rate / 1e12
    element = found["element"][-1]
    link = curves["gather"].best_rate if ranks > 1 else 1.0
    on_host = accelerator.is_host(device)
    free = free_budget(device, Offload())
    size, seconds = found["disk"][0]
    return Machine(
        name,
        gpus=ranks,
        memory=float(host_memory()[1] if on_host else accelerator.free_bytes(device)),
        tflops=tflops,
        tflops_fp32=tflops,
        memory_rate=element[0] / element[1],
        node_link=link,
        host_link=0.0 if on_host else Curve(tuple(found["copy"])).best_rate,
        network=link,
        host_memory=float(host_memory()[1]),
        host_rate=ranks * element[0] / element[1],
        disk=float(free.disk),
        disk_rate=ranks * size / seconds,
        reached=1.0,
        one_memory=on_host,
        curves=tuple(curves.items()),
        source=f"measured, {ranks} {'ranks' if ranks > 1 else 'rank'} at a time",
    )
