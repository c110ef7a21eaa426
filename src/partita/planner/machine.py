"""A machine on paper: what each memory holds, and how fast its GPUs compute, copy and send."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from partita.errors import ConfigError
from partita.plan.mesh_shape import AXES, MeshShape, expand
from partita.planner.budget import MemoryBudget

# What large matrix products, copies and messages reach of the rates on data sheets; what was measured reaches itself.
REACHED = 0.6
# Seconds until a message to a neighbour begins to arrive, and until a GPU's next operator runs.
LATENCY_S, LAUNCH_S = 10e-6, 5e-6
# What stays free: on the GPU its context and what an allocator loses to rounding, on the host the operating system's.
DEVICE_SHARE, HOST_SHARE, DISK_SHARE = 0.94, 0.9, 0.95


@dataclass(frozen=True)
class Machine:
    """A node of ``gpus`` GPUs, of as many as there are. Bytes, and bytes per second of one direction.

    ``memory`` of a GPU; ``host_memory`` and ``disk`` of a node. ``tflops`` of a GPU's 16-bit products (``tflops_fp32``:
    of 32-bit ones), ``memory_rate`` of its memory, ``node_link`` between GPUs of a node, ``host_link`` between a GPU
    and its host; ``network``, ``host_rate`` (memory) and ``disk_rate`` are of the node. ``reached``: the share of all
    rates that training reaches. ``one_memory``: the device is the host's own processor.
    """

    name: str
    gpus: int
    memory: float
    tflops: float
    tflops_fp32: float
    memory_rate: float
    node_link: float
    host_link: float
    network: float
    host_memory: float
    host_rate: float
    disk: float
    disk_rate: float
    bf16: bool = True
    reached: float = REACHED
    one_memory: bool = False
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, int | float) and not 0 <= value < float("inf"):
                raise ConfigError(f"machine '{self.name}': {each.name}: expected a number of at least 0; got {value:g}")
        for name in ("gpus", "memory", "tflops", "tflops_fp32", "memory_rate", "node_link", "network", "host_rate"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"machine '{self.name}': {name}: expected more than 0; got {getattr(self, name):g}")

    @property
    def compute_dtype(self) -> str:
        """That training computes in here."""
        return "fp32" if self.one_memory else "bf16" if self.bf16 else "fp16"

    def flops_per_s(self, dtype: str) -> float:
        """Of matrix products."""
        return 1e12 * self.reached * (self.tflops_fp32 if dtype == "fp32" else self.tflops)

    def gpus_on_node(self, num_gpus: int) -> int:
        """Of so many in all, those that share a host."""
        return min(self.gpus, num_gpus)

    def budget(self, num_gpus: int) -> MemoryBudget:
        """What a rank may use of each memory."""
        num = self.gpus_on_node(num_gpus)
        host, disk = int(HOST_SHARE * self.host_memory / num), int(DISK_SHARE * self.disk / num)
        if self.one_memory:
            return MemoryBudget(host, 0, disk, one_memory=True)
        return MemoryBudget(int(DEVICE_SHARE * self.memory), host, disk)

    def group_rate(self, axes: tuple[str, ...], mesh: MeshShape, num_gpus: int) -> float:
        """Bytes per second that each rank of a group over ``axes`` can send, while all groups over them do.

        Ranks are on nodes in the mesh's order, tensor innermost. In a ring over several nodes one rank of a group sends
        from each node to the next; the groups that a node is in share its network.
        """
        on_node, members = self.gpus_on_node(num_gpus), set(expand(axes))
        span, inside, reach = 1, 1, 1
        for axis in reversed(expand(AXES)):
            span *= mesh.size(axis)
            if axis in members and mesh.size(axis) > 1:
                reach = span
            elif reach == 1:
                inside = span
        if reach <= on_node:
            return self.reached * self.node_link
        return self.reached * min(self.node_link, self.network / min(on_node, inside))


@cache
def machines() -> Mapping[str, Machine]:
    """Those that partita knows, by name."""
    data: dict[str, dict[str, Any]] = yaml.safe_load(
        files("partita.planner").joinpath("machines.yaml").read_text(encoding="utf-8")
    )
    return {name: Machine(name, source=row.pop("from"), **row) for name, row in data.items()}


def machine_named(name: str, **changed: float | None) -> Machine:
    """One of :func:`machines`, with what is given in place of its own: ``host_memory``, ``disk``, ``network``, ...

    Raises:
        ConfigError: there is none of that name, or a figure is none.
    """
    found = machines().get(name.lower())
    if found is None:
        near = difflib.get_close_matches(name.lower(), machines(), n=2, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ConfigError(f"--gpu: there is no machine '{name}'; {hint}known are {', '.join(machines())}")
    given = {key: value for key, value in changed.items() if value is not None}
    return replace(found, **given)  # type: ignore[arg-type]
