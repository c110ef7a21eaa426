"""accelerate's own checks, unmodified from the installed package, for ``partita run -m``.

The checks are the functions that the ``main`` of each script calls. Each rank writes their outcomes to its own file.
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

outcomes: dict[str, str] = {}  # by check: its error; empty if there is none


def recorded(name: str, check: Callable[..., None]) -> Callable[..., None]:
    @wraps(check)
    def run(*args: Any, **kwargs: Any) -> None:
        error = ""
        try:
            check(*args, **kwargs)
        except Exception as raised:  # of any type: the test knows the expected errors
            error = f"{type(raised).__name__}: {raised}"
            AcceleratorState._reset_state()  # the next check starts from a fresh state
            accelerate.Accelerator()
        outcomes[name] = outcomes.get(name) or error

    return run


def run_main(script: ModuleType) -> None:
    """Run all checks of a script, also after one has failed."""
    for name in script.main.__code__.co_names:
        check = getattr(script, name, None)
        if getattr(check, "__module__", None) == script.__name__:
            setattr(script, name, recorded(name, check))
    script.main()


def main(folder: Path) -> None:
    end, PartialState.destroy_process_group = PartialState.destroy_process_group, lambda *_: None
    for script in (test_script, test_sync):  # each would end the process group, which they share here
        run_main(script)
    state = PartialState()
    (folder / f"{state.process_index}.json").write_text(json.dumps(outcomes))
    end(state)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
