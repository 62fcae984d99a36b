"""kdacore.compat.fla computes what flash-linear-attention's functions do, and takes arguments as they do."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch

import kdacore
from kdacore.compat import fla

B, T, H, HV, K, V = 2, 70, 2, 4, 16, 8
Tensors = dict[str, torch.Tensor]


def arrays(seed: int = 0, gate: tuple[int, ...] = (K,), B: int = B, T: int = T) -> Tensors:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "q": normal(B, T, H, K),
        "k": normal(B, T, H, K),
        "v": normal(B, T, HV, V),
        "g": -torch.rand(B, T, HV, *gate, generator=generator),
        "beta": torch.rand(B, T, HV, generator=generator),
    }


def states(n: int = B, seed: int = 5) -> torch.Tensor:
    return torch.randn(n, HV, K, V, generator=torch.Generator().manual_seed(seed))


def assert_same(got: Any, want: Any) -> None:
    for x, y in zip(got, want, strict=True):
        assert (x is None and y is None) or torch.equal(x, y)


KDA = {"use_qk_l2norm_in_kernel": True}
RATES = {"A_log": torch.linspace(-1, 1, HV), "dt_bias": torch.linspace(-2, 2, HV * K)}
GATED = {**KDA, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}


# --- plain calls --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda"])
def test_kda_by_position(op: str) -> None:
    x = arrays()
    state = states()
    want = getattr(kdacore, op)(**x, scale=0.3, initial_state=state, output_final_state=True)
    before_scale = (None, None) if op == "fused_recurrent_kda" else ()  # A_log and dt_bias
    got = getattr(fla, op)(*x.values(), *before_scale, 0.3, state, True)
    assert_same(got, want)


def test_gated_delta_rule_by_position() -> None:
    x = arrays(gate=())
    state = states()
    want = kdacore.chunk_gated_delta_rule(**x, scale=0.3, initial_state=state, output_final_state=True)
    assert_same(fla.chunk_gated_delta_rule(*x.values(), 0.3, state, True), want)
    want = kdacore.fused_recurrent_gated_delta_rule(
        **x, scale=0.3, initial_state=state, output_final_state=True
    )
    got = fla.fused_recurrent_gdn(x["q"], x["k"], x["v"], x["g"], None, None, x["beta"], 0.3, state, True)
    assert_same(got, want)


def test_no_final_state_unless_asked_for() -> None:
    assert fla.chunk_kda(**arrays())[1] is None
    # What a layer passes on as `use_cache` may be None.
    assert fla.chunk_kda(**arrays(), output_final_state=None)[1] is None


def test_gradients() -> None:
    def gradients(op: Any) -> list[torch.Tensor]:
        leaves = {n: x.requires_grad_() for n, x in arrays().items()}
        rates = {n: x.clone().requires_grad_() for n, x in RATES.items()}
        o, state = op(**leaves, **rates, **GATED, output_final_state=True)
        (o.sum() + state.square().sum()).backward()
        return [x.grad for x in (*leaves.values(), *rates.values()) if x.grad is not None]

    got, want = gradients(fla.chunk_kda), gradients(kdacore.chunk_kda)
    assert len(got) == len(want) == 7
    assert_same(got, want)


def test_compiled_without_graph_breaks() -> None:
    x = arrays(T=3)
    with torch.no_grad():
        compiled = torch.compile(fla.chunk_kda, backend="eager", fullgraph=True)
        assert_same(compiled(**x, **RATES, **GATED), fla.chunk_kda(**x, **RATES, **GATED))


# --- gates --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(HV,), (1, 1, HV, 1), (HV, 1)])
def test_log_rates_of_any_shape_and_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = arrays()
    rates = RATES["A_log"].to(dtype)
    want = kdacore.chunk_kda(**x, A_log=rates.float(), dt_bias=RATES["dt_bias"], **GATED)
    given = {"A_log": rates.reshape(shape), "dt_bias": RATES["dt_bias"].reshape(1, 1, HV, K)}
    assert_same(fla.chunk_kda(**x, **given, **GATED), want)
    assert_same(
        fla.fused_recurrent_kda(**x, **given, **GATED),
        kdacore.fused_recurrent_kda(**x, A_log=rates.float(), dt_bias=RATES["dt_bias"], **GATED),
    )


def test_gradients_of_log_rates_keep_their_shape_and_dtype() -> None:
    rates = RATES["A_log"].bfloat16().reshape(1, 1, HV, 1).requires_grad_()
    fla.chunk_kda(**arrays(), A_log=rates, **GATED)[0].sum().backward()
    assert rates.grad is not None and rates.grad.shape == rates.shape and rates.grad.dtype is rates.dtype


def test_arguments_without_effect_are_accepted() -> None:
    x = arrays()
    want = kdacore.chunk_kda(**x)
    assert_same(fla.chunk_kda(**x, **RATES), want)
    assert_same(fla.chunk_kda(**x, lower_bound=-5.0), want)
    assert_same(fla.chunk_kda(**x, safe_gate=True), want)
    assert_same(fla.chunk_kda(**x, chunk_size=32, cu_seqlens_cpu=torch.tensor([0, T])), want)
    assert_same(fla.chunk_kda(**x, use_graph=True), want)
    want = kdacore.fused_recurrent_kda(**x)
    assert_same(fla.fused_recurrent_kda(**x, **RATES, lower_bound=-5.0), want)
    x = arrays(gate=())
    rates = {"A_log": RATES["A_log"], "dt_bias": torch.zeros(HV)}
    want = kdacore.chunk_gated_delta_rule(**x)
    assert_same(fla.chunk_gated_delta_rule(**x, **rates, chunk_size=16), want)
    want = kdacore.fused_recurrent_gated_delta_rule(**x)
    assert_same(fla.fused_recurrent_gated_delta_rule(**x, **rates), want)


def test_a_promise_about_given_decays_is_kept_with_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    with kdacore.record_selections() as ran:
        fla.chunk_kda(**arrays(), safe_gate=True, lower_bound=-5.0)
    assert ran[0].request.safe_gate and ran[0].request.lower_bound == -5.0


def test_the_bounded_gate() -> None:
    x = arrays()
    want = kdacore.chunk_kda(**x, **RATES, **GATED, safe_gate=True, lower_bound=-5.0)
    assert_same(fla.chunk_kda(**x, **RATES, **GATED, safe_gate=True, lower_bound=-5.0), want)
    want = kdacore.chunk_kda(**x, **GATED, lower_bound=-7.0)
    assert_same(fla.chunk_kda(**x, **GATED, lower_bound=-7.0), want)
    with pytest.raises(kdacore.ContractError, match="safe_gate"):
        fla.chunk_kda(**x, **RATES, **GATED, safe_gate=True)


@pytest.mark.parametrize("leading", [(), (T,), (B, T), (2, 3, 5)])
def test_the_gate_alone(leading: tuple[int, ...]) -> None:
    g = torch.randn(*leading, HV, K)
    want = -RATES["A_log"].exp()[:, None] * torch.nn.functional.softplus(g + RATES["dt_bias"].view(HV, K))
    got = fla.fused_kda_gate(g, RATES["A_log"].view(1, 1, HV, 1), RATES["dt_bias"])
    assert got.shape == g.shape and got.dtype is torch.float32
    torch.testing.assert_close(got, want)
    got = fla.fused_kda_gate(g, None, RATES["dt_bias"], -5.0, torch.bfloat16)
    assert got.shape == g.shape and got.dtype is torch.bfloat16
    torch.testing.assert_close(got, (-5 * torch.sigmoid(g + RATES["dt_bias"].view(HV, K))).bfloat16())
    got = fla.fused_gdn_gate(g[..., 0], RATES["A_log"], torch.ones(HV))
    torch.testing.assert_close(got, -RATES["A_log"].exp() * torch.nn.functional.softplus(g[..., 0] + 1))


# --- states -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda"])
def test_half_precision_states_are_computed_with_and_returned_in_float32(op: str, dtype: torch.dtype) -> None:
    x, state = arrays(), states().to(dtype)
    want = getattr(kdacore, op)(**x, initial_state=state.float(), output_final_state=True)
    got = getattr(fla, op)(**x, initial_state=state, output_final_state=True)
    assert got[1].dtype is torch.float32
    assert_same(got, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("op", ["fused_recurrent_kda", "fused_recurrent_gated_delta_rule"])
def test_half_precision_v_beside_float32_q_and_k(op: str, dtype: torch.dtype) -> None:
    x = arrays(gate=(K,) if op == "fused_recurrent_kda" else ())
    v = x.pop("v").to(dtype)
    o, state = getattr(kdacore, op)(**x, v=v.float(), output_final_state=True)
    v.requires_grad_(True)
    got = getattr(fla, op)(**x, v=v, output_final_state=True)
    assert_same(got, (o.to(dtype), state))
    got[0].float().sum().backward()
    assert v.grad is not None and v.grad.dtype is dtype
    with pytest.raises(kdacore.ContractError, match="'k'"):
        getattr(fla, op)(**{**x, "k": x["k"].to(dtype)}, v=v)


def test_half_precision_v_with_states_in_place() -> None:
    x = arrays(T=1)
    v, pool = x.pop("v").half(), states()
    o, state = kdacore.fused_recurrent_kda(
        **x, v=v.float(), initial_state=pool.clone(), output_final_state=True
    )
    for inplace in (False, True):
        got = fla.fused_recurrent_kda_fwd(
            *(x["q"], x["k"], v, x["g"], x["beta"]),
            initial_state=pool,
            output_final_state=True,
            inplace_final_state=inplace,
        )
        assert_same(got, (o.half(), state))
    assert got[1] is pool


def test_the_former_name_of_state_v_first() -> None:
    x, state = arrays(), states().transpose(2, 3).contiguous()
    given = {"initial_state": state, "output_final_state": True}
    for op in ("chunk_kda", "fused_recurrent_kda"):
        want = getattr(kdacore, op)(**x, **given, state_v_first=True)
        with pytest.warns(DeprecationWarning, match="former name of state_v_first"):
            got = getattr(fla, op)(**x, **given, transpose_state_layout=True)
        assert_same(got, want)
        with pytest.raises(kdacore.ContractError, match="transpose_state_layout"):
            getattr(fla, op)(**x, **given, transpose_state_layout=True, state_v_first=True)


@pytest.mark.parametrize("state_v_first", [False, True])
def test_intermediate_states(state_v_first: bool) -> None:
    """``[B, NT, HV, K, V]`` in q's dtype: the state that the tokens before each chunk leave behind."""
    x = {n: a.bfloat16() for n, a in arrays().items()}
    given = {"initial_state": states(), "output_final_state": True, "return_intermediate_states": True}
    if state_v_first:
        given["initial_state"] = states().transpose(2, 3).contiguous()
    with torch.inference_mode():
        o, final, h = fla.chunk_kda(**x, **given, state_v_first=state_v_first)
        want_o, want_final = kdacore.chunk_kda(
            **x, initial_state=given["initial_state"], output_final_state=True, state_v_first=state_v_first
        )
        first = {n: a[:, :64] for n, a in x.items()}
        _, middle = kdacore.chunk_kda(
            **first,
            initial_state=given["initial_state"],
            output_final_state=True,
            state_v_first=state_v_first,
        )
    assert torch.equal(o, want_o) and torch.equal(final, want_final)
    assert h.dtype is torch.bfloat16 and h.shape[:3] == (B, math.ceil(T / 64), HV)
    assert torch.equal(h[:, 0], given["initial_state"].bfloat16())
    torch.testing.assert_close(h[:, 1], middle.bfloat16(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("on_host", [False, True])
def test_intermediate_states_of_a_pack(on_host: bool) -> None:
    lengths = [65, 0, 64, 1, 130]
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    x = arrays(B=1, T=sum(lengths))
    given = {"cu_seqlens": ends.int(), "initial_state": states(len(lengths))}
    if on_host:
        given["cu_seqlens_cpu"] = ends
    with torch.no_grad():
        _, _, h = fla.chunk_kda(**x, **given, return_intermediate_states=True)
    assert h.shape == (1, 2 + 0 + 1 + 1 + 3, HV, K, V)
    for chunk, sequence in zip((0, 2, 3, 4), (0, 2, 3, 4), strict=True):
        assert torch.equal(h[0, chunk], given["initial_state"][sequence])


def test_intermediate_states_are_for_inference() -> None:
    x = {n: a.requires_grad_() for n, a in arrays().items()}
    with pytest.raises(kdacore.ContractError, match="return_intermediate_states"):
        fla.chunk_kda(**x, return_intermediate_states=True)
    with pytest.raises(kdacore.ContractError, match="return_intermediate_states"):
        fla.chunk_kda(**arrays(), return_intermediate_states=True, chunk_size=32)


# --- decoding -----------------------------------------------------------------------------------------------------


def test_states_in_place() -> None:
    x, state, want_state = arrays(T=1), states(), states()
    want, _ = kdacore.fused_recurrent_kda(**x, initial_state=want_state, inplace_state=True)
    o, final = fla.fused_recurrent_kda_fwd(**x, initial_state=state)
    assert final is state and torch.equal(state, want_state) and torch.equal(o, want)


def test_rows_of_a_pool() -> None:
    x, pool, want_pool = arrays(T=1), states(6), states(6)
    rows = torch.tensor([4, 1])
    want, _ = kdacore.fused_recurrent_kda(
        **x, initial_state=want_pool, inplace_state=True, state_indices=rows
    )
    out = torch.empty_like(x["v"])
    o, final = fla.fused_recurrent_kda_fwd(**x, initial_state=pool, ssm_state_indices=rows, out=out)
    assert o is out and final is pool and torch.equal(pool, want_pool) and torch.equal(o, want)
    pool = states(6)
    o, final = fla.fused_recurrent_kda_fwd(
        **x,
        initial_state=pool,
        inplace_final_state=False,
        output_final_state=True,
        ssm_state_indices=rows,
    )
    assert torch.equal(pool, states(6)) and torch.equal(final, want_pool[rows]) and torch.equal(o, want)


@pytest.mark.parametrize("accepted", [None, [1, 3]])
def test_candidate_tokens(accepted: list[int] | None) -> None:
    x, pool, want_pool = arrays(T=3), states(9), states(9)
    rows = torch.tensor([[4, 1, 7], [0, 2, 8]])
    number = torch.tensor(accepted or [1, 1])
    want, _ = kdacore.fused_recurrent_kda(
        **x, initial_state=want_pool, inplace_state=True, state_indices=rows, num_accepted_tokens=number
    )
    o, final = fla.fused_recurrent_kda_fwd(
        **x,
        initial_state=pool,
        ssm_state_indices=rows,
        num_accepted_tokens=None if accepted is None else number,
    )
    assert final is pool and torch.equal(pool, want_pool) and torch.equal(o, want)


def test_states_in_place_of_a_model_in_training() -> None:
    """The published function knows no gradients, whatever the parameters ask for."""
    rates = {n: torch.nn.Parameter(x) for n, x in RATES.items()}
    o, _ = fla.fused_recurrent_kda_fwd(**arrays(T=1), **rates, **GATED, initial_state=states())
    assert not o.requires_grad


def test_decays_of_channels_in_the_gated_delta_rule() -> None:
    x = arrays(T=5)
    heads = arrays(1, gate=(), T=5)["g"]
    qkv = {n: x[n] for n in "qkv"}
    want = kdacore.fused_recurrent_kda(**x, output_final_state=True)
    got = fla.fused_recurrent_gdn(**qkv, gk=x["g"], beta=x["beta"], output_final_state=True)
    assert_same(got, want)
    both = {**x, "g": x["g"] + heads.unsqueeze(-1)}
    want = kdacore.fused_recurrent_kda(**both)
    assert_same(fla.fused_recurrent_gdn(**qkv, g=heads, gk=x["g"], beta=x["beta"]), want)


def test_defaults_of_the_recurrent_gated_delta_rule() -> None:
    x = arrays(T=5)
    qkv = {n: x[n] for n in "qkv"}
    ones = torch.ones(B, 5, HV)
    want = kdacore.fused_recurrent_gated_delta_rule(**qkv, g=0 * ones, beta=ones)
    assert_same(fla.fused_recurrent_gated_delta_rule(**qkv), want)


# --- what cannot be served ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["chunk_kda", "chunk_gated_delta_rule"])
def test_head_first_arrays_are_told_how_to_become_others(op: str) -> None:
    x = arrays(gate=() if "gated" in op else (K,))
    with pytest.raises(kdacore.ContractError, match=r"head_first.*True.*x\.swapaxes\(1, 2\)"):
        getattr(fla, op)(**x, head_first=True)


@pytest.mark.parametrize(
    ("op", "given", "named"),
    [
        ("chunk_kda", {"cp_context": object()}, "cp_context"),
        ("chunk_kda", {"head_first": True}, "head_first"),
        ("chunk_kda", {"chunk_size": 16}, "chunk_size"),
        ("chunk_kda", {"use_gate_in_kernel": True}, "A_log"),
        ("chunk_kda", {"allow_neg_eigval": True}, "allow_neg_eigval"),
        ("chunk_gated_delta_rule", {"cp_context": object()}, "cp_context"),
        ("chunk_gated_delta_rule", {"chunk_indices": object()}, "chunk_indices"),
        ("chunk_gated_delta_rule", {"head_first": True}, "head_first"),
        ("chunk_gated_delta_rule", {"chunk_size": 48}, "chunk_size"),
        ("fused_recurrent_gated_delta_rule", {"gv": torch.zeros(B, T, HV, V)}, "gv"),
        ("fused_recurrent_kda_fwd", {"num_accepted_tokens": torch.ones(B)}, "num_accepted_tokens"),
        ("fused_recurrent_kda_fwd", {}, "inplace_state"),
        (
            "fused_recurrent_kda_fwd",
            {"initial_state": states(), "ssm_state_indices": torch.tensor([0, 1])},
            "ssm_state_indices",
        ),
        (
            "fused_recurrent_kda_fwd",
            {
                "initial_state": states(),
                "ssm_state_indices": torch.zeros(B, T, dtype=torch.int64),
                "inplace_final_state": False,
            },
            "inplace_final_state",
        ),
        ("fused_kda_gate", {"g": torch.zeros(3)}, "g"),
    ],
)
def test_what_cannot_be_served_is_named(op: str, given: dict[str, Any], named: str) -> None:
    x = {} if op == "fused_kda_gate" else arrays(gate=() if "gated" in op else (K,))
    with pytest.raises(kdacore.ContractError, match=f"'{named}'"):
        getattr(fla, op)(**{**x, **given})


def test_sequences_of_a_graph() -> None:
    x = arrays(B=1)
    given = {"cu_seqlens": torch.tensor([0, 30, T, T]), "use_graph": True}
    assert_same(fla.chunk_kda(**x, **given, max_num_seqs=3), fla.chunk_kda(**x, **given))
    with pytest.raises(kdacore.ContractError, match="'max_num_seqs': got 2; wanted None or 3"):
        fla.chunk_kda(**x, **given, max_num_seqs=2)


def test_unknown_keywords_are_type_errors() -> None:
    with pytest.raises(TypeError, match="ssm_state_indices"):
        fla.fused_recurrent_kda(**arrays(), ssm_state_indices=torch.zeros(B))  # ignored there


def test_nothing_warns_on_ordinary_calls() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fla.chunk_kda(**arrays(), **RATES, **GATED)
