"""Whole tensors by name, put together from what each rank holds. Every method is a collective: call it on all ranks."""

import difflib
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from partita.comm.collectives import Collectives
from partita.comm.together import lack_of_memory, together
from partita.errors import PartitaError
from partita.inspection.modules import extra_states, persistent_buffers, state_dict_names
from partita.memory.accelerator import is_host
from partita.memory.capacity import free_now
from partita.optim.updater import Updater
from partita.planner.parameters import find_quantized
from partita.sharding.runtime import Runtime
from partita.sharding.unit import Member, Segment, Unit


class Whole:
    """Parameters, gradients and optimizer states of a running engine, as one process would hold them, once the updates
    under way are done.
    """

    def __init__(self, runtime: Runtime, updater: Updater) -> None:
        self._runtime, self._updater = runtime, updater
        self._collectives: Collectives = runtime.collectives
        self._group = runtime.gradient_group
        self.num_gathered = 0  # blocks of gathered that are open
        self.is_first = runtime.collectives.mesh.is_first_replica()
        self._quantized = {id(holding.param) for holding in find_quantized(runtime.model)}  # which are always whole
        self._named = {fqn: member for _, member in runtime.members() for fqn in member.holding.fqns}

    @property
    def members(self) -> list[Member]:
        """Every parameter once."""
        return [member for _, member in self._runtime.members()]

    def member(self, name: str) -> Member:
        """The parameter called ``name``.

        Raises:
            PartitaError: there is none; names the nearest.
        """
        if name not in self._named:
            near = difflib.get_close_matches(name, self._named, 1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise PartitaError(f"the model has no parameter '{name}'{hint}")
        return self._named[name]

    def gradient(self, name: str, scale: float) -> Tensor | None:
        """The mean gradient of a parameter so far, divided by the loss ``scale``, in fp32; None if no rank has one."""
        self._updater.wait_for_updates()
        member = self.member(name)
        reducer = self._runtime.reducer
        bucket = reducer.bucket_of(member)
        if bucket is None:
            return None
        reducer.join()
        reducer.drain()
        row = self._runtime.part_index if self._runtime.is_first_of_part else None
        held = bucket.held_of(member, row, self._collectives.mesh.device)
        flat = self._group.all_reduce(torch.cat([held, held.new_tensor([id(member) in bucket.used])]))
        return self._shaped(member, flat[:-1].div_(scale)) if flat[-1] > 0 else None

    def optimizer_state(self, name: str) -> dict[str, Tensor]:
        """The optimizer's state of a parameter, tensors whole and in the parameter's shape; empty before its first
        update.
        """
        self._updater.wait_for_updates()
        member = self.member(name)
        view = self._updater.views.of(member.param)
        state = self._updater.states.of(view) if view is not None else {}
        own = {key: _spread_dtype(value) for key, value in state.items()}
        dtypes = dict[str, torch.dtype | None]()
        for of_rank in self._group.exchange_objects(own, "engine.optimizer_state"):
            dtypes = of_rank | dtypes
        return {key: self._gather_state(member, key, dtype, state.get(key)) for key, dtype in dtypes.items()}

    def _gather_state(self, member: Member, key: str, dtype: torch.dtype | None, value: object) -> Tensor:
        if dtype is None:
            every = self._group.exchange_objects(value, "engine.optimizer_state")
            return torch.as_tensor(next(item for item in every if item is not None)).clone()
        view = self._updater.views.of(member.param)
        assert view is not None
        if isinstance(value, Tensor) and member.segment.holds_whole_master and value.shape != member.shape:
            return value.clone()
        values = torch.zeros(member.span.num_elements, dtype=dtype, device=self._collectives.mesh.device)
        is_whole = member.segment.holds_whole_master
        if isinstance(value, Tensor) and (self._group.index == 0 if is_whole else self._runtime.is_first_of_part):
            values[view.start : view.start + view.num_elements] = member.flat(value) if is_whole else value
        return self._shaped(member, self._group.all_reduce(values))

    def _shaped(self, member: Member, flat: Tensor) -> Tensor:
        return self._global(member, member.shaped(flat.clone()).contiguous())

    def _global(self, member: Member, local: Tensor) -> Tensor:
        """The global tensor of which ``local`` is this rank's box, and that of all whose gradients it sums with."""
        if not member.span.is_part:
            return local
        whole = local.new_zeros(member.span.global_shape)
        if self._group.index == 0:
            whole[member.span.box.slices] = local
        self._collectives.all_ranks.all_reduce(whole.view(-1))
        return whole

    # ---------------------------------------------------------------- parameters

    @contextmanager
    def gathered(self, items: tuple[nn.Module | nn.Parameter, ...], modify: bool) -> Iterator[None]:
        """Hold the units of the given modules and parameters whole (see :meth:`Engine.gathered`)."""
        self._updater.take_written()
        wanted = self._parameters_of(items)
        units = [unit for unit in self._runtime.units if any(id(m.param) in wanted for m in unit.members)]
        sharded = [unit for unit in units if not unit.rests_whole]
        self._runtime.residency.hold(sharded)
        self.num_gathered += 1
        members = [member for unit in units for member in unit.members]
        before = [member.param._version for member in members]
        try:
            yield
            for member, version in zip(members, before, strict=True):
                if member.param._version != version and not (modify and id(member.param) in wanted):
                    raise PartitaError(
                        f"parameter '{member.fqn}' was written inside engine.gathered(...) without being given to it "
                        "with modify=True: the ranks and the optimizer would not learn of it"
                    )
            if modify:
                self._write_back(units, {member.fqn for member in members if id(member.param) in wanted})
        finally:
            self.num_gathered -= 1
            self._runtime.residency.let_go(sharded)

    def _parameters_of(self, items: tuple[nn.Module | nn.Parameter, ...]) -> set[int]:
        """Ids of the parameters that are asked for."""
        known = {id(member.param) for _, member in self._runtime.members()} | self._quantized
        wanted = set[int]()
        for item in items:
            if not isinstance(item, nn.Module | nn.Parameter):
                raise PartitaError(f"engine.gathered: expected modules and parameters; got a {type(item).__name__}")
            wanted.update(id(param) for param in (item.parameters() if isinstance(item, nn.Module) else (item,)))
        if not wanted <= known:
            raise PartitaError("engine.gathered: a given module or parameter is no part of the engine's model")
        return wanted

    def raise_together(self, problem: str | None) -> None:
        """Raise on every rank what any rank met."""
        for found in self._collectives.all_ranks.exchange_objects(problem, "whole parameters"):
            if found is not None:
                raise PartitaError(found)

    def _write_back(self, units: Sequence[Unit], names: AbstractSet[str]) -> None:
        """Make rank 0's values those of all ranks, of what rests, and, of the parameters named, of the optimizer."""
        for unit in units:
            self._group.broadcast([segment.full for segment in unit.segments], "parameters")
            for segment in unit.segments:
                if not segment.planned.rests_whole:
                    segment.rest.store(segment.part(segment.full, segment.plan.param_rest))
                if segment.master is not None and not segment.master_is_parameter:
                    segment.master.set(segment.part(segment.full, segment.plan.master), names)
        self._runtime.updated()

    def weights(self, *, master: bool, trainable: bool = False) -> Iterator[tuple[Member, Tensor]]:
        """Every parameter once, whole, unit by unit: valid until the next one is asked for.

        Args:
            master: the values that the optimizer updates, where they have more digits than those in compute.
            trainable: only the parameters that require gradients; units without any are not gathered.
        """
        self._updater.take_written()
        for unit in self._runtime.units:
            wanted = [member for member in unit.members if member.param.requires_grad or not trainable]
            if not wanted:
                continue
            sharded = [] if unit.rests_whole else [unit]
            self._runtime.residency.hold(sharded)
            segments = {id(member.segment): member.segment for member in wanted if master}
            separate = {key: self._master_of(s) for key, s in segments.items() if not s.master_is_parameter}
            try:
                for member in wanted:
                    full = separate.get(id(member.segment))
                    if full is None:
                        full = member.segment.full
                    local = member.shaped(full[member.span.offset :][: member.span.num_elements])
                    yield member, self._global(member, local)
            finally:
                self._runtime.residency.let_go(sharded)

    def copies(self) -> list[tuple[Member, Tensor]]:
        """Every parameter whole, as it computes, in memory of its own on this rank's device.

        Raises:
            PartitaError: on every rank: the memory of one does not suffice; says how much is needed and free.
        """
        device, all_ranks = self._collectives.mesh.device, self._collectives.all_ranks
        needed = sum(m.param.numel() * m.segment.dtype.itemsize for _, m in self._runtime.members())
        needed += max((unit.planned.num_bytes for unit in self._runtime.units if not unit.rests_whole), default=0)
        call = "engine.close(whole=True)"
        short = lack_of_memory(needed, free_now(device), all_ranks, call, shared=is_host(device))
        if short is not None:
            raise PartitaError(
                f"{call}: {short.memory} needs {short.needed} bytes for whole parameters and has {short.free} bytes "
                "free; the engine stays open: engine.export or engine.save writes the parameters without holding them "
                "whole, engine.close() leaves them as they are"
            )
        found, error = list[tuple[Member, Tensor]](), None
        for member, weight in self.weights(master=False):
            try:
                found += [(member, weight.detach().clone())] if error is None else []
            except RuntimeError as raised:  # out of memory after all: the other ranks need this one for every unit
                error = raised
        with together(all_ranks):
            if error is not None:
                raise error
        return found

    def _master_of(self, segment: Segment) -> Tensor | None:
        """The whole master weights of a segment that is whole."""
        if segment.master is None:
            return None
        device = self._collectives.mesh.device
        whole = part = segment.master.state.load().to(device)
        if not segment.holds_whole_master:
            whole = part.new_empty(segment.layout.padded)
            self._collectives.group(segment.plan.master.shard_axes).all_gather(whole, part).wait()
        return segment.master.joined(segment.full, whole)

    def state_dict(self, *, trainable: bool = False) -> dict[str, Any]:
        """The model's state dict with master weights, whole, on the host of rank 0; empty on the others. Quantized
        parameters, of which modules save more than a tensor, are not in it.

        Args:
            trainable: only the parameters that require gradients.
        """
        values = dict[str, Any]()
        for member, weight in self.weights(master=True, trainable=trainable):
            if self.is_first:
                whole = weight.detach().cpu().clone().contiguous()
                values.update((fqn, whole) for fqn in member.holding.fqns)
        model = self._runtime.model
        if self.is_first and not trainable:
            values.update((name, buffer.detach().cpu().clone()) for name, buffer in persistent_buffers(model))
            values.update((name, module.get_extra_state()) for name, module in extra_states(model))
        return {name: values[name] for name in state_dict_names(model) if name in values}


def _spread_dtype(value: object) -> torch.dtype | None:
    """The dtype of a state that is a tensor with an element for each of the parameter's; None of any other."""
    return value.dtype if isinstance(value, Tensor) and value.dim() > 0 else None
