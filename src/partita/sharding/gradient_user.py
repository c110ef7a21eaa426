"""The updater as the reducer sees it."""

from typing import Protocol

from partita.memory.streams import Event
from partita.sharding.buckets import Bucket
from partita.sharding.unit import Segment


class GradientUser(Protocol):
    """``steps``: so far; ``loss_scale``: what losses are multiplied by."""

    steps: int

    @property
    def loss_scale(self) -> float: ...

    def begin(self) -> None:
        """A backward is about to bring its first gradient."""

    def use(self, bucket: Bucket) -> Event:
        """The reduction of gradients that rest nowhere is queued. The event passes when the sums are used up."""

    def unfreeze(self, segment: Segment) -> None:
        """A segment begins to train."""
