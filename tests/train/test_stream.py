"""Documents that are read during training: each once in a pass, on any number of ranks, from any position."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import partita
from partita.config.resolve import ResolvedBatch
from partita.engine.engine import Engine
from partita.errors import ConfigError
from partita.train import stream
from partita.train.job import DataSection, load_job
from partita.train.packing import IGNORED, PackedBatches
from partita.train.rows import START, Place, read_from
from partita.train.stream import DocumentStream, StreamedCorpus, open_stream
from tests.kit.models import Stack
from tests.kit.ranks import on_ranks
from tests.train.small_models import job_sections, write_rows

NUM_ROWS, BLOCK = 100, 16
CPU = torch.device("cpu")


class Numbers:
    """Stands for a tokenizer: documents are numbers, which are their tokens. Counts the rows."""

    template = None

    def __init__(self) -> None:
        self.num_rows = 0

    def encode(self, documents: Sequence[str]) -> Iterator[list[int]]:
        self.num_rows += len(documents)
        return ([int(number) for number in document.split()] for document in documents if document)


def document(row: int) -> list[int]:
    """The tokens of a row, which no other row has."""
    return [100 * row + place for place in range(2 + row * 7 % 12)]


def rows(begin: int = 0, end: int = NUM_ROWS) -> list[str]:
    return [" ".join(map(str, document(row))) for row in range(begin, end)]


def section(corpus: Path, **settings: Any) -> DataSection:
    base = {"format": "jsonl", "corpus": str(corpus), "sequence": 16, "held_out": 0.2, "stream": BLOCK}
    return DataSection.model_validate(base | settings)


def written(folder: Path) -> Path:
    """Three files of rows, of which one is empty."""
    folder.mkdir(exist_ok=True)
    for name, begin, end in (("a", 0, 40), ("b", 0, 0), ("c", 40, NUM_ROWS)):
        write_rows(folder / f"{name}.jsonl", rows(begin, end))
    return folder


@contextmanager
def opened(data: DataSection, encoder: Any = None) -> Iterator[tuple[StreamedCorpus, Engine]]:
    """The samples of a stream, and an engine that knows its position."""
    with (
        partita.initialize(Stack(1), {}) as engine,
        open_stream(DocumentStream(data, encoder or Numbers(), 10**6), engine) as corpus,
    ):
        yield corpus, engine


def predicted(corpus: StreamedCorpus, step: int, total: int) -> list[int]:
    """The tokens that a step predicts."""
    found = [sample.samples.row(sample.number, 16).labels for sample in corpus.batch(step, total)]
    return [int(token) for labels in found for token in labels[labels != IGNORED]]


def targets(of: Sequence[int]) -> list[int]:
    """The tokens of these rows that are predicted, in order."""
    return sorted(token for row in of for token in document(row)[1:])


def held_out_of(corpus: StreamedCorpus) -> set[int]:
    return {start_token // 100 for start_token in corpus.held_out.tokens.stored[corpus.held_out.starts].tolist()}


@pytest.mark.parametrize("file_format", ["jsonl", "parquet", "hf", "saved"])
def test_reading_continues_from_any_place(tmp_path: Path, file_format: str) -> None:
    import datasets

    folder = written(tmp_path / "rows")
    if file_format != "jsonl":
        found = datasets.Dataset.from_dict({"text": rows()})
        if file_format == "saved":
            found.save_to_disk(folder := tmp_path / "saved")
        else:
            folder = tmp_path / "parquet"
            folder.mkdir()
            for number in range(3):
                found.shard(3, number).to_parquet(folder / f"{number}.parquet")
    kind = "hf" if file_format == "saved" else file_format
    data = section(folder, format=kind)
    batches = list(read_from(START, data, Numbers(), 7))
    documents = [document for batch in batches for document in batch.documents]
    assert sorted(documents) == [document(row) for row in range(NUM_ROWS)]
    assert sum(batch.num_rows for batch in batches) == NUM_ROWS
    seen = 0
    for batch in batches:
        seen += batch.num_rows
        place = Place(**json.loads(json.dumps(vars(batch.after))))  # as in a checkpoint
        rest = [document for batch in read_from(place, data, Numbers(), 9) for document in batch.documents]
        assert rest == documents[seen:]


def test_each_document_is_trained_on_once_in_a_pass_block_by_block(tmp_path: Path) -> None:
    passes = list[list[int]]()
    with opened(section(written(tmp_path))) as (corpus, _):
        held_out = held_out_of(corpus)
        assert held_out < set(range(BLOCK))
        trained = [row for row in range(NUM_ROWS) if row not in held_out]
        for _ in range(2):
            seen = list[int]()
            while len(seen) < len(targets(trained)):
                seen += predicted(corpus, 0, 1)
            assert sorted(seen) == targets(trained)
            passes.append(seen)
    assert passes[0] != passes[1]
    first = [row for row in trained if row < BLOCK]
    assert sorted(passes[0][: len(targets(first))]) == targets(first)


def test_a_batch_may_have_samples_of_several_blocks(tmp_path: Path) -> None:
    with opened(section(written(tmp_path), stream=3)) as (corpus, _):
        whole = [predicted(corpus, step, 8) for step in range(12)]
    with opened(section(tmp_path, stream=3)) as (corpus, _):
        assert [token for batch in whole for token in batch] == [
            token for step in range(12 * 8) for token in predicted(corpus, step, 1)
        ]


@pytest.mark.parametrize("total", [1, 5])
def test_a_run_continues_from_any_step(tmp_path: Path, total: int) -> None:
    data = section(written(tmp_path))
    with opened(data) as (corpus, engine):
        expected, positions = list[list[int]](), list[str]()
        for step in range(60 // total):
            positions.append(json.dumps(engine.extra))
            expected.append(predicted(corpus, step, total))
    for step in range(0, len(positions), 7):
        with opened(data) as (corpus, engine):
            engine.extra.update(json.loads(positions[step]))
            assert [predicted(corpus, step, total) for step in range(step, len(positions))] == expected[step:]


def test_a_rewound_run_goes_on_with_new_samples(tmp_path: Path) -> None:
    with opened(section(written(tmp_path))) as (corpus, _):
        expected = [predicted(corpus, step, 2) for step in range(12)]
    with opened(section(tmp_path)) as (corpus, engine):
        found = [predicted(corpus, step, 2) for step in range(2)]
        saved = json.dumps(engine.extra)
        found += [predicted(corpus, step, 2) for step in range(2, 9)]
        engine.extra.update(json.loads(saved))  # as a rewound engine does
        found += [predicted(corpus, step, 2) for step in range(2, 5)]
        assert found == expected
        rest = json.dumps(engine.extra)
    with opened(section(tmp_path)) as (corpus, engine):
        engine.extra.update(json.loads(rest))
        assert predicted(corpus, 0, 2) not in expected


def test_one_block_is_read_ahead(tmp_path: Path) -> None:
    encoder = Numbers()
    with opened(section(write_rows(tmp_path / "rows.jsonl", rows())), encoder) as (corpus, _):
        assert encoder.num_rows == BLOCK  # an evaluation needs the first block alone
        for num_blocks in range(2, 5):
            predicted(corpus, 0, 1)
            reader = corpus._blocks._reader
            assert reader is not None
            reader._block.result()
            assert encoder.num_rows == BLOCK * num_blocks
            predicted(corpus, 0, corpus._samples.num - 1)


def test_the_thread_ends_with_the_stream(tmp_path: Path) -> None:
    with opened(section(written(tmp_path))) as (corpus, _):
        predicted(corpus, 0, 1)
        (thread,) = [one for one in threading.enumerate() if one.name.startswith("partita data")]
    thread.join(60)
    assert not thread.is_alive()


def samples_of(folder: Path, ranks: int, parallel: dict[str, int]) -> list[list[tuple[int, ...]]]:
    """The samples of each step on this rank. Only rank 0 can read the rows."""
    engine_config = {"parallel": parallel}
    with partita.initialize(Stack(2), engine_config) as engine:
        corpus = folder if engine.is_main else folder / "nowhere"
        data, num = section(corpus), engine.mesh.size("data")
        with open_stream(DocumentStream(data, Numbers(), 10**6), engine) as found:
            batch = ResolvedBatch(4 // num, 1, 4)
            batches = PackedBatches(found, data, batch, engine.mesh.coordinate("data"), num, CPU)
            steps = [next(iter(batches.train(step))) for step in range(1, 16)]
            return [[tuple(row.tolist()) for row in step["input_ids"]] for step in steps]


@pytest.mark.parametrize(("ranks", "parallel"), [(2, {}), (4, {}), (4, {"tensor": 2})])
def test_ranks_share_the_samples_that_one_rank_has(tmp_path: Path, ranks: int, parallel: dict[str, int]) -> None:
    folder = written(tmp_path / "rows")
    expected = samples_of(folder, 1, {})
    found = on_ranks(ranks, samples_of, folder, ranks, parallel)
    tensor = parallel.get("tensor", 1)
    assert found[1] == found[0] if tensor > 1 else found[1] != found[0]
    of_data_ranks = found[::tensor]
    for step, samples in enumerate(expected):
        assert sorted(sample for rank in of_data_ranks for sample in rank[step]) == sorted(samples)


def failures(folder: Path) -> list[str]:
    """The messages on this rank."""
    found = list[str]()
    with partita.initialize(Stack(1), {}) as engine:
        for name, vocabulary in (("bad", 10**6), ("nowhere", 10**6), ("empty", 10**6), ("good", 3000)):
            data = section(folder / name)
            with (
                pytest.raises(ConfigError) as caught,
                open_stream(DocumentStream(data, Numbers(), vocabulary), engine) as corpus,
            ):
                for step in range(20):
                    corpus.batch(step, 4)
            found.append(str(caught.value))
            engine.extra.clear()
    return found


def test_what_rank_0_cannot_read_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    written(tmp_path / "good")
    for name in ("bad", "empty"):
        (tmp_path / name).mkdir()
    write_rows(tmp_path / "bad" / "rows.jsonl", [*rows(0, 40), None])
    write_rows(tmp_path / "empty" / "rows.jsonl", ["", ""])
    one, other = on_ranks(2, failures, tmp_path)
    assert one == other
    bad, nowhere, empty, large = one
    assert "data.field: row 41 of" in bad
    assert "has nothing in 'text', expected a text" in bad
    assert "data.corpus: no file or folder" in nowhere
    assert "no document with text in" in empty
    assert "of the tokenizer is not in the model's vocabulary of 3000" in large


def test_the_end_of_the_rows_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="partita"), opened(section(written(tmp_path), stream=10**6)) as (corpus, _):
        for step in range(2 * corpus._first.train.num + 1):
            corpus.batch(step, 1)
    assert [record.getMessage() for record in caplog.records if "rows" in record.getMessage()] == [
        f"data: all rows of '{tmp_path}' have been read; they are read again"
    ] * 2


def test_the_size_of_blocks_is_part_of_the_digest(tmp_path: Path) -> None:
    digests = set[str]()
    for size in (BLOCK, BLOCK + 1):
        with opened(section(written(tmp_path), stream=size)) as (corpus, _):
            digests.add(corpus.digest)
            assert int(corpus.digest[:12], 16)  # the ranks compare it as a number
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.cache=tokens"], "data.cache: a stream of documents is not stored"),
        (["data.format=text"], "data.stream: has no effect with data.format: text"),
        (["data.stream=-1"], "data.stream: expected a whole number"),
        (
            ["train={epochs: 2}"],
            "train.epochs: 2 epochs of a stream (data.stream) have an unknown number of steps",
        ),
    ],
)
def test_keys_that_do_not_go_with_a_stream(tmp_path: Path, overrides: list[str], message: str) -> None:
    sections = job_sections(tmp_path, stream=BLOCK)
    if "train" in overrides[0]:
        del sections["train"]["steps"]
    with pytest.raises(ConfigError) as caught:
        load_job(sections, overrides)
    assert message in str(caught.value)


def test_positions_are_plain_values(tmp_path: Path) -> None:
    with opened(section(written(tmp_path))) as (corpus, engine):
        corpus.batch(1, 30)
        assert engine.extra[stream.POSITION] == json.loads(json.dumps(engine.extra[stream.POSITION]))
