"""Which form serves a call, and the numbers that decide: the one place where that is chosen.

:func:`choose` is a pure function of a request and of a device's figures. Launch code, ``explain`` and tests read
its answer through :mod:`kdacore_cuda.forms.choice_on_device`. Kernels of one form that differ in their blocks only,
and give the same bits, are chosen by that form's ``sizes`` and ``kernels``.

No rule of the chunk forms reads the number of tokens where that would change bits: appending tokens would then
change the results of those before. All rules count *items*, sequences times value heads.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from itertools import product
from typing import Literal, NamedTuple

from kdacore.types import Request
from kdacore_cuda.architectures import CLUSTER_ARCHS, HOPPER, has_hopper_kernel
from kdacore_cuda.fitted_head_dims import kernel_request
from kdacore_cuda.gated_delta_variant import state_parts
from kdacore_cuda.kernel_parameters import LEAST_SPACING, MOST_SPACING, ORDERED_SEQUENCES, STEP_TOKENS
from kdacore_cuda.request_encoding import has_bounded_gate, items_for_choice

ClustersAtOnce = Callable[[int], int]
"""Given a cluster's number of blocks: how many such clusters are resident on the GPU at once; 0 if unknown."""


class Figures(NamedTuple):
    """What a choice reads of the device."""

    arch: str
    """The real architecture whose machine code runs there, such as ``sm_90a``."""
    multiprocessors: int
    clusters_at_once: ClustersAtOnce
    """Of the fused kernel for the call. Called only where that decides: it loads the kernel."""
    memory_rate: Callable[[], float]
    """Gives the bytes a second that the memory delivers. Called only where that decides."""

    def at_once(self, cluster: int) -> int:
        """How many clusters of so many blocks run at once: as the driver says, else by a formula."""
        return self.clusters_at_once(cluster) or formula_at_once(cluster, self.multiprocessors)


class Clusters(NamedTuple):
    """How the fused form divides a call among clusters of blocks."""

    size: int
    """Blocks that share an item."""
    resident: int
    """Clusters that divide all items evenly among themselves; 0: each item has a cluster of its own."""
    preparing: int
    """Clusters whose blocks prepare steps for the others; the same bits."""
    many_short: bool
    """The kernel for many short sequences; the same bits."""
    spacing: int = 0
    """In clusters of two for which others prepare: from one step that a cluster prepares itself to the next, in
    1/65536. The others prepare all steps between."""

    def blocks(self, items: int) -> int:
        """Blocks of the launch, for so many sequences times value heads."""
        return (self.preparing + (self.resident or items)) * self.size


class Split(NamedTuple):
    """How the fused decode step divides a sequence and key head among the blocks of a cluster."""

    slices: int
    """Blocks that share a value head."""
    heads: int
    """Value heads that are computed side by side; the others follow."""
    four_warps: bool = False
    """By the kernels for one token and for several whose blocks have four warps, and whole states in shared memory."""

    @property
    def blocks(self) -> int:
        """Blocks of a cluster."""
        return self.slices * self.heads


class RecurrentMode(IntEnum):
    """Which calls a kernel serves. All modes do the same arithmetic, bit for bit."""

    GENERAL = 0
    """Every call."""
    CONTIGUOUS = 1
    """bfloat16 q, k and v, no float16, one gate per channel, contiguous token arrays of fewer than
    2**31 elements, not packed, rows of states on 16 bytes."""
    ONE_TOKEN = 2
    """As CONTIGUOUS, with one token per sequence, bfloat16 g and beta, float32 dt_bias, and one
    pool row per sequence."""
    ONE_TOKEN_HEAD_GATE = 3
    """As ONE_TOKEN, with one gate per head, and g, beta and dt_bias of float32 or bfloat16."""


class Choice(NamedTuple):
    """What serves a call."""

    form: str
    """A folder of :mod:`kdacore_cuda.forms`."""
    why: str
    """The numbers that decided."""
    clusters: Clusters | None = None
    """Of the fused form."""
    saves: str = ""
    """What the forward saves for the backward: ``operands`` (what it would recompute), ``maps`` (of segments, if a
    sequence has several), or nothing."""
    backward_in_segments: bool = False
    """A backward for which nothing was saved walks segments of a sequence side by side, else one chain per item."""
    records: Literal["before", "beside"] = "before"
    """Of the gated delta rule: records are made before all walks, or ``beside`` them, by blocks of their own. The same
    bits."""
    mode: RecurrentMode = RecurrentMode.GENERAL
    """Of the recurrent form: the kernel for contiguous arrays."""
    split: Split | None = None
    """Of the decode form."""
    cut: bool = False
    """The gated delta rule: sequences long enough are cut into segments."""
    own_recompute: bool = False
    """Of the stages: Hopper's own kernel of ``kda_recompute_w_u``."""


def choose(request: Request, device: Figures) -> Choice:
    """What serves a request on a device with these figures."""
    if request.op == "chunk_kda":
        return _choose_chunk(request, device)
    if request.op in ("kda_chunk_intra", "kda_recompute_w_u"):
        return _choose_stage(request, device)
    if request.op == "chunk_gated_delta_rule":
        return _choose_gated_delta(request, device)
    if request.op.startswith("fused_decode"):
        return _choose_decode(request, device)
    if request.op == "commit_records":
        windows = ", and windows of the convolution" if request.has("conv_state") else ""
        return Choice("commit", amount_of(request) + windows)
    mode = recurrent_mode(request)
    return Choice("recurrent", f"{_MODES[mode]}, {amount_of(request)}", mode=mode)


# --- the chunk ops ------------------------------------------------------------------------------------------------


def _choose_chunk(request: Request, device: Figures) -> Choice:
    r = kernel_request(request)
    items, multiprocessors, bounded = items_for_choice(r), device.multiprocessors, has_bounded_gate(r)
    amount = amount_of(r)
    cut = use_segments_backward(items, multiprocessors)
    if saves_operands(r, multiprocessors):
        return Choice("saving_forward", f"disable_recompute, {amount}", None, "operands", cut)
    if not has_hopper_kernel(r.K, device.arch):
        clusters = choose_clusters(r, device)
        return Choice("fused", f"{amount}, portable kernel for {device.arch}, K={r.K}", clusters, "", cut)
    on = f"on {multiprocessors} multiprocessors"
    if dataflow_serves(r) and use_dataflow(items, bounded, multiprocessors):
        least, most = dataflow_range(multiprocessors)
        return Choice("dataflow", f"{amount} ({least} to {most} {on})", None, "", cut)
    most = most_in_segments(bounded, multiprocessors)
    if use_segments(items, bounded, device):
        if items > most:
            most = most_in_segments(bounded, multiprocessors, fast_memory=True)
        saves = "maps" if saves_maps(r, multiprocessors) else ""
        return Choice("segments", f"{amount} (up to {most} {on})", None, saves, cut)
    return Choice("fused", f"{amount} (segments: up to {most} {on})", choose_clusters(r, device), "", cut)


def _choose_gated_delta(r: Request, device: Figures) -> Choice:
    amount, count, items = amount_of(r), device.multiprocessors, items_for_choice(r)
    most = most_cut(count)
    # Where it is cut, the backward makes its states in another order.
    if items > most and may_save_operands(r):
        return Choice("gated_delta", f"disable_recompute, {amount}", saves="operands")
    why = f"{amount} (segments: up to {most} on {count} multiprocessors)"
    if items <= most:
        return Choice("gated_delta", why, cut=True, backward_in_segments=use_cut_backward(items, count))
    if use_records_beside(r, count):
        walking = f"{state_parts(r) * r.N * r.HV} of {count} multiprocessors walk"
        return Choice("gated_delta", f"{amount}, records beside walks ({walking})", records="beside")
    return Choice("gated_delta", why)


def amount_of(r: Request) -> str:
    """Sequences and value heads, in words."""
    heads = f"{r.HV} head{'s' if r.HV != 1 else ''}"
    if r.N != 1:
        heads = f"{r.N} sequences of {heads}"
    return f"{heads}, computed as among many (batch_invariant)" if r.batch_invariant else heads


_CYCLES_PER_CHUNK_IN_SEGMENTS = {True: 23_500, False: 23_800}
"""By whether gates are bounded: cycles of one multiprocessor for 64 tokens of one value head in segments, all
launches together. With a bounded gate 8192 tokens take a tenth less, but with more than 17 heads other lengths are
slower than in the fused kernel (H100, 20 heads: 3072 tokens 108 us and 94, 16384 tokens 475 us and 418)."""
_CYCLES_WITH_FAST_MEMORY, _FAST_MEMORY = 18_500, 4e12
"""The same with a bounded gate and more than 16 heads, which the bytes limit, where the memory delivers so many bytes a
second or more: an H200, not an H100."""
_CYCLES_PER_FUSED_STEP = {True: 1_570, False: 2_040}
"""Cycles of a step of 32 tokens of the fused kernel with clusters of four, for 20 heads."""


def most_in_segments(bounded: bool, multiprocessors: int, fast_memory: bool = False) -> int:
    """The most items for which segments are faster than the fused kernel."""
    cycles = _CYCLES_WITH_FAST_MEMORY if fast_memory else _CYCLES_PER_CHUNK_IN_SEGMENTS[bounded]
    return 2 * _CYCLES_PER_FUSED_STEP[bounded] * multiprocessors // cycles


def use_segments(items: int, bounded: bool, device: Figures) -> bool:
    """Whether ``items`` are few enough for segments to be faster than the fused kernel.

    In segments every multiprocessor is used, so the time is the total work divided by their number.
    The fused kernel takes its steps one after another even on an idle device. Both times grow with
    the tokens.
    """
    if items <= most_in_segments(bounded, device.multiprocessors):
        return True
    if not bounded or items > most_in_segments(bounded, device.multiprocessors, fast_memory=True):
        return False
    return device.memory_rate() >= _FAST_MEMORY


def dataflow_serves(r: Request) -> bool:
    """Whether the kernels of the dataflow form have what a request asks for: no pack, no rows of a pool, states
    neither in place nor masked, no checkpoints at chosen tokens."""
    return not (
        r.packed
        or r.inplace_state
        or r.state_indices_ndim
        or r.checkpoint_count
        or r.has("has_initial_state")
    )


_LEAST_PART, _LARGEST_PART = 15.5 / 132, 22.5 / 132
"""Of the multiprocessors: with fewer items segments are as fast, with more clusters of four for which others prepare
(:func:`preparing_clusters`)."""


def dataflow_range(multiprocessors: int) -> tuple[int, int]:
    """The fewest and the most items that the dataflow form serves."""
    return int(_LEAST_PART * multiprocessors) + 1, int(_LARGEST_PART * multiprocessors)


def use_dataflow(items: int, bounded: bool, multiprocessors: int) -> bool:
    """Whether ``items`` are served by two launches side by side.

    If gates are bounded, segments or the fused kernel with clusters of four are faster for every number of
    items, or as fast.
    """
    least, most = dataflow_range(multiprocessors)
    return not bounded and least <= items <= most


# --- the gated delta rule -----------------------------------------------------------------------------------------

_LARGEST_WALKING_PART = 0.55
"""Of the multiprocessors. Where more than these walk, the others make records slower than those walk. Counted in cycles
of a multiprocessor: 2,400 a chunk in a walk, and for its record 4,900, or 6,500 where each key head has one value
head. With 36 items, 72 walking of 132 multiprocessors, both ways take as long in the latter case."""
_CHUNK, _LEAST_UNITS = 64, 3
"""Tokens of a chunk. Chunks of key heads for each multiprocessor: with fewer, most records are made as soon as the
first ones."""


def most_cut(multiprocessors: int) -> int:
    """The most items for which long sequences of the gated delta rule are cut into segments: as many as leave room for
    three later segments of each, with two blocks a segment.

    A first and three later segments of 8192 tokens take 64 chunks one after another, in two walks, instead of 128.
    """
    return multiprocessors // 6


USE_COMPOSED_STARTS = False
"""Whether blocks of later segments find the states that these start from themselves, without a launch for it: not
before a GPU has run and timed those kernels (the log of the gated delta rule has what is predicted)."""
_MOST_COMPOSED = 12
"""Segments of a sequence, at most. A step takes a block 1,840 cycles, and the launch's blocks, which share a state by
eight, 1,300; that launch and its gap cost 3.5 us."""


def composes_starts(r: Request, segments: int) -> bool:
    """Whether they do for a forward of the gated delta rule whose longest sequence has so many segments. Both ways give
    the same bits, so tokens may decide. Maps are bfloat16 whatever q is, and the products of such a walk are q's."""
    return _may_compose(r) and segments <= _MOST_COMPOSED


def _may_compose(r: Request) -> bool:
    return USE_COMPOSED_STARTS and r.dtype == "bfloat16"


USE_SHORTER_SEGMENTS = False
"""Whether the first segments are shorter where blocks may find their starts themselves: not before both have been timed
(the same log)."""


def shorter_segments(r: Request) -> bool:
    """Whether they are for a forward of the gated delta rule, however many tokens it has: these may move no border."""
    return USE_SHORTER_SEGMENTS and _may_compose(r)


def use_cut_backward(items: int, multiprocessors: int) -> bool:
    """Whether long sequences of so many items of the gated delta rule are walked in segments by the backward, too.

    With two blocks for each later segment and direction two such segments find room. Three of 8192 tokens take 86
    chunks one after another, in two walks, instead of 128.
    """
    return 8 * items <= multiprocessors


_WALK_CYCLES = {1: 2_400, 2: 4_500}
"""Of a chunk, by the warpgroups of a block: one has half of a state of 128 values, two have all of it."""
_LEAST_MEAN = 512
"""Tokens of a pack's sequences on average for which half states pay whatever the lengths are."""


def walk_warpgroups(r: Request, multiprocessors: int) -> int:
    """Warpgroups of a block that walks a sequence and value head of the gated delta rule forward: two carry its whole
    state, one half of it. The same bits.

    A multiprocessor has one block at a time. Two blocks of half a state take 7 % more of its time, and half of the time
    of one until a sequence has been walked. The host does not know a pack's lengths: there the longest one decides,
    unless sequences are so short that half of a block's time goes into its start.
    """
    items = r.N * r.HV
    if r.packed and r.N > 1:
        return 1 if 2 * items <= multiprocessors or r.B * r.T >= _LEAST_MEAN * r.N else 2
    return min((2, 1), key=lambda w: -(-2 * items // (w * multiprocessors)) * _WALK_CYCLES[w])


def use_records_beside(r: Request, multiprocessors: int) -> bool:
    """Whether a forward of the gated delta rule makes records while others are walked. Both ways give the same bits, so
    tokens may decide."""
    if _LARGEST_WALKING_PART * multiprocessors < state_parts(r) * r.N * r.HV:
        return False
    has_order = not r.packed or r.N <= ORDERED_SEQUENCES
    return has_order and _LEAST_UNITS * multiprocessors <= r.B * r.T // _CHUNK * r.H


# --- what a forward saves, and the backward -----------------------------------------------------------------------


def may_save_operands(r: Request) -> bool:
    """Whether a forward may save what its backward would recompute.

    Not where it also gives checkpoints, or works on pools of states. The number of tokens does not matter, as long as
    there are any.
    """
    if not (r.disable_recompute and r.needs_grad and r.kind == "torch" and not r.traced):
        return False
    if r.checkpoint_every or r.checkpoint_count or r.pool_size or r.inplace_state or r.has("out"):
        return False
    return bool(r.B * r.T)


def saves_operands(r: Request, multiprocessors: int) -> bool:
    """Whether a forward of ``chunk_kda`` saves what its backward would recompute: not with so few heads that the
    backward is cut in segments, which makes its states in another order."""
    return may_save_operands(r) and not use_segments_backward(items_for_choice(r), multiprocessors)


def saves_maps(r: Request, multiprocessors: int) -> bool:
    """Whether a forward in segments, of which a sequence has several, saves their maps and starting states: with few
    enough items for a backward that takes those to be faster than one chain per item.

    Of what a backward in segments takes more than such a chain, the maps are most.
    """
    may_save = r.needs_grad and r.kind == "torch" and not r.traced
    return may_save and 8 * items_for_choice(r) <= multiprocessors


def use_segments_backward(items: int, multiprocessors: int) -> bool:
    """Whether ``items`` are few enough for a backward in segments to be faster than one chain per item.

    A chunk of all heads takes 1.35 us in one chain per head, and 0.1 us for each head in segments
    (132 multiprocessors, 65536 tokens).
    """
    return 11 * items <= multiprocessors


# --- slices of a row that ranks share -----------------------------------------------------------------------------


def finishes_as_whole(items: int, packed: bool, multiprocessors: int) -> bool:
    """Whether the results of a slice come from a call of its own, not from segments.

    So it is for packs of many sequences: such a call takes half the time of segments (0.6 ns a token and head), and
    the one sequence that goes on behind the slice is then likely to be a small part of it. Of few long sequences the
    call would be one chain after another.
    """
    return packed and items >= 4 * multiprocessors


# --- clusters of the fused form -----------------------------------------------------------------------------------

SCANNERS = 2
"""Blocks of a cluster that scan, in the kernel of Hopper. Clusters of that many have no others."""
_LONG = 1024
"""Tokens of a sequence from which on clusters of four pay that share more items than there are clusters."""
HELP_CLUSTERS_OF_TWO = False
"""Whether others prepare for clusters of two at all: not before a GPU has run and timed it (the log of few heads has
what is predicted)."""
_LEAST_HELPED_PART = 36.5 / 132
"""Items, at least, for which clusters of two that others prepare for are faster than clusters of four, as part of the
multiprocessors."""
_LEAST_PREPARED_PART = {True: 23.5 / 132, False: 22.5 / 132}
"""By whether gates are bounded: items that others prepare for, at least, as part of the multiprocessors. With
fewer, clusters of four do not wait for what those prepare (bounded), or other forms are faster (unbounded)."""
_PREPARING_TIMES = {True: (1.5, 1.35, 0.42), False: (1.9, 1.62, 0.68)}
"""By whether gates are bounded, us on an H200: a step prepared by a helper of clusters of two; a step of a cluster of
two that prepares all of its steps; how much shorter that step is if it prepares none."""
_LEAST_SHARE = 0.15
"""Helpers of clusters of two are used if they can prepare at least this share of the steps. The kernel then gives them
a sixth or more."""
SHORT_TOKENS, SHORT_ITEMS = 4 * STEP_TOKENS, 8
"""Tokens of a short sequence, at most; items of a cluster, at least, where many short sequences have a kernel of
their own, since uneven parts cost little there."""


def choose_clusters(r: Request, device: Figures) -> Clusters:
    """How the fused form divides a call."""
    items, tokens = r.N * r.HV, r.B * r.T // max(r.N, 1)
    if not has_hopper_kernel(r.K, device.arch):
        return Clusters(portable_cluster_size(r.K, items_for_choice(r), device), 0, 0, False)
    looks_up = r.packed or r.has("state_indices")
    size = cluster_size(items, tokens, device, HELP_CLUSTERS_OF_TWO and not looks_up)
    resident = resident_clusters(items, size, device)
    whole = not (looks_up or r.checkpoint_every or r.checkpoint_count)
    many_short = whole and are_many_short(r.T, items, size, resident)
    # Blocks that prepare for clusters of four, and those that wait for them, take every sequence to have the steps of
    # the first, so of several none may be shorter or padding; for clusters of two they count steps by T.
    prepared = not resident and (not looks_up or (r.N == 1 and size > SCANNERS))
    bounded = has_bounded_gate(r)
    preparing = preparing_clusters(items, r.T, size, bounded, device) if prepared else 0
    spacing = own_spacing(prepared_share(items, preparing, bounded)) if preparing and size == SCANNERS else 0
    return Clusters(size, resident, preparing, many_short, spacing)


def cluster_sizes(K: int, arch: str) -> tuple[int, ...]:
    """Cluster sizes the kernels are compiled with. At K = 64 one block carries the whole state;
    sharing was slower."""
    if K == 64 or arch not in CLUSTER_ARCHS:
        return (1,)
    return (2, 4) if has_hopper_kernel(K, arch) else (1, 2, 4)


def portable_cluster_size(K: int, items: int, device: Figures) -> int:
    """Blocks that share an item in the portable kernel: as many as find a multiprocessor each. The number of tokens
    does not decide."""
    count, sizes = device.multiprocessors, cluster_sizes(K, device.arch)
    reached = {c: count if c <= 2 else count * 9 // 11 for c in sizes}
    return max(c for c in sizes if c == sizes[0] or items * c <= reached[c])


def cluster_size(items: int, tokens: int, device: Figures, may_be_helped: bool = False) -> int:
    """Blocks that share an item in Hopper's kernel, given the tokens of a sequence on average.

    A larger cluster shortens one item and costs throughput, so it pays while multiprocessors are
    idle. Clusters of four still pay where they share up to a third more items than run at
    once, if sequences are long and others may not prepare for clusters of two. Both sizes give the same bits, so
    tokens may decide.
    """
    if 3 * items > device.multiprocessors:  # more than a third above whatever the driver would say
        return 2
    together = device.at_once(4)
    if items <= together:
        return 4
    shared = 3 * items <= 4 * together and tokens >= _LONG
    return 4 if shared and not (may_be_helped and items >= _LEAST_HELPED_PART * device.multiprocessors) else 2


def formula_at_once(cluster: int, multiprocessors: int) -> int:
    """How many clusters run at once, for plans without a device whose driver could be asked. A cluster lies within one
    of the parts that a device is made of, so clusters of four leave some multiprocessors out: of an H200's 132 they
    have 120. Other devices with as many multiprocessors may differ."""
    return multiprocessors * 10 // 44 if cluster == 4 else multiprocessors // cluster


def resident_clusters(items: int, cluster: int, device: Figures) -> int:
    """How many clusters of Hopper's kernel divide all ``items`` evenly among themselves, or 0: each item has a cluster
    of its own.

    As many as run at once, where there are more items than that: the kernel can cut an item in two.
    """
    together = device.at_once(cluster)
    return together if items > together else 0


def preparing_clusters(items: int, tokens: int, cluster: int, bounded: bool, device: Figures) -> int:
    """Clusters of blocks that prepare steps of ``items`` of ``tokens`` tokens. For clusters of four each block prepares
    every third step of one item, for clusters of two all blocks together :func:`prepared_share` of all steps. 0 where
    nobody does; the same bits.

    These clusters and those that wait for them all run at once.
    """
    if tokens < _LONG:
        return 0
    if cluster == SCANNERS:
        if not HELP_CLUSTERS_OF_TWO or items < _LEAST_HELPED_PART * device.multiprocessors:
            return 0
        preparing = device.at_once(cluster) - items
        return preparing if preparing > 0 and prepared_share(items, preparing, bounded) >= _LEAST_SHARE else 0
    if items < _LEAST_PREPARED_PART[bounded] * device.multiprocessors:
        return 0
    preparing = -(-items // 4)
    return preparing if items + preparing <= device.at_once(4) else 0


def prepared_share(items: int, preparing: int, bounded: bool) -> float:
    """The share of the steps of ``items``, each in a cluster of two, that the blocks of ``preparing`` further clusters
    prepare: nine tenths of their capacity, so that no cluster waits for them."""
    takes, step, saved = _PREPARING_TIMES[bounded]
    part = 0.9 * SCANNERS * preparing / (takes * items)
    return min(0.9, part * step / (1 + part * saved))


def own_spacing(share: float) -> int:
    """:attr:`Clusters.spacing` if others prepare so much of the steps, as far as the kernel can."""
    return max(LEAST_SPACING, min(MOST_SPACING, int((1 << 16) / (1 - share)) + 1))


def are_many_short(T: int, items: int, cluster: int, clusters: int) -> bool:
    """Whether ``clusters`` have a faster kernel for ``items`` of ``T`` tokens: the same bits."""
    return cluster == SCANNERS and 0 < SHORT_ITEMS * clusters <= items and T <= SHORT_TOKENS


# --- the recurrent ops and the stages -----------------------------------------------------------------------------

_MODES = {
    RecurrentMode.GENERAL: "the kernel for every call",
    RecurrentMode.CONTIGUOUS: "the kernel for contiguous bfloat16",
    RecurrentMode.ONE_TOKEN: "the kernel for one token a sequence",
    RecurrentMode.ONE_TOKEN_HEAD_GATE: "the kernel for one token a sequence and a gate per head",
}


def recurrent_mode(r: Request) -> RecurrentMode:
    """The most specialised kernel that serves the call if its arrays are contiguous. With records of candidates
    there are only the first two modes."""
    types = {name: spec.dtype for name, spec in r.tensors if name in ("v", "g", "beta", "dt_bias")}
    no_float16 = r.dtype == "bfloat16" and "float16" not in types.values()
    if not no_float16 or r.packed or r.B * r.T * r.HV * r.K >= 2**31:
        return RecurrentMode.GENERAL
    one_token = r.T == 1 and r.state_indices_ndim == 1 and not r.has("record_update")
    if r.scalar_gate:
        return RecurrentMode.ONE_TOKEN_HEAD_GATE if one_token else RecurrentMode.GENERAL
    usual_types = types["g"] == types["beta"] == "bfloat16" and types.get("dt_bias", "float32") == "float32"
    return RecurrentMode.ONE_TOKEN if one_token and usual_types else RecurrentMode.CONTIGUOUS


_MODES_OF_TOKENS = {
    RecurrentMode.GENERAL: _MODES[RecurrentMode.GENERAL],
    RecurrentMode.ONE_TOKEN: "the kernel for several tokens a sequence",
    RecurrentMode.ONE_TOKEN_HEAD_GATE: "the kernel for several tokens a sequence and a gate per head",
}
"""Those of the fused decode step where a sequence may have more than one token, or candidates."""

DECODE_TAPS = 4
"""Taps of the convolution that the kernels for one token of the fused decode step have."""
DECODE_HEADS = (1, 2, 4)
"""Value heads of a key head that a cluster of the fused decode step may compute side by side."""
_DECODE_BLOCKS = 8
"""Blocks of a cluster, at most: as many as every device with clusters takes."""


def decode_splits(mode: RecurrentMode, state_dtype: str, arch: str) -> tuple[Split, ...]:
    """The divisions that the fused decode step is compiled with: a state of 64 KB may be shared by four blocks, one of
    32 by two, for one token. One gate a channel comes with one value head a key head."""
    if arch not in CLUSTER_ARCHS:
        return (Split(1, 1),)
    one_token = mode != RecurrentMode.GENERAL
    slices = (1,) if not one_token else (1, 2, 4) if state_dtype == "float32" else (1, 2)
    heads = (1,) if mode == RecurrentMode.ONE_TOKEN else DECODE_HEADS
    every = (Split(*sizes, four_warps=one_token) for sizes in product(slices, heads))
    return tuple(split for split in every if split.blocks <= _DECODE_BLOCKS)


def _choose_decode(r: Request, device: Figures) -> Choice:
    mode, count, items = decode_mode(r, device.arch), device.multiprocessors, items_for_choice(r)
    split, group = decode_split(r, mode, items, device), r.HV // r.H
    serves = _MODES if decodes_one_token(r) else _MODES_OF_TOKENS
    parts = [
        f"{split.slices} blocks a head on {count} multiprocessors" if split.slices > 1 else "one block a head"
    ]
    if group > 1:
        parts += [
            f"{group} value heads in a cluster" if split.heads == group else "windows of q and k in a launch"
        ]
    if r.has("record_update"):
        parts.append("candidates by records")
    if at_once := sequences_in_turn(r, mode, split, device):
        parts.append(f"{at_once} sequences at once, others in turn")
    return Choice("decode", ", ".join([serves[mode], amount_of(r), *parts]), mode=mode, split=split)


_BLOCKS_AT_ONCE = {2: 4, 4: 1}
"""The most blocks for each multiprocessor with which 2 or 4 blocks share a head. Measured with one block a head: 9.5 us
for 128 heads and 15.9 us for 256; with two blocks a head: 5.1 us for 64 heads. A multiprocessor holds four blocks
with half a head each, three of those for several tokens."""


def decode_split(r: Request, mode: RecurrentMode, items: int, device: Figures) -> Split:
    """The blocks of a cluster: all value heads of a key head, to which the windows of q and k belong, if there are
    kernels for as many, else one; and one where the call names rows of records and is served by the kernel for every
    call. Each is shared by as many blocks as :data:`_BLOCKS_AT_ONCE` allows, of ``items`` sequences and value heads.
    The number of blocks decides the order of sums of states ``[K, V]``: several tokens are divided as one would be."""
    if r.has("record_indices") and mode == RecurrentMode.GENERAL:
        return Split(1, 1)
    splits, group = decode_splits(mode, r.state_dtype, device.arch), r.HV // r.H
    heads = group if group in [x.heads for x in splits] else 1
    fitting = [x for x in splits if x.heads == heads]
    most = device.multiprocessors
    return max(x for x in fitting if x.slices == 1 or items * x.slices <= _BLOCKS_AT_ONCE[x.slices] * most)


USE_TURNS = False
"""Whether blocks take sequences in turn at all: not before a GPU has run and timed that kernel (the log of the fused
decode step has what is predicted)."""
BLOCKS_IN_TURN = 2
"""Blocks of a multiprocessor, by shared memory, where each takes several sequences in turn."""
_LEAST_AT_ONCE = 3
"""Heads per multiprocessor above which blocks take sequences in turn: so many blocks of one head are resident at
once."""
_LEAST_BUSY = 0.75
"""Least share of the resident places that such a launch must fill, as its blocks are a multiple of the heads."""


def sequences_in_turn(r: Request, mode: RecurrentMode, split: Split, device: Figures) -> int:
    """Sequences that run side by side where blocks take several of them in turn; 0 where each takes one. Both give the
    same bits."""
    whole = mode == RecurrentMode.ONE_TOKEN and split == Split(1, 1, True) and not decodes_one_token(r)
    if not USE_TURNS or not whole or r.state_dtype != "float32" or device.arch != HOPPER:
        return 0
    if _LEAST_AT_ONCE * device.multiprocessors >= r.N * r.HV:
        return 0
    places = BLOCKS_IN_TURN * device.multiprocessors
    at_once = places // r.HV
    return at_once if at_once * r.HV >= _LEAST_BUSY * places else 0


def decodes_one_token(r: Request) -> bool:
    """Whether a call of the fused decode step has one token and one state a sequence, and no candidates."""
    one = r.T == 1 and not r.packed and r.state_indices_ndim == 1 and r.write_indices_ndim < 2
    return one and not r.has("record_indices")


def decode_mode(r: Request, arch: str) -> RecurrentMode:
    """The most specialised kernel of the fused decode step that serves the call if the layout of its arrays allows:
    the general one, or those that know the types of arrays, one for one token a sequence, one for any number of
    them."""
    typed = decodes_one_token(r) or _has_kernel_for_tokens(r, arch)
    if not typed or r.K != 128 or r.B * r.T * r.HV * r.K >= 2**31:
        return RecurrentMode.GENERAL
    types = {name: spec.dtype for name, spec in r.tensors if name not in ("initial_state", "write_pool")}
    if "conv_weight" not in types or r.spec("conv_weight").shape[1] != DECODE_TAPS or "conv_indices" in types:
        return RecurrentMode.GENERAL
    if r.dtype != "bfloat16" or types.get("z", "bfloat16") != "bfloat16" or "float16" in types.values():
        return RecurrentMode.GENERAL
    group = r.HV // r.H
    if r.scalar_gate:
        whole = group in (DECODE_HEADS if arch in CLUSTER_ARCHS else (1,))
        return RecurrentMode.ONE_TOKEN_HEAD_GATE if whole else RecurrentMode.GENERAL
    usual_types = types["g"] == types["beta"] == "bfloat16" and types.get("dt_bias", "float32") == "float32"
    return RecurrentMode.ONE_TOKEN if usual_types and group == 1 else RecurrentMode.GENERAL


def _has_kernel_for_tokens(r: Request, arch: str) -> bool:
    """Whether sequences of any number of tokens may be served in blocks of four warps, with the order of sums that one
    token has there: on states that stay in a pool."""
    in_pool = r.inplace_state and r.state_indices_ndim > 0
    return arch in CLUSTER_ARCHS and in_pool and r.state_dtype != "float16"


def _choose_stage(r: Request, device: Figures) -> Choice:
    recomputes = r.op == "kda_recompute_w_u"
    own = recomputes and has_hopper_recompute(r.K, r.V, device.arch)
    head_dims = f"K={r.K}, V={r.V}" if recomputes else f"K={r.K}"
    kernel = "the kernel of Hopper" if own else "the portable kernel"
    return Choice("stages", f"{kernel}, {head_dims}", own_recompute=own)


def has_hopper_recompute(K: int, V: int, arch: str) -> bool:
    """Whether Hopper's own kernel of ``kda_recompute_w_u`` serves such calls; the portable one serves all others."""
    return K == V == 128 and arch == HOPPER
