"""A parameter of a unit: the user's object, and the place of its values in its segment."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from partita.plan.flat_range import FlatRange, memory_order
from partita.plan.span import Span
from partita.planner.parameters import Holding
from partita.sharding.placeholder import GradientPlaceholder, ShardedParameter, restore_class

if TYPE_CHECKING:
    from partita.sharding.segment import Segment


@dataclass
class Member:
    """One parameter of a unit: the user's object, its names, and where its values lie. ``shape`` and ``stride`` are the
    local tensor's, which the parameter is once the unit has adopted it.
    """

    holding: Holding
    span: Span
    segment: "Segment"
    param: nn.Parameter = field(init=False)
    kind: type[nn.Parameter] = field(init=False)
    here_kind: type[nn.Parameter] = field(init=False)  # the parameter's class while its data is here
    sharded_kind: type[ShardedParameter] = ShardedParameter
    whole_kind: type[nn.Parameter] = nn.Parameter  # while it has whole values of a parameter that ranks hold in parts
    shape: torch.Size = field(init=False)
    stride: tuple[int, ...] = field(init=False)
    own_dtype: torch.dtype = field(init=False)  # before the unit adopted it
    own_device: torch.device = field(init=False)
    hooked: bool = False
    _collected: GradientPlaceholder | None = None

    def __post_init__(self) -> None:
        self.param = param = self.holding.param
        place = self.span.place
        self.kind = self.here_kind = type(param)
        self.shape = torch.Size(place.sizes)
        self.stride = place.stride if place.is_part else dense_stride(param)
        self.own_dtype = param.dtype
        self.own_device = param.device

    @property
    def fqn(self) -> str:
        return self.holding.fqns[0]

    @property
    def rounded(self) -> bool:
        """True if values were cast to a dtype with fewer digits."""
        own, compute = self.own_dtype, self.segment.dtype
        return self.own_device.type != "meta" and own != compute and own.itemsize >= compute.itemsize

    @property
    def is_cut(self) -> bool:
        """True if the user's object is a part of the global parameter now."""
        place = self.span.place
        with torch._C.DisableTorchFunctionSubclass():  # which would answer for the whole one
            return place.sizes != place.shape and self.param.shape == self.shape

    @property
    def grad(self) -> Tensor | None:
        """The gradient that autograd left with the parameter, if it is there still."""
        grad = self.param.grad
        return None if isinstance(grad, GradientPlaceholder) else grad

    def mark_collected(self) -> None:
        """Say so where somebody looks for a gradient that was collected."""
        if self.param.grad is None:
            if self._collected is None:
                with torch._C.DisableTorchFunctionSubclass():  # which would answer for the whole one
                    self._collected = GradientPlaceholder(self.param, self.fqn)
            self.param.grad = self._collected

    def unmark_collected(self) -> None:
        """Leave in ``.grad`` only what autograd has put there."""
        grad = self.param.grad
        if isinstance(grad, GradientPlaceholder):
            self.param.grad = grad.added
            grad.added = None

    def leave(self, values: Tensor) -> None:
        """Make the parameter one of no unit: its own class, with ``values`` of its shape, wherever the unit is."""
        restore_class(self.param, self.kind)
        self.param.data = values

    def elements(self, start: int, stop: int) -> FlatRange:
        """Elements ``[start, stop)`` in this parameter's stride order, as a piece of the global parameter."""
        return FlatRange(self.span.place, memory_order(self.stride), start, stop)

    def shaped(self, flat: Tensor) -> Tensor:
        """A view of ``flat`` ``[numel]`` (in this parameter's stride order) with this parameter's shape."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset())

    def within(self, whole: Tensor) -> Tensor:
        """The parameter's part of a tensor that has all of its segment, in its shape."""
        return self.shaped(whole[self.span.offset :][: self.span.num_elements])

    @property
    def values(self) -> Tensor:
        """This rank's values of the parameter, flat, where its unit is whole."""
        return self.segment.full[self.span.offset :][: self.span.num_elements]

    def flat(self, values: Tensor) -> Tensor:
        """``values`` of this parameter's shape as ``[numel]`` in its stride order; a view where strides agree."""
        if values.stride() != self.stride:
            values = torch.empty_strided(self.shape, self.stride, dtype=values.dtype, device=values.device).copy_(
                values
            )
        return values.as_strided((values.numel(),), (1,), values.storage_offset())


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's strides if they fill memory without gaps, else those of a contiguous tensor."""
    order = sorted(range(tensor.dim()), key=tensor.stride)
    expected = 1
    for dim in order:
        if tensor.size(dim) > 1 and tensor.stride(dim) != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= tensor.size(dim)
    return tensor.stride()


def replace_data(param: nn.Parameter, values: Tensor) -> None:
    """Give a parameter other values, also of another device, dtype or shape, while it stays the same object."""
    try:
        param.data = values
    except RuntimeError:  # another device: only torch's own swap keeps the object
        # Made from the values themselves, it would share the version of the whole buffer, which every gather raises.
        fresh = nn.Parameter(values.new_empty(0), requires_grad=param.requires_grad)
        fresh.data = values
        kind = type(param)
        param.__class__ = nn.Parameter
        torch.utils.swap_tensors(param, fresh)
        param.__class__ = kind
