"""The blocks of a model on slices: arguments are sliced for each block, and the output of the last one is gathered."""

import inspect
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from partita.comm.group import Group
from partita.comm.mesh import Mesh
from partita.errors import PartitaError
from partita.parallel.sequence.attention import on_slices
from partita.parallel.sequence.exchange import gather, slice_for_rank
from partita.parallel.sequence.slices import Slices
from partita.sharding.compiler import eager, eager_itself
from partita.sharding.hooks import Hook
from partita.sharding.pytree import map_tensors, tensors_in
from partita.transforms.modules import Level

# The keyword that passes the slices to a forward (also when it is recomputed); the attribute of enabled blocks.
_KEYWORD, _ON = "partita_slices", "partita_on_slices"
# The attribute of a transformers block that checkpoints its own forward.
_CHECKPOINT = "_gradient_checkpointing_func"


# Called before a block's first call, with the blocks, the block, and its args and kwargs.
OnFirstCall = Callable[["Blocks", nn.Module, Any, Any], None]


class Blocks:
    """Consecutive blocks: the sequence is split before the first one and gathered after the last one.

    Their input is ``[batch, positions, width]``. Other arguments that have the sequence's length in a dim are split
    along it. Masks, biases and the output of an encoder are not split.

    Args:
        blocks: by name, in the order of their calls.
        group: the ranks over which sequences are split.
        alone: the group of this rank only, which computes sequences that are too short to be split.
        changes: records all changes, so that they can be undone.
        intercept: blocks call ``F.scaled_dot_product_attention`` directly.
    """

    def __init__(
        self,
        blocks: Mapping[str, nn.Module],
        mesh: Mesh,
        group: Group,
        alone: Group,
        changes: Level,
        *,
        intercept: bool,
    ) -> None:
        self.blocks = blocks
        self.group = group
        self.alone = alone
        self.mesh = mesh
        self._names = {id(block): name for name, block in blocks.items()}
        self._first, *_ = blocks.values()
        *_, self._last = blocks.values()
        self.slices: Slices | None = None  # of the last forward
        self.is_sliced = False  # from the first block's call until the last one's output has been gathered
        self.on_first_call: OnFirstCall | None = None
        self._called = set[int]()  # blocks, by id
        self._of_inputs: MutableMapping[Tensor, Slices] = WeakTensorKeyDictionary()
        self._sliced = dict[tuple[int, int], tuple[Tensor, Tensor]]()  # in this forward: a tensor, and its slice
        # While the first block's attribute is suspended, all blocks are disabled; their wrappers are never suspended.
        changes.set_attribute(self._first, _ON, True)
        for block in blocks.values():
            changes.wrap_forward(block, SlicedForward(block, intercept=intercept), always=True)
            changes.on_undo(block.register_forward_pre_hook(Hook(self._enter), with_kwargs=True).remove)
        changes.on_undo(self._last.register_forward_hook(Hook(self._leave), with_kwargs=True).remove)

    @property
    def enabled(self) -> bool:
        """True if blocks run on slices. Otherwise every rank computes all positions, like the unmodified model."""
        return hasattr(self._first, _ON)

    def name(self, block: nn.Module) -> str:
        return self._names[id(block)]

    @eager
    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if not self.enabled:
            return None
        hidden = hidden_in((args, kwargs))
        name = self.name(module)
        if hidden is None:
            raise PartitaError(
                f"parallel.sequence: '{name}': expected a floating-point input [batch, positions, width], which can be "
                "sliced; got none"
            )
        slices = self._slices_of_call(module, hidden, name)
        if id(module) not in self._called and slices.group is self.group:
            self._called.add(id(module))
            if self.on_first_call is not None:
                self.on_first_call(self, module, args, kwargs)
                self._sliced.clear()  # slices made by the check have no gradient
        return self.slice_arguments(module, (args, kwargs), slices)

    def slice_arguments(self, module: nn.Module, arguments: tuple[Any, Any], slices: Slices) -> tuple[Any, Any]:
        """Return the arguments of a block's forward, sliced where they have all positions, with ``slices`` as an
        additional keyword.
        """
        hidden = hidden_in(arguments)
        assert hidden is not None
        batch = hidden.shape[0]
        args, kwargs = _map_split_arguments(module, arguments, lambda tensor: self._slice_of(tensor, slices, batch))
        return args, {**kwargs, _KEYWORD: slices}

    def _slices_of_call(self, module: nn.Module, hidden: Tensor, name: str) -> Slices:
        """Return the slices of a block's input.

        The first call in a forward creates them. Every rank computes all positions of a batch without samples, or with
        fewer positions than ranks: its slices are those of a group of one rank. A call that the model's own
        checkpointing recomputes in backward has the slices of the original call.

        Raises:
            PartitaError: the input does not have this rank's positions.
        """
        if (repeated := torch._C._current_graph_task_id() != -1) and hidden in self._of_inputs:
            return self._of_inputs[hidden]
        if (module is self._first or not self.is_sliced) and not repeated:
            can_be_split = len(hidden) > 0 and hidden.shape[1] >= self.group.size
            self.slices = Slices.even(hidden.shape[1], self.group if can_be_split else self.alone, self.mesh)
            self.is_sliced = True
            self._sliced.clear()
        elif self.slices is None or hidden.shape[1] != self.slices.num_own:
            raise PartitaError(
                f"parallel.sequence: '{name}': expected this rank's {self.slices and self.slices.num_own} of "
                f"{self.slices and self.slices.length} positions; got {hidden.shape[1]}: the code between two blocks "
                "changes the number of positions; set parallel.sequence: 1"
            )
        self._of_inputs[hidden] = self.slices
        return self.slices

    def whole(self, module: nn.Module, arguments: tuple[Any, Any]) -> tuple[Any, Any]:
        """Return a block's arguments with the slices of hidden states gathered to all positions."""
        slices = self.slices
        assert slices is not None
        return _map_split_arguments(module, arguments, lambda x: gather(x, 1, slices) if is_slice(x, slices) else x)

    def _slice_of(self, tensor: Tensor, slices: Slices, batch: int) -> Tensor:
        dim = sequence_dim(tensor, slices.length, batch)
        if dim is None:
            return tensor
        key = id(tensor), slices.length
        if key not in self._sliced:
            self._sliced[key] = tensor, slice_for_rank(tensor, dim, slices)
        return self._sliced[key][1]

    def placeholder_output(self, block: nn.Module, placeholder: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the placeholder output of a block that another pipeline stage runs.

        ``placeholder(args, kwargs)`` returns it for all positions. The result has only this rank's positions, except
        after the last block.
        """
        hidden = hidden_in((args, kwargs))
        if not self.enabled or hidden is None:
            return placeholder(args, kwargs)
        slices = self._slices_of_call(block, hidden, self.name(block))

        def whole(tensor: Tensor) -> Tensor:
            shape = tensor.shape
            return tensor.new_empty((shape[0], slices.length, shape[2])) if is_slice(tensor, slices) else tensor

        def own(tensor: Tensor) -> Tensor:
            is_whole = _is_hidden_states(tensor) and tensor.shape[1] == slices.length
            return slices.take(tensor, 1).clone() if is_whole else tensor

        output = placeholder(*(map_tensors(given, whole) for given in (args, kwargs)))
        self.is_sliced = block is not self._last
        return map_tensors(output, own) if self.is_sliced else output

    def drop_slices(self) -> None:
        """Drop the cached slices of a forward that ended before the last block: another rank runs it, or it failed."""
        self.is_sliced = False
        self._sliced.clear()

    def check_gathered(self) -> None:
        """Check that a forward that ends has called the last block.

        Raises:
            PartitaError: it has not, so the code after the blocks computed with this rank's slice.
        """
        if self.is_sliced:
            self.drop_slices()
            raise PartitaError(
                f"parallel.sequence: {self.group.size}: the forward ended without a call of "
                f"'{self.name(self._last)}', after which the slices of the sequence are gathered: call every block in "
                "each forward (a block that is left out at random may return its input), or set parallel.sequence: 1"
            )

    @eager
    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        slices: Slices | None = kwargs.get(_KEYWORD)
        if slices is None:
            return None
        self.is_sliced = False
        self._sliced.clear()
        return map_tensors(output, lambda x: gather(x, 1, slices) if is_slice(x, slices) else x)


def _is_hidden_states(tensor: Tensor) -> bool:
    """Return whether a tensor may contain hidden states: ``[batch, positions, width]``."""
    return tensor.dim() == 3 and tensor.is_floating_point()


def is_slice(tensor: Tensor, slices: Slices) -> bool:
    """Return whether a tensor may contain hidden states of this rank's positions only."""
    return _is_hidden_states(tensor) and tensor.shape[1] == slices.num_own


def hidden_in(arguments: Any) -> Tensor | None:
    """Return a block's input: the first argument that may contain hidden states; None if there is none."""
    return next((tensor for tensor in tensors_in(arguments) if _is_hidden_states(tensor)), None)


def _map_split_arguments(
    module: nn.Module, arguments: tuple[Any, Any], change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Apply ``change`` to the tensors in a block's arguments, except to arguments that are not split."""
    args, kwargs = arguments
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    names += [""] * (len(args) - len(names))
    changed = [
        argument if _is_not_split(name) else map_tensors(argument, change)
        for name, argument in zip(names, args, strict=False)
    ]
    named = {key: value if _is_not_split(key) else map_tensors(value, change) for key, value in kwargs.items()}
    return tuple(changed), named


def _is_not_split(name: str) -> bool:
    return "mask" in name or "bias" in name or name == "encoder_hidden_states"


def sequence_dim(tensor: Tensor, length: int, batch: int) -> int | None:
    """Return the dim of an argument that contains the sequence's positions.

    It is the dim of positions in ``[batch, positions, ...]``, in a table ``[positions, ...]``, or in ``[batch, heads,
    positions, size]``. None if there is no such dim, or if the tensor has an element for each pair of positions.
    """
    sizes = tensor.shape
    if tensor.dim() in (2, 4) and sizes[-1] == sizes[-2] == length:
        return None
    if tensor.dim() >= 2 and sizes[1] == length:
        return 1
    if 1 <= tensor.dim() <= 2 and sizes[0] == length and (tensor.dim() == 1 or sizes[0] != batch):
        return 0
    return 2 if tensor.dim() == 4 and sizes[2] == length else None


class SlicedForward:
    """Wrapper that runs a block's forward on slices."""

    def __init__(self, block: nn.Module, *, intercept: bool) -> None:
        self._block = block
        self._intercept = intercept

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        run = partial(self._run_on_slices, kwargs.pop(_KEYWORD, None))
        checkpoint = vars(self._block).get(_CHECKPOINT)
        if checkpoint is None:
            return run(forward, *args, **kwargs)
        # The recomputed forward must also run inside `run`.
        setattr(self._block, _CHECKPOINT, lambda inner, *inputs: checkpoint(partial(run, inner), *inputs))
        try:
            return run(forward, *args, **kwargs)
        finally:
            setattr(self._block, _CHECKPOINT, checkpoint)

    @eager_itself  # attention finds the slices in a context variable
    def _run_on_slices(self, slices: Slices | None, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with on_slices(slices, intercept=self._intercept):
            return forward(*args, **kwargs)
