"""All-gathers of a step: their number, prefetch, secondary shards of nodes, and the number of unsharded units."""

import os
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

import partita
from partita import ConfigError
from partita.layout.blueprint import make_blueprint
from partita.sharding.unit import UnitState
from partita.table.slots import unit_pool
from tests.kit import seeds
from tests.kit.models import CASES, Block, Stack, inputs, square_loss
from tests.kit.plans import ZERO, matrix
from tests.kit.ranks import on_ranks
from tests.kit.state import assert_idle
from tests.kit.training import Loss, Recipe, assert_same_bits, check, rank, train_recipe
from tests.sharding.test_visits import siamese

HIERARCHICAL = {"stage": 3, "hierarchical": True}


def on_two_nodes() -> Any:
    return mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(rank() % 2))


def hierarchical(loss: Loss, compute: str) -> None:
    with on_two_nodes():
        recipe = Recipe(Stack, loss, config={"precision": {"compute": compute}}, plain=False)
        trained = train_recipe(recipe, HIERARCHICAL)
        assert_same_bits(trained, train_recipe(recipe, ZERO["3"]), "hierarchical against 3")
        assert_same_bits(trained, train_recipe(recipe, ZERO["0"]), "hierarchical against 0")


def gathers_of_hierarchical() -> None:
    """Check that parameters are gathered over all ranks in forward, and within the node in backward."""
    with on_two_nodes():
        with partita.initialize(Stack(), {"zero": HIERARCHICAL}) as engine:
            engine.backward(square_loss(engine, rank(), 0))
            rows = engine.traffic_report().rows
            calls = {key.axes: row.calls for key, row in rows.items() if key.purpose == "parameters"}
            assert calls == {("data",): 6, ("local",): 6}
            engine.step()
            assert_idle(engine)


def second_shards_are_not_stale() -> None:
    """Check that a forward after a step, or after a write, renews the secondary shards."""
    with on_two_nodes():
        ends = []
        for zero in (HIERARCHICAL, ZERO["0"]):
            seeds.start()
            with partita.initialize(Stack(2), {"zero": zero}) as engine:
                module: Any = engine.module
                engine.backward(square_loss(engine, rank(), 0))
                engine.step()
                square_loss(engine, rank(), 1)  # no backward: the secondary shard stays
                with engine.gathered(module.blocks[0], modify=True), torch.no_grad():
                    module.blocks[0].up.weight.mul_(3)
                loss = square_loss(engine, rank(), 2)
                engine.backward(loss)
                ends.append((loss.item(), engine.step().grad_norm))
        assert ends[0] == ends[1]


def gathers(engine: partita.Engine, step: int) -> int:
    before = engine.traffic_report()
    engine.backward(square_loss(engine, rank(), step))
    engine.step()
    rows = engine.traffic_report().since(before).rows
    return sum(row.calls for key, row in rows.items() if key.purpose == "parameters")


def gathers_of_a_step() -> None:
    """Check that each unit is gathered once in forward and once in backward, or once per step if it stays unsharded."""
    for prefetch in ("auto", 0, 10_000_000):
        with partita.initialize(Stack(), {"zero": {"stage": 3, "prefetch_bytes": prefetch}}) as engine:
            counts = [gathers(engine, step) for step in range(3)]
        # With unlimited prefetch all units fit: the last ones are still unsharded when backward begins.
        assert counts[0] == 12
        assert all(count <= 12 for count in counts), counts
        assert prefetch == 10_000_000 or counts == [12, 12, 12]
    with partita.initialize(Stack(), {"zero": ZERO["3-kept"]}) as engine:
        assert [gathers(engine, step) for step in range(3)] == [6, 6, 6]


def gathers_after_evaluation() -> None:
    """Check that evaluation between steps causes no unnecessary prefetch."""
    with partita.initialize(Stack(), {"zero": {"stage": 3}}) as engine:
        assert gathers(engine, 0) == 12
        for step in range(3):
            before = engine.traffic_report()
            engine.eval()
            with torch.no_grad():
                for turn in range(3):
                    engine(inputs(rank(), turn))
            engine.train()
            rows = engine.traffic_report().since(before).rows
            calls = sum(row.calls for key, row in rows.items() if key.purpose == "parameters")
            assert calls == 3 * 6
            assert gathers(engine, step) == 12


def whole_at_a_time() -> None:
    """Check that at most three units are unsharded at a time: the root, the unit in use, and a prefetched one."""
    most = 0
    with partita.initialize(Stack(8), {"zero": {"stage": 3}}) as engine:
        units = engine._parts.runtime.unsharder.units

        def count(*_: Any) -> None:
            nonlocal most
            most = max(most, sum(unit.state is not UnitState.SHARDED for unit in units))

        def count_both(module: nn.Module, args: Any, output: Tensor) -> None:
            count()
            output.register_hook(count)

        for module in engine.module.modules():
            if not isinstance(module, nn.ModuleList):
                module.register_forward_hook(count_both)
        for step in range(3):
            engine.backward(square_loss(engine, rank(), step))
            engine.step()
    assert most == 3


BLUEPRINTS: tuple[dict[str, Any], ...] = (
    {},
    {"zero": ZERO["2"], "precision": {"compute": "bf16", "keep_fp32": ["RMSNorm"]}},
    {"zero": ZERO["3"], "precision": {"compute": "bf16", "gradients": "in_backward", "master": "split"}},
    {"zero": {**ZERO["3"], "offload": {"parameters": "host", "optimizer": "disk"}}},
)


def of_a_model_on_meta() -> None:
    """Check that an engine's blueprint equals the one made from a meta model, on every rank."""
    for config in BLUEPRINTS:
        with partita.initialize(CASES["decoder"].build(), config) as engine:
            model, resolved = CASES["decoder"].build(device="meta"), engine.blueprint.resolved
            assert make_blueprint(model, resolved) == engine.blueprint
            assert [unit.planned for unit in engine._parts.runtime.units] == engine.units
            held = engine.memory_report().held.get(("buffer_pool", "device"), 0)
            assert held == unit_pool(engine.units, "auto").num_bytes


class Fancy(Stack):
    """Blocks whose outputs also contain a sparse tensor and values that are not tensors."""

    class Inner(Block):
        def forward(self, x: Tensor) -> Any:
            x = super().forward(x)
            return x, None, "text", {"index": torch.eye(3).to_sparse(), "count": 3}

    def __init__(self) -> None:
        super().__init__(2)
        self.blocks = nn.ModuleList([Fancy.Inner() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x, *_ = block(x)
        return self.last(x)


def fancy_outputs() -> None:
    check(Recipe(Fancy))


def distributed_parameters() -> None:
    """Check that a DTensor parameter is an error that names it."""
    mesh = init_device_mesh("cpu", (2,))
    model: Any = Stack(1)
    model.first.weight = nn.Parameter(distribute_tensor(model.first.weight.detach(), mesh))
    for zero in ZERO.values():
        with pytest.raises(ConfigError, match=r"'first.weight' is a DTensor.*before it is distributed"):
            partita.initialize(model, {"zero": zero})


@matrix(loss=[square_loss, siamese], compute=["fp32", "bf16"])
def test_hierarchical_on_two_nodes(loss: Loss, compute: str) -> None:
    on_ranks(4, hierarchical, loss, compute)


def test_gathers_on_two_nodes() -> None:
    on_ranks(4, gathers_of_hierarchical)
    on_ranks(4, second_shards_are_not_stale)


def test_gathers_of_a_step() -> None:
    on_ranks(2, gathers_of_a_step)


def test_gathers_after_evaluation() -> None:
    on_ranks(2, gathers_after_evaluation)


def test_blueprints() -> None:
    on_ranks(2, of_a_model_on_meta)


def test_units_that_are_whole_at_a_time() -> None:
    on_ranks(2, whole_at_a_time)


def test_outputs_of_all_kinds() -> None:
    on_ranks(2, fancy_outputs)


def test_distributed_parameters_are_refused() -> None:
    on_ranks(2, distributed_parameters)
