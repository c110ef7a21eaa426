"""Optimizer states on disk: taken out of the optimizer after an update, put back for the next.

What an optimizer keeps is its own affair. Every tensor with an element for each of the parameter's is a state to be
kept, whatever its key; counters and the like stay where they are.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from partita.kernels.state import num_blocks
from partita.memory.allocate import trim
from partita.memory.tiers import Kept, Lease, StateMemory
from partita.optim.fused import BLOCK_STATES
from partita.optim.views import View
from partita.plan.residence import Tier
from partita.sharding.unit import Segment

# By key; a segment's states of one key are kept together.
Leases = dict[str, Lease]


class Moments:
    """The states of one segment; ``state`` is the optimizer's."""

    def __init__(self, segment: Segment, views: Sequence[View], state: dict[Tensor, Any], memory: StateMemory) -> None:
        self._views, self._state, self._memory = views, state, memory
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

    def load(self, view: View) -> dict[str, Any]:
        """A copy of what the optimizer keeps of one parameter."""
        found = dict(self._state.get(view.tensor, {}))
        for key, kept in self._kept.items():
            if _is_away(found.get(key)):
                found[key] = self._place(key, view, kept.load()).clone()
        return found

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
