"""Bytes that a rank sends in a step, straight from the table: what the traffic report will count.

With P the padded bytes of the parameters on N ranks, data parallelism sends 2P (N-1)/N per rank and step, and so do
stages 1 and 2; stage 3 sends 3P (N-1)/N, or 2P (N-1)/N where parameters are kept whole between forward and backward
(Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, section 7). Beside
them go control messages of some bytes each, which are counted here as well.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from partita.plan.mesh_shape import AXES, BATCH_AXES, PIPELINE_AXES, MeshShape
from partita.plan.planned import PlannedSegment, PlannedUnit, factor_elements, reduction_order, share_buckets
from partita.plan.residence import FP32, Encoding, Residence
from partita.plan.steps import AllGather, Encode, ReduceScatter, Slice, Step, in_phases, on_wires, steps
from partita.plan.traffic import TrafficKey, TrafficMeter, TrafficReport
from partita.plan.wire import Wire, hops

# Bytes of a number in a control message: a count of gathers or of waves, a share of the norm, a loss.
WORD_BYTES = 8
# Of the loss that the last stage tells the others.
LOSS_BYTES = 4


@dataclass(frozen=True)
class StepShape:
    """What happens in a step.

    ``accumulate``: micro-batches, each a forward of every unit and a backward through every unit, in so many ``chunks``
    (stages of a pipeline that a rank has). ``num_reduced``: after how many backwards gradients that rest split are
    reduced (if after none of them, then at the step); None: after each, as without ``no_sync``. ``returns_loss``: the
    mean loss over the ranks is asked for, as ``train_batch`` does (which also has the ranks tell each other what they
    have drawn).
    ``announced``: a unit's number is exchanged beside each gather, as it is on accelerators. ``ends_round``: replicas
    that train apart meet. ``is_first``: codes do not travel yet, or those of ``communication.warmup`` do.
    """

    accumulate: int = 1
    num_reduced: int | None = None
    returns_loss: bool = False
    announced: bool = False
    ends_round: bool = False
    is_first: bool = False
    chunks: int = 1

    @property
    def num_backwards(self) -> int:
        """Of all chunks."""
        return self.accumulate * self.chunks


def step_traffic(units: Sequence[PlannedUnit], shape: StepShape = StepShape()) -> TrafficReport:
    """What one rank sends in a step in which every parameter that trains gets a gradient, once codes travel. The ranks
    send the same.

    Buffers that the forward changes (running statistics) come on top: they are no part of the plan.
    """
    if shape.is_first:
        units = [_in_first_steps(unit) for unit in units]
    sent = _Sent(units[0].segments[0].mesh)
    around = {"", *(name for unit in units for name in unit.inside)}  # whose forward all chunks run
    for unit in units:
        if not unit.rests_whole:
            sent.gathers(unit, shape, shape.chunks if unit.name in around else 1)
    segments = reduction_order(units)
    buckets = share_buckets(segments)
    num_reduced = shape.num_backwards if shape.num_reduced is None else max(1, shape.num_reduced)
    for bucket in buckets:
        sent.reductions(bucket, num_reduced)
    for segment in segments:
        sent.count(segment.publication, segment.row.master, segment.layout.padded, "parameters")
    for segment in segments if shape.ends_round and segments[0].row.apart_axes else ():
        row, padded = segment.row, segment.layout.padded
        sent.count(segment.rounds.steps(row.wires), row.outer_gradient, padded, "gradients")
        part = replace(row.master, shard_axes=row.part_axes)
        sent.count(segment.rounds.publication, part, padded, "parameters")
        sent.count(segment.publication, row.master, padded, "parameters")
    if not all(unit.rests_whole for unit in units):
        sent.messages(units[0].row.summed_axes, WORD_BYTES, shape.num_backwards)  # the end of a micro-batch
    num_members = sum(len(segment.layout.spans) for segment in segments)
    copied = Counter[tuple[str, ...]]()
    for segment in segments:
        copied[segment.row.copies.axes] += len(segment.layout.spans)
    for axes, num in copied.items():
        sent.messages(axes, num)  # what was used by those that have copies
    # Waves, what was written, the gradients' scale; what was used, and what is left to reduce.
    summed_axes = units[0].row.summed_axes
    sent.messages(summed_axes, 3 * WORD_BYTES + len(buckets) + num_members)
    if all(segment.row.gradients_rest for segment in segments):
        sent.messages(AXES, 3 * WORD_BYTES)  # the norm, the gradients' scale, whether something was written
    if shape.returns_loss:
        sent.messages(AXES, WORD_BYTES)  # what was drawn
        sent.messages(PIPELINE_AXES, LOSS_BYTES)
        sent.messages(BATCH_AXES, WORD_BYTES)  # the loss
    return sent.meter.report()


def _in_first_steps(unit: PlannedUnit) -> PlannedUnit:
    """The same on the wires of the first steps."""
    rows = [replace(segment.row, wires=segment.warmup_wires) for segment in unit.segments]
    segments = [replace(segment, row=row) for segment, row in zip(unit.segments, rows, strict=True)]
    return replace(unit, segments=tuple(segments))


class _Sent:
    """Adds up what a rank sends."""

    def __init__(self, mesh: MeshShape) -> None:
        self.meter = TrafficMeter()
        self._mesh = mesh

    def gathers(self, unit: PlannedUnit, shape: StepShape, times: int) -> None:
        """A unit's gathers for forward and backward, of each micro-batch so many."""
        num_gathers = times * shape.accumulate * (1 if unit.stays_whole else 2)
        if shape.announced:
            self.messages(unit.row.summed_axes, WORD_BYTES, num_gathers)
        for segment in unit.segments:
            row, padded = segment.row, segment.layout.padded
            num_near = num_gathers - 1 if segment.has_second else 0  # the second part lasts from forward to the step
            self.count(segment.gathers, row.param_rest, padded, "parameters", num_gathers - num_near)
            if num_near:
                self.move(row.param_between, row.param_compute, padded, "parameters", num_near)

    def reductions(self, bucket: Sequence[PlannedSegment], num_reduced: int) -> None:
        """The reductions of one bucket: of the parts that rest split after a micro-batch, of the rest at the step. Of
        gradients that rest nowhere, the norms and which were used are summed there, too.
        """
        row, num_elements = bucket[0].row, sum(segment.layout.padded for segment in bucket)
        if bucket[0].gradients.factors is not None:
            self.factors(bucket, num_reduced)
            if not row.copies.axes:
                return
        arriving, remaining = (
            on_wires(steps(src, dst, self._mesh), row.wires.gradients, row.wires.sums)
            for src, dst in ((row.grad_arrival, row.grad_between), (row.grad_between, row.grad_step))
        )
        self.count(arriving, row.grad_arrival, num_elements, "gradients", num_reduced)
        self.count(remaining, row.grad_between, num_elements, "gradients")
        summed = replace(row.grad_step, shard_axes=row.part_axes)
        self.move(replace(summed, partial_axes=row.copies.axes), summed, num_elements, "gradients")
        if bucket[0].gradients.send_averages and not bucket[0].gradients.phases[1]:
            self.count(bucket[0].gradients.average_steps(row.wires.sums), summed, num_elements, "gradients")
        axes = self._mesh.named(AXES)
        if not row.gradients_rest and axes:
            num, num_words = self._mesh.group_size(axes), sum(1 + len(segment.layout.spans) for segment in bucket)
            self.meter.add(TrafficKey("all_reduce", axes, "control"), 2 * (num - 1) * num_words * WORD_BYTES // num)

    def factors(self, bucket: Sequence[PlannedSegment], num_reduced: int) -> None:
        """The sums of low-rank factors of one bucket, and of what travels as it is beside them."""
        row = bucket[0].row
        calls = num_reduced if steps(row.grad_arrival, row.grad_between, self._mesh) else 1
        axes = self._mesh.named(row.summed_axes)
        num = self._mesh.group_size(axes)
        for num_elements in factor_elements(bucket):
            if num_bytes := FP32.num_bytes(num_elements):
                sent = 2 * (num - 1) * num_bytes // num
                self.meter.add(TrafficKey("all_reduce", axes, "gradients"), calls * sent, calls)

    def messages(self, axes: tuple[str, ...], num_bytes: int, calls: int = 1) -> None:
        """Messages of ``num_bytes`` that every rank of a group sends to every other."""
        if named := self._mesh.named(axes):
            num = self._mesh.group_size(named)
            self.meter.add(TrafficKey("all_gather", named, "control"), calls * (num - 1) * num_bytes, calls)

    def move(self, src: Residence, dst: Residence, padded: int, purpose: str, calls: int = 1) -> None:
        """The table's steps from ``src`` to ``dst`` for a flat buffer of ``padded`` elements, ``calls`` times."""
        self.count(steps(src, dst, self._mesh), src, padded, purpose, calls)

    def count(self, ops: Sequence[Step], src: Residence, padded: int, purpose: str, calls: int = 1) -> None:
        """``ops`` from ``src`` on, ``calls`` times."""
        for collective, axes, num_bytes in sent_by_steps(ops, src, padded, self._mesh):
            self.meter.add(TrafficKey(collective, axes, purpose), calls * num_bytes, calls)


def sent_by_steps(
    ops: Sequence[Step], src: Residence, padded: int, mesh: MeshShape
) -> Iterator[tuple[str, tuple[str, ...], int]]:
    """(collective, axes, bytes that one rank sends) for ``ops`` from ``src`` on, of ``padded`` elements.

    An all-reduce is a reduce-scatter, and an all-gather once the norm is known. Codes are exchanged, and summed where
    they arrive.
    """
    num_elements, encoding = src.num_elements(padded, mesh), src.encoding
    for op in in_phases(ops):
        if isinstance(op, Encode):
            encoding = op.encoding
        elif isinstance(op, AllGather):
            num = mesh.group_size(op.axes)
            num_elements *= num
            yield "all_gather", op.axes, _on(op.wire, encoding).sent_bytes(num_elements, num)
        elif isinstance(op, ReduceScatter):
            coded = op.wire.is_coded
            for axes in hops(op.axes, mesh) if coded else (op.axes,):
                num = mesh.group_size(axes)
                yield (
                    "all_to_all" if coded else "reduce_scatter",
                    axes,
                    _on(op.wire, encoding).sent_bytes(num_elements, num),
                )
                num_elements //= num
        elif isinstance(op, Slice):
            num_elements //= mesh.group_size(op.axes)


def _on(wire: Wire, encoding: Encoding) -> Wire:
    """What travels of values that are encoded so by now."""
    return replace(wire, encoding=encoding)
