"""Libraries that are there only where they were asked for."""

from importlib.util import find_spec

from partita.errors import PartitaError


def require(package: str, extra: str, *libraries: str) -> None:
    """Refuse to go on without the ``libraries`` that a ``package`` of partita's needs, which come with an ``extra``.

    Raises:
        PartitaError: one is not installed; names the extra.
    """
    for library in libraries:
        if find_spec(library) is None:
            raise PartitaError(f"{package} needs '{library}', which is not installed: pip install 'partita[{extra}]'")
