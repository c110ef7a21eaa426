"""Which query heads each tensor rank computes, and which key and value heads these read."""

from dataclasses import dataclass

from partita.parallel.tensor.linear import Ranges
from partita.parallel.tensor.splitter import adjacent
from partita.plan.place import even


@dataclass(frozen=True)
class Heads:
    """Attention of ``queries`` heads over ``keys`` key and value heads (``queries / keys`` in a row share one), on
    ``size`` ranks, which have a head more or less where they do not divide.
    """

    queries: int
    keys: int
    size: int

    def queries_of(self, rank: int) -> Ranges:
        return (even(self.queries, self.size)[rank],)

    def keys_of(self, rank: int) -> tuple[Ranges, int]:
        """The key heads of a rank's queries, in their order, and how many of its queries share each. Where these are
        not as many for each, every query has its own.
        """
        ((start, stop),) = self.queries_of(rank)
        used = [head * self.keys // self.queries for head in range(start, stop)]
        each = sorted(set(used))
        counts = {used.count(key) for key in each}
        if len(counts) == 1:
            return adjacent(each), counts.pop()
        return adjacent(used), 1
