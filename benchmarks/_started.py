"""Start ranks on this machine with a given Python interpreter, and so with the partita installed for it."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks._common import ROOT
from benchmarks._ranks import wait


def started(
    module: str,
    arguments: Sequence[str],
    num_ranks: int,
    folder: Path,
    *,
    python: Path = Path(sys.executable),
    environment: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Run ``python -m module arguments`` as every rank, and return the contents of each ``folder/RANK.json``.

    Raises:
        RuntimeError: a rank failed; its output is printed.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    common = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = []
    for rank in range(num_ranks):
        own = {name: str(value) for name, value in (common | {"RANK": rank, "LOCAL_RANK": rank}).items()}
        command = [str(python), "-m", module, *arguments]
        with Path(folder, f"{rank}.log").open("w") as log:
            ranks.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env={**os.environ, **(environment or {}), **own},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    if wait(ranks, str(folder)):
        raise RuntimeError(f"{module} with {python} on {num_ranks} ranks failed")
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(num_ranks)]
