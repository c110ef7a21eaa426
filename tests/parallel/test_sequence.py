"""Sequence parallelism: one process's losses and gradients, on unmodified models."""

import pytest

from tests.local import pool
from tests.matrix import matrix
from tests.parallel import sequence


@matrix(name=sequence.NAMES, ranks=[2, 3])
def test_losses_and_gradients_are_those_of_one_process(name: str, ranks: int) -> None:
    """Masks on both sides, ignored labels, sliding windows, grouped heads, both directions, lengths that change."""
    for found in pool.run(ranks, sequence.beside_whole, name, timeout=120):
        assert found.loss < 1e-5
        assert found.gradient < 1e-5, found.name


@matrix(way=sequence.WAYS, heads=[(6, 6), (6, 2), (8, 1)], mask=["causal", "none", "padding", "added", "window"])
def test_every_way_of_attention_is_the_whole_one(way: str, heads: tuple[int, int], mask: str) -> None:
    """On three ranks, with the bytes that the formula says."""
    for found in pool.run(3, sequence.attention_alone, way, *heads, mask):
        assert found.off < 1e-5
        assert found.counted == found.formula


@pytest.mark.parametrize(
    ("name", "by"), [("decoder", "config"), ("llama", "config"), ("llama", "model"), ("decoder", "user")]
)
def test_recomputed_blocks_know_their_slices(name: str, by: str) -> None:
    for off, largest in pool.run(2, sequence.recomputed, name, by):
        assert off <= 1e-7 * largest


@pytest.mark.parametrize("name", ["llama", "decoder"])
def test_logits_are_never_whole(name: str) -> None:
    for found, own, whole in pool.run(2, sequence.logits_bytes, name):
        assert found == own < whole


@pytest.mark.parametrize("name", ["llama", "decoder"])
def test_logits_can_be_read(name: str) -> None:
    assert max(pool.run(3, sequence.whole_logits, name)) < 1e-5


def test_losses_are_those_of_whole_logits() -> None:
    for losses in pool.run(3, sequence.losses_of_own, "decoder"):
        for found, expected in losses:
            assert found == pytest.approx(expected, rel=1e-5)
