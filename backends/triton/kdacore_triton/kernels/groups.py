"""Groups of arguments: arrays and strides that belong together are one parameter of a kernel.

A launch takes the members one after another (see :mod:`kdacore_triton.launch`). Two kernels that take the same arrays
take the same group, so their host code gives them in the same order. Absent arrays are None.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Inputs(NamedTuple):
    """The arrays of a chunk call, as the public functions name them."""

    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any
    A_log: Any
    dt_bias: Any
    cu_seqlens: Any


class KeyInputs(NamedTuple):
    """The arrays of a chunk call that the state depends on, besides v and beta."""

    k: Any
    g: Any
    A_log: Any
    dt_bias: Any
    cu_seqlens: Any


class Records(NamedTuple):
    """What the chunk forward's prepare kernel writes; :mod:`kdacore_triton.chunk_forward` has the layout."""

    tiles: Any
    decay: Any


class StateArrays(NamedTuple):
    """States that the chunk forward's scan reads and writes."""

    source: Any
    """The initial states."""
    starts: Any
    """The states at the starts of segments, which replace the initial ones."""
    target: Any
    """The final states."""
    checkpoints: Any


class PoolStrides(NamedTuple):
    """Strides over rows and heads of the states read and written."""

    source_row: Any
    source_head: Any
    target_row: Any
    target_head: Any


class CellStrides(NamedTuple):
    """Strides over K and V of the states read and written; constants of a kernel."""

    source_k: int
    source_v: int
    target_k: int
    target_v: int


class PreparedTiles(NamedTuple):
    """What the chunk backward's prepare kernels write, per chunk and value head."""

    Aqk: Any
    inv: Any
    qg: Any
    kg: Any
    w: Any
    uT: Any  # noqa: N815


class OffsetOperands(NamedTuple):
    """Operands of the chunk backward with one exponent offset, and the decays over a chunk and its halves."""

    zq: Any
    zb: Any
    yk: Any
    sk: Any
    last: Any


class ScannedTiles(NamedTuple):
    """What the chunk backward's scan writes: states, their gradients, v_new, the gradient that ``inv`` multiplies."""

    hT: Any  # noqa: N815
    dhT: Any  # noqa: N815
    vT: Any  # noqa: N815
    drT: Any  # noqa: N815


class BoundaryStates(NamedTuple):
    """States at a sequence's start and end that the chunk backward's scan reads, and the gradient that it writes."""

    initial_state: Any
    d_final_state: Any
    d_initial_state: Any


class Gradients(NamedTuple):
    """What the chunk backward's gradient kernels write; the last two are parts to be summed over chunks."""

    dq: Any
    dk: Any
    dv: Any
    dg: Any
    dbeta: Any
    dA_part: Any  # noqa: N815
    dbias_part: Any


class Place(NamedTuple):
    """Where the rows of one program lie, and the sizes that locate them: what device functions take together."""

    start: Any
    """The first row, counted over all tokens."""
    rows: Any
    """How many rows exist from there on; at most the rows of the tile count."""
    H: Any
    h: Any
    HV: Any
    hv: Any
    K: Any
    V: Any


class IntraArrays(NamedTuple):
    """What the kernels of stage ``kda_chunk_intra`` read."""

    q: Any
    k: Any
    gc: Any
    beta: Any
    cu_seqlens: Any


class RecomputeArrays(NamedTuple):
    """What stage ``kda_recompute_w_u`` reads."""

    q: Any
    k: Any
    v: Any
    beta: Any
    gc: Any
    Akk: Any
    cu_seqlens: Any


class RecomputedArrays(NamedTuple):
    """What stage ``kda_recompute_w_u`` writes."""

    w: Any
    u: Any
    kg: Any
    qg: Any


class ChunkStateArrays(NamedTuple):
    """What stage ``delta_rule_chunk_state`` reads."""

    kg: Any
    w: Any
    u: Any
    gc: Any
    initial_state: Any
    cu_seqlens: Any


class ChunkOutputArrays(NamedTuple):
    """What stage ``kda_chunk_output`` reads."""

    q: Any
    v_new: Any
    gc: Any
    Aqk: Any
    h: Any
    cu_seqlens: Any


class SequencePlace(NamedTuple):
    """Where a sequence and a value head lie, for the scan's device functions."""

    bos: Any
    """The first row, counted over all tokens."""
    length: Any
    slot: Any
    """The sequence's first chunk slot."""
    block: Any
    """Its first checkpoint, of those at every so many tokens."""
    HV: Any
    hv: Any


class RecordOffsets(NamedTuple):
    """Offsets in a record of the chunk forward, of what one program of the scan loads."""

    w_and_qg: Any
    kg: Any
    aqk: Any
    ut: Any


class ChosenCheckpoints(NamedTuple):
    """Checkpoints at chosen tokens: their tokens, rows of the target, their count, and the row that names no slot."""

    offsets: Any
    rows: Any
    count: Any
    null: Any


class RecurrentArrays(NamedTuple):
    """The arrays of a recurrent call that are read and written by rows. ``source``, ``target``: states."""

    q: Any
    k: Any
    v: Any
    g: Any
    o: Any
    dt_bias: Any
    source: Any
    target: Any


class InputStrides(NamedTuple):
    """Strides of q, k, v and g over batch, token and head."""

    q_batch: Any
    q_token: Any
    q_head: Any
    k_batch: Any
    k_token: Any
    k_head: Any
    v_batch: Any
    v_token: Any
    v_head: Any
    g_batch: Any
    g_token: Any
    g_head: Any


class RowStrides(NamedTuple):
    """Strides of one array over batch, token and head."""

    batch: Any
    token: Any
    head: Any


class DecodeArrays(NamedTuple):
    """What a decode step reads and writes by rows. ``source``, ``target``: states."""

    q: Any
    k: Any
    v: Any
    g: Any
    z: Any
    o: Any
    dt_bias: Any
    norm_weight: Any
    source: Any
    target: Any


class ConvolutionArrays(NamedTuple):
    """The convolution of a decode step: its parameters, the pool of its states, and the windows of candidates."""

    conv_weight: Any
    conv_bias: Any
    conv_state: Any
    conv_windows: Any


class ConvolutionStrides(NamedTuple):
    """Strides of :class:`ConvolutionArrays`, and how many columns a row and how many tokens a row of windows has."""

    weight_channel: Any
    weight_tap: Any
    state_row: Any
    state_channel: Any
    state_column: Any
    columns: Any
    windows_row: Any
    windows_token: Any
    windows_tap: Any
    windows_channel: Any
    tokens: Any


class ConvolutionRows(NamedTuple):
    """Where a sequence's window lies: rows of the state and of the windows, negative for none; how many candidates
    precede the first token; and whether there is anything to read (positive) or it is zero."""

    state: Any
    windows: Any
    preceding: Any
    live: Any


class CandidateRecords(NamedTuple):
    """What candidates did to the states: ``S = decay * S + outer(key, update)`` for each."""

    update: Any
    key: Any
    decay: Any


class CandidateRecordStrides(NamedTuple):
    """Strides of :class:`CandidateRecords` over row, token, head and the last axis (0 without), and how many a row
    holds."""

    update_row: Any
    update_token: Any
    update_head: Any
    update_cell: Any
    key_row: Any
    key_token: Any
    key_head: Any
    key_cell: Any
    decay_row: Any
    decay_token: Any
    decay_head: Any
    decay_cell: Any
    tokens: Any


class CommittedStates(NamedTuple):
    """The pool that ``commit_records`` reads, and the same one as it is written."""

    source: Any
    target: Any
