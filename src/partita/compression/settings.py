"""Settings of compression: which codec, which warm-up, and the rules between them and other settings."""

from collections.abc import Iterator
from functools import cache
from importlib import import_module

from partita.config.messages import Contradiction, setting
from partita.config.schema import Config
from partita.errors import ConfigError
from partita.kernels.codecs import CODECS, Codec, TorchCodec

# Of all steps, those in which 1-bit Adam's second moment is still measured (Tang et al., 2021, section 7, has 15 % to
# 20 %).
WARM_UP = 0.15
CHECKED_EVERY = 100
# The names of codecs in a configuration: those that round at random, and those too coarse for that, whose errors are
# kept and sent later.
AT_RANDOM = ("int8", "int4")
LOW_RANK = "low_rank"  # no codec of blocks: matrices travel as two thin factors
HELD_BACK = {"2bit": "two_bits", "ternary": "ternary", "onebit": "sign", "topk": "top8"}


def keeps_errors(name: str) -> bool:
    """Return whether what the codec of this name loses is kept and sent later."""
    return name in HELD_BACK or ":" in name


def codec_named(name: str) -> Codec | None:
    """Return the codec of a name in a configuration, or of a class at ``module:class``; None: there is none.

    Raises:
        ConfigError: there is no such class, or it is no :class:`TorchCodec`.
    """
    return _own_codec(name) if ":" in name else CODECS.get(HELD_BACK.get(name, name))


@cache  # one object for all rows: rows that use equal formats are equal
def _own_codec(place: str) -> TorchCodec:
    module, _, kind = place.partition(":")
    try:
        found = getattr(import_module(module), kind)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(f"communication.gradients: {place}: {error}; expected module:class of a codec") from error
    if not isinstance(found, TorchCodec):
        raise ConfigError(f"communication.gradients: {place} is no partita.kernels.codecs.TorchCodec: subclass it")
    return found


def sends_averages(config: Config) -> bool:
    """Return whether the optimizer's running average travels in place of gradients."""
    return config.optimizer.name == "onebit_adam" and config.optimizer.sends == "averages"


def stores_deltas(config: Config) -> bool:
    """Return whether codes of parameters are of their deltas, from where they are updated to all that store them.

    Those are all ranks below stage 3, and a rank of each node under ``zero.hierarchical``.
    """
    zero, codec = config.zero, config.communication.parameters
    return codec != "full" and (zero.stage < 3 or zero.hierarchical)


def check_every(config: Config) -> int:
    """Return the steps between two comparisons of parameters that several ranks store; 0: there are none."""
    asked = config.communication.check_every
    if asked != "auto":
        return asked
    return CHECKED_EVERY if stores_deltas(config) else 0


def gradient_codec(config: Config) -> str:
    """Return the codec of gradients, or of the running average that travels in their place."""
    asked = config.communication.gradients
    return "onebit" if asked == "full" and sends_averages(config) else asked


def warmup_steps(config: Config) -> int:
    """Return the number of updates before codes begin to travel."""
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
    if not keeps_errors(codec) and codec != LOW_RANK:
        return
    yield from _low_rank(config)
    if config.precision.gradients == "in_backward":
        yield (
            ("communication.gradients", "precision.gradients"),
            f"communication.gradients: {codec} holds back what codes lose once a step is known to be finite; "
            "precision.gradients: in_backward updates before that",
            "set communication.gradients to int8",
        )
    for key in ("optimizer", "gradients"):
        if getattr(offload, key) in ("disk", "auto") and (key, offload.gradients) != ("gradients", "auto"):
            yield (
                ("communication.gradients", f"zero.offload.{key}"),
                f"what communication.gradients: {codec} holds back rests on the device or on the host, as the "
                "optimizer states do; gradients come there, too",
                f"set zero.offload.{key} to host",
            )
    if codec == "onebit" and config.optimizer.name == "sgd" and config.optimizer.momentum == 0:
        yield (
            ("communication.gradients", "optimizer.name", "optimizer.momentum"),
            "communication.gradients: onebit sends signs, which say nothing of a value's size: it takes a running "
            "average, and plain sgd keeps none",
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
                    f"communication.{key} is of replicas that train apart",
                    "set communication.every to the optimizer steps between two exchanges",
                )
        return
    for key, why in (
        ("zero.hierarchical", "splits parameters over all nodes"),
        ("zero.replicate", "has all nodes add up every gradient"),
        ("communication.parameters", "has codes stand for the parameters of a replica"),
        ("precision.gradients", "updates a unit before it is known whether all replicas' gradients are finite"),
        ("precision.master", "has no master weights that could be compared with those of the last exchange"),
        ("precision.moments", "has averages in blocks, of which there is no mean over the replicas"),
        ("optimizer.name", "has the running average of all ranks in place of each replica's"),
    ):
        value = setting(config, key)
        refused = {
            "precision.gradients": value == "in_backward",
            "optimizer.name": value == "onebit_adam",
        }
        if refused.get(key, value != setting(Config(), key)):
            yield (
                (key, "communication.every"),
                f"{key}: {value} {why}; under communication.every each replica trains apart",
                f"leave {key} or communication.every out",
            )
    if config.zero.offload.optimizer in ("disk", "auto"):
        yield (
            ("zero.offload.optimizer", "communication.every"),
            "what replicas that train apart compare rests on the device or on the host",
            "set zero.offload.optimizer to host",
        )


def _low_rank(config: Config) -> Iterator[Contradiction]:
    """Rules of low-rank gradients (PowerSGD)."""
    if config.communication.gradients != LOW_RANK:
        return
    for key, is_set, why in (
        ("zero.replicate", config.zero.replicate != "none", "has sums go from node to node as parts of matrices"),
        ("communication.every", config.communication.every is not None, "exchanges parts, which are no matrices"),
        ("optimizer.sends", sends_averages(config), "sends averages back as codes of parts"),
    ):
        if is_set:
            yield (
                ("communication.gradients", key),
                f"communication.gradients: low_rank makes factors of whole matrices; {key} {why}",
                "set communication.gradients to ternary",
            )


def _warm_up(config: Config) -> Iterator[Contradiction]:
    """Rules of the warm-up, before codes travel."""
    total, num = config.schedule.total_steps, warmup_steps(config)
    if total is not None and num >= total:
        yield (
            ("communication.warmup_steps", "schedule.total_steps"),
            "communication.warmup_steps: all of the training's steps would be before codes travel",
            f"set communication.warmup_steps to less than {total}",
        )
    if config.communication.warmup != "full" and not num:
        yield (
            ("communication.warmup", "communication.warmup_steps"),
            f"communication.warmup: {config.communication.warmup} is of the steps before codes travel, and there are "
            "none",
            "set communication.warmup_steps",
        )
    if num and config.precision.gradients == "in_backward":
        yield (
            ("communication.warmup_steps", "precision.gradients"),
            "under precision.gradients: in_backward codes travel from the first step on",
            "leave communication.warmup_steps out",
        )
    if (name := config.optimizer.name) != "onebit_adam":
        return
    if sends_averages(config) and config.communication.gradients in AT_RANDOM:
        yield (
            ("optimizer.name", "optimizer.sends", "communication.gradients"),
            f"optimizer.name: {name} has its running average travel, in codes that hold back what they lose",
            "set communication.gradients to onebit, ternary, 2bit or topk, or optimizer.sends to gradients",
        )
    if not num:
        yield (
            ("optimizer.name", "communication.warmup_steps", "schedule.total_steps"),
            f"optimizer.name: {name} measures its second moment in a warm-up",
            "set communication.warmup_steps, or schedule.total_steps, of which it is 15 %",
        )
    if sends_averages(config) and config.zero.replicate != "none":
        yield (
            ("optimizer.name", "optimizer.sends", "zero.replicate"),
            f"optimizer.name: {name} has all ranks know one running average; zero.replicate has one a node",
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
                f"communication.parameters: {codec} is too coarse to compute with: what travels at stage 3 are the "
                "parameters themselves, at stages 1 and 2 and between the nodes of zero.hierarchical their changes",
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
            "precision.master: split has its high halves in the parameters, which changes in codes make other ones",
            "set precision.master to fp32",
        )
    if zero.offload.parameters != "none":
        yield (
            ("communication.parameters", "zero.offload.parameters"),
            "changes in codes are added to parameters on the device",
            "leave zero.offload.parameters out",
        )


def _deltas_between_nodes(config: Config) -> Iterator[Contradiction]:
    """Rules of parameter deltas between nodes, each of which stores all parameters."""
    asked = config.communication
    if sends_averages(config):
        yield (
            ("optimizer.name", "optimizer.sends", "zero.hierarchical", "communication.parameters"),
            "optimizer.name: onebit_adam has its running average go back to all ranks at once; where "
            f"communication.parameters: {asked.parameters} has changes pass between the nodes of zero.hierarchical, "
            "what comes back goes from node to node first",
            "set communication.parameters to full, or optimizer.sends to gradients",
        )
    if config.precision.gradients == "in_backward":
        yield (
            ("communication.parameters", "zero.hierarchical", "precision.gradients"),
            "precision.gradients: in_backward updates a unit as its gradients come, while others are gathered for "
            f"backward: where communication.parameters: {asked.parameters} has changes pass between the nodes of "
            "zero.hierarchical, ranks would meet in these and in gathers in different orders",
            "set precision.gradients to fp32, or communication.parameters to full",
        )
