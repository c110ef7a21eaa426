"""Checks of an engine's state between steps, and of hooks and attributes on a model."""

from typing import Any

from torch import nn

import partita
from partita.sharding.unit import UnitState

_VALUES = ("_parameters", "_buffers", "_modules")


def attached_to(model: nn.Module) -> set[str]:
    """Describe the hooks and attributes (including replaced forwards) of modules, and parameters' classes and hooks."""
    found = set[str]()
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if "hooks" in key:
                found |= {f"{name}.{key}: {hook!r}" for hook in (value or {}).values()}
            elif key not in _VALUES:
                found.add(f"{name}.{key}: {value!r} {getattr(value, '_attn_implementation', '')}")
        for key, param in module.named_parameters(recurse=False):
            hooks = (param._backward_hooks, param._post_accumulate_grad_hooks)  # type: ignore[attr-defined]
            found.add(f"{name}.{key}: {type(param).__name__} {[list((each or {}).values()) for each in hooks]}")
    return found - {f"{name}._compiled_call_impl: None " for name, _ in model.named_modules()}


def assert_idle(engine: partita.Engine) -> None:
    """Assert that nothing is in use between steps: all units are sharded and all buffers are back in their pools."""
    unsharder, reducer = engine._parts.runtime.unsharder, engine._parts.runtime.reducer
    open_units = [
        u.title for u in unsharder.units if u.state is not UnitState.SHARDED or u.open_calls or u.pinned or u.slot
    ]
    assert not open_units, f"open: {open_units}"
    held = engine.memory_report().held
    assert _free_bytes(engine._parts.runtime._pool) == held.get(("buffer_pool", "device"), 0)
    pools = tuple(reducer.pools)
    assert sum(map(_free_bytes, pools)) == sum(held.get(("buckets", tier), 0) for tier in ("device", "host"))
    assert all((bucket.buffer.full is None) == bucket.is_pooled for bucket in reducer.buckets if bucket.buffer.collects)


def _free_bytes(pool: Any) -> int:
    return sum(slot.num_bytes for slots in pool._free.values() for slot in slots)
