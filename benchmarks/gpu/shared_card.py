"""Train on several ranks that share one GPU: python -m benchmarks.gpu.shared_card --save

Collectives go through host memory (`communication.through_host`); everything else is as on several GPUs: streams, the
device's allocator, gathers and reductions that overlap with the device's work. Every config is compared with the same
ranks on the CPU, in fp32, and the ZeRO stages with each other, bitwise.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import partita
from benchmarks._common import ROOT, Report
from benchmarks.gpu._common import device_here, find_device, is_tiny, parser, place
from partita.train.decoder import Decoder, DecoderShape

SHAPE = DecoderShape(layers=4, width=128, heads=4, kv_heads=2, ffn_width=256)
TINY = DecoderShape(layers=2, width=32, heads=2, kv_heads=2, ffn_width=64)
STEPS, SAMPLES, LENGTH = 4, 2, 64
# Maximum relative error of a loss compared with the CPU's.
TOLERANCE = 1e-4
ON_HOST = {"parameters": "host", "optimizer": "host"}

DATA: dict[str, dict[str, Any]] = {
    "stage 0": {"zero": {"stage": 0}},
    "stage 1": {"zero": {"stage": 1}},
    "stage 2": {"zero": {"stage": 2}},
    "stage 3": {"zero": {"stage": 3}},
    "stage 3, kept": {"zero": {"stage": 3, "keep_gathered": True}},
    "stage 3, host": {"zero": {"stage": 3, "offload": ON_HOST}},
    "stage 3, in backward": {"zero": {"stage": 3}, "precision": {"gradients": "in_backward"}},
    "stage 3, int8": {"zero": {"stage": 3}, "communication": {"gradients": "int8", "parameters": "int8"}},
}
AXES: dict[str, dict[str, Any]] = {
    "pipeline 2": {"parallel": {"pipeline": 2}, "zero": {"stage": 2}},
    "tensor 2": {"parallel": {"tensor": 2}, "zero": {"stage": 3}},
    "sequence 2": {"parallel": {"sequence": 2}, "zero": {"stage": 3}},
    "tensor 2 x pipeline 2": {"parallel": {"tensor": 2, "pipeline": 2}, "zero": {"stage": 1}},
}
RANKS = {
    2: DATA,
    4: {"stage 3": DATA["stage 3"], **{name: config | {"batch": {"accumulate": 2}} for name, config in AXES.items()}},
}
# Configs that are bitwise equal to stage 0: the same sums in the same order, and the same update.
SAME_BITS = ("stage 1", "stage 2", "stage 3", "stage 3, kept")
TIMEOUT_S = 300


def train(config: dict[str, Any], shape: DecoderShape, device: torch.device, *, through_host: bool) -> list[float]:
    """Return the loss of each step, as the mean over all ranks."""
    torch.manual_seed(0)
    whole = {
        **config,
        "precision": {"compute": "fp32", **config.get("precision", {})},
        "optimizer": {"lr": 1e-3},
        "communication": {**config.get("communication", {}), "through_host": through_host},
        "seed": 0,
    }
    losses = []
    with partita.initialize(Decoder(shape), whole, device=device) as engine:
        for step in range(STEPS):
            batches = []
            for micro in range(config.get("batch", {}).get("accumulate", 1)):
                number = 100 * step + 10 * micro + engine.mesh.coordinate("data")
                rows = torch.randint(256, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(number))
                batches.append((rows[:, :-1].to(device), rows[:, 1:].to(device)))
            losses.append(engine.train_batch(iter(batches)).item())
    return losses


def run_rank(out: str, num_ranks: int, where: str, shape: DecoderShape) -> None:
    """Train every config for this number of ranks, as one of the ranks; rank 0 writes the losses."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    os.environ["LOCAL_RANK"] = "0"  # the only device of every rank
    device = torch.device("cpu") if where == "cpu" else find_device(simulated=where == "simulated")
    with sdpa_kernel(SDPBackend.MATH):  # the other kernels' backward sums in a different order at each run
        found = {
            name: train(config, shape, device, through_host=where != "cpu") for name, config in RANKS[num_ranks].items()
        }
    if os.environ["RANK"] == "0":
        Path(out).write_text(json.dumps(found))


def losses_of(num_ranks: int, where: str, *, tiny: bool) -> dict[str, list[float]]:
    """Train on new processes, and return the losses of each config.

    Raises:
        RuntimeError: a rank failed; the message has the last output.
        subprocess.TimeoutExpired: the time was up.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "losses.json")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        command += ["-m", "benchmarks.gpu.shared_card", "rank", str(out), str(num_ranks), where, str(int(tiny))]
        environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1", "SIM_UUID": "one"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
        if done.returncode:
            raise RuntimeError(f"{num_ranks} ranks on {where} failed:\n{(done.stdout + done.stderr)[-6000:]}")
        found: dict[str, list[float]] = json.loads(out.read_text())
    return found


def rows(report: Report, where: str, *, tiny: bool) -> Iterator[list[str]]:
    for num_ranks in RANKS:
        on_cpu, here = losses_of(num_ranks, "cpu", tiny=tiny), losses_of(num_ranks, where, tiny=tiny)
        for name, losses in here.items():
            worst = max(abs(mine - theirs) / theirs for mine, theirs in zip(losses, on_cpu[name], strict=True))
            report.expect(worst < TOLERANCE, f"{name} on {num_ranks} ranks: losses {worst:.1e} from the CPU's")
            same = "-"
            if num_ranks == 2 and name in SAME_BITS:
                same = "yes" if losses == here["stage 0"] else "NO"
                report.expect(same == "yes", f"{name}: the bits of stage 0")
            yield [name, str(num_ranks), f"{worst:.1e}", same, f"{losses[0]:.3f} to {losses[-1]:.3f}"]


def main() -> int:
    arguments = parser(__doc__).parse_args()
    device = device_here(arguments)
    report = Report("Several ranks on one GPU")
    report.begin()
    report.write(place(device))
    report.write()
    where = "simulated" if arguments.simulated else "cpu" if device.type == "cpu" else "device"
    header = ["config", "ranks", "loss, farthest from the CPU's", "bits of stage 0", "loss"]
    report.table(header, rows(report, where, tiny=is_tiny(arguments)))
    return report.end(arguments.save)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        out, num_ranks, where, tiny = sys.argv[2:]
        run_rank(out, int(num_ranks), where, TINY if int(tiny) else SHAPE)
    else:
        sys.exit(main())
