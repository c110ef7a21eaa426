"""What a configuration says of the wire, all of its sections together."""

from partita.config.schema import Config

# Of all steps, those in which 1-bit Adam's second moment is still measured (Tang et al., 2021, section 7, has 15 % to
# 20 %).
WARM_UP = 0.15
CHECKED_EVERY = 100
# Optimizers whose running average travels in place of gradients.
SENDS_MOMENTUM = ("onebit_adam", "zeroone_adam", "onebit_lamb")
MEASURES_MOMENT = ("onebit_adam", "onebit_lamb")  # in a warm-up


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
    carries = config.optimizer.name in SENDS_MOMENTUM and config.communication.carrier is None
    return "onebit" if asked == "full" and carries else asked


def warmup_steps(config: Config) -> int:
    """Optimizer steps before codes begin to travel."""
    asked, optimizer = config.communication.warmup_steps, config.optimizer
    if asked != "auto":
        return asked
    if optimizer.name == "zeroone_adam":
        return optimizer.refresh
    return int(WARM_UP * (config.schedule.total_steps or 0)) if optimizer.name in MEASURES_MOMENT else 0


def travels_in_full(config: Config, step: int) -> bool:
    """Whether no codes travel in the step after so many: before they begin to, and where 0/1 Adam's second moment is
    refreshed.
    """
    refreshes = config.optimizer.name == "zeroone_adam" and is_refresh(step, config.optimizer.refresh)
    return refreshes or step < warmup_steps(config)


def is_refresh(step: int, num: int) -> bool:
    """Whether the step after so many refreshes the second moment: of each ``num`` refreshes, one and the next are twice
    as many steps apart as of the ``num`` before (Lu et al., "0/1 Adam", 2022, section 6).
    """
    apart = 1 << (step // num + 1).bit_length() - 1
    return (step - num * (apart - 1)) % apart == 0
