"""The gradients of a bucket that have arrived: in this reduce pass, since the last reduction, since the last update."""

from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from partita.sharding.unit import Member


class Arrivals:
    """By the members' ids.

    Attributes: ``used``: those that brought one since the last update; ``collected``: whose gradients lie in the
    buffer; ``fresh``: that brought one in this wave.
    """

    def __init__(self, members: Iterable[Member]) -> None:
        self.used = set[int]()
        self.collected = set[int]()
        self.fresh = set[int]()
        self._previous = set[int]()  # in the last wave
        self._expected: AbstractSet[int] = {id(member) for member in members}  # learned from the last two waves

    @property
    def is_complete(self) -> bool:
        """True if every expected gradient has arrived in this reduce pass."""
        return self._expected <= self.fresh

    def has_collected(self, member: Member) -> bool:
        """Return whether the buffer has a gradient of the member."""
        return id(member) in self.collected

    def note(self, member: Member, *, in_wave: bool) -> None:
        """A gradient has come; ``in_wave``: to be reduced with this backward's."""
        self.used.add(id(member))
        if in_wave:
            self.fresh.add(id(member))

    def collect(self, member: Member) -> None:
        """A gradient was moved into the buffer."""
        self.collected.add(id(member))
        self.used.add(id(member))

    def launched(self, *, learns: bool) -> None:
        """Note that the collected gradients are being reduced. ``learns``: expect the same in the next passes."""
        if learns:
            self._expected = self.fresh | self._previous or self._expected
        self._previous = set(self.fresh)
        self.collected.clear()

    def end_wave(self) -> None:
        """Begin another reduce pass."""
        self.fresh.clear()

    def clear(self) -> None:
        """All gradients are dropped, or used up."""
        self.collected.clear()
        self.fresh.clear()
        self.used.clear()
