"""Rows of files or of a data set, which are read in batches and converted to tokens.

The library ``datasets`` reads the rows, so files are never completely in memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from partita.config.messages import shown
from partita.errors import ConfigError
from partita.train.documents import DocumentEncoder
from partita.train.files import corpus_files
from partita.train.job import DataSection

_BATCH_ROWS = 1000
# Files that mark the folder of a data set that was written by datasets' save_to_disk.
_SAVED = ("state.json", "dataset_dict.json")


@dataclass(frozen=True)
class RowPosition:
    """A position between two rows: after ``row`` rows of the ``source`` (a file in ``data.corpus``, or all of it).

    ``state`` is that of ``datasets`` there, for batches of ``batch_rows`` rows, from which reading continues.
    """

    source: str = ""  # empty: the first one
    row: int = 0
    state: dict[str, Any] | None = None
    batch_rows: int = 0


START = RowPosition()


class ReadBatch(NamedTuple):
    """The tokens of the documents in ``num_rows`` rows (rows without text have none), and the position after them."""

    documents: list[list[int]]
    num_rows: int
    after: RowPosition


def source_identity(data: DataSection) -> str:
    """Return a text that changes when the rows may have changed: paths, sizes and times of files.

    Raises:
        ConfigError: ``data.corpus`` does not exist.
    """
    path = Path(data.corpus)
    if data.format != "hf":
        files = corpus_files(data)
    elif path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
    else:
        return repr((data.corpus, data.split, _data_set(data)._fingerprint))
    states = [(file.resolve().as_posix(), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return repr((data.split, states))


def read_documents(data: DataSection, encoder: DocumentEncoder) -> Iterator[list[int]]:
    """Yield the tokens of each document, in the order of the rows.

    Raises:
        ConfigError: a file cannot be read, a row lacks the field or has something else in it, or the chat template
            does not accept its messages. The message names the file and the row.
    """
    for batch in read_from(START, data, encoder):
        yield from batch.documents


def read_from(position: RowPosition, data: DataSection, encoder: DocumentEncoder) -> Iterator[ReadBatch]:
    """Yield the documents after a position, some rows at a time: at most ``data.stream``, if that is set.

    Only positions of a stream have a state; reading cannot continue from others.

    Raises:
        ConfigError: as in :func:`read_documents`; or the file of the position does not exist any more.
    """
    sources = _sources(data)
    names = list(sources)
    if position.source and position.source not in names:
        raise ConfigError(
            f"data.corpus: the checkpoint continues after row {position.row} of '{position.source}', which is not in "
            f"'{data.corpus}' any more; restore the file, or begin a new run"
        )
    for source in names[names.index(position.source) if position.source else 0 :]:
        begin = RowPosition(source, batch_rows=min(data.stream or _BATCH_ROWS, _BATCH_ROWS))
        if source == position.source:
            begin = position
        name, open_rows = sources[source]
        row = begin.row
        for batch, state in _batches(name, open_rows, begin, data):
            values = _column(batch, name, row, data)
            try:
                documents = list(encoder.encode(values))
            except Exception as error:  # a template raises errors of Jinja and its own ones
                if encoder.template is None:
                    raise
                raise ConfigError(
                    f"data.chat_template: messages in rows {row + 1} to {row + len(values)} of '{name}' do "
                    f"not fit the template: {_first_line(error)}; correct data.chat_template, or the rows"
                ) from error
            row += len(values)
            yield ReadBatch(documents, len(values), RowPosition(source, row, state, begin.batch_rows))


def _sources(data: DataSection) -> dict[str, tuple[str, Callable[[], Any]]]:
    """Return the sources of rows, by their name in ``data.corpus``: the name for messages, and a function that opens
    the rows.
    """
    if data.format == "hf":
        return {data.split: (data.corpus, lambda: _data_set(data))}
    files = [file for file in corpus_files(data) if file.stat().st_size]
    folder = Path(data.corpus) if Path(data.corpus).is_dir() else Path(data.corpus).parent
    return {file.relative_to(folder).as_posix(): (str(file), _rows_of(file, data.format)) for file in files}


def place_of(data: DataSection) -> str:
    """Describe for a message where documents are looked for."""
    return f"the first {data.stream:,} rows (data.stream) of '{data.corpus}'" if data.stream else f"'{data.corpus}'"


def no_documents(data: DataSection) -> ConfigError:
    """Return the error of rows without text."""
    return ConfigError(
        f"data.corpus: no document with text in {place_of(data)} (files '{data.pattern}', field '{data.field}'); name "
        "files with rows, or correct data.pattern or data.field"
    )


def _batches(
    name: str, open_rows: Callable[[], Any], begin: RowPosition, data: DataSection
) -> Iterator[tuple[Mapping[str, Sequence[Any]], dict[str, Any] | None]]:
    """Yield the rows after a position in batches: the values by field, and in a stream, the state after them.

    Errors of ``datasets`` are raised as the user's errors.
    """
    try:
        rows = open_rows()
        if begin.state is not None:
            rows.load_state_dict(begin.state)
        for batch in rows.iter(batch_size=begin.batch_rows):
            yield batch, rows.state_dict() if data.stream else None
    except ConfigError:
        raise
    except Exception as error:  # datasets raises its own errors, and those of pyarrow and pandas
        cause = error.__cause__ or error
        resumed = f" after row {begin.row}, where a checkpoint continues" if begin.row else ""
        raise ConfigError(
            f"data.corpus: '{name}' cannot be read as {data.format}{resumed}: {_first_line(cause)}; correct the file, "
            "or set data.format to its format"
        ) from error


def _column(batch: Mapping[str, Sequence[Any]], name: str, first: int, data: DataSection) -> Sequence[Any]:
    """Return the documents of a batch whose first row is number ``first``, counted from 0."""
    if data.field not in batch:
        raise ConfigError(
            f"data.field: rows of '{name}' have no field '{data.field}', only {', '.join(map(repr, batch))}; set "
            "data.field to one of them"
        )
    kind, expected = (str, "a text") if data.chat_template is None else (list, "a list of messages")
    for index, value in enumerate(batch[data.field]):
        if not isinstance(value, kind):
            got = "nothing" if value is None else f"{shown(value)} ({type(value).__name__})"
            remedy = "set data.chat_template" if isinstance(value, list) else "correct the row, or set data.field"
            raise ConfigError(
                f"data.field: row {first + index + 1} of '{name}' has {got} in '{data.field}', expected {expected}; "
                f"{remedy}"
            )
    return batch[data.field]


def _rows_of(file: Path, file_format: str) -> Callable[[], Any]:
    """Return a function that opens a file's rows, as a data set that is read batch by batch."""
    builder = {"jsonl": "json", "parquet": "parquet"}[file_format]
    return lambda: _datasets().load_dataset(builder, data_files=str(file), split="train", streaming=True)


def _data_set(data: DataSection) -> Any:
    """Open the data set that ``data.corpus`` names: a folder, or a name that ``datasets`` finds.

    For a stream, nothing is downloaded or converted in advance.
    """
    library, path = _datasets(), Path(data.corpus)
    try:
        if not any((path / name).exists() for name in _SAVED):
            return library.load_dataset(data.corpus, split=data.split, streaming=data.stream > 0)
        found = library.load_from_disk(data.corpus)
        if isinstance(found, Mapping):
            if data.split not in found:
                raise ConfigError(
                    f"data.split: '{data.corpus}' has no split '{data.split}', only "
                    f"{', '.join(map(repr, found))}; set data.split to one of them"
                )
            found = found[data.split]
        return found.to_iterable_dataset() if data.stream else found
    except ConfigError:
        raise
    except Exception as error:  # datasets raises its own errors, and those of files and networks
        raise ConfigError(
            f"data.corpus: datasets cannot open '{data.corpus}': {_first_line(error)}; name a folder, or a data set "
            "that load_dataset finds"
        ) from error


def _datasets() -> Any:
    try:
        import datasets
    except ImportError:
        raise ConfigError("data.format: documents need the package datasets: pip install datasets") from None
    library: Any = datasets
    library.disable_progress_bars()
    return library


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
