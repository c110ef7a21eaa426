"""Check that optional libraries are installed."""

from importlib.util import find_spec

from partita.errors import PartitaError


def require(package: str, extra: str, *libraries: str) -> None:
    """Check that the ``libraries`` that a ``package`` of partita needs are installed; the ``extra`` installs them.

    Raises:
        PartitaError: a library is not installed; the message names the extra.
    """
    for library in libraries:
        if find_spec(library) is None:
            raise PartitaError(f"{package} needs '{library}', which is not installed: pip install 'partita[{extra}]'")
