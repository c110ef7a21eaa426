"""``partita.tune``: the best plan for a model on this machine, by short measured trials."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from partita.config.launchers import launch_environment
from partita.config.resolve import resolve
from partita.config.schema import Config
from partita.errors import ConfigError
from partita.forecast.plan import Plan, default_samples
from partita.forecast.source import Source
from partita.forecast.this_machine import measure_machine
from partita.memory import accelerator
from partita.memory.capacity import host_memory, usable_cores
from partita.optim.build import build_optimizer
from partita.optim.traits import states_per_element
from partita.planner.figures import format_bytes
from partita.planner.machine import Machine, machine_named
from partita.tune.results import Results
from partita.tune.space import Candidate, Space
from partita.tune.target import Target
from partita.tune.trial import Outcome, Trials

# Before settings are changed, plans are measured whose predicted times are within NEAR times the best one's.
NEAR, MOST_STARTS = 1.25, 3
# The least share of a step that a change must gain: less is noise.
GAIN = 0.02
NUM_TRIALS, NUM_STEPS, TIMEOUT_S = 12, 5, 600.0
THIS = "this"


@dataclass(frozen=True)
class Trial:
    """A candidate, and the outcome of its trial."""

    candidate: Candidate
    outcome: Outcome

    @property
    def seconds(self) -> float:
        """Measured seconds of a step; infinity if the trial failed."""
        return float("inf") if self.outcome.step_s is None else self.outcome.step_s


@dataclass(frozen=True)
class Tuned:
    """The ``trials``, in their order, and the ``best`` of them.

    ``complete``: no change of the best was left to try; otherwise the limit of trials was reached.
    """

    target: Target
    source: Source
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
        """Write :meth:`config` as YAML. For a job, write all of it, with this as its engine section.

        Raises:
            ConfigError: the file cannot be written.
        """
        job, content = self.target.job(), self.config()
        if job is not None:
            content = {**job.model_dump(mode="json", exclude_unset=True), "engine": content}
        try:
            Path(path).write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"'{path}' cannot be written: {error.strerror}; name another file") from None


@dataclass(frozen=True)
class Effort:
    """Limits of a tuning: the number of ``trials``, and of each trial the ``steps`` and the time ``timeout_s``."""

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
    tell: Callable[[Trial], None] | None = None,
) -> Tuned:
    """Find the fastest config on this machine.

    Plans are measured in the order of their predicted times, then changes of the best one by one setting at a time,
    each in processes of its own. The samples of a step and the precision stay the same.

    Args:
        model: a model as in :func:`partita.plan`, or the file of a job of ``partita train``.
        processes: number of processes on this machine; None: one for each GPU, or one.
        machine: the machine that predictions are made for; None: this one, measured (or read from ``results``).
        config: settings of every trial; for settings that are searched, the values to try first.
        samples: samples of an optimizer step, over all ranks; None: the config's, or those of :func:`partita.plan`.
        effort: limits of the trials.
        results: a file that outcomes are added to; trials whose outcomes it has are not run again.
        tell: called with each trial.

    Raises:
        ConfigError: there is no such model; nothing fits; ``results`` are of another model, machine or config; no trial
            trained.
    """
    if launch_environment().world_size > 1:
        raise ConfigError("tune starts the processes of each trial itself: call it in one process, without a launcher")
    target = model if isinstance(model, Target) else Target(str(model))
    source, base = target.source(), target.config(config)
    num_ranks = max(1, accelerator.count()) if processes is None else processes
    _check_processes(num_ranks)
    kind = accelerator.device_type()
    given = resolve(base, num_ranks, kind, num_ranks)
    says = target.is_job or bool({"micro", "accumulate", "total"} & base.batch.model_fields_set)
    if samples is None:
        samples = given.batch.total if says else default_samples(source, num_ranks)
    if samples < 1:
        raise ConfigError(f"samples: expected at least 1 sample in a step; got {samples}")
    subject = {
        "model": source.name,
        "parameters": source.num_params,
        "tokens": source.context,
        "samples": samples,
        "processes": num_ranks,
        "device": _device(),
        "config": base.model_dump(mode="json", exclude_unset=True),
    }
    kept = Results.open(None if results is None else Path(results), subject)
    on = _machine(machine, kept, num_ranks)
    kept.begin(on)
    space = Space(source, on, num_ranks, base, samples, kind, _num_moments(base))
    trials = Trials(target, num_ranks, effort.steps, effort.timeout_s)
    found = _Tuning(space, trials, kept, effort.trials, tell or (lambda _: None)).run()
    return Tuned(target, source, num_ranks, *found)


class _Tuning:
    """A tuning from plan to plan. Trials that were measured before count as tried, but take no time."""

    def __init__(self, space: Space, trials: Trials, kept: Results, most: int, tell: Callable[[Trial], None]) -> None:
        self._space = space
        self._trials = trials
        self._kept = kept
        self._most = most
        self._tell = tell
        self._done = dict[str, Trial]()

    def run(self) -> tuple[tuple[Trial, ...], bool]:
        """Return the trials, and whether nothing was left to try.

        Raises:
            ConfigError: nothing fits, or no trial trained.
        """
        self._start()
        trained = [trial for trial in self._done.values() if trial.outcome.step_s is not None]
        if not trained:
            lines = [
                f"  {trial.candidate.choice.state_settings.name}: {trial.outcome.failed}"
                for trial in self._done.values()
            ]
            raise ConfigError("\n".join([f"tune: none of {len(lines)} trials has trained:", *lines]))
        best = min(trained, key=lambda trial: trial.seconds)
        complete = False
        while not complete and self._has_left:
            best, complete = self._step(best)
        return tuple(self._done.values()), complete

    @property
    def _has_left(self) -> bool:
        return len(self._done) < self._most

    def _start(self) -> None:
        """Try the user's config, and the plans with about the fastest predictions.

        After a plan that lacks memory, the next is the same with micro-batches of half the size.
        """
        space, given = self._space, self._space.as_given()
        starts = space.starts()
        if not starts and given is None:
            if any(each.fits for each in space.forecasts):
                raise ConfigError(f"tune: no plan that fits is a config with what yours says: {space.refused}")
            if not space.forecasts:
                raise ConfigError(f"tune: no plan has the parallel axes of the config, {space.given.mesh}; name others")
            plan = Plan(space.source, space.machine, space.num_ranks, space.samples, tuple(space.forecasts))
            raise ConfigError(plan.why_not())
        if given is not None:
            self._try(given)
        waiting, num_trained = deque(starts), 0
        while waiting and self._has_left:
            candidate = waiting.popleft()
            if num_trained and (num_trained == MOST_STARTS or candidate.seconds > NEAR * starts[0].seconds):
                break
            outcome = self._try(candidate).outcome
            num_trained += outcome.step_s is not None
            if outcome.lacks_memory and (smaller := space.smaller(candidate)) is not None:
                waiting.appendleft(smaller)

    def _step(self, best: Trial) -> tuple[Trial, bool]:
        """Return the first change of ``best`` that is faster, and False; or ``best``, and whether all changes were
        tried.
        """
        for candidate in self._space.moves(best.candidate):
            if candidate.key in self._done or self._is_larger_than_memory(candidate):
                continue
            if not self._has_left:
                return best, False
            trial = self._try(candidate)
            if trial.seconds < (1 - GAIN) * best.seconds:
                return trial, False
        return best, True

    def _is_larger_than_memory(self, candidate: Candidate) -> bool:
        """Return whether the same plan lacked memory with micro-batches of this size or a smaller one."""
        choice = candidate.choice
        for trial in self._done.values():
            other = trial.candidate.choice
            alike = replace(other, micro=choice.micro, accumulate=choice.accumulate) == choice
            alike = alike and trial.candidate.variant == candidate.variant
            if trial.outcome.lacks_memory and alike and other.micro <= choice.micro:
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
        self._tell(trial)
        return trial


def _check_processes(num: int) -> None:
    on_cpu = accelerator.device_type() == accelerator.HOST.type
    most = usable_cores() if on_cpu else accelerator.count()
    if not 1 <= num <= most:
        what = "cores" if on_cpu else "devices"
        raise ConfigError(f"--processes: {num} cannot be measured here, where there are {most} {what}")


def _machine(given: str | Machine | None, kept: Results, num_ranks: int) -> Machine:
    if isinstance(given, Machine):
        return given
    if given is not None and given != THIS:
        return machine_named(given)
    return measure_machine(num_ranks) if kept.machine is None else kept.machine


def _device() -> str:
    """Return a description of the devices, cores and memory, which distinguishes results of different machines."""
    kinds = sorted({name for name, _ in accelerator.installed()}) if accelerator.count() else []
    memory = format_bytes(host_memory()[0])
    return f"{', '.join(kinds) or accelerator.HOST.type}, {usable_cores()} cores, {memory} of memory"


def _num_moments(config: Config) -> int:
    """Return the number of states per element of the config's optimizer."""
    optimizer = build_optimizer(
        [nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))], config, None, kernels=False
    )
    return states_per_element(optimizer)
