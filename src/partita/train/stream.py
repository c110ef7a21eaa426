"""Documents that are read during training: rank 0 reads rows in blocks, one ahead, and all ranks pack the same blocks.

Invariants: the blocks, their samples and their order depend on the rows and ``data`` alone, not on the number of ranks.
The position is in ``engine.extra``, so a resumed run continues with the rows that an uninterrupted one would have read.
The held-out documents are a share of the first block's, and are never trained on.
"""

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import numpy as np

from partita.engine.engine import Engine
from partita.errors import ConfigError
from partita.train.documents import DocumentEncoder
from partita.train.job import DataSection
from partita.train.packing import Sample, Samples, pack, pack_documents, shuffled
from partita.train.rows import START, RowPosition, read_from
from partita.train.tokens import DocumentTokens

# Key in a checkpoint: the position in the stream.
POSITION = "stream"
# Seconds after which ranks that wait for a block are told that rank 0 is still reading it.
WAIT_S = 10.0

_log = logging.getLogger("partita")


@dataclass(frozen=True)
class DocumentStream:
    """The documents of ``data``, which are read in blocks of ``data.stream`` rows. ``vocabulary`` is the model's."""

    data: DataSection
    encoder: DocumentEncoder
    vocabulary: int


@dataclass(frozen=True)
class Block:
    """The documents of a block of rows, and the position of the next block: START after the last row."""

    tokens: DocumentTokens
    after: RowPosition


class _Reader:
    """Rank 0's thread that reads one block ahead."""

    def __init__(self, stream: DocumentStream) -> None:
        self._stream = stream
        self._pool = ThreadPoolExecutor(1, "partita data")
        self._ended = threading.Event()
        self._ahead: tuple[RowPosition, Future[Block]] | None = None
        self._blocks: Iterator[Block] = iter(())
        self._next: RowPosition | None = None  # of the block that self._blocks yields next

    def start(self, position: RowPosition) -> Future[Block]:
        """Start to read the block at ``position``, if that has not begun."""
        if self._ahead is None or self._ahead[0] != position:
            self._ahead = position, self._pool.submit(self._read, position)
        return self._ahead[1]

    def close(self) -> None:
        """Stop reading after the current batch of rows, and wait for that."""
        self._ended.set()
        self._pool.shutdown(cancel_futures=True)

    def _read(self, position: RowPosition) -> Block:
        if position != self._next:
            self._blocks = self._blocks_from(position)
        self._next = None  # if there is an error
        block = next(self._blocks)
        self._next = None if block.after == START else block.after
        return block

    def _blocks_from(self, position: RowPosition) -> Iterator[Block]:
        """Yield the blocks up to the last row."""
        data = self._stream.data
        documents, missing = list[list[int]](), data.stream
        for batch in read_from(position, data, self._stream.encoder):
            if self._ended.is_set():
                return
            documents += batch.documents
            missing -= batch.num_rows
            if missing <= 0:
                yield Block(DocumentTokens.of(documents), batch.after)
                documents, missing = [], data.stream
        yield Block(DocumentTokens.of(documents), START)


class _SharedBlocks:
    """Blocks that rank 0 reads, on every rank."""

    def __init__(self, stream: DocumentStream, engine: Engine) -> None:
        self._stream = stream
        self._engine = engine
        self._reader = _Reader(stream) if engine.is_main else None

    def start(self, position: RowPosition) -> None:
        """Start to read the block at ``position``."""
        if self._reader is not None:
            self._reader.start(position)

    def block(self, position: RowPosition) -> Block:
        """Wait for the block at ``position``. A collective.

        Raises:
            ConfigError: on all ranks: it cannot be read, or has tokens that are not in the vocabulary.
        """
        future = None if self._reader is None else self._reader.start(position)
        while not self._engine.broadcast(future is not None and bool(wait([future], WAIT_S).done)):
            if self._engine.is_main:
                _log.info("data: training waits for rows of '%s'", self._stream.data.corpus)
        found: Block | str = self._engine.broadcast(None if future is None else _outcome(future))
        if future is not None:
            found = future.result()  # raises the error of the reading thread
        if isinstance(found, str):
            raise ConfigError(found)
        found.tokens.check_vocabulary(self._stream.vocabulary)
        return found

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()


def _outcome(future: Future[Block]) -> Block | str:
    """Return the block that was read, or, after an error, the message for the other ranks."""
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, ConfigError):
        return str(error)
    return f"data.corpus: rank 0 cannot read the documents: {type(error).__name__}: {error}; see its error"


@dataclass
class StreamPosition:
    """The position in a stream.

    Attributes:
        number: the number of earlier blocks, in all passes over the rows.
        block: where this block begins.
        used: the number of this block's samples that have been trained on.
    """

    number: int
    block: RowPosition
    used: int


class StreamedCorpus:
    """Samples of the block that is trained on, and of the first block's held-out documents."""

    def __init__(self, data: DataSection, blocks: _SharedBlocks, engine: Engine) -> None:
        self._data = data
        self._blocks = blocks
        self._engine = engine
        first = blocks.block(START)
        self._first = pack_documents(first.tokens, data)
        self._after_first = first.after
        self.held_out = self._first.held_out
        self.digest = self._first.digest
        self._position: StreamPosition | None = None  # None: training has not begun
        self._samples: Samples  # of the block at the position
        self._after: RowPosition

    def batch(self, first: int, total: int) -> list[Sample]:
        """Return the next ``total`` samples; the position decides, not ``first``. A collective where a block ends."""
        position = self._position or self._resumed()
        chosen = list[Sample]()
        while len(chosen) < total:
            while position.used == self._samples.num:
                position = self._enter(StreamPosition(position.number + 1, self._after, 0))
            index = shuffled(self._data.seed, position.number, self._samples.num)[position.used]
            chosen.append(Sample(self._samples, int(index)))
            position.used += 1
        self._engine.extra[POSITION] = asdict(position)
        return chosen

    def summary(self, token: str) -> str:
        """Describe the size of the corpus for people."""
        return (
            f"blocks of {self._data.stream:,} rows to train on and {self.held_out.num_tokens / 1e6:.2f}M {token}s held "
            "out"
        )

    def _resumed(self) -> StreamPosition:
        """Return the position that a checkpoint has restored, or the beginning, after reading the block there."""
        stored = self._engine.extra.get(POSITION)
        if stored is None:
            return self._enter(StreamPosition(0, START, 0))
        position = self._enter(StreamPosition(stored["number"], RowPosition(**stored["block"]), stored["used"]))
        position.used = min(position.used, self._samples.num)  # the rows or the sizes may have changed
        return position

    def _enter(self, position: StreamPosition) -> StreamPosition:
        """Pack the block at a position, and start to read the one after it. A collective."""
        if position.block == START:
            if position.number and self._engine.is_main:
                _log.info("data: all rows of '%s' have been read; they are read again", self._data.corpus)
            self._samples = self._first.train
            self._after = self._after_first
        else:
            block = self._blocks.block(position.block)
            self._samples = pack(block.tokens, np.arange(len(block.tokens.ends)), self._data)
            self._after = block.after
        if self._after != START:
            self._blocks.start(self._after)
        self._position = position
        return position


@contextmanager
def open_stream(stream: DocumentStream, engine: Engine) -> Iterator[StreamedCorpus]:
    """Read the first block, and read on inside the ``with`` block. A collective.

    Raises:
        ConfigError: on all ranks: the rows cannot be read, or there are too few documents in the first block.
    """
    blocks = _SharedBlocks(stream, engine)
    try:
        yield StreamedCorpus(stream.data, blocks, engine)
    finally:
        blocks.close()
