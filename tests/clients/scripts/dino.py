"""Self-distillation without labels: a teacher that is a moving average of the student, centred targets, and a last
layer whose gradients are dropped in the first steps.
"""

import copy

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.last_layer = nn.Linear(16, 24, bias=False)

    def forward(self, x):
        return self.last_layer(F.normalize(self.backbone(x), dim=-1))


set_seed(0)
accelerator = Accelerator()
student = Network()
teacher = copy.deepcopy(student).requires_grad_(False)
optimizer = torch.optim.AdamW(student.parameters(), lr=2e-3)
student, optimizer = accelerator.prepare(student, optimizer)
centre = torch.zeros(1, 24)
torch.manual_seed(100 + accelerator.process_index)
for step in range(6):
    x = torch.randn(8, 16)
    views = [x + 0.1 * torch.randn_like(x) for _ in range(2)]
    with torch.no_grad():
        targets = [teacher(view) for view in views]
    outputs = student(torch.cat(views)).chunk(2)
    losses = [
        -(F.softmax((target - centre) / 0.04, -1) * F.log_softmax(output / 0.1, -1)).sum(-1).mean()
        for target, output in ((targets[0], outputs[1]), (targets[1], outputs[0]))
    ]
    loss = sum(losses) / 2
    optimizer.zero_grad()
    accelerator.backward(loss)
    if step < 2:
        for name, param in student.named_parameters():
            if "last_layer" in name:
                param.grad = None
    optimizer.step()
    with torch.no_grad():
        for param, kept in zip(student.parameters(), teacher.parameters(), strict=True):
            kept.data.mul_(0.9).add_((1 - 0.9) * param.detach().data)
        mean = accelerator.reduce(torch.cat(targets).mean(0, keepdim=True), "mean")
        centre = centre * 0.9 + mean * 0.1
    accelerator.print(f"loss {loss.item():.9f}")
