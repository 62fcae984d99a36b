"""The launches of the fused form as data: one, and one behind it for checkpoints between steps."""

from __future__ import annotations

from collections.abc import Iterable

from kdacore.types import Request
from kdacore_cuda.architectures import has_hopper_kernel
from kdacore_cuda.fitted_head_dims import kernel_request
from kdacore_cuda.forms.choice_on_device import chosen
from kdacore_cuda.forms.chunk_numbers import call_numbers, g_type, gates_of
from kdacore_cuda.forms.fused.kernels import TAIL_BLOCKS, checkpoint_tail_kernel, chunk_forward_kernel
from kdacore_cuda.forms.fused.workspace import workspace_bytes
from kdacore_cuda.forms.launches import FORWARD_ARRAYS, Launches, arguments_of, made_once
from kdacore_cuda.kernel_parameters import CHECKPOINT_TAIL, CHUNK_FORWARD, STEP_TOKENS, TYPES
from kdacore_cuda.runtime.device_figures import arch_of
from kdacore_cuda.runtime.kernel import Kernel
from kdacore_cuda.runtime.program import LAUNCH, NOTHING, Launch, Program, Value


def launches_of(r: Request) -> Launches:
    """The launches of a call that this form serves."""
    arch, clusters = arch_of(r), chosen(r).clusters
    if clusters is None:
        raise ValueError(f"{r.op}: another form serves this call")
    made = kernel_request(r)  # with V > 128: each block of 128 values is a value head
    if narrow := made is not r:  # the other kernels, of the same bits, are for K = V = 128
        clusters = clusters._replace(preparing=0, many_short=False, spacing=0)
    numbers = call_numbers(r) | {"clusters": clusters.resident, "blocks": clusters.blocks(made.N * made.HV)}
    numbers["spacing"] = clusters.spacing
    numbers["HV"] = made.HV
    used = workspace_bytes(made, clusters)
    has_workspace = used > 0
    if has_tail := bool(r.checkpoint_count) and has_hopper_kernel(r.K, arch):
        used = -(-used // 256) * 256
        numbers |= {
            "states_at": used,
            "tail_blocks": r.checkpoint_count * r.HV * TAIL_BLOCKS,
            "step": STEP_TOKENS,
            "g_type": TYPES[g_type(r)],
        }
        used += 4 * r.checkpoint_count * r.HV * r.K * r.V
    float_gate, bounded = gates_of(r)
    more = clusters.many_short, clusters.preparing > 0
    kernel = chunk_forward_kernel(made.K, clusters.size, bounded, float_gate, arch, *more, narrow)
    program = _program(numbers, kernel, has_workspace, has_tail)
    return Launches(program, numbers, arch, {"workspace": used})


@made_once
def _program(numbers: Iterable[str], kernel: Kernel, has_workspace: bool, has_tail: bool) -> Program:
    fields: dict[str, Value] = {**arguments_of(CHUNK_FORWARD), "launch": LAUNCH}
    if not has_workspace:  # the buffer is for the states before checkpoints alone
        fields["workspace"] = NOTHING
    steps = [Launch("fused", kernel, "blocks", fields)]
    if has_tail:
        fields["mark_states"] = "workspace", "states_at"
        tail = arguments_of(CHECKPOINT_TAIL) | {"mark_states": fields["mark_states"]}
        steps.append(Launch("tail", checkpoint_tail_kernel(), "tail_blocks", tail))
    return Program(steps, FORWARD_ARRAYS, tuple(numbers))
