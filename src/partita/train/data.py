"""A text as one sequence of tokens, split into a training and a held-out text, and batches of it.

Invariants: the held-out regions are never trained on. The split depends only on the text, the share and the seed. The
batch of a step is a pure function of (seed, step, data rank), so the data position needs no state. The samples of a
step are the same set for every micro x accumulate x ranks with the same total.
"""

import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from partita.config.resolve import ResolvedBatch
from partita.errors import ConfigError
from partita.train.files import corpus_files
from partita.train.job import DataSection

# Longer texts are cut into regions of this many bytes, so that held-out regions are spread over a long text.
LARGEST_REGION_BYTES = 2**18
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}

Encode = Callable[[bytes], Tensor]


@dataclass(frozen=True)
class Corpus:
    """Two sequences of tokens, [length] each: the training text and the held-out text."""

    train: Tensor
    held_out: Tensor

    def summary(self, token: str) -> str:
        """Describe the size of the text for people."""
        return f"{len(self.train) / 1e6:.2f}M {token}s to train on and {len(self.held_out) / 1e6:.2f}M held out"

    def samples_per_epoch(self, sequence: int) -> int:
        """Return the number of samples of ``sequence`` tokens that have as many tokens as the training text."""
        return -(-len(self.train) // sequence)

    @property
    def digest(self) -> str:
        """A hash that identifies this text and its split."""
        texts = (self.train, self.held_out)
        return " ".join(xxhash.xxh3_64(text.contiguous().view(torch.uint8).numpy().data).hexdigest() for text in texts)


def bytes_to_tokens(text: bytes) -> Tensor:
    """Convert each byte into a token: [length], uint8."""
    return (
        torch.frombuffer(bytearray(text), dtype=torch.uint8)
        if text
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )


def load_corpus(data: DataSection, encode: Encode = bytes_to_tokens) -> Corpus:
    """Read the text and split it.

    Raises:
        ConfigError: there is nothing to read, or too little text for one sample on either side of the split.
    """
    documents = _read_stdlib() if data.corpus == "stdlib" else _read_files(data)
    train_text, held_out_text = split(documents, data.held_out, data.seed)
    corpus = Corpus(encode(train_text), encode(held_out_text))
    shortest = min(len(corpus.train), len(corpus.held_out))
    if shortest <= data.sequence:
        raise ConfigError(
            f"data.corpus '{data.corpus}': {len(corpus.train)} tokens to train on and {len(corpus.held_out)} held out, "
            f"but one sample is data.sequence + 1 = {data.sequence + 1} tokens; use more text, a shorter "
            "data.sequence or another data.held_out"
        )
    return corpus


def split(documents: Sequence[bytes], share: float, seed: int) -> tuple[bytes, bytes]:
    """Return the training text and the held-out text: contiguous regions (complete documents if they are short enough).

    Regions are held out in an order drawn from ``seed`` until they are at least ``share`` of the bytes. Both sides keep
    the order of the text.
    """
    total = sum(map(len, documents))
    length = min(LARGEST_REGION_BYTES, max(1, int(total * share)))
    regions = [text[start : start + length] for text in documents for start in range(0, len(text), length)]
    held_out: set[int] = set()
    missing = total * share
    for index in torch.randperm(len(regions), generator=torch.Generator().manual_seed(seed), device="cpu").tolist():
        if missing <= 0:
            break
        held_out.add(index)
        missing -= len(regions[index])
    train_text = b"".join(region for index, region in enumerate(regions) if index not in held_out)
    return train_text, b"".join(regions[index] for index in sorted(held_out))


@dataclass(frozen=True)
class Batches:
    """The micro-batches of one of ``num_ranks`` data ranks: windows [micro, sequence + 1] of int64 on ``device``."""

    corpus: Corpus
    data: DataSection
    batch: ResolvedBatch
    rank: int
    num_ranks: int
    device: torch.device

    @property
    def tokens_per_step(self) -> int:
        """Tokens predicted in one optimizer step, over all ranks."""
        return self.batch.total * self.data.sequence

    def train(self, step: int) -> Iterator[Tensor]:
        """Yield the ``accumulate`` micro-batches of a step: windows at random places of the training text."""
        text = self.corpus.train
        # torch's generator takes 32 bits of its seed; neighbouring seeds give unrelated numbers.
        generator = torch.Generator().manual_seed(self.data.seed * 1_000_003 + step)
        starts = torch.randint(len(text) - self.data.sequence, (self.batch.total,), generator=generator, device="cpu")
        return self._micro_batches(text, starts)

    def held_out(self, num_batches: int) -> Iterator[Tensor]:
        """Yield this rank's micro-batches of ``num_batches`` full batches: evenly spread windows of the held-out text.

        They are the same every time, and for every micro x accumulate x ranks with the same total.
        """
        text = self.corpus.held_out
        num_windows = num_batches * self.batch.total
        last = len(text) - self.data.sequence - 1
        return self._micro_batches(text, torch.arange(num_windows, device="cpu") * last // max(1, num_windows - 1))

    def num_held_out(self, num_batches: int) -> int:
        """Return the tokens that :meth:`held_out` predicts on all ranks."""
        return num_batches * self.tokens_per_step

    def _micro_batches(self, text: Tensor, starts: Tensor) -> Iterator[Tensor]:
        offsets = torch.arange(self.data.sequence + 1, device="cpu")
        for mine in starts.view(-1, self.num_ranks, self.batch.micro)[:, self.rank]:
            yield text[mine[:, None] + offsets].long().to(self.device, non_blocking=True)


def _read_stdlib() -> list[bytes]:
    """Return the modules of Python's standard library, without its tests, in the order of their paths."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = (path for path in root.rglob("*.py") if not _SKIPPED_FOLDERS & set(path.relative_to(root).parts[:-1]))
    documents = [path.read_bytes() for path in sorted(paths)]
    if not documents:
        raise ConfigError(f"data.corpus 'stdlib': no sources in {root}; name a text file or a folder instead")
    return documents


def _read_files(data: DataSection) -> list[bytes]:
    documents = [file.read_bytes() for file in corpus_files(data)]
    if not any(documents):
        raise ConfigError(
            f"data.corpus: no text in the files '{data.pattern}' of '{data.corpus}'; correct data.pattern"
        )
    return documents
