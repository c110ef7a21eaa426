"""Streams of documents: each is read once per pass, on any number of ranks, and reading resumes at any position."""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import partita
from partita.config.resolve import ResolvedBatch
from partita.engine.engine import Engine
from partita.errors import ConfigError
from partita.train import stream
from partita.train.job import DataSection, load_job
from partita.train.packing import IGNORED, PackedBatches
from partita.train.rows import START, RowPosition, read_from
from partita.train.stream import DocumentStream, StreamedCorpus, open_stream
from tests.kit.models import Stack
from tests.kit.ranks import on_ranks
from tests.train.small_models import job_sections, write_rows

NUM_ROWS, BLOCK = 100, 16
CPU = torch.device("cpu")


class Numbers:
    """A stand-in for a tokenizer: the numbers in a document are its tokens. It counts the encoded rows."""

    template = None

    def __init__(self) -> None:
        self.num_rows = 0

    def encode(self, documents: Sequence[str]) -> Iterator[list[int]]:
        self.num_rows += len(documents)
        return ([int(number) for number in document.split()] for document in documents if document)


def document(row: int) -> list[int]:
    """Return the tokens of a row. No two rows have a token in common."""
    return [100 * row + place for place in range(2 + row * 7 % 12)]


def rows(begin: int = 0, end: int = NUM_ROWS) -> list[str]:
    return [" ".join(map(str, document(row))) for row in range(begin, end)]


def section(corpus: Path, **settings: Any) -> DataSection:
    base = {"format": "jsonl", "corpus": str(corpus), "sequence": 16, "held_out": 0.2, "stream": BLOCK}
    return DataSection.model_validate(base | settings)


def written(folder: Path) -> Path:
    """Write three files of rows, one of them empty, into ``folder``, and return it."""
    folder.mkdir(exist_ok=True)
    for name, begin, end in (("a", 0, 40), ("b", 0, 0), ("c", 40, NUM_ROWS)):
        write_rows(folder / f"{name}.jsonl", rows(begin, end))
    return folder


@contextmanager
def opened(data: DataSection, encoder: Any = None) -> Iterator[tuple[StreamedCorpus, Engine]]:
    """Open a stream: yield its samples, and the engine that stores its position."""
    with (
        partita.initialize(Stack(1), {}) as engine,
        open_stream(DocumentStream(data, encoder or Numbers(), 10**6), engine) as corpus,
    ):
        yield corpus, engine


def predicted(corpus: StreamedCorpus, step: int, total: int) -> list[int]:
    """Return the tokens that a step predicts."""
    found = [sample.samples.row(sample.number, 16).labels for sample in corpus.batch(step, total)]
    return [int(token) for labels in found for token in labels[labels != IGNORED]]


def targets(of: Sequence[int]) -> list[int]:
    """Return the sorted tokens of these rows that are predicted: all except the first of each row."""
    return sorted(token for row in of for token in document(row)[1:])


def held_out_of(corpus: StreamedCorpus) -> set[int]:
    return {start_token // 100 for start_token in corpus.held_out.tokens.stored[corpus.held_out.starts].tolist()}


def sources(folder: Path, file_format: str) -> DataSection:
    """Write the rows as several files, or parts of files, whose sizes are not multiples of a batch."""
    import datasets
    import pyarrow
    from pyarrow import parquet

    if file_format == "jsonl":
        return section(written(folder), stream=7)
    if file_format == "saved":
        datasets.Dataset.from_dict({"text": rows()}).save_to_disk(folder, num_shards=3)
        return section(folder, format="hf", stream=7)
    folder.mkdir()
    for number, begin in enumerate(range(0, NUM_ROWS, 40)):
        table = pyarrow.table({"text": rows(begin, min(begin + 40, NUM_ROWS))})
        parquet.write_table(table, folder / f"{number}.parquet", row_group_size=11)
    return section(folder, format=file_format, stream=7)


@pytest.mark.parametrize("file_format", ["jsonl", "parquet", "hf", "saved"])
def test_reading_continues_from_any_position(tmp_path: Path, file_format: str) -> None:
    """Reading resumes at any position, even at one that was reached by resuming several times."""
    data = sources(tmp_path / "rows", file_format)
    batches = list(read_from(START, data, Numbers()))
    documents = [document for batch in batches for document in batch.documents]
    assert sorted(documents) == [document(row) for row in range(NUM_ROWS)]
    assert sum(batch.num_rows for batch in batches) == NUM_ROWS
    position, seen = START, list[list[int]]()
    for number in range(len(batches)):
        batch = next(iter(read_from(position, data, Numbers())))
        seen += batch.documents
        stored = json.loads(json.dumps(vars(batch.after)))  # as in a checkpoint
        position = RowPosition(**stored)
        if number % 5 == 0:
            rest = [document for batch in read_from(position, data, Numbers()) for document in batch.documents]
            assert seen + rest == documents
    assert seen == documents


def test_positions_keep_their_batches(tmp_path: Path) -> None:
    """The state of ``datasets`` is valid for one batch size, so a new ``data.stream`` takes effect at the next file."""
    data = sources(tmp_path / "rows", "jsonl")
    first, *others = read_from(START, data, Numbers())
    wider = data.model_copy(update={"stream": 13})
    rest = [document for batch in read_from(first.after, wider, Numbers()) for document in batch.documents]
    assert rest == [document for batch in others for document in batch.documents]


def test_a_file_that_a_checkpoint_names_must_exist(tmp_path: Path) -> None:
    data = section(written(tmp_path), stream=10)
    batches = list(read_from(START, data, Numbers()))
    assert batches[-1].after.source == "c.jsonl"
    write_rows(tmp_path / "b2.jsonl", ["1 2 3"])  # positions name their file, so a new file before it does not matter
    rest = list(read_from(batches[-2].after, data, Numbers()))
    assert [batch.documents for batch in rest] == [batches[-1].documents]
    (tmp_path / "c.jsonl").unlink()
    message = r"the checkpoint continues after row 50 of 'c.jsonl', which is not in '.*' any more; restore the file"
    with pytest.raises(ConfigError, match=message):
        list(read_from(batches[-2].after, data, Numbers()))


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


def test_a_rewound_stream_continues_with_new_samples(tmp_path: Path) -> None:
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
        assert encoder.num_rows == BLOCK  # evaluation needs only the first block
        for num_blocks in range(2, 5):
            predicted(corpus, 0, 1)
            reader = corpus._blocks._reader
            assert reader is not None
            assert reader._ahead is not None
            reader._ahead[1].result()
            assert encoder.num_rows == BLOCK * num_blocks
            predicted(corpus, 0, corpus._samples.num - 1)


def test_the_thread_ends_with_the_stream(tmp_path: Path) -> None:
    with opened(section(written(tmp_path))) as (corpus, _):
        predicted(corpus, 0, 1)
        (thread,) = [one for one in threading.enumerate() if one.name.startswith("partita data")]
    assert not thread.is_alive()


def samples_of(folder: Path, parallel: dict[str, int]) -> tuple[int, list[list[tuple[int, ...]]]]:
    """Return this rank's data coordinate, and the samples of each of its steps. Only rank 0 can read the rows."""
    with partita.initialize(Stack(2), {"parallel": parallel}) as engine:
        data = section(folder if engine.is_main else folder / "nowhere")
        coordinate, num = engine.mesh.coordinate("data"), engine.mesh.size("data")
        with open_stream(DocumentStream(data, Numbers(), 10**6), engine) as found:
            batches = PackedBatches(found, data, ResolvedBatch(4 // num, 1, 4), coordinate, num, CPU)
            steps = [next(iter(batches.train(step))) for step in range(1, 16)]
            return coordinate, [[tuple(row.tolist()) for row in step["input_ids"]] for step in steps]


@pytest.mark.parametrize(("ranks", "parallel"), [(2, {}), (4, {}), (4, {"tensor": 2}), (4, {"pipeline": 2})])
def test_ranks_share_the_samples_that_one_rank_has(tmp_path: Path, ranks: int, parallel: dict[str, int]) -> None:
    folder = written(tmp_path / "rows")
    _, expected = samples_of(folder, {})
    found = on_ranks(ranks, samples_of, folder, parallel)
    of_data_ranks = dict(found)
    assert all(samples == of_data_ranks[coordinate] for coordinate, samples in found)
    for step, samples in enumerate(expected):
        assert sorted(sample for rank in of_data_ranks.values() for sample in rank[step]) == sorted(samples)


class Failing(Numbers):
    """A tokenizer that fails in the third block, after a delay."""

    def encode(self, documents: Sequence[str]) -> Iterator[list[int]]:
        if self.num_rows >= 2 * BLOCK:
            time.sleep(0.5)
            raise MemoryError("no memory")
        return super().encode(documents)


def failed_late(folder: Path) -> str:
    data = section(folder)
    with (
        mock.patch("partita.train.stream.WAIT_S", 0.1),
        partita.initialize(Stack(1), {}) as engine,
        pytest.raises((MemoryError, ConfigError)) as caught,
        open_stream(DocumentStream(data, Failing(), 10**6), engine) as corpus,
    ):
        for step in range(20):
            corpus.batch(step, 4)
    return str(caught.value)


def test_an_error_of_rank_0_alone_ends_the_other_ranks(tmp_path: Path) -> None:
    own, other = on_ranks(2, failed_late, written(tmp_path))
    assert own == "no memory"
    assert other == "data.corpus: rank 0 cannot read the documents: MemoryError: no memory; see its error"


def test_waiting_for_rows_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        mock.patch("partita.train.stream.WAIT_S", 0.0),
        caplog.at_level("INFO", logger="partita"),
        opened(section(written(tmp_path))),
    ):
        assert f"data: training waits for rows of '{tmp_path}'" in caplog.text


def failures(folder: Path) -> list[str]:
    """Return the error messages on this rank."""
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
    assert f"no document with text in the first {BLOCK} rows (data.stream) of" in empty
    assert "of the tokenizer is not in the model's vocabulary of 3000" in large


def test_the_end_of_the_rows_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="partita"), opened(section(written(tmp_path), stream=10**6)) as (corpus, _):
        for step in range(2 * corpus._first.train.num + 1):
            corpus.batch(step, 1)
    assert [record.getMessage() for record in caplog.records if "rows" in record.getMessage()] == [
        f"data: all rows of '{tmp_path}' have been read; they are read again"
    ] * 2


def test_other_blocks_have_another_digest(tmp_path: Path) -> None:
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
