"""Starts the ranks of one run and waits for them: `python -m benchmarks._ranks NUM_RANKS MODE WORK FOLDER`.

It is a process of its own so that it can stand in a network namespace of its own. When a rank fails, the others are
ended, and what it said is printed.
"""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from benchmarks._loopback import bring_up

POLL_S = 0.1
LAST_CHARACTERS = 3000


def main() -> int:
    num_ranks, mode, work, folder = int(sys.argv[1]), *sys.argv[2:]
    bring_up()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    ranks = []
    for rank in range(num_ranks):
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
        network = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        own = {name: str(value) for name, value in (places | network).items()}
        command = [sys.executable, "-m", "benchmarks._rank", mode, work, folder]
        with Path(folder, f"{rank}.log").open("w") as said:
            ranks.append(subprocess.Popen(command, env=os.environ | own, stdout=said, stderr=subprocess.STDOUT))
    return wait(ranks, folder)


def wait(ranks: list[subprocess.Popen[bytes]], folder: str) -> int:
    """Wait for all ranks, or for the first that fails."""
    while True:
        failed = [rank for rank, process in enumerate(ranks) if process.poll()]
        if failed:
            for process in ranks:
                process.kill()
                process.wait()
            for rank in failed:
                print(f"rank {rank}:\n{Path(folder, f'{rank}.log').read_text()[-LAST_CHARACTERS:]}", flush=True)
            return 1
        if all(process.poll() == 0 for process in ranks):
            return 0
        time.sleep(POLL_S)


if __name__ == "__main__":
    sys.exit(main())
