"""One rank of one run: train in one mode and write the measurements as JSON.

    python -m benchmarks._rank MODE WORK FOLDER LIMIT_S

WORK is a JSON object of :class:`benchmarks._work.Work`; the result is FOLDER/RANK.json. After LIMIT_S seconds, the
stacks of all threads are printed and the process ends.
"""

import faulthandler
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks._modes import MODES, Trainer
from benchmarks._network import sent_bytes
from benchmarks._parallel_modes import PARALLEL_MODES
from benchmarks._work import Work
from partita.memory.ledger import STATES, process_memory


class Rank:
    """The training and the measurements of a rank."""

    def __init__(self, mode: str, work: Work) -> None:
        self.mode, self.work = mode, work
        self.rank, self.num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.interface = os.environ["GLOO_SOCKET_IFNAME"]
        self.measured: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        trainer = (MODES | PARALLEL_MODES)[self.mode](self._build)
        place = trainer.data or (self.rank, self.num_ranks)
        losses, times, peak, before = [], [], 0, dict[str, float]()
        sent_before, report, disk, measured_from = 0, None, None, 0.0
        for step in range(self.work.steps):
            batch = self.work.part_of_batch(step, *place)
            if step == self.work.warmup:
                _finish_updates(trainer)
                peak = process_memory()[1]
                self._barrier()
                _reset_peak()
                sent_before = sent_bytes(self.interface)
                report = trainer.engine and trainer.engine.traffic_report()
                before = dict(trainer.seconds)
                disk = trainer.engine and trainer.engine.memory_report().disk
                self._barrier()
                measured_from = time.perf_counter()
            begin = time.perf_counter()
            losses.append(trainer.take_step(*batch))
            times.append(time.perf_counter() - begin)
        counted = trainer.engine and trainer.engine.traffic_report().since(report).sent_bytes()
        _finish_updates(trainer)
        measured_s = time.perf_counter() - measured_from
        self._barrier()
        num_measured = self.work.steps - self.work.warmup
        steady = process_memory()[1]
        self.measured |= {
            "losses": losses,
            "times_s": times[self.work.warmup :],
            "peak_bytes": max(peak, steady),
            "steady_peak_bytes": steady,
            "measured_s": measured_s,
            "interface_bytes_a_step": (sent_bytes(self.interface) - sent_before) / num_measured,
        }
        self.measured |= {name: (total - before[name]) / num_measured for name, total in trainer.seconds.items()}
        if disk is not None:
            self.measured["disk"] = asdict(trainer.engine.memory_report().disk.since(disk))
        if trainer.engine is not None:
            self._compare(trainer, counted / num_measured)
        self._barrier()
        if trainer.engine is not None:
            trainer.engine.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        return self.measured

    def _build(self, device: str) -> nn.Module:
        self.measured["imported_bytes"] = process_memory()[0]
        model = self.work.build(device)
        self.measured["num_params"] = sum(param.numel() for param in model.parameters())
        return model

    def _compare(self, trainer: Trainer, counted_bytes_a_step: float) -> None:
        """Record partita's own figures and its estimates of them."""
        from partita.layout.state_bytes import model_state_bytes
        from partita.layout.traffic import step_traffic

        engine = trainer.engine
        report = engine.memory_report()
        self.measured |= {
            "state_bytes": {
                f"{state} {tier}": num for (state, tier), num in report.peak.items() if state in STATES and num
            },
            "expected_state_bytes": {
                f"{state} {tier}": num for (state, tier), num in model_state_bytes(engine.units, self.rank).items()
            },
            "held_bytes": {f"{state} on {tier}": num for (state, tier), num in report.peak.items() if num},
            "buffer_bytes": sum(num for (state, _), num in report.peak.items() if state not in STATES),
            "counted_bytes_a_step": counted_bytes_a_step,
            "expected_bytes_a_step": step_traffic(engine.units).sent_bytes(),
        }

    def _barrier(self) -> None:
        if dist.is_initialized():
            dist.barrier()


def _finish_updates(trainer: Trainer) -> None:
    """Wait for updates that run in the background, so that none runs when the measurement begins or ends."""
    if trainer.engine is not None:
        trainer.engine.zero_grad()


def _reset_peak() -> None:
    """Reset the peak of this process's memory (if the system supports it)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def main() -> None:
    mode, work, folder, limit_s = sys.argv[1:]
    faulthandler.dump_traceback_later(float(limit_s), exit=True)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    rank = Rank(mode, Work(**json.loads(work)))
    result = rank.run()
    Path(folder, f"{rank.rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
