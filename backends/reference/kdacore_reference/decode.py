"""The step that servers decode with: convolution, recurrence and gated norm, one after the other in float32."""

from __future__ import annotations

from typing import Any

from kdacore.types import Array, DecodeInputs, Outputs, RecurrentInputs, Request
from kdacore_reference.arrays import cast, compute_dtype, namespace, plain, put, without_float_errors
from kdacore_reference.convolution import Convolution
from kdacore_reference.gate import sigmoid
from kdacore_reference.recurrent import recurrence
from kdacore_reference.slabs import Sequence, last_row, sequences_of, write_output
from kdacore_reference.states import checked_state_rows, with_slots


@without_float_errors
def decode_forward(request: Request, inputs: DecodeInputs) -> Outputs:
    """``fused_decode_kda`` and ``fused_decode_gated_delta_rule``.

    Returns: ``o`` (``inputs.out`` itself when given and writable). ``final_state`` when asked for;
        with ``inplace_state`` it is the caller's pool, written in place, or for JAX, whose arrays
        cannot be written, the updated pool; ``written`` then has all else.

    Raises:
        ContractError: as :func:`kdacore_reference.recurrent.recurrent_forward`. Nothing is written then.
    """
    every = sequences_of(request, inputs)
    rows = checked_state_rows(request, inputs, every)
    sequences = with_slots(every, rows)
    conv = None if inputs.conv_weight is None else Convolution(request, inputs, sequences, rows)
    xp = namespace(inputs.x)
    x = cast(inputs.x, compute_dtype(xp, request)) if conv is None else conv.output()
    o, writes = recurrence(request, _recurrent_inputs(request, inputs, x), sequences, rows)
    o = cast(_normed(request, inputs, o, sequences), plain(inputs.x).dtype)
    # The caller's arrays are written last, with values that are there: what fails before has changed none.
    o = write_output(inputs, o, last_row(request, every))
    final, written = writes.write()
    if conv is not None and request.inplace_state:
        written = (*conv.write(), *written)
    return Outputs(o=o, final_state=final, written=written)


def _recurrent_inputs(request: Request, inputs: DecodeInputs, x: Array) -> RecurrentInputs:
    """The arrays of the recurrent op: q, k and v from the channels ``[B, T, D]``, all else as it was given."""
    xp, keys = namespace(x), request.H * request.K

    def heads(first: int, end: int, count: int) -> Array:
        return xp.reshape(x[:, :, first:end], (request.B, request.T, count, -1))

    shared: dict[str, Any] = {n: getattr(inputs, n) for n in RecurrentInputs._fields if n in inputs._fields}
    return RecurrentInputs(
        q=heads(0, keys, request.H),
        k=heads(keys, 2 * keys, request.H),
        v=heads(2 * keys, x.shape[2], request.HV),
        **shared,
    )


def _normed(request: Request, inputs: DecodeInputs, o: Array, sequences: list[Sequence]) -> Array:
    """The gated norm of ``o`` ``[B, T, HV, V]``; rows of no sequence are zero, whatever z holds there."""
    if inputs.norm_weight is None:
        return o
    xp = namespace(o)
    o = o / xp.sqrt(xp.vecdot(o, o)[..., None] / request.V + request.norm_eps)
    o = o * cast(inputs.norm_weight, o.dtype)
    if inputs.z is None:
        return o
    z = cast(inputs.z, o.dtype)
    gate = sigmoid(z)
    gate = gate if request.norm_activation == "sigmoid" else z * gate
    size = (request.B * request.T, request.HV, request.V)
    gated, flat = xp.zeros_like(xp.reshape(o, size)), xp.reshape(o * gate, size)
    for s in sequences:
        if s.length:
            here = slice(s.start, s.start + s.length)
            gated = put(gated, (here,), flat[here, ...])
    return xp.reshape(gated, o.shape)
