"""A package named sglang for tests: its registry of hooks, and its kernel classes with the published signatures, whose
methods say that SGLang computed."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from published_sources import FACTS

from kdacore.integrations import sglang
from kdacore.integrations.sglang_tracked_states import OBSERVED

THEIRS = "computed by SGLang"
_REGISTRY = """
import enum
import pkgutil


class HookType(enum.Enum):
    AROUND = 'around'


class HookRegistry:
    hooks = {}

    @classmethod
    def register(cls, target, hook, hook_type):
        assert hook_type is HookType.AROUND
        assert target not in cls.hooks
        cls.hooks[target] = hook

    @classmethod
    def apply_hooks(cls):
        for target, hook in cls.hooks.items():
            owner, _, name = target.rpartition('.')
            owner = pkgutil.resolve_name(owner)
            setattr(owner, name, cls.around(getattr(owner, name), hook))

    @staticmethod
    def around(original, hook):
        return lambda *args, **kwargs: hook(original, *args, **kwargs)
"""
_BACKEND = """
class {name}:
    def __init__(self, kernel, forward_metadata):
        self.kernel, self.forward_metadata = kernel, forward_metadata

    def forward_extend(self, layer, forward_batch, **given):
        found = self.kernel.extend(cache_indices=self.forward_metadata.mamba_cache_indices, **given)
        o, h = found[0], found[-1]
        if self.forward_metadata.has_mamba_track_mask:
            self._track_mamba_state_extend(
                forward_batch, h, given["ssm_states"], self.forward_metadata, h_track_buf=None
            )
        return o

    def forward_decode(self, layer, forward_batch, mixed_qkv, a, b, **kwargs):
        return "computed by SGLang"

    def _track_mamba_state_decode(self, forward_batch, conv_states, ssm_states, cache_indices, layer_id=None):
        self.tracked = forward_batch, conv_states, ssm_states, cache_indices, layer_id

    def _track_mamba_state_extend(self, forward_batch, h, ssm_states, forward_metadata, *, h_track_buf):
        m = forward_metadata
        if m.track_ssm_h_src.numel() > 0:
            ssm_states[m.track_ssm_h_dst] = h.squeeze(0)[m.track_ssm_h_src].to(ssm_states.dtype)
        ssm_states[m.track_ssm_final_dst] = ssm_states[m.track_ssm_final_src]
"""


def make(folder: Path) -> None:
    """Write the package into a folder."""
    source = folder / "sglang" / "srt"
    _write(source / "plugins" / "hook_registry.py", _REGISTRY)
    linear = source / "layers" / "attention" / "linear"
    for module, name in OBSERVED.items():
        _write(linear / f"{module.rpartition('.')[2]}.py", _BACKEND.format(name=name))
    published = json.loads(FACTS.read_text())["sglang"]["functions"]
    for kernel in sglang.TRANSLATIONS:
        *_, module, name = kernel.split(".")
        methods = [_method(found, published[found]) for found in published if f"::{name}." in found]
        _write(linear / "kernels" / f"{module}.py", f"class {name}:\n{''.join(methods)}")


def kernel(path: str) -> Any:
    """An object of a kernel class of the package, as it is when SGLang has loaded its plugins."""
    sglang.activate()
    registry = importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry
    assert set(registry.hooks) == {f"{k}.{method}" for k in sglang.TRANSLATIONS for method in sglang.METHODS}
    registry.apply_hooks()
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)()


def forget() -> None:
    """Undo the integration, and forget what was imported of the package."""
    sglang.deactivate()
    sglang._registered = False
    for name in [n for n in sys.modules if n.partition(".")[0] == "sglang"]:
        del sys.modules[name]


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def _method(found: str, rows: list[list[str]]) -> str:
    parameters = ["self"]
    for kind, name, default in rows:
        if kind == "keyword" and "*" not in parameters:
            parameters.append("*")
        declared = f"{name}={default}" if default else name
        parameters.append(f"**{name}" if kind == "others" else declared)
    return f"    def {found.rpartition('.')[2]}({', '.join(parameters)}):\n        return {THEIRS!r}\n"
