"""A running average that all ranks derive from the changes of parameters that they are told, so that nobody sends it.

What ranks send as codes is made of it and of their gradients, as in 1-bit Adam (Tang et al., 2021), where the average
is gathered instead. Where the optimizer's change of an element is ``-lr * average / divisor``, and ``divisor`` stands
still, a change that was told says what the average was, but for what its codes lost: it does not have to be right,
only the same on all ranks, since the rank that sums up takes out again what each of them has put in.
"""

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

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

    def _follow(self, segment: Segment, first_column: int, row: int, change: Tensor) -> None:
        """All ranks were told this ``change`` ``[part_elements]`` of a part of the segment. Steps that codes had held
        back come at once: no step is larger than the learning rate, so no carrier is larger than its divisor.
        """
        place = slice(first_column, first_column + change.numel())
        values = self.values[row, place]
        values.copy_(change)
        members = [member for member in self._layout.members if member.segment is segment]
        rates = {self._rates.get(id(member), 0.0) for member in members}
        if len(rates) == 1:
            _over_rate(values, rates.pop())
        else:
            for member in members:
                for piece in self._layout.pieces[id(member)]:
                    if piece.row == row:
                        _over_rate(piece.of(self.values[row]), self._rates.get(id(member), 0.0))
        values.mul_(self.divisors[row, place])

    def take_out(self, summed: Tensor, row: int) -> None:
        """Make of a sum ``[num_columns]`` of what was sent, which this rank has made, the mean gradient."""
        gradient = summed.float()
        gradient.sub_(self.values[row].to(summed.device), alpha=self.share).mul_(1.0 / (1.0 - self.share))
        if gradient is not summed:
            summed.copy_(gradient)


def _over_rate(change: Tensor, rate: float) -> None:
    """From a change to the optimizer's step, of which ``rate`` is the largest that it takes."""
    if rate > 0:
        change.mul_(-1.0 / rate).clamp_(-1.0, 1.0)
    else:
        change.zero_()
