"""Outputs of single blocks that a transformers model collects: hidden states and router logits.

With ``output_hidden_states`` a model returns the hidden states after each block, and some heads compute a weighted sum
of them. With ``output_router_logits`` it returns the outputs of the routers in its blocks, and computes a loss that
balances experts. A pipeline stage runs only its own blocks, and under sequence parallelism blocks see only a slice of
the positions. :class:`BlockOutputs` completes both: slices are gathered, and pipeline stages pass the values on to
the next stage (:mod:`partita.parallel.pipeline.stage`).
"""

from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from partita.errors import ConfigError, PartitaError
from partita.layout.units import model_around
from partita.parallel.pipeline.off_stage import is_missing, received_value
from partita.parallel.sequence.blocks import Blocks, is_slice
from partita.parallel.sequence.exchange import gather, is_checking
from partita.parallel.sequence.slices import Slices
from partita.sharding.compiler import eager
from partita.sharding.hooks import Hook
from partita.sharding.pytree import map_tensors, tensors_in
from partita.transforms.modules import Level

_HIDDEN_STATES, _ROUTER_LOGITS = "hidden_states", "router_logits"
FLAGS = {field: f"output_{field}" for field in (_HIDDEN_STATES, _ROUTER_LOGITS)}


class BlockOutputs:
    """The outputs of single blocks in the running forward.

    Args:
        blocks: the names of the model's blocks.
        stacks: those that run on slices of the sequence.
        changes: receives the changes to the modules.
        across_stages: pipeline stages pass the values on, and call :meth:`clear` after each forward.

    Attributes:
        router_logits: the output of each router that has run, in the order of the calls: ``[positions of all samples,
            experts]``, of all positions.
        hidden_states: the input of the first block and the outputs of all blocks so far of the innermost model that
            returns them; only with ``across_stages``.

    Raises:
        ConfigError: the model computes a loss from router logits, and does not declare its routers.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Iterable[str],
        stacks: Sequence[Blocks],
        changes: Level,
        *,
        across_stages: bool,
    ) -> None:
        self.router_logits = list[Tensor]()
        self.hidden_states = list[Tensor]()
        self._asked = frozenset[str]()  # what the innermost running model collects
        self._stacks = stacks
        self._changes = changes
        self._across_stages = across_stages
        self._owners = {stack: model_around(model, next(iter(stack.blocks))) for stack in stacks}
        owners = [model_around(model, block) for block in blocks]
        routers = {owner: dict[nn.Module, int]() for owner in owners if owner is not None}
        for owner, router, index in _routers(model, None, ()):
            routers.setdefault(owner, {})[router] = index
        if not any(routers.values()):
            _check_routers(model)
        for owner, indices in routers.items():
            changes.wrap_forward(owner, partial(self._run, owner, indices))
        self._watched = set[nn.Module]()

    @property
    def collects_router_logits(self) -> bool:
        """True inside the forward of a model that returns router logits."""
        return _ROUTER_LOGITS in self._asked

    @property
    def passed_on(self) -> list[Tensor]:
        """The values that a pipeline stage passes on to the next one."""
        return [*self.router_logits, *self.hidden_states]

    def clear(self) -> None:
        """Drop the values of a stage's forward."""
        self.router_logits.clear()
        self.hidden_states.clear()

    def add_hidden_states(self, values: Any) -> None:
        """Note the hidden states among a block's arguments or in its output, if a model collects them."""
        if self._across_stages and _HIDDEN_STATES in self._asked:
            self.hidden_states += [tensor for tensor in tensors_in(values) if tensor.is_floating_point()][:1]

    # ------------------------------------------------------------------------- forward

    def _run(
        self, owner: nn.Module, routers: dict[nn.Module, int], forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run the forward of a model, and complete the block outputs that it returns."""
        config = getattr(owner, "config", None)
        asked = frozenset(field for field, flag in FLAGS.items() if kwargs.get(flag, getattr(config, flag, False)))
        if not asked:
            return forward(*args, **kwargs)
        if _ROUTER_LOGITS in asked:
            self._watch(routers)
        first, outer, self._asked = len(self.router_logits), self._asked, asked
        try:
            return self._completed(owner, asked, forward(*args, **kwargs), self.router_logits[first:])
        finally:
            self._asked = outer
            self.hidden_states.clear()  # later stages do not run the code that reads them
            if not self._across_stages:
                del self.router_logits[first:]

    def _completed(self, owner: nn.Module, asked: frozenset[str], output: Any, router_logits: list[Tensor]) -> Any:
        """Return a model's output with the hidden states of all positions, and the router logits of all blocks.

        Raises:
            PartitaError: the output has no fields, so they cannot be found.
        """
        if not isinstance(output, MutableMapping):
            raise PartitaError(
                f"{type(owner).__name__}: expected an output with fields, in which parallel.pipeline and "
                f"parallel.sequence complete what is collected from blocks; got a {type(output).__name__}: set "
                f"return_dict to True, or {FLAGS[min(asked)]} to False"
            )
        if output.get(_HIDDEN_STATES) is not None:
            output[_HIDDEN_STATES] = map_tensors(output[_HIDDEN_STATES], partial(self._of_all_positions, owner))
        if _ROUTER_LOGITS in asked and router_logits:
            output[_ROUTER_LOGITS] = tuple(map(received_value, router_logits))
        return output

    def _of_all_positions(self, owner: nn.Module, hidden: Tensor) -> Tensor:
        """Return hidden states of a model's blocks, gathered if they are those of this rank's positions."""
        hidden = received_value(hidden)
        for stack in self._stacks:
            slices = stack.slices if stack.enabled and self._owners.get(stack) is owner else None
            if slices is not None and slices.group.size > 1 and is_slice(hidden, slices):
                return gather(hidden, 1, slices)
        return hidden

    # ------------------------------------------------------------------------- routers

    def _watch(self, routers: dict[nn.Module, int]) -> None:
        """Register the hooks of routers, at the first forward that needs them: compiled blocks would break at them."""
        for router, index in routers.items():
            if router not in self._watched:
                self._watched.add(router)
                self._changes.on_undo(router.register_forward_hook(Hook(partial(self._record, index))).remove)

    @eager
    def _record(self, index: int, router: nn.Module, args: Any, output: Any) -> None:
        if not self.collects_router_logits or is_checking():
            return
        logits = output[index] if isinstance(output, tuple) else output
        if logits is not None:
            self.router_logits.append(self._gathered(router, logits))

    def _gathered(self, router: nn.Module, logits: Tensor) -> Tensor:
        slices = self._slices(router)
        if slices is None or slices.group.size == 1 or is_missing(logits):  # runs without data have all positions
            return logits
        own = logits.unflatten(0, (-1, slices.num_own)) if logits.dim() == 2 else logits
        everything = gather(own, 1, slices)
        return everything.flatten(0, 1) if logits.dim() == 2 else everything

    def _slices(self, router: nn.Module) -> Slices | None:
        """Return the slices on which a router runs; None if it sees all positions."""
        for stack in self._stacks:
            if stack.enabled and any(router in block.modules() for block in stack.blocks.values()):
                return stack.slices
        return None

    @contextmanager
    def recorded_in(self, values: list[Tensor]) -> Iterator[None]:
        """Record router logits in another list in the ``with`` block."""
        before, self.router_logits = self.router_logits, values
        try:
            yield
        finally:
            self.router_logits = before

    def check_found(self, module: nn.Module, name: str, found: Sequence[Tensor]) -> None:
        """Check the number of router logits of a module that another pipeline stage runs.

        Raises:
            PartitaError: a run of the module without data did not get to all of its routers.
        """
        num = sum(router in self._watched for router in module.modules()) if self.collects_router_logits else 0
        if len(found) != num:
            raise PartitaError(
                f"parallel.pipeline: '{name}': expected the router logits of {num} routers, whose shapes are found by "
                f"a run without data; got {len(found)}; set {FLAGS[_ROUTER_LOGITS]} to False"
            )


def _check_routers(model: nn.Module) -> None:
    """Refuse a loss that is computed from router logits of a model that does not declare its routers.

    Raises:
        ConfigError: the model's config asks for such a loss.
    """
    flag = FLAGS[_ROUTER_LOGITS]
    if getattr(getattr(model, "config", None), flag, False):
        raise ConfigError(
            f"{type(model).__name__} computes a loss from the router logits of all blocks ({flag}), and does not say "
            "in _can_record_outputs which modules compute them, so parallel.pipeline and parallel.sequence cannot "
            f"collect them: set {flag} to False in the model's config"
        )


def _routers(
    module: nn.Module, owner: nn.Module | None, kinds: Sequence[tuple[type, int]]
) -> Iterator[tuple[nn.Module, nn.Module, int]]:
    """Yield the model that records router logits, the router, and the index of the logits in the router's output.

    Models of transformers declare it in ``_can_record_outputs``. A model inside a model records its own.
    """
    declared = getattr(module, "_can_record_outputs", None)
    if declared is not None:
        specs = declared.get(_ROUTER_LOGITS, [])
        specs = specs if isinstance(specs, list) else [specs]
        owner, kinds = module, [(s.target_class, s.index) for s in specs if hasattr(s, "target_class")]
    for kind, index in kinds:
        if isinstance(module, kind) and owner is not None:
            yield owner, module, index
    for child in module.children():
        yield from _routers(child, owner, kinds)
