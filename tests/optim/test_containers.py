"""States in lists, tuples and dictionaries: flattened for checkpoints, and restored."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from partita.optim.states import flattened, unflattened

VALUES = st.recursive(
    st.none() | st.integers() | st.builds(torch.tensor, st.integers(0, 9)),
    lambda items: (
        st.lists(items, max_size=12)
        | st.lists(items, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from(["left", "right_2", "a.b", "c]", 0]), items)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["Q", "exp_avg"]), VALUES))
def test_containers_of_states(state: dict[str, Any]) -> None:
    flat = flattened(state)
    assert sorted_repr(unflattened(flat)) == sorted_repr(state)
    containers = [value for value in flat.values() if isinstance(value, list | tuple)]
    assert not any(isinstance(item, Tensor) for value in containers for item in value)


def sorted_repr(value: Any) -> str:
    if isinstance(value, dict):
        return repr(sorted((repr(key), sorted_repr(item)) for key, item in value.items()))
    return repr(type(value)([sorted_repr(item) for item in value]) if isinstance(value, list | tuple) else value)
