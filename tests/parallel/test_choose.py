"""Choice of the attention method for a split sequence, and the bytes that each method sends."""

import itertools

import pytest

from partita.parallel.sequence.choose import ALL_TO_ALL, GATHER_KEYS, RING, Sizes, choose


def sizes(heads: int, key_heads: int, positions: tuple[int, ...], **others: int) -> Sizes:
    return Sizes(heads, key_heads, 8, 8, positions, **others)


@pytest.mark.parametrize("num", [2, 4, 8])
def test_even_shares_send_what_the_papers_say(num: int) -> None:
    """A rank sends 4 n h (p - 1) / p^2 elements (Ulysses) or 2 n h (p - 1) / p (gathering); n positions, width h."""
    even = Sizes(8, 8, 16, 16, (32,) * num, batch=3, itemsize=2)
    whole = 32 * num * 8 * 16 * 3 * 2
    assert set(even.sent_bytes(ALL_TO_ALL)) == {4 * whole * (num - 1) // num**2}
    assert set(even.sent_bytes(GATHER_KEYS)) == {2 * whole * (num - 1) // num}


def test_backward_sends_what_forward_received() -> None:
    for way in (ALL_TO_ALL, GATHER_KEYS):
        found = Sizes(6, 2, 8, 4, (5, 4, 4))
        assert sum(found.sent_bytes(way)) == sum(found.sent_bytes(way, backward=True))


def test_shared_keys_are_taken_once_where_that_is_even() -> None:
    assert sizes(8, 2, (4, 4)).own_key_heads == ((0,), (1,))
    assert sizes(8, 2, (2, 2, 2, 2)).own_key_heads == ((0,), (0,), (1,), (1,))
    assert sizes(6, 2, (1, 1)).own_key_heads == ((0,), (1,))
    assert sizes(6, 2, (1, 1, 1, 1)).own_key_heads == ((0,), (0, 1), (1,), (1,))
    assert sizes(6, 3, (1, 1, 1, 1)).own_key_heads == ((0,), (1,), (2,), (2,))
    assert sizes(9, 3, (1, 1)).own_key_heads == ((0, 0, 0, 1, 1), (1, 2, 2, 2))


def test_every_query_head_is_on_one_rank() -> None:
    for heads, num in itertools.product(range(1, 13), range(1, 6)):
        own = sizes(heads, 1, (1,) * num).own_heads
        assert [head for taken in own for head in taken] == list(range(heads))


def test_the_way_that_sends_less() -> None:
    assert choose(sizes(8, 8, (16, 16))) == ALL_TO_ALL  # gathering sends as much, and stores all keys on each rank
    assert choose(sizes(8, 8, (16, 16, 16, 16))) == ALL_TO_ALL
    assert choose(sizes(8, 1, (16, 16, 16, 16))) == GATHER_KEYS
    for heads, key_heads, num in itertools.product((4, 8, 16), (1, 2, 4), (2, 3, 4)):
        found = sizes(heads, key_heads, (5,) * num)
        least = min((ALL_TO_ALL, GATHER_KEYS), key=lambda way: sum(found.sent_bytes(way)))
        assert sum(found.sent_bytes(choose(found))) == sum(found.sent_bytes(least))


def test_causal_attention_takes_the_way_without_a_mask() -> None:
    many, few = sizes(8, 1, (16, 16, 16, 16)), sizes(2, 2, (16, 16, 15))
    assert choose(many, causal=True) == ALL_TO_ALL
    assert choose(few, causal=True) == choose(many, causal=True, needs_all_heads=True) == GATHER_KEYS
    assert few.mask_bytes == 16 * 47 * 4
    kept = few.gathered_bytes + few.mask_bytes
    assert choose(few, causal=True, max_gathered_bytes=kept) == GATHER_KEYS
    assert choose(few, causal=True, max_gathered_bytes=kept - 1) == RING
    assert choose(few, causal=True, max_gathered_bytes=kept - 1, ring=False) == GATHER_KEYS


def test_the_way_that_fits() -> None:
    few = sizes(2, 2, (16, 16, 16))
    assert choose(few) == GATHER_KEYS
    assert choose(few, max_gathered_bytes=few.gathered_bytes - 1) == RING
    assert choose(few, max_gathered_bytes=few.gathered_bytes - 1, ring=False) == GATHER_KEYS
    many = sizes(8, 1, (16, 16, 16))
    assert choose(many, max_gathered_bytes=many.gathered_bytes - 1) == ALL_TO_ALL
    assert choose(many, needs_all_heads=True, max_gathered_bytes=many.gathered_bytes - 1) == RING
