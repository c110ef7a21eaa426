"""A running average that all ranks derive from the changes of parameters that they are told, so that nobody sends it.

What ranks send as codes is made of it and of their gradients, as in 1-bit Adam (Tang et al., 2021), where the average
is gathered instead. Where the optimizer's change of an element is ``-lr * average / divisor``, and ``divisor`` stands
still, a change that was told says what the average was, but for what its codes lost: it does not have to be right,
only the same on all ranks, since the rank that sums up takes out again what each of them has put in.
"""

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from partita.kernels.chunks import in_chunks
from partita.sharding.bucket_layout import BucketLayout
from partita.sharding.unit import Member, Segment


class Carrier:
    """Of one bucket: ``values`` and ``divisors``, each ``[num_rows, num_columns]`` in fp32, the same on all ranks.
    Where a divisor is 0 the optimizer moves nothing, and the carrier is 0, too.

    Args:
        share: of what travels, how much is the carrier.
    """

    def __init__(self, layout: BucketLayout, share: float, values: Tensor, divisors: Tensor) -> None:
        self.share = share
        self.values, self.divisors = (each.view(layout.num_rows, -1) for each in (values, divisors))
        self._layout = layout
        self._rates: Mapping[int, float] = {}
        first_column = 0
        for segment in layout.segments:
            segment.told = partial(self._follow, segment, first_column)
            first_column += segment.layout.part_elements

    def note_rates(self, rate_of: Callable[[Member], float]) -> None:
        """Of the update that comes: each parameter's learning rate."""
        self._rates = {id(member): rate_of(member) for member in self._layout.members}

    def _follow(self, segment: Segment, first_column: int, row: int, write_change: Callable[[Tensor], None]) -> None:
        """All ranks were told how a part of the segment changed. Steps that codes had held back come at once: no step
        is larger than the learning rate, so no carrier is larger than its divisor.
        """
        values, divisors = self.values[row], self.divisors[row]
        part = slice(first_column, first_column + segment.layout.part_elements)
        write_change(values[part])
        members = [member for member in self._layout.members if member.segment is segment]
        rates = {self._rates.get(id(member), 0.0) for member in members}
        if len(rates) == 1:
            _to_average(values[part], divisors[part], rates.pop())
        else:
            for member in members:
                for piece in self._layout.pieces[id(member)]:
                    if piece.row == row:
                        _to_average(piece.of(values), piece.of(divisors), self._rates.get(id(member), 0.0))
            self._layout.clear_gaps(values, only=row)

    def take_out(self, summed: Tensor, row: int) -> None:
        """Make of a sum ``[num_columns]`` of what was sent, which this rank has made, the mean gradient."""
        for part, carried in in_chunks(summed, self.values[row].to(summed.device)):
            gradient = part.float()
            gradient.sub_(carried, alpha=self.share).mul_(1.0 / (1.0 - self.share))
            if gradient is not part:
                part.copy_(gradient)


def _to_average(change: Tensor, divisors: Tensor, rate: float) -> None:
    """From a change to the optimizer's step, of which ``rate`` is the largest that it takes, and to the average."""
    if rate > 0:
        for part, divisor in in_chunks(change, divisors):
            part.mul_(-1.0 / rate).clamp_(-1.0, 1.0).mul_(divisor)
    else:
        change.zero_()
