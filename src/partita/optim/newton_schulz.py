"""Orthogonalization of matrices by the Newton-Schulz iteration.

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024. The scales of updates: Liu et
al., "Muon is Scalable for LLM Training", 2025, section 2.2 (``rms``), and Bernstein, "Deriving Muon", 2025
(``spectral``).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

# Coefficients of the iteration x -> a x + b (x x^T) x + c (x x^T)^2 x, of Jordan et al.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# Smallest norm that a matrix is divided by.
EPS = 1e-7
# The number of matrices of a stack that are iterated on together.
STACK = 8
# The root mean square of an update's elements under the scale ``rms``, relative to the learning rate.
_RMS = 0.2


def orthogonalize(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, dtype: torch.dtype) -> Tensor:
    """Return approximations of the nearest semi-orthogonal matrices, with singular values near 1.

    The result depends on the values of ``matrix`` alone, not on its strides. Matrices of a stack are iterated on in
    batches of :data:`STACK`, so that a part of the stack from a multiple of it on has the same results.

    Args:
        matrix: ``[..., rows, columns]``; each matrix of a stack is orthogonalized by itself.
        dtype: the dtype of the iteration, and of the result.
    """
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.to(dtype, copy=True, memory_format=torch.contiguous_format)
    if is_tall:
        x = x.mT
    if x.dim() == 2:
        x = _iterate(x, torch.addmm, coefficients, steps)
    else:
        few = x.flatten(0, -3).split(STACK)
        x = torch.cat([_iterate(each, torch.baddbmm, coefficients, steps) for each in few])
    x = x.mT if is_tall else x
    return x.reshape(matrix.shape)


def _iterate(x: Tensor, product: Callable[..., Tensor], coefficients: tuple[float, float, float], steps: int) -> Tensor:
    """Normalize ``x`` ``[..., n, m]``, with n at most m, and return the result of the iteration.

    Args:
        product: addmm, or that of batches.
    """
    a, b, c = coefficients
    x /= torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(steps):
        gram = x @ x.mT  # [..., n, n]
        x = product(x, product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def scale_of(rows: int, columns: int, scale: str) -> float:
    """Return the factor of the update of a matrix ``[rows, columns]`` that maps ``columns`` inputs to ``rows`` outputs.

    Args:
        scale: ``rms``: elements have a root mean square of about 0.2, like those of AdamW. ``spectral``: the square
            root of outputs over inputs. ``original``: the same, but at least 1.
    """
    if scale == "rms":
        return _RMS * math.sqrt(max(rows, columns))
    ratio = rows / columns
    return math.sqrt(ratio if scale == "spectral" else max(1.0, ratio))


def operations(rows: int, columns: int, steps: int) -> int:
    """Return the floating-point operations that :func:`orthogonalize` takes for one matrix."""
    small, large = sorted((rows, columns))
    return steps * (4 * small * small * large + 2 * small**3)
