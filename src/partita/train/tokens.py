"""The tokens of documents as one array, in memory or memory-mapped."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import xxhash

from partita.errors import ConfigError

Integers = np.ndarray[tuple[int], np.dtype[np.int64]]
Booleans = np.ndarray[tuple[int], np.dtype[np.bool_]]


@dataclass(frozen=True)
class DocumentTokens:
    """The tokens of documents, one after the other.

    Attributes:
        stored: [tokens]; ``~token`` for a token that is not predicted.
        ends: [documents], int64: the position after each document's last token.
        largest: the greatest token; -1 if there is none.
        digest: a hash of the tokens and ends.
    """

    stored: "np.ndarray[tuple[int], np.dtype[np.int32]]"
    ends: "np.ndarray[tuple[int], np.dtype[np.int64]]"
    largest: int
    digest: str

    @classmethod
    def of(cls, documents: Sequence[Sequence[int]]) -> "DocumentTokens":
        """Join documents in memory."""
        stored = np.fromiter(chain.from_iterable(documents), np.int32)
        ends = np.cumsum([len(document) for document in documents], dtype=np.int64)
        largest = max(int(stored.max()), ~int(stored.min())) if len(stored) else -1
        digest = xxhash.xxh3_64(stored.data)
        digest.update(ends.data)
        return cls(stored, ends, largest, digest.hexdigest())

    def check_vocabulary(self, size: int) -> None:
        """Check that all tokens are below ``size``, the model's vocabulary.

        Raises:
            ConfigError: one is not.
        """
        if self.largest >= size:
            raise ConfigError(
                f"data.tokenizer: token {self.largest} of the tokenizer is not in the model's vocabulary of {size} "
                "(vocab_size); use the model's own tokenizer, or a model with more tokens"
            )

    def read(self, start: int, length: int) -> tuple[Integers, Booleans]:
        """Return some tokens, and whether each is predicted: [length] each."""
        stored = self.stored[start : start + length].astype(np.int64)
        return np.where(stored < 0, ~stored, stored), stored >= 0
