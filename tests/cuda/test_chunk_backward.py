"""The hand-written backward: its model against the oracle, and each kernel, emulated on the CPU, against its model."""

from __future__ import annotations

import chunk_backward_model as model
import numpy as np
import pytest
import torch
from chunk_backward_calls import draw
from cuda_calls import BOUNDED_MODEL, MODEL, Draw, error, request_of
from single_launches import launch_kernel, plan_of

from kdacore.types import ChunkInputs, OutputGrads
from kdacore_cuda.forms.backward import gradients as chunk_backward
from kdacore_cuda.forms.backward import kernels
from kdacore_cuda.kernel_parameters import SUM_SCALE, TYPES
from kdacore_cuda.runtime import torch_launch
from kdacore_reference.oracle import oracle_backward


@pytest.mark.every_other
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("case", ["dense", "packed", "grouped", "log", "softplus", "mixed"])
def test_model_is_the_oracle(case: str, v_first: bool) -> None:
    unbounded = case in ("softplus", "mixed")  # decays are cut off where nothing is left
    options = {
        **(MODEL if unbounded else BOUNDED_MODEL),
        "output_final_state": True,
        "state_v_first": v_first,
    }
    if case == "packed":
        cu = torch.tensor([0, 3, 3, 70, 150], dtype=torch.int32)
        inputs = draw(cu_seqlens=cu, initial_state=torch.randn(4, 1, 128, 128))
    elif case == "softplus":
        inputs = draw(70, gate="random", initial_state=torch.randn(1, 1, 128, 128))
    elif case in ("log", "mixed"):
        options |= {
            "use_gate_in_kernel": False,
            "use_qk_l2norm_in_kernel": False,
            "use_beta_sigmoid_in_kernel": False,
        }
        inputs = draw(70, gate="spread" if case == "log" else case)
    else:
        inputs = draw(
            70,
            1,
            2 if case == "grouped" else 1,
            B=2,
            initial_state=torch.randn(2, 2 if case == "grouped" else 1, 128, 128),
        )
    request = request_of("chunk_kda", inputs, **options)
    d = Draw(7)
    do, d_final = d.normal(*inputs.v.shape), d.normal(request.N, request.HV, 128, 128)
    want = oracle_backward(request, inputs, OutputGrads(do, d_final))
    work = model.prepare(request, inputs)
    scanned, d_h0 = model.scan(request, inputs, work, do, d_final)
    got = model.grads(request, inputs, work | scanned, do)
    bound = 2e-4 if unbounded else 1e-9
    if request.H == request.HV:
        assert error(got["dq"], want.q) < bound
        assert error(got["dk"], want.k) < bound
    for mine, exact in (("dv", want.v), ("dg", want.g), ("dbeta", want.beta)):
        assert error(got[mine], exact) < bound
    if want.A_log is not None:
        assert error(np.nansum(got["dA_part"], 0), want.A_log) < bound
        dbias = np.nansum(got["dbias_part"], 0).reshape(np.shape(want.dt_bias))
        assert error(dbias, want.dt_bias) < bound
    if d_h0 is not None:
        assert error(d_h0, want.initial_state) < bound


def test_images_are_what_shared_memory_holds() -> None:
    x = np.arange(64 * 128, dtype=np.float64).reshape(64, 128) % 251
    images = model.to_images(x)
    assert np.array_equal(model.from_images(images, 64, 128), x)
    row, piece, column = 13, 5, 3  # of the second half of the columns
    at = 64 * 64 + row * 64 + ((piece ^ (row & 7)) << 3) + column
    assert float(images[at]) == x[row, 64 + 8 * piece + column]


@pytest.mark.parametrize("norm", [True, False])
def test_sums_over_chunks_and_over_value_heads(emulated: list[str], norm: bool) -> None:
    """Against NumPy; chunks that add nothing change no bit."""
    options = {**BOUNDED_MODEL, "use_qk_l2norm_in_kernel": norm}
    inputs = draw(70, 2, 4, B=2)
    request = request_of("chunk_kda", inputs, **options)
    plan = plan_of(request)
    d = Draw(3)
    parts = {
        "dA_part": d.normal(plan.slots, 4, dtype=torch.float32),
        "dbias_part": d.normal(plan.slots, 4, 128, dtype=torch.float32),
    }
    A, bias = sum_chunks(inputs, parts)
    whole = {name: (x.double() / SUM_SCALE).sum(0) for name, x in parts.items()}
    np.testing.assert_allclose(A, whole["dA_part"], rtol=1e-5, atol=1e-5 / SUM_SCALE)
    np.testing.assert_allclose(bias, whole["dbias_part"], rtol=1e-5, atol=1e-5 / SUM_SCALE)
    more = {name: torch.cat([x, torch.zeros_like(x)]) for name, x in parts.items()}
    again = sum_chunks(inputs, more)
    assert torch.equal(A, again[0]) and torch.equal(bias, again[1])

    part = d.normal(2, 70, 4, 128, dtype=torch.float32)
    got = torch.empty_like(inputs.k)
    x = inputs.k
    strides = dict(zip(("x_sb", "x_st", "x_sh"), x.stride(), strict=False))
    numbers = {name: plan.numbers[name] for name in ("T", "H", "HV", "flags")} | {"rows": 2 * 70 * 2}
    launch_kernel(
        *(kernels.groups_kernel(), -(-2 * 70 * 2 // 8), x, {"x": x, "part": part, "out": got}),
        **strides,
        **numbers,
    )
    want, k = part.double().numpy().reshape(2, 70, 2, 2, 128).sum(3), inputs.k.double().numpy()
    if norm:
        r = 1 / np.sqrt((k * k).sum(-1) + 1e-6)
        want = model.through_norm(k * r[..., None], r, want)
    assert error(got, want) < 3e-3
    assert len(emulated) == 3


def sum_chunks(inputs: ChunkInputs, parts: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of A_log and dt_bias from the sums over each chunk."""
    assert inputs.A_log is not None and inputs.dt_bias is not None
    A, bias = torch.empty_like(inputs.A_log), torch.empty_like(inputs.dt_bias)
    slots, HV = parts["dA_part"].shape
    types = {"A_type": TYPES["float32"], "bias_type": TYPES["float32"]}
    arrays = parts | {"d_A": A, "d_bias": bias}
    launch_kernel(kernels.sums_kernel(), HV, A, arrays, slots=slots, HV=HV, **types)
    return A, bias


@pytest.mark.parametrize("heads", [2, 3])
def test_the_benchmark_times_what_a_call_launches(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, heads: int
) -> None:
    """Few and many heads take different scans."""
    from benchmarks import backward_launches

    monkeypatch.setattr(torch_launch, "multiprocessors", lambda index: 8)
    inputs = draw(70, heads, heads)
    request = request_of("chunk_kda", inputs, **BOUNDED_MODEL)
    grads = OutputGrads(torch.zeros(inputs.v.shape, dtype=torch.bfloat16), None)
    chunk_backward.backward(request, inputs, (), grads)
    called, emulated[:] = [*emulated], []
    backward_launches.cuda_steps(request, inputs, grads)["all"]()
    assert emulated[-len(called) :] == called
    assert f"WARPGROUPS{1 if heads == 2 else 2}" in called[1]
