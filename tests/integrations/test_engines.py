"""SGLang's and vLLM's calls, with their tensors, computed by kdacore: strided projections, paged pools, null slots,
padded offsets. The engines are packages made for the test that have the modules and functions that kdacore hooks."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_vllm
import pytest
import sglang_package
import torch

import kdacore
from kdacore import config
from kdacore.integrations import sglang, vllm

H, K = 2, 16
BOUND = -5.0
KDA = "vllm.models.kimi_k3.nvidia.ops.third_party.kda"


class Model:
    """Random inputs of one call, and what the recurrence makes of each sequence alone."""

    def __init__(self, lengths: tuple[int, ...], padding: int = 0, lower_bound: float | None = BOUND) -> None:
        torch.manual_seed(sum(lengths) + padding)
        self.lengths, T = lengths, sum(lengths) + padding
        self.tokens = sum(lengths)
        self.mixed = torch.randn(T, 3 * H * K + 8)[:, : 3 * H * K]  # columns of a wider projection
        self.g, self.beta = torch.randn(1, T, H, K), torch.randn(1, T, H)
        self.mixed[self.tokens :] = torch.nan
        self.A_log, self.dt_bias = torch.rand(H), torch.randn(H * K)
        self.offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
        self.lower_bound = lower_bound

    @property
    def qkv(self) -> tuple[torch.Tensor, ...]:
        """Strided ``[1, T, H, K]`` each."""
        return tuple(x.unflatten(-1, (H, K)).unsqueeze(0) for x in self.mixed.split(H * K, dim=-1))

    def expected(self, n: int, state: torch.Tensor, tokens: int | None = None) -> tuple[Any, Any]:
        """``o`` and the state after sequence n (after its first ``tokens`` tokens), by the recurrence."""
        start = int(self.offsets[n])
        here = slice(start, start + (self.lengths[n] if tokens is None else tokens))
        o, final = kdacore.fused_recurrent_kda(
            *(x[:, here] for x in (*self.qkv, self.g, self.beta)),
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            lower_bound=self.lower_bound,
            initial_state=state[None],
            output_final_state=True,
            use_gate_in_kernel=True,
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            state_v_first=True,
        )
        return o[0], final[0]


def paged_pool(rows: int) -> torch.Tensor:
    """Rows that lie far apart, with NaN between them and in row 0."""
    memory = torch.full((rows, 3 * H * K * K), torch.nan)
    pool = memory[:, : H * K * K].unflatten(-1, (H, K, K))
    pool[1:] = torch.randn(rows - 1, H, K, K)
    return pool


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


# --- vLLM -----------------------------------------------------------------------------------------------------------

SOURCE = "\n".join(
    f"def {name}(*args, **kwargs):\n    return 'computed by vLLM'"
    for name in (
        "chunk_kda_with_fused_gate",
        "fused_recurrent_kda",
        "fused_recurrent_kda_packed_decode",
        "_flashkda_prefill",
    )
)


def classes_of(module: str) -> str:
    """Classes whose methods are replaced there."""
    methods = [name.split(".") for name in vllm.REPLACED[module] if "." in name]
    body = "".join(f"    def {name}(self): ...\n" for _, name in methods)
    return f"\nclass {methods[0][0]}:\n{body}" if methods else ""


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Packages of the engines' names; what was imported of them is forgotten afterwards."""
    sources = {module: SOURCE + classes_of(module) for module in vllm.REPLACED} | fake_vllm.SUPPORT
    for module, text in sources.items():
        folder = tmp_path.joinpath(*module.split("."))
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(text)
    sglang_package.make(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    vllm.deactivate()
    sglang_package.forget()
    for name in [n for n in sys.modules if n.partition(".")[0] == "vllm"]:
        del sys.modules[name]


@pytest.fixture
def kda(engines: None) -> Any:
    """vLLM's functions, imported after kdacore was activated."""
    vllm.activate()
    return importlib.import_module(KDA)


def test_vllm_prefill(kda: Any) -> None:
    x = Model((70, 0, 17), padding=5)
    q, k, v = x.qkv
    states = torch.randn(3, H, K, K)
    out = torch.full_like(v, 7.0)
    with kdacore.record_selections() as ran:
        o, final = kda.chunk_kda_with_fused_gate(
            q=q, k=k, v=v, raw_g=x.g, raw_beta=x.beta, A_log=x.A_log, g_bias=x.dt_bias, lower_bound=BOUND,
            initial_state=states, output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=x.offsets,
            out=out,
        )  # fmt: skip
    assert [s.op for s in ran] == ["chunk_kda"] and o is out
    for n in (0, 2):
        want, state = x.expected(n, states[n])
        close(o[0, x.offsets[n] : x.offsets[n + 1]], want)
        close(final[n], state)
    close(final[1], states[1])
    assert (out[0, x.tokens :] == 7.0).all()


@pytest.mark.parametrize("checkpoints", [None, (32, 0), (0, 16)])
def test_vllm_prefill_into_the_buffers_of_flashkda(engines: None, checkpoints: Any) -> None:
    vllm.activate()
    module = importlib.import_module("vllm.models.kimi_k3.nvidia.kda")
    x = Model((70, 33))
    states, final, kept = torch.randn(2, H, K, K), torch.empty(2, H, K, K), torch.full((2, H, K, K), 7.0)
    out = torch.empty_like(x.qkv[2])
    given = {}
    if checkpoints:
        given = {"checkpoint_state": kept, "checkpoint_offsets": torch.tensor(checkpoints, dtype=torch.int32)}
    with kdacore.record_selections() as ran:
        o, got = module._flashkda_prefill(
            *x.qkv,
            x.g,
            x.beta,
            x.A_log,
            x.dt_bias,
            BOUND,
            states,
            x.offsets,
            out,
            final,
            torch.empty(9),
            **given,
        )
    assert len(ran) == 1 and o is out and got is final
    for n in range(2):
        want, state = x.expected(n, states[n])
        close(out[0, x.offsets[n] : x.offsets[n + 1]], want)
        close(final[n], state)
        if checkpoints and checkpoints[n]:
            close(kept[n], x.expected(n, states[n], checkpoints[n])[1])
        else:
            assert (kept[n] == 7.0).all()


def test_vllm_packed_decode_with_null_slots(kda: Any) -> None:
    x = Model((1, 1, 1, 1))
    pool = paged_pool(5)
    before = pool.clone()
    rows = torch.tensor([3, 0, 1, 0], dtype=torch.int32)
    with kdacore.record_selections() as ran:
        o, state = kda.fused_recurrent_kda_packed_decode(
            mixed_qkv=x.mixed, raw_g=x.g, raw_beta=x.beta, A_log=x.A_log, dt_bias=x.dt_bias, lower_bound=BOUND,
            initial_state=pool, state_indices=rows, out=None,
        )  # fmt: skip
    assert len(ran) == 1 and state is pool and o.shape == (1, 4, H, K)
    for n, row in enumerate(rows.tolist()):
        if row == 0:
            assert not o[0, n].any()
        else:
            want, after = x.expected(n, before[row])
            close(o[0, n : n + 1], want)
            close(pool[row], after)
    assert pool[0].isnan().all() and torch.equal(pool[[2, 4]], before[[2, 4]])


def test_vllm_speculative_decode_with_padded_graphs(kda: Any) -> None:
    """Index arrays longer than the batch; a padded sequence has one token, one accepted, and the null slot."""
    x = Model((3, 2, 1), padding=4)
    pool = paged_pool(8)
    before = pool.clone()
    rows = torch.tensor([[1, 2, 3], [4, 5, 6], [0, 0, 0], [9, 9, 9]], dtype=torch.int32)
    accepted = torch.tensor([2, 1, 1, 1], dtype=torch.int32)
    q, k, v = x.qkv
    with kdacore.record_selections() as ran:
        o, _ = kda.fused_recurrent_kda(
            q=q, k=k, v=v, raw_g=x.g, raw_beta=x.beta, A_log=x.A_log, dt_bias=x.dt_bias, lower_bound=BOUND,
            initial_state=pool, cu_seqlens=x.offsets, ssm_state_indices=rows, num_accepted_tokens=accepted,
        )  # fmt: skip
    assert len(ran) == 1
    for n, start in ((0, 2), (1, 4)):
        for t in range(x.lengths[n]):
            close(pool[rows[n, t]], x.expected(n, before[start], t + 1)[1])
        close(o[0, x.offsets[n] : x.offsets[n + 1]], x.expected(n, before[start])[0])
    assert not o[0, x.offsets[2] :].any() and pool[0].isnan().all()
    assert torch.equal(pool[[6, 7]], before[[6, 7]])


def test_vllm_glm(engines: None) -> None:
    vllm.activate()
    glm = importlib.import_module("vllm.models.glm5next.nvidia.ops.third_party.kda")
    x = Model((4, 9))
    q, k, v = x.qkv
    states = torch.randn(2, H, K, K)
    o, final = glm.chunk_kda_with_fused_gate(
        q=q, k=k, v=v, raw_g=x.g, beta=x.beta.sigmoid(), A_log=x.A_log.view(1, 1, H, 1), g_bias=x.dt_bias,
        initial_state=states, output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=x.offsets,
        safe_gate=True, lower_bound=BOUND,
    )  # fmt: skip
    pool, step = paged_pool(3), Model((1, 1))
    before, rows = pool.clone(), torch.tensor([2, 0], dtype=torch.int32)
    q, k, v = step.qkv
    decoded, _ = glm.fused_recurrent_kda(
        q=q, k=k, v=v, g=step.g, beta=step.beta, initial_state=pool, cu_seqlens=step.offsets,
        ssm_state_indices=rows, sigmoid_beta=True, a_log=step.A_log, g_bias=step.dt_bias, compute_gate=True,
        lower_bound=BOUND,
    )  # fmt: skip
    close(o[0, :4], x.expected(0, states[0])[0])
    close(final[1], x.expected(1, states[1])[1])
    close(decoded[0, :1], step.expected(0, before[2])[0])
    close(pool[2], step.expected(0, before[2])[1])
    assert not decoded[0, 1].any()


def test_vllm_computes_what_kdacore_declines(kda: Any) -> None:
    assert kda.chunk_kda_with_fused_gate(window=64) == "computed by vLLM"
    (hook,) = [h for h in vllm.status() if h.function == "chunk_kda_with_fused_gate"]
    assert "window" in hook.reason and hook.place.startswith(KDA)
    vllm.deactivate()
    assert kda.fused_recurrent_kda() == "computed by vLLM" and not vllm.is_active()


def test_modules_imported_before_are_hooked_too(engines: None) -> None:
    module = importlib.import_module(KDA)
    original = module.fused_recurrent_kda
    vllm.activate()
    assert module.fused_recurrent_kda is not original
    vllm.deactivate()
    assert module.fused_recurrent_kda is original
    assert KDA not in [name for name in sys.modules if name.startswith("vllm.models.glm")]


# --- SGLang ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def kernel(engines: None) -> Any:
    """SGLang's kernel class as it is once the hooks are applied."""
    return sglang_package.kernel(sglang.KDA_KERNEL)


def test_sglang_extend_with_tracked_states(kernel: Any) -> None:
    x = Model((130, 0, 64), padding=3)
    pool = paged_pool(6)
    before, rows = pool.clone(), torch.tensor([4, -1, 2])
    q, k, v = x.qkv
    tracked = torch.full((3, H, K, K), 7.0)
    with kdacore.record_selections() as ran:
        o, h = kernel.extend(
            q, k, v, x.g, x.beta, ssm_states=pool, cache_indices=rows, query_start_loc=x.offsets, A_log=x.A_log,
            dt_bias=x.dt_bias, lower_bound=BOUND, beta_is_raw=True, return_intermediate_states=True,
            track_state=tracked, track_chunk_idx=torch.tensor([1, -1, 1]), layer_id=3, chunk_indices=None,
        )  # fmt: skip
    assert len(ran) == 1
    for n in (0, 2):
        want, after = x.expected(n, before[rows[n]])
        close(o[0, x.offsets[n] : x.offsets[n + 1]], want)
        close(pool[rows[n]], after)
    close(tracked[0], x.expected(0, before[4], 64)[1])
    assert (tracked[1:] == 7.0).all(), "there is no such chunk"
    close(h[0, 1], x.expected(0, before[4], 64)[1])
    close(h[0, 3], before[2])


def test_sglang_decode_and_packed_decode(kernel: Any) -> None:
    x = Model((1, 1, 1))
    pool = paged_pool(6)
    before, rows = pool.clone(), torch.tensor([4, -1, 2], dtype=torch.int32)
    shared: dict[str, Any] = {
        "A_log": x.A_log.view(1, 1, H, 1),
        "dt_bias": x.dt_bias,
        "cache_indices": rows,
        "lower_bound": None,
    }
    x.lower_bound = None
    packed = kernel.packed_decode(
        mixed_qkv=x.mixed, a=x.g.reshape(3, 1, H * K), b=x.beta.transpose(0, 1), scale=K**-0.5, num_v_heads=H,
        head_v_dim=K, ssm_states=pool, replayssm_d=None, replayssm_write_pos=None, **shared,
    )  # fmt: skip
    other = paged_pool(6)
    other[1:] = before[1:]
    q, k, v = x.qkv
    plain = kernel.decode(
        q, k, v, x.g.flatten(-2), x.beta, ssm_states=other, query_start_loc=x.offsets, **shared
    )
    for n in (0, 2):
        want, after = x.expected(n, before[rows[n]])
        for o, states in ((packed, pool), (plain, other)):
            close(o[0, n : n + 1], want)
            close(states[rows[n]], after)
    assert not packed[0, 1].any() and torch.equal(pool[[1, 3, 5]], before[[1, 3, 5]])


def test_sglang_verify_writes_scratch_rows_alone(kernel: Any) -> None:
    x = Model((3, 2))
    pool, scratch = paged_pool(6), torch.full((5, 6, H, K, K), 7.0)  # room for more drafts
    before, rows, slots = pool.clone(), torch.tensor([4, 2]), torch.tensor([3, 0])
    q, k, v = x.qkv
    given: dict[str, Any] = {
        "A_log": x.A_log,
        "dt_bias": x.dt_bias,
        "q": q,
        "k": k,
        "v": v,
        "a": x.g,
        "b": x.beta,
        "ssm_states": pool,
        "cache_indices": rows,
        "query_start_loc": x.offsets,
        "lower_bound": BOUND,
        "intermediate_state_indices": slots,
        "cache_steps": 4,
        "retrieve_parent_token": None,
    }
    o = kernel.target_verify(intermediate_states_buffer=scratch, **given)
    assert torch.equal(pool[1:], before[1:])
    for n, slot in enumerate(slots.tolist()):
        close(o[0, x.offsets[n] : x.offsets[n + 1]], x.expected(n, before[rows[n]])[0])
        for t in range(x.lengths[n]):
            close(scratch[slot, t], x.expected(n, before[rows[n]], t + 1)[1])
        assert (scratch[slot, x.lengths[n] :] == 7.0).all()
    assert (scratch[[1, 2, 4]] == 7.0).all()
    close(kernel.target_verify(intermediate_states_buffer=None, **given), o)
    tree = {**given, "retrieve_parent_token": torch.zeros(2, 3), "intermediate_states_buffer": scratch}
    assert kernel.target_verify(**tree) == sglang_package.THEIRS


def test_sglang_computes_when_inactive(kernel: Any) -> None:
    sglang.deactivate()
    x = torch.zeros(1)
    given = {"ssm_states": x, "cache_indices": x, "query_start_loc": x}
    assert kernel.extend(x, x, x, x, x, **given) == sglang_package.THEIRS and not sglang.is_active()


# --- the entry points -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "active"), [("", (False, False)), ("vllm", (True, False)), ("vllm,sglang", (True, True))]
)
def test_plugins_sleep_unless_named(
    engines: None, monkeypatch: pytest.MonkeyPatch, named: str, active: tuple[bool, bool]
) -> None:
    monkeypatch.setenv("KDACORE_INTEGRATIONS", named)
    config.refresh()
    try:
        vllm.plugin()
        sglang.plugin()
        assert (vllm.is_active(), sglang.is_active()) == active
    finally:
        monkeypatch.undo()
        config.refresh()
