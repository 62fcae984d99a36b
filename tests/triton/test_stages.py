"""Each stage op against its float64 oracle, both forms of the intra-chunk stage, and the chain against the whole op."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kdacore import contract
from kdacore.ops import OPS
from kdacore.oracle import stages as exact
from kdacore.oracle.host_values import to_float64
from kdacore.types import (
    ChunkGateInputs,
    ChunkOutputInputs,
    ChunkStateInputs,
    IntraInputs,
    IntraOutputs,
    RecomputeInputs,
    Request,
)
from kdacore_triton import configs, stages

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if GPU else [torch.float32]
BOUND = {torch.float32: 2e-5, torch.bfloat16: 6e-3, torch.float16: 3e-3}
"""One stage rounds its inputs to the matrix unit's operands and its output once."""

Form = Callable[[Request, IntraInputs], IntraOutputs]
FORMS = [
    pytest.param(stages.chunk_intra_by_token, id="token"),
    pytest.param(stages.chunk_intra_by_chunk, id="chunk"),
]
SHAPES = [
    pytest.param({"T": 70}, id="tail"),
    pytest.param({"T": 40, "H": 2, "HV": 4, "B": 2}, id="grouped"),
    pytest.param({"T": 20, "K": 60, "V": 100}, id="odd-dims"),
    pytest.param({"lengths": [0, 1, 17, 64, 15, 0, 33]}, id="packed"),
]
# In the interpreter the token form costs some milliseconds a token.
SMALL = [
    pytest.param({"T": 18, "H": 1, "HV": 2}, id="grouped-tail"),
    pytest.param({"T": 5, "B": 2, "K": 60}, id="odd-dims"),
    pytest.param({"lengths": [0, 1, 17, 0, 2]}, id="packed"),
]


def request_of(op: str, inputs: Any, **options: Any) -> Request:
    opdef = OPS[op]
    flags = {"scale": None, "lower_bound": None, "chunk_size": 64, "state_v_first": False} | options
    return contract.build_request(opdef, inputs, tuple(flags[o] for o in opdef.options))[0]


class Drawn:
    """Random arrays of one chunk pipeline. ``low``: the lowest log decay of a step."""

    def __init__(
        self, T: int = 0, B: int = 1, H: int = 1, HV: int = 1, K: int = 16, V: int = 16, chunk_size: int = 64,
        lengths: list[int] | None = None, dtype: torch.dtype = torch.float32, low: float = -5.0,
    ) -> None:  # fmt: skip
        rng = torch.Generator().manual_seed(0)
        self.cu = None if lengths is None else torch.tensor(np.cumsum([0, *lengths])).to(DEVICE)
        T = sum(lengths) if lengths else T

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=rng)

        unit = torch.nn.functional.normalize
        self.q = unit(normal(B, T, H, K), dim=-1).to(DEVICE, dtype)
        self.k = unit(normal(B, T, H, K), dim=-1).to(DEVICE, dtype)
        self.v = normal(B, T, HV, V).to(DEVICE, dtype)
        self.g = (low * torch.rand((B, T, HV, K), generator=rng) ** 3).to(DEVICE)
        self.beta = torch.rand((B, T, HV), generator=rng).to(DEVICE)
        self.options = {"chunk_size": chunk_size}
        x = ChunkGateInputs(self.g, cu_seqlens=self.cu)
        gc = exact.oracle_chunk_gate(request_of("kda_chunk_gate", x, **self.options), x)
        self.gc = torch.tensor(gc, dtype=torch.float32, device=DEVICE)
        self.dtype = dtype

    def given(self, array: np.ndarray) -> torch.Tensor:
        """An oracle's result as the input of the next stage."""
        return torch.tensor(array, device=DEVICE).to(self.dtype)


def error(got: torch.Tensor, want: np.ndarray) -> float:
    assert got.shape == want.shape
    return float(np.linalg.norm(to_float64(got) - want)) / (float(np.linalg.norm(want)) or 1.0)


@pytest.mark.jax_later
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("raw", "lower_bound"), [(False, None), (True, None), (True, -5.0)])
def test_gate(shape: dict[str, Any], raw: bool, lower_bound: float | None) -> None:
    x = Drawn(**shape)
    HV, K = x.g.shape[2:]
    inputs = ChunkGateInputs(x.g, cu_seqlens=x.cu)
    if raw:
        A_log = torch.linspace(-1, 1, HV).to(DEVICE)
        inputs = inputs._replace(g=x.g + 2, A_log=A_log, dt_bias=torch.ones(HV, K).to(DEVICE))
    r = request_of("kda_chunk_gate", inputs, lower_bound=lower_bound, chunk_size=32)
    got = stages.chunk_gate(r, inputs)
    assert got.dtype == torch.float32
    assert error(got, exact.oracle_chunk_gate(r, inputs)) <= 1e-6


@pytest.mark.first_cases(6)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk_size", [16, 32, 64])
@pytest.mark.parametrize("shape", SMALL)
@pytest.mark.parametrize("form", FORMS)
def test_intra(form: Form, shape: dict[str, Any], chunk_size: int, dtype: torch.dtype) -> None:
    x = Drawn(**shape, chunk_size=chunk_size, dtype=dtype)
    inputs = IntraInputs(x.q, x.k, x.gc, x.beta, x.cu)
    r = request_of("kda_chunk_intra", inputs, **x.options)
    got, want = form(r, inputs), exact.oracle_chunk_intra(r, inputs)
    assert error(got.Aqk, want.Aqk) <= BOUND[dtype]
    assert error(got.Akk, want.Akk) <= BOUND[dtype]


@pytest.mark.parametrize("chunk_size", [32, 64])
def test_intra_across_blocks(chunk_size: int) -> None:
    """Every pair of blocks of 16 rows, whole and cut short."""
    x = Drawn(lengths=[64, 0, 33, 50], K=20, chunk_size=chunk_size)
    inputs = IntraInputs(x.q, x.k, x.gc, x.beta, x.cu)
    r = request_of("kda_chunk_intra", inputs, **x.options)
    got, want = stages.chunk_intra_by_chunk(r, inputs), exact.oracle_chunk_intra(r, inputs)
    assert error(got.Aqk, want.Aqk) <= BOUND[torch.float32]
    assert error(got.Akk, want.Akk) <= BOUND[torch.float32]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("K", [16, 60, 64, 100, 128, 256])
@pytest.mark.parametrize("chunk_size", [16, 32, 64])
@pytest.mark.parametrize("form", FORMS)
def test_gpu_intra_of_every_size(form: Form, chunk_size: int, K: int, dtype: torch.dtype) -> None:
    x = Drawn(lengths=[200, 0, 1, 33, 64], H=2, HV=4, K=K, chunk_size=chunk_size, dtype=dtype)
    inputs = IntraInputs(x.q, x.k, x.gc, x.beta, x.cu)
    r = request_of("kda_chunk_intra", inputs, **x.options)
    got, want = form(r, inputs), exact.oracle_chunk_intra(r, inputs)
    assert error(got.Aqk, want.Aqk) <= BOUND[dtype]
    assert error(got.Akk, want.Akk) <= BOUND[dtype]


@pytest.mark.parametrize("low", [0.0, -60.0])
@pytest.mark.parametrize("form", FORMS)
def test_intra_extreme_gates(form: Form, low: float) -> None:
    x = Drawn(T=18, low=low)
    inputs = IntraInputs(x.q, x.k, x.gc, x.beta)
    r = request_of("kda_chunk_intra", inputs)
    got, want = form(r, inputs), exact.oracle_chunk_intra(r, inputs)
    # gc itself is float32: at -60 a step its differences keep about 1e-4 of a decay that is itself tiny.
    assert error(got.Aqk, want.Aqk) <= 2 * BOUND[torch.float32]
    assert error(got.Akk, want.Akk) <= 2 * BOUND[torch.float32]


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("form", FORMS)
def test_later_rows_change_no_bit_of_earlier_ones(form: Form) -> None:
    x, y = Drawn(T=35), Drawn(T=35)
    y.q, y.k, y.gc = y.q.flip(1), y.k.flip(1), y.gc * 1.5
    for t in (9, 33):
        arrays = [torch.cat([a[:, :t], b[:, t:]], 1) for a, b in ((x.q, y.q), (x.k, y.k), (x.gc, y.gc))]
        both = [IntraInputs(*arrays, x.beta), IntraInputs(x.q, x.k, x.gc, x.beta)]
        a, b = (form(request_of("kda_chunk_intra", i), i) for i in both)
        assert torch.equal(a.Aqk[:, :t], b.Aqk[:, :t])
        assert torch.equal(a.Akk[:, :t], b.Akk[:, :t])


def test_the_configuration_picks_the_form() -> None:
    x = Drawn(T=20)
    inputs = IntraInputs(x.q, x.k, x.gc, x.beta)
    r = request_of("kda_chunk_intra", inputs)
    for form, run in (("token", stages.chunk_intra_by_token), ("chunk", stages.chunk_intra_by_chunk)):
        config = {
            "form": form,
            "heads": 1,
            "token_warps": 1,
            "diagonal_BK": 16,
            "diagonal_warps": 1,
            "diagonal_stages": 1,
            "merge_BK": 16,
            "merge_warps": 2,
            "merge_stages": 1,
        }
        with configs.override("chunk_intra", config):
            assert torch.equal(stages.chunk_intra(r, inputs).Akk, run(r, inputs).Akk)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_q", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_recompute(shape: dict[str, Any], with_q: bool, dtype: torch.dtype) -> None:
    x = Drawn(**shape, dtype=dtype)
    intra = IntraInputs(x.q, x.k, x.gc, x.beta, x.cu)
    Akk = x.given(exact.oracle_chunk_intra(request_of("kda_chunk_intra", intra), intra).Akk)
    inputs = RecomputeInputs(x.k, x.v, x.beta, x.gc, Akk, x.q if with_q else None, x.cu)
    r = request_of("kda_recompute_w_u", inputs)
    got, want = stages.recompute_w_u(r, inputs), exact.oracle_recompute_w_u(r, inputs)
    assert (got.qg is None) == (want.qg is None)
    for name in ("w", "u", "kg", "qg"):
        if getattr(want, name) is not None:
            assert error(getattr(got, name), getattr(want, name)) <= BOUND[dtype]


def recomputed(x: Drawn) -> tuple[torch.Tensor, ...]:
    """``Aqk, w, u, kg`` of the oracle."""
    intra = IntraInputs(x.q, x.k, x.gc, x.beta, x.cu)
    a = exact.oracle_chunk_intra(request_of("kda_chunk_intra", intra), intra)
    inputs = RecomputeInputs(x.k, x.v, x.beta, x.gc, x.given(a.Akk), None, x.cu)
    parts = exact.oracle_recompute_w_u(request_of("kda_recompute_w_u", inputs), inputs)
    return x.given(a.Aqk), x.given(parts.w), x.given(parts.u), x.given(parts.kg)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("initial", [None, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_state(shape: dict[str, Any], initial: torch.dtype | None, v_first: bool, dtype: torch.dtype) -> None:
    x = Drawn(**shape, dtype=dtype)
    _, w, u, kg = recomputed(x)
    s0 = None
    if initial is not None:
        N = x.q.shape[0] if x.cu is None else x.cu.numel() - 1
        tail = (u.shape[3], w.shape[3]) if v_first else (w.shape[3], u.shape[3])
        s0 = torch.randn((N, w.shape[2], *tail), generator=torch.Generator().manual_seed(3)).to(
            DEVICE, initial
        )
    inputs = ChunkStateInputs(kg, w, u, x.gc, s0, x.cu)
    r = request_of("delta_rule_chunk_state", inputs, state_v_first=v_first)
    got, want = stages.chunk_state(r, inputs), exact.oracle_chunk_state(r, inputs)
    for name in ("h", "v_new", "final_state"):
        narrow = name == "final_state" and initial in (torch.bfloat16, torch.float16)
        bound = BOUND[torch.bfloat16] if narrow else BOUND[dtype]
        assert error(getattr(got, name), getattr(want, name)) <= bound


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_output(shape: dict[str, Any], dtype: torch.dtype) -> None:
    x = Drawn(**shape, dtype=dtype)
    Aqk, w, u, kg = recomputed(x)
    state = ChunkStateInputs(kg, w, u, x.gc, None, x.cu)
    walked = exact.oracle_chunk_state(request_of("delta_rule_chunk_state", state), state)
    inputs = ChunkOutputInputs(x.q, x.given(walked.v_new), x.gc, Aqk, x.given(walked.h), x.cu)
    r = request_of("kda_chunk_output", inputs, scale=0.3)
    assert error(stages.chunk_output(r, inputs), exact.oracle_chunk_output(r, inputs)) <= BOUND[dtype]


def test_bfloat16_is_right_in_the_interpreter_too() -> None:
    x = Drawn(T=20, dtype=torch.bfloat16)
    inputs = IntraInputs(x.q, x.k, x.gc, x.beta)
    r = request_of("kda_chunk_intra", inputs)
    got, want = stages.chunk_intra(r, inputs), exact.oracle_chunk_intra(r, inputs)
    assert error(got.Aqk, want.Aqk) <= BOUND[torch.bfloat16]


STAGES = [
    pytest.param("kda_chunk_gate", stages.chunk_gate, id="gate"),
    pytest.param("kda_chunk_intra", stages.chunk_intra_by_token, id="intra-token"),
    pytest.param("kda_chunk_intra", stages.chunk_intra_by_chunk, id="intra-chunk"),
    pytest.param("kda_recompute_w_u", stages.recompute_w_u, id="recompute"),
    pytest.param("delta_rule_chunk_state", stages.chunk_state, id="state"),
    pytest.param("kda_chunk_output", stages.chunk_output, id="output"),
]


@pytest.mark.parametrize(("op", "run"), STAGES)
def test_tokens_behind_a_pack(op: str, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not read, and nothing is written for them."""
    x = Drawn(lengths=[3, 0, 17], chunk_size=32)
    Akk, h = (torch.randn(shape, device=DEVICE) for shape in ((1, 20, 1, 32), (1, 3, 1, 16, 16)))
    given = {
        "kda_chunk_gate": ChunkGateInputs(x.g, cu_seqlens=x.cu),
        "kda_chunk_intra": IntraInputs(x.q, x.k, x.gc, x.beta, x.cu),
        "kda_recompute_w_u": RecomputeInputs(x.k, x.v, x.beta, x.gc, Akk, x.q, x.cu),
        "delta_rule_chunk_state": ChunkStateInputs(x.k, x.k, x.v, x.gc, cu_seqlens=x.cu),
        "kda_chunk_output": ChunkOutputInputs(x.q, x.v, x.gc, Akk, h, x.cu),
    }[op]
    padded = type(given)(*(
        torch.cat([a, torch.full_like(a[:, :11], float("nan"))], 1)
        if a is not None and a.ndim > 1 and a.shape[1] == 20
        else a
        for a in given
    ))  # fmt: skip

    def outputs(inputs: Any) -> list[torch.Tensor]:
        found = run(request_of(op, inputs, **x.options), inputs)
        return [found] if isinstance(found, torch.Tensor) else list(found)

    want = outputs(given)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **b: empty(*a, **b).fill_(7.0))
    for got, alone in zip(outputs(padded), want, strict=True):
        if alone.shape[:2] == (1, 20):
            assert torch.equal(got[:, :20], alone) and bool((got[:, 20:] == 7.0).all())
        else:
            assert torch.equal(got, alone)
