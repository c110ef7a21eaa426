"""Feed-forward modules, found by their shapes: linear layers from ``hidden`` to ``width`` features (or to a multiple of
``width``, in a fused matrix), and one linear layer with ``width`` inputs. The former are split by outputs (column
parallel), the latter by inputs (row parallel).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from partita.parallel.tensor.dropout import SplitDropout
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

    def split(self, splitter: Splitter, module: nn.Module, rule_name: str) -> None:
        """Split the ``width`` features over the ranks."""
        cuts = even(self.width, splitter.size)
        for name, num_fused in self.ups:
            ranges = [self._outputs(cut, num_fused) for cut in cuts]
            splitter.column(module.get_submodule(name), rule_name, ranges, gathers=False)
        splitter.row(module.get_submodule(self.down), rule_name)
        split_dropout(splitter, module, self.width)

    def _outputs(self, cut: tuple[int, int], num_fused: int) -> Ranges:
        """Return the output ranges of the features ``cut`` in a layer with ``num_fused * width`` outputs."""
        return tuple(place for index in range(num_fused) for place in scaled((cut,), 1, index * self.width))


def split_dropout(splitter: Splitter, module: nn.Module, width: int) -> None:
    """Make dropout between the layers of ``module`` use this rank's slice of the mask of all ``width`` features."""
    own = (even(width, splitter.size)[splitter.rank],)
    forward = SplitDropout(module, splitter.copy_input, own, width, heads=False)
    splitter.changes.wrap_forward(module, forward)


# Feed-forward modules of these classes need no check (it would allocate all their weights): their last linear layer has
# the ``width`` inputs.
KNOWN_CLASSES = ("GPT2MLP", "partita.train.decoder.FeedForward", "partita.prediction.gpt.FeedForward")


# Layers whose outputs are those of a gate and, after them, those of the values that it multiplies: their names in any
# module, and in one class.
_GATE_AND_VALUE = ("gate_up_proj",)
_GATE_AND_VALUE_OF = {"partita.train.decoder.FeedForward": "up"}


def fused_layers(module: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """Yield the layers of a feed-forward module that consist of several matrices of equal size, with their number."""
    kind = type(module)
    names = (*_GATE_AND_VALUE, _GATE_AND_VALUE_OF.get(f"{kind.__module__}.{kind.__qualname__}"))
    for name, child in module.named_children():
        weight = child._parameters.get("weight")
        if name in names and weight is not None and weight.dim() == 2:
            yield child, 2


def feed_forward_by_class(module: nn.Module, size: int) -> FeedForward | None:
    """Return the layers of a module whose class is in :data:`KNOWN_CLASSES`; None for other modules."""
    kind = type(module)
    if kind.__name__ not in KNOWN_CLASSES and f"{kind.__module__}.{kind.__qualname__}" not in KNOWN_CLASSES:
        return None
    last = [child for child in module.children() if is_linear(child)][-1]
    return next(
        (layers for layers in feed_forwards_by_shape(module, size) if module.get_submodule(layers.down) is last), None
    )


def feed_forwards_by_shape(module: nn.Module, size: int) -> Iterator[FeedForward]:
    """Yield the possible splits of a module as a feed-forward module over ``size`` ranks, by shapes alone."""
    children = {name: child for name, child in module.named_children() if any(True for _ in child.parameters())}
    own = any(True for _ in module.parameters(recurse=False))
    if len(children) < 2 or own or not all(is_linear(child) for child in children.values()):
        return
    for down, last in children.items():
        width, ups = num_inputs(last), {name: child for name, child in children.items() if name != down}
        hidden = {num_inputs(child) for child in ups.values()}
        if width >= size and len(hidden) == 1 and not any(num_outputs(child) % width for child in ups.values()):
            first_layers = tuple((name, num_outputs(child) // width) for name, child in ups.items())
            yield FeedForward(first_layers, down, hidden.pop(), width)
