"""The backward of ``chunk_gated_delta_rule`` on Hopper, emulated on the CPU: against the float64 oracle, equal bits."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from chunk_backward_calls import same_gradients
from cuda_calls import MODEL, Draw, error
from emulated_backend import NAME, registered, run_emulated
from gated_delta_backward_calls import WHOLE, carry, check, hold, output_grads, run, training
from gated_delta_calls import OP, TOKENS, draw, in_each_order, names_of, pack, state

from kdacore.testing import matrix
from kdacore.testing.cases import Case
from kdacore.testing.serving import judge
from kdacore.types import ChunkInputs, OutputGrads
from kdacore_reference.oracle import oracle_backward

pytestmark = [pytest.mark.usefixtures("poison"), pytest.mark.first_cases(2)]
MORE = pytest.mark.exhaustive
NAN = float("nan")


@pytest.fixture(params=[1, 2], ids=["half a state a block", "a whole state a block"])
def warpgroups(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    carry(monkeypatch, request.param)
    return int(request.param)


# --- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("T", [1, 63, 64, 65, 130])
def test_lengths(emulated: list[str], warpgroups: int, T: int) -> None:
    check(draw(T, B=1 + T % 2, seed=T), **MODEL)
    assert names_of(emulated) == WHOLE


@pytest.mark.parametrize("gate", ["init", "random", "slow", "fast", "spread", "mixed"])
def test_gates(emulated: list[str], gate: str) -> None:
    options = MODEL if gate in ("init", "random") else {"use_qk_l2norm_in_kernel": True}
    inputs = draw(150, gate=gate, initial_state=state(1, 2))
    if gate not in ("init", "random"):
        inputs = inputs._replace(beta=inputs.beta.sigmoid())
    check(inputs, **options)


@pytest.mark.parametrize("group", [1, 2, 3, 16])
def test_groups_of_value_heads(emulated: list[str], group: int) -> None:
    check(draw(70, 2, 2 * group), **MODEL)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("sigmoid", [True, False])
def test_norm_and_sigmoid(emulated: list[str], norm: bool, sigmoid: bool) -> None:
    inputs = draw(100, initial_state=state(1, 2))
    if not norm:
        unit = {n: torch.nn.functional.normalize(getattr(inputs, n).float(), dim=-1).bfloat16() for n in "qk"}
        inputs = inputs._replace(**unit)
    if not sigmoid:
        inputs = inputs._replace(beta=inputs.beta.sigmoid())
    options = {"use_qk_l2norm_in_kernel": norm, "use_beta_sigmoid_in_kernel": sigmoid}
    check(inputs, **MODEL | options)


def test_bounded_gate_and_negative_eigenvalues(emulated: list[str]) -> None:
    check(draw(140), safe_gate=True, lower_bound=-5.0, allow_neg_eigval=True, scale=0.2, **MODEL)


@pytest.mark.parametrize("all_of_them", [True, False])
def test_betas_of_zero(emulated: list[str], all_of_them: bool) -> None:
    """Tokens that write nothing. Gradients are divided by beta."""
    inputs = draw(130, initial_state=state(1, 2))
    beta = inputs.beta.sigmoid()
    beta[:, :: 1 if all_of_them else 3] = 0
    got = check(inputs._replace(beta=beta), **MODEL | {"use_beta_sigmoid_in_kernel": False})
    assert got.beta.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_gates_and_betas_of_other_types(emulated: list[str], dtype: torch.dtype) -> None:
    inputs = draw(140)
    check(inputs._replace(**{n: getattr(inputs, n).to(dtype) for n in ("g", "beta", "dt_bias")}), **MODEL)


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states(emulated: list[str], warpgroups: int, v_first: bool, dtype: torch.dtype) -> None:
    check(draw(100, B=2, initial_state=state(2, 2, dtype=dtype)), state_v_first=v_first, **MODEL)


def test_strided_inputs(emulated: list[str]) -> None:
    """The same bits as of contiguous ones; what kernels cannot read as it lies is copied."""
    wide = torch.randn(2, 70, 4, 3 * 128).to(torch.bfloat16)
    heads, ragged = torch.randn(2, 70, 9).to(torch.bfloat16), torch.randn(2, 70, 4, 128, 2).to(torch.bfloat16)
    inputs = draw(70, 2, 4, B=2)._replace(
        q=wide[:, :, :2, :128],
        k=wide[:, :, 2:, 256:],
        v=ragged[..., 0],
        g=heads[..., :4],
        beta=heads[..., 5:],
    )
    got = check(inputs, **MODEL)
    dense = ChunkInputs(*(None if x is None else x.contiguous() for x in inputs))
    r = training(dense, output_final_state=True, **MODEL)
    same_gradients(got, run(r, dense, output_grads(r, dense)))


@MORE
@pytest.mark.parametrize("gate", ["random", "init"])
def test_the_contract_s_length(emulated: list[str], gate: str) -> None:
    """Drawn so that the gradients of A_log and dt_bias are not what is left of terms that cancel."""
    check(draw(2048, gate=gate, seed=1), loose=1.0, **MODEL)


# --- packs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_pack_of_hard_lengths_with_states(emulated: list[str], warpgroups: int, dtype: torch.dtype) -> None:
    lengths = (0, 1, 31, 64, 65, 0, 40)
    got = check(pack(lengths, dtype=dtype, initial_state=state(7, 2)), state_v_first=True, **MODEL)
    assert got.initial_state is not None


@pytest.mark.parametrize("lengths", [(70, 0, 33), (0, 0), pytest.param((1, 63, 0, 0), marks=MORE)])
@pytest.mark.parametrize("HV", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_rows_behind_a_pack(
    emulated: list[str], lengths: tuple[int, ...], HV: int, dtype: torch.dtype
) -> None:
    """NaN there, in inputs and in the gradient of the output, reaches nothing; gradients there are zero."""
    end = sum(lengths)
    inputs = pack(lengths, 90, HV=HV, dtype=torch.int64)
    inputs = inputs._replace(g=inputs.g.to(dtype), beta=inputs.beta.to(dtype))
    poisoned = inputs._replace(**{n: getattr(inputs, n).clone() for n in TOKENS})
    r = training(inputs, output_final_state=True, **MODEL)
    grads = output_grads(r, inputs)
    assert grads.o is not None
    for x in (*(getattr(poisoned, n) for n in TOKENS), grads.o):
        x[:, end:] = NAN
    got = run(r, poisoned, grads)
    for name in TOKENS:
        assert not getattr(got, name)[:, end:].any(), name
    if not end:
        assert not got.A_log.any() and not got.dt_bias.any()
        return
    short = inputs._replace(**{n: getattr(inputs, n)[:, :end].contiguous() for n in TOKENS})
    want = run(
        training(short, output_final_state=True, **MODEL),
        short,
        OutputGrads(grads.o[:, :end].contiguous(), grads.final_state),
    )
    for name in TOKENS:
        assert torch.equal(getattr(got, name)[:, :end], getattr(want, name)), name
    assert error(got.A_log, want.A_log.numpy()) < 1e-5
    assert error(got.dt_bias, want.dt_bias.numpy()) < 1e-5


def test_nothing_at_all(emulated: list[str]) -> None:
    """Empty sequences alone: the gradient of the final state is that of the initial one."""
    inputs = pack((0, 0), 5, initial_state=state(2, 2))
    r = training(inputs, output_final_state=True, **MODEL)
    grads = output_grads(r, inputs)
    got = run(r, inputs, grads)
    assert torch.equal(got.initial_state, grads.final_state)
    assert not got.A_log.any() and not got.dt_bias.any()


# --- gradients of the results --------------------------------------------------------------------------------------


def test_of_the_output_or_of_the_state_alone(emulated: list[str]) -> None:
    inputs = draw(100, initial_state=state(1, 2))
    r = training(inputs, output_final_state=True, **MODEL)
    both = output_grads(r, inputs)
    for grads in (both._replace(o=None), both._replace(final_state=None)):
        hold(run(r, inputs, grads), oracle_backward(r, inputs, grads), inputs, 2.0)


def test_nothing_flows_back(emulated: list[str]) -> None:
    """No gradient of the outputs: every gradient is exactly zero."""
    inputs = draw(70, initial_state=state(1, 2))
    got = run(training(inputs, output_final_state=True, **MODEL), inputs, OutputGrads(None, None))
    for name, x in got._asdict().items():
        assert x is not None and not x.any(), name


def test_later_tokens_without_a_gradient_change_no_bit(emulated: list[str]) -> None:
    inputs, other = draw(200), draw(200, seed=9)
    d_o = Draw(3).normal(*inputs.v.shape)
    d_o[:, 100:] = 0
    r = training(inputs, **MODEL)
    first = run(r, inputs, OutputGrads(d_o, None))
    later = {n: torch.cat([getattr(inputs, n)[:, :100], getattr(other, n)[:, 100:]], 1) for n in TOKENS}
    second = run(r, inputs._replace(**later), OutputGrads(d_o, None))
    for name in TOKENS:
        a, b = getattr(first, name), getattr(second, name)
        assert torch.equal(a[:, :100], b[:, :100]) and not a[:, 100:].any(), name
    assert torch.equal(first.A_log, second.A_log) and torch.equal(first.dt_bias, second.dt_bias)


# --- bits ----------------------------------------------------------------------------------------------------------


def test_a_sequence_has_the_same_bits_alone_in_a_batch_and_in_a_pack(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the blocks that carry its states."""
    batch, found = draw(100, B=3), []
    d_o = Draw(17).normal(*batch.v.shape)
    for warpgroups in (1, 2):
        carry(monkeypatch, warpgroups)
        first = batch._replace(**{n: getattr(batch, n)[:1].contiguous() for n in TOKENS})
        tokens = {n: getattr(batch, n).flatten(0, 1)[None] for n in TOKENS}
        packed = batch._replace(**tokens, cu_seqlens=torch.tensor([0, 100, 200, 300]))
        for x, d in ((first, d_o[:1]), (batch, d_o), (packed, d_o.flatten(0, 1)[None])):
            got = run(training(x, **MODEL), x, OutputGrads(d.contiguous(), None))
            found.append([getattr(got, n).flatten(0, 1)[:100] for n in TOKENS])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, found[0], strict=True))


def test_nan_of_another_sequence_reaches_nothing(emulated: list[str]) -> None:
    inputs = draw(100, B=2)
    r = training(inputs, **MODEL)
    grads = output_grads(r, inputs)
    want = run(r, inputs, grads)
    for n in TOKENS:
        getattr(inputs, n)[1] = NAN
    got = run(r, inputs, grads)
    for n in TOKENS:
        assert torch.equal(getattr(got, n)[0], getattr(want, n)[0]), n


def test_same_bits_in_any_order(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, warpgroups: int
) -> None:
    """Of threads and copies; and where one warp falls behind all others."""
    inputs = draw(200, 1, 3)
    r = training(inputs, output_final_state=True, **MODEL)
    grads, found = output_grads(r, inputs), []
    for _ in in_each_order(monkeypatch, (0, 3, 4, 8)):
        found.append(run(r, inputs, grads))
    for other in found[1:]:
        same_gradients(other, found[0])


# --- conformance ---------------------------------------------------------------------------------------------------

QUICK = (f"{OP}-gradients-collinear", f"{OP}-gradient_causality-base")


def served() -> list[Case]:
    cases = matrix.plan(NAME, device="cpu", kinds=("torch",)).cases
    wanted = [c for c in cases if c.op == OP and c.check in matrix.DIFFERENTIATES and c.mode == "eager"]
    wide = [dataclasses.replace(c, shape=dataclasses.replace(c.shape, K=128, V=128)) for c in wanted]
    return [c for c in wide if not judge(c)]


def test_some_conformance_cases(emulated: list[str]) -> None:
    with registered(OP):
        cases = [c for c in served() if c.id.startswith(QUICK)]
        assert len(cases) >= len(QUICK)
        run_emulated(cases, emulated, "unit_grads")


@MORE
def test_every_conformance_case(emulated: list[str]) -> None:
    with registered(OP):
        cases = served()
        assert len(cases) > 20
        run_emulated(cases, emulated, "unit_grads")
