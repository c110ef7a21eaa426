"""Starts the ranks of one run and waits for them: `python -m benchmarks._ranks NUM_RANKS MODE WORK FOLDER`.

It is a process of its own so that it can stand in a network namespace of its own. When a rank fails, the others are
ended.
"""

import os
import socket
import subprocess
import sys
import time

from benchmarks._loopback import bring_up

POLL_S = 0.1


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
        ranks.append(subprocess.Popen(command, env=os.environ | own))
    while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
        time.sleep(POLL_S)
    failed = any(rank.poll() for rank in ranks)
    for rank in ranks:
        if failed:
            rank.kill()
        rank.wait()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
