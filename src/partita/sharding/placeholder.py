"""Placeholders: a sharded parameter without its data, and a gradient that lies in a bucket.

A sharded parameter is of class :class:`ShardedParameter` and gets its own class back when it is unsharded. Its shape,
dtype and device answer; reading its data asks its :class:`Guardian`, which unshards it or raises an error.

From the end of a batch's backward until the step, a :class:`GradientPlaceholder` is the ``.grad`` of a parameter whose
gradient lies in a bucket. Reading or changing its values is an error that names the call to use instead: with ``None``,
clipping by hand would find nothing to clip, silently.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from partita.errors import ConfigError, PartitaError
from partita.planner.off_stage import is_elsewhere

# Attributes and methods, by name, that take no data.
METADATA = frozenset(
    """
    shape dtype device requires_grad grad is_leaf ndim layout is_cuda is_cpu is_meta grad_fn names _version
    is_sparse is_quantized size dim numel stride is_floating_point requires_grad_ is_contiguous element_size
    nelement is_complex __hash__ __len__ register_hook register_post_accumulate_grad_hook storage_offset
    retains_grad itemsize nbytes _backward_hooks _post_accumulate_grad_hooks is_sparse_csr is_mkldnn is_nested
    is_xla is_xpu is_mps
    """.split()
)
_ACCESS = ("__get__", "__set__")


def is_access(func: Callable[..., Any]) -> bool:
    """Return whether torch calls the reader, or the writer, of an attribute."""
    return getattr(func, "__name__", "") in _ACCESS


def asked_for(func: Callable[..., Any]) -> str:
    """The name of what torch calls: of a function, or of the attribute that is read or written."""
    if is_access(func):
        return str(getattr(getattr(func, "__self__", None), "__name__", func.__name__))
    return str(getattr(func, "__name__", func))


_DATA = torch._C.TensorBase.data

Report = Callable[[nn.Parameter, Tensor], object]


class _ReportedData:
    """The attribute ``data``, which calls ``report`` with the parameter and the tensor that is returned."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def __get__(self, param: nn.Parameter | None, owner: type[Any]) -> Any:
        if param is None:
            return _DATA
        values = _DATA.__get__(param)  # type: ignore[attr-defined]
        self._report(param, values)
        return values

    def __set__(self, param: nn.Parameter, values: Tensor) -> None:
        _DATA.__set__(param, values)  # type: ignore[attr-defined]


def report_reads(report: Report) -> None:
    """Call ``report`` at every read of a parameter's ``data`` from here on."""
    if not isinstance(nn.Parameter.__dict__.get("data"), _ReportedData):
        setattr(nn.Parameter, "data", _ReportedData(report))  # noqa: B010 - torch declares it as a tensor


class Guardian(Protocol):
    """The object that unshards a parameter whose data is asked for, or says why it must not be."""

    def touched(self, param: nn.Parameter, what: str) -> None:
        """Called when data of a sharded ``param`` is asked for by ``what``. Unshard it or raise an error."""

    def exposed(self, param: nn.Parameter, values: Tensor) -> None:
        """Called when ``param.data`` was read and returns ``values``, through which ``param`` may be written."""


@dataclass(frozen=True)
class _Claim:
    """The guardian of the parameter called ``name``; None once its engine was closed, or is gone.

    The guardian holds its parameters: were it held here, they would keep themselves alive.
    """

    name: str
    guardian: Callable[[], Guardian | None] = lambda: None

    def touched(self, param: nn.Parameter, what: str) -> None:
        if (guardian := self.guardian()) is None:
            raise PartitaError(
                f"parameter '{self.name}' has no data: it was at rest when its engine was closed ({what} needs it); "
                "save, export, or take engine.state_dict() before engine.close()"
            )
        guardian.touched(param, what)


_left_shares = WeakIdKeyDictionary()  # parameters of which an engine has left this rank's share alone
_claims = WeakIdKeyDictionary()  # parameter of an engine -> _Claim; only a tensor is at hand when it is touched


class ShardedParameter(nn.Parameter):
    """The class of a parameter whose data is elsewhere."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if (name := asked_for(func)) not in METADATA:
            for leaf in torch.utils._pytree.tree_leaves((args, kwargs)):
                if isinstance(leaf, ShardedParameter):
                    _claims[leaf].touched(leaf, name)
                    if has_own_functions(leaf):
                        return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Parameter at rest (its data is split over the ranks): {tuple(self.shape)}, {self.dtype}, {self.device}"


def claim(param: nn.Parameter, name: str, guardian: Guardian) -> None:
    """Make ``guardian`` the one that is asked about ``param``, for as long as it lives."""
    report_reads(_report_read)
    _claims[param] = _Claim(name, weakref.ref(guardian))


def _report_read(param: nn.Parameter, values: Tensor) -> None:
    claim = _claims.get(param)
    if claim is not None and (guardian := claim.guardian()) is not None:
        guardian.exposed(param, values)


def disclaim(param: nn.Parameter) -> None:
    """Nobody answers for ``param`` any more: with its data it is a parameter like any other again."""
    claim = _claims.pop(param, None)
    if claim is not None and is_sharded(param):
        _claims[param] = _Claim(claim.name)


def leave_share(param: nn.Parameter) -> None:
    """An engine ended, or did not start, and this rank has no more of ``param`` than its share: no other takes it."""
    _left_shares[param] = True


def is_claimed(param: nn.Parameter) -> bool:
    """Return whether ``param`` belongs to an engine, or has no data, or a share of it alone, since it did."""
    claim = _claims.get(param)
    return param in _left_shares or (claim is not None and (is_sharded(param) or claim.guardian() is not None))


def check_unclaimed(model: nn.Module) -> None:
    """Refuse parameters that another engine holds.

    Raises:
        ConfigError: names the first of them.
    """
    for name, param in model.named_parameters():
        if is_claimed(param):
            raise _claimed(name)


def check_here(model: nn.Module) -> None:
    """Refuse parameters that another engine has left on other stages of its pipeline; before this one's are cut.

    Raises:
        ConfigError: names the first of them.
    """
    for name, param in model.named_parameters():
        if is_elsewhere(param):
            raise _claimed(name)


def _claimed(name: str) -> ConfigError:
    return ConfigError(
        f"parameter '{name}' already belongs to another engine (one that is open, or was closed while the parameter "
        "was split over the ranks, or failed to start when they had taken their shares): close that one first, or "
        "build the model anew and pass weights="
    )


def touch(param: nn.Parameter, what: str) -> None:
    """Make ``param``, which is at rest, whole for ``what``, or raise."""
    _claims[param].touched(param, what)


def mark_sharded(param: nn.Parameter, kind: type[ShardedParameter] = ShardedParameter) -> None:
    """Mark ``param``, which is claimed, as being without data."""
    param.__class__ = kind


def restore_class(param: nn.Parameter, kind: type[nn.Parameter]) -> None:
    """Give ``param`` its own class back: its data is there."""
    param.__class__ = kind


def has_own_functions(param: Tensor) -> bool:
    """True if the class of a parameter, whose data is there, says what functions of it do."""
    return not is_sharded(param) and type(param).__torch_function__ is not nn.Parameter.__torch_function__


def is_sharded(param: Tensor) -> bool:
    return issubclass(type(param), ShardedParameter)


class GradientPlaceholder(Tensor):
    """Stands for the gradient of the parameter called ``fqn``.

    A backward that comes all the same adds to it: ``added`` is then the new gradient alone.
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
                return args[1]
            if func is torch.ops.aten.add_.Tensor:
                args[0].added = args[1].clone()
                return args[0]
        fqn = next(leaf.fqn for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if type(leaf) is cls)
        raise PartitaError(
            f"the .grad of '{fqn}' has no values ({func} needs them): its gradient went into a buffer in which the "
            "ranks' are added up. To clip, set clip_grad_norm in the config, or call engine.clip_grad_norm(max_norm) "
            f"before engine.step(); to look, call engine.gradient('{fqn}'); to drop it, engine.zero_grad()"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Collected gradient of '{self.fqn}': {tuple(self.shape)}, {self.dtype}, {self.device}"

    __format__: Callable[..., str] = lambda self, spec: format(repr(self), spec)
