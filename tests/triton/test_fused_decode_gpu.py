"""What only a GPU can show of the decode step: races on shared windows, bits over many steps, graphs, host time."""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest
import torch
from decode_inputs import GDN, KDA, MODEL, PARTS, UNBOUNDED, check, draw, on, request_of, same_bits
from test_candidate_records import check_bits, recurrent_call

import kdacore
from kdacore.types import Request
from kdacore_triton import decode, recurrent

pytestmark = pytest.mark.gpu
OPS = {KDA: MODEL, GDN: UNBOUNDED}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16, torch.float16])
def test_sizes_of_models(op: str, K: int, v_first: bool, state: torch.dtype) -> None:
    sizes: dict[str, Any] = {"K": K, "V": K, "v_first": v_first, "state": state, "dtype": torch.bfloat16}
    H, HV = (16, 32) if op == GDN else (6, 6)
    check(op, draw(op, 5, H=H, HV=HV, slots=[3, 0, 5, 1, 2], **sizes), state_v_first=v_first, **OPS[op])
    x = draw(op, (4, 1, 3, 0, 2), H=2, HV=8, records=4, columns=6, slots=[3, 5, 1, 0, 2], padding=3, **sizes)
    x.record_indices.copy_(torch.tensor([4, 2, -1, 1, 3]))
    check(op, x, state_v_first=v_first, **OPS[op])


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("group", [1, 3, 16])
def test_a_window_of_many_value_heads_is_moved_once(op: str, group: int) -> None:
    """The same call many times over: a window that was written before its last read would change some result."""
    x = on("cuda", draw(op, 64, H=4, HV=4 * group, K=128, V=128, dtype=torch.bfloat16, taps=4))
    request = request_of(op, x, inplace_state=True, **OPS[op])
    want = copied_there(x)
    o = decode.forward(request, want).o
    for _ in range(50):
        again = copied_there(x)
        assert same_bits(decode.forward(request, again).o, o)
        assert same_bits(again.conv_state, want.conv_state)
        assert same_bits(again.initial_state, want.initial_state)


def copied_there(x: Any) -> Any:
    return type(x)(*(None if a is None else a.clone() for a in x))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("fused", [True, False])
def test_float32_states_are_those_of_plain_decoding(op: str, fused: bool) -> None:
    for seed in range(8):
        check_bits(op, fused, steps=12, seed=seed)


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("op", ["fused_recurrent_kda", "fused_recurrent_gated_delta_rule"])
@pytest.mark.parametrize("K", [64, 128])
def test_replays_have_the_bits_of_the_plain_kernel(op: str, v_first: bool, K: int) -> None:
    """At the head dims of models: three tokens through records, then replayed, and one by one without."""
    options = (MODEL if op == "fused_recurrent_kda" else UNBOUNDED) | {
        "state_v_first": v_first,
        "inplace_state": True,
    }
    x = on(
        "cuda",
        recurrent_call(op, 32, T=3, H=8, HV=8, K=K, V=K, records=3, dtype=torch.bfloat16, v_first=v_first),
    )
    none = torch.zeros_like(x.num_replayed)
    speculating = x._replace(initial_state=x.initial_state.clone(), num_replayed=none)
    o = recurrent.forward(request_of(op, speculating, **options), speculating).o
    replaying = speculating._replace(num_replayed=none + 3)
    recurrent.forward(request_of(op, replaying, **options), replaying)
    plain = x._replace(**dict.fromkeys((*PARTS, "record_indices", "num_replayed")))
    for t in range(3):
        token = {name: getattr(x, name)[:, t : t + 1].contiguous() for name in ("q", "k", "v", "g", "beta")}
        step = plain._replace(**token)
        assert same_bits(recurrent.forward(request_of(op, step, **options), step).o, o[:, t : t + 1])
    named = x.state_indices.long()
    assert same_bits(speculating.initial_state[named], plain.initial_state[named])


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("K", [64, 128])
def test_fused_replays_have_the_bits_of_one_token_at_a_time(op: str, v_first: bool, K: int) -> None:
    options = OPS[op] | {"state_v_first": v_first, "inplace_state": True}
    sizes: dict[str, Any] = {"H": 4, "HV": 8, "K": K, "V": K, "dtype": torch.bfloat16, "v_first": v_first}
    x = on("cuda", draw(op, 32, T=3, records=3, columns=5, **sizes))
    speculating = copied_there(x)._replace(num_replayed=torch.zeros_like(x.num_replayed))
    o = decode.forward(request_of(op, speculating, **options), speculating).o
    replaying = speculating._replace(num_replayed=torch.full_like(x.num_replayed, 3))
    decode.forward(request_of(op, replaying, **options), replaying)
    plain = copied_there(x)._replace(**dict.fromkeys((*PARTS, "record_indices", "num_replayed")))
    for t in range(3):
        token = {name: getattr(x, name)[:, t : t + 1].contiguous() for name in ("x", "g", "beta", "z")}
        step = plain._replace(**token)
        assert same_bits(decode.forward(request_of(op, step, **options), step).o, o[:, t : t + 1])
    named = x.state_indices.long()
    assert same_bits(speculating.initial_state[named], plain.initial_state[named])


def served(op: str, B: int, T: int = 1, **more: Any) -> tuple[Request, Any]:
    x = on("cuda", draw(op, B, T=T, H=8, HV=8, K=128, V=128, dtype=torch.bfloat16, **more))
    return request_of(op, x, inplace_state=True, null_index=0, **OPS[op]), x


@pytest.mark.parametrize("records", [0, 3])
def test_graph_replay_equals_eager(records: int) -> None:
    more: dict[str, Any] = {"T": 3, "records": 3, "columns": 5} if records else {}
    request, x = served(KDA, 4, **more)
    eager = copied_there(x)
    want = [decode.forward(request, eager).o.clone() for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = decode.forward(request, x).o
    for step in want:
        graph.replay()
        assert same_bits(o, step)
    for a, b in zip(x, eager, strict=True):
        assert a is None or same_bits(a, b)


def test_counts_stay_on_the_device() -> None:
    """A captured graph serves other rows and other counts of replays."""
    request, x = served(KDA, 4, T=3, records=3, columns=5)
    decode.forward(request, copied_there(x))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = decode.forward(request, x).o
    for counts in ([0, 1, 2, 3], [3, 3, 0, 0]):
        x.num_replayed.copy_(torch.tensor(counts))
        want = copied_there(x)
        expected = decode.forward(request, want).o
        graph.replay()
        assert same_bits(o, expected) and same_bits(x.initial_state, want.initial_state)


def test_commit_in_a_graph() -> None:
    _, x = served(KDA, 4, T=3, records=3, columns=5)
    given = {"record_indices": x.record_indices, "num_replayed": x.num_replayed, "conv_state": x.conv_state}
    records = (x.record_update, x.record_key, x.record_decay)

    def step() -> None:
        kdacore.commit_records(x.initial_state, x.state_indices, records, **given, backend="triton")

    before = copied_there(x)
    step()
    after = copied_there(x)
    x.initial_state.copy_(before.initial_state)
    x.conv_state.copy_(before.conv_state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    assert same_bits(x.initial_state, after.initial_state) and same_bits(x.conv_state, after.conv_state)


def test_pool_beyond_32_bit_offsets() -> None:
    P, H, K = 4200, 32, 128
    pool = torch.empty(P, H, K, K, dtype=torch.bfloat16, device="cuda").normal_()
    assert pool.numel() > 2**31
    rows = torch.tensor([4199, 0, 4097], device="cuda")
    x = on("cuda", draw(KDA, 3, H=H, HV=H, K=K, V=K, dtype=torch.bfloat16, state=torch.bfloat16))
    conv = torch.randn(P, x.x.shape[2], 3, device="cuda").bfloat16()
    large = x._replace(initial_state=pool, conv_state=conv, state_indices=rows.int())
    small = x._replace(initial_state=pool[rows].clone(), conv_state=conv[rows].clone(), state_indices=None)
    want = decode.forward(request_of(KDA, small, inplace_state=True, **MODEL), small)
    got = decode.forward(request_of(KDA, large, inplace_state=True, **MODEL), large)
    assert same_bits(got.o, want.o)
    assert same_bits(pool[rows], small.initial_state) and same_bits(conv[rows], small.conv_state)


def test_the_shorter_way_and_its_host_time() -> None:
    request, x = served(KDA, 2)
    want = copied_there(x)
    o = decode.forward(request, want).o
    step = decode.fast_path(request, x)
    assert step is not None
    found = step(tuple(x))
    assert found is not None and same_bits(found[0], o) and same_bits(x.initial_state, want.initial_state)
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(100):
            step(tuple(x))
        times.append((time.perf_counter() - start) / 100)
    assert statistics.median(times) < 23e-6


def test_the_public_call_on_a_gpu() -> None:
    _, x = served(KDA, 4)
    arrays = {name: a for name, a in x._asdict().items() if a is not None}
    host = {name: a.cpu() for name, a in arrays.items()}
    with kdacore.record_selections() as ran:
        o, _ = kdacore.fused_decode_kda(**arrays, **MODEL, inplace_state=True, null_index=0, backend="triton")
    assert [s.backend for s in ran] == ["triton"]
    want, _ = kdacore.fused_decode_kda(**host, **MODEL, inplace_state=True, null_index=0, backend="reference")
    assert float((o.cpu().float() - want.float()).norm() / want.float().norm()) < 9e-3
