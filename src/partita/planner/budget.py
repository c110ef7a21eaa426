"""The memory budget of a rank: the bytes of each memory that its states and its working memory may use."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from partita.plan.residence import Tier


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes that a rank may use of each memory, for states and working memory.

    ``one_memory``: the device is the host's own processor; states on either tier count towards ``device``.
    """

    device: int
    host: int
    disk: int
    one_memory: bool = False

    def lacking(self, used: Counter[Tier]) -> list[Tier]:
        """Return the memories of which ``used`` exceeds the budget."""
        if self.one_memory:
            used = Counter({Tier.DEVICE: used[Tier.DEVICE] + used[Tier.HOST], Tier.DISK: used[Tier.DISK]})
        return [tier for tier in Tier if used[tier] > self.of(tier)]

    def of(self, tier: Tier) -> int:
        return {Tier.DEVICE: self.device, Tier.HOST: self.host, Tier.DISK: self.disk}[tier]

    def shared(self, num_ranks: int) -> "MemoryBudget":
        """Return the budget of one of ``num_ranks`` ranks on a node. They divide all memories evenly, except a device
        that each rank has for itself.
        """
        device = self.device // num_ranks if self.one_memory else self.device
        return MemoryBudget(device, self.host // num_ranks, self.disk // num_ranks, self.one_memory)

    @staticmethod
    def least(budgets: Sequence["MemoryBudget"]) -> "MemoryBudget":
        """Return the minimum of several budgets, for each memory."""
        device, host, disk = (min(budget.of(tier) for budget in budgets) for tier in Tier)
        return MemoryBudget(device, host, disk, budgets[0].one_memory)
