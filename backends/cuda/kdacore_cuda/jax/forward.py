"""Every op on JAX arrays: the launches of the torch calls, made by XLA's programs through the handler."""

from __future__ import annotations

from functools import partial

from kdacore.types import (
    ChunkInputs,
    CommitInputs,
    CommitOutputs,
    IntraInputs,
    IntraOutputs,
    Outputs,
    RecomputeInputs,
    RecomputeOutputs,
    RecurrentInputs,
    Request,
)
from kdacore_cuda import fitted_head_dims
from kdacore_cuda.forms import chunk_launches
from kdacore_cuda.forms.commit import launches as commit_launches
from kdacore_cuda.forms.gated_delta import launches as gated_delta_launches
from kdacore_cuda.forms.launches import Launches
from kdacore_cuda.forms.recurrent import launches as recurrent_launches
from kdacore_cuda.forms.recurrent.record_numbers import PARTS
from kdacore_cuda.forms.stages import launches as stage_launches
from kdacore_cuda.jax.batching import Arrays, new_name, run_batched
from kdacore_cuda.jax.launch import Form, given_arrays, make_launches
from kdacore_cuda.jax.partitioning import run_partitioned


@fitted_head_dims.forward
def forward(request: Request, inputs: ChunkInputs | RecurrentInputs) -> Outputs:
    """Whole ops, chunked or recurrent, on traced arrays of CUDA devices.

    Arguments, results and errors as of the op's ``forward`` in :mod:`kdacore_cuda.forms`; where states are written in
    place, the pool as it then is.
    """
    found = run_batched(partial(run_partitioned, _run), request, given_arrays(request, inputs))
    final = found.get("final_state") if request.output_final_state else None
    records = tuple([found[new_name(name)] for name in PARTS if request.has(name)])
    return Outputs(found["o"], final, found.get("checkpoints"), written=records)


def commit_records(request: Request, inputs: CommitInputs) -> CommitOutputs:
    """As :func:`kdacore_cuda.forms.commit.forward.commit_records`, on traced arrays: the pools as they then are.
    Arrays that plain ``jit`` splits over devices are brought together where there are windows: their channels are those
    of several kinds of heads."""
    run = _run_commit if request.has("conv_state") else partial(run_partitioned, _run_commit)
    found = run_batched(run, request, given_arrays(request, inputs))
    return CommitOutputs(found["final_state"], found.get(new_name("conv_state")))


def _run_commit(r: Request, arrays: Arrays, groups: int) -> Arrays:
    in_place = {"final_state": "initial_state"}
    if r.has("conv_state"):
        in_place[new_name("conv_state")] = "conv_state"
    found = make_launches(r, commit_launches.launches_of(r), arrays, {}, in_place)
    return {name: found[name] for name in in_place}


def chunk_intra(request: Request, inputs: IntraInputs) -> IntraOutputs:
    """As :func:`kdacore_cuda.forms.stages.forward.chunk_intra`, on traced arrays."""
    return IntraOutputs(**run_batched(_run_stage, request, given_arrays(request, inputs)))


def recompute_w_u(request: Request, inputs: RecomputeInputs) -> RecomputeOutputs:
    """As :func:`kdacore_cuda.forms.stages.forward.recompute_w_u`, on traced arrays."""
    return RecomputeOutputs(**run_batched(_run_stage, request, given_arrays(request, inputs)))


def _run(r: Request, arrays: Arrays, groups: int) -> Arrays:
    results: dict[str, Form] = {"o": ((r.B, r.T, r.HV, r.V), r.dtype)}
    in_place = {"final_state": r.written_pool} if r.inplace_state else {}
    in_place |= {new_name(name): name for name in PARTS if r.has(name)}
    if r.output_final_state and not in_place:
        results["final_state"] = r.state_shape, r.state_dtype
    cleared = []
    if r.checkpoint_every:
        results["checkpoints"] = r.checkpoint_shape, r.state_dtype
        if r.packed or r.pool_size:  # no kernel writes the unused rows
            cleared.append("checkpoints")
    found = make_launches(r, _launches_of(r), arrays, results, in_place, cleared)
    return {name: found[name] for name in (*results, *in_place)}


def _launches_of(r: Request) -> Launches:
    if r.op.startswith("fused_recurrent"):
        return recurrent_launches.launches_of(r)
    return gated_delta_launches.launches_of(r) if r.scalar_gate else chunk_launches.launches_of(r)


def _run_stage(r: Request, arrays: Arrays, groups: int) -> Arrays:
    widths = {"Aqk": r.chunk_size, "Akk": r.chunk_size, "w": r.K, "u": r.V, "kg": r.K, "qg": r.K}
    results: dict[str, Form] = {
        name: ((r.B, r.T, r.HV, widths[name]), r.dtype)
        for name in stage_launches.ARRAYS[r.op].results
        if name != "qg" or "q" in arrays
    }
    return make_launches(r, stage_launches.launches_of(r), arrays, results)
