"""Settings of compression that follow from several sections of a configuration."""

from functools import cache
from importlib import import_module

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
