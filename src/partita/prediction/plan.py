"""``partita.plan``: predict the memory and the speed of plans for a model on a machine, and get the best config."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from partita.config.load import load_config
from partita.config.messages import format_bytes
from partita.config.resolve import resolve
from partita.config.schema import Config
from partita.config.write import write_yaml
from partita.errors import ConfigError
from partita.memory import accelerator
from partita.prediction.communication_variants import communication_variants
from partita.prediction.given_config import estimate_config
from partita.prediction.machine import Machine, machine_named
from partita.prediction.model_source import ModelSource, read_source
from partita.prediction.plan_settings import with_sections
from partita.prediction.search import Forecast, Search
from partita.table.residence import Tier

# Default tokens of a step, and default samples of a model without positions.
STEP_TOKENS = 2**19
STEP_SAMPLES = 64
# Plans whose times differ by less are equally fast: predictions are not more exact.
AS_FAST = 1.02


@dataclass(frozen=True)
class Plan:
    """The ``forecasts`` for a model: plans that fit, fastest first; then those that do not fit, by missing bytes.

    ``base`` is the user's config, the settings of every plan.
    """

    source: ModelSource
    machine: Machine
    num_gpus: int
    samples: int
    forecasts: tuple[Forecast, ...]
    lean: bool = False
    base: Config = field(default_factory=Config)

    @cached_property
    def best(self) -> Forecast | None:
        """The best plan that fits, or None.

        Plans whose states are not exact count only if no exact plan fits, or with ``lean``. Of those that take at most
        :data:`AS_FAST` of the shortest time, the best one is exact if there is one, and has most device memory free.
        """
        fits = [each for each in self.forecasts if each.fits]
        exact = [each for each in fits if each.settings.states.precision.is_exact]
        counted = exact if exact and not self.lean else fits
        if not counted:
            return None
        limit_s = AS_FAST * min(_step_s(each) for each in counted)
        return min(
            (each for each in counted if _step_s(each) <= limit_s),
            key=lambda each: (not each.settings.states.precision.is_exact, each.by_tier[Tier.DEVICE], _step_s(each)),
        )

    @cached_property
    def best_per_state_settings(self) -> list[Forecast]:
        """The best plan for each setting of the states: first :attr:`best`, then in the order of ``forecasts``.

        The best one of a setting is the fastest that fits. If none fits, it is the one with the fewest missing bytes.
        """
        found = dict[str, Forecast]()
        for each in (*([self.best] if self.best else ()), *self.forecasts):
            found.setdefault(each.settings.states.name, each)
        return list(found.values())

    def config(self) -> dict[str, Any]:
        """Return the config of the best plan, for :func:`partita.initialize`, including the settings of every plan.

        Raises:
            ConfigError: no plan fits; the message names the nearest ones.
        """
        if self.best is None:
            raise ConfigError(self.explain_no_fit())
        found = with_sections(self.base, self.best.settings.sections())
        found["precision"] = {**found.get("precision", {}), "compute": _compute_dtype(self.base, self.machine)}
        resolve(Config(**found), self.num_gpus, "cpu" if self.machine.one_memory else "gpu", self.on_node)
        return found

    def write(self, path: str | Path) -> None:
        """Write :meth:`config` as YAML.

        Raises:
            ConfigError: the file cannot be written.
        """
        write_yaml(path, self.config())

    def write_trace(self, path: str | Path) -> None:
        """Write the predicted step of the best plan for Perfetto (ui.perfetto.dev).

        Raises:
            ConfigError: no plan fits, or the file cannot be written.
        """
        kind = accelerator.usual_kind(self.machine.one_memory)
        estimate_config(self.source, self.config(), self.num_gpus, kind, self.on_node).write_trace(
            Path(path), self.machine
        )

    @property
    def on_node(self) -> int:
        """Number of GPUs on a node."""
        return self.machine.gpus_on_node(self.num_gpus)

    def explain_no_fit(self) -> str:
        """Return the message that no plan fits, with the missing memory of the nearest plans."""
        lines = [
            f"{self.source.name} does not fit on {self.num_gpus} x {self.machine.name} with any of these settings:"
        ]
        lines += [
            f"  {each.settings.states.name}: {format_shortfall(each)}" for each in self.best_per_state_settings[:4]
        ]
        return "\n".join([*lines, "More GPUs, more host memory or a disk would help: --gpus, --host-memory, --disk."])

    def data(self) -> dict[str, Any]:
        """Return the plan as plain values: bytes and seconds."""
        best = self.best
        return {
            "model": {"name": self.source.name, "parameters": self.source.num_params, "tokens": self.source.context},
            "machine": {**asdict(self.machine), "num_gpus": self.num_gpus},
            "samples": self.samples,
            "config": None if best is None else self.config(),
            "plans": [_data(each) for each in self.best_per_state_settings],
        }


def plan(
    model: str | ModelSource,
    *,
    gpus: int = 1,
    gpu: str | Machine = "h100",
    tokens: int | None = None,
    samples: int | None = None,
    config: str | Path | Mapping[str, Any] | Config | None = None,
    compress: bool = False,
    lean: bool = False,
) -> Plan:
    """Find the plans for a model, without weights and without a GPU.

    Args:
        model: a preset, sizes (``layers=24,hidden=2048``), a folder or config.json of Hugging Face, or
            ``module:function``, which returns (model, batch).
        gpus: number of GPUs.
        gpu: name of the GPU, or a :class:`~partita.prediction.machine.Machine` (``machine_named`` in the same module
            makes one from a name and other figures: ``host_memory=``, ``disk=``, ``network=``).
        tokens: positions of a sample; None: the model's maximum, at most 2048.
        samples: samples of an optimizer step, over all ranks; None: about half a million tokens, and at least one
            sample per GPU.
        config: settings of every plan: units, fp32 modules, the compute dtype, the optimizer, the pipeline schedule.
            Mesh, stage, micro-batches and recomputation are searched in any case.
        compress: also consider quantized collectives for gradients and parameters, which lose precision.
        lean: also consider states of lower precision (16-bit gradients, 8-bit moments) where exact ones fit.

    Raises:
        ConfigError: there is no such model or machine, a figure is invalid, or the forward cannot be traced.
    """
    if gpus < 1 or gpus != int(gpus):
        raise ConfigError(f"--gpus: expected at least 1 GPU; got {gpus}")
    source = read_source(model, tokens) if isinstance(model, str) else model
    machine = machine_named(gpu) if isinstance(gpu, str) else gpu
    if machine.one_memory and gpus > machine.gpus:
        raise ConfigError(f"--gpus: expected at most {machine.gpus} on {machine.name}; got {gpus}")
    if samples is None:
        samples = default_samples(source, gpus)
    if samples < 1:
        raise ConfigError(f"samples: expected at least 1 sample in a step; got {samples}")
    base = load_config(config)
    search = Search(source, machine, gpus, samples, base, _compute_dtype(base, machine), lean=lean)
    found = search.run()
    found += communication_variants(search, found, compress=compress)
    return Plan(source, machine, gpus, samples, tuple(sorted(found, key=lambda each: each.rank)), lean, base)


def _compute_dtype(config: Config, machine: Machine) -> str:
    """Return the compute dtype that the user's config names, or else the machine's."""
    named = config.precision.compute
    return machine.compute_dtype if named == "auto" else named


def default_samples(source: ModelSource, num_gpus: int) -> int:
    """Return the default samples of a step: a power of two per GPU, about half a million tokens in all.

    Models whose samples have no positions get about :data:`STEP_SAMPLES`.
    """
    per_step = STEP_TOKENS // source.context if source.context else STEP_SAMPLES
    return num_gpus * int(2 ** max(0, round(math.log2(max(1.0, per_step / num_gpus)))))


def _step_s(forecast: Forecast) -> float:
    assert forecast.time is not None, "a plan that fits has a time"
    return forecast.time.total_s


def format_shortfall(forecast: Forecast) -> str:
    """Describe the memories that are too small: the usable bytes, and those that the fullest rank needs."""
    names = {Tier.DEVICE: "GPU", Tier.HOST: "host", Tier.DISK: "disk"}
    if forecast.budget.one_memory:
        names[Tier.DEVICE] = "memory"
    return ", ".join(
        f"{names[tier]} has {format_bytes(forecast.budget.of(tier))}, "
        f"{format_bytes(forecast.budget.of(tier) + num)} needed"
        for tier, num in forecast.shortfall.items()
    )


def _data(forecast: Forecast) -> dict[str, Any]:
    settings, time = forecast.settings, forecast.time
    return {
        "way": settings.states.name,
        "mesh": asdict(settings.mesh),
        "micro": settings.micro,
        "accumulate": settings.accumulate,
        "checkpoint": settings.checkpoint,
        "inputs": settings.inputs,
        "fits": forecast.fits,
        "bytes": [{"what": what, "tier": tier, "bytes": num} for (what, tier), num in forecast.held.items()],
        "lacking_bytes": {tier.value: num for tier, num in forecast.shortfall.items()},
        "step_s": None if time is None else time.total_s,
        "compute_s": None if time is None else time.compute_s,
        "sent_bytes": None if forecast.sent is None else dict(forecast.sent),
        "waits_s": None if time is None else time.waits_s,
    }
