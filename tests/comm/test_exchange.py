"""Exchanges whose tensors arrive in pieces."""

from collections import deque

import pytest
import torch
from torch import Tensor

from partita.comm.transport import Exchange, Receive


class Sender:
    """Another rank, which sends the pieces of ``values`` in turn. A receive buffer is filled in its ``wait``, not
    before.
    """

    def __init__(self, values: Tensor, piece: int) -> None:
        self._pieces = deque(values.split(piece))
        self.num_posted = self.num_awaited = 0

    def post(self, place: Tensor) -> "Message":
        self.num_posted += 1
        return Message(self, place, self._pieces.popleft())


class Message:
    def __init__(self, sender: Sender, place: Tensor, piece: Tensor) -> None:
        self._sender, self._place, self._piece = sender, place, piece

    def wait(self) -> None:
        self._sender.num_awaited += 1
        self._place.copy_(self._piece)


class Leaving:
    def __init__(self) -> None:
        self.left = False

    def wait(self) -> None:
        self.left = True


@pytest.mark.parametrize(
    ("num_elements", "piece", "room"), [(10, 10, 10), (10, 3, 10), (10, 3, 6), (12, 3, 3), (2, 3, 2)]
)
def test_pieces_arrive_from_all_ranks(num_elements: int, piece: int, room: int) -> None:
    values = [torch.randn(num_elements) for _ in range(3)]
    senders = [Sender(each, piece) for each in values]
    arriving = [Receive(sender.post, torch.full((room,), torch.nan), num_elements, piece) for sender in senders]
    leaving, seen = Leaving(), torch.empty(3, num_elements)
    for at, parts in Exchange(arriving, [leaving], num_elements, piece).pieces():
        assert not leaving.left
        seen[:, at] = torch.stack(parts)
    assert torch.equal(seen, torch.stack(values))
    assert leaving.left


def test_the_next_messages_are_awaited_while_one_is_used() -> None:
    sender = Sender(torch.arange(10.0), 2)
    receive = Receive(sender.post, torch.empty(6), 10, 2)
    posted = []
    for start in range(0, 10, 2):
        receive.piece(start, start + 2)
        posted.append((sender.num_posted, sender.num_awaited))
    assert posted == [(3, 1), (4, 2), (5, 3), (5, 4), (5, 5)]


def test_what_arrives_at_once_lands_where_it_shall() -> None:
    room = torch.empty(7)
    Exchange([Receive(Sender(torch.arange(7.0), 7).post, room, 7, 7)], [], 7, 7).wait()
    assert torch.equal(room, torch.arange(7.0))
