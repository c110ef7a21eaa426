"""What a parameter is while its data is not there: its shape, dtype and device answer, its data says where it is.

A parameter at rest is given the class :class:`Resting` and gets its own class back when it is whole. Reading it then
asks its :class:`Guardian`, which either makes it whole (a module reads another unit's parameter inside the engine's
forward) or raises an error that names the parameter.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from partita.errors import ConfigError, PartitaError
from partita.planner.elsewhere import is_elsewhere
from partita.sharding.data_access import report_reads
from partita.sharding.placeholder import METADATA, asked_for


class Guardian(Protocol):
    """Who knows how to make a resting parameter whole, or why it must not be."""

    def touched(self, param: nn.Parameter, what: str) -> None:
        """Called when data of a resting ``param`` is asked for by ``what``. Makes it whole or raises."""

    def exposed(self, param: nn.Parameter, values: Tensor) -> None:
        """Called when ``param.data`` was read and returns ``values``, through which ``param`` may be written."""


@dataclass(frozen=True)
class _Claim:
    """Who answers for the parameter called ``name``; None once its engine was closed, or is gone.

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


class Resting(nn.Parameter):
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
                if isinstance(leaf, Resting):
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
    if claim is not None and is_resting(param):
        _claims[param] = _Claim(claim.name)


def leave_share(param: nn.Parameter) -> None:
    """An engine ended, or did not start, and this rank has no more of ``param`` than its share: no other takes it."""
    _left_shares[param] = True


def is_claimed(param: nn.Parameter) -> bool:
    """Whether ``param`` belongs to an engine, or has no data, or a share of it alone, since it did."""
    claim = _claims.get(param)
    return param in _left_shares or (claim is not None and (is_resting(param) or claim.guardian() is not None))


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


def rest(param: nn.Parameter, kind: type[Resting] = Resting) -> None:
    """Mark ``param``, which is claimed, as being without data."""
    param.__class__ = kind


def wake(param: nn.Parameter, kind: type[nn.Parameter]) -> None:
    """Give ``param`` its own class back: its data is there."""
    param.__class__ = kind


def has_own_functions(param: Tensor) -> bool:
    """True if the class of a parameter, whose data is there, says what functions of it do."""
    return not is_resting(param) and type(param).__torch_function__ is not nn.Parameter.__torch_function__


def is_resting(param: Tensor) -> bool:
    return issubclass(type(param), Resting)
