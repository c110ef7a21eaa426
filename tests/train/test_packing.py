"""Packing of documents into samples, and the batches of these samples."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from partita.config.resolve import ResolvedBatch
from partita.errors import ConfigError
from partita.train.job import DataSection
from partita.train.packing import IGNORED, PackedBatches, PackedCorpus, Samples, cut, fill_samples, pack_documents
from partita.train.tokens import DocumentTokens

CPU = torch.device("cpu")
LENGTHS = [5, 3, 17, 2, 9, 4, 4, 30, 6, 2, 8, 3, 7, 5, 11, 2, 6, 3]
NOTHING = DocumentTokens.of([])


def corpus(lengths: list[int] = LENGTHS, **settings: Any) -> PackedCorpus:
    """Return a packed corpus in which each token is its own position in the text."""
    ends = np.cumsum(lengths)
    tokens = DocumentTokens(np.arange(ends[-1], dtype=np.int32), ends, int(ends[-1]), "digest")
    return pack_documents(tokens, section(**settings))


def section(**settings: Any) -> DataSection:
    return DataSection.model_validate({"format": "jsonl", "sequence": 12, "held_out": 0.1, **settings})


def batches(made: PackedCorpus, micro: int = 2, accumulate: int = 1, ranks: int = 1, rank: int = 0) -> PackedBatches:
    batch = ResolvedBatch(micro, accumulate, micro * accumulate * ranks)
    return PackedBatches(made, section(), batch, rank, ranks, CPU)


def predicted(batch: dict[str, Any]) -> list[int]:
    """Return the tokens that a batch predicts, which are their positions in the text."""
    return batch["labels"][batch["labels"] != IGNORED].tolist()


def pieces_of(samples: Samples) -> list[range]:
    return [range(start, start + length) for start, length in zip(samples.starts, samples.lengths, strict=True)]


@given(st.lists(st.integers(2, 60), min_size=1, max_size=30), st.integers(4, 20))
def test_pieces_predict_every_token_but_the_first_once(lengths: list[int], width: int) -> None:
    ends = np.cumsum(lengths)
    starts, sizes = cut(ends - lengths, np.array(lengths), width)
    targets = [token for start, size in zip(starts, sizes, strict=True) for token in range(start + 1, start + size)]
    firsts = set((ends - lengths).tolist())
    assert sorted(targets) == [token for token in range(ends[-1]) if token not in firsts]
    assert sizes.max() <= width
    assert sizes.min() >= 2


@given(st.lists(st.integers(2, 20), min_size=1, max_size=60))
def test_samples_hold_every_piece_once_and_have_no_room_for_another_sample(lengths: list[int]) -> None:
    starts = np.arange(len(lengths)) * 100
    samples = fill_samples(NOTHING, starts, np.array(lengths), 20)
    assert sorted(zip(samples.starts, samples.lengths, strict=True)) == list(zip(starts, lengths, strict=True))
    sizes = np.add.reduceat(samples.lengths, samples.first[:-1])
    assert sizes.max() <= 20
    assert samples.targets.sum() == sum(lengths) - len(lengths)
    if samples.num > 1:  # not even the two smallest samples fit into one
        assert sum(sorted(sizes)[:2]) > 20


def test_a_piece_goes_where_the_least_space_remains() -> None:
    samples = fill_samples(NOTHING, np.arange(3) * 100, np.array([6, 7, 3]), 10)
    assert [set(starts) for starts in np.split(samples.starts, samples.first[1:-1])] == [{100, 200}, {0}]


def test_documents_are_held_out_whole_and_never_trained_on() -> None:
    made = corpus(held_out=0.2)
    sides = [{token for piece in pieces_of(side) for token in piece} for side in (made.train, made.held_out)]
    assert not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) == sum(LENGTHS)
    bounds = [0, *np.cumsum(LENGTHS)]
    for start, end in pairwise(bounds):
        assert len({token in sides[1] for token in range(start, end)}) == 1
    assert len(sides[1]) >= 0.2 * sum(LENGTHS)
    assert corpus(held_out=0.2, seed=1).held_out.starts.tolist() != made.held_out.starts.tolist()
    assert corpus(held_out=0.99).train.num == 1  # at least one document is trained on


def only_even(**settings: Any) -> PackedCorpus:
    """Return a corpus that predicts only tokens at even positions from 40 on."""
    ends = np.cumsum(LENGTHS)
    stored = np.arange(ends[-1], dtype=np.int32)
    stored[(stored % 2 == 1) | (stored < 40)] ^= -1
    return pack_documents(DocumentTokens(stored, ends, int(ends[-1]), "digest"), section(predict="answers", **settings))


@pytest.mark.parametrize("pack", [True, False])
def test_tokens_outside_answers_are_seen_and_not_predicted(pack: bool) -> None:
    made = only_even(pack=pack)
    data = section(predict="answers", pack=pack)
    one = PackedBatches(made, data, ResolvedBatch(1, 1, 1), 0, 1, CPU)
    seen = list[int]()
    for number in range(made.train.num):
        (batch,) = one.train(number)
        targets = predicted(batch)
        assert targets, "a sample that predicts nothing"
        assert batch["num_items_in_batch"] == len(targets)
        assert (batch["input_ids"] >= 0).all()
        seen += targets
    firsts = {0, *np.cumsum(LENGTHS).tolist()}
    held_out = {token for piece in pieces_of(made.held_out) for token in piece}
    documents = [range(end - length, end) for length, end in zip(LENGTHS, np.cumsum(LENGTHS), strict=True)]
    expected = {
        token for document in documents for token in document[1:] if token % 2 == 0 and token >= 40
    } - held_out - firsts  # fmt: skip
    assert sorted(seen) == sorted(expected)
    assert one.num_held_out(10**6) == sum(len(predicted(batch)) for batch in one.held_out(10**6))


def test_documents_without_an_answer_are_named() -> None:
    ends = np.cumsum(LENGTHS)
    tokens = DocumentTokens(~np.arange(ends[-1], dtype=np.int32), ends, int(ends[-1]), "digest")
    with pytest.raises(ConfigError, match="data.predict: answers, but no message of the assistant in .* training docu"):
        pack_documents(tokens, section(predict="answers"))


def test_one_document_is_too_few() -> None:
    with pytest.raises(ConfigError, match="one document in '.*', but one is to train on and another one is held out"):
        corpus([40])


def test_an_epoch_has_each_document_once_in_another_order() -> None:
    made = corpus()
    one = batches(made, micro=1)
    epochs = [
        [next(one.train(epoch * made.train.num + number)) for number in range(made.train.num)] for epoch in range(2)
    ]
    expected = sorted(token for piece in pieces_of(made.train) for token in piece[1:])
    assert all(sorted(token for batch in epoch for token in predicted(batch)) == expected for epoch in epochs)
    assert [predicted(batch) for batch in epochs[0]] != [predicted(batch) for batch in epochs[1]]


def test_a_batch_may_have_samples_of_two_epochs() -> None:
    made = corpus()
    num, micro = made.train.num, 4
    assert num % micro
    many = batches(made, micro=micro)
    seen = [predicted({"labels": row}) for step in range(num) for row in next(many.train(micro * step))["labels"]]
    one = batches(made, micro=1)
    assert seen == [predicted(next(one.train(number))) for number in range(micro * num)]


@pytest.mark.parametrize(("micro", "accumulate", "ranks"), [(4, 1, 1), (1, 4, 1), (2, 1, 2), (1, 1, 4)])
def test_the_samples_of_a_step_and_their_weights_are_the_same_for_every_way_to_share_them(
    micro: int, accumulate: int, ranks: int
) -> None:
    made = corpus()
    found = [one for rank in range(ranks) for one in batches(made, micro, accumulate, ranks, rank).train(8)]
    (whole,) = batches(made, 4).train(8)
    assert sorted(token for one in found for token in predicted(one)) == sorted(predicted(whole))
    # The mean over micro-batches of sum / num_items_in_batch is the mean over all predicted tokens.
    shares = [len(predicted(one)) / one["num_items_in_batch"].item() for one in found]
    assert sum(shares) / len(shares) == pytest.approx(1)


def test_a_sample_has_documents_with_positions_of_their_own() -> None:
    made = corpus()
    seen = set[int]()
    for batch in batches(made, micro=made.train.num).train(0):
        for tokens, labels, positions in zip(
            batch["input_ids"].tolist(), batch["labels"].tolist(), batch["position_ids"].tolist(), strict=True
        ):
            for place, (token, label, position) in enumerate(zip(tokens, labels, positions, strict=True)):
                if label == IGNORED:
                    assert position == 0 or token == 0  # the first token of a piece, or padding
                    continue
                assert label == token
                assert (position, token) == (positions[place - 1] + 1, tokens[place - 1] + 1)
                seen.add(token)
    assert len(seen) == made.train.targets.sum()
    assert all(batch["use_cache"] is False for batch in batches(made).train(0))


def test_without_packing_each_sample_has_one_piece() -> None:
    made = corpus(pack=False)
    assert made.train.num == len(made.train.starts)
    one = PackedBatches(made, section(pack=False), ResolvedBatch(2, 1, 2), 0, 1, CPU)
    (batch,) = one.train(0)
    assert "position_ids" not in batch
    for labels in batch["labels"]:
        (where,) = (labels != IGNORED).nonzero(as_tuple=True)
        assert where.tolist() == list(range(1, len(where) + 1))


@pytest.mark.parametrize("num_batches", [1, 2, 50])
def test_held_out_samples_are_evaluated_at_most_once(num_batches: int) -> None:
    made = corpus(held_out=0.5)
    ranks = [batches(made, 2, 1, 2, rank) for rank in range(2)]
    found = [list(one.held_out(num_batches)) for one in ranks]
    assert len(found[0]) == len(found[1]) == min(num_batches, -(-made.held_out.num // 4))
    tokens = [token for rank in found for batch in rank for token in predicted(batch)]
    assert len(tokens) == len(set(tokens)) == ranks[0].num_held_out(num_batches)
    shares = [len(predicted(one)) / one["num_items_in_batch"].item() for rank in found for one in rank]
    assert sum(shares) / len(shares) == pytest.approx(1)
    if num_batches == 50:
        assert len(tokens) == made.held_out.targets.sum()


def test_what_changes_the_split_changes_the_digest() -> None:
    digests = {
        corpus(**settings).digest for settings in ({}, {"seed": 1}, {"held_out": 0.3}, {"sequence": 9}, {"pack": False})
    }
    assert len(digests) == 5


def test_tokens_are_read_from_the_map(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    np.arange(sum(LENGTHS), dtype=np.int32).tofile(path)
    mapped = DocumentTokens(np.memmap(path, dtype=np.int32, mode="r"), np.cumsum(LENGTHS), 200, "digest")
    one, other = batches(corpus()), batches(pack_documents(mapped, section()))
    assert torch.equal(next(one.train(2))["input_ids"], next(other.train(2))["input_ids"])
