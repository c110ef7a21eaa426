"""Activation checkpointing: modules keep only their inputs, and run their forward again in backward.

T. Chen et al., "Training Deep Nets with Sublinear Memory Cost", section 4. Selective recomputation also keeps results
that are expensive to compute: V. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
section 5.
"""

import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointError,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from partita.activation.forward_state import ForwardCall, ForwardState
from partita.activation.inputs import RecomputedCall, StoredInputs
from partita.activation.recompute_budget import RecomputeBudget
from partita.activation.tiles import TiledForward
from partita.errors import ConfigError, PartitaError
from partita.layout.units import modules_like
from partita.memory import accelerator
from partita.parallel.random import RandomStreams
from partita.parallel.sequence.exchange import is_checking
from partita.sharding.compiler import constant, eager_itself
from partita.sharding.pytree import tensors_in
from partita.transforms.modules import Level

KEY = "activations.checkpoint"
_DIFFERS = re.compile(r"tensor at position (\d+):\nsaved metadata: (.*)\nrecomputed metadata: (.*)")
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
# `selective` keeps results on the device: hooks that offload inputs do not see them, as in torch 2.13.
_HOOKS: dict[str, Any] = {
    name: False for name in ("respect_saved_tensors_hooks",) if name in inspect.signature(checkpoint).parameters
}

# Operators whose results `selective` keeps: they are expensive to compute, relative to the memory of the results.
EXPENSIVE = frozenset(
    {
        *("mm", "addmm", "bmm", "baddbmm", "linear", "convolution", "_scaled_mm", "_grouped_mm"),
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    }
)


def chosen_modules(model: nn.Module, units: Iterable[str], choice: str | Sequence[str]) -> dict[str, nn.Module]:
    """Return the modules that ``activations.checkpoint`` selects, by name.

    Args:
        units: names of the model's units. ``units`` and ``selective`` recompute the units that contain other modules.
            (A single layer has no intermediate results.)

    Raises:
        ConfigError: there are none.
    """
    if choice == "none":
        return {}
    if not isinstance(choice, str):
        chosen = {id(module) for text in choice for module in modules_like(model, text, KEY)}
        return {name: module for name, module in model.named_modules() if id(module) in chosen}
    modules = {name: model.get_submodule(name) for name in units if name}
    modules = {name: module for name, module in modules.items() if any(True for _ in module.children())}
    if not modules:
        raise ConfigError(
            f"{KEY}: '{choice}' recomputes units, and {type(model).__name__} has no unit except the model itself; name "
            "modules to recompute by class or pattern, or name units in zero.units"
        )
    return modules


class Recomputation:
    """Activation checkpointing of modules.

    The hooks of the submodules run in both runs, so sharded parameters are unsharded in both.

    Args:
        tiled: modules that are recomputed for a tile of positions at a time.
        inputs: offloads or shards the inputs of the other modules.
        kept: decides which calls of the other modules are not recomputed.
        streams: the random numbers that recomputed forwards draw again; None: those of torch's generators.
        device: the model's device, whose random state recomputed forwards start from.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        changes: Level,
        *,
        selective: bool,
        tiled: Mapping[str, nn.Module],
        inputs: StoredInputs | None = None,
        kept: RecomputeBudget | None = None,
        streams: RandomStreams | None = None,
        device: torch.device = accelerator.HOST,
    ) -> None:
        self._recomputed_name = ""
        for name, module in tiled.items():
            recomputed = Recomputed(name, module, self._note, streams=streams, device=device)
            changes.wrap_forward(module, TiledForward(name, recomputed))
        for name, module in modules.items():
            changes.wrap_forward(module, Recomputed(name, module, self._note, selective, inputs, kept, streams, device))

    def _note(self, name: str) -> None:
        self._recomputed_name = name

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Replace torch's error about a recomputed forward by one that names the module.

        Raises:
            PartitaError: the recomputed forward saved other tensors than the first one.
        """
        try:
            yield
        except CheckpointError as error:
            raise PartitaError(
                f"'{self._recomputed_name}' computed something else when its forward was recomputed in backward: its "
                "forward depends on more than its inputs and torch's random numbers, so it cannot be recomputed; leave "
                f"it out of {KEY}. {_difference(str(error))}"
            ) from error


def _difference(message: str) -> str:
    """Return the part of torch's checkpoint error about the first tensor that differs, or about their number."""
    if found := _DIFFERS.search(message):
        place, saved, repeated = found.groups()
        return f"Of the tensors that it saves, the first that differs is number {place}: {saved}, then {repeated}"
    return message.partition(".\n\n")[0]


class Recomputed:
    """Wrapper that checkpoints a module's forward. ``on_recompute`` is called with the module's name before each
    recomputation.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        on_recompute: Callable[[str], None],
        selective: bool = False,
        inputs: StoredInputs | None = None,
        kept: RecomputeBudget | None = None,
        streams: RandomStreams | None = None,
        device: torch.device = accelerator.HOST,
    ) -> None:
        self._name = name
        self._module = module
        self._on_recompute = partial(on_recompute, name)
        self._selective = selective
        self._inputs = inputs
        self._kept = kept
        self._streams = streams
        self._device = device
        self._draws = streams is not None and streams.has_seeds(module)  # by hooks, which are not compiled
        self._state = ForwardState(name, module)

    def __call__(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or checkpoints_itself(self._module) or _is_checked():
            return own(*args, **kwargs)
        if self._kept is None or not self._is_first():
            return self._recomputed(own, *args, **kwargs)
        with self._kept.call(self._module, list(tensors_in((args, kwargs)))) as is_whole:
            output = own(*args, **kwargs) if is_whole else self._recomputed(own, *args, **kwargs)
        self._kept.follow(output)
        return output

    def _recomputed(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._inputs is not None and self._is_first():
            return self._recomputed_with_moved_inputs(self._inputs, own, args, kwargs)
        forward = partial(own, **kwargs)  # some keywords could be arguments of `checkpoint`
        if torch.compiler.is_compiling() and not self._draws:  # a compiled graph changes buffers after recomputed parts
            if self._selective:
                return checkpoint(forward, *args, use_reentrant=False, context_fn=selecting)
            return checkpoint(forward, *args, use_reentrant=False)
        return self._checkpoint(self._contexts, forward, *args)

    def _is_first(self) -> bool:
        """Return whether this is the first run of a forward: not a recomputation, and not in a compiled graph."""
        if torch.compiler.is_compiling():
            warn_of_compiled()
            return False
        return torch._C._current_graph_task_id() == -1

    def _recomputed_with_moved_inputs(
        self, inputs: StoredInputs, own: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        call = RecomputedCall(inputs, own, self._name, args, kwargs)
        if not call.moved:
            return self._checkpoint(self._contexts, partial(own, **kwargs), *args)
        output = self._checkpoint(partial(self._contexts, call.start_reload), call.run, *call.others)
        inputs.forward_ended()
        return output

    @eager_itself
    def _checkpoint(self, contexts: Callable[[], Contexts], function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function``, and recompute it in backward, in the two ``contexts``."""
        # `checkpoint` saves the random states of the devices of its positional tensors. `args` may have none: modules
        # may be called with keywords only, and inputs may be offloaded.
        like = torch.empty(0, dtype=torch.uint8, device=self._device)
        run = partial(_call_without_first, function)
        return checkpoint(run, like, *args, use_reentrant=False, context_fn=contexts, **_HOOKS)

    def _contexts(self, *on_begin: Callable[[], None]) -> Contexts:
        """Return the contexts of the forward and of its recomputations. Each recomputation first calls ``on_begin``."""
        keeping: Contexts = selecting() if self._selective else (nullcontext(), nullcontext())
        call = ForwardCall(self._state)
        measured = nullcontext() if self._kept is None else self._kept.measured()
        random = nullcontext if self._streams is None else self._streams.recomputation()
        return _enter_all(call, keeping[0], measured), RecomputeContext(
            call, keeping[1], (self._on_recompute, *on_begin), random
        )


def _call_without_first(function: Callable[..., Any], first: Tensor, *args: Any) -> Any:
    return function(*args)


@contextmanager
def _enter_all(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    """Enter several contexts, outermost first."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


class RecomputeContext:
    """The context of each recomputation of a module's forward (several with ``retain_graph=True``).

    Inside it, buffers are copies with the values that the first forward read. It may have changed them (the running
    mean of a batch norm). Modules draw the random numbers of the first forward (``random``).
    """

    def __init__(
        self,
        call: ForwardCall,
        keeping: AbstractContextManager[Any],
        on_begin: Sequence[Callable[[], None]],
        random: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._call = call
        self._keeping = keeping
        self._on_begin = on_begin
        self._random = random
        self._entered = ExitStack()

    def __enter__(self) -> None:
        for on_begin in self._on_begin:
            on_begin()
        self._entered.enter_context(self._call.repeated())
        self._entered.enter_context(self._random())
        self._entered.enter_context(self._keeping)

    def __exit__(self, *raised: Any) -> None:
        self._entered.__exit__(*raised)


def _is_checked() -> bool:
    return not torch.compiler.is_compiling() and is_checking()


@constant
def warn_of_compiled() -> None:
    """Warn, once per compiled graph, that some settings do not apply to compiled modules."""
    warnings.warn(
        "activations.offload, partition and keep_bytes do not apply to compiled modules: their inputs stay unsharded "
        "on the device, and they are recomputed; set these keys to none, or do not compile the modules that "
        "activations.checkpoint selects",
        stacklevel=2,
    )


def checkpoints_itself(module: nn.Module) -> bool:
    """Return whether a transformers module checkpoints its own forward (``gradient_checkpointing_enable``)."""
    return bool(module.training and getattr(module, "gradient_checkpointing", False))


def selecting() -> Contexts:
    """Return the contexts of a forward and its recomputation in which results of expensive operators are kept."""
    contexts: Contexts = create_selective_checkpoint_contexts(_policy)
    return contexts


def _policy(context: object, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    packet = getattr(operator, "overloadpacket", None)  # operators of higher order have none
    kept = getattr(packet, "__name__", "") in EXPENSIVE
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
