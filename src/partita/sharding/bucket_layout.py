"""The layout of a bucket: the place of each element of the gradients that share it. It never changes."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from torch import Tensor

from partita.plan.planned_bucket import PlannedBucket
from partita.sharding.unit import Member, Segment


@dataclass(frozen=True)
class Piece:
    """Elements ``[start, stop)`` of a parameter's gradient at column ``column`` of row ``row`` of a bucket."""

    row: int
    column: int
    start: int
    stop: int

    def of(self, row: Tensor) -> Tensor:
        """The piece's elements of its row ``[num_columns]``; a view."""
        return row[self.column : self.column + self.stop - self.start]


class BucketLayout:
    """``[num_rows, num_columns]``: a row for each rank that will own its sum, with its part of each segment.

    Attributes: ``planned``: the bucket on paper; ``row``: this rank's; ``pieces`` of each member, by its id; ``gaps``:
    (row, first column, end) of what is padding; ``is_saved`` and ``is_measured``: of the ranks that have the same row,
    this one saves it, and counts it in the norm.
    """

    def __init__(self, segments: Sequence[Segment], members: Sequence[Member]) -> None:
        self.segments = segments
        self.members = members
        self.planned = PlannedBucket(tuple(segment.planned for segment in segments))
        first = segments[0]  # segments of a bucket are cut alike
        self.row = first.part_index
        self.is_saved = first.is_first_copy
        self.is_measured = first.is_first_of_replica
        self.num_rows = self.planned.num_parts
        self.num_columns = 0
        first_column = dict[int, int]()
        for segment in segments:
            first_column[id(segment)] = self.num_columns
            self.num_columns += segment.layout.part_elements
        self.num_elements = self.num_rows * self.num_columns
        self.pieces = {id(member): _pieces(member, first_column[id(member.segment)]) for member in members}
        self.gaps = self._gaps()

    def pieces_of_unused(self, used: AbstractSet[int]) -> list[tuple[Piece, ...]]:
        """Return the pieces of each member that is not ``used`` (by id)."""
        return [pieces for member, pieces in self.pieces.items() if member not in used]

    def clear_gaps(self, whole: Tensor, only: int | None = None) -> None:
        """Padding of ``[num_rows, num_columns]`` becomes zeros, which add nothing to norms. ``only``: ``whole`` is that
        row.
        """
        for row, begin, end in self.gaps:
            if only in (None, row):
                (whole[row] if only is None else whole)[begin:end].zero_()

    def _gaps(self) -> list[tuple[int, int, int]]:
        covered: list[list[tuple[int, int]]] = [[] for _ in range(self.num_rows)]
        for pieces in self.pieces.values():
            for piece in pieces:
                covered[piece.row].append((piece.column, piece.column + piece.stop - piece.start))
        found = []
        for row, ranges in enumerate(covered):
            at = 0
            for begin, end in [*sorted(ranges), (self.num_columns, self.num_columns)]:
                if begin > at:
                    found.append((row, at, begin))
                at = max(at, end)
        return found


def _pieces(member: Member, first_column: int) -> tuple[Piece, ...]:
    layout = member.segment.layout
    begins = [row * layout.part_elements for row in range(layout.num_parts)]
    spans = [member.span.within(begin, begin + layout.part_elements) for begin in begins]
    return tuple(Piece(row, first_column + s.offset, s.start, s.stop) for row, s in enumerate(spans) if s is not None)
