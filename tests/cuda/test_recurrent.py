"""The recurrent kernel, emulated on the CPU, against the float64 oracle."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from cuda_calls import BOUNDED_MODEL, MODEL, O_BOUND, Draw, error, oracle, request_of
from server_model import expected

from kdacore.types import Outputs, RecurrentInputs, Request
from kdacore_cuda.forms.recurrent import forward as recurrent
from kdacore_cuda.runtime import torch_launch


def draw(B: int, T: int, H: int = 1, HV: int = 2, K: int = 64, *, gate: str = "random", **more: Any) -> Any:
    d = Draw(seed=B + T, **{k: more.pop(k) for k in ("dtype",) if k in more})
    raw = gate in ("random", "init")
    make = d.normal if raw else d.unit
    fields = {
        "q": make(B, T, H, K),
        "k": make(B, T, H, K),
        "v": d.normal(B, T, HV, K),
        "beta": d.normal(B, T, HV) if raw else d.uniform(B, T, HV),
        **d.gate(gate, B, T, HV, K),
        **more,
    }
    return RecurrentInputs(**fields)


def check(inputs: RecurrentInputs, bound: float = O_BOUND, **options: Any) -> Outputs:
    given = None if inputs.initial_state is None else inputs.initial_state.clone()
    request = request_of("fused_recurrent_kda", inputs, **options)
    want = oracle(request, inputs._replace(initial_state=given))
    got = recurrent.forward(request, inputs)
    assert error(got.o, want.o) < bound
    if request.output_final_state:
        assert error(got.final_state, want.final_state) < bound
    else:
        assert got.final_state is None
    check_repeated(request, inputs, given, got)
    return got


def check_repeated(
    request: Request, inputs: RecurrentInputs, given: torch.Tensor | None, got: Outputs
) -> None:
    """The fast path gives the same bits, in the results and in the pool."""
    step = recurrent.make_fast_call(request, inputs)
    if step is None:
        return
    pool, o = inputs.initial_state, got.o.clone()
    written = None if pool is None else pool.clone()
    state = None if got.final_state is None else got.final_state.clone()
    if pool is not None:
        pool.copy_(given)
    again = step(tuple(inputs))
    if again is None:
        return
    assert torch.equal(again[0], o)
    assert (again[1] is pool) == (got.final_state is pool)
    assert state is None if again[1] is None else torch.equal(again[1], state)
    assert pool is None or torch.equal(pool, written)


@pytest.mark.every_other
@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layouts_and_state_dtypes(
    emulated: list[str], K: int, v_first: bool, state_dtype: torch.dtype
) -> None:
    state = torch.randn(2, 2, K, K).to(state_dtype)
    check(
        draw(2, 1, K=K, initial_state=state), output_final_state=True, state_v_first=v_first, **BOUNDED_MODEL
    )
    assert len(emulated) == 2 and emulated[0] == emulated[1]  # and the shorter way


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(emulated: list[str], dtype: torch.dtype) -> None:
    bound = 2e-5 if dtype == torch.float32 else O_BOUND
    check(draw(1, 3, dtype=dtype, K=128), bound, output_final_state=True, **BOUNDED_MODEL)


@pytest.mark.parametrize("gate", ["random", "init", "slow", "fast", "mixed"])
def test_gates(emulated: list[str], gate: str) -> None:
    options = MODEL if gate in ("random", "init") else {}
    check(draw(1, 20, gate=gate), output_final_state=True, **options)


def test_more_tokens_than_one_block_and_packed(emulated: list[str]) -> None:
    for index in (torch.int32, torch.int64):
        cu = torch.tensor([0, 17, 17, 18, 40], dtype=index)
        inputs = draw(1, 40, cu_seqlens=cu, initial_state=torch.randn(4, 2, 64, 64))
        check(inputs, output_final_state=True, **BOUNDED_MODEL)


def test_negative_eigenvalues_and_scale(emulated: list[str]) -> None:
    check(draw(1, 4), scale=0.3, allow_neg_eigval=True, **MODEL)


def mode_of(name: str) -> int:
    return int(name[-1])


@pytest.mark.first_cases(4)
@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_mode_gives_the_same_bits(
    emulated: list[str], K: int, v_first: bool, state_dtype: torch.dtype
) -> None:
    pool = torch.randn(3, 4, K, K).to(state_dtype)
    several = draw(2, 3, H=2, HV=4, K=K, initial_state=pool, state_indices=torch.tensor([2, 0]))
    tokens = {name: getattr(several, name)[:, :1] for name in ("q", "k", "v", "g", "beta")}
    one = several._replace(**{name: x.contiguous() for name, x in tokens.items()})
    strided = several._replace(**tokens)
    first = [check(x, state_v_first=v_first, **BOUNDED_MODEL).o[:, 0] for x in (one, several, strided)]
    assert [mode_of(name) for name in emulated] == [2, 2, 1, 1, 0, 0]  # each by the shorter way too
    assert torch.equal(first[0], first[1])
    assert torch.equal(first[0], first[2])


@pytest.mark.parametrize("v_first", [False, True])
def test_several_tokens_are_as_many_calls(emulated: list[str], v_first: bool) -> None:
    """Bit for bit, outputs and state, whatever kernel serves one token and whatever several."""
    several = draw(2, 5, H=2, HV=4, K=128, initial_state=torch.randn(2, 4, 128, 128))
    want = check(several, state_v_first=v_first, output_final_state=True, **BOUNDED_MODEL)
    state = several.initial_state
    for t in range(5):
        tokens = {n: getattr(several, n)[:, t : t + 1].contiguous() for n in ("q", "k", "v", "g", "beta")}
        one = several._replace(**tokens, initial_state=state, state_indices=torch.tensor([0, 1]))
        got = check(one, state_v_first=v_first, output_final_state=True, **BOUNDED_MODEL)
        assert torch.equal(got.o[:, 0], want.o[:, t])
        state = got.final_state
    assert torch.equal(state, want.final_state)
    assert {mode_of(name) for name in emulated} == {1, 2}


@pytest.mark.parametrize("name", ["g", "beta", "dt_bias", "no pool", "int32"])
def test_one_token_of_other_types(emulated: list[str], name: str) -> None:
    inputs = draw(2, 1, K=128, initial_state=torch.randn(2, 2, 128, 128), state_indices=torch.tensor([1, 0]))
    if name == "no pool":
        inputs = inputs._replace(state_indices=None)
    elif name == "int32":
        inputs = inputs._replace(state_indices=inputs.state_indices.int())
    else:
        x = getattr(inputs, name)
        inputs = inputs._replace(**{name: x.bfloat16() if name == "dt_bias" else x.float()})
    check(inputs, output_final_state=True, **BOUNDED_MODEL)
    assert mode_of(emulated[0]) == (2 if name == "int32" else 1)


def test_unaligned_bias_and_output(emulated: list[str]) -> None:
    inputs = draw(2, 1, initial_state=torch.randn(2, 2, 64, 64), state_indices=torch.tensor([1, 0]))
    bias = torch.empty(2 * 64 + 1)[1:].view(2, 64).copy_(inputs.dt_bias)
    out = torch.empty(2 * 2 * 64 + 1, dtype=torch.bfloat16)[1:].view(2, 1, 2, 64)
    got = check(inputs._replace(dt_bias=bias, out=out), **BOUNDED_MODEL)
    assert got.o is out


def test_pool_in_place_touches_only_named_rows(emulated: list[str]) -> None:
    pool = torch.randn(5, 2, 64, 64)
    before = pool.clone()
    inputs = draw(3, 2, initial_state=pool, state_indices=torch.tensor([4, -1, 1]))
    request = request_of(
        "fused_recurrent_kda", inputs, inplace_state=True, output_final_state=True, **BOUNDED_MODEL
    )
    want = expected(request, inputs._replace(initial_state=before), BOUNDED_MODEL)
    got = recurrent.forward(request, inputs)
    assert got.final_state is pool
    assert error(got.o, want.o) < O_BOUND
    assert not got.o[1].any()
    for row in (0, 2, 3):
        assert torch.equal(pool[row], before[row])
    assert error(pool, want.pool) < O_BOUND


def test_pool_rows_may_have_any_stride(emulated: list[str]) -> None:
    base = torch.full((5, 3, 2, 64, 64), float("nan"))
    base[:, 1] = torch.randn(5, 2, 64, 64)
    pool = base[:, 1]
    inputs = draw(2, 1, initial_state=pool, state_indices=torch.tensor([3, 0], dtype=torch.int32))
    check(inputs, output_final_state=True, **BOUNDED_MODEL)


@pytest.mark.every_other
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pool_rows_may_start_anywhere(emulated: list[str], v_first: bool, state_dtype: torch.dtype) -> None:
    row = 2 * 64 * 64
    memory = torch.full((4, 3 * row + 5), float("nan"), dtype=state_dtype)
    memory[:, 5 : 5 + row] = torch.randn(4, row)
    pool = memory[:, 5 : 5 + row].view(4, 2, 64, 64)
    before, surroundings = pool.clone(), memory[:, 5 + row :].clone()
    inputs = draw(2, 1, initial_state=pool, state_indices=torch.tensor([3, 0]))
    options = BOUNDED_MODEL | {"inplace_state": True, "output_final_state": True, "state_v_first": v_first}
    request = request_of("fused_recurrent_kda", inputs, **options)
    want = oracle(request, inputs._replace(initial_state=before))
    got = recurrent.forward(request, inputs)
    assert mode_of(emulated[0]) == 0
    assert error(got.o, want.o) < O_BOUND
    assert error(pool, want.final_state) < O_BOUND
    assert torch.equal(pool[1:3], before[1:3])
    assert torch.equal(memory[:, 5 + row :].isnan(), surroundings.isnan())


@pytest.mark.parametrize(("inplace", "v_first"), [(False, False), (True, False), (True, True)])
def test_accepted_tokens(emulated: list[str], inplace: bool, v_first: bool) -> None:
    pool = torch.randn(9, 2, 64, 64)
    before = pool.clone()
    inputs = draw(
        3,
        2,
        initial_state=pool,
        state_indices=torch.tensor([[8, 1, 0], [2, -1, 5], [3, 4, 6]]),
        num_accepted_tokens=torch.tensor([3, 0, 1]),
    )
    request = request_of(
        "fused_recurrent_kda",
        inputs,
        inplace_state=inplace,
        output_final_state=True,
        state_v_first=v_first,
        **BOUNDED_MODEL,
    )
    want = oracle(request, inputs._replace(initial_state=before))
    got = recurrent.forward(request, inputs)
    assert error(got.o, want.o) < O_BOUND
    assert error(got.final_state, want.final_state) < O_BOUND
    if not inplace:
        assert torch.equal(pool, before)


def test_read_only(emulated: list[str]) -> None:
    pool = torch.randn(2, 2, 64, 64)
    before = pool.clone()
    inputs = draw(2, 4, initial_state=pool, state_indices=torch.tensor([1, 0]))
    check(inputs, read_only_state=True, **BOUNDED_MODEL)
    assert torch.equal(pool, before)


def test_out_and_strided_inputs(emulated: list[str]) -> None:
    inputs = draw(2, 3)
    wide = torch.randn(2, 3, 1, 3 * 64).to(torch.bfloat16)
    out = torch.empty(2, 2, 3, 64, dtype=torch.bfloat16).transpose(1, 2)
    inputs = inputs._replace(q=wide[..., :64], k=wide[..., 64:128], out=out)
    got = check(inputs, **BOUNDED_MODEL)
    assert got.o is out


def test_scalar_gate(emulated: list[str]) -> None:
    d = Draw(3)
    inputs = RecurrentInputs(
        q=d.normal(1, 3, 1, 64),
        k=d.normal(1, 3, 1, 64),
        v=d.normal(1, 3, 2, 64),
        g=d.normal(1, 3, 2),
        beta=d.normal(1, 3, 2),
        A_log=d.uniform(2),
        dt_bias=d.normal(2),
    )
    request = request_of("fused_recurrent_gated_delta_rule", inputs, output_final_state=True, **MODEL)
    want = oracle(request, inputs)
    got = recurrent.forward(request, inputs)
    assert error(got.o, want.o) < O_BOUND
    assert error(got.final_state, want.final_state) < O_BOUND


def one_gate_a_head(g: torch.dtype = torch.bfloat16, beta: torch.dtype = torch.bfloat16) -> RecurrentInputs:
    """A single-token step of the gated delta rule."""
    d = Draw(4)
    return RecurrentInputs(
        q=d.normal(2, 1, 2, 64),
        k=d.normal(2, 1, 2, 64),
        v=d.normal(2, 1, 4, 64),
        g=d.normal(2, 1, 4, dtype=g),
        beta=d.normal(2, 1, 4, dtype=beta),
        A_log=d.uniform(4),
        dt_bias=d.normal(4, dtype=torch.float32),
        initial_state=d.normal(3, 4, 64, 64, dtype=torch.float32),
        state_indices=torch.tensor([2, 0]),
    )


def check_head_gate(inputs: RecurrentInputs, **options: Any) -> torch.Tensor:
    given = inputs.initial_state.clone()
    options = options or MODEL
    request = request_of("fused_recurrent_gated_delta_rule", inputs, inplace_state=True, **options)
    want = oracle(request, inputs._replace(initial_state=given.clone()))
    got = recurrent.forward(request, inputs)
    assert error(got.o, want.o) < O_BOUND
    check_repeated(request, inputs, given, got)
    inputs.initial_state.copy_(given)
    return got.o


@pytest.mark.every_other
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_token_with_one_gate_a_head(emulated: list[str], v_first: bool, state_dtype: torch.dtype) -> None:
    """Its own mode, with the bits of the one that serves everything."""
    inputs = one_gate_a_head()
    inputs = inputs._replace(initial_state=inputs.initial_state.to(state_dtype))
    strided = torch.stack([inputs.v, inputs.v], 1)[:, 0]
    first = check_head_gate(inputs, state_v_first=v_first, **MODEL)
    assert torch.equal(first, check_head_gate(inputs._replace(v=strided), state_v_first=v_first, **MODEL))
    assert [mode_of(name) for name in emulated] == [3, 3, 0, 0]


@pytest.mark.parametrize("g", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("beta", [torch.float32, torch.bfloat16])
def test_one_gate_a_head_of_either_type(emulated: list[str], g: torch.dtype, beta: torch.dtype) -> None:
    inputs = one_gate_a_head(g, beta)
    for bias in (inputs.dt_bias, inputs.dt_bias.bfloat16(), None):
        check_head_gate(inputs._replace(dt_bias=bias))
    log = inputs._replace(g=-inputs.g.abs(), A_log=None, dt_bias=None, beta=inputs.beta.sigmoid())
    check_head_gate(log, use_qk_l2norm_in_kernel=True)
    assert {mode_of(name) for name in emulated} == {3}


@pytest.mark.parametrize("name", ["several tokens", "float16 g", "no pool"])
def test_one_gate_a_head_that_its_mode_does_not_serve(emulated: list[str], name: str) -> None:
    inputs = one_gate_a_head(torch.float16 if name == "float16 g" else torch.bfloat16)
    if name == "several tokens":
        tokens = ("q", "k", "v", "g", "beta")
        inputs = inputs._replace(**{t: torch.cat([getattr(inputs, t)] * 2, 1) for t in tokens})
    if name == "no pool":
        inputs = inputs._replace(initial_state=inputs.initial_state[:2], state_indices=None)
    check_head_gate(inputs)
    assert {mode_of(name) for name in emulated} == {0}


def decoding(**more: Any) -> RecurrentInputs:
    return draw(2, 1, initial_state=torch.randn(3, 2, 64, 64), state_indices=torch.tensor([2, 0]), **more)


def fast_call_of(inputs: RecurrentInputs) -> Any:
    return recurrent.make_fast_call(
        request_of("fused_recurrent_kda", inputs, inplace_state=True, **BOUNDED_MODEL), inputs
    )


def test_a_step_serves_other_arrays_and_keeps_none(emulated: list[str]) -> None:
    first = decoding()
    step = fast_call_of(first)
    held = weakref.ref(first.q)
    second = RecurrentInputs(*(None if x is None else x.clone() for x in first))
    second.v.normal_()
    del first
    assert held() is None
    pool = second.initial_state.clone()
    request = request_of("fused_recurrent_kda", second, inplace_state=True, **BOUNDED_MODEL)
    want = recurrent.forward(request, second._replace(initial_state=pool))
    assert torch.equal(step(tuple(second))[0], want.o)
    assert torch.equal(second.initial_state, pool)


@pytest.mark.parametrize("name", ["q", "v", "g", "dt_bias", "initial_state", "out"])
def test_a_step_leaves_arrays_off_16_bytes_alone(emulated: list[str], name: str) -> None:
    inputs = decoding(out=torch.empty(2, 1, 2, 64, dtype=torch.bfloat16))
    step = fast_call_of(inputs)
    x = getattr(inputs, name)
    off = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)
    assert step(tuple(inputs._replace(**{name: off}))) is None
    assert emulated == []


@pytest.mark.parametrize("name", ["k", "A_log", "dt_bias", "state_indices", "initial_state"])
def test_no_step_where_something_is_copied(emulated: list[str], name: str) -> None:
    inputs = decoding()
    x = getattr(inputs, name)
    strided = torch.stack([x, x], -1)[..., 0]
    assert fast_call_of(inputs) is not None
    assert fast_call_of(inputs._replace(**{name: strided})) is None


def test_another_current_device_takes_the_long_way(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = decoding()
    monkeypatch.setattr(torch_launch, "current_device", lambda: 1)
    step = fast_call_of(inputs)
    assert step(tuple(inputs)) is None
    assert emulated == []
