"""Values that the user writes into parameters in place, outside and inside forward.

``load_state_dict``, a clamp, a copy of averages, a momentum encoder that follows inside forward, weights that forward
normalizes: what is written lasts, as in one process. A write is found by the parameter's version counter. Where master
weights are a state of their own they take the written values, each rank its part; where parameters are sharded, the
shard takes them before the unit's memory is released.

The written elements that a rank owns count, so all ranks have to write the same values. The next step compares
checksums of what they wrote, and fails where these differ.
"""

import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from partita.errors import PartitaError
from partita.kernels.chunks import chunks
from partita.memory import accelerator
from partita.memory.streams import record
from partita.sharding.unit import Member, Segment, Unit, UnitState


class Written:
    """Finds parameters that were written since the engine itself changed them, and stores the written values.

    Sums of what was written are kept until the ranks have compared them (:meth:`agreed`).

    Args:
        units: all units of the model.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._sharded = [unit for unit in units if not unit.rests_whole]
        members = [member for unit in units if unit.rests_whole for member in unit.members]
        self._whole = [member for member in members if _has_owner(member.segment)]
        self._versions = dict[int, int]()  # by the member's id; unknown until the first note()
        self._sums = dict[str, Tensor]()

    def __bool__(self) -> bool:
        """True if there are parameters whose written values are stored elsewhere; the same on all ranks."""
        return bool(self._whole or self._sharded)

    def note(self) -> None:
        """Take the parameters as they are for what the engine made them."""
        members = [*self._whole, *(member for unit in self._sharded for member in unit.members)]
        with torch._C.DisableTorchFunctionSubclass():  # sharded parameters answer through Python
            self._versions = {id(member): member.param._version for member in members}

    def forget(self, members: Iterable[Member]) -> None:
        """Ignore what was written into these parameters."""
        with torch._C.DisableTorchFunctionSubclass():
            self._versions.update({id(m): m.param._version for m in members if id(m) in self._versions})

    def take(self) -> None:
        """Store what was written. No update may be running."""
        if written := self._found(self._whole):
            by_segment = defaultdict[int, list[Member]](list)
            for member in written:
                by_segment[id(member.segment)].append(member)
            for members in by_segment.values():
                segment = members[0].segment
                if segment.master is not None and not segment.master_is_parameter:
                    names = {member.fqn for member in members}
                    segment.master.set(segment.part(segment.full, segment.plan.master), names)
            self.forget(written)
            self._add(written)
        for unit in self._sharded:
            if unit.state is UnitState.WHOLE and not unit.holds:  # blocks of engine.gathered store their own
                self.take_from(unit)

    def take_from(self, unit: Unit) -> None:
        """Store what was written into a gathered unit of sharded parameters; called before its memory is released.

        Raises:
            PartitaError: the written values cannot be stored exactly.
        """
        if not (written := self._found(unit.members)):
            return
        self.forget(written)
        by_segment = defaultdict[int, list[Member]](list)
        for member in written:
            _check_stored(unit, member)
            by_segment[id(member.segment)].append(member)
        for members in by_segment.values():
            _store(members[0].segment, {member.fqn for member in members})
        unit.updated = record(unit.storage.device)
        if unit.has_second:
            _store_second(unit)
        self._add(written)

    def _found(self, members: Iterable[Member]) -> list[Member]:
        versions = self._versions
        with torch._C.DisableTorchFunctionSubclass():
            return [m for m in members if m.param._version != versions.get(id(m), m.param._version)]

    # ------------------------------------------------------- comparison of the ranks

    @property
    def sums(self) -> dict[str, int]:
        """A checksum of each parameter that was written since :meth:`agreed`, by name."""
        if not self._sums:
            return {}
        return dict(zip(self._sums, accelerator.read(torch.stack([*self._sums.values()])).tolist(), strict=True))

    @property
    def digest(self) -> int:
        """One number of all :attr:`sums`; 0 if nothing was written."""
        return zlib.crc32(repr(sorted(self.sums.items())).encode()) if self._sums else 0

    def agreed(self) -> None:
        """Forget the sums: the ranks have compared them."""
        self._sums = {}

    def _add(self, members: Iterable[Member]) -> None:
        for member in members:
            self._sums[member.fqn] = checksum(member)


def checksum(member: Member) -> Tensor:
    """The sum of the bits of a parameter's values on this rank, as whole numbers; a scalar on their device."""
    values: Tensor = member.segment.full[member.span.offset :][: member.span.num_elements]
    bits = values.view({2: torch.int16, 4: torch.int32}.get(values.itemsize, torch.uint8))
    return torch.stack([bits[chunk].sum(dtype=torch.int64) for chunk in chunks(bits)]).sum()


def _has_owner(segment: Segment) -> bool:
    """True if the values of one rank, or of the master weights, replace what the others have after an update."""
    return not segment.master_is_parameter or segment.planned.num_shards(segment.plan.master) > 1


def _check_stored(unit: Unit, member: Member) -> None:
    """Raise where a value written into a gathered parameter cannot be stored as it is."""
    if member.segment.planned.gathers_codes and not unit.is_exact:
        raise PartitaError(
            f"parameter '{member.fqn}' was written in forward, where its values were decoded from codes "
            "(communication.parameters): what is stored would lose digits; write it after engine.step() inside `with "
            "engine.gathered(..., modify=True)`, or set communication.parameters: full"
        )
    if not member.segment.plan.gradients_rest and torch._C._current_graph_task_id() != -1:
        raise PartitaError(
            f"parameter '{member.fqn}' was written while backward ran its module again, and "
            "precision.gradients: in_backward may have updated it meanwhile: do not recompute that module "
            "(activations.checkpoint), or set precision.gradients: fp32"
        )


def _store(segment: Segment, names: set[str]) -> None:
    """Bring this rank's part of the named parameters from a gathered segment to where it is stored."""
    part = segment.part(segment.full, segment.plan.param_rest)
    lease = segment.rest.lend()
    stored = lease.wait()
    if segment.master is not None and not segment.master_is_parameter:
        before = segment.part_of_rest(stored)
        segment.master.set(segment.part(segment.full, segment.plan.master), names, before)
    for span in segment.rest_spans:
        if span.fqn in names:
            place = slice(span.offset, span.offset + span.num_elements)
            stored[place] = part[place]
    lease.end(changed=True)


def _store_second(unit: Unit) -> None:
    """Bring what was written to the secondary shards, from which backward gathers."""
    for segment in unit.segments:
        if segment.second is not None:
            segment.second.store(segment.part(segment.full, segment.plan.param_between))
    unit.second_kept = record(unit.storage.device)
