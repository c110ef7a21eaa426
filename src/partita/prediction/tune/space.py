"""The search space of a tuning: configs of plans, and configs that differ from one of these by a single setting."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from partita.config.resolve import Resolved, resolve
from partita.config.schema import Config
from partita.errors import ConfigError
from partita.layout.units import find_blocks
from partita.prediction.machine import Machine
from partita.prediction.model_source import ModelSource
from partita.prediction.plan_settings import CHECKPOINTS, PlanSettings, StateSettings, state_precisions
from partita.prediction.search import Forecast, Search, halvings
from partita.table.mesh_shape import MeshShape
from partita.table.slots import bytes_ahead
from partita.table.state_plan import neighbouring_stages

# Candidates with a predicted step this many times as long are not tried: predictions are accurate to a fourth.
MAX_SLOWDOWN = 1.5
# Settings that every trial sets. Their values in the user's config only determine the start of the search.
_SEARCHED = {"batch": ("micro", "accumulate", "total"), "activations": ("checkpoint", "offload")}
_SEARCHED_ZERO = ("stage", "units", "prefetch_bytes", "keep_gathered")
_SEARCHED_TIERS = ("parameters", "optimizer", "gradients")


@dataclass(frozen=True)
class Variant:
    """Settings that are not part of a plan: prefetching, keeping parameters gathered, and units.

    They are ``zero.prefetch_bytes``, ``zero.keep_gathered`` and ``zero.units`` (empty: auto).
    """

    prefetch: int | str = "auto"
    keep_gathered: bool = False
    units: tuple[str, ...] = ()

    def zero(self) -> dict[str, Any]:
        """Return the keys of the config section ``zero``."""
        found: dict[str, Any] = {} if self.prefetch == "auto" else {"prefetch_bytes": self.prefetch}
        found |= {"keep_gathered": True} if self.keep_gathered else {}
        return found | ({"units": list(self.units)} if self.units else {})


@dataclass(frozen=True)
class Candidate:
    """A plan with a variant, the ``config`` of both, and its forecast.

    ``change`` describes the difference from the candidate that it was made from.
    """

    settings: PlanSettings
    variant: Variant
    config: dict[str, Any] = field(compare=False)
    forecast: Forecast = field(compare=False)
    change: str = field(default="", compare=False)

    @property
    def key(self) -> str:
        """The config as a string."""
        return key_of(self.config)

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step."""
        assert self.forecast.time is not None, "it fits"
        return self.forecast.time.total_s


def key_of(config: dict[str, Any]) -> str:
    return json.dumps(config, sort_keys=True)


@dataclass
class Space:
    """The search space for ``source`` on ``num_ranks`` devices of a ``kind`` of ``machine``.

    ``base`` is the user's config. The ``samples`` of a step and the precision are constant; only if no plan fits
    with the most exact precision of the states is the next one tried. ``last_error``: the last error of a plan whose
    config conflicts with ``base``.
    """

    source: ModelSource
    machine: Machine
    num_ranks: int
    base: Config
    samples: int
    kind: str
    last_error: str = ""
    _searches: dict[Variant, Search] = field(default_factory=dict)

    @cached_property
    def resolved(self) -> Resolved:
        """The user's config, resolved."""
        return resolve(self.base, self.num_ranks, self.kind, self.num_ranks)

    @cached_property
    def forecasts(self) -> list[Forecast]:
        """Forecasts of all plans."""
        return self._search(Variant(units=self._units)).run()

    @property
    def _units(self) -> tuple[str, ...]:
        units = self.base.zero.units
        return () if isinstance(units, str) else tuple(units)

    def starts(self) -> list[Candidate]:
        """Return plans that fit in the most exact precision that fits, the fastest predictions first.

        There is one for each mesh and setting of the states: the remaining plans differ from it by single settings.
        """
        fitting = [each for each in self.forecasts if each.fits and each.time is not None]
        order = [precision.name for precision in state_precisions(self._search(Variant(units=self._units)).dtype)]
        best = min((order.index(each.settings.states.precision.name) for each in fitting), default=0)
        found = dict[tuple[MeshShape, StateSettings], Candidate]()
        variant = Variant(units=self._units)
        for each in sorted(fitting, key=lambda each: each.rank):
            group = each.settings.mesh, each.settings.states
            if each.settings.states.precision.name == order[best] and group not in found:
                candidate = self._candidate(each.settings, variant, each)
                found |= {} if candidate is None else {group: candidate}
        return list(found.values())

    def user_candidate(self) -> Candidate | None:
        """Return the user's config as a candidate.

        ``accumulate`` is adapted to :attr:`samples`. Return None if the config has none of the sections ``zero``,
        ``batch`` and ``activations``, if no plan can express it, or if it is predicted not to fit.
        """
        zero, checkpoint = self.base.zero, self.base.activations.checkpoint
        has_settings = self.base.model_fields_set & {"zero", "batch", "activations"}
        tiers = zero.offload
        if not has_settings or tiers.gradients != "auto" or "auto" in (tiers.parameters, tiers.optimizer):
            return None
        if not isinstance(checkpoint, str) or checkpoint not in CHECKPOINTS:
            return None
        precision, batch = state_precisions(self.resolved.compute_dtype)[0], self.resolved.batch
        states = StateSettings(zero.stage, tiers.parameters, tiers.optimizer, precision)
        inputs = self.base.activations.offload
        settings = PlanSettings(self.resolved.mesh, states, batch.micro, batch.accumulate, checkpoint, inputs)
        variant = Variant(zero.prefetch_bytes, zero.keep_gathered, self._units)
        found = [self._candidate(each, variant, None, "as in the config") for each in self._with_samples(settings)]
        return min((each for each in found if each is not None), key=lambda each: each.seconds, default=None)

    def neighbours(self, origin: Candidate) -> list[Candidate]:
        """Return candidates that differ from ``origin`` by one setting and are predicted to fit, the fastest first."""
        found = dict[str, Candidate]()
        for change, settings, variant in self._changes(origin):
            candidate = self._candidate(settings, variant, None, change)
            if candidate is None or candidate.key == origin.key:
                continue
            if candidate.seconds < MAX_SLOWDOWN * origin.seconds:
                found.setdefault(candidate.key, candidate)
        return sorted(found.values(), key=lambda each: each.seconds)

    def half_batch(self, origin: Candidate) -> Candidate | None:
        """Return a candidate with micro-batches of half the size, for one that did not fit.

        Return None if they cannot be halved.
        """
        settings = origin.settings
        if settings.micro % 2:
            return None
        half = replace(settings, micro=settings.micro // 2, accumulate=2 * settings.accumulate)
        return self._candidate(half, origin.variant, None, "micro-batch halved")

    def config(self, settings: PlanSettings, variant: Variant) -> dict[str, Any]:
        """Return the config for :func:`partita.initialize`, including all other settings of the user."""
        found = {
            name: value
            for name, value in self.base.model_dump(mode="json", exclude_unset=True).items()
            if not (isinstance(value, dict) and not value)
        }
        for section, keys in _SEARCHED.items():
            found[section] = {key: value for key, value in found.get(section, {}).items() if key not in keys}
        zero = {key: value for key, value in found.get("zero", {}).items() if key not in _SEARCHED_ZERO}
        offload = {key: value for key, value in zero.pop("offload", {}).items() if key not in _SEARCHED_TIERS}
        sections = settings.sections()
        offload |= sections["zero"].pop("offload", {})
        found["zero"] = {**zero, **sections.pop("zero"), **variant.zero(), **({"offload": offload} if offload else {})}
        for name, values in sections.items():
            found[name] = {**found.get(name, {}), **values}
        found["precision"] = {"compute": self.resolved.compute_dtype, **found.get("precision", {})}
        return {name: value for name, value in found.items() if value != {}}

    # ------------------------------------------------------------------------------------------------------- private

    def _with_samples(self, settings: PlanSettings) -> Iterator[PlanSettings]:
        """Yield the user's plan with :attr:`samples` samples in a step, if its micro-batches divide them.

        If the config has no keys of ``batch``, yield the plan with each size of micro-batches that a search considers.
        """
        data, per_rank = settings.mesh.data, self.samples // settings.mesh.data
        sets_batch = settings.samples == self.samples or bool(self.base.batch.model_fields_set)
        for micro in [settings.micro] if sets_batch else halvings(per_rank):
            if self.samples % (micro * data) == 0:
                yield replace(settings, micro=micro, accumulate=per_rank // micro)

    def _candidate(
        self, settings: PlanSettings, variant: Variant, forecast: Forecast | None, change: str = ""
    ) -> Candidate | None:
        """Return a candidate; None if its config is invalid, or if it is predicted not to fit."""
        config = self.config(settings, variant)
        try:
            resolve(Config.model_validate(config), self.num_ranks, self.kind, self.num_ranks)
            found = self._search(variant).forecast(settings) if forecast is None else forecast
        except ConfigError as error:
            self.last_error = str(error)
            return None
        return Candidate(settings, variant, config, found, change) if found.fits else None

    def _search(self, variant: Variant) -> Search:
        """Return the search for a variant. Variants with the same units share the traces of the model."""
        if variant not in self._searches:
            shared = next((each for known, each in self._searches.items() if known.units == variant.units), None)
            sections = self.base.model_dump(exclude_unset=True)
            zero = {key: value for key, value in sections.get("zero", {}).items() if key not in _SEARCHED_ZERO}
            tiers = {key: value for key, value in zero.pop("offload", {}).items() if key not in _SEARCHED_TIERS}
            config = Config.model_validate({**sections, "zero": {**zero, **variant.zero(), "offload": tiers}})
            self._searches[variant] = self._new_search(config) if shared is None else shared.with_config(config)
        return self._searches[variant]

    def _new_search(self, config: Config) -> Search:
        """Return a search over the parallel axes that the config names, if it names any."""
        dtype, only = (
            self.resolved.compute_dtype,
            self.resolved.mesh if "parallel" in self.base.model_fields_set else None,
        )
        return Search(self.source, self.machine, self.num_ranks, self.samples, config, dtype, only)

    def _changes(self, origin: Candidate) -> Iterator[tuple[str, PlanSettings, Variant]]:
        settings, variant = origin.settings, origin.variant
        if settings.accumulate % 2 == 0:
            double = replace(settings, micro=2 * settings.micro, accumulate=settings.accumulate // 2)
            yield "micro-batch doubled", double, variant
        if settings.micro % 2 == 0:
            half = replace(settings, micro=settings.micro // 2, accumulate=2 * settings.accumulate)
            yield "micro-batch halved", half, variant
        for stage in neighbouring_stages(settings.states.stage) if settings.mesh.data > 1 else ():
            default = replace(variant, prefetch="auto", keep_gathered=False)
            yield (
                f"stage {stage}",
                replace(settings, states=replace(settings.states, stage=stage)),
                default,
            )
        for checkpoint in self._search(variant).rank_model(settings.mesh).traces:
            if isinstance(checkpoint, str):
                inputs = "none" if checkpoint == "none" else settings.inputs
                yield f"checkpoint {checkpoint}", replace(settings, checkpoint=checkpoint, inputs=inputs), variant
        states = settings.states
        if states.parameters != "none":
            yield (
                "parameters on the device",
                replace(settings, states=replace(states, parameters="none")),
                variant,
            )
        if states.optimizer != "none":
            yield (
                "optimizer on the device",
                replace(settings, states=replace(states, optimizer="none")),
                variant,
            )
        yield from ((change, settings, other) for change, other in self._variants(origin))

    def _variants(self, origin: Candidate) -> Iterator[tuple[str, Variant]]:
        """Yield variants with other settings of all-gathers. There are none if all parameters are stored unsharded."""
        settings, variant = origin.settings, origin.variant
        search = self._search(variant)
        units = [unit for of_stage in search.planned(settings.mesh, settings.states).values() for unit in of_stage]
        if all(unit.always_unsharded for unit in units):
            return
        yield (
            ("released after forward" if variant.keep_gathered else "kept after forward"),
            replace(variant, keep_gathered=not variant.keep_gathered, prefetch="auto"),
        )
        if not variant.keep_gathered:
            ahead = bytes_ahead(units, variant.prefetch)
            for size in (2 * ahead, ahead // 2 if variant.prefetch != "auto" else 0):
                yield f"prefetch {size} bytes", replace(variant, prefetch=size)
        if not variant.units and (finer := self._finer()):
            yield f"units {', '.join(finer)}", replace(variant, units=finer)
        elif variant.units and variant.units != self._units:
            yield "units of blocks", replace(variant, units=())

    def _finer(self) -> tuple[str, ...]:
        """Return the classes of the children of blocks, except those with few parameters."""
        found = dict[str, None]()
        for _, block in find_blocks(self.source.model):
            total = sum(param.numel() for param in block.parameters())
            for child in block.children():
                if 4 * sum(param.numel() for param in child.parameters()) >= total:
                    found[type(child).__name__] = None
        return tuple(found)
