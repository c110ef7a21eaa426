"""What travels on an edge of the table: the values as they rest, or codes of fewer bits, a block at a time.

A codec makes a *record* of each block of ``BLOCK`` values, with all that decoding it takes: nothing else travels, so
its bytes are all there are, and a buffer is cut between any two blocks. The codecs: blocks of 8 and 4 bits with a scale
each (Wang et al., "ZeRO++", 2023, section 3: qwZ and qgZ), 2 bits, three levels (Wen et al., "TernGrad", 2017; rounded
to nearest: Li and Liu, "Ternary weight networks", 2016), signs (Tang et al., "1-bit Adam", 2021) and the largest values
of a block with their places (Stich et al., "Sparsified SGD with memory", 2018).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from partita.plan.mesh_shape import MeshShape
from partita.plan.residence import BLOCK, FP32, Encoding


@dataclass(frozen=True)
class Codec:
    """``record_bytes``: of a block, codes and scale. ``unbiased``: whether values can be rounded at random, so that
    what is decoded is right on average.
    """

    name: str
    record_bytes: int
    unbiased: bool = True

    def num_bytes(self, num_elements: int) -> int:
        """Bytes that travel in place of ``num_elements`` values.

        Raises:
            ValueError: they are no whole blocks.
        """
        if num_elements % BLOCK:
            raise ValueError(f"{self.name} encodes whole blocks of {BLOCK} values; got {num_elements} values")
        return num_elements // BLOCK * self.record_bytes


STEP_BYTES = FP32.itemsize  # what a step between two levels takes in a record
TOP = 8  # values that `top8` sends of a block

# 255, 15, 4, 3 and 2 levels: 1, 2, 4, 5 and 8 codes in a byte. Last, values and their places in the block.
_CODECS = (
    Codec("int8", STEP_BYTES + BLOCK),
    Codec("int4", STEP_BYTES + BLOCK // 2),
    Codec("two_bits", STEP_BYTES + BLOCK // 4),
    Codec("ternary", STEP_BYTES + -(-BLOCK // 5)),
    Codec("sign", STEP_BYTES + BLOCK // 8),
    Codec("top8", TOP * (FP32.itemsize + 1), unbiased=False),
)
CODECS = {codec.name: codec for codec in _CODECS}
# By the names that a configuration has for them: those that round at random, and those too coarse for that, whose error
# is held back.
AT_RANDOM = ("int8", "int4")
LOW_RANK = "low_rank"  # no codec of blocks: matrices travel as two thin factors
HELD_BACK = {"2bit": "two_bits", "ternary": "ternary", "onebit": "sign", "topk": "top8"}


@dataclass(frozen=True)
class Wire:
    """What travels between two residences of one ``encoding``: without a ``codec`` the values themselves.

    ``feedback``: what rounding takes away is held back, and added to what is sent next. ``unbiased``: values are
    rounded at random; otherwise to the nearest level.

    Raises:
        ValueError: there is no codec whose error could be held back, or which could round at random.
    """

    encoding: Encoding = FP32
    codec: Codec | None = None
    feedback: bool = False
    unbiased: bool = False

    def __post_init__(self) -> None:
        if self.feedback and self.codec is None:
            raise ValueError("values that travel as they are leave nothing to be held back")
        if self.unbiased and (self.codec is None or not self.codec.unbiased):
            raise ValueError(f"{self.codec.name if self.codec else 'a wire without codec'} does not round at random")

    def num_bytes(self, num_elements: int) -> int:
        """Bytes that travel in place of ``num_elements`` values."""
        return num_elements * self.encoding.itemsize if self.codec is None else self.codec.num_bytes(num_elements)

    @property
    def is_coded(self) -> bool:
        return self.codec is not None

    def sent_bytes(self, num_elements: int, num_ranks: int) -> int:
        """Bytes that a rank sends where each of ``num_ranks`` gets all ``num_elements``, and has one part of them; as
        many as where each has all, and gets one part of the sum.
        """
        return (num_ranks - 1) * self.num_bytes(num_elements // num_ranks)


FULL = Wire()


@dataclass(frozen=True)
class Wires:
    """What travels on the edges of the table: ``gradients`` to where they are summed up, ``sums`` of them to where the
    optimizer works on more than a rank has summed up, ``parameters`` that rest split to where they are computed with,
    and ``changes`` of them from where they are updated to all that have them at rest: what travels of one is how far
    the updated value is from what these have alike, which so is the wire's feedback. ``first``: what travels in their
    place in the first steps; None: there are no such steps.

    ``momentum``: what ranks send is the optimizer's running average as it would be by their own gradients: so much of
    the last one, which all of them have, and the rest of the gradient (Tang et al., "1-bit Adam", 2021). The average
    of these is the next running average, which goes back to all. 0: they send gradients.

    ``outer`` and ``outer_sums``: of the outer gradients of replicas that train apart, how far each has come in a round,
    to where they are summed up, and back. ``factor_rank``: sums of matrices are low-rank factors of so many columns,
    which all ranks have (Vogels et al., "PowerSGD", 2019); 0: they are not.
    """

    gradients: Wire = FULL
    sums: Wire = FULL
    parameters: Wire = FULL
    changes: Wire = FULL
    outer: Wire = FULL
    outer_sums: Wire = FULL
    first: "Wires | None" = None
    momentum: float = 0.0
    factor_rank: int = 0


@dataclass(frozen=True)
class Matrix:
    """A parameter as ``[rows, columns]``: what its low-rank factors are of."""

    rows: int
    columns: int

    @classmethod
    def of(cls, shape: Sequence[int]) -> "Matrix":
        """All dims but the first are columns."""
        rows, columns = (shape[0], prod(shape[1:])) if len(shape) > 1 else (1, prod(shape))
        return cls(rows, columns)

    def factor_columns(self, rank: int) -> int:
        """Columns of each factor; 0 where the factors would be no fewer values than the matrix."""
        num = min(rank, self.rows, self.columns)
        return num if (self.rows + self.columns) * num < self.rows * self.columns else 0


AS_THEY_ARE = Wires()


def hops(axes: tuple[str, ...], mesh: MeshShape) -> tuple[tuple[str, ...], ...]:
    """The axes over which codes are exchanged, one after the other, for a sum over ``axes``: inside each node, and of
    those sums between the nodes (ZeRO++, section 3.3), where the mesh tells nodes apart; otherwise over all at once.
    """
    active = mesh.active(axes)
    inner = tuple(axis for axis in active if axis != "node")
    if active[:1] != ("node",) or not inner:
        return (mesh.named(active),) if active else ()
    return mesh.named(inner), ("node",)


def coded_sum_bytes(wire: Wire, num_elements: int, sizes: Sequence[int]) -> int:
    """Scratch memory of a sum of ``num_elements`` in codes, over groups of these sizes one after the other: what is
    sent and received of the first, the largest, and each one's sum in fp32.
    """
    total = 2 * wire.num_bytes(num_elements)
    for size in sizes:
        num_elements //= size
        total += num_elements * FP32.itemsize
    return total
