"""Process that runs a script on partita: ``python -m partita.cli.script SETTINGS(JSON) [-m] SCRIPT [ARGS]``.

``partita run --processes N`` starts N of them; for a single process it calls :func:`run_script`.
"""

import json
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from partita.cli.process import end_with_parent, outcome_of


def run_script(settings: Mapping[str, object] | None, command: Sequence[str]) -> None:
    """Run ``command`` ([-m] SCRIPT ARGS) as Python does, with partita in place of accelerate, transformers' Trainer and
    DeepSpeed.

    ``settings`` are partita's; None: they come from the script's own arguments.

    Raises:
        PartitaError: accelerate or transformers is not installed, or the settings are wrong.
    """
    from partita.integrations.huggingface import activate  # needs the extra hf, and takes seconds to import
    from partita.integrations.replace_deepspeed import replace_deepspeed

    activate(settings)
    replace_deepspeed()
    if command[0] == "-m":
        sys.path.insert(0, str(Path.cwd()))
        sys.argv = list(command[1:])
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(command[0]).resolve().parent))
        sys.argv = list(command)
        runpy.run_path(command[0], run_name="__main__")


def main(arguments: Sequence[str]) -> int:
    """Run the script on this rank; return the exit code, unless the script ends the process itself."""
    return outcome_of(lambda: run_script(json.loads(arguments[0]), arguments[1:]))


if __name__ == "__main__":
    end_with_parent()
    sys.exit(main(sys.argv[1:]))
