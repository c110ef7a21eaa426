"""Start a script on two processes, with plain accelerate or with partita."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROCESSES = 2
TIMEOUT_S = 280
# Without it, accelerate takes two processes without a GPU for a mistake.
PLAIN = {"ACCELERATE_USE_CPU": "true"}


def _search_path() -> list[str]:
    return [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]


def losses(script: list[str], config: dict[str, object] | None, folder: Path) -> list[float]:
    """Run a script as :func:`run` does. Return the numbers of the lines ``loss <number>`` that it prints."""
    printed = run(script, config, folder)
    found = [float(line.split()[1]) for line in printed.splitlines() if line.startswith("loss ")]
    assert found, f"no losses in: {printed[-2000:]}"
    return found


def run(script: list[str], config: dict[str, object] | None, folder: Path, timeout_s: float = TIMEOUT_S) -> str:
    """Run a script in ``folder``, and return what it prints.

    Args:
        script: the path of a script (or -m and a module), and its arguments.
        config: partita's configuration; None: run without partita.
    """
    launcher = [sys.executable, "-W", "ignore", "-m"]
    if config is None:
        launcher += ["torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"]
    else:
        path = folder / "config.json"
        path.write_text(json.dumps(config))
        launcher += ["partita.cli.main", "run", "--config", str(path), f"--processes={PROCESSES}"]
    process = subprocess.Popen(
        [*launcher, *script],
        cwd=folder,
        env={
            **os.environ,
            **(PLAIN if config is None else {}),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": os.pathsep.join(str(Path(each).resolve()) for each in _search_path()),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:  # closes the pipes, also after a time-out
        try:
            printed, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # the launcher ends its processes
            raise
    assert process.returncode == 0, f"{' '.join(script)}: {printed[-2000:]}\n{errors[-4000:]}"
    return printed
