"""Momentum contrast: a key encoder that is a moving average of the query encoder, and a queue of keys in a buffer."""

import copy

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn


class MoCo(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(8, 32), dim=0))
        self.register_buffer("start", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def update_key(self):
        for kept, param in zip(self.key.parameters(), self.query.parameters(), strict=True):
            kept.data = kept.data * 0.9 + param.data * 0.1

    @torch.no_grad()
    def enqueue(self, keys):
        begin = int(self.start)
        self.queue[:, begin : begin + len(keys)] = keys.T
        self.start[0] = (begin + len(keys)) % self.queue.shape[1]

    def forward(self, x, y):
        query = F.normalize(self.query(x), dim=1)
        with torch.no_grad():
            self.update_key()
            key = F.normalize(self.key(y), dim=1)
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone()], 1) / 0.2
        keys = accelerator.gather(key)
        self.enqueue(keys)
        return logits


set_seed(0)
accelerator = Accelerator()
model = MoCo()
optimizer = torch.optim.SGD(model.query.parameters(), lr=0.1, momentum=0.9)
model, optimizer = accelerator.prepare(model, optimizer)
torch.manual_seed(100 + accelerator.process_index)
for _ in range(6):
    x = torch.randn(4, 16)
    logits = model(x, x + 0.1 * torch.randn(4, 16))
    loss = F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    accelerator.print(f"loss {loss.item():.9f}")
