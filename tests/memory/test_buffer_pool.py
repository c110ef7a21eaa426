"""Slots: none is borrowed twice at a time, size classes waste little, and the ledger counts every byte."""

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from partita.memory.buffer_pool import BufferPool, Slot
from partita.memory.ledger import Ledger
from partita.memory.streams import Event
from partita.table.slots import CLASS_SHARE, PlannedPool

CPU = torch.device("cpu")
BLOCK, EMBEDDING = 4096, 40960


def held(ledger: Ledger, name: str = "buffer_pool") -> int:
    return ledger.report(CPU).held.get((name, "device"), 0)


def lend_all(pool: BufferPool, num_bytes: int) -> list[Slot]:
    slots = []
    while pool.available(num_bytes):
        slots.append(pool.borrow(num_bytes))
    return slots


# ------------------------------------------------------------------------------------------------------------- classes


def test_an_embedding_is_not_a_block() -> None:
    ledger = Ledger()
    pool = BufferPool("buffer_pool", PlannedPool((EMBEDDING, *[BLOCK] * 6), 2), ledger, CPU)
    assert held(ledger) == EMBEDDING + 2 * BLOCK, "the one embedding has one slot, six blocks share two"
    assert [slot.num_bytes for slot in lend_all(pool, EMBEDDING)] == [EMBEDDING]
    assert [slot.num_bytes for slot in lend_all(pool, BLOCK)] == [BLOCK] * 2


def test_nearly_equal_sizes_share_slots() -> None:
    ledger, near = Ledger(), int(CLASS_SHARE * BLOCK)
    pool = BufferPool("buffer_pool", PlannedPool((near, BLOCK, near - 1), 2), ledger, CPU)
    assert held(ledger) == 2 * BLOCK + near - 1
    first, second = pool.borrow(near), pool.borrow(BLOCK)
    assert first.num_bytes == second.num_bytes == BLOCK
    assert pool.borrow(near - 1).num_bytes == near - 1


def test_a_tensor_that_lasts_has_a_slot_beside_the_others() -> None:
    ledger = Ledger()
    pool = BufferPool("buffer_pool", PlannedPool(tuple([BLOCK] * 5), 2, (BLOCK,)), ledger, CPU)
    assert len(lend_all(pool, BLOCK)) == 3
    pool = BufferPool("buffer_pool", PlannedPool(tuple([BLOCK] * 5), 2, tuple([BLOCK] * 5)), Ledger(), CPU)
    assert len(lend_all(pool, BLOCK)) == 5, "never more than there are tensors"


def test_without_memory_of_their_own() -> None:
    ledger = Ledger()
    slot = BufferPool("buffer_pool", PlannedPool((BLOCK,), 1), ledger, CPU, backed=False).borrow(BLOCK)
    assert (slot.storage.nbytes(), slot.num_bytes) == (0, BLOCK)
    assert held(ledger) == BLOCK, "the tensor that it is lent to takes the memory"


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=12), st.integers(1, 4))
def test_classes_waste_little(sizes: list[int], depth: int) -> None:
    ledger = Ledger()
    pool = BufferPool("buffer_pool", PlannedPool(tuple(sizes), depth), ledger, CPU)
    for size in sizes:
        assert pool.available(size)
        slot = pool.borrow(size)
        assert CLASS_SHARE * slot.num_bytes <= size <= slot.num_bytes == slot.storage.nbytes()
        pool.give_back(slot, Event())
    assert held(ledger) <= depth * sum(set(sizes))


# ---------------------------------------------------------------------------------------------------------- growing


def test_the_pool_grows_with_one_warning() -> None:
    ledger = Ledger()
    pool = BufferPool("buckets", PlannedPool((3_000_000, 3_000_000), 1), ledger, CPU)
    first = pool.borrow(3_000_000)
    assert not pool.available(3_000_000)
    with pytest.warns(UserWarning, match=r"'buckets' .* grows by 3\.0 MB") as warned:
        slots = [pool.borrow(3_000_000), pool.borrow(3_000_000)]
    assert len(warned) == 1
    assert held(ledger, "buckets") == 9_000_000
    for slot in [first, *slots]:
        pool.give_back(slot, Event())
    assert {id(slot) for slot in lend_all(pool, 3_000_000)} == {id(first), *map(id, slots)}, "each slot stays"


def test_spare_memory_is_given_up() -> None:
    ledger = Ledger()
    pool = BufferPool("buffer_pool", PlannedPool((BLOCK,), 1), ledger, CPU)
    kept, spare = pool.borrow(BLOCK, spare=True), pool.borrow(100, spare=True)
    assert (kept.num_bytes, spare.num_bytes) == (BLOCK, 100), "a free slot is taken first"
    assert held(ledger) == BLOCK + 100
    pool.give_back(spare, Event())
    assert held(ledger) == BLOCK
    assert not pool.available(BLOCK)
    pool.give_back(kept, Event())
    assert pool.borrow(BLOCK) is kept


def test_a_size_that_was_not_planned() -> None:
    pool = BufferPool("buffer_pool", PlannedPool((BLOCK,), 1), Ledger(), CPU)
    assert not pool.available(2 * BLOCK)
    with pytest.warns(UserWarning, match=r"'buffer_pool' .* grows by 0\.0 MB"):
        slot = pool.borrow(2 * BLOCK)
    assert slot.num_bytes == 2 * BLOCK
    pool.give_back(slot, Event())
    assert pool.borrow(2 * BLOCK) is slot
    assert pool.available(BLOCK)


def test_a_slot_comes_with_the_event_of_its_last_use() -> None:
    pool, event = BufferPool("buffer_pool", PlannedPool((BLOCK,), 1), Ledger(), CPU), Event()
    slot = pool.borrow(BLOCK)
    pool.give_back(slot, event)
    assert pool.borrow(BLOCK).last_use is event


def test_the_newest_slot_is_the_one_that_came_back_last() -> None:
    pool = BufferPool("buffer_pool", PlannedPool((BLOCK,) * 5, 3), Ledger(), CPU)
    first = pool.borrow(BLOCK)
    pool.give_back(first, Event())
    assert pool.borrow(BLOCK, newest=True) is first
    pool.give_back(first, Event())
    assert pool.borrow(BLOCK) is not first


# ---------------------------------------------------------------------------------------------- any order of borrowing


class Borrowing(RuleBasedStateMachine):
    """Random borrowing; the model is the list of borrowed slots."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger, self.num_warnings = Ledger(), 0
        self.pool = BufferPool("buffer_pool", PlannedPool((100, 80, 30, 30, 30, 9), 2, (30,)), self.ledger, CPU)
        self.out: list[Slot] = []
        self.owned = {id(slot): slot for size in (100, 30, 9) for slot in lend_all(self.pool, size)}
        for slot in self.owned.values():
            self.pool.give_back(slot, Event())

    @rule(num_bytes=st.integers(1, 120), spare=st.booleans())
    def borrow(self, num_bytes: int, spare: bool) -> None:
        free = self.pool.available(num_bytes)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            slot = self.pool.borrow(num_bytes, spare=spare)
        self.num_warnings += len(warned)
        assert slot.num_bytes >= num_bytes
        assert all(slot is not other for other in self.out), "lent twice"
        assert slot.spare == (spare and not free)
        assert free == (id(slot) in self.owned)
        assert not (warned and (free or spare))
        self.out.append(slot)
        if not slot.spare:
            self.owned[id(slot)] = slot

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        slot = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
        self.pool.give_back(slot, Event())

    @invariant()
    def the_ledger_knows_every_byte(self) -> None:
        spare = [slot for slot in self.out if slot.spare]
        assert held(self.ledger) == sum(slot.num_bytes for slot in [*self.owned.values(), *spare])

    @invariant()
    def one_warning_at_most(self) -> None:
        assert self.num_warnings <= 1


TestBorrowing = Borrowing.TestCase
