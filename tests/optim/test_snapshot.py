"""Optimizer snapshots: a step uses the settings of the snapshot, updates chosen parameters, and is counted once."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from partita.errors import PartitaError
from partita.optim.optimizer import Snapshot


class Counting(Optimizer):
    """An optimizer that counts its steps in an attribute, in a number of its groups, and in place in their tensors."""

    def __init__(self, params: Any) -> None:
        self.steps = 0
        super().__init__(params, {"lr": 1.0, "k": 0, "power": torch.ones(())})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            group["k"] += 1
            group["power"].mul_(0.5)
            for param in group["params"]:
                param.sub_(group["lr"] * group["power"])


def params(num: int = 2) -> list[nn.Parameter]:
    found = [nn.Parameter(torch.ones(3)) for _ in range(num)]
    for param in found:
        param.grad = torch.ones(3)
    return found


def values(of: list[nn.Parameter]) -> list[float]:
    return [float(param.detach()[0]) for param in of]


def test_a_step_has_the_settings_of_its_moment() -> None:
    first, second = params()
    optimizer = SGD([first, second], lr=0.5, momentum=0.9)
    hooked: list[Any] = []
    optimizer.register_step_post_hook(lambda *_: hooked.append(1))
    snapshot = Snapshot(optimizer, ())
    optimizer.param_groups[0]["lr"] = 100.0
    snapshot.step({id(second)})()
    assert values([first, second]) == [1.0, 0.5]
    assert list(optimizer.state) == [second]
    assert optimizer.param_groups[0]["lr"] == 100.0
    assert not hooked


def test_what_several_steps_count_is_counted_once() -> None:
    first, second = params()
    optimizer = Counting([first, second])
    snapshot = Snapshot(optimizer, ("steps",))
    stepped = [snapshot.step({id(param)}) for param in (first, second)]
    assert values([first, second]) == [0.5, 0.5]
    assert (optimizer.steps, optimizer.param_groups[0]["k"], float(optimizer.param_groups[0]["power"])) == (0, 0, 1.0)
    for copy_counters in stepped:
        copy_counters()
    assert (optimizer.steps, optimizer.param_groups[0]["k"], float(optimizer.param_groups[0]["power"])) == (1, 1, 0.5)


def test_a_rank_that_updates_nothing_counts_too() -> None:
    optimizer = Counting(params())
    snapshot = Snapshot(optimizer, ("steps",))
    snapshot.step(set())()
    assert optimizer.steps == 1


def test_a_group_that_is_added_meanwhile_takes_no_part() -> None:
    first, second = params()
    optimizer = SGD([first], lr=0.5)
    snapshot = Snapshot(optimizer, ())
    optimizer.add_param_group({"params": [second]})
    snapshot.step({id(first), id(second)})()
    assert values([first, second]) == [0.5, 1.0]


def test_a_state_that_is_not_there_is_named() -> None:
    (param,) = params(1)
    optimizer = torch.optim.Adam([param])
    Snapshot(optimizer, ()).step({id(param)})
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(
        PartitaError, match=r"optimizer Adam: its step found no state 'max_exp_avg_sq'\. Group settings that"
    ):
        Snapshot(optimizer, ()).step({id(param)})
