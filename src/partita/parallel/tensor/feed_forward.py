"""Feed-forward modules, found by their shapes: linear layers from ``hidden`` to ``width`` features (or to a multiple of
``width``, in a fused matrix), and one linear layer with ``width`` inputs. The former are split by outputs (column
parallel), the latter by inputs (row parallel).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from partita.parallel.tensor.dropout import DropsParts
from partita.parallel.tensor.linear import Ranges, is_linear, num_inputs, num_outputs
from partita.parallel.tensor.splitter import Splitter, scaled
from partita.table.place import even


@dataclass(frozen=True)
class FeedForward:
    """The layers of a feed-forward module.

    Attributes:
        ups: the first layers: the name of each, and its number of outputs as a multiple of ``width``.
        down: the name of the last layer, which has ``width`` inputs.
        hidden: the number of inputs of the first layers.
        width: the number of features between the layers.
    """

    ups: tuple[tuple[str, int], ...]
    down: str
    hidden: int
    width: int

    def split(self, splitter: Splitter, module: nn.Module, by: str) -> None:
        """Split the ``width`` features over the ranks."""
        cuts = even(self.width, splitter.size)
        for name, num_parts in self.ups:
            ranges = [self._outputs(cut, num_parts) for cut in cuts]
            splitter.column(module.get_submodule(name), by, ranges, gathers=False)
        splitter.row(module.get_submodule(self.down), by)
        drop_parts(splitter, module, self.width)

    def _outputs(self, cut: tuple[int, int], num_parts: int) -> Ranges:
        """Return the output ranges of the features ``cut`` in a layer with ``num_parts * width`` outputs."""
        return tuple(place for part in range(num_parts) for place in scaled((cut,), 1, part * self.width))


def drop_parts(splitter: Splitter, module: nn.Module, width: int) -> None:
    """Make dropout between the layers of ``module`` use this rank's slice of the mask of all ``width`` features."""
    own = (even(width, splitter.size)[splitter.rank],)
    forward = DropsParts(module, splitter.copy_input, own, width, heads=False)
    splitter.changes.wrap_forward(module, forward)


# Feed-forward modules of these classes need no check (it would allocate all their weights): their last linear layer has
# the ``width`` inputs.
KNOWN = ("GPT2MLP", "partita.train.decoder.FeedForward", "partita.prediction.gpt.FeedForward")


def known_feed_forward(module: nn.Module, size: int) -> FeedForward | None:
    """Return the layers of a module whose class is in :data:`KNOWN`; None for other modules."""
    kind = type(module)
    if kind.__name__ not in KNOWN and f"{kind.__module__}.{kind.__qualname__}" not in KNOWN:
        return None
    last = [child for child in module.children() if is_linear(child)][-1]
    return next((way for way in like_feed_forward(module, size) if module.get_submodule(way.down) is last), None)


def like_feed_forward(module: nn.Module, size: int) -> Iterator[FeedForward]:
    """Yield the possible splits of a module as a feed-forward module over ``size`` ranks, by shapes alone."""
    children = {name: child for name, child in module.named_children() if any(True for _ in child.parameters())}
    own = any(True for _ in module.parameters(recurse=False))
    if len(children) < 2 or own or not all(is_linear(child) for child in children.values()):
        return
    for down, last in children.items():
        width, ups = num_inputs(last), {name: child for name, child in children.items() if name != down}
        hidden = {num_inputs(child) for child in ups.values()}
        if width >= size and len(hidden) == 1 and not any(num_outputs(child) % width for child in ups.values()):
            parts = tuple((name, num_outputs(child) // width) for name, child in ups.items())
            yield FeedForward(parts, down, hidden.pop(), width)
