"""Documents that are read during training: rank 0 reads rows in blocks, one ahead, and all ranks pack the same blocks.

Invariants: the blocks, their samples and the order of these depend on the rows and ``data`` alone, not on the number of
ranks. The position is in ``engine.extra``, so a resumed run continues with the rows that an uninterrupted one would
have read. The held-out documents are those of the first block, and are never trained on.
"""

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import numpy as np

from partita.engine.engine import Engine
from partita.errors import ConfigError
from partita.train.documents import DocumentEncoder
from partita.train.job import DataSection
from partita.train.packing import Sample, Samples, pack, pack_documents, shuffled
from partita.train.rows import START, Place, read_from
from partita.train.tokens import DocumentTokens

# Key in a checkpoint: the position in the stream.
POSITION = "stream"
# Rows between two looks at whether the run has ended.
_BATCH_ROWS = 1000

_log = logging.getLogger("partita")


@dataclass(frozen=True)
class DocumentStream:
    """The documents of ``data``, which are read in blocks of ``data.stream`` rows. ``vocabulary`` is the model's."""

    data: DataSection
    encoder: DocumentEncoder
    vocabulary: int


@dataclass(frozen=True)
class Block:
    """The documents of a block of rows, and the place after it: that of the first row if no row is left."""

    tokens: DocumentTokens
    after: Place


class _Reader:
    """A thread that reads a block ahead of its use."""

    def __init__(self, stream: DocumentStream) -> None:
        self._stream = stream
        self._pool = ThreadPoolExecutor(1, "partita data")
        self._ended = threading.Event()
        self._place: Place | None = None  # of the block that is read ahead
        self._block: Future[Block]
        self._next_place: Place | None = None  # of the blocks that follow
        self._blocks: Iterator[Block] = iter(())

    def start(self, place: Place) -> None:
        """Start to read the block at ``place``."""
        self._place = place
        self._block = self._pool.submit(self._read, place)

    def block(self, place: Place) -> Block:
        """Return the block at ``place``, when it is read.

        Raises:
            ConfigError: it cannot be read.
        """
        if place != self._place:
            self.start(place)
        return self._block.result()

    def close(self) -> None:
        """Stop reading after the next rows."""
        self._ended.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _read(self, place: Place) -> Block:
        if place != self._next_place or place == START:
            self._blocks = self._blocks_from(place)
        self._next_place = None  # not known after an error
        block = next(self._blocks)
        self._next_place = block.after
        return block

    def _blocks_from(self, place: Place) -> Iterator[Block]:
        """Yield the blocks up to the last row."""
        data = self._stream.data
        documents, missing = list[list[int]](), data.stream
        for batch in read_from(place, data, self._stream.encoder, min(data.stream, _BATCH_ROWS)):
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

    def start(self, place: Place) -> None:
        """Start to read the block at ``place``."""
        if self._reader is not None:
            self._reader.start(place)

    def block(self, place: Place) -> Block:
        """Return the block at ``place``. A collective.

        Raises:
            ConfigError: on all ranks: it cannot be read, or has tokens that are not in the vocabulary.
        """
        found: Block | str = ""
        if self._reader is not None:
            try:
                found = self._reader.block(place)
            except ConfigError as error:
                found = str(error)
        found = self._engine.broadcast(found)
        if isinstance(found, str):
            raise ConfigError(found)
        found.tokens.check_vocabulary(self._stream.vocabulary)
        return found

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()


@dataclass
class _Position:
    """The position in a stream.

    Attributes:
        number: blocks before this one, in all passes over the rows.
        place: where this block begins.
        used: samples of this block that have been trained on.
    """

    number: int
    place: Place
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
        self.digest = f"{self._first.digest} {data.stream}"
        self._samples: Samples  # of the block at self._position
        self._position: _Position | None = None
        self._after: Place

    def batch(self, step: int, total: int) -> list[Sample]:
        """Return the next ``total`` samples. A collective where a block ends."""
        position = self._position or self._resumed()
        chosen = list[Sample]()
        while len(chosen) < total:
            while position.used == self._samples.num:
                position = self._enter(_Position(position.number + 1, self._after, 0))
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

    def _resumed(self) -> _Position:
        """Return the position that a checkpoint has restored, or the beginning, after reading the block there."""
        stored = self._engine.extra.get(POSITION)
        if stored is None:
            return self._enter(_Position(0, START, 0))
        position = self._enter(_Position(stored["number"], Place(**stored["place"]), stored["used"]))
        position.used = min(position.used, self._samples.num)  # the rows or the sizes may have changed
        return position

    def _enter(self, position: _Position) -> _Position:
        """Pack the block at a position, and start to read the one after it. A collective."""
        if position.place == START:
            if position.number:
                _log.info("data: all rows of '%s' have been read; they are read again", self._data.corpus)
            self._samples = self._first.train
            self._after = self._after_first
        else:
            block = self._blocks.block(position.place)
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
