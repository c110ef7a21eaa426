"""A graph network of torch_geometric."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch_geometric.nn import GATConv, GCNConv, global_mean_pool


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = GCNConv(8, 16), GATConv(16, 8, heads=2)
        self.head = nn.Linear(16, 3)

    def forward(self, x, edges, batch):
        x = F.elu(self.first(x, edges))
        x = F.elu(self.second(x, edges))
        return self.head(global_mean_pool(x, batch))


set_seed(0)
accelerator = Accelerator()
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
model, optimizer = accelerator.prepare(model, optimizer)
torch.manual_seed(100 + accelerator.process_index)
for _ in range(6):
    sizes = torch.randint(3, 7, (4,))
    batch = torch.repeat_interleave(torch.arange(4), sizes)
    nodes = len(batch)
    edges = torch.randint(0, nodes, (2, 4 * nodes))
    loss = F.cross_entropy(model(torch.randn(nodes, 8), edges, batch), torch.randint(0, 3, (4,)))
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    accelerator.print(f"loss {loss.item():.9f}")
