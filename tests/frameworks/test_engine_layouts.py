"""Decode steps as vLLM 0.33 and SGLang 0.5.23 make them: the strides, dtypes and counts of their own arrays.

Each call is the fused op on views of memory that is laid out like an engine's, at the head dims of its models. Results
are the oracle's, they lie in the engine's memory, nothing else there changes, and no pool is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kdacore
from kdacore.calls.requests import request_with
from kdacore.oracle.decode import oracle_decode
from kdacore.types import DecodeInputs

N, BLOCKS, TAPS, DRAFTS = 3, 17, 4, 3
T = 1 + DRAFTS
"""Tokens that a verification step tries for each sequence."""
BF16, F32, F16 = torch.bfloat16, torch.float32, torch.float16
KDA = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "safe_gate": True,
    "lower_bound": -5.0,
}
GDN = {
    name: KDA[name]
    for name in ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")
}


class Layer(NamedTuple):
    """Heads of one rank, and the dtype of the recurrent states."""

    op: str
    H: int
    HV: int
    K: int
    state: torch.dtype = F32
    weight: torch.dtype = F32
    """Of the convolution."""

    @property
    def channels(self) -> int:
        return (2 * self.H + self.HV) * self.K

    @property
    def options(self) -> dict[str, Any]:
        own = KDA if self.op.endswith("kda") else GDN
        return {**own, "state_v_first": True, "inplace_state": True, "output_final_state": True}


K3 = Layer("fused_decode_kda", 12, 12, 128)
"""Kimi K3 on eight GPUs; its convolution has float32 weights beside bfloat16 channels."""
QWEN = Layer("fused_decode_gated_delta_rule", 4, 8, 128, BF16, BF16)
"""Qwen3-Next on four, with bfloat16 states."""


class Step(NamedTuple):
    """A decode step."""

    layer: Layer
    arrays: dict[str, torch.Tensor]
    """Arguments of the op; ``out`` and the pools are views of ``memory``."""
    options: dict[str, Any]
    memory: dict[str, torch.Tensor]
    """What the engine allocated, by a name, as bytes."""
    written: tuple[str, ...]
    """Arguments that the call writes."""


class Draw:
    """Random numbers, the same on each device."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.rng = torch.Generator().manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.randn(shape, generator=self.rng).to(dtype).to(self.device)

    def projected(self, tokens: int, *sizes: int, dtype: torch.dtype = BF16) -> tuple[torch.Tensor, ...]:
        """Columns of one projection's output, each a view with the row stride of all."""
        return self.normal(tokens, sum(sizes), dtype=dtype).split(sizes, dim=-1)

    def ints(self, *values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


def parameters(d: Draw, layer: Layer) -> dict[str, torch.Tensor]:
    """Weights as the engines hold them: a convolution's is ``[D, 1, w]``, and KDA's bias of the gate is flat."""
    kda = layer.op.endswith("kda")
    bias = layer.HV * layer.K if kda else layer.HV
    return {
        "conv_weight": d.normal(layer.channels, 1, TAPS, dtype=layer.weight).squeeze(1),
        "A_log": torch.linspace(0, 2, layer.HV, device=d.device),
        "dt_bias": d.normal(bias, dtype=F32 if kda else BF16),
        "norm_weight": 1 + 0.1 * d.normal(layer.K, dtype=F32),
    }


def tokens(d: Draw, layer: Layer, count: int) -> dict[str, torch.Tensor]:
    """What a step computes of its ``count`` tokens, with the views that the models take of their projections."""
    HV, K = layer.HV, layer.K
    if layer.op.endswith(
        "kda"
    ):  # q, k, v, the norm's gate, the gate's low rank, beta and padding: one product
        x, z, _, beta, _ = d.projected(count, layer.channels, HV * K, K, HV, 4)
        g = d.normal(count, HV * K).view(count, HV, K)
    else:
        x, z = d.projected(count, layer.channels, HV * K)
        beta, g = d.projected(count, HV, HV)
    return {"x": x, "z": z.unflatten(-1, (HV, K)), "beta": beta, "g": g}


def one_token_each(x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: a.unsqueeze(1) for name, a in x.items()}


def packed(x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: a.unsqueeze(0) for name, a in x.items()}


# --- vLLM: a page of the cache holds a layer's convolution window and its state ---------------------------------------


def vllm_pages(
    d: Draw, layer: Layer, columns: int, rows: list[int]
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """``conv_state`` and ``initial_state`` as views of pages, two layers in turn, NaN but in ``rows``."""
    HV, K, D = layer.HV, layer.K, layer.channels
    window = columns * D * BF16.itemsize
    page = -(-(window + HV * K * K * layer.state.itemsize) // 4096) * 4096
    raw = torch.full((BLOCKS * 2 * page,), 0xFF, dtype=torch.uint8, device=d.device)

    def view(dtype: torch.dtype, offset: int, *shape: int) -> torch.Tensor:
        whole, size = raw.view(dtype), dtype.itemsize
        tails = [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]
        return whole.as_strided((BLOCKS, *shape), (2 * page // size, *tails), (page + offset) // size)

    conv, state = view(BF16, 0, columns, D), view(layer.state, window, HV, K, K)
    conv[rows] = d.normal(len(rows), columns, D)
    state[rows] = d.normal(len(rows), HV, K, K, dtype=layer.state)
    return {"conv_state": conv.transpose(-1, -2), "initial_state": state}, raw


def vllm_step(d: Draw, layer: Layer) -> Step:
    """One token each, in a graph for more sequences than there are: row 0 is nobody's."""
    table = torch.zeros(N, 7, dtype=torch.int32, device=d.device)
    table[:, 0] = d.ints(5, 0, 9)
    pools, raw = vllm_pages(d, layer, TAPS - 1, [5, 9])
    out = torch.full((1, N, layer.HV, layer.K), 7, dtype=BF16, device=d.device)
    arrays = {**one_token_each(tokens(d, layer, N)), **parameters(d, layer), **pools}
    arrays |= {"state_indices": table[:, 0], "out": out.view(N, 1, layer.HV, layer.K)}
    memory = {"cache": raw, "out": out}
    return Step(
        layer, arrays, {**layer.options, "null_index": 0}, memory, ("conv_state", "initial_state", "out")
    )


def vllm_verification(d: Draw, layer: Layer) -> Step:
    """Drafts of several lengths in a padded pack. A sequence has a block for each token, and a long window in the
    first; it goes on from the block, and the column of the window, of the last token that was accepted."""
    table = torch.zeros(N, 7, dtype=torch.int32, device=d.device)
    table[0, :T], table[2, :T] = d.ints(5, 6, 7, 8), d.ints(9, 3, 2, 1)
    pools, raw = vllm_pages(d, layer, TAPS - 1 + DRAFTS, [5, 6, 9])
    x = packed(tokens(d, layer, N * T))
    out = torch.full((1, N * T, layer.HV, layer.K), 7, dtype=BF16, device=d.device)
    arrays = {**x, **parameters(d, layer), **pools, "out": out}
    arrays |= {
        "cu_seqlens": d.ints(0, 4, 7, 9),
        "state_indices": table[:, :T],
        "num_accepted_tokens": d.ints(2, 3, 1),
    }
    memory = {"cache": raw, "out": out}
    return Step(
        layer, arrays, {**layer.options, "null_index": 0}, memory, ("conv_state", "initial_state", "out")
    )


# --- SGLang: pools of all layers, windows and states of candidates beside them ----------------------------------------


def sglang_pools(
    d: Draw, layer: Layer, rows: list[int]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The second layer of a pool of two, NaN but in ``rows``: windows are ``[3, D]`` for KDA, ``[D, 3]`` else."""
    kda = layer.op.endswith("kda")
    shape = (TAPS - 1, layer.channels) if kda else (layer.channels, TAPS - 1)
    conv = torch.full((2, BLOCKS, *shape), torch.nan, dtype=BF16, device=d.device)
    state = torch.full((2, BLOCKS, layer.HV, layer.K, layer.K), torch.nan, dtype=layer.state, device=d.device)
    conv[1, rows] = d.normal(len(rows), *shape)
    state[1, rows] = d.normal(len(rows), layer.HV, layer.K, layer.K, dtype=layer.state)
    pools = {"conv_state": conv[1].transpose(-1, -2) if kda else conv[1], "initial_state": state[1]}
    return pools, {"conv": conv, "state": state}


def sglang_step(d: Draw, layer: Layer) -> Step:
    """One token each; negative rows are padding."""
    pools, memory = sglang_pools(d, layer, [4, 8])
    arrays = {**one_token_each(tokens(d, layer, N)), **parameters(d, layer), **pools}
    arrays |= {"state_indices": d.ints(8, 4, -1)}
    return Step(layer, arrays, layer.options, memory, ("conv_state", "initial_state"))


def sglang_verification(d: Draw, layer: Layer) -> Step:
    """The pools stay. For the gated delta rule the windows of a sequence share memory: each begins one token later."""
    pools, memory = sglang_pools(d, layer, [4, 8])
    HV, K, D = layer.HV, layer.K, layer.channels
    states = torch.full((2, BLOCKS, T, HV, K, K), torch.nan, dtype=layer.state, device=d.device)
    if layer.op.endswith("kda"):
        kept = torch.full((2, BLOCKS, T, TAPS - 1, D), torch.nan, dtype=BF16, device=d.device)
        windows = kept[1]
    else:
        kept = torch.full((2, BLOCKS, D, T + TAPS - 2), torch.nan, dtype=BF16, device=d.device)
        row, channel, column = kept[1].stride()
        windows = (
            kept[1].as_strided((BLOCKS, T, D, TAPS - 1), (row, column, channel, column)).transpose(-1, -2)
        )
    rows = d.ints(2, 0, 7)
    x = {name: a.unflatten(0, (N, T)) for name, a in tokens(d, layer, N * T).items()}
    arrays = {**x, **parameters(d, layer), **pools, "conv_windows": windows, "record_indices": rows}
    arrays |= {"state_indices": d.ints(8, 4, -1), "write_pool": states[1].flatten(0, 1)}
    arrays |= {"write_indices": rows[:, None] * T + torch.arange(T, dtype=torch.int32, device=d.device)}
    memory |= {"states": states, "windows": kept}
    return Step(layer, arrays, layer.options, memory, ("conv_windows", "write_pool"))


STEPS: dict[str, tuple[Callable[[Draw, Layer], Step], Layer]] = {
    "vllm k3": (vllm_step, K3),
    "vllm k3, bfloat16 states": (vllm_step, K3._replace(state=BF16)),
    "vllm k3, drafts": (vllm_verification, K3),
    "vllm qwen": (vllm_step, QWEN),
    "vllm qwen, float16 states": (vllm_step, QWEN._replace(state=F16)),
    "vllm qwen, drafts": (vllm_verification, QWEN),
    "sglang k3": (sglang_step, K3),
    "sglang k3, drafts": (sglang_verification, K3),
    "sglang qwen": (sglang_step, QWEN._replace(state=F32)),
    "sglang qwen, drafts": (sglang_verification, QWEN),
}
DEVICES = [
    ("cpu", "reference"),
    pytest.param("cuda", "cuda", marks=pytest.mark.gpu),
]


def bits(x: torch.Tensor) -> Any:
    return x.cpu().contiguous().view(torch.uint8).numpy()


def wide(x: torch.Tensor) -> Any:
    return x.detach().cpu().double().numpy()


class _NoPools(TorchDispatchMode):
    """Fails where an operation makes a tensor of the size of a pool."""

    def __init__(self, pools: list[torch.Tensor]) -> None:
        super().__init__()
        self.sizes, self.most = {x.numel() for x in pools}, max(x.nbytes for x in pools)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and (result.numel() in self.sizes or result.nbytes >= self.most):
            given = [a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)]
            assert result.untyped_storage().data_ptr() in given, f"{func} made a tensor {list(result.shape)}"
        return result


@contextmanager
def no_copy_of_a_pool(step: Step, device: str) -> Iterator[None]:
    """Neither pool is copied."""
    pools = [step.arrays[name] for name in ("conv_state", "initial_state")]
    if device == "cpu":
        with _NoPools(pools):
            yield
        return
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield
    assert torch.cuda.max_memory_allocated() - before < min(x.nbytes for x in pools)


def test_a_copy_of_a_pool_is_noticed() -> None:
    pool = torch.zeros(4, 6).transpose(0, 1)
    with _NoPools([pool]):
        pool[2:].add_(1)
        with pytest.raises(AssertionError, match="made a tensor"):
            pool.contiguous()


def expected(step: Step) -> dict[str, Any]:
    """What the oracle gives: ``o``, and the arrays that are written, float64."""
    arrays = {name: a.cpu() for name, a in step.arrays.items()}
    request = request_with(step.layer.op, {**arrays, **step.options})
    found = oracle_decode(request, DecodeInputs(**arrays))
    beside = [n for n in ("conv_state", "conv_windows") if n in arrays]
    return {
        "o": found.o,
        request.written_pool: found.final_state,
        **dict(zip(beside, found.written, strict=True)),
    }


def check(got: Any, want: Any, before: Any, bound: float) -> None:
    """What the oracle changed is within the bound; all else has its bits."""
    changed = ~((want == wide(before)) | (np.isnan(want) & np.isnan(wide(before))))
    assert changed.any()
    kept = np.broadcast_to(~changed[..., None], (*changed.shape, got.element_size()))
    shape = (*got.shape, got.element_size())
    assert np.array_equal(bits(got).reshape(shape)[kept], bits(before).reshape(shape)[kept])
    x, y = wide(got)[changed], want[changed]
    assert np.isfinite(x).all() and np.linalg.norm(x - y) <= bound * np.linalg.norm(y)


@pytest.mark.parametrize(("device", "backend"), DEVICES)
@pytest.mark.parametrize("name", STEPS)
def test_decode_step(name: str, device: str, backend: str) -> None:
    make, layer = STEPS[name]
    check_step(make(Draw(device), layer), device, backend)


@pytest.mark.parametrize("name", ["vllm qwen, drafts", "sglang k3, drafts", "sglang qwen, drafts"])
def test_candidates_of_torch_callers_on_xla(name: str) -> None:
    """Which hands JAX the rows that are named."""
    make, layer = STEPS[name]
    check_step(make(Draw("cpu"), layer._replace(H=layer.H // 4, HV=layer.HV // 4, K=16)), "cpu", "xla")


def check_step(step: Step, device: str, backend: str) -> None:
    layer, want = step.layer, expected(step)
    before = {n: x.clone() for n, x in step.arrays.items()}
    engine = {n: bits(x).copy() for n, x in step.memory.items()}
    call = getattr(kdacore, layer.op)
    with kdacore.record_selections() as ran, no_copy_of_a_pool(step, device):
        o, _ = call(**step.arrays, **step.options, backend=backend)
    assert ran[-1].backend == backend
    if "out" in step.arrays:
        assert o is step.arrays["out"]
        end = step.arrays["cu_seqlens"][-1] if "cu_seqlens" in step.arrays else N
        rows = o.flatten(0, 1)[end:]
        assert (rows == 7).all()  # no sequence's
        rows.zero_()
    got = wide(o)
    assert np.linalg.norm(got - want["o"]) <= 4.5e-3 * np.linalg.norm(want["o"])
    for argument in (n for n in step.written if n != "out"):
        check(step.arrays[argument], want[argument], before[argument], 3.3e-3)
    for n, x in step.arrays.items():
        if n not in step.written:
            assert np.array_equal(bits(x), bits(before[n])), n
    restore(step, before)
    assert all(np.array_equal(bits(step.memory[n]), was) for n, was in engine.items() if n != "out")


def restore(step: Step, before: dict[str, torch.Tensor]) -> None:
    """Put back what the call wrote: the rest of the engine's memory must have its bits."""
    for name in step.written:
        x = step.arrays[name]
        for t in range(x.shape[1]) if name == "conv_windows" else [slice(None)]:
            x[:, t].copy_(before[name][:, t])
