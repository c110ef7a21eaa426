"""What the user writes into parameters that rest whole, where the values that are updated lie elsewhere.

``load_state_dict``, a clamp, an average that is copied back: where master weights are a state of their own, they take
up what was written, this rank's part of it. That something was written is told by the parameters' version counters
(``param.data`` has others: what is written through it is not seen).
"""

import zlib
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from partita.sharding.unit import Member, Unit


class Written:
    """Tells what was written since the engine itself changed the parameters.

    Attributes: ``names`` of the parameters whose values were taken since :meth:`agreed`, and ``digest``, a number that
    is the same on all ranks if they wrote the same.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        whole = [unit for unit in units if unit.rests_whole]
        self._watched = [m for unit in whole for m in unit.members if not m.segment.master_is_parameter]
        self.note()
        self.agreed()

    def __bool__(self) -> bool:
        """Whether there are such parameters at all; the same on all ranks."""
        return bool(self._watched)

    def note(self) -> None:
        """The parameters are as the engine has made them."""
        self._versions = self._counted()

    def agreed(self) -> None:
        """The ranks have compared what they wrote."""
        self.names, self.digest = list[str](), 0

    def take(self) -> None:
        """Bring what was written into the master weights. No update may be under way."""
        versions = self._counted()
        if versions == self._versions:
            return
        written = defaultdict[int, list[Member]](list)
        for member, now, before in zip(self._watched, versions, self._versions, strict=True):
            if now != before and member.segment.master is not None:
                written[id(member.segment)].append(member)
        for members in written.values():
            segment = members[0].segment
            assert segment.master is not None
            segment.master.set(segment.part(segment.full, segment.plan.master), {member.fqn for member in members})
            for member in members:
                self._add(member)
        self._versions = versions

    def _counted(self) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():  # resting parameters answer through Python
            return [member.param._version for member in self._watched]

    def _add(self, member: Member) -> None:
        values: Tensor = member.segment.full[member.span.offset :][: member.span.num_elements]
        bits = values.view(torch.int16 if values.itemsize == 2 else torch.int32)
        self.names.append(member.fqn)
        self.digest = zlib.crc32(repr((self.digest, member.fqn, int(bits.sum(dtype=torch.int64)))).encode())
