"""8-bit optimizers of other libraries: save and resume, refusal of unsupported states, settings per parameter."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partita
from partita import ConfigError
from tests.kit import seeds
from tests.kit.plans import matrix
from tests.kit.ranks import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of the libraries


def model() -> nn.Module:
    seeds.start(0)
    return nn.Sequential(nn.Embedding(128, 64), nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 8))


def train(engine: partita.Engine, num_steps: int) -> list[float]:
    losses = []
    tokens = torch.arange(16).view(2, 8) + 16 * engine.mesh.rank
    for _ in range(num_steps):
        loss = engine(tokens).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def optimizer_of(name: str) -> Any:
    import bitsandbytes

    return lambda params: getattr(bitsandbytes.optim, name)(params, lr=1e-2)


def resumes(folder: str, name: str, stage: int) -> None:
    config = {"zero": {"stage": stage}}
    with partita.initialize(model(), config, optimizer=optimizer_of(name)) as engine:
        train(engine, 3)
        engine.save(folder)
        expected = train(engine, 3)
        assert engine.optimizer_state("1.weight")["state1"].dtype == torch.uint8
    with partita.initialize(model(), config, optimizer=optimizer_of(name)) as engine:
        engine.load(folder)
        assert train(engine, 3) == expected


@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (1, 3), (2, 0), (2, 3)])
@pytest.mark.parametrize("name", ["AdamW8bit", "Lion8bit"])
def test_states_of_bitsandbytes_are_saved_and_resumed(name: str, ranks: int, stage: int, tmp_path: Path) -> None:
    on_ranks(ranks, resumes, str(tmp_path), name, stage)


def keeps_embeddings_in_32_bits(by: str, stage: int) -> None:
    from bitsandbytes.optim import GlobalOptimManager

    manager = GlobalOptimManager.get_instance()
    before = dict(manager.pid2config)
    own = model()
    if by == "module":
        manager.register_module_override(own[0], "weight", {"optim_bits": 32})
    else:
        manager.override_config(own[0].weight, "optim_bits", 32)
    with partita.initialize(own, {"zero": {"stage": stage}}, optimizer=optimizer_of("AdamW8bit")) as engine:
        train(engine, 1)
        dtypes = [engine.optimizer_state(name)["state1"].dtype for name in ("0.weight", "1.weight")]
    assert dtypes == [torch.float32, torch.uint8]
    manager.pid2config.pop(id(own[0].weight), None)
    manager.module_weight_config_triple.clear()
    assert manager.pid2config == before


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("by", ["module", "parameter"])
def test_settings_of_single_parameters_reach_their_views(by: str, stage: int) -> None:
    on_ranks(2, keeps_embeddings_in_32_bits, by, stage)


def stages_are_alike() -> None:
    losses = []
    for stage in (0, 1, 3):
        with partita.initialize(model(), {"zero": {"stage": stage}}, optimizer=optimizer_of("AdamW8bit")) as engine:
            losses.append(train(engine, 4))
    assert losses[0] == losses[1] == losses[2]


def test_stages_have_the_same_losses() -> None:
    on_ranks(2, stages_are_alike)


class Coded(Tensor):
    """A tensor subclass, for a state that is not a plain tensor."""


class KeepsCoded(torch.optim.AdamW):
    def step(self, closure: Any = None) -> None:
        super().step()
        for state in self.state.values():
            state["coded"] = torch.zeros(3).as_subclass(Coded)


def refused(stage: int) -> None:
    with pytest.raises(ConfigError, match=r"optimizer KeepsCoded keeps its state 'coded' as Coded, which checkpoints"):
        partita.initialize(model(), {"zero": {"stage": stage}}, optimizer=KeepsCoded)


@matrix(ranks=[1, 2], stage=[0])
def test_states_that_cannot_be_saved_are_refused_at_the_start(ranks: int, stage: int) -> None:
    on_ranks(ranks, refused, stage)
