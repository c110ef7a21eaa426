"""A group: the ranks that differ from this one only along some axes, and what they do together, counted."""

import pickle
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from partita.comm.collective_log import Board
from partita.comm.control_message import ControlMessage, Explained
from partita.comm.mesh import Mesh
from partita.comm.transport import Transport, Work
from partita.comm.watchdog import Watchdog
from partita.errors import PartitaError
from partita.memory import accelerator, step_events
from partita.plan.scratch import received_elements
from partita.plan.traffic import TrafficKey, TrafficMeter

T = TypeVar("T")


class Handle:
    """A collective under way. :meth:`wait` returns when its result may be used (by the current stream)."""

    def __init__(self, work: Work, explained: Explained) -> None:
        self._work = work
        self._explained = explained

    def wait(self) -> None:
        with self._explained():
            self._work.wait()


class Sent(Handle):
    """A tensor on its way to another rank, which is held until it has left."""

    def __init__(self, work: Work, explained: Explained, tensor: Tensor) -> None:
        super().__init__(work, explained)
        self.tensor = tensor


class Group:
    """Collectives of the ranks along ``axes``: ``size`` of them, this one at ``index``. Tensors are flat and
    contiguous; part ``i`` belongs to rank ``i`` of the group. A group of one rank has the same calls.

    Args:
        axes: as :meth:`MeshShape.named` writes them.
        meter: counts what is sent.
    """

    def __init__(self, axes: tuple[str, ...], mesh: Mesh, meter: TrafficMeter) -> None:
        self.axes = axes
        self._mesh = mesh
        self._meter = meter
        self.size = mesh.shape.group_size(axes)
        self.index = mesh.index(axes)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The mesh's numbers of the ranks, in order."""
        return next(tuple(ranks) for ranks in self._mesh.shape.groups(self.axes) if self._mesh.rank in ranks)

    @property
    def transport(self) -> Transport:
        """The transport of the tensors. Raises PartitaError: the mesh is closed, or was never opened over these
        axes.
        """
        found = self._mesh.transports.get(self.axes)
        return self._mesh.transport(self.axes) if found is None else found

    @property
    def rare_purpose(self) -> str:
        """The purpose whose connections broadcasts use, in turn with its other messages."""
        return "parameters" if "parameters" in self._mesh.purposes(self.axes) else "gradients"

    # ------------------------------------------------------------------ flat tensors

    def all_gather(
        self, whole: Tensor, part: Tensor, purpose: str = "parameters", tag: int = 0, *, connections: str = ""
    ) -> Handle:
        """Start gathering every rank's ``part`` ``[n]`` into ``whole`` ``[size * n]``.

        Ranks that gather under different tags wait for each other, if the transport keeps tags apart, where the same
        tag with other sizes would end them. ``connections``: those of another purpose, in which this is in order.
        """
        self._count("all_gather", purpose, (self.size - 1) * part.nbytes)
        explained = partial(self._explained, f"all-gather of {purpose}")
        with explained():
            work = self.transport.all_gather(whole, part, connections or purpose, tag)
        return Handle(work, explained)

    def reduce_scatter(self, out: Tensor, sent: Tensor, received: Tensor, *, accumulate: bool) -> None:
        """Write the sum over the ranks, in rank order, of their ``sent`` ``[size * n]`` into ``out`` ``[n]`` (or add
        it).

        ``out`` may be this rank's part of ``sent``; ``received`` is scratch memory of :meth:`received_elements`.
        """
        self._count("reduce_scatter", "gradients", (self.size - 1) * sent.nbytes // self.size)
        with self._explained("reduce-scatter of gradients"):
            self.transport.reduce_scatter(out, sent, received, accumulate=accumulate)

    def received_elements(self, sent: int, itemsize: int) -> int:
        """Elements of scratch memory that a reduction of ``sent`` elements of ``itemsize`` bytes needs."""
        return received_elements(sent, itemsize, self.size, in_pieces=accelerator.is_host(self._mesh.device))

    def exchange_parts(self, received: Tensor, sent: Tensor) -> None:
        """Send part ``i`` of ``sent`` to, and write into part ``i`` of ``received`` what comes from, every rank ``i``.
        For codes of gradients, which whoever gets them adds up.
        """
        self._count("all_to_all", "gradients", (self.size - 1) * sent.nbytes // self.size)
        arriving, leaving = received.view(self.size, -1).unbind(), sent.view(self.size, -1).unbind()
        with self._explained("all-to-all of gradients"):
            self.transport.all_to_all(arriving, leaving, "gradients")

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` over the ranks, in place. For small or rare tensors: the order of the sum is the backend's."""
        if self.size == 1:
            return tensor
        self._count("all_reduce", "control", 2 * (self.size - 1) * tensor.nbytes // self.size)
        with self._explained("all-reduce of control"):
            self.transport.all_reduce(tensor)
        return tensor

    # ------------------------------------------------------------------ activations

    def sum(self, tensor: Tensor, purpose: str, connections: str = "activations") -> Tensor:
        """The sum of a tensor of any shape over the ranks, in rank order over gloo: the same bits on all of them."""
        if self.size == 1:
            return tensor
        tensor = tensor.contiguous()
        self._count("all_reduce", purpose, 2 * (self.size - 1) * tensor.nbytes // self.size)
        with self._explained(f"all-reduce of {purpose}"):
            return self.transport.sum(tensor, connections)

    def all_to_all(self, sent: Sequence[Tensor], shapes: Sequence[Sequence[int]], purpose: str) -> list[Tensor]:
        """Return what every rank sent to this one, in rank order, of the given ``shapes``; ``sent[i]`` goes to rank
        ``i``. Sizes are free where sender and receiver agree.
        """
        if self.size == 1:
            return list(sent)
        parts = [part.contiguous() for part in sent]
        received = [part.new_empty(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]
        self._count("all_to_all", purpose, sum(part.nbytes for part in parts) - parts[self.index].nbytes)
        with self._explained(f"all-to-all of {purpose}"):
            self.transport.all_to_all([part.view(-1) for part in received], [part.view(-1) for part in parts])
        return received

    def gather(self, part: Tensor, shapes: Sequence[Sequence[int]], purpose: str) -> list[Tensor]:
        """Every rank's ``part``, in rank order, of the given ``shapes``, which are known to all."""
        if self.size == 1:
            return [part]
        part = part.contiguous()
        received = [part if i == self.index else part.new_empty(tuple(shape)) for i, shape in enumerate(shapes)]
        self._count("all_gather", purpose, (self.size - 1) * part.nbytes)
        with self._explained(f"all-gather of {purpose}"):
            self.transport.all_to_all([row.view(-1) for row in received], [part.view(-1)] * self.size)
        return received

    def send(self, tensors: Sequence[Tensor], to: int, lane: str, purpose: str) -> Sequence[Handle]:
        """Begin to send tensors of any shape to one rank, which receives what comes on a lane
        (:data:`~partita.comm.transport.LANES`) in this order. They are held by who holds the handles.
        """
        flat = [tensor.contiguous().view(-1) for tensor in tensors]
        self._count("send", purpose, sum(tensor.nbytes for tensor in flat))
        explained = partial(self._explained, f"sending of {purpose}")
        with explained():
            return [Sent(self.transport.send(part, to, lane), explained, part) for part in flat if part.numel()]

    def receive(self, tensors: Sequence[Tensor], source: int, lane: str, purpose: str) -> Sequence[Handle]:
        """Begin to overwrite contiguous tensors with the next that a rank sends on a lane."""
        explained = partial(self._explained, f"receiving of {purpose}")
        with explained():
            flat = [tensor.view(-1) for tensor in tensors if tensor.numel()]
            return [Handle(self.transport.receive(part, source, lane), explained) for part in flat]

    def broadcast(self, tensors: Sequence[Tensor], purpose: str) -> None:
        """Overwrite ``tensors``, of any shape, strides and dtype, with those of the group's first rank."""
        if self.size == 1:
            return
        works, copies = [], [tensor.contiguous().resolve_conj().resolve_neg() for tensor in tensors]
        with self._explained(f"broadcast of {purpose}"):
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
        """Start an all-gather of a small host tensor ``[n]``; its ``wait`` returns ``[size, n]``. Ranks that are at
        another ``call`` (its name, at most 40 letters) are told so, on all ranks.
        """
        axes, ranks = self._controlling()
        self._count("all_gather", "control", (len(ranks) - 1) * message.nbytes, axes)
        shape = (self.size, message.numel())
        return self._send(call, message.view(torch.uint8), lambda rows: torch.cat(rows).view(message.dtype).view(shape))

    def exchange_objects(self, value: object, call: str) -> list[Any]:
        """Every rank's ``value``, in rank order; ``call`` as in :meth:`exchange`. For rare, small Python values
        (reports, names in an error).
        """
        if self.size == 1:
            return [value]
        payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        return self._send(call, payload, lambda rows: [pickle.loads(bytes(row.numpy())) for row in rows]).wait()

    def _send(self, call: str, payload: Tensor, read: Callable[[list[Tensor]], T]) -> ControlMessage[T]:
        explained = partial(self._explained, "exchange of control")
        if self.size == 1:
            return ControlMessage(call, payload, None, read, explained)
        axes, ranks = self._controlling()
        own = range(self.size) if axes == self.axes else [ranks.index(rank) for rank in self.ranks]

        def gather(row: Tensor) -> tuple[Tensor, Work]:
            rows = row.new_empty((len(ranks), row.numel()))
            return rows, self._mesh.transport(axes).gather_messages(rows, row)

        return ControlMessage(call, payload, gather, lambda rows: read([rows[place] for place in own]), explained)

    def _controlling(self) -> tuple[tuple[str, ...], Sequence[int]]:
        """Return the axes of the group whose connections control messages use, and its ranks: this group, or, where it
        has no such connections, a larger one, whose other ranks exchange at the same time.
        """
        if self.size == 1 or "control" in self._mesh.purposes(self.axes):
            return self.axes, range(self.size)
        axes = self._mesh.control_axes(self.axes)
        return axes, next(ranks for ranks in self._mesh.shape.groups(axes) if self._mesh.rank in ranks)

    # -------------------------------------------------------------- beside collectives

    def board(self) -> Board | None:
        """A new board for notes among the ranks, if there are several and they have a store; called on all of them."""
        topic = self._agreed_topic()
        return Board(topic, self.index, self.size) if self._has_notes else None

    def watchdog(self) -> Watchdog | None:
        """Return a watchdog that answers the questions of other ranks; called on all of them."""
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
    def _explained(self, what: str) -> Iterator[None]:
        """Name what the backend failed at (gloo does so when it is waited for, and also at once where a peer is gone),
        and tell what every rank is doing.
        """
        try:
            yield
        except PartitaError:  # says what it is
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
