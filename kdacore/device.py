"""Lazy, cached hardware probes. Nothing is probed at import time, and no framework is imported here."""

from __future__ import annotations

import functools
import sys

from kdacore import config
from kdacore.types import Device

TYPES = ("cpu", "cuda", "rocm", "tpu", "meta", "mps", "xpu")
"""Devices that arrays are on as the libraries come; a backend may declare others."""

_TPU_GENERATIONS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
    "TPU v7x": "tpu7x",
}


@functools.cache
def torch_device(kind: str, index: int) -> Device:
    """The :class:`Device` of a torch device. Asks the driver once per device; torch is already imported."""
    if kind != "cuda":
        return Device(kind, index)
    torch = sys.modules["torch"]
    if torch.version.hip is not None:
        arch = torch.cuda.get_device_properties(index).gcnArchName.split(":")[0]
        return Device("rocm", index, arch)
    if not torch.cuda.is_available():  # a fake tensor on a machine without a GPU
        return Device("cuda", index, config.get().arch)
    major, minor = torch.cuda.get_device_capability(index)
    return Device("cuda", index, f"sm_{major}{minor}")


@functools.cache
def jax_device(device: object) -> Device:
    """The :class:`Device` of a ``jax.Device``."""
    platform: str = device.platform  # type: ignore[attr-defined]
    index: int = device.id  # type: ignore[attr-defined]
    if platform == "cpu":
        return Device("cpu")
    if platform == "tpu":
        kind: str = device.device_kind  # type: ignore[attr-defined]
        return Device("tpu", index, _TPU_GENERATIONS.get(kind, kind))
    if platform in ("gpu", "cuda"):
        capability = str(getattr(device, "compute_capability", ""))
        return Device("cuda", index, f"sm_{capability.replace('.', '')}" if capability else "")
    return Device(platform, index)


def jax_mesh_device(abstract: object) -> Device | None:
    """The :class:`Device` that a ``jax.sharding.AbstractDevice`` describes; None where that does not tell."""
    platform: str = getattr(abstract, "platform", None) or ""
    kind: str = getattr(abstract, "device_kind", "")
    if kind in _TPU_GENERATIONS:
        return Device("tpu", 0, _TPU_GENERATIONS[kind])
    return Device("cpu") if platform == "cpu" else None


config.on_refresh(torch_device.cache_clear)
