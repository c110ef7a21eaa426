"""Checkpoints saved on one mesh and loaded on another, and exports of them."""

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import partita
from partita import ConfigError
from partita.config.load import load_config
from partita.config.resolve import resolve
from tests.kit import seeds
from tests.kit.ranks import on_ranks
from tests.parallel import stages

NUM_PAIRS, NUM_QUICK, MOST_RANKS = 20, 1, 8
MICROS, STEPS_BEFORE, STEPS_AFTER, SAMPLES = 2, 2, 2, 12
NAMES, TIMEOUT_S = ("llama", "gpt2", "qwen3moe"), 300


@dataclass(frozen=True)
class Layout:
    """A mesh and a ZeRO stage."""

    pipeline: int
    data: int
    sequence: int
    tensor: int
    stage: int

    @property
    def num_ranks(self) -> int:
        return self.pipeline * self.data * self.sequence * self.tensor

    @property
    def config(self) -> dict[str, Any]:
        sizes = asdict(self)
        return {
            "zero": {"stage": sizes.pop("stage")},
            "parallel": sizes,
            "batch": {"accumulate": MICROS},
            "optimizer": {"lr": 2e-3, "eps": 1e-6},
            "clip_grad_norm": 0.5,
        }


def layouts() -> Iterator[Layout]:
    """Yield the valid layouts of 2 to ``MOST_RANKS`` ranks."""
    for sizes in product((1, 2, 3), (1, 2, 3), (1, 2), (1, 2, 3), range(4)):
        layout = Layout(*sizes)
        if 1 < layout.num_ranks <= MOST_RANKS:
            try:
                resolve(load_config(layout.config), layout.num_ranks, "cpu")
            except ConfigError:
                continue
            yield layout


def pairs() -> list[tuple[str, Layout, Layout]]:
    """Return pairs of layouts with different meshes and different stages, sampled with this run's seed."""
    draw, possible = random.Random(seeds.chosen()), list(layouts())
    found = []
    while len(found) < NUM_PAIRS:
        one, other = draw.sample(possible, 2)
        if one.stage != other.stage and asdict(one) | {"stage": 0} != asdict(other) | {"stage": 0}:
            found.append((NAMES[len(found) % len(NAMES)], one, other))
    return sorted(found, key=lambda pair: pair[1].num_ranks + pair[2].num_ranks)


def losses_of(engine: partita.Engine, name: str, first: int, num: int) -> list[float]:
    """Train on the same samples for any number of data ranks, each with equally many labels; return the losses."""
    losses, index, num_data = list[float](), engine.mesh.coordinate("data"), engine.mesh.size("data")
    for step in range(first, first + num):
        whole = stages.batch(name, step, SAMPLES)
        whole["labels"] = whole["input_ids"]
        own = {key: value.chunk(num_data)[index].chunk(MICROS) for key, value in whole.items()}
        micros = [{key: parts[micro] for key, parts in own.items()} for micro in range(MICROS)]
        losses.append(engine.train_batch(micros).item())
    return losses


def states_of(engine: partita.Engine) -> dict[str, Tensor]:
    """Return the full weights and optimizer states on rank 0, and nothing on other ranks."""
    states = dict(engine.state_dict())
    for name, _ in engine.module.named_parameters():
        states |= {f"{name} {key}": value for key, value in engine.optimizer_state(name).items()}
    return states if engine.mesh.rank == 0 else {}


Seen = tuple[dict[str, Tensor], list[float]]


def saved(folder: str, name: str, layout: Layout) -> Seen:
    with partita.initialize(stages.build(name), layout.config) as engine:
        losses_of(engine, name, 0, STEPS_BEFORE)
        engine.save(folder)
        states = states_of(engine)
        return states, losses_of(engine, name, STEPS_BEFORE, STEPS_AFTER)


def loaded(folder: str, name: str, layout: Layout) -> Seen:
    model = stages.build(name)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    with partita.initialize(model, layout.config) as engine:
        assert engine.load(folder).step == STEPS_BEFORE
        engine.export(f"{folder}/exported")
        states = states_of(engine)
        return states, losses_of(engine, name, STEPS_BEFORE, STEPS_AFTER)


@pytest.mark.parametrize(
    "number", [pytest.param(at, marks=[] if at < NUM_QUICK else pytest.mark.thorough) for at in range(NUM_PAIRS)]
)
def test_saved_under_one_mesh_and_loaded_under_another(number: int, tmp_path: Path) -> None:
    name, one, other = pairs()[number]
    before, losses = on_ranks(one.num_ranks, saved, str(tmp_path), name, one, timeout=TIMEOUT_S)[0]
    after, further = on_ranks(other.num_ranks, loaded, str(tmp_path), name, other, timeout=TIMEOUT_S)[0]
    what = f"seed {seeds.chosen()}, {name}: {one} -> {other}"
    assert after.keys() == before.keys(), what
    assert [key for key, value in after.items() if not torch.equal(value, before[key])] == [], what
    assert further == pytest.approx(losses, abs=1e-5), what
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32).state_dict()
    assert exported.keys() <= before.keys(), what
    assert [key for key, value in exported.items() if not torch.equal(value, before[key])] == [], what
