"""Collectives of a simulated rank as rows of a trace, with the seconds that each would take on a machine."""

from typing import Any

from partita.engine.profile import COLLECTIVES, Span, rows
from partita.prediction.simulate.rank import RankReport
from partita.prediction.step_cost import StepCost
from partita.table.mesh_shape import MeshShape


def collective_rows(rank: RankReport, mesh: MeshShape, step_cost: StepCost) -> list[dict[str, Any]]:
    """Return the calls as trace rows, one row for each combination of axes.

    The calls follow each other without pauses. The plan's trace shows their overlap with computation.
    """
    spans, start_ns = list[Span](), 0
    for call in rank.collectives:
        key = call.key
        stop_ns = start_ns + int(1e9 * step_cost.collective(key.collective, key.axes, mesh, call.sent_bytes))
        label = f"{key.purpose}, {call.sent_bytes} bytes"
        spans.append(Span(key.collective, label, ", ".join(key.axes), start_ns, stop_ns))
        start_ns = stop_ns
    title = f"simulated collectives of rank {rank.role.rank} ({rank.role.coordinates})"
    return rows(spans, 0, title, COLLECTIVES)
