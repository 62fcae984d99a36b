"""What is drawn for a random call of a stage op: each change takes a case, a generator and the level."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kdacore.testing.capabilities import representable
from kdacore.testing.cases import Case
from kdacore.testing.matrix import Level
from kdacore.testing.random_parts import USUAL_GATES, draw_memory, index_dtype, pick, usable_dtypes

QUICK_TOKENS, FULL_TOKENS = 200, 700
EDGES = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
"""Lengths around those of chunks and of the tiles inside them."""
_WIDTHS, _POWERS = (16, 32, 60, 64, 100, 128), (64, 128)


def _most(level: Level) -> int:
    return FULL_TOKENS if level == "full" else QUICK_TOKENS


def draw_sizes(case: Case, rng: Any, level: Level) -> Case:
    T = pick(rng, *EDGES) if rng.random() < 0.5 else int(rng.integers(1, _most(level)))
    H = int(rng.integers(1, 4))
    K, V = case.shape.K, case.shape.V
    # Compiled kernels have few widths, which independent draws would seldom meet.
    if widths := pick(rng, (), _POWERS, _POWERS, _WIDTHS):
        K, V = pick(rng, *widths), pick(rng, *widths)
    B, HV = int(rng.integers(1, 4)), H * int(rng.integers(1, 4))
    return replace(case, shape=replace(case.shape, B=B, T=T, H=H, HV=HV, K=K, V=V))


def draw_pack(case: Case, rng: Any, level: Level) -> Case:
    """Up to eight sequences, many empty or at an edge."""
    if rng.random() < 0.5:
        return case
    lengths: list[int] = []
    for _ in range(int(rng.integers(1, 9))):
        wanted = pick(rng, 0, int(rng.integers(1, 20)), pick(rng, *EDGES), pick(rng, *EDGES))
        lengths.append(min(wanted, _most(level) - sum(lengths)))
    if not sum(lengths):
        lengths.append(1)
    padding = pick(rng, 0, int(rng.integers(1, 80)))
    packed = replace(case.shape, B=1, T=sum(lengths) + padding, lengths=tuple(lengths), padding=padding)
    return replace(case, shape=packed, host_offsets=bool(rng.random() < 0.3))


def draw_keys_and_gates(case: Case, rng: Any, level: Level) -> Case:
    case = replace(case, gates=pick(rng, "random", "slow", *USUAL_GATES), collinear=bool(rng.random() < 0.3))
    how = pick(rng, "log", "softplus", "sigmoid") if case.op == "kda_chunk_gate" else "log"
    if how == "log":
        return case
    A_log = how == "softplus" or rng.random() < 0.8
    case = replace(case, A_log=bool(A_log), dt_bias=pick(rng, "", "matrix", "flat"))
    return case.having(lower_bound=pick(rng, -5.0, -1.0) if how == "sigmoid" else None)


def draw_options(case: Case, rng: Any, level: Level) -> Case:
    """The chunk size, and what single stages take or do without."""
    if rng.random() < 0.3:
        case = case.having(chunk_size=pick(rng, 16, 32, 64))
    if case.op in ("kda_chunk_intra", "kda_chunk_output") and rng.random() < 0.3:
        return case.having(scale=0.3)
    if case.op == "kda_recompute_w_u":
        return replace(case, q_given=bool(rng.random() < 0.5))
    if case.op == "delta_rule_chunk_state":
        narrow = rng.random() < 0.2 and representable(case.kind, "bfloat16")
        case = case.having(state_v_first=pick(rng, None, True))
        given = bool(rng.random() < 0.6)
        # A state that is not given has no dtype of its own.
        return replace(case, initial_state=given, state_dtype="bfloat16" if given and narrow else "float32")
    return case


def draw_dtypes(case: Case, rng: Any, level: Level) -> Case:
    """Draw dtypes of betas, biases and intermediates (as they are or float32), beside those of q, k and v."""
    usable = usable_dtypes(case)
    return replace(
        case,
        beta_dtype=pick(rng, "float32", *usable),
        bias_dtype=pick(rng, "float32", *usable),
        stage_dtype=pick(rng, "", "", "float32"),
        index_dtype=index_dtype(case, rng),
    )


CHANGES = (draw_sizes, draw_pack, draw_keys_and_gates, draw_options, draw_dtypes, draw_memory)


def draw_check(case: Case, rng: Any) -> Case:
    """Mostly the results alone; some torch calls on fresh memory full of NaN."""
    fresh = case.kind == "torch" and rng.random() < 0.2
    return replace(case, check="uninitialised" if fresh else "accuracy")
