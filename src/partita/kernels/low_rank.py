"""PowerSGD: two low-rank factors of a matrix, which ranks all-reduce instead of the matrix.

Vogels et al., "PowerSGD: Practical low-rank gradient compression for distributed optimization", 2019, algorithm 1: one
step of subspace iteration, warm-started with the last step's factor. Both factors are linear in the matrix, so ranks
can sum them: ``left`` [rows, rank] is summed and orthogonalized identically on every rank, then ``right`` [rank,
columns] is computed with it and summed. The caller stores the residual (error feedback).
"""

import torch
from torch import Tensor

from partita.errors import PartitaError

# Columns that are (up to rounding) linear combinations of earlier ones become zero.
_NEGLIGIBLE = 1e-6


def first_right(columns: int, rank: int, seed: int, device: torch.device) -> Tensor:
    """Return a random initial ``right``, which depends only on the seed and the shape."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rank, columns, generator=generator, dtype=torch.float32, device="cpu").to(device)


# The memory layout of each factor is the fastest for BLAS products of large and thin matrices; the transposed layout
# takes five times as long.


def left_factor(matrix: Tensor, right: Tensor) -> Tensor:
    """Return this rank's term of ``left``, to be summed: ``matrix`` ``[rows, columns]`` times the last ``right``."""
    return _as_matrix(matrix).float() @ right.T


def right_factor(matrix: Tensor, left: Tensor) -> Tensor:
    """Return this rank's term of ``right``, to be summed. ``left``: the sum, after :func:`orthogonal`."""
    return left.T @ _as_matrix(matrix).float()


def product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the product of the factors, ``[rows, columns]``, in ``out`` if that is given (fp32)."""
    return torch.mm(left, right, out=out)


def orthogonal(left: Tensor) -> Tensor:
    """Orthonormalize the columns of each matrix of ``[..., rows, rank]``. Equal inputs give equal bits on every rank. A
    column in the span of earlier ones becomes zero.
    """
    basis, triangle = torch.linalg.qr(left)
    new = triangle.diagonal(dim1=-2, dim2=-1).abs()
    return torch.where((new > _NEGLIGIBLE * torch.linalg.vector_norm(left, dim=-2))[..., None, :], basis, 0.0)


def _as_matrix(matrix: Tensor) -> Tensor:
    if matrix.dim() != 2:
        raise PartitaError(f"a low-rank codec takes matrices; got a tensor of shape {tuple(matrix.shape)}")
    return matrix
