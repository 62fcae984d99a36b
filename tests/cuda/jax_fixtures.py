"""Fixtures of the tests of calls from JAX."""

from __future__ import annotations

from collections.abc import Iterator

import jax_emulation as emulation
import pytest
from emulated_backend import NAME, Plugin

from kdacore.registry import REGISTRY

OPS = (
    *("chunk_kda", "chunk_gated_delta_rule", "fused_recurrent_kda", "fused_recurrent_gated_delta_rule"),
    *("fused_decode_kda", "fused_decode_gated_delta_rule"),
    *("commit_records", "kda_chunk_intra", "kda_recompute_w_u"),
)
HANDLERS = {"native": emulation.native_handler, "python": emulation.python_handler}
_made: dict[str, tuple[emulation.Device, emulation.Handler]] = {}
"""By name of the handler: XLA keeps what was registered for as long as the process lives."""


def made(name: str, folder: pytest.TempPathFactory) -> tuple[emulation.Device, emulation.Handler]:
    """A device, and the handler that launches there, registered with XLA."""
    if name not in _made:
        device = emulation.Device(folder.mktemp("driver"))
        _made[name] = device, HANDLERS[name](device)
        emulation.register(_made[name][1], f"test.{name}")
    return _made[name]


def installed(
    name: str, monkeypatch: pytest.MonkeyPatch, folder: pytest.TempPathFactory
) -> Iterator[emulation.Device]:
    """Calls from JAX on the CPU with ``backend="emulated"``, launched by one of the handlers."""
    device, handler = made(name, folder)
    device.reset()
    emulation.install(monkeypatch, device, handler, f"test.{name}")
    REGISTRY.register(Plugin(*OPS, kind="jax"), NAME)
    yield device
    REGISTRY.reset()
    device.reset()
    assert not device.failed
