"""Contexts in which parameters are unsharded, so that the user can read or modify them."""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from partita.errors import PartitaError
from partita.inspection.full_tensors import FullTensors
from partita.layout.parameters import ParameterInfo, find_quantized_params
from partita.optim.updater import Updater
from partita.sharding.assemble import equal_value_ranks
from partita.sharding.parameter import Member, replace_data
from partita.sharding.placeholder import set_data
from partita.sharding.runtime import Runtime
from partita.sharding.structure import checksum
from partita.sharding.unit import Unit
from partita.sharding.unshard import gradient_node
from partita.transforms.modules import OF_AXES, ModuleTransforms


class Gathered:
    """The contexts of :meth:`Engine.gathered`. ``num_open`` of them are active.

    ``transforms``: the changes to modules. Those of the parallel axes are suspended in a context, where parameters are
    unsharded.
    """

    def __init__(self, runtime: Runtime, updater: Updater, whole: FullTensors, transforms: ModuleTransforms) -> None:
        self._runtime = runtime
        self._updater = updater
        self._whole = whole
        self._transforms = transforms
        self._quantized = {id(info.param) for info in find_quantized_params(runtime.model)}  # always unsharded
        self._unsharded = set[int]()  # ids of parameters that active contexts have unsharded
        self._in_fp32 = set[int]()  # ids of unsharded parameters with the values of their master weights
        # Autograd's nodes of split parameters that are now unsharded, kept alive because they have the shard's shape.
        self._nodes = dict[int, Any]()
        self._kinds = {id(info.param): type(info.param) for info in whole.infos}
        self.num_open = 0

    @contextmanager
    def hold(self, items: tuple[nn.Module | nn.Parameter, ...], modify: bool) -> Iterator[None]:
        """Unshard the units of the given modules and parameters in a context (see :meth:`Engine.gathered`)."""
        self._updater.take_written()
        if modify and any(listener.differs_between_replicas for listener in self._updater.listeners):
            raise PartitaError(
                "engine.gathered(modify=True): replicas that train separately (communication.every) have different "
                "values inside a round: modify them after the step that ends a round, or after engine.save"
            )
        wanted = self._parameters_of(items)
        units = [unit for unit in self._runtime.units if any(id(m.param) in wanted for m in unit.members)]
        sharded = [unit for unit in units if not unit.always_unsharded]
        self._runtime.unsharder.hold(sharded)
        self.num_open += 1
        members = [member for unit in units for member in unit.members]
        infos = [each for each in self._whole.infos if id(each.param) in wanted]
        if not self._whole.shares:
            infos = [each for each in infos if modify and self._has_fp32_master(each)]
        unsharded = list[ParameterInfo]()
        try:
            unsharded += self._unshard(infos, modify)
            watched = {id(each.param): (each.fqns[0], each.param) for each in [m.info for m in members] + infos}
            before = {key: param._version for key, (_, param) in watched.items()}
            copied = [] if modify else [info for info in unsharded if self._is_copied(info)]
            sums = [checksum(info.param.detach().flatten()) for info in copied]
            had_gradients = self._runtime.reducer.holds_batch
            with self._transforms.suspended(items, OF_AXES):
                yield
            self._check_no_backward(had_gradients)
            written = {key for key, (_, param) in watched.items() if param._version != before[key]}
            written |= {id(member.param) for member in self._runtime.written.through_data(members)}
            for info, before_sum in zip(copied, sums, strict=True):
                if not torch.equal(checksum(info.param.detach().flatten()), before_sum):
                    written.add(id(info.param))
            for key, (name, _) in watched.items():
                if key in written and not (modify and key in wanted):
                    raise PartitaError(
                        f"parameter '{name}' was written inside engine.gathered(...) without being passed to it "
                        "with modify=True: the other ranks and the optimizer would not get the change"
                    )
            if modify:
                self._broadcast_first(infos)
                self._write_back(units, {member.fqn for member in members if id(member.param) in wanted})
        finally:
            self.num_open -= 1
            self._reshard(unsharded)
            self._runtime.written.forget([member for unit in sharded for member in unit.members])
            self._runtime.unsharder.release_hold(sharded)

    def _unshard(self, infos: Sequence[ParameterInfo], modify: bool) -> list[ParameterInfo]:
        """Give parameters their full values. Return those that no enclosing context has already unsharded.

        The values are in separate memory if the unit does not have them: if ranks hold different shards, or, to
        ``modify`` parameters, if master weights have a higher precision.
        """
        requested = {id(each.param) for each in infos if id(each.param) not in self._unsharded}
        if not requested:
            return []
        found = [(info, weight.clone()) for info, weight in self._whole.weights(master=modify, only=requested)]
        for info, weight in found:
            if modify and self._has_fp32_master(info):
                self._in_fp32.add(id(info.param))
            if self._is_copied(info):
                member = self._whole.member_of(info)
                kind = nn.Parameter if member is None else member.global_kind
                if kind is not nn.Parameter:
                    self._nodes[id(info.param)] = gradient_node(info.param)
                info.param.__class__ = kind
                replace_data(info.param, weight)
                self._runtime.structure.relocated.add(id(info.param))
        self._unsharded |= requested
        return [info for info, _ in found]

    def _has_fp32_master(self, info: ParameterInfo) -> bool:
        """Return True if this rank has master weights of the parameter with a higher precision than compute."""
        member = self._whole.member_of(info)
        return member is not None and member.segment.keeps_digits

    def _is_copied(self, info: ParameterInfo) -> bool:
        """Return True if the unsharded parameter is in separate memory.

        That is the case if this rank holds a shard of it, or nothing, or if it has the master weights' values.
        """
        member = self._whole.member_of(info)
        return member is None or member.span.place.is_part or id(info.param) in self._in_fp32

    def _broadcast_first(self, infos: Sequence[ParameterInfo]) -> None:
        """Broadcast rank 0's full values to all ranks. Each rank stores its shard."""
        all_ranks = self._runtime.collectives.all_ranks
        for info in infos:
            all_ranks.broadcast([info.param.detach()], "parameters")
            member = self._whole.member_of(info)
            if member is not None and self._is_copied(info):
                shard = member.flat(member.span.place.take(info.param.detach()))
                member.values.copy_(member.segment.rounded(shard))

    def _reshard(self, infos: Sequence[ParameterInfo]) -> None:
        """Restore this rank's shards of the parameters."""
        for info in infos:
            self._unsharded.discard(id(info.param))
            if not self._is_copied(info):
                continue
            self._in_fp32.discard(id(info.param))
            self._nodes.pop(id(info.param), None)
            self._runtime.structure.relocated.discard(id(info.param))
            if (member := self._whole.member_of(info)) is not None:
                set_data(info.param, member.within(member.segment.full))
                info.param.__class__ = member.unsharded_kind
            else:
                replace_data(info.param, torch.empty_like(info.param.data, device="meta"))
                info.param.__class__ = self._kinds[id(info.param)]

    def check_backward(self) -> None:
        """Check that no tensor-parallel parameter is unsharded, because its gradient would have another shape.

        Raises:
            PartitaError: there is such a parameter.
        """
        if self._nodes:
            raise PartitaError(
                "engine.backward inside engine.gathered(...): parameters that parallel.tensor splits are unsharded "
                "there, but gradients are sharded: call it after the block (a penalty may be computed inside)"
            )

    def _check_no_backward(self, had_gradients: bool) -> None:
        """Refuse a backward of the full model inside the block if the model is split into pipeline stages.

        The gradients of other stages' parameters would be lost. Those of this stage are dropped.

        Raises:
            PartitaError: a backward has run.
        """
        in_pipeline = self._runtime.collectives.mesh.shape.size("pipeline") > 1
        if in_pipeline and not had_gradients and self._runtime.reducer.holds_batch:
            self._updater.zero()
            for info in self._whole.infos:
                if self._whole.member_of(info) is None:
                    info.param.grad = None
            raise PartitaError(
                "a backward inside engine.gathered(...) under parallel.pipeline: this rank stores gradients only of "
                "its own stage; use torch.no_grad() there, and train with engine.train_batch"
            )

    def _parameters_of(self, items: tuple[nn.Module | nn.Parameter, ...]) -> set[int]:
        """Return the ids of the requested parameters."""
        known = {id(info.param) for info in self._whole.infos} | self._quantized
        wanted = set[int]()
        for item in items:
            if not isinstance(item, nn.Module | nn.Parameter):
                raise PartitaError(f"engine.gathered: expected modules and parameters; got a {type(item).__name__}")
            wanted.update(id(param) for param in (item.parameters() if isinstance(item, nn.Module) else (item,)))
        if not wanted <= known:
            raise PartitaError("engine.gathered: a given module or parameter does not belong to the engine's model")
        return wanted

    def _write_back(self, units: Sequence[Unit], names: AbstractSet[str]) -> None:
        """Broadcast rank 0's values, and store them as parameters and, for those in ``names``, as master weights."""
        for unit in units:
            for segment in unit.segments:
                equal_value_ranks(segment, self._runtime.collectives).broadcast([segment.full], "parameters")
                if not segment.planned.always_unsharded:
                    segment.stored.store(segment.part(segment.full, segment.plan.param_stored))
                if segment.master is not None and not segment.master_is_parameter:
                    segment.set_master_from_full(names)
                    self._store_exactly([m for m in unit.members if m.segment is segment and m.fqn in names])
        self._runtime.rewritten()

    def _store_exactly(self, members: Sequence[Member]) -> None:
        """Store parameters of one segment that were modified in fp32 in its master weights, without rounding."""
        if members := [member for member in members if id(member.param) in self._in_fp32]:
            members[0].segment.set_master({m.fqn: m.flat(m.span.place.take(m.param.detach())) for m in members})
