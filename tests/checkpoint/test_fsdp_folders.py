"""FSDP checkpoints that accelerate writes, loaded by an engine without conversion."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import partita
from partita import PartitaError
from tests.checkpoint.test_interchange import NUM_STEPS, fsdp, fsdp_steps, our_steps, whole
from tests.kit.models import Stack
from tests.kit.ranks import on_ranks
from tests.kit.training import ADAMW, rank, whole_weights, world

SHARDED, FULL = "SHARDED_STATE_DICT", "FULL_STATE_DICT"


def save_as_accelerate(folder: str, kind: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Save as ``Accelerator.save_state`` and the Trainer do under FSDP2."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils import fsdp_utils

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind, reshard_after_forward=True)
    accelerator = SimpleNamespace(num_processes=world(), process_index=rank(), is_main_process=not rank())
    with patch.object(fsdp_utils, "logger", logging.getLogger("accelerate")):  # accelerate's needs a full Accelerator
        fsdp_utils.save_fsdp_model(plugin, accelerator, model, folder)
        fsdp_utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)


def from_accelerate(folder: str, kind: str) -> None:
    with partita.initialize(nn.Linear(1, 1)) as starts_the_group:
        model, optimizer = fsdp()
        fsdp_steps(model, optimizer, 0)
        save_as_accelerate(folder, kind, model, optimizer)
        dist.barrier()
        saved = whole(model)
        torch.manual_seed(1)
        config = {"zero": {"stage": 3}, "optimizer": ADAMW}
        with partita.initialize(Stack(2), config, mesh=starts_the_group.mesh) as engine:
            restored = engine.resume(folder)
            assert restored is not None
            assert (restored.missing, restored.unexpected) == ((), ())
            assert str(restored).startswith("restored model and optimizer states of step 0 from")
            got = whole_weights(engine)
            if rank() == 0:
                assert all(torch.equal(got[name], value) for name, value in saved.items())
            assert engine.optimizer_state("blocks.1.up.weight")["step"] == NUM_STEPS
            assert our_steps(engine, NUM_STEPS) == pytest.approx(fsdp_steps(model, optimizer, NUM_STEPS), rel=1e-5)
        dist.barrier()


@pytest.mark.parametrize("kind", [SHARDED, FULL])
def test_what_accelerate_has_saved(kind: str, tmp_path: Path) -> None:
    on_ranks(2, from_accelerate, str(tmp_path), kind)


class Runs:
    """An object that runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return print, ("this ran",)


def refuses(folder: str) -> None:
    with partita.initialize(nn.Linear(2, 2), {"optimizer": ADAMW}) as engine:
        for name, said in (
            ("code", "which could run any code"),
            ("cut", "cannot be loaded"),
            ("number", "holds a int: expected a state dict"),
            ("swapped", "expected an optimizer's state dict, with 'state' and 'param_groups'"),
            ("numbered", "numbers the optimizer's parameters, and the name of number 0 is unknown"),
            ("shards", "is one rank's shard.*SHARDED_STATE_DICT or FULL_STATE_DICT"),
        ):
            for call in (engine.load, engine.resume):
                with pytest.raises(PartitaError, match=said):
                    call(f"{folder}/{name}")


def test_files_that_are_not_loaded(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    pairs: dict[str, tuple[Any, Any]] = {
        "code": ({**model.state_dict(), "more": Runs()}, {}),
        "cut": (model.state_dict(), {}),
        "number": (3, {}),
        "swapped": (model.state_dict(), model.state_dict()),
        "numbered": (model.state_dict(), optimizer.state_dict()),
    }
    for name, (weights, states) in pairs.items():
        (tmp_path / name).mkdir()
        torch.save(weights, tmp_path / name / "pytorch_model_fsdp.bin")
        torch.save(states, tmp_path / name / "optimizer.bin")
    path = tmp_path / "cut" / "pytorch_model_fsdp.bin"
    path.write_bytes(path.read_bytes()[:100])
    (tmp_path / "shards").mkdir()
    torch.save(model.state_dict(), tmp_path / "shards" / "pytorch_model_fsdp_0_rank1.bin")
    on_ranks(1, refuses, str(tmp_path))
