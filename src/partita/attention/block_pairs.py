"""The pairs of a block of queries and a block of keys that a pattern selects, computed from its ranges of keys."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from partita.attention.layout import Layout, Range
from partita.attention.segments import Segments, Sizes


@dataclass(frozen=True, eq=False)
class MaskFunction:
    """The mask of a batch, as a function of the indices of a query and a key.

    Fields are [samples, queries padded to full blocks]. ``single`` is flat, with a flag for each pair of blocks of each
    segment; a query's flags begin at ``table``, with ``width`` flags per row. If only some blocks of keys are present,
    ``origin`` [samples, blocks] has their original indices (-1: none).
    """

    layout: Layout
    ranges: list[Range]
    position: Tensor
    k_start: Tensor
    k_stop: Tensor
    table: Tensor
    width: Tensor
    single: Tensor
    seen: Tensor | None  # [samples, keys padded to full blocks]
    origin: Tensor | None = None

    def __call__(self, sample: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Return a bool tensor, True where a query sees a key. The three arguments are broadcast."""
        if self.origin is not None:
            block = self.layout.block
            key = self.origin[sample, key.div(block, rounding_mode="floor")] * block + key % block
        position = self.position[sample, query]
        start = self.k_start[sample, query]
        at = key - start
        found = torch.zeros_like(at, dtype=torch.bool)
        for each in self.ranges:
            found = found | each.contains(position, at)
        if self.single.numel():
            row, col = (x.clamp(min=0).div(self.layout.block, rounding_mode="floor") for x in (position, at))
            width = self.width[sample, query]
            place = self.table[sample, query] + row * width + torch.minimum(col, width - 1)
            found = found | (self.single[place] & (position >= 0))
        found = found & (at >= 0) & (key < self.k_stop[sample, query])
        if self.layout.causal:
            found = found & (at <= position)
        return found if self.seen is None else found & self.seen[sample, key]

    def to(self, device: torch.device) -> "MaskFunction":
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **moved)


@dataclass(frozen=True, eq=False)
class BlockPairs:
    """Pairs of a block of queries and a block of keys, sorted by row and then by column.

    ``row`` is the index of a block of queries in all samples, ``col`` the index of a block of keys within a sample.
    ``whole`` is True if every query of the row sees every key of the block. Others need a mask (``mask_function``).
    """

    sizes: Sizes
    row: Tensor
    col: Tensor
    whole: Tensor
    mask_function: MaskFunction

    @property
    def block(self) -> int:
        return self.mask_function.layout.block

    @property
    def num_rows(self) -> int:
        """The number of blocks of queries in a sample."""
        return -(-self.sizes.queries // self.block)

    @property
    def num_cols(self) -> int:
        """The number of blocks of keys in a sample."""
        return -(-self.sizes.keys // self.block)

    @property
    def read(self) -> tuple[Tensor, Tensor, Tensor]:
        """The sample, index, and index among the sample's read blocks of each block of keys that any query reads."""
        found = (self.row.div(self.num_rows, rounding_mode="floor") * self.num_cols + self.col).unique()
        sample = found.div(self.num_cols, rounding_mode="floor")
        counts = torch.bincount(sample, minlength=self.sizes.samples)
        return (
            sample,
            found % self.num_cols,
            torch.arange(len(found), device="cpu") - (counts.cumsum(0) - counts)[sample],
        )

    def of_read(self) -> "BlockPairs":
        """Return the same pairs over a compact sequence of only those blocks of keys that a sample's queries read."""
        sample, col, number = self.read
        width = int(number.max()) + 1 if len(number) else 1
        origin = torch.full((self.sizes.samples, width), -1, device="cpu")
        origin[sample, number] = col
        numbers = torch.zeros(self.sizes.samples, self.num_cols, dtype=torch.long, device="cpu")
        numbers[sample, col] = number
        moved = numbers[self.row.div(self.num_rows, rounding_mode="floor"), self.col]
        sizes = replace(self.sizes, keys=width * self.block)
        return BlockPairs(sizes, self.row, moved, self.whole, replace(self.mask_function, origin=origin))


@dataclass(frozen=True)
class _Rows:
    """The blocks of queries of each segment; the fields are [rows]. ``first`` and ``last`` are the positions of a
    block's first and last query in the segment.
    """

    segment: Tensor
    number: Tensor
    first: Tensor
    last: Tensor
    is_whole: Tensor  # all queries of the block are in the segment


@dataclass(frozen=True)
class _Reach:
    """Ranges of keys of a segment: those that any query of the row sees (``start`` to ``stop``), and those that all
    queries see (``all_start`` to ``all_stop``).
    """

    row: Tensor
    start: Tensor
    stop: Tensor
    all_start: Tensor
    all_stop: Tensor


def block_pairs(layout: Layout, sizes: Sizes, segments: Segments, seen: Tensor | None = None) -> BlockPairs:
    """Return the block pairs of a batch.

    Args:
        seen: bool [samples, keys]; False for keys that no query sees.
    """
    block = layout.block
    num_rows, num_cols = -(-sizes.queries // block), -(-sizes.keys // block)
    if seen is not None:
        seen = torch.nn.functional.pad(seen, (0, num_cols * block - sizes.keys))
    rows = _rows(segments, sizes, block)
    singles = _Singles(layout, segments)
    pairs, whole = [], []
    for reach in (*(_ranged(each, rows) for each in layout.ranges()), singles.reach(rows)):
        owner, col, is_whole = _blocks(reach, rows, segments, layout)
        pairs.append((segments.sample[rows.segment[owner]] * num_rows + rows.number[owner]) * num_cols + col)
        whole.append(is_whole)
    found, place = torch.cat(pairs).unique(return_inverse=True)
    is_whole = torch.zeros_like(found).scatter_reduce_(0, place, torch.cat(whole).long(), "amax").bool()
    row, col = found.div(num_cols, rounding_mode="floor"), found % num_cols
    if seen is not None:
        counts = seen.view(sizes.samples, num_cols, block).sum(2)[row.div(num_rows, rounding_mode="floor"), col]
        is_whole &= counts == block
        row, col, is_whole = (x[counts > 0] for x in (row, col, is_whole))
    return BlockPairs(sizes, row, col, is_whole, _mask_function(layout, sizes, segments, singles, seen))


def _rows(segments: Segments, sizes: Sizes, block: int) -> _Rows:
    begin = segments.q_start.div(block, rounding_mode="floor")
    segment, number = _enumerate((segments.q_stop + block - 1).div(block, rounding_mode="floor") - begin)
    number = number + begin[segment]
    start, stop = segments.q_start[segment], segments.q_stop[segment]
    first, end = torch.maximum(number * block, start), torch.minimum((number + 1) * block, stop)
    is_whole = (first == number * block) & (end == ((number + 1) * block).clamp(max=sizes.queries))
    shift = segments.offset[segment] - start
    return _Rows(segment, number, first + shift, end - 1 + shift, is_whole)


def _ranged(each: Range, rows: _Rows) -> _Reach:
    row = torch.arange(len(rows.number), device="cpu")
    return _Reach(row, each.start(rows.first), each.stop(rows.last), each.start(rows.last), each.stop(rows.first))


class _Singles:
    """The single blocks of the pattern in each segment."""

    def __init__(self, layout: Layout, segments: Segments) -> None:
        block = self._block = layout.block
        last = segments.offset + segments.q_stop - segments.q_start  # the position after the last query
        self._num_rows = ((last + block - 1).div(block, rounding_mode="floor")).clamp(min=0)
        self.width = (segments.k_stop - segments.k_start + block - 1).div(block, rounding_mode="floor")
        shapes = list(zip(self._num_rows.tolist(), self.width.tolist(), strict=True))
        needed = bool(layout.rows or layout.num_random or layout.pattern == "fixed")
        lists = {shape: layout.blocks(*shape) if needed else [] for shape in set(shapes)}
        cols = [row for shape in shapes for row in lists[shape]]
        self._counts = torch.tensor([len(row) for row in cols], dtype=torch.long, device="cpu")
        self._starts = self._counts.cumsum(0) - self._counts
        self._cols = torch.tensor([col for row in cols for col in row], dtype=torch.long, device="cpu")
        self._first_row = self._num_rows.cumsum(0) - self._num_rows
        self.table = (self._num_rows * self.width).cumsum(0) - self._num_rows * self.width

    def reach(self, rows: _Rows) -> _Reach:
        """Return the keys of the single blocks, by row. A row of blocks overlaps two rows of the pattern if the segment
        does not begin at a block boundary.
        """
        if not self._cols.numel():
            none = torch.zeros(0, dtype=torch.long, device="cpu")
            return _Reach(none, none, none, none, none)
        row = torch.arange(len(rows.number), device="cpu").repeat(2)
        top, bottom = (x.div(self._block, rounding_mode="floor") for x in (rows.first, rows.last))
        grid = torch.cat([top, bottom])
        is_first = torch.arange(len(grid), device="cpu") < len(top)
        kept = (grid >= 0) & (is_first | (top != bottom).repeat(2))
        row, grid = row[kept], grid[kept]
        place = self._first_row[rows.segment[row]] + grid
        owner, number = _enumerate(self._counts[place])
        start = self._cols[self._starts[place][owner] + number] * self._block
        stop = start + self._block
        row = row[owner]
        return _Reach(row, start, stop, start, torch.where((top == bottom)[row], stop, 0))

    def flags(self) -> Tensor:
        """Return a flat bool tensor with a flag for each block of queries and block of keys of each segment."""
        if not self._cols.numel():
            return torch.zeros(0, dtype=torch.bool, device="cpu")
        segment, number = _enumerate(self._num_rows)
        owner, nth = _enumerate(self._counts)
        flags = torch.zeros(int((self._num_rows * self.width).sum()), dtype=torch.bool, device="cpu")
        begin = (self.table[segment] + number * self.width[segment])[owner]
        flags[begin + self._cols[self._starts[owner] + nth]] = True
        return flags


def _blocks(reach: _Reach, rows: _Rows, segments: Segments, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Return the row and the index of each block of keys in a reach, and True if all queries of the row see all
    keys.
    """
    block, row = layout.block, reach.row
    segment = rows.segment[row]
    begin = segments.k_start[segment]
    end = stop = segments.k_stop[segment] - begin
    if layout.causal:
        stop = torch.minimum(stop, rows.last[row] + 1)
        end = torch.minimum(end, rows.first[row] + 1)
    stop, all_stop = torch.minimum(reach.stop, stop), torch.minimum(reach.all_stop, end)
    start = reach.start.clamp(min=0)
    first = (begin + start).div(block, rounding_mode="floor")
    end_block = (begin + stop + block - 1).div(block, rounding_mode="floor")
    owner, number = _enumerate(torch.where(stop > start, end_block - first, 0))
    col = first[owner] + number
    whole_first = (begin + reach.all_start.clamp(min=0) + block - 1).div(block, rounding_mode="floor")
    whole_end = (begin + all_stop).div(block, rounding_mode="floor")
    is_whole = (col >= whole_first[owner]) & (col < whole_end[owner]) & rows.is_whole[row][owner]
    return row[owner], col, is_whole


def _enumerate(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pairs (0, 0), (0, 1), ... (1, 0), ...: ``counts[i]`` pairs that begin with i, as two tensors."""
    owner = torch.arange(len(counts), device="cpu").repeat_interleave(counts)
    return owner, torch.arange(len(owner), device="cpu") - (counts.cumsum(0) - counts)[owner]


def _mask_function(
    layout: Layout, sizes: Sizes, segments: Segments, singles: _Singles, seen: Tensor | None
) -> MaskFunction:
    length = -(-sizes.queries // layout.block) * layout.block
    owner, number = _enumerate(segments.q_stop - segments.q_start)
    place = segments.sample[owner] * length + segments.q_start[owner] + number

    def by_query(values: Tensor) -> Tensor:
        filled = torch.zeros(sizes.samples * length, dtype=torch.long, device="cpu")
        filled[place] = values
        return filled.view(sizes.samples, length)

    position = by_query(segments.offset[owner] + number)
    k_start, k_stop = by_query(segments.k_start[owner]), by_query(segments.k_stop[owner])
    table, width = by_query(singles.table[owner]), by_query(singles.width[owner])
    return MaskFunction(layout, layout.ranges(), position, k_start, k_stop, table, width, singles.flags(), seen)
