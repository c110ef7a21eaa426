"""Optimizers that need full parameters: the same bits at every stage and tier."""

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import partita
from partita import ConfigError, PartitaError
from partita.checkpoint.format.stored import open_stored
from partita.checkpoint.offline import verify
from partita.layout.owners import Exchanges
from partita.layout.traffic import UPDATES
from tests.kit import seeds
from tests.kit.models import tiny
from tests.kit.plans import TIERS, ZERO, sampled
from tests.kit.ranks import on_ranks
from tests.kit.training import (
    Trained,
    assert_same_bits,
    loss_of,
    quiet,
    rank,
    train_engine,
    train_module,
    whole_weights,
    world,
)

Params = Iterable[Any]


def adafactor(params: Params) -> Optimizer:
    return torch.optim.Adafactor(params, lr=1e-2, weight_decay=0.1)


def adafactor_of_transformers(params: Params) -> Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(params, lr=1e-2, relative_step=False, scale_parameter=True, beta1=0.9)


def soap(params: Params) -> Optimizer:
    from pytorch_optimizer import SOAP

    return SOAP(params, lr=1e-2, precondition_frequency=2)


def lamb(params: Params) -> Optimizer:
    from pytorch_optimizer import Lamb

    return Lamb(params, lr=1e-2)


def lars(params: Params) -> Optimizer:
    from pytorch_optimizer import LARS

    return LARS(params, lr=1e-2)


def came(params: Params) -> Optimizer:
    from pytorch_optimizer import CAME

    return CAME(params, lr=1e-2)


def muon(params: Params) -> Optimizer:
    return torch.optim.Muon(params, lr=1e-2)


KINDS: dict[str, Callable[[Params], Optimizer]] = {
    "torch's Adafactor": adafactor,
    "transformers' Adafactor": adafactor_of_transformers,
    "SOAP": soap,
    "LAMB": lamb,
    "LARS": lars,
    "CAME": came,
}
FEW = ("torch's Adafactor", "SOAP", "LAMB")


class Scaled(Optimizer):
    """``p -= lr / count * g / |g|``; the first step creates the counter in the group."""

    def __init__(self, params: Params, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(group["lr"] / group["count"] * self.change(param.grad))

    def change(self, grad: Tensor) -> Tensor:
        return grad / (grad.norm() + 1e-3)


class Signs(Scaled):
    """An elementwise variant with the same counter."""

    def change(self, grad: Tensor) -> Tensor:
        return grad.sign()


def trained(kind: str, config: Mapping[str, Any], *, steps: int = 4, **settings: Any) -> Trained:
    case = tiny("llama")
    with partita.initialize(
        case.build(), {"clip_grad_norm": 0.5, **config}, optimizer=KINDS[kind], loss_fn=case.loss_of_batch
    ) as engine:
        return train_engine(engine, loss_of(case), steps, keep=(), **settings)


# -- stages, tiers and axes --------------------------------------------------------------------------------------------


def stages_have_the_same_bits(kind: str) -> None:
    plans = {**ZERO, "3-host": TIERS["3-host"]} if world() == 2 else {key: ZERO[key] for key in ("0", "1", "3")}
    results = {key: trained(kind, {"zero": zero}) for key, zero in plans.items()}
    for key, result in results.items():
        assert_same_bits(result, results["0"], f"stage {key}")


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("kind", sampled(KINDS, *FEW))
def test_stages_have_the_same_bits(kind: str, num_ranks: int) -> None:
    on_ranks(num_ranks, stages_have_the_same_bits, kind)


def equals_one_process(kind: str, parallel: dict[str, int]) -> None:
    case = tiny("llama")
    config = {"zero": {"stage": 1}, "parallel": parallel}
    with (
        quiet("rank"),
        partita.initialize(case.build(), config, optimizer=KINDS[kind], loss_fn=case.loss_of_batch) as engine,
    ):
        data = engine.mesh.coordinate("data")
        for step in range(3):
            engine.train_batch(iter([case.batch(4, 1000 * step + data)]))
        found = whole_weights(engine)
    num_data, make = world() // math.prod(parallel.values()), KINDS[kind]
    expected = train_module(case.build(), loss_of(case), 3, num_data=num_data, own=data, optimizer=make)
    for name, weights in expected.weights.items():
        torch.testing.assert_close(found[name], weights, rtol=0, atol=1e-4 * weights.abs().max().item(), msg=name)


@pytest.mark.parametrize(
    ("num_ranks", "parallel"),
    sampled(
        [(2, {"tensor": 2}), (2, {"pipeline": 2}), (2, {"sequence": 2}), (4, {"tensor": 2}), (4, {"pipeline": 2})],
        (2, {"tensor": 2}),
        (2, {"pipeline": 2}),
        (4, {"tensor": 2}),
    ),
)
@pytest.mark.parametrize("kind", ["LARS"])
def test_axes_have_the_results_of_one_process(kind: str, num_ranks: int, parallel: dict[str, int]) -> None:
    on_ranks(num_ranks, equals_one_process, kind, parallel)


def of_matrices_alone() -> None:
    """Check torch's Muon on a model of matrices only; Muon refuses other parameters."""
    results = []
    for stage in (0, 1, 3):
        seeds.start()
        model = nn.Sequential(nn.Linear(24, 40, bias=False), nn.Tanh(), nn.Linear(40, 24, bias=False))
        with partita.initialize(model, {"zero": {"stage": stage}}, optimizer=muon) as engine:
            for step in range(3):
                generator = torch.Generator().manual_seed(10 * step + rank())
                engine.backward(engine(torch.randn(4, 24, generator=generator)).square().mean())
                engine.step()
            results.append(whole_weights(engine))
    for result in results[1:]:
        assert all(torch.equal(results[0][name], result[name]) for name in result)
    model = nn.Linear(24, 40)
    with pytest.raises(ValueError, match="Muon only supports 2D"):
        partita.initialize(model, {"zero": {"stage": 3}}, optimizer=muon)


@pytest.mark.parametrize("num_ranks", [2, 4])  # 4: more ranks than matrices
def test_torch_muon(num_ranks: int) -> None:
    on_ranks(num_ranks, of_matrices_alone)


def updates_in_backward() -> None:
    found = []
    for gradients in ("fp32", "in_backward"):
        config = {"zero": {"stage": 3}, "precision": {"gradients": gradients}, "clip_grad_norm": None}
        found.append(trained("LAMB", config).weights)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_updates_in_backward_have_the_same_bits() -> None:
    on_ranks(2, updates_in_backward)


def counts_in_groups() -> None:
    """Check that counters that a step creates in a group advance wherever the optimizer runs."""
    case = tiny("llama")
    for kind in (Scaled, Signs):
        results = []
        for zero in (ZERO["0"], ZERO["3"], TIERS["3-host"]):
            with partita.initialize(case.build(), {"zero": zero}, optimizer=kind) as engine:
                results.append(train_engine(engine, loss_of(case), 3, keep=()))
                assert engine.optimizer.param_groups[0]["count"] == 3
        for result in results[1:]:
            assert_same_bits(result, results[0])

    model = nn.Linear(4, 4, bias=False)  # one matrix, which one rank owns
    with partita.initialize(model, {"zero": {"stage": 3}}, optimizer=Scaled) as engine:
        for _ in range(3):
            engine.backward(engine(torch.ones(2, 4)).square().mean())
            engine.step()
        assert engine.optimizer.param_groups[0]["count"] == 3


def test_counters_in_groups() -> None:
    on_ranks(2, counts_in_groups)


def frozen_and_skipped() -> None:
    def freeze(module: nn.Module, step: int) -> None:
        for name, param in module.named_parameters():
            if "layers.1.mlp" in name:
                param.requires_grad_(step != 1)

    results = [trained("SOAP", {"zero": {"stage": stage}}, before_step=freeze) for stage in (0, 3)]
    assert_same_bits(*results)
    case = tiny("llama")
    with partita.initialize(case.build(), {"zero": {"stage": 3}}, optimizer=adafactor) as engine:
        train_engine(engine, loss_of(case), 1, keep=())
        before = whole_weights(engine), engine.optimizer_state("model.norm.weight")
        with quiet("step"):
            engine.backward(case.loss(engine(**case.batch(4))) * (math.nan if rank() == 1 else 1.0))
            assert engine.step().skipped
        after = whole_weights(engine), engine.optimizer_state("model.norm.weight")
        for one, other in zip(before, after, strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[key], other[key]) for key in one)


def test_frozen_parameters_and_skipped_steps() -> None:
    on_ranks(2, frozen_and_skipped)


def dropped_gradients() -> None:
    """Check that a parameter whose gradient is dropped before the step stays as it is (DINO), equally at all stages."""
    case, results = tiny("llama"), []
    for stage in (0, 1, 3):
        with partita.initialize(case.build(), {"zero": {"stage": stage}}, optimizer=adafactor) as engine:
            train_engine(engine, loss_of(case), 1, keep=())
            before = whole_weights(engine)["lm_head.weight"]
            for step in (1, 2):
                engine.backward(loss_of(case)(engine, rank(), step))
                if step == 1:
                    engine.module.lm_head.weight.grad = None
                engine.step()
                assert torch.equal(whole_weights(engine)["lm_head.weight"], before) == (step == 1)
            results.append(whole_weights(engine) | states(engine))
    for result in results[1:]:
        assert result.keys() == results[0].keys()
        assert all(torch.equal(result[name], value) for name, value in results[0].items())


def test_dropped_gradients() -> None:
    on_ranks(2, dropped_gradients)


def hooks_see_every_step() -> None:
    case, calls, results = tiny("llama"), [], []
    for hooked in (False, True):
        with partita.initialize(case.build(), {"zero": {"stage": 3}}, optimizer=Scaled) as engine:
            if hooked:
                engine.optimizer.register_step_post_hook(lambda *args: calls.append(args))
            results.append(train_engine(engine, loss_of(case), 3, keep=()))
            assert engine.optimizer.param_groups[0]["count"] == 3
    assert_same_bits(*results)
    assert len(calls) == 3


def test_hooks_of_the_optimizer() -> None:
    on_ranks(2, hooks_see_every_step)


def states_from_before() -> None:
    """Check that an optimizer that has taken steps without an engine keeps its states."""
    case, results = tiny("llama"), []
    for stage in (0, 3):
        model = case.build()
        optimizer = adafactor(model.parameters())
        case.loss(model(**case.batch(4))).backward()
        optimizer.step()
        optimizer.zero_grad()
        with partita.initialize(model, {"zero": {"stage": stage}}, optimizer=optimizer) as engine:
            assert float(engine.optimizer_state("lm_head.weight")["step"]) == 1
            results.append(train_engine(engine, loss_of(case), 2, keep=()))
    assert_same_bits(*results)


def test_states_from_before_the_engine() -> None:
    on_ranks(2, states_from_before)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def states(engine: partita.Engine) -> dict[str, Tensor]:
    names = [name for name, _ in engine.module.named_parameters()]
    return {f"{name}.{key}": value for name in names for key, value in engine.optimizer_state(name).items()}


def resumed(kind: str, folder: Path, zero: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Save after three steps, or resume; return the states at that point, and the weights after two more steps.

    The two steps use the same samples on any number of ranks.
    """
    case = tiny("llama")
    with partita.initialize(case.build(), {"zero": zero}, optimizer=KINDS[kind], loss_fn=case.loss_of_batch) as engine:
        if engine.resume(folder) is None:
            train_engine(engine, loss_of(case), 3, keep=())
            engine.save(folder)
        found = states(engine)
        for step in range(2):
            batch = case.batch(4, step)
            part = {key: values.chunk(world())[rank()] for key, values in batch.items()}
            engine.train_batch(iter([part]))
        return found, whole_weights(engine)


@pytest.mark.parametrize("kind", sampled(KINDS, "SOAP", "CAME"))
def test_resumes_on_other_ranks(tmp_path: Path, kind: str) -> None:
    """States load bitwise on any number of ranks and stage; later weights are bitwise equal on as many ranks."""
    saved, expected = on_ranks(2, resumed, kind, tmp_path, {"stage": 3})[0]
    assert len(saved) >= 20
    for num_ranks, zero in ((1, ZERO["0"]), (2, ZERO["0"]), (2, TIERS["3-host"]), (4, ZERO["1"])):
        loaded, weights = on_ranks(num_ranks, resumed, kind, tmp_path, zero)[0]
        assert saved.keys() == loaded.keys()
        for name, state in saved.items():
            assert torch.equal(loaded[name], state), (name, num_ranks, zero)
        for name, values in expected.items():
            if num_ranks == 2:
                assert torch.equal(weights[name], values), (name, zero)
            else:
                torch.testing.assert_close(weights[name], values, rtol=0, atol=1e-3 * values.abs().max().item())


def saved_once(folder: Path) -> None:
    """Check that data ranks that own the same parameters save their states once, and load them."""
    case = tiny("llama")
    config = {"zero": {"stage": 0}, "parallel": {"tensor": 2}}

    def opened() -> partita.Engine:
        return partita.initialize(case.build(), config, optimizer=adafactor, loss_fn=case.loss_of_batch)

    with quiet("rank"), opened() as engine:
        engine.train_batch(iter([case.batch(4, engine.mesh.coordinate("data"))]))
        path = engine.save(folder)
        expected = states(engine)
    if rank() == 0:
        stored = open_stored(path)
        assert list(verify(stored)) == []
        assert len(stored.tensors["optimizer.state.lm_head.weight.row_var"].chunks) == 1
    with quiet("rank"), opened() as engine:
        engine.load(path)
        found = states(engine)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], state) for name, state in expected.items())


def test_states_are_saved_by_one_of_their_owners(tmp_path: Path) -> None:
    on_ranks(4, saved_once, tmp_path)


def test_states_are_tensors_under_the_names_of_parameters(tmp_path: Path) -> None:
    on_ranks(2, resumed, "SOAP", tmp_path, {"stage": 3})
    from torch.distributed.checkpoint import FileSystemReader

    (folder,) = [path.parent for path in tmp_path.rglob(".metadata")]
    keys = FileSystemReader(folder).read_metadata().state_dict_metadata
    name = "optimizer.state.model.layers.0.mlp.up_proj.weight"
    for key, shape in {"exp_avg": (128, 64), "GG[0]": (128, 128), "GG[1]": (64, 64), "Q[1]": (64, 64)}.items():
        assert tuple(keys[f"{name}.{key}"].size) == shape  # type: ignore[union-attr]


class WithEmpty(nn.Module):
    """A model with a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.empty = nn.Linear(8, 4), nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)).sum() + self.empty.sum()


def without_elements() -> None:
    for optimizer in ({"name": "muon", "muon": {"rules": {"empty": "muon"}}}, None):
        results = []
        for stage in (0, 3):
            torch.manual_seed(0)
            config = {"zero": {"stage": stage}, **({} if optimizer is None else {"optimizer": optimizer})}
            with partita.initialize(WithEmpty(), config, optimizer=None if optimizer else adafactor) as engine:
                for step in range(2):
                    engine.backward(engine(torch.full((2, 8), 0.1 * (step + rank()))))
                    assert engine.step().stepped
                results.append(whole_weights(engine)["linear.weight"])
        assert torch.equal(*results)


def test_parameters_without_elements() -> None:
    on_ranks(2, without_elements)


# -- traffic -----------------------------------------------------------------------------------------------------------


def sent_bytes() -> int:
    case = tiny("llama")
    with partita.initialize(case.build(), {"zero": {"stage": 3}}, optimizer=adafactor) as engine:
        train_engine(engine, loss_of(case), 1, keep=())
        before = engine.traffic_report()
        engine.backward(loss_of(case)(engine, rank(), 1))
        engine.step()
        sent = engine.traffic_report().since(before)
        updates = engine._parts.updater._full_updates
        assert updates is not None
        planned = Exchanges(engine.units, updates.work).operations(rank())
        assert sent.sent_bytes(UPDATES) == sum(each.num_bytes for each in planned)
        return sent.sent_bytes(UPDATES) // 4


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_traffic_is_that_of_the_formula(num_ranks: int) -> None:
    num = sum(param.numel() for param in tiny("llama").build().parameters())
    sent = on_ranks(num_ranks, sent_bytes)
    assert 0 < sum(sent) <= 3 * num * (num_ranks - 1) / num_ranks


# -- bad input ---------------------------------------------------------------------------------------------------------


class OfAll(Scaled):
    """A variant that divides by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        norm = torch.stack([param.grad.norm() for param in params]).norm()  # type: ignore[union-attr]
        for param in params:
            param.sub_(1e-2 * param.grad / norm)


class WithModes(Scaled):
    """A variant that writes parameters in ``eval()``, like Schedule-Free."""

    def train(self) -> None:
        pass

    def eval(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.data.mul_(0.5)


def refused() -> None:
    def message(kind: Any, config: dict[str, Any], case: str = "llama") -> str:
        with pytest.raises(ConfigError) as caught:
            partita.initialize(tiny(case).build(), config, optimizer=kind)
        return str(caught.value)

    disk = message(Scaled, {"zero": TIERS["3-disk"]})
    assert "Scaled needs full parameters, whose states cannot be on disk: set zero.offload.optimizer to host" in disk
    assert "OfAll cannot run on some of the parameters: " in message(OfAll, {"zero": {"stage": 3}})
    with partita.initialize(tiny("llama").build(), {"zero": {"stage": 3}}, optimizer=WithModes) as engine:
        with pytest.raises(PartitaError, match=r"writes parameters outside its step .* use an elementwise optimizer"):
            engine.optimizer.eval()  # type: ignore[attr-defined]


def test_refused() -> None:
    on_ranks(2, refused)


def refused_with_local_steps() -> None:
    config = {"zero": {"stage": 1}, "communication": {"every": 4, "replicas": 2}}
    with pytest.raises(ConfigError, match=r"communication.every: not with optimizer Scaled, which needs full param"):
        partita.initialize(tiny("llama").build(), config, optimizer=Scaled)


def test_refused_with_local_steps() -> None:
    on_ranks(4, refused_with_local_steps)
