"""Low-rank factors of a sum of matrices: exact if the rank suffices, and with error feedback otherwise."""

import pytest
import torch
from torch import Tensor

from partita.errors import PartitaError
from partita.kernels.low_rank import first_right, left_factor, orthogonal, product, right_factor

DEVICE = torch.device("cpu")


def mean_of(matrices: list[Tensor], right: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors of the mean, computed as ranks do: by summing factors only."""
    left = orthogonal(sum((left_factor(m, right) for m in matrices), torch.zeros(())) / len(matrices))
    return left, sum((right_factor(m, left) for m in matrices), torch.zeros(())) / len(matrices)


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_a_mean_of_enough_rank_is_found_exactly(rank: int) -> None:
    """Factors of a mean of rank ``rank`` are exact, although the ranks' matrices have a higher rank."""
    mean = torch.randn(40, rank) @ torch.randn(rank, 24)
    noise = torch.randn(40, 24)
    matrices = [mean + noise, mean - noise]
    right = first_right(24, rank, 5, DEVICE)
    for _ in range(2):
        left, right = mean_of(matrices, right)
    torch.testing.assert_close(product(left, right), mean, rtol=1e-3, atol=1e-4 * float(noise.abs().max()))


def test_the_best_rank_is_approached_step_by_step() -> None:
    """The factors converge to the best approximation: by the warm start, each call continues the subspace iteration."""
    u, _, v = torch.linalg.svd(torch.randn(48, 32), full_matrices=False)
    values = 0.5 ** torch.arange(32.0)
    matrix = u * values @ v
    best = values[4:].square().sum().sqrt()
    right = first_right(32, 4, 1, DEVICE)
    for _ in range(8):
        left, right = mean_of([matrix], right)
    assert torch.linalg.matrix_norm(matrix - product(left, right)) < 1.01 * best


def test_feedback_telescopes() -> None:
    ranks, right = 3, first_right(30, 2, 2, DEVICE)
    residual, sent, given = [torch.zeros(20, 30) for _ in range(ranks)], torch.zeros(20, 30), torch.zeros(20, 30)
    for _ in range(20):
        matrices = [torch.randn(20, 30) for _ in range(ranks)]
        given = given + sum(matrices, torch.zeros(())) / ranks
        fed = [m + h for m, h in zip(matrices, residual, strict=True)]
        left, right = mean_of(fed, right)
        sent = sent + product(left, right)
        residual = [m - product(left, right) for m in fed]
    torch.testing.assert_close(sent + sum(residual, torch.zeros(())) / ranks, given, rtol=1e-4, atol=1e-4)


def test_columns_without_anything_new_are_zero() -> None:
    column = torch.randn(16, 1)
    basis = orthogonal(torch.cat([column, 2 * column, torch.zeros(16, 1), torch.randn(16, 1)], 1))
    expected = torch.diag(torch.tensor([1.0, 0.0, 0.0, 1.0]))
    torch.testing.assert_close(basis.T @ basis, expected, rtol=1e-4, atol=1e-5)


def test_what_is_no_matrix() -> None:
    with pytest.raises(PartitaError, match=r"takes matrices; got a tensor of shape \(5,\)"):
        left_factor(torch.zeros(5), first_right(5, 1, 0, DEVICE))
