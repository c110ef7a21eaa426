"""A plain PyTorch training script that trains with partita.

python examples/plain_script.py
torchrun --nproc-per-node 2 examples/plain_script.py
"""

import torch
from torch import nn
from torch.nn import functional as F

import partita

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1))

# The config sets stages, precision, accumulation and clipping. It may also be the path of a file.
engine = partita.initialize(model, config={"zero": {"stage": 3}, "optimizer": {"lr": 3e-3}, "batch": {"micro": 64}})

rank, num_ranks = engine.mesh.coordinate("data"), engine.mesh.size("data")
generator = torch.Generator().manual_seed(rank)  # each rank draws different samples
for step in range(301):
    inputs = torch.rand(64, 16, generator=generator).to(engine.mesh.device)
    targets = torch.sin(6 * inputs.mean(dim=1, keepdim=True))

    loss = F.mse_loss(engine(inputs), targets)
    engine.backward(loss)
    result = engine.step()

    if step % 100 == 0:
        mean_loss = engine.mean(loss)  # call on every rank: it is a collective
        if rank == 0:
            print(f"step {step:3}  loss {mean_loss:.5f}  gradient norm {result.grad_norm:.3f}  ranks {num_ranks}")

engine.export("runs/plain_script")  # safetensors
engine.close()
