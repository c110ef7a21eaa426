"""Whether numbers of this rank are finite, found out without waiting for them."""

from torch import Tensor

from partita.memory import accelerator


class FiniteWatch:
    """Remembers one flag, on the device, for all that was watched since the last update.

    Attributes: ``traces``: gradients that this rank sends are watched too.
    """

    def __init__(self) -> None:
        self.traces = False
        self._finite: Tensor | None = None

    def watch(self, value: Tensor) -> None:
        """Remember whether all elements of ``value`` are finite."""
        finite = value.detach().isfinite().all()
        self._finite = finite if self._finite is None else self._finite & finite

    @property
    def is_suspect(self) -> bool:
        """Whether anything watched is not finite. Reads it from the device."""
        return self._finite is not None and not bool(accelerator.read(self._finite))

    def clear(self) -> None:
        """Forget what was watched."""
        self._finite = None
