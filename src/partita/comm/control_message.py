"""Control messages: small ones, of any size, that say what they are about. Ranks that are at different calls of the
engine are told so, where messages of different sizes would end the process in the backend.
"""

import struct
from collections.abc import Callable

import torch
from torch import Tensor

from partita.comm.exchange import Work
from partita.errors import PartitaError

# What precedes a message: the call that it belongs to, as text, and its bytes.
HEAD = struct.Struct("<40sq")
# Of every rank's first message; what does not fit follows in a second one.
ROW_BYTES = 512
ROOM_BYTES = ROW_BYTES - HEAD.size

Gather = Callable[[Tensor], tuple[Tensor, Work | None]]


class ControlMessage:
    """A message of every rank, under way.

    Args:
        call: what this rank is doing, at most 40 letters; the same on all ranks.
        payload: of this rank, bytes ``[n]``; ``n`` may differ between the ranks unless ``land`` wants it the same.
        gather: begins to gather a row of bytes of every rank, ``[m]``, as ``[ranks, m]``.
        land: takes every rank's bytes when they are there.
    """

    def __init__(self, call: str, payload: Tensor, gather: Gather, land: Callable[[list[Tensor]], object]) -> None:
        self._payload, self._gather, self._land = payload, gather, land
        row = torch.zeros(ROW_BYTES, dtype=torch.uint8, device="cpu")
        head = HEAD.pack(call.encode()[:40], payload.numel())
        row[: HEAD.size] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        row[HEAD.size :][: payload.numel()] = payload[:ROOM_BYTES]
        self._rows, self.first = gather(row)

    def wait(self) -> None:
        """Until all messages are there.

        Raises:
            PartitaError: the ranks are at different calls.
        """
        if self.first is not None:
            self.first.wait()
        heads = [HEAD.unpack(bytes(row[: HEAD.size].tolist())) for row in self._rows]
        calls, sizes = [head[0].rstrip(b"\0").decode() for head in heads], [head[1] for head in heads]
        if len(set(calls)) > 1:
            at = "; ".join(f"rank {rank} is at {call}" for rank, call in enumerate(calls))
            raise PartitaError(
                f"the ranks are at different calls: {at}. Call the engine's methods on every rank, in the same order"
            )
        payloads = [row[HEAD.size :][:size] for row, size in zip(self._rows, sizes, strict=True)]
        if max(sizes) > ROOM_BYTES:
            rest = torch.zeros(max(sizes) - ROOM_BYTES, dtype=torch.uint8, device="cpu")
            if self._payload.numel() > ROOM_BYTES:
                rest[: self._payload.numel() - ROOM_BYTES] = self._payload[ROOM_BYTES:]
            rests, work = self._gather(rest)
            if work is not None:
                work.wait()
            payloads = [
                torch.cat([first, more[: max(0, size - ROOM_BYTES)]])
                for first, more, size in zip(payloads, rests, sizes, strict=True)
            ]
        self._land(payloads)
