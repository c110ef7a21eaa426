"""Pipeline schedules: the order of a batch's work on each rank, as data.

A rank holds ``chunks`` stages of the model: stage ``chunk * ranks + rank`` is chunk ``chunk`` of rank ``rank``. GPipe:
Huang et al., 2019. 1F1B: Narayanan et al., "PipeDream", 2019, section 3.2; interleaved: Narayanan et al., "Efficient
Large-Scale Language Model Training", 2021, section 2.2. Zero bubble: Qi et al., "Zero Bubble Pipeline Parallelism",
2023.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import pairwise


class Work(StrEnum):
    """The kinds of work of a stage for one micro-batch. If a schedule has ``WEIGHTS``, its ``BACKWARD`` does not
    include the weight gradients.
    """

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHTS = "W"


@dataclass(frozen=True)
class Action:
    """A stage's work for one micro-batch."""

    work: Work
    micro: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.work}{self.micro}" + f".{self.chunk}" * (self.chunk > 0)


Order = tuple[Action, ...]


@dataclass(frozen=True)
class Shape:
    """The size of a pipeline: ranks, micro-batches per batch, and stages (chunks) per rank."""

    ranks: int
    micros: int
    chunks: int = 1

    @property
    def num_stages(self) -> int:
        return self.ranks * self.chunks

    def stage(self, rank: int, chunk: int) -> int:
        """Return the number of a stage, in the order of the forward."""
        return chunk * self.ranks + rank


@dataclass(frozen=True)
class Schedule:
    """The actions of each rank of a pipeline, in order."""

    name: str
    shape: Shape
    orders: tuple[Order, ...]

    @cached_property
    def splits_weights(self) -> bool:
        """True if weight gradients are computed separately from the backward."""
        return any(action.work is Work.WEIGHTS for action in self.orders[0])

    @property
    def last_work(self) -> Work:
        """The last kind of work that a stage does for a micro-batch."""
        return Work.WEIGHTS if self.splits_weights else Work.BACKWARD

    def __str__(self) -> str:
        return "\n".join(f"rank {rank}: {' '.join(map(str, order))}" for rank, order in enumerate(self.orders))


def make_schedule(name: str, shape: Shape) -> Schedule:
    """Return the schedule ``name`` (``parallel.schedule``) for a pipeline of this shape. With one stage, each backward
    directly follows its forward.
    """
    if shape.num_stages == 1:
        orders = [_alternate(_forwards(shape), _backwards(shape), ahead=0)]
    elif name == "zero_bubble":
        orders = [_zero_bubble(shape, rank) for rank in range(shape.ranks)]
    elif name == "gpipe":
        orders = [_alternate(_forwards(shape), _backwards(shape), ahead=shape.micros)] * shape.ranks
    else:
        orders = [_alternate(_forwards(shape), _backwards(shape), _ahead(shape, rank)) for rank in range(shape.ranks)]
    return Schedule(name, shape, tuple(tuple(order) for order in orders))


def _rounds(shape: Shape) -> list[range]:
    """Divide the micro-batches into rounds: all micro-batches of a round run through one chunk before the next chunk.

    With several chunks, a round has as many micro-batches as there are ranks, or a few more.
    """
    num = max(1, shape.micros // shape.ranks) if shape.chunks > 1 else 1
    cuts = [-(-shape.micros * at // num) for at in range(num + 1)]
    return [range(start, stop) for start, stop in pairwise(cuts)]


def _forwards(shape: Shape) -> list[Action]:
    chunks = range(shape.chunks)
    return [Action(Work.FORWARD, micro, chunk) for round_ in _rounds(shape) for chunk in chunks for micro in round_]


def _backwards(shape: Shape) -> list[Action]:
    chunks = range(shape.chunks - 1, -1, -1)
    return [Action(Work.BACKWARD, micro, chunk) for round_ in _rounds(shape) for chunk in chunks for micro in round_]


def _ahead(shape: Shape, rank: int) -> int:
    """Return the number of forwards that a rank runs before its first pair of forward and backward."""
    num_after = shape.ranks - 1 - rank
    return num_after if shape.chunks == 1 else (shape.chunks - 1) * max(map(len, _rounds(shape))) + 2 * num_after


def _alternate(forwards: Sequence[Action], backwards: Sequence[Action], ahead: int) -> list[Action]:
    """Return an order: ``ahead`` forwards, then one forward and one backward in turn, then the remaining backwards."""
    order = list(forwards[:ahead])
    remaining = list(backwards)
    for forward in forwards[ahead:]:
        order += [forward, remaining.pop(0)]
    return order + remaining


def _zero_bubble(shape: Shape, rank: int) -> list[Action]:
    """Return a rank's order in schedule ZB-H1 (Qi et al., section 3.1).

    It begins with ``ranks - rank`` forwards, then backwards and forwards follow in turn. The weight gradients are
    delayed by ``rank`` micro-batches, and fill the bubbles. No rank keeps more activations than the first rank does
    under 1F1B.
    """
    forwards, backwards = _forwards(shape), _backwards(shape)
    weights = [Action(Work.WEIGHTS, action.micro) for action in backwards]
    order, forwards = forwards[: shape.ranks - rank], forwards[shape.ranks - rank :]
    for num, backward in enumerate(backwards):
        order.append(backward)
        if num >= rank:
            order.append(weights.pop(0))
        if forwards:
            order.append(forwards.pop(0))
    return order + weights
