"""Full tensors by name, gathered from all ranks.

Every method is a collective: call it on all ranks.
"""

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from partita.comm.collective_errors import find_memory_shortfall, shared_errors
from partita.comm.collectives import Collectives
from partita.comm.several_axes import SeveralAxes
from partita.errors import PartitaError
from partita.inspection.modules import extra_states, further_names, owning_ranks, persistent_buffers, state_dict_names
from partita.layout.parameters import ParameterInfo, find_all_parameters
from partita.memory.accelerator import is_host
from partita.memory.capacity import free_now
from partita.optim.states import View, flattened
from partita.optim.updater import Updater
from partita.sharding.assemble import has_distinct_shards
from partita.sharding.interpreter import Interpreter
from partita.sharding.parameter import Member, replace_data
from partita.sharding.runtime import Runtime
from partita.sharding.segment import Segment
from partita.sharding.unit import Unit
from partita.table.residence import Tier
from partita.table.steps import steps


class FullTensors:
    """Parameters, gradients and optimizer states of a running engine, unsharded, after all pending updates.

    Attributes: ``shares``: True if ranks hold different shards of parameters; ``infos``: every parameter of the
    model once.
    """

    def __init__(self, runtime: Runtime, updater: Updater) -> None:
        self._runtime = runtime
        self._updater = updater
        self._collectives: Collectives = runtime.collectives
        self._all_ranks = runtime.collectives.all_ranks
        self.shares = has_distinct_shards(runtime.units, runtime.collectives)
        self.is_first = runtime.collectives.mesh.is_first_replica()
        self.infos = find_all_parameters(runtime.model)
        self._named = {fqn: info for info in self.infos for fqn in info.fqns}
        self._members = {id(member.param): member for _, member in runtime.members()}
        self._unit_of = {id(member.param): unit for unit, member in runtime.members()}

    def member_of(self, info: ParameterInfo) -> Member | None:
        """Return this rank's shard of a parameter; None if it has none."""
        return self._members.get(id(info.param))

    def _find(self, name: str) -> tuple[ParameterInfo, Member | None]:
        """Return the parameter called ``name``, and this rank's shard of it.

        Raises:
            PartitaError: there is no such parameter; the message suggests the nearest name.
        """
        if name not in self._named:
            raise _unknown("parameter", name, self._named)
        return self._named[name], self.member_of(self._named[name])

    def gradient(self, name: str, scale: float) -> Tensor | None:
        """Return the mean gradient of a parameter so far, in fp32; None if no rank has one.

        It is divided by the loss ``scale``.
        """
        self._updater.wait_for_updates()
        info, member = self._find(name)
        reducer = self._runtime.reducer
        bucket = None if member is None else reducer.bucket_of(member)
        local = None
        if member is not None and bucket is not None:
            reducer.join()
            reducer.drain()
            is_first = self._is_first_replica(member)
            reduced = bucket.gradient_term(member, self._collectives.mesh.device, is_first=is_first)
            flat = self._group_of(member).all_reduce(
                torch.cat([reduced, reduced.new_tensor([id(member) in bucket.arrivals.used])])
            )
            factor = 1.0 if bucket.has_all_copies else bucket.copies.factor
            if flat[-1] > 0:
                local = self._shaped(member, flat[:-1].div_(scale).mul_(factor))
        if not self.shares:
            return local
        if not any(self._all_ranks.exchange_objects(local is not None, "engine.gradient")):
            return None
        is_counted = bucket is not None and (bucket.layout.is_saved or not bucket.has_all_copies)
        return self._full(info, local if is_counted else None, torch.float32)

    def optimizer_state(self, name: str) -> dict[str, Tensor]:
        """Return the full optimizer state of a parameter, in the parameter's shape; empty before its first update.

        Items of containers have keys such as 'Q[0]'.
        """
        self._updater.wait_for_updates()
        info, member = self._find(name)
        view = None if member is None else self._updater.views.of(member.param)
        state = flattened(self._updater.states.of(view)) if view is not None else {}
        numbers = {key: value for key, value in state.items() if isinstance(value, Tensor | int | float)}
        own = {key: _elementwise_dtype(view, value) for key, value in numbers.items()}
        dtypes = dict[str, torch.dtype | None]()
        for of_rank in self._all_ranks.exchange_objects(own, "engine.optimizer_state"):
            dtypes = of_rank | dtypes
        found = dict[str, Tensor]()
        for key, dtype in dtypes.items():
            if dtype is None:
                number = state.get(key)
                on_host = number.cpu() if isinstance(number, Tensor) else number  # other ranks lack this rank's device
                every = self._all_ranks.exchange_objects(on_host, "engine.optimizer_state")
                value = torch.as_tensor(next(item for item in every if item is not None)).clone()
                found[key] = value.to(number.device) if isinstance(number, Tensor) else value
                continue
            local = None if view is None else self._gather_state(view, dtype, state.get(key))
            if self.shares:
                is_first = member is not None and member.segment.is_first_copy
                found[key] = self._full(info, local if is_first else None, dtype)
            else:
                assert local is not None
                found[key] = local
        return found

    def _gather_state(self, view: View, dtype: torch.dtype, value: object) -> Tensor:
        """Return a state of the group's shard of a parameter, gathered over the group."""
        member = view.member
        values = torch.zeros(member.span.num_elements, dtype=dtype, device=self._collectives.mesh.device)
        is_whole = member.segment.has_full_master
        if isinstance(value, Tensor) and (
            self._group_of(member).is_first if is_whole else self._is_first_replica(member)
        ):
            values[view.start : view.start + view.num_elements] = member.flat(value) if is_whole else value
        return self._shaped(member, self._group_of(member).all_reduce(values))

    def _group_of(self, member: Member) -> SeveralAxes:
        """Return the group of ranks that sum the gradients of the same shard of a parameter."""
        plan = member.segment.plan
        return SeveralAxes(self._collectives, plan.hops(plan.summed_axes, member.segment.mesh)[::-1])

    def _is_first_replica(self, member: Member) -> bool:
        """Return True if this rank's shard is the first of identical shards in the group."""
        return self._collectives.mesh.index(member.segment.plan.gradient_replica_axes) == 0

    def _shaped(self, member: Member, flat: Tensor) -> Tensor:
        return member.shaped(flat.clone()).contiguous()

    def _full(self, info: ParameterInfo, local: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the full tensor, assembled from the groups' shards.

        ``local`` is this group's shard; None if another group has the same.
        """
        member = self.member_of(info)
        shape = self.shape_of(info)
        full = torch.zeros(shape, dtype=dtype, device=self._collectives.mesh.device)
        if member is not None and local is not None and self._group_of(member).is_first:
            member.span.place.put(local, full)
        self._all_ranks.all_reduce(full.view(-1))
        return full

    def shape_of(self, info: ParameterInfo) -> tuple[int, ...]:
        """Return the shape of the full parameter."""
        member = self.member_of(info)
        return tuple(info.param.shape) if member is None else member.span.place.shape

    # ---------------------------------------------------------------- parameters

    def weights(
        self, *, master: bool, trainable: bool = False, only: AbstractSet[int] | None = None
    ) -> Iterator[tuple[ParameterInfo, Tensor]]:
        """Yield every parameter once, unsharded, unit by unit. Each one is valid until the next.

        Args:
            master: yield the values that the optimizer updates, if they have a higher precision than the compute
            values. trainable: only the parameters that require gradients; units without any are not gathered. only: ids
            of the requested parameters (None: all).
        """
        self._updater.take_written()
        for of_unit in self._by_unit():
            wanted = [(h, dtypes) for h, dtypes in of_unit if h.param.requires_grad or not trainable]
            wanted = [pair for pair in wanted if only is None or id(pair[0].param) in only]
            members = [member for info, _ in wanted if (member := self.member_of(info)) is not None]
            units = {id(unit): unit for member in members for unit in [self._unit_of[id(member.param)]]}
            sharded = [unit for unit in units.values() if not unit.always_unsharded]
            self._runtime.unsharder.hold(sharded)
            segments = {id(member.segment): member.segment for member in members if master}
            separate = {key: self._master_of(s) for key, s in segments.items() if not s.master_is_parameter}
            try:
                for info, dtypes in wanted:
                    if (member := self.member_of(info)) is None:
                        yield info, self._full(info, None, dtypes[master])
                        continue
                    full = separate.get(id(member.segment))
                    local = member.within(member.segment.full if full is None else full)
                    if self._is_split(member):
                        counted = local if member.segment.is_first_copy else None
                        yield info, self._full(info, counted, dtypes[master])
                    else:
                        yield info, local
            finally:
                self._runtime.unsharder.release_hold(sharded)

    def _is_split(self, member: Member) -> bool:
        """Return True if some rank does not hold the full parameter; the same on all ranks."""
        return self.shares and (member.span.place.is_part or not self._runtime.runs_all)

    def _by_unit(self) -> list[list[tuple[ParameterInfo, tuple[torch.dtype, torch.dtype]]]]:
        """Return the parameters of each unit of each pipeline stage, with their dtypes in compute and in the update.

        They are gathered unit by unit, in the same order on all ranks.
        """
        own = [tuple((member.fqn, _dtypes(member)) for member in unit.members) for unit in self._runtime.units]
        every = [own] if self._runtime.runs_all else self._all_ranks.exchange_objects(own, "full parameters")
        known, units = set[str](), []
        for unit in dict.fromkeys(unit for of_rank in every for unit in of_rank):
            units.append([(self._named[fqn], dtypes) for fqn, dtypes in unit if fqn not in known])
            known.update(fqn for fqn, _ in unit)
        return units

    def raise_on_all_ranks(self, problem: str | None) -> None:
        """Raise a ``problem`` of any rank on every rank."""
        for found in self._all_ranks.exchange_objects(problem, "full parameters"):
            if found is not None:
                raise PartitaError(found)

    def copies(self, dtypes: Mapping[str, torch.dtype] | None = None) -> list[tuple[ParameterInfo, Tensor]]:
        """Return a separate copy of every parameter, unsharded, on this rank's device.

        Args:
            dtypes: the dtypes of the copies, by name, which then have the values of the master weights; None: the
                compute dtypes, and the values in compute.

        Raises:
            PartitaError: on every rank, if one has too little memory; the message says how much is needed and free.
        """
        device, all_ranks = self._collectives.mesh.device, self._collectives.all_ranks
        exact, wanted = dtypes is not None, dict(dtypes or {})
        own = {info.fqns[0]: wanted.get(info.fqns[0], info.param.dtype) for info in self.infos}
        needed = sum(math.prod(self.shape_of(info)) * own[info.fqns[0]].itemsize for info in self.infos)
        needed += max((_gathered_bytes(unit, exact=exact) for unit in self._runtime.units), default=0)
        call = "engine.close(whole=True)"
        short = find_memory_shortfall(needed, free_now(device), all_ranks, call, shared=is_host(device))
        if short is not None:
            raise PartitaError(
                f"{call}: {short.memory} needs {short.needed} bytes for full parameters and has {short.free} bytes "
                "free; the engine stays open: engine.export or engine.save writes the parameters unit by unit, and "
                "engine.close() leaves them sharded"
            )
        found, error = list[tuple[ParameterInfo, Tensor]](), None
        for info, weight in self.weights(master=exact):
            dtype = wanted.get(info.fqns[0], weight.dtype)
            try:
                if error is None:
                    copied = weight.detach().clone() if dtype == weight.dtype else weight.detach().to(dtype)
                    found.append((info, copied))
            except RuntimeError as raised:  # out of memory nevertheless: the other ranks need this rank for every unit
                error = raised
        with shared_errors(all_ranks):
            if error is not None:
                raise error
        return found

    def leave(self, copies: Sequence[tuple[ParameterInfo, Tensor]]) -> None:
        """Detach parameters from their units, and give them these full values."""
        for info, values in copies:
            if (member := self.member_of(info)) is not None:
                member.leave(values)
            else:
                info.param.__class__ = nn.Parameter
                replace_data(info.param, values)

    def _master_of(self, segment: Segment) -> Tensor | None:
        """Return the unsharded master weights of an unsharded segment; None if it has none."""
        if segment.master is None:
            return None
        device = self._collectives.mesh.device
        full = shard = segment.master.state.load().to(device)
        if not segment.has_full_master:
            full, sharded = shard.new_empty(segment.layout.padded), replace(segment.plan.master, tier=Tier.DEVICE)
            ops = steps(sharded, replace(sharded, shard_axes=()), segment.mesh)
            Interpreter(self._collectives).run(ops, shard, full)
        return segment.master.joined(segment.full, full)

    def buffers_and_extra_states(self) -> dict[str, Any]:
        """Return the buffers of the model's state dict, on the host, and its modules' extra states.

        They come from the ranks that run the modules, and are complete on the first rank.
        """
        model, rank = self._runtime.model, self._collectives.mesh.rank
        rank_of = owning_ranks(model, self._all_ranks, shared=self._runtime.runs_all)
        own: dict[str, Any] = {
            name: buffer.detach().cpu().clone() for name, buffer in persistent_buffers(model) if rank_of(name) == rank
        }
        own |= {name: module.get_extra_state() for name, module in extra_states(model) if rank_of(name) == rank}
        if self._runtime.runs_all:
            return own
        every = self._all_ranks.exchange_objects(own, "full parameters")
        return {name: value for of_rank in every for name, value in of_rank.items()}

    def state_dict(self, *, trainable: bool = False, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Return the model's state dict with master weights, unsharded, on the host of rank 0; empty on other ranks.

        Quantized parameters are not in it, because modules save more than one tensor for each.

        Args:
            trainable: only the parameters that require gradients.
            names: only the entries with these names (None: all), the same on every rank.

        Raises:
            PartitaError: the model has no entry with one of these names; the message suggests the nearest name.
        """
        values, known = dict[str, Any](), list(state_dict_names(self._runtime.model))
        requested = None if names is None else frozenset(names)
        for name in sorted((requested or frozenset()).difference(known)):
            raise _unknown("parameter or buffer", name, known)
        only = None if requested is None else {id(h.param) for h in self.infos if not requested.isdisjoint(h.fqns)}
        for info, weight in self.weights(master=True, trainable=trainable, only=only):
            if self.is_first:
                full = weight.detach().cpu().clone().contiguous()
                values.update((fqn, full) for fqn in info.fqns)
        model = self._runtime.model
        if not trainable:
            entries = self.buffers_and_extra_states()
            values.update(entries if self.is_first else {})
            values.update((name, values[first]) for name, first in further_names(model) if first in values)
        wanted = values.keys() if requested is None else requested & values.keys()
        return {name: values[name] for name in known if name in wanted}


def _gathered_bytes(unit: Unit, *, exact: bool) -> int:
    """Return the memory for a unit's full parameters, and with ``exact`` for those of its master weights."""
    masters = [s for s in unit.segments if exact and s.master is not None and not s.master_is_parameter]
    num_bytes = 0 if unit.always_unsharded else unit.planned.num_bytes
    return num_bytes + sum(segment.layout.padded * torch.float32.itemsize for segment in masters)


def _unknown(what: str, name: str, known: Iterable[str]) -> PartitaError:
    near = difflib.get_close_matches(name, known, 1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return PartitaError(f"the model has no {what} '{name}'{hint}")


def _elementwise_dtype(view: View | None, value: object) -> torch.dtype | None:
    """Return the dtype of a state tensor with one element per element of the parameter; None for any other state."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return None
    if view is not None and view.is_full_at_owner:
        return None
    is_whole = view is not None and view.member.segment.has_full_master
    return None if is_whole and view is not None and value.shape != view.member.shape else value.dtype


def _dtypes(member: Member) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of a parameter's values in compute and in the update."""
    segment = member.segment
    has_fp32_master = segment.master is not None and not segment.master_is_parameter
    return segment.dtype, torch.float32 if has_fp32_master else segment.dtype
