"""VMEM that the kernels need, from shapes alone. The verifiers check it and the compiler is given
it as a limit.

A block that is moved by the pipeline has two buffers; scratch has one. The last two axes of
anything in VMEM are rounded up to a register. The compiler adds space for spilled registers; a
multiple of one ``[128, max(K, V)]`` float32 array covers what it reported over a grid of shapes.
"""

from __future__ import annotations

import math

from kdacore.types import Request
from kdacore_pallas.tpu.sizes import CHUNK, HEADS, LANES, SUBLANES

MIB = 1024 * 1024
VMEM = {"v4": 16 * MIB, "v5e": 128 * MIB, "v5p": 64 * MIB, "v6e": 128 * MIB, "tpu7x": 64 * MIB}
"""Bytes of VMEM per TensorCore."""
TOGETHER = {"forward": (4, 2, 1), "backward": (2, 1)}
"""Value heads that a chunk kernel may compute side by side."""
SPILLS = {
    ("forward", 2, 1): 32,
    ("forward", 2, 2): 64,
    ("forward", 2, 4): 100,
    ("forward", 4, 1): 32,
    ("forward", 4, 2): 64,
    ("forward", 4, 4): 128,
    ("backward", 2, 1): 70,
    ("backward", 2, 2): 140,
    ("backward", 4, 1): 130,
    ("backward", 4, 2): 260,
    ("recurrent", 4, 1): 8,
}
"""Register spills by kernel, bytes of an input element and heads side by side, in arrays of
``[128, max(K, V)]`` float32."""
Blocks = list[tuple[tuple[int, ...], str]]
ITEM = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


def padded(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of an array in VMEM."""
    item = ITEM[dtype]
    *lead, rows, lanes = (1, *shape) if len(shape) == 1 else shape
    return math.prod(lead) * -(-rows // SUBLANES) * SUBLANES * -(-lanes // LANES) * LANES * item


def _gate_dtype(request: Request) -> str:
    return request.spec("g").dtype if request.has("g") else "float32"


def _rows(request: Request, hb: int) -> Blocks:
    """Blocks of q, k, v, beta and g."""
    hvb = hb * (request.HV // request.H)
    keys, values = (CHUNK, hb * request.K), (CHUNK, hvb * request.V)
    per_token = (hvb, CHUNK)
    g = (per_token, "float32") if request.scalar_gate else ((CHUNK, hvb * request.K), _gate_dtype(request))
    return [(keys, request.dtype), (keys, request.dtype), (values, request.dtype), (per_token, "float32"), g]


def _state(request: Request, hb: int) -> tuple[int, int, int]:
    return hb * (request.HV // request.H), request.V, request.K


def _copy(heads: int, D: int) -> list[tuple[int, ...]]:
    """The scratch for the rows of some heads, if they need any."""
    return [] if D % LANES == 0 else [(heads, CHUNK, D)]


def _row_copies(request: Request, hb: int) -> list[tuple[int, ...]]:
    """Scratch for the rows of q, k, v and g."""
    hvb = hb * (request.HV // request.H)
    found = 2 * _copy(hb, request.K) + _copy(hvb, request.V)
    return found if request.scalar_gate else found + _copy(hvb, request.K)


def _total(
    request: Request, kernel: str, blocks: Blocks, scratch: list[tuple[int, ...]], together: int = 1
) -> int:
    moved = sum(2 * padded(shape, dtype) for shape, dtype in blocks)
    kept = sum(padded(shape, "float32") for shape in scratch)
    spills = SPILLS[kernel, 4 if kernel == "recurrent" else ITEM[request.dtype], together]
    return moved + kept + spills * padded((CHUNK, max(request.K, request.V)), "float32")


def chunk_forward_bytes(request: Request, hb: int, keep_starts: bool = False, together: int = 1) -> int:
    """VMEM of the forward kernel with ``hb`` q/k heads a step, ``together`` value heads side by side.
    ``keep_starts``: it also writes the states that chunks start from."""
    state = _state(request, hb)
    blocks = _rows(request, hb)
    blocks.append((blocks[2][0], request.dtype))
    if request.has("initial_state"):
        blocks.append((state, request.state_dtype))
    if request.output_final_state:
        blocks.append((state, request.state_dtype))
    if keep_starts:
        blocks.append((state, "float32"))
    scratch = [state, *_row_copies(request, hb), *_copy(state[0], request.V)]
    return _total(request, "forward", blocks, scratch, together)


def chunk_backward_bytes(request: Request, hb: int, together: int = 1) -> int:
    """VMEM of the backward kernel with ``hb`` q/k heads a step, ``together`` value heads side by side."""
    state = _state(request, hb)
    rows = _rows(request, hb)
    blocks = [*rows, *rows, (rows[2][0], request.dtype), (state, "float32")]
    if request.has("initial_state"):
        blocks.append((state, "float32"))
        blocks += [(state, request.state_dtype)] * request.packed  # the states that sequences begin with
    if request.output_final_state:
        blocks.append((state, request.state_dtype))
    copies = _row_copies(request, hb)
    scratch = [state, *copies, *copies, *_copy(state[0], request.V)]
    if request.HV > request.H:
        scratch += 2 * [(CHUNK, request.K)]  # the sums over value heads
    return _total(request, "backward", blocks, scratch, together)


def recurrent_bytes(request: Request) -> int:
    """VMEM of the recurrent kernel."""
    H, HV, K, V = request.H, request.HV, request.K, request.V
    state = (HV, *request.state_tail)
    g = ((1, HV), "float32") if request.scalar_gate else ((HV, K), _gate_dtype(request))
    keys, values = ((H, K), request.dtype), ((HV, V), request.dtype)
    blocks: Blocks = [
        keys,
        keys,
        values,
        values,
        ((1, HV), "float32"),
        g,
        ((HV, K), "float32"),
        ((1, HV), "float32"),
    ]
    buffers = 2 * request.has("initial_state") + 2 * (request.inplace_state or request.output_final_state)
    scratch: list[tuple[int, ...]] = [state, (H, K), (H, K), (HV, V), (HV, V), (HV, K), (HV, V)]
    return _total(request, "recurrent", blocks, scratch) + buffers * padded(state, request.state_dtype)


def head_blocks(H: int, HV: int, K: int, V: int) -> list[int]:
    """Numbers of q/k heads a step may take, smallest first: whole registers of heads and of their channels, or all of
    them."""
    R = HV // H

    def whole(hb: int) -> bool:
        lanes = (hb * K, hb * R * K, hb * R * V)
        return H % hb == 0 and (hb * R) % HEADS == 0 and all(n % LANES == 0 for n in lanes)

    return [*filter(whole, range(HEADS, H, HEADS)), H]


def heads_per_step(request: Request) -> int:
    """q/k heads of a grid step: the fewest allowed, which suffices to amortise a step's fixed cost."""
    return head_blocks(request.H, request.HV, request.K, request.V)[0]


def chunk_bytes(request: Request, kernel: str, hb: int, keep_starts: bool, together: int) -> int:
    """VMEM of the ``forward`` or the ``backward`` kernel."""
    if kernel == "forward":
        return chunk_forward_bytes(request, hb, keep_starts, together)
    return chunk_backward_bytes(request, hb, together)


def heads_together(request: Request, kernel: str, hb: int, keep_starts: bool = False) -> int:
    """Value heads to compute side by side: the most that divide those of a step and fit in VMEM, or one."""
    value_heads, have = hb * (request.HV // request.H), VMEM.get(request.device.arch)
    for n in TOGETHER[kernel]:
        fits = have is None or chunk_bytes(request, kernel, hb, keep_starts, n) <= have
        if value_heads % n == 0 and fits:
            return n
    return 1


def limit(need: int, generation: str) -> int:
    """The compiler's limit: a quarter more than needed, at least the usual 16 MiB, at most the
    whole VMEM."""
    return min(VMEM[generation], max(16 * MIB, need + need // 4))
