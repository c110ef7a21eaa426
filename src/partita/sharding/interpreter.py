"""The interpreter of :func:`~partita.table.steps.steps`, which moves parameters, gradients and updates."""

import zlib
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from partita.comm.collectives import Collectives
from partita.comm.group import Group
from partita.comm.transport import Work
from partita.memory.accelerator import is_host
from partita.memory.step_events import span
from partita.memory.tiers import Lease, StoredState
from partita.table.formats import Format
from partita.table.scratch import scratch_bytes
from partita.table.steps import AllGather, Copy, Encode, Read, ReduceScatter, Slice, Step, Write, in_phases


@dataclass(frozen=True)
class FormatCall:
    """One use of a :class:`RunnableFormat`.

    Attributes:
        scratch: memory of the format's ``gather_scratch_bytes`` or ``sum_scratch_bytes``.
        seed: of random numbers; the same on all ranks.
        tag: identifies the gather; ranks with different tags wait for each other.
    """

    scratch: Tensor
    seed: int
    purpose: str
    tag: int


class RunnableFormat(Format):
    """A communication format with collectives of its own."""

    @abstractmethod
    def begin_gather(self, group: Group, source: Tensor, target: Tensor, call: FormatCall) -> Work:
        """Start an all-gather of every rank's ``source`` ``[n]`` into ``target`` ``[size * n]``."""

    @abstractmethod
    def reduce_scatter(
        self, groups: Sequence[Group], source: Tensor, target: Tensor, call: FormatCall, *, accumulate: bool
    ) -> None:
        """Write this rank's shard of the sum over all ``groups``, one after the other, into ``target``, or add it."""


class Running:
    """Operations under way. :meth:`finish` waits for them and ends the leases that they needed."""

    def __init__(self) -> None:
        self._works = list[Work]()
        self._source: Lease | None = None
        self._target: Lease | None = None

    def lease(self, source: StoredState) -> Tensor:
        """Lease a stored state until :meth:`finish`."""
        self._source = source.lease()
        return self._source.wait()

    def lease_for_writing(self, target: StoredState) -> Tensor:
        """Lease the memory of a stored state, which is overwritten, until :meth:`finish`."""
        self._target = target.lease(read=False)
        return self._target.wait()

    def add(self, work: Work) -> None:
        """Add an operation for :meth:`finish` to wait for."""
        self._works.append(work)

    def wait(self) -> None:
        """Wait for all operations so far."""
        for work in self._works:
            work.wait()
        self._works.clear()

    def finish(self) -> None:
        """Wait for all operations, and end the leases."""
        self.wait()
        if self._source is not None:
            self._source.end(changed=False)
        if self._target is not None:
            self._target.end(changed=True)


class Interpreter:
    """Runs operations between residences on flat tensors in memory or on stored states.

    Args:
        seed: of random numbers, for formats with stochastic rounding.
    """

    def __init__(self, collectives: Collectives, seed: int = 0) -> None:
        self._collectives = collectives
        self._groups = dict[tuple[str, ...], Group]()  # by the axes that operations name
        self._seed = seed
        self.device = collectives.mesh.device

    def seeded(self, *numbers: int) -> "Interpreter":
        """Return the same interpreter with its own seed, derived from ``numbers``."""
        other = Interpreter(self._collectives, seed_of(*numbers))
        other._groups = self._groups
        return other

    def run(
        self,
        ops: Sequence[Step],
        source: Tensor | StoredState,
        target: Tensor | StoredState,
        *,
        purpose: str = "parameters",
        accumulate: bool = False,
        scratch: Tensor | None = None,
    ) -> None:
        """Move ``source`` to ``target``; see :meth:`begin`."""
        self.begin(ops, source, target, purpose=purpose, accumulate=accumulate, scratch=scratch).finish()

    def begin(
        self,
        ops: Sequence[Step],
        source: Tensor | StoredState,
        target: Tensor | StoredState,
        *,
        purpose: str = "parameters",
        tag: int = 0,
        accumulate: bool = False,
        scratch: Tensor | None = None,
    ) -> Running:
        """Start to move ``source`` to ``target``. Only gathers are under way on return.

        If several sums follow each other, all except the last are written into ``source``.

        Args:
            source: a tensor, or a stored state, which is leased meanwhile.
            target: a tensor, or a stored state, which is overwritten.
            tag: identifies the gather; ranks with different tags wait for each other.
            accumulate: add the result to the target.
            scratch: memory of :meth:`scratch_bytes`, if ``ops`` reduce, or gather in another format.

        Raises:
            NotImplementedError: an operation is unknown.
        """
        running, ops = Running(), in_phases(ops)
        if isinstance(source, StoredState):
            is_copied = all(isinstance(op, Read | Copy) for op in ops)
            if isinstance(target, Tensor) and is_copied and (reading := source.read_into(target)) is not None:
                running.add(reading)
                return running
            source = running.lease(source)
        is_stored = isinstance(target, StoredState)
        if isinstance(target, StoredState):
            target = running.lease_for_writing(target)
        if target.device != self.device and any(isinstance(op, AllGather) for op in ops):
            full = torch.empty_like(target, device=self.device)
            self.run(ops, source, full, purpose=purpose, scratch=scratch)
            self._copy(full, target, blocks=not is_stored)
            return running
        outputs = self._outputs(ops, target)
        for number, op in enumerate(ops):
            match op:
                case AllGather(axes, form):
                    running.wait()  # the previous gather is the source of this one
                    group, output = self.group(axes), outputs[number]
                    if (source.dtype, source.device) != (output.dtype, output.device):
                        source = _shard(output, group).copy_(source, non_blocking=True)
                    if isinstance(form, RunnableFormat):
                        assert scratch is not None
                        call = FormatCall(scratch, self._seed, purpose, tag)
                        running.add(form.begin_gather(group, source, output, call))
                    else:
                        running.add(group.all_gather(output, source, purpose, tag))
                    source = output
                case ReduceScatter():
                    assert scratch is not None
                    seed = seed_of(self._seed, number) if number else self._seed
                    call = FormatCall(scratch, seed, purpose, tag)
                    source = self._sum(op, source, target, call, accumulate=accumulate)
                case Slice(axes):
                    source = _shard(source, self.group(axes))
                case Encode() | Copy():
                    pass  # the copy into the target, or into this rank's shard of an all-gather's output, does both
                case Read() | Write():
                    pass  # leasing the stored state does it
                case _:
                    raise NotImplementedError(f"unknown operation {op} in {list(ops)}")
        if source.data_ptr() != target.data_ptr():
            if accumulate:
                target.add_(source.to(target.device))
            else:
                self._copy(source, target, blocks=not is_stored)
        return running

    def _sum(self, op: ReduceScatter, source: Tensor, target: Tensor, call: FormatCall, *, accumulate: bool) -> Tensor:
        """Return this rank's shard of the sum, which is in ``target``, or in ``source`` if another sum follows."""
        group = self.group(op.axes)
        shard = _shard(target, group) if target.numel() == source.numel() else target
        if shard.numel() * group.size < source.numel():
            shard, accumulate = _shard(source, group).to(target.dtype), False
        if isinstance(op.format, RunnableFormat):
            groups = op.format.groups_of_sum(op.axes, self._collectives.mesh.shape)
            op.format.reduce_scatter(list(map(self.group, groups)), source, shard, call, accumulate=accumulate)
        else:
            received = call.scratch[: group.received_elements(source.numel(), source.itemsize)]
            group.reduce_scatter(shard, source, received, accumulate=accumulate)
        return shard

    def _outputs(self, ops: Sequence[Step], target: Tensor) -> dict[int, Tensor]:
        """Return each gather's output by its number: the target, or this rank's shard of the next gather's output."""
        outputs, output, following = dict[int, Tensor](), target, None
        for number, op in reversed(list(enumerate(ops))):
            if isinstance(op, AllGather):
                output = target if following is None else _shard(output, self.group(following.axes))
                outputs[number], following = output, op
            elif isinstance(op, ReduceScatter):
                following = None
        return outputs

    def group(self, axes: tuple[str, ...]) -> Group:
        """Return the group of the ranks along these axes."""
        if axes not in self._groups:
            self._groups[axes] = self._collectives.group(axes)
        return self._groups[axes]

    def _copy(self, source: Tensor, target: Tensor, *, blocks: bool) -> None:
        """Copy. ``blocks``: the host may use the target at once; otherwise its next lease waits for the copy."""
        if source.device == target.device:
            target.copy_(source)
        else:
            with span("copy", f"to {target.device.type}"):
                target.copy_(source, non_blocking=target.device == self.device or not blocks)

    def scratch_bytes(self, ops: Sequence[Step], num_elements: int, itemsize: int) -> int:
        """Return the scratch memory that ``ops`` need when they run one after the other."""
        shape, in_pieces = self._collectives.mesh.shape, is_host(self.device)
        return scratch_bytes(ops, num_elements, itemsize, shape, in_pieces=in_pieces)


def seed_of(*numbers: int) -> int:
    """Return a seed derived from the numbers, the same in every run."""
    return zlib.crc32(repr(numbers).encode())


def _shard(full: Tensor, group: Group) -> Tensor:
    """Return this rank's shard of a tensor that the group shards."""
    return full.view(group.size, -1)[group.index]
