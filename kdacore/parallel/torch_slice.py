"""One rank's slice of a torch call: validated, agreed on with the other ranks, run, and joined to autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from array_api_compat import array_namespace

from kdacore import config, contract
from kdacore.arrays import adapter_of
from kdacore.arrays.torch.eager import TORCH
from kdacore.arrays.torch.modes import as_given
from kdacore.contract.values import check_values
from kdacore.dispatch import results
from kdacore.dispatch.plan import RECORDS, Plan, current_policy, is_plain
from kdacore.dispatch.selection import Policy
from kdacore.errors import ContractError, UnsupportedError
from kdacore.ops import OpDef
from kdacore.parallel import exchange
from kdacore.parallel.agreement import (
    BACKWARD,
    FORWARD,
    Description,
    Step,
    agree,
    description,
    report,
    told,
)
from kdacore.parallel.call_marks import code_of, mark_of, number_of
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
from kdacore.parallel.offsets import check_copies, check_offsets
from kdacore.parallel.progress import Turn
from kdacore.parallel.torch_ranks import TorchRanks, check_group
from kdacore.registry import REGISTRY
from kdacore.types import InputGrads, OutputGrads, Outputs, Request

_CHECKED = 1024
"""Offsets that a call remembers."""


class HostOffsets(NamedTuple):
    """Offsets of the whole row that were in host memory, and are valid."""

    values: tuple[int, ...] | None
    code: int


_NO_OFFSETS = HostOffsets(None, 0)


class SliceCall:
    """A call of one rank that was validated and given a backend."""

    def __init__(
        self,
        opdef: OpDef,
        request: Request,
        options: tuple[Any, ...],
        ranks: TorchRanks,
        plan: Plan,
        functions: Any,
        host_arguments: tuple[str, ...],
    ) -> None:
        self.opdef = opdef
        self.request = request
        """The request of the caller's arguments."""
        self.ranks = ranks
        self.plan = plan
        """The plan of the slice: its backend, and what results are held to."""
        self.description = description(opdef, request, options, "values" if plan.validate else "shapes")
        self.code = code_of(self.description)
        self.on_host = ranks.on_host(request.device.type)
        self.slice = Slice(plan.request, functions, ranks, self.on_host)
        self.known = False
        """The ranks have agreed on it."""
        self.gradients_checked = False
        self._long = ranks.size * request.T >= 2**31
        self._host_arguments = host_arguments
        """Offsets that are in host memory, by the name of the argument."""
        self._offsets: dict[Any, HostOffsets] = {}

    def agree(self, number: int, offsets: HostOffsets, device: torch.device, phase: str = FORWARD) -> None:
        """Compare a step with those of the other ranks, as far as that is wanted. ``device``: of the arrays.

        Raises:
            ContractError: they are not the same; on every rank.
            UnsupportedError: the first call of its kind while a CUDA graph is captured.
        """
        known = self.known or self.description in self.ranks.progress.agreed
        if not (known and self.on_host):
            if known and not config.get().cp_check_always:
                return
            if device.type == "cuda":
                self._refuse_capture()
            if not self.on_host:
                self._found_out_of_step(device)
        step = Step(phase, number, self.description, offsets.values)
        agree(self.ranks, step, self.code + offsets.code, known=known, on_host=self.on_host)
        self.known = True

    def _refuse_capture(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            message = (
                "cp: the first call of its kind, and every step under KDACORE_CP_CHECK=always, compares the ranks' "
                "arguments on the host; make it before the graph is captured"
            )
            raise UnsupportedError(self.opdef.name, message, {})

    def _found_out_of_step(self, device: torch.device) -> None:
        """An error for calls before, whose results were NaN: nobody could be told at the time."""
        flags = self.ranks.progress.in_step
        if device not in flags:
            with torch.inference_mode(False):  # it is written in any mode
                flags[device] = torch.ones((), dtype=torch.bool, device=device)
        elif not flags[device]:
            flags[device].fill_(True)
            got = "ranks that were at different calls; results since then are NaN"
            want = "the same calls on every rank, in one order (KDACORE_CP_CHECK=always names the first other one)"
            raise ContractError(self.opdef.name, "cp", got, want)

    def host_offsets(self, inputs: Any) -> HostOffsets:
        """The offsets that are in host memory, valid for the whole row.

        Raises:
            ContractError: they are not.
        """
        if not self._host_arguments:
            return _NO_OFFSETS
        given = []
        for name in self._host_arguments:
            x = getattr(inputs, name)
            own: Any = adapter_of(x)
            given.append((name, own.host_values(x)))
        key = tuple([(name, x.tobytes()) for name, x in given])
        found = self._offsets.get(key)
        if found is None:
            op, tokens = self.opdef.name, self.ranks.size * self.request.T
            for name, x in given:
                check_offsets(op, name, x, tokens)
            if len(given) > 1:
                check_copies(op, *[x for _, x in given])
            values = tuple(given[0][1].tolist())
            if len(self._offsets) >= _CHECKED:
                self._offsets.clear()
            found = self._offsets[key] = HostOffsets(values, code_of(values))
        return found

    def local(self, inputs: Any) -> tuple[Any, Rows | None]:
        """The slice's own arrays, and the place of its sequences."""
        cu, T, ranks = inputs.cu_seqlens, self.request.T, self.ranks
        if cu is None:
            return inputs._replace(initial_state=None), None
        wide = cu.long() if self._long else cu
        rows = Rows(wide, layout(wide, ranks.rank, T))
        return self._with_offsets(inputs, rows), rows

    def _with_offsets(self, inputs: Any, rows: Rows) -> Any:
        host = inputs.cu_seqlens_cpu
        if host is not None:
            host = self._local_copy(host)
        return inputs._replace(
            initial_state=None,
            cu_seqlens=rows.place.offsets.to(inputs.cu_seqlens.dtype),
            cu_seqlens_cpu=host,
        )

    def _local_copy(self, host: Any) -> Any:
        xp: Any = array_namespace(host)
        wide = xp.astype(host, xp.int64) if self._long else host
        return xp.astype(local_offsets(wide, self.ranks.rank, self.request.T), host.dtype, copy=False)

    def forward(self, inputs: Any, number: int, code: int) -> tuple[Outputs, Residuals, Rows | None]:
        """The results as the caller has them, and what the backward needs.

        Args:
            inputs: the caller's arrays.
            number: of the call on this rank.
            code: of its offsets.
        """
        local, rows = self.local(inputs)
        if self.plan.validate:
            self._check_values(inputs, local)
        outputs, residuals = exchange.forward(
            self.slice, local, rows, self._initial(inputs), mark_of(self.code + code, number)
        )
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
        """This rank's gradients, as the caller has them. ``rows``: those of the forward, else found again.

        Raises:
            ContractError: the ranks are not at the same step, or the group has been destroyed.
        """
        check_group(self.opdef.name, self.ranks)
        with Turn(self.ranks.progress) as alone:
            if self.on_host or config.get().cp_check_always:
                self._agree_on_backward(inputs, residuals, alone)
            return self._backward(inputs, residuals, do, dstate, rows)

    def _agree_on_backward(self, inputs: Any, residuals: Residuals, alone: bool) -> None:
        offsets, number = self.host_offsets(inputs), residuals.number
        if number is None:
            if residuals.marks.is_cuda:
                self._refuse_capture()
            number = number_of(self.code + offsets.code, float(residuals.marks[0]))
        if not alone:
            error = two_threads(self.opdef.name)
            step = Step(BACKWARD, number, self.description, offsets.values, error)
            report(self.ranks, step, on_host=self.on_host)
            raise error
        self.agree(number, offsets, inputs.q.device, BACKWARD)

    def _backward(self, inputs: Any, residuals: Residuals, do: Any, dstate: Any, rows: Any) -> InputGrads:
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
                    check_offsets(self.opdef.name, name, values, self.ranks.size * self.request.T)
            checked = local._replace(initial_state=inputs.initial_state)
            check_values(self.request, checked, self.plan.adapter, warn=False)
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


def two_threads(op: str) -> ContractError:
    """The error for a group that two threads of a process use at once."""
    want = "one thread at a time: two may meet those of other ranks in another order"
    return ContractError(op, "cp", "a group that another thread of this process is using", want)


def tell(ranks: TorchRanks, op: str, arrays: Any, number: int, error: Exception) -> None:
    """Tell the other ranks that this one cannot make a call, where they can be told."""
    kind = next((x.device.type for x in arrays if isinstance(x, torch.Tensor)), "cpu")
    step = Step(FORWARD, number, Description(op, ()), None, told(op, error))
    report(ranks, step, on_host=ranks.on_host(kind))


def begun(
    opdef: OpDef, inputs: Any, ranks: TorchRanks, alone: bool, make: Callable[[], SliceCall]
) -> tuple[SliceCall, int, int]:
    """Begin a call: counted, made, and agreed on with the other ranks. What is wrong with it they are told.

    Args:
        alone: no other thread is at a call with these ranks.
        make: the validated call, or its error.

    Returns:
        The call, its number, and the code of its offsets.
    """
    number = ranks.progress.begin()
    try:
        if not alone:
            raise two_threads(opdef.name)
        found = make()
        if found.request.needs_grad:
            TORCH.check_saved(found.request, inputs)
        offsets = found.host_offsets(inputs)
    except Exception as error:
        tell(ranks, opdef.name, inputs, number, error)
        raise
    found.agree(number, offsets, inputs.q.device)
    return found, number, offsets.code


def run(opdef: OpDef, inputs: Any, ranks: TorchRanks, make: Callable[[], SliceCall]) -> Outputs:
    """Make a call and run it, joined to autograd where it needs gradients. ``make``: as for :func:`begun`."""
    with Turn(ranks.progress) as alone:
        found, number, code = begun(opdef, inputs, ranks, alone, make)
        for records in RECORDS.get():
            records.append(found.plan.selection)
        with as_given(inputs.q):
            if found.request.needs_grad:
                # Here, as in kdacore.arrays.torch.eager.
                from kdacore.arrays.torch.autograd import apply
                from kdacore.parallel.torch_autograd import RanksStep

                return Outputs(*apply(RanksStep(found, number, code, inputs), inputs))
            return found.forward(inputs, number, code)[0]


_calls: dict[Any, SliceCall] = {}
_MOST = 1024
_PLAIN = frozenset({type(None), bool, int})
"""Types of options that are plain whatever their value."""
REGISTRY.on_change(_calls.clear)


def _are_plain(options: tuple[Any, ...], types: tuple[type, ...]) -> bool:
    """:func:`is_plain` of every option; asked of floats alone."""
    if _PLAIN.issuperset(types):
        return True
    others = [x for x, kind in zip(options, types, strict=True) if kind not in _PLAIN]
    return all(map(is_plain, others))


def slice_call(
    opdef: OpDef,
    inputs: Any,
    options: tuple[Any, ...],
    asked: Any,
    ranks: TorchRanks,
    needs_grad: bool | None = None,
) -> SliceCall:
    """The validated call of this rank, from a cache or made now.

    Args:
        options: without ``cp``.
        asked: what was asked of dispatch: a policy, or ``backend`` and the preference around the call.
        needs_grad: overrides what the tensors say.

    Raises:
        ContractError, UnsupportedError: as the call would.
    """
    # A host copy of the offsets may be a NumPy array.
    key = TORCH.key(inputs if inputs.cu_seqlens_cpu is None else inputs._replace(cu_seqlens_cpu=None))
    types = tuple(map(type, options))
    if key is not None and _are_plain(options, types):  # validation names the option; a key would keep it
        host = inputs.cu_seqlens_cpu
        spec = (
            None if host is None else (type(host), getattr(host, "shape", ()), getattr(host, "dtype", None))
        )
        # The ranks themselves, not their name: names come again.
        key = opdef.name, key, spec, options, types, asked, needs_grad, ranks
        try:
            found = _calls.get(key)
        except TypeError:  # something that is no name of a backend
            return _made(opdef, inputs, options, asked, ranks, needs_grad)
        if found is not None:
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
    check_arguments(opdef, inputs, options)
    policy = asked if isinstance(asked, Policy) else current_policy(opdef, asked[0])
    request, adapter = contract.build_request(opdef, inputs, options, needs_grad=needs_grad)
    problem = ranks.obstacle(request.device.type)
    if problem is not None:
        raise ContractError(opdef.name, "cp", *problem)
    chosen, functions = choose(slice_request(request), policy)
    on_host = tuple(
        [name for name in ("cu_seqlens", "cu_seqlens_cpu") if _in_host_memory(getattr(inputs, name))]
    )
    return SliceCall(opdef, request, options, ranks, plan_of(opdef, chosen, adapter), functions, on_host)


def _in_host_memory(x: Any) -> bool:
    return x is not None and (not isinstance(x, torch.Tensor) or x.device.type == "cpu")
