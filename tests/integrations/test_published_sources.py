"""The translations have the signatures that the published engines have. Where wheels lie in a folder that
``--engine-wheels`` names, what is committed of them is compared with them."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from published_sources import FACTS, read

from kdacore.integrations import (
    sglang,
    sglang_decode_steps,
    sglang_tracked_states,
    vllm,
    vllm_layers,
    vllm_pools,
)

PUBLISHED: dict[str, Any] = json.loads(FACTS.read_text())
KINDS = {
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "positional",
    inspect.Parameter.KEYWORD_ONLY: "keyword",
}


def signature(function: Any) -> list[list[str]]:
    """As :mod:`published_sources` writes it."""
    found = []
    for p in inspect.signature(function).parameters.values():
        default = "" if p.default is p.empty else repr(p.default)
        found.append([KINDS[p.kind], p.name, default])
    return found


def published(engine: str, function: str) -> list[list[str]]:
    """A function's parameters, without what takes any other keyword."""
    (found,) = [rows for name, rows in PUBLISHED[engine]["functions"].items() if name.endswith(function)]
    return [row for row in found if row[0] != "others"]


def names_and_kinds(rows: list[list[str]]) -> list[list[str]]:
    return [row[:2] for row in rows]


VLLM = {
    "flashkda_prefill": "kimi_k3/nvidia/kda.py::_flashkda_prefill",
    "chunk_kda_with_fused_gate": "kimi_k3/nvidia/ops/third_party/kda/chunk.py::chunk_kda_with_fused_gate",
    "fused_recurrent_kda": "kimi_k3/nvidia/ops/third_party/kda/fused_recurrent.py::fused_recurrent_kda",
    "fused_recurrent_kda_packed_decode": "fused_recurrent_kda_packed_decode",
    "glm_chunk_kda_with_fused_gate": "glm5next/nvidia/ops/third_party/kda/kernels.py::chunk_kda_with_fused_gate",
    "glm_fused_recurrent_kda": "glm5next/nvidia/ops/third_party/kda/kernels.py::fused_recurrent_kda",
    "chunk_gated_delta_rule": "ops/chunk.py::chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule": "ops/fused_recurrent.py::fused_recurrent_gated_delta_rule",
    "fused_recurrent_gated_delta_rule_packed_decode": "fused_recurrent_gated_delta_rule_packed_decode",
    "ling_chunk_kda": "linear_attention/ops/kda.py::chunk_kda",
    "ling_fused_recurrent_kda": "linear_attention/ops/kda.py::fused_recurrent_kda",
    "ling_fused_recurrent_kda_fwd": "linear_attention/ops/kda.py::fused_recurrent_kda_fwd",
    "fused_gdn_decode_post_conv_mtp": "_custom_ops.py::fused_gdn_decode_post_conv_mtp",
    "fused_sigmoid_gating_delta_rule_update": "fused_sigmoid_gating_delta_rule_update",
}
OTHER_DEFAULTS = ("glm_fused_recurrent_kda", "fused_gdn_decode_post_conv_mtp")
"""vLLM declares None as the default of an argument that it cannot do without, or writes a number as a power."""
TAKE_ANY_KEYWORD = ("ling_chunk_kda", "ling_fused_recurrent_kda")
"""What these take by ``**kwargs`` has a name in ours, behind the others."""
TRANSLATORS = {
    t.__name__: t for functions in vllm.REPLACED.values() for several in functions.values() for t in several
}
OF_METHODS = {"gdn_decode_step", "gdn_prefill", "kda_decode_step", "kda_prefill"}
"""Translations of what hooks of methods gather, which are compared below."""


@pytest.mark.parametrize("name", VLLM)
def test_vllm(name: str) -> None:
    ours, theirs = signature(TRANSLATORS[name]), published("vllm", VLLM[name])
    if name in TAKE_ANY_KEYWORD:
        ours = ours[: len(theirs)]
    assert ours[1:] == theirs[1:] or (
        name in OTHER_DEFAULTS and names_and_kinds(ours) == names_and_kinds(theirs)
    )


def test_every_translation_for_vllm_is_compared() -> None:
    assert set(TRANSLATORS) == {*VLLM, *OF_METHODS}


@pytest.mark.parametrize("file", PUBLISHED["vllm"]["imports"])
def test_vllm_looks_functions_up_where_they_are_replaced(file: str) -> None:
    module = file.removesuffix(".py").replace("/", ".")
    imported = {name: full.rpartition(".")[2] for name, full in PUBLISHED["vllm"]["imports"][file].items()}
    functions = {name: t for name, (t, *_) in vllm.REPLACED[module].items() if "." not in name}
    assert {name: VLLM[t.__name__].rpartition("::")[2] for name, t in functions.items()} == imported


def test_vllm_has_the_arrays_of_layers_that_hooks_read() -> None:
    qwen = "QwenGatedDeltaNetAttention._forward_core_decode_non_spec"
    (module,) = [name for name, functions in vllm.REPLACED.items() if qwen in functions]
    file = f"{module.replace('.', '/')}.py"
    hook = vllm_layers.with_arrays_of_layer(None, lambda *args: None)  # type: ignore[arg-type]
    del hook.__wrapped__  # type: ignore[attr-defined]
    ours = signature(hook)
    assert names_and_kinds(ours)[1:] == names_and_kinds(published("vllm", qwen))
    read = PUBLISHED["vllm"]["attributes"]
    assert set(read[f"{file}::{qwen}"]) >= {
        "attn_metadata.num_actual_tokens",
        "attn_metadata.non_spec_state_indices_tensor",
        *(
            f"self.{name}"
            for name in ("A_log", "activation", "conv1d.bias", "conv1d.weight", "dt_bias", "kv_cache")
        ),
    }


def test_vllm_has_what_the_prefills_of_qwen_read() -> None:
    method = "QwenGatedDeltaNetAttention._forward_core"
    theirs = names_and_kinds(published("vllm", f"::{method}"))
    assert theirs == [["positional", name] for name in ("mixed_qkv", "b", "a", "core_attn_out")]
    (read,) = [names for file, names in PUBLISHED["vllm"]["attributes"].items() if file.endswith(method)]
    assert set(read) >= {
        *(f"self.{name}" for name in ("A_log", "activation", "conv1d.bias", "conv1d.weight", "dt_bias")),
        *(f"self.{name}" for name in ("kv_cache", "prefix")),
        *(f"attn_metadata.{name}" for name in ("checkpoint", "num_actual_tokens", "num_decodes")),
        *(f"attn_metadata.{name}" for name in ("num_prefills", "num_spec_decodes", "has_initial_state")),
        *(f"attn_metadata.prefill_{name}" for name in ("has_initial_state", "query_start_loc")),
        *(f"attn_metadata.{name}" for name in ("prefill_state_indices", "non_spec_query_start_loc")),
        "attn_metadata.non_spec_state_indices_tensor",
    }


KIMI = [
    ("vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn", "KimiGatedDeltaNetAttention._forward"),
    ("vllm.models.kimi_k3.nvidia.kda", "KimiK3DeltaAttention._forward"),
]
READ_OF_KIMI = {
    *(f"self.{name}" for name in ("A_log", "conv1d.bias", "conv1d.weight", "dt_bias", "gate_lower_bound")),
    *(f"self.{name}" for name in ("kv_cache", "o_norm", "prefix")),
    *(f"m.{name}" for name in ("has_initial_state", "non_spec_query_start_loc", "num_actual_tokens")),
    *(
        f"m.{name}"
        for name in ("non_spec_state_indices_tensor", "num_decodes", "num_prefills", "num_spec_decodes")
    ),
}


@pytest.mark.parametrize(("module", "method"), KIMI)
def test_vllm_has_what_the_steps_of_kimi_read(module: str, method: str) -> None:
    assert method in vllm.REPLACED[module]
    theirs = names_and_kinds(published("vllm", method))
    names = ("mixed_qkv", "g1", "g2", "beta", "core_attn_out")
    assert theirs == [["positional", name] for name in names]
    (read,) = [names for file, names in PUBLISHED["vllm"]["attributes"].items() if file.endswith(method)]
    assert set(read) >= READ_OF_KIMI
    if "K3" in method:
        assert set(read) >= {"m.checkpoint", "self.kda_decode_backend", "self.kda_prefill_backend"}
    convolution = {name for _, name, _ in published("vllm", "::causal_conv1d_fn")}
    assert convolution >= {"activation", "conv_states", "has_initial_state", "cache_indices", "metadata"}
    functions = PUBLISHED["vllm"]["functions"]
    assert functions["vllm/forward_context.py::get_forward_context"] == []
    assert len(functions["vllm/compilation/breakable_cudagraph.py::eager_break_during_capture"]) == 1
    assert "vllm/forward_context.py::ForwardContext.attn_metadata" in PUBLISHED["vllm"]["constants"]


@pytest.mark.parametrize("name", sglang.METHODS)
@pytest.mark.parametrize("kernel", sglang.TRANSLATIONS)
def test_sglang(kernel: str, name: str) -> None:
    """A prefix: what a method takes by ``**kwargs`` has a name in ours."""
    ours = signature(getattr(sglang.TRANSLATIONS[kernel], name))
    theirs = published("sglang", f"{kernel.rpartition('.')[2]}.{name}")
    assert ours[: len(theirs)] == theirs


@pytest.mark.parametrize("backend", sglang_tracked_states.OBSERVED.values())
def test_what_is_observed_of_sglang(backend: str) -> None:
    """That the metadata has its attributes is held where they are read from the wheel."""
    assert published("sglang", f"{backend}.forward_extend")[0] == ["positional", "layer", ""]
    track = names_and_kinds(published("sglang", "MambaAttnBackendBase._track_mamba_state_extend"))
    assert track[:4] == [
        ["positional", name] for name in ("forward_batch", "h", "ssm_states", "forward_metadata")
    ]


READ_OF_A_STEP = {
    *(f"layer.{name}" for name in ("A_log", "bias", "conv_weights", "dt_bias", "layer_id")),
    *("layer_cache.conv", "layer_cache.replayssm_d", "layer_cache.temporal"),
    *("self.forward_metadata.mamba_cache_indices", "self.req_to_token_pool.mamba2_layer_cache"),
    "self.kernel_dispatcher.supports_packed_decode",
}


@pytest.mark.parametrize(
    ("module", "more"),
    [
        (
            "kda_backend",
            {
                *("layer.lower_bound", "layer._k3_fused_decode_args", "layer._k3_onorm_gate"),
                *("layer._k3_onorm_consumed", "layer._k3_deferred_f_b"),
            },
        ),
        ("gdn_backend", {"layer.activation"}),
    ],
)
def test_sglang_has_what_the_hooks_of_decode_steps_read(module: str, more: set[str]) -> None:
    backend, _, hook = sglang_decode_steps._HOOKS[f"sglang.srt.layers.attention.linear.{module}"]
    method = f"{backend}.forward_decode"
    replaced = hook(None, lambda *args: None)  # type: ignore[arg-type]
    del replaced.__wrapped__  # type: ignore[attr-defined]
    ours = [p.name for p in inspect.signature(replaced).parameters.values()]
    theirs = [name for _, name, _ in published("sglang", method)]
    assert ours == ["self", *theirs, "kwargs"]
    (read,) = [names for file, names in PUBLISHED["sglang"]["attributes"].items() if file.endswith(method)]
    assert set(read) >= READ_OF_A_STEP | more
    track = published("sglang", "MambaAttnBackendBase._track_mamba_state_decode")
    names = ["forward_batch", "conv_states", "ssm_states", "cache_indices", "layer_id"]
    assert names_and_kinds(track) == [["positional", name] for name in names]


def test_constants() -> None:
    constants = {**PUBLISHED["vllm"]["constants"], **PUBLISHED["sglang"]["constants"]}
    named = {name.rpartition("::")[2]: value for name, value in constants.items()}
    assert named["NULL_BLOCK_ID"] == str(vllm_pools.NULL_BLOCK)
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for group in ("DEFAULT_PLUGINS_GROUP", "GENERAL_PLUGINS_GROUP"):
        assert f'[project.entry-points."{named[group][1:-1]}"]' in project


def test_the_published_wheels(pytestconfig: pytest.Config) -> None:
    folder = pytestconfig.getoption("--engine-wheels", default=None)
    if folder is None:
        pytest.skip("needs the wheels of the engines: --engine-wheels=FOLDER")
    wheels = list(Path(folder).glob("*.whl"))
    assert {wheel.name.split("-")[0] for wheel in wheels} == set(PUBLISHED)
    for wheel in wheels:
        assert read(wheel) == PUBLISHED[wheel.name.split("-")[0]]
