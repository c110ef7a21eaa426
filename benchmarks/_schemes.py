"""Kinds of compressed communication, as sections of the config."""

from dataclasses import dataclass, field
from typing import Any

FULL = "full"


@dataclass(frozen=True)
class Scheme:
    """A compression scheme.

    ``forgets``: discard the error-feedback residuals after each step, for a control run; no config does this.
    """

    sections: dict[str, Any] = field(default_factory=dict)
    forgets: bool = False


def schemes(steps: int) -> dict[str, Scheme]:
    """Return all schemes for runs of ``steps`` steps on 4 ranks; the first is the reference."""

    def both(codec: str, warm_up: float = 0.0) -> dict[str, Any]:
        given = {"warmup_steps": int(warm_up * steps)} if warm_up else {}
        return {"zero": {"stage": 1}, "communication": {"gradients": codec, "parameters": codec, **given}}

    def onebit(stage: int, codec: str, warm_up: float) -> dict[str, Any]:
        parameters = {"parameters": codec} if stage else {}
        communication = {"gradients": codec, **parameters, "warmup_steps": int(warm_up * steps)}
        return {"zero": {"stage": stage}, "communication": communication, "optimizer": {"name": "onebit_adam"}}

    def local_steps(codec: str, every: int, momentum: float | None = None, **others: Any) -> dict[str, Any]:
        outer = others if momentum is None else {"outer_momentum": momentum, **others}
        return {"zero": {"stage": 1}, "communication": {"every": every, "replicas": 4, "gradients": codec, **outer}}

    def sends_gradients(codec: str, warm_up: float, start: str = "int8") -> dict[str, Any]:
        made = onebit(1, codec, warm_up)
        optimizer = {**made["optimizer"], "sends": "gradients"}
        return {**made, "communication": {**made["communication"], "warmup": start}, "optimizer": optimizer}

    def low_rank(rank: int, warm_up: float) -> dict[str, Any]:
        given = {"gradients": "low_rank", "low_rank": rank, "warmup_steps": int(warm_up * steps)}
        return {"zero": {"stage": 0}, "communication": given}

    after_5 = "after 5 %, 8-bit start"
    after_15 = "after 15 %, 8-bit start"
    made = {
        FULL: {"zero": {"stage": 1}},
        f"onebit_adam sends gradients, ternary {after_5}": sends_gradients("ternary", 0.05),
        "ternary both ways after 15 %": both("ternary", 0.15),
        "int4 both ways": both("int4"),
        "onebit_adam, signs after 15 %": onebit(0, "onebit", 0.15),
        "local steps, 8, ternary, momentum 0.5": local_steps("ternary", 8, 0.5),
        "control, full, frozen and capped after 5 %": sends_gradients("full", 0.05, "full"),
        "int8 both ways": both("int8"),
        "low rank 4 after 5 %": low_rank(4, 0.05),
        "ternary both ways after 5 %": both("ternary", 0.05),
        "local steps, 8, int4, momentum 0.5": local_steps("int4", 8, 0.5),
        "local steps, 8, momentum 0.5": local_steps("full", 8, 0.5),
        "local steps, 4, onebit, momentum 0.5": local_steps("onebit", 4, 0.5),
        "local steps, 30, ternary, momentum 0.5": local_steps("ternary", 30, 0.5),
        "local steps, 10, ternary": local_steps("ternary", 10),
        "onebit_adam at stage 1, ternary after 5 %": onebit(1, "ternary", 0.05),
        "onebit_adam, signs after 5 %": onebit(0, "onebit", 0.05),
        "2bit both ways after 5 %": both("2bit", 0.05),
        "topk both ways after 5 %": both("topk", 0.05),
        f"onebit_adam sends gradients, ternary {after_15}": sends_gradients("ternary", 0.15),
        "control, full, frozen and capped after 15 %": sends_gradients("full", 0.15, "full"),
        "low rank 1": low_rank(1, 0.0),
        "ternary both ways": both("ternary"),
    }
    found = {name: Scheme(sections) for name, sections in made.items()}
    without = Scheme(made[f"onebit_adam sends gradients, ternary {after_5}"], forgets=True)
    return {**found, f"control, no feedback: ternary {after_5}": without}
