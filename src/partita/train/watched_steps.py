"""A few steps of a run whose timeline is written down."""

from pathlib import Path

from partita.engine.engine import Engine
from partita.engine.profile import Profile, ProfileReport

# Steps before them: in these, optimizers make their states, and the order of gathers is learned.
WARM_UP = 3


def trace_of(out: Path, rank: int) -> Path:
    """Where a rank's trace is."""
    return out / f"trace-{rank}.json.gz"


class WatchedSteps:
    """``num`` steps of those after ``start``, up to ``last``. Each rank writes its trace into the folder ``out``."""

    def __init__(self, engine: Engine, out: Path, num: int, start: int, last: int) -> None:
        self._engine = engine
        self._path = trace_of(out, engine.mesh.rank)
        self._first = start + max(0, min(WARM_UP, last - start - num)) + 1
        self._last = min(self._first + num - 1, last)
        self._profile: Profile | None = None

    def before(self, step: int) -> None:
        """This step comes next."""
        if self._first <= step <= self._last and self._profile is None:
            self._profile = self._engine.profile(self._path).__enter__()

    def after(self, step: int) -> ProfileReport | None:
        """This step is done; after the last, what they waited for."""
        if self._profile is None or step < self._last:
            return None
        profile, self._profile = self._profile, None
        profile.__exit__(None, None, None)
        return profile.report

    def close(self) -> None:
        """Leave what was watched so far unwritten, if the run ends before the last of them."""
        if self._profile is not None:
            self._profile.abandon()
            self._profile = None
