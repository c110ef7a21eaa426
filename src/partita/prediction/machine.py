"""Descriptions of machines: the size of each memory, and the rates of computation, copies and messages."""

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from partita.config.write import YAML, write_yaml
from partita.errors import ConfigError
from partita.layout.budget import MemoryBudget
from partita.prediction.curve import Curve
from partita.table.mesh_shape import AXES, MeshShape, expand

# Share of the rates on data sheets that large matrix products, copies and messages reach. It is 1 for measured rates.
REACHED = 0.6
# Seconds of latency of a message to a neighbor, and of the launch of an operator on a GPU.
LATENCY_S, LAUNCH_S = 10e-6, 5e-6
# Kinds of jobs whose size is FLOPs. Convolutions are a separate kind: libraries run them at other rates than products.
BY_FLOPS = ("product", "attention", "attention_backward", "convolution", "convolution_backward")
# Usable shares of the memories. The rest is for the GPU's context, fragmentation, and the operating system.
DEVICE_SHARE, HOST_SHARE, DISK_SHARE = 0.94, 0.9, 0.95


@dataclass(frozen=True)
class Machine:
    """A node with ``gpus`` GPUs; a job may run on any number of such nodes.

    Sizes are in bytes, rates in bytes per second in one direction.

    A GPU has ``memory``, ``tflops`` of 16-bit matrix products (``tflops_fp32``: of 32-bit ones), ``memory_rate`` of its
    memory, ``node_link`` to the node's other GPUs and ``host_link`` to its host. A node has ``host_memory``, ``disk``,
    ``network``, ``host_rate`` (of its memory) and ``disk_rate``. ``reached``: the share of all rates that training
    reaches. ``one_memory``: the device is the CPU.

    ``curves`` are the measurements of a machine: pairs of a kind of job and a :class:`~partita.prediction.curve.Curve`.
    Sizes are FLOPs for the kinds in :data:`BY_FLOPS`; bytes read and written for an ``element`` operator, a
    ``function`` (an exponential, a norm, of each element), a ``batch_norm``, its backward, a ``pool`` and an
    ``update``; bytes that a rank sends for a ``gather`` and a ``reduce``. A curve replaces the
    rates above.
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
    curves: tuple[tuple[str, Curve], ...] = ()
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, int | float) and not 0 <= value < float("inf"):
                raise ConfigError(f"machine '{self.name}': {each.name}: expected a number of at least 0; got {value:g}")
        for name in ("gpus", "memory", "tflops", "tflops_fp32", "memory_rate", "node_link", "network", "host_rate"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"machine '{self.name}': {name}: expected more than 0; got {getattr(self, name):g}")

    def curve(self, kind: str) -> Curve | None:
        """Return the measured curve of this kind of job; None if there is none."""
        return next((curve for name, curve in self.curves if name == kind), None)

    @property
    def compute_dtype(self) -> str:
        """The dtype in which training computes on this machine."""
        return "fp32" if self.one_memory else "bf16" if self.bf16 else "fp16"

    def flops_per_s(self, dtype: str) -> float:
        """Return the FLOPs per second that matrix products in ``dtype`` reach."""
        return 1e12 * self.reached * (self.tflops_fp32 if dtype == "fp32" else self.tflops)

    def gpus_on_node(self, num_gpus: int) -> int:
        """Return the number of GPUs that share a host, of ``num_gpus`` in all."""
        return min(self.gpus, num_gpus)

    def budget(self, num_gpus: int) -> MemoryBudget:
        """Return the memory budget of one rank of ``num_gpus``."""
        num = self.gpus_on_node(num_gpus)
        host, disk = int(HOST_SHARE * self.host_memory / num), int(DISK_SHARE * self.disk / num)
        if self.one_memory:
            return MemoryBudget(host, 0, disk, one_memory=True)
        return MemoryBudget(int(DEVICE_SHARE * self.memory), host, disk)

    def group_rate(self, axes: tuple[str, ...], mesh: MeshShape, num_gpus: int) -> float:
        """Return the bytes per second that each rank of a group over ``axes`` can send if all such groups send.

        Ranks are placed on nodes in the mesh's order, tensor innermost. In a ring over several nodes, one rank of each
        group sends from each node to the next. All groups with ranks on a node share its network.
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
    """Return the machines that partita knows, by name."""
    text = files("partita.prediction").joinpath("machines.yaml").read_text(encoding="utf-8")
    return {name: _machine(name, row) for name, row in yaml.safe_load(text).items()}


def _machine(name: str, row: Mapping[str, Any]) -> Machine:
    """Return the machine that a row of a machine file describes."""
    figures = {key: value for key, value in row.items() if key not in ("from", "curves")}
    points = {kind: tuple((size, seconds) for size, seconds in of) for kind, of in row.get("curves", {}).items()}
    curves = tuple((kind, Curve(of)) for kind, of in points.items())
    return Machine(name, curves=curves, source=row.get("from", ""), **figures)


def read_machine(path: Path) -> Machine:
    """Read the machine that a file in the format of ``machines.yaml`` describes.

    Raises:
        ConfigError: the file cannot be read, or does not describe exactly one machine.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
        ((name, row),) = data.items()
        return _machine(str(name), row)
    except OSError as error:
        raise ConfigError(f"--gpu: '{path}' cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"--gpu: '{path}' is no file of one machine ({str(error).partition(chr(10))[0]}); partita machine --out "
            f"'{path}' writes one"
        ) from None


def plain_machine(machine: Machine) -> dict[str, dict[str, Any]]:
    """Return the content of the file of a machine: all its values, by its name."""
    row = asdict(machine)
    name, row["from"] = row.pop("name"), row.pop("source")
    row["curves"] = {kind: [list(point) for point in curve.points] for kind, curve in machine.curves}
    return {name: row}


def machine_of(plain: Mapping[str, Mapping[str, Any]]) -> Machine:
    """Return the machine of a result of :func:`plain_machine`."""
    ((name, row),) = plain.items()
    return _machine(name, row)


def write_machine(machine: Machine, path: Path) -> None:
    """Write a machine to a file, for :func:`read_machine`.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_yaml(path, plain_machine(machine))


def machine_named(name: str, **changed: float | None) -> Machine:
    """Return one of :func:`machines`, or that of a file, with some values changed: ``host_memory``, ``disk``, ...

    Raises:
        ConfigError: there is no machine of that name, or a value is out of range.
    """
    is_file = name.endswith(YAML)
    found = read_machine(Path(name)) if is_file else machines().get(name.lower())
    if found is None:
        near = difflib.get_close_matches(name.lower(), machines(), n=2, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ConfigError(
            f"--gpu: there is no machine '{name}'; {hint}known are {', '.join(machines())}, and the files "
            "that partita machine writes"
        )
    values = {key: value for key, value in changed.items() if value is not None}
    return replace(found, **values)  # type: ignore[arg-type]
