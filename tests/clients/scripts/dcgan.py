"""A convolutional generator against a discriminator, with the usual loop: the next ``discriminator.zero_grad()`` drops
the discriminator's gradients of the generator's loss.
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

set_seed(0)
accelerator = Accelerator()
generator = nn.Sequential(
    nn.ConvTranspose2d(8, 16, 4),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.ConvTranspose2d(16, 1, 4, 2, 1),
    nn.Tanh(),
)
discriminator = nn.Sequential(
    nn.Conv2d(1, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 32, 3), nn.LeakyReLU(0.2), nn.Conv2d(32, 1, 2)
)
of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
generator, discriminator, of_generator, of_discriminator = accelerator.prepare(
    generator, discriminator, of_generator, of_discriminator
)
torch.manual_seed(100 + accelerator.process_index)
for _ in range(5):
    real, noise = torch.rand(8, 1, 8, 8) * 2 - 1, torch.randn(8, 8, 1, 1)
    ones, zeros = torch.ones(8), torch.zeros(8)
    discriminator.zero_grad()
    on_real = F.binary_cross_entropy_with_logits(discriminator(real).flatten(), ones)
    accelerator.backward(on_real)
    fake = generator(noise)
    on_fake = F.binary_cross_entropy_with_logits(discriminator(fake.detach()).flatten(), zeros)
    accelerator.backward(on_fake)
    of_discriminator.step()
    generator.zero_grad()
    fooled = F.binary_cross_entropy_with_logits(discriminator(fake).flatten(), ones)
    accelerator.backward(fooled)
    of_generator.step()
    accelerator.print(f"loss {on_real.item():.9f}\nloss {on_fake.item():.9f}\nloss {fooled.item():.9f}")
