"""Processes that exit without closing their engines."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys, time
import partita, torch
import torch.distributed as dist

torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
if sys.argv[1] != "partita":
    dist.init_process_group(None if sys.argv[1] == "default" else sys.argv[1])
config = {"zero": {"stage": 3}, "optimizer": {"name": "sgd", "lr": 0.1}}
engine = partita.initialize(model, config, loss_fn=lambda out, batch: out.sum())
batches = iter([torch.randn(2, 4), torch.randn(2, 4)])
engine.train_batch(batches)
if os.environ["RANK"] == "0":
    if (child := os.fork()) == 0:
        sys.exit()  # which must not end the connections of its parent
    os.waitpid(child, 0)
engine.train_batch(batches)
for _ in range(200):
    work = dist.all_reduce(torch.ones(1000), async_op=True)
    if os.environ["RANK"] == "0":
        work.wait()
        time.sleep(0.002)  # so that they complete while rank 1 exits
del work
"""


@pytest.mark.parametrize("group", ["partita", "gloo", "default"])
def test_operations_that_complete_while_the_process_exits(group: str, tmp_path: Path) -> None:
    """Pending operations do not abort a process that exits: no gloo thread releases their tensors at its shutdown."""
    (script := tmp_path / "train.py").write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, str(script), group], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
