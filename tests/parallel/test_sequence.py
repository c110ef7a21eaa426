"""Sequence parallelism on unmodified models: losses and gradients match one process."""

import pytest
import torch

from partita import PartitaError
from partita.parallel.sequence.exchange import take_heads
from tests.kit.plans import matrix
from tests.kit.ranks import on_ranks
from tests.kit.training import assert_exact, assert_same_bits
from tests.parallel import sequence


@matrix(name=sequence.NAMES, ranks=[2, 3])
def test_losses_and_gradients_are_those_of_one_process(name: str, ranks: int) -> None:
    """Losses and gradients match one process, with padding on both sides, ignored labels, sliding windows, grouped
    heads, causal and bidirectional attention, and changing lengths.
    """
    for found in on_ranks(ranks, sequence.beside_whole, name, timeout=120):
        assert found.loss < 1e-5
        assert found.gradient < 1e-5, found.name


@matrix(way=sequence.WAYS, heads=[(6, 6), (6, 2), (8, 1)], mask=["causal", "none", "padding", "added", "window"])
def test_every_way_of_attention_is_the_whole_one(way: str, heads: tuple[int, int], mask: str) -> None:
    """Each attention method equals full attention on three ranks, and sends the bytes that its formula says."""
    for found in on_ranks(3, sequence.attention_alone, way, *heads, mask):
        assert found.off < 1e-5
        assert found.counted == found.formula


@pytest.mark.parametrize("heads", [(2,), (1, 2, 3), (0, 0, 1), (3, 1)])
def test_heads_are_taken_by_their_numbers(heads: tuple[int, ...]) -> None:
    x = torch.randn(2, 4, 3, 5)
    assert torch.equal(take_heads(x, heads), x[:, list(heads)])


def test_causal_attention_with_few_key_heads_saves_no_mask() -> None:
    for shapes in on_ranks(3, sequence.saved_by_causal_attention, 8, 1):
        assert shapes
        assert not [shape for shape in shapes if shape[-2:] in ((7, sequence.LENGTH), (8, sequence.LENGTH))]


@pytest.mark.parametrize(
    ("name", "by"),
    [
        ("decoder", "config"),
        ("llama", "config"),
        ("llama", "model"),
        ("decoder", "user"),
        ("balanced", "config"),
        ("balanced", "model"),
    ],
)
def test_recomputed_blocks_know_their_slices(name: str, by: str) -> None:
    for off, largest in on_ranks(2, sequence.recomputed, name, by):
        assert off <= 1e-7 * largest


@pytest.mark.parametrize("name", ["llama", "decoder"])
def test_logits_are_never_whole(name: str) -> None:
    for found, own, whole in on_ranks(2, sequence.logits_bytes, name):
        assert found == own < whole


@pytest.mark.parametrize("name", ["llama", "decoder"])
def test_logits_can_be_read(name: str) -> None:
    assert max(on_ranks(3, sequence.whole_logits, name)) < 1e-5


def test_losses_are_those_of_whole_logits() -> None:
    for losses in on_ranks(3, sequence.losses_of_own, "decoder"):
        for found, expected in losses:
            assert found == pytest.approx(expected, rel=1e-5)


@matrix(name=["llama", "qwen3", "gpt2", "decoder", "vit", "t5", "llava", "wav2vec2"], ranks=[2, 3])
def test_engines_train_as_one_process_does(name: str, ranks: int) -> None:
    (plain,) = on_ranks(1, sequence.trained_plainly, name, 1)
    for found in on_ranks(ranks, sequence.trained, name, ranks):
        assert_exact(found, plain)


@pytest.mark.parametrize(
    ("name", "what"),
    [("own", "no samples"), ("own", "few positions"), ("llama", "few positions"), ("balanced", "few positions")],
)
def test_batches_that_cannot_be_split_train(name: str, what: str) -> None:
    (plain,) = on_ranks(1, sequence.trained_on_few, name, what, None)
    for found in on_ranks(3, sequence.trained_on_few, name, what, 3):
        assert_exact(found, plain)


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.thorough)])
def test_every_stage_is_the_same_beside_data(name: str) -> None:
    """On sequence 2 x data 2, where states are sharded over both axes, all ZeRO stages have the same bits."""
    (plain,) = on_ranks(1, sequence.trained_plainly, name, 2)
    first = None
    for stage in range(4):
        by_rank = on_ranks(4, sequence.trained, name, 2, stage, timeout=120)
        first = first or by_rank
        for found, reference in zip(by_rank, first, strict=True):
            assert_exact(found, plain)
            assert found.weights.keys() == reference.weights.keys()
            assert_same_bits(found, reference, f"stage {stage}")


ERRORS = {
    "no blocks": "parallel.sequence: 3: Sequential has no blocks .repeated modules in a ModuleList or Sequential.",
    "flash": "got 'flash_attention_2': load the model with attn_implementation='sdpa'",
    "capacity": "block.1.layer.*SwitchTransformersTop1Router. drops the tokens beyond an expert's capacity",
    "cached": "expected attention over this rank's .* positions; got 1 queries and [89] keys",
    "collected": "output_attentions returns the attention weights of each block, of which a rank has only its slice",
    "alone": "'argmax' reads logits that are split over 3 sequence ranks, and not all of them do",
}


@pytest.mark.parametrize("what", ERRORS)
def test_what_is_refused(what: str) -> None:
    with pytest.raises(PartitaError, match=ERRORS[what]):
        on_ranks(3, sequence.refused, what)


HIDDEN = {
    "by hand": "'blocks.0' computes something else on slices of the sequence .* Attention is intercepted if it calls",
    "causal by hand": "'blocks.0' computes something else on slices of the sequence",
    "convolution": "'blocks.0' computes something else on slices of the sequence",
    "gate of 0": "'blocks.0' computes something else on slices of the sequence",
    "gate of 1e-6": "'blocks.0' computes something else on slices of the sequence",
    "alike": "'blocks.0' computes something else on slices of the sequence",
    "batch norm": "'blocks.0' computes something else on slices of the sequence",
    "gradients": "'blocks.0' has other gradients on slices of the sequence",
    "table": "'blocks.0' runs on full sequences and fails on slices: The size of tensor a .1[12]. must match",
    "last left out": "ended without a call of 'blocks.1', after which the slices of the sequence are gathered",
    "between": "'blocks.1': expected this rank's 1[12] of 23 positions; got 1[23]: the code between two blocks",
}


@pytest.mark.parametrize("how", HIDDEN)
def test_what_slices_do_not_see_is_found_on_the_first_batch(how: str) -> None:
    with pytest.raises(PartitaError, match=HIDDEN[how]):
        on_ranks(2, sequence.mixed, how)


def test_the_first_block_may_be_left_out() -> None:
    for losses in on_ranks(2, sequence.without_first_block):
        for found, expected in losses:
            assert found == pytest.approx(expected, abs=1e-5)


def test_it_is_found_where_parameters_are_sharded_inside_blocks() -> None:
    config = {"zero": {"stage": 3, "units": ["Mixing", "Linear", "Conv1d"]}}
    with pytest.raises(PartitaError, match="'blocks.0' computes something else on slices of the sequence"):
        on_ranks(2, sequence.mixed, "gate of 0", config)
    assert all(on_ranks(2, sequence.mixed, "nothing", config))


def test_the_check_of_the_first_batch_leaves_everything_as_it_was() -> None:
    assert on_ranks(2, sequence.first_call_changes) == [[], []]


PENALTIES = {
    "inside": "gradients are computed inside the model's forward",
    "without a graph": "gradients are computed inside the model's forward",
    "outside": "create_graph=True computes gradients of gradients",
}


@pytest.mark.parametrize("how", PENALTIES)
def test_gradients_of_slices_are_not_given_out(how: str) -> None:
    """Reading gradients of slices is an error: they are one rank's part, and their gradients would lack exchanges."""
    with pytest.raises(PartitaError, match=f"parallel.sequence: 2: {PENALTIES[how]}"):
        on_ranks(2, sequence.penalized, how)


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_on_gradients_of_slices_are_refused(when: str) -> None:
    with pytest.raises(PartitaError, match=r"has a gradient hook \(register_hook\), which under parallel.sequence"):
        on_ranks(2, sequence.hooked, when)


def test_it_is_found_in_the_stages_of_a_pipeline() -> None:
    on_ranks(4, sequence.mixed_in_stages, "nothing")
    with pytest.raises(PartitaError, match="'blocks.0' computes something else on slices of the sequence"):
        on_ranks(4, sequence.mixed_in_stages, "convolution")


def test_blocks_that_mix_nothing_train() -> None:
    assert all(on_ranks(2, sequence.mixed, "nothing"))


def test_the_first_call_may_fill_a_cache() -> None:
    """The first call fills a cache with each position once, although every block is checked in it."""
    found = on_ranks(2, sequence.cached)
    assert max(off for off, _ in found) < 1e-5
    assert [positions for _, positions in found] == [[12, 12], [11, 11]]


def test_text_is_generated_on_a_gathered_model() -> None:
    assert all(on_ranks(2, sequence.generated))


def test_masks_are_those_of_one_process_where_a_tensor_is_whole() -> None:
    """Dropout of full tensors has one process's masks; in the blocks, each rank draws different masks for its slice."""
    ((whole, *_),) = on_ranks(1, sequence.masks, 1, 7)
    first, second = on_ranks(2, sequence.masks, 2, 7)
    assert torch.equal(first[0], whole)
    assert torch.equal(second[0], whole)
    for mine, other in zip(first[1:], second[1:], strict=True):
        assert mine.shape[1] == 12
        assert other.shape[1] == 11
        assert not torch.equal(mine[:, :11], other)
    again = on_ranks(2, sequence.masks, 2, 7)
    assert all(torch.equal(a, b) for a, b in zip(first, again[0], strict=True))
    drawn = on_ranks(2, sequence.masks, 2, None)
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert not torch.equal(drawn[0][0], whole)
