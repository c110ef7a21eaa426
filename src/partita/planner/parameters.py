"""The parameters of a model, each once, and the checks that they can be stored in flat buffers."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from partita.errors import ConfigError
from partita.planner.off_stage import is_elsewhere


@dataclass
class Holding:
    """One parameter: the object, every name it has, and every module (with the attribute) that holds it."""

    param: nn.Parameter
    fqns: list[str] = field(default_factory=list)
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)


def find_holdings(model: nn.Module) -> list[Holding]:
    """Return every parameter in units of this rank once, with its names and owners, in ``named_parameters``' order."""
    return [holding for holding in find_everywhere(model) if not is_elsewhere(holding.param)]


def find_everywhere(model: nn.Module) -> list[Holding]:
    """Return the parameters in units of any rank, including other stages', as :func:`find_holdings` does."""
    return [holding for holding in _every_holding(model) if not is_quantized(holding.param)]


def find_quantized(model: nn.Module) -> list[Holding]:
    """Return the quantized parameters, which stay as they are outside units, in the same order."""
    return [holding for holding in _every_holding(model) if is_quantized(holding.param)]


def is_quantized(param: Tensor) -> bool:
    """Return whether a frozen parameter stores its values in a format of its class that cannot be split.

    These are the parameters of bitsandbytes, which are bytes, and tensors that consist of several tensors (torchao).
    """
    if param.requires_grad or nn.parameter.is_lazy(param) or is_elsewhere(param):
        return False
    own_class = not type(param).__module__.startswith(("torch.", "partita."))  # as plain ones, and those at rest, have
    return own_class and (bool(inner_names(param)) or not param.is_floating_point())


def inner_names(param: Tensor) -> list[str]:
    """Return the attributes that hold the tensors which a tensor consists of; none for a plain tensor."""
    flatten = getattr(param, "__tensor_flatten__", None)
    return [] if flatten is None else list(flatten()[0])


def check_quantized(holdings: Sequence[Holding], device: torch.device) -> None:
    """Check that quantized parameters are on the device that computes.

    Raises:
        ConfigError: one is not; the message names the first.
    """
    for holding in holdings:
        if holding.param.device != device:
            raise ConfigError(
                f"parameter '{holding.fqns[0]}' is quantized ({type(holding.param).__name__}) and on "
                f"'{holding.param.device}': quantized parameters stay where they are; load the model onto "
                f"'{device}' (from_pretrained(..., device_map={{'': '{device}'}})) before partita.initialize"
            )


def _every_holding(model: nn.Module) -> list[Holding]:
    found: dict[int, Holding] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for attribute, param in module._parameters.items():
            if param is None:
                continue
            holding = found.setdefault(id(param), Holding(param))
            holding.fqns.append(f"{path}.{attribute}" if path else attribute)
            if all(owner is not module or name != attribute for owner, name in holding.owners):
                holding.owners.append((module, attribute))
    return list(found.values())


def check_supported(holding: Holding) -> None:
    """Check that a parameter's memory can be a view of a flat buffer.

    Raises:
        ConfigError: it cannot; the message names the parameter.
    """
    param, name = holding.param, holding.fqns[0]
    if nn.parameter.is_lazy(param):
        raise ConfigError(f"parameter '{name}' has no shape before the model's first forward: run one, then initialize")
    plain = type(param) in (nn.Parameter, nn.parameter.Buffer) or isinstance(param, nn.Parameter)
    if not plain or type(param.data) is not Tensor:
        raise ConfigError(
            f"parameter '{name}' is a {type(param.data).__name__}: its memory cannot be split; "
            "pass the model before it is distributed; of quantized parameters, freeze them (requires_grad_(False))"
        )
    if param.layout is not torch.strided:
        raise ConfigError(f"parameter '{name}' is sparse ({param.layout}); use a dense parameter")
    if param.is_complex() and param.requires_grad:
        raise ConfigError(f"parameter '{name}' is complex; hold it as a real tensor of shape [..., 2] instead")


def check_apart(holdings: Sequence[Holding]) -> None:
    """Check that no two parameters are separate objects over the same memory: each would be trained separately.

    Raises:
        ConfigError: two are; the message names both.
    """
    by_storage = defaultdict[int, list[Holding]](list)
    for holding in holdings:
        if holding.param.numel():
            by_storage[holding.param.untyped_storage()._cdata].append(holding)
    for sharing in by_storage.values():
        near = list[Holding]()  # that reach as far as the next begins
        for holding in sorted(sharing, key=lambda holding: _reach(holding.param).start):
            near = [other for other in near if _reach(other.param).stop > _reach(holding.param).start]
            for other in near:
                if _overlap(holding.param, other.param):
                    raise ConfigError(
                        f"parameters '{other.fqns[0]}' and '{holding.fqns[0]}' share memory but are two objects, which "
                        "would be trained apart: tie them by assigning the Parameter itself (module.weight = "
                        "other.weight), or give one its own memory (param.data = param.data.clone())"
                    )
            near.append(holding)


def _reach(tensor: Tensor) -> range:
    """Return the range of bytes in its storage from a tensor's first element to its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first, itemsize = tensor.storage_offset(), tensor.element_size()
    return range(first * itemsize, (first + last + 1) * itemsize)


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors with overlapping ranges of memory share an element: strides may interleave. Tensors
    with different element sizes are taken to do so.
    """
    if one.element_size() != other.element_size():
        return True
    first = min(one.storage_offset(), other.storage_offset())
    num = max(_reach(one).stop, _reach(other).stop) // one.element_size() - first
    taken = torch.zeros(num, dtype=torch.bool, device="cpu")
    taken.as_strided(one.shape, one.stride(), one.storage_offset() - first).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), other.storage_offset() - first).any())
