"""The versions of the software that writes a checkpoint, for its manifest."""

from importlib.metadata import PackageNotFoundError, version

import torch


def versions() -> dict[str, str]:
    """Return the versions of partita and torch."""
    try:
        own = version("partita")
    except PackageNotFoundError:  # used from a checkout
        own = "not installed"
    return {"partita": own, "torch": torch.__version__}
