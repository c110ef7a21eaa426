"""Lightning on partita: one strategy for its Trainer, and one for Fabric.

    from partita.integrations.lightning import PartitaStrategy
    trainer = lightning.pytorch.Trainer(strategy=PartitaStrategy({"zero": {"stage": 3}}), ...)

    from partita.integrations.lightning.fabric import PartitaStrategy
    fabric = lightning.fabric.Fabric(strategy=PartitaStrategy({"zero": {"stage": 3}}), ...)

There are two classes because Lightning itself has separate strategies in ``lightning.pytorch`` and
``lightning.fabric``.
"""

from partita.integrations.extras import require

require(__name__, "lightning", "lightning")

from partita.integrations.lightning.trainer import PartitaStrategy  # noqa: E402  (Lightning is there)

__all__ = ["PartitaStrategy"]
