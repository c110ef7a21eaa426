"""The calls of a training loop: their results, and their errors when they are used wrongly."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import partita
from partita import ConfigError, PartitaError, StepResult
from partita.memory import accelerator
from tests.kit import seeds
from tests.kit.models import WIDTH, Stack, inputs, square_loss
from tests.kit.plans import ZERO
from tests.kit.ranks import on_ranks
from tests.kit.state import assert_idle
from tests.kit.training import rank, whole_weights, world


class Output(NamedTuple):
    loss: Tensor
    logits: Tensor


class Learner(Stack):
    """Stack that returns its loss in the form that ``form`` names."""

    form = "scalar"

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        logits = super().forward(x)
        loss = logits.square().mean() if y is None else F.mse_loss(logits, y)
        forms = {
            "scalar": loss,
            "tuple": Output(loss, logits),
            "dict": {"loss": loss, "logits": logits},
            "logits": logits,
            "nothing": None,
            "number": 3.0,
        }
        return forms[self.form]


def batches(form: str) -> Iterator[Any]:
    step = 0
    while True:
        x, y = inputs(rank(), step), inputs(rank(), step + 100)
        yield {"x": x, "y": y} if form == "dict" else (x, y) if form == "tuple" else [x, y] if form == "list" else x
        step += 1


def trains_batches() -> None:
    """Check every form of batch and output; the loss is the mean over all ranks and micro-batches."""
    for zero in ZERO.values():
        for batch, output in (("dict", "scalar"), ("tuple", "tuple"), ("list", "dict"), ("tensor", "scalar")):
            seeds.start()
            model = Learner(2)
            model.form = output
            expected = []
            with torch.no_grad():
                for other in range(world()):
                    for step in range(2):
                        y = None if batch == "tensor" else inputs(other, step + 100)
                        loss = model(inputs(other, step), y)
                        expected.append(
                            loss if isinstance(loss, Tensor) else loss["loss"] if output == "dict" else loss.loss
                        )
            with partita.initialize(model, {"zero": zero, "batch": {"accumulate": 2}}) as engine:
                stream = batches(batch)
                loss = engine.train_batch(stream)
                assert loss.shape == ()
                assert not loss.requires_grad
                torch.testing.assert_close(loss, torch.stack(expected).mean())
                assert engine.mean(loss).item() == loss.item()
                assert engine.last_step.stepped
                second = engine.train_batch(stream)
                assert second.item() != loss.item()
                assert_idle(engine)


def own_loss() -> None:
    """Check that loss_fn(output, batch) computes the loss from any output, and receives the batch itself."""
    model = Learner(2)
    model.form = "logits"
    seen: list[Any] = []

    def loss_fn(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        seen.append(batch)
        return F.mse_loss(output, batch[1])

    with partita.initialize(model, {"zero": {"stage": 3}}, loss_fn=loss_fn) as engine:
        batch = (inputs(rank(), 0), inputs(rank(), 1))
        loss = engine.train_batch([batch])
        assert loss > 0
        assert seen[0] is batch


def losses_that_are_none() -> None:
    """Check that errors name an invalid result of ``loss_fn`` (training, evaluation), and a loss without a gradient."""
    returned: list[Any] = []
    with partita.initialize(Learner(2), {"zero": {"stage": 3}}, loss_fn=lambda *_: returned[-1]) as engine:
        for value, said in ((torch.zeros(4), r"a tensor of shape \(4,\)"), (None, "a NoneType")):
            returned.append(value)
            for call in (engine.train_batch, engine.eval_batch):
                with pytest.raises(PartitaError, match=f"loss_fn: expected a scalar tensor.*{said}"):
                    call([inputs(0, 0)])
        returned.append(torch.zeros(()))
        assert engine.eval_batch([inputs(0, 0)]) == 0
        with pytest.raises(PartitaError, match="train_batch: expected a loss that depends on the parameters"):
            engine.train_batch([inputs(0, 0)])


def train_batch_errors() -> None:
    for zero in ZERO.values():
        model = Learner(2)
        with partita.initialize(model, {"zero": zero, "batch": {"accumulate": 2}}) as engine:
            with pytest.raises(StopIteration):
                engine.train_batch(iter([]))
            with pytest.raises(PartitaError, match=r"ended after 1 of 2 micro-batches \(batch.accumulate\)"):
                engine.train_batch([inputs(0, 0)])
            for form, kind in (("logits", "Tensor"), ("nothing", "NoneType"), ("number", "float")):
                model.form = form
                with pytest.raises(PartitaError, match=f"returned a {kind} without a scalar loss.*loss_fn"):
                    engine.train_batch(batches("tensor"))
            model.form = "scalar"
            for given in (3, [inputs(0, 0)] * 3, DataLoader([inputs(0, 0)] * 2, batch_size=None)):
                with pytest.raises(PartitaError, match=r"expected an iterator .*`batches = iter\(loader\)` once"):
                    engine.train_batch(given)  # type: ignore[arg-type]


def epochs(zero: Mapping[str, Any], lengths: tuple[int, ...], folder: Path) -> None:
    """Check that data may end anywhere, on any rank: every rank then raises, and is between two batches."""
    with partita.initialize(Learner(2), {"zero": zero, "batch": {"accumulate": 2}}) as engine:
        whole = min(lengths) // 2
        for _ in range(2):
            stream = iter([inputs(rank(), step) for step in range(lengths[rank()])])
            for _ in range(whole):
                engine.train_batch(stream)
                assert engine.last_step.stepped
            if all(length == 2 * whole for length in lengths):
                with pytest.raises(StopIteration):
                    engine.train_batch(stream)
            else:
                with pytest.raises(PartitaError, match=r"iterator of rank \d ended after [01] of 2 micro-batches"):
                    engine.train_batch(stream)
            assert engine.gradient("first.weight") is None
            engine.save(folder)


def after_an_unfinished_batch() -> None:
    """Check that an incomplete batch trains nothing, and that the count of micro-batches starts again."""
    for zero in ZERO.values():
        seeds.start()
        with partita.initialize(Learner(2), {"zero": zero, "batch": {"accumulate": 2}}) as engine:
            with pytest.raises(PartitaError, match="ended after 1 of 2"):
                engine.train_batch([inputs(rank(), 7)])
            results = []
            for step in range(2):
                engine.backward(square_loss(engine, rank(), step))
                results.append(engine.step().stepped)
            assert results == [False, True]


def results() -> None:
    config = {"batch": {"accumulate": 2}, "optimizer": {"lr": 0.5}}
    for zero in ZERO.values():
        with partita.initialize(Stack(2), {"zero": zero, **config}) as engine:
            engine.backward(square_loss(engine, rank(), 0))
            assert engine.step() == StepResult(stepped=False, grad_norm=None, loss_scale=1.0, skipped=False, lr=(0.5,))
            engine.backward(square_loss(engine, rank(), 1))
            result = engine.step()
            assert (result.stepped, result.skipped, result.loss_scale, result.lr) == (True, False, 1.0, (0.5,))
            assert isinstance(result.grad_norm, float)
            assert engine.mean(result.grad_norm).item() == pytest.approx(result.grad_norm)


def attributes() -> None:
    with partita.initialize(Stack(2), {"zero": {"stage": 3}}) as engine:
        assert isinstance(engine, partita.Engine)
        assert isinstance(engine.module, Stack)
        assert isinstance(engine.optimizer, torch.optim.AdamW)
        assert isinstance(engine.scheduler, torch.optim.lr_scheduler.LRScheduler)
        assert isinstance(engine.config, partita.Config)
        assert engine.config.zero.stage == 3
        assert engine.plan.keys() == {"", "blocks.0", "blocks.1"}
        assert {row.name for row in engine.plan.values()} == {"zero3"}
        sizes = {axis: engine.mesh.size(axis) for axis in ("pipeline", "data", "sequence", "tensor")}
        assert sizes == {"pipeline": 1, "data": world(), "sequence": 1, "tensor": 1}
        assert engine.mesh.coordinate("data") == rank()
        assert engine.mesh.coordinate("tensor") == 0
        with pytest.raises(ConfigError, match="axis"):
            engine.mesh.size("width")
        assert engine.train() is engine
        assert engine.module.training
        assert engine.eval() is engine
        assert not engine.module.training


def numbers() -> None:
    with partita.initialize(Stack(1)) as engine:
        assert engine.mean(float(rank())).item() == (world() - 1) / 2
        assert engine.mean(torch.tensor(rank() + 1)).item() == (world() + 1) / 2
        assert engine.any(rank() == world() - 1)
        assert not engine.any(False)


def wrong_losses() -> None:
    for zero in ZERO.values():
        with partita.initialize(Stack(1), {"zero": zero}) as engine:
            with pytest.raises(PartitaError, match=r"scalar loss.*\(4, 16\)"):
                engine.backward(engine(inputs(0, 0)))
            with pytest.raises(PartitaError, match=r"scalar loss that depends on the parameters.*requires_grad"):
                engine.backward(torch.tensor(1.0))
            with pytest.raises(PartitaError, match=r"scalar loss.*SimpleNamespace: pass its \.loss"):
                engine.backward(SimpleNamespace(loss=torch.zeros(())))  # type: ignore[arg-type]
            with pytest.raises(PartitaError, match="scalar loss.*float"):
                engine.backward(1.0)  # type: ignore[arg-type]
            with torch.no_grad():
                loss = square_loss(engine, rank(), 0)
            with pytest.raises(PartitaError, match="scalar loss that depends"):
                engine.backward(loss)
            loss = square_loss(engine, rank(), 0)
            engine.backward(loss)
            with pytest.raises(RuntimeError, match="second time"):
                engine.backward(loss)
            engine.zero_grad()
            engine.backward(square_loss(engine, rank(), 1))
            assert engine.step().stepped
            assert_idle(engine)


def steps_without_backward() -> None:
    """Check that a step without any gradient raises an error and changes nothing."""
    for zero in ZERO.values():
        with partita.initialize(Stack(1), {"zero": zero}) as engine:
            before = whole_weights(engine)
            with pytest.raises(PartitaError, match="no parameter has a gradient on any rank"):
                engine.step()
            assert all(torch.equal(value, before[name]) for name, value in whole_weights(engine).items())
            assert engine.optimizer_state("first.weight") == {}


class NoParameters(nn.Module):
    pass


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.eye(3).to_sparse())


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(3, dtype=torch.complex64))


class SparseGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, WIDTH, sparse=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)


def wrong_models() -> None:
    wrong: list[tuple[Any, str]] = [
        (lambda x: x, "model: expected a torch.nn.Module, got function"),
        (Stack, "model: expected a torch.nn.Module, got type"),
        (NoParameters(), "NoParameters has no parameters"),
        (Sparse(), "'table' is sparse"),
        (Complex(), "'table' is complex"),
        (nn.LazyLinear(3), "'weight' .*first forward"),
    ]
    for model, message in wrong:
        for zero in ({"stage": 1}, {"stage": 3}):
            with pytest.raises(ConfigError, match=message):
                partita.initialize(model, {"zero": zero})


def sparse_gradients() -> None:
    for zero in ZERO.values():
        if zero["stage"] == 0:
            continue
        with partita.initialize(SparseGradient(), {"zero": zero}) as engine:
            loss = engine(torch.arange(3)).sum()
            with pytest.raises(PartitaError, match=r"gradient of 'table.weight' is sparse.*sparse=False"):
                engine.backward(loss)


def tokens_of(data: int, step: int) -> Tensor:
    return torch.tensor([data + step, data, 5])


def sparse_gradients_at_stage_0() -> None:
    """Check that sparse gradients train as in plain PyTorch on all ranks' samples, where they are sparse."""
    plain = SparseGradient()
    weights = plain.table.weight.detach().clone().fill_(1.0)
    plain.table.weight.data.copy_(weights)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    model = SparseGradient()
    model.table.weight.data.copy_(weights)
    config = {"zero": {"stage": 0}, "batch": {"micro": 3, "accumulate": 2}}
    with partita.initialize(model, config, optimizer=lambda params: torch.optim.SGD(params, lr=0.5)) as engine:
        for step in range(2):
            for micro in range(2):
                engine.backward(engine(tokens_of(rank(), step + micro)).square().mean())
                engine.step()
                for data in range(world()):
                    loss = plain(tokens_of(data, step + micro)).square().mean()
                    (loss / (2 * world())).backward()
            assert plain.table.weight.grad is not None
            assert plain.table.weight.grad.is_sparse
            optimizer.step()
            optimizer.zero_grad()
        with engine.gathered():
            torch.testing.assert_close(model.table.weight.detach(), plain.table.weight.detach())


def test_sparse_gradients_at_stage_0() -> None:
    on_ranks(2, sparse_gradients_at_stage_0)


class Spectral(nn.Module):
    """Model with weights of a Fourier transform, as complex numbers or as pairs of real numbers."""

    def __init__(self, *, pairs: bool) -> None:
        super().__init__()
        values = torch.randn(3, 5, 2, generator=torch.Generator().manual_seed(0))
        self.bias = nn.Parameter(torch.zeros(3))
        self.weight = nn.Parameter(values if pairs else torch.view_as_complex(values))

    def forward(self, inputs: Tensor) -> Tensor:
        weight = self.weight
        if not weight.is_complex():
            weight = torch.complex(weight[..., 0], weight[..., 1])
        return torch.fft.irfft(torch.fft.rfft(inputs) * weight, n=inputs.shape[-1]) + self.bias[:, None]


def complex_as_pairs() -> None:
    """Check that pairs of real numbers, the remedy for complex parameters, train as those do in plain PyTorch."""

    def samples(data: int, step: int) -> Tensor:
        return torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(10 * step + data))

    plain = Spectral(pairs=False)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for step in range(3):
        for data in range(world()):
            (plain(samples(data, step)).square().mean() / world()).backward()
        optimizer.step()
        optimizer.zero_grad()
    for zero in ZERO.values():
        model = Spectral(pairs=True)
        config = {"zero": zero, "optimizer": {"lr": 0.01}}
        with partita.initialize(model, config) as engine:
            for step in range(3):
                engine.backward(engine(samples(rank(), step)).square().mean())
                engine.step()
            with engine.gathered():
                found = torch.view_as_complex(model.weight.detach().clone())
                torch.testing.assert_close(found, plain.weight.detach(), rtol=1e-5, atol=1e-6)


def test_complex_parameters_as_pairs_of_real_numbers() -> None:
    on_ranks(2, complex_as_pairs)


def wrong_units() -> None:
    for units, message in (
        (["Blok"], r"zero.units: 'Blok' matches no module.*Block"),
        (["blocks.9"], "matches no module"),
    ):
        with pytest.raises(ConfigError, match=message):
            partita.initialize(Stack(2), {"zero": {"stage": 3, "units": units}})
    with pytest.raises(ConfigError, match=r"precision.keep_fp32: 'RMSNorm' matches no module"):
        partita.initialize(Stack(2), {"precision": {"compute": "bf16", "keep_fp32": ["RMSNorm"]}})


def chosen_units() -> None:
    """Check that units chosen by class or by name, of any size, train the same."""
    results = []
    for units in ("auto", ["Block"], ["blocks.*"], ["Linear", "LayerNorm"], ["Stack"]):
        seeds.start()
        with partita.initialize(Stack(2), {"zero": {"stage": 3, "units": units}}) as engine:
            for step in range(3):
                engine.backward(square_loss(engine, rank(), step))
                engine.step()
            results.append(whole_weights(engine))
    for weights in results[1:]:
        for name, value in weights.items():
            torch.testing.assert_close(value, results[0][name], rtol=1e-4, atol=1e-6)


def wrong_meshes() -> None:
    with partita.initialize(Stack(1)) as engine, pytest.raises(ConfigError, match="mesh"):
        partita.initialize(Stack(1), mesh="data")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"parallel.data"):
        partita.initialize(Stack(1), {"parallel": {"data": world() + 1}})
    with partita.initialize(Stack(1)) as engine:
        mesh = engine.mesh
    with pytest.raises(PartitaError, match="closed"):
        partita.initialize(Stack(1), mesh=mesh)


def named_devices() -> None:
    for device in ("cpu", torch.device("cpu")):
        with partita.initialize(Stack(1), device=device) as engine:
            assert engine.mesh.device == torch.device("cpu")
            partita.initialize(Stack(1), mesh=engine.mesh, device=device).close()
            other = mock.patch.object(accelerator, "chosen_device", return_value=torch.device("xpu:1"))
            with other, pytest.raises(ConfigError, match=r"device: 'xpu:1' is not the device of the given mesh, 'cpu'"):
                partita.initialize(Stack(1), mesh=engine.mesh, device="xpu:1")
    with pytest.raises(ConfigError, match=r"device: expected a torch.device, or the name of one .*; got 'gpu'"):
        partita.initialize(Stack(1), device="gpu")


def plain_loop() -> float:
    """Train as a plain script does, without a process group before or after. Return the last loss."""
    assert not torch.distributed.is_initialized()
    seeds.start()
    with partita.initialize(Stack(1), {"zero": {"stage": 3}}) as engine:
        for step in range(2):
            loss = square_loss(engine, rank(), step)
            loss.backward()
            assert engine.step().stepped
    assert not torch.distributed.is_initialized()
    return loss.item()


@pytest.mark.parametrize("world", [1, 2])
def test_train_batch(world: int) -> None:
    on_ranks(world, trains_batches)


def test_loss_of_the_user() -> None:
    on_ranks(2, own_loss)


@pytest.mark.parametrize("zero", [{"stage": 1}, {"stage": 3}], ids=str)
@pytest.mark.parametrize("lengths", [(4, 4), (5, 5), (4, 6), (5, 4)])
def test_data_that_ends(lengths: tuple[int, ...], zero: Mapping[str, Any], tmp_path: Path) -> None:
    on_ranks(2, epochs, zero, lengths, tmp_path)


def test_losses_that_are_none() -> None:
    on_ranks(2, losses_that_are_none)


def test_train_batch_errors() -> None:
    on_ranks(2, train_batch_errors)
    on_ranks(2, after_an_unfinished_batch)


def test_step_results() -> None:
    on_ranks(2, results)


def test_attributes() -> None:
    on_ranks(2, attributes)


@pytest.mark.parametrize("world", [1, 2])
def test_numbers_over_ranks(world: int) -> None:
    on_ranks(world, numbers)


@pytest.mark.parametrize("world", [1, 2])
def test_wrong_losses(world: int) -> None:
    on_ranks(world, wrong_losses)


@pytest.mark.parametrize("world", [1, 2])
def test_step_without_backward(world: int) -> None:
    on_ranks(world, steps_without_backward)


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_wrong_models() -> None:
    on_ranks(2, wrong_models)


@pytest.mark.parametrize("world", [1, 2])
def test_sparse_gradients_are_refused(world: int) -> None:
    on_ranks(world, sparse_gradients)


def test_units_by_choice() -> None:
    on_ranks(1, wrong_units)
    on_ranks(2, chosen_units)


def test_wrong_meshes() -> None:
    on_ranks(2, wrong_meshes)


def test_a_device_that_is_named() -> None:
    on_ranks(2, named_devices)


@pytest.mark.parametrize("world", [1, 2])
def test_plain_script(world: int) -> None:
    losses = on_ranks(world, plain_loop, with_group=False)
    assert len(losses) == world


def test_the_configuration_is_logged_once_if_logging_is_configured_later() -> None:
    """Each of two engines logs its configuration once, before and after ``logging.basicConfig`` adds a root handler."""
    script = """
import logging, torch, partita
for _ in range(2):
    partita.initialize(torch.nn.Linear(4, 1), {"zero": {"stage": 1}}).close()
    logging.basicConfig(level=logging.INFO, format="root: %(message)s")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    lines = done.stderr.splitlines()
    assert [line.startswith("root: ") for line in lines if "mesh: 1 ranks" in line] == [False, True]
