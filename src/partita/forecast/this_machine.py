"""Measurement of the current machine: as many ranks as will train compute, copy and send at the same time."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from partita.config.schema import Offload
from partita.errors import ConfigError, PartitaError
from partita.forecast.measured_rank import Place, Points
from partita.forecast.processes import run_ranks
from partita.memory import accelerator
from partita.memory.capacity import free_budget, host_memory, usable_cores
from partita.memory.disk import scratch_folder
from partita.planner.curve import Curve
from partita.planner.machine import Machine

# Ranks normally take a part of this time.
TIMEOUT_S = 240
# Kinds that become rates of the machine instead of curves.
_RATES = ("disk", "copy")


def measure_machine(ranks: int = 1, name: str = "this machine") -> Machine:
    """Measure the current machine with ``ranks`` processes.

    On a CPU they divide the cores among them; elsewhere each has a device. It takes about half a minute. The rates are
    those that the ranks reach at the same time, so they hold for plans with as many ranks. The memory that is free now
    counts as the memory of the machine.

    Raises:
        ConfigError: there are fewer devices, or cores, than ranks.
        PartitaError: a rank failed, or the ranks cannot connect.
    """
    device, cores = accelerator.own_device(None), usable_cores()
    most = cores if accelerator.is_host(device) else accelerator.count()
    if not 1 <= ranks <= most:
        what = "cores" if accelerator.is_host(device) else "devices"
        raise ConfigError(f"--gpus: {ranks} ranks cannot be measured here, where there are {most} {what}")
    dtype = "float32" if accelerator.is_host(device) else "bfloat16"
    folder = str(scratch_folder(Offload()))
    with tempfile.TemporaryDirectory(prefix="partita-") as meeting:
        url = f"file://{meeting}/store" if ranks > 1 else ""
        places = [
            Place(rank, ranks, max(1, cores // ranks), _device(device, rank), dtype, url, folder)
            for rank in range(ranks)
        ]
        found = _slowest(_measured(places, Path(meeting)))
    return _machine(name, device, ranks, found)


def _device(device: torch.device, rank: int) -> str:
    return device.type if accelerator.is_host(device) else f"{device.type}:{rank}"


def _measured(places: Sequence[Place], folder: Path) -> list[Mapping[str, Points]]:
    """Run every rank in a process of its own, and return what each has measured."""
    tasks = [json.dumps(asdict(place)) for place in places]
    ended = run_ranks("partita.forecast.measured_rank", tasks, folder, TIMEOUT_S)
    if ended is None:
        raise PartitaError(f"measuring this machine: no end within {TIMEOUT_S} s")
    for rank, each in enumerate(ended):
        if each.code:
            raise PartitaError(f"measuring this machine: rank {rank} failed:\n{each.log}")
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
