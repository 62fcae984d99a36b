"""Which form serves a call: every form, every boundary of a rule on either side, its text, and that launches follow."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from cuda_calls import BOUNDED_MODEL, MODEL, Draw
from emulated_backend import HOPPER, NAME, Plugin

import kdacore
from kdacore.registry import REGISTRY
from kdacore.types import Device, Request, TensorSpec
from kdacore_cuda import choice, make_backend
from kdacore_cuda.choice import Choice, Figures, RecurrentMode, Split, choose
from kdacore_cuda.forms import explain
from kdacore_cuda.runtime import device_figures, torch_launch

H100, H200 = 3.35e12, 4.9e12
"""Bytes a second that their memories deliver."""
BOUNDED: dict[str, Any] = {"gate": "sigmoid", "lower_bound": -5.0}
TRAINING: dict[str, Any] = {"needs_grad": True, **BOUNDED}


def call(heads: int, T: int = 8192, *, arrays: tuple[str, ...] = (), **fields: Any) -> Request:
    """A ``chunk_kda`` of bfloat16 on a Hopper GPU. ``arrays``: index arrays and states that it has."""
    sizes = {"B": 1, "T": T, "H": heads, "HV": heads, "K": 128, "V": 128, "N": 1, **fields}
    K, V = sizes["K"], sizes["V"]
    tokens = dict.fromkeys(("q", "k", "g"), (sizes["B"], T, heads, K)) | {"v": (sizes["B"], T, heads, V)}
    tensors = {name: TensorSpec(shape, "bfloat16") for name, shape in tokens.items()}
    tensors["beta"] = TensorSpec((sizes["B"], T, heads), "bfloat16")
    tensors |= {name: TensorSpec((sizes["N"],), "int32") for name in arrays}
    known: dict[str, Any] = {"op": "chunk_kda", "kind": "torch", "device": HOPPER, "dtype": "bfloat16"}
    known |= {"state_dtype": "float32", "tensors": tuple(tensors.items())}
    return Request(**(known | sizes))


def chosen(request: Request, multiprocessors: int = 132, rate: float = H100, four: int = 30) -> Choice:
    """The choice on a device with these figures."""
    arch = device_figures.arch_of(request)

    def at_once(cluster: int) -> int:
        return four if cluster == 4 else multiprocessors // cluster

    return choose(request, Figures(arch, multiprocessors, at_once, lambda: rate))


def packed(heads: int, *, arrays: tuple[str, ...] = (), **fields: Any) -> Request:
    return call(heads, packed=True, arrays=("cu_seqlens", *arrays), **fields)


def gated_delta(heads: int, **fields: Any) -> Request:
    return dataclasses.replace(call(heads, **fields), op="chunk_gated_delta_rule", scalar_gate=True)


def decoding(heads: int, N: int = 1, group: int = 1, scalar: bool = False, **fields: Any) -> Request:
    """A fused decode step of one token as models are served, of so many key heads with ``group`` value heads each."""
    HV = heads * group
    base = call(heads, 1, B=N, N=N, HV=HV, state_indices_ndim=1, scalar_gate=scalar)
    given = {"conv_weight": TensorSpec((2 * heads * 128 + HV * 128, 4), "float32")}
    given |= {name: TensorSpec((N, 1, HV), "bfloat16") for name in ("g", "beta")}
    given |= {"state_indices": TensorSpec((N,), "int32")} | fields.pop("tensors", {})
    op = "fused_decode_gated_delta_rule" if scalar else "fused_decode_kda"
    return dataclasses.replace(base, op=op, tensors=tuple(given.items()), **fields)


def with_arrays(request: Request, **shapes: tuple[int, ...]) -> Request:
    """The call with further arrays."""
    more = tuple((name, TensorSpec(shape, "float32")) for name, shape in shapes.items())
    return dataclasses.replace(request, tensors=(*request.tensors, *more))


# --- the forms ----------------------------------------------------------------------------------------------------

FORMS: dict[str, tuple[Request, str]] = {
    "few heads": (call(8, **BOUNDED), "segments: 8 heads (up to 17 on 132 multiprocessors)"),
    "one head": (call(1), "segments: 1 head (up to 22 on 132 multiprocessors)"),
    "more, unbounded": (call(18), "dataflow: 18 heads (16 to 22 on 132 multiprocessors)"),
    "many heads": (call(64, **BOUNDED), "fused: 64 heads (segments: up to 17 on 132 multiprocessors)"),
    "a batch": (
        call(8, B=4, N=4, **BOUNDED),
        "fused: 4 sequences of 8 heads (segments: up to 17 on 132 multiprocessors)",
    ),
    "one of many": (
        call(8, batch_invariant=True, **BOUNDED),
        "fused: 8 heads, computed as among many (batch_invariant) (segments: up to 17 on 132 multiprocessors)",
    ),
    "head dim 64": (call(8, K=64, V=64), "fused: 8 heads, portable kernel for sm_90a, K=64"),
    "Ampere": (
        call(8, device=Device("cuda", 0, "sm_80")),
        "fused: 8 heads, portable kernel for sm_80, K=128",
    ),
    "no recomputation": (
        call(64, disable_recompute=True, **TRAINING),
        "saving_forward: disable_recompute, 64 heads",
    ),
    "decoding": (
        dataclasses.replace(call(8, 1, B=32, N=32, state_indices_ndim=1), op="fused_recurrent_kda"),
        "recurrent: the kernel for one token a sequence, 32 sequences of 8 heads",
    ),
    "the fused decode step": (
        decoding(32),
        "decode: the kernel for one token a sequence, 32 heads, 4 blocks a head on 132 multiprocessors",
    ),
    "the fused decode step, many heads": (
        decoding(16, 32, 2, scalar=True),
        "decode: the kernel for one token a sequence and a gate per head, 32 sequences of 32 heads, one block a head, "
        "2 value heads in a cluster",
    ),
    "the fused decode step, other groups": (
        decoding(16, 32, 3, scalar=True),
        "decode: the kernel for every call, 32 sequences of 48 heads, one block a head, windows of q and k in a launch",
    ),
    "the fused decode step by records": (
        with_arrays(
            decoding(16, 32, inplace_state=True), record_update=(32, 4, 16, 128), record_indices=(32,)
        ),
        "decode: the kernel for several tokens a sequence, 32 sequences of 16 heads, one block a head, "
        "candidates by records",
    ),
    "the fused decode step by records, float16 states": (
        with_arrays(
            decoding(16, 32, inplace_state=True, state_dtype="float16"),
            record_update=(32, 4, 16, 128),
            record_indices=(32,),
        ),
        "decode: the kernel for every call, 32 sequences of 16 heads, one block a head, candidates by records",
    ),
    "records without tokens": (
        dataclasses.replace(call(32), op="commit_records"),
        "commit: 32 heads",
    ),
    "records without tokens, and windows": (
        with_arrays(dataclasses.replace(call(32), op="commit_records"), conv_state=(8, 12288, 3)),
        "commit: 32 heads, and windows of the convolution",
    ),
    "the gated delta rule": (
        gated_delta(8),
        "gated_delta: 8 heads (segments: up to 22 on 132 multiprocessors)",
    ),
    "the gated delta rule, many heads": (
        gated_delta(64),
        "gated_delta: 64 heads (segments: up to 22 on 132 multiprocessors)",
    ),
    "the gated delta rule, fewer heads": (
        gated_delta(32),
        "gated_delta: 32 heads, records beside walks (64 of 132 multiprocessors walk)",
    ),
    "the gated delta rule, no recomputation": (
        gated_delta(64, disable_recompute=True, needs_grad=True),
        "gated_delta: disable_recompute, 64 heads",
    ),
    "a stage": (
        dataclasses.replace(call(8), op="kda_recompute_w_u"),
        "stages: the kernel of Hopper, K=128, V=128",
    ),
    "the other stage": (
        dataclasses.replace(call(8), op="kda_chunk_intra"),
        "stages: the portable kernel, K=128",
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form(name: str) -> None:
    request, text = FORMS[name]
    found = chosen(request)
    assert f"{found.form}: {found.why}" == text
    assert (found.clusters is None) == (found.form != "fused")


def test_the_forms_are_the_folders() -> None:
    from pathlib import Path

    folders = {x.name for x in Path(explain.__file__).parent.iterdir() if (x / "__init__.py").is_file()}
    # A slice of a row, and a backward, are parts of calls that are chosen otherwise.
    assert {chosen(request).form for request, _ in FORMS.values()} == folders - {"slices", "backward"}


# --- their borders ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "rate", "multiprocessors", "limit"),
    [
        (BOUNDED, H100, 132, 17),
        (BOUNDED, H200, 132, 22),
        (BOUNDED, H100, 66, 8),
        ({"inplace_state": True}, H100, 132, 22),
        ({"inplace_state": True}, H200, 132, 22),
    ],
)
def test_segments_end(options: dict[str, Any], rate: float, multiprocessors: int, limit: int) -> None:
    """By heads, and by sequences times heads, whatever their tokens."""
    for T in (1, 64, 100_000):
        forms = [chosen(call(n, T, **options), multiprocessors, rate).form for n in (limit, limit + 1)]
        assert forms == ["segments", "fused"]
    many = packed(1, N=limit), packed(1, N=limit + 1)
    if not options.get("gate"):
        assert [chosen(r, multiprocessors, rate).form for r in many] == ["segments", "fused"]


def test_dataflow_begins_and_ends() -> None:
    forms = {n: chosen(call(n)).form for n in (15, 16, 22, 23)}
    assert forms == {15: "segments", 16: "dataflow", 22: "dataflow", 23: "fused"}
    assert chosen(call(18, **BOUNDED)).form == "fused"
    assert chosen(call(18, **BOUNDED), rate=H200).form == "segments"


@pytest.mark.parametrize(
    "other",
    [
        packed(18),
        call(18, inplace_state=True),
        call(18, state_indices_ndim=1),
        call(18, checkpoint_count=2),
        call(18, arrays=("has_initial_state",)),
    ],
    ids=["pack", "in place", "rows", "checkpoints", "mask"],
)
def test_what_dataflow_does_not_serve(other: Request) -> None:
    assert chosen(call(18)).form == "dataflow"
    assert chosen(other).form == "segments"


def test_the_backward_is_cut_with_few_heads() -> None:
    assert [chosen(call(n, **TRAINING)).backward_in_segments for n in (12, 13)] == [True, False]
    assert not chosen(call(1, batch_invariant=True, **TRAINING)).backward_in_segments


def test_operands_are_saved_behind_that() -> None:
    saving = {"disable_recompute": True, **TRAINING}
    assert [chosen(call(n, **saving)).form for n in (12, 13)] == ["segments", "saving_forward"]
    assert [chosen(call(n, **saving)).saves for n in (12, 13)] == ["maps", "operands"]
    for change in (
        {"disable_recompute": False},
        {"needs_grad": False},
        {"kind": "jax"},
        {"traced": True},
        {"T": 0},
        {"checkpoint_every": 64},
        {"checkpoint_count": 1},
        {"pool_size": 4},
        {"inplace_state": True},
    ):
        assert chosen(dataclasses.replace(call(64, **saving), **change)).form == "fused", change
    assert chosen(call(64, arrays=("out",), **saving)).form == "fused"


def test_the_gated_delta_rule_is_cut_with_few_heads() -> None:
    """By heads, and by sequences times heads, whatever their tokens."""
    for T in (1, 64, 100_000):
        assert [chosen(gated_delta(n, T=T)).cut for n in (22, 23)] == [True, False]
    assert [chosen(gated_delta(2, B=n, N=n)).cut for n in (11, 12)] == [True, False]
    assert not chosen(gated_delta(1, batch_invariant=True)).cut
    assert [chosen(gated_delta(n), multiprocessors=66).cut for n in (11, 12)] == [True, False]


def test_records_of_the_gated_delta_rule_are_made_beside_walks() -> None:
    """Where walks leave enough multiprocessors, and there are enough chunks of key heads."""

    def beside(r: Request, multiprocessors: int = 132) -> bool:
        return chosen(r, multiprocessors).records == "beside"

    assert [beside(gated_delta(n)) for n in (23, 36, 37)] == [True, True, False]
    assert [beside(gated_delta(16, B=n, N=n)) for n in (2, 3)] == [True, False]
    assert [beside(gated_delta(n), 78) for n in (21, 22)] == [True, False]
    assert not beside(gated_delta(23), 0)
    assert [beside(gated_delta(32, T=T)) for T in (64 * 12, 64 * 13)] == [False, True]
    assert [beside(gated_delta(2, HV=24, T=T)) for T in (8192, 64 * 198)] == [False, True]
    sequences = {
        n: dataclasses.replace(packed(1, N=n, T=65536), op="chunk_gated_delta_rule") for n in (32, 33)
    }
    assert [beside(r) for r in sequences.values()] == [True, False]
    saving = gated_delta(23, disable_recompute=True, needs_grad=True)
    assert not beside(saving)


def test_whole_states_or_halves() -> None:
    """As many rounds of blocks as there are, and halves for packs."""

    def warpgroups(items: int) -> int:
        return choice.walk_warpgroups(gated_delta(items), 132)

    assert [warpgroups(n) for n in (66, 67, 132, 133, 198, 199, 256)] == [1, 2, 2, 1, 1, 2, 2]
    pack = dataclasses.replace(packed(32, N=6, T=6 * 512), op="chunk_gated_delta_rule")
    assert choice.walk_warpgroups(pack, 132) == 1
    assert choice.walk_warpgroups(dataclasses.replace(pack, T=6 * 512 - 1), 132) == 2
    assert choice.walk_warpgroups(dataclasses.replace(pack, N=1, HV=128), 132) == 2
    assert choice.walk_warpgroups(dataclasses.replace(pack, HV=11, T=6), 132) == 1


def test_the_gated_delta_rule_saves_operands_where_it_is_not_cut() -> None:
    saving = {"disable_recompute": True, "needs_grad": True}
    assert [chosen(gated_delta(n, **saving)).saves for n in (1, 22, 23, 64)] == ["", "", *["operands"] * 2]
    assert chosen(gated_delta(1, batch_invariant=True, **saving)).saves == "operands"
    for change in (
        {"disable_recompute": False},
        {"needs_grad": False},
        {"kind": "jax"},
        {"traced": True},
        {"T": 0},
        {"checkpoint_every": 64},
        {"pool_size": 4},
        {"inplace_state": True},
    ):
        assert not chosen(dataclasses.replace(gated_delta(64, **saving), **change)).saves, change
    assert not chosen(gated_delta(64, arrays=("out",), **saving)).saves


def test_maps_are_saved_with_few_heads() -> None:
    assert [chosen(call(n, **TRAINING)).saves for n in (16, 17)] == ["maps", ""]
    for change in ({"needs_grad": False}, {"kind": "jax"}, {"traced": True}):
        assert not chosen(dataclasses.replace(call(8, **TRAINING), **change)).saves


def clusters_of(request: Request, **figures: Any) -> choice.Clusters:
    found = chosen(request, **figures).clusters
    assert found is not None
    return found


def test_clusters_of_four() -> None:
    """As many as run at once, and a third more if sequences are long and nobody prepares for clusters of two."""
    sizes = {
        (n, T): clusters_of(call(n, T, arrays=("state_indices",), **BOUNDED)).size
        for n in (30, 31, 40, 41)
        for T in (1023, 1024)
    }
    assert sizes == {
        (30, 1023): 4,
        (30, 1024): 4,
        (31, 1023): 2,
        (31, 1024): 4,
        (40, 1023): 2,
        (40, 1024): 4,
    } | {
        (41, 1023): 2,
        (41, 1024): 2,
    }
    assert [clusters_of(call(n, **BOUNDED), four=24).size for n in (32, 33)] == [4, 2]


def test_clusters_of_two_that_others_prepare_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 37 items on; not in packs, nor with rows of a pool, which keep clusters of four."""
    assert [clusters_of(call(n, **BOUNDED))[:3] for n in (40, 48)] == [(4, 30, 0), (2, 0, 0)]
    monkeypatch.setattr(choice, "HELP_CLUSTERS_OF_TWO", True)
    found = {n: clusters_of(call(n, **BOUNDED)) for n in (36, 37, 40, 48, 60, 61)}
    assert {n: (x.size, x.resident, x.preparing, bool(x.spacing)) for n, x in found.items()} == {
        36: (4, 30, 0, False),
        37: (2, 0, 29, True),
        40: (2, 0, 26, True),
        48: (2, 0, 18, True),
        60: (2, 0, 6, True),
        61: (2, 0, 0, False),
    }
    assert clusters_of(call(48, 1023, **BOUNDED)).preparing == 0
    for other in (call(40, arrays=("state_indices",), **BOUNDED), packed(40, **BOUNDED)):
        assert clusters_of(other)[:3] == (4, 30, 0)
    for other in (call(48, arrays=("state_indices",), **BOUNDED), packed(48, **BOUNDED)):
        assert clusters_of(other)[:3] == (2, 0, 0)


def test_clusters_share_more_items_than_run_at_once() -> None:
    assert [clusters_of(call(n, **BOUNDED)).resident for n in (66, 67)] == [0, 66]
    assert [clusters_of(call(n, **BOUNDED)).resident for n in (30, 31)] == [0, 30]


def test_clusters_that_prepare() -> None:
    """Where those and the clusters that they help run at once."""
    assert [clusters_of(call(n, **BOUNDED)).preparing for n in (23, 24, 25)] == [0, 6, 0]
    assert [clusters_of(call(24, T, **BOUNDED)).preparing for T in (1023, 1024)] == [0, 6]
    assert [clusters_of(call(n)).preparing for n in (23, 24, 25)] == [6, 6, 0]
    assert clusters_of(call(24, arrays=("state_indices",), **BOUNDED)).preparing == 6
    assert clusters_of(packed(24, arrays=("state_indices",), **BOUNDED)).preparing == 6
    for arrays in ((), ("state_indices",)):  # several sequences may have other steps than the first
        several = call(12, B=2, N=2, arrays=arrays, **BOUNDED)
        assert clusters_of(several).preparing == (0 if arrays else 6)
    assert clusters_of(call(24, **BOUNDED), four=29).preparing == 0


def test_many_short_sequences() -> None:
    def short(sequences: int, T: int = 128, **fields: Any) -> bool:
        return clusters_of(call(1, T, B=sequences, N=sequences, **BOUNDED, **fields)).many_short

    assert [short(n) for n in (527, 528)] == [False, True]
    assert [short(528, T) for T in (128, 129)] == [True, False]
    for fields in ({"checkpoint_every": 64}, {"checkpoint_count": 1}, {"arrays": ("state_indices",)}):
        assert not short(528, **fields)


def test_portable_clusters() -> None:
    blackwell = Device("cuda", 0, "sm_100")
    sizes = [clusters_of(call(n, device=blackwell), multiprocessors=148).size for n in (30, 31, 74, 75)]
    assert sizes == [4, 2, 2, 1]
    assert clusters_of(call(1, K=64, V=64, device=blackwell), multiprocessors=148).size == 1
    assert clusters_of(call(1, device=Device("cuda", 0, "sm_120"))).size == 1


def test_a_slice_of_many_sequences_finishes_as_a_whole_call() -> None:
    assert [choice.finishes_as_whole(n, True, 132) for n in (527, 528)] == [False, True]
    assert not choice.finishes_as_whole(528, False, 132)


RECORDS = TensorSpec((2, 1, 8, 128), "float32")


@pytest.mark.parametrize(
    ("change", "mode"),
    [
        ({}, RecurrentMode.ONE_TOKEN),
        ({"T": 2}, RecurrentMode.CONTIGUOUS),
        ({"state_indices_ndim": 2}, RecurrentMode.CONTIGUOUS),
        ({"tensors": (*call(8, 1).tensors, ("record_update", RECORDS))}, RecurrentMode.CONTIGUOUS),
        ({"scalar_gate": True}, RecurrentMode.ONE_TOKEN_HEAD_GATE),
        ({"scalar_gate": True, "T": 2}, RecurrentMode.GENERAL),
        ({"packed": True}, RecurrentMode.GENERAL),
        ({"dtype": "float32"}, RecurrentMode.GENERAL),
        ({"B": 2**21 - 1}, RecurrentMode.ONE_TOKEN),
        ({"B": 2**21}, RecurrentMode.GENERAL),
    ],
)
def test_recurrent_kernels(change: dict[str, Any], mode: RecurrentMode) -> None:
    decode = dataclasses.replace(call(8, 1, state_indices_ndim=1), op="fused_recurrent_kda")
    assert chosen(dataclasses.replace(decode, **change)).mode == mode


def test_hoppers_stage() -> None:
    stage = dataclasses.replace(call(8), op="kda_recompute_w_u")
    assert chosen(stage).own_recompute
    for change in ({"K": 64}, {"V": 64}, {"device": Device("cuda", 0, "sm_100")}, {"op": "kda_chunk_intra"}):
        assert not chosen(dataclasses.replace(stage, **change)).own_recompute


def test_the_device_is_asked_only_where_it_decides() -> None:
    """Clusters mean loading a kernel."""
    asked: list[str] = []

    def at_once(cluster: int) -> int:
        asked.append(f"clusters of {cluster}")
        return 30

    def rate() -> float:
        asked.append("memory")
        return H200

    def ask(request: Request) -> list[str]:
        asked.clear()
        choose(request, Figures("sm_90a", 132, at_once, rate))
        return asked

    assert ask(call(8, **BOUNDED)) == [] and ask(call(18)) == []
    assert ask(call(18, **BOUNDED)) == ["memory"]
    assert "memory" not in ask(call(64, **BOUNDED)) and asked
    assert ask(call(64, disable_recompute=True, **TRAINING)) == []


# --- in words -----------------------------------------------------------------------------------------------------

ASSUMED = "; the device is assumed"
TEXTS: dict[str, tuple[Request, str]] = {
    "segments": (call(8, **BOUNDED), "segments: 8 heads (up to 17 on 132 multiprocessors), 8 segments"),
    "of a pack": (
        packed(8, N=1, **BOUNDED),
        "segments: 8 heads (up to 17 on 132 multiprocessors), up to 8 segments a sequence",
    ),
    "one segment": (call(8, 64, **BOUNDED), "segments: 8 heads (up to 17 on 132 multiprocessors), 1 segment"),
    "clusters": (
        call(64, **BOUNDED),
        "fused: 64 heads (segments: up to 17 on 132 multiprocessors), clusters of 2",
    ),
    "shared": (
        call(67, **BOUNDED),
        "fused: 67 heads (segments: up to 17 on 132 multiprocessors), clusters of 2, 66 at once",
    ),
    "prepared": (
        call(24, **BOUNDED),
        "fused: 24 heads (segments: up to 17 on 132 multiprocessors), clusters of 4, 6 more prepare",
    ),
    "short": (
        call(1, 64, B=600, N=600, **BOUNDED),
        "fused: 600 sequences of 1 head (segments: up to 17 on 132 multiprocessors), clusters of 2, 66 at once, "
        "many short sequences",
    ),
    "training": (
        call(4, **TRAINING),
        "segments: 4 heads (up to 17 on 132 multiprocessors), 14 segments; backward from the maps of segments",
    ),
    "saved operands": (
        call(64, disable_recompute=True, **TRAINING),
        "saving_forward: disable_recompute, 64 heads; backward from what the forward saves",
    ),
    "from JAX": (
        call(4, kind="jax", **TRAINING),
        "segments: 4 heads (up to 17 on 132 multiprocessors), 14 segments; backward in segments of 16 chunks",
    ),
    "whole": (
        call(64, **TRAINING),
        "fused: 64 heads (segments: up to 17 on 132 multiprocessors), clusters of 2; backward in one chain per head",
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_the_text_of_a_call_on_hardware_that_is_not_here(name: str) -> None:
    request, text = TEXTS[name]
    assert make_backend().ops["chunk_kda"].form(request) == text + ASSUMED  # type: ignore[misc]


def test_the_text_of_the_gated_delta_rule() -> None:
    text = make_backend().ops["chunk_gated_delta_rule"].form
    assert text is not None
    limit = "(segments: up to 22 on 132 multiprocessors)"
    assert text(gated_delta(64)) == f"gated_delta: 64 heads {limit}{ASSUMED}"
    assert text(gated_delta(8)) == f"gated_delta: 8 heads {limit}, 9 segments{ASSUMED}"
    assert text(gated_delta(8, T=1024)) == f"gated_delta: 8 heads {limit}, 1 segment{ASSUMED}"
    assert text(gated_delta(8, T=2048)) == f"gated_delta: 8 heads {limit}, 3 segments{ASSUMED}"
    pack = gated_delta(8, packed=True, arrays=("cu_seqlens",), T=4096)
    assert text(pack) == f"gated_delta: 8 heads {limit}, up to 5 segments a sequence{ASSUMED}"
    training = gated_delta(8, needs_grad=True)
    assert text(training) == f"gated_delta: 8 heads {limit}, 9 segments; backward in 5 segments{ASSUMED}"
    short = gated_delta(8, T=2048, needs_grad=True)
    assert text(short) == f"gated_delta: 8 heads {limit}, 3 segments; backward in one chain per head{ASSUMED}"
    more = gated_delta(17, needs_grad=True)
    assert text(more) == f"gated_delta: 17 heads {limit}, 4 segments; backward in one chain per head{ASSUMED}"
    beside = "gated_delta: 32 heads, records beside walks (64 of 132 multiprocessors walk)"
    assert text(gated_delta(32)) == beside + ASSUMED
    saving = gated_delta(32, needs_grad=True, disable_recompute=True)
    assert text(saving) == (
        f"gated_delta: disable_recompute, 32 heads; backward from what the forward saves{ASSUMED}"
    )


def test_the_text_of_a_slice() -> None:
    assert explain.form_of_slice(call(8, **BOUNDED)) == f"slices: 8 heads, segments of 16 chunks{ASSUMED}"
    many = packed(8, N=66, **BOUNDED)
    assert explain.form_of_slice(many) == (
        f"slices: 66 sequences of 8 heads (at least 4 items for each of 132 multiprocessors), results by a whole call"
        f"{ASSUMED}"
    )


def test_another_gpu_than_the_one_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its figures do not count."""
    monkeypatch.setattr(torch_launch, "architecture", lambda index: "sm_80")
    monkeypatch.setattr(torch_launch, "multiprocessors", lambda index: 108)
    assert "132 multiprocessors" in explain.form(call(8, **BOUNDED))
    monkeypatch.setattr(torch_launch, "architecture", lambda index: "sm_90")
    here = explain.form(call(4, **BOUNDED))
    assert here.startswith("segments: 4 heads (up to 14 on 108 multiprocessors)") and ASSUMED not in here


@pytest.mark.parametrize(("items", "slices"), [(1, 4), (33, 4), (34, 2), (264, 2), (265, 1), (8192, 1)])
def test_blocks_of_a_head_of_the_fused_decode_step(items: int, slices: int) -> None:
    """As many as find a multiprocessor each."""
    assert chosen(decoding(items)).split == Split(slices, 1, True)
    assert chosen(decoding(1, items)).split == Split(slices, 1, True)
    half = chosen(decoding(items, state_dtype="bfloat16")).split
    assert half == Split(min(slices, 2), 1, True)
    assert chosen(decoding(items, batch_invariant=True)).split == Split(1, 1, True)


@pytest.mark.parametrize(
    ("group", "N", "split"),
    [
        (2, 1, Split(4, 2, True)),
        (4, 1, Split(2, 4, True)),
        (4, 64, Split(1, 4, True)),
        (3, 1, Split(1, 1)),
        (16, 1, Split(1, 1)),
    ],
)
def test_value_heads_of_a_cluster_of_the_fused_decode_step(group: int, N: int, split: Split) -> None:
    assert chosen(decoding(2, N, group, scalar=True)).split == split


PLAIN = decoding(2)
GENERAL_CALLS: dict[str, Request] = {
    "tokens": dataclasses.replace(PLAIN, T=2),
    "a pack": dataclasses.replace(PLAIN, packed=True),
    "candidates": dataclasses.replace(PLAIN, state_indices_ndim=2),
    "no slots": dataclasses.replace(PLAIN, state_indices_ndim=0),
    "float16": dataclasses.replace(PLAIN, dtype="float16"),
    "head dim": dataclasses.replace(PLAIN, K=64, V=64),
    "float32 z": decoding(2, tensors={"z": TensorSpec((1, 1, 2, 128), "float32")}),
    "float32 gate": decoding(2, tensors={"g": TensorSpec((1, 1, 2, 128), "float32")}),
    "three taps": decoding(2, tensors={"conv_weight": TensorSpec((768, 3), "float32")}),
    "rows of windows": decoding(2, tensors={"conv_indices": TensorSpec((1,), "int32")}),
    "groups of one gate a channel": decoding(2, group=2),
}


@pytest.mark.parametrize("name", GENERAL_CALLS)
def test_the_fused_decode_step_for_every_call(name: str) -> None:
    assert chosen(PLAIN).mode == RecurrentMode.ONE_TOKEN
    found = chosen(GENERAL_CALLS[name])
    assert found.mode == RecurrentMode.GENERAL and found.split is not None and found.split.slices == 1


TOKENS_CALLS: dict[str, Any] = {
    "tokens": {"T": 2},
    "a pack": {"packed": True},
    "candidates by states": {"state_indices_ndim": 2},
    "rows for candidates": {"write_indices_ndim": 2},
    "candidates by records": {},
}


@pytest.mark.parametrize("name", TOKENS_CALLS)
def test_several_tokens_in_a_pool(name: str) -> None:
    """They are divided as one token is; where states do not stay in a pool, the kernel for every call serves them."""
    for request in (decoding(2), decoding(40, 2), decoding(16, 3, group=2, scalar=True), decoding(300)):
        several = dataclasses.replace(request, inplace_state=True, **TOKENS_CALLS[name])
        if "records" in name:
            several = with_arrays(several, record_update=(8, 4, 2, 128), record_indices=(1,))
        found = chosen(several)
        assert (found.mode, found.split) == (chosen(request).mode, chosen(request).split)
        assert "several tokens" in found.why
        for change in ({"inplace_state": False}, {"state_dtype": "float16"}, {"state_indices_ndim": 0}):
            assert chosen(dataclasses.replace(several, **change)).mode == RecurrentMode.GENERAL


@pytest.mark.parametrize(
    ("heads", "N", "at_once"),
    [
        (32, 12, 0),
        (32, 13, 8),
        (32, 32, 8),
        (24, 17, 11),
        (6, 66, 0),
        (6, 67, 44),
        (96, 32, 0),
        (128, 32, 2),
        (300, 4, 0),
    ],
)
def test_sequences_in_turn(heads: int, N: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are more heads than find room at once, and most places have a block of their own."""
    request = decoding(heads, N, inplace_state=True, packed=True)
    assert "in turn" not in chosen(request).why
    monkeypatch.setattr(choice, "USE_TURNS", True)
    for r in (request, dataclasses.replace(request, batch_invariant=True)):
        assert (f" {at_once} sequences at once, others in turn" in chosen(r).why) == (at_once > 0)
    for r in (
        decoding(heads, N),
        dataclasses.replace(request, state_dtype="bfloat16"),
        dataclasses.replace(request, device=Device("cuda", 0, "sm_100")),
        decoding(heads, N, 2, scalar=True, inplace_state=True, packed=True),
    ):
        assert "in turn" not in chosen(r).why


def test_the_fused_decode_step_without_clusters() -> None:
    for request in (decoding(2), decoding(2, group=2, scalar=True), decoding(2, T=2, inplace_state=True)):
        found = chosen(dataclasses.replace(request, device=Device("cuda", 0, "sm_80")))
        assert found.split == Split(1, 1)
        assert (found.mode == RecurrentMode.GENERAL) == (request.HV > request.H or request.T > 1)


# --- launches follow ----------------------------------------------------------------------------------------------


@pytest.fixture
def small_device(monkeypatch: pytest.MonkeyPatch, emulated: list[str]) -> Any:
    """An emulated GPU of 8 multiprocessors, where few heads suffice for each form; what it launched."""
    monkeypatch.setattr(torch_launch, "multiprocessors", lambda index: 8)
    REGISTRY.register(Plugin("chunk_kda"), NAME)
    yield emulated
    REGISTRY.reset()


@pytest.mark.first_cases(2)
@pytest.mark.parametrize(
    ("heads", "options", "training", "form", "kernels"),
    [
        (1, BOUNDED_MODEL, False, "segments", ["prepare", "output"]),
        (1, MODEL, False, "dataflow", ["prepare_units", "walk"]),
        (2, BOUNDED_MODEL, False, "fused", ["chunk_forward"]),
        (1, BOUNDED_MODEL | {"disable_recompute": True}, True, "saving_forward", ["prepare", "scan_outputs"]),
    ],
    ids=["segments", "dataflow", "fused", "saving_forward"],
)
def test_a_call_launches_the_kernels_of_its_form(
    small_device: list[str],
    heads: int,
    options: dict[str, Any],
    training: bool,
    form: str,
    kernels: list[str],
) -> None:
    """First calls and recognised ones, and what is recorded of them says so."""
    d = Draw()
    x = {name: d.normal(1, 20, heads, 128) for name in ("q", "k", "v")} | {"beta": d.normal(1, 20, heads)}
    x |= d.gate("random", 1, 20, heads, 128)
    if training:
        x["v"].requires_grad_()
    with kdacore.record_selections() as ran:
        for _ in range(3):
            small_device.clear()
            kdacore.chunk_kda(**x, **options, backend=NAME)
            assert [name.partition("-")[0] for name in small_device] == kernels
    assert [s.candidate(NAME).form.partition(":")[0] for s in ran] == [form] * 3
    explained = kdacore.explain("chunk_kda", **x, **options, backend=NAME)
    assert explained.candidate(NAME).form == ran[0].candidate(NAME).form
    assert torch.isfinite(x["v"]).all()
