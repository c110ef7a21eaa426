"""After an engine is closed: nothing of it is left on the model or in the process."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from collections.abc import Mapping as Config
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import partita
from partita import PartitaError
from partita.memory.allocate import Mapping
from partita.sharding import resting
from tests.local import pool
from tests.local.training import PLANS, Stack, inputs, rank, square_loss

HOST = {"parameters": "host", "gradients": "host", "optimizer": "host"}
DISK = {"parameters": "disk", "gradients": "disk", "optimizer": "disk"}
LEAN = {"compute": "bf16", "master": "split", "moments": "int8", "gradients": "in_backward"}
SETTINGS: dict[str, dict[str, Any]] = {
    **{f"stage {name}": {"zero": zero} for name, zero in PLANS.items()},
    "host": {"zero": {"stage": 3, "offload": HOST}},
    "host, whole": {"zero": {"stage": 1, "offload": {"optimizer": "host"}}},
    "disk": {"zero": {"stage": 3, "offload": DISK}},
    "lean": {"zero": {"stage": 3}, "precision": LEAN},
    "kept in fp32": {"zero": {"stage": 3}, "precision": {"compute": "bf16", "keep_fp32": ["LayerNorm", "last"]}},
    "kept in fp32, whole": {"precision": {"compute": "bf16", "keep_fp32": ["LayerNorm"]}},
}


def _settings(name: str, folder: Path) -> dict[str, Any]:
    setting = SETTINGS[name]
    if "disk" in setting.get("zero", {}).get("offload", {}).values():
        setting = {"zero": {**setting["zero"], "offload": {**setting["zero"]["offload"], "path": str(folder)}}}
    return setting


def _left(look: Callable[[], Sequence[str]]) -> Sequence[str]:
    """What ``look`` finds, once what is about to go is gone: threads end, and let go of what they worked on."""
    for _ in range(100):
        gc.collect()
        if not (found := look()):
            break
        time.sleep(0.02)
    return found


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("partita")]


def _mappings() -> list[str]:
    return [f"{len(found)} bytes" for found in gc.get_objects() if isinstance(found, Mapping)]


def freed(config: Config[str, Any], close: bool) -> None:
    """The engine and all that it made goes with the last reference to it, whether it was closed or not."""
    model = Stack(2)
    engine = partita.initialize(model, config)
    for step in range(2):
        engine.backward(square_loss(engine, rank(), step))
        engine.step()
    runtime = engine._runtime
    made = [engine, model, runtime, runtime.ring, runtime.residency, runtime.reducer, engine.optimizer, engine._ledger]
    seen = [weakref.ref(found) for found in [*made, *model.parameters()]]
    mesh = engine.mesh
    engine.memory_report()  # waits for updates under way, which need the engine
    if close:
        engine.close()
    del made, engine, model, runtime
    assert not _left(lambda: [type(found).__name__ for ref in seen if (found := ref()) is not None])
    assert not _left(_mappings)
    assert not len(resting._claims)
    mesh.close()
    del mesh
    assert not _left(_threads)


def _hooks(model: nn.Module) -> list[Any]:
    """What a model's modules carry beside their parameters, buffers and children."""
    carried: list[Any] = []
    for name, module in model.named_modules():
        carried.append((name, type(module), {key: repr(value) for key, value in vars(module).items() if "hook" in key}))
        carried.append(sorted(vars(module)))
    for param in model.parameters():
        carried.append(dict(param._backward_hooks or {}))
        carried.append(dict(getattr(param, "_post_accumulate_grad_hooks", None) or {}))
    return carried


def left_on_the_model(config: Config[str, Any]) -> None:
    model = Stack(2)
    before = _hooks(model)
    with partita.initialize(model, config) as engine:
        engine.backward(square_loss(engine, rank(), 0))
        engine.step()
        assert _hooks(model) != before
    assert _hooks(model) == before


def read_after_close() -> str:
    """What reading a parameter says whose engine was closed while its data was split over the ranks."""
    model = Stack(2)
    engine = partita.initialize(model, {"zero": {"stage": 3}})
    engine.close()
    param, said = model.first.weight, list[str]()
    assert param.shape == (16, 16)
    del engine
    for engine_is_gone in (False, True):
        if engine_is_gone:
            del model
            gc.collect()
        with pytest.raises(PartitaError) as raised:
            param.sum()
        said.append(str(raised.value))
    assert said[0] == said[1]
    return said[0]


def forward_after_close() -> None:
    model = Stack(2)
    partita.initialize(model, {"zero": {"stage": 3}}).close()
    with pytest.raises(PartitaError, match=r"'first.weight' has no data: .* closed .*linear.* engine.state_dict\(\)"):
        model(inputs(0, 0))
    with pytest.raises(PartitaError, match=r"'first.weight' already belongs to another engine"):
        partita.initialize(model)


def parameter_alone() -> None:
    """An engine that was dropped without being closed: its parameters say so."""
    model = Stack(2)
    engine = partita.initialize(model, {"zero": {"stage": 3}})
    mesh, param = engine.mesh, model.first.weight
    del engine, model
    gc.collect()
    with pytest.raises(PartitaError, match=r"'first.weight' has no data"):
        param.sum()
    mesh.close()


@pytest.mark.parametrize("close", [True, False])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("world", [1, 2])
def test_engine_is_freed(world: int, name: str, close: bool, tmp_path: Path) -> None:
    pool.run(world, freed, _settings(name, tmp_path), close)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("world", [1, 2])
def test_nothing_stays_on_the_model(world: int, name: str, tmp_path: Path) -> None:
    pool.run(world, left_on_the_model, _settings(name, tmp_path))


def test_reading_a_parameter_of_a_closed_engine() -> None:
    for said in pool.run(2, read_after_close):
        assert "'first.weight' has no data" in said
        assert "engine was closed" in said
    pool.run(2, forward_after_close)
    pool.run(2, parameter_alone)
