"""What several ranks hold of the parameters is the same bits on all of them: whether it still is.

Where changes travel as codes, each rank adds them to what it has: one that has other values keeps them, and trains on.
"""

from collections import Counter
from collections.abc import Sequence

import torch

from partita.comm.together import together
from partita.errors import PartitaError
from partita.memory import accelerator
from partita.optim.updater import Updater
from partita.sharding.runtime import Runtime
from partita.sharding.unit import Unit

CALL = "a check of what ranks hold alike"


class AlikeCheck:
    """Compares them every so many steps.

    Args:
        every: optimizer steps between two comparisons; 0: none are made.
    """

    def __init__(self, runtime: Runtime, updater: Updater, every: int) -> None:
        self._units = runtime.units
        self._updater = updater
        self._all_ranks = runtime.collectives.all_ranks
        self._group = runtime.collectives.group(runtime.row.rest_alike_axes)
        self._every = every if self._group.size > 1 else 0

    def after_update(self) -> None:
        """Compare, if it is time to; a collective then.

        Raises:
            PartitaError: as :meth:`compare` does.
        """
        if self._every and self._updater.steps % self._every == 0:
            self.compare()

    def compare(self) -> None:
        """One checksum per unit: the sum of its bits as whole numbers.

        Raises:
            PartitaError: on all ranks: one has other bits of a unit than the others.
        """
        self._updater.wait_for_updates()
        own = torch.tensor([_checksum(unit) for unit in self._units], dtype=torch.int64, device="cpu")
        every = self._group.exchange(own, CALL).wait()
        with together(self._all_ranks):
            for unit, column in zip(self._units, every.unbind(1), strict=True):
                self._check(unit, column.tolist())

    def _check(self, unit: Unit, checksums: Sequence[int]) -> None:
        usual = Counter(checksums).most_common(1)[0][0]
        by_rank = dict(zip(self._group.ranks, checksums, strict=True))
        differing = [str(rank) for rank, checksum in by_rank.items() if checksum != usual]
        if differing:
            like = next(rank for rank, checksum in by_rank.items() if checksum == usual)
            raise PartitaError(
                f"step {self._updater.steps}: rank {', '.join(differing)} has other parameters of {unit.title} than "
                f"rank {like}, which should be the same bits on ranks {', '.join(map(str, by_rank))} "
                "(communication.check_every): one of them wrote where nothing sees it, or its memory or "
                "its processor is faulty. Go on from a checkpoint (engine.load); write inside `with "
                "engine.gathered(..., modify=True)`"
            )


def _checksum(unit: Unit) -> int:
    """Of what rests of a unit on this rank."""
    total = 0
    for segment in unit.segments:
        lease = segment.rest.lend()
        words = lease.wait().view(torch.int32)  # segments are padded to whole words
        total += int(accelerator.read(words.sum(dtype=torch.int64)))
        lease.end(changed=False)
    return total
