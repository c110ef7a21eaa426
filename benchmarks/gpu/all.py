"""Run every GPU benchmark, in three calls of at most ten minutes each:

    python -m benchmarks.gpu.all correct --seconds 300 --save    # correctness; the scripts run side by side
    python -m benchmarks.gpu.all speed --seconds 580 --save      # compared with plain PyTorch and FSDP2, one at a time
    python -m benchmarks.gpu.all offload --seconds 580 --save    # models beyond the card, one at a time

Without a part, all three run in turn. A script that fails or misses a target does not stop the others.
`--logs FOLDER` stores the output of each script. `--quick` runs each script in its quick form, on the CPU if there is
no GPU; `--simulated` runs each on the simulated accelerator, so that every line runs without a GPU.
If partita is not installed, run `make kernels PYTHON=python3` and set `PYTHONPATH=src` first.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks._common import ROOT
from benchmarks.gpu._common import add_simulated, chosen


@dataclass(frozen=True)
class Script:
    """A benchmark: its module, its arguments, and the share of the remaining time that it may take."""

    module: str
    options: tuple[str, ...] = ()
    share: float = 1.0
    saves: bool = True
    keeps_time: bool = True  # has the option --seconds

    def command(self, seconds: float, *, tiny: str, save: bool) -> list[str]:
        """Return the command. ``tiny`` is the option for a tiny model, or empty."""
        options = [tiny] if tiny else list(self.options)
        if self.keeps_time:
            options += ["--seconds", f"{seconds * self.share:.0f}"]
        if self.saves and save:
            options.append("--save")
        return [sys.executable, "-m", f"benchmarks.{self.module}", *options]


PARTS: dict[str, list[Script]] = {
    "correct": [
        Script("gpu.check", ("--only", "correct"), saves=False, keeps_time=False),
        Script("gpu.offload_check", ("--quick",), keeps_time=False),
        Script("gpu.shared_card", keeps_time=False),
        Script("precision_zoo", keeps_time=False),
    ],
    "speed": [
        Script("gpu.kernels", keeps_time=False),
        Script("gpu.check", ("--only", "speed"), saves=False, keeps_time=False),
        Script("gpu.model_tflops", ("--size", "1B", "3B", "7B", "--tokens", "16384"), 0.7),
        Script("gpu.sparse_attention", keeps_time=False),
    ],
    "offload": [
        Script("gpu.model_tflops", ("--size", "7B", "--tokens", "16384", "--mode", "optimizer on host"), 0.25),
        Script("gpu.largest_model", ("--mode", "lean, everything on host"), 0.5),
        Script("gpu.timeline", share=0.5),
        Script("gpu.longest_sequence", share=0.5),
        Script("gpu.offload_check", keeps_time=False),
    ],
}
LEAST_S = 30.0
SHOWN_LINES = 60


def main() -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("part", nargs="*", help=f"of {', '.join(PARTS)} (all, if none is named)")
    made.add_argument("--quick", action="store_true", help="each script in its quick form")
    add_simulated(made)
    made.add_argument("--save", action="store_true", help="write the reports into benchmarks/results/")
    made.add_argument("--seconds", type=float, default=580.0)
    made.add_argument("--logs", type=Path, default=None, help="folder for what each script prints")
    arguments = made.parse_args()
    end, failed = time.monotonic() + arguments.seconds, list[str]()
    tiny = "--simulated" if arguments.simulated else "--quick" if arguments.quick else ""
    with tempfile.TemporaryDirectory() as folder:
        logs = arguments.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        for part in chosen(arguments.part, list(PARTS)):
            # Measurements of speed need the GPU for themselves; checks do not.
            scripts = [one for one in PARTS[part] if not arguments.simulated or one.module.startswith("gpu.")]
            groups = [scripts] if part == "correct" and not tiny else [[one] for one in scripts]
            for group in groups:
                if end - time.monotonic() > LEAST_S:
                    failed += run(group, end, tiny, arguments.save, logs / part)
    print(f"\nfailed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def run(scripts: list[Script], end: float, tiny: str, save: bool, logs: Path) -> list[str]:
    """Run scripts in parallel until ``end``, print the last lines of each, and return those that failed."""
    logs.mkdir(exist_ok=True)
    running, failed = [], []
    for script in scripts:
        command = script.command(end - time.monotonic(), tiny=tiny, save=save)
        log = (logs / f"{script.module}.log").open("w+")
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        running.append((command, log, process, time.monotonic()))
    for command, log, process, begin in running:
        try:
            status = process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait() and 124
        with log:
            log.seek(0)
            lines = log.read().splitlines()[-SHOWN_LINES:]
        print(f"\n== {' '.join(command[1:])}: {time.monotonic() - begin:.0f} s", *lines, sep="\n", flush=True)
        if status:
            failed.append(f"{command[2]} ({status})")
    return failed


if __name__ == "__main__":
    sys.exit(main())
