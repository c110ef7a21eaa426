"""The codecs by name, with the bytes of an encoded block.

A codec encodes each block of ``BLOCK`` values into a *record*, which contains everything that decoding needs, so a
buffer can be split between any two blocks. The codecs: 8 and 4 bits with a scale per block (Wang et al., "ZeRO++",
2023, section 3: qwZ and qgZ), 2 bits, three levels (Wen et al., "TernGrad", 2017; rounded to nearest: Li and Liu,
"Ternary weight networks", 2016), signs (Tang et al., "1-bit Adam", 2021) and the largest values of a block with their
indices (Stich et al., "Sparsified SGD with memory", 2018).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from partita.table.residence import BLOCK, FP32


@dataclass(frozen=True)
class Codec:
    """A codec, which encodes values block by block.

    Attributes:
        record_bytes: bytes of an encoded block: codes and scale.
        unbiased: True if stochastic rounding is supported, with which decoded values are unbiased.
    """

    name: str
    record_bytes: int
    unbiased: bool = True

    def num_bytes(self, num_elements: int) -> int:
        """Return the bytes of ``num_elements`` encoded values.

        Raises:
            ValueError: they are not full blocks.
        """
        if num_elements % BLOCK:
            raise ValueError(f"{self.name} encodes full blocks of {BLOCK} values; got {num_elements} values")
        return num_elements // BLOCK * self.record_bytes


STEP_BYTES = FP32.itemsize  # bytes of the step between two levels in a record
TOP = 8  # number of values per block that `top8` sends

# 255, 15, 4, 3 and 2 levels: 1, 2, 4, 5 and 8 codes in a byte. Last, values and their indices in the block.
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
    """A user-defined codec in plain torch, selected by ``communication.gradients: module:class``.

    The class is created without arguments; its ``__init__`` sets the bytes of an encoded block::

        class Halves(TorchCodec):
            def __init__(self) -> None:
                super().__init__("halves", record_bytes=2 * BLOCK, unbiased=False)

    The encoding error is added to the next values that are encoded (error feedback: Seide et al., 2014).
    """

    @abstractmethod
    def encode(self, blocks: Tensor) -> Tensor:
        """Return the records of ``blocks``, fp32 ``[num_blocks, BLOCK]``, as uint8 ``[num_blocks, record_bytes]``.

        A block of zeros must decode to zeros; a non-finite block must decode to non-finite values.
        """

    @abstractmethod
    def decode(self, records: Tensor) -> Tensor:
        """Return the values of records, fp32 ``[num_blocks, BLOCK]``."""
