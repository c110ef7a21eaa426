"""The collectives: the only file that calls those of ``torch.distributed``. Every call is counted.

Over a gloo group a reduction is a direct exchange and a local sum in rank order: it moves half of what gloo's own
reduce-scatter moves, and its result does not depend on how a ring would have cut the tensor. An all-gather is a direct
exchange, too: as many bytes as gloo's own, without its flat copy of the whole. Between ranks of one node these bytes
need not pass the network (:mod:`partita.comm.neighbors`). NCCL has all of it natively.
"""

import pickle
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from partita.comm.board import Board
from partita.comm.control import ControlMessage
from partita.comm.exchange import NUM_AWAITED, PIECE_BYTES, Arriving, Exchange, Receive, Work
from partita.comm.introduction import Group, find_neighbors
from partita.comm.mesh import STREAMS, Mesh
from partita.comm.neighbors import Fetch, Offer
from partita.comm.watchdog import Watchdog
from partita.errors import PartitaError
from partita.memory import accelerator
from partita.plan.traffic import TrafficKey, TrafficMeter

# torch 2.13 renamed the single-tensor collectives; earlier versions know the former names only.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Handle:
    """A collective under way. :meth:`wait` returns when its result may be used (of an accelerator: by the current
    stream).
    """

    def __init__(self, works: Sequence[Work | None], explained: "Explained" = nullcontext) -> None:
        self._works, self._explained = works, explained

    def wait_for(self, seconds: float) -> bool:
        """Wait at most so long, for an :meth:`Collectives.exchange` only; whether it has ended, well or not."""
        for work in self._works:
            if isinstance(work, dist.Work):
                try:
                    work.wait(timedelta(seconds=seconds))
                except RuntimeError:
                    return work.is_completed()
        return True

    def wait(self) -> None:
        works, self._works = self._works, ()
        with self._explained():
            for work in works:
                if work is not None:
                    work.wait()


Explained = Callable[[], AbstractContextManager[None]]


class Collectives:
    """Collectives over the axes of a mesh. Tensors are flat and contiguous; part ``i`` belongs to rank ``i`` of the
    group.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.meter = mesh, TrafficMeter()
        self.ordered = accelerator.is_host(mesh.device)

    def introduce(self) -> None:
        """Find the neighbors of this rank in groups that are new, as ``communication.within_node`` says, which is the
        same on all ranks.
        """
        mesh = self.mesh
        if self.ordered and mesh.within_node != "network":
            for axes in mesh.axes:
                if axes not in mesh.neighbors:
                    exchange = partial(self.exchange_objects, axes=axes, call="partita.initialize")
                    group = Group(mesh.index(axes), exchange, STREAMS, mesh.timeout_s)
                    mesh.neighbors[axes] = find_neighbors(group, required=mesh.within_node == "memory")

    def all_gather(
        self, whole: Tensor, part: Tensor, axes: tuple[str, ...], purpose: str = "parameters", tag: int = 0
    ) -> Handle:
        """Start gathering every rank's ``part`` ``[n]`` into ``whole`` ``[group size * n]``.

        Ranks that gather under different tags wait for each other, where the same tag with other sizes would end them.
        """
        num = self.mesh.shape.group_size(axes)
        self._count("all_gather", axes, purpose, (num - 1) * part.nbytes)
        if self.ordered:
            rows = whole.view(num, -1)
            own = rows[self.mesh.index(axes)]
            with self._explained(self._name("all-gather", axes, purpose)):
                works: list[Work | None] = [self._exchange(rows, [part] * num, (axes, purpose), tag=tag)]
            if own.data_ptr() != part.data_ptr():  # beside the exchange, which reads `part` alone
                own.copy_(part)
        else:
            group = self.mesh.group(axes, purpose)
            works = [_all_gather_single(whole, part, group=group, async_op=True)]
        return Handle(works, partial(self._explained, self._name("all-gather", axes, purpose)))

    def _exchange(
        self,
        rooms: Sequence[Tensor] | Tensor,
        parts: Sequence[Tensor] | Tensor,
        over: tuple[tuple[str, ...], str],
        *,
        tag: int = 0,
        piece_bytes: int | None = None,
    ) -> Exchange:
        """Begin to send ``parts[i]`` to, and to receive in ``rooms[i]`` what comes from, every other rank ``i`` of the
        group ``over``, in pieces of so many bytes (None: at once).

        Receives are posted before sends: where a send is there before, gloo uses a network in one direction at a time.
        """
        axes, purpose = over
        num, own, group = self.mesh.shape.group_size(axes), self.mesh.index(axes), self.mesh.group(axes, purpose)
        neighbors, arriving, leaving = self.mesh.neighbors.get(axes, {}), dict[int, Arriving](), list[Work | None]()
        num_elements = parts[own].numel()
        piece = num_elements if piece_bytes is None else piece_bytes // parts[own].itemsize
        for source in ((own - distance) % num for distance in range(1, num)):
            room = rooms[source]
            if source in neighbors:
                process, line = neighbors[source].process, neighbors[source].lines[purpose]
                arriving[source] = Fetch(room, num_elements, process, line, tag)
            else:
                post = partial(dist.irecv, group=group, group_src=source, tag=tag)
                arriving[source] = Receive(post, room, num_elements, piece)
        for target in ((own + distance) % num for distance in range(1, num)):
            sent = parts[target]
            if target in neighbors:
                leaving.append(Offer(sent, neighbors[target].lines[purpose], tag))
            else:
                leaving += [dist.isend(part, group=group, group_dst=target, tag=tag) for part in sent.split(piece)]
        return Exchange([arriving[source] for source in sorted(arriving)], leaving, num_elements, piece)

    def reduce_scatter(
        self, out: Tensor, sent: Tensor, received: Tensor, axes: tuple[str, ...], *, accumulate: bool
    ) -> None:
        """Write the sum over the ranks, in rank order, of their ``sent`` ``[group size * n]`` into ``out`` ``[n]`` (or
        add it).

        ``out`` may be this rank's part of ``sent``; ``received`` is scratch memory of :meth:`received_elements`.
        """
        num, own = self.mesh.shape.group_size(axes), self.mesh.index(axes)
        self._count("reduce_scatter", axes, "gradients", (num - 1) * sent.nbytes // num)
        name = self._name("reduce-scatter", axes, "gradients")
        if self.ordered:
            outgoing, rooms = sent.view(num, -1), received.view(num - 1, -1)
            rows, over = [*rooms[:own], outgoing[own], *rooms[own:]], (axes, "gradients")
            with self._explained(name):
                for at, parts in self._exchange(rows, outgoing, over, piece_bytes=PIECE_BYTES).pieces():
                    target = out[at]
                    values = _sum(parts, outgoing[own][at], own, parts[0] if accumulate else target)
                    if values is not target:
                        land(values, target, accumulate=accumulate)
        else:
            group = self.mesh.group(axes, "gradients")
            work = _reduce_scatter_single(received, sent, group=group, async_op=True)
            Handle([work], partial(self._explained, name)).wait()
            land(received, out, accumulate=accumulate)

    def received_elements(self, sent: int, itemsize: int, axes: tuple[str, ...]) -> int:
        """Elements of scratch memory that a reduction of ``sent`` elements of ``itemsize`` bytes needs."""
        num = self.mesh.shape.group_size(axes)
        return (num - 1) * min(sent // num, NUM_AWAITED * PIECE_BYTES // itemsize) if self.ordered else sent // num

    def all_reduce(self, tensor: Tensor, axes: tuple[str, ...], purpose: str = "control") -> Tensor:
        """Sum ``tensor`` over the ranks, in place. For small or rare tensors: the order of the sum is the backend's."""
        num = self.mesh.shape.group_size(axes)
        if num > 1:
            self._count("all_reduce", axes, purpose, 2 * (num - 1) * tensor.nbytes // num)
            with self._explained(self._name("all-reduce", axes, purpose)):
                dist.all_reduce(tensor, group=self.mesh.group(axes, "gradients"))
        return tensor

    def exchange(self, message: Tensor, axes: tuple[str, ...], call: str) -> tuple[Tensor, Handle]:
        """Start an all-gather of a small host tensor ``[n]``: returns ``[group size, n]``, filled once the handle is
        waited for. Ranks that are at another ``call`` (its name, at most 40 letters) are told so, on all ranks.
        """
        num = self.mesh.shape.group_size(axes)
        every = message.new_empty((num, message.numel()))
        if num == 1:
            every[0] = message
            return every, Handle(())
        self._count("all_gather", axes, "control", (num - 1) * message.nbytes)

        def land(payloads: list[Tensor]) -> None:
            for row, payload in zip(every.view(torch.uint8), payloads, strict=True):
                row.copy_(payload)

        return every, self._control(call, message.view(torch.uint8), axes, land)

    def _control(
        self, call: str, payload: Tensor, axes: tuple[str, ...], land: Callable[[list[Tensor]], object]
    ) -> Handle:
        num, group = self.mesh.shape.group_size(axes), self.mesh.group(axes, "control")

        def gather(row: Tensor) -> tuple[Tensor, Work | None]:
            rows = row.new_empty((num, row.numel()))
            return rows, _all_gather_single(rows.view(-1), row, group=group, async_op=True)

        explained = partial(self._explained, self._name("exchange", axes, "control"))
        with explained():
            message = ControlMessage(call, payload, gather, land)
        return Handle([message.first, message], explained)

    def broadcast(self, tensors: Sequence[Tensor], axes: tuple[str, ...], purpose: str) -> None:
        """Overwrite ``tensors``, of any shape, strides and dtype, with those of the group's first rank."""
        num = self.mesh.shape.group_size(axes)
        if num == 1:
            return
        group = self.mesh.group(axes, "parameters")
        works, copies = [], [tensor.contiguous().resolve_conj().resolve_neg() for tensor in tensors]
        for tensor in copies:
            self._count("broadcast", axes, purpose, (num - 1) * tensor.nbytes if self.mesh.index(axes) == 0 else 0)
            sent = tensor.view(-1).view(torch.uint8)  # neither backend knows every dtype
            works.append(dist.broadcast(sent, group=group, group_src=0, async_op=True))
        for work in works:
            Handle([work], partial(self._explained, self._name("broadcast", axes, purpose))).wait()
        for tensor, copy in zip(tensors, copies, strict=True):
            if copy is not tensor:
                tensor.copy_(copy)

    def exchange_objects(self, value: object, axes: tuple[str, ...], call: str) -> list[Any]:
        """Every rank's ``value``, in rank order; ``call`` as in :meth:`exchange`. For rare, small Python values
        (reports, names in an error).
        """
        num = self.mesh.shape.group_size(axes)
        if num == 1:
            return [value]
        every: list[Any] = []
        payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        land = partial(_unpickle, every)
        self._control(call, payload, axes, land).wait()
        return every

    def board(self, axes: tuple[str, ...]) -> Board | None:
        """A new board for notes among the ranks of a group, if there are several; called on all of them."""
        num, topic = self.mesh.shape.group_size(axes), secrets.token_hex(8)
        return (
            Board(self.exchange_objects(topic, axes, "partita.initialize")[0], self.mesh.index(axes), num)
            if num > 1
            else None
        )

    def watchdog(self, axes: tuple[str, ...]) -> Watchdog | None:
        """What answers for this rank, if there are several; called on all of them."""
        num, topic = self.mesh.shape.group_size(axes), secrets.token_hex(8)
        if num == 1:
            return None
        return Watchdog(
            self.exchange_objects(topic, axes, "partita.initialize")[0], self.mesh.index(axes), num, self.mesh.order
        )

    def _count(self, collective: str, axes: tuple[str, ...], purpose: str, sent_bytes: int) -> None:
        self.mesh.order.operation = f"{collective} of {purpose}"
        self.meter.add(TrafficKey(collective, axes, purpose), sent_bytes)

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
            watchdog = self.mesh.watchdog
            raise PartitaError(
                f"{what} failed: another rank ended, or did not join within the time-out (communication.timeout_s, "
                f"{self.mesh.timeout_s:g} s). Backend: {error}" + (f"\n{watchdog.accounts()}" if watchdog else "")
            ) from error

    def _name(self, collective: str, axes: tuple[str, ...], purpose: str) -> str:
        return f"rank {self.mesh.rank}: {collective} of {purpose} over {','.join(axes)}"


def _unpickle(every: list[Any], payloads: list[Tensor]) -> None:
    every += [pickle.loads(bytes(payload.numpy())) for payload in payloads]


def land(values: Tensor, out: Tensor, *, accumulate: bool) -> None:
    """Write ``values`` into ``out``, which may be in another memory, or add them."""
    if accumulate:
        out.add_(values.to(out.device))
    else:
        out.copy_(values)


def _sum(incoming: list[Tensor], own: Tensor, place: int, out: Tensor) -> Tensor:
    """The sum from first to last of ``incoming`` with ``own`` put in at ``place``: in ``out``, or, of 16-bit tensors,
    in fp32. ``incoming[0]`` is overwritten.
    """
    scratch, parts = incoming[0], [*incoming[:place], own, *incoming[place:]]
    total = parts[0]
    if total.dtype.itemsize < 4:
        total = total.float()
        for part in parts[1:]:
            total.add_(part)
        return total
    for part in parts[1:-1]:
        total = torch.add(total, part, out=scratch)
    return torch.add(total, parts[-1], out=out)
