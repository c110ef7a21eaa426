"""Dropout under tensor parallelism: full tensors have one process's masks, and split tensors their part of them."""

from typing import Any

import pytest
import torch

from tests.kit.ranks import on_ranks
from tests.parallel import dropout


@pytest.mark.parametrize("name", ["gpt2-eager", "t5"])
def test_masks_are_parts_of_one_process_s(name: str) -> None:
    """Dropout of attention weights (split by heads) and of features between two layers gives one process's losses."""
    (alone,) = on_ranks(1, dropout.losses, name, {})
    found = on_ranks(2, dropout.losses, name, {"tensor": 2}, timeout=120)
    assert found[0] == found[1]
    assert found[0] == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize("attention", [{}, {"pattern": "sliding", "block": 4, "window": 8}], ids=["sdpa", "sliding"])
def test_heads_that_a_kernel_drops_out_differ_between_ranks(attention: dict[str, Any]) -> None:
    (first, dropped), (other, other_dropped) = on_ranks(2, dropout.heads_of_kernel, attention)
    assert torch.allclose(first, other, atol=1e-6)
    assert not torch.allclose(dropped, first, atol=1e-3)
    assert not torch.allclose(dropped, other_dropped, atol=1e-3)
