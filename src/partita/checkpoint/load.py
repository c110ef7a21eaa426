"""Loading: every rank reads what it holds, whatever ranks and tiers the values were saved from.

A rank's stretch of a tensor is compared, in the tensor's own coordinates, with the chunks that are stored; those that
it meets are read whole, checked, and pasted where they belong. Nothing but the chunks under way, and the optimizer
states of one unit where they rest on disk, is held beside the states.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from partita.checkpoint.beside import EXTRA, Beside
from partita.checkpoint.content import DATA, MODEL, STATE, Content, Stretch, blocks_of, stretch_of
from partita.checkpoint.folder import chosen
from partita.checkpoint.names import Names
from partita.checkpoint.stored import Chunk, Stored, narrowed, open_stored
from partita.checkpoint.whole import persistent_buffers
from partita.comm.together import together
from partita.errors import PartitaError
from partita.kernels.quantize import join, split
from partita.memory.allocate import trim
from partita.optim.fused import BLOCK_STATES, adopted
from partita.optim.views import View
from partita.plan.box import Box
from partita.plan.residence import SPLIT, Tier
from partita.plan.span import Span
from partita.plan.steps import steps
from partita.sharding.unit import Member, Segment, Unit

NUM_THREADS, AHEAD = 4, 8
MOST_NAMED = 5


@dataclass(frozen=True)
class Restored:
    """What :meth:`Engine.load` took from ``path``: ``step`` updates had been done.

    ``missing``: what the engine has and the checkpoint has not; ``unexpected``: names of the model that the engine's
    has not. ``extra`` is what was given to :meth:`Engine.save`.
    """

    path: Path
    step: int
    only_model: bool = False
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        what = "the model" if self.only_model else "model, optimizer, scheduler and random states"
        lines = [f"restored {what} of step {self.step} from '{self.path}'"]
        for title, names in (("not in the checkpoint", self.missing), ("not taken", self.unexpected)):
            if names:
                lines.append(f"{title}: {some_of(names)}")
        return "\n".join(lines)


def some_of(names: Iterable[str]) -> str:
    """A few names, and how many more there are."""
    every = list(names)
    more = f" and {len(every) - MOST_NAMED} more" if len(every) > MOST_NAMED else ""
    return ", ".join(every[:MOST_NAMED]) + more


@dataclass(frozen=True)
class _Paste:
    """A chunk whose values go into a box of a stretch, which is at ``place`` of ``flat``."""

    chunk: Chunk
    stretch: Stretch
    flat: Tensor
    box: Box
    place: slice

    def put(self, values: Tensor) -> None:
        assert self.chunk.box is not None
        met = self.box.meet(self.chunk.box)
        assert met is not None
        target = narrowed(self.stretch.shaped(self.flat[self.place], self.box), met.within(self.box))
        target.copy_(narrowed(values, met.within(self.chunk.box)))


class Loader:
    """Fills an engine's states from one checkpoint."""

    def __init__(self, content: Content, beside: Beside, folder: Path) -> None:
        self._content, self._beside, self._folder = content, beside, folder
        self._runtime, self._updater = content.runtime, content.updater
        self._collectives = content.runtime.collectives
        self._missing = list[str]()
        self._stored: Stored
        self._names: Names

    def load(self, *, only_model: bool, strict: bool) -> Restored:
        """Every rank reads its part.

        Raises:
            PartitaError: on all ranks: there is no complete checkpoint, a file of it is damaged, or (with ``strict``)
                it has other names or shapes.
        """
        with together(self._collectives, DATA):
            self._stored = open_stored(chosen(self._folder))
            members = [member for _, member in self._runtime.members()]
            buffers = [name for name, _ in persistent_buffers(self._runtime.model)]
            self._names = Names(self._stored, [*(fqn for m in members for fqn in m.holding.fqns), *buffers])
            self._check(members, buffers, only_model=only_model, strict=strict)
        error: Exception | None = None
        for unit, segment in self._content.segments:
            try:
                values = self._fill(unit, segment, only_model=only_model) if error is None else None
            except Exception as raised:  # the others need this rank for what follows
                error, values = raised, None
            self._deliver(segment, values)
        extra: dict[str, Any] = {}
        with together(self._collectives, DATA):
            if error is not None:
                raise error
            self._fill_buffers()
            if not only_model and self._stored.manifest:
                self._missing += self._beside.restore(self._stored, strict=strict)
            if EXTRA in self._stored.values:
                extra = dict(self._stored.value(EXTRA))
        trim()
        step = int(self._stored.manifest.get("step", self._updater.steps))
        return Restored(self._stored.folder, step, only_model, tuple(self._missing), tuple(self._names.strange), extra)

    def _check(self, members: list[Member], buffers: list[str], *, only_model: bool, strict: bool) -> None:
        """Names and shapes, before anything is touched."""
        wrong = []
        for member in members:
            key = self._names.model(member.holding.fqns)
            if key is None:
                self._missing.append(MODEL + member.fqn)
            elif (shape := self._stored.tensors[key].shape) != tuple(member.shape):
                wrong.append(f"'{member.fqn}' is {tuple(member.shape)} here, {shape} there")
        self._missing += [MODEL + name for name in buffers if self._names.model([name]) is None]
        started = int(self._stored.manifest.get("step", 0)) > 0
        if not only_model and started and not self._names.has_states and any(m.segment.trains for m in members):
            self._missing.append(STATE + "*")
        if wrong or (strict and (self._missing or self._names.strange)):
            said = [f"shapes differ: {some_of(wrong)}"] if wrong else []
            said += [f"missing there: {some_of(self._missing)}"] if self._missing else []
            said += [f"unknown here: {some_of(self._names.strange)}"] if self._names.strange else []
            hint = "" if wrong else "; strict=False takes what there is and reports the rest"
            raise PartitaError(f"checkpoint: '{self._stored.folder}' is of another model: {'; '.join(said)}{hint}")

    # -------------------------------------------------------------------- reading

    def _read(self, pastes: Iterable[_Paste]) -> None:
        """Read chunks ahead, and put each where it belongs."""
        with ThreadPoolExecutor(NUM_THREADS, "partita load") as pool:
            under_way = deque[tuple[_Paste, Future[Tensor]]]()
            for paste in pastes:
                under_way.append((paste, pool.submit(self._stored.tensor, paste.chunk)))
                if len(under_way) >= AHEAD:
                    self._put(under_way)
            while under_way:
                self._put(under_way)

    @staticmethod
    def _put(under_way: deque[tuple[_Paste, Future[Tensor]]]) -> None:
        paste, reading = under_way.popleft()
        paste.put(reading.result())

    def _pastes(self, key: str, stretch: Stretch, flat: Tensor) -> Iterator[_Paste]:
        """What fills ``flat``, the values of a stretch, from a stored tensor."""
        for box, place in stretch.boxes(1):
            for chunk in self._stored.tensors[key].chunks:
                if chunk.box is not None and box.meet(chunk.box) is not None:
                    yield _Paste(chunk, stretch, flat, box, place)

    def _fill(self, unit: Unit, segment: Segment, *, only_model: bool) -> Tensor | None:
        """Bring a segment's weights, and its optimizer states, into what this rank holds of them.

        Returns the parameters of a split master, which rest elsewhere.
        """
        kept = segment.master if segment.master is not None else segment.rest
        lease = kept.lend()
        held = weights = lease.wait()
        splits = segment.master is not None and segment.plan.master.encoding == SPLIT
        if splits:  # what is not stored stays as it is
            rest = segment.rest.lend()
            weights = join(segment.part_of_rest(rest.wait()).to(held.device), held)
            rest.end(changed=False)
        pastes, states = list[_Paste](), dict[View, dict[str, Any]]()
        members = {member.fqn: member for member in unit.members if member.segment is segment}
        for span in self._spans(segment, held):
            member, flat = members[span.fqn], weights[span.offset : span.offset + span.num_elements]
            if (key := self._names.model(member.holding.fqns)) is not None:
                pastes += self._pastes(key, stretch_of(member, span.start, span.stop), flat)
            view = self._updater.views.of(member.param)
            if not only_model and segment.trains and view is not None and view.num_elements:
                states[view], found = self._states_of(view)
                pastes += found
        self._read(pastes)
        param = None
        if splits:
            param, low = split(weights)
            held.copy_(low)
        lease.end(changed=True)
        self._adopt(segment, states)
        return param

    def _spans(self, segment: Segment, held: Tensor) -> tuple[Span, ...]:
        """The spans of what this rank holds."""
        if held.numel() == segment.layout.padded:
            return segment.layout.spans
        return segment.layout.part(self._collectives.mesh.index(DATA))

    def _states_of(self, view: View) -> tuple[dict[str, Any], list[_Paste]]:
        """Room for the stored states of one parameter, and what fills it."""
        member, state, pastes = view.member, dict[str, Any](), list[_Paste]()
        start, stop = view.start, view.start + view.num_elements
        for name, key in self._names.states(member.holding.fqns).items():
            stored = self._stored.tensors.get(key)
            if name in BLOCK_STATES:
                stretch = blocks_of(member, start, stop)
            elif stored is not None and stored.shape == tuple(member.shape) and (stored.shape or name != "step"):
                stretch = stretch_of(member, start, stop)
            else:
                state[name] = self._stored.value(key)
                continue
            assert stored is not None
            dtype = view.tensor.dtype if stored.dtype.is_floating_point and name not in BLOCK_STATES else stored.dtype
            state[name] = torch.empty(stretch.stop - stretch.start, dtype=dtype, device=view.tensor.device)
            pastes += self._pastes(key, stretch, state[name])
        return state, pastes

    def _adopt(self, segment: Segment, states: dict[View, dict[str, Any]]) -> None:
        """Give the optimizer its states, in the encoding that it keeps them in."""
        optimizer = self._updater.optimizer
        for view, state in states.items():
            if not state:
                continue
            known = adopted(optimizer, state)
            optimizer.state[view.tensor] = {
                name: view.member.shaped(value)
                if isinstance(value, Tensor) and value.dim() and name not in BLOCK_STATES and segment.holds_whole_master
                else value
                for name, value in known.items()
            }
        if states and segment.plan.moments.tier is Tier.DISK:
            self._updater.hidden.moments_of(segment).replace()

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
