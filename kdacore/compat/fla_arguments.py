"""The arguments of flash-linear-attention's functions, translated to kdacore's.

Each function here has the signature of the function of the same name in flash-linear-attention 0.6. What that one
reads from ``**kwargs`` is a keyword of its own, so that an unknown one is a TypeError. The result is a
:class:`~kdacore.compat.call.Call`: a public function of kdacore, its arguments, and what turns its result into theirs.
Nothing here runs a kernel.
"""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import torch
from torch import Tensor

from kdacore.compat.call import Call
from kdacore.compat.fla_cp_context import over_ranks
from kdacore.errors import ContractError

_CHUNK_STATES_EVERY = 64


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    transpose_state_layout: bool | None = None,
    head_first: bool = False,
) -> Call:
    """Kimi Delta Attention over whole sequences: ``fla.ops.kda.chunk_kda``, computed by :func:`kdacore.chunk_kda`.

    Args:
        A_log: HV elements in any shape and any float dtype. Without effect unless ``use_gate_in_kernel``.
        dt_bias: ``HV * K`` elements. Without effect unless ``use_gate_in_kernel``.
        initial_state: ``[N, HV, K, V]`` in any float dtype; computed with, and returned, in float32.
        lower_bound: without effect unless ``use_gate_in_kernel`` or ``safe_gate``.
        return_intermediate_states: also return the state at the start of every chunk of 64 tokens, as
            ``[B, NT, HV, K, V]`` in q's dtype. For inference: they carry no gradient.
        chunk_size: 32 or 64. Without effect on the results.
        use_graph, max_num_seqs: without effect: kdacore never reads ``cu_seqlens`` on the host, so a captured call may
            be replayed with other values in it.
        cp_context: of the contiguous layout, made while ``kdacore.integrations.fla`` is active; the call is then made
            with ``cp``. Initial and final states, and ``use_graph``, are refused with it.
        transpose_state_layout: the former name of ``state_v_first``.
        head_first: must be False: inputs are ``[B, T, H, ...]``.

    The other arguments are those of :func:`kdacore.chunk_kda`, with the positions and defaults they have there.

    Returns:
        ``(o, final_state)``, or ``(o, final_state, h)`` with ``return_intermediate_states``.

    Raises:
        ContractError: an argument breaks the contract or cannot be served; the message names it.
        UnsupportedError, BackendBuildError: as :func:`kdacore.chunk_kda`.
        TypeError: an unknown keyword.
    """
    op = "chunk_kda"
    if transpose_state_layout is not None:
        state_v_first = _by_former_name(op, state_v_first, transpose_state_layout)
    if head_first:
        _refuse_head_first(op, head_first)
    if chunk_size != 64:
        _check_chunk_size(op, chunk_size, (32, 64))
    if use_graph:
        _check_sequences(op, cu_seqlens, max_num_seqs)
    A_log, dt_bias, safe_gate, lower_bound = _gate(use_gate_in_kernel, A_log, dt_bias, safe_gate, lower_bound)
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "g": g,
        "beta": beta,
        "A_log": A_log,
        "dt_bias": dt_bias,
        "scale": scale,
        "initial_state": _float32(initial_state),
        "output_final_state": bool(output_final_state),
        "use_qk_l2norm_in_kernel": bool(use_qk_l2norm_in_kernel),
        "use_gate_in_kernel": bool(use_gate_in_kernel),
        "use_beta_sigmoid_in_kernel": bool(use_beta_sigmoid_in_kernel),
        "allow_neg_eigval": bool(allow_neg_eigval),
        "safe_gate": safe_gate,
        "lower_bound": lower_bound,
        "state_v_first": bool(state_v_first),
        "cu_seqlens": cu_seqlens,
        # What a captured call is replayed with is in `cu_seqlens` alone.
        "cu_seqlens_cpu": None if use_graph or cu_seqlens is None else cu_seqlens_cpu,
        "disable_recompute": bool(disable_recompute),
    }
    if cp_context is not None:
        arguments |= over_ranks(
            op,
            cp_context,
            q.shape[1],
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_graph=use_graph,
        )
    if not return_intermediate_states:
        return Call(op, arguments)
    _check_intermediate_states(op, arguments, chunk_size)
    arguments["checkpoint_every"] = _CHUNK_STATES_EVERY
    offsets = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    return Call(op, arguments, lambda result: _with_chunk_states(result, q.dtype, offsets))


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    transpose_state_layout: bool | None = None,
    head_first: bool = False,
) -> Call:
    """The gated delta rule over whole sequences: ``fla.ops.gated_delta_rule.chunk_gated_delta_rule``, computed by
    :func:`kdacore.chunk_gated_delta_rule`.

    Args:
        A_log, dt_bias: HV elements each. Without effect unless ``use_gate_in_kernel``.
        initial_state: ``[N, HV, K, V]`` in any float dtype; computed with, and returned, in float32.
        chunk_indices: a tensor that is derived from ``cu_seqlens``; not needed here.
        chunk_size: 16, 32 or 64. Without effect on the results.
        cp_context: as of :func:`chunk_kda`.
        transpose_state_layout: the former name of ``state_v_first``.
        head_first: must be False: inputs are ``[B, T, H, ...]``.

    The other arguments are those of :func:`kdacore.chunk_gated_delta_rule`.

    Returns:
        ``(o, final_state)``.

    Raises:
        ContractError, UnsupportedError, BackendBuildError, TypeError: as :func:`chunk_kda`.
    """
    op = "chunk_gated_delta_rule"
    if transpose_state_layout is not None:
        state_v_first = _by_former_name(op, state_v_first, transpose_state_layout)
    if head_first:
        _refuse_head_first(op, head_first)
    if chunk_size != 64:
        _check_chunk_size(op, chunk_size, (16, 32, 64))
    if chunk_indices is not None and not isinstance(chunk_indices, Tensor):
        # Releases before 0.6 have cp_context in this place.
        raise ContractError(op, "chunk_indices", type(chunk_indices).__name__, "None or a tensor")
    A_log, dt_bias, _, _ = _gate(use_gate_in_kernel, A_log, dt_bias, False, None)
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "g": g,
        "beta": beta,
        "A_log": A_log,
        "dt_bias": dt_bias,
        "scale": scale,
        "initial_state": _float32(initial_state),
        "output_final_state": bool(output_final_state),
        "use_qk_l2norm_in_kernel": bool(use_qk_l2norm_in_kernel),
        "use_gate_in_kernel": bool(use_gate_in_kernel),
        "use_beta_sigmoid_in_kernel": bool(use_beta_sigmoid_in_kernel),
        "allow_neg_eigval": bool(allow_neg_eigval),
        "state_v_first": bool(state_v_first),
        "cu_seqlens": cu_seqlens,
        "cu_seqlens_cpu": None if cu_seqlens is None else cu_seqlens_cpu,
    }
    if cp_context is not None:
        arguments |= over_ranks(
            op,
            cp_context,
            q.shape[1],
            initial_state=initial_state,
            output_final_state=output_final_state,
        )
    return Call(op, arguments)


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
) -> Call:
    """Kimi Delta Attention token by token: ``fla.ops.kda.fused_recurrent_kda``, computed by
    :func:`kdacore.fused_recurrent_kda`. Gradients flow, which they do not there.

    Args:
        v: may be float16 or bfloat16 beside float32 q and k; ``o`` is in its dtype.
        A_log: HV elements in any shape and any float dtype. Without effect unless ``use_gate_in_kernel``.
        dt_bias: ``HV * K`` elements. Without effect unless ``use_gate_in_kernel``.
        initial_state: ``[N, HV, K, V]`` in any float dtype; computed with, and returned, in float32.
        lower_bound: without effect unless ``use_gate_in_kernel``.
        transpose_state_layout: the former name of ``state_v_first``.

    The other arguments are those of :func:`kdacore.fused_recurrent_kda`.

    Returns:
        ``(o, final_state)``.

    Raises:
        ContractError, UnsupportedError, BackendBuildError, TypeError: as :func:`chunk_kda`.
    """
    op = "fused_recurrent_kda"
    if transpose_state_layout is not None:
        state_v_first = _by_former_name(op, state_v_first, transpose_state_layout)
    A_log, dt_bias, _, lower_bound = _gate(use_gate_in_kernel, A_log, dt_bias, False, lower_bound)
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "g": g,
        "beta": beta,
        "A_log": A_log,
        "dt_bias": dt_bias,
        "scale": scale,
        "initial_state": _float32(initial_state),
        "output_final_state": bool(output_final_state),
        "use_qk_l2norm_in_kernel": bool(use_qk_l2norm_in_kernel),
        "use_gate_in_kernel": bool(use_gate_in_kernel),
        "use_beta_sigmoid_in_kernel": bool(use_beta_sigmoid_in_kernel),
        "allow_neg_eigval": bool(allow_neg_eigval),
        "lower_bound": lower_bound,
        "state_v_first": bool(state_v_first),
        "cu_seqlens": cu_seqlens,
    }
    return _of_one_dtype(op, arguments)


def fused_recurrent_kda_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    scale: float | None = None,
    output_final_state: bool = False,
    inplace_final_state: bool = True,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    out: Tensor | None = None,
) -> Call:
    """The forward that serving engines call for decoding: ``fla.ops.kda.fused_recurrent.fused_recurrent_kda_fwd``,
    computed by :func:`kdacore.fused_recurrent_kda`.

    Args:
        inplace_final_state: write the states into ``initial_state``, and return it. A pool that is written is float32
            or bfloat16.
        ssm_state_indices: rows of the pool ``initial_state``: ``[N]`` for one token a sequence, or ``[N, W]``: the
            state after token t goes to row ``[n, t]``. kdacore's name is ``state_indices``.
        num_accepted_tokens: ``[N]``: start from the state in row ``[n, accepted - 1]``; without it, in row ``[n, 0]``.
        out: ``[B, T, HV, V]``, written and returned.

    The other arguments are those of :func:`fused_recurrent_kda`. No gradients flow where states are written in place,
    where rows are named, or with ``out``.

    Returns:
        ``(o, final_state)``.

    Raises:
        ContractError, UnsupportedError, BackendBuildError, TypeError: as :func:`chunk_kda`.
    """
    name = "fused_recurrent_kda_fwd"
    call = fused_recurrent_kda(
        q,
        k,
        v,
        g,
        beta,
        A_log,
        dt_bias,
        scale,
        None if inplace_final_state else initial_state,
        output_final_state,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        lower_bound,
        state_v_first,
        cu_seqlens,
    )
    if num_accepted_tokens is not None and ssm_state_indices is None:
        raise ContractError(name, "num_accepted_tokens", "an array", "None, or ssm_state_indices with it")
    if not (inplace_final_state or ssm_state_indices is not None or out is not None):
        return call
    arguments = call.arguments
    arguments["out"] = out
    if inplace_final_state:
        arguments.update(initial_state=initial_state, inplace_state=True, output_final_state=False)
    if ssm_state_indices is not None:
        if not inplace_final_state:
            arguments["initial_state"] = initial_state
        accepted = _accepted(name, arguments, ssm_state_indices, num_accepted_tokens)
        arguments.update(state_indices=ssm_state_indices, num_accepted_tokens=accepted)
    if torch.is_grad_enabled():
        arrays = {n: x for n, x in arguments.items() if isinstance(x, Tensor)}
        arguments.update({n: x.detach() for n, x in arrays.items() if x.requires_grad})
    if not inplace_final_state:
        return Call(call.op, arguments, call.finish)
    narrowed = call.finish or _as_it_is
    return Call(call.op, arguments, lambda result: (narrowed(result)[0], initial_state))


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
) -> Call:
    """The gated delta rule token by token: ``fla.ops.gated_delta_rule.fused_recurrent_gated_delta_rule``, computed by
    :func:`kdacore.fused_recurrent_gated_delta_rule`. Gradients flow, which they do not there.

    Args:
        v: as of :func:`fused_recurrent_kda`.
        g: ``[B, T, HV]``, one decay for each head; None for no decay.
        gk: ``[B, T, HV, K]``, one decay for each channel, beside ``g`` or instead of it. Such a call is computed by
            :func:`kdacore.fused_recurrent_kda`.
        gv: must be None.
        beta: ``[B, T, HV]``; None for ones.
        A_log, dt_bias: HV elements each. Without effect unless ``use_gate_in_kernel``.
        initial_state: ``[N, HV, K, V]`` in any float dtype; computed with, and returned, in float32.
        transpose_state_layout: the former name of ``state_v_first``.

    The other arguments are those of :func:`kdacore.fused_recurrent_gated_delta_rule`.

    Returns:
        ``(o, final_state)``.

    Raises:
        ContractError, UnsupportedError, BackendBuildError, TypeError: as :func:`chunk_kda`.
    """
    op = "fused_recurrent_gated_delta_rule"
    if transpose_state_layout is not None:
        state_v_first = _by_former_name(op, state_v_first, transpose_state_layout)
    if gv is not None:
        raise ContractError(op, "gv", type(gv).__name__, "None: kdacore has no counterpart")
    if gk is not None and use_gate_in_kernel:
        raise ContractError(op, "gk", "an array with use_gate_in_kernel=True", "one of the two")
    A_log, dt_bias, _, _ = _gate(use_gate_in_kernel, A_log, dt_bias, False, None)
    if gk is not None:
        op = "fused_recurrent_kda"
        decay = gk if g is None else gk + g.unsqueeze(-1)
    elif g is not None:
        decay = g
    elif use_gate_in_kernel:
        raise ContractError(op, "g", "None", "an array: use_gate_in_kernel=True computes the decay from it")
    else:
        decay = torch.zeros_like(v[..., 0], dtype=torch.float32)
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "g": decay,
        "beta": torch.ones_like(v[..., 0]) if beta is None else beta,
        "A_log": A_log,
        "dt_bias": dt_bias,
        "scale": scale,
        "initial_state": _float32(initial_state),
        "output_final_state": bool(output_final_state),
        "use_qk_l2norm_in_kernel": bool(use_qk_l2norm_in_kernel),
        "use_gate_in_kernel": bool(use_gate_in_kernel),
        "use_beta_sigmoid_in_kernel": bool(use_beta_sigmoid_in_kernel),
        "allow_neg_eigval": bool(allow_neg_eigval),
        "state_v_first": bool(state_v_first),
        "cu_seqlens": cu_seqlens,
    }
    return _of_one_dtype(op, arguments)


def fused_kda_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Call:
    """The gate alone: ``fla.ops.kda.gate.fused_kda_gate``, computed by :func:`kdacore.kda_gate`.

    Args:
        g: ``[..., HV, K]``.
        A_log: HV elements in any shape and any float dtype; needed without ``lower_bound``.
        dt_bias: ``HV * K`` elements.
        lower_bound: for the bounded gate.
        output_dtype: dtype of the result; computed in float32.

    Returns:
        The log decay, shaped as ``g``.

    Raises:
        ContractError, UnsupportedError, BackendBuildError: as :func:`chunk_kda`.
    """
    return _gate_alone("fused_kda_gate", g, 2, A_log, dt_bias, lower_bound, output_dtype)


def fused_gdn_gate(
    g: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Call:
    """The gate of the gated delta rule alone: ``fla.ops.gated_delta_rule.gate.fused_gdn_gate``, computed by
    :func:`kdacore.kda_gate`.

    Args:
        g: ``[..., HV]``.
        A_log: HV elements in any shape and any float dtype.
        dt_bias: HV elements.
        output_dtype: dtype of the result; computed in float32.

    Returns:
        The log decay, shaped as ``g``.

    Raises:
        ContractError, UnsupportedError, BackendBuildError: as :func:`chunk_kda`.
    """
    return _gate_alone("fused_gdn_gate", g, 1, A_log, dt_bias, None, output_dtype)


# --- parts of several functions -----------------------------------------------------------------------------------


def _by_former_name(op: str, state_v_first: bool, former: bool) -> bool:
    """``state_v_first``, given as ``transpose_state_layout``."""
    if state_v_first:
        raise ContractError(
            op, "transpose_state_layout", repr(former), "state_v_first alone, its present name"
        )
    warnings.warn(
        "transpose_state_layout is the former name of state_v_first", DeprecationWarning, stacklevel=4
    )
    return bool(former)


def _refuse_head_first(op: str, head_first: object) -> None:
    wanted = "False: pass arrays as [B, T, H, ...], which x.swapaxes(1, 2) makes"
    raise ContractError(op, "head_first", repr(head_first), wanted)


def _check_chunk_size(op: str, chunk_size: int, allowed: tuple[int, ...]) -> None:
    if chunk_size not in allowed:
        raise ContractError(op, "chunk_size", repr(chunk_size), f"one of {', '.join(map(str, allowed))}")


def _check_sequences(op: str, cu_seqlens: Tensor | None, max_num_seqs: int | None) -> None:
    if cu_seqlens is not None and max_num_seqs not in (None, cu_seqlens.shape[0] - 1):
        want = f"None or {cu_seqlens.shape[0] - 1}, the sequences that cu_seqlens has room for"
        raise ContractError(op, "max_num_seqs", repr(max_num_seqs), want)


def _gate(
    in_kernel: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    safe_gate: bool,
    lower_bound: float | None,
) -> tuple[Tensor | None, Tensor | None, bool, float | None]:
    """The gate's arguments as kdacore has them: those without effect left out."""
    if in_kernel:
        return _log_rates(A_log), _bias(dt_bias), bool(safe_gate), lower_bound
    # Given decays: the promise that they are bounded can be kept only together with the bound.
    promised = bool(safe_gate) and lower_bound is not None and -5 <= lower_bound < 0
    return None, None, promised, lower_bound if promised else None


def _log_rates(A_log: Tensor | None) -> Tensor | None:
    """``A_log`` as kdacore has it: ``[HV]`` float32."""
    if A_log is None or (A_log.dtype is torch.float32 and A_log.dim() == 1):
        return A_log
    return A_log.reshape(-1).float()


def _bias(dt_bias: Tensor | None) -> Tensor | None:
    return dt_bias if dt_bias is None or dt_bias.dim() <= 2 else dt_bias.reshape(-1)


def _float32(state: Tensor | None) -> Tensor | None:
    """A state in the dtype that the new one is returned in."""
    if state is None or state.dtype is torch.float32 or state.dtype is torch.float64:
        return state
    return state.float()


def _of_one_dtype(op: str, arguments: dict[str, Any]) -> Call:
    """A call in float32 where v is narrower than float32 q and k, with ``o`` in v's dtype then."""
    q, v = arguments["q"], arguments["v"]
    if not (isinstance(q, Tensor) and isinstance(v, Tensor)):
        return Call(op, arguments)
    narrow = v.dtype
    if q.dtype is not torch.float32 or narrow not in (torch.float16, torch.bfloat16):
        return Call(op, arguments)
    arguments["v"] = v.float()
    return Call(op, arguments, lambda result: (result[0].to(narrow), result[1]))


def _as_it_is(result: Any) -> Any:
    return result


def _check_intermediate_states(op: str, arguments: dict[str, Any], chunk_size: int) -> None:
    name = "return_intermediate_states"
    if chunk_size != _CHUNK_STATES_EVERY:
        want = f"chunk_size={_CHUNK_STATES_EVERY} with it"
        raise ContractError(op, name, f"True with chunk_size={chunk_size}", want)
    arrays = [x for x in arguments.values() if isinstance(x, Tensor)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in arrays):
        raise ContractError(op, name, "True, with inputs that require grad", "torch.no_grad() around it")


def _with_chunk_states(result: Any, dtype: torch.dtype, offsets: Tensor | None) -> tuple[Any, Any, Any]:
    """The states at the starts of chunks, as ``[B, NT, HV, K, V]``."""
    o, final_state, h = result
    if offsets is not None:
        ends = offsets.tolist()
        chunks = sum(-(-(end - start) // _CHUNK_STATES_EVERY) for start, end in itertools.pairwise(ends))
        h = h[:chunks].unsqueeze(0)
    return o, final_state, h.to(dtype)


def _accepted(
    name: str, arguments: dict[str, Any], indices: Tensor, num_accepted_tokens: Tensor | None
) -> Tensor | None:
    """How many tokens were accepted, for rows ``[N, W]``; None for rows ``[N]``."""
    inplace, packed = arguments.get("inplace_state", False), arguments["cu_seqlens"] is not None
    if indices.dim() == 1:
        if arguments["q"].shape[1] != 1 and not (packed and inplace):
            got = f"shape {list(indices.shape)} with {arguments['q'].shape[1]} tokens"
            raise ContractError(name, "ssm_state_indices", got, "[N, W] for several tokens a sequence")
        return num_accepted_tokens
    if not inplace:
        want = "True: states after every token go to rows of the pool"
        raise ContractError(name, "inplace_final_state", "False with ssm_state_indices [N, W]", want)
    if num_accepted_tokens is not None:
        return num_accepted_tokens
    return torch.ones(indices.shape[0], dtype=torch.int32, device=indices.device)


def _gate_alone(
    name: str,
    g: Tensor,
    trailing: int,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    output_dtype: torch.dtype,
) -> Call:
    """A call of ``kda_gate``, which has two leading axes."""
    if not isinstance(g, Tensor) or g.dim() < trailing:
        raise ContractError(name, "g", type(g).__name__, f"a tensor of at least {trailing} dimensions")
    if g.dim() == trailing + 2:
        arranged = g
    else:
        arranged = g.reshape(1, -1, *g.shape[g.dim() - trailing :])
    bias = None if dt_bias is None else dt_bias.reshape(-1)
    arguments = {"g": arranged, "A_log": _log_rates(A_log), "dt_bias": bias, "lower_bound": lower_bound}
    if arranged is g and output_dtype is torch.float32:
        return Call("kda_gate", arguments)
    return Call("kda_gate", arguments, lambda log: log.reshape(g.shape).to(output_dtype))
