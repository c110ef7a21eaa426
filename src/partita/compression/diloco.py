"""DiLoCo: replicas train separately, and an outer optimizer averages their weights after each round of local steps.

Each replica takes ``communication.every`` local steps from the same initial weights. The difference between initial and
final weights is its *outer gradient*. The outer optimizer (SGD with Nesterov momentum) applies the replicas' mean outer
gradient to the initial weights. Each replica keeps its own optimizer states.

Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023, algorithm 1.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from partita.checkpoint.names import DILOCO_ERROR_FEEDBACK, DILOCO_MOMENTUM
from partita.comm.group import Group
from partita.compression.error_feedback import with_residuals
from partita.compression.quantized import Quantized
from partita.config.schema import Communication
from partita.memory.accelerator import is_host
from partita.optim.extension import ComingUpdate, UpdateListener
from partita.optim.states import View, Views
from partita.sharding.interpreter import Interpreter
from partita.sharding.runtime import Runtime
from partita.sharding.segment import Segment
from partita.table.formats import Format
from partita.table.planned import PlannedSegment
from partita.table.residence import FP32, Residence
from partita.table.state_plan import LOCAL, STATES, StatePlan
from partita.table.steps import ReduceScatter, in_formats, in_phases, steps
from partita.table.strategies import KeptState, Transfer

# The weights at the start of the round, and the outer optimizer's momentum.
DILOCO_STATES = 2


def separate_nodes(row: StatePlan) -> StatePlan:
    """Return the row for replicas, one on each node, that train separately.

    States that were sharded or summed over all data ranks are sharded or summed within a node.
    """

    def within(residence: Residence) -> Residence:
        axes = residence.shard_axes, residence.partial_axes
        shard, partial = (LOCAL if found == STATES else found for found in axes)
        return replace(residence, shard_axes=shard, partial_axes=partial)

    columns = {f.name: getattr(row, f.name) for f in fields(row)}
    found: dict[str, Any] = {name: within(value) for name, value in columns.items() if isinstance(value, Residence)}
    return replace(row, **found, separate_axes=("node",))


def diloco_residual_sizes(segment: PlannedSegment, form: Format) -> tuple[int, ...]:
    """Return the sizes of the error-feedback residuals: of a rank's outer gradient, and of the sums that it sends."""
    if not (isinstance(form, Quantized) and form.has_error_feedback):
        return ()
    num_elements = segment.layout.shard_elements
    return num_elements, num_elements // segment.mesh.group_size(segment.row.separate_axes)


def diloco_states(segment: PlannedSegment, form: Format) -> Iterator[KeptState]:
    """Return DiLoCo's states of one segment. ``form``: the format of outer gradients."""
    num_elements = DILOCO_STATES * segment.layout.shard_elements + sum(diloco_residual_sizes(segment, form))
    residence = Residence((), segment.row.summed_axes, FP32, segment.row.master.tier)
    yield KeptState("outer", residence, FP32.num_bytes(num_elements))


def round_transfers(segment: PlannedSegment, form: Format, back: Format) -> tuple[Transfer, Transfer, Transfer]:
    """Return the transfers at the end of a round.

    These are the sum of the outer gradients, the gather of updated shards into the master weights, and the publication
    of the master weights.

    Args:
        form: the format of outer gradients.
        back: the format of their sums.
    """
    row, mesh = segment.row, segment.mesh
    gradient = Residence(row.gradient_shard_axes, row.separate_axes, FP32)
    part = replace(row.master, shard_axes=row.gradient_shard_axes)
    sums = in_phases(in_formats(steps(gradient, replace(gradient, partial_axes=()), mesh), form, back))
    return (
        Transfer(sums, gradient, "gradients"),
        Transfer(steps(part, row.master, mesh), part, "parameters"),
        Transfer(segment.publication, row.master, "parameters"),
    )


class DilocoState:
    """DiLoCo's states of this rank's shard of one segment, each ``[shard_elements]`` in fp32.

    ``begin``: the weights at the start of the round. ``momentum``: the outer optimizer's momentum, the same on all
    replicas. ``residual``: the error-feedback residual of this rank's outer gradient, in units of one replica's outer
    gradient. If all replicas have the same residual, it is the error of the mean.
    """

    def __init__(self, segment: Segment, runtime: Runtime) -> None:
        self._segment = segment
        self._index = segment.shard_index
        (stored,) = segment.plan.strategies.kept(segment.planned)
        tier = stored.residence.tier

        def kept(num_elements: int) -> Tensor:
            return runtime.memory.keep("outer", num_elements, torch.float32, tier).lease().tensor

        self.begin = kept(segment.layout.shard_elements)
        self.start_round()  # also of a segment that begins to train in a round: its weights are equal on all replicas
        self.momentum = kept(segment.layout.shard_elements)
        sums = transfers_of(segment, is_warming_up=False)[0].operations
        form = next(op.format for op in sums if isinstance(op, ReduceScatter))
        self.residuals = [kept(size) for size in diloco_residual_sizes(segment.planned, form)]

    @property
    def residual(self) -> Tensor | None:
        return self.residuals[0] if self.residuals else None

    def start_round(self) -> None:
        """Save the weights at the start of a round."""
        assert self._segment.master is not None
        self.begin.copy_(self.shard_of(self._segment.master.lease().wait()))

    def shard_of(self, master: Tensor) -> Tensor:
        """Return this rank's shard of master weights, which may be unsharded."""
        return master.view(-1, self._segment.layout.shard_elements)[self._index % (master.numel() // len(self.begin))]

    def clear_padding(self, values: Tensor, number: int = 0) -> None:
        """Set padding to zero, because sign codecs decode it to other values.

        ``values``: the slice ``number`` of this rank's shard, if it is cut into slices of this size.
        """
        layout, num = self._segment.layout, values.numel()
        spans, at = layout.cut(self._index * layout.shard_elements + number * num, num), 0
        for span in spans:
            values[at : span.offset].zero_()
            at = span.offset + span.num_elements
        values[at:].zero_()

    def clear(self) -> None:
        """Reset the states to zero."""
        for values in (self.momentum, *self.residuals):
            values.zero_()


class DilocoListener(UpdateListener):
    """Listener that counts local steps, and ends rounds.

    Args:
        last_step: the last step of the training, which ends a round; None if it is unknown.
    """

    setting = "communication.every"
    reads_weights = True

    def __init__(
        self, runtime: Runtime, optimizer: Optimizer, views: Views, section: Communication, last_step: int | None
    ) -> None:
        self._runtime = runtime
        self._optimizer = optimizer
        self._views = views
        self._section = section
        self._replicas = _replicas(runtime)
        self._interpreter = Interpreter(runtime.collectives)
        self._states = dict[int, DilocoState]()
        self._taken = 0  # local steps of this round
        self._last_step = last_step
        for segment in self._segments():
            self._state_of(segment)

    @staticmethod
    def is_needed(runtime: Runtime) -> bool:
        """Return True if replicas train separately."""
        return _replicas(runtime).size > 1

    @property
    def differs_between_replicas(self) -> bool:
        return self._taken > 0

    def _segments(self) -> Iterator[Segment]:
        return (segment for unit in self._runtime.units for segment in unit.trained)

    def _state_of(self, segment: Segment) -> DilocoState:
        if id(segment) not in self._states:
            self._states[id(segment)] = DilocoState(segment, self._runtime)
        return self._states[id(segment)]

    def saved(self, segment: Segment) -> Mapping[str, Tensor]:
        if (state := self._states.get(id(segment))) is None:
            return {}
        found = {DILOCO_MOMENTUM: state.momentum, DILOCO_ERROR_FEEDBACK: state.residual}
        return {key: values for key, values in found.items() if values is not None}

    # ---------------------------------------------------------------------- rounds

    def before_update(self, coming: ComingUpdate) -> None:
        """Save the weights at the start of a round, and those of segments that begin to train in it."""
        for segment in self._segments():
            state = self._state_of(segment)
            if not self.differs_between_replicas:
                state.start_round()

    def after_update(self, step: int, *, is_warming_up: bool) -> None:
        """Count a local step. End the round after its last step."""
        self._taken += 1
        if self._taken == self._section.every or step == self._last_step:
            self.end_round(step, is_warming_up=is_warming_up)

    def end_round(self, step: int, *, is_warming_up: bool) -> None:
        """End the round: average the outer gradients, and step the outer optimizer."""
        for number, segment in enumerate(self._segments()):
            assert segment.master is not None
            lease = segment.master.lease()
            master, state = lease.wait(), self._state_of(segment)
            shard = state.shard_of(master)
            sums, publication, _ = transfers_of(segment, is_warming_up=is_warming_up)
            mean = self._mean(sums, state, state.begin - shard, self._interpreter.seeded(step, number), is_warming_up)
            self._step(state, mean, shard)
            self._interpreter.run(publication.operations, shard, master)
            self._runtime.publisher.deliver(segment, master, segment.plan.master, exact=True)
            lease.end(changed=True)
        self._taken = 0
        self._runtime.rewritten()

    def _mean(
        self, sums: Transfer, state: DilocoState, change: Tensor, interpreter: Interpreter, is_warming_up: bool
    ) -> Tensor:
        """Return the mean of the replicas' outer gradients. It is decoded to the same bits on all replicas."""
        values, residuals = change.to(interpreter.device), [each.to(interpreter.device) for each in state.residuals]
        num_bytes = interpreter.scratch_bytes(sums.operations, values.numel(), values.itemsize)
        scratch = values.new_empty(-(-num_bytes // values.itemsize)) if num_bytes else None
        mesh = self._runtime.collectives.mesh.shape
        ops = with_residuals(sums.operations, [] if is_warming_up else residuals, mesh)
        interpreter.run(ops, values, values, purpose="gradients", scratch=scratch)
        for residual, kept in zip(residuals, state.residuals, strict=True):
            kept.copy_(residual)
        for kept, number in zip(state.residuals, (0, self._replicas.index), strict=False):
            state.clear_padding(kept, number)
        mean = values.mul_(1.0 / self._replicas.size).to(change.device)
        state.clear_padding(mean)
        return mean

    def _step(self, state: DilocoState, mean: Tensor, shard: Tensor) -> None:
        """Apply SGD with (Nesterov) momentum, as in torch.optim, to the weights at the start of the round."""
        settings = self._section
        state.momentum.mul_(settings.outer_momentum).add_(mean)
        step = mean.add_(state.momentum, alpha=settings.outer_momentum) if settings.outer_nesterov else state.momentum
        torch.sub(state.begin, step, alpha=settings.outer_lr, out=shard)

    # ----------------------------------------------------------------- checkpoints

    def prepare_for_checkpoint(self, step: int, *, is_warming_up: bool) -> None:
        """End the round, and average the residuals and the optimizer's states over the replicas.

        Afterwards all replicas have the same states. A checkpoint stores one replica's states, and this run continues
        from the same ones.
        """
        if self.differs_between_replicas:
            self.end_round(step, is_warming_up=is_warming_up)
        for segment in self._segments():
            self._average_residuals(self._state_of(segment))
        self._average_states()

    def clear(self) -> None:
        """Reset the states to zero, and start a new round."""
        self._taken = 0
        for state in self._states.values():
            state.clear()

    def _average_residuals(self, state: DilocoState) -> None:
        if state.residual is None:
            return
        of_gradient, of_sums = state.residuals
        of_gradient.view(self._replicas.size, -1)[self._replicas.index] += of_sums
        of_sums.zero_()
        of_gradient.copy_(self._sum(of_gradient).mul_(1.0 / self._replicas.size))

    def _average_states(self) -> None:
        """Average the optimizer's states. A replica that did not use a parameter has no states of it."""
        state, views = self._optimizer.state, [view for view in self._views if view.num_elements]
        every = self._replicas.exchange_objects([_described(state.get(v.tensor, {})) for v in views], "engine.save")
        for view, of_view in zip(views, zip(*every, strict=True), strict=True):
            for key in sorted({key for found in of_view for key in found}):
                found = [kinds[key] for kinds in of_view if key in kinds]
                if isinstance(found[0], tuple):
                    self._average_state(view, key, len(found), *found[0])
                else:
                    value = _furthest([each.value for each in found])
                    state[view.tensor][key] = value.to(view.tensor.device) if found[0].is_on_device else value

    def _average_state(self, view: View, key: str, num: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Replace a state by its mean over the ``num`` replicas that have it."""
        state = self._optimizer.state[view.tensor]
        if key not in state:
            param = view.tensor
            same = shape == tuple(param.shape)
            state[key] = torch.zeros_like(param) if same else torch.zeros(shape, dtype=dtype, device=param.device)
        state[key].copy_(self._sum(state[key]).div_(num))

    def _sum(self, values: Tensor) -> Tensor:
        return (
            self._replicas.sum(values.detach().to(self._interpreter.device), "moments", "gradients")
            .clone()
            .to(values.device)
        )


@dataclass(frozen=True)
class _Unaveraged:
    """A state that is not averaged. A tensor is on the host, since another replica does not have its device."""

    value: Any
    is_on_device: bool


def _described(state: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], torch.dtype] | _Unaveraged]:
    """Return the shapes and dtypes of a state's floating-point tensors, which are averaged, and its other values."""
    return {key: _described_value(value) for key, value in state.items()}


def _described_value(value: Any) -> tuple[tuple[int, ...], torch.dtype] | _Unaveraged:
    if not isinstance(value, Tensor):
        return _Unaveraged(value, is_on_device=False)
    if value.dim() and value.is_floating_point():
        return tuple(value.shape), value.dtype
    return _Unaveraged(value.cpu(), is_on_device=not is_host(value.device))


def _furthest(found: list[Any]) -> Any:
    """Return the largest of the replicas' counts, or the first value if they are not numbers."""
    if all(isinstance(value, Tensor) and value.numel() == 1 for value in found):
        return max(found, key=float).clone()
    return found[0]


def _replicas(runtime: Runtime) -> Group:
    """Return the group of the ranks, one per replica, that have the same shard."""
    return runtime.collectives.group(runtime.row.separate_axes)


def transfers_of(segment: Segment, *, is_warming_up: bool) -> Sequence[Transfer]:
    """Return the transfers at the end of a round, in the formats of the phase."""
    return tuple(segment.plan.strategies.of_round(segment.planned, is_warming_up=is_warming_up))
