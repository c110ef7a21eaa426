"""A matrix as the product of two thin ones, summed over ranks without ever being whole on the wire: PowerSGD.

Vogels et al., "PowerSGD: Practical low-rank gradient compression for distributed optimization", 2019, algorithm 1: one
step of subspace iteration, warm-started by the last one's factor. Both factors are linear in the matrix, so ranks add
them up: ``left`` [rows, rank] is summed, made orthogonal on every rank alike, and ``right`` [rank, columns] summed
with it. What of the matrix the product does not give back is for the caller to hold (error feedback).
"""

import torch
from torch import Tensor

from partita.errors import PartitaError

# Columns that are (up to rounding) in the span of those before become zero, and stand for nothing.
_NEGLIGIBLE = 1e-6


def first_right(columns: int, rank: int, seed: int, device: torch.device) -> Tensor:
    """The ``right`` to start from: the same on every rank that gives the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rank, columns, generator=generator, dtype=torch.float32, device="cpu").to(device)


# Each factor lies as BLAS multiplies large matrices by thin ones fastest: lying otherwise, it takes five times as long.


def left_factor(matrix: Tensor, right: Tensor) -> Tensor:
    """This rank's share of ``left``, to be summed: ``matrix`` ``[rows, columns]`` times the last ``right``."""
    return _as_matrix(matrix).float() @ right.T


def right_factor(matrix: Tensor, left: Tensor) -> Tensor:
    """This rank's share of ``right``, to be summed. ``left``: the sum, after :func:`orthogonal`."""
    return left.T @ _as_matrix(matrix).float()


def product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """What the factors stand for, ``[rows, columns]``: in ``out``, where that is given (fp32)."""
    return torch.mm(left, right, out=out)


def orthogonal(left: Tensor) -> Tensor:
    """An orthonormal basis of the columns' span, of each of ``[..., rows, rank]``: the same bits on every rank that has
    the same ``left``. A column that adds nothing to those before is zero.
    """
    basis, triangle = torch.linalg.qr(left)
    new = triangle.diagonal(dim1=-2, dim2=-1).abs()
    return torch.where((new > _NEGLIGIBLE * torch.linalg.vector_norm(left, dim=-2))[..., None, :], basis, 0.0)


def _as_matrix(matrix: Tensor) -> Tensor:
    if matrix.dim() != 2:
        raise PartitaError(f"a low-rank codec takes matrices; got a tensor of shape {tuple(matrix.shape)}")
    return matrix
