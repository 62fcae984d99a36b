"""The fused decode step on a GPU: against the oracle, in graphs, over many steps, and in every division."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from decode_calls import (
    GDN,
    KDA,
    WRITTEN,
    compare,
    decode_inputs,
    decode_request,
    poison,
    read_tokens,
    rows_of,
)
from pool_checks import same_bits
from record_calls import PARTS

import kdacore
from kdacore.oracle.decode import oracle_decode
from kdacore.types import DecodeInputs, Device
from kdacore_cuda import choice
from kdacore_cuda.choice import Split
from kdacore_cuda.forms.choice_on_device import chosen
from kdacore_cuda.forms.decode import forward as decode

pytestmark = pytest.mark.gpu
IN_PLACE: dict[str, Any] = {"inplace_state": True, "output_final_state": True}


def on_gpu(inputs: DecodeInputs) -> Any:
    """The same arrays there, with the strides that they have."""

    def moved(x: torch.Tensor) -> torch.Tensor:
        there = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
        return there.copy_(x)

    return DecodeInputs(*(None if x is None else moved(x) for x in inputs))


def check_on_gpu(inputs: DecodeInputs, op: str, **options: Any) -> Any:
    """A call against the oracle, with NaN in what is not read."""
    request = decode_request(op, inputs, **options)
    rows, lengths = rows_of(request, inputs)
    read = read_tokens(request, rows, lengths)
    inputs = poison(inputs, read, rows)
    want = oracle_decode(request, inputs)
    given = on_gpu(inputs)
    major, minor = torch.cuda.get_device_capability(0)
    there = dataclasses.replace(request, device=Device("cuda", 0, f"sm_{major}{minor}"))
    before = {name: x for name in WRITTEN if (x := getattr(inputs, name)) is not None}
    got = decode.forward(there, given)
    torch.cuda.synchronize()
    after = inputs._replace(**{name: getattr(given, name).cpu() for name in before})
    final = getattr(after, request.written_pool) if request.inplace_state else got.final_state
    compare(request, after, before, want, got.o.cpu(), final if request.output_final_state else None, read)
    return there


SIZES: dict[str, tuple[str, dict[str, Any], Split]] = {
    "B1 H32": (KDA, {"B": 1, "H": 32, "HV": 32}, Split(4, 1, True)),
    "B2 H32": (KDA, {"B": 2, "H": 32, "HV": 32}, Split(2, 1, True)),
    "B9 H32": (KDA, {"B": 9, "H": 32, "HV": 32}, Split(1, 1, True)),
    "B8 H32": (KDA, {"B": 8, "H": 32, "HV": 32}, Split(2, 1, True)),
    "B16 H6": (KDA, {"B": 16, "H": 6, "HV": 6}, Split(2, 1, True)),
    "B1 H16 HV32": (GDN, {"B": 1, "H": 16, "HV": 32}, Split(4, 2, True)),
    "B2 H16 HV32": (GDN, {"B": 2, "H": 16, "HV": 32}, Split(2, 2, True)),
    "B9 H16 HV32": (GDN, {"B": 9, "H": 16, "HV": 32}, Split(1, 2, True)),
    "B4 H2 HV8": (GDN, {"B": 4, "H": 2, "HV": 8}, Split(2, 4, True)),
    "B34 H2 HV8": (GDN, {"B": 34, "H": 2, "HV": 8}, Split(1, 4, True)),
    "B4 H4 HV12": (GDN, {"B": 4, "H": 4, "HV": 12}, Split(1, 1)),
}
"""Calls as models are served, and their division among blocks on 132 multiprocessors."""


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_sizes_of_models(size: str, v_first: bool) -> None:
    op, sizes, split = SIZES[size]
    inputs = decode_inputs(op, slots=sizes["B"] + 3, **sizes)
    if sizes["B"] > 1:
        inputs.state_indices[1] = -1
    request = check_on_gpu(inputs, op, state_v_first=v_first, **IN_PLACE)
    if torch.cuda.get_device_properties(0).multi_processor_count == 132:
        assert chosen(request).split == split


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("op", [KDA, GDN])
@pytest.mark.parametrize("T", [1, 4, 16])
def test_tokens(T: int, op: str, v_first: bool, state_dtype: torch.dtype) -> None:
    inputs = decode_inputs(op, B=5, T=T, H=4, HV=8, slots=9, state_dtype=state_dtype)
    check_on_gpu(inputs, op, state_v_first=v_first, **IN_PLACE)


def candidates_of(op: str, T: int, sizes: dict[str, int], **more: Any) -> Any:
    """``T`` candidates of each sequence, behind none to all ``T`` of the call before."""
    B, slots = sizes["B"], sizes["B"] + 3
    given: dict[str, Any] = {"slots": slots, "columns": 2 + T, "records": T}
    given["record_indices"] = torch.randperm(slots)[:B].int()
    given["num_replayed"] = (torch.arange(B) % (T + 1)).int()
    return decode_inputs(op, T=T, **sizes, **(given | more))


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("T", [4, 8])
@pytest.mark.parametrize("size", SIZES)
def test_records_of_sizes_of_models(size: str, T: int, v_first: bool, state_dtype: torch.dtype) -> None:
    op, sizes, _ = SIZES[size]
    inputs = candidates_of(op, T, sizes, state_dtype=state_dtype)
    if sizes["B"] > 1:
        inputs.record_indices[1] = -1
        inputs.state_indices[0] = -1
    check_on_gpu(inputs, op, state_v_first=v_first, **IN_PLACE)


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_states_by_records_are_those_of_one_token_at_a_time(size: str, v_first: bool) -> None:
    """Bit for bit. The second call by records writes the state behind the first one's candidates."""
    op, sizes, split = SIZES[size]
    if not split.four_warps:
        return
    by_records, plain = (on_gpu(candidates_of(op, 4, sizes, num_replayed=None)) for _ in range(2))
    major, minor = torch.cuda.get_device_capability(0)

    def call(x: DecodeInputs) -> torch.Tensor:
        request = decode_request(op, x, state_v_first=v_first, **IN_PLACE)
        return decode.forward(
            dataclasses.replace(request, device=Device("cuda", 0, f"sm_{major}{minor}")), x
        ).o

    o = call(by_records)
    for t in range(4):
        token = {name: getattr(plain, name)[:, t : t + 1].contiguous() for name in ("x", "g", "beta", "z")}
        alone = dict.fromkeys((*PARTS, "record_indices"))
        assert same_bits(call(plain._replace(**token, **alone)), o[:, t : t + 1])
    all_true = torch.full((sizes["B"],), 4, dtype=torch.int32, device="cuda")
    call(by_records._replace(num_replayed=all_true))
    assert same_bits(by_records.initial_state, plain.initial_state)


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("group", [1, 2, 3])
def test_a_pack_of_candidates(group: int, v_first: bool) -> None:
    table = torch.randperm(16)[:12].view(4, 3).int()
    inputs = decode_inputs(
        lengths=(3, 1, 0, 2),
        H=2,
        HV=2 * group,
        slots=16,
        columns=5,
        state_indices=table,
        num_accepted_tokens=torch.tensor([1, 3, 2, 1], dtype=torch.int32),
    )
    check_on_gpu(inputs, KDA, state_v_first=v_first, **IN_PLACE)


@pytest.mark.parametrize(
    ("op", "B", "H", "HV"), [(KDA, 1, 32, 32), (KDA, 64, 6, 6), (GDN, 16, 16, 32), (GDN, 2, 2, 8)]
)
def test_many_steps_of_a_graph_are_those_of_calls(op: str, B: int, H: int, HV: int) -> None:
    """The same bits after 200 steps that read what the one before has written; so no step reads windows or states that
    another block has not written yet, or has written already."""
    steps = 200
    plain = decode_inputs(op, B=B, H=H, HV=HV, slots=B + 2)
    order = [on_gpu(plain), on_gpu(plain)]
    options = {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
    }
    call = getattr(kdacore, op)

    def step(x: DecodeInputs) -> torch.Tensor:
        given = {name: a for name, a in x._asdict().items() if a is not None}
        o, _ = call(**given, **options, inplace_state=True, backend="cuda")
        return o

    warm = on_gpu(plain)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step(warm), step(warm)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = step(order[1])
    for name in WRITTEN:  # capturing may have warmed up nothing: both start alike
        if (x := getattr(order[1], name)) is not None:
            x.copy_(getattr(plain, name))
    for _ in range(steps):
        want = step(order[0])
        graph.replay()
        assert same_bits(o, want)
    assert all(same_bits(getattr(order[0], n), getattr(order[1], n)) for n in ("initial_state", "conv_state"))


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_every_division_repeats_its_bits(heads: int, v_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred times, and within the bounds of the oracle: sums that blocks exchange have always come."""
    for slices in (1, 2, 4):
        if slices * heads > 8:
            continue
        monkeypatch.setattr(choice, "decode_split", lambda *a, slices=slices: Split(slices, heads, True))
        inputs = decode_inputs(GDN, B=3, H=4, HV=4 * heads, slots=5)
        check_on_gpu(inputs, GDN, state_v_first=v_first, **IN_PLACE)
        given = on_gpu(inputs)
        request = decode_request(GDN, inputs, state_v_first=v_first, **IN_PLACE)
        before = [x.clone() for x in (given.initial_state, given.conv_state)]
        first: torch.Tensor | None = None
        for _ in range(100):
            for x, was in zip((given.initial_state, given.conv_state), before, strict=True):
                x.copy_(was)
            o = decode.forward(request, given).o
            first = o if first is None else first
            assert same_bits(o, first)
