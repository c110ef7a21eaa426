"""Ranks that cannot connect."""

import socket
from collections.abc import Iterator

import pytest
import torch

from partita import PartitaError
from partita.comm import world
from partita.comm.world import Rendezvous


@pytest.fixture
def port() -> Iterator[int]:
    """A port that is in use."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def test_a_port_that_is_taken_is_named(port: int) -> None:
    url = f"tcp://127.0.0.1:{port}"
    with pytest.raises(PartitaError, match=f"rank 0 of 2 did not reach the others at {url} .*MASTER_PORT"):
        world.join(Rendezvous(0, 2, 5.0, url=url), torch.device("cpu"))
