"""A layout drawn as text, with one character for each pair of blocks, or for several pairs if there are many."""

import torch

from partita.attention.block_pairs import block_pairs
from partita.attention.layout import Layout
from partita.attention.segments import Sizes, whole_samples

CELLS = 64
_NOTHING, _PARTLY, _WHOLE = ".", "+", "#"


def picture(layout: Layout, length: int) -> str:
    """Draw a layout, with queries as rows and keys as columns, at most ``CELLS`` each. The last lines compare the
    number of computed pairs with dense attention.

    Raises:
        ConfigError: a user's layout is smaller than the sequence.
    """
    sizes = Sizes(1, length, length)
    found = block_pairs(layout, sizes, whole_samples(sizes))
    step = -(-found.num_rows // CELLS)
    num_cells = -(-found.num_rows // step)
    cell = found.row.div(step, rounding_mode="floor") * num_cells + found.col.div(step, rounding_mode="floor")
    counts = torch.bincount(cell, minlength=num_cells**2)
    whole = torch.bincount(cell[found.whole], minlength=num_cells**2)
    blocks = torch.full((num_cells,), step, device="cpu")
    blocks[-1] = found.num_rows - step * (num_cells - 1)
    all_blocks = torch.outer(blocks, blocks).flatten()
    drawn = [
        _NOTHING if not count else _WHOLE if count == full == total else _PARTLY
        for count, full, total in zip(counts.tolist(), whole.tolist(), all_blocks.tolist(), strict=True)
    ]
    lines = ["".join(drawn[start : start + num_cells]) for start in range(0, num_cells**2, num_cells)]
    computed, dense = len(found.row) * layout.block**2, dense_pairs(layout.causal, length)
    kind = "causal" if layout.causal else "both directions"
    lines += [
        "",
        f"{layout.pattern}, {kind}: {length} positions in blocks of {layout.block}; a character is {step} x {step} "
        f"blocks ({_WHOLE} whole, {_PARTLY} in part, {_NOTHING} left out)",
        f"{len(found.row)} of {found.num_rows**2} blocks are computed: {computed / 1e6:.1f} million pairs, "
        f"{dense / computed:.1f} times fewer than dense attention's {dense / 1e6:.1f} million",
    ]
    return "\n".join(lines)


def dense_pairs(causal: bool, length: int) -> float:
    """Return the number of pairs of positions that dense attention computes."""
    return length * (length + 1) / 2 if causal else float(length) ** 2
