"""The map of a piece of a sequence: what it makes of any state that comes before it."""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace, device

from kdacore.dispatch.call import call
from kdacore.errors import ContractError
from kdacore.ops import OPS
from kdacore.types import Array


def segment_transition(
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    cu_seqlens: Array | None = None,
    backend: str | None = None,
) -> tuple[Array, Array]:
    """The map ``S_end = M @ S_start + C`` of a piece of a sequence, for each value head.

    Two calls of :func:`kdacore.chunk_kda` (of :func:`kdacore.chunk_gated_delta_rule` where ``g`` has one decay for each
    head): C is the final state from zeros, M the final state from the identity with values of zero. Differentiable
    where those are.

    Args:
        k: ``[B, T, H, K]``.
        v: ``[B, T, HV, V]``.
        g: ``[B, T, HV, K]`` or ``[B, T, HV]``: the log decay, or the raw gate input with ``use_gate_in_kernel``.
        beta: ``[B, T, HV]``.
        cu_seqlens: ``[N+1]``: the pieces of a pack, a map for each.
        backend: force one backend.

    The other arguments are those of :func:`kdacore.chunk_kda`.

    Returns:
        ``(M, C)``: ``[N, HV, K, K]`` and ``[N, HV, K, V]``, float32 (float64 of float64 inputs), on states ``[K, V]``.
        Of an empty piece, the identity and zeros.

    Raises:
        ContractError, UnsupportedError, BackendBuildError: as :func:`kdacore.chunk_kda`.

    Source: arXiv 2510.26692, section 3.

    Examples:
        >>> import numpy as np
        >>> from kdacore.parallel import segment_transition
        >>> k, beta = np.zeros((1, 2, 1, 16), np.float32), np.zeros((1, 2, 1), np.float32)
        >>> M, C = segment_transition(k, k, np.full_like(beta, np.log(0.5)), beta)
        >>> float(M[0, 0, 3, 3])  # no key: the state decays by half, twice
        0.25
    """
    scalar = len(getattr(g, "shape", ())) == 3
    opdef = OPS["chunk_gated_delta_rule" if scalar else "chunk_kda"]
    given = {"A_log": A_log, "dt_bias": dt_bias, "cu_seqlens": cu_seqlens}
    options = opdef.defaults | {
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "use_gate_in_kernel": use_gate_in_kernel,
        "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": allow_neg_eigval,
        "safe_gate": safe_gate,
        "lower_bound": lower_bound,
    }

    def final_state(values: Any, initial_state: Any) -> Any:
        arrays = {"q": k, "k": k, "v": values, "g": g, "beta": beta, "initial_state": initial_state, **given}
        given_arrays = tuple([arrays.get(name) for name in opdef.arrays])
        try:
            return call(opdef, given_arrays, tuple(options.values()), backend)[1]
        except ContractError as error:
            if error.argument != "q":
                raise
            raise ContractError(error.op, "k", error.got, error.want) from None  # there is no other q

    # First: this names what is wrong with the arguments.
    C = final_state(v, None)
    xp = array_namespace(C)
    eye = xp.eye(k.shape[-1], dtype=C.dtype, device=device(C)) + xp.zeros(
        (*C.shape[:-1], k.shape[-1]), dtype=C.dtype, device=device(C)
    )
    zeros = xp.zeros((*v.shape[:3], k.shape[-1]), dtype=v.dtype, device=device(C))
    return final_state(zeros, eye), C
