"""accelerate's own checks, unmodified from the installed package, for ``partita run -m``.

It runs what the ``main`` of each script calls, and writes what came of it to a folder, a file for each rank.
"""

import json
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import accelerate
from accelerate.state import AcceleratorState, PartialState
from accelerate.test_utils.scripts import test_script, test_sync

outcomes: dict[str, str] = {}  # by check: how its error begins; empty where there is none


def recorded(name: str, check: Callable[..., None]) -> Callable[..., None]:
    @wraps(check)
    def run(*args: Any, **kwargs: Any) -> None:
        error = ""
        try:
            check(*args, **kwargs)
        except Exception as raised:  # of whatever kind: what is expected is in the test
            error = f"{type(raised).__name__}: {raised}"
            AcceleratorState._reset_state()  # what it left is not the next one's
            accelerate.Accelerator()
        outcomes[name] = outcomes.get(name) or error

    return run


def run_main(script: ModuleType) -> None:
    """Run all of a script; a check that fails does not end it."""
    for name in script.main.__code__.co_names:
        check = getattr(script, name, None)
        if getattr(check, "__module__", None) == script.__name__:
            setattr(script, name, recorded(name, check))
    script.main()


def main(folder: Path) -> None:
    end, PartialState.destroy_process_group = PartialState.destroy_process_group, lambda *_: None
    for script in (test_script, test_sync):  # each ends the process group, which they share here
        run_main(script)
    state = PartialState()
    (folder / f"{state.process_index}.json").write_text(json.dumps(outcomes))
    end(state)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
