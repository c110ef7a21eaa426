"""Check an installed wheel outside the repository: python tests/installed.py

Importing partita imports no slow, seldom used modules. The wheel has its kernels, loads no second OpenMP runtime in
addition to torch's, and trains a few steps.
"""

import sys
import tempfile
from pathlib import Path

import torch

import partita
from partita.kernels import native


def openmp_runtimes() -> set[str]:
    """Return the OpenMP runtime libraries that are mapped into this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if "/" in line}
    return {path for path in paths if Path(path).name.startswith(("libgomp", "libomp", "libiomp"))}


def main() -> int:
    slow = {"torch._dynamo", "torch.distributed.tensor", "sympy", "transformers"} & sys.modules.keys()
    assert not slow, f"partita's import has brought {sorted(slow)}"
    torchs = openmp_runtimes()
    extension = native.module()
    assert extension is not None
    assert len(torchs) == 1
    assert openmp_runtimes() == torchs
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    config = {"zero": {"stage": 3}, "optimizer": {"name": "adamw", "lr": 1e-2}}
    inputs = torch.randn(64, 16)
    targets = inputs.sum(1, keepdim=True)
    with partita.initialize(model, config, loss_fn=torch.nn.functional.mse_loss) as engine, _folder() as folder:
        losses = [_step(engine, inputs, targets) for _ in range(3)]
        assert losses[2] < losses[0], losses
        engine.export(folder)
    sys.stdout.write(f"{Path(partita.__file__).parent} {Path(str(extension.__file__)).name} {losses}\n")
    return 0


def _step(engine: partita.Engine, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    loss = torch.nn.functional.mse_loss(engine(inputs), targets)
    engine.backward(loss)
    engine.step()
    return loss.item()


def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="partita-installed-")


if __name__ == "__main__":
    sys.exit(main())
