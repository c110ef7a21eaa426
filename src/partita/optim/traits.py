"""Facts about an optimizer: whether it may run on slices of parameters, which states it keeps, what it counts.

Some classes are known by name. The rest is found by steps of a copy of the optimizer on small parameters, which leave
the optimizer and the random numbers as they are.
"""

import copy
import inspect
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from partita.errors import ConfigError
from partita.optim.optimizer import copies
from partita.planner.memory import ADAM_MOMENTS

OptimizerClass = TypeVar("OptimizerClass", bound=type[Optimizer])

# Classes of torch and of this package that update elements independently of each other.
_ELEMENTWISE: set[type] = {
    getattr(torch.optim, name)
    for name in "Adadelta Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop SGD".split()
}
_DECLARED = set[type]()  # by users
_REASONS = {
    "Adafactor": "it keeps row and column means of each matrix",
    "Muon": "it orthogonalizes each matrix",
    "SparseAdam": "it works on sparse gradients",
}
# Of a small parameter: large enough for 8-bit states.
_SMALL = (64, 64)
_NUMBERS = (int, float, complex, Tensor)

# The trial's parameters. Two have elements on both ranks; each of the others is on one rank. The second is large enough
# for 8-bit states (4,096 elements), and its halves are not. All parts are multiples of 64 elements: torch computes a
# rest by other instructions, with other last bits.
_SHAPES = ((8, 16), (80, 80), (16, 16), (8, 8))
_NUM_CUT = 2
# Gradients of changing size set off clipping by norms; one direction throughout lets learned step sizes grow.
_SCALES = (1.0, 1.0, 100.0, 1.0, 0.01, 1.0, 1.0, 100.0, 1.0, 1.0, 0.01, 1.0)


def elementwise(cls: OptimizerClass) -> OptimizerClass:
    """Declare that an optimizer class updates every element of a parameter independently of all others.

    Use it as a decorator or a call, for a class that :func:`initialize` cannot try by itself. Sharded stages then run
    the class on slices of parameters. A class that a trial shows to be something else is refused nevertheless.
    """
    _DECLARED.add(cls)
    return cls


def runs_on_slices(cls: OptimizerClass) -> OptimizerClass:
    """Register an optimizer of this package that is right on slices of parameters."""
    _ELEMENTWISE.add(cls)
    return cls


class _UnknownError(Exception):
    """A trial was not possible, or its result says nothing."""


def check_elementwise(optimizer: Optimizer, *, cuts: bool = True) -> None:
    """Refuse an optimizer that computes something else on a rank's share of the parameters than on all of them.

    Args:
        cuts: True if ranks hold parts of parameters; False if each has some of the parameters, all of them uncut.

    Raises:
        ConfigError: names the class, the reason, and the remedies.
    """
    kind = type(optimizer)
    check_closure(optimizer)
    if _keeps_step(kind, _ELEMENTWISE):
        return
    advice = ""
    try:
        reason = _known_reason(kind) if cuts else None
        reason = reason or _trial(optimizer, cuts=cuts)
    except _UnknownError as unknown:
        if _keeps_step(kind, _DECLARED):
            return
        reason = str(unknown)
        advice = (
            "; if it updates every element independently of all others, declare that with "
            f"partita.elementwise({kind.__name__})"
        )
    if reason:
        what = "slices of parameters" if cuts else "a part of the parameters"
        raise ConfigError(
            f"optimizer {kind.__name__} cannot run on {what}: {reason}. Use an elementwise optimizer such as AdamW, or "
            f"zero.stage 0 without parallel axes and offload (every rank then updates all parameters){advice}"
        )


def check_closure(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose step evaluates the loss by itself.

    Raises:
        ConfigError: names the class.
    """
    if _needs_closure(optimizer):
        raise ConfigError(
            f"optimizer {type(optimizer).__name__} evaluates the loss in its step (step(closure)), which engine.step() "
            "does not do on several ranks, at any stage: use an optimizer whose step() needs no closure (AdamW), "
            "or one rank, with optimizer.step(closure)"
        )


def _needs_closure(optimizer: Optimizer) -> bool:
    """True if a step on small parameters fails without a closure, and succeeds with one."""
    if _keeps_step(type(optimizer), _ELEMENTWISE) or _stepped(optimizer) is not None:
        return False
    return _stepped(optimizer, lambda: torch.zeros((), dtype=torch.float32, device="cpu")) is not None


def _keeps_step(kind: type, classes: set[type]) -> bool:
    """True if the class is one of these, or has one's step."""
    base = next((base for base in kind.__mro__ if base in classes), None)
    return base is not None and _step(kind) is _step(base)


def _step(kind: Any) -> object:
    """The class's own function: torch wraps ``step`` anew in each class when its first object is made."""
    return inspect.unwrap(kind.step)


def _known_reason(kind: type) -> str | None:
    return next((_REASONS[base.__name__] for base in kind.__mro__ if base.__name__ in _REASONS), None)


def _trial(optimizer: Optimizer, *, cuts: bool = True) -> str | None:
    """The reason why the optimizer is wrong on a rank's share of the parameters; None if it is right, bit for bit.

    Raises:
        _UnknownError: the trial raised an error, or draws random numbers.
    """
    try:
        return _compare(partial(_small_copy, optimizer), optimizer, cuts=cuts)
    except _UnknownError as unknown:  # its __init__ may make states that a copy does not have
        if "random" in str(unknown):
            raise
        try:
            return _compare(partial(_made_again, optimizer), optimizer, cuts=cuts)
        except _UnknownError:
            raise unknown from None


def _compare(make: Callable[[Sequence[int], Any], Optimizer], optimizer: Optimizer, *, cuts: bool) -> str | None:
    """Steps on all of some parameters, and by two optimizers that each have the share of one of two ranks."""
    groups = {repr(_settings(group)): number for number, group in reversed([*enumerate(optimizer.param_groups)])}
    chosen = sorted(groups.values())
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator, dtype=torch.float32, device="cpu")
    whole = [[nn.Parameter(draw(shape)) for shape in _SHAPES] for _ in chosen]
    shares = [[_share(params, rank, cuts) for params in whole] for rank in range(2)]
    directions = [[draw(shape) for shape in _SHAPES] for _ in chosen]
    try:
        with torch.random.fork_rng(devices=[]):
            before = torch.get_rng_state()
            trials = [make(chosen, params) for params in (whole, *shares)]
            for trial in trials:
                _train_mode(trial)
            for number, scale in enumerate(_SCALES):
                for params, along in zip(whole, directions, strict=True):
                    for param, direction in zip(params, along, strict=True):
                        param.grad = _gradient(param, direction + 0.5 * draw(param.shape), number) * scale
                for rank, share in enumerate(shares):
                    for params, parts in zip(whole, share, strict=True):
                        grads = _share([param.grad for param in params], rank, cuts)
                        for part, grad in zip(parts, grads, strict=True):
                            part.grad = grad.detach().clone()
                for trial in trials:
                    trial.step()
            for trial in trials:
                if callable(leave := getattr(trial, "eval", None)):
                    leave()
            draws = not torch.equal(before, torch.get_rng_state())
    except Exception as error:  # the class is the user's: whatever it raises is the reason
        raise _UnknownError(f"a trial on slices of small parameters raised {type(error).__name__}: {error}") from None
    if all(
        torch.equal(part.view(torch.int32), found.view(torch.int32))
        for rank, share in enumerate(shares)
        for params, parts in zip(whole, share, strict=True)
        for part, found in zip(parts, _share(params, rank, cuts), strict=True)
    ):
        return None
    if draws:
        raise _UnknownError("it draws random numbers, so a trial cannot tell whether its elements are independent")
    half = "elements" if cuts else "parameters"
    return f"in a trial its result differs where each of two ranks has half of the {half}"


def _share(params: Sequence[Any], rank: int, cuts: bool) -> list[nn.Parameter]:
    """Copies of what one of two ranks has of the trial's parameters (or of their gradients)."""
    values = [param.detach() for param in params]
    if not cuts:
        return [nn.Parameter(value.clone()) for value in values[rank::2]]
    halves = [value.reshape(2, -1)[rank] for value in values[:_NUM_CUT]]
    return [nn.Parameter(value.reshape(-1).clone()) for value in (*halves, values[_NUM_CUT + rank])]


def _gradient(param: Tensor, grad: Tensor, number: int) -> Tensor:
    """A gradient, in every second step orthogonal to each row of the parameter, as of scale-invariant weights."""
    if number % 2 == 0:
        return grad
    weights = param.detach()
    along = (grad * weights).sum(1, keepdim=True) / weights.square().sum(1, keepdim=True)
    return grad - along * weights


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """A group's settings in the trial: with a rate that moves parameters, whatever a warm-up has set by now."""
    settings = {key: value for key, value in group.items() if key != "params"}
    if "lr" in settings and not float(settings["lr"]):
        settings["lr"] = settings.get("initial_lr") or 1e-3
    return settings


def _train_mode(optimizer: Optimizer) -> None:
    """Put an optimizer that has modes into the one in which it steps."""
    if callable(train := getattr(optimizer, "train", None)):
        train()


def _small_copy(
    optimizer: Optimizer,
    chosen: Sequence[int],
    params: Sequence[Sequence[nn.Parameter]],
    known: dict[int, Any] | None = None,
) -> Optimizer:
    """A copy of the optimizer, and of those that it wraps, without states and on other parameters.

    Args:
        chosen: the groups that it has.
        params: the parameters of each.
        known: copies by the id of what they are of.
    """
    known = {} if known is None else known
    for number, own in zip(chosen, params, strict=True):
        group = optimizer.param_groups[number]
        known.setdefault(id(group), {**copy.deepcopy(_settings(group)), "params": list(own)})
    known.setdefault(id(optimizer.param_groups), [known[id(optimizer.param_groups[number])] for number in chosen])
    state = copy.copy(optimizer.state)
    state.clear()
    known.setdefault(id(optimizer.state), state)
    clone = known[id(optimizer)] = object.__new__(type(optimizer))
    attributes = {name: value for name, value in optimizer.__dict__.items() if name not in ("step", "zero_grad")}
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        attributes[name] = type(attributes[name])() if name in attributes else {}
    for name, value in copies(attributes, attributes).items():
        original = attributes[name]
        if isinstance(original, Optimizer) and id(original) not in known:
            _small_copy(original, chosen, params, known)
        clone.__dict__[name] = known.get(id(original), value)
    return clone


def _made_again(optimizer: Optimizer, chosen: Sequence[int], params: Sequence[Sequence[nn.Parameter]]) -> Optimizer:
    """An optimizer that the class makes from what the optimizer's defaults tell of its arguments."""
    kind = type(optimizer)
    accepted = inspect.signature(kind.__init__).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    arguments = {name: value for name, value in optimizer.defaults.items() if takes_any or name in accepted}
    make: Any = kind
    made: Optimizer = make(
        [
            {**copy.deepcopy(_settings(optimizer.param_groups[number])), "params": list(own)}
            for number, own in zip(chosen, params, strict=True)
        ],
        **arguments,
    )
    return made


def states_per_element(optimizer: Optimizer) -> int:
    """Tensors of the parameter's shape that the optimizer keeps beside it; Adam's where a trial does not tell."""
    if (states := _states(optimizer)) is None:
        return ADAM_MOMENTS
    return max(sum(isinstance(value, Tensor) and value.shape == _SMALL for value in state.values()) for state in states)


def state_names(optimizer: Optimizer) -> frozenset[str]:
    """The names of what the optimizer keeps after a first step; none where a trial does not tell."""
    return frozenset(name for state in _states(optimizer) or () for name in state)


def check_states_can_be_saved(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose states are no plain tensors: its first checkpoint could not be saved.

    Raises:
        ConfigError: names the class and the state.
    """
    for state in _states(optimizer) or ():
        for key, value in state.items():
            if isinstance(value, Tensor) and type(value) not in (Tensor, nn.Parameter):
                raise ConfigError(
                    f"optimizer {type(optimizer).__name__} keeps its state '{key}' as {type(value).__name__}, which "
                    "checkpoints cannot hold; for 8-bit states use precision.moments: int8 with the config's adamw, or "
                    "an 8-bit optimizer of bitsandbytes (on one rank, or at zero.stage 0)"
                )


def counted_attributes(optimizer: Optimizer, *, apart: bool) -> tuple[str, ...]:
    """The names of the numbers and tensors beside ``state`` and groups that a step changes (``self.t += 1``); none
    where a trial does not tell.

    Steps beside the caller are made on a second object, and a checkpoint holds what it is told of: these are carried
    over to both. What a step changes of other kinds is not, with a warning.

    Args:
        apart: whether steps are made on a second object, where that is an error.

    Raises:
        ConfigError: names the attribute.
    """
    if (stepped := _stepped(optimizer)) is None:
        return ()
    trial, before = stepped
    after = trial.__dict__
    changed = [key for key in after if key not in ("param_groups", "state") and not _same(before.get(key), after[key])]
    others = [key for key in changed if not isinstance(after[key], _NUMBERS)]
    if others:
        said = (
            f"optimizer {type(optimizer).__name__} changes '{others[0]}' (a {type(after[others[0]]).__name__}) in its "
            "step, beside its state and groups"
        )
        remedy = f"keep it in self.state[param] or in the groups, or as numbers and tensors (self.{others[0]} = 0)"
        if apart:
            raise ConfigError(
                f"{said}; updates beside the caller (offload, gradients in_backward) would lose it: {remedy}"
            )
        warnings.warn(f"{said}: checkpoints do not hold it; {remedy}", stacklevel=4)
    return tuple(key for key in changed if key not in others)


def _states(optimizer: Optimizer) -> list[dict[str, Any]] | None:
    """Return the states of a small parameter in each group; None where a trial does not tell."""
    if (stepped := _stepped(optimizer)) is None:
        return None
    trial, _ = stepped
    return [trial.state.get(param, {}) for group in trial.param_groups for param in group["params"]]


def _stepped(
    optimizer: Optimizer, closure: Callable[[], Tensor] | None = None
) -> tuple[Optimizer, dict[str, Any]] | None:
    """A second object after a step on one small parameter in each group, and its attributes before; None where the
    step fails.
    """
    try:
        numbers = range(len(optimizer.param_groups))
        params = [[nn.Parameter(torch.zeros(_SMALL, dtype=torch.float32, device="cpu"))] for _ in numbers]
        for (param,) in params:
            param.grad = torch.ones_like(param)
        trial = _small_copy(optimizer, numbers, params)
        _train_mode(trial)
        before = copies(trial.__dict__, trial.__dict__)
        with torch.random.fork_rng(devices=[]):
            trial.step() if closure is None else trial.step(closure)  # type: ignore[arg-type]
    except Exception:  # the class is the user's: whatever it raises, it has not told
        return None
    return trial, before


def _same(one: Any, other: Any) -> bool:
    """Return whether a value is unchanged: containers by what they hold, objects by which they are."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if type(one) is type(other) and isinstance(one, list | dict | set):
        return _held(one) == _held(other)
    return one is other or (isinstance(one, int | float | complex) and isinstance(other, type(one)) and one == other)


def _held(box: Any) -> list[int]:
    return [id(item) for item in (box.values() if isinstance(box, dict) else box)]
