"""A closed engine, or a failed initialize, leaves nothing on the model or in the process."""

import copy
import gc
import logging
import pickle
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from collections.abc import Mapping as Config
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import partita
from partita import PartitaError
from partita.memory.allocate import Mapping
from partita.sharding import placeholder
from tests.kit import seeds
from tests.kit.models import CASES, WIDTH, Stack, inputs, square_loss
from tests.kit.plans import ZERO, matrix
from tests.kit.ranks import on_ranks
from tests.kit.training import rank

HOST = {"parameters": "host", "gradients": "host", "optimizer": "host"}
DISK = {"parameters": "disk", "gradients": "disk", "optimizer": "disk"}
LEAN = {"compute": "bf16", "master": "split", "moments": "int8", "gradients": "in_backward"}
SETTINGS: dict[str, dict[str, Any]] = {
    **{f"stage {name}": {"zero": zero} for name, zero in ZERO.items()},
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
    """Return what ``look`` finds. Retry for 2 s until it finds nothing: threads end with a delay."""
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


def _keep(module: nn.Module, args: Any, output: Tensor) -> None:
    module.kept = output  # type: ignore[assignment]


def freed(config: Config[str, Any], close: bool) -> None:
    """Check that the engine and its objects are freed with the last reference, closed or not, although a module keeps
    an output and with it the graph.
    """
    model = Stack(2)
    model.blocks[-1].register_forward_hook(_keep)
    engine = partita.initialize(model, config)
    for step in range(2):
        engine.backward(square_loss(engine, rank(), step))
        engine.step()
    runtime = engine._parts.runtime
    made = [
        engine,
        model,
        runtime,
        runtime._pool,
        runtime.unsharder,
        runtime.reducer,
        engine.optimizer,
        engine._parts.runtime.memory.ledger,
    ]
    seen = [weakref.ref(found) for found in [*made, *model.parameters()]]
    mesh = engine.mesh
    engine(inputs(rank(), 2))  # prefetches for a backward that never runs
    engine.memory_report()  # waits for running updates, which refer to the engine
    if close:
        engine.close()
    del made, engine, model, runtime
    still = _left(lambda: [type(found).__name__ for ref in seen if (found := ref()) is not None])
    assert not still, still
    assert not _left(_mappings)
    assert not len(placeholder._claims)
    mesh.close()
    assert "partita watchdog" not in _threads()
    del mesh
    assert not _left(_threads)


def exception_hook_of_several() -> None:
    """Check that engines, which hook sys.excepthook to report errors, restore it when closed in any order."""
    before = sys.excepthook
    engines = [partita.initialize(Stack(2), {}) for _ in range(3)]
    assert sys.excepthook is not before
    seen = [weakref.ref(engine.mesh.watchdog) for engine in engines]
    for number in (1, 0, 2):
        engines[number].close()
    assert sys.excepthook is before
    del engines
    assert not _left(lambda: ["a watchdog" for ref in seen if ref() is not None])


def _hooks(model: nn.Module) -> list[Any]:
    """Return classes, hooks and attribute names of the modules, and hooks of the parameters."""
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


def ordinary_after_close(config: Config[str, Any]) -> None:
    """Check that close(whole=True) leaves an ordinary model with the current values, which a new engine can train."""
    model = Buffered()
    classes, before = [type(param) for param in model.parameters()], _hooks(model)
    engine = partita.initialize(model, config)
    for step in range(2):
        engine.backward(square_loss(engine, rank(), step).float())
        engine.step()
    with engine.gathered():
        expected = {name: param.detach().clone() for name, param in model.named_parameters()}
        with pytest.raises(PartitaError, match=r"engine.close\(whole=True\) inside engine.gathered"):
            engine.close(whole=True)
    if config.get("precision") != LEAN:  # LEAN updates parameters in backward
        engine.backward(square_loss(engine, rank(), 2).float())
    engine.close(whole=True)
    engine.close()
    assert _hooks(model) == before
    assert [type(param) for param in model.parameters()] == classes
    for name, param in model.named_parameters():
        assert param.untyped_storage().nbytes() == param.nbytes, f"{name} has no memory of its own"
        assert torch.equal(param, expected[name])
    model.zero_grad()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        values = other.state_dict()
        assert torch.equal(values["seen"], torch.arange(3))
        assert all(torch.equal(values[name], value) for name, value in expected.items())
    for module in model.modules():
        module.float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    square_loss(model, 0, 0).backward()
    optimizer.step()
    assert not torch.equal(model.first.weight, expected["first.weight"].float())
    with partita.initialize(model, config) as again:
        again.backward(square_loss(again, rank(), 0).float())
        assert again.step().stepped


def exact_after_close(config: Config[str, Any]) -> dict[str, Tensor]:
    """Train in 16 bits, and close the engine with the original dtypes. Return the parameters.

    On rank 0, check that they are the master weights.
    """
    model = Stack(2)
    dtypes = {name: param.dtype for name, param in model.named_parameters()}
    engine = partita.initialize(model, config)
    for step in range(2):
        engine.backward(square_loss(engine, engine.mesh.coordinate("data"), step).float())
        engine.step()
    expected = engine.state_dict()
    engine.close(whole=True, dtypes=dtypes)
    found = {name: param.detach() for name, param in model.named_parameters()}
    assert {name: value.dtype for name, value in found.items()} == dtypes
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    return found


class Buffered(Stack):
    def __init__(self) -> None:
        super().__init__(2)
        self.register_buffer("seen", torch.arange(3))


def no_room_for_the_whole(config: Config[str, Any]) -> str:
    """Check that close(whole=True) without enough memory raises on all ranks, and training continues."""
    engine = partita.initialize(Stack(2), config)
    free = 100 if rank() == 1 else 10**12
    with (
        mock.patch("partita.inspection.full_tensors.free_now", return_value=free),
        pytest.raises(PartitaError) as raised,
    ):
        engine.close(whole=True)
    failing = mock.patch.object(Tensor, "clone", side_effect=RuntimeError("can't allocate memory"))
    with failing if rank() == 0 else nullcontext(), pytest.raises((PartitaError, RuntimeError), match="can't allocate"):
        engine.close(whole=True)
    engine.backward(square_loss(engine, rank(), 0))
    assert engine.step().stepped
    engine.close()
    return str(raised.value)


def no_room_for_original_dtypes() -> str:
    model = Stack(2)
    dtypes = {name: param.dtype for name, param in model.named_parameters()}
    with partita.initialize(model, {"precision": {"compute": "bf16"}}) as engine:
        with mock.patch("partita.inspection.full_tensors.free_now", return_value=100), pytest.raises(PartitaError) as e:
            engine.close(whole=True, dtypes=dtypes)
        return str(e.value)


def saved_by_its_own(name: str, folder: Path) -> Tensor:
    """Save a Hugging Face model by its own method after close(whole=True). Return its logits."""
    model = CASES[name].build()
    engine = partita.initialize(model, {"zero": {"stage": 3}})
    batch = next(CASES[name].batches(2, seed=9))
    engine.close(whole=True)
    if rank() == 0:
        model.save_pretrained(folder)
    with torch.no_grad():
        logits: Tensor = model.eval()(**batch).logits
    return logits


def read_after_close() -> str:
    """Return the error of reading a parameter that was sharded when its engine was closed."""
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
    """Check that reading a parameter raises an error if its engine was dropped without close."""
    model = Stack(2)
    engine = partita.initialize(model, {"zero": {"stage": 3}})
    mesh, param = engine.mesh, model.first.weight
    del engine, model
    gc.collect()
    with pytest.raises(PartitaError, match=r"'first.weight' has no data"):
        param.sum()
    mesh.close()


@matrix(world=[1, 2], name=SETTINGS, close=[True, False])
def test_engine_is_freed(world: int, name: str, close: bool, tmp_path: Path) -> None:
    on_ranks(world, freed, _settings(name, tmp_path), close)


@matrix(world=[1, 2], name=SETTINGS)
def test_nothing_stays_on_the_model(world: int, name: str, tmp_path: Path) -> None:
    on_ranks(world, left_on_the_model, _settings(name, tmp_path))


def _threads_of_connections() -> int:
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    return sum(name.startswith(("gloo", "pt_gloo")) for name in names)


def connections_ended() -> None:
    before = _threads_of_connections()
    with partita.initialize(Stack(1), {"zero": {"stage": 3}}) as engine:
        assert _threads_of_connections() > before
        engine.backward(square_loss(engine, 0, 0))
        engine.step()
    assert _threads_of_connections() == before


@pytest.mark.skipif(sys.platform != "linux", reason="threads are listed under /proc")
def test_connections_end_with_the_engine() -> None:
    """Closing an engine ends its gloo threads, which could abort the process at its end."""
    on_ranks(2, connections_ended, with_group=False)


def test_closed_in_any_order() -> None:
    on_ranks(2, exception_hook_of_several)


@matrix(world=[1, 2], name=SETTINGS)
def test_an_ordinary_model_again(world: int, name: str, tmp_path: Path) -> None:
    on_ranks(world, ordinary_after_close, _settings(name, tmp_path))


IN_16_BITS: dict[str, dict[str, Any]] = {
    "stage 1": {"zero": {"stage": 1}, "precision": {"compute": "bf16"}},
    "host": {"zero": {"stage": 3, "offload": HOST}, "precision": {"compute": "bf16"}},
    "lean": SETTINGS["lean"],
    "tensor": {"parallel": {"tensor": 2}, "zero": {"stage": 3}, "precision": {"compute": "bf16"}},
}


@pytest.mark.parametrize("name", IN_16_BITS)
def test_an_ordinary_model_in_its_original_dtypes(name: str) -> None:
    one, other = on_ranks(2, exact_after_close, IN_16_BITS[name])
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert any(not torch.equal(value, value.bfloat16().float()) for value in one.values())


@pytest.mark.parametrize("stage", [1, 3])
def test_no_room_for_an_ordinary_model(stage: int) -> None:
    one, other = on_ranks(2, no_room_for_the_whole, {"zero": {"stage": stage}})
    assert one == other
    num_bytes = sum(param.nbytes for param in Stack(2).parameters())
    needed = needed_bytes(one)
    assert needed == 2 * num_bytes if stage == 1 else 2 * num_bytes < needed < 4 * num_bytes
    in_fp32 = needed_bytes(on_ranks(2, no_room_for_original_dtypes)[0])  # and the master weights of the largest unit
    assert 2 * num_bytes < in_fp32 < 4 * num_bytes


def needed_bytes(message: str) -> int:
    found = re.search(r"node .* needs (\d+) bytes for full parameters and has 100 bytes free", message)
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_hugging_face_model_saves_itself_again(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    logits = on_ranks(2, saved_by_its_own, name, tmp_path)[1]
    with torch.no_grad():
        got = AutoModelForCausalLM.from_pretrained(tmp_path).eval()(**next(CASES[name].batches(2, seed=9))).logits
    assert torch.equal(got, logits)


def test_reading_a_parameter_of_a_closed_engine() -> None:
    for said in on_ranks(2, read_after_close):
        assert "'first.weight' has no data" in said
        assert "engine was closed" in said
    on_ranks(2, forward_after_close)
    on_ranks(2, parameter_alone)


# ------------------------------------------------------------------------------------------------ failed initialization


class NoReset(nn.Module):
    """Module with a parameter on ``meta`` that nothing initializes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(WIDTH, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Unfilled(Stack):
    def __init__(self) -> None:
        super().__init__(3)
        self.blocks.extend([NoReset(), NoReset()])
        self.register_buffer("table", torch.zeros(3))

    def repaired(self) -> "Unfilled":
        for block in self.blocks[3:]:
            block.scale = nn.Parameter(torch.ones(WIDTH))
        return self


def failed_start(config: Config[str, Any], others: Config[str, Any]) -> None:
    """Check that a failed initialize leaves the model unchanged, and that it then trains as a new model does."""
    seeds.start()
    expected = trained(Unfilled().repaired(), config)
    seeds.start()
    model = Unfilled()
    before, carried = dict(model.named_parameters()), _hooks(model)
    values = {name: param.detach().clone() for name, param in before.items()}
    with pytest.raises(PartitaError, match=r"scale' is on the meta device"):
        partita.initialize(model, config)
    assert not _left(_threads_of_engines)
    assert _hooks(model) == carried
    for name, param in model.named_parameters():
        assert param is before[name]
        assert type(param) is nn.Parameter
        assert (param.device, param.dtype) == (values[name].device, values[name].dtype)
        assert param.is_meta or torch.equal(param, values[name]), name
    for name, wrong in others.items():
        with pytest.raises(PartitaError, match=name):
            partita.initialize(model, **{"config": config, **wrong})
    assert not len(placeholder._claims)
    got = trained(model.repaired(), config)
    assert all(torch.equal(got[name], value) for name, value in expected.items())


def failed_after_the_hooks(config: Config[str, Any]) -> None:
    """Check that an optimizer error, raised after the parameters were moved, leaves the model unchanged."""
    seeds.start()
    model = Stack(2)
    carried, values = _hooks(model), {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = torch.optim.SGD([{"params": [param]} for param in model.parameters()], 0.1)
    optimizer.param_groups[1]["params"].append(model.first.weight)
    with pytest.raises(PartitaError, match="group 1 contains 'first.weight', which is also in an earlier group"):
        partita.initialize(model, config, optimizer=optimizer)
    assert _hooks(model) == carried
    assert all(torch.equal(param, values[name]) for name, param in model.named_parameters())
    assert set(trained(model, config)) == (set(values) if rank() == 0 else set())


def _threads_of_engines() -> list[str]:
    return [name for name in _threads() if "watchdog" not in name]


def trained(model: nn.Module, config: Config[str, Any]) -> dict[str, Tensor]:
    with partita.initialize(model, config) as engine:
        for step in range(2):
            engine.backward(square_loss(engine, rank(), step))
            engine.step()
        return engine.state_dict()


def rounded_in_a_failed_start() -> None:
    """Check that a failed initialize warns, on rank 0, of values that it has rounded and cannot restore."""
    model = Unfilled()
    config = {"zero": {"stage": 3}, "precision": {"compute": "bf16"}}
    with (
        mock.patch.object(logging.getLogger("partita"), "warning") as said,
        pytest.raises(PartitaError, match="meta device"),
    ):
        partita.initialize(model, config)
    assert model.first.weight.dtype == torch.float32
    assert ["had been cast to the compute dtype" in call.args[0] for call in said.mock_calls] == [True] * (rank() == 0)


def fails_on_one_rank(stage: int) -> None:
    """Check that initialize raises the same error on all ranks, without waiting, if one rank's arguments are wrong."""
    first = rank() == 0
    config = {"zero": {"stage": stage}}
    wrong: dict[str, dict[str, Any]] = {
        "int16.*build the same model on every rank": {"model": _with_buffer(torch.int32 if first else torch.int16)},
        "the ranks' models differ: .*'blocks.2": {"model": Stack(2 if first else 3)},
        "blocks.0.scale' is on the meta device": {
            "model": nn.ModuleDict({"blocks": nn.ModuleList([NoReset().to_empty(device="meta" if first else "cpu")])})
        },
        "is in float64": {"model": Stack(1) if first else Stack(1).double()},
        "expected a torch.optim.Optimizer": {"model": Stack(1), "optimizer": None if first else 3},
        "nowhere": {"model": Stack(1), "weights": None if first else "/nowhere"},
    }
    for said, given in wrong.items():
        with pytest.raises(PartitaError, match=said):
            partita.initialize(given.pop("model"), config, **given)


def _with_buffer(dtype: torch.dtype) -> nn.Module:
    model = Stack(1)
    model.register_buffer("table", torch.zeros(3, dtype=dtype))
    return model


@matrix(name=["stage 0", "stage 2", "stage 3", "host", "disk"], world=[1, 2])
def test_a_start_that_fails_can_be_repeated(world: int, name: str, tmp_path: Path) -> None:
    wrong = {
        "not a parameter of the model": {"optimizer": torch.optim.SGD([torch.zeros(2, requires_grad=True)], 0.1)},
        "nowhere": {"weights": "/nowhere"},
        "zero.units": {"config": {"zero": {"units": ["Nothing"]}}},
        "keep_fp32": {"config": {"precision": {"keep_fp32": ["Nothing"]}}},
    }
    on_ranks(world, failed_start, _settings(name, tmp_path), wrong)


@matrix(name=["stage 0", "stage 3", "host", "host, whole", "disk"], world=[1, 2])
def test_a_start_that_fails_at_the_optimizer(world: int, name: str, tmp_path: Path) -> None:
    on_ranks(world, failed_after_the_hooks, _settings(name, tmp_path))


def test_a_start_that_fails_after_a_cast_says_so() -> None:
    on_ranks(2, rounded_in_a_failed_start)


@pytest.mark.parametrize("stage", [0, 3])
def test_what_one_rank_meets_is_an_error_on_all(stage: int) -> None:
    on_ranks(2, fails_on_one_rank, stage)


def group_after_failure() -> bool:
    with pytest.raises(PartitaError, match="meta device"):
        partita.initialize(Unfilled(), {"zero": {"stage": 3}})
    return dist.is_initialized()


def test_the_process_group_ends_with_a_start_that_fails() -> None:
    assert on_ranks(2, group_after_failure, with_group=False) == [False, False]
    assert on_ranks(2, group_after_failure) == [True, True]
