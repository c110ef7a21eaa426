"""Reads and writes of sharded parameters between forwards, by code that does not know that they are sharded."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import partita
from partita import PartitaError
from partita.memory import buffer_pool
from partita.sharding import runtime
from partita.sharding.placeholder import is_sharded
from partita.sharding.unshard_order import RepeatedOrder
from tests.kit import seeds
from tests.kit.models import CASES, WIDTH, Case, Stack, inputs, square_loss
from tests.kit.ranks import on_ranks
from tests.kit.training import Recipe, check, rank

STAGE_3 = {"zero": {"stage": 3}}
Engine = partita.Engine


def stack() -> Stack:
    seeds.start()
    return Stack(2)


READS: dict[str, Callable[[Any], object]] = {
    "add": lambda p: p + 1,
    "item": lambda p: p.sum().item(),
    "norm": torch.linalg.vector_norm,
    "clone": lambda p: p.clone(),
    "detach": lambda p: p.detach() + 1,
    "data": lambda p: p.data + 1,
    "data of data": lambda p: p.data.data.norm(),
    "data to": lambda p: p.data.to(torch.float64),
    "data deepcopy": lambda p: copy.deepcopy(p.data),
    "data of shape": lambda p: torch.zeros_like(p) + p.detach(),
    "data of several": lambda p: torch.stack([p.data, p.detach(), p]),
    "tolist": lambda p: p.tolist(),
    "numpy": lambda p: torch.from_numpy(p.detach().numpy().copy()),
    "index": lambda p: p[0],
    "iterate": list,
    "view": lambda p: p.view(-1),
    "T": lambda p: p.T,
    "to": lambda p: p.to(torch.float64),
    "linear": lambda p: F.linear(torch.ones(1, WIDTH), p),
    "equal": lambda p: torch.equal(p, p),
    "compare": lambda p: p == 0,
    "bool": lambda p: bool((p > 0).all()),
    "deepcopy": copy.deepcopy,
    "norm of all": lambda p: nn.utils.parameters_to_vector([p]),
    "memory of data": lambda p: torch.tensor(p.data.untyped_storage()[:32]),
    "copy": copy.copy,
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "pickled data": lambda p: pickle.loads(pickle.dumps(p.data)),
}
REFUSED: dict[str, Callable[[Any], object]] = {
    "data_ptr": lambda p: p.data_ptr(),
    "storage": lambda p: p.untyped_storage(),
    "shared": lambda p: p.share_memory_(),
}


def equal(found: object, expected: object) -> bool:
    if isinstance(expected, Tensor):
        return isinstance(found, Tensor) and type(found) is type(expected) and torch.equal(found, expected)
    if isinstance(expected, list):
        return isinstance(found, list) and len(found) == len(expected) and all(map(equal, found, expected))
    return found == expected


def reads() -> None:
    plain = stack()
    for name, read in READS.items():
        with partita.initialize(stack(), STAGE_3) as engine, torch.no_grad():
            for own in ("first.weight", "blocks.1.up.weight"):
                weight: Any = engine.module.get_parameter(own)
                assert is_sharded(weight)
                if name == "linear" and own != "first.weight":
                    continue
                assert equal(read(weight), read(plain.get_parameter(own))), name
            assert torch.equal(weight, plain.get_parameter(own)), name
    with partita.initialize(stack(), STAGE_3) as engine:
        for read in REFUSED.values():
            with pytest.raises(PartitaError, match=r"'first.weight' is sharded: .*gathered.*state_dict"):
                read(engine.module.first.weight)


def _saved(model: nn.Module) -> dict[str, Tensor]:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    read: dict[str, Tensor] = torch.load(file)
    return read


def _averaged(model: nn.Module) -> dict[str, Tensor]:
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(2):
        averaged.update_parameters(model)
    return {name: value.detach() for name, value in averaged.module.named_parameters()}


def _vector(model: nn.Module) -> dict[str, Tensor]:
    vector, copied = nn.utils.parameters_to_vector(model.parameters()), stack()
    nn.utils.vector_to_parameters(vector.detach(), copied.parameters())
    return {name: value.detach() for name, value in copied.named_parameters()}


COPIES: dict[str, Callable[[nn.Module], dict[str, Tensor]]] = {
    "torch.save": _saved,
    "safetensors": lambda model: safetensors.torch.load(safetensors.torch.save(model.state_dict())),
    "deepcopy": lambda model: dict(copy.deepcopy(model).named_parameters()),
    "pickle": lambda model: dict(pickle.loads(pickle.dumps(model)).named_parameters()),
    "averages": _averaged,
    "clones": lambda model: {name: param.clone().detach() for name, param in model.named_parameters()},
    "vector": _vector,
}


def copies(stage: dict[str, Any]) -> None:
    """Check that copies of all parameters have the values after a step, and keep them during the next one."""
    for name, made in COPIES.items():
        with partita.initialize(stack(), stage) as engine:
            for step in range(2):
                engine.backward(square_loss(engine, rank(), step))
                engine.step()
                found = made(engine.module)
                with engine.gathered():
                    expected = {each: param.detach().clone() for each, param in engine.module.named_parameters()}
                engine.backward(square_loss(engine, rank(), 5))
                engine.step()
                assert found.keys() == expected.keys()
                for each, value in expected.items():
                    close = torch.allclose if name == "averages" else torch.equal
                    assert close(found[each], value), (name, each)


def several_at_once() -> None:
    """Check that one call can read and write parameters of several units."""
    plain, engine = stack(), partita.initialize(stack(), STAGE_3)
    with torch.no_grad():
        for model in (plain, engine.module):
            one, two, three = (model.get_parameter(f"{name}.weight") for name in ("blocks.0.up", "blocks.1.up", "last"))
            one.data.mul_(0.5).add_(two.data, alpha=2)
            two.lerp_(one, 0.25)
            torch._foreach_mul_([one, two, three], 0.5)
            torch._foreach_add_([one.data, two.data], [two, one])
            three.data = three.data * 2 + three.data.norm()
        for (name, found), expected in zip(engine.module.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(found, expected), name
    engine.close()


def one_unit_at_a_time() -> None:
    """Check that a loop over the parameters has one unit unsharded at a time, and that a kept view follows updates."""
    with partita.initialize(stack(), STAGE_3) as engine:
        units = engine._parts.runtime.units
        for param in engine.module.parameters():
            param.detach().norm()
            assert sum(unit.storage.nbytes() > 0 for unit in units) == 1
        view = engine.module.first.weight.view(-1)  # keeps its memory, which gets the values of later steps
        norm = view.norm().item()
        for step in range(2):
            engine.backward(square_loss(engine, rank(), step))
            assert engine.step().stepped
        engine.module.first.weight.sum()
        assert view.norm() != norm
        assert torch.equal(view, engine.module.first.weight.view(-1))
        del view
        engine.module.last.weight.sum()
        engine.module.blocks[0].up.weight.sum()
        assert sum(unit.storage.nbytes() > 0 for unit in units) == 1
        engine.state_dict()
        assert all(map(is_sharded, engine.module.parameters()))


def penalized(model: Any, rank: int, step: int) -> Tensor:
    """Return a loss with penalties on weights, computed outside of forward: one before it, and one after it."""
    module = getattr(model, "module", model)
    before = sum(param.square().sum() for param in module.parameters())
    loss = square_loss(model, rank, step)
    return loss + 1e-2 * before + 1e-2 * (module.first.weight @ module.blocks[0].up.weight.T).square().mean()


class Agent(nn.Module):
    """Has a method besides forward that reads a parameter of the root unit."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Stack(2)
        self.log_std = nn.Parameter(torch.zeros(1, WIDTH))

    def sample(self, x: Tensor) -> Tensor:
        return self.body(x) + self.log_std.exp()  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.sample(x)


def sampled(model: Any, rank: int, step: int) -> Tensor:
    module = getattr(model, "module", model)
    with torch.no_grad():
        wanted = module.sample(inputs(rank, step + 100))
    return (model(inputs(rank, step)) - wanted).square().mean() + 0.1 * module.sample(inputs(rank, step)).mean()


def graphs() -> None:
    check(Recipe(Stack, loss=penalized))
    check(Recipe(Agent, loss=sampled))


def split_and_sharded() -> None:
    """Check that reads of parameters that are also split over tensor return the global values."""
    plain = CASES["gpt2"].build()
    with partita.initialize(CASES["gpt2"].build(), {**STAGE_3, "parallel": {"tensor": 2}}) as engine:
        for (name, param), expected in zip(engine.module.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(param.clone(), expected), name
            assert torch.equal(param.detach() * 2, expected * 2), name
        copied = copy.deepcopy(engine.module.get_parameter("transformer.wte.weight"))
        assert torch.equal(copied, plain.get_parameter("transformer.wte.weight"))
        engine.backward(Case.loss(engine(**CASES["gpt2"].batch(2))))
        engine.step()


def _forward(engine: Engine) -> None:
    engine(inputs(rank(), 0))


def _step(engine: Engine) -> None:
    engine.backward(square_loss(engine, rank(), 0))
    engine.step()


def _other_read(engine: Engine) -> None:
    engine.module.blocks[0].up.weight.norm()  # type: ignore[index, union-attr]


# Calls of the other ranks while only rank 0 reads.
ELSEWHERE: dict[str, Callable[[Engine], object]] = {
    "forward": _forward,
    "step": lambda engine: engine.step(),
    "state_dict": lambda engine: engine.state_dict(),
    "barrier": lambda engine: dist.barrier(),
    "gathered": lambda engine: engine.gathered().__enter__(),
}


def read_on_rank_0(elsewhere: str, announced: bool) -> str:
    order = mock.patch.object(runtime, "agree", RepeatedOrder) if announced else mock.patch.object(runtime, "_log")
    with order:
        engine = partita.initialize(stack(), STAGE_3)
        _step(engine)
    if rank() > 0:
        ELSEWHERE[elsewhere](engine)
        return "nothing was raised"
    with pytest.raises(PartitaError) as raised:
        engine.module.last.weight.norm()
    raise raised.value


def kept_views_are_not_written() -> None:
    """Check that a write through a kept view of a sharded parameter is an error."""
    with partita.initialize(stack(), STAGE_3) as engine:
        row = engine.module.first.weight.detach()[0]
        engine.module.blocks[0].up.weight.sum()
        row.zero_()
        with pytest.raises(PartitaError, match="'first.weight' was written through a view that was kept"):
            engine.module.first.weight.sum()


def resized_storages() -> None:
    with mock.patch.object(buffer_pool, "storage_swap_available", return_value=False):
        several_at_once()
        one_unit_at_a_time()


def test_functions_get_the_values() -> None:
    on_ranks(2, reads)


@pytest.mark.parametrize("stage", [{**STAGE_3}, {"zero": {"stage": 3, "offload": {"parameters": "host"}}}])
def test_copies_of_the_model(stage: dict[str, Any]) -> None:
    on_ranks(2, copies, stage)


def test_a_call_with_parameters_of_several_units() -> None:
    on_ranks(2, several_at_once)


def test_one_unit_is_unsharded_at_a_time() -> None:
    on_ranks(2, one_unit_at_a_time)


def test_resized_storages() -> None:
    on_ranks(2, resized_storages)


def test_graphs_that_begin_outside_forward() -> None:
    on_ranks(2, graphs)


def test_parameters_that_tensor_ranks_split() -> None:
    on_ranks(4, split_and_sharded)


@pytest.mark.parametrize("elsewhere", ELSEWHERE)
@pytest.mark.parametrize("announced", [False, True])
def test_a_read_on_one_rank_is_named(elsewhere: str, announced: bool) -> None:
    with pytest.raises(
        PartitaError, match=r"needs the values of parameter 'last.weight'.*read and write .* every rank"
    ):
        on_ranks(2, read_on_rank_0, elsewhere, announced)


def test_a_lost_write_is_named() -> None:
    on_ranks(2, kept_views_are_not_written)
