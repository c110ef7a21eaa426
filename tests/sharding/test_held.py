"""Tensors inside objects of any class: all are found, and those in writable places can be replaced."""

import functools
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal
from transformers.modeling_outputs import CausalLMOutput

from partita.sharding import pytree
from partita.sharding.pytree import held_tensors, replace_held


def x(value: float = 1.0) -> Tensor:
    return torch.tensor([float(value)])


class Slots:
    __slots__ = ("__hidden", "_empty", "values")

    def __init__(self) -> None:
        self.values, self.__hidden = x(1), (x(2), "text")


class Method:
    def __init__(self) -> None:
        self.scale = x(1)

    def scaled(self) -> Tensor:
        return self.scale * 2


def closure() -> Callable[[], Tensor]:
    values, text = x(1), "text"
    return lambda: values if text else later  # type: ignore[name-defined]  # noqa: F821


def with_empty_cell() -> Callable[[], Tensor]:
    def made() -> Tensor:
        return values if False else never

    values = x(1)
    if len("text") == 3:
        never = x(2)
    return made


def generator() -> Any:
    def made() -> Any:
        values = x(1)
        yield 0
        yield values

    running = made()
    next(running)
    return running


def default() -> Any:
    def made(values: Tensor = x(1)) -> Tensor:  # noqa: B008
        return values

    return made


def cycle() -> Any:
    first, second = SimpleNamespace(values=x(1)), SimpleNamespace()
    first.other, second.other, second.values = second, first, [x(2), {"a": x(3)}]
    return first


WRITABLE: dict[str, tuple[Callable[[], Any], int]] = {
    "object": (lambda: SimpleNamespace(a=x(1), b=(x(2), [x(3)])), 3),
    "slots": (Slots, 2),
    "distribution": (lambda: Independent(Normal(x(1), x(2)), 1), 2),
    "closure": (closure, 1),
    "closure with an empty cell": (with_empty_cell, 1),
    "bound method": (lambda: Method().scaled, 1),
    "partial": (lambda: functools.partial(max, SimpleNamespace(a=x(1)), key=x(2)), 2),
    "deque": (lambda: deque([x(1), x(2)]), 2),
    "cycle": (cycle, 3),
    "object in containers": (lambda: {"a": [SimpleNamespace(a=x(1)), x(2)]}, 2),
    "model output": (lambda: CausalLMOutput(logits=x(1), hidden_states=(SimpleNamespace(a=x(2)),)), 2),
}
FIXED: dict[str, tuple[Callable[[], Any], int]] = {
    "generator": (generator, 1),
    "set": (lambda: {x(1), x(2)}, 2),
    "partial's arguments": (lambda: functools.partial(max, x(1), (x(2),)), 2),
    "default": (default, 1),
}


def unique(value: object) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in held_tensors(value)}.values())


@pytest.mark.parametrize("name", WRITABLE | FIXED)
def test_every_tensor_is_found(name: str) -> None:
    make, num = (WRITABLE | FIXED)[name]
    assert len(unique(make())) == num


@pytest.mark.parametrize("name", WRITABLE)
def test_every_tensor_is_replaced(name: str) -> None:
    value = WRITABLE[name][0]()
    before = sorted(tensor.item() for tensor in unique(value))
    replaced = replace_held(value, lambda tensor: tensor + 10)
    assert type(replaced) is type(value)
    assert sorted(tensor.item() for tensor in unique(replaced)) == [number + 10 for number in before]


@pytest.mark.parametrize("name", FIXED)
def test_what_cannot_be_written_keeps_what_it_has(name: str) -> None:
    make, num = FIXED[name]
    value = make()
    assert replace_held(value, lambda tensor: tensor + 10) is value
    assert all(tensor.item() < 10 for tensor in unique(value))
    assert len(unique(value)) == num


def test_the_same_object_where_nothing_changes() -> None:
    for make, _ in WRITABLE.values():
        value = make()
        assert replace_held(value, lambda tensor: tensor) is value


def test_results_use_the_new_tensors() -> None:
    made = closure()
    assert replace_held(made, lambda tensor: tensor + 10)().item() == 11
    method = Method().scaled
    assert replace_held(method, lambda tensor: tensor + 10)().item() == 22
    normal = replace_held(Normal(x(0), x(1)), lambda tensor: tensor + 1)
    assert (normal.mean.item(), normal.stddev.item()) == (1, 2)


def test_parameters_that_objects_hold_stay() -> None:
    param = nn.Parameter(x(1))
    holder = SimpleNamespace(param=param, view=param[:])
    replaced = replace_held((holder, param), lambda tensor: tensor + 10)
    assert holder.param is param
    assert holder.view.item() == 11
    assert replaced[1].item() == 11, "in containers, which are the forward's own, they are replaced"


def test_modules_classes_and_globals_are_not_followed() -> None:
    module = nn.Linear(2, 2)
    assert unique(SimpleNamespace(module=module, method=module.forward, kind=Method)) == []
    assert unique(test_parameters_that_objects_hold_stay) == []


def test_an_object_that_holds_too_much_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytree, "LIMIT", 100)
    with pytest.warns(UserWarning, match="SimpleNamespace with more than 100 objects"):
        held_tensors(SimpleNamespace(many=[SimpleNamespace(a=number) for number in range(200)]))
