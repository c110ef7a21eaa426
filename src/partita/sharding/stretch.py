"""What a rank holds of a tensor: a run of its elements as they lie in memory, and the boxes of it that the run is."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from partita.plan.box import Box, boxes_of, memory_order
from partita.sharding.unit import Member


@dataclass(frozen=True)
class Stretch:
    """Elements ``[start, stop)``, in memory order, of a tensor with this shape and order of dimensions."""

    shape: tuple[int, ...]
    order: tuple[int, ...]
    start: int
    stop: int

    @property
    def is_row_major(self) -> bool:
        """Whether a box's elements lie in memory in the order of its own coordinates."""
        return self.order == tuple(range(len(self.order)))

    def boxes(self, most: int = 2**63) -> Iterator[tuple[Box, slice]]:
        """Its boxes, of at most ``most`` elements, each with its place in the stretch."""
        for box, place in boxes_of(self.shape, self.order, self.start, self.stop, most):
            yield box, slice(place - self.start, place - self.start + box.num_elements)

    def shaped(self, flat: Tensor, box: Box) -> Tensor:
        """A box's elements, given as they lie in memory, in its own coordinates; a view."""
        inner = flat.view([box.sizes[dim] for dim in self.order])
        return inner.permute([self.order.index(dim) for dim in range(len(self.order))])


SCALAR = Stretch((), (), 0, 1)


def stretch_of(member: Member, start: int, stop: int) -> Stretch:
    """Of a parameter."""
    return Stretch(tuple(member.shape), memory_order(member.stride), start, stop)
