"""Recording of the timeline of a few steps of a run."""

from pathlib import Path

from partita.engine.engine import Engine
from partita.engine.profile import Profile, ProfileReport

# Steps before the watched ones, in which optimizers allocate states and the order of gathers is recorded.
WARM_UP = 3


def trace_of(out: Path, rank: int) -> Path:
    """Return the path of a rank's trace."""
    return out / f"trace-{rank}.json.gz"


class WatchedSteps:
    """A profile of ``num`` steps after ``start``, up to ``last``. Each rank writes its trace to the folder ``out``."""

    def __init__(self, engine: Engine, out: Path, num: int, start: int, last: int) -> None:
        self._engine = engine
        self._path = trace_of(out, engine.mesh.rank)
        self._first = start + max(0, min(WARM_UP, last - start - num)) + 1
        self._last = min(self._first + num - 1, last)
        self._profile: Profile | None = None

    def before(self, step: int) -> None:
        """Start the profile if ``step``, which comes next, is to be watched."""
        if self._first <= step <= self._last and self._profile is None:
            self._profile = self._engine.profile(self._path).__enter__()

    def after(self, step: int) -> ProfileReport | None:
        """End the profile after the last watched step, and return its report; None after other steps."""
        if self._profile is None or step < self._last:
            return None
        profile, self._profile = self._profile, None
        profile.__exit__(None, None, None)
        return profile.report

    def close(self) -> None:
        """Abandon the profile without writing it, if the run ends before the last watched step."""
        if self._profile is not None:
            self._profile.abandon()
            self._profile = None
