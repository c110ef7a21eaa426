"""The samples of a step: total = micro x accumulate x data ranks, whichever of them are given."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from partita.config.schema import Batch
from partita.config.table import Row, conflict

_KEYS = ("micro", "accumulate", "total")


@dataclass(frozen=True)
class ResolvedBatch:
    """Samples a rank in one forward, micro-batches a step, and samples of a step over all ranks."""

    micro: int
    accumulate: int
    total: int


def resolve_batch(batch: Batch, data: int, mesh_rows: Sequence[Row]) -> tuple[ResolvedBatch, list[Row]]:
    """Derives what is not given: ``total`` from the others (1 where absent), else ``accumulate``, else ``micro``.

    Returns the numbers and, for messages, where each came from. ``mesh_rows`` are those of the mesh.

    Raises:
        ConfigError: the numbers contradict each other or do not divide, with a table of them and one fix.
    """
    given = {key: value for key in _KEYS if (value := getattr(batch, key)) != "auto"}
    follows = _what_follows(given)
    factors = {key: given.get(key, 1) for key in ("micro", "accumulate") if key != follows}
    formula = " x ".join([f"{key} {value}" for key, value in factors.items()] + [f"data {data}"])
    product = prod(factors.values(), start=data)
    values = {**factors, "total": given.get("total", product)}
    sources = {key: "config" if key in given else "default" for key in _KEYS}
    total = values["total"]
    if follows == "total":
        sources["total"] = "config" if "total" in given else f"derived: {formula}"
        problem = f"batch.total is {total}, but {formula} = {product}" if total != product else None
        fix = f"leave batch.total out; it follows as {product}"
    else:
        values[follows], sources[follows] = total // product, f"derived: total {total} / ({formula})"
        problem = f"batch.total {total} cannot be divided by {formula} = {product}" if total % product else None
        fix = f"set batch.total: {max(1, round(total / product)) * product}"
    if problem:
        shown = values if follows == "total" else {**values, follows: "auto"}
        rows = [Row(f"batch.{key}", shown[key], "config" if key in given else "default") for key in _KEYS]
        raise conflict(problem, [*rows, *mesh_rows], fix)
    return ResolvedBatch(**values), [Row(f"batch.{key}", values[key], sources[key]) for key in _KEYS]


def _what_follows(given: Mapping[str, int]) -> str:
    if "total" not in given or ("micro" in given and "accumulate" in given):
        return "total"
    return "accumulate" if "micro" in given else "micro"
