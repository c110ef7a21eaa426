"""Environment variables that launchers set in each process: torchrun, Kubernetes and Slurm's srun.

On Kubernetes, Kubeflow's PyTorchJob and Indexed Jobs are supported. No other library file uses the environment.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from partita.config.messages import shown
from partita.errors import ConfigError

Environ = Mapping[str, str]
_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_INDEXED_JOB = ("JOB_COMPLETION_INDEX", *_TORCH[1:])
_STEP_SIZES = "SLURM_STEP_TASKS_PER_NODE"
_STEP_HOSTS, _JOB_HOSTS = "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"
# Only srun's tasks have these; a batch script and a shell of salloc also have SLURM_PROCID or SLURM_NTASKS.
_STEP = ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", _STEP_SIZES, _STEP_HOSTS)
# Ports that are neither reserved nor usually assigned to outgoing connections.
_FIRST_PORT, _NUM_PORTS = 10_000, 20_000


@dataclass(frozen=True)
class LaunchEnvironment:
    """Position of this process among the processes of the job, over all nodes and on its node.

    ``local_rank`` is None if the launcher does not set it. ``restarts`` is the number of restarts that torchrun has
    counted on this node; it may differ between nodes. ``url`` is the rendezvous address (empty if none is needed).
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None
    local_world_size: int = 1
    restarts: int = 0
    url: str = ""


def launch_environment(environ: Environ | None = None, running: tuple[int, int] | None = None) -> LaunchEnvironment:
    """Return the launcher's values; without a launcher, those of a single process.

    Args:
        environ: environment variables; None: those of this process.
        running: rank and size of the default process group if it is initialized; they take precedence.

    Raises:
        ConfigError: a variable is missing, not a number or out of range; the message names it.
    """
    environ = os.environ if environ is None else environ
    names = _names(environ)
    if running is None and names is None:
        return LaunchEnvironment()
    rank_name, size_name, local_rank_name, local_size_name = names or _TORCH
    by_slurm = local_size_name == _STEP_SIZES
    url = ""
    if running is None:
        world_size = _number(environ, size_name, 1, None)
        rank = _number(environ, rank_name, 0, world_size)
        if world_size > 1:
            url = _url(environ, world_size, by_slurm=by_slurm)
    else:
        rank, world_size = running
    restarts = _number(environ, "TORCHELASTIC_RESTART_COUNT", 0, None, default=0)
    if local_rank_name not in environ:
        return LaunchEnvironment(rank, world_size, None, 1, restarts, url)
    if by_slurm:
        local_size = _slurm_local_size(environ, world_size)
    else:
        local_size = _number(environ, local_size_name, 1, world_size + 1, default=world_size)
    local_rank = _number(environ, local_rank_name, 0, local_size)
    return LaunchEnvironment(rank, world_size, local_rank, local_size, restarts, url)


def set_launch_environment(launch: LaunchEnvironment, host: str, port: int) -> None:
    """Set torchrun's variables in this process, for launchers that call functions in their own processes.

    Args:
        launch: values of this process.
        host: the host of rank 0.
        port: a free port on this host.
    """
    local = {"LOCAL_RANK": launch.local_rank or 0, "LOCAL_WORLD_SIZE": launch.local_world_size}
    values = {"RANK": launch.rank, "WORLD_SIZE": launch.world_size, **local, "MASTER_ADDR": host, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in values.items()})


def set_torch_variables() -> None:
    """Set torchrun's variables in this process if srun or Kubernetes has set others, for libraries that need them.

    Raises:
        ConfigError: a variable is missing, not a number or out of range; the message names it.
    """
    launch = launch_environment()
    if "RANK" not in os.environ and launch.url and launch.local_rank is not None:
        place = urlsplit(launch.url)
        set_launch_environment(launch, str(place.hostname), int(place.port or 0))


def use_cpu_in_accelerate() -> None:
    """Make accelerate and ``TrainingArguments`` use the CPU in this process, unless the user has set its variable."""
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")


def set_local_world_size(size: int) -> None:
    """Set the number of processes on this node, for launchers that do not."""
    os.environ["LOCAL_WORLD_SIZE"] = str(size)


def _names(environ: Environ) -> tuple[str, str, str, str] | None:
    """Return the variables of rank, world size, local rank and local world size; None if there is no launcher."""
    if "RANK" in environ:
        return _TORCH
    if "SLURM_PROCID" in environ and any(name in environ for name in _STEP):
        size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
        return "SLURM_PROCID", size, "SLURM_LOCALID", _STEP_SIZES
    if "JOB_COMPLETION_INDEX" in environ and ("WORLD_SIZE" in environ or "MASTER_ADDR" in environ):
        return _INDEXED_JOB  # without either, each pod is a separate run
    return _TORCH if "WORLD_SIZE" in environ else None


def _number(environ: Environ, name: str, least: int, below: int | None, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        raise ConfigError(
            f"environment variable {name} is missing, but other variables of the launcher are set; start the script "
            f"with torchrun or srun, set {name}, or unset RANK, WORLD_SIZE, JOB_COMPLETION_INDEX and SLURM_PROCID to "
            "run one process"
        )
    value = int(text) if re.fullmatch(r"[0-9]{1,10}", text.strip()) else -1
    if value < least or (below is not None and value >= below):
        limits = f"of at least {least}" if below is None else f"from {least} to {below - 1}"
        raise ConfigError(f"environment variable {name}: expected a whole number {limits}; got {shown(text)}")
    return value


# ---------------------------------------------------------------------------------------------------------- rendezvous


def _url(environ: Environ, world_size: int, *, by_slurm: bool) -> str:
    """Return the URL of rank 0's store.

    srun sets no address. The host is then the first one of the step, and the port is computed from the ids of job and
    step.
    """
    host = environ.get("MASTER_ADDR") or (_first_host(environ) if by_slurm else "")
    if not host:
        others = f" (or {_STEP_HOSTS}, or {_JOB_HOSTS})" if by_slurm else ""
        raise ConfigError(
            f"environment variable MASTER_ADDR is missing{others}: {world_size} ranks connect to rank 0's host; set it "
            "to this host, and MASTER_PORT to a free port there, the same for every rank"
        )
    if by_slurm and "MASTER_PORT" not in environ and "SLURM_JOB_ID" in environ:
        job = _number(environ, "SLURM_JOB_ID", 0, None)
        step = _number(environ, "SLURM_STEP_ID", 0, None, default=0)
        port = _FIRST_PORT + (31 * job + step) % _NUM_PORTS
    elif "MASTER_PORT" in environ:
        port = _number(environ, "MASTER_PORT", 1, 2**16)
    else:
        others = " (or SLURM_JOB_ID)" if by_slurm else ""
        raise ConfigError(
            f"environment variable MASTER_PORT is missing{others}: {world_size} ranks connect to a port of {host}; set "
            "it to a free port there, the same for every rank"
        )
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _first_host(environ: Environ) -> str:
    """Return rank 0's host from the host list of the step (or the job); empty if there is no list.

    For ``node[07-09,12],gpu1`` it is node07.
    """
    name = _STEP_HOSTS if _STEP_HOSTS in environ else _JOB_HOSTS
    text = environ.get(name)
    if text is None:
        return ""
    first = re.match(r"(?:[\w.-]|\[[\w,-]+\])+(?=,|$)", text.strip())
    if first is None:
        raise ConfigError(
            f"environment variable {name}: expected hosts such as 'node[07-09,12],gpu1'; got {shown(text)}"
        )
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", first[0])


# ------------------------------------------------------------------------------------------- number of ranks on a node


def _slurm_local_size(environ: Environ, world_size: int) -> int:
    """Return the number of tasks on this node: from srun's list, else from the request, else an even share."""
    if _STEP_SIZES in environ:
        return _listed_size(environ)
    num_nodes = _number(environ, "SLURM_NNODES", 1, None, default=1)
    return min(world_size, _number(environ, "SLURM_NTASKS_PER_NODE", 1, None, default=-(-world_size // num_nodes)))


def _listed_size(environ: Environ) -> int:
    """Return the number of tasks on this node, from the run-length list of all nodes: ``2(x3),1`` is 2, 2, 2, 1."""
    text = environ[_STEP_SIZES]
    node = _number(environ, "SLURM_NODEID", 0, None, default=0)
    for run in text.split(","):
        match = re.fullmatch(r"([1-9][0-9]{0,8})(?:\(x([1-9][0-9]{0,8})\))?", run.strip())
        if match is None:
            break
        node -= int(match[2] or 1)
        if node < 0:
            return int(match[1])
    raise ConfigError(
        f"environment variable {_STEP_SIZES}: expected tasks per node such as '2(x3),1', with an entry for "
        f"SLURM_NODEID; got {shown(text)}"
    )
