"""Wrappers around forwards and calls of plain modules: their order, and the state after some are undone."""

import copy
import inspect
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partita.transforms.modules import WITHIN_STAGE, ModuleTransforms, Order, find
from tests.kit.state import attached_to


class Adds:
    """Wrapper that adds its name to the text that a module returns."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, inner: Callable[[Any], str], x: Any) -> str:
        return f"{self.name}({inner(x)})"


class Says(nn.Module):
    """Module that returns a text."""

    def forward(self, x: str) -> str:
        return x


def wrapped() -> tuple[Says, ModuleTransforms]:
    """Return a module with two wrappers of one level, and one of a later level that was added between them."""
    module, transforms = Says(), ModuleTransforms()
    transforms.at(Order.TENSOR).wrap_forward(module, Adds("a"))
    transforms.at(Order.ATTENTION).wrap_forward(module, Adds("c"))
    transforms.at(Order.TENSOR).wrap_forward(module, Adds("b"))
    return module, transforms


def test_later_levels_are_outside_and_later_wrappers_within_a_level() -> None:
    module, transforms = wrapped()
    assert module("x") == "c(b(a(x)))"
    transforms.at(Order.LOSS).wrap_call(module, Adds("f"))
    transforms.at(Order.SEQUENCE).wrap_call(module, Adds("e"))
    transforms.at(Order.SEQUENCE).wrap_forward(module, Adds("d"))
    assert module("x") == "f(e(c(d(b(a(x))))))"


def test_finding_the_outermost_active_wrapper_of_a_class() -> None:
    module, transforms = wrapped()
    transforms.at(Order.LOSS).wrap_forward(module, Doubles())
    found = find(module, Adds)
    assert found is not None
    assert found.name == "c"
    with transforms.suspended([module], levels=WITHIN_STAGE | {Order.ATTENTION}):
        assert find(module, Adds) is None
        assert find(module, Doubles) is not None
    assert find(Says(), Adds) is None


def test_suspending_leaves_other_levels() -> None:
    module, transforms = wrapped()
    for _ in range(2):
        with transforms.suspended([module], levels=WITHIN_STAGE):
            assert module("x") == "c(x)"
            with transforms.suspended([nn.ModuleList([module])], levels=WITHIN_STAGE):
                assert module("x") == "c(x)"
                with transforms.suspended([module], levels=list(Order)):
                    assert module("x") == "x"
                transforms.at(Order.TENSOR).wrap_forward(module, Adds("d"))
            assert module("x") == "c(d(x))"
        assert module("x") == "c(d(b(a(x))))"
        transforms.undo()
        assert module("x") == "x"
        module, transforms = wrapped()
    with transforms.suspended([Says()], levels=list(Order)):
        assert module("x") == "c(b(a(x)))"


def test_what_is_always_on_is_not_suspended() -> None:
    module, transforms = wrapped()
    transforms.at(Order.SEQUENCE).wrap_forward(module, Adds("d"), always=True)
    with transforms.suspended([module], levels=list(Order)):
        assert module("x") == "d(x)"


@pytest.mark.parametrize("raises", [True, False])
def test_changes_of_a_block_are_undone(raises: bool) -> None:
    module, transforms = wrapped()
    with pytest.raises(KeyError) if raises else nullcontext(), transforms.temporary():
        transforms.at(Order.WEIGHT_GRADIENT).wrap_forward(module, Adds("d"))
        assert module("x") == "c(b(a(d(x))))"
        if raises:
            raise KeyError
    assert module("x") == "c(b(a(x)))"


def test_all_is_undone_in_reverse_order_even_if_some_of_it_fails() -> None:
    module, transforms, said = Says(), ModuleTransforms(), list[str]()
    plain = attached_to(module)

    def fail() -> None:
        raise KeyError

    for order in (Order.STAGE, Order.TENSOR, Order.LOSS):
        transforms.at(order).on_undo(partial(said.append, order.name))
        transforms.at(order).wrap_forward(module, Adds("a"))
    transforms.at(Order.LOSS).on_undo(fail)
    with pytest.raises(KeyError):
        transforms.undo()
    assert said == ["STAGE", "LOSS", "TENSOR"]
    assert attached_to(module) == plain
    transforms.undo()
    assert len(said) == 3


def test_several_objects_may_change_a_module() -> None:
    plain = attached_to(Says())
    module, first = wrapped()
    second = ModuleTransforms()
    second.at(Order.RANDOM).wrap_forward(module, Adds("d"))
    assert module("x") == "c(d(b(a(x))))"
    first.undo()
    assert module("x") == "d(x)"
    second.undo()
    assert attached_to(module) == plain


def test_a_forward_that_was_replaced_since_stays() -> None:
    module, transforms = wrapped()
    inner = module.forward
    module.forward = lambda x: f"user({inner(x)})"  # type: ignore[method-assign]
    transforms.undo()
    assert module("x") == "user(x)"


def test_libraries_see_the_forward_inside_the_wrappers() -> None:
    """A wrapped forward has its original code, by which Lightning detects it, and the signature that Trainer reads."""
    module = wrapped()[0]
    forward: Any = module.forward
    assert inspect.signature(forward) == inspect.signature(Says().forward)
    assert forward.__code__ is Says.forward.__code__


def test_removing_some_modules() -> None:
    one, other, transforms = Says(), Says(), ModuleTransforms()
    changes = transforms.at(Order.TENSOR)
    for module in (one, other):
        changes.wrap_forward(module, Adds("a"))
        changes.set_attribute(module, "training", False)
    transforms.remove([one])
    assert (one("x"), one.training, other("x"), other.training) == ("x", True, "a(x)", False)
    transforms.undo()
    assert (other("x"), other.training) == ("x", True)


def test_a_failed_block_undoes_everything() -> None:
    module, transforms, plain = Says(), ModuleTransforms(), attached_to(Says())
    said, changes = list[str](), transforms.at(Order.LOSS)
    with pytest.raises(KeyError), transforms.building():
        changes.on_undo(lambda: said.append(str(module("x"))))
        changes.wrap_forward(module, Adds("a"))
        changes.wrap_call(module, Adds("b"))
        assert module("x") == "b(a(x))"
        raise KeyError
    assert said == ["x"]
    assert attached_to(module) == plain


def test_attributes_are_suspended_and_not_clobbered() -> None:
    module, transforms = nn.Embedding(4, 2, padding_idx=1), ModuleTransforms()
    changes = transforms.at(Order.TENSOR)
    changes.set_attribute(module, "padding_idx", None)
    changes.set_attribute(module, "own", 3)
    with transforms.suspended([module], levels=[Order.TENSOR]):
        assert module.padding_idx == 1
        assert not hasattr(module, "own")
    assert module.padding_idx is None
    module.own = 4  # type: ignore[assignment]
    transforms.undo()
    assert (module.padding_idx, module.own) == (1, 4)


class Doubles:
    """Wrapper that doubles what a module returns."""

    def __call__(self, inner: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return inner(x) * 2


@pytest.mark.parametrize("make", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_have_no_wrappers(make: Callable[[nn.Module], nn.Module]) -> None:
    module, changes, x = nn.Linear(2, 2), ModuleTransforms().at(Order.LOSS), torch.ones(1, 2)
    expected = module(x)
    changes.wrap_forward(module, Doubles())
    changes.wrap_call(module, Doubles())
    made = make(module)
    assert torch.equal(made(x), expected)
    assert torch.equal(module(x), expected * 4)
    made.compile(backend="eager")
    assert torch.equal(made(x), expected)


@pytest.mark.parametrize("first", [True, False])
def test_a_compiled_call_is_inside_the_wrappers(first: bool) -> None:
    module, one, other, x = nn.Linear(2, 2), ModuleTransforms(), ModuleTransforms(), torch.ones(1, 2)
    expected, seen = module(x), list[bool]()

    def look(_module: nn.Module, _args: Any) -> None:
        seen.append(torch.compiler.is_compiling())

    module.register_forward_pre_hook(look)
    if first:
        module.compile(backend="eager")
    one.at(Order.LOSS).wrap_call(module, Doubles())
    other.at(Order.STAGE).wrap_call(module, Doubles())
    if not first:
        module.compile(backend="eager")
    assert torch.equal(module(x), expected * 4)
    one.undo()
    assert torch.equal(module(x), expected * 2)
    other.undo()
    assert torch.equal(module(x), expected)
    assert module._compiled_call_impl is not None
    assert "compile" not in vars(module)
    assert any(seen), "it was compiled"
    torch.compiler.reset()
