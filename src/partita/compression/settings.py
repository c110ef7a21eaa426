"""Settings of compression: codecs, warm-up, and the rules between them and other settings."""

from collections.abc import Iterator
from functools import cache
from importlib import import_module

from partita.config.messages import Contradiction, setting
from partita.config.schema import Config
from partita.errors import ConfigError
from partita.kernels.codecs import CODECS, Codec, TorchCodec

# The share of the steps in which 1-bit Adam measures its second moment (15 % to 20 % in Tang et al., 2021, section 7).
WARM_UP = 0.15
CHECKED_EVERY = 100
# Codec names in a configuration. Codecs with stochastic rounding need no error feedback; coarser ones do.
STOCHASTIC_CODECS = ("int8", "int4")
LOW_RANK = "low_rank"  # not a codec of blocks: matrices are sent as two low-rank factors
ERROR_FEEDBACK_CODECS = {"2bit": "two_bits", "ternary": "ternary", "onebit": "sign", "topk": "top8"}


def has_error_feedback(name: str) -> bool:
    """Return True if the codec of this name is used with error feedback."""
    return name in ERROR_FEEDBACK_CODECS or ":" in name


def codec_named(name: str) -> Codec | None:
    """Return the codec of a name in a configuration, or of a class at ``module:class``; None if there is none.

    Raises:
        ConfigError: there is no such class, or it is not a :class:`TorchCodec`.
    """
    return _custom_codec(name) if ":" in name else CODECS.get(ERROR_FEEDBACK_CODECS.get(name, name))


@cache  # the same object for all rows, so that rows with equal formats are equal
def _custom_codec(path: str) -> TorchCodec:
    module, _, kind = path.partition(":")
    try:
        found = getattr(import_module(module), kind)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(f"communication.gradients: {path}: {error}; expected module:class of a codec") from error
    if not isinstance(found, TorchCodec):
        raise ConfigError(f"communication.gradients: {path} is not a subclass of partita.kernels.codecs.TorchCodec")
    return found


def sends_averages(config: Config) -> bool:
    """Return True if ranks send the optimizer's running average instead of gradients."""
    return config.optimizer.name == "onebit_adam" and config.optimizer.sends == "averages"


def stores_deltas(config: Config) -> bool:
    """Return True if quantized parameters are sent as deltas, to all ranks that store the parameter.

    These are all ranks below stage 3, and one rank per node with ``zero.hierarchical``.
    """
    zero, codec = config.zero, config.communication.parameters
    return codec != "full" and (zero.stage < 3 or zero.hierarchical)


def check_every(config: Config) -> int:
    """Return the steps between two comparisons of replicated parameters; 0 if they are not compared."""
    asked = config.communication.check_every
    if asked != "auto":
        return asked
    return CHECKED_EVERY if stores_deltas(config) else 0


def gradient_codec(config: Config) -> str:
    """Return the codec of gradients, or of the running average that is sent instead."""
    asked = config.communication.gradients
    return "onebit" if asked == "full" and sends_averages(config) else asked


def warmup_steps(config: Config) -> int:
    """Return the number of updates before compression starts."""
    asked = config.communication.warmup_steps
    if asked != "auto":
        return asked
    return int(WARM_UP * (config.schedule.total_steps or 0)) if config.optimizer.name == "onebit_adam" else 0


def contradictions(config: Config, compute: str) -> Iterator[Contradiction]:
    """Return one contradiction for each rule that is broken."""
    yield from _diloco(config)
    yield from _error_feedback(config)
    yield from _deltas(config, compute)


def _error_feedback(config: Config) -> Iterator[Contradiction]:
    """Rules of codecs with error feedback."""
    codec, offload = gradient_codec(config), config.zero.offload
    yield from _warm_up(config)
    if not has_error_feedback(codec) and codec != LOW_RANK:
        return
    yield from _low_rank(config)
    if config.precision.gradients == "in_backward":
        yield (
            ("communication.gradients", "precision.gradients"),
            f"communication.gradients: {codec} updates its error-feedback residuals after a step is known to be "
            "finite; precision.gradients: in_backward updates parameters before that",
            "set communication.gradients to int8",
        )
    for key in ("optimizer", "gradients"):
        if getattr(offload, key) in ("disk", "auto") and (key, offload.gradients) != ("gradients", "auto"):
            yield (
                ("communication.gradients", f"zero.offload.{key}"),
                f"the error-feedback residuals of communication.gradients: {codec} must be stored on the device or on "
                "the host, and with them the optimizer states and gradients",
                f"set zero.offload.{key} to host",
            )
    if codec == "onebit" and config.optimizer.name == "sgd" and config.optimizer.momentum == 0:
        yield (
            ("communication.gradients", "optimizer.name", "optimizer.momentum"),
            "communication.gradients: onebit sends only the signs of values: it needs a running average of gradients, "
            "and sgd without momentum keeps none",
            "set optimizer.momentum to 0.9, or communication.gradients to ternary",
        )


def _diloco(config: Config) -> Iterator[Contradiction]:
    """Rules of replicas that train separately (DiLoCo)."""
    asked, default = config.communication, Config().communication
    if asked.every is None:
        for key in ("replicas", "outer_lr", "outer_momentum", "outer_nesterov"):
            if getattr(asked, key) != getattr(default, key):
                yield (
                    (f"communication.{key}", "communication.every"),
                    f"communication.{key} applies only to replicas that train separately (DiLoCo)",
                    "set communication.every to the optimizer steps between two exchanges",
                )
        return
    for key, why in (
        ("zero.hierarchical", "shards parameters over all nodes"),
        ("zero.replicate", "sums every gradient over all nodes"),
        ("communication.parameters", "sends quantized parameters"),
        ("precision.gradients", "updates a unit before it is known whether all replicas' gradients are finite"),
        ("precision.master", "has no master weights to compare with those of the last exchange"),
        ("precision.moments", "has quantized moments, which cannot be averaged over the replicas"),
        ("optimizer.name", "has one running average for all ranks, not one per replica"),
    ):
        value = setting(config, key)
        refused = {
            "precision.gradients": value == "in_backward",
            "optimizer.name": value == "onebit_adam",
        }
        if refused.get(key, value != setting(Config(), key)):
            yield (
                (key, "communication.every"),
                f"{key}: {value} {why}; with communication.every, replicas train separately (DiLoCo)",
                f"leave {key} or communication.every out",
            )
    if config.zero.offload.optimizer in ("disk", "auto"):
        yield (
            ("zero.offload.optimizer", "communication.every"),
            "communication.every (DiLoCo): the outer optimizer's states must be stored on the device or on the host",
            "set zero.offload.optimizer to host",
        )


def _low_rank(config: Config) -> Iterator[Contradiction]:
    """Rules of low-rank gradients (PowerSGD)."""
    if config.communication.gradients != LOW_RANK:
        return
    for key, is_set, why in (
        ("zero.replicate", config.zero.replicate != "none", "sums shards of matrices between nodes"),
        ("communication.every", config.communication.every is not None, "exchanges shards of matrices"),
        ("optimizer.sends", sends_averages(config), "sends averages as quantized shards"),
    ):
        if is_set:
            yield (
                ("communication.gradients", key),
                f"communication.gradients: low_rank needs full matrices; {key} {why}",
                "set communication.gradients to ternary",
            )


def _warm_up(config: Config) -> Iterator[Contradiction]:
    """Rules of the warm-up, before compression starts."""
    total, num = config.schedule.total_steps, warmup_steps(config)
    if total is not None and num >= total:
        yield (
            ("communication.warmup_steps", "schedule.total_steps"),
            "communication.warmup_steps: training would end before compression starts",
            f"set communication.warmup_steps to less than {total}",
        )
    if config.communication.warmup != "full" and not num:
        yield (
            ("communication.warmup", "communication.warmup_steps"),
            f"communication.warmup: {config.communication.warmup} applies to the steps before compression starts, and "
            "there are none",
            "set communication.warmup_steps",
        )
    if num and config.precision.gradients == "in_backward":
        yield (
            ("communication.warmup_steps", "precision.gradients"),
            "precision.gradients: in_backward sends compressed values from the first step on",
            "leave communication.warmup_steps out",
        )
    if (name := config.optimizer.name) != "onebit_adam":
        return
    if sends_averages(config) and config.communication.gradients in STOCHASTIC_CODECS:
        yield (
            ("optimizer.name", "optimizer.sends", "communication.gradients"),
            f"optimizer.name: {name} sends its running average, which needs a codec with error feedback",
            "set communication.gradients to onebit, ternary, 2bit or topk, or optimizer.sends to gradients",
        )
    if not num:
        yield (
            ("optimizer.name", "communication.warmup_steps", "schedule.total_steps"),
            f"optimizer.name: {name} measures its second moment in a warm-up",
            "set communication.warmup_steps, or schedule.total_steps (the warm-up is 15 % of it)",
        )
    if sends_averages(config) and config.zero.replicate != "none":
        yield (
            ("optimizer.name", "optimizer.sends", "zero.replicate"),
            f"optimizer.name: {name} needs one running average for all ranks; zero.replicate has one per node",
            "leave zero.replicate out, or set optimizer.sends to gradients",
        )
    if config.precision.master == "split":
        yield (
            ("optimizer.name", "precision.master"),
            "precision.master: split belongs to adamw, adam, sgd and lion",
            "set precision.master to fp32",
        )


def _deltas(config: Config, compute: str) -> Iterator[Contradiction]:
    """Rules of quantized parameters and parameter deltas."""
    codec, zero = config.communication.parameters, config.zero
    if not stores_deltas(config):
        if zero.stage == 3 and codec not in ("full", "int8"):
            replicates = zero.replicate != "none"
            yield (
                ("communication.parameters", "zero.stage", "zero.replicate" if replicates else "zero.hierarchical"),
                f"communication.parameters: {codec} is too coarse to compute with: stage 3 sends the parameters "
                "themselves; stages 1 and 2, and zero.hierarchical between nodes, send their deltas",
                "set communication.parameters to int8"
                if replicates
                else "set zero.hierarchical to true, communication.parameters to int8, or zero.stage to 2",
            )
        return
    if zero.stage == 3:
        yield from _deltas_between_nodes(config)
    if config.precision.master == "split" and compute == "bf16":
        yield (
            ("communication.parameters", "precision.master"),
            "precision.master: split stores the high bits of master weights in the parameters, and quantized deltas "
            "would change them",
            "set precision.master to fp32",
        )
    if zero.offload.parameters != "none":
        yield (
            ("communication.parameters", "zero.offload.parameters"),
            "quantized deltas are added to parameters on the device",
            "leave zero.offload.parameters out",
        )


def _deltas_between_nodes(config: Config) -> Iterator[Contradiction]:
    """Rules of parameter deltas between nodes, each of which stores all parameters."""
    asked = config.communication
    if sends_averages(config):
        yield (
            ("optimizer.name", "optimizer.sends", "zero.hierarchical", "communication.parameters"),
            "optimizer.name: onebit_adam sends its running average to all ranks at once; with "
            f"communication.parameters: {asked.parameters}, zero.hierarchical sends deltas between nodes first",
            "set communication.parameters to full, or optimizer.sends to gradients",
        )
    if config.precision.gradients == "in_backward":
        yield (
            ("communication.parameters", "zero.hierarchical", "precision.gradients"),
            "precision.gradients: in_backward updates a unit while other units are unsharded for backward: with "
            f"communication.parameters: {asked.parameters}, zero.hierarchical sends deltas between nodes, and ranks "
            "would launch these and the all-gathers in different orders",
            "set precision.gradients to fp32, or communication.parameters to full",
        )
