"""Soft actor-critic: two critics, target critics by Polyak averaging, and a learned temperature."""

import copy

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn


class Critics(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
        self.second = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, observation, action):
        both = torch.cat([observation, action], 1)
        return self.first(both), self.second(both)


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, observation, noise):
        mean, log_std = self.body(observation).chunk(2, dim=1)
        std = log_std.clamp(-5, 2).exp()
        action = torch.tanh(mean + std * noise)
        log_prob = (-0.5 * noise.square() - std.log() - (1 - action.square() + 1e-6).log()).sum(1, keepdim=True)
        return action, log_prob


class Temperature(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_alpha = nn.Parameter(torch.zeros(1))

    def forward(self):
        return self.log_alpha.exp()


set_seed(0)
accelerator = Accelerator()
actor, critics, temperature = Actor(), Critics(), Temperature()
targets = copy.deepcopy(critics).requires_grad_(False)
of_actor = torch.optim.Adam(actor.parameters(), lr=3e-3)
of_critics = torch.optim.Adam(critics.parameters(), lr=3e-3)
of_temperature = torch.optim.Adam(temperature.parameters(), lr=3e-3)
actor, critics, temperature = accelerator.prepare(actor, critics, temperature)
of_actor, of_critics, of_temperature = accelerator.prepare(of_actor, of_critics, of_temperature)
torch.manual_seed(100 + accelerator.process_index)
for _ in range(6):
    observation, action, following = torch.randn(16, 4), torch.rand(16, 2) * 2 - 1, torch.randn(16, 4)
    reward = -observation.square().sum(1, keepdim=True)
    with torch.no_grad():
        next_action, next_log_prob = actor(following, torch.randn(16, 2))
        alpha = temperature()
        value = torch.min(*targets(following, next_action)) - alpha * next_log_prob
        wanted = reward + 0.99 * value
    first, second = critics(observation, action)
    critic_loss = F.mse_loss(first, wanted) + F.mse_loss(second, wanted)
    of_critics.zero_grad()
    accelerator.backward(critic_loss)
    of_critics.step()

    new_action, log_prob = actor(observation, torch.randn(16, 2))
    for param in critics.parameters():
        param.requires_grad_(False)
    actor_loss = (alpha * log_prob - torch.min(*accelerator.unwrap_model(critics)(observation, new_action))).mean()
    of_actor.zero_grad()
    accelerator.backward(actor_loss)
    of_actor.step()
    for param in critics.parameters():
        param.requires_grad_(True)

    temperature_loss = -(temperature() * (log_prob.detach() + 2)).mean()
    of_temperature.zero_grad()
    accelerator.backward(temperature_loss)
    of_temperature.step()

    with torch.no_grad():
        for kept, param in zip(targets.parameters(), critics.parameters(), strict=True):
            kept.lerp_(param, 0.05)
    for loss in (critic_loss, actor_loss, temperature_loss):
        accelerator.print(f"loss {loss.item():.9f}")
