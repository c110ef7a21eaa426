"""A parameter of a unit: the user's object, and the position of its values in its segment."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from partita.layout.parameters import ParameterInfo
from partita.sharding.placeholder import GradientPlaceholder, ShardedParameter, restore_class, set_data
from partita.table.flat_range import FlatRange, memory_order
from partita.table.span import Span

if TYPE_CHECKING:
    from partita.sharding.segment import Segment


@dataclass
class Member:
    """One parameter of a unit: the user's object, its names, and the position of its values in a segment.

    ``shape`` and ``stride`` are those of the local tensor, a view of the flat buffer, which replaces the parameter's
    own data.
    """

    info: ParameterInfo
    span: Span
    segment: "Segment"
    param: nn.Parameter = field(init=False)
    kind: type[nn.Parameter] = field(init=False)
    unsharded_kind: type[nn.Parameter] = field(init=False)  # the parameter's class while it is unsharded
    sharded_kind: type[ShardedParameter] = ShardedParameter
    global_kind: type[nn.Parameter] = nn.Parameter  # while engine.gathered has the values of all ranks in it
    shape: torch.Size = field(init=False)
    stride: tuple[int, ...] = field(init=False)
    own_dtype: torch.dtype = field(init=False)  # before its data became a view of the flat buffer
    own_device: torch.device = field(init=False)
    hooked: bool = False
    _collected: GradientPlaceholder | None = None
    _is_marked: bool = False  # True while .grad is expected to be the placeholder

    def __post_init__(self) -> None:
        self.param = param = self.info.param
        place = self.span.place
        self.kind = self.unsharded_kind = type(param)
        self.shape = torch.Size(place.sizes)
        self.stride = place.stride if place.is_part else dense_stride(param)
        self.own_dtype = param.dtype
        self.own_device = param.device

    @property
    def fqn(self) -> str:
        return self.info.fqns[0]

    @property
    def rounded(self) -> bool:
        """True if values were cast to a dtype of lower precision."""
        own, compute = self.own_dtype, self.segment.dtype
        return self.own_device.type != "meta" and own != compute and own.itemsize >= compute.itemsize

    @property
    def is_cut(self) -> bool:
        """True if the user's object has only this rank's slice of the global parameter now."""
        place = self.span.place
        with torch._C.DisableTorchFunctionSubclass():  # a subclass would return the global shape
            return place.sizes != place.shape and self.param.shape == self.shape

    @property
    def grad(self) -> Tensor | None:
        """The gradient that autograd left in ``.grad``, if it is still there."""
        grad = self.param.grad
        return None if isinstance(grad, GradientPlaceholder) else grad

    def mark_placeholder(self) -> None:
        """Set ``.grad`` to a placeholder: the gradient is in a bucket."""
        if self.param.grad is None:
            if self._collected is None:
                with torch._C.DisableTorchFunctionSubclass():  # a subclass would return the global shape
                    self._collected = GradientPlaceholder(self.param, self.fqn)
            self.param.grad = self._collected
            self._is_marked = True

    @property
    def is_dropped(self) -> bool:
        """True if the user has removed the placeholder, or a gradient that is not collected yet, from ``.grad``."""
        grad, placeholder = self.param.grad, self._collected
        if grad is None or placeholder is None or not self._is_marked:
            return grad is None
        return grad is not placeholder and grad is not placeholder.added

    def unmark_placeholder(self) -> None:
        """Replace the placeholder in ``.grad`` by the gradient that autograd has added since, if any."""
        placeholder = self._collected
        if placeholder is not None:
            if self.param.grad is placeholder:
                self.param.grad = placeholder.added
            placeholder.added = None
            self._is_marked = False

    def leave(self, values: Tensor) -> None:
        """Detach the parameter from its unit: restore its class, and give it ``values`` of its shape."""
        restore_class(self.param, self.kind)
        set_data(self.param, values)

    def elements(self, start: int, stop: int) -> FlatRange:
        """Return elements ``[start, stop)`` in this parameter's stride order as a range of the global parameter."""
        return FlatRange(self.span.place, memory_order(self.stride), start, stop)

    def shaped(self, flat: Tensor) -> Tensor:
        """Return a view of ``flat`` ``[numel]`` (in this parameter's stride order) with this parameter's shape."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset())

    def within(self, full: Tensor) -> Tensor:
        """Return the parameter's slice of its segment's unsharded flat buffer, in the parameter's shape."""
        return self.shaped(full[self.span.offset :][: self.span.num_elements])

    @property
    def values(self) -> Tensor:
        """The parameter's values, flat, while its unit is unsharded."""
        return self.segment.full[self.span.offset :][: self.span.num_elements]

    def flat(self, values: Tensor) -> Tensor:
        """Return ``values`` of this parameter's shape as ``[numel]`` in its stride order: a view if strides agree."""
        if values.stride() != self.stride:
            values = torch.empty_strided(self.shape, self.stride, dtype=values.dtype, device=values.device).copy_(
                values
            )
        return values.as_strided((values.numel(),), (1,), values.storage_offset())


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """Return the tensor's strides if they fill memory without gaps, else those of a contiguous tensor."""
    order = sorted(range(tensor.dim()), key=tensor.stride)
    expected = 1
    for dim in order:
        if tensor.size(dim) > 1 and tensor.stride(dim) != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= tensor.size(dim)
    return tensor.stride()


def replace_data(param: nn.Parameter, values: Tensor) -> None:
    """Replace a parameter's data, also by one of another device, dtype or shape; the object stays the same."""
    try:
        set_data(param, values)
    except RuntimeError:  # another device: only torch's own swap keeps the object
        # Created from the values themselves, it would share the version counter of the flat buffer, which every gather
        # increments.
        fresh = nn.Parameter(values.new_empty(0), requires_grad=param.requires_grad)
        fresh.data = values
        kind = type(param)
        param.__class__ = nn.Parameter
        torch.utils.swap_tensors(param, fresh)
        param.__class__ = kind
