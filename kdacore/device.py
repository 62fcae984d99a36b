"""Lazy, cached hardware probes. Nothing is probed at import time, and no framework is imported here."""

from __future__ import annotations

import functools
import re
import sys

from kdacore import config
from kdacore.types import Device, Request

TYPES = ("cpu", "cuda", "rocm", "tpu", "meta", "mps", "xpu")
"""Devices that arrays are on as the libraries come."""
TYPES_OF_EXTENSIONS = (
    "gcu",
    "hpu",
    "ipu",
    "maia",
    "metal",
    "mlu",
    "mtia",
    "musa",
    "neuron",
    "npu",
    "openreg",
    "privateuseone",
    "sdaa",
    "ve",
    "vulkan",
    "xla",
)
"""Those of packages that extend torch or JAX, by the names they give them. A backend for others declares ``"*"``, and a
verifier that looks at ``request.device.type``."""

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


def problem_of(kind: str, device_type: str) -> str:
    """Why arrays of a kind are never on a device of a type, as what was wanted instead; empty where they may be."""
    if kind == "numpy" and device_type != "cpu":
        return "cpu, where NumPy's arrays are"
    if (kind, device_type) == ("torch", "tpu"):
        return "another, or arrays of JAX: torch has no tensors there"
    if (kind, device_type) == ("jax", "meta"):
        return "another, or tensors of torch: JAX has no arrays there"
    return ""


ARCHITECTURES = (
    "",
    "sm_70",
    "sm_75",
    "sm_80",
    "sm_86",
    "sm_89",
    "sm_90",
    "sm_100",
    "sm_103",
    "sm_120",
    "gfx90a",
    "gfx942",
    "gfx950",
    "gfx1100",
    *dict.fromkeys(_TPU_GENERATIONS.values()),
)
"""Some values of :attr:`Device.arch`, for suggestions; ``""`` is a CPU's."""
_ARCHITECTURE = re.compile(r"sm_[1-9][0-9]{1,2}|gfx[1-9][0-9a-f]{2,3}|TPU .+")
"""NVIDIA's and AMD's, and a TPU's own name for itself where the table above has none."""


def is_architecture(name: str) -> bool:
    """Can :attr:`Device.arch` be this, or is it ``"*"``? ``sm_90a`` is a target of the compiler, and no device's."""
    return name == "*" or name in ARCHITECTURES or _ARCHITECTURE.fullmatch(name) is not None


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
    if platform in ("gpu", "cuda"):
        known = config.GPU_ARCHITECTURES
        models = [known[x] for x in re.findall(r"\w+", kind) if x in known]
        return Device("cuda", 0, models[0]) if models else None
    return Device("cpu") if platform == "cpu" else None


def compiled_for_elsewhere(request: Request) -> bool:
    """Whether a traced JAX call is for a kind of device that this process has none of: its program is compiled here,
    and runs elsewhere. Where JAX is not loaded (a call is only described), nothing is compiled."""
    return (
        request.kind == "jax"
        and request.traced
        and "jax" in sys.modules
        and not _jax_has(request.device.type)
    )


@functools.cache
def _jax_has(kind: str) -> bool:
    try:
        return bool(sys.modules["jax"].local_devices(backend="gpu" if kind == "cuda" else kind))
    except RuntimeError:  # what JAX raises where it has no such devices
        return False


config.on_refresh(torch_device.cache_clear)
