"""The chunk forward against the float64 oracle: every option, gate, layout and size, on whatever device there is."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kdacore import contract
from kdacore.ops import OPS
from kdacore.oracle.host_values import to_float64
from kdacore.oracle.recurrence import oracle_forward
from kdacore.types import ChunkInputs, Outputs, Request
from kdacore_triton import chunk_forward, configs

# Products above the diagonal may overflow before they are masked away; NumPy, which the interpreter uses, says so.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
POISON = 1e30
# Contract section 4: output and state, for float32 and for 16-bit inputs.
BOUNDS = {torch.float32: (2e-5, 2e-5), torch.bfloat16: (4.5e-3, 3.3e-3), torch.float16: (4.5e-3, 3.3e-3)}
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if GPU else [torch.float32]


def request_of(inputs: ChunkInputs, *, scalar: bool = False, **options: Any) -> Request:
    opdef = OPS["chunk_gated_delta_rule" if scalar else "chunk_kda"]
    flags = dict.fromkeys(opdef.options, False) | {
        "scale": None, "lower_bound": None, "checkpoint_every": None, "cp": None, "null_index": None,
    } | options  # fmt: skip
    return contract.build_request(opdef, inputs, tuple(flags[o] for o in opdef.options))[0]


def draw(
    B: int = 1, T: int = 70, H: int = 1, HV: int = 1, K: int = 16, V: int = 16, *,
    dtype: torch.dtype = torch.float32, seed: int = 0, scalar: bool = False, raw: bool = False, low: float = -5.0,
    **arrays: Any,
) -> ChunkInputs:  # fmt: skip
    """Random inputs. ``raw``: gate inputs and logits, keys not normalised; else log decays in ``[low, 0]``."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=rng)

    g_shape = (B, T, HV) if scalar else (B, T, HV, K)
    q, k = normal(B, T, H, K), normal(B, T, H, K)
    if not raw:
        q, k = torch.nn.functional.normalize(q, dim=-1), torch.nn.functional.normalize(k, dim=-1)
    x = ChunkInputs(
        q=q.to(dtype),
        k=k.to(dtype),
        v=normal(B, T, HV, V).to(dtype),
        g=normal(*g_shape) if raw else low * uniform(*g_shape) ** 3,
        beta=normal(B, T, HV) if raw else uniform(B, T, HV),
    )
    x = x._replace(**arrays)
    return ChunkInputs(*(None if a is None else a.to(DEVICE) for a in x))


def state(N: int, HV: int, a: int, b: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn((N, HV, a, b), generator=torch.Generator().manual_seed(9)).to(dtype)


def error(got: torch.Tensor, want: np.ndarray) -> float:
    wanted = float(np.linalg.norm(want))
    assert got.shape == want.shape
    return float(np.linalg.norm(to_float64(got) - want)) / (wanted or 1.0)


def check(inputs: ChunkInputs, loose: float = 1.0, **options: Any) -> Outputs:
    """Run, compare with the oracle, return what was computed. ``loose``: times the contract's bounds."""
    request = request_of(inputs, **options)
    got = chunk_forward.forward(request, inputs)
    want = oracle_forward(request, inputs)
    o_bound, state_bound = (b * loose for b in BOUNDS[inputs.q.dtype])
    assert got.o.dtype == inputs.v.dtype
    assert error(got.o, want.o) <= o_bound
    for part in ("final_state", "checkpoints"):
        a, b = getattr(got, part), getattr(want, part)
        assert (a is None) == (b is None)
        if a is not None:
            bound = state_bound if a.dtype == torch.float32 else max(state_bound, 3.3e-3)
            assert error(a, b) <= bound
    return got


BOUNDED = {"safe_gate": True, "lower_bound": -5.0}
RAW = {
    "use_gate_in_kernel": True,
    "use_qk_l2norm_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}
FAMILIES = [
    pytest.param({}, {"low": -60.0}, id="unbounded"),
    pytest.param(BOUNDED, {}, id="bounded"),
    pytest.param({"scalar": True}, {"scalar": True}, id="scalar"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("options", "drawn"), FAMILIES)
def test_decays_given(options: dict[str, Any], drawn: dict[str, Any], dtype: torch.dtype) -> None:
    check(draw(dtype=dtype, **drawn), output_final_state=True, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("options", "scalar"),
    [({}, False), (BOUNDED, False), ({}, True), (BOUNDED, True)],
    ids=["softplus", "sigmoid", "scalar-softplus", "scalar-sigmoid"],
)
def test_gate_norm_and_sigmoid_in_kernel(
    options: dict[str, Any], scalar: bool, bias: bool, dtype: torch.dtype
) -> None:
    HV, K = 2, 16
    arrays = {"A_log": torch.linspace(-1.0, 1.0, HV)}
    if bias:
        arrays["dt_bias"] = torch.linspace(-2.0, 1.0, HV if scalar else HV * K)
        if not scalar:
            arrays["dt_bias"] = arrays["dt_bias"].reshape(HV, K)
    x = draw(T=40, H=1, HV=HV, K=K, raw=True, scalar=scalar, dtype=dtype, **arrays)
    check(x, scalar=scalar, output_final_state=True, allow_neg_eigval=bias, **RAW, **options)


def test_bounded_gate_without_a_log() -> None:
    check(draw(T=20, raw=True), **RAW, **BOUNDED)


@pytest.mark.parametrize(("options", "drawn"), FAMILIES)
@pytest.mark.parametrize(("K", "V"), [(60, 100), (100, 16), (16, 60)])
def test_head_dims(K: int, V: int, options: dict[str, Any], drawn: dict[str, Any]) -> None:
    check(draw(T=33, K=K, V=V, **drawn), output_final_state=True, **options)


@pytest.mark.parametrize(("K", "V"), [(256, 32), (32, 256)])
def test_wide_heads(K: int, V: int) -> None:
    check(draw(T=33, K=K, V=V), output_final_state=True, **BOUNDED)
    check(draw(T=33, K=K, V=V, low=-60.0), output_final_state=True)


@pytest.mark.every_other
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_states_both_layouts_and_grouped_heads(v_first: bool, state_dtype: torch.dtype) -> None:
    s0 = state(2, 4, *((24, 16) if v_first else (16, 24)), dtype=state_dtype)
    x = draw(B=2, T=35, H=2, HV=4, K=16, V=24, initial_state=s0)
    got = check(x, output_final_state=True, state_v_first=v_first, scale=0.7, **BOUNDED)
    assert got.final_state is not None and got.final_state.dtype == state_dtype
    assert torch.equal(x.initial_state.cpu(), s0)


LENGTHS = [0, 1, 17, 15, 64, 0, 65, 16, 63, 0]


@pytest.mark.parametrize(("options", "drawn"), FAMILIES)
def test_packed_sequences(options: dict[str, Any], drawn: dict[str, Any]) -> None:
    cu = torch.tensor(np.cumsum([0, *LENGTHS]), dtype=torch.int64)
    x = draw(T=int(cu[-1]), cu_seqlens=cu, initial_state=state(len(LENGTHS), 1, 16, 16), **drawn)
    check(x, output_final_state=True, checkpoint_every=64, **options)


@pytest.mark.parametrize("packed", [False, True])
def test_checkpoints(packed: bool) -> None:
    arrays: dict[str, Any] = {"initial_state": state(2, 1, 16, 16)}
    if packed:
        arrays["cu_seqlens"] = torch.tensor([0, 70, 140], dtype=torch.int32)
    x = draw(B=1 if packed else 2, T=140, **arrays)
    check(x, checkpoint_every=64, state_v_first=True, **BOUNDED)


@pytest.mark.parametrize(
    ("low", "options"), [(0.0, BOUNDED), (-5.0, BOUNDED), (0.0, {}), (-60.0, {}), (-5.0, {})],
    ids=["bounded-none", "bounded-all", "none", "sixty", "five"],
)  # fmt: skip
def test_extreme_gates(low: float, options: dict[str, Any]) -> None:
    x = draw(T=70)
    check(x._replace(g=torch.full_like(x.g, low)), loose=2.0, output_final_state=True, **options)


def test_gates_mixing_none_and_minus_sixty() -> None:
    x = draw(T=70)
    mixed = torch.where(torch.arange(70 * 16).reshape(1, 70, 1, 16) % 3 == 0, -60.0, 0.0)
    check(x._replace(g=mixed.to(DEVICE)), loose=2.0, output_final_state=True)


@pytest.mark.parametrize("options", [BOUNDED, {}], ids=["bounded", "unbounded"])
def test_near_collinear_keys_with_beta_near_one(options: dict[str, Any]) -> None:
    x = draw(T=70)
    k = torch.nn.functional.normalize(x.k[:, :1] + 0.02 * x.k, dim=-1)
    x = x._replace(k=k, beta=torch.full_like(x.beta, 0.999), g=x.g * 1e-3)
    check(x, loose=2.0, output_final_state=True, **options)


@pytest.mark.parametrize(("options", "drawn"), FAMILIES)
def test_later_tokens_change_no_bit_of_earlier_outputs(
    options: dict[str, Any], drawn: dict[str, Any]
) -> None:
    x = draw(T=70, **drawn)
    whole = chunk_forward.forward(request_of(x, **options), x).o
    for t in (1, 31, 32, 50, 64):
        y = draw(T=70, seed=1, **drawn)
        other = ChunkInputs(
            *(None if a is None else torch.cat([a[:, :t], b[:, t:]], 1) for a, b in zip(x, y, strict=True))
        )
        assert torch.equal(chunk_forward.forward(request_of(other, **options), other).o[:, :t], whole[:, :t])
        short = ChunkInputs(*(None if a is None else a[:, :t].contiguous() for a in x))
        assert torch.equal(chunk_forward.forward(request_of(short, **options), short).o, whole[:, :t])


@pytest.mark.parametrize(("options", "drawn"), FAMILIES)
def test_split_equals_whole(options: dict[str, Any], drawn: dict[str, Any]) -> None:
    x = draw(T=100, **drawn)
    whole = check(x, output_final_state=True, **options)
    head = ChunkInputs(*(None if a is None else a[:, :37].contiguous() for a in x))
    first = chunk_forward.forward(request_of(head, output_final_state=True, **options), head)
    tail = ChunkInputs(*(None if a is None else a[:, 37:].contiguous() for a in x))
    tail = tail._replace(initial_state=first.final_state)
    second = chunk_forward.forward(request_of(tail, output_final_state=True, **options), tail)
    assert error(torch.cat([first.o, second.o], 1), to_float64(whole.o)) <= 2 * BOUNDS[x.q.dtype][0]
    assert error(second.final_state, to_float64(whole.final_state)) <= 2 * BOUNDS[x.q.dtype][1]


def test_alone_and_packed_give_the_same_bits() -> None:
    x = draw(T=100, cu_seqlens=torch.tensor([0, 37, 100]), low=-5.0)
    packed = chunk_forward.forward(request_of(x, **BOUNDED), x).o
    alone = ChunkInputs(*(a[:, 37:].contiguous() if a is not None and a.ndim > 1 else None for a in x))
    assert torch.equal(chunk_forward.forward(request_of(alone, **BOUNDED), alone).o, packed[:, 37:])


def test_rows_outside_a_tensor_are_never_read() -> None:
    """Every array lies between poisoned rows; a stray read would show, a stray write would change them."""
    x = draw(B=1, T=37, H=1, HV=2, K=60, V=20)
    guards, inside = [], []
    for a in x:
        if a is None:
            inside.append(None)
            continue
        block = torch.full(
            (a.shape[0], a.shape[1] + 128, *a.shape[2:]), POISON, dtype=a.dtype, device=a.device
        )
        block[:, 64:-64] = a
        guards.append((block, block.clone()))
        inside.append(block[:, 64:-64])
    assert all(a.is_contiguous() for a in inside if a is not None)
    y = ChunkInputs(*inside)
    got = chunk_forward.forward(request_of(y, **BOUNDED), y).o
    assert torch.equal(got, chunk_forward.forward(request_of(x, **BOUNDED), x).o)
    for now, before in guards:
        assert torch.equal(now, before)


def test_strided_inputs() -> None:
    x = draw(T=20, H=2, HV=2)
    strided = ChunkInputs(*(None if a is None else a.transpose(1, 2).contiguous().transpose(1, 2) for a in x))
    want = chunk_forward.forward(request_of(x, **BOUNDED), x).o
    assert torch.equal(chunk_forward.forward(request_of(strided, **BOUNDED), strided).o, want)


SHIPPED = [c.config for c in configs.shipped() if c.kernel == "chunk_forward"]


@pytest.mark.parametrize("config", SHIPPED, ids=str)
@pytest.mark.parametrize(("options", "drawn"), FAMILIES)
def test_every_shipped_configuration(
    config: dict[str, Any], options: dict[str, Any], drawn: dict[str, Any]
) -> None:
    K = 64 if GPU else 32  # more than the few channels that 16-bit inputs take float32 operands for
    T = 70 + (
        config["segment"] if GPU else 0
    )  # segments have tests of their own below, at lengths a CPU can do
    x = draw(T=T, K=K, V=64, dtype=torch.bfloat16 if GPU else torch.float32, **drawn)
    with configs.override("chunk_forward", config):
        check(x, output_final_state=True, **options)


def test_bfloat16_in_the_interpreter_is_right() -> None:
    x = draw(T=20, dtype=torch.bfloat16)
    check(x, output_final_state=True, **BOUNDED)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("options", "drawn"), FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("K", [16, 32])
def test_few_channels_keep_the_bound(
    K: int, dtype: torch.dtype, options: dict[str, Any], drawn: dict[str, Any], seed: int
) -> None:
    """Few elements do not average roundings out: with bfloat16 operands the state was up to 4.1e-3 off."""
    s0 = state(1, 2, K, 2 * K)
    x = draw(H=2, HV=2, K=K, V=2 * K, dtype=dtype, seed=seed, initial_state=s0, **drawn)
    check(x, output_final_state=True, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [BOUNDED, {}], ids=["bounded", "unbounded"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_contracts_own_case(dtype: torch.dtype, options: dict[str, Any]) -> None:
    A_log = torch.log(1 + 15 * torch.rand(2, generator=torch.Generator().manual_seed(1)))
    x = draw(T=2048, H=2, HV=2, K=128, V=128, raw=True, dtype=dtype, A_log=A_log)
    check(x, output_final_state=True, **RAW, **options)


# --- few heads, scanned in segments -----------------------------------------------------------------------------

SEGMENT = 512
SEGMENTED = {
    "C": 32, "prepare_BV": 128, "prepare_warps": 2, "scan_BV": 64, "scan_warps": 4, "scan_stages": 4,
    "segment": SEGMENT,
}  # fmt: skip


@pytest.fixture
def segmented() -> Iterator[None]:
    with configs.override("chunk_forward", SEGMENTED):
        yield


def launches(request: Request) -> int:
    return 2 if chunk_forward.plan_for(request).plain.segments is None else 4


SLOW = [
    pytest.param({}, {"low": -0.02}, id="unbounded"),
    pytest.param(BOUNDED, {"low": -0.02}, id="bounded"),
    pytest.param({"scalar": True}, {"scalar": True, "low": -0.02}, id="scalar"),
]
"""Gates slow enough for a segment to matter to the ones after the next."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("options", "drawn"), SLOW)
def test_segments(
    segmented: None, options: dict[str, Any], drawn: dict[str, Any], dtype: torch.dtype
) -> None:
    x = draw(B=2, T=3 * SEGMENT + 70, HV=2, initial_state=state(2, 2, 16, 16), dtype=dtype, **drawn)
    assert launches(request_of(x, **options)) == 4
    check(x, output_final_state=True, **options)


@pytest.mark.parametrize("T", [SEGMENT, SEGMENT + 1, 2 * SEGMENT])
def test_segments_at_their_edges(segmented: None, T: int) -> None:
    check(draw(T=T, K=20, V=24, low=-0.02), output_final_state=True, state_v_first=True, **BOUNDED)


def test_segments_of_packed_sequences(segmented: None) -> None:
    ends = torch.tensor([0, 0, 5, SEGMENT + 5, SEGMENT + 5, 3 * SEGMENT + 7, 3 * SEGMENT + 8])
    x = draw(T=int(ends[-1]), cu_seqlens=ends, initial_state=state(6, 1, 16, 16), low=-0.02)
    assert launches(request_of(x, **BOUNDED)) == 4
    check(x, output_final_state=True, checkpoint_every=192, **BOUNDED)


def test_checkpoints_across_segments(segmented: None) -> None:
    x = draw(T=2 * SEGMENT + 100, initial_state=state(1, 1, 16, 16), low=-0.02)
    check(x, output_final_state=True, checkpoint_every=192, **BOUNDED)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("options", "drawn"), SLOW)
def test_segments_change_no_bit_when_tokens_are_appended(
    segmented: None, options: dict[str, Any], drawn: dict[str, Any]
) -> None:
    x = draw(T=2 * SEGMENT + 40, **drawn)
    whole = chunk_forward.forward(request_of(x, **options), x).o
    for t in (40, SEGMENT, SEGMENT + 33, 2 * SEGMENT):
        short = ChunkInputs(*(None if a is None else a[:, :t].contiguous() for a in x))
        assert torch.equal(chunk_forward.forward(request_of(short, **options), short).o, whole[:, :t])


def test_segments_under_extreme_gates(segmented: None) -> None:
    x = draw(T=SEGMENT + 100, low=-60.0)
    x = x._replace(g=torch.where(x.g < -20, -60.0, 0.0))
    check(x, output_final_state=True)


def test_segments_are_as_exact_as_one_chain_for_near_collinear_keys() -> None:
    x = draw(T=2 * SEGMENT + 30, raw=True)
    k = torch.nn.functional.normalize(x.k[:, :1] + 0.02 * x.k, dim=-1)
    x = x._replace(k=k, beta=torch.full_like(x.beta, 0.999), g=-1e-3 * x.g.abs())
    request = request_of(x, output_final_state=True, **BOUNDED)
    want = oracle_forward(request, x)
    found = []
    for segment in (0, SEGMENT):
        with configs.override("chunk_forward", SEGMENTED | {"segment": segment}):
            got = chunk_forward.forward(request, x)
            found.append((error(got.o, want.o), error(got.final_state, want.final_state)))
    (o, state_), (o_segmented, state_segmented) = found
    assert o_segmented <= 1.1 * o and state_segmented <= 1.1 * state_


def test_heads_too_wide_for_a_map_are_scanned_whole(segmented: None) -> None:
    request = request_of(draw(T=SEGMENT + 10, K=130, V=16), **BOUNDED)
    assert launches(request) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("segment", [512, 1024, 2048])
@pytest.mark.parametrize("C", [16, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", [BOUNDED, {}], ids=["bounded", "unbounded"])
def test_segments_are_as_exact_as_one_chain_at_a_models_size(
    segment: int, C: int, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """With gates so slow that what the last segment sees went through every map."""
    A_log = torch.log(1 + 15 * torch.rand(2, generator=torch.Generator().manual_seed(1)))
    x = draw(T=4096, H=2, HV=2, K=128, V=128, raw=True, dtype=dtype, A_log=A_log)
    x = x._replace(g=x.g - 4.0)
    request = request_of(x, output_final_state=True, **RAW, **options)
    want = oracle_forward(request, x)
    found = []
    for length in (0, segment):
        stages = 4 if dtype == torch.bfloat16 else 1  # what fits shared memory
        with configs.override(
            "chunk_forward", SEGMENTED | {"segment": length, "C": C, "scan_stages": stages}
        ):
            assert launches(request) == (4 if length else 2)
            got = chunk_forward.forward(request, x)
            found.append((error(got.o, want.o), error(got.final_state, want.final_state)))
    for whole, pieces, bound in zip(*found, BOUNDS[dtype], strict=True):
        assert pieces <= 1.03 * whole + 1e-7 and pieces <= 2 * bound


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("options", [BOUNDED, {}], ids=["bounded", "unbounded"])
def test_what_ships_for_few_heads_changes_no_bit_when_tokens_are_appended(
    options: dict[str, Any], seed: int
) -> None:
    x = draw(T=3000, H=4, HV=8, K=128, V=128, raw=True, dtype=torch.bfloat16, seed=seed, A_log=torch.zeros(8))
    assert launches(request_of(x, **RAW, **options)) == 4
    whole = chunk_forward.forward(request_of(x, **RAW, **options), x).o
    for t in (100, 1024, 1025, 2048, 2900):
        short = ChunkInputs(*(a[:, :t].contiguous() if a is not None and a.ndim > 1 else a for a in x))
        assert torch.equal(chunk_forward.forward(request_of(short, **RAW, **options), short).o, whole[:, :t])
