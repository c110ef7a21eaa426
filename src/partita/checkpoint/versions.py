"""What writes a checkpoint, as its manifest says."""

from importlib.metadata import PackageNotFoundError, version

import torch


def versions() -> dict[str, str]:
    """The versions of partita and torch."""
    try:
        own = version("partita")
    except PackageNotFoundError:  # used from a checkout
        own = "not installed"
    return {"partita": own, "torch": torch.__version__}
