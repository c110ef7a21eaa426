"""Start the ranks of one run and wait for them.

    python -m benchmarks._ranks NUM_RANKS NETWORK MODE WORK FOLDER LIMIT_S

This is a separate process, so that it can run in its own network namespace. NETWORK is a JSON object of
:class:`benchmarks._network.Network`; the ranks are spread evenly over its hosts. If a rank fails, the others are
killed, and its output is printed.
"""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from benchmarks._network import LOOPBACK, Network, bring_up

POLL_S = 0.1
LAST_CHARACTERS = 3000


def main() -> int:
    num_ranks, network = int(sys.argv[1]), Network(**json.loads(sys.argv[2]))
    mode, work, folder, limit_s = sys.argv[3:]
    if network.interface == LOOPBACK:
        bring_up()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    ranks, num_local = [], num_ranks // len(network.hosts)
    for rank in range(num_ranks):
        host, local = network.place(rank, num_ranks)
        places = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_local}
        addresses = {"MASTER_ADDR": network.address, "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": network.interface}
        own = {name: str(value) for name, value in (places | addresses).items()}
        command = [*network.hosts[host], sys.executable, "-m", "benchmarks._rank", mode, work, folder, limit_s]
        with Path(folder, f"{rank}.log").open("w") as log:
            ranks.append(subprocess.Popen(command, env=os.environ | own, stdout=log, stderr=subprocess.STDOUT))
    return wait(ranks, folder)


def wait(ranks: list[subprocess.Popen[bytes]], folder: str) -> int:
    """Wait for all ranks; kill all when one fails. Return the exit status."""
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
