"""The codecs, by their names, with the bytes that each takes for a block of values.

A codec encodes each block of ``BLOCK`` values into a *record*, which has everything that decoding needs: nothing else
is sent, and a buffer can be cut between any two blocks. The codecs: blocks of 8 and 4 bits with a scale each (Wang et
al., "ZeRO++", 2023, section 3: qwZ and qgZ), 2 bits, three levels (Wen et al., "TernGrad", 2017; rounded to nearest: Li
and Liu, "Ternary weight networks", 2016), signs (Tang et al., "1-bit Adam", 2021) and the largest values of a block
with their places (Stich et al., "Sparsified SGD with memory", 2018).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from partita.plan.residence import BLOCK, FP32


@dataclass(frozen=True)
class Codec:
    """A codec, which encodes values block by block.

    Attributes:
        record_bytes: bytes of an encoded block, codes and scale.
        unbiased: True if values can be rounded stochastically, so that the mean of decoded values is the value.
    """

    name: str
    record_bytes: int
    unbiased: bool = True

    def num_bytes(self, num_elements: int) -> int:
        """Return the bytes of ``num_elements`` encoded values.

        Raises:
            ValueError: they are no full blocks.
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


class TorchCodec(Codec, ABC):
    """A codec in plain torch, defined anywhere; ``communication.gradients: module:class`` uses it.

    The class is created without arguments; its ``__init__`` sets the bytes of an encoded block::

        class Halves(TorchCodec):
            def __init__(self) -> None:
                super().__init__("halves", record_bytes=2 * BLOCK, unbiased=False)

    What decoding does not restore is added to the next values that are encoded (error feedback: Seide et al., 2014).
    """

    @abstractmethod
    def encode(self, blocks: Tensor) -> Tensor:
        """Return the records of ``blocks``, fp32 ``[num_blocks, BLOCK]``, as uint8 ``[num_blocks, record_bytes]``.

        A block of zeros must decode to zeros; one that is not finite must decode to something that is not.
        """

    @abstractmethod
    def decode(self, records: Tensor) -> Tensor:
        """Return the values of records, fp32 ``[num_blocks, BLOCK]``."""
