"""Sharded parameters: their metadata is readable, and replaced or moved parameters are detected."""

import copy
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import partita
from partita import PartitaError
from partita.memory import buffer_pool
from partita.sharding.placeholder import ShardedParameter, is_sharded
from tests.kit import seeds
from tests.kit.models import CASES, WIDTH, Case, Stack, inputs, square_loss
from tests.kit.plans import ZERO
from tests.kit.ranks import on_ranks
from tests.kit.training import Recipe, assert_same_bits, check, quiet, rank, train_recipe

SHARDED = {"zero": {"stage": 3}}


def metadata() -> None:
    plain = Stack()
    with partita.initialize(Stack(), SHARDED) as engine:
        for (name, param), (_, expected) in zip(
            engine.module.named_parameters(), plain.named_parameters(), strict=True
        ):
            assert is_sharded(param), name
            assert isinstance(param, nn.Parameter)
            assert param.shape == expected.shape
            assert param.size() == expected.size()
            assert param.size(0) == len(expected) == len(param)
            assert param.numel() == expected.numel() == param.nelement()
            assert param.dim() == expected.dim() == param.ndim
            assert param.stride() == expected.stride()
            assert (param.dtype, param.device, param.layout) == (expected.dtype, expected.device, expected.layout)
            assert param.is_contiguous()
            assert param.is_floating_point()
            assert param.element_size() == 4
            assert param.nbytes == expected.nbytes
            assert param.requires_grad
            assert param.is_leaf
            assert param.grad is None
            assert not param.is_meta
            assert hash(param) == id(param)
            assert param in {param: 1}
            assert str(tuple(expected.shape)) in repr(param)
            assert "Sharded parameter" in repr(param)
        assert str(engine.module) == str(plain)
        assert "Sharded parameter" in str(next(engine.module.parameters()))
        assert "Sharded parameter" in f"{engine.module.first.weight}"
        count = sum(p.numel() for p in engine.module.parameters() if p.requires_grad)
        assert count == sum(p.numel() for p in plain.parameters())
        optimizer = torch.optim.SGD(engine.module.parameters(), 0.1)  # its constructor reads no values
        assert len(optimizer.param_groups[0]["params"]) == len(list(plain.parameters()))


MADE: dict[str, Callable[[Any], Tensor]] = {
    "new_zeros": lambda p: p.new_zeros(1, 2),
    "new_empty": lambda p: p.new_empty(2),
    "new_full": lambda p: p.new_full((2,), 1.0),
    "new_tensor": lambda p: p.new_tensor([1.0]),
    "zeros_like": torch.zeros_like,
    "empty_like": torch.empty_like,
    "randn_like": lambda p: torch.randn_like(p, dtype=torch.float64),
    "to": lambda p: torch.ones(2, dtype=torch.float64).to(p),
    "type_as": lambda p: torch.ones(2, dtype=torch.float64).type_as(p),
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "like data": lambda p: torch.zeros_like(p.data),
    "to data": lambda p: torch.ones(2).to(p.detach()),
    "no change": lambda p: p.to("cpu"),
    "no change of data": lambda p: p.data.float(),
}


def made() -> None:
    """Check that making a tensor like a parameter, and conversions that change nothing, read no values."""
    configs = [SHARDED, {"zero": {"stage": 3}, "parallel": {"tensor": 2}}, {"parallel": {"tensor": 2}}]
    plain = CASES["gpt2"].build()
    for config in configs:
        model = CASES["gpt2"].build()
        with partita.initialize(model, config) as engine:
            for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
                for what, make in MADE.items():
                    if "parallel" in config and what in ("data", "like data", "no change of data"):
                        continue
                    made, wanted = make(param), make(expected)
                    assert (made.shape, made.dtype, made.device) == (wanted.shape, wanted.dtype, wanted.device), what
                    assert made.stride() == wanted.stride() or "parallel" in config, (name, what)
            assert model.to("cpu") is model.float() is model
            if rank() == 0:  # no collective
                torch.zeros_like(next(engine.module.parameters()))
            engine.backward(Case.loss(engine(**CASES["gpt2"].batch(2))))
            assert model.to("cpu") is model
            engine.step()


class Adjoint(torch.autograd.Function):
    """Integrates ``dy/dt = func(y)``. Backward integrates the adjoint state, without a graph of forward."""

    @staticmethod
    def forward(ctx: Any, func: nn.Module, y: Tensor, steps: int, *params: Tensor) -> Tensor:
        ctx.func, ctx.steps = func, steps
        with torch.no_grad():
            for _ in range(steps):
                y = y + func(y) / steps
        ctx.save_for_backward(y, *params)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        y, *params = ctx.saved_tensors
        (adjoint,), sums = gradients, [torch.zeros_like(param) for param in params]
        for _ in range(ctx.steps):
            with torch.enable_grad():
                y = y.detach().requires_grad_(True)
                views = [torch.as_strided(param, (), ()) for param in params]  # as torchdiffeq makes them
                change = ctx.func(y) / ctx.steps
                of_y, *found = torch.autograd.grad(change, (y, *params), adjoint, allow_unused=True)
                del views
            y = y.detach() - change.detach()
            adjoint = adjoint + of_y
            sums = [
                total + (torch.zeros_like(p) if g is None else g)
                for total, p, g in zip(sums, params, found, strict=True)
            ]
        return None, adjoint, None, *sums


class Integrated(nn.Module):
    """A neural differential equation, trained as by torchdiffeq's ``odeint_adjoint``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.func = nn.Linear(WIDTH, WIDTH), Stack()

    def forward(self, x: Tensor) -> Tensor:
        params = [param for param in self.func.parameters() if param.requires_grad]
        return Adjoint.apply(self.func, self.first(x), 2, *params)  # type: ignore[no-any-return]


def integrated() -> None:
    check(Recipe(Integrated, ignored="parameter .* is read outside|'buffer_pool' .* grows"))


def copies() -> None:
    """Check copies and averages of a model made inside `engine.gathered`, also of parameters split over tensor."""
    case = CASES["gpt2"]
    plain = case.build()
    for config in (SHARDED, {"parallel": {"tensor": 2}}):
        with partita.initialize(case.build(), config) as engine:
            with engine.gathered():
                states = [
                    copy.deepcopy(engine.module).state_dict(),
                    AveragedModel(engine.module).module.state_dict(),
                    pickle.loads(pickle.dumps(engine.module)).state_dict(),
                    {name: param.clone().detach() for name, param in engine.module.named_parameters()},
                ]
            for state in states:
                for name, param in plain.named_parameters():
                    assert torch.equal(state[name], param), name


def _double(model: Any) -> None:
    model.double()


def _new_data(model: Any) -> None:
    model.first.weight.data = torch.zeros(WIDTH, 2 * WIDTH)


def _replaced(model: Any) -> None:
    model.first.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))


def _replaced_layer(model: Any) -> None:
    model.first = nn.Linear(WIDTH, WIDTH)


def _deleted(model: Any) -> None:
    del model.blocks[1].up.bias
    model.blocks[1].up.bias = None


def _added(model: Any) -> None:
    model.extra = nn.Parameter(torch.zeros(3))


def _added_layer(model: Any) -> None:
    model.head = nn.Linear(WIDTH, WIDTH)


CHANGES = {
    "double": (_double, "is no longer a view"),
    "data": (_new_data, "is no longer a view"),
    "replaced": (_replaced, "'first.weight' was replaced"),
    "replaced layer": (_replaced_layer, "'first.weight' was replaced"),
    "deleted": (_deleted, "'blocks.1.up.bias' was replaced"),
    "added": (_added, "'extra' was added"),
    "added layer": (_added_layer, "'head.weight' was added"),
}


def changed(name: str) -> list[str]:
    said = []
    for zero in ZERO.values():
        with partita.initialize(Stack(), {"zero": zero}) as engine:
            engine.backward(square_loss(engine, rank(), 0))
            engine.step()
            try:
                CHANGES[name][0](engine.module)
                engine(inputs(rank(), 1))
            except PartitaError as error:
                said.append(str(error))
            else:
                said.append("nothing was raised")
    return said


class ReadsChild(Stack):
    """Reads weights of an inner unit from outside that unit."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + F.linear(x, self.blocks[1].down.weight @ self.blocks[1].up.weight)


def reads_child() -> None:
    check(Recipe(ReadsChild, ignored="parameter .* is read outside|'buffer_pool' .* grows"))


def reads_child_says_so() -> None:
    with quiet("'buffer_pool' .* grows"), partita.initialize(ReadsChild(), SHARDED) as engine:
        with pytest.warns(UserWarning, match=r"'blocks.1.down.weight' is read outside .* 'blocks.1', .* zero.units"):
            engine.backward(square_loss(engine, rank(), 0))
        engine.step()
        engine.backward(square_loss(engine, rank(), 1))  # no second warning


class OwnView(nn.Module):
    """Returns a view of its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, WIDTH))

    def forward(self) -> Tensor:
        return self.table[2:6]


class UsesView(Stack):
    """Uses views of parameters outside the units that return them."""

    def __init__(self) -> None:
        super().__init__()
        self.views = nn.ModuleList([OwnView(), OwnView()])

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.views[0](), self.views[1]()
        return super().forward(x + one) * other


def returns_view() -> None:
    check(Recipe(UsesView))


class Attends(nn.Module):
    """Uses torch's attention, which reads the weight of its output projection without calling that module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)[None]
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.last(self.encoder(x))


def attends() -> None:
    check(Recipe(Attends))


def attends_without_gradient() -> None:
    """Check evaluation, in which torch's fast path reads all weights of an encoder layer at once."""
    outputs = []
    for zero in ZERO.values():
        seeds.start()
        with partita.initialize(Attends(), {"zero": zero}) as engine, torch.no_grad():
            engine.eval()
            outputs.append(engine(inputs(0, 0)))
    assert all(torch.equal(output, outputs[0]) for output in outputs)


class Convolutions(nn.Module):
    """Convolutions with weights in channels-last memory format."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(4, 4, 3, padding=1) for _ in range(3)])
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x.view(-1, 4, 2, 2)))
        return x


def strides() -> None:
    for zero in ZERO.values():
        with partita.initialize(Convolutions(), {"zero": zero}) as engine:
            weight = engine.module.layers[1].weight
            assert weight.is_contiguous(memory_format=torch.channels_last)
            assert not weight.is_contiguous()
            with engine.gathered():
                assert weight.is_contiguous(memory_format=torch.channels_last)
            engine.backward(square_loss(engine, rank(), 0))
            engine.step()
            assert engine.optimizer_state("layers.1.weight")["exp_avg"].shape == weight.shape
    check(Recipe(Convolutions))


class OddStrides(nn.Module):
    """A transposed parameter, one with gaps in memory, one with one element, one with none, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(WIDTH, 24).t()[:WIDTH])
        self.gaps = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH)[:, ::2])
        self.single = nn.Parameter(torch.ones(1))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scalar = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.transposed @ self.gaps) * self.single + self.scalar + self.empty.sum()


def odd_strides() -> None:
    check(Recipe(OddStrides))


def resized_storage() -> None:
    """Check that results are the same if torch cannot swap storages, so that they are resized."""
    recipe = Recipe(Stack)
    expected = train_recipe(recipe, ZERO["3"])
    with mock.patch.object(buffer_pool, "storage_swap_available", return_value=False):
        for name in ("3", "3-kept"):
            assert_same_bits(train_recipe(recipe, ZERO[name]), expected, f"plan {name} with resized storages")


def given_back() -> None:
    """Check that sharded units have no memory for unsharded parameters."""
    with partita.initialize(Stack(), SHARDED) as engine:
        for unit in engine._parts.runtime.units:
            assert unit.storage.nbytes() == 0
        engine.backward(square_loss(engine, rank(), 0))
        engine.step()
        for unit in engine._parts.runtime.units:
            assert unit.storage.nbytes() == 0


def own_class() -> None:
    class Special(nn.Parameter):
        pass

    model = Stack()
    model.first.weight = Special(model.first.weight.data)
    with partita.initialize(model, SHARDED) as engine:
        assert type(model.first.weight) is ShardedParameter
        with engine.gathered():
            assert type(model.first.weight) is Special
        assert type(model.first.weight) is ShardedParameter


def test_metadata_answers() -> None:
    on_ranks(2, metadata)


def test_metadata_makes_tensors() -> None:
    on_ranks(4, made)


def test_adjoint_integration() -> None:
    on_ranks(2, integrated)


def test_copies_of_the_model() -> None:
    on_ranks(2, copies)


@pytest.mark.parametrize("name", CHANGES)
def test_replaced_and_moved_parameters_are_noticed(name: str) -> None:
    expected = CHANGES[name][1]
    for said in on_ranks(2, changed, name):
        for plan, text in zip(ZERO, said, strict=True):
            assert expected in text or "is sharded" in text, f"plan {plan}: {text}"


def test_parameter_read_by_another_unit() -> None:
    on_ranks(2, reads_child)
    on_ranks(2, reads_child_says_so)


def test_unit_that_returns_a_view_of_its_parameter() -> None:
    on_ranks(2, returns_view)


def test_attention_of_torch() -> None:
    on_ranks(2, attends)
    on_ranks(2, attends_without_gradient)


def test_strides_are_kept() -> None:
    on_ranks(2, strides)


def test_odd_strides_and_shapes() -> None:
    on_ranks(2, odd_strides)


def test_resized_storages_train_the_same() -> None:
    on_ranks(2, resized_storage)


def test_resting_parameters_have_no_memory() -> None:
    on_ranks(2, given_back)


def test_subclass_of_parameter_comes_back() -> None:
    on_ranks(2, own_class)
