"""Orders of a batch's work on the ranks of a pipeline, as data.

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
    """Of a stage, for one micro-batch. ``BACKWARD`` leaves the weights' gradients out where the order has ``WEIGHTS``
    apart.
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
    """Of a pipeline: its ranks, the micro-batches of a batch, and the stages that each rank holds."""

    ranks: int
    micros: int
    chunks: int = 1

    @property
    def num_stages(self) -> int:
        return self.ranks * self.chunks

    def stage(self, rank: int, chunk: int) -> int:
        """The number of a stage, in the order of the forward."""
        return chunk * self.ranks + rank


@dataclass(frozen=True)
class Schedule:
    """What each rank of a pipeline does, in its order."""

    name: str
    shape: Shape
    orders: tuple[Order, ...]

    @cached_property
    def splits_weights(self) -> bool:
        """Whether the weights' gradients are computed apart from the backward."""
        return any(action.work is Work.WEIGHTS for action in self.orders[0])

    @property
    def last_work(self) -> Work:
        """With which a stage is done with a micro-batch."""
        return Work.WEIGHTS if self.splits_weights else Work.BACKWARD

    def __str__(self) -> str:
        return "\n".join(f"rank {rank}: {' '.join(map(str, order))}" for rank, order in enumerate(self.orders))


def make_schedule(name: str, shape: Shape) -> Schedule:
    """The order called ``name`` (``parallel.schedule``) for a pipeline of this shape; of one rank, every micro-batch's
    backward follows its forward.
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
    """The micro-batches that go through one chunk before the next one: as many as there are ranks, or a few more."""
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
    """Forwards that a rank has done before its first pair of forward and backward."""
    behind = shape.ranks - 1 - rank
    return behind if shape.chunks == 1 else (shape.chunks - 1) * max(map(len, _rounds(shape))) + 2 * behind


def _alternate(forwards: Sequence[Action], backwards: Sequence[Action], ahead: int) -> list[Action]:
    """``ahead`` forwards, then one forward and one backward by turns, then the backwards that are left."""
    order = list(forwards[:ahead])
    left = list(backwards)
    for forward in forwards[ahead:]:
        order += [forward, left.pop(0)]
    return order + left


def _zero_bubble(shape: Shape, rank: int) -> list[Action]:
    """As many forwards as there are stages from this one on, then a backward and a forward by turns; the gradients of
    weights begin as many micro-batches later as there are stages before this one, and fill its bubbles. No rank keeps
    more than the first one does under 1F1B (Qi et al., section 3.1: ZB-H1).
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
