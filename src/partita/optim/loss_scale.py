"""The factor that keeps 16-bit gradients above the smallest number fp16 can hold.

Source: Micikevicius et al., "Mixed Precision Training", 2018, section 3.2; the dynamic rule is that of NVIDIA's Apex.
"""

from partita.errors import PartitaError

INITIAL = 2.0**16
SMALLEST = 2.0**-10
FACTOR = 2.0
GROWTH_INTERVAL = 2000  # steps


class LossScale:
    """The loss is multiplied by ``value`` before backward, gradients are divided by it before the update.

    A dynamic scale halves when a gradient is not finite and doubles after :data:`GROWTH_INTERVAL` good steps.

    Args:
        setting: ``"dynamic"`` or a fixed factor.
        needed: whether the compute dtype has fp16's range; otherwise the scale is 1 for ever.
    """

    def __init__(self, setting: str | float, needed: bool) -> None:
        self.dynamic = needed and setting == "dynamic"
        self.value = 1.0 if not needed else INITIAL if setting == "dynamic" else float(setting)
        self._good_steps = 0

    def succeeded(self) -> None:
        self._good_steps += 1
        if self.dynamic and self._good_steps % GROWTH_INTERVAL == 0:
            self.value *= FACTOR

    def counters(self) -> dict[str, float]:
        """The scale and the good steps since a gradient was last not finite, for a checkpoint."""
        return {"loss_scale": self.value, "good_steps": self._good_steps}

    def restore(self, counters: dict[str, float]) -> None:
        """Go on from what :meth:`counters` was, where the scale changes by itself."""
        if self.dynamic:
            self.value = float(counters["loss_scale"])
            self._good_steps = int(counters["good_steps"])

    def overflowed(self, culprit: str) -> None:
        """A gradient was not finite.

        Raises:
            PartitaError: the scale cannot go lower; names the ``culprit``.
        """
        self._good_steps = 0
        if not self.dynamic:
            return
        if self.value <= SMALLEST:
            raise PartitaError(
                f"the loss scale is at its smallest value ({SMALLEST:g}) and gradients are still not finite: "
                f"{culprit}. Look for a division by zero or a too large learning rate, or use precision.compute bf16"
            )
        self.value /= FACTOR
