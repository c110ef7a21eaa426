"""``partita.tune``: find the best plan for a model on this machine with short measured trials."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from partita.config.launchers import launch_environment
from partita.config.messages import format_bytes
from partita.config.resolve import resolve
from partita.config.schema import Config
from partita.config.write import write_yaml
from partita.errors import ConfigError
from partita.memory import accelerator
from partita.memory.capacity import host_memory, usable_cores
from partita.prediction.machine import Machine, machine_named
from partita.prediction.measure_machine import measure_machine
from partita.prediction.model_source import ModelSource
from partita.prediction.plan import Plan, default_samples
from partita.prediction.tune.results import Results
from partita.prediction.tune.space import Candidate, Space
from partita.prediction.tune.target import Target
from partita.prediction.tune.trial import TrialResult, Trials

# Plans whose predicted time is at most NEAR_BEST times the best one are measured first, MAX_STARTS that train.
NEAR_BEST, MAX_STARTS = 1.25, 3
# Minimal share of the step time that a change must save. Smaller differences are noise.
MIN_GAIN = 0.02
NUM_TRIALS, NUM_STEPS, TIMEOUT_S = 12, 5, 600.0
THIS = "this"


@dataclass(frozen=True)
class Trial:
    """A candidate, and the outcome of its trial."""

    candidate: Candidate
    outcome: TrialResult

    @property
    def seconds(self) -> float:
        """Measured seconds of a step; infinity if the trial failed."""
        return float("inf") if self.outcome.step_s is None else self.outcome.step_s


@dataclass(frozen=True)
class Tuned:
    """The ``trials`` in order, and the ``best`` of them.

    ``complete``: True if all changes of the best were tried; False if the limit of trials was reached before.
    """

    target: Target
    source: ModelSource
    num_ranks: int
    trials: tuple[Trial, ...]
    complete: bool

    @property
    def best(self) -> Trial:
        return min(self.trials, key=lambda trial: trial.seconds)

    def config(self) -> dict[str, Any]:
        """Return the config of the best trial, for :func:`partita.initialize`."""
        return dict(self.best.candidate.config)

    def write(self, path: str | Path) -> None:
        """Write :meth:`config` as YAML. For a job, write the full job with this engine section.

        Raises:
            ConfigError: the file cannot be written.
        """
        job, content = self.target.job(), self.config()
        if job is not None:
            content = {**job.model_dump(mode="json", exclude_unset=True), "engine": content}
        write_yaml(path, content)


@dataclass(frozen=True)
class Effort:
    """Limits of a tuning: the number of ``trials``, and the ``steps`` and the timeout of each trial."""

    trials: int = NUM_TRIALS
    steps: int = NUM_STEPS
    timeout_s: float = TIMEOUT_S

    def __post_init__(self) -> None:
        for name, value in (("trials", self.trials), ("steps", self.steps), ("timeout", self.timeout_s)):
            if not value > 0:
                raise ConfigError(f"--{name}: expected more than 0; got {value}")


def tune(
    model: str | Path | Target,
    *,
    processes: int | None = None,
    machine: str | Machine | None = None,
    config: str | Path | Mapping[str, Any] | Config | None = None,
    samples: int | None = None,
    effort: Effort = Effort(),
    results: str | Path | None = None,
    on_trial: Callable[[Trial], None] | None = None,
) -> Tuned:
    """Find the fastest config on this machine.

    First, plans are measured in the order of their predicted times; then changes of the best plan in a single setting.
    Each trial runs in separate processes. The samples of a step and the precision are constant.

    Args:
        model: a model as in :func:`partita.plan`, or the file of a job of ``partita train``.
        processes: number of processes on this machine; None: one for each GPU, or one.
        machine: the machine that predictions are made for; None: this machine, measured (or read from ``results``).
        config: settings of every trial; for searched settings, the values to try first.
        samples: samples of an optimizer step, over all ranks; None: the config's, or those of :func:`partita.plan`.
        effort: limits of the trials.
        results: a file to which outcomes are added; trials with outcomes in the file are not repeated.
        on_trial: called with each trial when it has ended.

    Raises:
        ConfigError: there is no such model; no plan fits; ``results`` are from another model, machine or config; all
            trials failed.
    """
    if launch_environment().world_size > 1:
        raise ConfigError("tune starts the processes of each trial itself: call it in one process, without a launcher")
    target = model if isinstance(model, Target) else Target(str(model))
    source, base = target.source(), target.config(config)
    num_ranks = max(1, accelerator.count()) if processes is None else processes
    _check_processes(num_ranks)
    kind = accelerator.device_type()
    resolved = resolve(base, num_ranks, kind, num_ranks)
    sets_batch = target.is_job or bool({"micro", "accumulate", "total"} & base.batch.model_fields_set)
    if samples is None:
        samples = resolved.batch.total if sets_batch else default_samples(source, num_ranks)
    if samples < 1:
        raise ConfigError(f"samples: expected at least 1 sample in a step; got {samples}")
    tuned_settings = {
        "model": source.name,
        "parameters": source.num_params,
        "tokens": source.context,
        "samples": samples,
        "processes": num_ranks,
        "device": _device(),
        "config": base.model_dump(mode="json", exclude_unset=True),
    }
    kept = Results.open(None if results is None else Path(results), tuned_settings)
    on = _machine(machine, kept, num_ranks)
    kept.begin(on)
    space = Space(source, on, num_ranks, base, samples, kind)
    trials = Trials(target, num_ranks, effort.steps, effort.timeout_s)
    found = _Tuning(space, trials, kept, effort.trials, on_trial or (lambda _: None)).run()
    return Tuned(target, source, num_ranks, *found)


class _Tuning:
    """A search for the fastest config. Trials with stored outcomes count as trials, but are not repeated."""

    def __init__(
        self, space: Space, trials: Trials, kept: Results, most: int, on_trial: Callable[[Trial], None]
    ) -> None:
        self._space = space
        self._trials = trials
        self._kept = kept
        self._most = most
        self._on_trial = on_trial
        self._done = dict[str, Trial]()

    def run(self) -> tuple[tuple[Trial, ...], bool]:
        """Return the trials, and True if all changes of the best were tried.

        Raises:
            ConfigError: no plan fits, or all trials failed.
        """
        self._start()
        trained = [trial for trial in self._done.values() if trial.outcome.step_s is not None]
        if not trained:
            lines = [
                f"  {trial.candidate.settings.states.name}: {trial.outcome.failed}" for trial in self._done.values()
            ]
            raise ConfigError("\n".join([f"tune: all {len(lines)} trials failed:", *lines]))
        best = min(trained, key=lambda trial: trial.seconds)
        complete = False
        while not complete and self._may_run_more:
            best, complete = self._step(best)
        return tuple(self._done.values()), complete

    @property
    def _may_run_more(self) -> bool:
        return len(self._done) < self._most

    def _start(self) -> None:
        """Try the user's config, and the plans with the fastest predictions.

        A plan that lacks memory is tried again with micro-batches of half the size.
        """
        space, user_config = self._space, self._space.user_candidate()
        starts = space.starts()
        if not starts and user_config is None:
            if any(each.fits for each in space.forecasts):
                raise ConfigError(f"tune: every plan that fits conflicts with the config: {space.last_error}")
            if not space.forecasts:
                raise ConfigError(
                    f"tune: no plan has the parallel axes of the config, {space.resolved.mesh}; change them"
                )
            plan = Plan(space.source, space.machine, space.num_ranks, space.samples, tuple(space.forecasts))
            raise ConfigError(plan.explain_no_fit())
        if user_config is not None:
            self._try(user_config)
        queue, num_trained = deque(starts), 0
        while queue and self._may_run_more:
            candidate = queue.popleft()
            if num_trained and (num_trained == MAX_STARTS or candidate.seconds > NEAR_BEST * starts[0].seconds):
                break
            outcome = self._try(candidate).outcome
            num_trained += outcome.step_s is not None
            if outcome.lacks_memory and (half_batch := space.half_batch(candidate)) is not None:
                queue.appendleft(half_batch)

    def _step(self, best: Trial) -> tuple[Trial, bool]:
        """Try the changes of ``best``, and return the first that is faster, and False.

        If there is none, return ``best``, and True if all changes were tried.
        """
        for candidate in self._space.neighbours(best.candidate):
            if candidate.key in self._done or self._is_known_not_to_fit(candidate):
                continue
            if not self._may_run_more:
                return best, False
            trial = self._try(candidate)
            if trial.seconds < (1 - MIN_GAIN) * best.seconds:
                return trial, False
        return best, True

    def _is_known_not_to_fit(self, candidate: Candidate) -> bool:
        """Return True if the same plan lacked memory with micro-batches of this size or a smaller one."""
        settings = candidate.settings
        for trial in self._done.values():
            other = trial.candidate.settings
            is_equal = replace(other, micro=settings.micro, accumulate=settings.accumulate) == settings
            is_equal = is_equal and trial.candidate.variant == candidate.variant
            if trial.outcome.lacks_memory and is_equal and other.micro <= settings.micro:
                return True
        return False

    def _try(self, candidate: Candidate) -> Trial:
        if candidate.key in self._done:
            return self._done[candidate.key]
        outcome = self._kept.of(candidate.config)
        if outcome is None:
            outcome = self._trials.run({name: of for name, of in candidate.config.items() if name != "checkpoint"})
            self._kept.add(candidate.config, outcome)
        trial = Trial(candidate, outcome)
        self._done[candidate.key] = trial
        self._on_trial(trial)
        return trial


def _check_processes(num: int) -> None:
    on_cpu = accelerator.device_type() == accelerator.HOST.type
    most = usable_cores() if on_cpu else accelerator.count()
    if not 1 <= num <= most:
        what = "cores" if on_cpu else "devices"
        raise ConfigError(f"--processes: expected 1 to {most}, as this machine has {most} {what}; got {num}")


def _machine(machine: str | Machine | None, kept: Results, num_ranks: int) -> Machine:
    if isinstance(machine, Machine):
        return machine
    if machine is not None and machine != THIS:
        return machine_named(machine)
    return measure_machine(num_ranks) if kept.machine is None else kept.machine


def _device() -> str:
    """Describe the devices, cores and memory, to distinguish the results of different machines."""
    kinds = sorted({name for name, _ in accelerator.installed()}) if accelerator.count() else []
    memory = format_bytes(host_memory()[0])
    return f"{', '.join(kinds) or accelerator.HOST.type}, {usable_cores()} cores, {memory} of memory"
