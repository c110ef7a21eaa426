"""Sparse attention on slices of a sequence: it matches one process, and sends only the blocks that are read."""

from typing import Any

import pytest

from partita import PartitaError
from partita.parallel.sequence.choose import ALL_TO_ALL, GATHER_BLOCKS, Sizes, choose
from tests.attention import sliced
from tests.attention.reference import LAYOUTS, assert_alike
from tests.kit.plans import matrix
from tests.kit.ranks import on_ranks
from tests.kit.training import Trained


@matrix(
    pattern=LAYOUTS,
    causal=(True, False),
    heads=((4, 4), (6, 2), (3, 1)),
    what=("whole", "documents", "padded"),
    ranks=(2, 3),
)
def test_each_rank_is_sent_the_blocks_it_reads(
    pattern: str, causal: bool, heads: tuple[int, int], what: str, ranks: int
) -> None:
    """Outputs and gradients equal dense attention under the same mask, and only the blocks that are read are sent."""
    for found in on_ranks(ranks, sliced.alone, pattern, causal, heads, what, GATHER_BLOCKS):
        assert found.off < 1e-5
        assert found.sent == found.expected == found.formula


@matrix(pattern=("dense", "longformer"), heads=((4, 4), (6, 2)), what=("whole", "documents", "padded"))
def test_or_exchanges_heads(pattern: str, heads: tuple[int, int], what: str) -> None:
    for found in on_ranks(3, sliced.alone, pattern, True, heads, what, ALL_TO_ALL):
        assert found.off < 1e-5
        assert found.sent == found.formula


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@matrix(what=("whole", "documents", "padded"))
def test_the_gpu_kernel_is_given_the_blocks_that_are_read(what: str) -> None:
    assert max(on_ranks(2, sliced.through_the_gpu_kernel, what)) < 1e-5


def _close(found: Trained, expected: Trained) -> None:
    assert found.losses == pytest.approx(expected.losses, abs=1e-5)
    mine, theirs = (
        {name: grad for name, grad in run.gradients[0].items() if grad is not None} for run in (found, expected)
    )
    assert mine.keys() == theirs.keys()
    assert_alike([*mine.values()], [*theirs.values()], "gradients")


@matrix(name=sliced.MODELS, pattern=LAYOUTS, ranks=(2, 3))
def test_models_train_as_one_process_does(name: str, pattern: str, ranks: int) -> None:
    (expected,) = on_ranks(1, sliced.trained, name, pattern, {})
    config: dict[str, Any] = {"parallel": {"sequence": ranks}}
    if pattern in ("fixed", "bigbird"):
        config["activations"] = {"checkpoint": "units"}
    for found in on_ranks(ranks, sliced.trained, name, pattern, config):
        _close(found, expected)
        if name != "direct":
            assert f"attention over the pattern {pattern}, in blocks of 8 positions" in found.looks[-1]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama, packed", "llama, padded"])
@pytest.mark.parametrize("other", ["tensor", "data"])
def test_beside_other_axes(name: str, other: str) -> None:
    """Training with a second axis matches one process; all data ranks get the same samples."""
    (expected,) = on_ranks(1, sliced.trained, name, "longformer", {})
    config = {"parallel": {"sequence": 2, other: 2}, "zero": {"stage": 3}}
    for found in on_ranks(4, sliced.trained, name, "longformer", config, timeout=120):
        _close(found, expected)


def test_layers_without_a_pattern_are_dense_beside_others() -> None:
    (expected,) = on_ranks(1, sliced.dense_layers_beside)
    assert on_ranks(2, sliced.dense_layers_beside) == pytest.approx([expected] * 2, abs=1e-5)


ERRORS = {
    "keys": "from 3[01] queries to 6[02] keys, where this rank has 3[01] of 61 positions",
    "seen": r"seen: expected \[2, 61\] .samples, all positions.; got \[2, 3[01]\]",
    "layout": "attention.layout: 2 x 2 blocks of 8 positions do not cover . x 8 blocks",
}


@pytest.mark.parametrize("what", ERRORS)
def test_what_is_refused(what: str) -> None:
    with pytest.raises(PartitaError, match=ERRORS[what]):
        on_ranks(2, sliced.refused, what)


def test_the_way_of_a_pattern_that_sends_less() -> None:
    """A narrow window gathers few blocks of the previous rank; to read all earlier positions, ranks exchange heads."""
    positions = (64,) * 4
    narrow = tuple(tuple(64 if of == rank else 16 * (of + 1 == rank) for of in range(4)) for rank in range(4))
    earlier = tuple(tuple(64 * (of <= rank) for of in range(4)) for rank in range(4))
    few, many = (Sizes(8, 8, 16, 16, positions, reads=reads) for reads in (narrow, earlier))
    assert choose(few, ring=False) == GATHER_BLOCKS
    assert few.sent_bytes(GATHER_BLOCKS) == (16 * 8 * 32 * 4,) * 3 + (0,)
    assert few.sent_bytes(GATHER_BLOCKS, backward=True) == (0,) + (16 * 8 * 32 * 4,) * 3
    assert choose(many, ring=False) == ALL_TO_ALL
    assert choose(many, needs_all_heads=True, ring=False) == GATHER_BLOCKS
    assert few.gathered_bytes == 80 * 8 * 32 * 4
    assert choose(few, ring=False, max_gathered_bytes=few.gathered_bytes - 1) == ALL_TO_ALL
    alone = Sizes(2, 2, 16, 16, positions, reads=earlier)
    assert choose(alone, ring=False, max_gathered_bytes=1) == GATHER_BLOCKS
