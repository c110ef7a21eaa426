"""LayerDrop of Hugging Face models (arXiv 1909.11556): in training, each rank skips layers at random.

With sharded parameters every rank must run every module, so it is switched off there, as it is where ranks run parts
of a forward (of its layers, or of its positions). transformers does the same for some models under FSDP and DeepSpeed's
ZeRO-3.
"""

import inspect

from torch import nn

from partita.transforms.modules import Level

# With this attribute, transformers runs layers that it has drawn to skip.
_RUNS_ALL = "_is_fsdp_managed_module"


def switch_off(model: nn.Module, changes: Level, reason: str) -> str:
    """Have every layer run. Returns: a notice for the user, with the ``reason``; empty if no module drops layers."""
    found = list[str]()
    for name, module in model.named_modules():
        if isinstance(getattr(module, "layerdrop", None), float) and module.layerdrop:
            changes.set_attribute(module, "layerdrop", 0.0)
        elif _draws_by_config(module):
            changes.set_attribute(module, _RUNS_ALL, True)
        else:
            continue
        found.append(name or type(module).__name__)
    if not found:
        return ""
    return f"{', '.join(found)}: no layers are dropped in training, because {reason}"


def _draws_by_config(module: nn.Module) -> bool:
    """Return whether the module's forward skips layers at its config's rate unless it has :data:`_RUNS_ALL`."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    settings = getattr(getattr(module, "config", None), "__dict__", {})
    rates = [value for name, value in settings.items() if name.endswith("layerdrop") and isinstance(value, float)]
    return code is not None and "is_fsdp_managed_module" in code.co_names and any(rates)
