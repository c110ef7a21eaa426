"""Everything that hangs on a model besides its values."""

from torch import nn

_VALUES = ("_parameters", "_buffers", "_modules")


def attached_to(model: nn.Module) -> set[str]:
    """Forwards, calls, hooks and attributes of the modules, and classes and hooks of their parameters."""
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
