"""Tensors in module arguments and outputs: they are found and replaced in every container, which keeps its type."""

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.tokenization_utils_base import BatchEncoding

from partita.sharding.pytree import map_tensors, tensors_in

Pair = namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class Output:
    loss: Tensor
    extra: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    values: Tensor
    name: str = "x"
    derived: int = dataclasses.field(init=False, default=7)


def x(value: float = 1.0) -> Tensor:
    return torch.tensor([value])


def default_dict() -> Any:
    made: Any = defaultdict(list)
    made["a"] = x(1)
    made["b"] = [x(2)]
    return made


CONTAINERS: dict[str, tuple[Callable[[], Any], int]] = {
    "tensor": (lambda: x(), 1),
    "tuple": (lambda: (x(1), x(2)), 2),
    "list": (lambda: [x(1), "text", None, 3], 1),
    "nested": (lambda: {"a": [x(1), (x(2), {"b": x(3)})]}, 3),
    "named tuple": (lambda: Pair(x(1), Pair(x(2), None)), 2),
    "torch's named tuple": (lambda: torch.ones(2, 3).max(dim=1), 2),
    "packed sequence": (lambda: pack_sequence([torch.ones(3, 2), torch.ones(1, 2)]), 2),
    "ordered dict": (lambda: OrderedDict(b=x(1), a=x(2)), 2),
    "default dict": (default_dict, 2),
    "user dict": (lambda: UserDict(a=x(1), b=x(2)), 2),
    "batch encoding": (lambda: BatchEncoding({"input_ids": x(1), "mask": x(2)}), 2),
    "model output": (lambda: CausalLMOutputWithPast(loss=x(1), logits=x(2)), 2),
    "dataclass": (lambda: Output(x(1), [x(2), x(3)]), 3),
    "frozen dataclass": (lambda: Frozen(x(1)), 1),
}
ALL = pytest.mark.parametrize("name", CONTAINERS)


@ALL
def test_every_tensor_is_found(name: str) -> None:
    make, num = CONTAINERS[name]
    assert len(list(tensors_in(make()))) == num


@ALL
def test_every_tensor_is_changed_in_the_same_containers(name: str) -> None:
    value = CONTAINERS[name][0]()
    before = list(tensors_in(value))
    changed = map_tensors(value, lambda tensor: tensor + 10)
    assert type(changed) is type(value)
    assert [tensor.tolist() for tensor in tensors_in(changed)] == [(tensor + 10).tolist() for tensor in before]
    assert [id(tensor) for tensor in tensors_in(value)] == [id(tensor) for tensor in before], "it stays as it was"


@ALL
def test_the_same_object_where_nothing_changes(name: str) -> None:
    value = CONTAINERS[name][0]()
    assert map_tensors(value, lambda tensor: tensor) is value


def test_what_is_beside_the_tensors_stays() -> None:
    changed = map_tensors(Frozen(x(1), "name"), lambda tensor: tensor + 1)
    assert (changed.name, changed.derived, changed.values.tolist()) == ("name", 7, [2.0])
    output = map_tensors(CausalLMOutputWithPast(loss=x(1), logits=x(2)), lambda tensor: tensor + 1)
    assert output.loss is output["loss"]
    assert output.loss.tolist() == [2.0]
    assert output.past_key_values is None
    made = map_tensors(default_dict(), lambda tensor: tensor + 1)
    assert made["new"] == [], "a default dict keeps its default"
    assert list(map_tensors(OrderedDict(b=x(), a=x()), lambda tensor: tensor + 1)) == ["b", "a"]
    packed = map_tensors(pack_sequence([torch.ones(3, 2), torch.ones(1, 2)]), lambda t: t.double())
    assert isinstance(packed, PackedSequence)
    assert packed.data.dtype == torch.float64


@pytest.mark.parametrize("value", [None, 3, 2.5, "text", b"bytes", {1, 2}, torch.Size([2]), Output, range(3)])
def test_without_tensors(value: object) -> None:
    assert list(tensors_in(value)) == []
    assert map_tensors(value, lambda tensor: tensor + 1) is value


def test_a_mapping_that_cannot_be_written_is_read() -> None:
    value = MappingProxyType({"a": x(1)})
    assert len(list(tensors_in(value))) == 1
    assert map_tensors(value, lambda tensor: tensor) is value


TREES = st.recursive(
    st.one_of(st.none(), st.integers(), st.floats(allow_nan=False).map(lambda value: torch.tensor(value).double())),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.tuples(inner, inner).map(lambda both: Pair(*both)),
        inner.map(lambda value: Output(x(), value)),
    ),
    max_leaves=10,
)


@given(TREES)
def test_any_tree(tree: Any) -> None:
    before = list(tensors_in(tree))
    assert map_tensors(tree, lambda tensor: tensor) is tree
    changed = map_tensors(tree, lambda tensor: -tensor)
    assert [tensor.tolist() for tensor in tensors_in(changed)] == [(-tensor).tolist() for tensor in before]
    again = map_tensors(changed, lambda tensor: -tensor)
    assert [tensor.tolist() for tensor in tensors_in(again)] == [tensor.tolist() for tensor in before]
