"""The corpus of a job, of text or of documents, and checks that need the engine."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from partita.engine.engine import Engine
from partita.errors import PartitaError
from partita.train.data import Batches, Corpus, load_corpus
from partita.train.job import DataSection
from partita.train.models import HuggingFaceModel, ReadyModel, vocabulary_size
from partita.train.packing import IGNORED, DocumentCorpus, PackedBatches, PackedCorpus, pack_documents
from partita.train.stream import DocumentStream, open_stream
from partita.train.token_cache import cached_tokens

AnyCorpus = Corpus | PackedCorpus | DocumentStream
# Relative difference of losses that rounding explains. A document that is seen changes them by more.
_ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 1e-3, torch.float16: 1e-3}
# Predictions at the beginning of a document, which depend most on the document before it if that is seen.
_NUM_PROBED = 8


def load_data(data: DataSection, ready: ReadyModel) -> AnyCorpus:
    """Read the text or the documents of a job, and hold out a part. A stream of documents is not read yet.

    Raises:
        ConfigError: they cannot be read, there are too few, or tokens are not in the model's vocabulary.
    """
    if not isinstance(ready, HuggingFaceModel) or ready.documents is None:
        return load_corpus(data, ready.encode)
    vocabulary = vocabulary_size(ready.module)
    if data.stream:
        return DocumentStream(data, ready.documents, vocabulary)
    tokens = cached_tokens(data, ready.documents)
    tokens.check_vocabulary(vocabulary)
    return pack_documents(tokens, data)


@contextmanager
def open_batches(corpus: AnyCorpus, data: DataSection, engine: Engine) -> Iterator[Batches | PackedBatches]:
    """Return the batches of this rank. Inside the ``with`` block, a stream is read. A collective.

    Raises:
        ConfigError: a stream cannot be read.
        PartitaError: on all ranks: the ranks have different documents, or the model does not separate the documents in
            one sample.
    """
    mesh, batch = engine.mesh, engine.blueprint.resolved.batch
    position = (mesh.coordinate("data"), mesh.size("data"), mesh.device)
    if isinstance(corpus, Corpus):
        yield Batches(corpus, data, batch, *position)
        return
    with ExitStack() as stack:
        documents: DocumentCorpus
        if isinstance(corpus, DocumentStream):
            documents = stack.enter_context(open_stream(corpus, engine))
        else:
            documents = corpus
            _check_equal(corpus, data, engine)
        if data.pack:
            _check_separation(data, engine)
        yield PackedBatches(documents, data, batch, *position)


def model_inputs(batches: Iterator[Tensor] | Iterator[dict[str, Any]], ready: ReadyModel) -> Iterator[dict[str, Any]]:
    """Return micro-batches as arguments of the model."""
    return (batch if isinstance(batch, dict) else ready.inputs(batch) for batch in batches)


def _check_equal(corpus: PackedCorpus, data: DataSection, engine: Engine) -> None:
    """Check that all ranks have the same documents. A collective.

    Raises:
        PartitaError: on all ranks: they have not.
    """
    digests = engine.each(float(int(corpus.digest[:12], 16)))  # 48 bits, which a float has exactly
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise PartitaError(
                f"data.corpus: rank {rank} has other documents than rank 0; give all nodes the same files in "
                f"'{data.corpus}'"
            )


def _check_separation(data: DataSection, engine: Engine) -> None:
    """Compare the losses of a document after two different ones.

    Raises:
        PartitaError: they differ, so the model does not separate documents by ``position_ids``.
    """
    first, second = (_loss_of_second(data, engine, seed) for seed in (1, 2))
    rounding = _ROUNDING[next(engine.module.parameters()).dtype]
    if not abs(first - second) <= rounding * abs(first):
        raise PartitaError(
            f"data.pack: {type(engine.module).__name__} does not separate documents in one sample: a document's loss "
            f"is {first:g} or {second:g}, depending on the document before it; set data.pack to false"
        )


def _loss_of_second(data: DataSection, engine: Engine, seed: int) -> float:
    """Return the loss of the second of two documents in a sample. ``seed`` draws the tokens of the first one."""
    micro, width = engine.blueprint.resolved.batch.micro, data.sequence
    half = width // 2
    tokens = torch.cat((_draw(seed, micro, half, engine), _draw(0, micro, width - half, engine)), dim=1)
    labels = torch.full_like(tokens, IGNORED)
    probed = slice(half + 1, half + 1 + _NUM_PROBED)
    labels[:, probed] = tokens[:, probed]
    positions = torch.cat([torch.arange(length, device="cpu") for length in (half, width - half)]).repeat(micro, 1)
    num = torch.tensor(float((labels != IGNORED).sum()), device="cpu")
    batch = {"input_ids": tokens, "labels": labels, "position_ids": positions, "num_items_in_batch": num}
    on_device = {name: value.to(engine.device) for name, value in batch.items()}
    return engine.eval_batch([{**on_device, "use_cache": False}]).item()


def _draw(seed: int, num: int, length: int, engine: Engine) -> Tensor:
    """Return random tokens: [num, length]. They differ between data ranks."""
    generator = torch.Generator().manual_seed(1000 * seed + engine.mesh.coordinate("data"))
    return torch.randint(vocabulary_size(engine.module), (num, length), generator=generator, device="cpu")
