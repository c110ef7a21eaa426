"""Documents that are read during training: tokens per second compared with datasets and TRL, and the time of a step.

    python -m benchmarks.streaming            # 2 processes train
    python -m benchmarks.streaming --quick    # few rows: no targets
    python -m benchmarks.streaming --save     # into benchmarks/results/streaming.md

It ends with status 1 if a target is missed: as many tokens per second as datasets and TRL, and a step on a stream at
most 1.03 times as long as on stored tokens.
"""

import json
import multiprocessing
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import yaml
from datasets import load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader
from transformers import LlamaConfig, PreTrainedTokenizerFast
from trl import pack_dataset

import partita
from benchmarks._common import ROOT, Report, opened
from partita.config.resolve import ResolvedBatch
from partita.observe.metrics import METRICS_FILE, read_metrics
from partita.train.documents import document_encoder
from partita.train.job import DataSection
from partita.train.packing import PackedBatches
from partita.train.stream import DocumentStream, open_stream

RATE_TARGET, STEP_TARGET = 1.0, 1.03
SEQUENCE, BATCH, VOCABULARY = 1024, 8, 8192
ROW_CHARACTERS = 2000
WARM_UP_STEPS = 3


@dataclass(frozen=True)
class Sizes:
    """Sizes of the benchmark.

    Attributes:
        rows: rows of the file.
        block: rows per block when batches are only drawn.
        trained_block: rows per block in training.
        steps: training steps.
    """

    rows: int
    block: int
    trained_block: int
    steps: int


FULL, QUICK = Sizes(rows=6000, block=1000, trained_block=40, steps=23), Sizes(400, 100, 20, 8)


def main() -> int:
    report, options = opened("Documents that are read during training", reps=3)
    sizes = QUICK if options.quick else FULL
    report.write(_TEXT)
    report.write()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_rows(folder / "rows.jsonl", sizes.rows)
        _in_fresh_process(_write_model, folder)
        header = ["what", "tokens per second", "ratio", "smallest - largest", "target"]
        report.table(header, _rates(report, folder, sizes, options))
        header = ["documents", "ms per step", "ratio", "smallest - largest", "target"]
        report.table(header, _steps(report, folder, sizes, options))
    return report.end(options.save)


_TEXT = f"""Rows of about {ROW_CHARACTERS} characters, the sources of Python's standard library, as JSON lines; a
byte-pair tokenizer of {VOCABULARY} tokens; samples of {SEQUENCE} tokens, packed by best fit.

*tokens per second*: tokens of documents in batches of {BATCH} samples that one process draws and does nothing with.
*datasets and TRL*: `load_dataset(streaming=True)`, `map` with the tokenizer, `trl.pack_dataset` (`bfd_split`), and a
`DataLoader` with one worker, in which the tokenizer uses all cores, as in partita. *ms per step*: the mean step of
`partita train` on 2 processes under ZeRO-3; a block of {FULL.trained_block} rows lasts about 5 steps. All runs in turn;
ratios are medians over the repetitions of ratios within one."""


def _rates(report: Report, folder: Path, sizes: Sizes, options: Any) -> Iterator[list[str]]:
    draws = {"datasets and TRL": _draw_peer, "partita": _draw_own}
    found: dict[str, list[float]] = {name: [] for name in draws}
    for _ in range(options.reps):
        for name, draw in draws.items():
            found[name].append(_in_fresh_process(_rate, draw, folder, sizes))
    ratio, rows = _compared(found, "{:,.0f}", "" if options.quick else f">= {RATE_TARGET:g}")
    report.expect(options.quick or ratio >= RATE_TARGET, f"tokens per second: {ratio:.2f} x datasets and TRL")
    yield from rows


def _compared(found: dict[str, list[float]], form: str, target: str) -> tuple[float, list[list[str]]]:
    """Return the median ratio of the second entry's figures to the first one's, and the rows of the table."""
    (first, reference), (second, measured) = found.items()
    ratios = [own / other for own, other in zip(measured, reference, strict=True)]
    ratio = statistics.median(ratios)
    spread = f"{min(ratios):.3f} - {max(ratios):.3f}"
    return ratio, [
        [first, form.format(statistics.median(reference)), "1", "", ""],
        [second, form.format(statistics.median(measured)), f"{ratio:.3f}", spread, target],
    ]


def _in_fresh_process(call: Callable[..., Any], *arguments: object) -> Any:
    """Call a function in a new process: a tokenizer uses only one core in a fork of a process that has used it."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(call, *arguments).result()


def _rate(draw: Callable[[Path, Sizes], int], folder: Path, sizes: Sizes) -> float:
    """Return the tokens per second of a function that draws documents and returns their tokens."""
    started = time.perf_counter()
    return draw(folder, sizes) / (time.perf_counter() - started)


def _draw_own(folder: Path, sizes: Sizes) -> int:
    """Draw the training documents once with partita; return the number of tokens."""
    data = DataSection(
        format="jsonl", corpus=str(folder / "rows.jsonl"), sequence=SEQUENCE, stream=sizes.block, held_out=0.001
    )
    encoder = document_encoder(PreTrainedTokenizerFast.from_pretrained(folder), data)
    num_tokens, cpu = 0, torch.device("cpu")
    with (
        partita.initialize(torch.nn.Linear(1, 1), {}) as engine,
        open_stream(DocumentStream(data, encoder, VOCABULARY), engine) as corpus,
    ):
        batches = PackedBatches(corpus, data, ResolvedBatch(BATCH, 1, BATCH), 0, 1, cpu)
        num_blocks = -(-sizes.rows // sizes.block)
        step = 0
        while (engine.extra.get("stream") or {"number": 0})["number"] < num_blocks:
            step += 1
            (batch,) = batches.train(step)
            num_tokens += int((batch["labels"] != -100).sum())
    return num_tokens


def _draw_peer(folder: Path, sizes: Sizes) -> int:
    """Draw the documents once with datasets and TRL; return the number of tokens."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    rows = load_dataset("json", data_files=str(folder / "rows.jsonl"), split="train", streaming=True)

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encoded = tokenizer(batch["text"], verbose=False)["input_ids"]
        return {"input_ids": [[*ids, tokenizer.eos_token_id] for ids in encoded]}

    tokens = rows.map(encode, batched=True, remove_columns=["text"])
    packed = pack_dataset(tokens, SEQUENCE, "bfd_split", {"batch_size": sizes.block})
    num_tokens = 0
    for batch in DataLoader(packed, BATCH, num_workers=1, collate_fn=_collate, multiprocessing_context="fork"):
        num_tokens += int((batch["labels"] != -100).sum())
    return num_tokens


def _collate(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Return a batch in the form of ``partita.train.packing``: tokens, labels and positions."""
    shape = (len(samples), SEQUENCE)
    batch = {name: torch.zeros(shape, dtype=torch.long) for name in ("input_ids", "position_ids")}
    batch["labels"] = torch.full(shape, -100)
    for row, sample in enumerate(samples):
        end = 0
        ids = torch.tensor(sample["input_ids"])
        for length in sample["seq_lengths"]:
            batch["input_ids"][row, end : end + length] = ids[end : end + length]
            batch["labels"][row, end + 1 : end + length] = ids[end + 1 : end + length]
            batch["position_ids"][row, end : end + length] = torch.arange(length)
            end += length
    return batch


def _steps(report: Report, folder: Path, sizes: Sizes, options: Any) -> Iterator[list[str]]:
    blocks = {"stored": 0, "stream": sizes.trained_block}
    found: dict[str, list[float]] = {name: [] for name in blocks}
    for repetition in range(options.reps):
        for name, block in blocks.items():
            found[name].append(1e3 * _step_s(folder, f"{name}-{repetition}", block, sizes.steps))
    ratio, rows = _compared(found, "{:.1f}", "" if options.quick else f"<= {STEP_TARGET}")
    report.expect(options.quick or round(ratio, 2) <= STEP_TARGET, f"a step on a stream: {ratio:.3f} x stored tokens")
    yield from rows


def _step_s(folder: Path, name: str, block: int, steps: int) -> float:
    """Return the seconds of the mean step of a run."""
    job = {
        "model": {"huggingface": str(folder / "config.json")},
        "data": {
            "format": "jsonl",
            "corpus": str(folder / "rows.jsonl"),
            "tokenizer": str(folder),
            "sequence": SEQUENCE // 4,
            "stream": block,
        },
        "train": {"steps": steps, "log_every": 1, "eval_batches": 1, "out": str(folder / name), "metrics": []},
        "engine": {"zero": {"stage": 3}, "batch": {"total": 2 * BATCH}},
    }
    if not block:
        job["data"]["cache"] = str(folder / "tokens")
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(job))
    command = [str(Path(sys.executable).parent / "partita"), "train", str(path), "--processes", "2"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    train, _ = read_metrics(folder / name / METRICS_FILE)
    return statistics.fmean(row.step_s for row in train[WARM_UP_STEPS:])


def _write_rows(path: Path, num: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in islice(_rows(), num):
            file.write(json.dumps({"text": row}) + "\n")


def _rows() -> Iterator[str]:
    """Yield parts of Python's standard library, repeating it forever."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    while True:
        for file in files:
            text = file.read_text(encoding="utf-8", errors="ignore")
            yield from (text[start : start + ROW_CHARACTERS] for start in range(0, len(text), ROW_CHARACTERS))


def _write_model(folder: Path) -> None:
    """Write a tokenizer and the config of a Llama."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(islice(_rows(), 2000), trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)
    LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
    ).save_pretrained(folder)


if __name__ == "__main__":
    raise SystemExit(main())
