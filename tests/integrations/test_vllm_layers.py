"""Steps of vLLM's layers computed by kdacore, compared with convolution, recurrence and norm in float64.

Arrays lie as in vLLM: columns of projections, windows and states in pages of one cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import fake_vllm
import pytest
import torch
from fake_vllm import BY_VLLM, Counts, close, packages, paged_pool, recurrence

import kdacore
from kdacore.integrations import fused_steps, vllm

OPS, CONTEXT = "vllm._custom_ops", fake_vllm.FORWARD_CONTEXT
QWEN = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
TAPS, K, BOUND, EPS = 4, 16, -5.0, 1e-5


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    name = "fused_gdn_decode_post_conv_mtp"
    sources = {**fake_vllm.layers(), OPS: fake_vllm.source(name, f"{OPS}.{name}")}
    with packages(tmp_path_factory.mktemp("decode"), sources) as found:
        yield found


class Layer(torch.nn.Module):
    """Weights of a layer, and its cache: windows ``[rows, L, D]`` and states, with NaN in row 0."""

    def __init__(self, H: int, HV: int, kda: bool, rows: int = 6, columns: int = TAPS - 1) -> None:
        super().__init__()
        torch.manual_seed(H + HV)
        self.H, self.HV, self.D, self.kda = H, HV, (2 * H + HV) * K, kda
        self.conv1d = torch.nn.Conv1d(self.D, self.D, TAPS, groups=self.D, bias=False)
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
        """Log decays of raw gates ``[T, HV, K]``, bounded where the layer has a bound, or ``[T, HV]``."""
        g = g.double() + self.dt_bias.double().view(g.shape[1:])
        rate = self.A_log.double().exp().view(-1, *[1] * (g.ndim - 2))
        bound = getattr(self, "gate_lower_bound", None)
        if bound is not None:
            return bound * (rate * g).sigmoid()
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


# --- Kimi-Linear and Kimi K3 ----------------------------------------------------------------------------------------

METHOD = "KimiGatedDeltaNetAttention._forward", "KimiK3DeltaAttention._forward"
KIMI_LINEAR = "vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn"
KIMI_K3 = "vllm.models.kimi_k3.nvidia.kda"


class Norm(torch.nn.Module):
    """vLLM's gated RMSNorm of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps, self.activation = torch.nn.Parameter(torch.rand(K) + 0.5), EPS, "sigmoid"

    def forward(self, x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return gated_norm(x.double(), g, self.weight, self.activation).to(x)


class KimiStep:
    """One step of a layer of one of Kimi's classes. Arrays are longer than the tokens of the step."""

    def __init__(self, modules: dict[str, Any], k3: bool, heads: int, bounded: bool = True) -> None:
        module, method = (KIMI_K3, METHOD[1]) if k3 else (KIMI_LINEAR, METHOD[0])
        self.context = modules[CONTEXT]
        owner = getattr(modules[module], method.partition(".")[0])
        self.layer: Any = Layer(heads, heads, True, rows=8)
        self.layer.__class__ = type("Kimi", (Layer, owner), {})
        self.layer.prefix, self.layer.o_norm = "model.layers.2.kda", Norm()
        self.layer.gate_lower_bound = BOUND if bounded else None
        if k3:
            self.layer.kda_decode_backend, self.layer.kda_prefill_backend = "fused", "flashkda"
        self.heads = heads

    def run(self, tokens: int, more: int = 2, **metadata: Any) -> Any:
        """Calls the method as vLLM does. ``more``: rows of the arrays behind the tokens."""
        T, H = tokens + more, self.heads
        self.x, self.g1 = self.layer.projected(T), torch.randn(1, T, H, K)
        self.g2 = torch.randn(T, H * K + 4)[:, : H * K].unflatten(-1, (H, K))
        self.beta = torch.randn(T, H + 4)[:, :H].unsqueeze(0)
        self.out = torch.full((1, T, H, K), 7.0)
        self.metadata = SimpleNamespace(**{
            "num_actual_tokens": tokens, "num_prefills": 0, "num_decodes": tokens, "num_spec_decodes": 0,
            "checkpoint": None, "has_initial_state": None, "non_spec_query_start_loc": None, **metadata,
        })  # fmt: skip
        self.context.current = SimpleNamespace(attn_metadata={self.layer.prefix: self.metadata})
        before = [pool.clone() for pool in self.layer.kv_cache]
        self.window, self.state = before[0].transpose(1, 2), before[1]
        with torch.no_grad():
            return self.layer._forward(
                mixed_qkv=self.x, g1=self.g1, g2=self.g2, beta=self.beta, core_attn_out=self.out
            )

    def check_sequence(self, here: slice, row: int, begun: bool = True) -> None:
        """The results of a sequence's tokens against the float64 recurrence."""
        layer = self.layer
        x, gate, beta = self.x[here], self.g1[0, here], self.beta[0, here]
        window = self.window[row, :, : TAPS - 1] if begun else torch.zeros(layer.D, TAPS - 1)
        state = self.state[row] if begun else torch.zeros_like(self.state[row])
        plain, after = layer.recurrence(layer.convolved(x, window.T), gate, beta, state)
        close(self.out[0, here], gated_norm(plain, self.g2[here], layer.o_norm.weight, "sigmoid"))
        close(layer.state[row], after)
        assert torch.equal(layer.conv_state[row], torch.cat([window, x.T], dim=1)[:, -(TAPS - 1) :])

    def check_left_alone(self, rows: list[int]) -> None:
        for pool, before in ((self.layer.state, self.state), (self.layer.conv_state, self.window)):
            assert pool[0].isnan().all() and torch.equal(pool[rows], before[rows])


ROWS = torch.tensor([3, 0, 1, 0, 0], dtype=torch.int32)


@pytest.mark.parametrize(("k3", "heads"), [(False, 2), (True, 6), (True, 24)])
def test_a_decode_step_of_kimi(modules: dict[str, Any], k3: bool, heads: int) -> None:
    """Convolution, recurrence and gated norm in one call, for any number of heads."""
    step, counts = KimiStep(modules, k3, heads, bounded=k3), Counts("kda_decode_step")
    with kdacore.record_selections() as ran:
        assert step.run(3, non_spec_state_indices_tensor=ROWS) is None
    assert [s.op for s in ran] == ["fused_decode_kda"] and (counts.served, counts.declined) == (1, 0)
    for n, row in enumerate(ROWS[:3].tolist()):
        if row:
            step.check_sequence(slice(n, n + 1), row)
        else:
            assert not step.out[0, n].any()
    assert (step.out[0, 3:] == 7.0).all()
    step.check_left_alone([2, 4, 5, 6, 7])


@pytest.mark.parametrize("k3", [False, True])
def test_a_step_of_kimi_with_prefills(modules: dict[str, Any], k3: bool) -> None:
    """Two prefills, of which one goes on, a decode among them, and padding; states never leave vLLM's pool."""
    step, counts = KimiStep(modules, k3, 2, bounded=k3), Counts("kda_prefill")
    offsets, begun = (0, 1, 70, 79, 79), (True, False, True, False)
    rows = torch.tensor([5, 2, 4, 0], dtype=torch.int32)
    with kdacore.record_selections() as ran:
        result = step.run(
            79,
            num_prefills=2,
            num_decodes=1,
            non_spec_query_start_loc=torch.tensor(offsets, dtype=torch.int32),
            non_spec_state_indices_tensor=rows,
            has_initial_state=torch.tensor(begun),
        )
    assert result is None and [s.op for s in ran] == ["chunk_kda"]
    assert (counts.served, counts.declined) == (1, 0)
    for n, row in enumerate(rows[:3].tolist()):
        step.check_sequence(slice(offsets[n], offsets[n + 1]), row, begun[n])
    step.check_left_alone([1, 3, 6, 7])


@pytest.mark.parametrize(
    ("metadata", "k3"),
    [
        ({"num_spec_decodes": 1}, False),
        ({"num_spec_decodes": 1}, True),
        ({"checkpoint": object()}, True),
        ({"num_decodes": 0}, False),
        (None, False),
    ],
    ids=["drafts", "drafts of K3", "checkpoints", "no requests", "no metadata"],
)
def test_other_steps_of_kimi_are_left_to_vllm(modules: dict[str, Any], metadata: Any, k3: bool) -> None:
    step, counts = KimiStep(modules, k3, 2), Counts("kda_decode_step")
    if metadata is None:
        step.layer.prefix = "model.layers.9"
        step.context.current = SimpleNamespace(attn_metadata=None)
        assert step.layer._forward(*torch.zeros(5, 1)) == BY_VLLM
    else:
        assert step.run(3, non_spec_state_indices_tensor=ROWS, **metadata) == BY_VLLM
        step.check_left_alone([1, 2, 3])
    assert (counts.served, counts.declined) == (0, 0)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_flashinfer_that_was_asked_for_is_left(modules: dict[str, Any], phase: str) -> None:
    step = KimiStep(modules, True, 2)
    setattr(step.layer, f"kda_{phase}_backend", "flashinfer")
    given = (
        {"num_prefills": 1, "non_spec_query_start_loc": torch.tensor([0, 3])} if phase == "prefill" else {}
    )
    assert step.run(3, non_spec_state_indices_tensor=ROWS[:1], **given) == BY_VLLM


def test_a_gate_of_the_norm_without_its_weight_is_declined(modules: dict[str, Any]) -> None:
    step, counts = KimiStep(modules, False, 2), Counts("kda_decode_step")
    step.layer.o_norm.weight = None
    assert step.run(3, non_spec_state_indices_tensor=ROWS) == BY_VLLM
    assert counts.declined == 1 and "norm_weight" in counts.reason
    step.check_left_alone([1, 2, 3])


def test_a_prefill_that_is_declined_is_not_convolved(modules: dict[str, Any]) -> None:
    step, counts = KimiStep(modules, False, 2), Counts("kda_prefill")
    step.layer.A_log = torch.nn.Parameter(torch.rand(3))
    given = {"non_spec_query_start_loc": torch.tensor([0, 3], dtype=torch.int32), "num_prefills": 1}
    begun = torch.tensor([True])
    assert step.run(3, has_initial_state=begun, non_spec_state_indices_tensor=ROWS[:1], **given) == BY_VLLM
    assert counts.declined == 1 and "A_log" in counts.reason
    step.check_left_alone([1, 2, 3])


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
    reason = fused_steps.why_left(selection, (), {})
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


def qwen_prefill(
    modules: dict[str, Any], layer: Any, decodes: int = 0, backend: str = "triton", **metadata: Any
) -> Any:
    """A step of the layer with decodes of rows 5 and 3 and prefills of 69 and 9 tokens, of which the second goes on;
    the arrays and the result."""
    layer.__class__ = type("Qwen", (Layer, modules[QWEN].QwenGatedDeltaNetAttention), {})
    layer.prefix, layer.gdn_prefill_backend = "model.layers.2.gdn", backend
    rows = torch.tensor([*(5, 3)[:decodes], 2, 4, 0], dtype=torch.int32)
    lengths = torch.tensor([0, 69, 9, 0], dtype=torch.int32)
    ours, begun = lengths.cumsum(0, dtype=torch.int32), torch.tensor([False, True, False])
    offsets = torch.cat([torch.arange(decodes, dtype=torch.int32), ours + decodes])
    m = SimpleNamespace(**{
        "num_actual_tokens": 78 + decodes, "num_prefills": 2, "num_decodes": decodes, "num_spec_decodes": 0,
        "has_initial_state": torch.cat([torch.ones(decodes, dtype=torch.bool), begun]), "checkpoint": None,
        "non_spec_query_start_loc": offsets, "non_spec_state_indices_tensor": rows,
        "prefill_has_initial_state": begun, "prefill_query_start_loc": ours,
        "prefill_state_indices": rows[decodes:], **metadata,
    })  # fmt: skip
    modules[CONTEXT].current = SimpleNamespace(attn_metadata={layer.prefix: m})
    T = 80 + decodes
    given = {
        "mixed_qkv": layer.projected(T),
        "b": torch.randn(T, layer.HV),
        "a": torch.randn(T, layer.HV),
        "core_attn_out": torch.full((T, layer.HV, K), 7.0),
    }
    with torch.no_grad():
        return given, layer._forward_core(**given)


@pytest.mark.parametrize("decodes", [0, 2])
def test_qwen_with_prefills(modules: dict[str, Any], decodes: int) -> None:
    """Gate, beta and norms are computed in the calls; states never leave vLLM's pool."""
    layer, both = (
        Layer(2, 4, False),
        [Counts("fused_recurrent_gated_delta_rule_packed_decode"), Counts("gdn_prefill")],
    )
    window, state = layer.conv_state.clone(), layer.state.clone()
    with kdacore.record_selections() as ran:
        step, result = qwen_prefill(modules, layer, decodes)
    first = ["fused_recurrent_gated_delta_rule"] if decodes else []
    assert result is None and [s.op for s in ran] == [*first, "chunk_gated_delta_rule"]
    assert [(c.served, c.declined) for c in both] == [(len(first), 0), (1, 0)]
    sequences = [(slice(n, n + 1), row, True) for n, row in enumerate((5, 3)[:decodes])]
    sequences += [(slice(decodes, decodes + 69), 2, False), (slice(decodes + 69, decodes + 78), 4, True)]
    for here, row, begun in sequences:
        before = window[row].T if begun else torch.zeros(TAPS - 1, layer.D)
        x, start = step["mixed_qkv"][here], state[row] if begun else torch.zeros_like(state[row])
        want, after = layer.recurrence(layer.convolved(x, before), step["a"][here], step["b"][here], start)
        close(step["core_attn_out"][here], want)
        close(layer.state[row], after)
        assert torch.equal(layer.conv_state[row], torch.cat([before, x])[-(TAPS - 1) :].T)
    assert (step["core_attn_out"][decodes + 78 :] == 7.0).all() and layer.state[0].isnan().all()
    left = [1] if decodes else [1, 3, 5]
    assert torch.equal(layer.state[left], state[left])


@pytest.mark.parametrize(
    "changed",
    [{"num_prefills": 0}, {"num_spec_decodes": 1}, {"checkpoint": object()}, {"backend": "flashinfer"}],
    ids=["no prefills", "drafts", "checkpoints", "FlashInfer"],
)
def test_other_prefills_of_qwen_are_left_to_vllm(modules: dict[str, Any], changed: dict[str, Any]) -> None:
    layer, counts = Layer(2, 4, False), Counts("gdn_prefill")
    before = layer.state.clone()
    assert qwen_prefill(modules, layer, **changed)[1] == BY_VLLM
    assert (counts.served, counts.declined) == (0, 0) and torch.equal(layer.state[1:], before[1:])


def test_a_run_of_qwen_without_metadata_is_left_to_vllm(modules: dict[str, Any]) -> None:
    layer: Any = Layer(2, 4, False)
    layer.__class__ = type("Qwen", (Layer, modules[QWEN].QwenGatedDeltaNetAttention), {})
    modules[CONTEXT].current = SimpleNamespace(attn_metadata=None)
    assert layer._forward_core(*torch.zeros(4, 1)) == BY_VLLM


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
        assert modules[OPS].fused_gdn_decode_post_conv_mtp(*range(12)) == BY_VLLM
    finally:
        vllm.activate()
    assert owner._forward_core_decode_non_spec.__wrapped__ is hooked.__wrapped__


@pytest.mark.parametrize(
    ("version", "source", "said"),
    [
        ("0.33.1", "", r"_forward to vLLM: vLLM 0\.33\.1 has no such function"),
        (
            "0.34.0",
            "class KimiGatedDeltaNetAttention:\n    def _forward(self): ...\n",
            r"0\.33\.\*, and this is 0\.34\.0",
        ),
    ],
)
def test_another_vllm_starts_with_a_warning(
    version: str, source: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function that it lacks, or a layer whose attributes may be others, is left to it."""
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    module = ModuleType(KIMI_LINEAR)
    exec(source, module.__dict__)
    before = dict(module.__dict__)
    with pytest.warns(RuntimeWarning, match=said):
        vllm._replace(module)
    assert module.__dict__ == before
    (hook,) = [h for h in vllm.status() if h.function == "kda_prefill"]
    assert "vLLM" in hook.reason
