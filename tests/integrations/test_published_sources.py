"""The translations have the signatures that the published engines have. Where wheels lie in a folder that
``--engine-wheels`` names, what is committed of them is compared with them."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from published_sources import FACTS, read

from kdacore.integrations import sglang, sglang_tracked_states, vllm, vllm_layers, vllm_pools

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
    "fused_kda_decode": "_custom_ops.py::fused_kda_decode",
    "fused_gdn_decode_post_conv_mtp": "_custom_ops.py::fused_gdn_decode_post_conv_mtp",
    "fused_sigmoid_gating_delta_rule_update": "fused_sigmoid_gating_delta_rule_update",
}
OTHER_DEFAULTS = ("glm_fused_recurrent_kda", "fused_gdn_decode_post_conv_mtp")
"""vLLM declares None as the default of an argument that it cannot do without, or writes a number as a power."""
TAKE_ANY_KEYWORD = ("ling_chunk_kda", "ling_fused_recurrent_kda")
"""What these take by ``**kwargs`` has a name in ours, behind the others."""
TRANSLATORS = {t.__name__: t for functions in vllm.REPLACED.values() for t in functions.values()}


@pytest.mark.parametrize("name", VLLM)
def test_vllm(name: str) -> None:
    ours, theirs = signature(TRANSLATORS[name]), published("vllm", VLLM[name])
    if name in TAKE_ANY_KEYWORD:
        ours = ours[: len(theirs)]
    assert ours[1:] == theirs[1:] or (
        name in OTHER_DEFAULTS and names_and_kinds(ours) == names_and_kinds(theirs)
    )


def test_every_translation_for_vllm_is_compared() -> None:
    assert set(TRANSLATORS) == {*VLLM, "gdn_decode_step"}  # whose method is compared below


@pytest.mark.parametrize("file", PUBLISHED["vllm"]["imports"])
def test_vllm_looks_functions_up_where_they_are_replaced(file: str) -> None:
    module = file.removesuffix(".py").replace("/", ".")
    imported = {name: full.rpartition(".")[2] for name, full in PUBLISHED["vllm"]["imports"][file].items()}
    functions = {name: t for name, t in vllm.REPLACED[module].items() if "." not in name}
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
    kimi = read["vllm/models/kimi_k3/nvidia/kda.py::KimiK3DeltaAttention._forward"]
    assert {"ops.fused_kda_decode", "self.decode_conv1d_weight", "self.conv1d.weight"} <= set(kimi)
    context = "vllm/forward_context.py::"
    assert PUBLISHED["vllm"]["functions"][f"{context}get_forward_context"] == []
    assert PUBLISHED["vllm"]["functions"][f"{context}is_forward_context_available"] == []
    assert f"{context}ForwardContext.no_compile_layers" in PUBLISHED["vllm"]["constants"]


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
