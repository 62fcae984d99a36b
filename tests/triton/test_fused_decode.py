"""The fused decode ops on Triton against the float64 oracle: convolution, state, records, windows and gated norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decode_inputs import (
    GDN,
    KDA,
    MODEL,
    NAN,
    UNBOUNDED,
    apart,
    check,
    copied,
    draw,
    request_of,
    run,
    same_bits,
)

import kdacore
from kdacore_triton import decode_tiles, verifiers

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
OPS = {KDA: MODEL, GDN: UNBOUNDED}


@pytest.mark.first_cases(4)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_token(op: str, v_first: bool, dtype: torch.dtype) -> None:
    """Four sequences, one of them without a slot."""
    x = draw(op, 4, dtype=dtype, v_first=v_first, slots=[3, 0, 5, 1], K=16, V=32)
    check(op, x, state_v_first=v_first, **OPS[op])


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("HV", [3, 8])
def test_value_heads_that_share_a_window(op: str, HV: int) -> None:
    """Several value heads read one window of q and k, which is moved once: one token and several."""
    H = 1 if HV == 3 else 2
    check(op, draw(op, 3, H=H, HV=HV), **OPS[op])
    check(op, draw(op, (2, 0, 4, 1), H=H, HV=HV, padding=3, seed=1), **OPS[op])


@pytest.mark.first_cases(3)
@pytest.mark.parametrize("taps", [0, 2, 3, 4])
@pytest.mark.parametrize("gated", [False, True])
def test_widths_of_the_convolution(taps: int, gated: bool) -> None:
    """0: x comes convolved."""
    check(KDA, draw(KDA, (1, 16, 0, 3), taps=taps, gated=gated, slots=[2, 1, 3, -1]), **MODEL)
    check(GDN, draw(GDN, 2, taps=taps, gated=gated), **UNBOUNDED)


@pytest.mark.first_cases(2)
@pytest.mark.parametrize(("K", "V"), [(60, 100), (17, 33), (64, 64), (128, 128), (100, 60)])
def test_head_dims(K: int, V: int) -> None:
    check(KDA, draw(KDA, 2, H=1, HV=2, K=K, V=V), **MODEL)
    check(KDA, draw(KDA, 2, T=2, H=1, HV=1, K=K, V=V), **MODEL)


def test_large_heads_need_no_whole_tile_without_a_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_tiles, "MAX_TILE", 16 * 16)
    x = draw(KDA, (2, 1), H=1, HV=2, V=40, gated=False, records=3, columns=6)
    check(KDA, x, **MODEL)
    request = request_of(KDA, draw(KDA, 2, V=40), inplace_state=True, **MODEL)
    reason = verifiers.norm_dims(request)
    assert reason is not None and reason.code == "head_dim"
    assert verifiers.norm_dims(request_of(KDA, draw(KDA, 2), inplace_state=True, **MODEL)) is None


def test_strides_of_everything() -> None:
    """Pools, records, windows and tokens with NaN between any two numbers, except the channels of x."""
    x = draw(KDA, 3, T=2, records=3, windows=True, HV=4)
    wide = torch.full((3, 5, 2 * x.x.shape[2]), NAN)
    lying = {name: apart(getattr(x, name)) for name in ("conv_state", "conv_windows", "initial_state")}
    lying |= {name: apart(getattr(x, name)) for name in ("record_update", "record_key", "record_decay")}
    lying |= {
        name: apart(getattr(x, name)) for name in ("g", "beta", "z", "conv_weight", "conv_bias", "dt_bias")
    }
    lying["x"] = wide[:, ::2, : x.x.shape[2]][:, :2].copy_(x.x)
    lying["out"] = apart(torch.full((3, 2, 4, 16), NAN))
    x = x._replace(**lying)
    got = check(KDA, x, **MODEL)
    assert torch.equal(got.o.cpu(), x.out)


def test_padding_rows_of_out_stay() -> None:
    x = draw(GDN, (2, 0, 1), padding=4)
    out = torch.full((1, 7, 2, 16), 7.0)
    x = x._replace(out=out)
    run(request_of(GDN, x, inplace_state=True, **UNBOUNDED), x)
    assert (out[:, 3:] == 7).all() and not (out[:, :3] == 7).any()


def test_other_rows_of_the_convolution_and_new_sequences() -> None:
    x = draw(
        KDA, 5, T=2, slots=[3, 5, 0, 1, 2], conv_indices=torch.tensor([4, -1, 2, 0, 5]),
        has_initial_state=torch.tensor([True, True, True, True, False]),
    )  # fmt: skip
    for i in (0, 4, 5):
        x.conv_state[i] = torch.randn(x.conv_state[i].shape)
    check(KDA, x, **MODEL)


def test_nothing_is_written_unless_asked() -> None:
    x = draw(KDA, 2)
    before = copied(x)
    got = run(request_of(KDA, x, output_final_state=True, **MODEL), x)
    assert got.final_state.shape == (2, 2, 16, 16)
    for a, b in zip(x, before, strict=True):
        assert a is None or same_bits(a, b)


# --- candidates --------------------------------------------------------------------------------------------------


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("HV", [2, 6])
def test_records(op: str, windows: bool, HV: int) -> None:
    """Ragged candidates, replays of none, some and all records, one sequence without a row and one without a slot."""
    x = draw(
        op, (3, 1, 4, 2, 0), HV=HV, records=4, windows=windows, columns=3 if windows else 6,
        slots=[3, 5, 1, 0, 2], padding=2,
    )  # fmt: skip
    x.record_indices.copy_(torch.tensor([4, 2, -1, 1, 3]))
    x.num_replayed.copy_(torch.tensor([4, 0, 2, 1, 3]))
    check(op, x, **OPS[op])


@pytest.mark.parametrize("windows", [False, True])
def test_a_state_and_a_window_for_each_candidate(windows: bool) -> None:
    """vLLM's way with long rows, SGLang's with windows beside the pool."""
    table = torch.tensor([[1, 2, 3], [4, -1, 6], [7, 8, 9]], dtype=torch.int32)
    x = draw(KDA, 3, T=3, columns=5, windows=windows)
    more = {"initial_state": torch.randn(10, 2, 16, 16), "conv_indices": torch.tensor([2, 3, 1])}
    x = x._replace(state_indices=table, num_accepted_tokens=torch.tensor([2, 1, 0]), **more)
    check(KDA, x, **MODEL)


@pytest.mark.parametrize("by_records", [False, True])
def test_windows_that_share_memory(by_records: bool) -> None:
    """Each begins one token after the one before, as SGLang has them for the gated delta rule. The call does what it
    does with the same windows in memory of their own."""
    lengths, rows = (3, 1, 2), [3, 2, 0]
    table = torch.randperm(12, generator=torch.Generator().manual_seed(4)).view(3, 4)

    def call(share: bool) -> tuple[Any, Any, torch.Tensor]:
        x = draw(GDN, lengths, H=1, records=4 if by_records else 0, columns=3, slots=[3, 5, 2])
        D = x.x.shape[2]
        memory = torch.randn(4, D, 4 + 2, generator=torch.Generator().manual_seed(2))
        windows = memory.as_strided((4, 4, 3, D), (6 * D, 1, 1, 6))
        x = x._replace(conv_windows=windows if share else windows.clone(), record_indices=torch.tensor(rows))
        counts = torch.tensor([2, 1, 3])
        if by_records:
            x.num_replayed.copy_(counts)
        else:
            pool = torch.randn(12, 2, 16, 16, generator=torch.Generator().manual_seed(3))
            more = {"initial_state": pool, "conv_indices": x.state_indices, "num_accepted_tokens": counts}
            x = x._replace(state_indices=table, **more)
        return run(request_of(GDN, x, inplace_state=True, **UNBOUNDED), x).o, x, memory

    o, apart_from_others, expected = call(False)
    for row, length in zip(rows, lengths, strict=True):
        for t in range(length):
            expected[row, :, t : t + 3] = apart_from_others.conv_windows[row, t].T
    got, x, memory = call(True)
    assert same_bits(got, o) and same_bits(memory, expected)
    for name in ("initial_state", "conv_state"):
        assert same_bits(getattr(x, name), getattr(apart_from_others, name))


def test_counts_that_leave_their_rows_touch_nothing_else() -> None:
    """More tokens in a pack than a row has records, columns or windows for."""
    x = draw(KDA, (5, 1), records=2, columns=4, slots=[2, 1])
    x.num_replayed.copy_(torch.tensor([9, -3]))
    before = copied(x)
    run(request_of(KDA, x, inplace_state=True, null_index=0, **MODEL), x)
    for name in ("record_update", "record_key", "record_decay"):
        assert same_bits(getattr(x, name)[2], getattr(before, name)[2])
    assert same_bits(x.conv_state[[0, 3, 4]], before.conv_state[[0, 3, 4]])


# --- what does not depend on what ----------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_more_tokens_change_no_earlier_bit(op: str) -> None:
    x = draw(op, 2, T=5)
    request = request_of(op, x, **OPS[op])
    whole = run(request, x).o
    for T in (1, 3):
        tokens = {name: getattr(x, name)[:, :T].contiguous() for name in ("x", "g", "beta", "z")}
        short = x._replace(**tokens)
        assert same_bits(run(request_of(op, short, **OPS[op]), short).o, whole[:, :T])


def test_the_public_call_runs_here() -> None:
    x = {name: a for name, a in draw(KDA, 2)._asdict().items() if a is not None}
    with kdacore.record_selections() as ran:
        o, final = kdacore.fused_decode_kda(**x, **MODEL, inplace_state=True, backend="triton")
    assert [s.backend for s in ran] == ["triton"]
    assert o.shape == (2, 1, 2, 16) and final is None


def test_a_large_norm_is_declined_by_name() -> None:
    arrays: Any = {
        name: a for name, a in draw(KDA, 1, H=1, HV=1, K=256, V=256)._asdict().items() if a is not None
    }
    with pytest.raises(kdacore.UnsupportedError, match="head_dim"):
        kdacore.fused_decode_kda(**arrays, **MODEL, inplace_state=True, backend="triton")
