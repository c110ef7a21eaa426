"""The config section `compile`: the selected modules train as uncompiled ones, and close removes the compilation."""

import re
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters

import partita
from partita import ConfigError
from partita.transforms.modules import is_compiled
from tests.kit import CASES, on_ranks, seeds
from tests.kit.models import Stack, square_loss
from tests.kit.plans import ZERO
from tests.kit.training import ADAMW, rank, whole_weights

# torch's compiler reads .grad of a graph's inputs, for which torch warns.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def section(modules: Any) -> dict[str, Any]:
    return {"compile": {"modules": modules, "backend": "aot_eager"}}


def compiled_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if is_compiled(module)]


def train(modules: Any, zero: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor], list[str]]:
    torch._dynamo.reset()
    counters.clear()
    seeds.start()
    model = Stack(3)
    with partita.initialize(model, {"zero": zero, "optimizer": ADAMW, **section(modules)}) as engine:
        names, losses = compiled_names(model), []
        for step in range(3):
            loss = square_loss(engine, rank(), step)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        weights = whole_weights(engine)
    assert not compiled_names(model)
    assert "_compiled_call_impl" not in vars(model)
    assert bool(counters["stats"]["unique_graphs"]) == (modules != "none")
    return losses, weights, names


def as_without() -> None:
    blocks = ["blocks.0", "blocks.1", "blocks.2"]
    for name, zero in ZERO.items():
        losses, weights, names = train("none", zero)
        assert names == []
        cases: list[tuple[Any, list[str]]] = [("units", blocks), (["blocks.1"], ["blocks.1"])]
        for modules, expected in cases + ([("model", [""])] if zero["stage"] < 3 else []):
            got_losses, got_weights, names = train(modules, zero)
            assert names == expected
            assert got_losses == losses, f"{name}, {modules}"
            assert all(torch.equal(value, weights[key]) for key, value in got_weights.items()), f"{name}, {modules}"


def test_training_has_the_bits_of_training_without() -> None:
    on_ranks(2, as_without, timeout=200)


PARALLEL: dict[str, dict[str, Any]] = {
    "tensor": {"parallel": {"tensor": 2}, "zero": {"stage": 3}},
    "pipeline": {"parallel": {"pipeline": 2}, "batch": {"accumulate": 2}},
    "sequence": {"parallel": {"sequence": 2}, "zero": {"stage": 3}},
    "recomputed": {"activations": {"checkpoint": "units"}, "zero": {"stage": 3}},
    "offloaded": {"zero": {"stage": 3, "offload": {"parameters": "host", "optimizer": "host"}}},
}


def losses_of(config: dict[str, Any]) -> list[float]:
    torch._dynamo.reset()
    case = CASES["llama"]
    with partita.initialize(case.build(), {"optimizer": ADAMW, **config}, loss_fn=case.loss_of_batch) as engine:
        accumulate, data = engine.config.batch.accumulate, engine.mesh.coordinate("data")
        num = accumulate if isinstance(accumulate, int) else 1
        batches = [[case.batch(2, 100 * step + 10 * micro + data) for micro in range(num)] for step in range(2)]
        return [engine.train_batch(batch).item() for batch in batches]


def parallel(name: str) -> None:
    expected = losses_of(PARALLEL[name])
    counters.clear()
    got = losses_of(PARALLEL[name] | section("units"))
    assert counters["stats"]["unique_graphs"]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", PARALLEL)
def test_with_other_settings(name: str) -> None:
    on_ranks(2, parallel, name, timeout=200)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"zero": {"stage": 3}}, "compile.modules: model compiles one region, but stage 3 gathers the parameters"),
        (
            {"activations": {"checkpoint": "units", "offload": "disk"}},
            "activations.offload does not apply to compiled modules",
        ),
        ({"loss": {"tiled": "auto"}}, "compile.modules: model compiles the loss together with full logits"),
    ],
)
def test_what_the_full_model_cannot_be_compiled_with(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        partita.initialize(Stack(2), {**config, **section("model")})


def in_a_pipeline() -> None:
    with pytest.raises(ConfigError, match=r"but a pipeline's rank runs groups of layers one at a time"):
        partita.initialize(Stack(2), {"parallel": {"pipeline": 2}, **section("model")})


def test_the_full_model_in_a_pipeline_is_refused() -> None:
    on_ranks(2, in_a_pipeline)


def test_what_there_is_not_is_named() -> None:
    with pytest.raises(ConfigError, match=r"compile\.modules: 'Blok' matches no module of Stack by class or name"):
        partita.initialize(Stack(2), section(["Blok"]))
    with pytest.raises(ConfigError, match=r"'units' compiles units, and Linear has no unit except the model itself"):
        partita.initialize(nn.Linear(2, 2), section("units"))


def test_what_is_compiled_already_is_refused() -> None:
    model = Stack(2)
    model.blocks[1].compile(backend="aot_eager")
    with pytest.raises(ConfigError, match=r"'blocks\.1' is compiled already: leave compile\.modules out, or remove"):
        partita.initialize(model, section("units"))
