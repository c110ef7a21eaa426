"""The strategies of a row of the table whose states are sent compressed, and the row of a configuration."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from partita.compression.deltas import DeltaPlan
from partita.compression.diloco import diloco_states, round_transfers, separate_nodes
from partita.compression.error_feedback import ErrorFeedbackPlan
from partita.compression.low_rank import LowRankPlan
from partita.compression.onebit_adam import AveragePlan, average_gathers
from partita.compression.quantized import Quantized, hops
from partita.compression.settings import (
    LOW_RANK,
    STOCHASTIC_CODECS,
    codec_named,
    gradient_codec,
    has_error_feedback,
    sends_averages,
    warmup_steps,
)
from partita.config.schema import Config
from partita.errors import ConfigError
from partita.kernels.codecs import CODECS
from partita.table.formats import FULL, Format
from partita.table.mesh_shape import MeshShape
from partita.table.planned import PlannedSegment
from partita.table.planned_gradients import PlannedGradients
from partita.table.residence import ENCODINGS, FP32, Residence
from partita.table.state_plan import StatePlan
from partita.table.steps import in_formats
from partita.table.strategies import KeptState, Operations, PublishPlan, Strategies, SyncPlan, Transfer


@dataclass(frozen=True)
class Formats:
    """The communication formats of one phase: of the warm-up, or of all later steps.

    Attributes:
        gradients: the format in which gradients are summed.
        sums: the format in which summed gradients are gathered, if the optimizer works on more than one rank's shard.
        deltas: the format of parameter deltas.
        diloco: the format in which DiLoCo's outer gradients are summed.
        diloco_sums: the format in which their sums are gathered.
    """

    gradients: Format = FULL
    sums: Format = FULL
    deltas: Format = FULL
    diloco: Format = FULL
    diloco_sums: Format = FULL


@dataclass(frozen=True)
class CompressedStrategies(Strategies):
    """Strategies with compressed formats.

    Attributes:
        later: the formats after the warm-up.
        warmup: the formats of the warm-up; None if there is none.
        parameters: the format of unsharded parameters.
        momentum: if not 0, ranks send the optimizer's running average instead of gradients (Tang et al., "1-bit Adam",
            2021), and this is the weight of the last average in the next one.
        rank: if not 0, matrices are summed as low-rank factors of this many columns (Vogels et al., "PowerSGD", 2019).
    """

    later: Formats = field(default_factory=Formats)
    warmup: Formats | None = None
    parameters: Format = FULL
    momentum: float = 0.0
    rank: int = 0

    @property
    def _phases(self) -> tuple[Formats, ...]:
        return (self.later,) if self.warmup is None else (self.warmup, self.later)

    def unshard(self, operations: Operations) -> Operations:
        return in_formats(operations, FULL, self.parameters)

    def groups_of_sum(self, axes: tuple[str, ...], mesh: MeshShape) -> tuple[tuple[str, ...], ...]:
        is_exact = all(formats.gradients.is_exact for formats in self._phases)
        return () if is_exact else hops(axes, mesh)

    def syncs(self, gradients: PlannedGradients) -> tuple[SyncPlan, ...]:
        *warmup, later = (_sync(gradients, formats) for formats in self._phases)
        return (*warmup, self._with_states(gradients, later))

    def _with_states(self, gradients: PlannedGradients, plan: SyncPlan) -> SyncPlan:
        """Return the plan with the states that its formats need, such as error-feedback residuals."""
        exact, row = gradients.exact, gradients.row
        residual = Residence((), row.summed_axes, FP32, row.master.tier)
        if self.rank and gradients.reductions:
            gathers = exact.gathers if gradients.copy_steps else ()
            return LowRankPlan((), gathers, residual, self.rank, exact.gathers)
        if self.momentum and gradients.reductions:
            gathers = average_gathers(gradients, self.later.sums)
            return AveragePlan(plan.sums, gathers, residual, self.momentum, average_gathers(gradients))
        feedback = ErrorFeedbackPlan(plan.sums, plan.gathers, residual)
        return feedback if feedback.residual_sizes(gradients) else plan

    def publishes(self, segment: PlannedSegment) -> tuple[PublishPlan, ...]:
        if not segment.update_is_gathered or self.later.deltas.is_exact:
            return (PublishPlan(segment.publication),)
        return tuple(_publish(segment, formats.deltas) for formats in self._phases)

    def kept(self, segment: PlannedSegment) -> Iterator[KeptState]:
        if segment.row.separate_axes:
            yield from diloco_states(segment, self.later.diloco)

    def of_round(self, segment: PlannedSegment, *, is_warming_up: bool) -> Iterator[Transfer]:
        if segment.row.separate_axes:
            formats = self._phases[0 if is_warming_up else -1]
            yield from round_transfers(segment, formats.diloco, formats.diloco_sums)


def _sync(gradients: PlannedGradients, formats: Formats) -> SyncPlan:
    exact = gradients.exact
    return SyncPlan(*(in_formats(ops, formats.gradients, formats.sums) for ops in (exact.sums, exact.gathers)))


def _publish(segment: PlannedSegment, form: Format) -> PublishPlan:
    if isinstance(form, Quantized):
        return DeltaPlan.of(segment, form.codec)
    return PublishPlan(segment.publication, needs_master=True)


def row_of(config: Config, mesh: MeshShape, row: StatePlan) -> StatePlan:
    """Return the row with the configured strategies.

    Summed values use stochastic rounding or error feedback. Unsharded parameters are the same on all ranks. Parameters
    that are not floating-point are sent uncompressed.
    """
    if config.communication.every is not None and mesh.node > 1:
        row = separate_nodes(row)
    later, name = _of_gradients(gradient_codec(config), row), config.communication.parameters
    warmup = Formats()
    if config.communication.warmup != "full" and gradient_codec(config) != "full":
        warmup = _of_gradients(config.communication.warmup, row)
    if row.separate_axes:
        later, warmup = (Formats(diloco=each.gradients, diloco_sums=each.sums) for each in (later, warmup))
    codec = codec_named(name) if row.param_compute.encoding.name in ENCODINGS else None
    parameters: Format = FULL if codec is None else Quantized(codec)
    if not (row.param_stored.shard_axes and row.param_stored.shard_axes == row.master.shard_axes):
        later, parameters = replace(later, deltas=parameters), FULL
        if codec is not None and config.communication.warmup != "full":
            warmup = replace(warmup, deltas=Quantized(CODECS[config.communication.warmup]))
    strategies = CompressedStrategies(
        later,
        warmup if warmup_steps(config) > 0 else None,
        parameters,
        config.optimizer.betas[0] if sends_averages(config) else 0.0,
        config.communication.low_rank if gradient_codec(config) == LOW_RANK else 0,
    )
    is_needed = row.separate_axes or strategies != CompressedStrategies()
    if is_needed and row.copies.distinct:
        raise ConfigError(
            "communication: parameters that differ between data ranks (experts) cannot be compressed: leave out "
            "communication.gradients, communication.parameters and communication.every"
        )
    return replace(row, strategies=strategies) if is_needed else row


def _of_gradients(name: str, row: StatePlan) -> Formats:
    """Return the formats of gradients in blocks, and of their sums."""
    codec = codec_named(name)
    if codec is not None and has_error_feedback(name):
        summed = Quantized(codec, has_error_feedback=True)
        if not row.gradient_replica_axes:
            return Formats(summed, summed)
    elif codec is not None and name in STOCHASTIC_CODECS:
        summed = Quantized(codec, stochastic_rounding=True)
    else:
        return Formats()
    # Sums have no error feedback here, so they use a finer codec.
    return Formats(summed, Quantized(CODECS["int8"], stochastic_rounding=True))
