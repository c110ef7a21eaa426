"""The memory budget of a rank: usable bytes of each memory."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from partita.table.residence import Tier


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes that a rank may use of each memory, for states and working memory.

    ``one_memory``: the device is the CPU; states on the device and on the host both count towards ``device``.
    """

    device: int
    host: int
    disk: int
    one_memory: bool = False

    def shortfall(self, used: Counter[Tier]) -> list[Tier]:
        """Return the tiers in which ``used`` exceeds the budget."""
        if self.one_memory:
            used = Counter({Tier.DEVICE: used[Tier.DEVICE] + used[Tier.HOST], Tier.DISK: used[Tier.DISK]})
        return [tier for tier in Tier if used[tier] > self.of(tier)]

    def of(self, tier: Tier) -> int:
        """Return the usable bytes of a tier."""
        return {Tier.DEVICE: self.device, Tier.HOST: self.host, Tier.DISK: self.disk}[tier]

    def shared(self, num_ranks: int) -> "MemoryBudget":
        """Return the budget of one of ``num_ranks`` ranks on a node.

        Ranks divide all memories evenly, except that each rank has its own accelerator.
        """
        device = self.device // num_ranks if self.one_memory else self.device
        return MemoryBudget(device, self.host // num_ranks, self.disk // num_ranks, self.one_memory)

    @staticmethod
    def least(budgets: Sequence["MemoryBudget"]) -> "MemoryBudget":
        """Return the minimum of several budgets, for each memory."""
        device, host, disk = (min(budget.of(tier) for budget in budgets) for tier in Tier)
        return MemoryBudget(device, host, disk, budgets[0].one_memory)
