"""Predicted seconds of a step on a machine, from the planned units and a trace."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from partita.activation.inputs import NUM_STAYING
from partita.config.schema import Config
from partita.layout.operations import (
    Operation,
    completions,
    publications,
    reductions,
    rounds,
    unshards,
    unshards_for_backward,
)
from partita.layout.owners import Exchanges
from partita.layout.state_bytes import moment_bytes
from partita.parallel.pipeline.schedule import Shape, make_schedule
from partita.parallel.pipeline.schedule_cost import BACKWARD, waiting_per_work
from partita.parallel.tensor.splitter import TENSOR
from partita.prediction.curve import Curve
from partita.prediction.machine import LATENCY_S, LAUNCH_S, Machine
from partita.prediction.optimizer_plan import OptimizerPlan
from partita.prediction.rank_model import RankModel
from partita.prediction.stages import Stage, enclosing_modules
from partita.prediction.step_timeline import (
    DEVICE,
    DISK,
    HOST,
    HOST_LINK,
    RANKS,
    Job,
    StepTime,
    UnitTimes,
    simulate_step,
)
from partita.prediction.trace.block_trace import BlockTrace, Trace, Work
from partita.table.mesh_shape import MeshShape
from partita.table.planned import PlannedSegment, PlannedUnit, reduction_order
from partita.table.planned_bucket import PlannedBucket, share_buckets
from partita.table.residence import FP32, Tier

# The collectives that are measured, and the names of their curves.
_MEASURED = {"all_gather": "gather", "reduce_scatter": "reduce"}
# Substitutes for kinds that machine files of earlier versions lack.
_SUBSTITUTES = {
    "convolution": "product",
    "convolution_backward": "product",
    "batch_norm": "function",
    "batch_norm_backward": "function",
    "pool": "element",
}


@dataclass(frozen=True)
class UnitCost:
    """Seconds of one unit's jobs that depend neither on its computation nor on its reductions.

    The fields have the meanings that they have in :class:`~partita.prediction.step_timeline.UnitTimes`.
    """

    gather: float
    gather_again: float
    fetch: float
    read: float
    offload_gradient: float
    swap_gradient: float
    update: float
    updated_by: str
    swap: float
    upload: float
    publish: float


@dataclass
class StepCost:
    """Predicted seconds of computation and communication on ``num_gpus`` of a ``machine`` under ``settings``."""

    machine: Machine
    num_gpus: int
    dtype: str
    optimizer: OptimizerPlan = field(default_factory=OptimizerPlan)
    settings: Config = field(default_factory=Config)
    _unit_costs: dict[int, tuple[PlannedUnit, UnitCost]] = field(default_factory=dict)
    _buckets: dict[tuple[int, ...], tuple[PlannedBucket, tuple[float, float]]] = field(default_factory=dict)
    _curves: dict[str, Curve] = field(init=False)
    _links: dict[tuple[tuple[str, ...], MeshShape], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._curves = dict(self.machine.curves)

    def seconds(self, work: Work, mesh: MeshShape) -> float:
        """Return the seconds of ``work``: computation on the device, and communication that the device waits for."""
        machine = self.machine
        if machine.curves:
            computed = sum(num * self._job_s(kind, size) for (kind, size), num in work.jobs.items())
        else:
            products_s = work.flops / machine.flops_per_s(self.dtype)
            computed = max(work.num_ops * LAUNCH_S, products_s + self._memory_s(work.moved_bytes))
        return computed + sum(self._exchange_s(axis, num, work.calls[axis], mesh) for axis, num in work.sent.items())

    def _exchange_s(self, axis: str, num_bytes: int, calls: int, mesh: MeshShape) -> float:
        """Return the seconds to send ``num_bytes`` along an axis in ``calls`` calls, one after the other."""
        if axis == TENSOR:  # all-reduce: the data passes every rank twice
            return num_bytes / self.link((axis,), mesh) + 2 * LATENCY_S * mesh.tensor
        if (measured := self._curves.get("gather")) and num_bytes:  # every rank sends to every other
            return calls * measured.seconds(num_bytes / calls)
        return num_bytes / self.link((axis,), mesh) + calls * LATENCY_S

    def _job_s(self, kind: str, size: float) -> float:
        curve = self._curves.get(kind) or self._curves.get(_SUBSTITUTES.get(kind, ""))
        return curve.seconds(size) if curve and size else 0.0

    def link(self, axes: tuple[str, ...], mesh: MeshShape) -> float:
        """Return the bytes per second that a rank sends in a group over ``axes``."""
        if (axes, mesh) not in self._links:
            self._links[axes, mesh] = self.machine.group_rate(axes, mesh, self.num_gpus)
        return self._links[axes, mesh]

    def unit_cost(self, unit: PlannedUnit) -> UnitCost:
        """Return the seconds of a unit's transfers and of its update."""
        if id(unit) not in self._unit_costs:
            self._unit_costs[id(unit)] = unit, self._new_unit_cost(unit)
        return self._unit_costs[id(unit)][1]

    def _new_unit_cost(self, unit: PlannedUnit) -> UnitCost:
        machine, row = self.machine, unit.row
        on_node = machine.gpus_on_node(self.num_gpus)
        host_link, disk = machine.reached * max(machine.host_link, 1.0), machine.reached * machine.disk_rate / on_node
        trained = [segment for segment in unit.segments if segment.trains]

        def stored(name: str) -> int:
            return sum(segment.held_bytes(getattr(segment.row, name)) for segment in trained)

        parameters = sum(segment.held_bytes(segment.row.param_stored) for segment in unit.segments)
        mesh = unit.segments[0].mesh
        gather = sum(self._collectives_s(unshards(segment), mesh) for segment in unit.segments)
        again = sum(self._collectives_s(unshards_for_backward(segment), mesh) for segment in unit.segments)
        states = stored("master") + sum(moment_bytes(segment, None, self.optimizer.moments) for segment in trained)
        touched = 2 * states + stored("grad_step") + stored("master")
        offloaded = row.param_stored.tier is not Tier.DEVICE and not machine.one_memory
        on_host = not row.updates_on_device and row.master.tier is not Tier.DEVICE
        rate = machine.host_rate / on_node if on_host or machine.one_memory else machine.memory_rate
        update = "host_update" if on_host and "host_update" in self._curves else "update"
        swapped = stored("grad_step") if row.stores_gradients and row.grad_step.tier is Tier.DISK else 0
        swapped_in_update = swapped + (2 * states if row.master.tier is Tier.DISK else 0)
        updated = (replace(segment.row.master, encoding=segment.row.param_compute.encoding) for segment in trained)
        updated_bytes = sum(map(PlannedSegment.held_bytes, trained, updated))
        return UnitCost(
            gather,
            0.0 if unit.stays_unsharded else again,
            parameters / host_link if offloaded else 0.0,
            parameters / max(disk, 1.0) if row.param_stored.tier is Tier.DISK else 0.0,
            stored("grad_step") / host_link
            if row.grad_step.tier is not Tier.DEVICE and not machine.one_memory
            else 0.0,
            swapped / max(disk, 1.0),
            self._job_s(update, touched) if machine.curves else touched / (machine.reached * rate),
            HOST if on_host else DEVICE,
            swapped_in_update / max(disk, 1.0),
            updated_bytes / host_link if on_host and not (offloaded or machine.one_memory) else 0.0,
            sum(self._collectives_s(publications(segment), mesh) for segment in trained),
        )

    def _reductions(self, units: Sequence[PlannedUnit]) -> list[tuple[float, float]]:
        """Return the seconds of each unit's reductions after a backward, and of their completion at the step.

        A unit counts the buckets that its backward completes.
        """
        numbers = [at for at in reversed(range(len(units))) for segment in units[at].segments if segment.trains]
        found, end = [(0.0, 0.0)] * len(units), 0
        for bucket in share_buckets(reduction_order(units)):
            key, end = tuple(map(id, bucket.segments)), end + len(bucket.segments)
            if key not in self._buckets:
                seconds = (self._collectives_s(ops(bucket), bucket.mesh) for ops in (reductions, completions))
                self._buckets[key] = bucket, (next(seconds), next(seconds))
            (reduce, complete), (more, later) = found[numbers[end - 1]], self._buckets[key][1]
            found[numbers[end - 1]] = reduce + more, complete + later
        return found

    def _round_end_s(self, units: Sequence[PlannedUnit]) -> float:
        """Return the seconds per local step of synchronizing replicas that train separately at the end of a round."""
        if not (every := self.settings.communication.every):
            return 0.0
        trained = (segment for unit in units for segment in unit.segments if segment.trains)
        return sum(self._collectives_s([op], segment.mesh) for segment in trained for _, op in rounds(segment)) / every

    def _owners_s(self, units: Sequence[PlannedUnit]) -> tuple[float, float]:
        """Return the seconds of the exchanges with owners of parameters, and of the longest work of an owner."""
        if not self.optimizer.work.costs:
            return 0.0, 0.0
        exchanges, mesh = Exchanges(units, self.optimizer.work), units[0].segments[0].mesh
        flops_s = self.machine.flops_per_s(self.dtype)
        work_s = self._job_s("product", exchanges.cost) if self.machine.curves else exchanges.cost / flops_s
        return self._collectives_s(exchanges.longest_operations, mesh), work_s

    def _collectives_s(self, operations: Iterable[Operation], mesh: MeshShape) -> float:
        """Return the seconds of collectives, including quantization, which is bound by memory bandwidth."""
        found = 0.0
        for each in operations:
            found += self.collective(each.collective, each.axes, mesh, each.num_bytes)
            found += self._memory_s(2 * FP32.num_bytes(each.num_quantized)) if each.num_quantized else 0.0
        return found

    def _memory_s(self, num_bytes: int) -> float:
        """Return the seconds in which the device reads and writes ``num_bytes``."""
        if self.machine.curves:
            return self._job_s("element", num_bytes)
        return num_bytes / (self.machine.reached * self.machine.memory_rate)

    def collective(self, name: str, axes: tuple[str, ...], mesh: MeshShape, num_bytes: int) -> float:
        """Return the seconds of one collective in which each rank along ``axes`` sends ``num_bytes``."""
        measured = self._curves.get(_MEASURED.get(name, ""))
        if measured and num_bytes:
            return measured.seconds(num_bytes)
        return num_bytes / self.link(axes, mesh) + LATENCY_S

    def compute_s(self, trace: Trace, stage: Stage, mesh: MeshShape, num_micros: int) -> float:
        """Return the seconds of a step without communication, including the bubble of the pipeline."""
        forward, backward = self._pass_s(trace, stage, mesh)
        bubble = self._bubble(trace, stage, mesh, num_micros) if mesh.pipeline > 1 else 0.0
        return num_micros * (forward + backward) * (1 + bubble)

    def _pass_s(self, trace: Trace, stage: Stage, mesh: MeshShape) -> tuple[float, float]:
        """Return the seconds that one micro-batch's forward and backward compute on a stage's device."""
        block_traces = list[BlockTrace]()
        for start, stop in stage.chunks:
            first, last = start == 0, stop == len(trace.blocks)
            block_traces += [*trace.blocks[start:stop], *[trace.prologue] * first, *[trace.epilogue] * last]
        each = {id(p): self._block_s(p, mesh) for p in block_traces}
        return sum(each[id(p)][0] for p in block_traces), sum(each[id(p)][1] for p in block_traces)

    def _bubble(self, trace: Trace, stage: Stage, mesh: MeshShape, num_micros: int) -> float:
        """Return the bubble of a stage under its schedule, relative to the stage's own work."""
        name, shape = self.settings.parallel.schedule, Shape(mesh.pipeline, num_micros, len(stage.chunks))
        backward = BACKWARD
        if make_schedule(name, Shape(mesh.pipeline, 1)).splits_weights:  # other bubbles do not depend on it
            middle = replace(stage, chunks=((1, 2),)) if len(trace.blocks) > 2 else stage
            forward_s, backward_s = self._pass_s(trace, middle, mesh)
            backward = max(BACKWARD, round(backward_s / forward_s, 1)) if forward_s else BACKWARD
        return waiting_per_work(name, shape, backward)

    def step(
        self,
        rank_model: RankModel,
        stage: Stage,
        units: Sequence[PlannedUnit],
        trace: Trace,
        num_micros: int,
        jobs: list[Job] | None = None,
    ) -> StepTime:
        """Return the time of a step of one pipeline stage, including its waits for other stages.

        The jobs of the step are appended to ``jobs``, if it is given.
        """
        mesh, times = units[0].segments[0].mesh, self._unit_times(rank_model, stage, units, trace)
        if any(stop == len(trace.blocks) for _, stop in stage.chunks):
            times.append(UnitTimes(self.seconds(trace.epilogue.forward, mesh), 0.0))
        for at, (reduce, complete) in enumerate(self._reductions(units)):
            times[at] = replace(times[at], reduce=reduce, complete=complete)
        reduces_each = not mesh.active(units[0].row.grad_between.partial_axes)
        # On a CPU, the cores that compute also communicate: nothing overlaps.
        ranks = DEVICE if self.machine.one_memory else RANKS
        found = simulate_step(times, num_micros, reduces_each=reduces_each, ranks=ranks, jobs=jobs)
        if round_end_s := self._round_end_s(units):
            found = StepTime(found.total_s + round_end_s, found.compute_s, {**found.waits_s, "rounds": round_end_s})
        exchange_s, work_s = self._owners_s(units)
        if work_s:
            waits_s = {**found.waits_s, "owners": exchange_s}
            found = StepTime(found.total_s + exchange_s + work_s, found.compute_s + work_s, waits_s)
        if mesh.pipeline == 1:
            return found
        sent = [trace.blocks[start or stop].received_bytes for start, stop in stage.chunks]
        edges = sum(self._edge_s(num_bytes, mesh) for num_bytes in sent) * num_micros
        waits = {**found.waits_s, "edges": edges}
        bubble = self._bubble(trace, stage, mesh, num_micros)
        return StepTime(found.total_s + edges, found.compute_s, waits).in_pipeline(bubble)

    def _offload_s(self, block_trace: BlockTrace, to: Tier) -> float:
        """Return the seconds to copy a block's input to the tier that stores it until backward, or from it."""
        if to is Tier.DEVICE or (self.machine.one_memory and to is Tier.HOST):
            return 0.0
        on_node = self.machine.gpus_on_node(self.num_gpus)
        rate = self.machine.host_link if to is Tier.HOST else self.machine.disk_rate / on_node
        return block_trace.input_bytes / (self.machine.reached * max(rate, 1.0))

    def _edge_s(self, num_bytes: int, mesh: MeshShape) -> float:
        """Return the seconds to send one micro-batch's activations to the next stage, and their gradients back."""
        return 2 * (num_bytes / self.link(("pipeline",), mesh) + LATENCY_S)

    def _unit_times(
        self, rank_model: RankModel, stage: Stage, units: Sequence[PlannedUnit], trace: Trace
    ) -> list[UnitTimes]:
        """Return the seconds of the jobs of each unit, except its reductions.

        The work of a block is divided over its units; that of the prologue is added to the first unit.
        """
        mesh, by = units[0].segments[0].mesh, DISK if trace.offload_tier is Tier.DISK else HOST_LINK
        times = [UnitTimes(0.0, 0.0, **vars(self.unit_cost(unit)), offload_input_by=by) for unit in units]
        shares = _shares(rank_model, stage, units)
        for start, stop in stage.chunks:
            if start == 0:
                times[0] = times[0].plus(*self._block_s(trace.prologue, mesh))
            for number in range(start, stop):
                block_trace = trace.blocks[number]
                offload_s = self._offload_s(block_trace, trace.offload_tier) if number < stop - NUM_STAYING else 0.0
                seconds = (*self._block_s(block_trace, mesh), offload_s)
                for at, share in shares[number].items():
                    times[at] = times[at].plus(*(share * each for each in seconds))
        return times

    def _block_s(self, block_trace: BlockTrace, mesh: MeshShape) -> tuple[float, float]:
        """Return the seconds of a block's forward and backward."""
        return self.seconds(block_trace.forward, mesh), self.seconds(block_trace.backward, mesh)


def _shares(rank_model: RankModel, stage: Stage, units: Sequence[PlannedUnit]) -> dict[int, dict[int, float]]:
    """Return the share of each unit in the work of each of a stage's blocks, by the numbers of block and unit.

    Units inside a block share its work by their bytes. If there are none, it belongs to the unit around the block.
    """
    inside: dict[int, dict[int, int]] = {}
    for at, (unit, block) in enumerate(zip(units, stage.block_numbers, strict=True)):
        if block is not None:
            inside.setdefault(block, {})[at] = unit.num_bytes
    names = {rank_model.specs[number].name: at for at, number in enumerate(stage.units)}
    found = dict[int, dict[int, float]]()
    for block in (block for start, stop in stage.chunks for block in range(start, stop)):
        around = (names[name] for name in enclosing_modules(rank_model.blocks[block]) if name in names)
        num_bytes = inside.get(block) or {next(around, 0): 1}
        found[block] = {at: num / sum(num_bytes.values()) for at, num in num_bytes.items()}
    return found
