"""Sums of squares, which are norms and finite checks in one: the sum is finite exactly if every element is.

Squares are added up in float64, by blocks of 4096 elements in a fixed order: any number of threads and any instruction
set give the same bits. (Without compiled kernels the order is another, so the last bits may differ from theirs.)
"""

from collections.abc import Sequence

from torch import Tensor

from partita.errors import PartitaError
from partita.kernels import native, reference
from partita.kernels.state import GRADIENTS, check


def square_sum(values: Tensor, threads: int = 1, level: str | None = None) -> float:
    """The sum of the squares of flat fp32, bf16 or fp16 values; infinite or not a number if one of them is.

    Raises:
        PartitaError: the tensor is of another dtype, or not contiguous, or there is no such instruction set.
    """
    check("values", values, GRADIENTS, values)
    kernels = native.kernels_for(values)
    if kernels is None:
        return reference.square_sum(values)
    total: float = kernels.square_sum(native.launch(values.numel(), threads, level), native.typed(values))
    return total


def sum_and_square_(out: Tensor, inputs: Sequence[Tensor], threads: int = 1, level: str | None = None) -> float:
    """Write the sum of ``inputs``, from first to last, into ``out``; return the sum of the squares of what was written.

    Sums are taken in float32 and rounded to ``out``'s dtype at the end, to nearest, ties to even. ``out`` may be one of
    the inputs. All are fp32, bf16 or fp16, flat and equally long.

    Raises:
        PartitaError: there are no inputs, or a tensor is not what it should be, or there is no such instruction set.
    """
    check("out", out, GRADIENTS, out)
    if not inputs:
        raise PartitaError("a sum needs at least one input")
    for number, part in enumerate(inputs):
        check(f"inputs[{number}]", part, GRADIENTS, out)
    kernels = native.kernels_for(out)
    if kernels is None:
        return reference.sum_and_square_(out, inputs)
    total: float = kernels.sum_and_square(
        native.launch(out.numel(), threads, level), native.typed(out), [native.typed(part) for part in inputs]
    )
    return total
