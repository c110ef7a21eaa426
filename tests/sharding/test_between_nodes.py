"""Between nodes, the all-gather of updated parameters overlaps the next forward; every read waits for it."""

from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

import partita
from partita.sharding.placeholder import is_sharded
from partita.sharding.unit import UnitState
from tests.compression.test_wires import on_nodes_of
from tests.features.test_compile import HOW
from tests.kit import seeds
from tests.kit.models import Stack, square_loss
from tests.kit.plans import ZERO
from tests.kit.ranks import on_ranks
from tests.kit.training import Recipe, assert_same_bits, rank, train_recipe, whole_weights

# Stage 3 with replicas: parameters are sharded over the ranks of one node, and each node has all of them.
REPLICATED: dict[str, Any] = {"stage": 3, "replicate": "nodes"}
PLACES = {"1": ZERO["1"], "2": ZERO["2"], "replicated": REPLICATED}
SECTIONS: dict[str, dict[str, Any]] = {
    "fp32": {"clip_grad_norm": 0.1},
    "changes": {"communication": {"parameters": "int4"}},
}


class Apart(nn.Module):
    """Runs ``other`` in every second forward. In the remaining ones it reads a parameter of that stack directly."""

    def __init__(self) -> None:
        super().__init__()
        self.stack, self.other = Stack(2), Stack(1)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.stack(x)
        return x * self.other.blocks[0].up.weight.mean() if self.calls % 2 else self.other(x)


def trained(zero: dict[str, Any], sections: dict[str, Any]) -> Any:
    return train_recipe(Recipe(lambda: Stack(3), config=sections, num_steps=4), zero)


def same_bits(place: str, sections: dict[str, Any]) -> None:
    with on_nodes_of(1 if place != "replicated" else 2):
        got = trained(PLACES[place], sections)
    with on_nodes_of(torch.distributed.get_world_size()):  # there is one node
        expected = trained({"stage": 3} if place == "replicated" else PLACES[place], sections)
    if place == "replicated":  # sums gradients in another order
        for name, weight in expected.weights.items():
            torch.testing.assert_close(got.weights[name], weight, rtol=1e-4, atol=1e-5)
    else:
        assert_same_bits(got, expected, f"{place} between nodes")


def step(engine: partita.Engine, number: int) -> None:
    engine.backward(square_loss(engine, rank(), number))
    engine.step()


def waits(stage: int) -> None:
    """Check that parameters are placeholders after a step, and that a read of one waits for its new value."""
    config = {"zero": {"stage": stage}}
    with on_nodes_of(1), partita.initialize(Apart(), config) as engine:
        units = engine._parts.runtime.units
        for number in range(4):
            step(engine, number)
            assert all(unit.state is UnitState.UNSHARDING for unit in units)
            params = dict(engine.module.named_parameters())
            assert all(is_sharded(param) for param in params.values())
            found = {name: param.detach().clone() for name, param in params.items() if number % 2}
            assert all(unit.state is UnitState.UNSHARDED for unit in units) or not number % 2
            weights = engine.state_dict()
            assert not any(is_sharded(param) for param in params.values())
            if rank() == 0:
                assert all(torch.equal(value, weights[name]) for name, value in found.items())


def stays(per_node: int, stage: int) -> None:
    """Check that parameters stay unsharded after a step, on one node or if each rank updates all of them."""
    with on_nodes_of(per_node), partita.initialize(Stack(2), {"zero": {"stage": stage}}) as engine:
        step(engine, 0)
        assert not any(is_sharded(param) for param in engine.module.parameters())


def unfrozen() -> None:
    """Check that a unit which is unfrozen later trains the same on two nodes as on one."""

    def freeze(module: Any, number: int) -> None:
        module.blocks[1].requires_grad_(number >= 2)

    results = []
    for per_node in (1, 2):
        with on_nodes_of(per_node):
            results.append(train_recipe(Recipe(lambda: Stack(3), num_steps=4, before_step=freeze), ZERO["1"]))
    assert_same_bits(*results, "a unit that begins to train")


def compiled(how: str) -> None:
    """Check that compiled code sees unsharded parameters, does not recompile, and has the bits of eager code."""
    weights = []
    for prepare in (HOW[how], lambda model, backend: model):
        torch._dynamo.reset()
        seeds.start()
        with on_nodes_of(1), partita.initialize(prepare(Stack(3), "aot_eager"), {"zero": {"stage": 1}}) as engine:
            for number in range(5):
                with torch._dynamo.config.patch(error_on_recompile=number >= 2):
                    step(engine, number)
            weights.append(whole_weights(engine))
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


# -- tests -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sections", SECTIONS)
@pytest.mark.parametrize("place", ["1", "2"])
def test_the_bits_are_those_of_one_node(place: str, sections: str) -> None:
    on_ranks(2, same_bits, place, SECTIONS[sections])


def test_replicas_are_those_of_stage_3() -> None:
    on_ranks(4, same_bits, "replicated", SECTIONS["fp32"])


@pytest.mark.parametrize("stage", [1, 2])
def test_who_reads_a_parameter_waits_for_its_gather(stage: int) -> None:
    on_ranks(2, waits, stage)


@pytest.mark.parametrize(("per_node", "stage"), [(2, 1), (1, 0)])
def test_what_is_not_gathered_between_nodes_stays(per_node: int, stage: int) -> None:
    on_ranks(2, stays, per_node, stage)


def test_a_unit_that_begins_to_train() -> None:
    on_ranks(2, unfrozen)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("how", ["block.compile()", "model.compile()"])
def test_compiled_code_finds_whole_parameters(how: str) -> None:
    on_ranks(2, compiled, how)
