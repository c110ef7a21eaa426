"""What a configuration says of the wire, all of its sections together."""

from partita.config.schema import Config

# Of all steps, those in which 1-bit Adam's second moment is still measured (Tang et al., 2021, section 7, has 15 % to
# 20 %).
WARM_UP = 0.15


def gradient_codec(config: Config) -> str:
    """The codec of gradients, or of the running average that travels in their place."""
    asked = config.communication.gradients
    return "onebit" if asked == "full" and config.optimizer.name == "onebit_adam" else asked


def warmup_steps(config: Config) -> int:
    """Optimizer steps before codes begin to travel."""
    asked = config.communication.warmup_steps
    if asked != "auto":
        return asked
    return int(WARM_UP * (config.schedule.total_steps or 0)) if config.optimizer.name == "onebit_adam" else 0
