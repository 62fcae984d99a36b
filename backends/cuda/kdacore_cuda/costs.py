"""What recurrent calls cost where the cost table does not tell: it knows decoding by one token only."""

from __future__ import annotations

from kdacore import profile
from kdacore.types import Request

SEVERAL_TOKENS = {
    (False, "float32"): 1.5,
    (False, "bfloat16"): 1.4,
    (True, "float32"): 0.8,
    (True, "bfloat16"): 1.08,
}
"""State V first, state dtype -> our time for several tokens over Triton's: the geometric mean of 4 and 16 tokens
(benchmarks/results/h200/decode-cuda.json). With one token the two differ by 4% at most."""


def recurrent(request: Request) -> float | None:
    """Predicted seconds of ``fused_recurrent_kda``, None where nothing near was measured.

    Predictions scale with the tokens, ours and Triton's alike, so a factor on ours says which is faster.
    """
    seconds = profile.predict("cuda", request)
    if seconds is None or request.B * request.T <= request.N:
        return seconds
    return seconds * SEVERAL_TOKENS[request.state_v_first, request.state_dtype]
