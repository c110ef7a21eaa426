"""PowerSGD: a matrix as the product of two low-rank factors, which are summed over ranks in its place.

Vogels et al., "PowerSGD: Practical low-rank gradient compression for distributed optimization", 2019, algorithm 1: one
step of subspace iteration, warm-started with the last step's factor. Both factors are linear in the matrix, so ranks
can sum them: ``left`` [rows, rank] is summed and orthogonalized on every rank alike, then ``right`` [rank, columns] is
computed with it and summed. The caller keeps the residual, which the product does not restore (error feedback).
"""

import torch
from torch import Tensor

from partita.errors import PartitaError

# Columns that are (up to rounding) in the span of those before become zero, and stand for nothing.
_NEGLIGIBLE = 1e-6


def first_right(columns: int, rank: int, seed: int, device: torch.device) -> Tensor:
    """Return the ``right`` to start from: the same on every rank that gives the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rank, columns, generator=generator, dtype=torch.float32, device="cpu").to(device)


# Each factor lies as BLAS multiplies large matrices by thin ones fastest: lying otherwise, it takes five times as long.


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
    """Return an orthonormal basis of the columns' span, for each of ``[..., rows, rank]``. Every rank that has the same
    ``left`` gets the same bits. A column in the span of those before it becomes zero.
    """
    basis, triangle = torch.linalg.qr(left)
    new = triangle.diagonal(dim1=-2, dim2=-1).abs()
    return torch.where((new > _NEGLIGIBLE * torch.linalg.vector_norm(left, dim=-2))[..., None, :], basis, 0.0)


def _as_matrix(matrix: Tensor) -> Tensor:
    if matrix.dim() != 2:
        raise PartitaError(f"a low-rank codec takes matrices; got a tensor of shape {tuple(matrix.shape)}")
    return matrix
