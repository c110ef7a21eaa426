"""Modules that keep only their inputs for backward, and run forward again there.

T. Chen et al., "Training Deep Nets with Sublinear Memory Cost", section 4. With selective recomputation, results that
are expensive to compute are kept, too: V. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models", 5.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointError,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from partita.activation.forward_state import ForwardCall, ForwardState
from partita.activation.inputs import Call, StoredInputs
from partita.activation.kept_whole import KeptWhole
from partita.activation.tiles import InTiles
from partita.errors import ConfigError, PartitaError
from partita.parallel.sequence.exchange import is_checking
from partita.planner.group_units import modules_like
from partita.sharding.compiler import constant
from partita.sharding.pytree import tensors_in
from partita.transforms.modules import Level

KEY = "activations.checkpoint"
_DIFFERS = re.compile(r"tensor at position (\d+):\nsaved metadata: (.*)\nrecomputed metadata: (.*)")
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

# Operators whose results `selective` keeps: they take more time to compute than their results take to be kept.
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
        units: names of the model's units; those that have modules inside them are recomputed for ``units`` and
            ``selective``. (A single layer computes nothing that is not its output.)

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
            f"{KEY}: '{choice}' recomputes units, and {type(model).__name__} has none beside the whole model; name "
            "modules to recompute by class or pattern, or the units in zero.units"
        )
    return modules


class Recomputation:
    """Makes modules run forward again in backward.

    A module's hooks run both times: if its parameters are sharded, they are unsharded while it runs.

    Args:
        tiled: modules that are recomputed for some positions at a time.
        inputs: moves the inputs of the others.
        kept: decides which of their calls are not recomputed.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        changes: Level,
        *,
        selective: bool,
        tiled: Mapping[str, nn.Module],
        inputs: StoredInputs | None = None,
        kept: KeptWhole | None = None,
    ) -> None:
        self._repeated = ""
        for name, module in tiled.items():
            changes.wrap_forward(module, InTiles(name, Recomputed(name, module, self._note)))
        for name, module in modules.items():
            changes.wrap_forward(module, Recomputed(name, module, self._note, selective, inputs, kept))

    def _note(self, name: str) -> None:
        self._repeated = name

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn torch's error about a repeated forward into one that names the module.

        Raises:
            PartitaError: the repeated forward computed other tensors than the first one.
        """
        try:
            yield
        except CheckpointError as error:
            raise PartitaError(
                f"'{self._repeated}' computed something else when its forward was repeated in backward: a forward that "
                "depends on more than its inputs and torch's random numbers cannot be recomputed; leave it out of "
                f"{KEY}. {_difference(str(error))}"
            ) from error


def _difference(said: str) -> str:
    """Return what torch's checkpoint reports of the first tensor that differs, or else of their number."""
    if found := _DIFFERS.search(said):
        place, saved, repeated = found.groups()
        return f"Of the tensors that it saves, the first that differs is number {place}: {saved}, then {repeated}"
    return said.partition(".\n\n")[0]


class Recomputed:
    """Runs a module's forward again in backward; ``repeats`` is called with its name when it does."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        repeats: Callable[[str], None],
        selective: bool = False,
        inputs: StoredInputs | None = None,
        kept: KeptWhole | None = None,
    ) -> None:
        self._name = name
        self._module = module
        self._repeats = partial(repeats, name)
        self._selective = selective
        self._inputs = inputs
        self._kept = kept
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
            return self._called_with_moved(self._inputs, own, args, kwargs)
        forward = partial(own, **kwargs)  # checkpoint would take keywords with names of its own for itself
        if torch.compiler.is_compiling():  # what a graph does to buffers comes after the part of it that is repeated
            if self._selective:
                return checkpoint(forward, *args, use_reentrant=False, context_fn=selecting)
            return checkpoint(forward, *args, use_reentrant=False)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=self._contexts)

    def _is_first(self) -> bool:
        """Return whether this is known to be the forward itself: no repetition of it, and not in a compiled graph."""
        if torch.compiler.is_compiling():
            warn_of_compiled()
            return False
        return torch._C._current_graph_task_id() == -1

    def _called_with_moved(self, inputs: StoredInputs, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        call = Call(inputs, own, self._name, args, kwargs)
        if not call.moved:
            forward = partial(own, **kwargs)
            return checkpoint(forward, *args, use_reentrant=False, context_fn=self._contexts)
        like = call.moved[0].get().new_empty(0)  # by which checkpoint knows the device, whose random state it keeps
        contexts = partial(self._contexts, call.bring)
        output = checkpoint(call.run, like, *call.others, use_reentrant=False, context_fn=contexts)
        inputs.forward_ended()
        return output

    def _contexts(self, *begun: Callable[[], None]) -> Contexts:
        """Return the contexts of the forward and of its repetitions; each repetition calls ``begun`` first."""
        keeping: Contexts = selecting() if self._selective else (nullcontext(), nullcontext())
        call = ForwardCall(self._state)
        measured = nullcontext() if self._kept is None else self._kept.measured()
        return _nested(call, keeping[0], measured), Repeating(call, keeping[1], (self._repeats, *begun))


@contextmanager
def _nested(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    """Enter several contexts, outermost first."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


class Repeating:
    """The context of each repetition of a module's forward (a graph that is kept may have several).

    Buffers are copies meanwhile, with the values that the first forward read: it has changed them since (a batch norm's
    running mean).
    """

    def __init__(
        self, call: ForwardCall, keeping: AbstractContextManager[Any], begun: Sequence[Callable[[], None]]
    ) -> None:
        self._call = call
        self._keeping = keeping
        self._begun = begun
        self._entered = ExitStack()

    def __enter__(self) -> None:
        for begun in self._begun:
            begun()
        self._entered.enter_context(self._call.repeated())
        self._entered.enter_context(self._keeping)

    def __exit__(self, *raised: Any) -> None:
        self._entered.__exit__(*raised)


def _is_checked() -> bool:
    return not torch.compiler.is_compiling() and is_checking()


@constant
def warn_of_compiled() -> None:
    """Warn once for each graph that settings do not apply to compiled modules."""
    warnings.warn(
        "activations.offload, partition and keep_bytes leave compiled modules as they are: their inputs stay whole on "
        "the device, and they are recomputed; set them to none, or do not compile what activations.checkpoint names",
        stacklevel=2,
    )


def checkpoints_itself(module: nn.Module) -> bool:
    """Return whether a transformers module checkpoints its own calls (``activation_checkpointing_enable``)."""
    return bool(module.training and getattr(module, "gradient_checkpointing", False))


def selecting() -> Contexts:
    """Return the contexts of a forward and its repetition that keep the results of the expensive operators."""
    contexts: Contexts = create_selective_checkpoint_contexts(_policy)
    return contexts


def _policy(context: object, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    packet = getattr(operator, "overloadpacket", None)  # operators of higher order have none
    kept = getattr(packet, "__name__", "") in EXPENSIVE
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
