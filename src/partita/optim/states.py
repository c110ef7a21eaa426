"""What an optimizer keeps of each parameter, wherever it rests.

That is its own affair. On the disk tier every tensor with an element for each of the parameter's is kept there,
whatever its key, and is in the optimizer only while it is lent; counters and the like stay where they are.
"""

from collections import Counter
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from partita.kernels.state import num_blocks
from partita.memory.allocate import trim
from partita.memory.tiers import Kept, Lease, StateMemory
from partita.optim.fused import BLOCK_STATES, decoded
from partita.optim.views import View, Views
from partita.plan.residence import Tier
from partita.sharding.unit import Segment

# By key; a segment's states of one key are kept together.
Leases = dict[str, Lease]


class OptimizerStates:
    """The states of all parameters."""

    def __init__(self, optimizer: Optimizer, views: Views, memory: StateMemory) -> None:
        self._optimizer = optimizer
        self._views = views
        self._memory = memory
        self._on_disk: dict[int, DiskStates] = {}
        self._num_counted = -1

    def on_disk(self, segment: Segment) -> "DiskStates | None":
        """The states of a segment's parameters, where they rest on disk."""
        if segment.plan.moments.tier is not Tier.DISK:
            return None
        if id(segment) not in self._on_disk:
            self._on_disk[id(segment)] = DiskStates(
                segment, self._views.of_segment(segment), self._optimizer.state, self._memory
            )
        return self._on_disk[id(segment)]

    def of(self, view: View) -> dict[str, Any]:
        """The states of one parameter, every value as a number of its own."""
        state = dict(self._optimizer.state.get(view.tensor, {}))
        if (disk := self.on_disk(view.member.segment)) is not None:
            state.update(disk.load(view))
        return decoded(state)

    def count(self) -> None:
        """Enter the bytes of those in memory in the ledger, the step counters left out."""
        num_states = sum(len(state) for state in self._optimizer.state.values())
        if num_states == self._num_counted:
            return
        self._num_counted = num_states
        held = Counter[Tier]()
        for view in self._views:
            for key, value in self._optimizer.state.get(view.tensor, {}).items():
                if isinstance(value, Tensor) and key != "step":
                    held[view.member.segment.plan.moments.tier] += value.nbytes
        for tier, num_bytes in held.items():
            if tier is not Tier.DISK:
                self._memory.ledger.set("moments", num_bytes, tier)


class DiskStates:
    """The states of one segment on the disk tier; ``state`` is the optimizer's."""

    def __init__(
        self, segment: Segment, views: list[View], state: dict[Tensor, dict[str, Any]], memory: StateMemory
    ) -> None:
        self._views = views
        self._state = state
        self._memory = memory
        self._num_elements = segment.plan.master.num_elements(segment.layout.padded, segment.mesh)
        self._kept: dict[str, Kept] = {}

    def _room(self, key: str) -> int:
        return num_blocks(self._num_elements) if key in BLOCK_STATES else self._num_elements

    @staticmethod
    def _place(key: str, view: View, values: Tensor) -> Tensor:
        """A parameter's part of a state's values."""
        return view.blocks_over(values) if key in BLOCK_STATES else view.over(values)

    def lend(self) -> Leases:
        """Begin to read the states."""
        return {key: kept.lend() for key, kept in self._kept.items()}

    def load(self, view: View) -> dict[str, Tensor]:
        """A copy of what the disk has of one parameter."""
        state = self._state.get(view.tensor, {})
        away = {key: kept for key, kept in self._kept.items() if _is_away(state.get(key))}
        return {key: self._place(key, view, kept.load()).clone() for key, kept in away.items()}

    def connect(self, leases: Leases) -> None:
        """Let the optimizer find the states."""
        for key, lease in leases.items():
            values = lease.wait()
            for view in self._views:
                if _is_away(self._state.get(view.tensor, {}).get(key)):
                    self._state[view.tensor][key] = self._place(key, view, values)

    def replace(self) -> None:
        """Keep what is in the optimizer now, whatever was kept before."""
        self.put_back({key: kept.lend(read=False) for key, kept in self._kept.items()})

    def put_back(self, leases: Leases, *, changed: bool = True) -> None:
        """Take the states out of the optimizer, new ones too, write them where they have ``changed``, and end the
        leases.
        """
        known = len(leases)
        for view in self._views:
            for key, value in self._state.get(view.tensor, {}).items():
                if isinstance(value, Tensor) and value.dim() > 0 and value.numel() > 0:
                    if key not in leases:
                        self._kept[key] = self._memory.keep("moments", self._room(key), value.dtype, Tier.DISK)
                        leases[key] = self._kept[key].lend(read=False)
                    place = self._place(key, view, leases[key].tensor)
                    if place.data_ptr() != value.data_ptr():
                        place.copy_(value)
                    self._state[view.tensor][key] = value.new_empty(0)
        for lease in leases.values():
            lease.end(changed=changed)
        if len(leases) > known:  # the optimizer has made them
            trim()


def _is_away(state: object) -> bool:
    """Whether the disk has a state's values. (Of a parameter that is one number all states stay where they are.)"""
    return isinstance(state, Tensor) and state.numel() == 0
