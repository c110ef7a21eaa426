"""A configuration on a number of ranks and a kind of device: what it means there, or why it cannot."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from partita.config.batch import ResolvedBatch, resolve_batch
from partita.config.checks import check_batch, check_settings, idle_settings
from partita.config.plain import shown
from partita.config.schema import Config
from partita.config.table import Row, conflict, row
from partita.errors import ConfigError
from partita.plan.mesh_shape import AXES, MeshShape

_MAX_NOTICES = 5
# Nodes may have them under other paths.
_FOLDERS = ("checkpoint.dir", "zero.offload.path")


@dataclass(frozen=True)
class Resolved:
    """What a configuration means here.

    ``compute_dtype`` is ``fp32``, ``bf16`` or ``fp16``. ``values`` are the derived settings with where each came from;
    ``notices`` are lines to show at the start, one for each setting that has no effect; ``passed`` are the sections
    (optimizer, schedule) that an object given to ``partita.initialize`` stands in for.
    """

    config: Config
    mesh: MeshShape
    batch: ResolvedBatch
    compute_dtype: str
    values: tuple[Row, ...] = ()
    notices: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()

    @property
    def shared(self) -> dict[str, object]:
        """What must be the same on every rank, by key; of folders, only whether there is one."""
        found = dict(_flat("", self.config.model_dump(mode="json")))
        found.update((key, found[key] is not None) for key in _FOLDERS)
        del found["communication.timeout_s"]
        return found

    def with_passed(self, sections: tuple[str, ...]) -> "Resolved":
        """The same where objects were passed for these sections; what the config says of them has no effect."""
        idle = [name for name in sections if getattr(self.config, name) != getattr(Config(), name)]
        notices = tuple(f"ignored: {name} (one was passed to partita.initialize)" for name in idle)
        return replace(self, notices=self.notices + notices, passed=sections)


def resolve(config: Config, num_ranks: int, device_type: str, ranks_per_node: int | None = None) -> Resolved:
    """Derives the mesh, the batch and the compute dtype, and checks what must hold between settings.

    ``device_type`` is torch's (``cpu``, ``cuda``, ...). ``ranks_per_node`` splits the data axis over nodes for
    ``zero.hierarchical``; without it all ranks are on one node.

    Raises:
        ConfigError: settings contradict each other or the number of ranks; with a table of them and one fix.
    """
    if not isinstance(config, Config):
        raise ConfigError(f"config: expected a partita.Config (see partita.load_config); got {shown(config)}")
    _check_count("the number of ranks", num_ranks)
    if not isinstance(device_type, str):
        raise ConfigError(f"device_type: expected a name such as 'cpu' or 'cuda'; got {shown(device_type)}")
    mesh, mesh_rows = _resolve_mesh(config, num_ranks, ranks_per_node)
    batch, batch_rows = resolve_batch(config.batch, mesh.data, mesh_rows)
    compute = _resolve_compute(config, device_type)
    check_settings(config, compute)
    check_batch(config, next(r for r in batch_rows if r.key == "batch.accumulate"))
    notices = idle_settings(config, str(compute.value))
    if config.zero.hierarchical and mesh.node == 1:
        notices += ("ignored: zero.hierarchical (all data ranks are on one node)",)
    if config.communication.within_node != "auto" and device_type != "cpu":
        notices += (f"ignored: communication.within_node (on {device_type} its own backend chooses the way)",)
    return Resolved(config, mesh, batch, str(compute.value), (*mesh_rows, *batch_rows, compute), notices)


def describe(resolved: Resolved) -> str:
    """What will be run, in at most 10 short lines."""
    config, mesh, batch = resolved.config, resolved.mesh, resolved.batch
    sources = {r.key: r.source for r in resolved.values}
    zero, precision, schedule = config.zero, config.precision, config.schedule
    kept = ", kept whole after forward" * zero.keep_gathered + ", hierarchical" * zero.hierarchical
    of_each = " a unit" * (precision.gradients == "in_backward")
    clipped = f", gradients{of_each} clipped to norm {config.clip_grad_norm:g}" if config.clip_grad_norm else ""
    optimizer = f"{config.optimizer.name}, learning rate {config.optimizer.lr:g}"
    optimizer = "as passed" if "optimizer" in resolved.passed else optimizer
    rates = f"{schedule.name} after {schedule.warmup_steps} steps of warm-up"
    rates = "scheduler as passed" if "schedule" in resolved.passed else rates
    lines = [
        f"mesh: {mesh.num_ranks} ranks = {' x '.join(f'{axis} {mesh.size(axis)}' for axis in AXES)}",
        f"zero: stage {zero.stage}{kept}",
        f"batch: micro {batch.micro} x accumulate {batch.accumulate} x data {mesh.data} = {batch.total} samples a step",
        f"precision: compute {resolved.compute_dtype} ({sources['precision.compute']}), master {precision.master}, "
        f"gradients {precision.gradients}, moments {precision.moments}",
        f"optimizer: {optimizer}, {rates}{clipped}",
    ]
    most = _MAX_NOTICES - ("auto" in (zero.offload.parameters, zero.offload.optimizer))  # a line tells what was chosen
    lines += resolved.notices[: most - 1] if len(resolved.notices) > most else resolved.notices
    if len(resolved.notices) > most:
        lines.append(f"... and {len(resolved.notices) - most + 1} more settings without effect")
    return "\n".join(lines)


def _flat(name: str, value: object) -> Iterator[tuple[str, object]]:
    """The settings in a section, by dotted key."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}" if name else str(key), inner)
    else:
        yield name, value


def _check_count(what: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{what}: expected a whole number of at least 1; got {shown(value)}")


def _resolve_mesh(config: Config, num_ranks: int, ranks_per_node: int | None) -> tuple[MeshShape, list[Row]]:
    parallel = config.parallel
    ranks = Row("ranks", num_ranks, "number of ranks")
    others = [row(config, f"parallel.{axis}") for axis in AXES if axis != "data"]
    product = parallel.pipeline * parallel.sequence * parallel.tensor
    formula = f"pipeline {parallel.pipeline} x sequence {parallel.sequence} x tensor {parallel.tensor}"
    if parallel.data == "auto":
        data_row = Row("parallel.data", num_ranks // product, f"derived: ranks {num_ranks} / ({formula})")
        if num_ranks % product:
            raise conflict(
                f"{num_ranks} ranks cannot be divided by {formula} = {product}",
                [Row("parallel.data", "auto", row(config, "parallel.data").source), *others, ranks],
                f"start a multiple of {product} ranks, such as {max(1, round(num_ranks / product)) * product}",
            )
        data = num_ranks // product
    else:
        data = parallel.data
        data_row = row(config, "parallel.data")
        if data * product != num_ranks:
            raise conflict(
                f"data {data} x {formula} = {data * product} ranks, but there are {num_ranks}",
                [data_row, *others, ranks],
                "leave parallel.data out; it follows from the number of ranks"
                if num_ranks % product == 0
                else f"start {data * product} ranks",
            )
    node = _nodes(data, product // parallel.pipeline, ranks_per_node) if config.zero.hierarchical else 1
    mesh = MeshShape(parallel.pipeline, data, parallel.sequence, parallel.tensor, node)
    return mesh, [data_row, *others, ranks]


def _nodes(data: int, inner: int, ranks_per_node: int | None) -> int:
    """Nodes that one data group spans; ``inner`` ranks (sequence x tensor) share each data coordinate."""
    if ranks_per_node is None:
        return 1
    _check_count("the number of ranks on a node", ranks_per_node)
    if ranks_per_node >= data * inner:
        return 1
    local = ranks_per_node // inner
    if ranks_per_node % inner or data % local:
        raise conflict(
            "zero.hierarchical needs the same number of data ranks on every node",
            [
                Row("parallel.data", data, "mesh"),
                Row("sequence x tensor", inner, "mesh"),
                Row("ranks on a node", ranks_per_node, "launcher"),
            ],
            "leave zero.hierarchical out",
        )
    return data // local


def _resolve_compute(config: Config, device_type: str) -> Row:
    if config.precision.compute != "auto":
        return row(config, "precision.compute")
    return Row("precision.compute", "fp32" if device_type == "cpu" else "bf16", f"auto on {device_type}")
