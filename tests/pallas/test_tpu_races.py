"""The kernels in the TPU interpreter: two cores, race detection, scratch full of NaN, bounds
checks.

The state must persist over chunks and be initialised for each sequence and head. Leaked state is
not a race, so every run is also compared with the oracle.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu
from pallas_cases import Case, build, check_backward, check_forward, output_grads, to_jax

from kdacore.types import OutputGrads
from kdacore_pallas.tpu import chunk_backward, chunk_forward, recurrent
from kdacore_pallas.tpu.launch import Launch

FOUR_CHUNKS = {
    "dense": Case(B=2, T=512 - 9, H=1, HV=1, K=8, V=8, gates="mixed"),
    "pack": Case(lengths=(0, 1, 300, 5, 125), H=1, HV=2, K=8, V=16, gate="softplus"),
}


def strict(seed: int) -> Launch:
    return Launch(
        interpret=pltpu.InterpretParams(
            detect_races=True,
            uninitialized_memory="nan",
            out_of_bounds_reads="raise",
            random_seed=seed,
            num_cores_or_threads=2,
        )
    )


def no_races() -> bool:
    return not interpreter.races.races_found


MORE_SEEDS = [
    pytest.param(name, seed, marks=pytest.mark.exhaustive)
    for name, seed in (("dense", 0), ("dense", 1), ("pack", 2))
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "seed"), [("pack", 0), *MORE_SEEDS])
def test_chunk(name: str, seed: int) -> None:
    request, inputs = build(FOUR_CHUNKS[name])
    arrays, grads = to_jax(inputs), output_grads(request)
    d = OutputGrads(*(jnp.asarray(x) for x in grads))
    out = jax.jit(lambda x: chunk_forward.forward(request, x, request.H, strict(seed), True))(arrays)
    check_forward(out, request, inputs)
    assert no_races()
    got = jax.jit(lambda x, d: chunk_backward.backward(request, x, (), d, request.H, strict(seed)))(arrays, d)
    check_backward(got, request, inputs, grads)
    assert no_races()


@pytest.mark.parametrize("seed", [0, 1])
def test_recurrent(seed: int) -> None:
    request, inputs = build(Case(op="fused_recurrent_kda", lengths=(2, 1, 0, 3), K=8, V=8))
    out: Any = jax.jit(lambda x: recurrent.forward(request, x, strict(seed)))(to_jax(inputs))
    check_forward(out, request, inputs)
    assert no_races()
