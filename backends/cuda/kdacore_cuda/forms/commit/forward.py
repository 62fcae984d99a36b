"""``commit_records`` on torch tensors: a launch for states, and one for convolution windows where there are any."""

from __future__ import annotations

from kdacore.types import CommitInputs, CommitOutputs, Request
from kdacore_cuda.forms.commit.launches import WINDOW_STRIDES, WINDOWS, launches_of
from kdacore_cuda.forms.decode.launches import STRIDED
from kdacore_cuda.forms.launches import ROWS
from kdacore_cuda.forms.recurrent.record_numbers import PARTS, record_strides
from kdacore_cuda.kernel_parameters import RECORD_STRIDES
from kdacore_cuda.runtime import torch_launch
from kdacore_cuda.runtime.plan_cache import PlanCache
from kdacore_cuda.runtime.program import Program
from kdacore_cuda.runtime.torch_arguments import contiguous, contiguous_rows


def commit_records(request: Request, inputs: CommitInputs) -> CommitOutputs:
    """Apply records to states of a pool, and move the convolution's windows there.

    Args:
        request: K = V = 64 or 128, float32 records.
        inputs: its arrays, of any strides.

    Returns: the pools, written in place.

    Raises:
        BackendBuildError: a kernel had to be compiled and could not be.
        DriverError: the driver refused a launch.
    """
    r, pool = request, inputs.initial_state
    parts = [getattr(inputs, name) for name in PARTS]
    states, row = contiguous_rows(pool, r.HV * r.K * r.V)
    reads = contiguous(inputs.state_indices)
    arrays = dict(zip(PARTS, parts, strict=True)) | {
        "initial_state": states,
        "final_state": states,
        "state_indices": reads,
        "write_indices": reads if inputs.write_indices is None else contiguous(inputs.write_indices),
        "record_indices": contiguous(inputs.record_indices),
        "num_replayed": contiguous(inputs.num_replayed),
    }
    arrays |= {name: getattr(inputs, name) for name in WINDOWS}
    if inputs.conv_indices is not None:
        arrays["conv_indices"] = contiguous(inputs.conv_indices)
    program, numbers, arch = _packed(r, row, record_strides(r, parts), _window_strides(inputs))
    torch_launch.run(program, numbers, arch, pool, arrays)
    if states is not pool:
        pool.copy_(states)
    return CommitOutputs(pool, inputs.conv_state)


def _window_strides(inputs: CommitInputs) -> tuple[int, ...]:
    """The numbers :data:`kdacore_cuda.forms.commit.launches.WINDOW_STRIDES`; none without windows."""
    if inputs.conv_state is None:
        return ()
    given = {name: getattr(inputs, name) for name in WINDOWS}
    absent = {name: (0,) * len(STRIDED[name]) for name in WINDOWS}
    return tuple([s for name, x in given.items() for s in (absent[name] if x is None else x.stride())])


def _pack(
    r: Request, row: int, strides: tuple[int, ...], windows: tuple[int, ...]
) -> tuple[Program, bytes, str]:
    made = launches_of(r)
    lying = dict(zip((*ROWS, *RECORD_STRIDES), (row, row, *strides), strict=True))
    lying |= zip(WINDOW_STRIDES, windows, strict=bool(windows))
    return made.program, made.program.pack_numbers(made.numbers | lying), made.arch


_packed = PlanCache(_pack)
"""Program, numbers and architecture, by the strides of the arrays."""
