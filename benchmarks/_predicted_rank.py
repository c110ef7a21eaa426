"""One rank of the predicted cases: `python -m benchmarks._predicted_rank CASES FILE STEPS`.

CASES is a JSON list of :class:`benchmarks._predicted_cases.Case`. After each case, a line of JSON with its measurements
is appended to FILE. STEPS is the number of timed steps (0: measure bytes instead).
"""

import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import partita
from benchmarks._predicted_cases import Case
from partita.engine.engine import Engine
from partita.memory.capacity import usable_cores
from partita.memory.ledger import STATES
from partita.prediction.model_source import ModelSource, read_source
from partita.prediction.tune.trial_rank import autograd_peak_bytes

WARMUP = 2


def measure(case: Case, num_steps: int) -> dict[str, Any]:
    source = read_source(case.model)
    _give_values(source.model)
    with partita.initialize(source.model, case.config, device="cpu") as engine:
        for _ in range(WARMUP):
            _step(engine, source)
        return {"seconds": _seconds(engine, source, num_steps)} if num_steps else _bytes(engine, source)


def _give_values(model: nn.Module) -> None:
    """Fill the model with small random values; tied parameters stay tied."""
    made = {param: nn.Parameter(0.02 * torch.randn(param.shape)) for param in model.parameters()}
    for module in model.modules():
        for name, param in module._parameters.items():
            module._parameters[name] = None if param is None else made[param]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else torch.zeros_like(buffer, device="cpu")


def _step(engine: Engine, source: ModelSource) -> None:
    sizes = engine.blueprint.resolved.batch
    engine.train_batch([source.batch(sizes.micro, "cpu") for _ in range(sizes.accumulate)])


def _seconds(engine: Engine, source: ModelSource, num_steps: int) -> float:
    times = []
    for _ in range(num_steps):
        begin = time.perf_counter()
        _step(engine, source)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _bytes(engine: Engine, source: ModelSource) -> dict[str, Any]:
    before = engine.traffic_report()
    allocated = autograd_peak_bytes(engine, lambda: _step(engine, source))
    memory, sent = engine.memory_report(), engine.traffic_report().since(before)
    return {
        "held": {" ".join(key): num for key, num in memory.peak.items() if key[0] in STATES and num},
        "ledger_peak": sum(num for (_, tier), num in memory.peak.items() if tier == "device"),
        "allocated_peak": allocated,
        "sent": {
            " ".join([key.collective, *key.axes, key.purpose]): list(_plain(count)) for key, count in sent.rows.items()
        },
    }


def _plain(count: Any) -> tuple[int, int]:
    return count.calls, count.sent_bytes


def main(listed: Sequence[Case], file: Path, num_steps: int) -> None:
    for case in listed:
        # Times: the number of threads with which the machine is measured. Bytes: one, as some kernels have a buffer per
        # thread.
        torch.set_num_threads(max(1, usable_cores() // case.ranks) if num_steps else 1)
        found = measure(case, num_steps)
        with file.open("a") as out:
            out.write(json.dumps({"name": case.name, **found}) + "\n")


if __name__ == "__main__":
    main([Case(**each) for each in json.loads(sys.argv[1])], Path(sys.argv[2]), int(sys.argv[3]))
