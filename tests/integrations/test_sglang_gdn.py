"""SGLang's calls of its Triton kernel class for the gated delta rule, computed by kdacore: projections and gates as
columns of wider arrays, pools with rows far apart, padded offsets, several value heads a key head. Compared with the
recurrence written out in float64."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sglang_package
import torch
from torch import Tensor

import kdacore
from kdacore.integrations import sglang

K, V = 16, 24
HEADS = [(1, 1), (2, 6), (1, 16)]


class Model:
    """Random inputs of one call, and what the recurrence makes of each sequence alone."""

    def __init__(self, heads: tuple[int, int], lengths: tuple[int, ...], padding: int = 0) -> None:
        torch.manual_seed(sum(lengths) + padding)
        self.H, self.HV = heads
        self.lengths, T = lengths, sum(lengths) + padding
        self.width = 2 * self.H * K + self.HV * V
        self.mixed = torch.randn(T, self.width + 8)[:, : self.width]  # columns of a wider projection
        self.a, self.b = torch.randn(T, 3 * self.HV)[:, : 2 * self.HV].chunk(2, dim=-1)
        self.mixed[sum(lengths) :] = torch.nan
        self.A_log, self.dt_bias = torch.rand(self.HV), torch.randn(self.HV)
        self.offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)

    @property
    def qkv(self) -> tuple[Tensor, ...]:
        q, k, v = self.mixed.split([self.H * K, self.H * K, self.HV * V], dim=-1)
        heads = (q.unflatten(-1, (self.H, K)), k.unflatten(-1, (self.H, K)), v.unflatten(-1, (self.HV, V)))
        return tuple(x.unsqueeze(0) for x in heads)

    @property
    def log_decay(self) -> Tensor:
        """``[1, T, HV]``."""
        return (
            -self.A_log.exp() * torch.nn.functional.softplus(self.a.float() + self.dt_bias.float())
        ).unsqueeze(0)

    @property
    def beta(self) -> Tensor:
        return self.b.float().sigmoid().unsqueeze(0)

    def rows(self, n: int) -> slice:
        return slice(int(self.offsets[n]), int(self.offsets[n + 1]))

    def expected(self, n: int, state: Tensor, tokens: int | None = None) -> tuple[Tensor, Tensor]:
        """``o [t, HV, V]`` and the state ``[HV, V, K]`` after sequence n, or after its first ``tokens`` tokens."""
        state = state.double().clone()
        q, k, v = (x[0].double() for x in self.qkv)
        decay, beta = self.log_decay[0].double().exp(), self.beta[0].double()
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        q, k = (x.repeat_interleave(self.HV // self.H, 1) for x in (q, k))
        outputs = []
        for t in range(*self.rows(n).indices(len(q)))[:tokens]:
            state *= decay[t][:, None, None]
            change = beta[t][:, None] * (v[t] - (state * k[t][:, None]).sum(-1))
            state += change[:, :, None] * k[t][:, None]
            outputs.append((state * q[t][:, None]).sum(-1) * K**-0.5)
        return torch.stack(outputs) if outputs else v[:0], state

    def gate(self) -> dict[str, Any]:
        return {"a": self.a, "b": self.b, "A_log": self.A_log, "dt_bias": self.dt_bias}


def paged_pool(HV: int, rows: int = 6) -> Tensor:
    """Rows that lie far apart, with NaN between them and in row 0."""
    memory = torch.full((rows, 3 * HV * V * K), torch.nan)
    pool = memory[:, : HV * V * K].unflatten(-1, (HV, V, K))
    pool[1:] = torch.randn(rows - 1, HV, V, K)
    return pool


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want.float(), rtol=2e-5, atol=2e-5)


def counts(method: str) -> tuple[int, int]:
    (hook,) = [h for h in sglang.status() if h.function == f"TritonGDNKernel.{method}"]
    return hook.served, hook.declined


def reason(method: str) -> str:
    (hook,) = [h for h in sglang.status() if h.function == f"TritonGDNKernel.{method}"]
    return hook.reason


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    sglang_package.make(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield sglang_package.kernel(sglang.GDN_KERNEL)
    sglang_package.forget()


def prefill(x: Model, pool: Tensor, rows: Tensor) -> dict[str, Any]:
    """The keywords of SGLang 0.5.23."""
    q, k, v = x.qkv
    return {
        "q": q, "k": k, "v": v, "g": x.log_decay, "beta": x.beta, "ssm_states": pool, "cache_indices": rows,
        "query_start_loc": x.offsets, "state_checkpoint_cu_starts": None, "num_state_checkpoints": 0,
        "state_checkpoint_every_n_tokens": None, "output": None, "layer_id": 3,
        "extend_prefix_lens": torch.zeros(len(rows)), "track_state": None, "track_chunk_idx": None,
    }  # fmt: skip


@pytest.mark.parametrize("heads", HEADS)
def test_extend_returns_the_states_of_chunks(kernel: Any, heads: tuple[int, int]) -> None:
    x = Model(heads, (130, 0, 64), padding=3)
    pool = paged_pool(x.HV)
    before, rows = pool.clone(), torch.tensor([4, -1, 2])
    served, declined = counts("extend")
    with kdacore.record_selections() as ran:
        o, last, h = kernel.extend(**prefill(x, pool, rows))
    assert [s.op for s in ran] == ["chunk_gated_delta_rule"]
    assert counts("extend") == (served + 1, declined) and last is None
    for n in (0, 2):
        want, after = x.expected(n, before[rows[n]])
        close(o[0, x.rows(n)], want)
        close(pool[rows[n]], after)
    assert torch.equal(pool[[1, 3, 5]], before[[1, 3, 5]])
    for chunk in range(3):
        close(h[0, chunk], x.expected(0, before[4], 64 * chunk)[1])
    close(h[0, 3], before[2])


def test_extend_that_leaves_the_pool(kernel: Any) -> None:
    """Items of one request that are scored side by side start from one state."""
    x = Model((2, 4), (9, 5))
    pool = paged_pool(x.HV)
    before, rows = pool.clone(), torch.tensor([3, 3])
    o, _, _ = kernel.extend(**{**prefill(x, pool, rows), "inplace_update": False})
    assert torch.equal(pool[1:], before[1:])
    for n in range(2):
        close(o[0, x.rows(n)], x.expected(n, before[3])[0])


@pytest.mark.parametrize("heads", HEADS)
def test_decode_and_packed_decode(kernel: Any, heads: tuple[int, int]) -> None:
    x = Model(heads, (1, 1, 1))
    pool, other = paged_pool(x.HV), paged_pool(x.HV)
    other[1:] = pool[1:]
    before, rows = pool.clone(), torch.tensor([4, -1, 2], dtype=torch.int32)
    replay = {f"replayssm_{name}": None for name in ("d", "k", "g", "write_pos", "force_flush")}
    with kdacore.record_selections() as ran:
        packed = kernel.packed_decode(
            mixed_qkv=x.mixed, **x.gate(), scale=K**-0.5, ssm_states=pool, cache_indices=rows,
            num_v_heads=x.HV, head_v_dim=V, **replay,
        )  # fmt: skip
        q, k, v = x.qkv
        plain = kernel.decode(
            q=q, k=k, v=v, **x.gate(), ssm_states=other, cache_indices=rows, query_start_loc=x.offsets
        )
    assert [s.op for s in ran] == ["fused_recurrent_gated_delta_rule"] * 2
    for n in (0, 2):
        want, after = x.expected(n, before[rows[n]])
        for o, states in ((packed, pool), (plain, other)):
            assert o.shape == (1, 3, x.HV, V)
            close(o[0, n : n + 1], want)
            close(states[rows[n]], after)
    assert not packed[0, 1].any() and torch.equal(pool[[1, 3, 5]], before[[1, 3, 5]])


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
def test_dtypes_of_models_are_served(kernel: Any, state: torch.dtype) -> None:
    """bfloat16 but for ``A_log``, the log decay, beta of a prefill and, by default, the states."""
    x = Model((2, 8), (5, 1))
    for name in ("mixed", "a", "b", "dt_bias"):
        setattr(x, name, getattr(x, name).bfloat16())
    pool = paged_pool(x.HV).to(state)
    before, rows = pool.clone(), torch.tensor([4, 2], dtype=torch.int32)
    given = prefill(x, pool, rows)
    q, k, v = x.qkv
    before_counts = [counts("extend"), counts("decode"), counts("target_verify")]
    o, _, _ = kernel.extend(**given)
    verify = {**verification(x, before, 5), "cache_indices": rows, "intermediate_state_indices": rows}
    scratch = torch.zeros(5, 5, x.HV, V, K, dtype=state)
    verified = kernel.target_verify(**verify, intermediate_states_buffer=scratch)
    pool.copy_(before)
    decoded = kernel.decode(
        q=q, k=k, v=v, **x.gate(), ssm_states=pool, cache_indices=rows, query_start_loc=x.offsets
    )
    after_counts = [counts("extend"), counts("decode"), counts("target_verify")]
    assert after_counts == [(served + 1, declined) for served, declined in before_counts]
    for n in range(2):
        want, after = x.expected(n, before[rows[n]])
        for got in (o, decoded, verified):
            assert got.dtype is torch.bfloat16
            assert (got[0, x.rows(n)].double() - want).norm() <= 4.5e-3 * want.norm()
        for got in (pool[rows[n]], scratch[rows[n], x.lengths[n] - 1]):
            assert (got.double() - after).norm() <= 3.3e-3 * after.norm()


def test_columns_of_no_whole_key_head_are_declined(kernel: Any) -> None:
    x = Model((1, 2), (1,))
    got = kernel.packed_decode(
        mixed_qkv=x.mixed[:, 1:], **x.gate(), scale=1.0, ssm_states=paged_pool(2),
        cache_indices=torch.tensor([1]), num_v_heads=2, head_v_dim=V,
    )  # fmt: skip
    assert got == sglang_package.THEIRS and "mixed_qkv" in reason("packed_decode")


def test_decode_by_replay_is_declined(kernel: Any) -> None:
    x = Model((1, 2), (1,))
    ring = dict.fromkeys(("replayssm_d", "replayssm_k", "replayssm_g", "replayssm_write_pos"), torch.zeros(1))
    got = kernel.packed_decode(
        mixed_qkv=x.mixed, **x.gate(), scale=1.0, ssm_states=paged_pool(2), cache_indices=torch.tensor([1]),
        num_v_heads=2, head_v_dim=V, **ring,
    )  # fmt: skip
    assert got == sglang_package.THEIRS and "replayssm_d" in reason("packed_decode")


def verification(x: Model, pool: Tensor, steps: int) -> dict[str, Any]:
    q, k, v = x.qkv
    return {
        **x.gate(), "q": q, "k": k, "v": v, "ssm_states": pool, "query_start_loc": x.offsets,
        "cache_steps": steps, "retrieve_parent_token": None, "stable_rows": False,
    }  # fmt: skip


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("steps", [3, 4])
def test_verify_writes_scratch_rows_alone(kernel: Any, heads: tuple[int, int], steps: int) -> None:
    """Also with fewer drafts than the scratch has room for, and index arrays that are longer than the batch."""
    x = Model(heads, (steps, steps, steps))
    pool, scratch = paged_pool(x.HV), torch.full((5, 4, x.HV, V, K), 7.0)
    before = pool.clone()
    rows = torch.tensor([4, 2, -1, 1], dtype=torch.int32)
    slots = torch.tensor([3, 0, -1, 2], dtype=torch.int32)
    given = verification(x, pool, steps)
    given["cache_indices"], given["intermediate_state_indices"] = rows, slots
    served, declined = counts("target_verify")
    o = kernel.target_verify(**given, intermediate_states_buffer=scratch)
    assert counts("target_verify") == (served + 1, declined)
    assert torch.equal(pool[1:], before[1:])
    for n in (0, 1):
        close(o[0, x.rows(n)], x.expected(n, before[rows[n]])[0])
        for t in range(steps):
            close(scratch[slots[n], t], x.expected(n, before[rows[n]], t + 1)[1])
        assert (scratch[slots[n], steps:] == 7.0).all()
    assert (scratch[[1, 2, 4]] == 7.0).all() and not o[0, x.rows(2)].any()
    close(kernel.target_verify(**given, intermediate_states_buffer=None), o)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"retrieve_parent_token": torch.zeros(1, 3)}, "retrieve_parent_token"),
        (
            {"intermediate_states_buffer": torch.zeros(5, 3, 2, V, K).transpose(0, 1)},
            "intermediate_states_buffer",
        ),
        ({"cache_steps": 9}, "cache_steps"),
        ({"a_new_option": True}, "a_new_option"),
    ],
)
def test_what_is_left_to_sglang(kernel: Any, changed: dict[str, Any], named: str) -> None:
    x = Model((1, 2), (3,))
    given = verification(x, paged_pool(2), 3)
    indices = torch.tensor([1])
    given |= {"cache_indices": indices, "intermediate_state_indices": indices}
    given["intermediate_states_buffer"] = torch.zeros(5, 3, 2, V, K)
    assert kernel.target_verify(**{**given, **changed}) == sglang_package.THEIRS
    assert named in reason("target_verify")


def test_a_snapshot_that_sglangs_kernel_would_write_is_left_to_it(kernel: Any) -> None:
    x = Model((1, 2), (3,))
    given = prefill(x, paged_pool(2), torch.tensor([1]))
    assert kernel.extend(**{**given, "track_state": torch.zeros(1)}) == sglang_package.THEIRS
    assert "track_state" in reason("extend")


def test_sglang_without_a_gpu_is_left_alone(kernel: Any) -> None:
    """Behind the same class it has other kernels there, whose layout of states is not known."""
    kernel.supports_packed_decode = False
    x = Model((1, 2), (3,))
    assert kernel.extend(**prefill(x, paged_pool(2), torch.tensor([1]))) == sglang_package.THEIRS
    assert "GPU" in reason("extend")
