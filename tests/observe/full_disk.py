"""A metrics file on a full disk."""

import os
from pathlib import Path

import pytest

from partita.observe.metrics import MetricsWriter

needs_full_disk = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")


def fill_disk(writer: MetricsWriter) -> None:
    """Let the next row, and closing the file, find a full disk."""
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, writer._file.fileno())
    os.close(full)
