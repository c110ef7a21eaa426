"""partita loads checkpoints of torch's FSDP2, and FSDP2 those of partita, through torch.distributed.checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import partita
from partita import PartitaError
from tests.kit import seeds
from tests.kit.models import Stack, square_loss
from tests.kit.ranks import on_ranks
from tests.kit.training import ADAMW, rank, whole_weights, world

NUM_STEPS = 3


def fsdp() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a module under FSDP2, and its optimizer."""
    seeds.start()
    model = Stack(2)
    mesh = init_device_mesh("cpu", (world(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), **ADAMW)


def fsdp_steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> list[float]:
    losses = []
    for step in range(first, first + NUM_STEPS):
        loss = square_loss(model, rank(), step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def nested(model: nn.Module, optimizer: torch.optim.Optimizer, name: str) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), name: get_optimizer_state_dict(model, optimizer)}


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {
        key: value.clone()
        for key, value in get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)).items()
    }


def our_steps(engine: partita.Engine, first: int) -> list[float]:
    losses = []
    for step in range(first, first + NUM_STEPS):
        loss = square_loss(engine, rank(), step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def from_fsdp(folder: str, optimizer_name: str, zero: dict[str, Any]) -> None:
    with partita.initialize(nn.Linear(1, 1)) as starts_the_group:
        model, optimizer = fsdp()
        fsdp_steps(model, optimizer, 0)
        dcp.save(nested(model, optimizer, optimizer_name), checkpoint_id=folder)
        saved = whole(model)
        seeds.start(1)
        other = partita.initialize(Stack(2), {"zero": zero, "optimizer": ADAMW}, mesh=starts_the_group.mesh)
        with other as engine:
            restored = engine.load(folder)
            assert (restored.missing, restored.unexpected) == ((), ())
            got = whole_weights(engine)
            if rank() == 0:
                assert all(torch.equal(got[name], value) for name, value in saved.items())
            state = engine.optimizer_state("blocks.1.up.weight")
            assert state["step"] == NUM_STEPS
            assert our_steps(engine, NUM_STEPS) == pytest.approx(fsdp_steps(model, optimizer, NUM_STEPS), rel=1e-5)
        dist.barrier()


@pytest.mark.parametrize("name", ["optim", "optimizer"])
@pytest.mark.parametrize("zero", [{"stage": 3}, {"stage": 1, "offload": {"optimizer": "disk"}}], ids=["3", "1-disk"])
def test_what_fsdp2_has_saved(name: str, zero: dict[str, Any], tmp_path: Path) -> None:
    on_ranks(2, from_fsdp, str(tmp_path), name, zero)


def into_fsdp(folder: str, zero: dict[str, Any]) -> None:
    seeds.start(2)
    with partita.initialize(Stack(2), {"zero": zero, "optimizer": ADAMW}) as engine:
        our_steps(engine, 0)
        path = engine.save(folder)
        engine.wait_for_checkpoint()
        saved, moments = whole_weights(engine), engine.optimizer_state("blocks.1.up.weight")["exp_avg"]
        model, optimizer = fsdp()
        state = nested(model, optimizer, "optimizer")
        dcp.load(state, checkpoint_id=path)
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        got = whole(model)
        if rank() == 0:
            assert all(torch.equal(got[name], value) for name, value in saved.items())
        exp_avg = optimizer.state[model.get_parameter("blocks.1.up.weight")]["exp_avg"].full_tensor()
        assert torch.equal(exp_avg, moments)
        assert fsdp_steps(model, optimizer, NUM_STEPS) == pytest.approx(our_steps(engine, NUM_STEPS), rel=1e-5)


@pytest.mark.parametrize("zero", [{"stage": 3}, {"stage": 0}, {"stage": 2, "offload": {"optimizer": "host"}}])
def test_what_fsdp2_loads(zero: dict[str, Any], tmp_path: Path) -> None:
    on_ranks(2, into_fsdp, str(tmp_path), zero)


def chooses_a_copy(folder: str) -> None:
    with partita.initialize(Stack(1), {"zero": {"stage": 3}}) as engine:
        for prefix, value in ((None, 1.0), ("ema", 2.0), ("model", 1.0)):
            engine.load(folder + "/usual", prefix=prefix)
            assert all((weight == value).all() for weight in whole_weights(engine).values())
        with pytest.raises(PartitaError, match=r"2 copies of the weights, under 'ema', 'net'"):
            engine.load(folder + "/other")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("ranks", [1, 2])
def test_several_copies_of_the_weights(ranks: int, tmp_path: Path) -> None:
    one, two = ({key: torch.full_like(x, value) for key, x in Stack(1).state_dict().items()} for value in (1.0, 2.0))
    dcp.save({"ema": two, "model": one}, checkpoint_id=tmp_path / "usual")
    dcp.save({"ema": two, "net": one}, checkpoint_id=tmp_path / "other")
    on_ranks(ranks, chooses_a_copy, str(tmp_path))
