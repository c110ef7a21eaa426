"""DiLoCo: replicas train separately, and an outer optimizer averages their weights every so many steps.

Each replica takes ``every`` local steps from the same weights; how far it has come is its *outer gradient*, whose mean
over the replicas the outer optimizer, SGD with Nesterov momentum, takes for a gradient of the weights that the round
began with. Moments stay each replica's own.

Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023, algorithm 1.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from partita.checkpoint.names import MOMENTUM, OUTER_FEEDBACK
from partita.comm.group import Group
from partita.compression.error_feedback import with_errors
from partita.compression.quantized import Quantized
from partita.config.schema import Communication
from partita.optim.extension import ComingUpdate, UpdateListener
from partita.optim.states import View, Views
from partita.plan.formats import Format
from partita.plan.planned import PlannedSegment
from partita.plan.residence import FP32, Residence
from partita.plan.state_plan import LOCAL, STATES, StatePlan
from partita.plan.steps import ReduceScatter, in_formats, in_phases, steps
from partita.plan.strategies import KeptState, Transfer
from partita.sharding.interpreter import Interpreter
from partita.sharding.runtime import Runtime
from partita.sharding.segment import Segment

# The weights with which a round began, and the outer optimizer's momentum.
OUTER_STATES = 2


def separate(row: StatePlan) -> StatePlan:
    """Return the row for replicas, one on each node, that train separately.

    What is split or summed over all ranks that have the same parameters is so over those of a node.
    """

    def within(residence: Residence) -> Residence:
        axes = residence.shard_axes, residence.partial_axes
        shard, partial = (LOCAL if found == STATES else found for found in axes)
        return replace(residence, shard_axes=shard, partial_axes=partial)

    columns = {f.name: getattr(row, f.name) for f in fields(row)}
    found: dict[str, Any] = {name: within(value) for name, value in columns.items() if isinstance(value, Residence)}
    return replace(row, **found, separate_axes=("node",))


def outer_error_sizes(segment: PlannedSegment, form: Format) -> tuple[int, ...]:
    """Return the elements of the errors of outer gradients: of a rank's own, and of the sums that it sends back."""
    if not (isinstance(form, Quantized) and form.keeps_errors):
        return ()
    num_elements = segment.layout.part_elements
    return num_elements, num_elements // segment.mesh.group_size(segment.row.separate_axes)


def kept_by_rounds(segment: PlannedSegment, form: Format) -> Iterator[KeptState]:
    """Return the states that rounds keep of one segment, whose outer gradients travel in this format."""
    num_elements = OUTER_STATES * segment.layout.part_elements + sum(outer_error_sizes(segment, form))
    residence = Residence((), segment.row.summed_axes, FP32, segment.row.master.tier)
    yield KeptState("outer", residence, FP32.num_bytes(num_elements))


def transfers_of_round(segment: PlannedSegment, form: Format, back: Format) -> tuple[Transfer, Transfer, Transfer]:
    """Return the sum of the outer gradients, what brings updated parts to the master weights, and these to all.

    Args:
        form: the format of outer gradients.
        back: the format of their sums.
    """
    row, mesh = segment.row, segment.mesh
    outer = Residence(row.part_axes, row.separate_axes, FP32)
    part = replace(row.master, shard_axes=row.part_axes)
    sums = in_phases(in_formats(steps(outer, replace(outer, partial_axes=()), mesh), form, back))
    return (
        Transfer(sums, outer, "gradients"),
        Transfer(steps(part, row.master, mesh), part, "parameters"),
        Transfer(segment.publication, row.master, "parameters"),
    )


class OuterState:
    """This rank's part of one segment, ``[part_elements]`` in fp32: the weights that the round began with, the outer
    optimizer's ``momentum``, the same on all replicas, and what codes of outer gradients have ``held`` back.

    ``held`` is in units of one replica's outer gradient: where all replicas have the same, it is what the mean lacks.
    """

    def __init__(self, segment: Segment, runtime: Runtime) -> None:
        self._segment = segment
        self._index = segment.part_index
        (stored,) = segment.plan.strategies.kept(segment.planned)
        tier = stored.residence.tier

        def kept(num_elements: int) -> Tensor:
            return runtime.memory.keep("outer", num_elements, torch.float32, tier).lend().tensor

        self.begin = kept(segment.layout.part_elements)
        self.momentum = kept(segment.layout.part_elements)
        sums = transfers_of(segment, is_warming_up=False)[0].operations
        form = next(op.format for op in sums if isinstance(op, ReduceScatter))
        self.levels = [kept(size) for size in outer_error_sizes(segment.planned, form)]

    @property
    def held(self) -> Tensor | None:
        return self.levels[0] if self.levels else None

    def part_of(self, master: Tensor) -> Tensor:
        """This rank's part of what it may hold whole."""
        return master.view(-1, self._segment.layout.part_elements)[self._index % (master.numel() // len(self.begin))]

    def clear_padding(self, values: Tensor, number: int = 0) -> None:
        """Codes of signs leave other than zeros there. ``values``: the ``number``-th so many of this rank's part."""
        layout, num = self._segment.layout, values.numel()
        spans, at = layout.cut(self._index * layout.part_elements + number * num, num), 0
        for span in spans:
            values[at : span.offset].zero_()
            at = span.offset + span.num_elements
        values[at:].zero_()

    def clear(self) -> None:
        """Reset to zeros, as at the start."""
        for values in (self.momentum, *self.levels):
            values.zero_()


class OuterOptimizer(UpdateListener):
    """Counts local steps, and ends rounds.

    Args:
        last_step: the training's last, which ends a round; None: not known.
    """

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
        self._states = dict[int, OuterState]()
        self._taken = 0  # local steps of this round
        self._last_step = last_step
        for segment in self._segments():
            self._state_of(segment)

    @staticmethod
    def is_needed(runtime: Runtime) -> bool:
        """Return whether replicas train separately."""
        return _replicas(runtime).size > 1

    @property
    def differs_between_replicas(self) -> bool:
        return self._taken > 0

    def _segments(self) -> Iterator[Segment]:
        return (segment for unit in self._runtime.units for segment in unit.trained)

    def _state_of(self, segment: Segment) -> OuterState:
        if id(segment) not in self._states:
            self._states[id(segment)] = OuterState(segment, self._runtime)
        return self._states[id(segment)]

    def saved(self, segment: Segment) -> Mapping[str, Tensor]:
        if (state := self._states.get(id(segment))) is None:
            return {}
        found = {MOMENTUM: state.momentum, OUTER_FEEDBACK: state.held}
        return {key: values for key, values in found.items() if values is not None}

    # ---------------------------------------------------------------------- rounds

    def before_update(self, coming: ComingUpdate) -> None:
        """Keep the weights that a round begins with."""
        if not self.differs_between_replicas:
            for segment in self._segments():
                assert segment.master is not None
                state = self._state_of(segment)
                state.begin.copy_(state.part_of(segment.master.lend().wait()))

    def after_update(self, step: int, *, is_warming_up: bool) -> None:
        """A local step is done; the last of a round ends it."""
        self._taken += 1
        if self._taken == self._section.every or step == self._last_step:
            self.end_round(step, is_warming_up=is_warming_up)

    def end_round(self, step: int, *, is_warming_up: bool) -> None:
        """End the round: average the outer gradients, and step the outer optimizer."""
        for number, segment in enumerate(self._segments()):
            assert segment.master is not None
            lease = segment.master.lend()
            master, state = lease.wait(), self._state_of(segment)
            part = state.part_of(master)
            sums, publication, _ = transfers_of(segment, is_warming_up=is_warming_up)
            mean = self._mean(sums, state, state.begin - part, self._interpreter.seeded(step, number), is_warming_up)
            self._step(state, mean, part)
            self._interpreter.run(publication.operations, part, master)
            self._runtime.publisher.deliver(segment, master, segment.plan.master, exact=True)
            lease.end(changed=True)
        self._taken = 0
        self._runtime.updated()

    def _mean(
        self, sums: Transfer, state: OuterState, change: Tensor, interpreter: Interpreter, is_warming_up: bool
    ) -> Tensor:
        """Return the mean over the replicas of their outer gradients, as all of them decode it."""
        values, levels = change.to(interpreter.device), [level.to(interpreter.device) for level in state.levels]
        num_bytes = interpreter.scratch_bytes(sums.operations, values.numel(), values.itemsize)
        scratch = values.new_empty(-(-num_bytes // values.itemsize)) if num_bytes else None
        mesh = self._runtime.collectives.mesh.shape
        ops = with_errors(sums.operations, [] if is_warming_up else levels, mesh)
        interpreter.run(ops, values, values, purpose="gradients", scratch=scratch)
        for level, kept in zip(levels, state.levels, strict=True):
            kept.copy_(level)
        for level, number in zip(state.levels, (0, self._replicas.index), strict=False):
            state.clear_padding(level, number)
        mean = values.mul_(1.0 / self._replicas.size).to(change.device)
        state.clear_padding(mean)
        return mean

    def _step(self, state: OuterState, mean: Tensor, part: Tensor) -> None:
        """SGD with (Nesterov) momentum, as torch's: from the weights that the round began with."""
        asked = self._section
        state.momentum.mul_(asked.outer_momentum).add_(mean)
        step = mean.add_(state.momentum, alpha=asked.outer_momentum) if asked.outer_nesterov else state.momentum
        torch.sub(state.begin, step, alpha=asked.outer_lr, out=part)

    # ----------------------------------------------------------------- checkpoints

    def settle(self, step: int, *, is_warming_up: bool) -> None:
        """End the round, and make alike on all replicas what each has of its own: what codes have held back, and the
        optimizer's states, of which the mean is taken. So one replica's are all there is to go on from, here too.
        """
        if self.differs_between_replicas:
            self.end_round(step, is_warming_up=is_warming_up)
        for segment in self._segments():
            self._share_held(self._state_of(segment))
        self._share_states()

    def clear(self) -> None:
        """Reset to zeros, as at the start."""
        self._taken = 0
        for state in self._states.values():
            state.clear()

    def _share_held(self, state: OuterState) -> None:
        if state.held is None:
            return
        own, of_sums = state.levels
        own.view(self._replicas.size, -1)[self._replicas.index] += of_sums
        of_sums.zero_()
        own.copy_(self._sum(own).mul_(1.0 / self._replicas.size))

    def _share_states(self) -> None:
        """A replica in which nothing used a parameter has no states of it."""
        state, views = self._optimizer.state, [view for view in self._views if view.num_elements]
        every = self._replicas.exchange_objects([_described(state.get(v.tensor, {})) for v in views], "engine.save")
        for view, of_view in zip(views, zip(*every, strict=True), strict=True):
            for key in sorted({key for found in of_view for key in found}):
                found = [kinds[key] for kinds in of_view if key in kinds]
                if isinstance(found[0], tuple):
                    self._average(view, key, len(found), *found[0])
                else:
                    state[view.tensor][key] = _furthest(found)

    def _average(self, view: View, key: str, num: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """The mean of a state over the ``num`` replicas that have it."""
        own = self._optimizer.state[view.tensor]
        if key not in own:
            like = view.tensor
            same = shape == tuple(like.shape)
            own[key] = torch.zeros_like(like) if same else torch.zeros(shape, dtype=dtype, device=like.device)
        own[key].copy_(self._sum(own[key]).div_(num))

    def _sum(self, values: Tensor) -> Tensor:
        return (
            self._replicas.sum(values.detach().to(self._interpreter.device), "moments", "gradients")
            .clone()
            .to(values.device)
        )


def _described(state: dict[str, Any]) -> dict[str, Any]:
    """Shape and dtype of what a mean can be taken of; what else there is, as it is."""
    return {
        key: (tuple(value.shape), value.dtype)
        if isinstance(value, Tensor) and value.dim() and value.is_floating_point()
        else value
        for key, value in state.items()
    }


def _furthest(found: list[Any]) -> Any:
    """Return the largest of the replicas' counts; of other values, the first."""
    if all(isinstance(value, Tensor) and value.numel() == 1 for value in found):
        return max(found, key=float).clone()
    return found[0]


def _replicas(runtime: Runtime) -> Group:
    """Return the ranks of all replicas that have the same part."""
    return runtime.collectives.group(runtime.row.separate_axes)


def transfers_of(segment: Segment, *, is_warming_up: bool) -> Sequence[Transfer]:
    """Return :func:`transfers_of_round` in the formats of a phase."""
    return tuple(segment.plan.strategies.of_round(segment.planned, is_warming_up=is_warming_up))
