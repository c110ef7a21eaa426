"""What a parameter's ``.grad`` is from the end of a batch's backward until the step, where a bucket holds the gradient.

It has the parameter's shape, dtype and device. What reads or changes its values is an error that says what to call
instead: at ``None``, clipping by hand would find nothing to clip, and say nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from partita.errors import PartitaError


class Collected(Tensor):
    """Stands for the gradient of the parameter called ``fqn``.

    A backward that comes all the same adds to it: ``added`` is then the new gradient alone.
    """

    fqn: str
    added: Tensor | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, param: Tensor, fqn: str) -> "Collected":
        made: Collected = Tensor._make_wrapper_subclass(
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
