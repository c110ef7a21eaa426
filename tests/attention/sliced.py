"""Rank functions of ``test_sliced``: sparse attention on slices of a sequence, compared with the full sequence."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

import partita
from partita.attention import Layout, block_sparse, flex
from partita.parallel.sequence import attention, choose
from partita.parallel.sequence.slices import Slices
from tests.attention.reference import BLOCK, dense, layout, mask_of
from tests.attention.test_models import VOCAB, bert, built, decoder, llama, settings, tokens
from tests.kit import seeds
from tests.kit.training import Trained, rank, train_engine, world
from tests.parallel.sequence import connected

LENGTH, WIDTH = 61, 16
DOCUMENTS = ((13, 1, 40, 7), (23, 38))
PADDED = ((0, 45), (9, LENGTH))  # the range of each sample's keys


def batch_mask(chosen: Layout, what: str) -> tuple[dict[str, Tensor], Tensor]:
    """Return the arguments that describe a batch, and its bool mask [samples or 1, 1, queries, keys]."""
    if what == "whole":
        return {}, mask_of(chosen, LENGTH, LENGTH)[None, None]
    mask = torch.zeros(2, 1, LENGTH, LENGTH, dtype=torch.bool)
    if what == "documents":
        for sample, sizes in enumerate(DOCUMENTS):
            start = 0
            for size in sizes:
                mask[sample, 0, start : start + size, start : start + size] = mask_of(chosen, size, size)
                start += size
        numbers = [torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)) for sizes in DOCUMENTS]
        return {"documents": torch.stack(numbers)}, mask
    seen = torch.zeros(2, LENGTH, dtype=torch.bool)
    for sample, (left, stop) in enumerate(PADDED):
        start = left if chosen.causal else 0  # if not causal, earlier queries also see keys
        seen[sample, start:stop] = True
        mask[sample, 0, start:, start:stop] = mask_of(chosen, LENGTH - start, stop - start, first=0)
    return {"seen": seen}, mask


@dataclass
class Alone:
    """Result of attention on slices: the largest difference of output and gradients from full attention, and the bytes
    sent in forward and backward, as counted (``sent``), of the blocks that are read (``expected``), and by the formula.
    """

    off: float
    sent: tuple[int, int]
    expected: tuple[int, int]
    formula: tuple[int, int]


@contextmanager
def by(way: str) -> Iterator[dict[str, Any]]:
    """Make every attention use this method; yield a dict that receives the ``sizes`` of the last one."""
    told = dict[str, Any]()

    def chosen(sizes: choose.Sizes, **others: Any) -> str:
        told["sizes"] = sizes
        return way

    with mock.patch.object(choose, "choose", chosen):
        yield told


def alone(pattern: str, causal: bool, heads: tuple[int, int], what: str, way: str) -> Alone:
    chosen, generator = layout(pattern, causal), seeds.generator(3)
    said, mask = batch_mask(chosen, what)
    shapes = [(2, heads[0], LENGTH, WIDTH), (2, heads[1], LENGTH, WIDTH), (2, heads[1], LENGTH, WIDTH)]
    whole = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    weights = torch.randn(shapes[0], generator=generator)
    expected = dense(*whole, mask)
    (expected * weights).sum().backward()
    with connected() as collectives, by(way) as told:
        slices = Slices.even(LENGTH, collectives.group(("sequence",)), collectives.mesh)
        own = [slices.take(tensor.detach(), 2).clone().requires_grad_() for tensor in whole]
        with attention.on_slices(slices, intercept=False):
            found = block_sparse(*own, chosen, **said)
        forward = collectives.meter.report().sent_bytes("sequence")
        (found * slices.take(weights, 2)).sum().backward()
        backward = collectives.meter.report().sent_bytes("sequence") - forward
    off = [float((found - slices.take(expected, 2)).detach().abs().max())]
    off += [float((mine.grad - slices.take(of.grad, 2)).abs().max()) for mine, of in zip(own, whole, strict=True)]  # type: ignore[operator, arg-type]
    read = _read(mask.expand(2, -1, -1, -1)[:, 0], slices)
    each = heads[1] * 2 * WIDTH * 4
    of_blocks = each * sum(read[other][rank()] for other in range(world()) if other != rank())
    back = each * sum(read[rank()][other] for other in range(world()) if other != rank())
    formula = [told["sizes"].sent_bytes(way, backward=backward)[rank()] for backward in (False, True)]
    return Alone(max(off), (forward, backward), (of_blocks, back), (formula[0], formula[1]))


def _read(mask: Tensor, slices: Slices) -> list[list[int]]:
    """Return the number of a rank's positions (second index) in blocks of which another's queries (first) see a key."""
    filled = F.pad(mask, (0, -LENGTH % BLOCK))
    found = []
    for start, stop in slices.ranges:
        blocks = filled[:, start:stop].any(1).unflatten(1, (-1, BLOCK)).any(2)  # [samples, blocks]
        positions = blocks.repeat_interleave(BLOCK, 1)[:, :LENGTH]
        found.append([int(positions[:, first:behind].sum()) for first, behind in slices.ranges])
    return found


def through_the_gpu_kernel(what: str) -> float:
    """Return the largest difference of uncompiled FlexAttention from the CPU kernel, over the same blocks."""
    chosen = Layout("variable", 48, (5, 16, 24), 1, 1)
    generator = seeds.generator(3)
    own = [torch.randn(2, count, LENGTH, WIDTH, generator=generator) for count in (4, 2, 2)]
    said = batch_mask(chosen, what)[0]
    outputs = []
    with connected() as collectives, by(choose.GATHER_BLOCKS):
        slices = Slices.even(LENGTH, collectives.group(("sequence",)), collectives.mesh)
        for on_gpu in (False, True):
            patch = mock.patch.multiple(flex, runs_on=lambda device: True, _compiled=lambda: flex_attention)
            with attention.on_slices(slices, intercept=False), patch if on_gpu else nullcontext():
                outputs.append(block_sparse(*(slices.take(each, 2) for each in own), chosen, **said))
    return float((outputs[0] - outputs[1]).abs().max())


# -- models ------------------------------------------------------------------------------------------------------------

MODELS = {"llama, packed": llama, "llama, padded": llama, "decoder": decoder, "bert": bert, "direct": None}


class Direct(nn.Module):
    """Block that calls :func:`block_sparse` itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.layer(x).unflatten(-1, (12, 8)).transpose(1, 2).chunk(3, 1)
        return x + block_sparse(q, k, v, layout("longformer", True)).transpose(1, 2).flatten(2)


class Calling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 32)
        self.blocks = nn.ModuleList([Direct(), Direct()])
        self.head = nn.Linear(32, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(name: str, engine: Any) -> Tensor:
    ids = tokens()
    if name == "direct":
        return F.cross_entropy(engine(ids).flatten(0, 1), ids.flatten())
    if name == "decoder":
        found: Tensor = engine(ids, ids.roll(1, 1))
        return found
    seen = torch.ones(2, LENGTH, dtype=torch.long)
    if name == "bert":
        seen[0, 40:] = 0
        direction = torch.randn(32, generator=seeds.generator(1))
        states = engine(input_ids=ids, attention_mask=seen).last_hidden_state
        return (states * direction)[seen.bool()].mean()
    if name == "llama, packed":
        positions = torch.stack([torch.cat([torch.arange(size) for size in sizes]) for sizes in DOCUMENTS])
        return engine(input_ids=ids, position_ids=positions, labels=ids).loss  # type: ignore[no-any-return]
    seen[0, :9] = 0
    labels = ids.masked_fill(seen == 0, -100)
    return engine(input_ids=ids, attention_mask=seen, labels=labels).loss  # type: ignore[no-any-return]


def trained(name: str, pattern: str, sections: dict[str, Any]) -> Trained:
    """Train for two steps; keep the first step's gradients, and the engine's explanation after each step."""
    config = {"attention": settings(pattern), "optimizer": {"lr": 1e-3, "eps": 1e-4}, **sections}
    if name == "direct":
        del config["attention"]
    with partita.initialize(built(MODELS[name] or Calling), config) as engine:
        return train_engine(
            engine,
            lambda model, data, step: loss_of(name, model),
            2,
            keep=(0,),
            mean=True,
            look=lambda engine, step: engine.explain(),
        )


def dense_layers_beside() -> float:
    """Return the loss of a model in which only one layer has a pattern."""
    config = {"attention": {**settings("sliding"), "layers": ["model.layers.1.*"]}, "parallel": {"sequence": world()}}
    with partita.initialize(built(llama), config) as engine:
        return engine.mean(loss_of("llama, padded", engine)).item()


def refused(what: str) -> None:
    """Call :func:`block_sparse` with unsupported arguments; raises an error."""
    chosen = layout("sliding", True)
    with connected() as collectives:
        slices = Slices.even(LENGTH, collectives.group(("sequence",)), collectives.mesh)
        q = torch.randn(2, 4, slices.num_own, WIDTH)
        with attention.on_slices(slices, intercept=False):
            if what == "keys":
                block_sparse(q, torch.cat((q, q), 2), torch.cat((q, q), 2), chosen)
            elif what == "seen":
                block_sparse(q, q, q, chosen, seen=torch.ones(2, slices.num_own, dtype=torch.bool))
            elif what == "layout":
                block_sparse(q, q, q, Layout("user", BLOCK, rows=("10", "11")))
