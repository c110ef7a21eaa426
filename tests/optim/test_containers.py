"""States in lists, tuples and dictionaries: flattened for checkpoints, and restored."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from partita.optim.states import flattened, has_tensors, unflattened

KEYS = ["left", "right_2", "a.b", "c]", "", "0", "=0", "\u00e9 %2E", 0, -0.5, 0.999, 1e-08, True, None, (1, 0.9), b"d"]
VALUES = st.recursive(
    st.none() | st.integers() | st.builds(torch.tensor, st.integers(0, 9)),
    lambda items: (
        st.lists(items, max_size=12)
        | st.lists(items, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from(KEYS), items)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["Q", "exp_avg"]), VALUES))
def test_containers_of_states(state: dict[str, Any]) -> None:
    flat = flattened(state)
    assert sorted_repr(unflattened(flat)) == sorted_repr(state)
    assert not any(has_tensors(value) for value in flat.values() if not isinstance(value, Tensor))
    assert not any("." in key for key in flat)


def test_keys_that_are_no_literals() -> None:
    """Dictionaries with such keys are values, and stay as they are."""
    state = {"by dtype": {torch.float32: torch.ones(2), "left": torch.ones(3)}, "by nan": {float("nan"): torch.ones(2)}}
    assert flattened(state) == state


def sorted_repr(value: Any) -> str:
    if isinstance(value, dict):
        return repr(sorted((repr(key), sorted_repr(item)) for key, item in value.items()))
    return repr(type(value)([sorted_repr(item) for item in value]) if isinstance(value, list | tuple) else value)
