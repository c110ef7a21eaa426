"""Loading: every rank reads what it holds, whatever ranks and tiers the values were saved from.

A rank's stretch of a tensor is compared, in the tensor's own coordinates, with the chunks that are stored; those that
it meets are read whole, checked, and pasted where they belong. Nothing but the chunks under way, and the optimizer
states of one unit where they rest on disk, is held beside the states.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from partita.checkpoint.beside import Beside
from partita.checkpoint.content import MODEL, STATE, Content, blocks_of
from partita.checkpoint.folder import chosen
from partita.checkpoint.names import Names, some_of
from partita.checkpoint.reading import Reading
from partita.checkpoint.stored import Chunk, Stored, narrowed, open_stored
from partita.checkpoint.whole import extra_states, persistent_buffers
from partita.comm.together import together
from partita.errors import PartitaError
from partita.kernels.quantize import join, split
from partita.memory.allocate import trim
from partita.memory.collector import collector_paused
from partita.memory.tiers import Kept
from partita.optim.elements import state_names, states_per_element
from partita.optim.fused import BLOCK_STATES, adopted
from partita.optim.views import View
from partita.plan.box import Box
from partita.plan.residence import SPLIT, Tier
from partita.plan.span import Span
from partita.plan.steps import steps
from partita.sharding.stretch import SCALAR, Stretch, stretch_of
from partita.sharding.unit import Member, Segment, Unit


@dataclass(frozen=True)
class Restored:
    """What :meth:`Engine.load` took from ``path``: ``step`` updates had been done.

    ``missing``: what the engine has and the checkpoint has not; ``unexpected``: names of the model that the engine's
    has not.
    """

    path: Path
    step: int
    only_model: bool = False
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    def __str__(self) -> str:
        what = "the model" if self.only_model else "model, optimizer, scheduler and random states"
        lines = [f"restored {what} of step {self.step} from '{self.path}'"]
        for title, names in (("not in the checkpoint", self.missing), ("not taken", self.unexpected)):
            if names:
                lines.append(f"{title}: {some_of(names)}")
        return "\n".join(lines)


def _kept(segment: Segment) -> Kept:
    """What holds the values that the optimizer updates, or that rest."""
    return segment.master if segment.master is not None else segment.rest


@dataclass(frozen=True)
class _Target:
    """What a stretch of a stored tensor fills: a place of a segment's weights, or a ``state`` of ``view``; with the
    chunks that it meets, each with the box that it meets and that box's place in the stretch.
    """

    key: str
    stretch: Stretch
    parts: tuple[tuple[Chunk, Box, slice], ...]
    place: slice = field(default_factory=lambda: slice(0, 0))
    view: View | None = None
    state: str = ""

    def fill(self, flat: Tensor, reading: Reading) -> None:
        """Paste the chunks, which come next, into the stretch's values."""
        for chunk, box, place in self.parts:
            assert chunk.box is not None
            if chunk.box == box and self.stretch.is_row_major:
                flat[place].copy_(reading.next().reshape(-1))
                continue
            met = box.meet(chunk.box)
            assert met is not None
            target = narrowed(self.stretch.shaped(flat[place], box), met.within(box))
            target.copy_(narrowed(reading.next(), met.within(chunk.box)))


class Loader:
    """Fills an engine's states from one checkpoint."""

    def __init__(self, content: Content, beside: Beside, folder: Path) -> None:
        self._content, self._beside, self._folder = content, beside, folder
        self._runtime, self._updater = content.runtime, content.updater
        self._all_ranks = content.runtime.collectives.all_ranks
        self._missing = list[str]()
        self._takes_states = True
        self._stored: Stored
        self._names: Names

    @collector_paused()
    def load(self, *, only_model: bool, strict: bool, prefix: str | None = None) -> Restored:
        """Every rank reads its part.

        Raises:
            PartitaError: on all ranks: there is no complete checkpoint, a file of it is damaged, or (with ``strict``)
                it has other names or shapes; it has several copies of the weights, and ``prefix`` names none.
        """
        self._content.forget()
        with together(self._all_ranks):
            self._stored = open_stored(chosen(self._folder))
            members = [member for _, member in self._runtime.members()]
            model = self._runtime.model
            others = [name for found in (persistent_buffers(model), extra_states(model)) for name, _ in found]
            self._names = Names(self._stored, [*(fqn for m in members for fqn in m.holding.fqns), *others], prefix)
            self._check(members, only_model=only_model, strict=strict)
            if not only_model:
                self._check_states(members, strict=strict)
            plan = [
                (segment, list(self._targets(unit, segment, only_model=only_model)))
                for unit, segment in self._content.segments
            ]
        error = self._fill_segments(plan, only_model=only_model)
        with together(self._all_ranks):
            if error is not None:
                raise error
            self._fill_buffers()
            self._set_extra_states()
            if not only_model and self._stored.manifest:
                self._missing += self._beside.restore(self._stored, strict=strict)
        self._runtime.updated()
        trim()
        step = int(self._stored.manifest.get("step", self._updater.steps))
        return Restored(self._stored.folder, step, only_model, tuple(self._missing), tuple(self._names.strange))

    def _fill_segments(
        self, plan: Sequence[tuple[Segment, Sequence[_Target]]], *, only_model: bool
    ) -> Exception | None:
        """Returns what this rank met: the others need it for every segment."""
        error: Exception | None = None
        chunks = [chunk for _, targets in plan for target in targets for chunk, _, _ in target.parts]
        with Reading(self._stored, chunks) as reading:
            for segment, targets in plan:
                try:
                    if error is None and not only_model:
                        self._forget_states(segment)
                    param = self._fill(segment, targets, reading) if error is None else None
                except Exception as raised:
                    error, param = raised, None
                self._deliver(segment, param)
        return error

    def _check(self, members: list[Member], *, only_model: bool, strict: bool) -> None:
        """Names and shapes, before anything is touched."""
        wrong = self._compare(members)
        started = int(self._stored.manifest.get("step", 0)) > 0
        if not only_model and started and not self._names.has_states and self._keeps_states(members):
            self._missing.append(STATE + "*")
        if wrong or (strict and (self._missing or self._names.strange)):
            said = [f"shapes differ: {some_of(wrong)}"] if wrong else []
            said += [f"missing there: {some_of(self._missing)}"] if self._missing else []
            said += [f"unknown here: {some_of(self._names.strange)}"] if self._names.strange else []
            hint = "" if wrong else "; strict=False takes what there is and reports the rest"
            raise PartitaError(f"checkpoint: '{self._stored.folder}' is of another model: {'; '.join(said)}{hint}")

    def _check_states(self, members: list[Member], *, strict: bool) -> None:
        """Whether the stored states are those of an optimizer like this one, before anything is touched."""
        there = {state for m in members if m.segment.trains for state in self._names.states(m.holding.fqns)} - {"step"}
        here = state_names(self._updater.optimizer) - {"step"}
        if not there or not here or there & here:
            return
        if strict:
            raise PartitaError(
                f"checkpoint: '{self._stored.folder}' holds the states of another optimizer ({some_of(sorted(there))}"
                f"): expected those of {type(self._updater.optimizer).__name__} ({some_of(sorted(here))}); "
                "only_model=True takes the weights alone, strict=False all but these states"
            )
        self._takes_states = False
        self._missing.append(STATE + "*")

    def _compare(self, members: list[Member]) -> list[str]:
        """Note what of the model is not there; returns what has another shape there."""
        model, wrong = self._runtime.model, list[str]()
        held = [(member.holding.fqns, tuple(member.shape)) for member in members]
        held += [([name], tuple(buffer.shape)) for name, buffer in persistent_buffers(model)]
        for names, expected in held:
            key = self._names.model(names)
            if key is None:
                self._missing.append(MODEL + names[0])
            elif (shape := self._stored.tensors[key].shape) != expected:
                wrong.append(f"'{names[0]}' is {expected} here, {shape} there")
        self._missing += [MODEL + name for name, _ in extra_states(model) if self._names.model([name]) is None]
        return wrong

    def _keeps_states(self, members: list[Member]) -> bool:
        """Whether the optimizer will keep states of what trains (SGD without momentum does not)."""
        return any(m.segment.trains for m in members) and states_per_element(self._updater.optimizer) > 0

    # -------------------------------------------------------------------- reading

    def _targets(self, unit: Unit, segment: Segment, *, only_model: bool) -> Iterator[_Target]:
        """What this rank holds of a segment and of its optimizer states, in the order in which it is read."""
        members = {member.fqn: member for member in unit.members if member.segment is segment}
        for span in self._spans(segment):
            member, place = members[span.fqn], slice(span.offset, span.offset + span.num_elements)
            if (key := self._names.model(member.holding.fqns)) is not None:
                yield self._target(key, stretch_of(member, span.start, span.stop), place=place)
            view = self._updater.views.of(member.param)
            if not only_model and self._takes_states and segment.trains and view is not None and view.num_elements:
                for state, key in self._names.states(member.holding.fqns).items():
                    if key in self._stored.tensors:
                        yield self._target(key, self._state_stretch(view, state, key), view=view, state=state)

    def _target(self, key: str, stretch: Stretch, **where: Any) -> _Target:
        parts = (
            (chunk, box, place)
            for box, place in stretch.boxes()
            for chunk in self._stored.tensors[key].chunks
            if chunk.box is not None and box.meet(chunk.box) is not None
        )
        return _Target(key, stretch, tuple(parts), **where)

    def _state_stretch(self, view: View, state: str, key: str) -> Stretch:
        """What of a stored state goes with a view: its elements or blocks, or the one number that it is."""
        start, stop, shape = view.start, view.start + view.num_elements, self._stored.tensors[key].shape
        if state in BLOCK_STATES:
            return blocks_of(view.member, start, stop)
        if shape == tuple(view.member.shape) and (shape or state != "step"):
            return stretch_of(view.member, start, stop)
        if shape and view.member.segment.holds_whole_master:
            return Stretch(shape, tuple(range(len(shape))), 0, math.prod(shape))
        if shape:
            raise PartitaError(
                f"checkpoint: '{key}' has shape {shape} in '{self._stored.folder}': expected {tuple(view.member.shape)}"
            )
        return SCALAR

    def _fill(self, segment: Segment, targets: Sequence[_Target], reading: Reading) -> Tensor | None:
        """Bring a segment's weights, and its optimizer states, into what this rank holds of them.

        Returns the parameters of a split master, which rest elsewhere.
        """
        lease = _kept(segment).lend()
        held = weights = lease.wait()
        splits = segment.master is not None and segment.plan.master.encoding == SPLIT
        if splits:  # what is not stored stays as it is
            rest = segment.rest.lend()
            weights = join(segment.part_of_rest(rest.wait()).to(held.device), held)
            rest.end(changed=False)
        states = dict[View, dict[str, Any]]()
        for target in targets:
            if target.view is None:
                target.fill(weights[target.place], reading)
            else:
                room = self._room(target)
                target.fill(room.view(-1), reading)
                states.setdefault(target.view, {})[target.state] = room
        param = None
        if splits:
            param, low = split(weights)
            held.copy_(low)
        lease.end(changed=True)
        self._adopt(segment, states)
        return param

    def _forget_states(self, segment: Segment) -> None:
        """Of a parameter whose states are not stored, the optimizer has had no gradient yet."""
        for view in self._updater.views.of_segment(segment):
            self._updater.optimizer.state.pop(view.tensor, None)

    def _room(self, target: _Target) -> Tensor:
        """Memory for an optimizer state: flat, or for one number alone."""
        assert target.view is not None
        stored, own = self._stored.tensors[target.key].dtype, target.view.tensor
        if target.stretch is SCALAR:
            groups = self._updater.optimizer.param_groups
            on_device = any(group.get("fused") or group.get("capturable") for group in groups)
            return torch.empty((), dtype=stored, device=own.device if on_device else "cpu")
        dtype = own.dtype if stored.is_floating_point and target.state not in BLOCK_STATES else stored
        return torch.empty(target.stretch.stop - target.stretch.start, dtype=dtype, device=own.device)

    def _plain_states(self, view: View) -> dict[str, Any]:
        """The states of a parameter that are no tensors."""
        found = self._names.states(view.member.holding.fqns)
        return {state: self._stored.value(key) for state, key in found.items() if key in self._stored.values}

    def _spans(self, segment: Segment) -> tuple[Span, ...]:
        """The spans of what this rank holds."""
        if _kept(segment).num_elements == segment.layout.padded:
            return segment.layout.spans
        return segment.layout.part(self._runtime.gradient_group.index)

    def _adopt(self, segment: Segment, states: dict[View, dict[str, Any]]) -> None:
        """Give the optimizer its states, in the encoding that it keeps them in."""
        optimizer = self._updater.optimizer
        for view, state in states.items():
            if not state:
                continue
            known = {**adopted(optimizer, state), **self._plain_states(view)}
            optimizer.state[view.tensor] = {
                name: self._shaped(view, name, value)
                if isinstance(value, Tensor) and value.dim() and name not in BLOCK_STATES and segment.holds_whole_master
                else value
                for name, value in known.items()
            }
        if states and segment.plan.moments.tier is Tier.DISK:
            self._updater.hidden.moments_of(segment).replace()

    def _shaped(self, view: View, name: str, value: Tensor) -> Tensor:
        """A flat state as an optimizer that sees parameters whole keeps it: like the parameter, or as it was stored."""
        key = self._names.states(view.member.holding.fqns).get(name)
        shape = self._stored.tensors[key].shape if key in self._stored.tensors else ()
        return view.member.shaped(value) if shape in ((), tuple(view.member.shape)) else value.view(shape)

    def _deliver(self, segment: Segment, param: Tensor | None) -> None:
        """Bring the weights into what rests. A collective where that is whole and the master is not."""
        if segment.master is None:
            return
        executor, master = self._runtime.executor, segment.plan.master
        if master.encoding == SPLIT:
            device = executor.device if master.tier is Tier.DEVICE else torch.device("cpu")
            tier = Tier.DEVICE if master.tier is Tier.DEVICE else Tier.HOST
            if param is None:  # this rank could not read
                lease = segment.rest.lend()
                param = segment.part_of_rest(lease.wait()).clone()
                lease.end(changed=False)
            found = replace(master, encoding=segment.layout.encoding, tier=tier)
            if steps(found, segment.plan.param_rest, segment.mesh):
                executor.deliver(segment, param.to(device), found)
            else:
                segment.rest.store(param)
            return
        lease = segment.master.lend()
        executor.deliver(segment, lease.wait(), master)
        lease.end(changed=False)

    def _fill_buffers(self) -> None:
        """Every rank reads the buffers whole."""
        for name, buffer in persistent_buffers(self._runtime.model):
            if (key := self._names.model([name])) is not None:
                buffer.copy_(self._stored.value(key))

    def _set_extra_states(self) -> None:
        for name, module in extra_states(self._runtime.model):
            if (key := self._names.model([name])) is not None:
                module.set_extra_state(self._stored.value(key))
