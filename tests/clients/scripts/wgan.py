"""A Wasserstein GAN: the critic's weights are clipped in place, and it has a gradient penalty."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

set_seed(0)
accelerator = Accelerator()
generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
critic = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
of_generator = torch.optim.RMSprop(generator.parameters(), lr=1e-3)
of_critic = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
generator, critic, of_generator, of_critic = accelerator.prepare(generator, critic, of_generator, of_critic)
torch.manual_seed(100 + accelerator.process_index)
for _ in range(4):
    for _ in range(2):
        for param in critic.parameters():
            param.data.clamp_(-0.1, 0.1)
        real = torch.randn(16, 16)
        with torch.no_grad():
            fake = generator(torch.randn(16, 8))
        between = (real + torch.rand(16, 1) * (fake - real)).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        loss = critic(fake).mean() - critic(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
        of_critic.zero_grad()
        accelerator.backward(loss)
        of_critic.step()
        accelerator.print(f"loss {loss.item():.9f}")
    fooled = -critic(generator(torch.randn(16, 8))).mean()
    of_generator.zero_grad()
    accelerator.backward(fooled)
    of_generator.step()
    accelerator.print(f"loss {fooled.item():.9f}")
