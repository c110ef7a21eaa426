"""Which wire the first steps speak for: what a step computes, how fast the line is, and how long each wire would take.

Nothing is switched on: a wire that loses something is the user's to ask for.
"""

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch

from partita.comm.collectives import Collectives
from partita.comm.group import Group
from partita.memory.streams import finish
from partita.memory.timeline import WAIT, Watcher, watched_by
from partita.plan.planned import PlannedUnit
from partita.plan.traffic import TrafficKey
from partita.planner.blueprint import Blueprint, wires_of
from partita.planner.traffic import StepShape, step_traffic

_log = logging.getLogger("partita")

# Optimizer steps before the measured ones, in which memory is found and orders are learned; and the measured ones.
SETTLING, MEASURED = 2, 3
PROBE_BYTES = 2**20  # to each other rank
# A wire that saves less than this share of another's step is not worth what it loses beside that.
WORTH = 0.1
# What may be named, by what it loses: the first two are right on average.
CANDIDATES: Mapping[str, Mapping[str, str]] = {
    "gradients: int8": {"gradients": "int8"},
    "gradients: int4": {"gradients": "int4"},
    "gradients: ternary, parameters: ternary": {"gradients": "ternary", "parameters": "ternary"},
    "gradients: low_rank": {"gradients": "low_rank"},
}


@dataclass(frozen=True)
class Measured:
    """Of the slowest rank: seconds of a step without waiting for others, and bytes per second that it sends."""

    compute_s: float
    bytes_per_s: float

    def step_s(self, sent_bytes: int) -> float:
        """Of a step that sends so many bytes, none of them beside computing."""
        return self.compute_s + sent_bytes / self.bytes_per_s


def sent_bytes(blueprint: Blueprint, asked: Mapping[str, str]) -> int:
    """What a rank sends in a step where ``communication`` says what is ``asked``, by the plan's formula."""
    config = blueprint.config
    wanted = config.model_copy(update={"communication": config.communication.model_copy(update=dict(asked))})

    def on_wires(unit: PlannedUnit) -> PlannedUnit:
        rows = [replace(segment.row, wires=wires_of(wanted, segment.row)) for segment in unit.segments]
        segments = [replace(segment, row=row) for segment, row in zip(unit.segments, rows, strict=True)]
        return replace(unit, segments=tuple(segments))

    return step_traffic(
        [on_wires(unit) for unit in blueprint.units], StepShape(blueprint.resolved.batch.accumulate)
    ).sent_bytes()


def wires_for(blueprint: Blueprint) -> dict[str, int]:
    """The wires that these rows have, ``full`` first, each with the bytes that a rank sends in a step."""
    has_changes = any(segment.update_is_gathered for unit in blueprint.units for segment in unit.segments)
    asked = {"full": {"gradients": "full", "parameters": "full"}}
    for name, keys in CANDIDATES.items():
        own = {key: codec for key, codec in keys.items() if key == "gradients" or has_changes}
        asked[", ".join(f"{key}: {codec}" for key, codec in own.items()) or name] = own
    return {name: sent_bytes(blueprint, keys) for name, keys in asked.items()}


def choose(measured: Measured, wires: Mapping[str, int]) -> str:
    """The first of the wires of whose step none saves more than :data:`WORTH`."""
    times = {name: measured.step_s(num_bytes) for name, num_bytes in wires.items()}
    return next(name for name, step_s in times.items() if min(times.values()) >= (1 - WORTH) * step_s)


def describe(measured: Measured, wires: Mapping[str, int]) -> str:
    """The choice, with the figures of each wire."""
    chosen, full = choose(measured, wires), next(iter(wires))
    lines = [
        f"communication.gradients: auto: a step computes for {measured.compute_s:.3g} s, and the line carries "
        f"{measured.bytes_per_s * 8e-6:.4g} Mbit/s"
    ]
    lines += [
        f"  {name}: {num_bytes / 1e6:.3f} MB per step, {measured.step_s(num_bytes):.3g} s"
        for name, num_bytes in wires.items()
    ]
    said = f"would take communication: {{{chosen}}}, which you have to ask for, as it loses something"
    lines.append(f"  full it stays: no wire saves {WORTH:.0%} of a step" if chosen == full else f"  {said}")
    return "\n".join(lines)


class WireChoice(Watcher):
    """Watches the first steps of an engine. :meth:`after_update` is a collective."""

    def __init__(self, blueprint: Blueprint, collectives: Collectives) -> None:
        self._blueprint, self._collectives = blueprint, collectives
        self._watching, self._num_steps = ExitStack(), 0
        self._began_s = self._waited_s = 0.0
        self._thread = threading.get_ident()
        self.measured: Measured | None = None

    def after_update(self) -> None:
        """An update is done; after the last that is measured, say what was found."""
        self._num_steps += 1
        if self._num_steps == SETTLING:
            self._watching.enter_context(watched_by(self))
            self._thread = threading.get_ident()
            self._began_s = time.perf_counter()
        elif self._num_steps == SETTLING + MEASURED:
            finish(self._collectives.mesh.device)
            compute_s = (time.perf_counter() - self._began_s - self._waited_s) / MEASURED
            self._watching.close()
            self.measured = self._agreed(compute_s)
            if self._collectives.mesh.rank == 0:
                _log.info("%s", describe(self.measured, wires_for(self._blueprint)))

    def close(self) -> None:
        """Watch no more."""
        self._watching.close()

    def _agreed(self, compute_s: float) -> Measured:
        group = self._collectives.group(self._blueprint.units[0].row.summed_axes)
        mesh, rates = self._collectives.mesh, list[float]()
        # In its turn among the gathers, of which some may be under way.
        mesh.stream("parameters").run(lambda: rates.append(_bytes_per_s(group, mesh.device))).wait()
        own = torch.tensor([compute_s, *rates], dtype=torch.float64, device="cpu")
        every = self._collectives.all_ranks.exchange(own, "communication: auto").wait()
        return Measured(float(every[:, 0].max()), float(every[:, 1].min()))

    def span(self, what: str, name: str) -> AbstractContextManager[None]:
        """Add up what the training loop waits for."""
        is_waiting = what.startswith(WAIT) and threading.get_ident() == self._thread
        return self._waiting() if is_waiting else nullcontext()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        began_s = time.perf_counter()
        yield
        self._waited_s += time.perf_counter() - began_s

    def sent(self, key: TrafficKey, num_bytes: int) -> None:
        """Bytes are the plan's."""


def _bytes_per_s(group: Group, device: torch.device) -> float:
    """What this rank sends to the others of the group, all at once; the second of two times counts."""
    own = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device=device)
    whole, seconds = own.new_empty(PROBE_BYTES * group.size), 1.0
    for _ in range(2):
        began_s = time.perf_counter()
        group.all_gather(whole, own, "control", connections="parameters").wait()
        finish(device)
        seconds = time.perf_counter() - began_s
    return (group.size - 1) * PROBE_BYTES / seconds
