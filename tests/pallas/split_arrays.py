"""Arrays of a call split over eight fake devices, for the tests of both backends' partitioning."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kdacore.types import OutputGrads

HEADS = P(None, None, "heads")
BOTH = P("data", None, "heads")


def mesh() -> Mesh:
    return Mesh(np.asarray(jax.devices()[:8]).reshape(2, 4), ("data", "heads"))


def on_mesh(x: Any, spec: P) -> Any:
    return jax.device_put(jnp.asarray(x), NamedSharding(mesh(), spec))


def collectives(program: Any) -> Counter[str]:
    names = "all-gather|all-reduce|collective-permute|all-to-all|reduce-scatter"
    return Counter(re.findall(rf"\b({names})(?:-start)?\(", program.as_text()))


@dataclass(frozen=True)
class Layout:
    """How the arrays of a call are split."""

    tokens: P
    states: P

    def of(self, name: str) -> P:
        if name in ("A_log", "dt_bias"):
            return P("heads")
        if name in ("initial_state", "final_state"):
            return self.states
        return P() if name == "cu_seqlens" else self.tokens

    def place(self, inputs: Any, grads: OutputGrads) -> tuple[dict[str, Any], OutputGrads]:
        """The arrays of a call by name, and the gradients of its outputs, on the mesh."""
        x = {n: on_mesh(a, self.of(n)) for n, a in inputs._asdict().items() if a is not None}
        return x, OutputGrads(on_mesh(grads.o, self.tokens), on_mesh(grads.final_state, self.states))
