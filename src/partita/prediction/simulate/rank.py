"""Training steps of the real engine as one rank, on tensors without values."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from partita.comm.mesh import Mesh
from partita.comm.simulated import Requests, SimulatedRanks
from partita.config.resolve import Resolved
from partita.engine.build import UserArguments
from partita.engine.engine import Engine
from partita.errors import PartitaError
from partita.layout.state_bytes import gradient_bytes_in_place
from partita.layout.traffic import StepShape, step_traffic
from partita.memory import accelerator
from partita.memory.ledger import MemoryReport
from partita.memory.step_events import Watcher, watched_by
from partita.prediction.simulate.live_bytes import LiveBytes
from partita.prediction.simulate.roles import Role
from partita.prediction.trace.meta_ops import without_values
from partita.table.residence import Tier
from partita.table.traffic import TrafficKey, TrafficReport

LossFn = Callable[[Any, Any], Tensor] | None


@dataclass(frozen=True)
class SimulatedModel:
    """The training to simulate.

    ``build()`` makes the model, ``batch(samples)`` a micro-batch, both on the ``meta`` device. ``loss_fn`` is as for
    :func:`partita.initialize`.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss_fn: LossFn = None


@dataclass(frozen=True)
class Collective:
    """One collective call of a rank."""

    key: TrafficKey
    sent_bytes: int


@dataclass(frozen=True)
class RankReport:
    """The memory and the traffic of one rank.

    ``memory``: the ledger's report after a step. ``activation_bytes``: peak device memory of autograd and of the
    model's operators in a step, without memory in the ledger. ``traffic``: that of a step; ``collectives``: its calls
    in order. ``planned_bytes`` and ``planned_traffic``: the closed forms for the model states (:mod:`partita.layout`),
    without the activations that are exchanged along axes other than data.
    """

    role: Role
    memory: MemoryReport
    activation_bytes: int
    traffic: TrafficReport
    collectives: tuple[Collective, ...]
    planned_bytes: dict[tuple[str, str], int]
    planned_traffic: TrafficReport

    @property
    def bytes_by_tier(self) -> dict[Tier, int]:
        """Peak bytes in use, by tier."""
        found = {tier: sum(num for (_, name), num in self.memory.peak.items() if name == tier.value) for tier in Tier}
        found[Tier.DEVICE] += self.activation_bytes
        return {tier: num for tier, num in found.items() if num}


class _CollectiveRecorder(Watcher):
    """Watcher that records the collectives."""

    def __init__(self) -> None:
        self.calls = list[Collective]()

    def span(self, what: str, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def sent(self, key: TrafficKey, num_bytes: int) -> None:
        self.calls.append(Collective(key, num_bytes))


def simulate_rank(
    simulated_model: SimulatedModel, resolved: Resolved, role: Role, kind: str, requests: Requests
) -> RankReport:
    """Build the engine as this rank on devices of type ``kind`` (``cpu``, ``cuda``), and train two steps.

    In the first step, optimizers allocate their states, and the order of all-gathers is recorded. The second step is
    equal to all later ones, and is reported.

    Args:
        requests: the requests of the stages simulated before (:class:`~partita.comm.simulated.SimulatedRanks`).

    Raises:
        PartitaError: the engine raises it, or the model reads the values of tensors.
    """
    with accelerator.simulating(kind), _ignore_warnings(), _explain_value_reads():
        with accelerator.SIMULATED:
            model = simulated_model.build()
        connections = SimulatedRanks(role.rank, resolved.mesh.num_ranks, requests)
        mesh = Mesh(resolved.mesh, accelerator.SIMULATED, connections, for_engines=True)
        arguments = UserArguments(None, None, simulated_model.loss_fn, None)
        with without_values(), Engine(model, resolved, mesh, arguments) as engine:
            for group in engine.optimizer.param_groups:  # PyTorch's fused kernels need memory
                group.update(fused=False, foreach=False)
            # The second step, which prefetches, may gather in another order than the first. Between accelerators, an
            # order is new until a step has repeated it.
            for _ in range(1 if accelerator.is_host(mesh.device) else 2):
                _train(engine, simulated_model)
            recorder, before = _CollectiveRecorder(), engine.traffic_report()
            with watched_by(recorder), LiveBytes() as live:
                _train(engine, simulated_model)
            return _report(engine, role, live.peak, before, recorder.calls)


def _train(engine: Engine, simulated_model: SimulatedModel) -> None:
    batch = engine.blueprint.resolved.batch
    with accelerator.SIMULATED:
        batches = [simulated_model.batch(batch.micro) for _ in range(batch.accumulate)]
    engine.train().train_batch(batches)


def _report(engine: Engine, role: Role, live_bytes: int, before: TrafficReport, calls: list[Collective]) -> RankReport:
    resolved = engine.blueprint.resolved
    num_chunks, syncs = resolved.config.parallel.num_chunks, accelerator.is_host(engine.mesh.device)
    shape = StepShape(resolved.batch.accumulate, returns_loss=True, syncs_each_micro_batch=syncs, chunks=num_chunks)
    return RankReport(
        role,
        engine.memory_report(),
        max(live_bytes - gradient_bytes_in_place(engine.units, role.rank), 0),  # these are also in the ledger
        engine.traffic_report().since(before),
        tuple(calls),
        engine.planned_bytes,
        step_traffic(engine.units, shape),
    )


@contextmanager
def _ignore_warnings() -> Iterator[None]:
    """Suppress warnings, which do not apply to a simulated run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _explain_value_reads() -> Iterator[None]:
    """Raise PartitaError if the model reads a tensor's values."""
    try:
        yield
    except (NotImplementedError, RuntimeError) as error:
        if isinstance(error, PartitaError) or "meta" not in str(error).lower():
            raise
        raise PartitaError(
            "simulate: the model's forward reads the values of a tensor (.item(), a branch on a tensor, a shape that "
            f"depends on data), but simulated tensors have none: {str(error).partition(chr(10))[0]}"
        ) from error
