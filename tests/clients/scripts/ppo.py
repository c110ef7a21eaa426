"""Proximal policy optimization with a diagonal Gaussian policy, whose deviation is a parameter at the agent's root."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.distributions import Normal


class Agent(nn.Module):
    def __init__(self, observations, actions):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(observations, 32), nn.Tanh(), nn.Linear(32, 1))
        self.actor_mean = nn.Sequential(nn.Linear(observations, 32), nn.Tanh(), nn.Linear(32, actions))
        self.actor_logstd = nn.Parameter(torch.zeros(1, actions))

    def get_value(self, x):
        return self.critic(x)

    def get_action_and_value(self, x, action=None):
        mean = self.actor_mean(x)
        policy = Normal(mean, torch.exp(self.actor_logstd.expand_as(mean)))
        if action is None:
            action = policy.sample()
        return action, policy.log_prob(action).sum(1), policy.entropy().sum(1), self.critic(x)

    def forward(self, x, action):
        return self.get_action_and_value(x, action)


def act(observation, action):
    """Move a point by an action; return it and its reward, which is higher near the origin."""
    moved = observation + 0.1 * torch.cat([action, action], dim=1)
    return moved, -moved.square().sum(1)


set_seed(0)
accelerator = Accelerator()
agent = Agent(4, 2)
optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3, eps=1e-5)
agent, optimizer = accelerator.prepare(agent, optimizer)
policy = accelerator.unwrap_model(agent)
torch.manual_seed(100 + accelerator.process_index)
for _ in range(3):
    observation, kept = torch.randn(8, 4), []
    for _ in range(4):
        with torch.no_grad():
            action, log_prob, _, value = policy.get_action_and_value(observation)
        following, reward = act(observation, action)
        kept.append((observation, action, log_prob, value.flatten(), reward))
        observation = following
    with torch.no_grad():
        value = policy.get_value(observation).flatten()
    returns, running = [], value
    for *_, reward in reversed(kept):
        running = reward + 0.9 * running
        returns.insert(0, running)
    observations, actions, log_probs, values, _ = (torch.cat(part) for part in zip(*kept, strict=True))
    returns = torch.cat(returns)
    advantages = returns - values
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    for _ in range(2):
        _, new, entropy, found = agent(observations, actions)
        ratio = (new - log_probs).exp()
        clipped = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)).mean()
        loss = clipped - 0.01 * entropy.mean() + 0.5 * (found.flatten() - returns).square().mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
        accelerator.print(f"loss {loss.item():.9f}")
