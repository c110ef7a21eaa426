"""The optimizer's groups in a checkpoint, compared with those of a run by the names of their parameters."""

from partita.checkpoint.backend import Stored
from partita.checkpoint.names import GROUPS, some_of
from partita.errors import PartitaError
from partita.optim.states import Views


def _numbers(stored: Stored) -> list[int]:
    """Return the numbers of the stored groups."""
    return sorted({int(key.removeprefix(GROUPS).partition(".")[0]) for key in stored.values if key.startswith(GROUPS)})


def differing_groups(stored: Stored, views: Views) -> dict[int, list[str]]:
    """Return, by number, the stored groups that have other parameters than the run's groups: the names in the
    checkpoint.

    Only parameters that train are compared. A stored group that the run does not have differs if it has any of them.
    """
    trained = {view.member.fqn for view in views if view.member.segment.trains}
    found = dict[int, list[str]]()
    for number in _numbers(stored):
        key = f"{GROUPS}{number}.params"
        names = stored.value(key) if key in stored.values else []
        if trained.intersection(names) != trained.intersection(views.names_in_groups.get(number, ())):
            found[number] = names
    return found


def lacking_groups(stored: Stored, num_groups: int) -> list[str]:
    """Return patterns of the keys of the stored groups that an optimizer with ``num_groups`` groups lacks."""
    return [f"{GROUPS}{number}.*" for number in _numbers(stored) if number >= num_groups]


def check_groups(stored: Stored, differing: dict[int, list[str]], num_groups: int) -> None:
    """Check that no group of the optimizer, which has ``num_groups``, has other parameters than in the checkpoint.

    Raises:
        PartitaError: one has.
    """
    for number, names in differing.items():
        if number < num_groups:
            raise PartitaError(
                f"checkpoint: the optimizer's group {number} has other parameters than in '{stored.folder}': build "
                "the optimizer with the same groups, or load with strict=False, which keeps the configured settings"
            )
        raise PartitaError(
            f"checkpoint: the optimizer has no group {number}, which '{stored.folder}' has ({some_of(names)}): call "
            "engine.optimizer.add_param_group before engine.load, or load with strict=False, which loads no states of "
            "these parameters"
        )
