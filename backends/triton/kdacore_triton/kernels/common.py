"""Device functions that all kernels of this backend share: gates, norms, dots, and the position of a chunk.

Decays are kept as log2 inside the kernels, so that one ``exp2`` (a single instruction) applies them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdacore.machine import release_of

LOG2E = tl.constexpr(1.4426950408889634)

GATE_LOG = tl.constexpr(0)
"""``g`` is the natural-log decay already."""
GATE_SOFTPLUS = tl.constexpr(1)
"""``-exp(A_log) softplus(g + dt_bias)``: unbounded below."""
GATE_SIGMOID = tl.constexpr(2)
"""``lower_bound sigmoid(exp(A_log) (g + dt_bias))``."""

BETA_GIVEN = tl.constexpr(0)
"""beta is the rate itself."""
BETA_SIGMOID = tl.constexpr(1)
"""The rate is ``sigmoid(beta)``."""
BETA_TWICE_SIGMOID = tl.constexpr(2)
"""The rate is ``2 sigmoid(beta)``: eigenvalues may be negative."""

FAMILY_BOUNDED = tl.constexpr(0)
"""One gate per channel, whose log decay per step has a usable bound."""
FAMILY_UNBOUNDED = tl.constexpr(1)
"""One gate per channel without such a bound."""
FAMILY_SCALAR = tl.constexpr(2)
"""One gate per head."""

MIN_STEP = tl.constexpr(-126.0)
"""One step's log2 decay is clamped here: 2**-126 is the smallest normal float32."""

LARGEST = tl.constexpr(3.4028234663852886e38)
"""The largest finite float32, to which ``exp(A_log)``, log decays and the gate's gradients are held."""
SMALLEST = tl.constexpr(1.1754943508222875e-38)
"""The smallest normal float32. A smaller ``exp(A_log)`` is 0."""
MAX_A_LOG = tl.constexpr(88.72283)
"""The largest float32 whose exponential is finite."""
SHIFTED_RATE = tl.constexpr(2.0**24)
"""The largest rate that a softplus is multiplied by."""
SMALL_EXPONENTIAL = tl.constexpr(2.0**-11)
"""Below this ``log(1 + e)`` is ``e``, to a relative error of 2.4e-4."""

ADDED_IN_PAIRS = tl.constexpr(release_of(triton.__version__) >= (3, 8))
"""A lane adds up the elements of a sum that it holds as a tree of pairs; before Triton 3.8, one after another."""


@triton.jit
def exp2(x, ASM: tl.constexpr):
    """``2**x`` flushing denormals. ``ASM`` (NVIDIA, not the interpreter): one instruction instead of four."""
    if ASM:
        r = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        r = tl.exp2(x)
    return r


@triton.jit
def log2(x, ASM: tl.constexpr):
    """``log2(x)``, absolute error near 1e-7 around 1; see :func:`exp2` for ``ASM``."""
    if ASM:
        r = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        r = tl.log2(x)
    return r


@triton.jit
def reciprocal(x, ASM: tl.constexpr):
    """``1 / x`` to one unit in the last place; see :func:`exp2` for ``ASM``."""
    if ASM:
        r = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        r = 1.0 / x
    return r


@triton.jit
def positive(i, n):
    """``n > 0`` as a block shaped like ``i``. Triton 3.6 to 3.9 interpret a broadcast scalar comparison as integers."""
    return i * 0 + n > 0


@triton.jit
def held(x):
    """``x`` with infinities as the largest finite numbers; NaN stays."""
    return tl.clamp(x, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def held_as(x, KIND: tl.constexpr):
    """:func:`held` for a conversion to the dtype KIND: with its largest finite number."""
    if tl.bfloat16 == KIND:
        x = tl.clamp(x, -3.3895313892515355e38, 3.3895313892515355e38, propagate_nan=tl.PropagateNan.ALL)
    elif tl.float16 == KIND:
        x = tl.clamp(x, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        x = held(x)
    return x


@triton.jit
def at_least(x, limit):
    """``max(x, limit)``; NaN stays."""
    return tl.maximum(x, limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def gate_rate(a_log):
    """``exp(A_log)`` in float32, held to LARGEST; 0 where it is no normal number."""
    a_log = a_log.to(tl.float32)
    a = tl.exp(tl.minimum(a_log, MAX_A_LOG, propagate_nan=tl.PropagateNan.ALL))
    a = tl.where(a_log >= MAX_A_LOG, LARGEST, tl.minimum(a, LARGEST, propagate_nan=tl.PropagateNan.ALL))
    return tl.where(a < SMALLEST, 0.0, a)


@triton.jit
def shifted_rate(a_exp, ASM: tl.constexpr):
    """The rate of a softplus, at most SHIFTED_RATE, and what that takes from it as log2, to be added to the input.

    A large rate makes much of an exponential that is no normal float32. Where the two differ, decays are clamped.
    """
    shift = log2(tl.maximum(a_exp, SHIFTED_RATE) * (1.0 / SHIFTED_RATE), ASM)
    return tl.minimum(a_exp, SHIFTED_RATE, propagate_nan=tl.PropagateNan.ALL), shift


@triton.jit
def gate_decay(
    g, inside, a_exp, bias, lower_bound,
    GATE: tl.constexpr, CLAMP: tl.constexpr, COARSE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """log2 decay of the raw gate ``g``: :func:`log2_decay` of ``g + bias`` in fewer, cheaper instructions.

    ``g`` is what it may be where ``inside``, and elsewhere what gives no decay: -inf, or 0 for GATE_LOG, which ignores
    ``a_exp`` and ``bias``. CLAMP: a bounded gate is clamped at MIN_STEP too. ``COARSE``: an absolute error of 1e-3 in a
    decay is accepted.
    """
    if GATE == GATE_LOG:
        y = at_least(g * LOG2E, MIN_STEP)
    elif GATE == GATE_SOFTPLUS and COARSE and ASM:
        # A rate of 0 times the largest finite number is 0. The logarithm of 1 + e loses what a large rate needs of it.
        rate, shift = shifted_rate(a_exp, ASM)
        x = tl.minimum((g + bias) * LOG2E + shift, LARGEST, propagate_nan=tl.PropagateNan.ALL)
        e = exp2(-tl.abs(x), ASM)
        y = -rate * (tl.maximum(x, 0.0) + tl.where(e < SMALL_EXPONENTIAL, e * LOG2E, log2(1.0 + e, ASM)))
        y = at_least(y, MIN_STEP)
    elif GATE == GATE_SOFTPLUS:
        y = at_least(rate_softplus(g + bias, a_exp) * -LOG2E, MIN_STEP)
    else:
        # A rate of 0 makes 0 of every input, but leaves what is not inside.
        x = tl.where(tl.where(inside, a_exp, 1.0) == 0.0, 0.0, g + bias)
        rate = tl.where(a_exp == 0.0, -1.0, at_least(a_exp * -LOG2E, -LARGEST))
        y = (lower_bound * LOG2E) * reciprocal(1.0 + exp2(x * rate, ASM), ASM)
        if CLAMP:
            y = at_least(y, MIN_STEP)
    return y


@triton.jit
def rounded(x, KIND: tl.constexpr, BY_HAND: tl.constexpr):
    """float32 ``x`` as KIND, to the nearest. BY_HAND: the interpreter rounds to bfloat16 by truncation."""
    if tl.bfloat16 == KIND and BY_HAND:
        bits = x.to(tl.uint32, bitcast=True)
        near = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, near.to(tl.float32, bitcast=True), x)
    return x.to(KIND)


@triton.jit
def sigmoid(x):
    """float32 sigmoid; exact 0 and 1 in the limits, never NaN."""
    return 1.0 / (1.0 + tl.exp2(-x * LOG2E))


@triton.jit
def rate_softplus(x, a_exp):
    """``a_exp * softplus(x)`` for any ``x`` and any rate of :func:`gate_rate`; perhaps infinite, NaN only where x is.

    A large rate makes much of an ``exp(x)`` that is no normal float32, so it is multiplied by the root of it twice.
    """
    x = tl.minimum(x, LARGEST, propagate_nan=tl.PropagateNan.ALL)  # a rate of 0 times this is 0
    root = tl.exp2(tl.abs(x) * (-0.5 * LOG2E))
    e = root * root
    # log2(1 + e) loses e's low bits when e is small: a short series there instead.
    series = root * (1.0 - e * (0.5 - e * (0.33333333 - e * (0.25 - e * 0.2))))
    high = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) * a_exp + tl.log2(1.0 + e) * (
        a_exp * (1.0 / LOG2E)
    )
    return tl.where(x < -3.5, series * (a_exp * root), high)


@triton.jit
def rate_sigmoid(x, a_exp):
    """``a_exp * sigmoid(x)`` for any rate of :func:`gate_rate`; see :func:`rate_softplus`."""
    root = tl.exp2(tl.abs(x) * (-0.5 * LOG2E))
    return tl.where(x < -17.0, (a_exp * root) * root, a_exp * sigmoid(x))


@triton.jit
def log2_decay(x, a_exp, lower_bound, GATE: tl.constexpr):
    """log2 decay (<= 0, at least MIN_STEP) of a raw gate.

    ``x`` is ``g + dt_bias`` in float32, ``a_exp`` is ``exp(A_log)`` (1 where A_log is absent; unused for
    GATE_LOG), ``lower_bound`` a natural-log bound (used by GATE_SIGMOID alone).
    """
    if GATE == GATE_LOG:
        y = x * LOG2E
    elif GATE == GATE_SOFTPLUS:
        y = rate_softplus(x, a_exp) * -LOG2E
    else:
        y = (lower_bound * LOG2E) * sigmoid(a_exp * held(x))
    return at_least(y, MIN_STEP)


@triton.jit
def product(a, b):
    """``a * b`` rounded, as the operand of a sum over the lanes of a warp.

    Where a lane holds one element, the compiler turns ``sum(a * b)`` into ``fma(a, b, other lane's value)``: two lanes
    then round the same pair in two ways, and their results differ. Of two products that one lane adds up, either may be
    contracted, and kernels differ in which. The compiler does not contract an fma further.
    """
    return tl.fma(a, b, 0.0)


@triton.jit
def rnorm(x, axis: tl.constexpr):
    """``1 / sqrt(sum(x*x) + 1e-6)`` along an axis, float32; rows of ``x`` as they are loaded."""
    # In a long row a lane loads several numbers and adds their squares first, so lanes exchange no products. Rounding
    # the squares there too made the forward 8 % slower.
    if x.shape[axis] > 64:
        squares = x * x
    else:
        squares = product(x, x)
    return 1.0 / tl.sqrt(tl.sum(squares, axis) + 1e-6)


@triton.jit
def operand(x, DOT: tl.constexpr):
    """``x`` in the dtype a dot of precision ``DOT`` takes."""
    if DOT == "bf16":
        r = x.to(tl.bfloat16)
    elif DOT == "fp16":
        r = x.to(tl.float16)
    else:
        r = x.to(tl.float32)
    return r


@triton.jit
def mma(a, b, DOT: tl.constexpr):
    """``a @ b`` accumulated in float32.

    ``DOT``: ``"bf16"`` or ``"fp16"`` rounds the operands to that dtype; ``"tf32"``, ``"tf32x3"`` and ``"ieee"`` take
    them as float32. The interpreter must get ``"ieee"``: its bfloat16 arithmetic is wrong.
    """
    if DOT == "bf16":
        r = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    elif DOT == "fp16":
        r = tl.dot(a.to(tl.float16), b.to(tl.float16))
    else:
        r = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=DOT)
    return r


@triton.jit
def mma_acc(a, b, acc, DOT: tl.constexpr):
    """``acc + a @ b``; see :func:`mma`."""
    if DOT == "bf16":
        r = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), acc=acc)
    elif DOT == "fp16":
        r = tl.dot(a.to(tl.float16), b.to(tl.float16), acc=acc)
    else:
        r = tl.dot(a.to(tl.float32), b.to(tl.float32), acc=acc, input_precision=DOT)
    return r


@triton.jit
def sequence_of_slot(cu_seqlens, N, slot, C: tl.constexpr):
    """The packed sequence that chunk slot ``slot`` belongs to.

    Chunk i of sequence n owns slot ``cu_seqlens[n] // C + n + i``: that needs no prefix sum over chunk counts,
    never collides, and stays below ``T // C + N``. Slots between two sequences' chunks stay unused.
    """
    lo = 0
    hi = N - 1
    while lo < hi:
        mid = (lo + hi + 1) // 2
        first = tl.load(cu_seqlens + mid).to(tl.int32) // C + mid
        if first <= slot:
            lo = mid
        else:
            hi = mid - 1
    return lo


@triton.jit
def chunk_of_slot(cu_seqlens, slot, N, T, NT, C: tl.constexpr, PACKED: tl.constexpr):
    """Where chunk slot ``slot`` lies: ``(first row, rows)``, rows counted over the flattened ``[B*T]`` tokens.

    ``rows`` is at most C, and at most 0 for an unused slot. Unpacked, slot ``b * NT + i`` is chunk i of batch b.
    """
    if PACKED:
        n = sequence_of_slot(cu_seqlens, N, slot, C)
        bos = tl.load(cu_seqlens + n).to(tl.int64)
        eos = tl.load(cu_seqlens + n + 1).to(tl.int64)
        t0 = (slot - (bos // C + n)) * C
        rows = eos - bos - t0
        start = bos + t0
    else:
        b = slot // NT
        t0 = (slot - b * NT) * C
        rows = (T - t0).to(tl.int64)
        start = b.to(tl.int64) * T + t0
    return start, tl.minimum(rows, C).to(tl.int32)


@triton.jit
def chunk_of_program(cu_seqlens, N, T, NT, HV, C: tl.constexpr, PACKED: tl.constexpr):
    """The chunk and value head of a program in a grid of ``slots * HV``: ``(program, hv, first row, rows)``.

    Rows are those of :func:`chunk_of_slot`; a program whose ``rows`` is not positive has nothing to do.
    """
    pid = tl.program_id(0)
    slot = pid // HV
    hv = pid - slot * HV
    start, rows = chunk_of_slot(cu_seqlens, slot, N, T, NT, C, PACKED)
    return pid, hv, start, rows


@triton.jit
def sequence_span(cu_seqlens, n, T, NT, C: tl.constexpr, PACKED: tl.constexpr):
    """Sequence n: ``(first row over flattened tokens, length, its first chunk slot)``."""
    if PACKED:
        bos = tl.load(cu_seqlens + n).to(tl.int64)
        length = (tl.load(cu_seqlens + n + 1).to(tl.int64) - bos).to(tl.int32)
        slot = (bos // C).to(tl.int32) + n
    else:
        bos = n.to(tl.int64) * T
        length = T
        slot = n * NT
    return bos, length, slot


@triton.jit
def state_cell(d, vv, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr):
    """Offsets in one head's state, as callers lay it out, of channels ``d`` (columns) and values ``vv`` (rows)."""
    if V_FIRST:
        cell = vv[:, None] * K + d[None, :]
    else:
        cell = d[None, :] * V + vv[:, None]
    return cell


@triton.jit
def load_state(ptr, n, HV, hv, cell, real, K: tl.constexpr, V: tl.constexpr):
    """A caller's state of sequence n and value head ``hv`` (64 bits) in float32; 0 where not ``real``."""
    return tl.load(ptr + (n * HV + hv) * (K * V) + cell, mask=real, other=0.0).to(tl.float32)


@triton.jit
def blocks_before(cu_seqlens, n, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """How many blocks of ``SIZE`` tokens the packed sequences before sequence n hold, each starting its own."""
    total = 0
    first = 0
    while first < n:
        m = first + tl.arange(0, WIDTH)
        here = tl.load(cu_seqlens + m, mask=m < n, other=0).to(tl.int32)
        past = tl.load(cu_seqlens + m + 1, mask=m < n, other=0).to(tl.int32)
        total += tl.sum((past - here + SIZE - 1) // SIZE, 0)
        first += WIDTH
    return total
