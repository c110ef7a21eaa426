"""One rank of ``benchmarks.trainer``; its measurements are written as JSON.

    torchrun --nproc-per-node 2 -m benchmarks._trainer_rank steps OPTIONS FOLDER
    torchrun --nproc-per-node 4 -m benchmarks._trainer_rank load OPTIONS FOLDER

OPTIONS is a JSON object of :class:`Options`; the result is FOLDER/RANK.json.
"""

import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments, set_seed

import partita
from partita.integrations.huggingface import Accelerator, Trainer, rank_0_reads
from partita.memory.ledger import STATES

RATE, NORM = 1e-4, 1.0
VOCABULARY = 4096


@dataclass(frozen=True)
class Options:
    """Sizes of a Llama, of a micro-batch, and of the run; the first ``warmup`` steps are not measured."""

    layers: int
    width: int
    stage: int = 3
    micro: int = 4
    sequence: int = 64
    steps: int = 16
    warmup: int = 4
    repetitions: int = 9

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=self.width,
            intermediate_size=self.width * 11 // 4,
            num_hidden_layers=self.layers,
            num_attention_heads=self.width // 64,
            num_key_value_heads=self.width // 64,
            max_position_embeddings=self.sequence,
        )

    def samples(self, number: int) -> list[dict[str, torch.Tensor]]:
        tokens = torch.randint(VOCABULARY, (number, self.sequence), generator=torch.Generator().manual_seed(1))
        return [{"input_ids": row, "labels": row} for row in tokens]


def bare(options: Options, folder: Path) -> list[float]:
    """Return the seconds of each step of a training loop with the engine."""
    set_seed(0)
    model = LlamaForCausalLM(options.config()).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    config = {"zero": {"stage": options.stage}, "clip_grad_norm": NORM, "precision": {"compute": "fp32"}}
    rank, times = dist.get_rank(), list[float]()
    rows = options.samples(options.steps * options.micro * dist.get_world_size())
    with partita.initialize(model, config, optimizer=optimizer) as engine:
        for step in range(options.steps):
            first = (step * dist.get_world_size() + rank) * options.micro
            batch = {key: torch.stack([row[key] for row in rows[first:][: options.micro]]) for key in rows[0]}
            begin = time.perf_counter()
            engine.backward(engine(**batch).loss)
            engine.step()
            times.append(time.perf_counter() - begin)
    return times


class Clock(TrainerCallback):
    """A callback that records the end of each step."""

    def __init__(self) -> None:
        self.ends = [time.perf_counter()]

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())


def in_trainer(options: Options, folder: Path) -> list[float]:
    """Return the seconds of each step of a Trainer, including all its other work."""
    set_seed(0)
    clock = Clock()
    args = TrainingArguments(
        str(folder / "run"),
        use_cpu=True,
        per_device_train_batch_size=options.micro,
        max_steps=options.steps,
        learning_rate=RATE,
        weight_decay=0.01,
        max_grad_norm=NORM,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    rows = options.samples(options.steps * options.micro * dist.get_world_size())
    trainer = Trainer(
        model=LlamaForCausalLM(options.config()),
        args=args,
        train_dataset=rows,
        callbacks=[clock],
        partita_config={"zero": {"stage": options.stage}},
    )
    trainer.train()
    trainer.accelerator.engines.close()
    return [end - begin for begin, end in zip(clock.ends, clock.ends[1:], strict=False)]


def steps(options: Options, folder: Path) -> dict[str, list[list[float]]]:
    """Return the measured steps of the engine and of the Trainer; every other repetition has the opposite order."""
    found: dict[str, list[list[float]]] = {"engine": [], "Trainer": []}
    ways: list[tuple[str, Callable[[Options, Path], list[float]]]] = [("engine", bare), ("Trainer", in_trainer)]
    for repetition in range(options.repetitions):
        for name, way in ways[:: -1 if repetition % 2 else 1]:
            found[name].append(way(options, folder)[options.warmup :])
    return found


def load(options: Options, folder: Path) -> dict[str, float]:
    """Load the model from the folder and shard it; files mark the beginning and the end for the watching process."""
    accelerator = Accelerator(cpu=True, partita_config={"zero": {"stage": options.stage}})
    (folder / f"began-{os.getpid()}").touch()
    dist.barrier()
    time.sleep(0.5)  # for the watching process
    with rank_0_reads():
        model = LlamaForCausalLM.from_pretrained(folder / "model")
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=RATE))
    dist.barrier()
    (folder / f"ended-{os.getpid()}").touch()
    dist.barrier()
    report = accelerator.engines.of(model).engine.memory_report()
    accelerator.engines.close()
    return {"buffer_bytes": sum(num for (state, _), num in report.peak.items() if state not in STATES)}


def main() -> None:
    warnings.simplefilter("ignore")
    way, described, folder = sys.argv[1:]
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    options = Options(**json.loads(described))
    result = steps(options, Path(folder)) if way == "steps" else load(options, Path(folder))
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
