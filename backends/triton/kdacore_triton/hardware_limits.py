"""What block sizes and pipeline stages depend on, by architecture: shared memory, and whose work a product is."""

from __future__ import annotations

from kdacore.verifiers import sm_number

_KIB = 1024
_AMPERE, _SMALL, _HOPPER = 163 * _KIB, 99 * _KIB, 227 * _KIB
_NVIDIA = {
    80: _AMPERE, 86: _SMALL, 87: _AMPERE, 89: _SMALL, 90: _HOPPER, 100: _HOPPER, 101: _HOPPER, 103: _HOPPER,
    110: _HOPPER, 120: _SMALL, 121: _SMALL,
}  # fmt: skip
_AMD = {"gfx950": 160 * _KIB}
_AMD_USUAL = 64 * _KIB


def shared_memory(arch: str) -> int:
    """Bytes of shared memory (LDS) for one program on ``sm_90``, ``gfx942``; of an unknown architecture the least that
    any of its vendor has."""
    if arch.startswith("gfx"):
        return _AMD.get(arch, _AMD_USUAL)
    return _NVIDIA.get(sm_number(arch), _SMALL)


def has_warp_products(arch: str) -> bool:
    """Are NVIDIA's matrix instructions a warp's here? From sm_90 to sm_119 they are a warp group's or a block's."""
    number = sm_number(arch)
    return number >= 80 and not 90 <= number < 120
