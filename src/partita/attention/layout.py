"""The patterns of block-sparse attention: rules for the keys that each query sees.

R. Child et al., "Generating Long Sequences with Sparse Transformers" (2019), section 4 (fixed); I. Beltagy et al.,
"Longformer" (2020), section 3; M. Zaheer et al., "Big Bird" (2020), section 2; the family is that of DeepSpeed's sparse
attention. A pattern is a union of ranges of keys that move with the query, and of single blocks. Both are relative to
the beginning of a document, so packed documents have the same pattern as separate ones.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from partita.errors import ConfigError

PATTERNS = ("dense", "sliding", "fixed", "variable", "bigbird", "longformer", "user")
# The settings that each pattern requires, and the settings that it accepts.
_NEEDS = {
    "sliding": ("window",),
    "fixed": ("window", "global"),
    "variable": ("window",),
    "bigbird": ("window", "global", "random"),
    "longformer": ("window", "global"),
    "user": ("layout",),
}
_TAKES = {**_NEEDS, "variable": ("window", "global", "random")}
_ALL = 2**40  # beyond any position


@dataclass(frozen=True)
class Range:
    """A range of keys that moves with the query: the query at position p sees the keys ``start(p)`` to ``stop(p) - 1``.
    Both functions are monotonically increasing.
    """

    start: Callable[[Tensor], Any]
    stop: Callable[[Tensor], Any]

    def contains(self, query: Tensor, key: Tensor) -> Tensor:
        found: Tensor = (key >= self.start(query)) & (key < self.stop(query))
        return found


@dataclass(frozen=True)
class Layout:
    """A pattern with its settings.

    Args:
        pattern: one of ``PATTERNS``.
        block: the number of positions in a block, which is the unit of computation, of ``num_global``, ``num_random``
            and ``rows``.
        window: in positions, as ``sliding_window`` of transformers. If causal, a query sees ``window`` keys up to its
            own position; otherwise those at a distance of at most ``window``. For ``fixed``, the size of each window;
            for ``variable``, the sizes of the windows, the last one for all remaining windows.
        num_global: the number of first blocks that all queries see (and whose queries see all keys, unless causal). For
            ``fixed``, the number of last blocks of each window that all later windows see (all windows, unless causal).
        num_random: the number of blocks outside the window that each row of blocks also sees, the same in every call.
        causal: no query sees later keys.
        rows: for ``user``, a string of 0 and 1 for each block of queries, with a digit for each block of keys.

    Raises:
        ConfigError: a setting is missing, out of range or not used by the pattern, or a query sees no key.
    """

    pattern: str
    block: int = 64
    window: int | tuple[int, ...] | None = None
    num_global: int = 0
    num_random: int = 0
    causal: bool = True
    rows: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.pattern not in PATTERNS:
            raise ConfigError(f"attention.pattern: expected one of {', '.join(PATTERNS)}; got {self.pattern!r}")
        given = {"window": self.window, "global": self.num_global, "random": self.num_random, "layout": self.rows}
        for name, value in given.items():
            if not value and name in _NEEDS.get(self.pattern, ()):
                raise ConfigError(f"attention.{name}: the pattern '{self.pattern}' needs it; set it to a value above 0")
            if value and name not in _TAKES.get(self.pattern, ()):
                takes = ", ".join(_TAKES.get(self.pattern, ())) or "none of these settings"
                raise ConfigError(
                    f"attention.{name}: the pattern '{self.pattern}' does not use it (it uses {takes}); leave it out, "
                    "or choose another attention.pattern"
                )
        if self.block < 1 or min(self.windows, default=1) < 1:
            raise ConfigError(
                f"attention: expected block and window in positions, at least 1; got {self.block} and {self.window}"
            )
        if len(self.windows) > 1 and self.pattern != "variable":
            raise ConfigError(
                f"attention.window: expected one window for the pattern '{self.pattern}'; got {list(self.windows)}"
            )
        if self.pattern == "fixed":
            self._check_fixed()
        if self.pattern == "user":
            self._check_rows()

    def _check_fixed(self) -> None:
        (window,) = self.windows
        if window % self.block:
            raise ConfigError(
                f"attention.block: {self.block} does not divide attention.window {window}, as the pattern 'fixed' "
                f"needs; set attention.window to a multiple of {self.block}"
            )
        if self.num_global * self.block > window:
            raise ConfigError(
                f"attention.global: {self.num_global} blocks of {self.block} are more than a window of {window}"
            )

    def _check_rows(self) -> None:
        for number, row in enumerate(self.rows):
            if len(row) != len(self.rows[0]) or set(row) - {"0", "1"}:
                raise ConfigError(
                    f"attention.layout: expected rows of {len(self.rows[0])} digits 0 and 1; row {number} is {row!r}"
                )
            if "1" not in (row[: number + 1] if self.causal else row):
                raise ConfigError(
                    f"attention.layout: row {number} leaves its queries without keys"
                    f"{' (later keys do not count, as attention is causal)' if self.causal else ''}: set one of its "
                    f"digits to 1, for example that of column {number}"
                )

    @property
    def windows(self) -> tuple[int, ...]:
        if self.window is None:
            return ()
        return (self.window,) if isinstance(self.window, int) else self.window

    # ---------------------------------------------------------------------------------- keys that a query sees

    def ranges(self) -> list[Range]:
        """Return the ranges of keys that move with the query. If causal, a query does not see later keys in them."""
        match self.pattern:
            case "dense":
                return [Range(lambda p: p * 0, lambda p: p * 0 + _ALL)]
            case "user":
                return []
            case "fixed" | "variable":
                near = Range(lambda p: self._local(p)[0], lambda p: self._local(p)[1])
            case _:
                near = Range(self._window_start, self._window_stop)
        ranges, first = [near], self.num_global * self.block
        if first and self.pattern != "fixed":
            ranges.append(Range(lambda p: p * 0, lambda p: p * 0 + first))
            if not self.causal:
                ranges.append(Range(lambda p: (p >= first) * _ALL, lambda p: p * 0 + _ALL))
        return ranges

    def _window_start(self, p: Tensor) -> Any:
        return p - self.windows[0] + (1 if self.causal else 0)

    def _window_stop(self, p: Tensor) -> Any:
        return p + 1 + (0 if self.causal else self.windows[0])

    def _local(self, p: Tensor) -> tuple[Any, Any]:
        """Return the start and the stop of the window that contains a position, for adjacent windows."""
        last = self.windows[-1]
        edge = sum(self.windows[:-1])
        start = edge + (p - edge).div(last, rounding_mode="floor") * last
        stop = start + last
        for size in reversed(self.windows[:-1]):
            start = torch.where(p < edge, edge - size, start)
            stop = torch.where(p < edge, edge, stop)
            edge -= size
        return start, stop

    def blocks(self, num_queries: int, num_keys: int) -> list[list[int]]:
        """Return the single blocks of keys that each block of queries sees in addition to its ranges.

        Args:
            num_queries: the number of blocks of queries in the document.
            num_keys: the number of blocks of keys in the document.

        Raises:
            ConfigError: a user's layout is smaller than the document.
        """
        if self.pattern == "user" and (num_queries > len(self.rows) or num_keys > len(self.rows[0])):
            raise ConfigError(
                f"attention.layout: {len(self.rows)} x {len(self.rows[0])} blocks of {self.block} positions do not "
                f"cover {num_queries} x {num_keys} blocks of queries and keys; set a larger layout"
            )
        return [sorted(self._blocks_of(row, num_keys)) for row in range(num_queries)]

    def _blocks_of(self, row: int, num_keys: int) -> Iterator[int]:
        end = min(num_keys, row + 1) if self.causal else num_keys
        if self.pattern == "user":
            yield from (col for col in range(end) if self.rows[row][col] == "1")
        if self.pattern == "fixed":
            per_window = self.windows[0] // self.block
            own = row // per_window
            for other in range(own if self.causal else -(-num_keys // per_window)):
                last = (other + 1) * per_window
                yield from range(last - self.num_global, min(last, num_keys)) if other != own else ()
        if self.num_random:
            yield from self._random_blocks(row, end)

    def _random_blocks(self, row: int, end: int) -> list[int]:
        """Return random blocks outside the window and the global blocks. They are the same for every document
        length.
        """
        p = torch.tensor([row * self.block, (row + 1) * self.block - 1], device="cpu")
        near = self.ranges()[0]
        first, last = int(near.start(p)[0]) // self.block, (int(near.stop(p)[1]) - 1) // self.block
        others = [*range(self.num_global, min(first, end)), *range(max(last + 1, self.num_global), end)]
        if row < self.num_global and not self.causal:  # it sees all
            return []
        return random.Random(row).sample(others, min(self.num_random, len(others)))
