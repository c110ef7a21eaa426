"""A neural ordinary differential equation, differentiated by torchdiffeq's adjoint method."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torchdiffeq import odeint_adjoint


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, t, y):
        return self.net(y**3)


class Solver(nn.Module):
    def __init__(self):
        super().__init__()
        self.field = Field()

    def forward(self, start, times):
        return odeint_adjoint(self.field, start, times, method="rk4")


set_seed(0)
accelerator = Accelerator()
model = Solver()
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
model, optimizer = accelerator.prepare(model, optimizer)
torch.manual_seed(100 + accelerator.process_index)
times = torch.linspace(0.0, 1.0, 5)
for _ in range(5):
    start = torch.randn(4, 2)
    wanted = start * torch.exp(-times)[:, None, None]
    loss = (model(start, times) - wanted).abs().mean()
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    accelerator.print(f"loss {loss.item():.9f}")
