"""The ledger: current and peak bytes, by state and tier."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from partita.memory import ledger as module
from partita.memory.ledger import STATES, Ledger, process_memory
from partita.table.residence import Tier

CPU = torch.device("cpu")
CHANGES = st.lists(
    st.tuples(st.sampled_from([*STATES, "buffer_pool"]), st.sampled_from(Tier), st.integers(-50, 50)), max_size=40
)


@given(CHANGES)
def test_bytes_now_and_at_their_peak(changes: list[tuple[str, Tier, int]]) -> None:
    ledger = Ledger()
    now, peak = dict[tuple[str, str], int](), dict[tuple[str, str], int]()
    for state, tier, num_bytes in changes:
        key = (state, tier.value)
        if num_bytes >= 0:
            ledger.add(state, num_bytes, tier)
            now[key] = now.get(key, 0) + num_bytes
        elif now.get(key, 0) >= -num_bytes:
            ledger.remove(state, -num_bytes, tier)
            now[key] -= -num_bytes
        else:
            with pytest.raises(AssertionError, match=f"more bytes of {state} freed than allocated"):
                ledger.remove(state, -num_bytes, tier)
        if key in now:
            peak[key] = max(peak.get(key, 0), now[key])
        report = ledger.report(CPU)
        assert report.held == {key: num for key, num in now.items() if num}
        assert report.peak == peak
        assert report.total_bytes == sum(now.values())
        assert report.model_state_bytes == sum(num for (name, _), num in now.items() if name in STATES)


def test_a_state_counted_as_a_whole() -> None:
    ledger = Ledger()
    for num_bytes in (100, 300, 200):
        ledger.set("moments", num_bytes, Tier.HOST)
    report = ledger.report(CPU)
    assert report.held == {("moments", "host"): 200}
    assert report.peak == {("moments", "host"): 300}


def test_a_report_stays_as_it_was() -> None:
    ledger = Ledger()
    ledger.add("parameters", 10)
    report = ledger.report(CPU)
    ledger.add("parameters", 5)
    assert report.held == report.peak == {("parameters", "device"): 10}


def test_the_report_as_a_table() -> None:
    ledger = Ledger()
    ledger.add("parameters", 1_000_000)
    ledger.add("moments", 8_500_000, Tier.HOST)
    ledger.remove("moments", 8_000_000, Tier.HOST)
    lines = [line.split() for line in str(ledger.report(CPU)).splitlines()]
    assert lines[0] == ["state", "tier", "MB", "now", "MB", "peak"]
    assert lines[1:3] == [["moments", "host", "0.500", "8.500"], ["parameters", "device", "1.000", "1.000"]]
    assert lines[3][0] == "process"
    assert len(lines) == 4, "no line for an allocator that is not there"


def test_what_the_system_says() -> None:
    report = Ledger().report(CPU)
    assert report.process_peak_bytes >= report.process_bytes > 2**20
    assert report.device_bytes == report.device_peak_bytes == 0
    assert report.held == report.peak == {}


def test_where_the_system_has_no_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: str) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr(module, "open", missing, raising=False)
    now, peak = process_memory()
    assert now == 0
    assert peak > 2**20, "a process that has torch loaded takes more than a megabyte"
