"""Instructions to torch's compiler about functions here, without importing it, which takes longer than the rest of
partita.

torch imports it when the first such function runs. The names are those of torch 2.11 and 2.13.
"""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch._compile import _disable_dynamo

Params = ParamSpec("Params")
Result = TypeVar("Result")
Called = TypeVar("Called", bound=Callable[..., Any])


def eager(function: Callable[Params, Result]) -> Callable[Params, Result]:
    """Have a function, and what it calls, run as it is: it has effects beside what it returns."""
    return _disable_dynamo(function)


def eager_itself(function: Callable[Params, Result]) -> Callable[Params, Result]:
    """Have a function run as it is; what it calls is compiled."""
    return _disable_dynamo(function, recursive=False)


def constant(function: Called) -> Called:
    """Have a function run while a graph is made, which keeps what it returned."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
