"""Tests of the leak check: it finds processes, threads and variables that a test leaves behind."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from tests.kit.hygiene import Snapshot, child_processes


def test_nothing_left_is_no_leak() -> None:
    assert Snapshot.take().leaks() == []


def test_thread_is_seen_and_a_daemon_is_not() -> None:
    before, stop = Snapshot.take(), threading.Event()
    for name, daemon in (("kept", False), ("background", True)):
        threading.Thread(target=stop.wait, name=name, daemon=daemon).start()
    leaks = before.leaks(grace_s=0)
    stop.set()
    assert leaks == ["thread kept"]


def test_thread_that_is_about_to_end_is_waited_for() -> None:
    before, stop = Snapshot.take(), threading.Event()
    threading.Thread(target=stop.wait, args=(0.2,)).start()
    assert before.leaks() == []


@pytest.mark.skipif(sys.platform != "linux", reason="child processes are listed from /proc")
def test_child_process_is_seen_unless_exempt() -> None:
    before, program = Snapshot.take(), "print(flush=True), input()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()  # a process that is still starting has no command line in /proc
        assert process.pid in child_processes()
        leaks = before.leaks(grace_s=0)
        exempted = before.leaks(exempt=lambda: {process.pid}, grace_s=0)
        before.restore()
        assert process.wait(5) == -signal.SIGKILL
    assert leaks == [f"process {process.pid} ({sys.executable} -c {program})"]
    assert exempted == []
    assert process.pid not in child_processes()


def test_variables_are_seen_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTITA_OLD", "a")
    monkeypatch.setenv("PARTITA_GONE", "a")
    before = Snapshot.take()
    os.environ["PARTITA_NEW"] = "1"
    os.environ["PARTITA_OLD"] = "b"
    del os.environ["PARTITA_GONE"]
    leaks = before.leaks()
    before.restore()
    assert leaks == [
        "environment variable PARTITA_GONE ('a' -> None)",
        "environment variable PARTITA_NEW (None -> '1')",
        "environment variable PARTITA_OLD ('a' -> 'b')",
    ]
    assert before.leaks() == []


def test_fixture_fails_the_test_that_leaks(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("from tests.conftest import no_leaks")
    pytester.makepyfile(
        """
        import os

        def test_leaks():
            os.environ["PARTITA_LEAK"] = "1"

        def test_next():
            assert "PARTITA_LEAK" not in os.environ
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*left behind: environment variable PARTITA_LEAK (None -> '1')*"])
