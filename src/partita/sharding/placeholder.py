"""Placeholders: a sharded parameter without its data, and a gradient that is in a bucket.

A sharded parameter has class :class:`ShardedParameter` and gets its own class back when it is unsharded. Its shape,
dtype and device can be read; reading or writing its data calls its :class:`Guardian`, which unshards it or raises an
error.

From the end of a batch's backward until the step, a :class:`GradientPlaceholder` is the ``.grad`` of a parameter whose
gradient is in a bucket. Reading or changing its values is an error that names the call to use instead: if ``.grad``
were ``None``, clipping by hand would silently do nothing.
"""

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from partita.errors import ConfigError, PartitaError
from partita.layout.off_stage import is_off_stage

# Names of attributes and methods that do not read data.
METADATA = frozenset(
    """
    shape dtype device requires_grad grad is_leaf ndim layout is_cuda is_cpu is_meta grad_fn names _version
    is_sparse is_quantized size dim numel stride is_floating_point requires_grad_ is_contiguous element_size
    nelement is_complex __hash__ __len__ register_hook register_post_accumulate_grad_hook storage_offset
    retains_grad itemsize nbytes _backward_hooks _post_accumulate_grad_hooks is_sparse_csr is_mkldnn is_nested
    is_xla is_xpu is_mps _has_compatible_shallow_copy_type
    """.split()
)
# Functions that make a tensor from the dtype, device and shape of their first argument, and from those of another one.
_MADE_LIKE_FIRST = frozenset(
    """
    new_zeros new_ones new_empty new_full new_tensor new_empty_strided
    zeros_like ones_like empty_like full_like rand_like randn_like randint_like
    """.split()
)
_MADE_LIKE_OTHER = frozenset(("to", "type_as"))
_CONVERSIONS = frozenset("to type float double half bfloat16 cpu cuda".split())
_DETACHED = frozenset(("data", "detach"))
# Functions whose results identify the memory of a tensor, or refer to it: they need memory that stays.
_MEMORY = frozenset("data_ptr untyped_storage storage _typed_storage __reduce_ex__ share_memory_".split())
_ACCESS = ("__get__", "__set__")


def is_access(func: Callable[..., Any]) -> bool:
    """Return whether a function is the getter or setter of an attribute."""
    return getattr(func, "__name__", "") in _ACCESS


def asked_for(func: Callable[..., Any]) -> str:
    """Return the name of a function, or of the attribute that it reads or writes."""
    if is_access(func):
        return str(getattr(getattr(func, "__self__", None), "__name__", func.__name__))
    return str(getattr(func, "__name__", func))


def read_as_metadata(name: str, args: Sequence[Any]) -> Any:
    """Return the argument of a function that is read for its dtype, device and shape only; None if none is."""
    if name in _MADE_LIKE_FIRST:
        return args[0] if args else None
    if name in _MADE_LIKE_OTHER:
        return args[1] if len(args) > 1 else None
    return None


def changes_nothing(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call returns its first argument, or sets a parameter's data to the parameter itself.

    ``module.to(device)`` makes such calls if all parameters are on the device.
    """
    name = asked_for(func)
    if name == "data" and func.__name__ == "__set__":
        return args[1] is args[0]
    if name not in _CONVERSIONS or not args or "memory_format" in kwargs:
        return False
    with torch._C.DisableTorchFunctionSubclass():
        empty = torch.empty(0, dtype=args[0].dtype, device=args[0].device)
        return func(empty, *args[1:], **kwargs) is empty


_DATA = torch._C.TensorBase.data


class Guardian(Protocol):
    """The object that unshards parameters whose data is needed, or raises an error."""

    def touched(self, params: Sequence[nn.Parameter], what: str) -> None:
        """Unshard ``params``, whose data ``what`` needs, or raise an error.

        All of them have data on return. Outside of forward and backward, they have it until the next call.
        """

    def keeps_unsharded(self, param: nn.Parameter) -> bool:
        """Return whether a sharded ``param`` would keep its data after :meth:`touched` for as long as it is in use."""

    def is_reading(self, param: nn.Parameter) -> bool:
        """Return whether ``param`` is unsharded for a read outside of forward and backward, until the next call of
        :meth:`touched`.
        """

    def exposed(self, param: nn.Parameter, values: Tensor) -> None:
        """Note that ``param.data`` was read and returned ``values``, through which ``param`` may be written."""

    def assign(self, param: nn.Parameter, values: Tensor) -> bool:
        """Copy ``values`` into an unsharded ``param``, whose ``data`` is set to them.

        Returns: False if they do not fit: ``param`` becomes a view of them.
        """


class _WatchedData:
    """The attribute ``data`` of all parameters. The guardian of a parameter sees reads and writes of it."""

    def __get__(self, param: nn.Parameter | None, owner: type[Any]) -> Any:
        if param is None:
            return _DATA
        guardian = _guardian_of(param)
        is_lent = guardian is not None and guardian.is_reading(param)
        values = ShardedValues(param) if is_lent else get_data(param)
        if guardian is not None:
            guardian.exposed(param, values)
        return values

    def __set__(self, param: nn.Parameter, values: Tensor) -> None:
        guardian = None if is_sharded(param) else _guardian_of(param)
        if guardian is None or values is param or not guardian.assign(param, values):
            set_data(param, values)


def get_data(param: nn.Parameter) -> Tensor:
    """Return ``param.data`` without telling the guardian."""
    values: Tensor = _DATA.__get__(param)  # type: ignore[attr-defined]
    return values


def set_data(param: nn.Parameter, values: Tensor) -> None:
    """Make ``param`` a view of ``values``: ``param.data = values`` without telling the guardian."""
    _DATA.__set__(param, values)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Claim:
    """The guardian of the parameter called ``name``; None after its engine was closed or collected as garbage.

    The reference is weak, because the guardian refers to its parameters.
    """

    name: str
    guardian: Callable[[], Guardian | None] = lambda: None


_abandoned = WeakIdKeyDictionary()  # parameters with only this rank's shard, left by an engine that has ended
_claims = WeakIdKeyDictionary()  # parameter of an engine -> _Claim; __torch_function__ gets only the tensor


class ShardedParameter(nn.Parameter):
    """The class of a parameter while it is sharded: it has no data."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs, name = kwargs or {}, asked_for(func)
        if name not in METADATA and not changes_nothing(func, args, kwargs):
            first = args[0] if args else None
            if isinstance(first, ShardedParameter) and not _keeps_unsharded(first):
                if name in _DETACHED and func.__name__ != "__set__":
                    return ShardedValues(first)
                if name in _MEMORY:
                    raise _no_memory(first, name)
            if name == "data" and func.__name__ == "__set__":
                unshard([args[0]], name)
                args[0].data = args[1]
                return None
            return _call_with_values(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        unshard([self], "__deepcopy__")
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(ShardedValues(self).copied(), self.requires_grad).__reduce_ex__(protocol)

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Sharded parameter (its data is split over the ranks): {tuple(self.shape)}, {self.dtype}, {self.device}"


class ShardedValues(Tensor):
    """The result of ``param.data`` and ``param.detach()`` while ``param`` is sharded: its shape, dtype and device.

    Functions that need values get those of the parameter, each time anew, as if this were a view of it. Functions that
    need the memory of a tensor get a copy.
    """

    param: nn.Parameter
    memory: Tensor | None

    @staticmethod
    def __new__(cls, param: nn.Parameter) -> "ShardedValues":
        made: ShardedValues = Tensor._make_wrapper_subclass(
            cls, param.shape, strides=param.stride(), dtype=param.dtype, device=param.device
        )
        made.param = param
        made.memory = None
        return made

    def read_with(self, param: nn.Parameter) -> Tensor:
        """Return a view of the current values, for an operation with them and ``param``."""
        unshard([self.param, param], "data")
        return get_data(self.param)

    def copied(self) -> Tensor:
        """Return the parameter's current values, in memory that belongs to this object."""
        unshard([self.param], "a copy")
        values = get_data(self.param)
        if self.memory is None:
            self.memory = torch.empty_like(values)
        return self.memory.copy_(values)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if (name := asked_for(func)) in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if (name in _DETACHED and func.__name__ != "__set__") or changes_nothing(func, args, kwargs):
            return args[0]
        if name in _MEMORY and isinstance(args[0], ShardedValues):
            return func(args[0].copied(), *args[1:], **kwargs)
        return _call_with_values(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        param = next(leaf.param for leaf in leaves if isinstance(leaf, ShardedValues))
        raise PartitaError(
            f"parameter '{_claims[param].name}' is sharded where its .data or .detach() was taken ({func} needs its "
            "values): take it inside `with engine.gathered(...)`"
        )

    __repr__ = ShardedParameter.__repr__  # type: ignore[assignment]
    __format__ = ShardedParameter.__format__


def _call_with_values(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function with the values of all sharded parameters among its arguments, which are unsharded together."""
    name, described = asked_for(func), read_as_metadata(asked_for(func), args)
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if leaf is not described]
    params = [leaf.param if isinstance(leaf, ShardedValues) else leaf for leaf in leaves]
    params = [param for param in params if isinstance(param, nn.Parameter)]
    unshard(params, name)

    def values(leaf: Any) -> Any:
        if not isinstance(leaf, ShardedValues):
            return leaf
        if leaf is described:
            return leaf.param
        if has_own_functions(leaf.param):
            return leaf.param.detach()
        found = get_data(leaf.param)
        if (guardian := _guardian_of(leaf.param)) is not None:
            guardian.exposed(leaf.param, found)
        return found

    first = args[0] if args else None
    if any(isinstance(leaf, ShardedValues) for leaf in (*leaves, described)):
        args, kwargs = torch.utils._pytree.tree_map(values, (tuple(args), dict(kwargs)))
    if any(has_own_functions(param) for param in params):
        return func(*args, **kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
    return first if args and result is args[0] else result  # p.data.mul_(2) is p.data


def _no_memory(param: nn.Parameter, what: str) -> PartitaError:
    return PartitaError(
        f"parameter '{_claims[param].name}' is sharded: its data is split over the ranks between uses ({what} needs "
        "memory that stays): take it inside `with engine.gathered(...)`, or take engine.state_dict()"
    )


def claim(param: nn.Parameter, name: str, guardian: Guardian) -> None:
    """Make ``guardian`` responsible for ``param``, for as long as the guardian lives."""
    if not isinstance(nn.Parameter.__dict__.get("data"), _WatchedData):
        setattr(nn.Parameter, "data", _WatchedData())  # noqa: B010 - torch declares it as a tensor
    _claims[param] = _Claim(name, weakref.ref(guardian))


def _guardian_of(param: nn.Parameter) -> Guardian | None:
    claim: _Claim | None = _claims.get(param)
    return None if claim is None else claim.guardian()


def _keeps_unsharded(param: nn.Parameter) -> bool:
    guardian = _guardian_of(param)
    return guardian is not None and guardian.keeps_unsharded(param)


def disclaim(param: nn.Parameter) -> None:
    """Remove the guardian of ``param``. An unsharded one is a plain parameter again; a sharded one raises errors."""
    claim = _claims.pop(param, None)
    if claim is not None and is_sharded(param):
        _claims[param] = _Claim(claim.name)


def leave_share(param: nn.Parameter) -> None:
    """Mark ``param`` as having only this rank's shard after its engine ended: later engines refuse it."""
    _abandoned[param] = True


def is_claimed(param: nn.Parameter) -> bool:
    """Return whether ``param`` belongs to an engine, or was left by one without its full data."""
    claim = _claims.get(param)
    return param in _abandoned or (claim is not None and (is_sharded(param) or claim.guardian() is not None))


def check_unclaimed(model: nn.Module) -> None:
    """Check that no parameter belongs to another engine.

    Raises:
        ConfigError: one does; the message names the first.
    """
    for name, param in model.named_parameters():
        if is_claimed(param):
            raise _already_claimed(name)


def check_not_off_stage(model: nn.Module) -> None:
    """Check that another engine's pipeline has left no parameter off-stage; call this before the model is cut into
    stages.

    Raises:
        ConfigError: it has; the message names the first.
    """
    for name, param in model.named_parameters():
        if is_off_stage(param):
            raise _already_claimed(name)


def _already_claimed(name: str) -> ConfigError:
    return ConfigError(
        f"parameter '{name}' already belongs to another engine (one that is open, or was closed while the parameter "
        "was sharded, or failed to start after sharding it): close that one first, or build the model anew and pass "
        "weights="
    )


def unshard(params: Iterable[nn.Parameter], what: str) -> None:
    """Unshard the sharded ones of ``params`` for ``what``, or raise an error; all of them have data on return."""
    of_guardian = dict[Guardian, list[nn.Parameter]]()
    for param in params:
        if (guardian := _guardian_of(param)) is not None:
            of_guardian.setdefault(guardian, []).append(param)
        elif is_sharded(param):
            raise PartitaError(
                f"parameter '{_claims[param].name}' has no data: it was sharded when its engine was closed ({what} "
                "needs it); save, export, or take engine.state_dict() before engine.close()"
            )
    for guardian, of_one in of_guardian.items():
        guardian.touched(of_one, what)


def mark_sharded(param: nn.Parameter, kind: type[ShardedParameter] = ShardedParameter) -> None:
    """Mark ``param``, which has a guardian, as sharded."""
    param.__class__ = kind


def restore_class(param: nn.Parameter, kind: type[nn.Parameter]) -> None:
    """Restore the class of ``param``, which has data again."""
    param.__class__ = kind


def has_own_functions(param: Tensor) -> bool:
    """Return whether the class of an unsharded parameter overrides ``__torch_function__``."""
    return not is_sharded(param) and type(param).__torch_function__ is not nn.Parameter.__torch_function__


def is_sharded(param: Tensor) -> bool:
    return issubclass(type(param), ShardedParameter)


class GradientPlaceholder(Tensor):
    """Placeholder for the gradient of the parameter called ``fqn``.

    If another backward adds to it, ``added`` is the new gradient alone.
    """

    fqn: str
    added: Tensor | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, param: Tensor, fqn: str) -> "GradientPlaceholder":
        made: GradientPlaceholder = Tensor._make_wrapper_subclass(
            cls, param.shape, strides=param.stride(), dtype=param.dtype, device=param.device
        )
        made.fqn = fqn
        made.added = None
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if torch._C._current_graph_task_id() != -1 and type(args[0]) is cls:  # by autograd
            if func is torch.ops.aten.add.Tensor:
                args[0].added = args[1]
                return args[1]
            if func is torch.ops.aten.add_.Tensor:
                args[0].added = args[1].clone()
                return args[0]
        fqn = next(leaf.fqn for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if type(leaf) is cls)
        raise PartitaError(
            f"the .grad of '{fqn}' has no values ({func} needs them): the gradient was moved into a buffer that is "
            "reduced over the ranks. To clip, set clip_grad_norm in the config, or call "
            "engine.clip_grad_norm(max_norm) before engine.step(); to read it, call "
            f"engine.gradient('{fqn}'); to drop it, engine.zero_grad()"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Placeholder for the gradient of '{self.fqn}': {tuple(self.shape)}, {self.dtype}, {self.device}"

    __format__: Callable[..., str] = lambda self, spec: format(repr(self), spec)
