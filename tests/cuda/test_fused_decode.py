"""The fused decode step of the CUDA backend, emulated, against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decode_calls import GDN, KDA, NAN, check, decode_inputs, decode_request
from gated_delta_calls import in_each_order
from pool_checks import same_bits

from kdacore_cuda import choice
from kdacore_cuda.choice import RecurrentMode, Split
from kdacore_cuda.forms.choice_on_device import chosen
from kdacore_cuda.forms.decode import forward as decode
from kdacore_cuda.runtime import torch_launch

GENERAL, ONE, HEAD = RecurrentMode.GENERAL, RecurrentMode.ONE_TOKEN, RecurrentMode.ONE_TOKEN_HEAD_GATE
PACK = (3, 1, 0, 16, 2, 1)
IN_PLACE: dict[str, Any] = {"inplace_state": True, "output_final_state": True}


def launched_kernel(emulated: list[str], windows: bool = False) -> str:
    """The name of the one kernel that ran, ahead, with ``windows``, of that which writes those of q and k."""
    names = [name for name in dict.fromkeys(emulated) if not name.startswith("decode_windows-")]
    assert (len(emulated) > len([x for x in emulated if x in names])) == windows
    (name,) = names
    assert name.startswith(("decode-", "decode_head-", "decode_tokens-"))
    return name


def assert_mode(emulated: list[str], mode: RecurrentMode, windows: bool = False) -> None:
    assert f"-MODE{int(mode)}-" in launched_kernel(emulated, windows)


@pytest.fixture
def for_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tokens are left to the kernel for every call, as on GPUs without clusters."""
    monkeypatch.setattr(choice, "_has_kernel_for_tokens", lambda *given: False)


def on_device_of(multiprocessors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_launch, "multiprocessors", lambda index: multiprocessors)


SPLITS = {
    "whole": Split(1, 1, True),
    "quarters": Split(4, 1, True),
    "two_heads": Split(1, 2, True),
    "halves": Split(2, 1, True),
    "two_halves": Split(2, 2, True),
    "two_quarters": Split(4, 2, True),
    "four_heads": Split(1, 4, True),
    "four_halves": Split(2, 4, True),
}


@pytest.mark.first_cases(3)
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize(
    ("op", "split"),
    [(op, name) for name in SPLITS for op in (KDA, GDN) if op == GDN or SPLITS[name].heads == 1],
)
def test_each_division(
    op: str, split: str, v_first: bool, emulated: list[str], poison: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token, as models are served: into the pool, with a slot for each sequence but one."""
    want = SPLITS[split]
    on_device_of(3 * want.blocks if want.slices > 1 else 1, monkeypatch)
    inputs = decode_inputs(op, H=1, HV=want.heads)
    inputs.state_indices[1] = -1
    request = check(inputs, op, state_v_first=v_first, **IN_PLACE)
    assert chosen(request).split == want
    name = launched_kernel(emulated)
    assert f"CLUSTER{want.blocks}" in name and f"COLUMNS{128 // want.slices}-" in name
    assert_mode(emulated, HEAD if op == GDN else ONE)


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("op", [KDA, GDN])
def test_whole_states_in_registers(
    op: str, v_first: bool, emulated: list[str], poison: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs without clusters."""
    monkeypatch.setattr(choice, "decode_split", lambda *given: Split(1, 1))
    inputs = decode_inputs(op)
    inputs.state_indices[1] = -1
    check(inputs, op, state_v_first=v_first, **IN_PLACE)
    assert launched_kernel(emulated).startswith("decode-")
    assert_mode(emulated, HEAD if op == GDN else ONE)


ONE_TOKEN_CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fresh": ({"has_initial_state": torch.tensor([True, False, True])}, IN_PLACE),
    "a_new_state": ({}, {"output_final_state": True}),
    "read_only": ({}, {"read_only_state": True}),
    "nothing_written": ({}, {}),
    "moved": (
        {"write_indices": torch.tensor([6, 5, -1]), "state_indices": torch.tensor([0, 1, 2])},
        IN_PLACE,
    ),
    "no_norm": ({"norm_weight": None, "z": None}, IN_PLACE),
    "norm_alone": ({"z": None}, IN_PLACE),
    "weights_as_x": ({"weights": torch.bfloat16}, IN_PLACE),
    "no_gate_parameters": ({"dt_bias": None}, IN_PLACE),
}


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("op", [KDA, GDN])
@pytest.mark.parametrize("call", ONE_TOKEN_CALLS)
def test_states_in_shared_memory(
    call: str, op: str, v_first: bool, emulated: list[str], poison: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, options = ONE_TOKEN_CALLS[call]
    on_device_of(3, monkeypatch)
    inputs = decode_inputs(op, **({"H": 1, "HV": 2 if op == GDN else 1} | given))
    if call != "moved":
        inputs.state_indices[1] = -1
    check(inputs, op, state_v_first=v_first, **options)
    assert launched_kernel(emulated).startswith("decode_head-")
    assert_mode(emulated, HEAD if op == GDN else ONE)


GENERAL_CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tokens": ({"T": 5}, {}),
    "pack": ({"lengths": PACK}, IN_PLACE),
    "sixteen": ({"B": 1, "T": 16}, IN_PLACE),
    "float32": ({"dtype": torch.float32, "T": 2}, IN_PLACE),
    "float16": ({"dtype": torch.float16, "T": 2}, IN_PLACE),
    "weights_as_x": ({"weights": torch.bfloat16, "T": 2}, IN_PLACE),
    "two_taps": ({"taps": 2, "T": 3}, IN_PLACE),
    "three_taps": ({"taps": 3, "T": 3, "columns": 5}, IN_PLACE),
    "convolved": ({"conv_weight": None, "conv_state": None}, IN_PLACE),
    "no_norm": ({"norm_weight": None, "z": None, "T": 2}, IN_PLACE),
    "norm_alone": ({"z": None, "T": 2}, IN_PLACE),
    "no_gate_parameters": ({"dt_bias": None, "T": 2}, IN_PLACE),
    "fresh_state": ({"T": 2}, {"output_final_state": True}),
    "read_only": ({"T": 4}, {"read_only_state": True}),
    "narrow": ({"K": 64, "T": 3}, IN_PLACE),
    "three_heads": ({"H": 2, "HV": 6, "B": 2, "T": 2}, IN_PLACE),
    "eight_heads": ({"H": 1, "HV": 8, "B": 3, "K": 64}, IN_PLACE),
    "three_heads_read_only": ({"H": 1, "HV": 3, "K": 64}, {}),
}


@pytest.mark.first_cases(6)
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("op", [KDA, GDN])
@pytest.mark.parametrize("call", GENERAL_CALLS)
def test_the_kernel_for_every_call(
    call: str, op: str, v_first: bool, emulated: list[str], poison: None, for_every_call: None
) -> None:
    given, options = GENERAL_CALLS[call]
    N = len(given.get("lengths", range(given.get("B", 3))))
    inputs = decode_inputs(op, **({"H": 1, "slots": N + 2} | given))
    if N > 1:
        inputs.state_indices[N - 2] = -1
    check(inputs, op, state_v_first=v_first, **options)
    assert_mode(emulated, GENERAL, windows=call in ("three_heads", "eight_heads"))


# --- pools, candidates and their windows --------------------------------------------------------------------------


def index(*rows: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(rows, dtype=dtype)


def table(N: int, W: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Rows ``[N, W]`` that no two candidates share, in any order."""
    return torch.randperm(N * W, generator=torch.Generator().manual_seed(3)).view(N, W).to(dtype)


POOL_CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "null_index": ({"state_indices": index(0, 3, 2)}, {**IN_PLACE, "null_index": 0}),
    "conv_rows": ({"conv_indices": index(4, -1, 1, dtype=torch.int64), "T": 2}, IN_PLACE),
    "fresh": ({"has_initial_state": torch.tensor([True, False, True])}, IN_PLACE),
    "moved": ({"write_indices": index(6, 5, -1), "state_indices": index(0, 1, 2), "T": 2}, IN_PLACE),
    "no_indices": ({"state_indices": None, "slots": 3}, IN_PLACE),
    "nothing_written": ({"T": 2}, {}),
    "candidates": (
        {
            "T": 3,
            "slots": 9,
            "columns": 6,
            "state_indices": table(3, 3),
            "num_accepted_tokens": index(2, 0, 3),
        },
        IN_PLACE,
    ),
    "candidates_pack": (
        {
            "lengths": (3, 1, 0, 2),
            "slots": 12,
            "columns": 5,
            "state_indices": table(4, 3, torch.int32),
            "num_accepted_tokens": index(1, 3, 2, 1),
        },
        IN_PLACE,
    ),
    "candidate_rows": (
        {
            "T": 3,
            "slots": 14,
            "columns": 5,
            "write_indices": table(3, 3) + 5,
            "state_indices": index(0, 1, -1),
        },
        IN_PLACE,
    ),
}


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("group", [2, 3])
@pytest.mark.parametrize("call", POOL_CALLS)
def test_pools(
    call: str, windows: bool, group: int, v_first: bool, emulated: list[str], poison: None
) -> None:
    """Two or three value heads a key head. With ``windows``, those of candidates go to an array of their own."""
    given, options = POOL_CALLS[call]
    given = {"H": 1, "HV": group, "K": 64, **given}
    if windows:
        if "candidate" not in call:
            return
        N, T = (4, 3) if "pack" in call else (3, 3)
        D = 2 * 64 + group * 64
        whole = torch.randn(N, T + 1, 3, D + 8, generator=torch.Generator().manual_seed(1)).bfloat16()
        given |= {"conv_windows": whole[..., :D], "columns": 3}
    check(decode_inputs(**given), state_v_first=v_first, **options)
    assert launched_kernel(emulated, windows=group == 3 and bool(options))


def strided(x: torch.Tensor, *order: int) -> torch.Tensor:
    """The same array, whose axes lie in another order, with NaN between the elements of the first."""
    room = torch.full([2 * x.shape[order[0]], *(x.shape[i] for i in order[1:])], NAN, dtype=x.dtype)
    apart = room[::2].permute(*[order.index(i) for i in range(x.dim())])
    apart.copy_(x)
    return apart


@pytest.mark.parametrize("T", [1, 2])
def test_arrays_that_lie_apart(T: int, emulated: list[str], poison: None) -> None:
    """As servers pass them: x and z are columns of projections, windows lie with channels side by side."""
    plain = decode_inputs(T=T)
    wide = torch.full((*plain.x.shape[:2], plain.x.shape[2] + plain.z[0, 0].numel() + 40), NAN).bfloat16()
    D = plain.x.shape[2]
    wide[..., 8 : 8 + D] = plain.x
    wide[..., D + 24 : D + 24 + plain.z[0, 0].numel()] = plain.z.flatten(2)
    z = wide[..., D + 24 : D + 24 + plain.z[0, 0].numel()].unflatten(2, plain.z.shape[2:])
    inputs = plain._replace(
        x=wide[..., 8 : 8 + D],
        z=z,
        conv_state=strided(plain.conv_state, 0, 2, 1),
        beta=strided(plain.beta, 2, 0, 1),
        g=strided(plain.g, 1, 0, 2, 3),
    )
    check(inputs, **IN_PLACE)
    assert_mode(emulated, ONE)
    assert launched_kernel(emulated).startswith("decode_head-" if T == 1 else "decode_tokens-")


def test_arrays_off_16_bytes(emulated: list[str], poison: None) -> None:
    """The kernel for every call reads arrays that start anywhere."""
    plain = decode_inputs()
    changed = {}
    for name in ("z", "conv_weight", "norm_weight", "x", "conv_state", "initial_state"):
        x = getattr(plain, name)
        memory = torch.full((x.numel() + 1,), NAN, dtype=x.dtype)
        memory[1:] = x.flatten()
        changed[name] = memory[1:].view(x.shape)
    check(plain._replace(**changed), **IN_PLACE)
    assert_mode(emulated, GENERAL)


def test_z_of_any_stride(emulated: list[str], poison: None) -> None:
    plain = decode_inputs()
    check(plain._replace(z=strided(plain.z, 3, 0, 1, 2)), **IN_PLACE)
    assert_mode(emulated, GENERAL)


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("state_dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("split", ["whole", "halves", "two_halves"])
def test_states_of_16_bits(
    split: str,
    v_first: bool,
    state_dtype: torch.dtype,
    emulated: list[str],
    poison: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    want = SPLITS[split]
    on_device_of(3 * want.blocks if want.slices > 1 else 1, monkeypatch)
    inputs = decode_inputs(GDN, H=1, HV=want.heads, state_dtype=state_dtype)
    request = check(inputs, GDN, state_v_first=v_first, **IN_PLACE)
    assert chosen(request).split == want
    assert f"STATE_{'F' if state_dtype == torch.float16 else 'BF'}161" in launched_kernel(emulated)


def test_an_output_that_is_given(emulated: list[str], poison: None) -> None:
    inputs = decode_inputs(lengths=(2, 1), K=64)
    out = torch.full((1, 5, 2, 64), 7.0).bfloat16()
    check(inputs._replace(out=out), **IN_PLACE)
    assert launched_kernel(emulated)


def test_another_pool_is_written(emulated: list[str], poison: None) -> None:
    inputs = decode_inputs(T=2, K=64)
    other = torch.full_like(inputs.initial_state.repeat(2, 1, 1, 1), NAN)
    check(inputs._replace(write_pool=other, write_indices=index(9, 3, 8)), **IN_PLACE)
    assert launched_kernel(emulated)


def test_a_bias_of_the_convolution(emulated: list[str], poison: None) -> None:
    inputs = decode_inputs()
    inputs = inputs._replace(conv_bias=torch.randn(inputs.x.shape[2]), norm_weight=torch.rand(2, 128))
    check(inputs, norm_activation="silu", norm_eps=1e-3, **IN_PLACE)
    assert_mode(emulated, ONE)


# --- what several blocks share ------------------------------------------------------------------------------------


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("split", ["two_heads", "quarters", "two_quarters", "four_halves"])
@pytest.mark.parametrize("op", [KDA, GDN])
def test_in_any_order_of_blocks_and_threads(
    op: str,
    split: str,
    emulated: list[str],
    poison: None,
    for_every_call: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The windows of q and k, which every block of a key head reads, are written once all have; and each head's blocks
    add the same sums. KDA: by the kernel for every call, and with three tokens."""
    want = SPLITS[split]
    T = 3 if op == KDA else 1
    on_device_of(2 * want.blocks if want.slices > 1 else 1, monkeypatch)
    first: list[torch.Tensor] = []
    starved = range(0, 8 * want.blocks, 5)
    for _ in in_each_order(monkeypatch, starved=starved, dispatch=range(3)):
        inputs = decode_inputs(op, B=2, T=T, H=1, HV=want.heads)
        check(inputs, op, **IN_PLACE)
        written = [inputs.initial_state, inputs.conv_state]
        assert all(map(same_bits, written, first or written))
        first = written
    heads = f"CLUSTER{want.heads if op == KDA else want.blocks}"
    assert launched_kernel(emulated).endswith(heads)


def test_no_later_token_changes_earlier_ones(emulated: list[str], poison: None) -> None:
    """Bit for bit."""
    outputs = []
    for T in (5, 3):
        plain = decode_inputs(B=2, T=5, K=64)
        cut = {name: getattr(plain, name)[:, :T].contiguous() for name in ("x", "g", "beta", "z")}
        inputs = plain._replace(**cut)
        if T == 3:
            inputs.x[:, 2:] *= 2
        request = decode_request(KDA, inputs, **IN_PLACE)
        outputs.append(decode.forward(request, inputs).o[:, :2])
    assert same_bits(*outputs)
