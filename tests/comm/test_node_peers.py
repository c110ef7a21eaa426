"""Node peers, which read each other's memory: messages, handshake, selection, and the network as the fallback."""

import os
import socket
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

import partita
from partita import PartitaError
from partita.comm.node import handshake
from partita.comm.node.handshake import HELLO, Handshake
from partita.comm.node.peers import OFFERED, READ, Channel, Fetch, Offer, read_memory
from tests.kit.models import Stack, square_loss
from tests.kit.plans import ZERO
from tests.kit.ranks import on_ranks
from tests.kit.training import Recipe, assert_same_bits, rank, train_recipe, world

PURPOSES = ("parameters", "gradients")


@pytest.fixture
def channels() -> Iterator[tuple[Channel, Channel]]:
    one, other = socket.socketpair()
    ends = Channel(one, 5), Channel(other, 5)
    yield ends
    for end in ends:
        end.close()


def fetch(room: torch.Tensor, channel: Channel, tag: int) -> None:
    Fetch(room, room.numel(), os.getpid(), channel, tag).piece(0, room.numel())


# -------------------------------------------------------------------------------------------------------- messages


def test_memory_goes_from_one_to_the_other(channels: tuple[Channel, Channel]) -> None:
    given, room = torch.randn(100_003), torch.empty(100_003)
    offer = Offer(given, channels[0], 7)
    fetch(room, channels[1], 7)
    offer.wait()
    assert torch.equal(room, given)


def test_pieces_are_read_one_after_the_other_into_one_place(channels: tuple[Channel, Channel]) -> None:
    given, room = torch.randn(10), torch.empty(4)
    offer, arriving = Offer(given, channels[0], 0), Fetch(room, 10, os.getpid(), channels[1], 0)
    for start, stop in ((0, 4), (4, 8), (8, 10)):
        read = arriving.piece(start, stop)
        assert torch.equal(read, given[start:stop])
        assert read.data_ptr() == room.data_ptr()
    offer.wait()


def test_what_is_offered_is_left_alone_until_it_was_read(channels: tuple[Channel, Channel]) -> None:
    offer = Offer(torch.ones(3), channels[0], 0)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(offer.wait)
        with pytest.raises(TimeoutError):
            waiting.result(0.1)
        fetch(torch.empty(3), channels[1], 0)
        waiting.result(5)


def test_an_exchange_takes_no_notice_of_another(channels: tuple[Channel, Channel]) -> None:
    """Offers with two tags can be fetched in either order."""
    given = {tag: torch.randn(50) for tag in (1, 2)}
    offers = [Offer(values, channels[0], tag) for tag, values in given.items()]
    for tag in (2, 1):
        room = torch.empty(50)
        fetch(room, channels[1], tag)
        assert torch.equal(room, given[tag])
    for offer in offers:
        offer.wait()


def test_threads_wait_for_messages_of_their_own(channels: tuple[Channel, Channel]) -> None:
    """Each thread receives its own message, also if a thread that waits for another one is listening."""
    with ThreadPoolExecutor(4) as threads:
        received = [threads.submit(channels[1].receive, OFFERED, tag) for tag in range(4)]
        for tag in reversed(range(4)):
            channels[0].send(OFFERED, tag, tag, 10 * tag)
        assert [message.result(5) for message in received] == [(tag, 10 * tag) for tag in range(4)]


def test_both_ends_send_more_than_the_socket_holds_before_either_receives(channels: tuple[Channel, Channel]) -> None:
    for tag in range(5_000):
        for end in channels:
            end.send(OFFERED, tag, address=tag)
    for end in channels:
        assert [end.receive(OFFERED, tag)[0] for tag in range(5_000)] == list(range(5_000))
    for end in channels:  # again, after the sender threads have ended
        end.send(READ, 0)
    for end in channels:
        end.receive(READ, 0)


def test_a_full_channel_is_told_that_the_other_ended(channels: tuple[Channel, Channel]) -> None:
    for tag in range(5_000):
        channels[0].send(OFFERED, tag)
    channels[1].close()
    with pytest.raises(RuntimeError, match="sending to a rank of this node"):
        while True:
            channels[0].send(OFFERED, 0)


def test_all_threads_are_told_that_the_other_ended(channels: tuple[Channel, Channel]) -> None:
    with ThreadPoolExecutor(3) as threads:
        received = [threads.submit(channels[1].receive, OFFERED, tag) for tag in range(3)]
        channels[0].close()
        for message in received:
            with pytest.raises(RuntimeError, match="its process has ended"):
                message.result(5)


def test_another_size_is_told(channels: tuple[Channel, Channel]) -> None:
    offer = Offer(torch.ones(10), channels[0], 0)
    with pytest.raises(RuntimeError, match=f"process {os.getpid()} offers 40 bytes, not 44"):
        fetch(torch.ones(11), channels[1], 0)
    del offer


def test_memory_that_is_not_there_is_told(channels: tuple[Channel, Channel]) -> None:
    channels[0].send(OFFERED, 0, address=4096, num_bytes=4)
    with pytest.raises(RuntimeError, match=f"reading the memory of process {os.getpid()}: Bad address"):
        fetch(torch.ones(1), channels[1], 0)


def test_whoever_waits_is_told_that_the_other_ended(channels: tuple[Channel, Channel]) -> None:
    channels[0].close()
    with pytest.raises(RuntimeError, match="waiting for a rank of this node: its process has ended"):
        channels[1].receive(READ, 0)
    with pytest.raises(RuntimeError, match="sending to a rank of this node"):
        channels[1].send(READ, 0)


def test_nobody_waits_for_ever() -> None:
    one, other = socket.socketpair()
    with one, other, pytest.raises(RuntimeError, match="timed out"):
        Channel(other, 0.05).receive(READ, 0)


# --------------------------------------------------------------------------------------------------------- handshake


@pytest.fixture
def strangers() -> Iterator[Callable[[str, int], None]]:
    """A function that connects to a socket ``times`` times and sends nothing. The last 100 connections stay open."""
    with ExitStack() as opened:
        last = deque[socket.socket]()

        def connect(name: str, times: int) -> None:
            for _ in range(times):
                last.append(opened.enter_context(socket.socket(socket.AF_UNIX)))
                last[-1].connect(name)
                if len(last) > 100:
                    last.popleft().close()

        yield connect


def test_strangers_are_turned_away_unreceived(strangers: Callable[[str, int], None]) -> None:
    """Only connections of the other rank's process are read, not silent ones or those of others with the token."""
    with Handshake(20.0) as one, socket.socket(socket.AF_UNIX) as knows_token:
        strangers(one.endpoint.socket_name, 50)
        knows_token.connect(one.endpoint.socket_name)
        knows_token.sendall(HELLO.pack(one.endpoint.token, 0))
        rank = os.fork()
        if not rank:
            connections = [socket.socket(socket.AF_UNIX) for _ in PURPOSES]
            for number, connection in enumerate(connections):
                connection.connect(one.endpoint.socket_name)
                connection.sendall(HELLO.pack(one.endpoint.token, number))
                Channel(connection, 5).send(OFFERED, number)
            connections[0].recv(1)  # until the other end is closed
            os._exit(0)
        found = one.connect(0, {1: replace(one.endpoint, process=rank)}, PURPOSES)[1]
        assert [found.channels[purpose].receive(OFFERED, number) for number, purpose in enumerate(PURPOSES)] == [
            (0, 0)
        ] * 2
        found.close()
        os.waitpid(rank, 0)


def test_a_flood_of_strangers_ends_with_the_time(strangers: Callable[[str, int], None]) -> None:
    with Handshake(1.0) as one, ThreadPoolExecutor(1) as threads:
        flood = threads.submit(strangers, one.endpoint.socket_name, 100_000)
        with pytest.raises(TimeoutError):
            one.connect(0, {1: replace(one.endpoint, process=os.getppid())}, PURPOSES)
        one.__exit__()
        assert isinstance(flood.exception(), OSError)  # nobody listens any more


@pytest.mark.parametrize("user", [None, 4711])
def test_only_the_ranks_own_socket_is_told_anything(user: int | None) -> None:
    """A socket with the peer's name that belongs to another process or user raises an error."""
    with Handshake(60.0) as one, Handshake(60.0) as other:
        process = os.getppid() if user is None else os.getpid()
        with mock.patch.object(handshake.os, "geteuid", return_value=user) if user else nullcontext():
            with pytest.raises(OSError, match="another process has the socket of a rank"):
                one.connect(1, {0: replace(other.endpoint, process=process)}, PURPOSES)


def test_no_more_is_read_than_there_is_to_fill() -> None:
    given, room = torch.arange(10), torch.zeros(10, dtype=torch.int64)
    read_memory(os.getpid(), given.data_ptr(), room[2:5])
    assert room.tolist() == [0, 0, 0, 1, 2, 0, 0, 0, 0, 0]


# ------------------------------------------------------------------------------------------------------- selection


def found(**communication: Any) -> list[int]:
    with partita.initialize(Stack(2), {"zero": {"stage": 3}, "communication": communication}) as engine:
        engine.backward(square_loss(engine, rank(), 0))
        assert engine.step().stepped
        return sorted(engine.mesh.transport(("data",)).peers or {})


def told(way: str) -> list[int] | str:
    """Return the node peers, or the error."""
    try:
        return found(within_node=way)
    except PartitaError as error:
        return str(error)


def refused(*_: Any) -> None:
    raise PermissionError(1, "Operation not permitted")


def test_all_ranks_of_a_node_are_peers() -> None:
    assert on_ranks(4, found) == [[other for other in range(4) if other != own] for own in range(4)]


def test_over_the_network_where_the_config_says_so() -> None:
    assert on_ranks(2, told, "network") == [[], []]


def on_nodes_of_their_own() -> list[int] | str:
    with mock.patch.object(handshake, "_node", return_value=rank() // 2):
        return told("memory")


def test_ranks_of_other_nodes_are_none() -> None:
    assert on_ranks(4, on_nodes_of_their_own) == [[1], [0], [3], [2]]


def test_without_a_socket_all_goes_over_the_network() -> None:
    with mock.patch.object(handshake.socket.socket, "bind", side_effect=refused):
        said = Handshake(60.0)
    with said as one, Handshake(60.0) as other:
        assert one.readable([one.endpoint, replace(other.endpoint, process=1)]) == {
            1: "[Errno 1] Operation not permitted"
        }


def cannot_be_read(way: str, everywhere: bool) -> list[int] | str:
    refusing = mock.patch.object(handshake, "read_memory", refused)
    with refusing if everywhere or rank() == 1 else nullcontext():
        return told(way)


@pytest.mark.parametrize("everywhere", [True, False])
def test_what_the_system_refuses_goes_over_the_network(everywhere: bool) -> None:
    assert on_ranks(2, cannot_be_read, "auto", everywhere) == [[], []]
    for said in on_ranks(2, cannot_be_read, "memory", everywhere):
        assert isinstance(said, str)
        assert (
            "communication.within_node memory: ranks cannot read each other's memory (Operation not permitted)" in said
        )
        assert "set it to network" in said


class Unanswered(Handshake):
    def connect(self, *_: Any) -> Any:
        raise TimeoutError("timed out")


def test_one_who_does_not_answer_leaves_all_to_the_network() -> None:
    assert on_ranks(2, one_does_not_answer) == [[], []]


def one_does_not_answer() -> list[int] | str:
    with (
        mock.patch.object(handshake, "Handshake", Unanswered if rank() == 1 else Handshake),
        mock.patch.object(handshake, "CONNECT_S", 1.0),
    ):
        return found()


# ----------------------------------------------------------------------------------------------------- the same bits


def both_ways() -> None:
    plans = {**ZERO, "on host": {"stage": 3, "offload": {"parameters": "host", "optimizer": "host"}}}
    for name, zero in plans.items():
        one, other = (
            train_recipe(Recipe(lambda: Stack(3), config={"communication": {"within_node": way}}), zero)
            for way in ("memory", "network")
        )
        assert_same_bits(one, other, f"plan {name} in memory against over the network, on {world()} ranks")


def counted() -> None:
    """Check that the counted bytes are the same in memory and over the network."""
    sent = []
    for way in ("memory", "network"):
        config = {"zero": {"stage": 3}, "communication": {"within_node": way}}
        with partita.initialize(Stack(3), config) as engine:
            before = engine.traffic_report()
            engine.backward(square_loss(engine, rank(), 0))
            engine.step()
            engine.zero_grad()
            sent.append(engine.traffic_report().since(before).sent_bytes())
    assert sent[0] == sent[1] > 0


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_the_same_bits_either_way(world: int) -> None:
    on_ranks(world, both_ways)


def test_the_same_bytes_are_counted() -> None:
    on_ranks(2, counted)
