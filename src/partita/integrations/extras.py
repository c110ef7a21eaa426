"""Libraries that are there only where they were asked for."""

from importlib.util import find_spec

from partita.errors import PartitaError


def require(library: str, extra: str) -> None:
    """Refuse to go on without a ``library``, which comes with an ``extra`` of partita's.

    Raises:
        PartitaError: it is not installed; names the extra.
    """
    if find_spec(library) is None:
        raise PartitaError(
            f"partita.integrations.{extra} needs '{library}', which is not installed: pip install 'partita[{extra}]'"
        )
