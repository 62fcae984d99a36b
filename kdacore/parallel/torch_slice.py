"""One rank's slice of a torch call: validated, agreed on with the other ranks, run, and joined to autograd."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from kdacore import config, contract
from kdacore.arrays import adapter_of
from kdacore.arrays.torch.eager import TORCH
from kdacore.arrays.torch.modes import as_given
from kdacore.contract.values import check_offsets, check_values
from kdacore.dispatch import results
from kdacore.dispatch.fast_path import is_plain
from kdacore.dispatch.plan import RECORDS, Plan, current_policy
from kdacore.dispatch.selection import Policy
from kdacore.errors import ContractError, UnsupportedError
from kdacore.ops import OpDef
from kdacore.parallel import exchange
from kdacore.parallel.agreement import agree, description, mark_of, report
from kdacore.parallel.exchange import Residuals, Rows, Slice
from kdacore.parallel.layout import layout, local_offsets
from kdacore.parallel.local_call import (
    check_arguments,
    choose,
    plan_of,
    slice_request,
    states_in,
    states_out,
)
from kdacore.parallel.torch_ranks import TorchRanks
from kdacore.registry import REGISTRY
from kdacore.types import InputGrads, OutputGrads, Outputs, Request


class SliceCall:
    """A call of one rank that was validated, agreed on with the other ranks, and given a backend."""

    def __init__(
        self,
        opdef: OpDef,
        request: Request,
        options: tuple[Any, ...],
        ranks: TorchRanks,
        plan: Plan,
        functions: Any,
    ) -> None:
        self.opdef = opdef
        self.request = request
        """Of the caller's arguments."""
        self.ranks = ranks
        self.plan = plan
        """Of the slice: its backend, and what results are held to."""
        self.description = description(opdef, request, options)
        self.slice = Slice(plan.request, functions, ranks, mark_of(self.description))
        self.gradients_checked = False

    def local(self, inputs: Any) -> tuple[Any, Rows | None]:
        """The slice's own arrays, and the place of its sequences."""
        cu, T, ranks = inputs.cu_seqlens, self.request.T, self.ranks
        if cu is None:
            return inputs._replace(initial_state=None), None
        wide = cu.long() if ranks.size * T >= 2**31 else cu
        rows = Rows(wide, layout(wide, ranks.rank, T))
        return self._with_offsets(inputs, rows), rows

    def _with_offsets(self, inputs: Any, rows: Rows) -> Any:
        host = inputs.cu_seqlens_cpu
        return inputs._replace(
            initial_state=None,
            cu_seqlens=rows.place.offsets.to(inputs.cu_seqlens.dtype),
            cu_seqlens_cpu=None if host is None else local_offsets(host, self.ranks.rank, self.request.T),
        )

    def forward(self, inputs: Any) -> tuple[Outputs, Residuals, Rows | None]:
        """The results as the caller has them, and what the backward needs."""
        local, rows = self.local(inputs)
        if self.plan.validate:
            self._check_values(inputs, local)
        outputs, residuals = exchange.forward(self.slice, local, rows, self._initial(inputs))
        if not self.plan.results_checked:
            results.check_results(self.plan, local, outputs)
            self.plan.results_checked = True
        final, checkpoints = (
            None if x is None else states_out(self.request, x).contiguous()
            for x in (outputs.final_state, outputs.checkpoints)
        )
        return Outputs(outputs.o, final, checkpoints), residuals, rows

    def backward(
        self, inputs: Any, residuals: Residuals, do: Any, dstate: Any, rows: Rows | None = None
    ) -> InputGrads:
        """This rank's gradients, as the caller has them. ``rows``: those of the forward, else found again."""
        if rows is None:
            local, rows = self.local(inputs)
        else:
            local = self._with_offsets(inputs, rows)
        dstate = states_in(self.request, dstate)
        initial, given = self._initial(inputs), OutputGrads(do, dstate)
        grads = exchange.backward(self.slice, local, rows, initial, residuals, given)
        if not self.gradients_checked:
            every = (True,) * len(InputGrads._fields)
            self.plan.check_gradients(
                local._replace(initial_state=inputs.q), grads, every
            )  # given, as all else
            self.gradients_checked = True
        if inputs.initial_state is None:
            return grads._replace(initial_state=None)
        return grads._replace(initial_state=states_out(self.request, grads.initial_state).contiguous())

    def _initial(self, inputs: Any) -> Any:
        states = states_in(self.request, inputs.initial_state)
        return None if states is None else states.contiguous()

    def _check_values(self, inputs: Any, local: Any) -> None:
        """The values of every rank, and that offsets are the same on all. What is wrong on one is an error on all."""
        problem = offsets = None
        try:
            for name in ("cu_seqlens", "cu_seqlens_cpu"):
                x = getattr(inputs, name)
                if x is not None:
                    own: Any = adapter_of(x)
                    values = own.host_values(x)
                    offsets = tuple(values.tolist())
                    check_offsets(
                        dataclasses.replace(self.request, T=self.ranks.size * self.request.T), name, values
                    )
            checked = local._replace(initial_state=inputs.initial_state)
            check_values(self.request, checked, self.plan.adapter)
        except ContractError as error:
            problem = error
        found = self.ranks.exchange((problem, offsets))
        for rank, (wrong, others) in enumerate(found):
            if wrong is not None:
                got = f"{wrong.got}, on rank {rank}"
                raise ContractError(self.opdef.name, wrong.argument, got, wrong.want)
            if others != found[0][1]:
                got = f"{list(found[0][1])} on rank 0, {list(others)} on rank {rank}"
                raise ContractError(self.opdef.name, "cu_seqlens", got, "the same on every rank of cp")


def run(found: SliceCall, inputs: Any) -> Outputs:
    """Run a call, joined to autograd where it needs gradients."""
    for records in RECORDS.get():
        records.append(found.plan.selection)
    with as_given(inputs.q):
        if found.request.needs_grad:
            from kdacore.parallel.torch_autograd import (
                RanksFunction,
            )  # here, as in kdacore.arrays.torch.eager

            return Outputs(*RanksFunction.apply(found, *inputs))
        return found.forward(inputs)[0]


_calls: dict[Any, SliceCall] = {}
_MOST = 1024
REGISTRY.on_change(_calls.clear)


def slice_call(
    opdef: OpDef,
    inputs: Any,
    options: tuple[Any, ...],
    asked: Any,
    ranks: TorchRanks,
    needs_grad: bool | None = None,
) -> SliceCall:
    """The validated call of this rank, from a cache or made now, and agreed on with the other ranks.

    Args:
        options: without ``cp``.
        asked: what was asked of dispatch: a policy, or ``backend`` and the preference around the call.
        needs_grad: overrides what the tensors say.

    Raises:
        ContractError, UnsupportedError: as the call would.
    """
    # A host copy of the offsets may be a NumPy array.
    key = TORCH.key(inputs._replace(cu_seqlens_cpu=None))
    if key is not None and all(
        is_plain(x) for x in options
    ):  # validation names the option; a key would keep it
        host = inputs.cu_seqlens_cpu
        spec = (
            None if host is None else (type(host), getattr(host, "shape", ()), getattr(host, "dtype", None))
        )
        # The ranks themselves, not their name: names come again.
        key = opdef.name, key, spec, options, tuple(map(type, options)), asked, needs_grad, ranks
        try:
            found = _calls.get(key)
        except TypeError:  # something that is no name of a backend
            return _made(opdef, inputs, options, asked, ranks, needs_grad)
        if found is not None:
            if config.get().cp_check_always:
                agree(ranks, found.description)
            return found
    found = _made(opdef, inputs, options, asked, ranks, needs_grad)
    if key is not None:
        if len(_calls) >= _MOST:
            _calls.clear()
        _calls[key] = found
    return found


def _made(
    opdef: OpDef,
    inputs: Any,
    options: tuple[Any, ...],
    asked: Any,
    ranks: TorchRanks,
    needs_grad: bool | None,
) -> SliceCall:
    try:
        check_arguments(opdef, inputs, options)
        policy = asked if isinstance(asked, Policy) else current_policy(opdef, asked[0])
        request, adapter = contract.build_request(opdef, inputs, options, needs_grad=needs_grad)
        problem = ranks.obstacle(request.device.type)
        if problem is not None:
            raise ContractError(opdef.name, "cp", *problem)
        chosen, functions = choose(slice_request(request), policy)
    except ContractError as error:
        report(ranks, opdef.name, error)
        raise
    found = SliceCall(opdef, request, options, ranks, plan_of(opdef, chosen, adapter), functions)
    if request.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        message = "cp: the first call of its kind compares the ranks' arguments; make it before the graph is captured"
        raise UnsupportedError(opdef.name, message, {})
    agree(ranks, found.description)
    return found
