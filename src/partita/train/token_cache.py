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
from pathlib import Path

import numpy as np
import xxhash

from partita.errors import ConfigError
from partita.train.documents import DocumentEncoder
from partita.train.job import DataSection
from partita.train.rows import no_documents, read_documents, source_identity
from partita.train.tokens import DocumentTokens

_VERSION = 2
_TOKENS, _ENDS, _FACTS = "tokens.bin", "ends.bin", "facts.json"
_FLUSH_TOKENS = 2**20

_log = logging.getLogger("partita")


def cached_tokens(data: DataSection, encoder: DocumentEncoder) -> DocumentTokens:
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
            raise no_documents(data)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_files(folder: Path, documents: Iterable[list[int]]) -> None:
    digest, largest, num_tokens = xxhash.xxh3_64(), 0, 0
    with open(folder / _TOKENS, "wb") as tokens, open(folder / _ENDS, "wb") as ends:
        for block in _blocks(documents):
            positions = num_tokens + block.ends
            for array, file in ((block.stored, tokens), (positions, ends)):
                file.write(array.data)
                digest.update(array.data)
            num_tokens, largest = int(positions[-1]), max(largest, block.largest)
        for file in (tokens, ends):
            file.flush()
            os.fsync(file.fileno())
    facts = {"digest": digest.hexdigest(), "largest": largest}
    (folder / _FACTS).write_text(json.dumps(facts), encoding="utf-8")


def _blocks(documents: Iterable[list[int]]) -> Iterator[DocumentTokens]:
    """Yield the tokens of several documents at a time."""
    block, num_tokens = list[list[int]](), 0
    for document in documents:
        block.append(document)
        num_tokens += len(document)
        if num_tokens >= _FLUSH_TOKENS:
            yield DocumentTokens.of(block)
            block, num_tokens = [], 0
    if block:
        yield DocumentTokens.of(block)


def _opened(folder: Path) -> DocumentTokens:
    facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
    stored = np.memmap(folder / _TOKENS, dtype=np.int32, mode="r")
    ends = np.memmap(folder / _ENDS, dtype=np.int64, mode="r")
    return DocumentTokens(stored, ends, facts["largest"], facts["digest"])


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock of a file inside the block, or wait for it."""
    with open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
