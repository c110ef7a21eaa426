"""The memory budget that all ranks use, so that they choose the same tiers."""

import socket
from collections import Counter

from partita.comm.collectives import Collectives
from partita.config.schema import Offload
from partita.errors import PartitaError
from partita.layout.budget import MemoryBudget
from partita.layout.placement import has_auto_tiers
from partita.memory.capacity import free_budget


def agreed_budget(offload: Offload, collectives: Collectives) -> MemoryBudget | None:
    """Return the minimum of all ranks' budgets, the same on all ranks; None if the config names every tier.

    Ranks on one node (with the same host name) share its memory and its disk evenly.

    Raises:
        PartitaError: on every rank, if one of them cannot determine its free memory.
    """
    if not has_auto_tiers(offload):
        return None
    budget: MemoryBudget | str
    try:
        budget = free_budget(collectives.mesh.device, offload)
    except PartitaError as error:
        budget = str(error)
    every = collectives.all_ranks.exchange_objects((socket.gethostname(), budget), "partita.initialize")
    on_node = Counter(host for host, _ in every)
    budgets = []
    for rank, (host, found) in enumerate(every):
        if isinstance(found, str):
            raise PartitaError(f"{found} (on rank {rank})")
        budgets.append(found.shared(on_node[host]))
    return MemoryBudget.least(budgets)
