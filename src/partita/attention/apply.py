"""Application of block-sparse attention to the modules of a model that the config selects."""

import inspect
import sys
from functools import cache, partial

from torch import nn

from partita.attention.intercept import InterceptAttention
from partita.attention.layout import Layout
from partita.config.schema import AttentionSection
from partita.errors import ConfigError
from partita.layout.units import modules_like
from partita.transforms.modules import Level

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
_DOT_PRODUCTS = {"scaled_dot_product_attention", "multi_head_attention_forward"}


def layout_of(settings: AttentionSection, causal: bool) -> Layout:
    """Return the layout that the settings describe.

    Raises:
        ConfigError: the settings are not valid together.
    """
    window = settings.window
    return Layout(
        settings.pattern,
        settings.block,
        window[0] if window is not None and len(window) == 1 else window,
        getattr(settings, "global"),
        settings.random,
        causal,
        settings.layout,
    )


class SparseAttention:
    """Block-sparse attention of a model. The constructor checks the settings; :meth:`apply` changes the model.

    Raises:
        ConfigError: the settings are not valid together, or a module's attention cannot be intercepted.
    """

    def __init__(self, model: nn.Module, settings: AttentionSection) -> None:
        self._model = model
        self._causal = None if settings.causal == "auto" else settings.causal
        self._modules: dict[str, nn.Module] = {}
        self._layouts = cache(partial(layout_of, settings))
        self._layouts(self._causal or False)
        self._description = f"attention over the pattern {settings.pattern}, in blocks of {settings.block} positions"
        if settings.pattern == "dense" and not settings.packed:
            return
        if isinstance(settings.layers, str):
            self._modules = _all_attention(model)
        else:
            self._modules = _attention_in(model, settings.layers)
        if "transformers" in sys.modules:
            from partita.attention import transformers_interface

            transformers_interface.check_settable(model)

    @property
    def lines(self) -> list[str]:
        """A line about each changed module, for :meth:`Engine.explain`."""
        return [f"{name}: {self._description}" for name in self._modules]

    def apply(self, changes: Level) -> None:
        if not self._modules:
            return
        if "transformers" in sys.modules:
            from partita.attention import transformers_interface

            changes.on_undo(transformers_interface.install(self._model))
        for name, module in self._modules.items():
            dot_products = _INTERFACE not in _names_in_forward(module)
            call = InterceptAttention(module, name, self._layouts, self._causal, dot_products)
            changes.wrap_forward(module, call)
            # In eval mode torch's encoder layers run a fused kernel, unless a submodule has a hook.
            changes.on_undo(module.register_forward_pre_hook(_nothing).remove)


def _nothing(module: nn.Module, args: object) -> None:
    pass


def _names_in_forward(module: nn.Module) -> set[str]:
    """Return the global names and attributes that the forward of a module's class uses."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return set(code.co_names) if code is not None else set()


def _is_attention(module: nn.Module) -> bool:
    return bool(_names_in_forward(module) & {_INTERFACE, *_DOT_PRODUCTS})


def _all_attention(model: nn.Module) -> dict[str, nn.Module]:
    found = {name: module for name, module in model.named_modules() if _is_attention(module)}
    for name, module in model.named_modules():
        has_some = any(each == name or each.startswith(f"{name}.") for each in found)
        if "Attention" in type(module).__name__ and not has_some and not any(name.startswith(f"{x}.") for x in found):
            raise ConfigError(
                f"attention.pattern: '{name}' ({type(module).__name__}) calls neither torch's "
                "scaled_dot_product_attention nor transformers' attention interface, so its attention cannot be "
                "intercepted; name those that can in attention.layers"
            )
    if not found:
        raise ConfigError(
            f"attention.pattern: no module of {type(model).__name__} calls torch's scaled_dot_product_attention or "
            "transformers' attention interface in its forward; name modules that call them through other functions in "
            "attention.layers"
        )
    return found


def _attention_in(model: nn.Module, patterns: tuple[str, ...]) -> dict[str, nn.Module]:
    """Return the attention modules at and inside the matching modules. If no attention module is found there, return
    the matching modules themselves, which may call attention through other functions.
    """
    chosen: set[int] = set()
    for pattern in patterns:
        matching = modules_like(model, pattern, "attention.layers")
        inside = [each for module in matching for each in module.modules() if _is_attention(each)]
        chosen |= {id(each) for each in inside or matching}
    return {name: module for name, module in model.named_modules() if id(module) in chosen}
