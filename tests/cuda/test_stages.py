"""The training stages, emulated on the CPU, against the float64 oracle."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
import torch
from cuda_calls import O_BOUND, STATE_BOUND, error, oracle, request_of
from stages_calls import Drawn, intra, recompute, stage_request

import kdacore
from kdacore import stages as api
from kdacore.errors import UnsupportedError
from kdacore.oracle import stages as exact
from kdacore.types import ChunkInputs, Device, IntraInputs, IntraOutputs, RecomputeInputs, RecomputeOutputs
from kdacore_cuda import choice, make_backend, unsupported_calls
from kdacore_cuda.build.compiler import compile_kernel
from kdacore_cuda.build.kernel_source import KernelSource
from kdacore_cuda.forms.stages.kernels import intra_kernel, recompute_kernel
from kdacore_cuda.runtime import torch_arguments

MIXED = [0, 1, 17, 64, 15, 0, 70, 33]
"""Lengths of a pack: empty, one token, a whole chunk, a chunk and some."""


def check_intra(inputs: IntraInputs, loose: float = 1.0) -> IntraOutputs:
    want = exact.oracle_chunk_intra(stage_request("kda_chunk_intra", inputs), inputs)
    got = intra(inputs)
    assert got.Aqk.dtype == got.Akk.dtype == inputs.q.dtype
    assert error(got.Aqk, want.Aqk) < loose * O_BOUND
    assert error(got.Akk, want.Akk) < loose * O_BOUND
    for chunk in exact.chunks_of(stage_request("kda_chunk_intra", inputs), inputs.cu_seqlens):
        rows = chunk.tokens.stop - chunk.tokens.start
        unused = ~np.tril(np.ones((rows, 64), dtype=bool))
        for x in got:
            assert not x[chunk.b, chunk.tokens].float().numpy().transpose(1, 0, 2)[:, unused].any()
    return got


def check_recompute(inputs: RecomputeInputs) -> RecomputeOutputs:
    want = exact.oracle_recompute_w_u(stage_request("kda_recompute_w_u", inputs), inputs)
    got = recompute(inputs)
    for mine, right in zip(got, want, strict=True):
        assert (mine is None) == (right is None)
        if mine is not None:
            assert mine.dtype == inputs.k.dtype
            assert error(mine, right) < O_BOUND
    return got


SHAPES = [
    pytest.param({"T": 70}, id="tail"),
    pytest.param({"T": 64, "K": 128, "V": 128}, id="K128"),
    pytest.param({"T": 33, "H": 2, "HV": 4, "B": 2}, id="grouped"),
    pytest.param({"lengths": MIXED}, id="packed"),
    pytest.param({"T": 40, "dtype": torch.float16}, id="float16"),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_intra(emulated: list[str], shape: dict[str, Any]) -> None:
    check_intra(Drawn(**shape).intra())


@pytest.mark.parametrize("gate", ["slow", "fast", "mixed"])
def test_intra_gates(emulated: list[str], gate: str) -> None:
    check_intra(Drawn(64, gate=gate).intra(), 2.0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_q", [False, True])
def test_recompute(emulated: list[str], shape: dict[str, Any], with_q: bool) -> None:
    check_recompute(Drawn(**shape).recompute(with_q))


@pytest.mark.parametrize("lowest", [-torch.finfo(torch.float32).max, -1e30, -1e6])
@pytest.mark.parametrize("hopper", [False, True])
def test_saturated_decays(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, lowest: float, hopper: bool
) -> None:
    """A sum of log decays may end at the lowest float32, in some channels and from any token on."""
    monkeypatch.setattr(choice, "has_hopper_recompute", lambda *call: hopper)
    K = 128 if hopper else 64
    x = Drawn(70, K=K, V=K)
    for channel, first in enumerate((0, 1, 3, 15, 16, 33, 63)):
        x.gc[:, first:64, :, channel] = lowest
        x.gc[:, 64:, :, channel] = lowest if channel & 1 else -1.0
    check_intra(x.intra(), 2.0)
    check_recompute(x.recompute())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_near_collinear_keys_survive(emulated: list[str], dtype: torch.dtype) -> None:
    got = check_intra(Drawn(64, gate="slow", collinear=True, dtype=dtype).intra(), 2.0)
    assert torch.isfinite(got.Akk).all()


def test_w_of_near_collinear_keys(emulated: list[str]) -> None:
    """Rows of w are then small differences: k must not be rounded before they are taken."""
    check_recompute(Drawn(70, gate="slow", collinear=True).recompute())


@pytest.mark.parametrize("t", [5, 16, 31, 33, 48])
@pytest.mark.parametrize("gate", ["spread", "mixed"])
def test_later_rows_change_no_bit_of_earlier_ones(emulated: list[str], t: int, gate: str) -> None:
    """Neither other rows after t nor none at all."""
    x, y = Drawn(64, gate=gate), Drawn(64, gate="fast", seed=1)
    one, other = x.intra(), y.intra()
    spliced = IntraInputs(
        *(torch.cat([a[:, :t], b[:, t:]], 1) for a, b in zip(one[:4], other[:4], strict=True))
    )
    short = IntraInputs(*(a[:, :t] for a in one[:4]))
    whole = intra(one)
    for changed in (spliced, short):
        for a, b in zip(intra(changed), whole, strict=True):
            assert torch.equal(a[:, :t], b[:, :t])


@pytest.mark.parametrize("hopper", [False, True])
def test_rows_behind_a_pack(emulated: list[str], monkeypatch: pytest.MonkeyPatch, hopper: bool) -> None:
    """They are not read and not written; the others' bits are those of a pack without them."""
    monkeypatch.setattr(choice, "has_hopper_recompute", lambda *call: hopper)
    K = 128 if hopper else 64
    lengths = [70, 0, 3, 0]
    long, short = Drawn(lengths=[*lengths, 90], K=K, V=K), Drawn(lengths=lengths, K=K, V=K)
    made: list[torch.Tensor] = []

    def marked(like: torch.Tensor, *size: Any, make: Any = torch.Tensor.new_empty, **more: Any) -> Any:
        made.append(make(like, *size, **more).fill_(7.0))
        return made[-1]

    for stage, arrays in ((intra, "intra"), (recompute, "recompute")):
        x, y = getattr(long, arrays)(), getattr(short, arrays)()
        tokens = {
            name: torch.cat([a, torch.full_like(b[:, 73:], float("nan"))], 1)
            for (name, b), a in zip(x._asdict().items(), y, strict=True)
            if b is not None and b.ndim > 1
        }
        with monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, "new_empty", marked)
            patched.setattr(torch, "empty_like", lambda like: marked(like, like.shape))
            got = stage(y._replace(**tokens))
        for a, b in zip(got, stage(y), strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert torch.equal(a[:, :73], b)
                assert (a[:, 73:] == 7.0).all()
    assert made


def test_rows_of_w_and_u_do_not_depend_on_later_ones(emulated: list[str]) -> None:
    x, t = Drawn(64).recompute(), 37
    short = recompute(RecomputeInputs(*(a[:, :t] for a in x[:6])))
    whole = recompute(x)
    for name in ("w", "u", "qg"):
        assert torch.equal(getattr(short, name), getattr(whole, name)[:, :t])


def test_grouped_heads_equal_repeated_ones(emulated: list[str]) -> None:
    """A value head gives the same bits whether q and k are shared or repeated for it."""
    x = Drawn(70, H=2, HV=4)
    shared, y = x.intra(), x.recompute()
    q, k = (a.repeat_interleave(2, dim=2) for a in (x.q, x.k))
    for a, b in zip(intra(shared), intra(shared._replace(q=q, k=k)), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(recompute(y), recompute(y._replace(q=q, k=k)), strict=True):
        assert torch.equal(a, b)


def test_a_sequence_alone_gives_the_bits_it_gives_packed(emulated: list[str]) -> None:
    x = Drawn(lengths=[5, 70, 0, 20])
    rows = slice(5, 75)
    alone = IntraInputs(*(a[:, rows] for a in x.intra()[:4]))
    for a, b in zip(intra(alone), intra(x.intra()), strict=True):
        assert torch.equal(a, b[:, rows])


def _strided(x: torch.Tensor) -> torch.Tensor:
    """The same values in the middle of a wider array full of NaN."""
    B, T, heads, width = x.shape
    wide = torch.full((B, T + 2, heads + 1, 2 * width), float("nan"), dtype=x.dtype)
    view = wide[:, 1:-1, 1:, :width]
    view.copy_(x)
    return view


def test_strides_and_poison(emulated: list[str]) -> None:
    """Views are read where they lie; nothing outside them, and no row past the end, is."""
    x = Drawn(33, B=2, HV=2)
    inputs, y = x.intra(), x.recompute()
    views = inputs._replace(**{n: _strided(getattr(inputs, n)) for n in ("q", "k", "gc")})
    for a, b in zip(intra(views), intra(inputs), strict=True):
        assert torch.equal(a, b)
    names = ("k", "v", "gc", "Akk", "q")
    for a, b in zip(
        recompute(y._replace(**{n: _strided(getattr(y, n)) for n in names})), recompute(y), strict=True
    ):
        assert torch.equal(a, b)


def test_unaligned_rows_are_copied(emulated: list[str]) -> None:
    x = Drawn(20).intra()
    shifted = torch.zeros(x.q.numel() + 1, dtype=x.q.dtype)[1:].view(x.q.shape)
    shifted.copy_(x.q)
    for a, b in zip(intra(x._replace(q=shifted)), intra(x), strict=True):
        assert torch.equal(a, b)


def test_long_sequences_are_not_copied() -> None:
    """Found by its time: from 2**27 elements a batch row on, every input was copied first."""
    long = torch.empty_strided((1, 2, 1, 64), (2**31, 64, 64, 1), dtype=torch.bfloat16)
    assert torch_arguments.aligned(long) is long
    far = torch.empty_strided((1, 1, 1, 64), (64, 2**27, 64, 1), dtype=torch.bfloat16)
    assert torch_arguments.aligned(far) is not far


def test_small_betas(emulated: list[str]) -> None:
    x = Drawn(40).recompute()
    check_recompute(x._replace(beta=x.beta.half()))


def test_many_sequences(emulated: list[str]) -> None:
    """More sequences than a warp has lanes, several of them empty."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 5, 40).tolist()
    x = Drawn(lengths=lengths)
    check_intra(x.intra())
    narrow = x.intra(cu_seqlens=x.cu.to(torch.int32))
    for a, b in zip(intra(narrow), intra(x.intra()), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("op", ["kda_chunk_intra", "kda_recompute_w_u"])
@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, None),
        ({"HV": 4}, None),
        ({"dtype": "float32"}, "dtype"),
        ({"K": 60}, "head_dim"),
        ({"chunk_size": 32}, "options"),
        ({"T": 2**30}, "too_large"),
        ({"HV": 2**22, "T": 2**20}, "too_large"),
        ({"device": Device("cuda", 0, "sm_75")}, "hardware"),
    ],
)
def test_verifiers(op: str, changes: dict[str, Any], code: str | None) -> None:
    x = Drawn(4)
    base = stage_request(op, x.intra() if op == "kda_chunk_intra" else x.recompute())
    r = dataclasses.replace(base, **({"device": Device("cuda", 0, "sm_90")} | changes))
    found = {reason.code for v in make_backend().ops[op].verifiers if (reason := v(r)) is not None}
    assert found == (set() if code is None else {code})


@pytest.mark.parametrize(("name", "dtype"), [("v", "float16"), ("Akk", "float32")])
def test_other_dtypes_are_rejected(name: str, dtype: str) -> None:
    r = stage_request("kda_recompute_w_u", Drawn(4).recompute())
    tensors = tuple((n, dataclasses.replace(s, dtype=dtype) if n == name else s) for n, s in r.tensors)
    reason = unsupported_calls.stage_dtypes(dataclasses.replace(r, tensors=tensors))
    assert reason is not None
    assert reason.code == "dtype"
    assert name in reason.got


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100f", "sm_120"])
@pytest.mark.parametrize(
    "kernel",
    [intra_kernel(128, False).source, recompute_kernel(128, 128, True).source],
    ids=["intra", "recompute"],
)
def test_kernels_compile_without_spills(kernel: KernelSource, arch: str) -> None:
    log = compile_kernel(kernel, arch).log
    spilled = re.search(r"(\d+) bytes spill stores", log)
    assert spilled is not None, log
    assert int(spilled[1]) <= (32 if arch == "sm_120" else 0)


def test_the_registry_serves_them_for_the_pipeline() -> None:
    x = Drawn(4).intra()
    with pytest.raises(UnsupportedError, match="device"):
        api.kda_chunk_intra(*x[:4], backend="cuda")


@pytest.mark.gpu
def test_the_chunk_pipeline_through_the_registry() -> None:
    """Both stages between Triton's others give what the whole op gives."""
    x = Drawn(200, H=2, HV=4, K=128, V=128)
    steps = torch.cat([x.gc[:, :1], x.gc[:, 1:] - x.gc[:, :-1]], 1)
    steps[:, ::64] = x.gc[:, ::64]
    whole = ChunkInputs(x.q, x.k, x.v, steps / np.log2(np.e), x.beta)
    q, k, v, gc, beta = (a.cuda() for a in (x.q, x.k, x.v, x.gc, x.beta))
    with kdacore.record_selections() as ran:
        Aqk, Akk = api.kda_chunk_intra(q, k, gc, beta, backend="cuda")
        w, u, kg, _ = api.kda_recompute_w_u(k, v, beta, gc, Akk, backend="cuda")
        h, v_new, final_state = api.delta_rule_chunk_state(kg, w, u, gc, backend="triton")
        o = api.kda_chunk_output(q, v_new, gc, Aqk, h, backend="triton")
    assert [s.backend for s in ran] == ["cuda", "cuda", "triton", "triton"]
    want = oracle(request_of("chunk_kda", whole, output_final_state=True), whole)
    assert error(o.cpu(), want.o) < 2 * O_BOUND
    assert error(final_state.cpu(), want.final_state) < 2 * STATE_BOUND
