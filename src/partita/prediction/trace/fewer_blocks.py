"""A model with fewer blocks: of consecutive equal blocks, a few represent all."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from partita.layout.units import find_blocks

# For every block of a model, its name and the block that represents it.
BlockMap = list[tuple[str, nn.Module]]
# Number of consecutive equal blocks that are kept.
NUM_KEPT = 2


@contextmanager
def fewer_blocks(model: nn.Module, *, keep_last: bool = False) -> Iterator[BlockMap]:
    """Keep only :data:`NUM_KEPT` of each row of consecutive equal blocks, until exit.

    Yields, for every block of the full model, its name and the block that represents it.

    Args:
        keep_last: also keep the last block of a row, which represents only itself: operators after it may count as
            its work.
    """
    rows = list[list[tuple[str, nn.Module]]]()
    for name, block in find_blocks(model):
        if rows and _parent(rows[-1][0][0]) == _parent(name) and _equal(rows[-1][-1][1], block):
            rows[-1].append((name, block))
        else:
            rows.append([(name, block)])
    saved = dict[int, tuple[nn.Module, dict[str, nn.Module | None]]]()
    block_map: BlockMap = []
    try:
        for row in rows:
            container = model.get_submodule(_parent(row[0][0]))
            kept = row
            if isinstance(container, nn.ModuleList | nn.Sequential):
                kept = row[:NUM_KEPT] + (row[NUM_KEPT:][-1:] if keep_last else [])
            saved.setdefault(id(container), (container, dict(container._modules)))
            stay = {id(block) for _, block in kept}
            for _, block in row:
                if id(block) not in stay:
                    container._modules = {key: child for key, child in container._modules.items() if child is not block}
            middle = min(NUM_KEPT, len(kept)) - 1
            block_map += [(name, block if id(block) in stay else kept[middle][1]) for name, block in row]
        for container, _ in saved.values():
            if isinstance(container, nn.ModuleList):  # indexed by position
                container._modules = {str(at): child for at, child in enumerate(container._modules.values())}
        yield block_map
    finally:
        for container, modules in saved.values():
            container._modules = modules


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _equal(one: nn.Module, other: nn.Module) -> bool:
    """Return True if two blocks have the same class, and parameters with equal names, shapes and ``requires_grad``."""
    if type(one) is not type(other):
        return False
    first, second = (
        [(name, tuple(p.shape), p.requires_grad) for name, p in block.named_parameters()] for block in (one, other)
    )
    return first == second
