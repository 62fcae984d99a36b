"""vLLM's fused decode steps computed by kdacore, compared with convolution, recurrence and norm in float64.

Arrays lie as in vLLM: columns of projections, windows and states in pages of one cache, weights of the convolution
twice, as the layer holds them for prefill and for decoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import fake_vllm
import pytest
import torch
from fake_vllm import BY_VLLM, Counts, close, packages, paged_pool, recurrence

import kdacore
from kdacore.integrations import vllm, vllm_decode_arguments, vllm_layers

OPS, CONTEXT = "vllm._custom_ops", "vllm.forward_context"
QWEN = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
TAPS, K, BOUND, EPS = 4, 16, -5.0, 1e-5


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    names = ("fused_kda_decode", "fused_gdn_decode_post_conv_mtp")
    sources = {
        **fake_vllm.layers(),
        OPS: "\n".join(fake_vllm.source(name, f"{OPS}.{name}") for name in names),
        CONTEXT: (
            "current = None\n"
            "def is_forward_context_available():\n    return current is not None\n"
            "def get_forward_context():\n    assert current is not None\n    return current\n"
        ),
    }
    with packages(tmp_path_factory.mktemp("decode"), sources) as found:
        yield found


class Layer(torch.nn.Module):
    """Weights of a layer, and its cache: windows ``[rows, L, D]`` and states, with NaN in row 0."""

    def __init__(self, H: int, HV: int, kda: bool, rows: int = 6, columns: int = TAPS - 1) -> None:
        super().__init__()
        torch.manual_seed(H + HV)
        self.H, self.HV, self.D, self.kda = H, HV, (2 * H + HV) * K, kda
        self.conv1d = torch.nn.Conv1d(self.D, self.D, TAPS, groups=self.D, bias=False)
        if kda:
            by_projection = self.conv1d.weight.detach().view(3, H * K, TAPS)
            self.register_buffer("decode_conv1d_weight", by_projection.transpose(1, 2).contiguous())
        self.A_log = torch.nn.Parameter(torch.rand(HV))
        self.dt_bias = torch.nn.Parameter(torch.randn(HV * K if kda else HV))
        self.activation = "silu"
        window, self.state = paged_pool(rows, columns, self.D), paged_pool(rows, HV, K, K)
        self.kv_cache = (window, self.state)

    @property
    def conv_state(self) -> torch.Tensor:
        return self.kv_cache[0].transpose(1, 2)

    def projected(self, tokens: int) -> torch.Tensor:
        return torch.randn(tokens, self.D + 8)[:, : self.D]

    def decay(self, g: torch.Tensor) -> torch.Tensor:
        """Log decays of raw gates ``[T, HV, K]`` (bounded) or ``[T, HV]``."""
        g = g.double() + self.dt_bias.double().view(g.shape[1:])
        rate = self.A_log.double().exp()
        if self.kda:
            return BOUND * (rate[:, None] * g).sigmoid()
        return -rate * torch.nn.functional.softplus(g)

    def convolved(self, x: torch.Tensor, window: torch.Tensor) -> torch.Tensor:
        """``[T, D]`` after the convolution and SiLU; ``window`` ``[3, D]`` is what was before it."""
        rows = torch.cat([window, x]).double().T[None]
        return torch.nn.functional.silu(
            torch.nn.functional.conv1d(rows, self.conv1d.weight.double(), groups=self.D)[0].T
        )

    def recurrence(self, x: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor) -> Any:
        """``o`` and the state after the convolved channels of one sequence."""
        q, k, v = x.split([self.H * K, self.H * K, self.HV * K], dim=-1)
        heads = (q.unflatten(-1, (self.H, K)), k.unflatten(-1, (self.H, K)), v.unflatten(-1, (self.HV, K)))
        return recurrence(*heads, self.decay(g), beta.double().sigmoid(), state)


def gated_norm(o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, activation: str) -> torch.Tensor:
    normal = o / (o.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    return normal * (
        z.double().sigmoid() if activation == "sigmoid" else torch.nn.functional.silu(z.double())
    )


# --- Kimi K3 --------------------------------------------------------------------------------------------------------

ROWS = torch.tensor([3, 0, 1], dtype=torch.int32)


def kimi(modules: dict[str, Any], *layers: Layer) -> None:
    """Make these the layers of the forward pass."""
    others = {"model.layers.0.mlp": object(), "model.layers.1.attn": SimpleNamespace()}
    named = {f"model.layers.{i}.kda": layer for i, layer in enumerate(layers, 2)}
    modules[CONTEXT].current = SimpleNamespace(no_compile_layers={**others, **named})


def kimi_step(layer: Layer, **changed: Any) -> dict[str, Any]:
    B, H = len(ROWS), layer.H
    given = {
        "x": layer.projected(B),
        "weight": layer.decode_conv1d_weight,
        "bias": None,
        "conv_state": layer.conv_state,
        "raw_g": torch.randn(1, B, H, K),
        "raw_beta": torch.randn(B, H + 4)[:, :H].unsqueeze(0),
        "A_log": layer.A_log,
        "dt_bias": layer.dt_bias,
        "state_indices": ROWS,
        "state": layer.state,
        "out": torch.full((1, B, H, K), 7.0),
        "lower_bound": BOUND,
        "output_gate": torch.randn(B, H * K + 4)[:, : H * K].unflatten(-1, (H, K)),
        "norm_weight": torch.rand(K) + 0.5,
        "norm_eps": EPS,
    }
    return {**given, **changed}


@pytest.mark.parametrize("heads", [12, 24, 48, 96])
def test_kimi_k3(modules: dict[str, Any], heads: int) -> None:
    layer, other, counts = Layer(heads, heads, True), Layer(2, 2, True), Counts("fused_kda_decode")
    kimi(modules, other, layer)
    step = kimi_step(layer)
    window, state = layer.conv_state.clone(), layer.state.clone()
    with torch.no_grad(), kdacore.record_selections() as ran:
        o = modules[OPS].fused_kda_decode(**step)
    assert [s.op for s in ran] == ["fused_decode_kda"] and (counts.served, counts.declined) == (1, 0)
    assert o.data_ptr() == step["out"].data_ptr() and o.shape == (1, 3, heads, K)
    for n, row in enumerate(ROWS.tolist()):
        if row == 0:
            assert not o[0, n].any()
            continue
        here = slice(n, n + 1)
        x, gate, beta = step["x"][here], step["raw_g"][0, here], step["raw_beta"][0, here]
        plain, after = layer.recurrence(layer.convolved(x, window[row].T), gate, beta, state[row])
        close(o[0, here], gated_norm(plain, step["output_gate"][n], step["norm_weight"], "sigmoid"))
        close(layer.state[row], after)
        assert torch.equal(layer.conv_state[row], torch.cat([window[row, :, 1:], x.T], dim=1))
    for pool, before in ((layer.state, state), (layer.conv_state, window)):
        assert pool[0].isnan().all() and torch.equal(pool[[2, 4, 5]], before[[2, 4, 5]])


def test_kimi_k3_without_an_output(modules: dict[str, Any]) -> None:
    layer = Layer(12, 12, True)
    kimi(modules, layer)
    step = kimi_step(layer)
    pools = [x.clone() for x in layer.kv_cache]
    with torch.no_grad():
        want = modules[OPS].fused_kda_decode(**step).clone()
        for pool, before in zip(layer.kv_cache, pools, strict=True):
            pool.copy_(before)
        assert torch.equal(modules[OPS].fused_kda_decode(**{**step, "out": None}), want)


def test_weights_that_are_loaded_again(modules: dict[str, Any]) -> None:
    """The layer's parameter is read, as it is at the call, and no copy of it."""
    layer = Layer(12, 12, True)
    kimi(modules, layer)
    rows = vllm_layers.rows_of_weight(layer.decode_conv1d_weight)
    assert rows is not None and rows.shape == (layer.D, TAPS)
    assert rows.data_ptr() == layer.conv1d.weight.data_ptr()
    layer.conv1d.weight = torch.nn.Parameter(torch.zeros_like(layer.conv1d.weight))
    modules[CONTEXT].current = None  # known by now
    again = vllm_layers.rows_of_weight(layer.decode_conv1d_weight)
    assert again is not None and not again.any()


def test_a_weight_of_no_layer_is_declined(modules: dict[str, Any]) -> None:
    layer, counts = Layer(12, 12, True), Counts("fused_kda_decode")
    kimi(modules)
    before = layer.state.clone()
    assert modules[OPS].fused_kda_decode(**kimi_step(layer)) == BY_VLLM
    modules[CONTEXT].current = None  # outside a forward pass
    assert modules[OPS].fused_kda_decode(**kimi_step(layer)) == BY_VLLM
    assert (counts.served, counts.declined) == (0, 2) and "weight" in counts.reason
    assert torch.equal(layer.state[1:], before[1:])
    kimi(modules, layer)  # what was declined for the weight alone is no verdict on others
    with torch.no_grad():
        modules[OPS].fused_kda_decode(**kimi_step(layer))
    assert counts.served == 1


def test_a_gate_of_the_norm_without_its_weight_is_declined(modules: dict[str, Any]) -> None:
    layer, counts = Layer(12, 12, True), Counts("fused_kda_decode")
    kimi(modules, layer)
    assert modules[OPS].fused_kda_decode(**kimi_step(layer, norm_weight=None)) == BY_VLLM
    assert counts.declined == 1 and "norm_weight" in counts.reason


@pytest.mark.parametrize(
    ("backend", "device", "why", "left"),
    [
        ("cuda", "cuda", "fastest", False),
        ("triton", "cuda", "fastest", True),
        ("triton", "cuda", "preferred by the caller", False),
        ("reference", "cpu", "fastest", False),
    ],
)
def test_fused_steps_are_computed_by_the_cuda_backend_alone(
    backend: str, device: str, why: str, left: bool
) -> None:
    request = SimpleNamespace(device=torch.device(device))
    candidates = (SimpleNamespace(backend="cuda", reasons=("K=96",)),)
    selection: Any = SimpleNamespace(backend=backend, request=request, why=why, candidates=candidates)
    reason = vllm_decode_arguments.why_left(selection, (), {})
    assert bool(reason) == left and ("K=96" in reason) == left


# --- Qwen3-Next and Qwen3.5 -----------------------------------------------------------------------------------------


def qwen_step(
    modules: dict[str, Any], layer: Layer, tokens: int, **changed: Any
) -> tuple[dict[str, Any], Any]:
    """The arguments of the method of a layer of Qwen's class, which computes ``tokens`` of its rows; and its result."""
    made = type("Qwen", (Layer, modules[QWEN].QwenGatedDeltaNetAttention), {})
    layer.__class__ = made
    given = {
        "mixed_qkv": layer.projected(5),
        "b": torch.randn(5, layer.HV),
        "a": torch.randn(5, layer.HV),
        "core_attn_out": torch.full((5, layer.HV, K), 7.0),
        "attn_metadata": SimpleNamespace(
            num_actual_tokens=tokens,
            non_spec_state_indices_tensor=torch.tensor([3, 0, 1, 0, 0, 0], dtype=torch.int32),
        ),
    }
    given |= changed
    with torch.no_grad():
        return given, layer._forward_core_decode_non_spec(**given)


@pytest.mark.parametrize("dim_first", [False, True])
@pytest.mark.parametrize("columns", [TAPS - 1, TAPS + 1])
def test_qwen_up_to_the_norm(modules: dict[str, Any], dim_first: bool, columns: int) -> None:
    """Both layouts of the windows; longer rows where drafts are configured."""
    layer, counts = Layer(2, 4, False, columns=columns), Counts("gdn_decode_step")
    if dim_first:
        layer.kv_cache = (layer.conv_state.contiguous(), layer.state)
    windows = layer.kv_cache[0] if dim_first else layer.conv_state
    window, state = windows.clone(), layer.state.clone()
    with kdacore.record_selections() as ran:
        step, result = qwen_step(modules, layer, 3)
    assert [s.op for s in ran] == ["fused_decode_gated_delta_rule"] and result is None
    assert (counts.served, counts.declined) == (1, 0)
    o = step["core_attn_out"]
    for n, row in enumerate((3, 0, 1)):
        if row == 0:
            assert not o[n].any()
            continue
        x = step["mixed_qkv"][n : n + 1]
        convolved = layer.convolved(x, window[row, :, : TAPS - 1].T)
        want, after = layer.recurrence(convolved, step["a"][n : n + 1], step["b"][n : n + 1], state[row])
        close(o[n : n + 1], want)
        close(layer.state[row], after)
        assert torch.equal(windows[row, :, : TAPS - 1], torch.cat([window[row, :, 1 : TAPS - 1], x.T], dim=1))
    assert (o[3:] == 7.0).all() and layer.state[0].isnan().all()
    assert torch.equal(layer.state[[2, 4, 5]], state[[2, 4, 5]])


def test_qwen_with_another_activation_is_declined(modules: dict[str, Any]) -> None:
    layer, counts = Layer(2, 4, False), Counts("gdn_decode_step")
    layer.activation = "gelu"
    before = layer.state.clone()
    _, result = qwen_step(modules, layer, 3)
    assert result == BY_VLLM and counts.declined == 1 and "activation" in counts.reason
    assert torch.equal(layer.state[1:], before[1:])


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_drafted_tokens_behind_the_convolution(modules: dict[str, Any], activation: str) -> None:
    layer, counts = Layer(2, 4, False, rows=8), Counts("fused_gdn_decode_post_conv_mtp")
    before, weight = layer.state.clone(), torch.rand(K) + 0.5
    rows = torch.tensor([[1, 2, 3], [4, 5, 6], [0, 0, 0]], dtype=torch.int32)
    offsets, accepted = (
        torch.tensor([0, 3, 5, 6], dtype=torch.int32),
        torch.tensor([2, 1, 1], dtype=torch.int32),
    )
    x, z = layer.projected(7), torch.randn(7, 4, K)
    b, a = torch.randn(7, 8).chunk(2, dim=-1)
    given = {
        "mixed_qkv": x, "a": a, "b": b, "A_log": layer.A_log, "dt_bias": layer.dt_bias, "state_indices": rows,
        "cu_seqlens": offsets, "num_accepted_tokens": accepted, "state": layer.state, "output_gate": z,
        "norm_weight": weight, "scale": K**-0.5, "norm_eps": EPS, "output_gate_activation": activation,
    }  # fmt: skip
    out = torch.full((7, 4, K), 7.0)
    with torch.no_grad(), kdacore.record_selections() as ran:
        o = modules[OPS].fused_gdn_decode_post_conv_mtp(**given, out=out)
    assert [s.op for s in ran] == ["fused_decode_gated_delta_rule"] and (counts.served, counts.declined) == (
        1,
        0,
    )
    assert o.data_ptr() == out.data_ptr() and o.shape == out.shape
    for n, (start, T) in enumerate(((2, 3), (4, 2))):
        here = slice(int(offsets[n]), int(offsets[n + 1]))
        plain, _ = layer.recurrence(x[here], a[here], b[here], before[start])
        close(o[here], gated_norm(plain, z[here], weight, activation))
        for t in range(T):
            upto = slice(here.start, here.start + t + 1)
            close(layer.state[rows[n, t]], layer.recurrence(x[upto], a[upto], b[upto], before[start])[1])
    assert not o[5].any() and (o[6] == 7.0).all() and torch.equal(layer.state[7], before[7])


def test_methods_are_put_back(modules: dict[str, Any]) -> None:
    owner = modules[QWEN].QwenGatedDeltaNetAttention
    hooked = owner._forward_core_decode_non_spec
    vllm.deactivate()
    try:
        assert owner._forward_core_decode_non_spec is hooked.__wrapped__
        assert modules[OPS].fused_kda_decode(*range(10)) == BY_VLLM
    finally:
        vllm.activate()
    assert owner._forward_core_decode_non_spec.__wrapped__ is hooked.__wrapped__
