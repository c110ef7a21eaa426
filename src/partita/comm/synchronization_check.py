"""Check that all ranks make a call that users tend to make on one rank only, such as saving. Ranks that wait in another
collective are named within seconds, not at the time-out; late ranks are waited for.
"""

import atexit
import signal
import threading

import torch

from partita.comm.group import Group
from partita.comm.watchdog import Watchdog
from partita.errors import PartitaError

# Between the first questions to the other ranks, and at most between two questions.
PATIENCE_S, MOST_S = 1.0, 60.0
# From the start of a process's exit until it is killed.
GRACE_S = 5


def check_synchronized(group: Group, watchdog: Watchdog | None, call: str) -> None:
    """Wait until every rank of the group is at ``call`` (its name, at most 40 letters).

    Raises:
        PartitaError: a rank waits in another collective, or has ended.
    """
    message = group.exchange(torch.zeros(1, dtype=torch.float32, device="cpu"), call)
    if watchdog is None:
        message.wait()
        return
    with watchdog.synchronizing(call):
        before, patience_s = dict[int, int](), PATIENCE_S
        while not message.wait_for(patience_s):
            found = watchdog.waiting_in_other_collectives(call)
            patience_s = PATIENCE_S if found != before else min(2 * patience_s, MOST_S)
            stuck = [rank for rank in group.ranks if rank in found]
            if stuck and found == before:
                atexit.register(_end_soon)
                group.transport.abandon_messages()
                raise PartitaError(
                    f"rank {group.index} is at {call}, but rank {', '.join(map(str, stuck))} waits in another "
                    f"collective: call {call} on every rank (only rank 0 writes)\n{watchdog.describe_ranks()}"
                )
            before = found
        message.wait()


def _end_soon() -> None:
    """Make sure that the process exits, even though gloo's destructor waits for a message that will never arrive."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(GRACE_S)
