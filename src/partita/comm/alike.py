"""Settings that must be the same on every rank: otherwise each would train in its own way, or wait in vain."""

from collections.abc import Mapping

from partita.comm.collectives import Collectives
from partita.config.messages import shown
from partita.errors import ConfigError

_ABSENT = "nothing"


def check_settings_alike(settings: Mapping[str, object], collectives: Collectives, axes: tuple[str, ...]) -> None:
    """Compare what the ranks are set to, by the names of the settings.

    Raises:
        ConfigError: on every rank: names a setting that differs, and two ranks with their values.
    """
    every = collectives.exchange_objects(dict(settings), axes, "partita.initialize")
    for rank, other in enumerate(every):
        for name in [*every[0], *(name for name in other if name not in every[0])]:
            first, found = every[0].get(name, _ABSENT), other.get(name, _ABSENT)
            if first != found:
                raise ConfigError(
                    f"the ranks' settings differ: {name} is {shown(first)} on rank 0 and {shown(found)} on rank "
                    f"{rank}; give every rank the same configuration and optimizer"
                )
