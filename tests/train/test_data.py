"""The corpus, its split into training and held-out text, and its batches."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from partita.config.resolve import ResolvedBatch
from partita.errors import ConfigError
from partita.train.data import Batches, Corpus, bytes_to_tokens, load_corpus, split
from partita.train.job import DataSection

CPU = torch.device("cpu")


def batches(micro: int, accumulate: int, num_ranks: int, rank: int, seed: int = 0) -> Batches:
    text = torch.arange(1000, dtype=torch.int32)  # each token is its own position
    data = DataSection(sequence=9, seed=seed)
    batch = ResolvedBatch(micro, accumulate, micro * accumulate * num_ranks)
    return Batches(Corpus(text, text + 5000), data, batch, rank, num_ranks, CPU)


def starts_of_step(micro: int, accumulate: int, num_ranks: int, step: int) -> list[int]:
    """Return the sorted start positions of a step's samples over all ranks."""
    per_rank = [batches(micro, accumulate, num_ranks, rank) for rank in range(num_ranks)]
    return sorted(int(start) for one in per_rank for window in one.train(step) for start in window[:, 0])


@given(
    st.lists(st.binary(max_size=400), min_size=1, max_size=8).filter(lambda texts: sum(map(len, texts)) > 40),
    st.floats(0.01, 0.9),
    st.integers(0, 5),
)
def test_split_parts_the_text(documents: list[bytes], share: float, seed: int) -> None:
    train, held_out = split(documents, share, seed)
    total = sum(map(len, documents))
    assert sorted(train + held_out) == sorted(b"".join(documents))
    region = max(1, int(total * share))
    assert total * share <= len(held_out) < total * share + region
    assert split(documents, share, seed) == (train, held_out)


def test_held_out_text_is_contiguous_regions_that_are_not_trained_on() -> None:
    text = bytes(range(256)) * 40
    lines = b"\n".join(b"%d" % number for number in range(20_000))
    train, held_out = split([lines, text], 0.1, seed=2)
    assert all(region not in train for region in (held_out[:200], held_out[-200:]))
    assert any(held_out[:100] in document for document in (lines, text))


def test_short_documents_are_held_out_whole() -> None:
    documents = [b"%d" % number * 50 for number in range(100, 160)]
    train, held_out = split(documents, 0.2, seed=0)
    assert {document in train for document in documents if document not in held_out} == {True}
    assert sum(document in held_out for document in documents) >= 11


def test_another_seed_holds_out_other_text() -> None:
    documents = [b"%d" % number * 50 for number in range(100, 160)]
    assert split(documents, 0.1, seed=0)[1] != split(documents, 0.1, seed=1)[1]


def test_windows_are_text_as_it_stands() -> None:
    for window in batches(4, 2, 3, 1).train(7):
        assert window.shape == (4, 10)
        assert window.dtype == torch.int64
        assert torch.equal(window, window[:, :1] + torch.arange(10))


def test_a_batch_depends_on_seed_step_and_rank_alone() -> None:
    first, again = batches(4, 2, 2, 1), batches(4, 2, 2, 1)
    list(first.train(1))  # earlier draws change nothing
    assert all(torch.equal(a, b) for a, b in zip(first.train(5), again.train(5), strict=True))
    for other in (batches(4, 2, 2, 0).train(5), first.train(6), batches(4, 2, 2, 1, seed=1).train(5)):
        assert not torch.equal(next(again.train(5)), next(other))


@pytest.mark.parametrize(("micro", "accumulate", "num_ranks"), [(12, 1, 1), (3, 4, 1), (1, 4, 3), (6, 1, 2), (2, 2, 3)])
def test_the_samples_of_a_step_are_the_same_for_every_way_to_share_them(
    micro: int, accumulate: int, num_ranks: int
) -> None:
    assert starts_of_step(micro, accumulate, num_ranks, step=3) == starts_of_step(1, 1, 12, step=3)


def test_every_place_of_the_text_can_be_drawn() -> None:
    one = batches(4000, 1, 1, 0)
    starts = torch.cat([window[:, 0] for step in range(4) for window in one.train(step)])
    assert starts.min() == 0
    assert starts.max() == 1000 - 9 - 1


def test_held_out_windows_are_spread_over_the_held_out_text_and_stay_the_same() -> None:
    seen = [window for rank in range(2) for window in batches(3, 2, 2, rank).held_out(4)]
    again = [window for rank in range(2) for window in batches(3, 2, 2, rank).held_out(4)]
    assert all(torch.equal(a, b) for a, b in zip(seen, again, strict=True))
    starts = torch.cat([window[:, 0] for window in seen]).sort().values
    assert len(starts) == 4 * 12
    whole = torch.cat([window[:, 0] for window in batches(12, 1, 1, 0).held_out(4)])
    assert torch.equal(whole.sort().values, starts)
    assert starts[0] == 5000
    assert starts[-1] == 5000 + 1000 - 9 - 1
    gaps = starts.diff()
    assert gaps.max() - gaps.min() <= 1


def test_bytes_are_tokens() -> None:
    assert bytes_to_tokens("é\n".encode()).tolist() == [0xC3, 0xA9, 0x0A]
    assert bytes_to_tokens(b"").shape == (0,)


def test_the_standard_library_is_text_without_its_tests() -> None:
    corpus = load_corpus(DataSection())
    text = corpus.train.numpy().tobytes() + corpus.held_out.numpy().tobytes()
    assert len(text) > 5_000_000
    assert len(corpus.held_out) >= 0.02 * len(text)
    assert b"class OrderedDict" in text
    assert b"class TestOrderedDict" not in text


def test_folder_is_read_in_order_by_pattern_without_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "b.txt").write_bytes(b"B" * 100)
    (tmp_path / "inner" / "c.txt").write_bytes(b"C" * 100)
    (tmp_path / "a.py").write_bytes(b"A" * 100)
    (tmp_path / ".hidden.txt").write_bytes(b"H" * 100)
    data = DataSection(corpus=str(tmp_path), pattern="*.txt", sequence=4, held_out=0.5)
    corpus = load_corpus(data)
    assert sorted([corpus.train.numpy().tobytes()[:1], corpus.held_out.numpy().tobytes()[:1]]) == [b"B", b"C"]
    whole = load_corpus(data.model_copy(update={"pattern": "*"}))
    assert len(whole.train) + len(whole.held_out) == 300


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"corpus": "{folder}/nowhere"}, "data.corpus: no file or folder '{folder}/nowhere'"),
        ({"corpus": "{folder}", "pattern": "*.rst"}, "no text in the files '*.rst' of '{folder}'"),
        (
            {"corpus": "{folder}/short.txt"},
            "90 tokens to train on and 10 held out, but one sample is data.sequence + 1 = 129",
        ),
    ],
)
def test_what_cannot_be_read_or_is_too_short_is_said(tmp_path: Path, settings: dict[str, str], message: str) -> None:
    (tmp_path / "short.txt").write_bytes(bytes(range(1, 101)))
    placed = {key: value.format(folder=tmp_path) for key, value in settings.items()}
    with pytest.raises(ConfigError) as caught:
        load_corpus(DataSection(held_out=0.1, **placed))
    assert message.format(folder=tmp_path) in str(caught.value)
