"""Distribution of query heads over the tensor ranks, with the key and value heads that they read."""

from dataclasses import dataclass

from partita.parallel.tensor.linear import Ranges
from partita.parallel.tensor.splitter import adjacent
from partita.table.place import even


@dataclass(frozen=True)
class Heads:
    """The heads of an attention on ``size`` ranks.

    Attributes:
        queries: the number of query heads. If they do not divide evenly, some ranks have one more.
        keys: the number of key and value heads; ``queries / keys`` query heads in a row share one.
        size: the number of ranks.
    """

    queries: int
    keys: int
    size: int

    def queries_of(self, rank: int) -> Ranges:
        return (even(self.queries, self.size)[rank],)

    def keys_of(self, rank: int) -> tuple[Ranges, int]:
        """Return the key heads that a rank's query heads read, in order, and the number of query heads that share each.

        If this number differs between its key heads, the key heads are repeated, one for each query head.
        """
        ((start, stop),) = self.queries_of(rank)
        used = [head * self.keys // self.queries for head in range(start, stop)]
        each = sorted(set(used))
        counts = {used.count(key) for key in each}
        if len(counts) == 1:
            return adjacent(each), counts.pop()
        return adjacent(used), 1
