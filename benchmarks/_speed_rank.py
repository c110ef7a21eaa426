"""One rank of one checkout: measure steps, saving and loading, and write the times as JSON.

    python -m benchmarks._speed_rank WORK CONFIG FOLDER

WORK is a JSON object of :class:`benchmarks._work.Work`, CONFIG a config of partita; the result is FOLDER/RANK.json.
Only the library's public API is used, so that any two versions can be compared.
"""

import json
import os
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import partita
from benchmarks._work import OPTIMIZER, Work

# Enough that one garbage collection by Python (180 ms) does not change the median.
SAVES = 7


def main() -> None:
    work, config, folder = Work(**json.loads(sys.argv[1])), json.loads(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(measured(work, config, folder)))


def measured(work: Work, config: dict[str, Any], folder: Path) -> dict[str, list[float]]:
    """Return the seconds of each step, each complete save and each load, and the peak bytes of resident memory."""

    def seconds(call: Callable[[], object]) -> float:
        dist.barrier()
        began = time.perf_counter()
        call()
        dist.barrier()
        return time.perf_counter() - began

    with tempfile.TemporaryDirectory() as cache:
        offload = config["zero"].get("offload")
        zero = {**config["zero"], "offload": {**offload, "path": cache}} if offload else config["zero"]
        with partita.initialize(work.build(), {**config, "zero": zero, "optimizer": OPTIMIZER}) as engine:
            rank, num_ranks = engine.mesh.rank, engine.mesh.num_ranks

            def step(number: int) -> None:
                tokens, targets = work.part_of_batch(number, rank, num_ranks)
                engine.backward(F.cross_entropy(engine(tokens).flatten(0, 1), targets.flatten()))
                engine.step()

            steps = [seconds(lambda number=number: step(number)) for number in range(work.steps)][work.warmup :]
            saved = [folder / f"checkpoint-{number}" for number in range(SAVES)]

            def save(path: Path) -> None:
                engine.save(path)
                engine.wait_for_checkpoint()

            saves = [seconds(lambda path=path: save(path)) for path in saved]
            loads = [seconds(lambda path=path: engine.load(path)) for path in saved]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"step": steps, "save": saves, "load": loads, "peak": [peak]}


if __name__ == "__main__":
    main()
