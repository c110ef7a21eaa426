"""Bytes that a rank sends in a step, by mesh axes: model states, and activations exchanged along the axes."""

from collections import Counter
from collections.abc import Mapping, Sequence

from partita.forecast.pieces import Trace
from partita.forecast.stages import Stage
from partita.plan.planned import PlannedUnit
from partita.planner.traffic import StepShape, step_traffic

PIPELINE = "pipeline"


def sent_by_axes(units: Sequence[PlannedUnit], stage: Stage, trace: Trace, num_micros: int) -> Mapping[str, int]:
    """Return the bytes that a rank of a pipeline ``stage`` with these ``units`` sends in a step, by axes.

    Axes of one group are joined to one key: ``data,tensor``.

    Args:
        trace: the trace of a micro-batch.
    """
    found = Counter[str]()
    shape = StepShape(num_micros, returns_loss=True, chunks=len(stage.chunks))
    for key, count in step_traffic(units, shape).rows.items():
        found[",".join(key.axes)] += count.sent_bytes
    for axis, num in activation_bytes(stage, trace).items():
        found[axis] += num_micros * num
    return {axes: num for axes, num in found.items() if num}


def activation_bytes(stage: Stage, trace: Trace) -> Counter[str]:
    """Return the activation bytes that a stage exchanges for one micro-batch, by axis.

    Ranks that share a sample exchange activations in forward and backward. Neighboring stages exchange one payload each
    way: what the block after this stage's last one is given, and the gradient of what this stage's first block is
    given.
    """
    found, blocks = Counter[str](), trace.blocks
    for start, stop in stage.chunks:
        first, last = start == 0, stop == len(blocks)
        for piece in (*blocks[start:stop], *[trace.before] * first, *[trace.after] * last):
            found += piece.forward.sent + piece.backward.sent
        found[PIPELINE] += 0 if last else blocks[stop].received_bytes
        found[PIPELINE] += 0 if first else blocks[start].received_bytes
    return found
