"""Buffers that a forward changes, under a pipeline: the micro-batches change them one after another."""

from typing import Any

import torch
from torch import Tensor

import partita
from tests.kit.ranks import on_ranks
from tests.parallel import stages

STEPS, MICROS = 2, 3


def statistics(parallel: dict[str, Any]) -> tuple[list[float], dict[str, Tensor], set[str]]:
    """Return the losses, all running statistics, and the names of those that this rank has changed."""
    with partita.initialize(stages.build("resnet"), {"parallel": parallel, "batch": {"accumulate": MICROS}}) as engine:
        losses = []
        for step in range(STEPS):
            batches = [stages.batch("resnet", 10 * step + micro) for micro in range(MICROS)]
            losses.append(engine.train_batch(iter(batches)).item())
        buffers = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
        whole = engine.state_dict()
    start = as_built()
    changed = {name for name, buffer in buffers.items() if not torch.equal(buffer, start[name])}
    return losses, {name: value for name, value in whole.items() if name in buffers}, changed


def as_built() -> dict[str, Tensor]:
    return dict(stages.build("resnet").named_buffers())


def test_running_statistics_are_those_of_one_process() -> None:
    ((losses, expected, all_changed),) = on_ranks(1, statistics, {})
    assert len(all_changed) == len(expected) > 0
    found = on_ranks(2, statistics, {"pipeline": 2})
    assert [one[0] for one in found] == [losses] * 2
    assert set.union(*(one[2] for one in found)) == all_changed
    whole = found[0][1]
    assert [name for name, value in expected.items() if not torch.equal(whole[name], value)] == []
