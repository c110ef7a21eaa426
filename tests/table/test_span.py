"""Tests of a unit's layout: every element has one position, and starts and cuts are multiples of the quantum."""

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.table.box import Box
from partita.table.place import Place
from partita.table.residence import BF16, FP32, Encoding
from partita.table.share import NO_COPIES, Copies
from partita.table.span import QUANTUM, Entry, SegmentLayout, Span, build_layout

Label = tuple[str, int] | None

SHAPES = st.one_of(
    st.just(()),
    st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple),
    st.sampled_from([(QUANTUM,), (QUANTUM - 1,), (QUANTUM + 1,), (2, QUANTUM), (5 * QUANTUM,), (0,)]),
)
ENTRIES = st.lists(
    st.tuples(SHAPES, st.sampled_from([FP32, BF16, Encoding("int64", 8)]), st.booleans()), min_size=1, max_size=8
).map(lambda rows: [Entry(f"p{number}", *row) for number, row in enumerate(rows)])
NUM_PARTS = st.integers(1, 9)


def labels(segment: SegmentLayout) -> list[Label]:
    """Return (parameter, element) for each position of a segment, or None for padding."""
    found: list[Label] = [None] * segment.padded
    for span in segment.spans:
        for place in range(span.num_elements):
            assert found[span.offset + place] is None, "two elements at one place"
            found[span.offset + place] = (span.fqn, span.start + place)
    return found


@given(ENTRIES, NUM_PARTS)
def test_every_element_lies_once(entries: list[Entry], num_shards: int) -> None:
    layout = build_layout(entries, num_shards)
    lying = Counter(label for segment in layout for label in labels(segment) if label is not None)
    expected = {(entry.fqn, element) for entry in entries for element in range(math.prod(entry.shape))}
    assert set(lying) == expected
    assert set(lying.values()) <= {1}


@given(ENTRIES, NUM_PARTS)
def test_starts_and_cuts_are_multiples_of_the_quantum(entries: list[Entry], num_shards: int) -> None:
    for segment in build_layout(entries, num_shards):
        assert segment.shard_elements % QUANTUM == 0
        assert segment.num_shards == num_shards
        assert segment.padded == num_shards * segment.shard_elements
        assert all(span.offset % QUANTUM == 0 for span in segment.spans)


@given(ENTRIES, NUM_PARTS)
def test_padding_is_less_than_a_quantum_a_parameter_and_a_part(entries: list[Entry], num_shards: int) -> None:
    for segment in build_layout(entries, num_shards):
        num_elements = sum(span.num_elements for span in segment.spans)
        most = len(segment.spans) * (QUANTUM - 1) + num_shards * QUANTUM - 1
        assert 0 <= segment.padded - num_elements <= most


@given(ENTRIES, NUM_PARTS)
def test_a_part_is_what_lies_between_its_cuts(entries: list[Entry], num_shards: int) -> None:
    for segment in build_layout(entries, num_shards):
        whole = labels(segment)
        for index in range(num_shards):
            mine: list[Label] = [None] * segment.shard_elements
            for span in segment.part(index):
                assert span.num_elements > 0
                assert span.place == next(other.place for other in segment.spans if other.fqn == span.fqn)
                for place in range(span.num_elements):
                    mine[span.offset + place] = (span.fqn, span.start + place)
            assert mine == whole[index * segment.shard_elements : (index + 1) * segment.shard_elements]


@given(ENTRIES, NUM_PARTS)
def test_segments_are_by_encoding_and_whether_they_train(entries: list[Entry], num_shards: int) -> None:
    layout = build_layout(entries, num_shards)
    kinds = [(segment.trainable, segment.encoding) for segment in layout]
    assert kinds == list(dict.fromkeys((entry.trainable, entry.encoding) for entry in entries))
    for segment, kind in zip(layout, kinds, strict=True):
        expected = [entry.fqn for entry in entries if (entry.trainable, entry.encoding) == kind]
        assert [span.fqn for span in segment.spans] == expected
    places = {span.fqn: span.place for segment in layout for span in segment.spans}
    assert places == {entry.fqn: Place(entry.shape) for entry in entries}


@given(ENTRIES, NUM_PARTS)
def test_a_parameter_may_be_a_part_of_a_larger_one(entries: list[Entry], num_shards: int) -> None:
    """Spans have the place of their local tensor in the global parameter; the place does not change the layout."""
    entries = [entry for entry in entries if entry.shape and entry.shape[0]]
    places = {e.fqn: Place((3 * e.shape[0], *e.shape[1:]), 0, ((e.shape[0], 2 * e.shape[0]),)) for e in entries}
    placed = build_layout([replace(e, shape=places[e.fqn].shape, place=places[e.fqn]) for e in entries], num_shards)
    for segment, whole in zip(placed, build_layout(entries, num_shards), strict=True):
        assert [replace(s, place=Place(s.place.sizes)) for s in segment.spans] == list(whole.spans)
        for index in range(num_shards):
            assert all(span.place == places[span.fqn] for span in segment.part(index))


@given(ENTRIES, NUM_PARTS)
def test_what_has_copies_is_laid_out_apart(entries: list[Entry], num_shards: int) -> None:
    """Parameters with copies have separate segments, whose shards can be divided among the ranks with copies.

    A parameter that is tied across pipeline stages is alone in its segment.
    """
    copies, tied = Copies(averaged=("tensor",)), Copies(summed=("pipeline:0,1",))
    chosen = [(NO_COPIES, copies, tied)[number % 3] for number in range(len(entries))]
    marked = [replace(entry, copies=of) for entry, of in zip(entries, chosen, strict=True)]
    for segment in build_layout(marked, num_shards, lambda of: 3 if of == copies else 1):
        assert {entry.copies for entry in marked if entry.fqn in {s.fqn for s in segment.spans}} == {segment.copies}
        assert len(segment.spans) == 1 or not segment.copies.is_tied
        assert segment.copies != copies or segment.shard_elements % (3 * QUANTUM) == 0


def test_an_example() -> None:
    entries = [
        Entry("a.weight", (3, 100), FP32, True),
        Entry("a.bias", (3,), FP32, True),
        Entry("b.weight", (10,), BF16, True),
        Entry("c.weight", (600,), FP32, True),
    ]
    a, bias, b, c = (Place(entry.shape) for entry in entries)
    first = SegmentLayout(
        FP32,
        True,
        (Span("a.weight", a, 0, 300, 0), Span("a.bias", bias, 0, 3, 512), Span("c.weight", c, 0, 600, 768)),
        2,
        768,
    )
    second = SegmentLayout(BF16, True, (Span("b.weight", b, 0, 10, 0),), 2, 256)
    layout = build_layout(entries, 2)
    assert layout == (first, second)
    assert first.part(0) == (Span("a.weight", a, 0, 300, 0), Span("a.bias", bias, 0, 3, 512))
    assert first.part(1) == (Span("c.weight", c, 0, 600, 0),)
    assert second.part(1) == ()


@pytest.mark.parametrize(
    ("begin", "end", "expected"),
    [
        (0, 1000, (0, 500, 300)),
        (300, 800, (0, 500, 0)),
        (400, 600, (100, 300, 0)),
        (0, 400, (0, 100, 300)),
        (700, 900, (400, 500, 0)),
        (0, 300, None),
        (800, 900, None),
        (400, 400, None),
    ],
)
def test_a_span_within_a_range(begin: int, end: int, expected: tuple[int, int, int] | None) -> None:
    span = Span("p", Place((5, 100)), 0, 500, 300)
    assert span.within(begin, end) == (Span("p", span.place, *expected) if expected else None)


def test_a_span_within_a_range_counts_from_its_own_start() -> None:
    place = Place((80,), 0, ((10, 60),))
    assert Span("p", place, 20, 40, 100).within(105, 500) == Span("p", place, 25, 40, 0)


def test_a_box() -> None:
    assert Box.whole((4096, 14336)) == Box((0, 0), (4096, 14336))
    assert Box((0, 1792), (4096, 1792)).num_elements == 4096 * 1792
    assert Box.whole(()).num_elements == 1
