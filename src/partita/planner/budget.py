"""What the states and the working memory of a rank may take of each memory."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from partita.plan.residence import Tier


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes that a rank may use of each memory, for states and working memory.

    ``one_memory``: the device is the host's own processor; what rests on either counts towards ``device``.
    """

    device: int
    host: int
    disk: int
    one_memory: bool = False

    def lacking(self, used: Counter[Tier]) -> list[Tier]:
        """The memories that ``used`` is more than there is of."""
        if self.one_memory:
            used = Counter({Tier.DEVICE: used[Tier.DEVICE] + used[Tier.HOST], Tier.DISK: used[Tier.DISK]})
        return [tier for tier in Tier if used[tier] > self.of(tier)]

    def of(self, tier: Tier) -> int:
        return {Tier.DEVICE: self.device, Tier.HOST: self.host, Tier.DISK: self.disk}[tier]

    def shared(self, num_ranks: int) -> "MemoryBudget":
        """The share of a rank on a node with so many: of all but a device of its own."""
        device = self.device // num_ranks if self.one_memory else self.device
        return MemoryBudget(device, self.host // num_ranks, self.disk // num_ranks, self.one_memory)

    @staticmethod
    def least(budgets: Sequence["MemoryBudget"]) -> "MemoryBudget":
        """What every one of them has."""
        device, host, disk = (min(budget.of(tier) for budget in budgets) for tier in Tier)
        return MemoryBudget(device, host, disk, budgets[0].one_memory)
