"""A training loop with accelerate's Accelerator on partita, compared with the plain one."""

import gc
import itertools
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate
import pytest
import torch
from accelerate.utils import TorchDynamoPlugin
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

from partita import ConfigError, PartitaError
from partita.integrations.huggingface import Accelerator
from partita.integrations.huggingface.local_sgd import LocalSGD
from tests.integrations.huggingface.runs import alone, llama
from tests.kit.ranks import on_ranks

MAX_NORM = 0.05


def network(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 1))


def loader() -> DataLoader[Any]:
    x = torch.randn(44, 8, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)


def made(stage: int | None, config: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    if stage is None:
        return accelerate.Accelerator(cpu=True, **kwargs)
    return Accelerator(cpu=True, partita_config={"zero": {"stage": stage}, **(config or {})}, **kwargs)


def close(accelerator: Any) -> None:
    if isinstance(accelerator, Accelerator):
        accelerator.engines.close()


def loop(accelerator: Any, parts: tuple[Any, ...], clip: bool = True) -> list[tuple[float, float, float]]:
    """Train for an epoch; return the loss, norm and learning rate of each update."""
    model, optimizer, data, scheduler = parts
    rows = []
    for x, y in data:
        with accelerator.accumulate(model):
            loss = ((model(x) - y) ** 2).mean()
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), MAX_NORM) if accelerator.sync_gradients else 0.0
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                rows.append((loss.item(), float(norm), scheduler.get_last_lr()[0]))
    return rows


def parts_of(accelerator: Any, apart: bool = False) -> tuple[Any, ...]:
    model = network()
    if apart:
        model = accelerator.prepare(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
        optimizer = accelerator.prepare(optimizer)
        return model, optimizer, *accelerator.prepare(loader(), scheduler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return accelerator.prepare(model, optimizer, loader(), scheduler)  # type: ignore[no-any-return]


def accumulated(
    stage: int | None, apart: bool = False, batch: dict[str, int] | None = None
) -> list[tuple[float, float, float]]:
    """Train with two micro-batches per update, as the argument or the config's ``batch`` says."""
    with alone():
        accelerator = made(stage, {"batch": batch}) if batch else made(stage, gradient_accumulation_steps=2)
        try:
            return loop(accelerator, parts_of(accelerator, apart))
        finally:
            close(accelerator)


def every_stage() -> list[list[tuple[float, float, float]]]:
    return [accumulated(None), *(accumulated(stage) for stage in range(4)), accumulated(3, apart=True)]


def test_a_loop_with_accumulation_and_clipping() -> None:
    plain, *others = on_ranks(2, every_stage)[0]
    assert plain[0][1] > MAX_NORM
    for rows in others:
        assert [value for row in rows for value in row] == pytest.approx([v for row in plain for v in row], rel=1e-6)
    assert others[0] == others[1]
    assert others[2] == others[3] == others[4]


def by_the_config() -> list[list[tuple[float, float, float]]]:
    batches = ({}, {"accumulate": 2}, {"micro": 4, "total": 16})
    return [accumulated(2, batch=batch) for batch in batches]


def test_accumulation_of_the_config() -> None:
    argument, accumulate, total = on_ranks(2, by_the_config)[0]
    assert argument == accumulate == total


def prepared_are_the_same() -> bool:
    with alone():
        accelerator = made(3)
        model, optimizer = network(), None
        optimizer = torch.optim.AdamW(model.parameters())
        prepared, wrapped = accelerator.prepare(model, optimizer)
        same = prepared is model and accelerator.unwrap_model(prepared) is model and wrapped.optimizer is optimizer
        close(accelerator)
        return same


def saved_and_loaded(folder: Path) -> tuple[list[Any], list[Any]]:
    """Train an epoch, save, and train another. Return the latter's updates, and those of a run at another stage that
    loads the saved state.
    """
    with alone():
        accelerator = made(3)
        parts = parts_of(accelerator)
        loop(accelerator, parts)
        accelerator.save_state(str(folder))
        after = loop(accelerator, parts)
        close(accelerator)
    with alone():
        accelerator = made(1)
        parts = parts_of(accelerator)
        accelerator.load_state(str(folder))
        again = loop(accelerator, parts)
        close(accelerator)
    return after, again


def test_a_state_is_saved_and_loaded(tmp_path: Path) -> None:
    assert all(on_ranks(2, prepared_are_the_same))
    after, again = on_ranks(2, saved_and_loaded, tmp_path)[0]
    assert again == after


def constant(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1.0)


def updates_at(rate: float, folder: Path, load: bool, registers: bool) -> list[float]:
    """Save or load a state of a run at a learning rate; return the sizes of its next three updates.

    Args:
        registers: register the scheduler for checkpoints, in place of preparing it.
    """
    with alone():
        accelerator = made(2)
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        if registers:
            model, optimizer = accelerator.prepare(model, optimizer)
            scheduler = constant(optimizer)
            accelerator.register_for_checkpointing(scheduler)
        else:
            model, optimizer, scheduler = accelerator.prepare(model, optimizer, constant(optimizer))
        (accelerator.load_state if load else accelerator.save_state)(str(folder))
        values = [model.weight.item()]
        for _ in range(3):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            values.append(model.weight.item())
        close(accelerator)
    return [before - after for before, after in itertools.pairwise(values)]


@pytest.mark.parametrize("registers", [False, True], ids=["prepared", "registered"])
def test_a_changed_learning_rate_stays(registers: bool, tmp_path: Path) -> None:
    on_ranks(2, updates_at, 1.0, tmp_path / "state", False, registers)
    for updates in on_ranks(2, updates_at, 0.125, tmp_path / "state", True, registers):
        assert updates == pytest.approx([0.125] * 3, abs=1e-5)


def two_models(stage: int | None) -> list[float]:
    """Train a generator through a discriminator, each with its own optimizer; return the losses."""
    with alone():
        accelerator = made(stage)
        one, other = network(), network(1)
        bridge = nn.Linear(1, 8)
        chain = nn.Sequential(one, bridge)
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (chain, other)]
        chain, other, first, second, data = accelerator.prepare(chain, other, *optimizers, loader())
        losses = []
        for x, y in data:
            loss = ((other(chain(x)) - y) ** 2).mean()
            accelerator.backward(loss)
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        close(accelerator)
        return losses


def bridged(stage: int | None) -> list[float]:
    torch.manual_seed(3)
    return two_models(stage)


def test_two_models_with_an_optimizer_each() -> None:
    plain, sharded = (on_ranks(2, bridged, stage)[0] for stage in (None, 3))
    assert sharded == pytest.approx(plain, rel=1e-6)


def dropped(stage: int | None) -> Tensor:
    """Drop the gradients of one batch, then step on those of another; return the model's output."""
    with alone():
        accelerator = made(stage)
        model = network()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for scale in (100.0, 1.0):
            optimizer.zero_grad()
            accelerator.backward(scale * model(torch.ones(2, 8)).sum())
        optimizer.step()
        with torch.no_grad():
            found: Tensor = model(torch.ones(1, 8)).clone()
        close(accelerator)
        return found


def test_zero_grad_drops_a_batch() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RANK", raising=False)
        assert torch.allclose(dropped(None), dropped(1), rtol=1e-6)


def refused(what: str) -> str:
    """Return the error for an unsupported combination."""
    with alone():
        configs = {"schedule": {"schedule": {"warmup_steps": 5}}, "no accumulation": {"batch": {"accumulate": 2}}}
        accelerator = made(2, configs.get(what))
        model = network()
        adam = torch.optim.AdamW(model.parameters())
        try:
            if what == "two optimizers":
                accelerator.prepare(model, adam, torch.optim.SGD(model.parameters(), lr=1.0))
            elif what == "plateau":
                accelerator.prepare(model, adam, ReduceLROnPlateau(adam))
            elif what == "schedule":
                accelerator.prepare(model, adam, LambdaLR(adam, lambda step: 1.0))
            elif what == "no optimizer":
                accelerator.backward(accelerator.prepare(model)(torch.ones(2, 8)).sum())
            elif what == "not elementwise":
                accelerator.prepare(model, torch.optim.LBFGS(model.parameters()))
            else:
                model, _ = accelerator.prepare(model, adam)
                accelerator.backward(model(torch.ones(2, 8)).sum())
                if what == "part":
                    accelerator.clip_grad_norm_(model[0].parameters(), 1.0)
                elif what == "value":
                    accelerator.clip_grad_value_(model.parameters(), 1.0)
                else:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=1)
        except PartitaError as error:
            return str(error)
        finally:
            close(accelerator)
        return ""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("two optimizers", "the optimizer's parameters belong to no prepared model without an optimizer"),
        ("plateau", "ReduceLROnPlateau depends on a metric, which may differ between the ranks"),
        ("schedule", "a LambdaLR, but the config also has a schedule (constant): leave one of the two out"),
        ("no optimizer", "the prepared Sequential has no optimizer yet"),
        ("not elementwise", "optimizer LBFGS evaluates the loss in its step"),
        ("no accumulation", "the config has 2 micro-batches per step (batch.accumulate)"),
        ("part", "'2.weight' is missing"),
        ("value", "use clip_grad_norm_"),
        ("norm", "expected norm_type 2"),
    ],
)
def test_what_does_not_go_together(what: str, said: str) -> None:
    for text in on_ranks(2, refused, what):
        assert said in text


def test_arguments_of_other_libraries() -> None:
    with (
        alone(),
        pytest.raises(ConfigError, match=r"fsdp_plugin cannot be combined with.*partita run --accelerate FILE"),
    ):
        Accelerator(cpu=True, fsdp_plugin=object())
    with alone(), pytest.raises(ConfigError, match="batch.accumulate and gradient_accumulation_steps differ"):
        Accelerator(cpu=True, gradient_accumulation_steps=2, partita_config={"batch": {"accumulate": 4}})
    with alone(), pytest.raises(ConfigError, match="precision.gradients: in_backward"):
        config = {"precision": {"gradients": "in_backward"}}
        Accelerator(cpu=True, gradient_accumulation_steps=2, partita_config=config)


def counted() -> tuple[int, str]:
    """Return accelerate's number of processes, and the error if it is not the launcher's."""
    with alone():
        number = Accelerator().num_processes
    with alone(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Accelerator, "num_processes", 1)
        try:
            Accelerator(cpu=True)
        except ConfigError as error:
            return number, str(error)
    return number, ""


def test_accelerate_knows_all_processes() -> None:
    for number, said in on_ranks(2, counted):
        assert number == 2
        assert "accelerate has 1 processes, but the launcher has started 2" in said


def with_parallelism(config: dict[str, Any]) -> tuple[int, str]:
    """Return the number of data-parallel ranks (0 after an error), and the error."""
    with alone():
        try:
            accelerator = Accelerator(
                cpu=True, parallelism_config=accelerate.ParallelismConfig(tp_size=2), partita_config=config
            )
        except ConfigError as error:
            return 0, str(error)
        return accelerator.data_rank.num, ""


def test_a_parallelism_config_in_python() -> None:
    assert on_ranks(2, with_parallelism, {}) == [(1, "")] * 2
    assert on_ranks(2, with_parallelism, {"parallel": {"tensor": 2}}) == [(1, "")] * 2
    for _, said in on_ranks(2, with_parallelism, {"parallel": {"tensor": 1}}):
        assert "parallel.tensor and the size in ParallelismConfig differ" in said


def locally(enabled: bool) -> str:
    with alone():
        accelerator = made(3)
        model = network()
        model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        try:
            with LocalSGD(accelerator, model, local_sgd_steps=4, enabled=enabled):
                return ""
        except ConfigError as error:
            return str(error)
        finally:
            close(accelerator)


def averaged(partita: bool) -> list[float]:
    """Return the losses of ranks that average their weights after every second step."""
    every = {"every": 2, "replicas": 2, "outer_lr": 1, "outer_momentum": 0, "outer_nesterov": False}
    with alone():
        accelerator = made(1 if partita else None, {"communication": every})
        torch.manual_seed(accelerator.process_index)
        model = network()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        losses = []
        with LocalSGD(accelerator, model, local_sgd_steps=2, enabled=not partita) as local:
            for _ in range(6):
                loss = model(torch.randn(4, 8)).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                local.step()
                losses.append(loss.item())
        close(accelerator)
        return losses


def test_local_sgd_is_a_setting() -> None:
    plain, found = on_ranks(2, averaged, False), on_ranks(2, averaged, True)
    assert [pytest.approx(losses, rel=1e-5) for losses in plain] == found
    assert on_ranks(2, locally, False) == [""] * 2
    for said in on_ranks(2, locally, True):
        assert "set communication: {every: 4, replicas: 2, outer_lr: 1, outer_momentum: 0" in said


def trained(accelerator: Any, model: nn.Module, rate: float = 0.1) -> tuple[Any, Any]:
    """Prepare a model and an optimizer, and make one update."""
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=rate))
    updated(accelerator, model, optimizer)
    return model, optimizer


def updated(accelerator: Any, model: Any, optimizer: Any) -> None:
    accelerator.backward(model(torch.ones(2, 8)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def freed(folder: Path) -> tuple[bool, bool]:
    """Free a model, and train another; return whether the first is gone, and the second is loaded from its state."""
    with alone():
        accelerator = made(3)
        first = weakref.ref(trained(accelerator, network())[0])
        accelerator.prepare(nn.Linear(8, 1))  # it never gets an optimizer
        accelerator.free_memory()
        gc.collect()
        model, _ = trained(accelerator, network(1))
        accelerator.save_state(str(folder))
        expected = accelerator.get_state_dict(model)
        close(accelerator)
    with alone():
        accelerator = made(3)
        model, _ = trained(accelerator, network(2))
        accelerator.load_state(str(folder))
        found = accelerator.get_state_dict(model)
        close(accelerator)
    return first() is None, all(torch.equal(found[name], value) for name, value in expected.items())


def test_free_memory_closes_every_engine(tmp_path: Path) -> None:
    for is_gone, is_equal in on_ranks(2, freed, tmp_path):
        assert is_gone
        assert is_equal


def one_of_two_is_freed() -> None:
    with alone():
        accelerator = made(3)
        models = [network(), network(1)]
        prepared = accelerator.prepare(*models, *(torch.optim.SGD(model.parameters(), lr=0.1) for model in models))
        accelerator.free_memory(prepared[0], prepared[2])
        updated(accelerator, prepared[1], prepared[3])
        trained(accelerator, network(2))
        close(accelerator)


def test_other_models_stay_when_the_first_is_freed() -> None:
    on_ranks(2, one_of_two_is_freed)


def rates(config: dict[str, Any]) -> list[float]:
    """Return the learning rates of three updates with the config's schedule."""
    with alone():
        accelerator = made(1, config)
        model, optimizer = accelerator.prepare(model := network(), torch.optim.SGD(model.parameters(), lr=1.0))
        found = []
        for _ in range(3):
            found.append(optimizer.param_groups[0]["lr"])
            updated(accelerator, model, optimizer)
        close(accelerator)
    return found


def test_the_schedule_of_the_config() -> None:
    assert on_ranks(1, rates, {"schedule": {"warmup_steps": 4}})[0] == pytest.approx([0.2, 0.4, 0.6])
    assert on_ranks(1, rates, {})[0] == [1.0, 1.0, 1.0]


def compiled(stage: int) -> tuple[bool, bool, bool]:
    with alone():
        accelerator = made(stage)
        plain = {name: value.clone() for name, value in network().state_dict().items()}
        model, optimizer = accelerator.prepare(
            model := torch.compile(network(), backend="eager"), torch.optim.SGD(model.parameters(), lr=0.0)
        )
        updated(accelerator, model, optimizer)
        found = accelerator.get_state_dict(model)
        has_engine, has_waiting = accelerator.engines.of(model) is not None, bool(accelerator._waiting)
        close(accelerator)
    same = found.keys() == plain.keys() and all(torch.equal(found[name], value) for name, value in plain.items())
    return has_engine, not has_waiting, same


@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_that_is_compiled_before(stage: int) -> None:
    assert on_ranks(1, compiled, stage) == [(True, True, True)]


def by_arguments(config: dict[str, Any], **kwargs: Any) -> tuple[str, str, int]:
    """Return the modules that the engine's config compiles, its backend, and the number of compiled modules."""
    with alone():
        accelerator = made(1, config, **kwargs)
        model, _ = accelerator.prepare(model := llama(), torch.optim.SGD(model.parameters(), lr=0.1))
        compile_ = accelerator.engines.of(model).engine.config.compile
        num_compiled = sum(module._compiled_call_impl is not None for module in model.modules())
        close(accelerator)
    return compile_.modules, compile_.backend, num_compiled


def test_the_arguments_compile_the_blocks() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RANK", raising=False)
        assert by_arguments({}) == ("none", "inductor", 0)
        modules, backend, num_compiled = by_arguments({}, dynamo_backend="eager")
        assert (modules, backend) == ("units", "eager")
        assert num_compiled > 1
        assert by_arguments({"compile": {"modules": "model"}}, dynamo_backend="eager") == ("model", "eager", 1)
        plugin = TorchDynamoPlugin(backend="inductor", options={"max_autotune": True})
        with alone(), pytest.raises(ConfigError, match="dynamo_plugin: partita compiles the model's blocks itself"):
            Accelerator(cpu=True, dynamo_plugin=plugin)


def test_a_model_without_an_optimizer_runs_on_the_device() -> None:
    with alone():
        accelerator = made(1)
        meta = torch.device("meta")
        with mock.patch.object(Accelerator, "device", meta):
            model = accelerator.prepare(network())
            assert model(torch.ones(2, 8, device=meta)).device == meta
        close(accelerator)
