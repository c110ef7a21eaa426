"""The tokens of documents in memory-mapped files, which the first process writes and all processes read.

The folder of one set of documents is named by a hash of the rows' files, the tokenizer and the settings. It appears
when it is complete, so an interrupted run leaves no partial one.
"""

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from partita.errors import ConfigError
from partita.train.documents import DocumentEncoder, read_documents, source_identity
from partita.train.job import DataSection

_VERSION = 1
_TOKENS, _ENDS, _FACTS = "tokens.bin", "ends.bin", "facts.json"
_FLUSH_TOKENS = 2**20

_log = logging.getLogger("partita")

Integers = np.ndarray[tuple[int], np.dtype[np.int64]]
Booleans = np.ndarray[tuple[int], np.dtype[np.bool_]]


@dataclass(frozen=True)
class CachedTokens:
    """The tokens of documents, one after the other.

    Attributes:
        stored: [tokens], memory-mapped; ``~token`` for a token that is not predicted.
        ends: [documents], int64: the position after each document's last token.
        largest: the greatest token.
        digest: a hash of the tokens and ends.
    """

    stored: "np.ndarray[tuple[int], np.dtype[np.int32]]"
    ends: "np.ndarray[tuple[int], np.dtype[np.int64]]"
    largest: int
    digest: str

    def read(self, start: int, length: int) -> tuple[Integers, Booleans]:
        """Return some tokens, and whether each is predicted: [length] each."""
        stored = self.stored[start : start + length].astype(np.int64)
        return np.where(stored < 0, ~stored, stored), stored >= 0


def cached_tokens(data: DataSection, encoder: DocumentEncoder) -> CachedTokens:
    """Return the tokens of a job's documents from ``data.cache``, after writing them if they are not there.

    Processes that need the same tokens wait for the one that writes them. If it fails, the next one tries, so every
    process raises the error.

    Raises:
        ConfigError: the documents cannot be read, there are none, or the folder cannot be written.
    """
    assert data.cache is not None, "set by load_job"
    settings = (_VERSION, data.format, data.field, source_identity(data), encoder.identity)
    folder = Path(data.cache, xxhash.xxh3_64(repr(settings).encode()).hexdigest())
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_suffix(".lock")):
            if not folder.exists():
                _write(folder, data, encoder)
        return _opened(folder)
    except OSError as error:
        raise ConfigError(
            f"data.cache: cannot write the tokens into '{folder.parent}': {error.strerror or error}; set data.cache to "
            "a folder with free space in which this user may write"
        ) from error


def _write(folder: Path, data: DataSection, encoder: DocumentEncoder) -> None:
    _log.info("data: converting the documents of '%s' to tokens in '%s'", data.corpus, folder)
    temporary = folder.with_suffix(".new")
    shutil.rmtree(temporary, ignore_errors=True)  # left by a process that was killed
    temporary.mkdir()
    try:
        _write_files(temporary, read_documents(data, encoder))
        if not (temporary / _ENDS).stat().st_size:
            raise ConfigError(
                f"data.corpus: no document with text in '{data.corpus}' (files '{data.pattern}', field "
                f"'{data.field}'); name files with rows, or correct data.pattern or data.field"
            )
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_files(folder: Path, documents: Iterable[list[int]]) -> None:
    digest, largest, num_tokens = xxhash.xxh3_64(), 0, 0
    with open(folder / _TOKENS, "wb") as tokens, open(folder / _ENDS, "wb") as ends:
        for flat, lengths in _blocks(documents):
            positions = num_tokens + np.cumsum(lengths, dtype=np.int64)
            for array, file in ((np.asarray(flat, dtype=np.int32), tokens), (positions, ends)):
                file.write(array.data)
                digest.update(array.data)
            num_tokens, largest = int(positions[-1]), max(largest, max(flat), ~min(flat))
        for file in (tokens, ends):
            file.flush()
            os.fsync(file.fileno())
    facts = {"digest": digest.hexdigest(), "largest": largest}
    (folder / _FACTS).write_text(json.dumps(facts), encoding="utf-8")


def _blocks(documents: Iterable[list[int]]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the tokens of several documents, and their lengths."""
    flat, lengths = list[int](), list[int]()
    for ids in documents:
        flat += ids
        lengths.append(len(ids))
        if len(flat) >= _FLUSH_TOKENS:
            yield flat, lengths
            flat, lengths = [], []
    if lengths:
        yield flat, lengths


def _opened(folder: Path) -> CachedTokens:
    facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
    stored = np.memmap(folder / _TOKENS, dtype=np.int32, mode="r")
    ends = np.memmap(folder / _ENDS, dtype=np.int64, mode="r")
    return CachedTokens(stored, ends, facts["largest"], facts["digest"])


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock of a file inside the block, or wait for it."""
    with open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
