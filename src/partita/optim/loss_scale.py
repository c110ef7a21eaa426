"""The factor that keeps 16-bit gradients above the smallest number fp16 can hold.

Source: Micikevicius et al., "Mixed Precision Training", 2018, section 3.2; the dynamic rule is that of NVIDIA's Apex.
"""

import math

import torch
from torch import Tensor

from partita.config import schema
from partita.errors import PartitaError

SMALLEST = 2.0**-10
FACTOR = 2.0


class LossScale:
    """The loss is multiplied by ``value`` before backward, gradients are divided by it before the update.

    A dynamic scale halves when a gradient is not finite and doubles after ``loss_scale_window`` good steps.

    Args:
        section: its ``loss_scale`` is ``"dynamic"`` or a fixed factor.
        needed: whether the compute dtype has fp16's range; otherwise the scale is 1 for ever.
    """

    def __init__(self, section: schema.Precision, needed: bool) -> None:
        self.dynamic = needed and section.loss_scale == "dynamic"
        setting = section.initial_loss_scale if section.loss_scale == "dynamic" else section.loss_scale
        self.value = setting if needed else 1.0
        self._largest = math.inf
        self._window = section.loss_scale_window
        self._good_steps = 0

    def carry(self, loss: Tensor) -> None:
        """Lower the scale to the largest that the gradient of ``loss`` can hold. In fp16, 2**16 is infinite.

        Raises:
            PartitaError: the scale is fixed, and larger.
        """
        if self.value == 1.0:
            return
        dtype = _narrowest(loss)
        largest = FACTOR ** math.floor(math.log2(torch.finfo(dtype).max))
        self._largest = min(self._largest, largest)
        if self.value <= largest:
            return
        if not self.dynamic:
            raise PartitaError(
                f"precision.loss_scale: {self.value:g} is more than the loss, which was computed in {dtype}, can be "
                f"multiplied by; set it to {largest:g} or less, or compute the loss in fp32 (logits.float())"
            )
        self.value = largest

    def succeeded(self) -> None:
        self._good_steps += 1
        if self.dynamic and self._good_steps % self._window == 0:
            self.value = min(self.value * FACTOR, self._largest)

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


def _narrowest(loss: Tensor) -> torch.dtype:
    """Return the dtype with the smallest range that a loss had before it was cast, scaled or divided."""
    found, (node, index) = loss.dtype, (loss.grad_fn, 0)
    while (metadata := getattr(node, "_input_metadata", None)) and not metadata[index].shape:
        found = min(found, metadata[index].dtype, key=lambda dtype: torch.finfo(dtype).max)
        before = [(other, number) for other, number in node.next_functions if other is not None] if node else []
        if len(before) != 1:
            break
        node, index = before[0]
    return found
