"""Reference implementation of each pattern, as a mask over all pairs of positions, and dense attention under a mask."""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from partita.attention import Layout

BLOCK = 8
# The settings of each pattern, with blocks of BLOCK, for causal and bidirectional attention.
LAYOUTS = {
    "dense": {},
    "sliding": {"window": 20},
    "fixed": {"window": 24, "num_global": 1},
    "variable": {"window": (5, 16, 24), "num_global": 1, "num_random": 1},
    "bigbird": {"window": 10, "num_global": 1, "num_random": 2},
    "longformer": {"window": 10, "num_global": 2},
    "user": {"rows": tuple("1" * (row % 2) + "0" * (12 - row % 2 - 1) + "1" for row in range(12))},
}


def layout(pattern: str, causal: bool) -> Layout:
    settings = dict(LAYOUTS[pattern])
    if pattern == "user" and causal:
        settings["rows"] = tuple("1" + row[1:] for row in settings["rows"])
    return Layout(pattern, BLOCK, causal=causal, **settings)  # type: ignore[arg-type]


def mask_of(layout: Layout, num_queries: int, num_keys: int, first: int | None = None) -> Tensor:
    """Return the bool mask [queries, keys] of a document.

    Args:
        first: the position of the first query; None: the last query is at the last key.
    """
    p = torch.arange(num_queries)[:, None] + (num_keys - num_queries if first is None else first)
    k = torch.arange(num_keys)[None]
    windows, block = layout.windows, layout.block
    common = layout.num_global * block
    causal = k <= p
    match layout.pattern:
        case "dense":
            seen = torch.ones(num_queries, num_keys, dtype=torch.bool)
        case "sliding" | "longformer" | "bigbird":
            seen = p - k < windows[0] if layout.causal else (p - k).abs() <= windows[0]
        case "fixed":
            ends = k % windows[0] >= windows[0] - common
            seen = (p // windows[0] == k // windows[0]) | ends
        case "variable":
            edges = torch.tensor(list(itertools.accumulate((*windows, *[windows[-1]] * num_keys))))
            seen = torch.bucketize(p, edges, right=True) == torch.bucketize(k, edges, right=True)
        case "user":
            seen = torch.zeros(num_queries, num_keys, dtype=torch.bool)
    if layout.pattern in ("longformer", "bigbird", "variable"):
        seen = seen | (k < common)
        if not layout.causal:
            seen = seen | (p < common)
    if layout.rows or layout.num_random:
        grid = torch.zeros(int(p.max()) // block + 1, -(-num_keys // block), dtype=torch.bool)
        for row, cols in enumerate(layout.blocks(*grid.shape)):
            grid[row, cols] = True
        seen = seen | grid[p // block, k // block]
    return seen & causal if layout.causal else seen


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Compute attention under a mask [samples or 1, 1, queries, keys]; the output of a query without keys is zero."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    some = mask.any(-1, keepdim=True)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask | ~some) * some


def assert_alike(mine: list[Tensor], theirs: list[Tensor], what: str, tolerance: float = 1e-5) -> None:
    for number, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        worst = (a.double() - b.double()).abs().max().item()
        assert worst <= tolerance * max(1.0, b.abs().max().item()), f"{what}, {number}: {worst:.1e}"
