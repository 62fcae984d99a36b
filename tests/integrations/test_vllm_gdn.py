"""vLLM's calls for the gated delta rule, computed by kdacore and compared with the recurrence in float64.

The modules have vLLM's names and its functions' signatures; the arrays are as its layers pass them: columns of
projections, gathered states, pools of pages, rows of nobody, index arrays longer than the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fake_vllm
import pytest
import torch
from fake_vllm import BY_VLLM, Counts, close, packages, paged_pool, recurrence

import kdacore

LAYERS = "vllm.model_executor.layers.mamba.gdn"
QWEN, OLMO = f"{LAYERS}.qwen_gdn_linear_attn", f"{LAYERS}.olmo_gdn_linear_attn"
PACKED = "fused_recurrent_gated_delta_rule_packed_decode"
UPDATE = "fused_sigmoid_gating_delta_rule_update"
H, HV, K, V = 2, 4, 16, 16


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The modules of both layers."""
    with packages(tmp_path_factory.mktemp("gdn"), fake_vllm.layers()) as modules:
        yield modules


@pytest.fixture
def qwen(layers: dict[str, Any]) -> Any:
    return layers[QWEN]


@pytest.fixture
def olmo(layers: dict[str, Any]) -> Any:
    return layers[OLMO]


class Tokens:
    """Random inputs of sequences of some lengths, in a pack with padding behind them."""

    def __init__(self, *lengths: int, padding: int = 0, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(sum(lengths) + padding)
        self.lengths, T = lengths, sum(lengths) + padding
        self.tokens = sum(lengths)
        D = 2 * H * K + HV * V
        self.mixed = torch.randn(T, D + 8).to(dtype)[:, :D]  # columns of a wider projection
        self.mixed[self.tokens :] = torch.nan
        self.a, self.b = torch.randn(T, HV).to(dtype), torch.randn(T, HV).to(dtype)
        self.A_log, self.dt_bias = torch.rand(HV), torch.randn(HV).to(dtype)
        self.offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)

    @property
    def qkv(self) -> dict[str, torch.Tensor]:
        """``[1, T, H, K]`` each, contiguous as vLLM's layers make them."""
        q, k, v = self.mixed.split([H * K, H * K, HV * V], dim=-1)
        heads = {"q": q.reshape(1, -1, H, K), "k": k.reshape(1, -1, H, K), "v": v.reshape(1, -1, HV, V)}
        return {name: x.contiguous() for name, x in heads.items()}

    @property
    def decay(self) -> torch.Tensor:
        """The log decay ``[1, T, HV]`` float32, as vLLM prepares it."""
        x = self.a.float() + self.dt_bias.float()
        return -(self.A_log.exp() * torch.nn.functional.softplus(x))[None]

    @property
    def raw(self) -> dict[str, torch.Tensor]:
        return {"A_log": self.A_log, "a": self.a, "b": self.b, "dt_bias": self.dt_bias}

    def rows(self, n: int, tokens: int | None = None) -> slice:
        start = int(self.offsets[n])
        return slice(start, start + (self.lengths[n] if tokens is None else tokens))

    def recurrence(
        self,
        n: int,
        state: torch.Tensor,
        *,
        tokens: int | None = None,
        norm: bool = True,
        beta: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``o`` and the state after sequence n, or its first ``tokens`` tokens."""
        here = self.rows(n, tokens)
        rate = self.b.double().sigmoid()[None] if beta is None else beta
        arrays = (*self.qkv.values(), self.decay, rate)
        return recurrence(*(x[0, here] for x in arrays), state, norm=norm)


def chunk_arguments(x: Tokens, states: torch.Tensor, **more: Any) -> dict[str, Any]:
    return {
        **x.qkv,
        "g": x.decay,
        "beta": x.b.float().sigmoid()[None],
        "initial_state": states,
        "output_final_state": True,
        "cu_seqlens": x.offsets,
        **more,
    }


@pytest.mark.parametrize("module", [QWEN, OLMO])
def test_prefill(layers: dict[str, Any], module: str) -> None:
    """Qwen's layer normalises q and k before the call and lists chunks; OLMo's leaves the former to the call."""
    name = "fla_chunk_gated_delta_rule" if module == QWEN else "chunk_gated_delta_rule"
    norm = module == OLMO
    x = Tokens(70, 0, 17, padding=5)
    states, counts = torch.randn(3, HV, V, K), Counts("chunk_gated_delta_rule")
    listed = {} if norm else {"chunk_indices": torch.zeros(3, 2), "chunk_offsets": torch.zeros(4)}
    with kdacore.record_selections() as ran:
        o, final = getattr(layers[module], name)(
            **chunk_arguments(x, states, use_qk_l2norm_in_kernel=norm, **listed)
        )
    assert [s.op for s in ran] == ["chunk_gated_delta_rule"] and (counts.served, counts.declined) == (1, 0)
    for n in (0, 2):
        want, after = x.recurrence(n, states[n], norm=norm)
        close(o[0, x.rows(n)], want)
        close(final[n], after)
    close(final[1], states[1])


def test_prefill_of_16_bits(qwen: Any) -> None:
    """States of the pool's dtype come back in it: vLLM casts its own, float32, to that."""
    x, states = Tokens(33, dtype=torch.bfloat16), torch.randn(1, HV, V, K).bfloat16()
    o, final = qwen.fla_chunk_gated_delta_rule(**chunk_arguments(x, states, use_qk_l2norm_in_kernel=True))
    want, after = x.recurrence(0, states[0])
    assert (o.dtype, final.dtype) == (torch.bfloat16, torch.bfloat16)
    close(o[0], want, 9e-3)
    close(final[0], after, 6.6e-3)


def test_lists_of_chunks_decide_nothing(qwen: Any) -> None:
    """Their lengths follow the batch's, so a call must be recognised whatever they are."""
    x, counts = Tokens(20), Counts("chunk_gated_delta_rule")
    states = torch.randn(1, HV, V, K)
    with kdacore.record_selections() as ran:
        for chunks in (1, 1, 1, 2, 3):
            listed = {"chunk_indices": torch.zeros(chunks, 2), "chunk_offsets": torch.zeros(chunks + 1)}
            qwen.fla_chunk_gated_delta_rule(**chunk_arguments(x, states, **listed))
    assert len(ran) == counts.served == 5


def test_packed_decode(qwen: Any) -> None:
    x, pool, counts = Tokens(1, 1, 1, 1), paged_pool(5, HV, V, K), Counts(PACKED)
    before, rows = pool.clone(), torch.tensor([3, 0, 1, 0], dtype=torch.int32)
    out = torch.full((4, 1, HV, V), 7.0)
    with kdacore.record_selections() as ran:
        o, state = qwen.fused_recurrent_gated_delta_rule_packed_decode(
            mixed_qkv=x.mixed, **x.raw, scale=K**-0.5, initial_state=pool, out=out, ssm_state_indices=rows,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
    assert len(ran) == 1 and o is out and state is pool and (counts.served, counts.declined) == (1, 0)
    for n, row in enumerate(rows.tolist()):
        if row == 0:
            assert not o[n].any()
        else:
            want, after = x.recurrence(n, before[row])
            close(o[n], want)
            close(pool[row], after)
    assert pool[0].isnan().all() and torch.equal(pool[[2, 4]], before[[2, 4]])


def test_decodes_in_a_batch_with_prefills(qwen: Any) -> None:
    """One token each; the indices are those of the whole batch, prefills behind the decodes."""
    x, pool, counts = Tokens(1, 1, 1), paged_pool(6, HV, V, K), Counts(UPDATE)
    before, rows = pool.clone(), torch.tensor([4, 0, 2, 5, 1], dtype=torch.int32)
    o, _ = qwen.fused_sigmoid_gating_delta_rule_update(
        **x.raw, **x.qkv, initial_state=pool, inplace_final_state=True, cu_seqlens=x.offsets,
        ssm_state_indices=rows, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    assert counts.served == 1 and o.shape == (1, 3, HV, V)
    for n in (0, 2):
        want, after = x.recurrence(n, before[rows[n]])
        close(o[0, n : n + 1], want)
        close(pool[rows[n]], after)
    assert torch.equal(pool[[1, 3, 5]], before[[1, 3, 5]])


@pytest.mark.parametrize("function", [UPDATE, "fused_recurrent_gated_delta_rule"])
def test_drafted_tokens(layers: dict[str, Any], function: str) -> None:
    """A padded pack; sequences go on from the row of the last accepted token. OLMo's beta goes to 2."""
    x, pool, counts = Tokens(3, 2, 1, padding=4), paged_pool(8, HV, V, K), Counts(function)
    before = pool.clone()
    beta = 2 * x.b.float().sigmoid()[None] if function != UPDATE else None
    given = x.raw if beta is None else {"g": x.decay, "beta": beta}
    rows = torch.tensor([[1, 2, 3], [4, 5, 6], [0, 0, 0], [9, 9, 9]], dtype=torch.int32)
    accepted = torch.tensor([2, 1, 1, 1], dtype=torch.int32)
    o, state = getattr(layers[QWEN if beta is None else OLMO], function)(
        **given, **x.qkv, initial_state=pool, inplace_final_state=True, cu_seqlens=x.offsets,
        ssm_state_indices=rows, num_accepted_tokens=accepted, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    assert (counts.served, counts.declined) == (1, 0) and state is pool
    for n, start in ((0, 2), (1, 4)):
        close(o[0, x.rows(n)], x.recurrence(n, before[start], beta=beta)[0])
        for t in range(x.lengths[n]):
            close(pool[rows[n, t]], x.recurrence(n, before[start], tokens=t + 1, beta=beta)[1])
    assert not o[0, x.offsets[2] :].any() and torch.equal(pool[7], before[7])


def decoding(x: Tokens, pool: torch.Tensor, **changed: Any) -> dict[str, Any]:
    rows = torch.tensor([1, 2], dtype=torch.int32)
    given = {**x.qkv, "initial_state": pool, "cu_seqlens": x.offsets, "ssm_state_indices": rows}
    return {**given, **changed}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"is_kda": True}, "is_kda"),
        ({"threshold": 10.0}, "threshold"),
        ({"beta": 2.0}, "beta"),
        ({"inplace_final_state": False}, "inplace_final_state"),
        ({"ssm_state_indices": None}, "ssm_state_indices"),
        ({"cu_seqlens": None}, "cu_seqlens"),
        ({"window": 3}, "window"),
    ],
)
def test_vllm_computes_what_is_declined(qwen: Any, changed: dict[str, Any], reason: str) -> None:
    x, pool, counts = Tokens(1, 1), paged_pool(3, HV, V, K), Counts(UPDATE)
    before = pool.clone()
    call = decoding(x, pool, **changed)
    if "window" in changed:  # an argument of a later vLLM
        with pytest.raises(TypeError, match="window"):
            qwen.fused_sigmoid_gating_delta_rule_update(**x.raw, **call)
    else:
        assert qwen.fused_sigmoid_gating_delta_rule_update(**x.raw, **call) == BY_VLLM
    assert (counts.served, counts.declined) == (0, 1) and reason in counts.reason
    assert torch.equal(pool[1:], before[1:])


def test_a_beta_for_each_channel_is_declined(olmo: Any) -> None:
    x, counts = Tokens(1, 1), Counts("fused_recurrent_gated_delta_rule")
    call = decoding(x, paged_pool(3, HV, V, K))
    for beta in (None, torch.ones(1, 2, HV, V)):
        assert olmo.fused_recurrent_gated_delta_rule(g=x.decay, beta=beta, **call) == BY_VLLM
        assert "beta" in counts.reason
    assert (counts.served, counts.declined) == (0, 2)


def test_a_buffer_for_the_output_of_prefill_is_declined(qwen: Any) -> None:
    x, counts = Tokens(9), Counts("chunk_gated_delta_rule")
    call = chunk_arguments(x, torch.randn(1, HV, V, K), core_attn_out=torch.empty(9 * HV * V))
    assert qwen.fla_chunk_gated_delta_rule(**call) == BY_VLLM
    assert counts.declined == 1 and "core_attn_out" in counts.reason


def test_columns_that_are_no_heads_are_declined(qwen: Any) -> None:
    x, counts = Tokens(1, 1), Counts(PACKED)
    call = {**x.raw, "scale": 0.25, "initial_state": paged_pool(3, HV, V, K), "out": torch.empty(2, 1, HV, V)}
    assert qwen.fused_recurrent_gated_delta_rule_packed_decode(
        mixed_qkv=x.mixed[:, :-1], ssm_state_indices=torch.tensor([1, 2]), **call
    ) == BY_VLLM  # fmt: skip
    assert counts.declined == 1 and "mixed_qkv" in counts.reason


def test_places_of_a_function_of_both_layers(layers: dict[str, Any]) -> None:
    place = Counts("chunk_gated_delta_rule")._now().place
    assert f"{QWEN}.fla_chunk_gated_delta_rule, replaced" in place
    assert f"{OLMO}.chunk_gated_delta_rule, replaced" in place
