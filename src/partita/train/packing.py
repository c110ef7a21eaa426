"""Samples of documents: documents packed into samples of equal length, and the batches of a step.

Invariants: held-out documents are never trained on. Every token of the training documents except each document's first
(if ``data.predict`` chooses answers, every such token of an answer) is predicted once per epoch. Documents in one
sample do not see each other. The batch of a step is a pure function of (seed, step, data rank), so the data position
needs no state; the samples of a step are the same set for every micro x accumulate x ranks with the same total.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
import xxhash

from partita.config.resolve import ResolvedBatch
from partita.errors import ConfigError
from partita.train.job import DataSection
from partita.train.token_cache import CachedTokens, Integers

# Labels that the loss leaves out.
IGNORED = -100
# Padding at the end of samples. It predicts nothing, and nothing before it sees it.
_PADDING = 0


@dataclass(frozen=True)
class Samples:
    """Samples of pieces: documents, or parts of documents that are longer than a sample.

    Attributes:
        starts: [pieces], the position of each piece's first token; pieces of one sample are adjacent.
        lengths: [pieces], at least 2 tokens each.
        first: [samples + 1], the number of each sample's first piece.
    """

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


@dataclass(frozen=True)
class PackedCorpus:
    """Samples of the training documents, and of the held-out documents."""

    tokens: CachedTokens
    train: Samples
    held_out: Samples
    digest: str

    @property
    def sizes(self) -> tuple[int, int]:
        """Tokens to train on, and tokens held out."""
        return int(self.train.lengths.sum()), int(self.held_out.lengths.sum())

    def samples_per_epoch(self, sequence: int) -> int:
        """Return the number of samples that have all training documents. They have ``sequence`` tokens each."""
        return self.train.num


def pack_documents(tokens: CachedTokens, data: DataSection) -> PackedCorpus:
    """Hold out documents, and put both sides into samples of ``data.sequence`` tokens.

    Raises:
        ConfigError: there is only one document; or no answer to predict, or to evaluate on.
    """
    ends = np.asarray(tokens.ends)
    starts = np.concatenate((np.zeros(1, np.int64), ends[:-1]))
    if len(ends) < 2:
        raise ConfigError(
            f"data.corpus: one document in '{data.corpus}', but one is to train on and another one is held out; use "
            "more documents, or data.format: text for one text"
        )
    generator = torch.Generator().manual_seed(data.seed)
    order = torch.randperm(len(ends), generator=generator, device="cpu").numpy()
    total = np.cumsum((ends - starts)[order])
    num_held_out = min(int(np.searchsorted(total, data.held_out * total[-1])) + 1, len(ends) - 1)
    sides = list[Samples]()
    for chosen in (np.sort(order[num_held_out:]), np.sort(order[:num_held_out])):
        pieces = cut(starts[chosen], ends[chosen] - starts[chosen], data.sequence)
        if data.predict == "answers":
            pieces = with_answers(*pieces, tokens)
            if not len(pieces[0]):
                raise ConfigError(
                    f"data.predict: answers, but no message of the assistant in {len(chosen)} "
                    f"{'held-out' if sides else 'training'} documents of '{data.corpus}'; correct the rows, or set "
                    "data.predict to all"
                )
        sides.append(fill_samples(*pieces, data.sequence) if data.pack else one_per_sample(*pieces))
    settings = (tokens.digest, data.held_out, data.seed, data.sequence, data.pack)
    return PackedCorpus(tokens, sides[0], sides[1], xxhash.xxh3_64(repr(settings).encode()).hexdigest())


def cut(starts: Integers, lengths: Integers, width: int) -> tuple[Integers, Integers]:
    """Return the starts and lengths of pieces of at most ``width`` tokens.

    A piece begins with the last token of the piece before it, so that every token except the first is predicted once.
    """
    counts = np.maximum(1, -(-(lengths - 1) // (width - 1)))
    document = np.repeat(np.arange(len(starts)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets = number * (width - 1)
    return starts[document] + offsets, np.minimum(width, lengths[document] - offsets)


def with_answers(starts: Integers, lengths: Integers, tokens: CachedTokens) -> tuple[Integers, Integers]:
    """Return the pieces that have a predicted token besides their first."""
    pieces = zip(starts.tolist(), lengths.tolist(), strict=True)
    chosen = [bool(tokens.read(start + 1, length - 1)[1].any()) for start, length in pieces]
    return starts[chosen], lengths[chosen]


def fill_samples(starts: Integers, lengths: Integers, width: int) -> Samples:
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
    return Samples(starts[order], lengths[order], first)


def one_per_sample(starts: Integers, lengths: Integers) -> Samples:
    """Put each piece into a sample of its own."""
    return Samples(starts, lengths, np.arange(len(starts) + 1))


@dataclass(frozen=True)
class PackedBatches:
    """The micro-batches of one of ``num_ranks`` data ranks: arguments of a causal language model of transformers.

    ``input_ids``, ``labels`` and, for packed documents, ``position_ids`` are [micro, sequence] of int64 on ``device``.
    With ``num_items_in_batch``, the mean of the losses of all micro-batches and ranks is the mean over all predicted
    tokens of the batch.
    """

    corpus: PackedCorpus
    data: DataSection
    batch: ResolvedBatch
    rank: int
    num_ranks: int
    device: torch.device

    @property
    def tokens_per_step(self) -> int:
        """Tokens of the samples of one optimizer step, over all ranks."""
        return self.batch.total * self.data.sequence

    def train(self, step: int) -> Iterator[dict[str, Any]]:
        """Yield the ``accumulate`` micro-batches of a step, which counts from 1.

        Each epoch has every sample once, in an order of its own. A batch may end one epoch and begin the next.
        """
        samples, total = self.corpus.train, self.batch.total
        indices = []
        for place in range((step - 1) * total, step * total):
            epoch, position = divmod(place, samples.num)
            indices.append(int(_order(self.data.seed, epoch, samples.num)[position]))
        return self._micro_batches(samples, indices)

    def held_out(self, num_batches: int) -> Iterator[dict[str, Any]]:
        """Yield this rank's micro-batches of at most ``num_batches`` full batches of held-out samples.

        They are spread evenly over the held-out samples, or are all of them, filled up with samples that count nothing.
        """
        indices = self._held_out_samples(num_batches)
        return self._micro_batches(self.corpus.held_out, [*indices, *[None] * (-len(indices) % self.batch.total)])

    def num_held_out(self, num_batches: int) -> int:
        """Return the tokens that :meth:`held_out` predicts on all ranks."""
        return self._num_targets(self.corpus.held_out, self._held_out_samples(num_batches))

    def _held_out_samples(self, num_batches: int) -> list[int]:
        all_samples = self.corpus.held_out.num
        num = min(num_batches * self.batch.total, all_samples)
        return [place * all_samples // num for place in range(num)]

    def _micro_batches(self, samples: Samples, indices: Sequence[int | None]) -> Iterator[dict[str, Any]]:
        num_targets = self._num_targets(samples, [index for index in indices if index is not None])
        num_micro_batches = len(indices) // self.batch.micro
        mean = torch.tensor(num_targets / num_micro_batches, dtype=torch.float32, device=self.device)
        micro = self.batch.micro
        for begin in range(self.rank * micro, len(indices), self.num_ranks * micro):
            rows = [self._row(samples, index) for index in indices[begin : begin + micro]]
            tokens, labels, positions = (
                torch.from_numpy(np.stack(part)).to(self.device, non_blocking=True) for part in zip(*rows, strict=True)
            )
            arguments = {"input_ids": tokens, "labels": labels}
            if self.data.pack:
                arguments["position_ids"] = positions
            yield {**arguments, "num_items_in_batch": mean, "use_cache": False}

    def _num_targets(self, samples: Samples, indices: Sequence[int]) -> int:
        """Return how many tokens are predicted in these samples."""
        if self.data.predict == "all":
            return int(samples.targets[np.asarray(indices, np.int64)].sum())
        return sum(int((self._row(samples, index)[1] != IGNORED).sum()) for index in indices)

    def _row(self, samples: Samples, index: int | None) -> tuple[Integers, Integers, Integers]:
        """Return the tokens, labels and positions of a sample, [sequence] each; of padding alone for None."""
        width = self.data.sequence
        tokens = np.full(width, _PADDING, np.int64)
        labels = np.full(width, IGNORED, np.int64)
        positions = np.arange(width, dtype=np.int64)
        end = 0
        pieces = range(0) if index is None else range(samples.first[index], samples.first[index + 1])
        for piece in pieces:
            start, length = int(samples.starts[piece]), int(samples.lengths[piece])
            at = slice(end, end + length)
            tokens[at], is_predicted = self.corpus.tokens.read(start, length)
            labels[end + 1 : end + length] = np.where(is_predicted, tokens[at], IGNORED)[1:]
            positions[at] = np.arange(length)
            end += length
        positions[end:] = np.arange(width - end)
        return tokens, labels, positions


@lru_cache(maxsize=2)  # a batch may have samples of two epochs
def _order(seed: int, epoch: int, num: int) -> Integers:
    """Return the order of the samples in an epoch."""
    # torch's generator takes 32 bits of its seed; neighboring seeds give unrelated numbers.
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order: Integers = torch.randperm(num, generator=generator, device="cpu").numpy()
    return order
