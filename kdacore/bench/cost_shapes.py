"""The calls that cost tables are measured on, as benchmark cases.

A call's time is a function of the tokens of a sequence and of how many sequences and value heads there are together
(items), for each of the variants that :func:`kdacore.dispatch.cost.variant_of` tells apart. The sizes are spaced so
that times between them can be interpolated: closely where backends change places, short sequences and few items.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from itertools import product
from typing import Any

from kdacore.bench.cases import Case
from kdacore.machine import version_of
from kdacore.types import ArrayKind

Fields = dict[str, Any]

LARGEST = 1 << 21
"""Tokens times value heads of a forward: a millisecond or two on a large GPU."""
LARGEST_TRAINING = 1 << 20

_TOKENS = (1, 16, 32, 64, 128, 256, 1024, 4096, 16384, 65536)
_ITEMS = (
    (1, 2),
    (1, 4),
    (1, 8),
    (1, 16),
    (1, 20),
    (1, 32),
    (1, 36),
    (1, 44),
    (1, 64),
    (4, 32),
    (8, 32),
    (16, 32),
    (64, 32),
    (256, 32),
)
"""Batch and heads."""
_GATED_DELTA_ITEMS = ((1, 2), (1, 4), (1, 8), (1, 16), (1, 24), (1, 32), (2, 32), (8, 32), (64, 32))
"""Batch and value heads, two a key head."""
_SOME_TOKENS = (1, 16, 64, 256, 4096)
_SOME_ITEMS = ((1, 4), (1, 16), (1, 64), (16, 32), (256, 32))
_STATE_TOKENS = (1, 16, 64, 128, 512)
_PACK_TOKENS = (16, 64, 256, 1024)
_PACK_ITEMS = ((4, 8), (4, 32), (16, 32), (64, 32), (256, 32))
_TRAINING_TOKENS = (16, 64, 128, 512, 4096, 32768)
_TRAINING_ITEMS = ((1, 4), (1, 8), (1, 16), (1, 32), (1, 64), (8, 32), (64, 32))
_RECURRENT_TOKENS = (1, 4, 16)
_RECURRENT_ITEMS = ((1, 8), (1, 32), (8, 32), (32, 32), (256, 32))
_FEW_RECURRENT_ITEMS = ((1, 32), (256, 32))


LARGEST_ON_CPU = 1 << 13
_CPU_TOKENS = (1, 16, 256, 4096)
_CPU_ITEMS = ((1, 2), (4, 8))
_CPU_RECURRENT_TOKENS = (1, 16)
_CPU_HEAD_DIMS = (32, 128)
"""Times of other head dims are taken in proportion to K * V."""


def cases(device_type: str) -> list[Case]:
    """Every call of a table for devices of a type, the most telling first."""
    if device_type == "cpu":
        kinds = [kind for kind in CPU_KINDS if kind == "numpy" or version_of(kind)]
        return [case for kind in kinds for case in cpu_cases(kind)]
    return [*_chunk(), *_training(), *_recurrent()]


CPU_KINDS: tuple[ArrayKind, ...] = ("numpy", "torch", "jax")


def cpu_cases(kind: ArrayKind) -> Iterator[Case]:
    """Calls without options, which every backend for CPUs serves, so that all can be compared. Few of JAX, which
    compiles each."""
    few = kind == "jax"
    tokens, decoded = (_CPU_TOKENS[1:3], (1,)) if few else (_CPU_TOKENS, _CPU_RECURRENT_TOKENS)
    for K in _CPU_HEAD_DIMS[few:]:
        plain: Fields = {"K": K, "V": K, "kind": kind, "dtype": "float32", "gate": "softplus"}
        plain |= {"gate_inside": False, "pool": False, "plain": True}
        for op in ("chunk_kda", "chunk_gated_delta_rule"):
            for sizes in _grid(tokens, _CPU_ITEMS, LARGEST_ON_CPU):
                yield _cpu_case(op, sizes, plain)
        for op in ("fused_recurrent_kda", "fused_recurrent_gated_delta_rule"):
            for sizes in _grid(decoded, _CPU_ITEMS, LARGEST_ON_CPU):
                yield _cpu_case(op, sizes, {**plain, "phase": "decode"})
        if kind == "torch":
            for sizes in _grid(tokens[1:3], _CPU_ITEMS, LARGEST_ON_CPU):
                yield _cpu_case("chunk_kda", sizes, {**plain, "phase": "training"})


def _cpu_case(op: str, sizes: Fields, fields: Fields) -> Case:
    phase = " training" if fields.get("phase") == "training" else ""
    words = [f"{name}={value}" for name, value in {**sizes, "K": fields["K"]}.items()]
    return Case(
        name=f"{fields['kind']} {op}{phase} {' '.join(words)}", op=op, gate_sets=("init",), **sizes, **fields
    )


def _case(**fields: Any) -> Case:
    words = [f"{name}={value}" for name, value in fields.items() if name != "lengths"]
    return Case(name=" ".join(words), gate_sets=("init",), **fields)


def _grid(
    tokens: tuple[int, ...], items: tuple[tuple[int, int], ...], largest: int
) -> Iterator[dict[str, int]]:
    for T in tokens:
        for B, H in items:
            sizes = {"B": B, "T": T, "H": H}
            if math.prod(sizes.values()) <= largest:
                yield sizes


def _chunk() -> Iterator[Case]:
    for sizes in _grid(_TOKENS, _ITEMS, LARGEST):
        yield _case(**sizes)
    for sizes in _grid(_SOME_TOKENS, _SOME_ITEMS, LARGEST):
        yield _case(**sizes, gate="softplus")
    for sizes in _grid(_STATE_TOKENS, _SOME_ITEMS, LARGEST):
        yield _case(**sizes, initial_state=True)
    for sizes in _grid(_PACK_TOKENS, _PACK_ITEMS, LARGEST):
        yield _pack(sizes["B"], sizes["T"], sizes["H"])
    gdn: Fields = {"op": "chunk_gated_delta_rule", "gate": "softplus"}
    for sizes in _grid(_TOKENS, _GATED_DELTA_ITEMS, LARGEST):
        yield _case(**sizes | {"H": sizes["H"] // 2, "HV": sizes["H"]}, **gdn)
    for sizes in _grid(_PACK_TOKENS, ((4, 8), (16, 32)), LARGEST):
        yield _pack(sizes["B"], sizes["T"], sizes["H"], **gdn)


def _pack(N: int, mean: int, H: int, **fields: Any) -> Case:
    """Lengths half of the mean and one and a half of it by turns."""
    lengths = tuple(mean // 2 if n % 2 else mean + mean // 2 for n in range(N))
    case = _case(**fields, T=sum(lengths), H=H, lengths=lengths)
    return dataclasses.replace(case, name=f"pack of {N} {case.name}")


def _training() -> Iterator[Case]:
    for sizes in _grid(_TRAINING_TOKENS, _TRAINING_ITEMS, LARGEST_TRAINING):
        yield _case(**sizes, phase="training")


def _recurrent() -> Iterator[Case]:
    kda: Fields = {"op": "fused_recurrent_kda", "phase": "decode"}
    gdn: Fields = {"op": "fused_recurrent_gated_delta_rule", "phase": "decode"}
    no_pool: Fields = {"pool": False, "initial_state": True}
    for state_dtype, v_first in product(("float32", "bfloat16"), (False, True)):
        layout: Fields = {"state_dtype": state_dtype, "state_v_first": v_first}
        for sizes in _grid(_RECURRENT_TOKENS, _RECURRENT_ITEMS, LARGEST):
            yield _case(**sizes, **layout, **kda)
        for sizes in _grid((1, 4), _FEW_RECURRENT_ITEMS, LARGEST):
            yield _case(**sizes, **layout, **kda, gate_dtype="float32")
            yield _case(**sizes, **layout, **gdn)
            yield _case(**sizes, **layout, **gdn, **no_pool)
        for B, H in _FEW_RECURRENT_ITEMS:
            yield _pack(B, 4, H, **layout, **kda)
            yield _case(B=B, T=4, H=H, **layout, **kda, **no_pool)
