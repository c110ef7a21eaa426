"""Settings that are documented, and of which this version has only some values. The one list of them.

When a value arrives, it is added to its line; when all are there, the line is deleted.
"""

from functools import reduce

from pydantic import BaseModel

from partita.config.plain import shown
from partita.config.problems import Problem
from partita.errors import not_available

AVAILABLE: dict[str, tuple[object, ...]] = {
    "parallel.tensor": (1,),
    "parallel.pipeline": (1,),
    "parallel.sequence": (1,),
    "zero.hierarchical": (False, True),
    "activations.checkpoint": ("none",),
    "activations.partition": (False,),
    "activations.offload": ("none",),
    "communication.gradients": ("full",),
    "communication.parameters": ("full",),
}


def setting(config: BaseModel, key: str) -> object:
    """The value of a dotted key."""
    return reduce(getattr, key.split("."), config)


def unavailable_problems(config: BaseModel) -> list[Problem]:
    """One problem for each setting whose value this version does not have."""
    problems = []
    for key, values in AVAILABLE.items():
        value = setting(config, key)
        if value not in values:
            text = f"{not_available(f'{key}: {shown(value)}')} ({shown(values[0])})"
            problems.append(Problem(tuple(key.split(".")), text))
    return problems
