"""What published wheels of serving engines say of the functions that kdacore replaces, read without importing them.

``python tests/integrations/published_sources.py FOLDER`` writes ``published_signatures.json`` from the wheels in a
folder, which ``pip download --no-deps sglang vllm`` fills.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

FACTS = Path(__file__).with_name("published_signatures.json")

_VLLM_KDA = "vllm/models/{}/nvidia/ops/third_party/kda/{}.py"
_VLLM_FLA = "vllm/third_party/flash_linear_attention/ops/{}.py"
_VLLM_QWEN = "vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py"
_VLLM_KIMI = "vllm/model_executor/layers/mamba/gdn/kimi_gdn_linear_attn.py"
_VLLM_K3 = "vllm/models/kimi_k3/nvidia/kda.py"
_VLLM_CONVOLUTION = "vllm/model_executor/layers/mamba/ops/causal_conv1d.py"
_SGLANG = "sglang/srt/layers/attention/linear"
_METHODS = ("extend", "decode", "packed_decode", "target_verify")
FUNCTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm": {
        _VLLM_KDA.format("kimi_k3", "chunk"): ("chunk_kda_with_fused_gate",),
        _VLLM_KDA.format("kimi_k3", "fused_recurrent"): (
            "fused_recurrent_kda",
            "fused_recurrent_kda_packed_decode",
        ),
        _VLLM_KDA.format("glm5next", "kernels"): ("chunk_kda_with_fused_gate", "fused_recurrent_kda"),
        _VLLM_K3: ("_flashkda_prefill", "KimiK3DeltaAttention._forward"),
        _VLLM_KIMI: ("KimiGatedDeltaNetAttention._forward",),
        _VLLM_CONVOLUTION: ("causal_conv1d_fn",),
        _VLLM_FLA.format("chunk"): ("chunk_gated_delta_rule",),
        _VLLM_FLA.format("fused_recurrent"): (
            "fused_recurrent_gated_delta_rule",
            "fused_recurrent_gated_delta_rule_packed_decode",
        ),
        _VLLM_FLA.format("fused_sigmoid_gating"): ("fused_sigmoid_gating_delta_rule_update",),
        _VLLM_QWEN: (
            "QwenGatedDeltaNetAttention._forward_core",
            "QwenGatedDeltaNetAttention._forward_core_decode_non_spec",
        ),
        "vllm/forward_context.py": ("get_forward_context",),
        "vllm/compilation/breakable_cudagraph.py": ("eager_break_during_capture",),
        "vllm/_custom_ops.py": ("fused_gdn_decode_post_conv_mtp",),
        _VLLM_FLA.format("kda"): ("chunk_kda", "fused_recurrent_kda", "fused_recurrent_kda_fwd"),
    },
    "sglang": {
        f"{_SGLANG}/kernels/kda_triton.py": tuple(f"TritonKDAKernel.{name}" for name in _METHODS),
        f"{_SGLANG}/kernels/gdn_triton.py": tuple(f"TritonGDNKernel.{name}" for name in _METHODS),
        f"{_SGLANG}/gdn_backend.py": ("GDNAttnBackend.forward_extend", "GDNAttnBackend.forward_decode"),
        f"{_SGLANG}/kda_backend.py": ("KDAAttnBackend.forward_extend", "KDAAttnBackend.forward_decode"),
        "sglang/srt/layers/attention/hybrid_linear_attn_backend.py": (
            "MambaAttnBackendBase._track_mamba_state_extend",
            "MambaAttnBackendBase._track_mamba_state_decode",
        ),
        "sglang/srt/plugins/hook_registry.py": ("HookRegistry.register",),
    },
}
"""Functions by the file that defines them."""
IMPORTS: dict[str, tuple[str, ...]] = {
    "vllm": (
        _VLLM_QWEN,
        "vllm/model_executor/layers/mamba/gdn/olmo_gdn_linear_attn.py",
        "vllm/model_executor/models/bailing_moe_v3.py",
    ),
}
"""Files that look functions up among their own names, having imported them from the engine's copy of FLA."""
ATTRIBUTES: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm": {
        _VLLM_QWEN: (
            "QwenGatedDeltaNetAttention._forward_core",
            "QwenGatedDeltaNetAttention._forward_core_decode_non_spec",
        ),
        _VLLM_K3: ("KimiK3DeltaAttention._forward",),
        _VLLM_KIMI: ("KimiGatedDeltaNetAttention._forward",),
    },
    "sglang": {
        f"{_SGLANG}/gdn_backend.py": ("GDNAttnBackend.forward_decode",),
        f"{_SGLANG}/kda_backend.py": ("KDAAttnBackend.forward_decode",),
    },
}
"""Methods that hooks replace by reading the same attributes."""
_OWNERS = {"vllm": "self|attn_metadata|m", "sglang": "self|layer|layer_cache"}
CONSTANTS = {
    "vllm": {
        "vllm/v1/attention/backends/utils.py": ("NULL_BLOCK_ID",),
        "vllm/forward_context.py": ("ForwardContext.attn_metadata",),
        "vllm/plugins/__init__.py": ("DEFAULT_PLUGINS_GROUP",),
    },
    "sglang": {
        "sglang/srt/layers/attention/mamba/mamba2_metadata.py": tuple(
            f"ForwardMetadata.{name}"
            for name in (
                "has_mamba_track_mask",
                "mamba_cache_indices",
                "query_start_loc",
                "track_ssm_h_dst",
                "track_ssm_h_src",
            )
        ),
        "sglang/srt/plugins/__init__.py": ("GENERAL_PLUGINS_GROUP",),
        "sglang/srt/plugins/hook_registry.py": ("HookType.AROUND",),
    },
}


def read(wheel: Path) -> dict[str, Any]:
    """The version of a wheel, and the signatures and constants above as its sources have them."""
    engine, version = wheel.name.split("-")[:2]
    found: dict[str, Any] = {"version": version, "functions": {}, "constants": {}}
    with zipfile.ZipFile(wheel) as archive:
        for file, names in FUNCTIONS[engine].items():
            tree = ast.parse(archive.read(file))
            for name in names:
                found["functions"][f"{file}::{name}"] = _signature(_definition(tree, name))
        for file, names in CONSTANTS[engine].items():
            tree = ast.parse(archive.read(file))
            for name in names:
                found["constants"][f"{file}::{name}"] = _constant(tree, name)
        found["attributes"] = {
            f"{file}::{name}": _attributes(_definition(ast.parse(archive.read(file)), name), _OWNERS[engine])
            for file, names in ATTRIBUTES[engine].items()
            for name in names
        }
        if engine in IMPORTS:
            kernels = [names for file, names in FUNCTIONS[engine].items() if "/third_party/flash" in file]
            defined = {name for names in kernels for name in names}
            found["imports"] = {f: _imported(ast.parse(archive.read(f)), defined) for f in IMPORTS[engine]}
    return found


def _imported(tree: ast.Module, names: set[str]) -> dict[str, str]:
    """Functions of these names that a module imports at its top, by its own names for them."""
    statements = [n for n in tree.body if isinstance(n, ast.ImportFrom)]
    return {
        a.asname or a.name: f"{n.module}.{a.name}" for n in statements for a in n.names if a.name in names
    }


def _attributes(definition: ast.FunctionDef, owners: str) -> list[str]:
    """What a method reads of ``owners``, also by ``getattr``: ``self.conv1d.weight`` for example."""
    dotted = {ast.unparse(n) for n in ast.walk(definition) if isinstance(n, ast.Attribute)}
    calls = [n for n in ast.walk(definition) if isinstance(n, ast.Call) and ast.unparse(n.func) == "getattr"]
    dotted |= {f"{ast.unparse(n.args[0])}.{ast.literal_eval(n.args[1])}" for n in calls}
    return sorted(n for n in dotted if re.fullmatch(rf"({owners})\.[\w.]+", n))


def _definition(tree: ast.Module, name: str) -> ast.FunctionDef:
    body: list[ast.stmt] = tree.body
    *classes, function = name.split(".")
    for wanted in classes:
        body = next(n for n in body if isinstance(n, ast.ClassDef) and n.name == wanted).body
    return next(n for n in body if isinstance(n, ast.FunctionDef) and n.name == function)


def _signature(definition: ast.FunctionDef) -> list[list[str]]:
    """Each parameter: its kind, its name, and its default as written (empty when there is none)."""
    a = definition.args
    positional = [*a.posonlyargs, *a.args]
    defaults = [None] * (len(positional) - len(a.defaults)) + list(a.defaults)
    rows = [["positional", p.arg, _text(d)] for p, d in zip(positional, defaults, strict=True)]
    rows += [["keyword", p.arg, _text(d)] for p, d in zip(a.kwonlyargs, a.kw_defaults, strict=True)]
    if a.kwarg:
        rows.append(["others", a.kwarg.arg, ""])
    return [row for row in rows if row[1] not in ("self", "cls")]


def _text(node: ast.expr | None) -> str:
    return "" if node is None else ast.unparse(node)


def _constant(tree: ast.Module, name: str) -> str:
    body: list[ast.stmt] = tree.body
    *classes, constant = name.split(".")
    for wanted in classes:
        body = next(n for n in body if isinstance(n, ast.ClassDef) and n.name == wanted).body
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(t, ast.Name) and t.id == constant for t in targets):
            return _text(node.value)  # type: ignore[union-attr]
    raise LookupError(name)


if __name__ == "__main__":
    wheels = [w for w in sorted(Path(sys.argv[1]).glob("*.whl")) if w.name.split("-")[0] in FUNCTIONS]
    FACTS.write_text(json.dumps({w.name.split("-")[0]: read(w) for w in wheels}, indent=1) + "\n")
