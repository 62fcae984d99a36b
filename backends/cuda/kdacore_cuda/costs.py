"""Predicted cost of recurrent calls. The measured table has one token and a bfloat16 g per channel;
the factors here cover the rest."""

from __future__ import annotations

from kdacore.dispatch import cost
from kdacore.types import Request
from kdacore_cuda.recurrent_kernels import RecurrentMode, recurrent_mode

SEVERAL_TOKENS = {
    (False, "float32"): 1.5,
    (False, "bfloat16"): 1.4,
    (True, "float32"): 0.8,
    (True, "bfloat16"): 1.08,
}
"""State V first, state dtype -> our time for several tokens over Triton's: the geometric mean of 4
and 16 tokens (benchmarks/results/h200/decode-cuda.json). With one token the two differ by 4% at
most."""

FLOAT32_G = {
    (False, "float32"): 1.07,
    (False, "bfloat16"): 1.31,
    (True, "float32"): 1.01,
    (True, "bfloat16"): 1.25,
}
"""State V first, state dtype -> our time with a float32 g over ours with a bfloat16 one (32
sequences, same file)."""

HEAD_GATE = {False: 1.30, True: 1.17}
"""State V first -> our time with one gate per head over ours with one per channel, for calls
without a kernel of their own. Triton's time is the same for both."""


def recurrent(request: Request) -> float | None:
    """Predicted seconds of a recurrent op, None where nothing similar was measured.

    All predictions grow with the tokens in proportion, so a factor on ours decides which backend is
    faster.
    """
    seconds = cost.predict("cuda", request)
    if seconds is None:
        return None
    layout = request.state_v_first, request.state_dtype
    if request.B * request.T > request.N:
        seconds *= SEVERAL_TOKENS[layout]
    if request.scalar_gate:
        own = recurrent_mode(request) == RecurrentMode.ONE_TOKEN_HEAD_GATE
        return seconds if own else seconds * HEAD_GATE[request.state_v_first]
    return seconds * FLOAT32_G[layout] if request.spec("g").dtype == "float32" else seconds
