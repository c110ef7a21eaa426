"""Loading: every rank reads the values that it stores, whatever ranks and memory tiers they were saved from.

The elements that a rank stores of a tensor are intersected, in the tensor's global coordinates, with the stored chunks.
Each intersecting chunk is read in full, checked, and copied into place. The only memory needed in addition to the
states is for the chunks in flight, and for the optimizer states of one unit if they are stored on disk.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from partita.checkpoint.backend import Backend, Chunk, Stored
from partita.checkpoint.content import Content
from partita.checkpoint.groups import check_groups, differing_groups, lacking_groups
from partita.checkpoint.names import (
    AVERAGES,
    DILOCO_MOMENTUM,
    ERROR_FEEDBACK,
    MODEL,
    STATE,
    Names,
    some_of,
)
from partita.checkpoint.open_on_ranks import open_on_ranks
from partita.checkpoint.settings import Change
from partita.checkpoint.stored_states import StoredStates
from partita.checkpoint.training_state import TrainingState
from partita.comm.collective_errors import shared_errors
from partita.errors import PartitaError
from partita.inspection.modules import extra_states, persistent_buffers
from partita.kernels.quantize import split
from partita.layout.parameters import find_all_parameters
from partita.memory.allocate import trim
from partita.memory.collector import collector_paused
from partita.memory.tiers import StoredState
from partita.optim.states import View
from partita.optim.traits import moments_of, state_names
from partita.sharding.parameter import Member
from partita.sharding.segment import Segment
from partita.sharding.unit import Unit
from partita.table.box import Box
from partita.table.flat_range import FlatRange
from partita.table.residence import Tier
from partita.table.span import Span
from partita.table.steps import steps


@dataclass(frozen=True)
class LoadOptions:
    """The selection of what to load from a checkpoint (see :meth:`Engine.load`)."""

    only_model: bool = False
    strict: bool = True
    prefix: str | None = None


@dataclass(frozen=True)
class Restored:
    """The result of :meth:`Engine.load`: the checkpoint at ``path``, saved after ``step`` updates.

    ``missing``: keys that the engine has and the checkpoint lacks. ``unexpected``: names of the stored model that the
    engine's model lacks, and stored groups that its optimizer lacks. ``only_states``: True for another library's
    checkpoint, from which the optimizer's settings, the scheduler, counters and random states are not restored.
    ``changes``: the optimizer's settings that are configured differently than in the saved run.
    """

    path: Path
    step: int
    only_model: bool = False
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    only_states: bool = False
    changes: tuple[Change, ...] = ()

    def __str__(self) -> str:
        what = "model and optimizer states" if self.only_states else "model, optimizer, scheduler and random states"
        what = "the model" if self.only_model else what
        lines = [f"restored {what} of step {self.step} from '{self.path}'"]
        for title, names in (("not in the checkpoint", self.missing), ("not loaded", self.unexpected)):
            if names:
                lines.append(f"{title}: {some_of(names)}")
        return "\n".join(lines)


@collector_paused()
@torch.inference_mode(False)  # states that are allocated in inference mode could not be updated
def load(content: Content, training: TrainingState, backend: Backend, folder: Path, options: LoadOptions) -> Restored:
    """Load an engine's states from one checkpoint. Every rank reads its shards. A collective.

    Raises:
        PartitaError: on all ranks: there is no complete checkpoint, a file of it is damaged, or (with ``strict``) it
            has other names or shapes; it has several copies of the weights, and ``prefix`` names none.
    """
    content.forget()
    all_ranks = content.runtime.collectives.all_ranks
    stored = open_on_ranks(backend, folder, all_ranks)
    with shared_errors(all_ranks):
        loading = Loading(content, training, stored, options)
        loading.check()
        plan = loading.plan()
    content.runtime.reducer.sync_states.clear()
    for listener in content.updater.listeners:
        listener.clear()
    error = loading.fill_segments(plan)
    with shared_errors(all_ranks):
        if error is not None:
            raise error
        restored = loading.fill_others()
    content.updater.after_load()
    content.runtime.rewritten()
    trim()
    return restored


@dataclass(frozen=True)
class _Target:
    """The destination of ``elements`` of a stored tensor.

    It is a ``place`` in a segment's weights, a ``state`` of ``view``, or the tensor ``values``.

    ``parts``: each stored chunk that intersects a box of the elements, with that box and its slice of the elements.
    """

    key: str
    elements: FlatRange
    parts: tuple[tuple[Chunk, Box, slice], ...]
    place: slice = field(default_factory=lambda: slice(0, 0))
    view: View | None = None
    state: str = ""
    values: Tensor | None = None

    def fill(self, flat: Tensor, tensors: Iterator[Tensor]) -> None:
        """Copy the next tensors, one for each of ``parts``, into the elements."""
        for chunk, box, place in self.parts:
            assert chunk.box is not None
            if chunk.box == box and self.elements.is_row_major:
                flat[place].copy_(next(tensors).reshape(-1))
                continue
            overlap = box.meet(chunk.box)
            assert overlap is not None
            target = self.elements.shaped(flat[place], box)[overlap.within(box).slices]
            target.copy_(next(tensors)[overlap.within(chunk.box).slices])


def _weights_storage(segment: Segment) -> StoredState:
    """Return the storage of the master weights, or, if there are none, of the parameters."""
    return segment.master.state if segment.master is not None else segment.stored


class Loading:
    """The process of loading one checkpoint into an engine's states."""

    def __init__(self, content: Content, training: TrainingState, stored: Stored, options: LoadOptions) -> None:
        self._runtime = content.runtime
        self._updater = content.updater
        self._training = training
        self._stored = stored
        self._options = options
        self._members = [member for _, member in self._runtime.members()]
        self._buffers = list(persistent_buffers(self._runtime.model))
        self._modules = list(extra_states(self._runtime.model))
        known = [fqn for info in find_all_parameters(self._runtime.model) for fqn in info.fqns]
        known += [name for name, _ in self._buffers] + [name for name, _ in self._modules]
        self._names = Names(stored, known, options.prefix)
        self._missing = list[str]()
        self._differing = dict[int, list[str]]()  # stored groups with other parameters, by number
        self._state_names = frozenset[str]() if options.only_model else state_names(self._updater.optimizer)
        self._own_buffers = training.own_buffers(stored)
        self._content = content
        self._averages = frozenset(content.averages)
        self._states = None if options.only_model else StoredStates(stored, self._names, self._updater)

    # ----------------------------------------------- before anything is modified

    def check(self) -> None:
        """Check that the checkpoint fits the engine's model and optimizer.

        Raises:
            PartitaError: it does not.
        """
        wrong = self._compare()
        started = int(self._stored.manifest.get("step", 0)) > 0
        if not self._options.only_model and started and not self._names.has_states and self._keeps_states():
            self._missing.append(STATE + "*")
        if wrong or (self._options.strict and (self._missing or self._names.unexpected)):
            problems = [f"shapes differ: {some_of(wrong)}"] if wrong else []
            problems += [f"missing in the checkpoint: {some_of(self._missing)}"] if self._missing else []
            problems += [f"not in the model: {some_of(self._names.unexpected)}"] if self._names.unexpected else []
            hint = "" if wrong else "; strict=False loads the matching entries and reports the rest"
            raise PartitaError(
                f"checkpoint: '{self._stored.folder}' does not match the model: {'; '.join(problems)}{hint}"
            )
        if not self._options.only_model:
            self._check_states()
        if not self._options.only_model and self._stored.manifest:
            self._differing = differing_groups(self._stored, self._updater.views)
            if self._options.strict:
                check_groups(self._stored, self._differing, len(self._updater.optimizer.param_groups))

    def _check_states(self) -> None:
        trained = [member for member in self._members if member.segment.trains]
        saved = {state for member in trained for state in self._names.states(member.info.fqns)} - {"step"}
        expected = self._state_names - {"step"}
        if not saved or not expected or saved & expected:
            return
        if self._options.strict:
            raise PartitaError(
                f"checkpoint: '{self._stored.folder}' holds the states of another optimizer ({some_of(sorted(saved))}"
                f"): expected those of {type(self._updater.optimizer).__name__} ({some_of(sorted(expected))}); "
                "only_model=True loads only the weights, strict=False everything except these states"
            )
        assert self._states is not None
        self._states.are_loaded = False
        self._missing.append(STATE + "*")

    def _compare(self) -> list[str]:
        """Record the names of the model that the checkpoint lacks; return a message for each shape that differs."""
        wrong = list[str]()
        entries = [(member.info.fqns, member.span.place.shape) for member in self._members]
        entries += [([name], tuple(buffer.shape)) for name, buffer in self._buffers]
        for names, expected in entries:
            key = self._names.model(names)
            if key is None:
                self._missing.append(MODEL + names[0])
            elif (shape := self._shape_of(key)) != expected:
                wrong.append(f"'{names[0]}' is {expected} in the model, {shape} in the checkpoint")
        self._missing += [MODEL + name for name, _ in self._modules if self._names.model([name]) is None]
        return wrong

    def _shape_of(self, key: str) -> tuple[int, ...]:
        """Return the shape of a stored parameter, or of the buffer that this rank loads."""
        own = self._own_buffers.get(key.removeprefix(MODEL))
        return self._stored.tensors[key].shape if own is None else tuple(own.shape)

    def _keeps_states(self) -> bool:
        """Return True if the optimizer keeps states of trainable parameters (SGD without momentum does not)."""
        keeps = moments_of(self._updater.optimizer).most > 0 or bool(self._state_names - {"step"})
        return keeps and any(member.segment.trains for member in self._members)

    def plan(self) -> list[tuple[Segment, list[_Target]]]:
        """Return the targets of each segment, in the order in which they are read."""
        units = self._runtime.units
        return [(segment, list(self._targets(unit, segment))) for unit in units for segment in unit.segments]

    def _targets(self, unit: Unit, segment: Segment) -> Iterator[_Target]:
        """Yield the targets for this rank's shard of a segment and of its states."""
        members = {member.fqn: member for member in unit.members if member.segment is segment}
        for span in self._spans(segment):
            member, place = members[span.fqn], slice(span.offset, span.offset + span.num_elements)
            if (key := self._names.model(member.info.fqns)) is not None:
                yield self._target(key, member.elements(span.start, span.stop), place=place)
            view = self._updater.views.of(member.param)
            if view is not None and view.num_elements and not view.is_full_at_owner:
                yield from self._targets_of_states(view)
        for view in self._updater.views.of_segment(segment):
            if view.is_full_at_owner and view.in_groups is not None:
                yield from self._targets_of_states(view)
        content = self._content
        self._prepare_averages(segment, members.values())
        additional = content.additional_states(segment) if segment.is_first_copy else content.listener_states(segment)
        for span, (prefix, kept) in product(segment.layout.part(segment.shard_index), additional.items()):
            if (key := self._key_of(prefix, members[span.fqn].info.fqns)) is not None:
                values = kept[span.offset : span.offset + span.num_elements]
                yield self._target(key, members[span.fqn].elements(span.start, span.stop), values=values)

    def _prepare_averages(self, segment: Segment, members: Iterable[Member]) -> None:
        """Create the averages that the checkpoint has of a segment that does not train yet."""
        names = [name for member in members for name in member.info.fqns]
        for listener in self._updater.listeners if not self._options.only_model else ():
            if listener.average and any(listener.average + name in self._stored.tensors for name in names):
                listener.prepare(segment)

    def _targets_of_states(self, view: View) -> Iterator[_Target]:
        for state, key, elements in self._states.targets(view) if self._states is not None else ():
            yield self._target(key, elements, view=view, state=state)

    def _key_of(self, prefix: str, names: Sequence[str]) -> str | None:
        """Return the key of an additional state of a parameter.

        An average that is not stored starts from the weights.
        """
        found = None
        if not self._options.only_model:
            found = next((prefix + name for name in names if prefix + name in self._stored.tensors), None)
        return self._names.model(names) if found is None and prefix in self._averages else found

    def _target(self, key: str, elements: FlatRange, **where: Any) -> _Target:
        parts = (
            (chunk, box, place)
            for box, place in elements.boxes()
            for chunk in self._stored.tensors[key].chunks
            if chunk.box is not None and box.meet(chunk.box) is not None
        )
        return _Target(key, elements, tuple(parts), **where)

    def _spans(self, segment: Segment) -> tuple[Span, ...]:
        """Return the spans of a segment that this rank stores."""
        return segment.stored_spans if segment.master is None else segment.master_spans

    # -------------------------------------------------------------------- reading

    def fill_segments(self, plan: Sequence[tuple[Segment, Sequence[_Target]]]) -> Exception | None:
        """Fill the segments; return this rank's error, if any.

        It is not raised, because the other ranks need this rank for every segment.
        """
        error: Exception | None = None
        chunks = [chunk for _, targets in plan for target in targets for chunk, _, _ in target.parts]
        with self._stored.read(chunks) as tensors:
            for segment, targets in plan:
                try:
                    if error is None and self._states is not None:
                        self._states.remove(segment)
                    param = self._fill(segment, targets, tensors) if error is None else None
                except Exception as raised:
                    error, param = raised, None
                self._deliver(segment, param)
        return error

    def _fill(self, segment: Segment, targets: Sequence[_Target], tensors: Iterator[Tensor]) -> Tensor | None:
        """Load a segment's weights and optimizer states into this rank's storage.

        Return the compute parameters if master weights are split (their low bits are stored separately); else None.
        """
        lease = _weights_storage(segment).lease()
        stored = weights = lease.wait()
        splits = segment.master is not None and segment.master.splits
        if segment.master is not None and splits:  # values that are not stored stay unchanged
            params = segment.stored.lease()
            weights = segment.master.joined(segment.slice_for_master(params.wait()), stored)
            params.end(changed=False)
        states = dict[View, dict[str, Any]]()
        for target in targets:
            if target.values is not None:
                target.fill(target.values, tensors)
            elif target.view is None:
                target.fill(weights[target.place], tensors)
            else:
                assert self._states is not None
                state = self._states.allocate(target.view, target.state, target.key, target.elements)
                target.fill(state.view(-1), tensors)
                states.setdefault(target.view, {})[target.state] = state
        param = None
        if splits:
            param, low = split(weights)
            stored.copy_(low)
        lease.end(changed=True)
        if self._states is not None:
            self._states.set(segment, states)
        return param

    def _deliver(self, segment: Segment, param: Tensor | None) -> None:
        """Copy the loaded weights to the stored parameters.

        This is a collective if the stored parameters are unsharded and the master weights are sharded.
        """
        if segment.master is None:
            return
        publisher, master = self._runtime.publisher, segment.plan.master
        if segment.master.splits:
            device = self._runtime.device if master.tier is Tier.DEVICE else torch.device("cpu")
            tier = Tier.DEVICE if master.tier is Tier.DEVICE else Tier.HOST
            if param is None:  # this rank could not read
                lease = segment.stored.lease()
                param = segment.slice_for_master(lease.wait()).clone()
                lease.end(changed=False)
            found = replace(master, encoding=segment.layout.encoding, tier=tier)
            if steps(found, segment.plan.param_stored, segment.mesh):
                publisher.deliver(segment, param.to(device), found)
            else:
                segment.stored.store(param)
            return
        lease = segment.master.lease()
        publisher.deliver(segment, lease.wait(), master, exact=True)
        lease.end(changed=False)

    def _warn_about_averages(self) -> None:
        """Warn of averages of the weights that only one of the two runs has."""
        stored = set(self._stored.manifest.get(AVERAGES, ()))
        for name in sorted(stored ^ self._averages) if not self._runtime.collectives.mesh.rank else ():
            kept = name.rstrip(".")
            warnings.warn(
                f"engine.load: '{self._stored.folder}' "
                + (
                    f"has the average '{kept}' of the weights, which is not loaded: call engine.ema(decay, "
                    f"name='{kept}') before engine.load"
                    if name in stored
                    else f"has no average '{kept}' of the weights: it starts from the loaded weights"
                ),
                stacklevel=2,
            )

    def _warn_about_residuals(self) -> None:
        """Warn if only one of the two runs has error-feedback residuals, or DiLoCo's momentum."""
        segments = [segment for unit in self._runtime.units for segment in unit.segments]
        of_listeners = {prefix for segment in segments for prefix in self._content.listener_states(segment)}
        has_residuals = bool(self._runtime.reducer.sync_states)
        for prefix, (what, key, is_here) in {
            ERROR_FEEDBACK: ("error-feedback residuals of gradients", "gradients", has_residuals),
            DILOCO_MOMENTUM: ("momentum of the outer optimizer (DiLoCo)", "every", DILOCO_MOMENTUM in of_listeners),
        }.items():
            is_there = any(stored.startswith(prefix) for stored in self._stored.tensors)
            if is_there == is_here or self._runtime.collectives.mesh.rank:
                continue
            dropped = f"has {what}, which this run does not use: they are not loaded"
            missing = f"has no {what}: they start at zero"
            difference = dropped if is_there else missing
            warnings.warn(f"engine.load: '{self._stored.folder}' {difference} (communication.{key})", stacklevel=2)

    def fill_others(self) -> Restored:
        """Restore everything except the segments; return the result. Every rank reads the buffers in full."""
        for name, buffer in self._buffers:
            if (key := self._names.model([name])) is not None:
                own = self._own_buffers.get(key.removeprefix(MODEL))
                buffer.copy_(self._stored.value(key) if own is None else own)
        for name, module in self._modules:
            if (key := self._names.model([name])) is not None:
                module.set_extra_state(self._stored.value(key))
        changed, unexpected = list[Change](), list(self._names.unexpected)
        if not self._options.only_model and self._stored.manifest:
            lacking, changed = self._training.restore(self._stored, self._differing)
            self._missing += lacking
            unexpected += lacking_groups(self._stored, len(self._updater.optimizer.param_groups))
            self._warn_about_residuals()
            self._warn_about_averages()
        step = int(self._stored.manifest.get("step", self._updater.steps))
        return Restored(
            self._stored.folder,
            step,
            self._options.only_model,
            tuple(self._missing),
            tuple(unexpected),
            only_states=not self._stored.manifest,
            changes=tuple(changed),
        )
