"""Resolution of a configuration for a number of ranks and a device type: derived values and checks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from math import log, prod

from partita.config.checks import check_settings, idle_settings
from partita.config.extension import CORE, Extension, installed
from partita.config.messages import Row, conflict, key_paths, row, setting, shown
from partita.config.schema import Batch, Config
from partita.config.values import Section
from partita.errors import ConfigError
from partita.table.across_nodes import needless_crossings
from partita.table.mesh_shape import AXES, MeshShape

_MAX_NOTICES = 5
_MAX_FACTORIZATIONS = 4
_BATCH_KEYS = ("micro", "accumulate", "total")
# Folders, whose paths may differ between nodes.
_FOLDERS = ("checkpoint.dir", "metrics.dir", "zero.offload.path")


@dataclass(frozen=True)
class ResolvedBatch:
    """Samples per rank in one forward, micro-batches per step, and samples per step over all ranks."""

    micro: int
    accumulate: int
    total: int


@dataclass(frozen=True)
class Resolved:
    """A configuration resolved for a number of ranks and a device type.

    ``compute_dtype`` is ``fp32``, ``bf16`` or ``fp16``. ``on_host`` is True if the CPU computes. ``values`` are the
    derived settings, each with its source. ``notices`` are lines to log at the start, one for each setting without
    effect. ``warnings`` are about axes that span nodes unnecessarily. ``passed`` are the sections (optimizer, schedule)
    that an object passed to ``partita.initialize`` replaces. ``spans_nodes`` is True if the ranks are on several nodes.
    ``extension`` is that of the optional packages.
    """

    config: Config
    mesh: MeshShape
    batch: ResolvedBatch
    compute_dtype: str
    on_host: bool
    values: tuple[Row, ...] = ()
    notices: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    spans_nodes: bool = False
    extension: Extension = CORE

    @property
    def param_dtype(self) -> str:
        """The dtype in which parameters are all-gathered and used by the model."""
        return "fp32" if self.config.precision.mode == "autocast" else self.compute_dtype

    @property
    def casts_buffers(self) -> bool:
        """True if the model's buffers are cast to the compute dtype."""
        return self.config.precision.mode == "cast" and self.compute_dtype != "fp32"

    @property
    def shared(self) -> dict[str, object]:
        """Settings that must be equal on every rank, by key; for folders, True if one is set."""
        keys = (".".join(path) for path in key_paths(Config))
        found = {key: value for key in keys if not isinstance(value := setting(self.config, key), Section)}
        found.update((key, found[key] is not None) for key in _FOLDERS)
        del found["communication.timeout_s"]
        return found

    def with_passed(self, sections: tuple[str, ...]) -> "Resolved":
        """Return a copy in which objects passed to ``partita.initialize`` replace these sections of the config."""
        idle = [name for name in sections if getattr(self.config, name) != getattr(Config(), name)]
        notices = tuple(f"ignored: {name} (one was passed to partita.initialize)" for name in idle)
        return replace(self, notices=self.notices + notices, passed=sections)


def resolve(
    config: Config,
    num_ranks: int,
    device_type: str,
    ranks_per_node: int | None = None,
    extension: Extension | None = None,
) -> Resolved:
    """Derive the mesh, the batch and the compute dtype, and check the rules between settings.

    ``device_type`` is torch's (``cpu``, ``cuda``, ...). ``ranks_per_node`` splits the data axis over nodes for
    ``zero.hierarchical`` and ``zero.replicate``; without it all ranks are on one node. ``extension`` is that of the
    optional packages (default: the installed ones).

    Raises:
        ConfigError: settings contradict each other or the number of ranks; the message has a table of them and one fix.
    """
    if not isinstance(config, Config):
        raise ConfigError(f"config: expected a partita.Config (partita.Config(**sections)); got {shown(config)}")
    _check_count("the number of ranks", num_ranks)
    if not isinstance(device_type, str):
        raise ConfigError(f"device_type: expected a name such as 'cpu' or 'cuda'; got {shown(device_type)}")
    extension = installed() if extension is None else extension
    on_host = device_type == "cpu"
    mesh, mesh_rows = _resolve_mesh(config, num_ranks, ranks_per_node)
    batch, batch_rows = _resolve_batch(config.batch, mesh.data, mesh_rows)
    values = (*mesh_rows, *batch_rows, _resolve_compute(config, device_type))
    check_settings(config, {value.key: value for value in values}, extension)
    compute = str(values[-1].value)
    notices = [*extension.idle_settings(config), *idle_settings(config, compute)]
    if mesh.node == 1 and (key := _splits_nodes(config)) is not None:
        notices.append(f"ignored: {key} (all data ranks are on one node)")
    for key in ("gradients", "parameters"):
        if getattr(config.communication, key) != "full" and mesh.data * mesh.sequence == 1:
            notices.append(f"ignored: communication.{key} (there is one data rank: nothing is communicated)")
        elif key == "parameters" and config.zero.hierarchical and extension.stores_deltas(config) and mesh.node == 1:
            notices.append(f"ignored: communication.{key} (parameter deltas are sent between nodes: there is one)")
        elif getattr(config.communication, key) != "full" and config.communication.every is not None and mesh.node == 1:
            notices.append(f"ignored: communication.{key} (with communication.every it applies between replicas)")
    if config.communication.check_every not in ("auto", 0) and not _has_replicas(config, mesh, extension):
        notices.append("ignored: communication.check_every (no two ranks hold the same parameters)")
    if config.communication.within_node != "auto" and not on_host:
        notices.append(f"ignored: communication.within_node (on {device_type} the backend chooses the transport)")
    if config.communication.reduction == "ordered" and on_host:
        notices.append("ignored: communication.reduction (on cpu, sums are in rank order in any case)")
    if config.communication.through_host and on_host:
        notices.append("ignored: communication.through_host (on cpu, tensors are in host memory already)")
    if config.activations.offload == "host" and on_host:
        notices.append("ignored: activations.offload (on cpu, activations are in host memory already; disk works)")
    warnings = tuple(map(str, needless_crossings(mesh, ranks_per_node)))
    spans_nodes = ranks_per_node is not None and ranks_per_node < num_ranks
    return Resolved(config, mesh, batch, compute, on_host, values, tuple(notices), (), warnings, spans_nodes, extension)


def describe(resolved: Resolved) -> str:
    """Describe the run in at most 10 short lines."""
    config, mesh, batch = resolved.config, resolved.mesh, resolved.batch
    sources = {r.key: r.source for r in resolved.values}
    zero, precision, schedule = config.zero, config.precision, config.schedule
    kept = ", not resharded after forward" * zero.keep_gathered + ", gradients unsharded" * zero.keep_gradients
    kept += ", hierarchical" * zero.hierarchical
    kept += ", within each node" * (mesh.node > 1 and zero.replicate == "nodes")
    if mesh.node > 1 and (every := config.communication.every) is not None:
        kept += f", in each of {mesh.node} replicas, which synchronize every {every} steps"
    of_each = " of each unit" * (precision.gradients == "in_backward")
    clipped = f", gradients{of_each} clipped to norm {config.clip_grad_norm:g}" if config.clip_grad_norm else ""
    optimizer = f"{config.optimizer.name}, learning rate {config.optimizer.lr:g}"
    rates = f"{schedule.name} after {schedule.warmup_steps} steps of warm-up"
    samples = f"set by the training loop, on each of {mesh.data} data ranks"
    if config.batch.model_fields_set:
        factors = f"micro {batch.micro} x accumulate {batch.accumulate} x data {mesh.data}"
        samples = f"{factors} = {batch.total} samples per step"
    lines = [
        f"mesh: {mesh.num_ranks} ranks = {' x '.join(f'{axis} {mesh.size(axis)}' for axis in AXES)}",
        f"zero: stage {zero.stage}{kept}",
        f"batch: {samples}",
        f"precision: compute {resolved.compute_dtype} ({sources['precision.compute']}){_mode(resolved)}, "
        f"master {precision.master}, gradients {precision.gradients}, moments {precision.moments}",
        f"optimizer: {'as passed' if 'optimizer' in resolved.passed else optimizer}, "
        f"{'scheduler as passed' if 'schedule' in resolved.passed else rates}{clipped}",
    ]
    most = _MAX_NOTICES - ("auto" in (zero.offload.parameters, zero.offload.optimizer))  # the chosen tiers have a line
    lines += resolved.notices[: most - 1] if len(resolved.notices) > most else resolved.notices
    if len(resolved.notices) > most:
        lines.append(f"... and {len(resolved.notices) - most + 1} more settings without effect")
    return "\n".join(lines)


def _check_count(what: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{what}: expected a whole number of at least 1; got {shown(value)}")


def _resolve_mesh(config: Config, num_ranks: int, ranks_per_node: int | None) -> tuple[MeshShape, list[Row]]:
    parallel = config.parallel
    inner = parallel.pipeline * parallel.sequence * parallel.tensor
    formula = f"pipeline {parallel.pipeline} x sequence {parallel.sequence} x tensor {parallel.tensor}"
    rows = [row(config, f"parallel.{axis}") for axis in ("data", "pipeline", "sequence", "tensor")]
    rows.append(Row("ranks", num_ranks, "number of ranks"))
    divides = num_ranks % inner == 0
    if parallel.data == "auto":
        if not divides:
            raise conflict(
                f"{num_ranks} ranks cannot be divided by {formula} = {inner}",
                rows,
                f"start a multiple of {inner} ranks, such as {max(1, round(num_ranks / inner)) * inner}; or set "
                f"{_possible(config, num_ranks)}, which divides {num_ranks} ranks",
            )
        data = num_ranks // inner
        rows[0] = Row("parallel.data", data, f"derived: ranks {num_ranks} / ({formula})")
    else:
        data = parallel.data
        if data * inner != num_ranks:
            fix = f"start {data * inner} ranks"
            raise conflict(
                f"data {data} x {formula} = {data * inner} ranks, but there are {num_ranks}",
                rows,
                "leave parallel.data out; it follows from the number of ranks" if divides else fix,
            )
    key = _splits_nodes(config)
    node = 1 if key is None else _nodes(key, data, inner // parallel.pipeline, ranks_per_node)
    if isinstance(asked := config.communication.replicas, int) and config.communication.every is not None:
        if data % asked:
            rows = [*rows, row(config, "communication.replicas")]
            problem = f"communication.replicas: {data} data ranks cannot form {asked} groups of equal size"
            raise conflict(problem, rows, "set communication.replicas to a number that divides the data ranks")
        node = asked
    if node == data > 1 and config.zero.replicate == "nodes":
        rows = [*rows, Row("ranks on a node", ranks_per_node, "launcher")]
        problem = "zero.replicate: nodes shards the states over the data ranks of a node, but each node has one"
        raise conflict(problem, rows, "leave zero.replicate out, or set zero.stage: 0")
    if key is None and config.communication.gradients != "full":
        node = _even_nodes(data, inner // parallel.pipeline, ranks_per_node)
    return MeshShape(parallel.pipeline, data, parallel.sequence, parallel.tensor, node), rows


def _possible(config: Config, num_ranks: int) -> str:
    """Describe sizes of the requested axes, except data, that fit this number of ranks, nearest to the requested
    sizes first.
    """
    axes = [axis for axis in ("pipeline", "sequence", "tensor") if getattr(config.parallel, axis) > 1]
    asked = [getattr(config.parallel, axis) for axis in axes]
    divisors = [number for number in range(1, num_ranks + 1) if num_ranks % number == 0]
    sizes = [found for found in product(divisors, repeat=len(axes)) if num_ranks % prod(found) == 0]
    sizes.sort(key=lambda found: sum(abs(log(size / wanted)) for size, wanted in zip(found, asked, strict=True)))
    named = (" x ".join(f"{axis} {size}" for axis, size in zip(axes, found, strict=True)) for found in sizes)
    return " or ".join(islice(named, _MAX_FACTORIZATIONS))


def _even_nodes(data: int, inner: int, ranks_per_node: int | None) -> int:
    """Return the number of nodes that one data group spans, if each node has the same number of its ranks, else 1.

    With more than one, reductions first sum inside the nodes.
    """
    if ranks_per_node is None or ranks_per_node % inner or data % (ranks_per_node // inner):
        return 1
    return data // (ranks_per_node // inner)


def _has_replicas(config: Config, mesh: MeshShape, extension: Extension) -> bool:
    """Return whether several ranks store the same parameters."""
    if config.zero.stage < 3:
        return mesh.data * mesh.sequence > 1
    return mesh.node > 1 and (config.zero.replicate == "nodes" or extension.stores_deltas(config))


def _splits_nodes(config: Config) -> str | None:
    """Return the setting that treats ranks of one node differently from other ranks; None if there is none."""
    if config.zero.hierarchical:
        return "zero.hierarchical"
    if config.communication.every is not None:
        return "communication.every"
    return "zero.replicate" if config.zero.replicate == "nodes" else None


def _nodes(key: str, data: int, inner: int, ranks_per_node: int | None) -> int:
    """Return the number of nodes that one data group spans, for the setting ``key``.

    ``inner`` ranks (sequence x tensor) share each data coordinate.
    """
    if ranks_per_node is None:
        return 1
    _check_count("the number of ranks on a node", ranks_per_node)
    if ranks_per_node >= data * inner:
        return 1
    local = ranks_per_node // inner
    if ranks_per_node % inner or data % local:
        rows = [
            Row("parallel.data", data, "mesh"),
            Row("sequence x tensor", inner, "mesh"),
            Row("ranks on a node", ranks_per_node, "launcher"),
        ]
        raise conflict(f"{key} needs the same number of data ranks on every node", rows, f"leave {key} out")
    return data // local


def _resolve_batch(batch: Batch, data: int, mesh_rows: Sequence[Row]) -> tuple[ResolvedBatch, list[Row]]:
    """Derive the missing batch sizes from total = micro x accumulate x data ranks.

    Without ``total``, it is computed from the others (default 1). With ``total``, ``accumulate`` is computed from
    ``micro``, or without ``micro``, ``micro`` is computed.

    Returns the numbers and the source of each, for messages. ``mesh_rows`` are the rows of the mesh.

    Raises:
        ConfigError: the numbers contradict each other or do not divide; the message has a table of them and one fix.
    """
    given = {key: value for key in _BATCH_KEYS if (value := getattr(batch, key)) != "auto"}
    follows = _what_follows(given)
    factors = {key: given.get(key, 1) for key in ("micro", "accumulate") if key != follows}
    formula = " x ".join([f"{key} {value}" for key, value in factors.items()] + [f"data {data}"])
    of_factors = prod(factors.values(), start=data)
    values = {**factors, "total": given.get("total", of_factors)}
    sources = {key: "config" if key in given else "default" for key in _BATCH_KEYS}
    total = values["total"]
    if follows == "total":
        problem = f"batch.total is {total}, but {formula} = {of_factors}" if total != of_factors else None
        fix = f"leave batch.total out; it follows as {of_factors}"
        shown_values: dict[str, object] = {**values}
    else:
        problem = f"batch.total {total} cannot be divided by {formula} = {of_factors}" if total % of_factors else None
        fix = f"set batch.total: {max(1, round(total / of_factors)) * of_factors}"
        shown_values = {**values, follows: "auto"}
        values[follows] = total // of_factors
    if problem:
        rows = [Row(f"batch.{key}", shown_values[key], sources[key]) for key in _BATCH_KEYS]
        raise conflict(problem, [*rows, *mesh_rows], fix)
    if follows not in given:
        sources[follows] = f"derived: {formula}" if follows == "total" else f"derived: total {total} / ({formula})"
    return ResolvedBatch(**values), [Row(f"batch.{key}", values[key], sources[key]) for key in _BATCH_KEYS]


def _mode(resolved: Resolved) -> str:
    """Describe the precision mode and the dtype of outputs; empty in fp32."""
    if resolved.compute_dtype == "fp32":
        return ""
    words = {
        "mixed": f"{resolved.compute_dtype} parameters under autocast",
        "autocast": "fp32 parameters under autocast",
        "cast": f"parameters, buffers and arguments cast to {resolved.compute_dtype}",
    }
    outputs = resolved.compute_dtype if resolved.config.precision.outputs == "compute" else "fp32"
    return f", {words[resolved.config.precision.mode]}, outputs {outputs}"


def _what_follows(given: Mapping[str, int]) -> str:
    if "total" not in given or ("micro" in given and "accumulate" in given):
        return "total"
    return "accumulate" if "micro" in given else "micro"


def _resolve_compute(config: Config, device_type: str) -> Row:
    if config.precision.compute != "auto":
        return row(config, "precision.compute")
    return Row("precision.compute", "fp32" if device_type == "cpu" else "bf16", f"auto on {device_type}")
