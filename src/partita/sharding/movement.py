"""The one interpreter of :func:`~partita.plan.steps.steps`: parameters, gradients and updates all move through it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from partita.comm.collectives import Collectives
from partita.comm.exchange import Work
from partita.comm.group import Group
from partita.memory.accelerator import is_host
from partita.memory.timeline import span
from partita.plan.scratch import scratch_bytes
from partita.plan.steps import AllGather, Copy, Encode, Read, ReduceScatter, Slice, Step, Write, in_phases
from partita.plan.wire import hops
from partita.sharding.coded import Rounding, begin_gather, reduce_scatter, seed_of


class Movement:
    """Runs operations between residences on flat tensors in memory.

    Args:
        seed: of random numbers, where codes are rounded by such.
        held: what codes have held back so far, of each sum over a group and each gather of sums, one after the other;
            it changes with each.
    """

    def __init__(self, collectives: Collectives, seed: int = 0, held: Sequence[Tensor] = ()) -> None:
        self._collectives = collectives
        self._seed = seed
        self._held = held
        self.device = collectives.mesh.device

    def seeded(self, seed: int) -> "Movement":
        """The same with other random numbers."""
        return Movement(self._collectives, seed, self._held)

    def holding(self, held: Sequence[Tensor]) -> "Movement":
        """The same with what was ``held`` back."""
        return Movement(self._collectives, self._seed, held)

    def begin(
        self,
        ops: Sequence[Step],
        source: Tensor,
        target: Tensor,
        *,
        purpose: str = "parameters",
        tag: int = 0,
        accumulate: bool = False,
        received: Tensor | None = None,
    ) -> list[Work]:
        """Begin to bring ``source`` into ``target``; handles of what is under way. Only gathers are, on return. Of sums
        over one group after the other the first ones are made in ``source``.

        Args:
            tag: ranks that gather under different tags wait for each other.
            accumulate: what arrives is added to what the target has.
            received: scratch memory of :meth:`scratch_bytes`, where ``ops`` reduce or codes are gathered.

        Raises:
            NotImplementedError: an operation that it does not know.
        """
        ops = in_phases(ops)
        if target.device != self.device and any(isinstance(op, AllGather) for op in ops):
            whole = torch.empty_like(target, device=self.device)
            finish_all(self.begin(ops, source, whole, purpose=purpose, tag=tag, received=received))
            target.copy_(whole)
            return []
        handles, held, rooms = list[Work](), list(self._held), self._rooms(ops, target)
        for number, op in enumerate(ops):
            match op:
                case AllGather(axes, wire):
                    finish_all(handles)  # what is gathered further
                    handles.clear()
                    group, whole = self._collectives.group(axes), rooms[number]
                    if (source.dtype, source.device) != (whole.dtype, whole.device):
                        source = _part(whole, group).copy_(source, non_blocking=True)
                    if wire.is_coded:
                        assert received is not None
                        how = Rounding(self._seed, held.pop(0) if wire.feedback else None)
                        begun = begin_gather(group, wire, source, whole, received, how=how, purpose=purpose, tag=tag)
                        handles.append(begun)
                    else:
                        handles.append(group.all_gather(whole, source, purpose, tag))
                    source = whole
                case ReduceScatter():
                    assert received is not None
                    seeded = self.seeded(seed_of(self._seed, number)) if number else self
                    source = seeded._sum(op, source, target, received, held, accumulate=accumulate)
                case Slice(axes):
                    source = _part(source, self._collectives.group(axes))
                case Encode() | Copy():
                    pass  # the copy into the target, or into this rank's part of what is gathered, does both at once
                case Read() | Write():
                    pass  # what rests on disk is lent: whoever lends it reads and writes
                case _:
                    raise NotImplementedError(f"no way to run {op} of {list(ops)}")
        if source.data_ptr() != target.data_ptr():
            if accumulate:
                target.add_(source.to(target.device))
            else:
                self._copy(source, target)
        return handles

    def _sum(
        self,
        op: ReduceScatter,
        source: Tensor,
        target: Tensor,
        received: Tensor,
        held: list[Tensor],
        *,
        accumulate: bool,
    ) -> Tensor:
        """This rank's part of the sum: in ``target``, or, where it is summed further, in ``source``. What is used of
        ``held`` is taken out of it.
        """
        group = self._collectives.group(op.axes)
        part = _part(target, group) if target.numel() == source.numel() else target
        if part.numel() * group.size < source.numel():
            part, accumulate = _part(source, group).to(target.dtype), False
        if op.wire.is_coded:
            groups = [self._collectives.group(axes) for axes in hops(op.axes, self._collectives.mesh.shape)]
            kept = [held.pop(0) for _ in groups] if op.wire.feedback else []
            reduce_scatter(groups, op.wire, source, part, received, seed=self._seed, accumulate=accumulate, held=kept)
        else:
            room = received[: group.received_elements(source.numel(), source.itemsize)]
            group.reduce_scatter(part, source, room, accumulate=accumulate)
        return part

    def _rooms(self, ops: Sequence[Step], target: Tensor) -> dict[int, Tensor]:
        """By its number, where each gather brings its parts: those before another one, into this rank's part of it."""
        rooms, room, following = dict[int, Tensor](), target, None
        for number, op in reversed(list(enumerate(ops))):
            if isinstance(op, AllGather):
                room = target if following is None else _part(room, self._collectives.group(following.axes))
                rooms[number], following = room, op
            elif isinstance(op, ReduceScatter):
                following = None
        return rooms

    def group(self, axes: tuple[str, ...]) -> Group:
        """The ranks along these axes."""
        return self._collectives.group(axes)

    def _copy(self, source: Tensor, target: Tensor) -> None:
        """What the host has afterwards, it may use at once."""
        if source.device == target.device:
            target.copy_(source)
        else:
            with span("copy", f"to {target.device.type}"):
                target.copy_(source, non_blocking=target.device == self.device)

    def scratch_bytes(self, ops: Sequence[Step], num_elements: int, itemsize: int) -> int:
        """Scratch memory that ``ops``, one after the other, need for what is received, and for codes."""
        shape, in_pieces = self._collectives.mesh.shape, is_host(self.device)
        return scratch_bytes(ops, num_elements, itemsize, shape, in_pieces=in_pieces)


def _part(whole: Tensor, group: Group) -> Tensor:
    """This rank's part of what is whole in the group."""
    return whole.view(group.size, -1)[group.index]


def finish_all(handles: Sequence[Work]) -> None:
    """Wait for all of them."""
    for handle in handles:
        handle.wait()
