"""Storage swap: a storage without memory temporarily takes a slot's memory, which all of its views see."""

import pytest
import torch
from torch import nn

from partita.memory import buffer_pool
from partita.memory.buffer_pool import BufferPool, Slot, StorageSwap
from partita.memory.ledger import Ledger
from partita.memory.streams import Event
from partita.table.slots import PlannedPool

CPU = torch.device("cpu")
NUM_BYTES = 64
WAYS = pytest.mark.parametrize("swap", [True, False], ids=["swap", "resize"])


def slots(loan: StorageSwap, num: int) -> list[Slot]:
    made = BufferPool("buffer_pool", PlannedPool(tuple([NUM_BYTES] * num), num), Ledger(), CPU, backed=loan.swap)
    return [made.borrow(NUM_BYTES) for _ in range(num)]


def parameter(storage: torch.UntypedStorage) -> nn.Parameter:
    """Return a permanent view ``[16]`` of a storage that currently has memory."""
    return nn.Parameter(torch.empty(0).set_(storage, 0, (NUM_BYTES // 4,)))


@WAYS
def test_a_view_is_a_view_whenever_there_is_memory(swap: bool) -> None:
    loan, storage = StorageSwap(swap), torch.UntypedStorage(0)
    first, second = slots(loan, 2)
    loan.attach(storage, first)
    view = parameter(storage)
    loan.detach(storage, first)
    for slot, value in ((second, 1.0), (first, 2.0), (second, 3.0)):
        assert storage.nbytes() == 0, "at rest there is no memory"
        loan.attach(storage, slot)
        assert storage.nbytes() == NUM_BYTES
        torch.empty(0).set_(storage, 0, (16,)).fill_(value)
        assert view.tolist() == [value] * 16
        loan.detach(storage, slot)
        assert view.untyped_storage()._cdata == storage._cdata


@WAYS
def test_what_autograd_saved_stays_an_alias(swap: bool) -> None:
    """Tensors that autograd saved stay aliases if the values move to another slot between forward and backward."""
    loan, storage = StorageSwap(swap), torch.UntypedStorage(0)
    first, second = slots(loan, 2)
    loan.attach(storage, first)
    weight = parameter(storage)
    with torch.no_grad():
        weight.copy_(torch.arange(16.0))
    version = weight._version
    loss = weight.square().sum()
    loan.detach(storage, first)
    loan.attach(storage, second)
    torch.empty(0).set_(storage, 0, (16,)).copy_(torch.arange(16.0))
    assert weight._version == version
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == (2 * torch.arange(16.0)).tolist()


def test_swapping_moves_nothing() -> None:
    loan = StorageSwap()
    if not loan.swap:
        assert not buffer_pool.storage_swap_available()
        return
    (slot,) = slots(loan, 1)
    address, storage = slot.storage.data_ptr(), torch.UntypedStorage(0)
    torch.empty(0).set_(slot.storage, 0, (16,)).fill_(7.0)
    loan.attach(storage, slot)
    assert (storage.data_ptr(), slot.storage.nbytes()) == (address, 0)
    assert torch.empty(0).set_(storage, 0, (16,)).tolist() == [7.0] * 16
    loan.detach(storage, slot)
    assert (slot.storage.data_ptr(), slot.storage.nbytes()) == (address, NUM_BYTES)


def test_the_storage_is_resized_where_torch_cannot_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_pool, "storage_swap_available", lambda: False)
    assert not StorageSwap().swap
    monkeypatch.setattr(buffer_pool, "storage_swap_available", lambda: True)
    assert StorageSwap().swap
    assert not StorageSwap(swap=False).swap


@WAYS
def test_the_event_is_kept_by_the_slot(swap: bool) -> None:
    loan, event = StorageSwap(swap), Event()
    made = BufferPool("buffer_pool", PlannedPool((NUM_BYTES,), 1), Ledger(), CPU, backed=loan.swap)
    slot, storage = made.borrow(NUM_BYTES), torch.UntypedStorage(0)
    loan.attach(storage, slot)
    loan.detach(storage, slot)
    made.give_back(slot, event)
    assert made.borrow(NUM_BYTES).last_use is event
