"""The decode kernel against the float64 oracle: every state mode, layout, gate and size, on whatever device there is.

Without a GPU the kernel runs in Triton's interpreter.
"""

import os
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from kdacore import contract
from kdacore.ops import OPS
from kdacore.oracle.host_values import to_float64
from kdacore.oracle.recurrence import oracle_forward
from kdacore.types import Outputs, RecurrentInputs, Request
from kdacore_triton import configs, recurrent

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POISON = 1e30
# Triton 3.6's interpreter turns a loop bound into an int in a way that NumPy < 2.4 warns about.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
BOUND = {torch.float32: 2e-5, torch.bfloat16: 4.5e-3, torch.float16: 4.5e-3}


def request_of(inputs: RecurrentInputs, op: str = "fused_recurrent_kda", **options: Any) -> Request:
    opdef = OPS[op]
    flags = (
        dict.fromkeys(opdef.options, False)
        | {"scale": None, "lower_bound": None, "null_index": None}
        | options
    )
    return contract.build_request(opdef, inputs, tuple(flags[o] for o in opdef.options))[0]


def draw(
    B: int = 1, T: int = 3, H: int = 2, HV: int = 2, K: int = 16, V: int = 16, *,
    dtype: torch.dtype = torch.float32, seed: int = 0, scalar: bool = False, raw: bool = False, **arrays: Any,
) -> RecurrentInputs:  # fmt: skip
    """Random inputs; ``raw``: gate inputs and logits instead of decays and rates."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=rng)

    g_shape = (B, T, HV) if scalar else (B, T, HV, K)
    unit = torch.nn.functional.normalize
    x = RecurrentInputs(
        q=(normal(B, T, H, K) if raw else unit(normal(B, T, H, K), dim=-1)).to(dtype),
        k=(normal(B, T, H, K) if raw else unit(normal(B, T, H, K), dim=-1)).to(dtype),
        v=normal(B, T, HV, V).to(dtype),
        g=normal(*g_shape) if raw else -uniform(*g_shape),
        beta=normal(B, T, HV) if raw else uniform(B, T, HV),
    )
    x = x._replace(**arrays)
    return RecurrentInputs(*(None if a is None else a.to(DEVICE) for a in x))


def states(
    rows: int, HV: int, a: int, b: int, dtype: torch.dtype = torch.float32, seed: int = 5
) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(rows, HV, a, b, generator=rng).to(dtype).to(DEVICE)


def error(got: torch.Tensor, want: np.ndarray) -> float:
    got64 = to_float64(got.detach().cpu())
    assert got64.shape == want.shape
    assert np.isfinite(got64).all()
    return float(np.linalg.norm(got64 - want) / max(np.linalg.norm(want), 1e-30))


def on_host(inputs: RecurrentInputs) -> RecurrentInputs:
    return RecurrentInputs(*(None if a is None else a.detach().cpu().clone() for a in inputs))


def check(
    inputs: RecurrentInputs, op: str = "fused_recurrent_kda", bound: float | None = None, **options: Any
) -> Outputs:
    """Run and compare with the oracle: o, the final state, and with an in-place pool every row of it."""
    request = request_of(inputs, op, **options)
    want = oracle_forward(request, on_host(inputs))
    before = None if inputs.initial_state is None else inputs.initial_state.clone()
    got = recurrent.forward(request, inputs)
    limit = bound or BOUND[inputs.v.dtype]
    assert got.o.dtype == inputs.v.dtype
    assert error(got.o, want.o) <= limit
    if request.inplace_state:
        check_pool(request, inputs, before, want.final_state, limit)
        assert got.final_state is (inputs.initial_state if request.output_final_state else None)
    else:
        if before is not None:
            assert torch.equal(before, inputs.initial_state), "the state was written to"
        if request.output_final_state:
            assert error(got.final_state, want.final_state) <= limit
            assert str(got.final_state.dtype) == f"torch.{request.state_dtype}"
        else:
            assert got.final_state is None
    return got


def check_pool(
    request: Request, inputs: RecurrentInputs, before: Any, want: np.ndarray, limit: float
) -> None:
    """Rows nobody named are bitwise what they were; the others are the oracle's."""
    named = set(range(request.N))
    if inputs.state_indices is not None:
        table = inputs.state_indices.cpu().reshape(request.N, -1)
        lengths = [request.T] * request.N
        if request.packed:
            lengths = torch.diff(inputs.cu_seqlens.cpu()).tolist()
        width = 1 if inputs.state_indices.ndim == 1 else None
        named = {int(i) for row, n in zip(table, lengths, strict=True) for i in row[: width or n] if i >= 0}
    pool = inputs.initial_state
    for row in range(pool.shape[0]):
        if row in named:
            assert error(pool[row], want[row]) <= limit, f"row {row}"
        else:
            same = pool[row].view(torch.int16 if pool.dtype != torch.float32 else torch.int32)
            assert torch.equal(same, before[row].view(same.dtype)), f"row {row} was touched"


# --- the operation ---------------------------------------------------------------------------------------------


@pytest.mark.first_cases(5)
@pytest.mark.parametrize("T", [1, 2, 5, 16, 20])
@pytest.mark.parametrize("v_first", [False, True])
def test_lengths_and_layouts(T: int, v_first: bool) -> None:
    x = draw(B=2, T=T, K=16, V=32, initial_state=states(2, 2, *((32, 16) if v_first else (16, 32))))
    check(x, output_final_state=True, state_v_first=v_first)


@pytest.mark.first_cases(6)
@pytest.mark.parametrize(
    ("K", "V"), [(16, 16), (60, 100), (100, 60), (64, 128), (128, 128), (256, 64), (17, 250)]
)
@pytest.mark.parametrize("T", [1, 2])
def test_head_sizes(K: int, V: int, T: int) -> None:
    for v_first in (False, True):
        x = draw(T=T, H=1, HV=1, K=K, V=V, initial_state=states(1, 1, *((V, K) if v_first else (K, V))))
        check(x, output_final_state=True, state_v_first=v_first)


@pytest.mark.first_cases(8)
@pytest.mark.parametrize("scalar", [False, True])
@pytest.mark.parametrize("gate", ["log", "softplus", "softplus+bias", "sigmoid", "sigmoid+A+bias"])
@pytest.mark.parametrize("T", [1, 3])
def test_gates_norms_and_sigmoids(scalar: bool, gate: str, T: int) -> None:
    op = "fused_recurrent_gated_delta_rule" if scalar else "fused_recurrent_kda"
    HV, K = 4, 20
    options: dict[str, Any] = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    arrays: dict[str, Any] = {}
    if gate == "log":
        x = draw(B=2, T=T, H=2, HV=HV, K=K, scalar=scalar, raw=True)
        x = x._replace(g=-x.g.abs())
        check(x, op, output_final_state=True, **options)
        return
    if "softplus" in gate or "+A" in gate:
        arrays["A_log"] = torch.rand(HV) * 2
    if "bias" in gate:
        arrays["dt_bias"] = torch.randn(HV) if scalar else torch.randn(HV, K).to(torch.float16)
    if "sigmoid" in gate:
        options |= {"lower_bound": -5.0, "safe_gate": True, "allow_neg_eigval": True}
    x = draw(B=2, T=T, H=2, HV=HV, K=K, scalar=scalar, raw=True, **arrays)
    check(x, op, output_final_state=True, use_gate_in_kernel=True, **options)
    if "bias" in gate and not scalar:
        flat = x._replace(dt_bias=x.dt_bias.reshape(-1))
        check(flat, op, use_gate_in_kernel=True, **options)


def test_strong_and_weak_decay() -> None:
    for value in (0.0, -5.0, -60.0, -1e4):
        x = draw(T=4, initial_state=states(1, 2, 16, 16))
        x = x._replace(g=torch.full_like(x.g, value))
        check(x, output_final_state=True)
    x = draw(T=8, initial_state=states(1, 2, 16, 16))
    mixed = torch.where(torch.rand(x.g.shape, generator=torch.Generator().manual_seed(1)) < 0.5, 0.0, -60.0)
    check(x._replace(g=mixed.to(DEVICE)), output_final_state=True)


@pytest.mark.parametrize("HV", [1, 2, 6])
def test_grouped_value_heads(HV: int) -> None:
    for H in {1, HV, max(1, HV // 3)}:
        check(draw(B=2, T=2, H=H, HV=HV), output_final_state=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("T", [1, 4])
def test_half_inputs(dtype: torch.dtype, T: int) -> None:
    x = draw(B=2, T=T, K=32, V=32, dtype=dtype, raw=True, A_log=torch.zeros(2))
    x = x._replace(g=x.g.to(dtype), beta=x.beta.to(dtype))
    options = {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
    }
    check(x, output_final_state=True, **options)


def test_explicit_scale() -> None:
    check(draw(T=2), scale=0.75)
    check(draw(T=2), scale=1.0)


# --- packs -----------------------------------------------------------------------------------------------------


@pytest.mark.every_other
@pytest.mark.parametrize("lengths", [[1, 1, 1], [3, 0, 1, 5], [0, 0, 2], [0, 1], [7]])
@pytest.mark.parametrize("initial", [False, True])
def test_packed_with_empty_sequences(lengths: list[int], initial: bool) -> None:
    cu = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    T = sum(lengths)
    state = states(len(lengths), 2, 16, 16) if initial else None
    x = draw(T=T, cu_seqlens=cu, initial_state=state)
    request = request_of(x, output_final_state=True)
    got = recurrent.forward(request, x)
    want = oracle_forward(request, on_host(x))
    assert error(got.final_state, want.final_state) <= 2e-5
    assert error(got.o, want.o) <= 2e-5
    for n, length in enumerate(lengths):
        if length == 0 and state is not None:
            assert torch.equal(got.final_state[n], state[n])
    wide = x._replace(cu_seqlens=x.cu_seqlens.to(torch.int64))
    again = recurrent.forward(request_of(wide, output_final_state=True), wide)
    assert torch.equal(again.o, got.o)


def test_packed_equals_alone_bitwise() -> None:
    lengths = [2, 5, 1]
    cu = torch.tensor([0, *np.cumsum(lengths)])
    x = draw(T=int(cu[-1]), cu_seqlens=cu)
    packed = recurrent.forward(request_of(x, output_final_state=True), x)
    for n in range(len(lengths)):
        a, b = int(cu[n]), int(cu[n + 1])
        one = RecurrentInputs(*(t[:, a:b] for t in x[:5]))
        alone = recurrent.forward(request_of(one, output_final_state=True), one)
        assert torch.equal(alone.o, packed.o[:, a:b])
        assert torch.equal(alone.final_state[0], packed.final_state[n])


# --- state pools -----------------------------------------------------------------------------------------------


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_pool_in_place(v_first: bool, T: int, kind: torch.dtype) -> None:
    pool = states(7, 2, *((24, 16) if v_first else (16, 24)))
    x = draw(B=4, T=T, V=24, initial_state=pool, state_indices=torch.tensor([5, 0, -1, 3], dtype=kind))
    for final in (True, False):
        check(x, state_v_first=v_first, inplace_state=True, output_final_state=final)


@pytest.mark.parametrize("T", [1, 3])
def test_pool_read_without_writing(T: int) -> None:
    x = draw(B=3, T=T, initial_state=states(6, 2, 16, 16), state_indices=torch.tensor([4, -1, 2]))
    got = check(x, output_final_state=True)
    assert got.final_state.shape[0] == 3
    check(x)
    check(x, read_only_state=True)


@pytest.mark.parametrize("T", [1, 4])
def test_in_place_without_indices(T: int) -> None:
    check(draw(B=2, T=T, initial_state=states(2, 2, 16, 16)), inplace_state=True, output_final_state=True)


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("inplace", [False, True])
def test_accepted_tokens(T: int, inplace: bool) -> None:
    table = torch.tensor([[3, 1, 4], [9, -1, 6], [5, 8, 7], [0, 2, 10], [-1, 11, 12]], dtype=torch.int32)
    x = draw(
        B=5, T=T, initial_state=states(16, 2, 16, 16), state_indices=table,
        num_accepted_tokens=torch.tensor([1, 2, 0, 3, 1], dtype=torch.int32),
    )  # fmt: skip
    check(x, inplace_state=inplace, output_final_state=True)
    wide = torch.full((5, 9), 13, dtype=torch.int32, device=DEVICE)
    wide[:, :3] = x.state_indices
    check(x._replace(state_indices=wide[:, :3]), inplace_state=inplace)
    check(x._replace(state_indices=wide[:, :3].T.contiguous().T), inplace_state=inplace)


def test_accepted_tokens_packed() -> None:
    cu = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    table = torch.tensor([[3, 1, 0], [9, 2, 6], [5, 8, 7]])
    x = draw(
        T=5, initial_state=states(10, 2, 16, 16), state_indices=table, cu_seqlens=cu,
        num_accepted_tokens=torch.tensor([2, 1, 3]),
    )  # fmt: skip
    check(x, inplace_state=True, output_final_state=True)


def test_indices_in_a_pack() -> None:
    cu = torch.tensor([0, 1, 1, 4])
    x = draw(T=4, initial_state=states(5, 2, 16, 16), state_indices=torch.tensor([4, 1, 0]), cu_seqlens=cu)
    check(x, inplace_state=True, output_final_state=True)


def test_rows_between_poison() -> None:
    """Neighbouring rows and the gaps inside strided rows hold NaN and 1e30: none may be read or written."""
    wide = torch.full((9, 3, 20, 21), POISON, device=DEVICE)
    wide[1::2] = float("nan")
    pool = wide[:, :2, :16, :16]
    fresh = states(9, 2, 16, 16)
    for row in (2, 7):
        pool[row] = fresh[row]
    before = wide.clone()
    x = draw(B=2, T=2, initial_state=pool, state_indices=torch.tensor([7, 2]))
    request = request_of(x, inplace_state=True)
    host = on_host(x)._replace(initial_state=fresh.cpu())
    want = oracle_forward(request, host)
    got = recurrent.forward(request, x)
    assert error(got.o, want.o) <= 2e-5
    for row in (2, 7):
        assert error(pool[row], want.final_state[row]) <= 2e-5
        before[row, :2, :16, :16] = pool[row]
    assert torch.equal(wide.view(torch.int32), before.view(torch.int32)), (
        "something outside the rows was written"
    )


@pytest.mark.parametrize(("kind", "bits"), [(torch.bfloat16, 8), (torch.float16, 11)], ids=str)
def test_16_bit_states(kind: torch.dtype, bits: int) -> None:
    for v_first in (False, True):
        pool = states(5, 2, 16, 16, kind)
        x = draw(B=2, T=3, initial_state=pool, state_indices=torch.tensor([3, 1]))
        for options in ({"output_final_state": True}, {"inplace_state": True}):
            # The state is rounded once when written: half a unit in the last place. Before that it carries the error of
            # float32 sums, which small elements feel.
            request = request_of(x, state_v_first=v_first, **options)
            want = oracle_forward(request, on_host(x))
            got = recurrent.forward(request, x)
            assert error(got.o, want.o) <= 2e-5
            state = x.initial_state if request.inplace_state else got.final_state
            assert state.dtype == kind
            rows = [3, 1] if request.inplace_state else [0, 1]
            exact = torch.from_numpy(want.final_state[rows])
            near = to_float64(state[rows].cpu())
            # Below its normal numbers float16 has units of 2^-24.
            exponent = np.floor(np.log2(np.abs(exact.numpy()) + (1e-30 if bits == 8 else 2.0**-14)))
            unit = 2.0 ** (exponent + 1 - bits)
            float32_error = 4 * np.finfo(np.float32).eps * np.abs(exact.numpy()).max()
            assert (np.abs(near - exact.numpy()) <= 0.5 * unit + float32_error).all()


# --- memory layout ---------------------------------------------------------------------------------------------


def strided(t: torch.Tensor, how: str) -> torch.Tensor:
    if how == "slice":  # as split from a fused projection
        wide = torch.full((*t.shape[:-1], t.shape[-1] + 16), float("nan"), dtype=t.dtype, device=t.device)
        wide[..., 8 : 8 + t.shape[-1]] = t
        return wide[..., 8 : 8 + t.shape[-1]]
    if how == "heads first":
        return t.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "last dimension apart":
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)
    flat = torch.full((t.numel() + 1,), float("nan"), dtype=t.dtype, device=t.device)
    flat[1:] = t.reshape(-1)
    return flat[1:].view(t.shape)


@pytest.mark.first_cases(3)
@pytest.mark.parametrize("how", ["slice", "heads first", "last dimension apart", "misaligned"])
@pytest.mark.parametrize("T", [1, 3])
def test_any_strides(how: str, T: int) -> None:
    x = draw(B=2, T=T, HV=4, K=16, V=32, initial_state=states(2, 4, 16, 32))
    want = recurrent.forward(request_of(x, output_final_state=True), x)
    y = x._replace(**{n: strided(getattr(x, n), how) for n in ("q", "k", "v", "g", "beta", "initial_state")})
    got = recurrent.forward(request_of(y, output_final_state=True), y)
    assert got.o.is_contiguous()
    # The order of a sum follows the state's memory layout, so not bit for bit.
    torch.testing.assert_close(got.o, want.o, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.final_state, want.final_state, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["slice", "heads first", "last dimension apart", "misaligned"])
def test_strided_state_in_place(how: str) -> None:
    x = draw(B=2, T=2, HV=3, H=1, K=16, V=32, initial_state=strided(states(2, 3, 16, 32), how))
    check(x, inplace_state=True, output_final_state=True)


@pytest.mark.parametrize("how", ["", "slice", "last dimension apart"])
def test_preallocated_output(how: str) -> None:
    x = draw(B=2, T=3)
    out = torch.full((2, 3, 2, 16), POISON, device=DEVICE)
    out = strided(out, how) if how else out
    x = x._replace(out=out)
    got = check(x)
    assert got.o is out


def test_inputs_stay_as_they_were() -> None:
    x = draw(B=2, T=3, initial_state=states(2, 2, 16, 16))
    before = on_host(x)
    recurrent.forward(request_of(x, output_final_state=True), x)
    for a, b in zip(before, on_host(x), strict=True):
        assert a is None or torch.equal(a, b)


# --- properties ------------------------------------------------------------------------------------------------


@pytest.mark.first_cases(2)
@pytest.mark.parametrize(
    ("K", "kept"), [(16, 1), (16, 4), pytest.param(128, 1, marks=pytest.mark.exhaustive), (128, 4)]
)
@pytest.mark.parametrize("v_first", [False, True])
def test_later_tokens_change_no_earlier_bit(kept: int, K: int, v_first: bool) -> None:
    """One token alone included, which the kernel treats apart."""
    x = draw(T=6, K=K, V=K, initial_state=states(1, 2, K, K))
    options = {"state_v_first": v_first, "use_qk_l2norm_in_kernel": True}
    whole = recurrent.forward(request_of(x, **options), x).o
    late = {n: getattr(x, n).clone() for n in ("q", "k", "v", "beta")}
    for tensor in late.values():
        tensor[:, kept:] = float("nan")
    y = x._replace(**late)
    assert torch.equal(recurrent.forward(request_of(y, **options), y).o[:, :kept], whole[:, :kept])
    short = RecurrentInputs(*(t[:, :kept] for t in x[:5]), initial_state=x.initial_state)
    assert torch.equal(recurrent.forward(request_of(short, **options), short).o, whole[:, :kept])


def test_split_equals_whole() -> None:
    """Token by token through an in-place pool gives what one call does."""
    x = draw(B=2, T=6, K=32, V=48)
    whole = recurrent.forward(request_of(x, output_final_state=True), x)
    pool = torch.zeros(4, 2, 32, 48, device=DEVICE)
    index = torch.tensor([3, 1], device=DEVICE)
    for t in range(6):
        token = RecurrentInputs(*(a[:, t : t + 1] for a in x[:5]), initial_state=pool, state_indices=index)
        step = recurrent.forward(request_of(token, inplace_state=True), token)
        torch.testing.assert_close(step.o, whole.o[:, t : t + 1], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(pool[index], whole.final_state, rtol=1e-6, atol=1e-7)


def test_long_decode_does_not_drift() -> None:
    """400 tokens of slow decay, beta near 1 from raw logits: a sigmoid rounded to bfloat16 fails this."""
    x = draw(T=400, H=1, HV=1, K=8, V=8, raw=True, A_log=torch.full((1,), -6.0))
    x = x._replace(beta=x.beta + 3.0)
    check(
        x, output_final_state=True, use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
    )  # fmt: skip


def test_near_collinear_keys() -> None:
    x = draw(T=16, K=32, V=32)
    k = torch.nn.functional.normalize(torch.ones_like(x.k) + 1e-3 * x.k, dim=-1)
    check(
        x._replace(k=k, beta=torch.full_like(x.beta, 0.999), g=torch.zeros_like(x.g)), output_final_state=True
    )


def test_same_bits_twice() -> None:
    x = draw(B=2, T=3)
    a, b = (recurrent.forward(request_of(x, output_final_state=True), x) for _ in range(2))
    assert torch.equal(a.o, b.o) and torch.equal(a.final_state, b.final_state)


def candidates() -> list[configs.Config]:
    """Every configuration a tuner may choose; in the interpreter, which has no warps, one of each block size."""
    found = configs.candidates("recurrent")
    return found if DEVICE == "cuda" else list({c["BV"]: c for c in found}.values())


@pytest.mark.parametrize("config", candidates(), ids=lambda c: f"BV{c['BV']}w{c['num_warps']}")
def test_every_candidate_configuration(config: configs.Config) -> None:
    with configs.override("recurrent", config):
        for T, V in ((1, config["BV"] + 3), (1, 2 * config["BV"]), (2, config["BV"] + 3)):
            check(draw(T=T, H=1, HV=1, K=16, V=V, initial_state=states(1, 1, 16, V)), output_final_state=True)


def test_many_sequences_and_wide_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grid for more sequences than its second axis holds, and 64-bit offsets, on small inputs."""
    x = draw(B=3, T=2, HV=4, initial_state=states(3, 4, 16, 16))
    want = recurrent.forward(request_of(x, output_final_state=True), x)
    for name, value in (("_MAX_GRID_Y", 2), ("_INT32_MAX", 10)):
        recurrent._forget()
        monkeypatch.setattr(recurrent, name, value)
        got = check(x, output_final_state=True)
        assert torch.equal(got.o, want.o) and torch.equal(got.final_state, want.final_state)
    recurrent._forget()


def test_plans_are_kept_per_request_and_strides() -> None:
    x = draw(B=2)
    request = request_of(x)
    for y in (x, x._replace(q=strided(x.q, "slice")), x):
        recurrent.forward(request, y)
    assert len(recurrent._plan(request).launches) == 2
    same = request_of(x)
    assert recurrent._plan(same) is recurrent._plan(request)
