"""Forked children close their parent's connections, and cannot use its engines."""

import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

import partita
from partita import PartitaError
from partita.comm.node.forks import connections_kept_from_children, keep_from_children
from tests.kit.models import Stack, square_loss
from tests.kit.ranks import on_ranks
from tests.kit.training import rank


def in_child(answer: Callable[[], str]) -> str:
    """Return the answer of a forked child."""
    reading, writing = os.pipe()
    if not os.fork():
        try:
            os.write(writing, answer().encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as said:
        text = said.read()
    os.wait()
    return text


def has(number: int) -> str:
    return "socket" if stat.S_ISSOCK(os.fstat(number).st_mode) else "nothing"


@contextmanager
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other = server.accept()[0]
        with other:
            yield one, other


def test_a_socket_that_is_kept_ends_with_its_process() -> None:
    one, other = socket.socketpair()
    with one, other:
        keep_from_children(one.fileno())
        assert in_child(lambda: has(one.fileno()) + has(other.fileno())) == "nothingsocket"
        one.sendall(b"still here")
        assert other.recv(20) == b"still here"


def test_connections_that_are_opened_in_a_block() -> None:
    with connection() as (before, _), connections_kept_from_children(), connection() as (one, _):
        pair = socket.socketpair()
        with pair[0], pair[1]:
            numbers = [end.fileno() for end in (one, before, pair[0])]
            with connections_kept_from_children():
                pass
            assert in_child(lambda: has(numbers[0])) == "socket", "the block has not ended"
    with connections_kept_from_children():
        opened = connection()
        one, _ = opened.__enter__()
        local = socket.socketpair()
    with local[0], local[1]:
        assert in_child(lambda: has(one.fileno()) + has(local[0].fileno())) == "nothingsocket"
    opened.__exit__(None, None, None)


def test_a_number_that_means_another_file_now() -> None:
    one, other = socket.socketpair()
    with other:
        number = one.fileno()
        keep_from_children(number)
        one.close()
        again = socket.socket(socket.AF_UNIX)
        with again:
            assert again.fileno() == number
            assert in_child(lambda: has(number)) == "socket"


def initialized_in_child() -> str:
    def attempt() -> str:
        try:
            partita.initialize(Stack(1))
        except PartitaError as error:
            return str(error)
        return "no error"

    with partita.initialize(Stack(1)) as engine:
        said = in_child(attempt)
        engine.backward(square_loss(engine, rank(), 0))
        assert engine.step().stepped, "the parent's connections are as they were"
    return said


@pytest.mark.parametrize("with_group", [True, False])
def test_initialize_in_a_forked_child(with_group: bool) -> None:
    for said in on_ranks(2, initialized_in_child, with_group=with_group):
        assert "this process was forked from one whose torch.distributed was running" in said


def trained_in_child(stage: int) -> str:
    def attempt() -> str:
        try:
            engine.backward(square_loss(engine, rank(), 0))
            engine.step()
        except PartitaError as error:
            return str(error)
        return "no error"

    with partita.initialize(Stack(1), {"zero": {"stage": stage}}) as engine:
        for _ in range(2):
            engine.backward(square_loss(engine, rank(), 0))
            assert engine.step().stepped
            said = in_child(attempt)
    return said


@pytest.mark.parametrize("stage", [1, 3])
def test_training_goes_on_in_no_forked_child(stage: int) -> None:
    for said in on_ranks(2, trained_in_child, stage, timeout=30):
        assert "this process was forked from the one that created the engine" in said
