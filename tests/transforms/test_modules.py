"""Wrappers around forwards and calls of plain modules: their order, and what remains when some are undone."""

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partita.transforms.modules import ModuleTransforms, forward_wrappers
from tests.kit.state import attached_to


class Adds:
    """Adds its name to the text that a module returns."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, inner: Callable[[Any], str], x: Any) -> str:
        return f"{self.name}({inner(x)})"


class Says(nn.Module):
    """Returns a text."""

    def forward(self, x: str) -> str:
        return x


def wrapped() -> tuple[Says, ModuleTransforms, ModuleTransforms]:
    """A module with two wrappers of one owner and a later one of another."""
    module, first, second = Says(), ModuleTransforms(), ModuleTransforms()
    first.wrap_forward(module, Adds("a"))
    first.wrap_forward(module, Adds("b"))
    second.wrap_forward(module, Adds("c"))
    return module, first, second


def test_later_wrappers_are_outside() -> None:
    module, _, _ = wrapped()
    assert module("x") == "c(b(a(x)))"
    assert [getattr(each, "name", "") for each in forward_wrappers(module)] == ["c", "b", "a"]


def test_suspending_leaves_later_wrappers() -> None:
    module, first, second = wrapped()
    for _ in range(2):
        with first.suspended([module]):
            assert module("x") == "c(x)"
            with first.suspended([nn.ModuleList([module])]):
                assert module("x") == "c(x)"
                second.wrap_forward(module, Adds("d"))
            assert module("x") == "d(c(x))"
            assert len(forward_wrappers(module)) == 2
        assert module("x") == "d(c(b(a(x))))"
        second.undo()
        second.wrap_forward(module, Adds("c"))
    with first.suspended([Says()]):
        assert module("x") == "c(b(a(x)))"


@pytest.mark.parametrize("reverse", [True, False])
def test_owners_undo_in_any_order(reverse: bool) -> None:
    plain = attached_to(Says())
    module, first, second = wrapped()
    owners = [second, first] if reverse else [first, second]
    owners[0].undo()
    assert module("x") == ("b(a(x))" if reverse else "c(x)")
    owners[1].undo()
    assert module("x") == "x"
    assert attached_to(module) == plain


def test_a_forward_that_was_replaced_since_stays() -> None:
    module, first, second = wrapped()
    inner = module.forward
    module.forward = lambda x: f"user({inner(x)})"  # type: ignore[method-assign]
    first.undo()
    assert module("x") == "user(c(x))"
    second.undo()
    assert module("x") == "user(x)"


def test_libraries_see_the_forward_inside_the_wrappers() -> None:
    """As Lightning asks whether a model has a forward, and the Trainer which arguments it takes."""
    module = wrapped()[0]
    forward: Any = module.forward
    assert inspect.signature(forward) == inspect.signature(Says().forward)
    assert forward.__code__ is Says.forward.__code__


def test_removing_some_modules() -> None:
    one, other, changes = Says(), Says(), ModuleTransforms()
    for module in (one, other):
        changes.wrap_forward(module, Adds("a"))
        changes.set_attribute(module, "training", False)
    changes.remove([one])
    assert (one("x"), one.training, other("x"), other.training) == ("x", True, "a(x)", False)
    changes.undo()
    assert (other("x"), other.training) == ("x", True)


def test_a_failed_block_undoes_everything() -> None:
    module, changes, plain = Says(), ModuleTransforms(), attached_to(Says())
    said = list[str]()
    with pytest.raises(KeyError), changes.building():
        changes.on_undo(lambda: said.append(str(module("x"))))
        changes.wrap_forward(module, Adds("a"))
        changes.wrap_call(module, Adds("b"))
        assert module("x") == "b(a(x))"
        raise KeyError
    assert said == ["x"]
    assert attached_to(module) == plain


def test_attributes_are_suspended_and_not_clobbered() -> None:
    module, changes = nn.Embedding(4, 2, padding_idx=1), ModuleTransforms()
    changes.set_attribute(module, "padding_idx", None)
    changes.set_attribute(module, "own", 3)
    with changes.suspended([module]):
        assert module.padding_idx == 1
        assert not hasattr(module, "own")
    assert module.padding_idx is None
    module.own = 4  # type: ignore[assignment]
    changes.undo()
    assert (module.padding_idx, module.own) == (1, 4)


class Doubles:
    """Doubles what a module returns."""

    def __call__(self, inner: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return inner(x) * 2


@pytest.mark.parametrize("make", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_have_no_wrappers(make: Callable[[nn.Module], nn.Module]) -> None:
    module, changes, x = nn.Linear(2, 2), ModuleTransforms(), torch.ones(1, 2)
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
    one.wrap_call(module, Doubles())
    other.wrap_call(module, Doubles())
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
