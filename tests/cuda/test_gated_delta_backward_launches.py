"""The launches of the backward of ``chunk_gated_delta_rule``: order, blocks and buffers; the sums over chunks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from cuda_calls import MODEL, Draw
from gated_delta_backward_calls import EVERY, training
from gated_delta_calls import draw, names_of, pack
from single_launches import launch_kernel

from kdacore.types import InputGrads
from kdacore_cuda.forms.gated_delta import backward_launches
from kdacore_cuda.forms.gated_delta.kernels import sums_kernel
from kdacore_cuda.forms.gated_delta.workspace import SAVED, unit_bytes
from kdacore_cuda.kernel_parameters import SUM_SCALE, TYPES

NAN = float("nan")


def test_sums_over_chunks(emulated: list[str]) -> None:
    """Against NumPy; chunks that add nothing change no bit."""
    d = Draw(3)
    parts = {name: d.normal(75, 5, dtype=torch.float32) for name in ("dA_part", "dbias_part")}
    found = sum_chunks(parts)
    for name, x in zip(parts, found, strict=True):
        want = (parts[name].double() / SUM_SCALE).sum(0)
        np.testing.assert_allclose(x, want, rtol=1e-5, atol=1e-5 / SUM_SCALE)
    again = sum_chunks({name: torch.cat([x, torch.zeros_like(x)]) for name, x in parts.items()})
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    assert names_of(emulated) == ["gate_sums"] * 2


def test_sums_saturate_and_have_any_type(emulated: list[str]) -> None:
    parts = {
        "dA_part": torch.full((3, 2), 3e38),
        "dbias_part": torch.tensor([[0.0, 1e33], [0.0, -1e33], [0.25, 0.0]]),
    }
    A, bias = sum_chunks(parts, torch.float16, torch.bfloat16)
    assert A.tolist() == [65504.0, 65504.0]
    assert bias.tolist() == [0.25 / SUM_SCALE, 0.0]
    assert sum_chunks(parts | {"dA_part": torch.full((3, 2), NAN)})[0].isnan().all()


@pytest.mark.parametrize("name", ["dA_part", "dbias_part"])
def test_one_sum_alone(emulated: list[str], name: str) -> None:
    parts = {x: torch.ones(40, 3) for x in ("dA_part", "dbias_part")}
    got = sum_chunks({name: parts[name]})[name == "dbias_part"]
    assert got.tolist() == [40 / SUM_SCALE] * 3


def sum_chunks(
    parts: dict[str, torch.Tensor], A: torch.dtype = torch.float32, bias: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of A_log and dt_bias from the parts; NaN where there are none."""
    slots, HV = next(iter(parts.values())).shape
    results = {"d_A": torch.full((HV,), NAN, dtype=A), "d_bias": torch.full((HV,), NAN, dtype=bias)}
    given = {"d_A": "dA_part", "d_bias": "dbias_part"}
    arrays = parts | {name: x for name, x in results.items() if given[name] in parts}
    types = {"A_type": TYPES[str(A)[6:]], "bias_type": TYPES[str(bias)[6:]]}
    launch_kernel(sums_kernel(), HV, results["d_A"], arrays, slots=slots, HV=HV, **types)
    return results["d_A"], results["d_bias"]


@pytest.mark.parametrize("saved", ["", "operands"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("to_caller", [False, True])
def test_launches(emulated: list[str], saved: str, packed: bool, to_caller: bool) -> None:
    """Their order, blocks, and buffers, of which no two arrays overlap."""
    inputs = pack((64, 0, 90), 10, H=2, HV=6) if packed else draw(130, 2, 6, B=2)
    r = training(inputs, **MODEL)
    wanted = InputGrads(*EVERY)._replace(k=False, beta=False)
    got = backward_launches.launches_of(r, wanted, saved, to_caller)
    numbers, slots = got.numbers, 164 // 64 + 3 if packed else 2 * 3
    names = [getattr(step, "name", "clear") for step in got.program.steps]
    sums = [] if to_caller else ["sums"]
    cleared = ["clear"] if packed and not to_caller else []
    assert names == [*cleared, *([] if saved else ["records"]), "walks", "grads", *sums]
    walks = 6 * r.N * (1 if saved else 2)
    assert numbers["walk_blocks"] == walks * 2  # few find a multiprocessor each
    assert (numbers["units"], numbers["record_blocks"], numbers["grads_blocks"]) == (slots * 2,) * 3
    places = {n: numbers[f"{n}_at"] for n in unit_bytes() if not (saved and n in SAVED)}
    sizes = {n: slots * 6 * unit_bytes()[n] for n in places}
    parts = {n: numbers[f"{n}_at"] for n in ("dA_part", "dbias_part") if not to_caller}
    ends = slots * 6 * 4
    if packed:
        assert got.buffers["zeroed"] == sum(-(-ends // 256) * 256 for _ in parts) == numbers["zeroed_bytes"]
    else:
        places, sizes = places | parts, sizes | dict.fromkeys(parts, ends)
    in_order = sorted((at, at + sizes[n]) for n, at in places.items())
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(in_order))
    assert in_order[0][0] == 0 and in_order[-1][1] <= got.buffers["workspace"]
    assert got.buffers["second"] >= r.B * r.T * (2 * 128 * 2 + 6 * 2)
    assert numbers["dbeta_at"] >= r.B * r.T * 2 * 128 * 2
