"""Decorators for torch's compiler that do not import it: its import takes longer than that of all of partita.

torch imports it when the first decorated function runs. The private names are those of torch 2.11 and 2.13.
"""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch._compile import _disable_dynamo

Params = ParamSpec("Params")
Result = TypeVar("Result")
Called = TypeVar("Called", bound=Callable[..., Any])


def eager(function: Callable[Params, Result]) -> Callable[Params, Result]:
    """Exclude a function with side effects, and everything it calls, from compilation."""
    return _disable_dynamo(function)


def eager_itself(function: Callable[Params, Result]) -> Callable[Params, Result]:
    """Exclude a function from compilation, but not the functions that it calls."""
    return _disable_dynamo(function, recursive=False)


def constant(function: Called) -> Called:
    """Run a function once during tracing; its result is a constant of the graph."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
