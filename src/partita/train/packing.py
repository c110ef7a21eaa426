"""Samples of documents: documents packed into samples of equal length, and the batches of a step.

Invariants: held-out documents are never trained on. Every token of the training documents except each document's first
(if ``data.predict`` chooses answers, every such token of an answer) is predicted once per epoch. Documents in one
sample do not see each other. The samples of a step are the same set for every micro x accumulate x ranks with the same
total. Those of a :class:`PackedCorpus` are a pure function of the seed and the number of earlier samples.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import xxhash

from partita.config.resolve import ResolvedBatch
from partita.errors import ConfigError
from partita.train.job import DataSection
from partita.train.rows import no_documents, place_of
from partita.train.tokens import DocumentTokens, Integers

# Labels that the loss leaves out.
IGNORED = -100
# Padding at the end of samples. It predicts nothing, and nothing before it sees it.
_PADDING = 0


@dataclass(frozen=True)
class Samples:
    """Samples of pieces: documents, or parts of documents that are longer than a sample.

    Attributes:
        tokens: the tokens of the documents.
        starts: [pieces], the position of each piece's first token; pieces of one sample are adjacent.
        lengths: [pieces], at least 2 tokens each.
        first: [samples + 1], the number of each sample's first piece.
    """

    tokens: DocumentTokens
    starts: Integers
    lengths: Integers
    first: Integers

    @property
    def num(self) -> int:
        return len(self.first) - 1

    @cached_property
    def targets(self) -> Integers:
        """Tokens of each sample that may be predicted: all of a piece except its first. [samples]"""
        return np.add.reduceat(self.lengths - 1, self.first[:-1])

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    def row(self, index: int, width: int) -> "Row":
        """Return a sample, filled up with padding to ``width`` tokens."""
        row = Row.padding(width)
        end = 0
        for piece in range(self.first[index], self.first[index + 1]):
            start, length = int(self.starts[piece]), int(self.lengths[piece])
            at = slice(end, end + length)
            row.tokens[at], is_predicted = self.tokens.read(start, length)
            row.labels[end + 1 : end + length] = np.where(is_predicted, row.tokens[at], IGNORED)[1:]
            row.positions[at] = np.arange(length)
            end += length
        row.positions[end:] = np.arange(width - end)
        return row


class Sample(NamedTuple):
    """A sample: its number in ``samples``."""

    samples: Samples
    number: int


class Row(NamedTuple):
    """The tokens, labels and positions of a sample, [sequence] each."""

    tokens: Integers
    labels: Integers
    positions: Integers

    @classmethod
    def padding(cls, width: int) -> "Row":
        """Return a sample without a token to predict."""
        return cls(np.full(width, _PADDING, np.int64), np.full(width, IGNORED, np.int64), np.arange(width))


class DocumentCorpus(Protocol):
    """Samples of documents to train on, and of documents that are held out."""

    @property
    def held_out(self) -> Samples: ...

    @property
    def digest(self) -> str:
        """A hash that identifies the documents and their split."""
        ...

    def batch(self, first: int, total: int) -> list[Sample]:
        """Return ``total`` samples, from number ``first`` on. Numbers begin at 0 and continue in the next epoch."""
        ...

    def summary(self, token: str) -> str:
        """Describe the size of the corpus for people."""
        ...


@dataclass(frozen=True)
class PackedCorpus:
    """Samples of the training documents, and of the held-out documents."""

    train: Samples
    held_out: Samples
    digest: str
    seed: int

    def samples_per_epoch(self, sequence: int) -> int:
        """Return the number of samples that have all training documents. They have ``sequence`` tokens each."""
        return self.train.num

    def batch(self, first: int, total: int) -> list[Sample]:
        """Return ``total`` samples, from number ``first`` on.

        Each epoch has every sample once, in an order of its own. A batch may end one epoch and begin the next.
        """
        places = (divmod(place, self.train.num) for place in range(first, first + total))
        return [
            Sample(self.train, int(shuffled(self.seed, epoch, self.train.num)[position])) for epoch, position in places
        ]

    def summary(self, token: str) -> str:
        """Describe the size of the corpus for people."""
        return (
            f"{self.train.num_tokens / 1e6:.2f}M {token}s to train on and {self.held_out.num_tokens / 1e6:.2f}M held "
            "out"
        )


def pack_documents(tokens: DocumentTokens, data: DataSection) -> PackedCorpus:
    """Hold out documents, and put both sides into samples of ``data.sequence`` tokens.

    Raises:
        ConfigError: there is no document, or only one; or no answer to predict, or to evaluate on.
    """
    lengths = np.diff(tokens.ends, prepend=0)
    if not len(lengths):
        raise no_documents(data)
    if len(lengths) < 2:
        raise ConfigError(
            f"data.corpus: one document in {place_of(data)}, but one is to train on and another one is held out; use "
            f"{'more rows' if data.stream else 'more documents, or data.format: text for one text'}"
        )
    generator = torch.Generator().manual_seed(data.seed)
    order = torch.randperm(len(lengths), generator=generator, device="cpu").numpy()
    total = np.cumsum(lengths[order])
    num_held_out = min(int(np.searchsorted(total, data.held_out * total[-1])) + 1, len(lengths) - 1)
    train = pack(tokens, np.sort(order[num_held_out:]), data)
    held_out = pack(tokens, np.sort(order[:num_held_out]), data)
    for documents, side in (("training", train), ("held-out", held_out)):
        if not side.num:
            raise ConfigError(
                f"data.predict: answers, but no message of the assistant in the {documents} documents of "
                f"{place_of(data)}; {'use more rows, ' if data.stream else ''}correct the rows, or set data.predict to "
                "all"
            )
    settings = (tokens.digest, data.held_out, data.seed, data.sequence, data.pack)
    return PackedCorpus(train, held_out, xxhash.xxh3_64(repr(settings).encode()).hexdigest(), data.seed)


def pack(tokens: DocumentTokens, documents: Integers, data: DataSection) -> Samples:
    """Put the documents of these numbers into samples of ``data.sequence`` tokens."""
    lengths = np.diff(tokens.ends, prepend=0)[documents]
    pieces = cut(tokens.ends[documents] - lengths, lengths, data.sequence)
    if data.predict == "answers":
        pieces = with_answers(*pieces, tokens)
    return fill_samples(tokens, *pieces, data.sequence) if data.pack else one_per_sample(tokens, *pieces)


def cut(starts: Integers, lengths: Integers, width: int) -> tuple[Integers, Integers]:
    """Return the starts and lengths of pieces of at most ``width`` tokens.

    A piece begins with the last token of the piece before it, so that every token except the first is predicted once.
    """
    counts = np.maximum(1, -(-(lengths - 1) // (width - 1)))
    document = np.repeat(np.arange(len(starts)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets = number * (width - 1)
    return starts[document] + offsets, np.minimum(width, lengths[document] - offsets)


def with_answers(starts: Integers, lengths: Integers, tokens: DocumentTokens) -> tuple[Integers, Integers]:
    """Return the pieces that have a predicted token besides their first."""
    pieces = zip(starts.tolist(), lengths.tolist(), strict=True)
    chosen = [bool(tokens.read(start + 1, length - 1)[1].any()) for start, length in pieces]
    return starts[chosen], lengths[chosen]


def fill_samples(tokens: DocumentTokens, starts: Integers, lengths: Integers, width: int) -> Samples:
    """Put pieces into samples of ``width`` tokens by best fit, the longest first (Ding et al., 2024).

    A piece is put where the least space remains, or into a new sample. Pieces are never cut.
    """
    open_samples: list[list[int]] = [[] for _ in range(width + 1)]  # by their free tokens
    nonempty = 0  # bit n: there is an open sample with n free tokens
    sample_of = np.empty(len(lengths), np.int64)
    num = 0
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        fitting = nonempty >> length
        if fitting:
            free = length + (fitting & -fitting).bit_length() - 1
            sample = open_samples[free].pop()
            if not open_samples[free]:
                nonempty &= ~(1 << free)
        else:
            free, sample, num = width, num, num + 1
        sample_of[piece] = sample
        free -= length
        if free > 1:
            open_samples[free].append(sample)
            nonempty |= 1 << free
    order = np.argsort(sample_of, kind="stable")
    first = np.searchsorted(sample_of[order], np.arange(num + 1))
    return Samples(tokens, starts[order], lengths[order], first)


def one_per_sample(tokens: DocumentTokens, starts: Integers, lengths: Integers) -> Samples:
    """Put each piece into a sample of its own."""
    return Samples(tokens, starts, lengths, np.arange(len(starts) + 1))


@dataclass(frozen=True)
class PackedBatches:
    """The micro-batches of one of ``num_ranks`` data ranks: arguments of a causal language model of transformers.

    ``input_ids``, ``labels`` and, for packed documents, ``position_ids`` are [micro, sequence] of int64 on ``device``.
    With ``num_items_in_batch``, the mean of the losses of all micro-batches and ranks is the mean over all predicted
    tokens of the batch.
    """

    corpus: DocumentCorpus
    data: DataSection
    batch: ResolvedBatch
    rank: int
    num_ranks: int
    device: torch.device

    @property
    def tokens_per_step(self) -> int:
        """Tokens of the samples of one optimizer step, over all ranks."""
        return self.batch.total * self.data.sequence

    def train(self, first: int) -> Iterator[dict[str, Any]]:
        """Yield the ``accumulate`` micro-batches of a step whose first sample has this number, which counts from 0."""
        return self._micro_batches(self.corpus.batch(first, self.batch.total))

    def held_out(self, num_batches: int) -> Iterator[dict[str, Any]]:
        """Yield this rank's micro-batches of at most ``num_batches`` full batches of held-out samples.

        They are spread evenly over the held-out samples, or are all of them, filled up with samples that count nothing.
        """
        chosen = self._held_out_samples(num_batches)
        return self._micro_batches([*chosen, *[None] * (-len(chosen) % self.batch.total)])

    def num_held_out(self, num_batches: int) -> int:
        """Return the tokens that :meth:`held_out` predicts on all ranks."""
        return self._num_targets(self._held_out_samples(num_batches))

    def _held_out_samples(self, num_batches: int) -> list[Sample]:
        samples = self.corpus.held_out
        num = min(num_batches * self.batch.total, samples.num)
        return [Sample(samples, place * samples.num // num) for place in range(num)]

    def _micro_batches(self, chosen: Sequence[Sample | None]) -> Iterator[dict[str, Any]]:
        """Yield this rank's micro-batches of a batch, which has padding in place of None."""
        micro = self.batch.micro
        num_targets = self._num_targets([sample for sample in chosen if sample is not None])
        mean = torch.tensor(num_targets / (len(chosen) // micro), dtype=torch.float32, device=self.device)
        for begin in range(self.rank * micro, len(chosen), self.num_ranks * micro):
            rows = [self._row(sample) for sample in chosen[begin : begin + micro]]
            tokens, labels, positions = (
                torch.from_numpy(np.stack(part)).to(self.device, non_blocking=True) for part in zip(*rows, strict=True)
            )
            arguments = {"input_ids": tokens, "labels": labels}
            if self.data.pack:
                arguments["position_ids"] = positions
            yield {**arguments, "num_items_in_batch": mean, "use_cache": False}

    def _num_targets(self, chosen: Sequence[Sample]) -> int:
        """Return how many tokens are predicted in these samples."""
        if self.data.predict == "all":
            return sum(int(samples.targets[number]) for samples, number in chosen)
        return sum(int((self._row(sample).labels != IGNORED).sum()) for sample in chosen)

    def _row(self, sample: Sample | None) -> Row:
        width = self.data.sequence
        return Row.padding(width) if sample is None else sample.samples.row(sample.number, width)


@lru_cache(maxsize=2)  # a batch may have samples of two epochs
def shuffled(seed: int, epoch: int, num: int) -> Integers:
    """Return the order of ``num`` samples in an epoch."""
    # torch's generator takes 32 bits of its seed; neighboring seeds give unrelated numbers.
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order: Integers = torch.randperm(num, generator=generator, device="cpu").numpy()
    return order
