"""The states that SGLang's prefix cache tracks, of both its backends, against the recurrence."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_package
import torch
from torch import Tensor

import kdacore
from kdacore.integrations import sglang
from kdacore.integrations.sglang_tracked_states import OBSERVED

H, HV, K, V = 1, 2, 16, 16
LENGTHS = (130, 0, 64, 70)
KERNELS = {"GDNAttnBackend": sglang.GDN_KERNEL, "KDAAttnBackend": sglang.KDA_KERNEL}
OFFSETS = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
TRACKED = {
    # chunks, numbered through all sequences: the second of the first, the second of the last
    "track_ssm_h_src": torch.tensor([1, 5]),
    "track_ssm_h_dst": torch.tensor([6, 1]),
    "track_ssm_final_src": torch.tensor([2]),
    "track_ssm_final_dst": torch.tensor([7]),
}
UNALIGNED = ((6, 0, 64), (1, 3, 64))
"""A row, and the sequence and how many of its tokens have led to the state there."""


class Layer:
    """Inputs of one layer's prefill, and its pool."""

    def __init__(self, name: str, layer_id: int) -> None:
        torch.manual_seed(layer_id)
        T = int(OFFSETS[-1])
        self.name, self.layer_id = name, layer_id
        self.x = {"q": torch.randn(1, T, H, K), "k": torch.randn(1, T, H, K), "v": torch.randn(1, T, HV, V)}
        gate = (HV, K) if name == "KDAAttnBackend" else (HV,)
        self.x |= {"g": -torch.rand(1, T, *gate), "beta": torch.rand(1, T, HV)}
        self.pool = torch.randn(8, HV, V, K)
        self.before = self.pool.clone()

    def expected(self, row: int, n: int, tokens: int) -> tuple[Tensor, Tensor]:
        """``o`` and the state after the first tokens of sequence n, which starts from a row of the pool."""
        here = slice(int(OFFSETS[n]), int(OFFSETS[n]) + tokens)
        op = "fused_recurrent_kda" if self.name == "KDAAttnBackend" else "fused_recurrent_gated_delta_rule"
        o, state = getattr(kdacore, op)(
            **{name: a[:, here] for name, a in self.x.items()},
            initial_state=self.before[row, None],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            state_v_first=True,
        )
        return o[0], state[0]

    def run(self, backend: Any) -> tuple[Tensor, Any]:
        """Returns ``o`` and the request that kdacore served."""
        given: dict[str, Any] = {
            "ssm_states": self.pool,
            "query_start_loc": OFFSETS,
            "layer_id": self.layer_id,
        }
        if self.name == "KDAAttnBackend":
            given["return_intermediate_states"] = backend.forward_metadata.has_mamba_track_mask
        with kdacore.record_selections() as ran:
            o = backend.forward_extend(layer=self, forward_batch=None, **self.x, **given)
        assert len(ran) == 1
        return o, ran[0].request


@pytest.fixture(params=KERNELS)
def backend(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A backend that tracks two chunks and an end."""
    sglang_package.make(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    kernel = sglang_package.kernel(KERNELS[request.param])
    (module,) = [m for m, name in OBSERVED.items() if name == request.param]
    metadata = SimpleNamespace(
        mamba_cache_indices=torch.tensor([4, -1, 2, 3]),
        query_start_loc=OFFSETS,
        has_mamba_track_mask=True,
        **TRACKED,
    )
    yield getattr(importlib.import_module(module), request.param)(kernel, metadata)
    sglang_package.forget()


def assert_tracked(layer: Layer, o: Tensor) -> None:
    for row, n in ((4, 0), (2, 2), (3, 3)):
        want, after = layer.expected(row, n, LENGTHS[n])
        close(o[0, OFFSETS[n] : OFFSETS[n + 1]], want)
        close(layer.pool[row], after)
    for row, n, tokens in UNALIGNED:
        start = {0: 4, 3: 3}[n]
        close(layer.pool[row], layer.expected(start, n, tokens)[1])
    assert torch.equal(layer.pool[7], layer.pool[2])
    assert torch.equal(layer.pool[[0, 5]], layer.before[[0, 5]])


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


def test_states_go_to_their_slots(backend: Any) -> None:
    """In two passes of two layers."""
    for _ in range(2):
        tracked = []
        for i in range(2):
            layer = Layer(type(backend).__name__, i)
            o, request = layer.run(backend)
            assert request.checkpoint_count == 2 and not request.checkpoint_every
            assert_tracked(layer, o)
            tracked.append(backend.forward_metadata.kdacore_tracked)
        assert tracked[0].offsets is tracked[1].offsets, "computed once a pass"
        assert tracked[0].without_rows.kdacore_tracked is None, "no chain of former passes"


def test_other_arrays_are_seen_by_a_later_layer(backend: Any) -> None:
    name = type(backend).__name__
    backend.forward_metadata.track_ssm_h_src = torch.tensor([0, 4])
    layer = Layer(name, 0)
    layer.run(backend)
    close(layer.pool[6], layer.before[4])
    backend.forward_metadata.track_ssm_h_src = TRACKED["track_ssm_h_src"]
    layer = Layer(name, 1)
    assert_tracked(layer, layer.run(backend)[0])


def test_refilled_arrays_are_seen_by_the_first_layer(backend: Any) -> None:
    name = type(backend).__name__
    backend.forward_metadata.track_ssm_h_src = chunks = torch.tensor([0, 4])
    layer = Layer(name, 0)
    layer.run(backend)
    close(layer.pool[6], layer.before[4])
    chunks.copy_(TRACKED["track_ssm_h_src"])
    layer = Layer(name, 0)
    assert_tracked(layer, layer.run(backend)[0])


@pytest.mark.parametrize("mask", [False, True])
def test_nothing_is_written_where_nothing_is_read(backend: Any, mask: bool) -> None:
    backend.forward_metadata.has_mamba_track_mask = mask
    backend.forward_metadata.track_ssm_h_src = torch.empty(0, dtype=torch.int64)
    layer = Layer(type(backend).__name__, 0)
    _, request = layer.run(backend)
    assert not request.checkpoint_every and not request.checkpoint_count
    assert torch.equal(layer.pool[[0, 1, 5, 6]], layer.before[[0, 1, 5, 6]])
    assert torch.equal(layer.pool[7], layer.pool[2] if mask else layer.before[7])


@pytest.mark.parametrize("missing", ["track_ssm_h_src", "track_ssm_h_dst", "mamba_cache_indices"])
def test_metadata_of_another_release(backend: Any, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states are returned, as SGLang's kernels do."""
    kept = getattr(backend.forward_metadata, missing)
    seen = []
    original = backend.kernel.extend

    def extend(**given: Any) -> Any:
        delattr(backend.forward_metadata, missing)
        seen.append(original(**given))
        setattr(backend.forward_metadata, missing, kept)
        return seen[0]

    monkeypatch.setattr(backend.kernel, "extend", extend)
    layer = Layer(type(backend).__name__, 0)
    o, request = layer.run(backend)
    assert request.checkpoint_every == 64
    assert_tracked(layer, o)


def test_a_gathered_pool(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a copy are not rows of the pool."""
    original = backend.kernel.extend
    monkeypatch.setattr(
        backend.kernel,
        "extend",
        lambda cache_indices, **given: original(cache_indices=cache_indices.clone(), **given),
    )
    layer = Layer(type(backend).__name__, 0)
    o, request = layer.run(backend)
    assert request.checkpoint_every == 64
    assert_tracked(layer, o)


def test_the_backends_are_put_back(backend: Any) -> None:
    assert "observing" in type(backend).forward_extend.__code__.co_name
    sglang.deactivate()
    assert type(backend).forward_extend.__code__.co_name == "forward_extend"
    assert type(backend)._track_mamba_state_extend.__code__.co_name == "_track_mamba_state_extend"


def test_a_backend_that_is_not_as_expected_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sglang_package.make(tmp_path)
    module = "sglang.srt.layers.attention.linear.gdn_backend"
    (tmp_path / f"{module.replace('.', '/')}.py").write_text("class GDNAttnBackend:\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        sglang.activate()
        with pytest.warns(RuntimeWarning, match="it has no forward_decode"):
            backend = importlib.import_module(module).GDNAttnBackend
        assert not hasattr(backend, "forward_extend") and not hasattr(backend, "forward_decode")
    finally:
        sglang_package.forget()
