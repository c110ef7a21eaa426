"""Control messages: all-gathers of a few bytes, each labelled with the call that it belongs to. Ranks that are at
different calls of the engine get an error, where a backend would abort the process because of different sizes.
"""

import struct
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from partita.comm.transport import Work
from partita.errors import PartitaError
from partita.memory.step_events import span

# The header of a message: the name of the call, and the size of the payload in bytes.
HEADER = struct.Struct("<40sq")
# Size of every rank's first message; the rest of a larger payload follows in a second one.
MESSAGE_BYTES = 512
PAYLOAD_BYTES = MESSAGE_BYTES - HEADER.size

T = TypeVar("T")
Gather = Callable[[Tensor], tuple[Tensor, Work]]
ErrorContext = Callable[[], AbstractContextManager[None]]


class ControlMessage(Generic[T]):
    """An asynchronous all-gather of one message per rank.

    Args:
        call: the name of this rank's call, at most 40 letters; the same on all ranks.
        payload: this rank's bytes ``[n]``; ``n`` may differ between ranks unless ``read`` requires equal sizes.
        gather: starts an all-gather of a row of bytes, ``[m]`` to ``[ranks, m]``; None: there is one rank.
        read: converts every rank's bytes into the result of :meth:`wait`.
        error_context: a context manager that adds an explanation to errors of the backend.
    """

    def __init__(
        self,
        call: str,
        payload: Tensor,
        gather: Gather | None,
        read: Callable[[list[Tensor]], T],
        error_context: ErrorContext,
    ) -> None:
        self._payload = payload
        self._gather = gather
        self._read = read
        self._error_context = error_context
        self._call = call
        if gather is not None:
            row = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8, device="cpu")
            head = HEADER.pack(call.encode()[:40], payload.numel())
            row[: HEADER.size] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
            row[HEADER.size :][: payload.numel()] = payload[:PAYLOAD_BYTES]
            with error_context():
                self._rows, self._first = gather(row)

    def wait_for(self, seconds: float) -> bool:
        """Wait at most ``seconds``. Return True if the first message has arrived or failed."""
        if self._gather is not None and isinstance(self._first, dist.Work):
            try:
                self._first.wait(timedelta(seconds=seconds))
            except RuntimeError:
                return self._first.is_completed()
        return True

    def wait(self) -> T:
        """Return what all ranks sent; called once.

        Raises:
            PartitaError: the ranks are at different calls, or one of them does not send in time.
        """
        with self._error_context(), span("wait for ranks", self._call):
            return self._read([self._payload] if self._gather is None else self._payloads(self._gather))

    def _payloads(self, gather: Gather) -> list[Tensor]:
        self._first.wait()
        heads = [HEADER.unpack_from(row) for row in self._rows.numpy()]
        calls, sizes = [head[0].rstrip(b"\0").decode() for head in heads], [head[1] for head in heads]
        if len(set(calls)) > 1:
            at = "; ".join(f"rank {rank} is at {call}" for rank, call in enumerate(calls))
            raise PartitaError(
                f"the ranks are at different calls: {at}. Call the engine's methods on every rank, in the same order"
            )
        rows = self._rows[:, HEADER.size :][:, : max(sizes)].unbind()
        payloads = [row if size >= len(row) else row[:size] for row, size in zip(rows, sizes, strict=True)]
        if max(sizes) > PAYLOAD_BYTES:
            remainder = torch.zeros(max(sizes) - PAYLOAD_BYTES, dtype=torch.uint8, device="cpu")
            if self._payload.numel() > PAYLOAD_BYTES:
                remainder[: self._payload.numel() - PAYLOAD_BYTES] = self._payload[PAYLOAD_BYTES:]
            remainders, second = gather(remainder)
            second.wait()
            payloads = [
                torch.cat([first, more[: max(0, size - PAYLOAD_BYTES)]])
                for first, more, size in zip(payloads, remainders, sizes, strict=True)
            ]
        return payloads
