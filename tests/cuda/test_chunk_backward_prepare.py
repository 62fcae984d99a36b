"""The backward's prepare kernel, emulated on the CPU, against its float64 model."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import chunk_backward_model as model
import emulator
import numpy as np
import pytest
import torch
from chunk_backward_calls import draw, filled, launch, worst
from cuda_calls import BOUNDED_MODEL, MODEL, request_of

from kdacore.types import ChunkInputs, Request
from kdacore_cuda.build.compiler import compile_kernel
from kdacore_cuda.forms.backward.kernels import prepare_kernel
from kdacore_cuda.request_encoding import has_bounded_gate

SAFE_LOG: dict[str, Any] = {"safe_gate": True, "lower_bound": -5.0}
BOUNDS = {
    "kg": 3e-3,
    "qg": 4e-3,
    **dict.fromkeys(("w", "u", "aqk", "inv"), 5e-3),
    "kg_low": 2e-5,
    "last": 1e-5,
    "rows": 1e-6,
}
"""Error allowed in a chunk, relative in the 2-norm: one rounding to bfloat16, two (fast gates may leave one number),
several, kg and kg_low together, sums of up to 64 float32 steps, none."""
SOFTPLUS_LAST = 1e-4
"""A step of the softplus is good to 1.4e-6 of itself, and their sum is an exponent."""


def errors(request: Request, inputs: ChunkInputs, got: dict[str, model.F64]) -> dict[str, float]:
    want, where = model.prepare(request, inputs), filled(request, inputs)
    found = {name: worst(got[name], want[name], where) for name in BOUNDS}
    found["kg_low"] = worst(got["kg"] + got["kg_low"], want["kg"], where)
    # Queries and keys, unit vectors here, may be nearly at right angles: a few of their average products count.
    typical_norms = [
        request.scale * (max(16, np.count_nonzero(want["aqk"][at])) / 128) ** 0.5 for at in where
    ]
    found["aqk"] = worst(got["aqk"], want["aqk"], where, typical_norms)
    # Below what float32 can hold.
    found["last"] = worst(got["last"], want["last"], where, [1e-30] * len(where))
    return found


def run(inputs: ChunkInputs, device: str = "cpu", **options: Any) -> dict[str, model.F64]:
    """What the kernel writes; slots that no sequence fills must stay as they were."""
    request = request_of("chunk_kda", inputs, **options)
    kernel = prepare_kernel(inputs.g.dtype == torch.float32, has_bounded_gate(request))
    got = launch(kernel, request, inputs, {}, dict.fromkeys(BOUNDS), device)
    used = np.zeros((model.num_slots(request), request.HV), bool)
    for at in filled(request, inputs):
        used[at] = True
    for x in got.values():
        assert np.isnan(x[~used]).all()
    return got


def check(inputs: ChunkInputs, device: str = "cpu", **options: Any) -> dict[str, model.F64]:
    request = request_of("chunk_kda", inputs, **options)
    got = run(inputs, device, **options)
    found = errors(request, inputs, got)
    bounds = BOUNDS if request.gate != "softplus" else BOUNDS | {"last": SOFTPLUS_LAST}
    assert all(found[name] < bound for name, bound in bounds.items()), str(found)
    return got


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("gate", ["random", "init", "fast", "slow", "spread"])
def test_gates(emulated: list[str], gate: str) -> None:
    raw = gate in ("random", "init")
    check(draw(150, gate=gate), **(BOUNDED_MODEL if raw else SAFE_LOG))
    assert len(emulated) == 1
    assert ("G_FLOAT0-BOUNDED1" if raw else "G_FLOAT1-BOUNDED1") in emulated[0]


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("gate", ["random", "init", "fast", "slow", "spread", "mixed"])
def test_gates_without_a_bound(emulated: list[str], gate: str) -> None:
    raw = gate in ("random", "init")
    check(draw(150, gate=gate), **(MODEL if raw else {}))
    assert ("G_FLOAT0-BOUNDED0" if raw else "G_FLOAT1-BOUNDED0") in emulated[0]


@pytest.mark.parametrize("lower_bound", [-8.0, -30.0])
def test_sigmoid_with_a_low_bound(emulated: list[str], lower_bound: float) -> None:
    check(draw(70), **MODEL, lower_bound=lower_bound)
    assert "BOUNDED0" in emulated[0]


def test_one_quarter_keeps_everything(emulated: list[str]) -> None:
    """Decays at the floor but for one quarter, which then neither over- nor underflows under the others' anchors."""
    for quarter in range(4):
        inputs = draw(64, gate="mixed")
        g = torch.full_like(inputs.g, -60.0)
        g[:, 16 * quarter : 16 * quarter + 16] = -1e-3
        check(inputs._replace(g=g))


@pytest.mark.every_other
@pytest.mark.parametrize("options", [BOUNDED_MODEL, MODEL])
@pytest.mark.parametrize("T", [1, 15, 16, 17, 31, 32, 33, 48, 49, 63, 64, 65])
def test_lengths(emulated: list[str], T: int, options: dict[str, Any]) -> None:
    check(draw(T, B=2), **options)


@pytest.mark.parametrize("options", [BOUNDED_MODEL, MODEL])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_packs(emulated: list[str], index: torch.dtype, options: dict[str, Any]) -> None:
    lengths = [0, 1, 31, 32, 0, 33, 63, 64, 65, 0]
    cu = torch.tensor(np.cumsum([0, *lengths]), dtype=index)
    check(draw(sum(lengths), cu_seqlens=cu), **options)


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("options", [BOUNDED_MODEL, MODEL])
@pytest.mark.parametrize(("H", "HV"), [(1, 2), (2, 4), (3, 3)])
def test_heads(emulated: list[str], H: int, HV: int, options: dict[str, Any]) -> None:
    check(draw(70, H, HV, B=2), **options)


@pytest.mark.parametrize("options", [BOUNDED_MODEL, MODEL])
@pytest.mark.parametrize("gate", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("beta", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(emulated: list[str], gate: torch.dtype, beta: torch.dtype, options: dict[str, Any]) -> None:
    inputs = draw(40)
    assert inputs.dt_bias is not None
    bias = inputs.dt_bias.to(beta)
    check(inputs._replace(g=inputs.g.to(gate), beta=inputs.beta.to(beta), dt_bias=bias), **options)


@pytest.mark.parametrize("options", [SAFE_LOG, {}])
@pytest.mark.parametrize("gate", ["slow", "fast", "spread"])
def test_bfloat16_decays(emulated: list[str], gate: str, options: dict[str, Any]) -> None:
    inputs = draw(70, gate=gate)
    check(inputs._replace(g=inputs.g.bfloat16()), **options)


@pytest.mark.parametrize(
    "change",
    [
        {"use_qk_l2norm_in_kernel": False},
        {"use_beta_sigmoid_in_kernel": False},
        {"allow_neg_eigval": True},
        {"scale": 0.3},
        {"lower_bound": -1.0},
    ],
)
def test_options(emulated: list[str], change: dict[str, Any]) -> None:
    inputs = draw(70)
    unit = torch.nn.functional.normalize(inputs.k.float(), dim=-1).bfloat16()
    check(inputs._replace(k=unit, beta=inputs.beta.sigmoid()), **BOUNDED_MODEL | change)


def test_without_parameters(emulated: list[str]) -> None:
    inputs = draw(70)
    check(inputs._replace(A_log=None, dt_bias=None), **BOUNDED_MODEL)


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("options", [BOUNDED_MODEL, MODEL])
@pytest.mark.parametrize("packed", [False, True])
def test_strides(emulated: list[str], packed: bool, options: dict[str, Any]) -> None:
    """Views of wider arrays; rows past the end of all of them are NaN."""
    inputs = draw(70, 2, 4, cu_seqlens=torch.tensor([0, 3, 70]) if packed else None)

    def wide(x: torch.Tensor) -> torch.Tensor:
        buffer = torch.full(
            (1, 80, x.shape[2] + 1, *(3 * d for d in x.shape[3:])), float("nan"), dtype=x.dtype
        )
        view = buffer[:, :70, : x.shape[2]]
        if x.dim() == 4:
            view = view[..., 128:256]
        return view.copy_(x)

    views = {name: wide(getattr(inputs, name)) for name in ("q", "k", "v", "g", "beta")}
    got = check(inputs._replace(**views), **options)
    for name, x in run(inputs, **options).items():
        assert np.array_equal(got[name], x, equal_nan=True), name


@pytest.mark.parametrize("options", [BOUNDED_MODEL, MODEL])
def test_order_of_threads(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    inputs, once = draw(100), emulator.run
    want = run(inputs, **options)
    for seed in range(1, 6):
        monkeypatch.setattr(emulator, "run", partial(once, seed=seed))
        got = run(inputs, **options)
        assert all(np.array_equal(got[name], want[name]) for name in BOUNDS), seed


@pytest.mark.parametrize("options", [SAFE_LOG, {}])
@pytest.mark.parametrize("beta", [0.5, 1.0])
def test_keys_nearly_alike(emulated: list[str], beta: float, options: dict[str, Any]) -> None:
    """Keys within 1e-2 of one another, slow gates: what the inverse cancels is of the size of the keys themselves."""
    inputs = draw(64, gate="slow")
    near = inputs.k[:, :1].float() + 1e-2 * torch.randn(inputs.k.shape) / 128**0.5
    unit = torch.nn.functional.normalize(near, dim=-1).bfloat16()
    inputs = inputs._replace(k=unit, beta=torch.full_like(inputs.beta, beta))
    request = request_of("chunk_kda", inputs, **options)
    got = run(inputs, **options)
    found = errors(request, inputs, got)
    assert found["inv"] < 2e-3
    # Rows of w are differences of keys, each rounded: what is lost is relative to the keys.
    want = model.prepare(request, inputs)["w"]
    found["w"] = worst(got["w"], want, [(0, 0)], [beta * 8.0])
    assert all(found[name] < bound for name, bound in BOUNDS.items()), found


@pytest.mark.parametrize("options", [BOUNDED_MODEL, MODEL])
@pytest.mark.parametrize("token", [5, 15, 16, 31, 32, 47])
def test_later_tokens_change_nothing(emulated: list[str], token: int, options: dict[str, Any]) -> None:
    inputs = draw(64)
    other = draw(64, seed=1)
    mixed = {}
    for name in ("q", "k", "v", "g", "beta"):
        x = getattr(inputs, name).clone()
        x[:, token + 1 :] = getattr(other, name)[:, token + 1 :]
        mixed[name] = x
    a, b = run(inputs, **options), run(inputs._replace(**mixed), **options)
    seen = slice(token + 1)
    for name in ("qg", "w", "aqk", "inv"):
        assert np.array_equal(a[name][..., seen, :], b[name][..., seen, :]), name
    for name in ("u", "rows"):
        assert np.array_equal(a[name][..., seen], b[name][..., seen]), name
    assert not np.array_equal(a["kg"], b["kg"])
    assert not np.array_equal(a["kg_low"], b["kg_low"])


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("float_gate", [False, True])
def test_no_spills(float_gate: bool, bounded: bool) -> None:
    """And registers for three blocks a multiprocessor, two without a bound."""
    log = compile_kernel(prepare_kernel(float_gate, bounded).source, "sm_90a").log
    spills, registers = re.search(r"(\d+) bytes spill stores", log), re.search(r"Used (\d+) registers", log)
    assert spills is not None, log
    assert registers is not None, log
    assert int(spills[1]) == 0
    assert int(registers[1]) <= (80 if bounded else 128)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("gate", ["random", "fast", "slow"])
def test_on_the_device(gate: str, bounded: bool, packed: bool) -> None:
    """More blocks than run at once, and the same bits every time."""
    options = (BOUNDED_MODEL if bounded else MODEL) if gate == "random" else SAFE_LOG if bounded else {}
    if packed:
        cu = torch.tensor([0, 0, 1, 63, 64, 65, 130, 900], dtype=torch.int32)
        inputs = draw(900, 8, 32, gate=gate, cu_seqlens=cu)
    else:
        inputs = draw(1000, 16, 32, gate=gate)
    first, again = check(inputs, "cuda", **options), run(inputs, "cuda", **options)
    for name, x in first.items():
        assert np.array_equal(x, again[name], equal_nan=True), name
