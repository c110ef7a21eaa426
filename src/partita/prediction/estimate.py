"""Bytes, seconds and traffic of one configuration, from the units of its pipeline stages and a micro-batch's trace."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from partita.config.schema import Config
from partita.layout.owners import NO_WORK, Exchanges, FullWork
from partita.layout.state_bytes import Moments, model_state_bytes
from partita.layout.traffic import StepShape, step_traffic
from partita.layout.working_bytes import autograd_gradient_bytes, working_bytes
from partita.prediction.chunk_activations import ChunkBytes, ScheduleState, peak_bytes
from partita.prediction.rank_model import RankModel
from partita.prediction.stages import Stage
from partita.prediction.step_cost import StepCost
from partita.prediction.step_timeline import StepTime
from partita.prediction.trace.block_trace import Trace
from partita.table.planned import PlannedUnit
from partita.table.residence import Tier

PIPELINE = "pipeline"

# Bytes by (state, tier). States include ``working`` memory (unsharded units, buckets, staging) and ``activations``.
BytesByTier = Mapping[tuple[str, str], int]
Units = Mapping[Stage, Sequence[PlannedUnit]]


def state_and_working_bytes(
    units: Sequence[PlannedUnit], settings: Config, moments: Moments, *, on_host: bool
) -> Counter[tuple[str, str]]:
    """Return the bytes of states and of working memory by (state, tier), on the rank of a stage with the most.

    Args:
        units: the units of the stage. Equal units may be one object.
        on_host: training computes on the CPU.
    """
    held = Counter[tuple[str, str]]()
    for number, num in Counter(map(id, units)).items():
        unit = next(unit for unit in units if id(unit) == number)
        for key, num_bytes in model_state_bytes([unit], None, moments).items():
            held[key] += num * num_bytes
    working = working_bytes(units, settings.zero.prefetch_bytes, moments, on_host=on_host)
    working[Tier.DEVICE] -= autograd_gradient_bytes(units)  # counted in the trace
    held.update({("working", tier.value): num for tier, num in working.items() if num})
    return held


def activation_bytes(
    schedule_states: Iterable[ScheduleState], per_chunk: Sequence[ChunkBytes], inputs: Tier
) -> dict[tuple[str, str], int]:
    """Return the peak bytes of activations over a rank's schedule states, by (``activations``, tier).

    Args:
        per_chunk: activation bytes of each of the rank's chunks.
        inputs: the tier of the inputs of recomputed blocks.
    """
    schedule_states = list(schedule_states)
    held = {("activations", Tier.DEVICE.value): peak_bytes(schedule_states, per_chunk)}
    if inputs is not Tier.DEVICE:
        held["activations", inputs.value] = peak_bytes(
            schedule_states, [chunk_bytes.offloaded_inputs for chunk_bytes in per_chunk]
        )
    return held


def step_time(step_cost: StepCost, rank_model: RankModel, units: Units, trace: Trace, num_micros: int) -> StepTime:
    """Return the time of a step on the pipeline stage that takes longest."""
    times = (step_cost.step(rank_model, stage, of_stage, trace, num_micros) for stage, of_stage in units.items())
    return max(times, key=lambda time: time.total_s)


def most_sent(units: Units, trace: Trace, num_micros: int, work: FullWork = NO_WORK) -> Mapping[str, int]:
    """Return :func:`sent_by_axes` for the pipeline stage that sends most."""
    every = (sent_by_axes(of_stage, stage, trace, num_micros, work) for stage, of_stage in units.items())
    return max(every, key=lambda sent: sum(sent.values()))


def sent_by_axes(
    units: Sequence[PlannedUnit], stage: Stage, trace: Trace, num_micros: int, work: FullWork = NO_WORK
) -> Mapping[str, int]:
    """Return the bytes that a rank of a pipeline ``stage`` with these ``units`` sends in a step, by axes.

    They include model states and activations. Axes of one group are joined to one key: ``data,tensor``.

    Args:
        trace: the trace of a micro-batch.
        work: the optimizer's work on full parameters; of the ranks of the stage, this is the one that sends most.
    """
    found = Counter[str]()
    shape = StepShape(num_micros, returns_loss=True, chunks=len(stage.chunks))
    for key, count in step_traffic(units, shape, Exchanges(units, work).most_operations).rows.items():
        found[",".join(key.axes)] += count.sent_bytes
    for axis, num in sent_activations(stage, trace).items():
        found[axis] += num_micros * num
    return {axes: num for axes, num in found.items() if num}


def sent_activations(stage: Stage, trace: Trace) -> Counter[str]:
    """Return the activation bytes that a stage exchanges for one micro-batch, by axis.

    Ranks that share a sample exchange activations in forward and backward. Neighboring stages exchange one payload in
    each direction: the input of the block after this stage's last one, and the gradient of the input of this stage's
    first block.
    """
    found, blocks = Counter[str](), trace.blocks
    for start, stop in stage.chunks:
        first, last = start == 0, stop == len(blocks)
        for block_trace in (*blocks[start:stop], *[trace.prologue] * first, *[trace.epilogue] * last):
            found += block_trace.forward.sent + block_trace.backward.sent
        found[PIPELINE] += 0 if last else blocks[stop].received_bytes
        found[PIPELINE] += 0 if first else blocks[start].received_bytes
    return found
