"""Parameters that are sharded over the tensor ranks. Code outside their module's forward sees the full parameters.

Once the engine is initialized, the data of such a parameter is this rank's shard. Its module's split forward computes
with that shard (:class:`UseLocalShards`). Any other operation on the parameter all-gathers the full parameter first, on
all tensor ranks. The all-gather is differentiable: the shard gets its slice of the gradient.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from partita.comm.group import Group
from partita.comm.mesh import Mesh
from partita.comm.synchronization_check import check_synchronized
from partita.errors import ConfigError, PartitaError
from partita.parallel.tensor.functions import PURPOSE, copy_to_ranks, sum_over_ranks
from partita.sharding.compiler import eager, eager_itself
from partita.sharding.parameter import Member
from partita.sharding.placeholder import (
    METADATA,
    ShardedParameter,
    asked_for,
    changes_nothing,
    is_access,
    is_sharded,
    read_as_metadata,
    unshard,
)
from partita.table.place import Place

Gradient = Callable[[Tensor], Tensor | None]
_CALL = "a read of a split parameter"

# Answered for the full parameter without gathering it.
_SHAPE = frozenset({"shape", "size", "dim", "ndim", "numel", "nelement", "nbytes", "stride", "__len__"})
# Answered for the memory of this rank's shard.
_MEMORY = frozenset({"untyped_storage", "data_ptr", "get_device", "is_pinned", "is_shared"})
# Conversions that return the same object if they change nothing.
_CONVERSIONS = frozenset({"to", "type", "type_as", "float", "double", "half", "bfloat16", "contiguous", "cpu"})
_IN_PLACE = frozenset(
    f"__{name}__" for name in "setitem iadd isub imul itruediv ifloordiv imod ipow iand ior ixor".split()
)


@dataclass(frozen=True)
class TensorSharding:
    """The sharding of a parameter over the ranks of ``group``: rank ``r`` has ``places[r]`` of it.

    If ``places`` is None, each rank has a copy of the parameter, and its gradient is the sum of the ranks' partial
    gradients.
    """

    group: Group
    places: tuple[Place, ...] | None = None

    def whole(self, local: Tensor) -> Tensor:
        """All-gather the ranks' ``local`` shards. In backward, return this rank's shard of the gradient."""
        out: Tensor = (_FromCopy if self.places is None else _GatherShards).apply(local, self)  # type: ignore[no-untyped-call]
        return out

    def own(self, whole: Tensor) -> Tensor:
        """Return this rank's shard of a tensor that all ranks have. In backward, all-gather the shards of the gradient
        (for copies: sum the gradients).
        """
        if self.places is None:
            return copy_to_ranks(whole, self.group)
        out: Tensor = _TakeShard.apply(whole, self)  # type: ignore[no-untyped-call]
        return out

    def whole_gradient(self, gradient: Tensor) -> Tensor:
        """Return the full gradient, given this rank's shard of it (for copies: its partial gradient)."""
        return sum_over_ranks(gradient, self.group) if self.places is None else self.whole(gradient)

    def own_gradient(self, whole: Tensor) -> Tensor:
        """Return this rank's shard of a full gradient: the inverse of :meth:`whole_gradient`."""
        return _first_only(whole, self.group) if self.places is None else self.own(whole)

    def is_whole(self, tensor: Tensor) -> bool:
        """Return whether a tensor that replaces the parameter is the full tensor."""
        if self.places is None:
            return not isinstance(tensor, nn.Parameter)
        return tuple(tensor.shape) == self.places[0].shape


class _GatherShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, sharding: TensorSharding) -> Tensor:
        ctx.sharding, places, group = sharding, sharding.places, sharding.group
        assert places is not None
        whole = torch.empty(places[0].shape, dtype=local.dtype, device=local.device)
        shards = group.gather(local, [place.sizes for place in places], PURPOSE)
        for place, of_rank in zip(places, shards, strict=True):
            place.put(of_rank, whole)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.sharding.own(gradients[0]), None


class _TakeShard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, sharding: TensorSharding) -> Tensor:
        ctx.sharding = sharding
        assert sharding.places is not None
        return sharding.places[sharding.group.index].take(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.sharding.whole(gradients[0]), None


class _ViewOfFull(torch.autograd.Function):
    """Graph node of a parameter whose data is temporarily the full tensor. Its gradient must have the shape of this
    rank's shard, so backward returns that shard.
    """

    @staticmethod
    def forward(ctx: Any, param: Tensor, sharding: TensorSharding) -> Tensor:
        ctx.sharding = sharding
        return param.view_as(param)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.sharding.own(gradients[0]), None


class _FromCopy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, sharding: TensorSharding) -> Tensor:
        ctx.group = sharding.group
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _first_only(gradients[0], ctx.group), None


class _FirstOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.clone() if group.index == 0 else torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return sum_over_ranks(_first_only(gradients[0], ctx.group), ctx.group), None


def _first_only(x: Tensor, group: Group) -> Tensor:
    """Return ``x``, which all ranks have, as summands: ``x`` on the first rank, zeros on the other ranks."""
    out: Tensor = _FirstOnly.apply(x, group)  # type: ignore[no-untyped-call]
    return out


# -- parameters --------------------------------------------------------------------------------------------------------


@dataclass
class _Known:
    """Record about a split parameter. ``kind`` is the parameter's original class."""

    name: str
    kind: type[nn.Parameter]
    sharding: TensorSharding
    mesh: Mesh
    closed: bool = False

    def whole(self, param: Tensor, reader: str) -> Tensor:
        """Return the full parameter.

        Raises:
            PartitaError: the engine is closed, not every rank reads the parameter, or an autograd.Function was given a
                copy.
        """
        if self.sharding.places is None:
            if not torch.is_grad_enabled() and (function := _function_of(param)):
                raise PartitaError(
                    f"the autograd.Function '{function}' got parameter '{self.name}', of which each of the "
                    f"{self.sharding.group.size} tensor ranks has a copy: gradients of copies are summed, and this one "
                    f"would count {self.sharding.group.size} times; pass the parameter's .clone() to it"
                )
            return self.sharding.whole(param)
        if self.closed:
            raise PartitaError(
                f"parameter '{self.name}' is only this rank's shard: its engine was closed under parallel.tensor "
                f"('{reader}' reads it); save, export, or take engine.state_dict() before engine.close()"
            )
        try:
            check_synchronized(self.sharding.group, self.mesh.watchdog, _CALL)
        except PartitaError as error:
            raise PartitaError(
                f"rank {self.mesh.rank}: '{reader}' reads parameter '{self.name}', which is split over "
                f"{self.sharding.group.size} tensor ranks, and not all of them do: read it on every rank, or inside "
                f"`with engine.gathered(...)`. {error}"
            ) from error
        return self.sharding.whole(param)

    def hooked(self, hook: Gradient) -> Gradient:
        """Return a hook for this rank's shard of the gradient that calls the user's ``hook`` with the full gradient."""

        def on_shard(gradient: Tensor) -> Tensor | None:
            whole = self.sharding.whole_gradient(gradient)
            version = whole._version
            changed = hook(whole)
            if changed is None and whole._version != version:
                changed = whole
            return None if changed is None else self.sharding.own_gradient(changed)

        return on_shard


def _function_of(param: Tensor) -> str:
    """Return the name of the autograd.Function whose forward is running with the parameter as an argument; empty if
    there is none.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame := frame.f_back if frame is not None else None:
        if frame.f_code is _APPLY and any(each is param for each in frame.f_locals["args"]):
            return str(frame.f_locals["cls"].__name__)
    return ""


_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]  # of a class method

# By the parameter: ``__torch_function__`` is given only the tensor.
_known = WeakIdKeyDictionary()


def _answer(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of a call that needs no full parameter; NotImplemented if it needs one.

    Raises:
        PartitaError: the call writes or could write to this rank's shard, or it registers a post-accumulate hook.
    """
    if func is torch.autograd.grad:
        return _grad(*args, **kwargs)
    name, first = asked_for(func), args[0] if args else None
    known: _Known | None = _known.get(first) if isinstance(first, Tensor) else None
    if known is not None and isinstance(first, Tensor):
        places = known.sharding.places
        if name in _SHAPE and places is not None:
            whole = Place(places[0].shape)
            if name == "stride":
                dim = args[1] if len(args) > 1 else kwargs.get("dim")
                return whole.stride if dim is None else whole.stride[dim]
            return func(_form(first, known, "meta"), *args[1:], **kwargs)
        if name == "register_hook":
            return func(first, known.hooked(args[1] if len(args) > 1 else kwargs["hook"]))
        if name == "register_post_accumulate_grad_hook":
            raise PartitaError(_AFTER_ACCUMULATION.format(known.name))
        if name in _CONVERSIONS and not is_sharded(first) and func(*args, **kwargs) is first:
            return first
        if name == "data" and changes_nothing(func, args, kwargs):
            return None
        if name == "data" and (places is not None or func.__name__ == "__set__"):
            raise PartitaError(_WRITTEN.format(known.name, ".data"))
    if name in METADATA or name in _MEMORY:
        return func(*args, **kwargs)
    described = read_as_metadata(name, args)
    if isinstance(described, Tensor) and (known := _known.get(described)) is not None:
        form = _form(described, known, described.device)
        args, kwargs = tree_map(lambda leaf: form if leaf is described else leaf, (tuple(args), dict(kwargs)))
        others = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf in _known]
        return NotImplemented if others else func(*args, **kwargs)
    if name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")):
        written = args[:1]
    else:
        written = [kwargs.get("out")]
    for leaf in tree_leaves(written):
        if isinstance(leaf, Tensor) and (known := _known.get(leaf)) is not None:
            raise PartitaError(_WRITTEN.format(known.name, name))
    return NotImplemented


def _form(param: Tensor, known: _Known, device: torch.device | str) -> Tensor:
    """Return a tensor of the full parameter's shape and dtype."""
    shape = param.shape if known.sharding.places is None else known.sharding.places[0].shape
    # Expanded from no dims: a full one would take memory, which a simulated device counts, too.
    return torch.empty((), dtype=param.dtype, device=device).expand(shape)


_WRITTEN = (
    "parameter '{}' is split over the tensor ranks, and '{}' could write to this rank's shard of it: read and write it "
    "inside `with engine.gathered(...)`, with modify=True to write; if the model's own forward does this, set 'whole' "
    "for the parameter's module in parallel.tensor_rules"
)
_AFTER_ACCUMULATION = (
    "parameter '{}' is split over the tensor ranks, and its .grad is a shard of the gradient: a post-accumulate hook "
    "cannot see all of it; use param.register_hook, which gets the full gradient"
)


def _grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
    """Call ``torch.autograd.grad``, and gather the gradients of split parameters."""
    found = torch.autograd.grad(outputs, inputs, *args, **kwargs)
    result = list[Tensor | None](found)
    for at, (param, gradient) in enumerate(zip(inputs, found, strict=True)):
        known: _Known | None = _known.get(param) if isinstance(param, Tensor) else None
        if known is None or gradient is None:
            continue
        if kwargs.get("is_grads_batched"):
            raise PartitaError(
                f"torch.autograd.grad(is_grads_batched=True) for parameter '{known.name}', which is split over the "
                "tensor ranks: compute one gradient at a time, or set 'whole' for its module in parallel.tensor_rules"
            )
        result[at] = known.sharding.whole_gradient(gradient)
    return tuple(result)


def _is_compiled_backward(func: Callable[..., Any]) -> bool:
    """Return whether a compiled graph calls an operator in backward. It was traced with this rank's shard, inside the
    forward of the parameter's module.
    """
    return isinstance(func, torch._ops.OpOverload) and torch._C._current_graph_task_id() != -1


class SplitParameter(nn.Parameter):
    """The class of a parameter split over the tensor ranks, while its data is unsharded (this rank's slice)."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if _is_compiled_backward(func):
                return func(*args, **kwargs)
            answer = _answer(func, args, kwargs)
            if answer is not NotImplemented:
                return answer
            name, wholes = asked_for(func), dict[int, Tensor]()
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, SplitParameter) and id(leaf) not in wholes:
                    wholes[id(leaf)] = _known[leaf].whole(leaf, name)
        args, kwargs = tree_map(lambda leaf: wholes.get(id(leaf), leaf), (tuple(args), kwargs))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = nn.Parameter(self.detach().clone(), self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Parameter split over tensor ranks: {tuple(self.shape)}, {self.dtype}, {self.device}"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)


class ShardedSplit(ShardedParameter):
    """The class of a parameter split over the tensor ranks, while its data is sharded by ZeRO."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            answer = _answer(func, args, kwargs or {})
        return super().__torch_function__(func, types, args, kwargs) if answer is NotImplemented else answer


class GatheredParameter(nn.Parameter):
    """The class of a split parameter inside ``engine.gathered``, where its data is the full tensor.

    In backward its ``.grad`` gets this rank's shard of the gradient. ``torch.autograd.grad`` and hooks get full
    gradients.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs, name = kwargs or {}, asked_for(func)
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.autograd.grad:
                return _grad(*args, **kwargs)
            if name == "register_hook" and args[0] in _known:
                return func(args[0], _known[args[0]].hooked(args[1] if len(args) > 1 else kwargs["hook"]))
            writes = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
            if not torch.is_grad_enabled() or writes or is_access(func) or name in METADATA or name in _MEMORY:
                return func(*args, **kwargs)
            wholes = {
                id(leaf): _ViewOfFull.apply(leaf, _known[leaf].sharding)  # type: ignore[no-untyped-call]
                for leaf in tree_leaves((args, kwargs))
                if isinstance(leaf, GatheredParameter) and leaf.requires_grad
            }
        args, kwargs = tree_map(lambda leaf: wholes.get(id(leaf), leaf), (tuple(args), kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = nn.Parameter(self.detach().clone(), self.requires_grad)
        memo[id(self)] = copied
        return copied


@cache
def _split_class(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """Return the class of a split parameter whose original class is ``kind``."""
    return SplitParameter if kind is nn.Parameter else type(kind.__name__, (SplitParameter, kind), {})


def check_hooks(param: nn.Parameter, name: str) -> None:
    """Refuse hooks that would see only a shard of the gradient.

    Raises:
        ConfigError: the parameter has such a hook. The message names the parameter.
    """
    if getattr(param, "_post_accumulate_grad_hooks", None):
        raise ConfigError(_AFTER_ACCUMULATION.format(name))


class SplitParameters:
    """The parameters that are split over the tensor ranks. Their classes are replaced until the engine is closed."""

    def __init__(self, members: Iterable[Member], shardings: Mapping[int, TensorSharding], mesh: Mesh) -> None:
        self._members = [member for member in members if id(member.param) in shardings]
        for member in self._members:
            param = member.param
            known = _known[param] = _Known(member.fqn, member.kind, shardings[id(param)], mesh)
            member.unsharded_kind = _split_class(member.kind)
            member.sharded_kind = ShardedSplit
            if known.sharding.places is not None:
                member.global_kind = GatheredParameter
            with torch._C.DisableTorchFunctionSubclass():
                param.__class__ = ShardedSplit if is_sharded(param) else member.unsharded_kind
                hooks = param._backward_hooks or {}
            for key, hook in hooks.items():
                hooks[key] = known.hooked(hook)

    def remove(self) -> None:
        """Restore the classes of the parameters, for example because the engine did not start."""
        while self._members:
            member = self._members.pop()
            del _known[member.param]
            member.unsharded_kind = member.kind
            member.sharded_kind = ShardedParameter
            member.global_kind = nn.Parameter
            with torch._C.DisableTorchFunctionSubclass():
                member.param.__class__ = ShardedParameter if is_sharded(member.param) else member.kind

    def close(self) -> None:
        """Close: copies become ordinary parameters again, and reading a shard raises an error."""
        for member in self._members:
            _known[member.param].closed = True
        self._members = [member for member in self._members if _known[member.param].sharding.places is None]
        self.remove()


class UseLocalShards(AbstractContextManager[None]):
    """Context in which a module computes with this rank's shards of its own parameters.

    Called as a wrapper, it runs the forward inside that context. Tensors that replace the parameters
    (``torch.func.functional_call``) may be full; then this rank's shards are taken from them.

    Args:
        shardings: by the names of the parameters in the module.
    """

    def __init__(self, module: nn.Module, shardings: Mapping[str, TensorSharding]) -> None:
        self._params = module._parameters
        self._shardings = shardings
        self._replaced = list[list[tuple[str, Tensor, type]]]()

    def __enter__(self) -> None:
        replaced = list[tuple[str, Tensor, type]]()
        params = [param for name in self._shardings if (param := self._params.get(name)) is not None]
        if any(is_sharded(param) for param in params):
            unshard(params, "its module's forward")
        for name, sharding in self._shardings.items():
            value = self._params.get(name)
            if value is None:
                continue
            if isinstance(value, SplitParameter):
                replaced.append((name, value, type(value)))
                value.__class__ = _known[value].kind
            elif sharding.is_whole(value):
                replaced.append((name, value, type(value)))
                self._params[name] = sharding.own(value)  # type: ignore[assignment]
        self._replaced.append(replaced)

    def __exit__(self, *error: object) -> None:
        for name, value, kind in self._replaced.pop():
            if type(value) is not kind:
                value.__class__ = kind
            self._params[name] = value  # type: ignore[assignment]

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._outside_graphs(forward, *args, **kwargs)
        with self:
            return forward(*args, **kwargs)

    @eager_itself  # torch.compile does not support changing an object's class
    def _outside_graphs(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._enter_uncompiled()
        try:
            return forward(*args, **kwargs)
        finally:
            self._exit_uncompiled()

    @eager
    def _enter_uncompiled(self) -> None:
        self.__enter__()

    @eager
    def _exit_uncompiled(self) -> None:
        self.__exit__()
