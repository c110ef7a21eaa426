"""Loss of block-sparse attention, compared with dense attention after equal tokens.

    python -m benchmarks.sparse_learning             # copies within 8k bytes, text at 4k bytes: an hour
    python -m benchmarks.sparse_learning --short     # copies within 512 bytes, text at 512 bytes: 20 minutes
    python -m benchmarks.sparse_learning --quick     # copies within 256 bytes, text at 256, a few steps: no targets
    python -m benchmarks.sparse_learning --save      # into benchmarks/results/sparse_learning.md
    python -m benchmarks.sparse_learning --hours 2   # in parts: finished runs are stored, and none starts after 2 hours

There are two tasks. For each, all patterns train the same decoder on the same samples in the same order; only the
config differs. One task is copying: the second half of a sample repeats the first, so a model must attend half a sample
back. A layout written for this task includes those blocks; a window passes on only a few bytes per layer. The other
task is the standard library's text. It ends with status 1 if a target is missed: the share of correct copies, and the
loss of the text. The short form has shorter samples: it shows whether the patterns learn, not how far they attend.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import partita
from benchmarks._common import Report, parser
from benchmarks._finished import Described, Finished, add_parts, in_parts
from benchmarks._work import OPTIMIZER
from partita.train.data import Corpus, load_corpus
from partita.train.decoder import Decoder, DecoderShape
from partita.train.job import DataSection

# Targets of a pattern's held-out loss and share of correct copies, in units of dense attention's.
LOSS = 1.02
RIGHT = 0.98
DENSE = "dense"
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Scale:
    """Sizes of a task.

    Attributes:
        length: bytes per sample.
        batch: samples per step.
        steps: optimizer steps.
        window, block: of the patterns.
        symbols: the number of different symbols to copy; None for the text task.
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
        """Return the rows of a layout with the window and the blocks half a sample before."""
        num, back = self.length // self.block, self.length // 2 // self.block
        near, around = self.window // self.block, (back - 1, back, back + 1)
        return ["".join("1" if 0 <= q - k <= near or q - k in around else "0" for k in range(num)) for q in range(num)]


COPY = Scale(length=8192, batch=2, steps=600, window=1024, block=128, symbols=16)
TEXT = Scale(length=4096, batch=2, steps=800, window=1024, block=128)
SHORT_COPY = Scale(length=512, batch=16, steps=1200, window=64, block=32, symbols=16)
SHORT_TEXT = Scale(length=512, batch=8, steps=800, window=128, block=32)
QUICK_COPY = Scale(length=256, batch=4, steps=3, window=64, block=32, symbols=16)
QUICK_TEXT = Scale(length=256, batch=4, steps=3, window=64, block=32)
SHAPE = DecoderShape(layers=2, width=64, heads=2, kv_heads=2, ffn_width=172)


def main() -> int:
    made = parser("Learning with block-sparse attention", ())
    made.add_argument("--short", action="store_true", help="shorter samples")
    add_parts(made)
    options = made.parse_args()
    report = Report("Learning with block-sparse attention")
    report.begin()
    report.write(_TEXT)
    report.write()
    scales = {"copies": COPY, "text": TEXT}
    if options.short:
        scales = {"copies": SHORT_COPY, "text": SHORT_TEXT}
    if options.quick:
        scales = {"copies": QUICK_COPY, "text": QUICK_TEXT}
    runs = [
        {"task": task, "attention": name, "shape": asdict(SHAPE), **asdict(scale)}
        for task, scale in scales.items()
        for name in scale.patterns()
    ]
    finished = in_parts(options, "sparse_learning")
    finished.complete(runs, learn)
    header = ["task", "attention", "right", "held-out loss", "x dense's loss", "target"]
    report.table(header, _rows(report, runs, finished, not options.quick))
    return report.end(options.save)


_TEXT = """Samples that were not trained on, after equal tokens in equal order; AdamW, fp32. *right*: share of symbols
whose most likely prediction is correct (of copies: in the second half). The loss is in nats per symbol."""


def copies(scale: Scale, step: int) -> Batch:
    """Return tokens and targets [batch, length - 1]; only the second half has targets. Negative steps are held out."""
    half = torch.randint(
        scale.symbols or 256, (scale.batch, scale.length // 2), generator=torch.Generator().manual_seed(step % 2**32)
    )
    tokens = torch.cat([half, half], 1)
    targets = tokens[:, 1:].clone()
    targets[:, : scale.length // 2 - 1] = -100
    return tokens[:, :-1], targets


def stretches(corpus: Corpus, scale: Scale, step: int) -> Batch:
    """Return tokens and targets [batch, length] of the text; negative steps are held out."""
    row = corpus.train if step >= 0 else corpus.held_out
    generator = torch.Generator().manual_seed(step % 2**32)
    starts = torch.randint(len(row) - scale.length, (scale.batch, 1), generator=generator)
    tokens = row[starts + torch.arange(scale.length + 1)].long()
    return tokens[:, :-1], tokens[:, 1:]


def logits_of(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the logits [symbols, 256] and the targets [symbols]."""
    return model(batch[0]).flatten(0, 1), batch[1].flatten()


def learn(described: Described) -> dict[str, Any]:
    """Train on one task with one pattern; return ``loss`` and the share ``right`` on held-out samples."""
    scale = Scale(**{field.name: described[field.name] for field in fields(Scale)})
    if described["task"] == "text":
        corpus = load_corpus(DataSection(sequence=scale.length))
    torch.manual_seed(0)
    config = {
        "attention": scale.patterns()[described["attention"]],
        "optimizer": {**OPTIMIZER, "lr": 1e-3},
        "schedule": {"name": "cosine", "warmup_steps": scale.steps // 10, "total_steps": scale.steps},
        "clip_grad_norm": 1.0,
    }

    def draw(step: int) -> Batch:
        return copies(scale, step) if described["task"] == "copies" else stretches(corpus, scale, step)

    with partita.initialize(Decoder(DecoderShape(**described["shape"])), config) as engine:
        for step in range(scale.steps):
            loss = F.cross_entropy(*logits_of(engine, draw(step)))
            engine.backward(loss)
            engine.step()
            if step % 50 == 0:
                what = f"{described['task']}, {described['attention']}, step {step}"
                print(f"  {what}: {loss.item():.4f}", file=sys.stderr, flush=True)
        losses, hits = list[float](), list[float]()
        with torch.no_grad():
            for number in range(8):
                logits, targets = logits_of(engine, draw(-1 - number))
                losses.append(F.cross_entropy(logits, targets).item())
                counted = targets >= 0
                hits.append((logits.argmax(1) == targets)[counted].float().mean().item())
    return {"loss": sum(losses) / len(losses), "right": sum(hits) / len(hits)}


def _rows(report: Report, runs: Sequence[dict[str, Any]], finished: Finished, has_targets: bool) -> Iterator[list[str]]:
    dense = dict[str, dict[str, Any]]()
    for run in runs:
        task, name, length = run["task"], run["attention"], run["length"]
        what = f"copies over {length // 2} bytes" if task == "copies" else f"the standard library, {length} bytes"
        found = finished.of(run)
        if found is None:
            report.expect(False, f"{what}, {name}: has not run")
            continue
        if name == DENSE:
            dense[task] = found
        target = ""
        other = dense.get(task, found)
        if has_targets and name != DENSE and task == "copies":
            target = f"right >= {RIGHT} x dense's"
            report.expect(found["right"] >= RIGHT * other["right"], f"{what}, {name}: {found['right']:.1%} right")
        elif has_targets and name != DENSE:
            target = f"loss <= {LOSS} x dense's"
            above = found["loss"] / other["loss"]
            report.expect(above <= LOSS, f"{what}, {name}: {above:.3f} x dense's loss")
        above_dense = f"{found['loss'] / other['loss']:.3f}" if task == "text" else ""
        yield [what, name, f"{found['right']:.2%}", f"{found['loss']:.4f}", above_dense, target]


if __name__ == "__main__":
    sys.exit(main())
