"""What is learned with block-sparse attention, beside dense attention at equal tokens.

    python -m benchmarks.sparse_learning             # copies over 8k bytes, text at 4k bytes: about four hours
    python -m benchmarks.sparse_learning --short     # copies over 512 bytes, text at 512 bytes: 20 minutes
    python -m benchmarks.sparse_learning --quick     # copies over 256 bytes, text at 256, a few steps: no targets
    python -m benchmarks.sparse_learning --save      # into benchmarks/results/sparse_learning.md

Two tasks, each the same decoder, samples and order for every pattern, by the config alone: the loss of the second half
of samples whose second half repeats the first, which takes seeing as far back as half of the sample (as the layout of
one's own does, which has the blocks there, too: a window passes on no more than a few bytes a layer); and the held-out
loss of the standard library's text. It ends with status 1 where a target is missed. The short form has the same tasks
with fewer symbols and fewer bytes: it says whether the patterns learn, and not how far they see.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import partita
from benchmarks._common import Report, parser
from benchmarks._work import OPTIMIZER
from partita.train.data import Corpus, load_corpus
from partita.train.decoder import Decoder, DecoderShape
from partita.train.job import DataSection

# How far a pattern's held-out loss may be above dense attention's.
TARGET = 1.02
DENSE = "dense"
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Scale:
    """Sizes of a task: a sample's bytes, samples of a step, steps, the patterns' window and block, and how many symbols
    are copied (None: it is text).
    """

    length: int
    batch: int
    steps: int
    window: int
    block: int
    symbols: int | None = None

    def patterns(self) -> dict[str, dict[str, Any]]:
        same = {"block": self.block, "window": self.window, "global": 1}
        near: dict[str, dict[str, Any]] = {
            DENSE: {},
            "longformer": {"pattern": "longformer", **same},
            "bigbird": {"pattern": "bigbird", **same, "random": 2},
            "fixed": {"pattern": "fixed", **same},
        }
        if self.symbols is None:
            return near
        return {DENSE: {}, "user": {"pattern": "user", "block": self.block, "layout": self.far()}}

    def far(self) -> list[str]:
        """Rows of blocks: the window, and the blocks half a sample before."""
        num, back = self.length // self.block, self.length // 2 // self.block
        near, around = self.window // self.block, (back - 1, back, back + 1)
        return ["".join("1" if 0 <= q - k <= near or q - k in around else "0" for k in range(num)) for q in range(num)]


COPY = Scale(length=8192, batch=2, steps=1500, window=1024, block=128, symbols=256)
TEXT = Scale(length=4096, batch=2, steps=1500, window=1024, block=128)
SHORT_COPY = Scale(length=512, batch=16, steps=1200, window=64, block=32, symbols=16)
SHORT_TEXT = Scale(length=512, batch=8, steps=800, window=128, block=32)
QUICK_COPY = Scale(length=256, batch=4, steps=3, window=64, block=32, symbols=16)
QUICK_TEXT = Scale(length=256, batch=4, steps=3, window=64, block=32)
SHAPE = DecoderShape(layers=4, width=128, heads=4, kv_heads=4, ffn_width=344)
SHORT_SHAPE = replace(SHAPE, layers=2, width=64, heads=2, kv_heads=2, ffn_width=172)
QUICK_SHAPE = replace(SHAPE, layers=2, width=32, ffn_width=64)


def main() -> int:
    made = parser("What is learned with block-sparse attention", ())
    made.add_argument("--short", action="store_true", help="shorter samples of fewer symbols, and a smaller model")
    options = made.parse_args()
    report = Report("What is learned with block-sparse attention")
    report.begin()
    report.write("Nats per byte on samples that were not trained on, after equal tokens in equal order; AdamW, fp32.")
    report.write()
    copy, text, shape = COPY, TEXT, SHAPE
    if options.short:
        copy, text, shape = SHORT_COPY, SHORT_TEXT, SHORT_SHAPE
    if options.quick:
        copy, text, shape = QUICK_COPY, QUICK_TEXT, QUICK_SHAPE
    corpus = load_corpus(DataSection(sequence=text.length))
    tasks: dict[str, tuple[Scale, Callable[[int], Batch]]] = {
        f"copies over {copy.length // 2} bytes": (copy, lambda step: copies(copy, step)),
        f"the standard library, {text.length} bytes": (text, lambda step: stretches(corpus, text, step)),
    }
    header = ["task", "attention", "held-out loss", "x dense's", "target"]
    report.table(header, _rows(report, tasks, shape, not options.quick))
    return report.end(options.save)


def copies(scale: Scale, step: int) -> Batch:
    """Tokens and targets [batch, length - 1]; the first half's targets are left out. Held-out steps are negative."""
    half = torch.randint(
        scale.symbols or 256, (scale.batch, scale.length // 2), generator=torch.Generator().manual_seed(step % 2**32)
    )
    tokens = torch.cat([half, half], 1)
    targets = tokens[:, 1:].clone()
    targets[:, : scale.length // 2 - 1] = -100
    return tokens[:, :-1], targets


def stretches(corpus: Corpus, scale: Scale, step: int) -> Batch:
    """Tokens and targets [batch, length] of the text; those of negative steps are held out."""
    row = corpus.train if step >= 0 else corpus.held_out
    generator = torch.Generator().manual_seed(step % 2**32)
    starts = torch.randint(len(row) - scale.length, (scale.batch, 1), generator=generator)
    tokens = row[starts + torch.arange(scale.length + 1)].long()
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def held_out(scale: Scale, draw: Callable[[int], Batch], shape: DecoderShape, attention: dict[str, Any]) -> float:
    """Nats per byte after training."""
    torch.manual_seed(0)
    warmup = {"name": "cosine", "warmup_steps": scale.steps // 10, "total_steps": scale.steps}
    config = {
        "attention": attention,
        "optimizer": {**OPTIMIZER, "lr": 1e-3},
        "schedule": warmup,
        "clip_grad_norm": 1.0,
        "activations": {"checkpoint": "units"},
    }
    with partita.initialize(Decoder(shape), config) as engine:
        for step in range(scale.steps):
            engine.backward(loss_of(engine, draw(step)))
            engine.step()
        with torch.no_grad():
            losses = [loss_of(engine, draw(-1 - number)).item() for number in range(8)]
    return sum(losses) / len(losses)


def _rows(
    report: Report, tasks: dict[str, tuple[Scale, Callable[[int], Batch]]], shape: DecoderShape, has_targets: bool
) -> Iterator[list[str]]:
    for task, (scale, draw) in tasks.items():
        dense = 0.0
        for name, attention in scale.patterns().items():
            loss = held_out(scale, draw, shape, attention)
            if name == DENSE:
                dense = loss
            has_target = has_targets and name != DENSE
            if has_target:
                report.expect(loss <= TARGET * dense, f"{task}, {name}: {loss / dense:.3f} x dense's loss")
            yield [task, name, f"{loss:.4f}", f"{loss / dense:.3f}", f"<= {TARGET}" if has_target else ""]


if __name__ == "__main__":
    sys.exit(main())
