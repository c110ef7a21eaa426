"""References to unsharded parameters: tensors of the user's, and what autograd's graphs save."""

from typing import Any

import torch

from partita.sharding.unit import Unit


class References:
    """References to the parameters of an unsharded unit, and to views of them, when ``engine.gathered`` begins.

    Args:
        version: of the parameters; autograd refuses graphs that were made with others.
    """

    def __init__(self, unit: Unit, version: int) -> None:
        self._unit = unit
        self._version = version
        # A graph that adds to a parameter's gradient refers to it, whether or not it has saved its values. With these
        # nodes there is one such reference throughout.
        self._nodes = [node for member in unit.members if (node := gradient_node(member.param)) is not None]
        self._before = self._count()

    def begin_again(self, version: int) -> None:
        """Another block begins while there are more references."""
        self._version = version

    def end_block(self) -> bool:
        """End the block. Returns: True if there are more references than when it began."""
        grown = self.grown(self._version)
        self._nodes.clear()
        return grown

    def grown(self, version: int) -> bool:
        """True if there are more references; after an update only views count, graphs are void then."""
        (views, params), (views_before, params_before) = self._count(), self._before
        if views > views_before:
            return True
        return version == self._version and any(now > then for now, then in zip(params, params_before, strict=True))

    def _count(self) -> tuple[int, list[int]]:
        """Numbers of views, and of references to each parameter."""
        with torch._C.DisableTorchFunctionSubclass():
            params = [member.param._use_count() for member in self._unit.members]  # type: ignore[attr-defined]
        return torch._C._storage_Use_Count(self._unit.storage._cdata), params


def gradient_node(param: torch.Tensor) -> Any:
    """The node of autograd's graphs that adds to the gradient; a new one has the parameter's shape of now."""
    if not param.requires_grad:
        return None
    with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
        view = param.view_as(param)
    assert view.grad_fn is not None
    return view.grad_fn.next_functions[0][0]
