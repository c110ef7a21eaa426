"""Step counters on the device, as torch's fused Adam keeps them, stay on each rank's own device."""

from pathlib import Path
from typing import Any

import torch

import partita
from tests.kit import seeds
from tests.kit.ranks import on_ranks
from tests.kit.training import rank
from tests.simulated.training import Model, on, simulated, train_step


class Counting(torch.optim.Optimizer):
    """SGD whose learning rate falls with a count on the device."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                state = self.state[param]
                if not state:
                    state["step"] = torch.zeros((), device=param.device)
                state["step"] += 1
                param.sub_(0.1 * param.grad / state["step"])


def trains_after_a_save(folder: Path) -> int:
    """Save inside a round of DiLoCo, and train on. Return the number of counters."""
    partita.elementwise(Counting)
    seeds.start()
    config = {**on(1), "communication": {"every": 3, "replicas": 2}}
    with partita.initialize(Model(1), config, optimizer=Counting) as engine:
        for step in range(2):
            train_step(engine, step, None)
        engine.save(folder)
        count = engine.optimizer_state("head.weight")["step"]
        assert float(count) == 2
        train_step(engine, 2, None)
        counts = [state["step"] for state in engine.optimizer.state.values()]
        assert {float(each) for each in counts} == {3.0}
        assert engine.mesh.device.index == rank()
        assert {each.device for each in (count, *counts)} == {engine.mesh.device}
        return len(counts)


def test_counters_stay_on_the_ranks_own_devices(tmp_path: Path) -> None:
    for num_counters, races in on_ranks(2, simulated, trains_after_a_save, tmp_path, with_group=False, timeout=200):
        assert num_counters > 0
        assert races == []
