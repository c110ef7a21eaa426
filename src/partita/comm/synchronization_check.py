"""Calls that one rank may have made alone, such as saving: ranks that wait elsewhere are named within seconds, not at
the time-out. A rank that is merely late is waited for.
"""

import atexit
import signal
import threading

import torch

from partita.comm.group import Group
from partita.comm.watchdog import Watchdog
from partita.errors import PartitaError

# Between two looks at what the others are doing.
PATIENCE_S = 1.0
# From a process's exit until it is ended.
GRACE_S = 5


def attend(group: Group, watchdog: Watchdog | None, call: str) -> None:
    """Wait until every rank of the group is at ``call`` (its name, at most 40 letters).

    Raises:
        PartitaError: a rank waits in another collective, which this one is no part of; or it has ended.
    """
    message = group.exchange(torch.zeros(1, dtype=torch.float32, device="cpu"), call)
    if watchdog is None:
        message.wait()
        return
    with watchdog.attending(call):
        before = dict[int, int]()
        while not message.wait_for(PATIENCE_S):
            found = watchdog.waiting_elsewhere(call)
            stuck = [rank for rank in group.ranks if rank in found and before.get(rank) == found[rank]]
            if stuck:
                atexit.register(_end_soon)
                raise PartitaError(
                    f"rank {group.index} is at {call}, and rank {', '.join(map(str, stuck))} waits for it elsewhere: "
                    f"{call} is to be called on every rank (rank 0 alone writes)\n{watchdog.describe_ranks()}"
                )
            before = found
        message.wait()


def _end_soon() -> None:
    """Have the process end even if gloo's destructor waits for the message, which nobody will answer."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(GRACE_S)
