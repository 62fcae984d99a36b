"""What both kinds of tuning share: the device, and saying why not."""

from __future__ import annotations

import importlib.util
import sys

from kdacore.device import torch_device
from kdacore.types import Device


def complain(why: str, status: int) -> int:
    """Print why nothing is tuned; the exit status for it."""
    print(f"kdacore tune: {why}", file=sys.stderr)
    return status


def default_device() -> str:
    """``cuda`` where torch sees an NVIDIA GPU, else ``cpu``."""
    if importlib.util.find_spec("torch") is None:
        return "cpu"
    return "cpu" if device_of("cuda") is None else "cuda"


def device_of(name: str) -> Device | None:
    """The GPU as requests name it; None without one."""
    import torch

    if not torch.cuda.is_available() or torch.version.cuda is None or not name.startswith("cuda"):
        return None
    index = torch.device(name).index
    index = torch.cuda.current_device() if index is None else index
    if index >= torch.cuda.device_count():
        return None
    return torch_device("cuda", index)


def name_of(device: Device) -> str:
    """The GPU's name for itself, as ``NVIDIA H200``."""
    import torch

    return str(torch.cuda.get_device_name(device.index))


def torch_name(device: Device) -> str:
    """The device as torch names it, made the current one."""
    import torch

    torch.cuda.set_device(device.index)
    return f"cuda:{device.index}"
