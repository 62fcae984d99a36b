"""The checks: plain functions from a case to what they measured. ``CHECKS`` names them all."""

from __future__ import annotations

from collections.abc import Callable

from kdacore.testing.cases import Case
from kdacore.testing.checks.accuracy import accuracy, uninitialised
from kdacore.testing.checks.batch_invariance import batch_invariance, gradient_batch_invariance
from kdacore.testing.checks.causality import (
    causality,
    causality_append,
    gradient_causality,
    gradient_causality_append,
)
from kdacore.testing.checks.gradients import gradients, recomputed_gradients
from kdacore.testing.checks.graphs import graph
from kdacore.testing.checks.nan_containment import gradient_nan_containment, nan_containment
from kdacore.testing.checks.pool import pool
from kdacore.testing.checks.refusal import refusal
from kdacore.testing.checks.repeat import determinism, gradient_determinism
from kdacore.testing.checks.split import drift, split, split_decode
from kdacore.testing.compare import Findings

Check = Callable[[Case, Findings], None]

CHECKS: dict[str, Check] = {
    "accuracy": accuracy,
    "uninitialised": uninitialised,
    "graph": graph,
    "gradients": gradients,
    "recomputed_gradients": recomputed_gradients,
    "causality": causality,
    "causality_append": causality_append,
    "gradient_causality": gradient_causality,
    "gradient_causality_append": gradient_causality_append,
    "split": split,
    "split_decode": split_decode,
    "drift": drift,
    "pool": pool,
    "refusal": refusal,
    "determinism": determinism,
    "gradient_determinism": gradient_determinism,
    "batch_invariance": batch_invariance,
    "gradient_batch_invariance": gradient_batch_invariance,
    "nan_containment": nan_containment,
    "gradient_nan_containment": gradient_nan_containment,
}
