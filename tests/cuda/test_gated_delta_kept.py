"""What the forward of ``chunk_gated_delta_rule`` saves for its backward under disable_recompute, emulated: results and
gradients against the float64 oracle, gradients bit for bit those of a backward that computes all again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from chunk_backward_calls import same_gradients
from cuda_calls import MODEL, check_outputs, oracle
from gated_delta_backward_calls import WHOLE, carry, hold, leave_uncut, output_grads, run, training
from gated_delta_calls import draw, names_of, pack, state

from kdacore.types import ChunkInputs, Outputs, Request
from kdacore_cuda.forms.gated_delta import forward as gated_delta
from kdacore_cuda.forms.gated_delta import launches
from kdacore_cuda.forms.gated_delta.workspace import SAVED, unit_bytes
from kdacore_reference.oracle import oracle_backward

pytestmark = pytest.mark.usefixtures("poison")


@pytest.fixture(autouse=True)
def not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_uncut(monkeypatch)


@pytest.fixture(params=[1, 2], ids=["half a state a block", "a whole state a block"])
def warpgroups(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    carry(monkeypatch, request.param)
    return int(request.param)


def kept(inputs: ChunkInputs, **options: Any) -> Request:
    return training(inputs, disable_recompute=True, **options)


def check_kept(inputs: ChunkInputs, launched: list[str], **options: Any) -> Outputs:
    """Results against the oracle, gradients bit for bit those of a backward that computes all again."""
    r = kept(inputs, output_final_state=True, **options)
    launched.clear()
    out = gated_delta.forward(r, inputs)
    grads = output_grads(r, inputs)
    got = run(r, inputs, grads, out.saved)
    assert names_of(launched) == ["chunk_records", "walk_records_keeping", *WHOLE[1:]]
    assert "WITH_STATES0" in launched[2]
    (buffer,) = out.saved
    units = launches.launches_of(r).buffers["saved"] // sum(unit_bytes()[n] for n in SAVED)
    assert buffer.dtype == torch.uint8 and units >= r.HV
    check_outputs(out, oracle(r, inputs), 2.0)
    hold(got, oracle_backward(r, inputs, grads), inputs, 2.0)
    same_gradients(got, run(r, inputs, grads))
    assert "WITH_STATES1" in launched[-3]
    return out


@pytest.mark.first_cases(1)
def test_saved_of_a_batch(emulated: list[str], warpgroups: int) -> None:
    check_kept(draw(130, 1, 3, B=2, initial_state=state(2, 3)), emulated, **MODEL)


def test_saved_of_a_pack(emulated: list[str], warpgroups: int) -> None:
    """With betas of zero, rows behind it, and slots that nobody writes."""
    inputs = pack((0, 1, 63, 64, 66, 0), 30, initial_state=state(6, 2, dtype=torch.bfloat16))
    beta = inputs.beta.sigmoid()
    beta[:, ::5] = 0
    options = MODEL | {"use_beta_sigmoid_in_kernel": False, "state_v_first": True}
    out = check_kept(inputs._replace(beta=beta), emulated, **options)
    assert not out.o[:, 194:].any()


def test_results_are_those_of_a_call_that_saves_nothing(emulated: list[str]) -> None:
    """Betas that are not tiny."""
    inputs = draw(200, initial_state=state(1, 2))
    a, b = (
        gated_delta.forward(training(inputs, output_final_state=True, disable_recompute=x, **MODEL), inputs)
        for x in (True, False)
    )
    assert torch.equal(a.o, b.o) and torch.equal(a.final_state, b.final_state)
    assert len(a.saved) == 1 and not b.saved
