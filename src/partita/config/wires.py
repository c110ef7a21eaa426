"""What a configuration says of the wire, all of its sections together."""

from partita.config.schema import Config

# Of all steps, those in which 1-bit Adam's second moment is still measured (Tang et al., 2021, section 7, has 15 % to
# 20 %).
WARM_UP = 0.15
CHECKED_EVERY = 100


def sends_averages(config: Config) -> bool:
    """Whether the optimizer's running average travels in place of gradients."""
    return config.optimizer.name == "onebit_adam" and config.optimizer.sends == "averages"


def sends_changes(config: Config) -> bool:
    """Whether codes of parameters are of their changes, from where they are updated to all that have them at rest: all
    ranks below stage 3, a rank of each node under ``zero.hierarchical``.
    """
    zero, codec = config.zero, config.communication.parameters
    return codec != "full" and (zero.stage < 3 or zero.hierarchical)


def check_every(config: Config) -> int:
    """Optimizer steps between two checks of what ranks hold alike; 0: there are none."""
    asked = config.communication.check_every
    if asked != "auto":
        return asked
    return CHECKED_EVERY if sends_changes(config) else 0


def gradient_codec(config: Config) -> str:
    """The codec of gradients, or of the running average that travels in their place."""
    asked = config.communication.gradients
    return "onebit" if asked == "full" and sends_averages(config) else asked


def warmup_steps(config: Config) -> int:
    """Optimizer steps before codes begin to travel."""
    asked = config.communication.warmup_steps
    if asked != "auto":
        return asked
    return int(WARM_UP * (config.schedule.total_steps or 0)) if config.optimizer.name == "onebit_adam" else 0
