"""States before chosen tokens (``checkpoint_offsets``), which go to rows of the pool.

A chosen token is a multiple of 16 from its sequence's start, and chunks have 32 tokens. The state
at the start of the token's chunk is recorded while chunks are scanned; where the token is in the
middle of the chunk, the 16 tokens before it then follow one by one. So no chunk is divided, and all
other results have the bits that they have without checkpoints.
"""

from __future__ import annotations

from typing import Any

from kdacore.contract.state_rows import ZEROS, StateRows
from kdacore.oracle.host_values import to_int64
from kdacore.types import Array, Request
from kdacore_reference.arrays import device_of, index_array, namespace, put
from kdacore_reference.recurrent import plan_recurrent, run_tokens
from kdacore_reference.slabs import CHUNK, Sequence, Unit


class PoolCheckpoints:
    """The checkpoints of one call.

    Args:
        request: of a chunked op.
        inputs: its arrays.
        sequences: all of the call's.
        rows: the pool rows, checked.
        dtype: the compute dtype.
    """

    def __init__(
        self, request: Request, inputs: Any, sequences: list[Sequence], rows: StateRows, dtype: Any
    ) -> None:
        self.request, self.inputs = request, inputs
        self.chunks: dict[tuple[int, int], list[int]] = {}
        """Checkpoints whose token is in this chunk, by sequence and chunk."""
        self.rest: list[Sequence] = []
        """Tokens between the chunk's start and the chosen token, by checkpoint."""
        shape = (request.checkpoint_count, request.HV, request.K, request.V)
        self.starts = namespace(inputs.q).zeros(shape, dtype=dtype, device=device_of(inputs.q))
        for c, offset in enumerate(to_int64(inputs.checkpoint_offsets).tolist()):
            if rows.checkpoints[c] == ZEROS:
                continue
            s = sequences[rows.checkpoint_sequences[c]]
            chunk, behind = divmod(offset - s.start, CHUNK)
            self.chunks.setdefault((s.n, chunk), []).append(c)
            if behind:
                self.rest.append(Sequence(c, offset - behind, behind))

    def record(self, unit: Unit, chunk: int, states: Array) -> None:
        """Take note of the states ``[sequences, heads, K, V]`` at the start of a chunk."""
        for i, s in enumerate(unit.sequences[: states.shape[0]]):
            for c in self.chunks.get((s.n, chunk), ()):
                self.starts = put(self.starts, (c, unit.value_heads), states[i, ...])

    def states(self) -> Array:
        """``[C, HV, K, V]``, zeros where no row is written."""
        if not self.rest:
            return self.starts
        plan = plan_recurrent(self.rest)
        chosen = index_array([s.n for s in plan.sequences], self.starts)
        S, _ = run_tokens(self.request, self.inputs, plan, self.starts[chosen, ...])
        shape = (-1, *self.starts.shape[1:])
        return put(self.starts, (chosen,), namespace(S).reshape(S, shape))
