"""Groups: collectives among the ranks that differ from this one only along some axes, with counters of sent bytes."""

import pickle
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from partita.comm.collective_log import Board
from partita.comm.control_message import ControlMessage, ErrorContext
from partita.comm.mesh import Mesh
from partita.comm.transport import Transport, Work
from partita.comm.watchdog import Watchdog
from partita.errors import PartitaError
from partita.memory import accelerator, step_events
from partita.memory.streams import record
from partita.table.scratch import received_elements
from partita.table.traffic import TrafficKey, TrafficMeter

T = TypeVar("T")
# Seconds between two looks at the accelerator, and at the other ranks, while this rank waits for its accelerator.
POLL_S, LOOK_S = 1e-4, 1.0


class Handle:
    """A collective in flight. :meth:`wait` returns when the current stream may use its result."""

    def __init__(self, work: Work, error_context: ErrorContext) -> None:
        self._work = work
        self._error_context = error_context

    def wait(self) -> None:
        with self._error_context():
            self._work.wait()


class PendingSend(Handle):
    """A send in flight. It keeps the tensor alive until the send has completed."""

    def __init__(self, work: Work, error_context: ErrorContext, tensor: Tensor) -> None:
        super().__init__(work, error_context)
        self.tensor = tensor


class Group:
    """Collectives among the ``size`` ranks along ``axes``; this rank has position ``index``. Tensors are flat and
    contiguous; shard ``i`` belongs to rank ``i`` of the group. A group of one rank has the same calls.

    Args:
        axes: names of the axes, as :meth:`MeshShape.named` returns them.
        meter: counts the sent bytes.
    """

    def __init__(self, axes: tuple[str, ...], mesh: Mesh, meter: TrafficMeter) -> None:
        self.axes = axes
        self._mesh = mesh
        self._meter = meter
        self.size = mesh.shape.group_size(axes)
        self.index = mesh.index(axes)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the group, in order."""
        return next(tuple(ranks) for ranks in self._mesh.shape.groups(self.axes) if self._mesh.rank in ranks)

    @property
    def transport(self) -> Transport:
        """The transport over these axes. Raises PartitaError: the mesh is closed, or was never opened over them."""
        found = self._mesh.transports.get(self.axes)
        return self._mesh.transport(self.axes) if found is None else found

    @property
    def rare_purpose(self) -> str:
        """The purpose whose connections broadcasts use, in order with its other messages."""
        return "parameters" if "parameters" in self._mesh.purposes(self.axes) else "gradients"

    # ------------------------------------------------------------------ flat tensors

    def all_gather(
        self, whole: Tensor, part: Tensor, purpose: str = "parameters", tag: int = 0, *, connections: str = ""
    ) -> Handle:
        """Start an all-gather of every rank's ``part`` ``[n]`` into ``whole`` ``[size * n]``.

        Args:
            tag: a number that must be equal on all ranks. If the transport matches tags, ranks with different tags wait
                for each other; without tags, different sizes would abort the processes.
            connections: the purpose whose connections are used, and with whose messages this one is in order; default:
                ``purpose``.
        """
        self._count("all_gather", purpose, (self.size - 1) * part.nbytes)
        error_context = partial(self._error_context, f"all-gather of {purpose}")
        with error_context():
            work = self.transport.all_gather(whole, part, connections or purpose, tag)
        return Handle(work, error_context)

    def reduce_scatter(self, out: Tensor, sent: Tensor, received: Tensor, *, accumulate: bool) -> None:
        """Reduce-scatter ``sent`` ``[size * n]`` into ``out`` ``[n]``, summing in rank order.

        Args:
            out: may be this rank's shard of ``sent``.
            received: scratch memory of :meth:`received_elements` elements.
            accumulate: add to ``out`` instead of overwriting it.
        """
        self._count("reduce_scatter", "gradients", (self.size - 1) * sent.nbytes // self.size)
        with self._error_context("reduce-scatter of gradients"):
            self.transport.reduce_scatter(out, sent, received, accumulate=accumulate)

    def received_elements(self, sent: int, itemsize: int) -> int:
        """Return the number of scratch elements for a reduce-scatter of ``sent`` elements of ``itemsize`` bytes."""
        return received_elements(sent, itemsize, self.size, in_pieces=accelerator.is_host(self._mesh.device))

    def all_to_all_single(self, received: Tensor, sent: Tensor) -> None:
        """All-to-all of equal chunks: send chunk ``i`` of ``sent`` to rank ``i``, and receive chunk ``i`` of
        ``received`` from it. Used for quantized gradients, which the receiver decodes and sums.
        """
        self._count("all_to_all", "gradients", (self.size - 1) * sent.nbytes // self.size)
        arriving, leaving = received.view(self.size, -1).unbind(), sent.view(self.size, -1).unbind()
        with self._error_context("all-to-all of gradients"):
            self.transport.all_to_all(arriving, leaving, "gradients")

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` over the ranks, in place, in the backend's order. For small or rare tensors."""
        if self.size == 1:
            return tensor
        self._count("all_reduce", "control", 2 * (self.size - 1) * tensor.nbytes // self.size)
        with self._error_context("all-reduce of control"):
            self.transport.all_reduce(tensor)
        return tensor

    # ------------------------------------------------------------------ activations

    def sum(self, tensor: Tensor, purpose: str, connections: str = "activations") -> Tensor:
        """Return the sum of a tensor of any shape over the ranks, with the same bits on all of them. Over gloo it is
        summed in rank order.
        """
        if self.size == 1:
            return tensor
        tensor = tensor.contiguous()
        self._count("all_reduce", purpose, 2 * (self.size - 1) * tensor.nbytes // self.size)
        with self._error_context(f"all-reduce of {purpose}"):
            return self.transport.sum(tensor, connections)

    def all_to_all(
        self, sent: Sequence[Tensor], shapes: Sequence[Sequence[int]], purpose: str, connections: str = "activations"
    ) -> list[Tensor]:
        """Send ``sent[i]`` to rank ``i``, and return the received tensors in rank order.

        Args:
            shapes: shapes of the received tensors. They may differ, as long as sender and receiver agree.
            connections: the purpose whose connections are used, and with whose messages these are in order.
        """
        if self.size == 1:
            return list(sent)
        parts = [part.contiguous() for part in sent]
        received = [part.new_empty(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]
        self._count("all_to_all", purpose, sum(part.nbytes for part in parts) - parts[self.index].nbytes)
        with self._error_context(f"all-to-all of {purpose}"):
            self.transport.all_to_all([p.view(-1) for p in received], [p.view(-1) for p in parts], connections)
        return received

    def gather(self, part: Tensor, shapes: Sequence[Sequence[int]], purpose: str) -> list[Tensor]:
        """Return every rank's ``part``, in rank order.

        Args:
            shapes: the shape of each rank's part, in rank order; the same list on all ranks.
        """
        if self.size == 1:
            return [part]
        part = part.contiguous()
        received = [part if i == self.index else part.new_empty(tuple(shape)) for i, shape in enumerate(shapes)]
        self._count("all_gather", purpose, (self.size - 1) * part.nbytes)
        with self._error_context(f"all-gather of {purpose}"):
            self.transport.all_to_all([row.view(-1) for row in received], [part.view(-1)] * self.size)
        return received

    def send(self, tensors: Sequence[Tensor], to: int, lane: str, purpose: str) -> Sequence[Handle]:
        """Start sending tensors of any shape to one rank, which receives the tensors of a lane
        (:data:`~partita.comm.transport.LANES`) in order. The handles keep the tensors alive.
        """
        flat = [tensor.contiguous().view(-1) for tensor in tensors]
        self._count("send", purpose, sum(tensor.nbytes for tensor in flat))
        error_context = partial(self._error_context, f"sending of {purpose}")
        with error_context():
            return [
                PendingSend(self.transport.send(part, to, lane), error_context, part) for part in flat if part.numel()
            ]

    def receive(self, tensors: Sequence[Tensor], source: int, lane: str, purpose: str) -> Sequence[Handle]:
        """Start receiving the next tensors that a rank sends on a lane into contiguous ``tensors``."""
        error_context = partial(self._error_context, f"receiving of {purpose}")
        with error_context():
            flat = [tensor.view(-1) for tensor in tensors if tensor.numel()]
            return [Handle(self.transport.receive(part, source, lane), error_context) for part in flat]

    def broadcast(self, tensors: Sequence[Tensor], purpose: str) -> None:
        """Broadcast ``tensors``, of any shape, strides and dtype, from the group's first rank."""
        if self.size == 1:
            return
        works, copies = [], [tensor.contiguous().resolve_conj().resolve_neg() for tensor in tensors]
        with self._error_context(f"broadcast of {purpose}"):
            for tensor in copies:
                self._count("broadcast", purpose, (self.size - 1) * tensor.nbytes if self.index == 0 else 0)
                sent = tensor.view(-1).view(torch.uint8)  # no backend knows every dtype
                works.append(self.transport.broadcast(sent))
            for work in works:
                work.wait()
        for tensor, copy in zip(tensors, copies, strict=True):
            if copy is not tensor:
                tensor.copy_(copy)

    # -------------------------------------------------------------- control messages

    def exchange(self, message: Tensor, call: str) -> ControlMessage[Tensor]:
        """Start an all-gather of a small host tensor ``[n]``; its ``wait`` returns ``[size, n]``, or raises on all
        ranks if they are at different calls.

        Args:
            call: the name of the current call, at most 40 letters.
        """
        axes, ranks = self._controlling()
        self._count("all_gather", "control", (len(ranks) - 1) * message.nbytes, axes)
        shape = (self.size, message.numel())
        return self._send(call, message.view(torch.uint8), lambda rows: torch.cat(rows).view(message.dtype).view(shape))

    def exchange_objects(self, value: object, call: str) -> list[Any]:
        """All-gather a Python value: return every rank's ``value``, in rank order. For rare, small values (reports,
        names in an error). ``call`` as in :meth:`exchange`.
        """
        if self.size == 1:
            return [value]
        payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        return self._send(call, payload, lambda rows: [pickle.loads(bytes(row.numpy())) for row in rows]).wait()

    def broadcast_object(self, value: object, call: str) -> Any:
        """Return the first rank's Python value, pickled, on every rank, over the connections for control messages.
        ``call`` as in :meth:`exchange`.

        Raises:
            PartitaError: on all ranks: the value cannot be pickled.
        """
        payload, problem = b"", ""
        if self.index == 0:
            try:
                payload = pickle.dumps(value)
            except Exception as error:  # of any class: pickle calls the value's own methods
                problem = f": {type(error).__name__}: {error}"
        length = torch.tensor([-1 if problem else len(payload)], device="cpu")
        num_bytes = int(self.exchange(length, call).wait()[0, 0])
        if num_bytes < 0:
            raise PartitaError(f"{call}: rank 0's value cannot be pickled{problem}; pass a value that can be")
        message = torch.frombuffer(bytearray(payload or num_bytes), dtype=torch.uint8)
        if self.size > 1:
            self._count("broadcast", "control", (self.size - 1) * len(payload))
            with self._error_context("broadcast of a value"):
                self.transport.broadcast_message(message).wait()
        return pickle.loads(message.numpy().data)

    def _send(self, call: str, payload: Tensor, read: Callable[[list[Tensor]], T]) -> ControlMessage[T]:
        error_context = partial(self._error_context, "exchange of control")
        if self.size == 1:
            return ControlMessage(call, payload, None, read, error_context)
        axes, ranks = self._controlling()
        own = range(self.size) if axes == self.axes else [ranks.index(rank) for rank in self.ranks]

        def gather(row: Tensor) -> tuple[Tensor, Work]:
            rows = row.new_empty((len(ranks), row.numel()))
            return rows, self._mesh.transport(axes).gather_messages(rows, row)

        return ControlMessage(call, payload, gather, lambda rows: read([rows[place] for place in own]), error_context)

    def _controlling(self) -> tuple[tuple[str, ...], Sequence[int]]:
        """Return the axes of the group that carries this group's control messages, and its ranks. It is this group, or
        a larger one if this one has no control connections; all ranks of the larger one then exchange at the same time.
        """
        if self.size == 1 or "control" in self._mesh.purposes(self.axes):
            return self.axes, range(self.size)
        axes = self._mesh.control_axes(self.axes)
        return axes, next(ranks for ranks in self._mesh.shape.groups(axes) if self._mesh.rank in ranks)

    # -------------------------------------------------------------- outside of collectives

    def read(self, tensor: Tensor, call: str) -> Tensor:
        """Return a copy of a tensor on the host, like :func:`partita.memory.accelerator.read`, for the current call.

        Raises:
            PartitaError: a rank has ended with an error, so this rank's accelerator may wait for it forever.
        """
        computed, watchdog, looked = record(tensor.device), self._mesh.watchdog, time.monotonic()
        while watchdog is not None and computed.is_behind():
            time.sleep(POLL_S)
            if time.monotonic() - looked > LOOK_S:
                looked = time.monotonic()
                if watchdog.has_ending():
                    with self._error_context(call):
                        raise RuntimeError("the accelerator has not completed earlier collectives")
        return accelerator.read(tensor)

    def board(self) -> Board | None:
        """Return a new board for notes among the ranks; None for one rank, or without a store. Collective."""
        topic = self._agreed_topic()
        return Board(topic, self.index, self.size) if self._has_notes else None

    def watchdog(self) -> Watchdog | None:
        """Start a watchdog, which answers the other ranks' questions about this one. Collective."""
        topic = self._agreed_topic()
        return Watchdog(topic, self.index, self.size, self._mesh.log) if self._has_notes else None

    @property
    def _has_notes(self) -> bool:
        return self.size > 1 and self._mesh.has_store

    def _agreed_topic(self) -> str:
        return str(self.exchange_objects(secrets.token_hex(8), "partita.initialize")[0])

    def _count(self, collective: str, purpose: str, sent_bytes: int, axes: tuple[str, ...] | None = None) -> None:
        if self.size > 1:
            self._mesh.log.operation = f"{collective} of {purpose}"
            key = TrafficKey(collective, self.axes if axes is None else axes, purpose)
            self._meter.add(key, sent_bytes)
            step_events.sent(key, sent_bytes)

    @contextmanager
    def _error_context(self, what: str) -> Iterator[None]:
        """Convert the backend's errors into a PartitaError that names the operation and what every rank is doing. gloo
        raises in ``wait``, and at once if a peer has ended.
        """
        try:
            yield
        except PartitaError:  # needs no explanation
            raise
        except RuntimeError as error:
            watchdog = self._mesh.watchdog
            ranks = f"\n{watchdog.describe_ranks()}" if watchdog else ""
            cause = "; ".join(watchdog.endings) if watchdog else ""
            if not cause:
                cause = (
                    "another rank ended, or did not join within the time-out (communication.timeout_s, "
                    f"{self._mesh.timeout_s:g} s)"
                )
            raise PartitaError(
                f"rank {self._mesh.rank}: {what} over {','.join(self.axes)} failed: {cause}. Backend: {error}{ranks}"
            ) from error
