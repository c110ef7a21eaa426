"""Direct reads of the memory of another rank on the node (``process_vm_readv``). The kernel copies once, while a socket
needs two copies and a protocol.

Node peers announce over a Unix socket where their memory is, and when they have read it. A wait on the socket ends when
the message arrives, the other process ends, or the time-out expires.
"""

import contextlib
import ctypes
import functools
import os
import socket
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from partita.comm.node.forks import keep_from_children
from partita.comm.node.ptrace_permission import grant, revoke

# Kind of message, tag of the exchange, address and size of the memory.
MESSAGE = struct.Struct("<qqqq")
OFFERED, READ = 0, 1


@functools.cache
def system() -> ctypes.CDLL:
    """The C library."""
    return ctypes.CDLL(None, use_errno=True)


class _Range(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


def read_memory(process: int, address: int, into: Tensor) -> None:
    """Fill a contiguous host tensor from the memory of another process.

    Raises:
        OSError: permission denied, or the process has ended.
    """
    call = getattr(system(), "process_vm_readv", None)
    if call is None:
        raise OSError(0, "this system has no process_vm_readv")
    call.restype = ctypes.c_ssize_t
    done = 0
    while done < into.nbytes:
        here = _Range(into.data_ptr() + done, into.nbytes - done)
        there = _Range(address + done, into.nbytes - done)
        one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
        moved = call(ctypes.c_int(process), ctypes.byref(here), one, ctypes.byref(there), one, none)
        if moved <= 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        done += moved


class Channel:
    """Messages to and from one peer for one purpose. A wait takes at most ``timeout_s``. Several threads may wait for
    different messages.

    Sending never blocks: two ranks that start many exchanges before they finish the first one would otherwise wait for
    each other. If the socket is full, a thread sends the queued messages in order, and ends after the last one.
    """

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        connection.settimeout(timeout_s)  # this also makes the descriptor non-blocking, as `send` requires
        self._socket = connection
        keep_from_children(connection.fileno())  # a child would keep the connection open after this process has ended
        self._received: dict[tuple[int, int], deque[tuple[int, int]]] = defaultdict(deque)
        self._listening = False  # one thread receives for all
        self._changed = threading.Condition()
        self._unsent = deque[bytes]()
        self._sending = threading.Lock()
        self._sender: threading.Thread | None = None  # runs while there are unsent messages
        self._failure: OSError | None = None  # of that thread

    def send(self, kind: int, tag: int, address: int = 0, num_bytes: int = 0) -> None:
        """Send a message, or queue it where the socket is full.

        Raises:
            RuntimeError: the peer has ended, or has not received an earlier message in time.
        """
        message = MESSAGE.pack(kind, tag, address, num_bytes)
        try:
            with self._sending:
                if self._failure is not None:
                    raise self._failure
                if self._sender is None:
                    with contextlib.suppress(BlockingIOError):
                        message = message[os.write(self._socket.fileno(), message) :]
                if message:
                    self._unsent.append(message)
                    if self._sender is None:
                        self._sender = threading.Thread(target=self._send_queued, name="partita sender", daemon=True)
                        self._sender.start()
        except OSError as error:
            raise RuntimeError(f"sending to a rank of this node: {error}") from error

    def _send_queued(self) -> None:
        """Send the queued messages, each as soon as the socket has space for it."""
        while True:
            with self._sending:
                if not self._unsent:
                    self._sender = None
                    return
                message = self._unsent.popleft()
            try:
                self._socket.sendall(message)
            except OSError as error:
                with self._sending:
                    self._failure = error
                    self._sender = None
                    self._unsent.clear()
                return

    def receive(self, kind: int, tag: int) -> tuple[int, int]:
        """Wait for a message of this kind and tag, and store others for later calls.

        Raises:
            RuntimeError: the peer has ended, or does not send it in time.
        """
        with self._changed:
            while not self._received[kind, tag]:
                if self._listening:
                    self._changed.wait()
                else:
                    self._listen()
            return self._received[kind, tag].popleft()

    def _listen(self) -> None:
        """Receive one message, with the lock released."""
        self._listening = True
        self._changed.release()
        try:
            kind, tag, address, num_bytes = MESSAGE.unpack(receive_bytes(self._socket, MESSAGE.size))
        except OSError as error:
            raise RuntimeError(f"waiting for a rank of this node: {error}") from error
        finally:
            self._changed.acquire()
            self._listening = False
            self._changed.notify_all()
        self._received[kind, tag].append((address, num_bytes))

    def close(self) -> None:
        with contextlib.suppress(OSError):  # wakes threads that wait for a message
            self._socket.shutdown(socket.SHUT_RDWR)
        if (sender := self._sender) is not None:
            sender.join()
        self._socket.close()


def receive_bytes(connection: socket.socket, num_bytes: int) -> bytes:
    """Receive exactly ``num_bytes``.

    Raises:
        OSError: the other end is closed, or the time-out expired.
    """
    content = b""
    while len(content) < num_bytes:
        more = connection.recv(num_bytes - len(content))
        if not more:
            raise ConnectionError("its process has ended")
        content += more
    return content


@dataclass(frozen=True)
class NodePeer:
    """A rank whose memory this one can read, and that can read this one's; ``channels`` by purpose."""

    process: int
    channels: Mapping[str, Channel]

    def __post_init__(self) -> None:
        grant([self.process])

    def close(self) -> None:
        """Close the channels and revoke the peer's permission to read. Called once."""
        for channel in self.channels.values():
            channel.close()
        revoke([self.process])


class Offer:
    """Memory that a peer reads. It must not change until :meth:`wait` returns."""

    def __init__(self, values: Tensor, channel: Channel, tag: int) -> None:
        self._values = values
        self._channel = channel
        self._tag = tag
        channel.send(OFFERED, tag, values.data_ptr(), values.nbytes)

    def wait(self) -> None:
        self._channel.receive(READ, self._tag)


class Fetch:
    """A read of ``num_elements`` from a peer (:class:`~partita.comm.transport.IncomingTensor`): in one piece into
    ``buffer``, or in several, each to the start of ``buffer``. Read the last piece before waiting for any
    :class:`Offer`: the peer does the same.
    """

    def __init__(self, buffer: Tensor, num_elements: int, process: int, channel: Channel, tag: int) -> None:
        self._buffer = buffer
        self._num_elements = num_elements
        self._process = process
        self._channel = channel
        self._tag = tag
        self._address: int | None = None

    def piece(self, start: int, stop: int) -> Tensor:
        """Raises RuntimeError: the peer has ended, or offers something else."""
        if self._address is None:
            self._address, num_bytes = self._channel.receive(OFFERED, self._tag)
            expected = self._num_elements * self._buffer.itemsize
            if num_bytes != expected:
                raise RuntimeError(f"process {self._process} offers {num_bytes} bytes, not {expected}")
        read = self._buffer[: stop - start]
        try:
            read_memory(self._process, self._address + start * self._buffer.itemsize, read)
        except OSError as error:
            raise RuntimeError(f"reading the memory of process {self._process}: {error.strerror}") from error
        if stop == self._num_elements:
            self._channel.send(READ, self._tag)
        return read
